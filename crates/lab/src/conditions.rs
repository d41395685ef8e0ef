//! What the way between two hosts is like: by figures, by name, or along a trace.
//!
//! A trace has a line for each change, in the order of time:
//!
//! ```text
//! # time  rate    delay  loss
//! 0s      20mbit  25ms   0%
//! 1.5s    4mbit   60ms   0.5%
//! ```

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    error::LabError,
    units::{TIMES, read_delay, read_rate, scaled, write_delay, write_rate},
};

/// Most changes in a trace: an hour of them, ten a second.
const MAX_STEPS: usize = 36_000;

/// What the way between two hosts is like, in each direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    /// Bits per second on the wire; none: what the hosts' own links carry.
    pub rate: Option<u64>,
    /// One-way delay. It takes the place of that of the hosts' own links.
    pub delay: Duration,
    /// By how much the delay of a frame is more or less at most; all differences are equally likely.
    /// Frames do not overtake each other.
    pub jitter: Duration,
    /// Share of the frames that are lost, each by itself.
    pub loss: f64,
}

/// Conditions from a time on, after the first of the trace.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// When.
    pub at: Duration,
    /// From then on.
    pub conditions: Conditions,
}

/// Conditions that have a name, with where they come from.
///
/// `lte` and `office` stand for the two links of Puliafito et al., *Container Migration in the Fog*,
/// Sensors 19(7), 1488 (2019), Table 2: between nodes over 4G, and between two buildings. They are
/// approximations, as the table itself was not at hand: 11 Mbit/s and 120 ms of round trip, 72 Mbit/s and
/// 7 ms, with half of it each way. The others are of the usual order, and of no publication.
pub const PRESETS: [(&str, Conditions); 5] = [
    ("lan", preset(1_000_000_000, 100, 0, 0.0)),
    ("office", preset(72_000_000, 3_500, 0, 0.0)),
    ("wifi", preset(100_000_000, 2_000, 1_000, 0.001)),
    ("wan", preset(100_000_000, 20_000, 1_000, 0.0001)),
    ("lte", preset(11_000_000, 60_000, 0, 0.0)),
];

const fn preset(rate: u64, delay_us: u64, jitter_us: u64, loss: f64) -> Conditions {
    let (delay, jitter) = (Duration::from_micros(delay_us), Duration::from_micros(jitter_us));
    Conditions { rate: Some(rate), delay, jitter, loss }
}

impl Conditions {
    /// Conditions by their name.
    ///
    /// # Errors
    /// There is no such name.
    pub fn named(name: &str) -> Result<Self, LabError> {
        let found = PRESETS.iter().find(|(known, _)| *known == name);
        found.map(|(_, conditions)| *conditions).ok_or_else(|| {
            let names: Vec<_> = PRESETS.iter().map(|(name, _)| *name).collect();
            bad(name, &format!("the names are {}", names.join(", ")))
        })
    }

    /// Whether frames are treated one by one, so that hosts have to cut them to size themselves.
    pub(crate) fn is_by_frame(&self) -> bool {
        self.loss > 0.0 || !self.jitter.is_zero()
    }
}

impl fmt::Display for Conditions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rate {
            Some(rate) => write_rate(f, rate)?,
            None => f.write_str("any rate")?,
        }
        f.write_str(",")?;
        write_delay(f, self.delay)?;
        if !self.jitter.is_zero() {
            f.write_str("±")?;
            write_delay(f, self.jitter)?;
        }
        if self.loss > 0.0 {
            write!(f, ",{}% lost", self.loss * 100.0)?;
        }
        Ok(())
    }
}

/// Reads `20mbit`.
///
/// # Errors
/// It is no rate, or none that a link can have.
pub fn rate(text: &str) -> Result<u64, LabError> {
    read_rate(text).map_err(|why| bad(text, why))
}

/// Reads `25ms`.
///
/// # Errors
/// It is no time, or longer than 10 s.
pub fn delay(text: &str) -> Result<Duration, LabError> {
    read_delay(text).map_err(|why| bad(text, why))
}

/// Reads `0.1%` as a share.
///
/// # Errors
/// It is no percentage from 0 to 100.
pub fn loss(text: &str) -> Result<f64, LabError> {
    let percent: Option<f64> = text.strip_suffix('%').and_then(|number| number.trim().parse().ok());
    match percent {
        Some(percent) if (0.0..=100.0).contains(&percent) => Ok(percent / 100.0),
        _ => Err(bad(text, "a loss is a percentage from 0% to 100%")),
    }
}

/// Reads a trace.
///
/// # Errors
/// A line is not understood, or earlier than the one before; or there is none, or too many.
pub fn trace(text: &str) -> Result<Vec<Step>, LabError> {
    let mut steps: Vec<Step> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let words: Vec<&str> = line.split('#').next().unwrap_or_default().split_whitespace().collect();
        if words.is_empty() {
            continue;
        }
        let wrong = |why: &str| bad(line.trim(), &format!("line {number}: {why}"));
        let [at, rate_, delay_, loss_] = words[..] else {
            return Err(wrong("a line has time, rate, delay and loss"));
        };
        let at = scaled(&at.to_ascii_lowercase(), &TIMES).map_err(wrong)?;
        let at = Duration::try_from_secs_f64(at / 1e9).map_err(|_| wrong("the time is too long"))?;
        if steps.last().is_some_and(|last| last.at >= at) {
            return Err(wrong("it is not later than the line before"));
        }
        let said = |error: LabError| wrong(&error.to_string());
        let conditions = Conditions {
            rate: Some(rate(rate_).map_err(said)?),
            delay: delay(delay_).map_err(said)?,
            jitter: Duration::ZERO,
            loss: loss(loss_).map_err(said)?,
        };
        steps.push(Step { at, conditions });
        if steps.len() > MAX_STEPS {
            return Err(wrong("a trace has 36000 lines at most"));
        }
    }
    if steps.is_empty() {
        return Err(bad("the trace", "it has no line"));
    }
    Ok(steps)
}

fn bad(given: &str, reason: &str) -> LabError {
    LabError::BadConditions { given: given.to_owned(), reason: reason.to_owned() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_and_others_are_refused() {
        assert_eq!(rate("20Mbit").unwrap(), 20_000_000);
        assert_eq!(delay("2.5ms").unwrap(), Duration::from_micros(2500));
        assert!((loss("0.1%").unwrap() - 0.001).abs() < 1e-12);
        for text in ["", "20", "-1mbit", "1bit", "nanmbit"] {
            assert!(rate(text).is_err(), "{text}");
        }
        for text in ["", "5", "-1ms", "11s", "infs"] {
            assert!(delay(text).is_err(), "{text}");
        }
        for text in ["", "5", "-1%", "101%", "nan%"] {
            assert!(loss(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_trace_is_read_line_by_line_and_tells_which_is_wrong() {
        let steps = trace("# a drive\n0s 20mbit 25ms 0%\n\n1.5s 4mbit 60ms 0.5% # a bridge\n").unwrap();
        let [first, second] = steps[..] else { panic!("{steps:?}") };
        assert_eq!((first.at, first.conditions.rate), (Duration::ZERO, Some(20_000_000)));
        assert_eq!(
            (second.at, second.conditions.delay),
            (Duration::from_millis(1500), Duration::from_millis(60))
        );
        for (text, why) in [
            ("", "no line"),
            ("0s 20mbit 25ms", "line 1: a line has"),
            ("0s 20mbit 25ms 0%\n0s 20mbit 25ms 0%", "line 2: it is not later"),
            ("0s fast 25ms 0%", "line 1"),
            ("1e300s 20mbit 25ms 0%", "too long"),
        ] {
            let error = trace(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text:?}: {error}");
        }
    }

    #[test]
    fn conditions_have_names_and_are_written_out() {
        assert_eq!(Conditions::named("lte").unwrap().to_string(), "11mbit,60ms");
        assert_eq!(Conditions::named("wifi").unwrap().to_string(), "100mbit,2ms±1ms,0.1% lost");
        let error = Conditions::named("dsl").unwrap_err().to_string();
        assert!(error.contains("lan, office, wifi, wan, lte"), "{error}");
    }
}
