//! `godwit policy`: whether a service follows its clients by itself, how, and what was decided for it last.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Subcommand, ValueEnum};
use godwit_api::v1::policy_request::Change;
use godwit_api::v1::{Policy, PolicyRequest, PolicyResponse};

use super::place::words;
use crate::client::Connection;
use crate::global::Global;
use crate::output;
use crate::values;

/// The latency with which clients are content where a policy names none, in microseconds.
const LATENCY_US: u64 = 20_000;

/// Have a service follow its clients by itself, or stay where it is
///
/// A service that follows its clients moves by the rules of `godwit place`, without being asked. It waits until its clients
/// have lost enough for the move to be worth it, and it moves and freezes only so often in an hour. The policy goes with the
/// service.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  godwit policy set web --follow-clients
  godwit policy show web
  godwit policy clear web")]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: PolicyVerb,
}

#[derive(Debug, Subcommand)]
enum PolicyVerb {
    Set(Set),
    /// Show the policy of a service, and what was decided last
    Show(Named),
    /// Have a service stay where it is until it is told to move
    Clear(Named),
}

/// Set the policy of a service, in place of the one that it has
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  godwit policy set web --follow-clients
  godwit policy set web --follow-clients --latency 10ms --max-frozen-ms 200 --allow postcopy")]
struct Set {
    /// The service
    name: String,
    // What the policy is: required, so that a further kind changes no command that is in use.
    /// It moves to the node that is best for its clients
    #[arg(long, required = true)]
    follow_clients: bool,
    /// The longest round trip with which a client is content, such as 20ms or 500us
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = values::latency)]
    latency: Duration,
    /// Longest frozen time in milliseconds; it does not move where more is predicted
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..))]
    max_frozen_ms: Option<u32>,
    /// What may be done to a service that writes faster than the link carries
    #[arg(long, value_enum, value_delimiter = ',', value_name = "WHAT")]
    allow: Vec<Allow>,
}

/// What may be done to a service beside copying it. A policy has no throttling, other than `migrate`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Allow {
    /// Pages may follow after the commit: losing the source meanwhile loses the service
    Postcopy,
}

#[derive(Debug, clap::Args)]
struct Named {
    /// The service
    name: String,
}

impl Set {
    fn change(&self) -> Option<Change> {
        let policy = Policy {
            latency_us: u64::try_from(self.latency.as_micros()).unwrap_or(u64::MAX),
            max_frozen_ms: self.max_frozen_ms.unwrap_or(0),
            allow_postcopy: self.allow.contains(&Allow::Postcopy),
        };
        self.follow_clients.then_some(Change::Set(policy))
    }
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let (is_shown, change, name) = match args.verb {
        PolicyVerb::Set(args) => (false, args.change(), args.name),
        PolicyVerb::Show(args) => (true, None, args.name),
        PolicyVerb::Clear(args) => (false, Some(Change::Clear(true)), args.name),
    };
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.policy(PolicyRequest { name, change }).await;
    let answer = answer.map_err(|status| connection.explain(&status))?.into_inner();
    if global.json {
        output::json(&answer)?;
        return Ok(ExitCode::SUCCESS);
    }
    output::line(&sentence(&answer))?;
    if is_shown {
        decided(&answer)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What the service does from now on.
fn sentence(answer: &PolicyResponse) -> String {
    let PolicyResponse { name, node, .. } = answer;
    let Some(policy) = &answer.policy else {
        return format!("{name} stays on {node} until it is told to move");
    };
    let latency_us = if policy.latency_us == 0 { LATENCY_US } else { policy.latency_us };
    let latency = words::ms(latency_us);
    let frozen = match policy.max_frozen_ms {
        0 => String::new(),
        most => format!(", frozen for at most {most} ms"),
    };
    let postcopy = if policy.allow_postcopy { ", pages may follow" } else { "" };
    format!(
        "{name} follows its clients from {node}: they are content with a round trip of {latency}{frozen}{postcopy}"
    )
}

/// Prints the last decision, with its age.
fn decided(answer: &PolicyResponse) -> anyhow::Result<()> {
    match &answer.last {
        Some(last) => {
            output::line(&format!("decided {} ago", output::span(output::seconds_since(answer.decided_ms))))?;
            words::print(last, true)
        }
        None if answer.policy.is_some() => Ok(output::line("nothing has been decided yet")?),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_a_sentence_with_what_was_asked_for() {
        let said = |policy| {
            sentence(&PolicyResponse { name: "web".into(), node: "a".into(), policy, ..Default::default() })
        };
        assert_eq!(said(None), "web stays on a until it is told to move");
        // Another client of the API may leave the latency to the daemon.
        assert_eq!(
            said(Some(Policy::default())),
            "web follows its clients from a: they are content with a round trip of 20.0 ms"
        );
        assert_eq!(
            said(Some(Policy { latency_us: 500, max_frozen_ms: 200, allow_postcopy: true })),
            "web follows its clients from a: they are content with a round trip of 0.5 ms, frozen for at most 200 ms, pages may follow"
        );
    }
}
