//! Health checks of a container that has come here, until its next start.
//!
//! Podman begins them when it starts a container, by timers of systemd, and a container that was restored has not been
//! started. So godwitd asks Podman for each check meanwhile: Podman runs it, notes what came of it, and does what the
//! container's user wants of an unhealthy one.

use std::ffi::OsStr;
use std::time::Duration;

use super::Podman;
use super::command::{Call, Healthcheck, said};
use crate::container::{ContainerConfig, EngineError};
use crate::foreign::Keeps as _;

/// What Podman itself allows at least.
const SHORTEST: Duration = Duration::from_millis(100);

/// Longest check that is waited for; Podman ends one after its own time.
const LIMIT: Duration = Duration::from_secs(600);

/// How often a check is to run; nothing for none.
fn interval(check: &Healthcheck) -> Option<Duration> {
    let first = check.test.as_ref()?.first()?;
    let interval = u64::try_from(check.interval).ok().filter(|interval| *interval > 0)?;
    (!first.is_empty() && first != "NONE").then_some(Duration::from_nanos(interval).max(SHORTEST))
}

impl Podman {
    /// Has Podman check the health of a container again and again. It does not return, except for one without a check.
    pub(super) async fn check_again_and_again(
        &self,
        config: &ContainerConfig,
        id: &str,
    ) -> Result<(), EngineError> {
        let inspected = self.inspect(&config.name, id).await?;
        let check = inspected.and_then(|inspected| inspected.config.healthcheck);
        let Some(interval) = check.as_ref().and_then(interval) else { return Ok(()) };
        let words = ["healthcheck", "run", "--", id].map(OsStr::new).to_vec();
        let call = Call { name: &config.name, action: "check the health of", words, settings: None };
        loop {
            tokio::time::sleep(interval).await;
            // Nothing runs in one that is frozen, and Podman would wait for it.
            let (placed, _) = self.care().placed(config)?;
            if self.care().processes.cgroup(&placed)?.is_frozen() {
                continue;
            }
            let mut command = self.command(&call);
            match tokio::time::timeout(LIMIT, command.kill_on_drop(true).output()).await {
                // 1: it is unhealthy, which Podman has noted.
                Ok(Ok(output)) if matches!(output.status.code(), Some(0 | 1)) => {}
                Ok(Ok(output)) => {
                    let said = said(&output.stderr);
                    tracing::debug!(container = %config.name, said, "its health was not checked");
                }
                Ok(Err(error)) => return Err(self.not_started(&call, &error)),
                Err(_) => {
                    tracing::warn!(container = %config.name, "a check of its health does not end in {LIMIT:?}")
                }
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_container_without_a_check_has_none() {
        let interval = |text: &str| super::interval(&serde_json::from_str(text).unwrap());
        let second = Some(Duration::from_secs(1));
        assert_eq!(interval(r#"{"Test":["CMD-SHELL","true"],"Interval":1000000000,"Retries":3}"#), second);
        assert_eq!(interval(r#"{"Test":["CMD-SHELL","true"],"Interval":1}"#), Some(SHORTEST));
        for none in [
            "{}",
            r#"{"Test":null}"#,
            r#"{"Test":["NONE"],"Interval":1000000000}"#,
            r#"{"Test":["CMD","true"],"Interval":0}"#,
            r#"{"Test":["CMD","true"],"Interval":-1}"#,
        ] {
            assert_eq!(interval(none), None, "{none}");
        }
    }
}
