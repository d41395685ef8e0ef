//! The links of one lab: see `godwit_lab::switch`. `godwit lab up` starts it; there is no need to do so by hand.

use std::path::PathBuf;

use clap::Parser;
use godwit_lab::{Link, switch};

/// The links of one lab, started by `godwit lab up`.
#[derive(Parser)]
#[command(version)]
struct Options {
    /// Path of the control socket to make.
    #[arg(long)]
    control: PathBuf,
    /// Rate and one-way delay, such as 1gbit,1ms.
    #[arg(long)]
    link: Option<Link>,
    /// A host and its network namespace, NAME=PATH; once for each host.
    #[arg(long = "host", required = true, value_parser = host)]
    hosts: Vec<(String, PathBuf)>,
}

fn host(text: &str) -> Result<(String, PathBuf), String> {
    let (name, path) = text.split_once('=').ok_or("a host is given as NAME=PATH")?;
    Ok((name.to_owned(), PathBuf::from(path)))
}

fn main() -> anyhow::Result<()> {
    let Options { control, link, hosts } = Options::parse();
    Ok(switch::run(switch::Arguments { control, hosts, link })?)
}
