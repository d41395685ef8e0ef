//! Rates and times as text: `20mbit`, `1.5ms`.

use std::{fmt, time::Duration};

/// Rates that a way can have, bits per second.
const RATES: std::ops::RangeInclusive<f64> = 1e4..=1e11;
/// Longest delay, nanoseconds.
const LONGEST: f64 = 1e10;
/// Units of times, in nanoseconds; `s` comes last, as the others end with it.
pub(crate) const TIMES: [(&str, f64); 3] = [("ms", 1e6), ("us", 1e3), ("s", 1e9)];

/// Reads a number followed by one of the units; the first unit that fits counts.
pub(crate) fn scaled(text: &str, units: &[(&str, f64)]) -> Result<f64, &'static str> {
    for (unit, scale) in units {
        if let Some(number) = text.strip_suffix(unit) {
            let value: f64 = number.trim().parse().map_err(|_| "the part before the unit is not a number")?;
            return if value.is_finite() && value >= 0.0 { Ok(value * scale) } else { Err("it is negative") };
        }
    }
    Err("a unit is missing (gbit, mbit, kbit for the rate; s, ms, us for the delay)")
}

/// A rate, or why it is none.
pub(crate) fn read_rate(text: &str) -> Result<u64, &'static str> {
    let units = [("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3), ("bit", 1.0)];
    let rate = scaled(&text.to_ascii_lowercase(), &units)?;
    if !RATES.contains(&rate) {
        return Err("the rate must lie between 10kbit and 100gbit");
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // bounded above
    Ok(rate.round() as u64)
}

/// A delay, or why it is none.
pub(crate) fn read_delay(text: &str) -> Result<Duration, &'static str> {
    let time = scaled(&text.to_ascii_lowercase(), &TIMES)?;
    if time > LONGEST {
        return Err("the delay must lie between 0ms and 10s");
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // bounded above
    Ok(Duration::from_nanos(time.round() as u64))
}

/// A rate as it is read, in the largest unit of which it is a multiple.
pub(crate) fn write_rate(f: &mut fmt::Formatter<'_>, rate: u64) -> fmt::Result {
    let (value, unit) = match rate {
        r if r % 1_000_000_000 == 0 => (r / 1_000_000_000, "gbit"),
        r if r % 1_000_000 == 0 => (r / 1_000_000, "mbit"),
        r if r % 1_000 == 0 => (r / 1_000, "kbit"),
        r => (r, "bit"),
    };
    write!(f, "{value}{unit}")
}

/// A delay as it is read.
pub(crate) fn write_delay(f: &mut fmt::Formatter<'_>, delay: Duration) -> fmt::Result {
    match delay.as_micros() {
        m if m % 1000 == 0 => write!(f, "{}ms", m / 1000),
        m => write!(f, "{m}us"),
    }
}
