//! What a move costs, in lost client-seconds, and the mode in which it costs least.
//!
//! ```text
//!  C = Σw·(frozen + degradation) + price·bytes + price·CPU + risk
//! ```

use std::time::Duration;

use crate::Mode;
use crate::constraint::Refusal;
use crate::converge::Goals;
use crate::degradation::{Behaviour, Degradation, degradation};
use crate::loss::Prices;
use crate::predict::{Cargo, Forecast, Link, Steps, predict};
use crate::quantity::{Share, Weight, bounded};

/// What a service is taken to keep of its throughput while it is copied, where that was not measured. Redis keeps 0.7
/// when its cores are shared with all of a move and are always busy; a service that leaves some of its CPU idle keeps
/// all.
pub const THROUGHPUT: f64 = 0.9;

/// Cores that a move keeps busy: one at each end.
const CORES: f64 = 2.0;

/// How a service may move.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Allowed {
    /// All while it is frozen.
    pub cold: bool,
    /// In rounds while it runs.
    pub precopy: bool,
    /// After it runs at the destination.
    pub postcopy: bool,
    /// In rounds, and the rest after it runs at the destination.
    pub hybrid: bool,
    /// Whether its CPU may be slowed.
    pub throttle: bool,
    /// Longest frozen time.
    pub max_frozen: Option<Duration>,
    /// Most rounds.
    pub max_rounds: u32,
}

impl Allowed {
    /// The modes that are allowed.
    pub fn modes(&self) -> impl Iterator<Item = Mode> {
        let all = [
            (self.cold, Mode::Cold),
            (self.precopy, Mode::Precopy),
            (self.postcopy, Mode::Postcopy),
            (self.hybrid, Mode::Hybrid),
        ];
        all.into_iter().filter_map(|(allowed, mode)| allowed.then_some(mode))
    }

    /// The goals of a move in this mode. A move in rounds becomes hybrid where they do not pay, if that is allowed.
    #[must_use]
    pub fn goals(&self, mode: Mode, margin: Duration) -> Goals {
        let after = matches!(mode, Mode::Postcopy | Mode::Hybrid);
        Goals {
            max_frozen: self.max_frozen,
            margin,
            max_rounds: self.max_rounds,
            throttle: self.throttle && !after,
            postcopy: after || self.hybrid,
            thrifty: after,
        }
    }
}

/// The terms of a cost, lost client-seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cost {
    /// Clients without a service while it is frozen.
    pub frozen: f64,
    /// And while it is degraded.
    pub degraded: f64,
    /// Bytes sent.
    pub bytes: f64,
    /// CPU of the move.
    pub cpu: f64,
    /// The source may fail while pages follow.
    pub risk: f64,
    /// Whether the degradation while copying is assumed ([`THROUGHPUT`]), because it was not measured.
    pub copying_assumed: bool,
    /// Whether the degradation while pages follow is assumed to be total, because the requests were not measured.
    pub filling_assumed: bool,
}

impl Cost {
    /// All together.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.frozen + self.degraded + self.bytes + self.cpu + self.risk
    }
}

/// A move that was thought through.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Priced {
    /// The mode to ask for. What becomes of it is in the forecast.
    pub mode: Mode,
    /// What it takes.
    pub forecast: Forecast,
    /// The frozen time that nine of ten such moves do not exceed.
    pub upper: Duration,
    /// The service lost beside the frozen time.
    pub degradation: Degradation,
    /// What it costs.
    pub cost: Cost,
}

impl Priced {
    /// How long the unluckiest client is expected to wait: the frozen time, and the longest wait for pages that follow. None
    /// where pages follow and the requests are not known.
    #[must_use]
    pub fn downtime(&self) -> Option<Duration> {
        self.degradation.filling.map(|overload| bounded(self.forecast.frozen + overload.longest_wait))
    }
}

/// What a move costs clients of this weight.
#[must_use]
pub fn cost(forecast: &Forecast, degradation: &Degradation, weight: Weight, prices: &Prices) -> Cost {
    let Degradation { written, slowed, copying, filling } = *degradation;
    let running = forecast.copying.saturating_sub(forecast.slowed);
    let copying_lost = copying.unwrap_or(running.mul_f64(Share::clamped(THROUGHPUT).rest().get()));
    let filling_lost = filling.map_or(forecast.filling, |overload| overload.lasts);
    let lost = [written, slowed, copying_lost, filling_lost].map(|time| bounded(time).as_secs_f64());
    let (filling_time, busy) = (forecast.filling.as_secs_f64(), forecast.total.as_secs_f64() * CORES);
    Cost {
        frozen: weight.get() * forecast.frozen.as_secs_f64(),
        degraded: weight.get() * lost.iter().sum::<f64>(),
        bytes: prices.byte_sent.get() * forecast.bytes as f64,
        cpu: prices.core_second.get() * busy,
        risk: weight.get()
            * (filling_time * prices.failure.get()).min(1.0)
            * bounded(prices.outage).as_secs_f64(),
        copying_assumed: copying.is_none(),
        filling_assumed: filling.is_none(),
    }
}

/// What is known of a move to one node, and of the service that would move.
#[derive(Debug, Clone, Copy)]
pub struct Prospect<'a> {
    /// What has to cross.
    pub cargo: Cargo<'a>,
    /// The way.
    pub link: Link,
    /// The steps that no bandwidth shortens.
    pub steps: Steps,
    /// How much longer than predicted the frozen time may be, of [`crate::learn::Belief::margin`].
    pub margin: Duration,
    /// Whether the destination can restore before all pages are there.
    pub userfaultfd: bool,
}

/// The allowed mode that costs least and keeps the limit on the frozen time.
///
/// # Errors
/// The refusal, if there is none.
pub fn cheapest(
    prospect: &Prospect,
    allowed: &Allowed,
    behaviour: &Behaviour,
    weight: Weight,
    prices: &Prices,
) -> Result<Priced, Refusal> {
    let here = prospect.userfaultfd;
    let allowed = &Allowed { postcopy: allowed.postcopy && here, hybrid: allowed.hybrid && here, ..*allowed };
    let limit = allowed.max_frozen;
    let (mut best, mut least): (Option<Priced>, Option<Duration>) = (None, None);
    for mode in allowed.modes() {
        let goals = allowed.goals(mode, prospect.margin);
        let forecast = predict(mode, &prospect.cargo, &prospect.link, &prospect.steps, &goals);
        let upper = forecast.most_frozen(prospect.margin);
        least = Some(least.map_or(upper, |least| least.min(upper)));
        if limit.is_some_and(|limit| upper > limit) || forecast.kept.is_some() {
            continue;
        }
        let degradation = degradation(&forecast, prospect.link.round_trip, behaviour);
        let cost = cost(&forecast, &degradation, weight, prices);
        if best.is_none_or(|best| cost.total() < best.cost.total()) {
            best = Some(Priced { mode, forecast, upper, degradation, cost });
        }
    }
    match (best, least, limit) {
        (Some(best), ..) => Ok(best),
        (None, Some(upper), Some(limit)) => Err(Refusal::Frozen { upper, limit }),
        (None, ..) => Err(Refusal::NoMode),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::curve::{Curve, Look};
    use crate::files::Files;
    use crate::fixed::Parts;
    use crate::quantity::{Bandwidth, WireRatio};

    const ALL: Allowed = Allowed {
        cold: true,
        precopy: true,
        postcopy: true,
        hybrid: true,
        throttle: false,
        max_frozen: None,
        max_rounds: 20,
    };

    /// A service of 256 MiB that writes so many pages in a second.
    fn curve(pages: u64) -> Curve {
        let look = |pages, ms| Look { pages, time: Duration::from_millis(ms) };
        Curve::fit(&[look(pages / 4, 250), look(pages, 1000)], 1 << 16)
    }

    fn prospect<'a>(writes: &'a Curve, files: &'a Files) -> Prospect<'a> {
        Prospect {
            cargo: Cargo { pages: 1 << 16, kept: 0, images: 1 << 20, layers: 0, files, writes },
            link: Link {
                bandwidth: Bandwidth::new(100e6).unwrap(),
                of_pages: Bandwidth::new(100e6).unwrap(),
                ratio: WireRatio::new(1.0).unwrap(),
                round_trip: Duration::from_millis(5),
            },
            steps: Steps { fixed: Parts::of(1 << 28, 1), ..Steps::default() },
            margin: Duration::from_millis(30),
            userfaultfd: true,
        }
    }

    fn chosen(writes: u64, allowed: Allowed) -> Result<Priced, Refusal> {
        let (curve, ten) = (curve(writes), Weight::new(10.0).unwrap());
        let behaviour = Behaviour { throughput: Share::new(1.0), ..Behaviour::default() };
        cheapest(&prospect(&curve, &Files::none()), &allowed, &behaviour, ten, &Prices::default())
    }

    #[test]
    fn a_service_that_writes_little_is_copied_in_rounds_and_a_fast_writer_is_not() {
        let quiet = chosen(100, ALL).unwrap();
        assert_eq!((quiet.mode, quiet.forecast.mode), (Mode::Precopy, Mode::Precopy));
        // Frozen for some 0.12 s, ten clients; 257 MiB.
        assert!((1.0..1.5).contains(&quiet.cost.frozen), "{quiet:?}");
        assert!((quiet.cost.bytes - 2.7).abs() < 0.1, "{quiet:?}");
        assert!(!quiet.cost.copying_assumed && !quiet.cost.filling_assumed);
        // 240 MB/s, more than the link carries: all crosses while it is frozen or follows.
        let fast = chosen(60_000, ALL).unwrap();
        assert_ne!((fast.mode, fast.forecast.mode), (Mode::Precopy, Mode::Precopy));
        assert!(fast.cost.filling_assumed || fast.mode == Mode::Cold, "{fast:?}");
    }

    #[test]
    fn a_limit_rules_out_modes_and_a_limit_that_none_keeps_has_its_figures() {
        let limit = Duration::from_millis(300);
        let allowed = Allowed { max_frozen: Some(limit), ..ALL };
        let fast = chosen(60_000, allowed).unwrap();
        assert!(fast.upper <= limit && fast.forecast.filling > Duration::from_secs(1), "{fast:?}");
        let strict = Allowed { postcopy: false, hybrid: false, ..allowed };
        let refusal = chosen(60_000, strict).unwrap_err();
        assert!(
            matches!(refusal, Refusal::Frozen { upper, limit: held } if held == limit && upper > 5 * limit),
            "{refusal:?}"
        );
        assert_eq!(chosen(0, Allowed { precopy: false, cold: false, ..strict }), Err(Refusal::NoMode));
    }

    #[test]
    fn files_that_change_faster_than_they_cross_rule_out_each_mode_with_a_limit() {
        let (curve, changing, one) = (curve(100), curve(60_000), Weight::new(1.0).unwrap());
        let files = Files { bytes: 1 << 28, writes: changing, ..Files::none() };
        let limit = Duration::from_secs(1);
        let of = |allowed: &Allowed| {
            let behaviour = Behaviour::default();
            cheapest(&prospect(&curve, &files), allowed, &behaviour, one, &Prices::default())
        };
        let refused = of(&Allowed { max_frozen: Some(limit), ..ALL }).unwrap_err();
        assert!(matches!(refused, Refusal::Frozen { upper, .. } if upper > 2 * limit), "{refused:?}");
        let priced = of(&ALL).unwrap();
        assert!(priced.cost.frozen > 2.0 && priced.forecast.bytes > 2 << 28, "{priced:?}");
    }

    #[test]
    fn a_node_that_cannot_restore_early_takes_no_pages_later() {
        let (curve, files) = (curve(60_000), Files::none());
        let early = Prospect { userfaultfd: false, ..prospect(&curve, &files) };
        let found = cheapest(&early, &ALL, &Behaviour::default(), Weight::MOST, &Prices::default()).unwrap();
        assert!(found.forecast.filling.is_zero() && matches!(found.mode, Mode::Cold | Mode::Precopy));
    }

    #[test]
    fn what_is_assumed_is_said_and_costs_no_less_than_nothing_lost() {
        let (curve, files) = (curve(100), Files::none());
        let Prospect { cargo, link, steps, .. } = prospect(&curve, &files);
        let forecast = predict(Mode::Hybrid, &cargo, &link, &steps, &ALL.goals(Mode::Hybrid, Duration::ZERO));
        let one = Weight::new(1.0).unwrap();
        let of = |behaviour: &Behaviour| {
            let lost = degradation(&forecast, Duration::from_millis(5), behaviour);
            cost(&forecast, &lost, one, &Prices::default())
        };
        let (unknown, known) = (
            of(&Behaviour::default()),
            of(&Behaviour { throughput: Share::new(1.0), ..Behaviour::default() }),
        );
        assert!(unknown.copying_assumed && !known.copying_assumed && unknown.filling_assumed);
        let tenth = forecast.copying.as_secs_f64() * 0.1;
        assert!((unknown.degraded - known.degraded - tenth).abs() < 1e-6, "{unknown:?} {known:?}");
        assert!(known.degraded >= forecast.filling.as_secs_f64());
    }
}
