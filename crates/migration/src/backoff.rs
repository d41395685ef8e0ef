//! The pauses between tries of something that has to succeed in the end: each is twice as long as the one before it, up to
//! a limit.

use std::time::Duration;

/// The pauses of one thing that is tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    limit: Duration,
    next: Duration,
}

impl Backoff {
    /// Begins with this pause; none is longer than the limit.
    #[must_use]
    pub const fn new(first: Duration, limit: Duration) -> Self {
        Self { first, limit, next: first }
    }

    /// How long to wait before the next try.
    pub fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = pause.saturating_mul(2).min(self.limit);
        pause
    }

    /// Waits for the time of the next try.
    pub async fn wait(&mut self) {
        tokio::time::sleep(self.pause()).await;
    }

    /// Begins with the first pause again: a try has succeeded.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: Duration = Duration::from_millis(1);

    fn pauses(backoff: &mut Backoff, count: usize) -> Vec<u128> {
        (0..count).map(|_| backoff.pause().as_millis()).collect()
    }

    #[test]
    fn each_pause_is_twice_the_one_before_up_to_the_limit() {
        let mut backoff = Backoff::new(MILLISECOND * 100, MILLISECOND * 500);
        assert_eq!(pauses(&mut backoff, 5), [100, 200, 400, 500, 500]);
        let mut longest = Backoff::new(Duration::MAX, Duration::MAX);
        assert_eq!([longest.pause(), longest.pause()], [Duration::MAX; 2]);
    }

    #[test]
    fn after_a_success_the_first_pause_comes_again() {
        let mut backoff = Backoff::new(MILLISECOND * 100, MILLISECOND * 500);
        assert_eq!(pauses(&mut backoff, 2), [100, 200]);
        backoff.reset();
        assert_eq!(pauses(&mut backoff, 2), [100, 200]);
    }

    #[tokio::test]
    async fn it_waits_for_as_long_as_each_pause_is() {
        let mut backoff = Backoff::new(MILLISECOND, MILLISECOND * 2);
        let begun = std::time::Instant::now();
        for _ in 0..3 {
            backoff.wait().await;
        }
        assert!(begun.elapsed() >= MILLISECOND * 5);
    }
}
