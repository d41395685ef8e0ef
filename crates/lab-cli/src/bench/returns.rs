//! `godwit bench return`: what crosses when a service comes back to a node that has kept its pages.
//!
//! ```text
//!   a ── all of its memory ─▶ b    writes a hundredth of its pages    b ── what differs ─▶ a
//! ```

use std::process::ExitCode;

use anyhow::ensure;
use godwit_cli::{
    global::Global,
    migration::{How, Mode, Outcome},
};
use serde_json::{Value, json};

use super::{
    parts::{self, LinkArgs},
    results::Results,
};
use crate::trial::{self, DESTINATION, Job, SOURCE, blocking};

/// One page of so many is written between the two moves.
const WRITTEN: u64 = 100;

pub(super) async fn measure(args: &LinkArgs, lab: &str, global: &Global) -> anyhow::Result<ExitCode> {
    let mut results = Results::new(args.out.as_deref(), global.json)?;
    for run in 1..=args.runs {
        for mode in [Mode::Precopy, Mode::Postcopy] {
            let mut row = there_and_back(args, lab, mode).await?;
            row["bench"] = "part".into();
            row["series"] = format!("return-{}", mode.as_str()).into();
            row["run"] = run.into();
            row["memory"] = args.memory.into();
            row["streams"] = args.streams.into();
            row["link"] = args.link_name().into();
            results.add(row)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn there_and_back(args: &LinkArgs, lab: &str, mode: Mode) -> anyhow::Result<Value> {
    args.lab(lab, async |lab| {
        let (connection, mut orders) = parts::start(lab, args.memory, 1).await?;
        let how = How::plain(args.streams);
        let job = Job { memory: args.memory, rate: 0, mode, how, back: false, busy: false };
        let quiet = trial::quiet(lab);
        let moved = async |to| {
            let (report, _) = trial::moved(&connection, &job, parts::NAME, to, &quiet).await?;
            ensure!(Outcome::of(&report) == Outcome::Moved, "it was {}: {}", report.outcome, report.reason);
            Ok(report)
        };
        let first = moved(DESTINATION).await?;
        let written = args.memory / 4096 / WRITTEN;
        orders = blocking(move || {
            orders.give(&format!("write {written}"))?;
            Ok(orders)
        })
        .await?;
        let back = moved(SOURCE).await?;
        blocking(move || orders.check(false)).await?;
        Ok(json!({
            "outcome": "moved", "written_pages": written,
            "first_wire_bytes": first.wire_bytes, "return_wire_bytes": back.wire_bytes,
            "share_of_first": back.wire_bytes as f64 / first.wire_bytes as f64,
        }))
    })
    .await
}
