//! `godwit image pack`: an image of programs that godwit-cc has built, without a daemon.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use godwit_api::v1::Entrypoint;
use godwit_pack::{PackError, Packed, Recipe, Run, Set, Twins};
use serde::Serialize;

use crate::{global::Global, output, values};

#[derive(Debug, clap::Args)]
#[command(
    override_usage = "godwit image pack [OPTIONS] --output FILE NAME PROGRAM[=PATH]...",
    after_long_help = "\
Examples:
  godwit-cc -O2 -o ledger ledger.c
  godwit image pack -o ledger.tar ledger:1 ./ledger
  godwit-cc -O2 --save-module -o ledger ledger.c && godwit image pack -o small.tar --platform amd64 --modules ledger:1 ./ledger
  godwit image pack -o web.tar --add ./root --cmd '[\"-p\", \"80\"]' web:3 ./httpd=/usr/sbin/httpd
  godwit run --name ledger --image ./ledger.tar"
)]
pub(super) struct Args {
    /// File to write: an OCI archive
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Directory whose files the image has, the same for both instruction sets; all are root's there
    #[arg(long, value_name = "DIR")]
    add: Option<PathBuf>,
    /// Program that the image runs, or words as a JSON array, or empty for none [default: the first PROGRAM]
    #[arg(long, value_name = "PROGRAM", value_parser = values::entrypoint)]
    entrypoint: Option<Entrypoint>,
    /// Argument of that program which a command of `godwit run` replaces, or words as a JSON array
    #[arg(long, value_name = "ARGUMENT", value_parser = values::entrypoint)]
    cmd: Option<Entrypoint>,
    /// Environment that the image has: NAME=VALUE, or NAME to take your own
    #[arg(short, long, value_name = "NAME[=VALUE]", value_parser = values::env)]
    env: Vec<String>,
    /// Directory inside the container that the program starts in
    #[arg(short, long, value_name = "DIR", value_parser = workdir)]
    workdir: Option<String>,
    /// User that runs the program: UID, UID:GID, or a name that the image knows
    #[arg(short, long)]
    user: Option<String>,
    /// Platform that the image is for, amd64 or arm64; can be repeated [default: both]
    #[arg(long, value_name = "PLATFORM", value_parser = platform)]
    platform: Vec<Set>,
    /// Keep the neutral modules of the programs in the image, from which `godwit image add-platform` makes executables
    #[arg(long)]
    modules: bool,
    /// Name of the image in the archive
    name: String,
    /// Programs: for ./ledger the files ./ledger.x86_64 and ./ledger.aarch64, which get the path /bin/ledger, or PATH
    #[arg(required = true, value_name = "PROGRAM[=PATH]", value_parser = program)]
    programs: Vec<Twins>,
}

/// A program, and where it is in the image.
fn program(text: &str) -> Result<Twins, PackError> {
    match text.rsplit_once('=') {
        Some((file, path)) => Twins::new(Path::new(file), Some(path)),
        None => Twins::new(Path::new(text), None),
    }
}

/// An instruction set by its platform.
fn platform(text: &str) -> Result<Set, &'static str> {
    match super::architecture(text)?.as_str() {
        "arm64" => Ok(Set::Aarch64),
        _ => Ok(Set::X86_64),
    }
}

/// A directory inside a container.
fn workdir(text: &str) -> Result<String, &'static str> {
    if text.starts_with('/') { Ok(text.to_owned()) } else { Err("it is not an absolute path") }
}

/// What was packed, as JSON.
#[derive(Serialize)]
struct Shown<'a> {
    image: &'a str,
    digest: &'a str,
    output: &'a Path,
    bytes: u64,
}

pub(super) fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let words = |given: Option<Entrypoint>| given.map(|given| given.words);
    let first = || args.programs.iter().take(1).map(Twins::path).collect();
    let run = Run {
        user: args.user.unwrap_or_default(),
        env: args.env.into_iter().filter(|entry| !entry.is_empty()).collect(),
        entrypoint: words(args.entrypoint).unwrap_or_else(first),
        cmd: words(args.cmd).unwrap_or_default(),
        working_dir: args.workdir.unwrap_or_default(),
    };
    let recipe = Recipe {
        name: args.name,
        programs: args.programs,
        sets: args.platform,
        modules: args.modules,
        files: args.add,
        run,
    };
    let Packed { digest, bytes } = recipe.write(&args.output)?;
    if global.json {
        output::json(&Shown { image: &recipe.name, digest: &digest, output: &args.output, bytes })?;
    } else {
        output::line(&format!("{}@{digest}", recipe.name))?;
    }
    Ok(ExitCode::SUCCESS)
}
