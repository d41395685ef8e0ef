//! The compilers that are compared.

use anyhow::{Context as _, Result};
use godwit_isa_programs::compile::Compiler;

use crate::measure::Variant;

/// What tells where the time goes: each is the one before and one thing more. The last is godwit-cc as it is.
pub(crate) const PARTS: [(&str, &str); 4] = [
    ("one-program", "the same front end and musl, optimised as one program (`godwit-cc --plain`)"),
    ("data-stack", "locals with an address on the data stack, and the common layout"),
    ("polls", "polls"),
    ("checks", "tests behind calls"),
];

/// Other alignments of the plain build.
pub(crate) const ALIGNMENTS: [(&str, &str); 3] = [
    ("functions-64", "-falign-functions=64"),
    ("blocks-16", "-mllvm -align-all-blocks=4"),
    ("branches-32", "-mllvm -align-all-nofallthru-blocks=5"),
];

/// The compilers of a run.
#[derive(Debug)]
pub(crate) struct Compilers {
    godwit: String,
    runs: usize,
}

impl Compilers {
    /// With this godwit-cc, and this many runs of what both main compilers build.
    pub(crate) fn new(godwit: String, runs: usize) -> Self {
        Self { godwit, runs }
    }

    pub(crate) fn plain(&self) -> Variant {
        Variant { compiler: Compiler::plain_musl("plain", "-O2"), runs: self.runs }
    }

    pub(crate) fn godwit(&self) -> Result<Variant> {
        self.variant("godwit", &format!("{} -O2", self.godwit), ".x86_64", self.runs)
    }

    /// The builds between the two, fewer runs of each.
    pub(crate) fn parts(&self, names: &[&str]) -> Result<Vec<Variant>> {
        let runs = self.runs.min(3);
        names
            .iter()
            .map(|name| match *name {
                "one-program" => self.variant(name, &format!("{} -O2 --plain", self.godwit), ".x86_64", runs),
                _ => {
                    let command = format!("env GODWIT_LINK_MEASURE={name} {} -O2", self.godwit);
                    self.variant(name, &command, ".x86_64", runs)
                }
            })
            .collect()
    }

    pub(crate) fn alignments(&self) -> Vec<Variant> {
        ALIGNMENTS
            .iter()
            .map(|(name, flags)| {
                let mut compiler = Compiler::plain_musl(name, "-O2");
                compiler.command.extend(flags.split_whitespace().map(str::to_owned));
                Variant { compiler, runs: self.runs }
            })
            .collect()
    }

    fn variant(&self, name: &str, command: &str, suffix: &str, runs: usize) -> Result<Variant> {
        let compiler = Compiler::parse(&format!("{name}|{command}|{suffix}"))
            .with_context(|| format!("the compiler {name}"))?;
        Ok(Variant { compiler, runs })
    }
}
