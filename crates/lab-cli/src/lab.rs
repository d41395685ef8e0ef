//! `godwit lab`: nodes and a client host on this machine, in network namespaces.

use std::{
    fmt::Display,
    os::unix::process::ExitStatusExt as _,
    path::PathBuf,
    process::{ExitCode, ExitStatus},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use clap::Subcommand;
use godwit_cli::{
    global::Global,
    output::{self, Table},
};
use godwit_lab::{
    Conditions, Lab, LabConfig, LabStatus, Link, NetworkBackend, Step, conditions,
    selftest::{self, Measured},
};

use crate::{demo, experiment};

/// Make nodes and a client host on this machine to try things with
///
/// Each host is a network namespace; each node runs its own godwitd. Several labs can be up at
/// once, under different names. Needs root.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  godwit lab up --nodes a,b --link 1gbit,1ms
  godwit run --node a --name redis --ip 10.88.0.10 --image redis.tar -- redis-server --bind 0.0.0.0
  godwit lab exec client -- redis-cli -h 10.88.0.10 ping
  godwit migrate --node a redis --to b
  godwit lab down")]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: LabVerb,
}

#[derive(Debug, Subcommand)]
enum LabVerb {
    #[command(flatten)]
    Bed(BedVerb),
    /// Move a Redis with a busy client between two nodes of a lab of its own, and show what happened
    ///
    /// Fails if any answer was lost.
    Demo(demo::Args),
    /// Measure again what published work has measured, and draw it beside what that says
    ///
    /// Writes what was measured as NAME.jsonl and a picture as NAME.svg. Ends with 1 where a figure is not what was aimed at.
    Experiment(experiment::Args),
}

/// What is done to a lab itself.
#[derive(Debug, Subcommand)]
enum BedVerb {
    /// Bring a lab up: its nodes, one client host, and the links between them
    Up {
        /// Name of the lab [default: that of --lab]
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        /// Names of the nodes; the first founds the cluster. NAME=MACHINE makes the node a virtual machine: debian12,
        /// debian13, ubuntu24.04, arm64, where needed with options, such as
        /// debian12:cpu=Haswell:memory=2GiB:processors=1:disk=volatile
        #[arg(long, value_delimiter = ',', required = true, value_name = "NAME[=MACHINE],…")]
        nodes: Vec<String>,
        /// Directory of godwit's packages, which machines install
        #[arg(long, value_name = "DIR", env = "GODWIT_PACKAGES")]
        packages: Option<PathBuf>,
        /// Rate and one-way delay of each host's link: 1gbit,1ms [default: unshaped]
        #[arg(long, value_name = "RATE[,DELAY]")]
        link: Option<Link>,
        /// The nodes' switch; for Open vSwitch each gets one of its own
        #[arg(long, value_enum, default_value_t)]
        network_backend: NetworkBackend,
    },
    /// Take a lab down with everything in it, even what a crash left of it
    Down {
        /// Name of the lab [default: that of --lab]
        name: Option<String>,
        /// All labs on this machine
        #[arg(long, conflicts_with = "name")]
        all: bool,
    },
    /// Show a lab, or all labs there are
    Status {
        /// Name of the lab [default: all]
        name: Option<String>,
    },
    /// Run a command on a host of the lab; ends with its exit code
    Exec {
        /// A node, or `client`
        host: String,
        /// Command and its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
        command: Vec<String>,
    },
    /// Let nothing pass between two hosts
    Cut {
        /// A node, or `client`
        a: String,
        /// Another one
        b: String,
    },
    /// Undo a cut
    Heal {
        /// A node, or `client`
        a: String,
        /// Another one
        b: String,
    },
    /// Give all links another rate and delay, or the way between two hosts conditions of its own
    ///
    /// Without two hosts: the rate and delay of every host's link; none: unshaped. With two hosts: what
    /// lies between them, in each direction, in place of the delay of their links.
    #[command(after_long_help = LINK_HELP)]
    Link(LinkArgs),
    /// Measure how exact the links of a lab are on this machine, in a lab of its own
    ///
    /// Ends with 1 if a delay is off by more than 0.2 ms and 1 %, a rate by more than 2 %, or a loss by
    /// more than chance.
    Selftest,
    /// Kill the daemon of a node with SIGKILL; its services go on
    Kill {
        /// The node
        host: String,
    },
    /// Cut the power of a node that is a machine, or give it back
    Power {
        /// The node
        host: String,
        /// What to do
        #[arg(value_enum)]
        action: Power,
    },
    /// Set the clock of a node that is a machine ahead, or back: +1h, -3d, +90s
    Clock {
        /// The node
        host: String,
        /// By how much
        #[arg(value_name = "+TIME", allow_hyphen_values = true, value_parser = seconds)]
        by: i64,
    },
    /// Start the daemon of a node that does not run
    Start {
        /// The node
        host: String,
    },
}

/// What can be done with a machine's power.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Power {
    /// Cut it: memory is lost, and what was not yet written to the disk, nor flushed where that is volatile
    Cut,
    /// Boot from the disk, and wait until it answers
    On,
    /// Cut it and give it back
    Reset,
}

/// A time with a sign, in seconds.
fn seconds(text: &str) -> Result<i64, String> {
    let units = [('s', 1), ('m', 60), ('h', 3_600), ('d', 86_400)];
    let read = units
        .iter()
        .find_map(|(unit, seconds)| text.strip_suffix(*unit)?.parse::<i64>().ok()?.checked_mul(*seconds));
    let read = read.filter(|_| text.starts_with(['+', '-']));
    read.ok_or_else(|| "write a sign, a whole number and a unit: +90s, -30m, +1h, -3d".to_owned())
}

const LINK_HELP: &str = "\
Presets: lan (1gbit, 0.1ms), office (72mbit, 3.5ms), wifi (100mbit, 2ms ± 1ms, 0.1% lost),
wan (100mbit, 20ms ± 1ms, 0.01% lost), lte (11mbit, 60ms). Delays are one-way. Of these lte and office
approximate the links of \"Container Migration in the Fog\" (Puliafito et al., Sensors 19(7), 1488, 2019).

A trace has a line for each change: time, rate, delay and loss, such as `1.5s 4mbit 60ms 0.5%`. Times
begin with 0s when the command is given, and the last line holds from then on.

Examples:
  godwit lab link 1gbit,1ms
  godwit lab link a b --rate 20mbit --delay 25ms --jitter 3ms --loss 0.1%
  godwit lab link a client --preset lte
  godwit lab link a b --trace drive.txt
  godwit lab link a b --none";

#[derive(Debug, clap::Args)]
struct LinkArgs {
    /// 1gbit,1ms for every link, or two hosts: nodes, or `client`
    #[arg(value_name = "RATE[,DELAY] | HOST HOST", num_args = 0..=2)]
    what: Vec<String>,
    /// Rate between the hosts, in each direction [default: that of their links]
    #[arg(long, value_name = "RATE", value_parser = conditions::rate)]
    rate: Option<u64>,
    /// One-way delay between them
    #[arg(long, value_name = "TIME", value_parser = conditions::delay)]
    delay: Option<Duration>,
    /// Largest deviation of a frame's delay; frames do not overtake each other
    #[arg(long, value_name = "TIME", value_parser = conditions::delay)]
    jitter: Option<Duration>,
    /// Share of the frames that are lost
    #[arg(long, value_name = "PERCENT", value_parser = conditions::loss)]
    loss: Option<f64>,
    /// Begin with conditions that have a name: lan, office, wifi, wan, lte
    #[arg(long, value_name = "NAME", value_parser = Conditions::named)]
    preset: Option<Conditions>,
    /// Follow a file with lines of time, rate, delay and loss
    #[arg(long, value_name = "FILE", conflicts_with_all = ["rate", "delay", "jitter", "loss", "preset"])]
    trace: Option<PathBuf>,
    /// Remove the conditions between the two hosts
    #[arg(long, conflicts_with_all = ["rate", "delay", "jitter", "loss", "preset", "trace"])]
    none: bool,
}

impl LinkArgs {
    /// What the way between two hosts shall be like, from now on; none where nothing is said of it.
    fn steps(&self) -> anyhow::Result<Option<Vec<Step>>> {
        if self.none {
            return Ok(Some(Vec::new()));
        }
        if let Some(file) = &self.trace {
            let text = std::fs::read_to_string(file)
                .with_context(|| format!("the trace {} cannot be read", file.display()))?;
            let steps = conditions::trace(&text);
            return steps.with_context(|| format!("the trace {} is not valid", file.display())).map(Some);
        }
        let said =
            self.rate.is_some() || self.delay.is_some() || self.jitter.is_some() || self.loss.is_some();
        if !said && self.preset.is_none() {
            return Ok(None);
        }
        let base = self.preset.unwrap_or_default();
        let conditions = Conditions {
            rate: self.rate.or(base.rate),
            delay: self.delay.unwrap_or(base.delay),
            jitter: self.jitter.unwrap_or(base.jitter),
            loss: self.loss.unwrap_or(base.loss),
        };
        Ok(Some(vec![Step { at: Duration::ZERO, conditions }]))
    }
}

/// The lab's functions block, so they run on a thread that may.
pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    match args.verb {
        LabVerb::Demo(args) => demo::run(args, global).await,
        LabVerb::Experiment(args) => experiment::run(args, global).await,
        LabVerb::Bed(verb) => {
            let (lab, json) = (global.lab.clone(), global.json);
            tokio::task::spawn_blocking(move || perform(verb, lab, json)).await?
        }
    }
}

fn perform(verb: BedVerb, lab: String, json: bool) -> anyhow::Result<ExitCode> {
    match verb {
        BedVerb::Up { name, nodes, packages, link, network_backend } => {
            let mut config = LabConfig::new(name.unwrap_or(lab), Vec::<String>::new());
            for node in nodes {
                let (name, machine) = match node.split_once('=') {
                    Some((name, machine)) => (name, Some(machine.parse()?)),
                    None => (&*node, None),
                };
                config.nodes.push(name.to_owned());
                config.machines.extend(machine.map(|machine| (name.to_owned(), machine)));
            }
            config.packages = packages.map(std::path::absolute).transpose()?;
            config.link = link;
            config.network_backend = network_backend;
            let lab = Lab::up(&config)?;
            let status = Lab::status(lab.name())?;
            if json {
                output::json(&status)?;
            } else {
                table(&[status]).print()?;
            }
        }
        BedVerb::Down { all: true, .. } => {
            for name in Lab::list() {
                down(&name, json)?;
            }
        }
        BedVerb::Down { name, .. } => down(&name.unwrap_or(lab), json)?,
        BedVerb::Status { name } => {
            let names = name.map_or_else(Lab::list, |name| vec![name]);
            let labs = names.iter().map(|name| Lab::status(name)).collect::<Result<Vec<_>, _>>()?;
            if json {
                output::json(&labs)?;
            } else {
                table(&labs).print()?;
                for (lab, way) in labs.iter().flat_map(|lab| lab.ways.iter().map(move |way| (lab, way))) {
                    let (a, b) = &way.between;
                    output::line(&format!("{}: between {a} and {b} it is {}", lab.name, way.conditions))?;
                }
            }
        }
        BedVerb::Exec { host, command } => {
            return Ok(passed_on(Lab::open(&lab)?.exec(&host, &command)?));
        }
        BedVerb::Cut { a, b } => {
            Lab::open(&lab)?.cut(&a, &b)?;
            say(json, &[("cut", &a), ("from", &b)], &format!("nothing passes between {a} and {b}"))?;
        }
        BedVerb::Heal { a, b } => {
            Lab::open(&lab)?.heal(&a, &b)?;
            say(json, &[("healed", &a), ("with", &b)], &format!("{a} and {b} reach each other"))?;
        }
        BedVerb::Link(args) => link(&args, &lab, json)?,
        BedVerb::Selftest => return selftest(json),
        BedVerb::Kill { host } => {
            Lab::open(&lab)?.stop_node(&host)?;
            say(json, &[("killed", &host)], &format!("godwitd of {host} is killed"))?;
        }
        BedVerb::Power { host, action } => {
            let lab = Lab::open(&lab)?;
            if matches!(action, Power::Cut | Power::Reset) {
                lab.cut_power(&host)?;
            }
            if matches!(action, Power::On | Power::Reset) {
                lab.power_on(&host)?;
                say(json, &[("on", &host)], &format!("{host} has booted and answers"))?;
            } else {
                say(json, &[("cut", &host)], &format!("{host} has no power"))?;
            }
        }
        BedVerb::Clock { host, by } => {
            Lab::open(&lab)?.shift_clock(&host, by)?;
            say(json, &[("clock", &host)], &format!("the clock of {host} is {by:+} s from where it was"))?;
        }
        BedVerb::Start { host } => {
            Lab::open(&lab)?.start_node(&host)?;
            say(json, &[("started", &host)], &format!("godwitd of {host} answers"))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn link(args: &LinkArgs, lab: &str, json: bool) -> anyhow::Result<()> {
    let steps = args.steps()?;
    let [a, b] = &args.what[..] else {
        ensure!(
            steps.is_none(),
            "between which hosts? Name two of the lab's: godwit lab link a b --rate 20mbit --delay 25ms"
        );
        let link: Option<Link> = args.what.first().map(|link| link.parse()).transpose()?;
        Lab::open(lab)?.set_link(link)?;
        let link = shape(link);
        say(json, &[("link", &link)], &format!("links are {link}"))?;
        return Ok(());
    };
    let steps = steps.with_context(|| {
        format!("what is it to be like between {a} and {b}? Say so with --rate, --delay, --jitter, --loss, --preset or --trace, or --none")
    })?;
    Lab::open(lab)?.set_way(a, b, &steps)?;
    let (words, sentence) = match &steps[..] {
        [] => ("none".to_owned(), format!("the way between {a} and {b} is like their links")),
        [only] => (only.conditions.to_string(), format!("between {a} and {b} it is {}", only.conditions)),
        [first, .., last] => (
            format!("{} to {}", first.conditions, last.conditions),
            format!("between {a} and {b} it changes along {} lines, for {:?}", steps.len(), last.at),
        ),
    };
    say(json, &[("between", a), ("and", b), ("conditions", &words)], &sentence)?;
    Ok(())
}

fn selftest(json: bool) -> anyhow::Result<ExitCode> {
    let mut all: Vec<Measured> = Vec::new();
    let mut shown = Ok(());
    selftest::run("selftest", |measured| {
        if json {
            shown = std::mem::replace(&mut shown, Ok(())).and_then(|()| output::json(measured));
        }
        all.push(measured.clone());
    })?;
    shown?;
    if !json {
        let mut table = Table::new(["LINK", "DELAY", "OFF BY", "P99", "RATE", "OFF BY", "LOST", "HOLDS"]);
        for measured in &all {
            table.row([
                measured.link.clone(),
                format!("{:.3} ms", measured.delay_ms),
                format!("{:+.3} ms", measured.delay_error_ms),
                format!("{:.3} ms", measured.delay_p99_ms),
                measured.rate.map(|rate| format!("{:.2} Mbit/s", rate / 1e6)).unwrap_or_default(),
                measured.rate_error.map(|error| format!("{:+.2} %", error * 100.0)).unwrap_or_default(),
                if measured.asked.loss > 0.0 {
                    format!("{:.2} %", measured.loss * 100.0)
                } else {
                    String::new()
                },
                if measured.holds { "yes" } else { "no" }.to_owned(),
            ]);
        }
        table.print()?;
    }
    let good = all.iter().all(|measured| measured.holds);
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn down(name: &str, json: bool) -> anyhow::Result<()> {
    Lab::down(name)?;
    say(json, &[("down", name)], &format!("lab {name} is down"))?;
    Ok(())
}

/// One object as JSON, or one line.
fn say(json: bool, object: &[(&str, &str)], sentence: &str) -> std::io::Result<()> {
    if json {
        let object: serde_json::Map<_, _> =
            object.iter().map(|(name, value)| ((*name).to_owned(), (*value).into())).collect();
        output::json(&object)
    } else {
        output::line(sentence)
    }
}

fn table(labs: &[LabStatus]) -> Table {
    let mut table = Table::new(["LAB", "HOST", "ADDRESS", "DAEMON", "LINK", "NAMESPACE"]);
    for lab in labs {
        if !lab.complete {
            table.row([lab.name.clone(), format!("remains of a lab: godwit lab down {}", lab.name)]);
        }
        for host in &lab.hosts {
            let daemon = match (host.daemon, &host.socket, lab.daemons) {
                _ if host.machine.is_some() && host.emulator.is_none() => "no power".to_owned(),
                _ if host.machine.is_some() => "in the machine".to_owned(),
                (Some(pid), ..) => pid.to_string(),
                (None, Some(_), true) => "does not run".to_owned(),
                _ => "-".to_owned(),
            };
            let link = if lab.link_program.is_some() { shape(lab.link) } else { "down".to_owned() };
            table.row([
                lab.name.clone(),
                host.name.clone(),
                host.address.to_string(),
                daemon,
                link,
                if host.present { display(host.namespace.display()) } else { "gone".to_owned() },
            ]);
        }
    }
    table
}

fn shape(link: Option<Link>) -> String {
    link.map_or_else(|| "unshaped".to_owned(), display)
}

fn display(value: impl Display) -> String {
    value.to_string()
}

/// A command's exit code; 128 and the signal's number if one ended it, as shells have it.
fn passed_on(status: ExitStatus) -> ExitCode {
    let code = status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX))
}
