//! The service that clients lose beside the frozen time: while pages are copied, and while they follow after the resume.
//!
//! ```text
//!  running   (1 − φ) · Σt + 1 µs · ΣU(t)                  φ: share of its throughput that a service keeps meanwhile
//!  filling   u = λx/h      v = p·λ·g·(r + 1 ms)/h          λ requests/s of x seconds on h threads meet g missing pages each
//!            overloaded while u + v·(1 − t/T) > 1:   T·(u + v − 1)/v
//!            longest wait:                           T·(u + v − 1 − ln(u + v))/v
//! ```
//! `p` is the share of accesses that meet missing pages: 1 after post-copy. The pages that a hybrid move leaves were
//! written last and so are the likeliest to be used: 1 is the bound there.
//!
//! Some of these figures are not measured for each service. An unknown one is `None`, which differs from a measured 0.

use std::time::Duration;

use crate::Mode;
use crate::predict::Forecast;
use crate::quantity::{PagesMet, RequestRate, Share, bounded, seconds};

/// What the first write to a page costs after a look for written pages.
const FIRST_WRITE: Duration = Duration::from_micros(1);

/// What the nodes need to deliver a missing page, beside the round trip.
const DELIVERY: f64 = 1e-3;

/// The requests of a service.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Requests {
    /// How many come in a second.
    pub rate: RequestRate,
    /// How long one occupies a thread.
    pub time: Duration,
    /// Threads that serve them; 0 counts as 1.
    pub threads: u32,
    /// Missing pages that each meets while none has followed yet.
    pub misses: PagesMet,
}

/// What is known of a service's behaviour.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Behaviour {
    /// Share of its throughput that it keeps while its memory is copied.
    pub throughput: Option<Share>,
    /// Its requests.
    pub requests: Option<Requests>,
    /// Share of accesses that meet the pages left by a hybrid move.
    pub meets_left: Option<Share>,
}

/// The overload while pages follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Overload {
    /// How long more requests come than are served.
    pub lasts: Duration,
    /// How long the unluckiest request waits. It adds to the downtime that a client sees.
    pub longest_wait: Duration,
}

/// Seconds of service lost beside the frozen time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Degradation {
    /// By faults at the first write to a page.
    pub written: Duration,
    /// Because the service was slowed on purpose.
    pub slowed: Duration,
    /// Because copying takes CPU, memory bandwidth and link from it. None: its throughput is not known.
    pub copying: Option<Duration>,
    /// While pages follow. None: its requests are not known.
    pub filling: Option<Overload>,
}

/// What a move costs this service beside its frozen time.
#[must_use]
pub fn degradation(forecast: &Forecast, round_trip: Duration, behaviour: &Behaviour) -> Degradation {
    let running = forecast.copying.saturating_sub(forecast.slowed);
    let copying = match behaviour.throughput {
        _ if running.is_zero() => Some(Duration::ZERO),
        Some(kept) => Some(running.mul_f64(kept.rest().get())),
        None => None,
    };
    let met = match forecast.mode {
        Mode::Hybrid => behaviour.meets_left.unwrap_or(Share::MOST),
        Mode::Auto | Mode::Cold | Mode::Precopy | Mode::Postcopy => Share::MOST,
    };
    let filling = match behaviour.requests {
        _ if forecast.filling.is_zero() => Some(Overload::default()),
        Some(requests) => Some(overload(forecast.filling, round_trip, &requests, met)),
        None => None,
    };
    Degradation {
        written: seconds(FIRST_WRITE.as_secs_f64() * forecast.written as f64),
        slowed: forecast.slowed,
        copying,
        filling,
    }
}

fn overload(filling: Duration, round_trip: Duration, requests: &Requests, met: Share) -> Overload {
    let threads = f64::from(requests.threads.max(1));
    let each = |time: f64| requests.rate.get() * time / threads;
    // A service that is overloaded anyway loses no more than all of the time.
    let busy = each(bounded(requests.time).as_secs_f64()).min(1.0);
    let fetch = bounded(round_trip).as_secs_f64() + DELIVERY;
    let waiting = each(met.get() * requests.misses.get() * fetch);
    let over = busy + waiting - 1.0;
    if over <= 0.0 || waiting <= 0.0 {
        return Overload::default();
    }
    let of = |part: f64| filling.mul_f64((part / waiting).clamp(0.0, 1.0));
    Overload { lasts: of(over), longest_wait: of(over - over.ln_1p()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn forecast(mode: Mode, copying: u64, filling: u64) -> Forecast {
        Forecast {
            mode,
            rounds: 1,
            sent: 1000,
            left: 10,
            file_bytes: 0,
            files_left: 0,
            bytes: 0,
            copying: MS * 1000 * u32::try_from(copying).unwrap(),
            written: 5000,
            slowed: Duration::ZERO,
            frozen: 100 * MS,
            held: 100 * MS,
            filling: Duration::from_secs(filling),
            total: Duration::ZERO,
            kept: None,
        }
    }

    fn requests(rate: f64) -> Requests {
        Requests {
            rate: RequestRate::new(rate).unwrap(),
            time: MS,
            threads: 1,
            misses: PagesMet::new(1.3).unwrap(),
        }
    }

    #[test]
    fn what_is_not_measured_is_unknown_and_not_nothing() {
        let found = degradation(&forecast(Mode::Hybrid, 3, 2), MS, &Behaviour::default());
        assert_eq!((found.copying, found.filling), (None, None));
        assert_eq!(found.written, 5 * MS, "this is known of every service");
        // A move without rounds and without pages that follow loses nothing, whatever is known.
        let cold = degradation(&forecast(Mode::Cold, 0, 0), MS, &Behaviour::default());
        assert_eq!((cold.copying, cold.filling), (Some(Duration::ZERO), Some(Overload::default())));
    }

    #[test]
    fn a_service_that_keeps_two_thirds_of_its_throughput_loses_a_third_of_the_rounds() {
        let kept = Behaviour { throughput: Share::new(0.7), ..Behaviour::default() };
        let found = degradation(&forecast(Mode::Precopy, 10, 0), MS, &kept);
        assert!(found.copying.unwrap().abs_diff(3000 * MS) < MS, "{found:?}");
        let slowed = Forecast { slowed: 4000 * MS, ..forecast(Mode::Precopy, 10, 0) };
        let found = degradation(&slowed, MS, &kept);
        assert_eq!(found.slowed, 4000 * MS);
        assert!(found.copying.unwrap().abs_diff(1800 * MS) < MS, "only of the time that it had: {found:?}");
    }

    #[test]
    fn few_requests_are_served_meanwhile_and_many_pile_up() {
        let with = |rate| Behaviour { requests: Some(requests(rate)), ..Behaviour::default() };
        let few = degradation(&forecast(Mode::Postcopy, 0, 10), 4 * MS, &with(100.0));
        assert_eq!(few.filling, Some(Overload::default()), "u = 0.1, v = 0.65");
        let many = degradation(&forecast(Mode::Postcopy, 0, 10), 4 * MS, &with(400.0)).filling.unwrap();
        // u = 0.4, v = 2.6: overloaded for 10 s · 2/2.6, at worst 10 s · (2 − ln 3)/2.6 late.
        assert!(many.lasts.abs_diff(Duration::from_secs_f64(7.692)) < 2 * MS, "{many:?}");
        assert!(many.longest_wait.abs_diff(Duration::from_secs_f64(3.467)) < 2 * MS, "{many:?}");
        // Few accesses meet the pages that a hybrid move left.
        let rare = Behaviour { meets_left: Share::new(0.1), ..with(400.0) };
        let hybrid = degradation(&forecast(Mode::Hybrid, 0, 10), 4 * MS, &rare);
        assert_eq!(hybrid.filling, Some(Overload::default()));
        assert_ne!(degradation(&forecast(Mode::Hybrid, 0, 10), 4 * MS, &with(400.0)).filling, hybrid.filling);
    }

    #[test]
    fn no_overload_is_longer_than_the_pages_take_to_follow() {
        for rate in [0.0, 1.0, 999.0, 1e9] {
            for time in [Duration::ZERO, MS, Duration::MAX] {
                let requests = Requests { time, threads: 0, ..requests(rate) };
                let behaviour = Behaviour { requests: Some(requests), ..Behaviour::default() };
                let found = degradation(&forecast(Mode::Postcopy, 0, 10), Duration::MAX, &behaviour);
                let Overload { lasts, longest_wait } = found.filling.unwrap();
                assert!(longest_wait <= lasts && lasts <= Duration::from_secs(10), "{found:?}");
            }
        }
    }
}
