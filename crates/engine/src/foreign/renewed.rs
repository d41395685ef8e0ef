//! What the users of an engine have changed of a container by the engine's own commands since it came into godwit's care: its
//! name, its limits, its restart policy. A move takes them along, as the engine has them when it begins.

use serde_json::Value;

/// A container as its engine has it now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Renewed {
    /// What the engine makes it from.
    pub definition: Value,
    /// Memory limit in bytes; 0 for none.
    pub memory_bytes: u64,
    /// CPU limit in thousandths; 0 for none.
    pub cpu_millis: u32,
}

/// A CPU limit in thousandths, of a time in microseconds in each period of so many; 0 for none.
pub(crate) fn cpu_millis(quota: i64, period: i64) -> u32 {
    /// That of an engine which names none.
    const PERIOD: u64 = 100_000;
    let period = u64::try_from(period).ok().filter(|period| *period != 0).unwrap_or(PERIOD);
    u32::try_from(u64::try_from(quota).unwrap_or(0).saturating_mul(1000) / period).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::cpu_millis;

    #[test]
    fn a_limit_of_cpu_is_a_part_of_its_period() {
        assert_eq!([cpu_millis(0, 0), cpu_millis(-1, 100_000), cpu_millis(50_000, 0)], [0, 0, 500]);
        assert_eq!(cpu_millis(30_000, 20_000), 1500);
    }
}
