//! Whether the pages of `docs/` tell of all verbs and flags: asked by the tests of both programs.

use std::{fs, path::Path};

/// A page of `docs/`; empty if there is none.
#[must_use]
pub fn page(file: &str) -> String {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    fs::read_to_string(docs.join(file)).unwrap_or_default()
}

/// What is missing of a command, and of those below it, in the pages about it.
#[must_use]
pub fn missing(command: &clap::Command, name: &str, pages: &str) -> Vec<String> {
    let mut lacking = Vec::new();
    if !pages.contains(name) {
        lacking.push(name.to_owned());
    }
    for flag in command.get_arguments().filter(|flag| !flag.is_hide_set()) {
        let Some(long) = flag.get_long().filter(|long| !matches!(*long, "help" | "version")) else {
            continue;
        };
        let word = format!("--{long}");
        let named = |at: usize| {
            let next = pages[at + word.len()..].chars().next();
            next.is_none_or(|next| !next.is_ascii_alphanumeric() && next != '-')
        };
        if !pages.match_indices(&word).any(|(at, _)| named(at)) {
            lacking.push(format!("{name} {word}"));
        }
    }
    for below in command.get_subcommands().filter(|below| below.get_name() != "help" && !below.is_hide_set())
    {
        lacking.extend(missing(below, &format!("{name} {}", below.get_name()), pages));
    }
    lacking
}
