//! Flags of `godwit run` about the health check of a container that an engine makes.

use anyhow::bail;
use godwit_api::v1::HealthCheck;

use crate::values;

#[derive(Debug, clap::Args)]
pub(super) struct Check {
    /// Line for the image's shell by which Podman or Docker checks the container's health; with --engine alone
    #[arg(long, value_name = "COMMAND", value_parser = values::health_command)]
    health_cmd: Option<String>,
    /// Time between two checks: 500ms, 30s, 1m30s [default: with Docker the image's, or 30s]
    #[arg(long, value_name = "TIME", value_parser = values::health_time)]
    health_interval: Option<u64>,
    /// Failures in a row after which the container is unhealthy [default: with Docker the image's, or 3]
    #[arg(long, value_name = "NUMBER")]
    health_retries: Option<u32>,
    /// Time after a start in which failures do not count [default: with Docker the image's, or none]
    #[arg(long, value_name = "TIME", value_parser = values::health_time)]
    health_start_period: Option<u64>,
    /// Time after which a check has failed that has not ended [default: with Docker the image's, or 30s]
    #[arg(long, value_name = "TIME", value_parser = values::health_time)]
    health_timeout: Option<u64>,
    /// No health check, although the image has one; with --engine alone
    #[arg(
        long,
        conflicts_with_all = ["health_cmd", "health_interval", "health_retries", "health_start_period", "health_timeout"]
    )]
    no_healthcheck: bool,
}

impl Check {
    /// The check for an engine; nothing for the image's. The bounds are for the daemon to say.
    pub(super) fn of_engine(self, engine: &str) -> anyhow::Result<Option<HealthCheck>> {
        let check = HealthCheck {
            none: self.no_healthcheck,
            command: self.health_cmd.unwrap_or_default(),
            interval_ms: self.health_interval,
            timeout_ms: self.health_timeout,
            start_period_ms: self.health_start_period,
            retries: self.health_retries,
        };
        if check == HealthCheck::default() {
            return Ok(None);
        }
        if engine == "runc" {
            bail!(
                "godwit has no health checks of its own: --engine podman or --engine docker has that engine make the container, with its check"
            );
        }
        Ok(Some(check))
    }
}
