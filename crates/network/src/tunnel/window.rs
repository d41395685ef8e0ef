//! Which packets of a session have come already: a sliding window of their numbers (RFC 6479), so
//! that a packet that is sent once more, by whoever recorded it, is not taken twice.

/// How far a packet may be behind the newest, and still be taken: links that bundle reorder this much.
const WIDTH: u64 = 2048;
const WORDS: usize = 2048 / 64;

/// The numbers seen of one session.
#[derive(Debug)]
pub(super) struct Window {
    /// One more than the highest number seen.
    next: u64,
    /// One bit for each of the last [`WIDTH`] numbers, at the number modulo the width.
    seen: [u64; WORDS],
}

impl Window {
    pub(super) fn new() -> Self {
        Self { next: 0, seen: [0; WORDS] }
    }

    /// Whether a packet of this number would be taken.
    pub(super) fn is_new(&self, number: u64) -> bool {
        if number >= self.next {
            return true;
        }
        self.next - number <= WIDTH && self.seen[Self::word(number)] & Self::bit(number) == 0
    }

    /// Notes a packet of this number, which was found to be genuine; whether it was the first.
    pub(super) fn take(&mut self, number: u64) -> bool {
        if !self.is_new(number) {
            return false;
        }
        if number >= self.next {
            // The numbers between were not seen yet; their places hold older ones.
            let from = self.next.max(number.saturating_sub(WIDTH - 1));
            for skipped in from..number {
                self.seen[Self::word(skipped)] &= !Self::bit(skipped);
            }
            self.next = number.saturating_add(1);
        }
        self.seen[Self::word(number)] |= Self::bit(number);
        true
    }

    fn word(number: u64) -> usize {
        // Below WORDS, which fits.
        usize::try_from(number / 64 % (WIDTH / 64)).unwrap_or(0)
    }

    fn bit(number: u64) -> u64 {
        1 << (number % 64)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_number_is_taken_once_in_any_order() {
        let mut window = Window::new();
        for number in [0, 1, 5, 3, 4, 2, 1000, 6, 2047] {
            assert!(window.take(number), "{number}");
            assert!(!window.take(number), "{number} again");
        }
        assert!(window.take(4096));
        assert!(!window.is_new(2047), "too old");
        assert!(window.is_new(2049), "skipped, and just within the window");
        assert!(window.take(1 << 60));
        assert!(!window.is_new(4096));
    }

    proptest! {
        #[test]
        fn it_never_takes_a_number_twice_nor_refuses_a_recent_one(
            steps in proptest::collection::vec((0_u64..3, 0_u64..5000), 1..300)
        ) {
            let (mut window, mut taken, mut newest) = (Window::new(), BTreeSet::new(), 0_u64);
            for (kind, distance) in steps {
                let number = match kind {
                    0 => newest + distance % 8,
                    1 => newest.saturating_sub(distance),
                    _ => newest + distance,
                };
                let recent = newest < number || newest - number < WIDTH;
                let expected = recent && !taken.contains(&number);
                prop_assert_eq!(window.take(number), expected, "{} with {} the newest", number, newest);
                if expected {
                    taken.insert(number);
                    newest = newest.max(number);
                }
            }
        }
    }
}
