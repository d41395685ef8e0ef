//! nftables by its program: each script is one transaction, in this thread's network namespace or another.
//!
//! Callers hold locks while nft works, so it has a time limit.

use std::io::ErrorKind;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};
use tokio::runtime::Handle;

use crate::{NetworkError, enter};

/// Much longer than a table of a thousand ports takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);

/// Has nft do what the script says, all of it or, with an error, nothing.
pub(crate) async fn run(action: &str, script: &str) -> Result<(), NetworkError> {
    finish(action, call(&["-f", "-"], script).await?)
}

/// The same in the network namespace that is mounted there.
pub(crate) async fn run_in(netns: &Path, action: &str, script: &str) -> Result<(), NetworkError> {
    let action = format!("{action} the namespace {}", netns.display());
    let runtime = Handle::current();
    // It inherits the namespace of the thread that starts it.
    let started = enter(netns, move || {
        let _runtime = runtime.enter();
        start(command(&["-f", "-"]))
    });
    finish(&action, talk(started.await??, script, LIMIT).await?)
}

/// Runs nft with `script` on its standard input.
pub(crate) async fn call(arguments: &[&str], script: &str) -> Result<Output, NetworkError> {
    talk(start(command(arguments))?, script, LIMIT).await
}

/// Why nft did not, in its own words.
pub(crate) fn refused(action: &str, stderr: &[u8]) -> NetworkError {
    let text = String::from_utf8_lossy(stderr);
    let message = text.lines().next().unwrap_or("it gave no reason").trim().to_owned();
    NetworkError::Nft { action: action.to_owned(), message }
}

/// Whether nft says that there is no such thing.
pub(crate) fn is_missing(stderr: &[u8]) -> bool {
    String::from_utf8_lossy(stderr).contains("No such file or directory")
}

fn finish(action: &str, output: Output) -> Result<(), NetworkError> {
    if output.status.success() { Ok(()) } else { Err(refused(action, &output.stderr)) }
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new("nft");
    command.args(arguments);
    command
}

fn start(mut command: Command) -> Result<Child, NetworkError> {
    let streams = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    streams.kill_on_drop(true).spawn().map_err(NetworkError::NoNft)
}

async fn talk(mut child: Child, script: &str, limit: Duration) -> Result<Output, NetworkError> {
    let talk = async {
        if let Some(mut stdin) = child.stdin.take() {
            match stdin.write_all(script.as_bytes()).await {
                // It ended without reading; its own words say why.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
                other => other.map_err(NetworkError::system("write to nft"))?,
            }
        }
        child.wait_with_output().await.map_err(NetworkError::system("read from nft"))
    };
    // Out of time, what waits is dropped, and nft is killed with it.
    tokio::time::timeout(limit, talk).await.map_err(|_| NetworkError::NftLate { seconds: limit.as_secs() })?
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// A shell in nft's place, which never answers.
    #[tokio::test]
    async fn one_that_hangs_is_killed_at_the_limit() {
        for script in ["", &"x".repeat(1 << 20)] {
            let mut command = Command::new("sh");
            command.args(["-c", "exec sleep 1000"]);
            let child = start(command).unwrap();
            let status = format!("/proc/{}/stat", child.id().unwrap());
            let error = talk(child, script, Duration::from_secs(2)).await.unwrap_err();
            assert!(matches!(error, NetworkError::NftLate { seconds: 2 }), "{error}");
            // SIGKILL is sent before the error is returned; the kernel needs a moment.
            let ended = async {
                while std::fs::read_to_string(&status).is_ok_and(|stat| !stat.contains(") Z ")) {
                    tokio::task::yield_now().await;
                }
            };
            tokio::time::timeout(Duration::from_secs(30), ended).await.expect("it is killed");
        }
    }
}
