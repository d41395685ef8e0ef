//! `godwit lab`: nodes and a client host on this machine, in network namespaces.

use std::{
    fmt::Display,
    os::unix::process::ExitStatusExt as _,
    process::{ExitCode, ExitStatus},
};

use clap::Subcommand;
use godwit_lab::{Lab, LabConfig, LabStatus, Link};

use crate::{
    cli::Global,
    output::{self, Table},
    verbs::demo,
};

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
    /// Ends with an error if any answer was lost.
    Demo(demo::Args),
}

/// What is done to a lab itself.
#[derive(Debug, Subcommand)]
enum BedVerb {
    /// Bring a lab up: its nodes, one client host, and the links between them
    Up {
        /// Name of the lab [default: that of --lab]
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        /// Names of the nodes; the first founds the cluster
        #[arg(long, value_delimiter = ',', required = true, value_name = "NAME,NAME…")]
        nodes: Vec<String>,
        /// Rate and one-way delay of each host's link: 1gbit,1ms [default: unshaped]
        #[arg(long, value_name = "RATE[,DELAY]")]
        link: Option<Link>,
    },
    /// Take a lab down with everything in it, also what a crash left of it
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
    /// Give all links another rate and delay
    Link {
        /// 1gbit,1ms; none: unshaped
        #[arg(value_name = "RATE[,DELAY]")]
        link: Option<Link>,
    },
    /// Kill the daemon of a node with SIGKILL; its services go on
    Kill {
        /// The node
        host: String,
    },
    /// Start the daemon of a node that does not run
    Start {
        /// The node
        host: String,
    },
}

/// The lab's functions block, so they run on a thread that may.
pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    match args.verb {
        LabVerb::Demo(args) => demo::run(args, global).await,
        LabVerb::Bed(verb) => {
            let (lab, json) = (global.lab.clone(), global.json);
            tokio::task::spawn_blocking(move || perform(verb, lab, json)).await?
        }
    }
}

fn perform(verb: BedVerb, lab: String, json: bool) -> anyhow::Result<ExitCode> {
    match verb {
        BedVerb::Up { name, nodes, link } => {
            let mut config = LabConfig::new(name.unwrap_or(lab), nodes);
            config.link = link;
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
        BedVerb::Link { link } => {
            Lab::open(&lab)?.set_link(link)?;
            let link = shape(link);
            say(json, &[("link", &link)], &format!("links are {link}"))?;
        }
        BedVerb::Kill { host } => {
            Lab::open(&lab)?.stop_node(&host)?;
            say(json, &[("killed", &host)], &format!("godwitd of {host} is killed"))?;
        }
        BedVerb::Start { host } => {
            Lab::open(&lab)?.start_node(&host)?;
            say(json, &[("started", &host)], &format!("godwitd of {host} answers"))?;
        }
    }
    Ok(ExitCode::SUCCESS)
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
