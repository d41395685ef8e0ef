//! `hcontainer-compute`: a client on its way asks for what takes a service a while to compute.
//!
//! ```text
//!   OCR      a page of digits    ─▶ a shell starts GOCR for it  ─▶ the text
//!   Ransac   points              ─▶ 200 lines through two each  ─▶ the line with most of them near
//! ```
//!
//! The paper (figures 22 to 25) holds its x86-64 machine to an eighth of a processor, so that both of its machines are about
//! as fast. Ours are alike without that.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    path::Path,
    time::Duration,
};

use godwit_api::v1::run_request::Source;
use godwit_isa_packages::gocr;
use godwit_lab::{
    Lab,
    config::CLIENT,
    workload::{Question, Repeated},
};
use serde_json::Value;

use super::{
    Args, Lines, Verdict,
    journey::{self, Check, Journey, PLACES},
    picture::{Picture, Row},
    quantile, values,
};
use crate::{
    bench::Bed,
    services::{self, Program, Service},
    trial::{ADDRESS, SERVICE},
};

const RUNS: u32 = 3;
const TAKES: Duration = Duration::from_secs(20);
const PORT: u16 = 7000;
const RANSAC: Program = Program { name: "ransac", source: include_str!("ransac.c") };
/// Of four points so many are on the line that is looked for, y = 2x + 1.
const ON_LINE: u32 = 3;
/// What is judged: moving gains where the way to the service takes most of the time, and costs no more than this elsewhere.
const COSTS: f64 = 0.05;

/// What a service is asked.
#[derive(Clone, Copy)]
struct Task {
    program: &'static str,
    /// Lines of the page, or points.
    size: u32,
    /// What that is.
    shown: &'static str,
    /// The way to the service takes most of the time.
    is_short: bool,
}

const TASKS: [Task; 6] = [
    Task { program: "ocr", size: 1, shown: "OCR, 40 digits", is_short: true },
    Task { program: "ocr", size: 4, shown: "OCR, 160 digits", is_short: false },
    Task { program: "ocr", size: 16, shown: "OCR, 640 digits", is_short: false },
    Task { program: "ransac", size: 1000, shown: "Ransac, 1,000 points", is_short: true },
    Task { program: "ransac", size: 10_000, shown: "Ransac, 10,000 points", is_short: false },
    Task { program: "ransac", size: 100_000, shown: "Ransac, 100,000 points", is_short: false },
];

impl Task {
    fn question(self) -> Question {
        match self.program {
            "ocr" => {
                let (request, answer) = gocr::question(self.size as usize);
                Question { request, answer }
            }
            _ => points(self.size),
        }
    }

    fn like(self) -> [(&'static str, Value); 2] {
        [("program", self.program.into()), ("size", self.size.into())]
    }
}

/// Points of which three in four are on the line, and the others far above it.
fn points(count: u32) -> Question {
    let mut request = format!("{}\n", count * 16).into_bytes();
    let mut near = 0;
    for number in 0..count {
        let x = f64::from(number);
        let is_on_line = number % 4 < ON_LINE;
        near += u32::from(is_on_line);
        // No line has more than two of these near it and those on the line, too.
        let above = if is_on_line { 0.0 } else { 100.0 + x * x };
        for coordinate in [x, 2.0 * x + 1.0 + above] {
            request.extend(coordinate.to_le_bytes());
        }
    }
    Question { request, answer: format!("{near} 2.000 1.000\n\n").into_bytes() }
}

pub(super) async fn measure(args: &Args, lines: &mut Lines) -> anyhow::Result<()> {
    let (runs, takes) = if args.quick { (1, TAKES / 4) } else { (RUNS, TAKES) };
    let image = services::image(&args.images, "gocr")?;
    let bed = Bed { name: args.name.clone(), ..Bed::default() };
    for run in 1..=runs {
        for task in TASKS {
            for place in PLACES {
                let journey = Journey { place, takes };
                let take = async |lab: &Lab| {
                    let (source, command) = match task.program {
                        "ocr" => (image.clone(), Vec::new()),
                        _ => (RANSAC.root(lab, &args.compiler).await?, ransac()),
                    };
                    let serve = async |node: &_| serve(source, command).run(node).await.map(|()| at());
                    let question = task.question();
                    let ask = move |lab: &Lab, at| {
                        let check: Check = Box::new(|| Ok(()));
                        Ok((Repeated::start(lab, CLIENT, at, 1, question)?, check))
                    };
                    journey.take(lab, serve, ask).await
                };
                for mut row in bed.lab(true, take).await? {
                    row["experiment"] = "hcontainer-compute".into();
                    row["run"] = run.into();
                    for (field, value) in task.like() {
                        row[field] = value;
                    }
                    lines.add(row)?;
                }
            }
        }
    }
    Ok(())
}

fn ransac() -> Vec<String> {
    vec![format!("/{}", RANSAC.name), PORT.to_string()]
}

fn serve(source: Source, command: Vec<String>) -> Service<'static> {
    Service { name: SERVICE, address: ADDRESS, source, command, ulimits: Vec::new() }
}

const fn at() -> SocketAddrV4 {
    const HERE: Ipv4Addr = ADDRESS;
    SocketAddrV4::new(HERE, PORT)
}

pub(super) fn tell(rows: &[Value], path: &Path) -> anyhow::Result<Vec<Verdict>> {
    let (mut drawn, mut verdicts) = (Vec::new(), Vec::new());
    for task in TASKS {
        let means = |place| values(rows, &journey::at(&task.like(), place), "mean_s");
        let origin = quantile(&means(PLACES[0]), 0.5);
        for place in PLACES {
            let ratios: Vec<f64> = origin
                .map(|origin| means(place).iter().map(|mean| mean / origin).collect())
                .unwrap_or_default();
            drawn.extend(Row::of(format!("{}: {}", task.shown, place.name), place.colour, &ratios));
        }
        let least = if task.is_short { 0.0 } else { -COSTS };
        verdicts.extend(journey::gains(rows, &task.like(), task.shown, least, |_| String::new()));
        verdicts.push(journey::answers(rows, &task.like(), task.shown));
    }
    let picture = Picture {
        title: "Requests answered, beside a service at the origin: least, median, most",
        unit: "×",
        rows: drawn,
        paper: None,
        goal: None,
    };
    picture.draw(path)?;
    Ok(verdicts)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_answer_about_points_is_the_line_of_most_of_them() {
        let Question { request, answer } = points(1000);
        assert!(request.starts_with(b"16000\n") && request.len() == 6 + 16_000);
        assert_eq!(answer, b"750 2.000 1.000\n\n");
    }

    #[test]
    fn a_gain_is_asked_of_short_requests_alone() -> anyhow::Result<()> {
        let row = |task: Task, place: &str, mean: f64| {
            let mut row = json!({ "place": place, "mean_s": mean, "lost_or_wrong": 0, "reconnects": 0, "requests": 10 });
            for (field, value) in task.like() {
                row[field] = value;
            }
            row
        };
        let of =
            |task| [row(task, "origin", 100.0), row(task, "destination", 90.0), row(task, "moved", 99.0)];
        let rows: Vec<Value> = TASKS[..2].iter().flat_map(|task| of(*task)).collect();
        let scratch = tempfile::tempdir()?;
        let holds = tell(&rows, &scratch.path().join("x.svg"))?
            .iter()
            .map(|verdict| verdict.holds)
            .collect::<Vec<_>>();
        assert_eq!(holds[..6], [false, true, true, true, true, true]);
        assert!(holds[6..].iter().all(|holds| !holds), "nothing was measured of the other tasks");
        Ok(())
    }
}
