//! When a service that has ended is started again: its policy, which moves with it, and the pauses between starts.
//!
//! | policy | a service that ended by itself, or with its machine | one that `godwit stop` ended |
//! |---|---|---|
//! | `no` | stays ended | stays ended |
//! | `on-failure` | is started if it failed; with `:N` at most N times | stays ended |
//! | `always` | is started | stays ended |
//!
//! `always` is what Podman and Docker call `unless-stopped`, and both words are understood.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::backoff::Backoff;

/// The pauses before a service's starts; as Docker's.
pub const PAUSES: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(60));

/// A service that has run for this long begins with the first pause again.
const SETTLED: Duration = Duration::from_secs(10);

/// When a service that has ended is started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Restart {
    /// Never.
    #[default]
    No,
    /// When it failed, at most so many times; 0 for no limit.
    OnFailure(u32),
    /// Whenever it ended by itself.
    Always,
}

/// Not a policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a restart policy; write no, on-failure, on-failure:N with N from 1, or always")]
pub struct UnknownRestart(String);

impl FromStr for Restart {
    type Err = UnknownRestart;

    fn from_str(text: &str) -> Result<Self, UnknownRestart> {
        match text {
            "" | "no" | "never" => Ok(Self::No),
            "on-failure" => Ok(Self::OnFailure(0)),
            "always" | "unless-stopped" => Ok(Self::Always),
            _ => text
                .strip_prefix("on-failure:")
                .filter(|most| most.bytes().all(|byte| byte.is_ascii_digit()))
                .and_then(|most| most.parse().ok())
                .filter(|most| *most > 0)
                .map(Self::OnFailure)
                .ok_or_else(|| UnknownRestart(text.chars().take(40).collect())),
        }
    }
}

impl TryFrom<String> for Restart {
    type Error = UnknownRestart;

    fn try_from(text: String) -> Result<Self, UnknownRestart> {
        text.parse()
    }
}

impl fmt::Display for Restart {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::No => formatter.write_str("no"),
            Self::OnFailure(0) => formatter.write_str("on-failure"),
            Self::OnFailure(most) => write!(formatter, "on-failure:{most}"),
            Self::Always => formatter.write_str("always"),
        }
    }
}

impl From<Restart> for String {
    fn from(policy: Restart) -> Self {
        policy.to_string()
    }
}

impl Restart {
    /// Whether to start a service again that ended with this code, was started again so often since a user
    /// started it, and may have been stopped by a user.
    #[must_use]
    pub fn wants(self, code: i32, restarts: u32, stopped: bool) -> bool {
        match self {
            _ if stopped => false,
            Self::No => false,
            Self::OnFailure(most) => code != 0 && (most == 0 || restarts < most),
            Self::Always => true,
        }
    }
}

/// The pause before the next start of a service that has run for so long since the last one.
pub fn pause(pauses: &mut Backoff, ran: Duration) -> Duration {
    if ran >= SETTLED {
        pauses.reset();
    }
    pauses.pause()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_written_as_podman_writes_them() {
        for (text, policy) in [
            ("no", Restart::No),
            ("on-failure", Restart::OnFailure(0)),
            ("on-failure:3", Restart::OnFailure(3)),
            ("always", Restart::Always),
        ] {
            assert_eq!(text.parse::<Restart>().unwrap(), policy);
            assert_eq!(policy.to_string(), text);
            let json = serde_json::to_string(&policy).unwrap();
            assert_eq!(serde_json::from_str::<Restart>(&json).unwrap(), policy);
        }
        assert_eq!("unless-stopped".parse::<Restart>().unwrap(), Restart::Always);
        assert_eq!("never".parse::<Restart>().unwrap(), Restart::No);
        for wrong in ["sometimes", "on-failure:", "on-failure:0", "on-failure:-1", "on-failure:+1", "Always"]
        {
            assert!(wrong.parse::<Restart>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_a_user_has_stopped_stays_stopped() {
        for policy in [Restart::No, Restart::OnFailure(0), Restart::Always] {
            assert!(!policy.wants(143, 0, true), "{policy}");
        }
    }

    #[test]
    fn on_failure_is_for_failures_and_as_often_as_it_says() {
        assert!(!Restart::OnFailure(0).wants(0, 0, false));
        assert!(Restart::OnFailure(0).wants(1, 1_000_000, false));
        assert!(Restart::OnFailure(2).wants(-1, 1, false), "its machine was cut off");
        assert!(!Restart::OnFailure(2).wants(1, 2, false));
        assert!(Restart::Always.wants(0, u32::MAX, false));
        assert!(!Restart::No.wants(1, 0, false));
    }

    #[test]
    fn pauses_double_up_to_a_minute_until_the_service_has_run_a_while() {
        let mut pauses = PAUSES;
        let mut after = |ran| pause(&mut pauses, ran).as_millis();
        let millis: Vec<_> = (0..12).map(|_| after(Duration::from_secs(1))).collect();
        assert_eq!(millis, [100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 51_200, 60_000, 60_000]);
        assert_eq!(after(SETTLED), 100);
    }
}
