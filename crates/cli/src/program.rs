//! What a program of godwit's does around its verb: it reads the command line, runs the verb, and says why it failed.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use clap::{
    Parser,
    error::{ContextKind, ErrorKind},
};

use crate::output;

/// Exit code for a command line that cannot be understood.
const USAGE: u8 = 2;

/// Reads the command line; else says what is wrong with it, or prints the help that was asked for. `instead` may have a
/// better sentence for what is wrong with these words.
///
/// # Errors
/// The exit code, when there is nothing more to do.
pub fn parse<P: Parser>(instead: fn(&clap::Error, &[String]) -> Option<String>) -> Result<P, ExitCode> {
    P::try_parse().map_err(|error| {
        let words: Vec<_> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
        match instead(&error, &words) {
            Some(sentence) => {
                output::note(&format!("Error: {sentence}"));
                ExitCode::from(USAGE)
            }
            None => explain_usage(error),
        }
    })
}

/// Runs a verb to its end; `code_of_failure` is the exit code where the program itself fails.
pub fn run(verb: impl Future<Output = anyhow::Result<ExitCode>>, code_of_failure: u8) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&anyhow::Error::new(error), code_of_failure),
    };
    let outcome = runtime.block_on(verb);
    // A thread may still wait in a read of standard input, which nothing can interrupt.
    runtime.shutdown_background();
    match outcome {
        Ok(code) => code,
        Err(error) => fail(&error, code_of_failure),
    }
}

/// One sentence on standard error; silence when whoever read our output has gone.
fn fail(error: &anyhow::Error, code: u8) -> ExitCode {
    let reader_gone = error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe);
    if reader_gone {
        return ExitCode::SUCCESS;
    }
    output::note(&format!("Error: {}", sentence(error)));
    ExitCode::from(code)
}

/// The error and its causes, each said once: some errors repeat their cause in their own words.
fn sentence(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Help and version as clap writes them; errors in godwit's own form.
fn explain_usage(mut error: clap::Error) -> ExitCode {
    // Its advice is to put `--` before a flag that it does not know, which makes a command of the flag.
    if error.kind() == ErrorKind::UnknownArgument {
        error.remove(ContextKind::Suggested);
    }
    if matches!(
        error.kind(),
        ErrorKind::DisplayHelp
            | ErrorKind::DisplayVersion
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    ) {
        let _ = error.print();
        return if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
    }
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let _ = write!(io::stderr(), "Error: {text}");
    ExitCode::from(USAGE)
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    #[test]
    fn a_cause_is_said_once() {
        let error = anyhow!("no such file").context("running ping failed: no such file").context("lab exec");
        assert_eq!(super::sentence(&error), "lab exec: running ping failed: no such file");
    }
}
