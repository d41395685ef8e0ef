//! Named points of a migration at which a test can make this process die or wait.
//!
//! `GODWIT_FAILPOINTS=POINT=exit` ends the process at once as SIGKILL would; `GODWIT_FAILPOINTS=POINT=wait:DIR`
//! makes `DIR/POINT.reached` and goes on when `DIR/POINT.go` is there; where it is there already, the
//! point is passed without a mark. `GODWIT_FAILPOINTS=POINT=error` makes what is done there fail. Several are
//! separated by commas. Only the user who starts the daemon can set its environment; unset, a point costs a comparison.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

/// Between two checks for the mark that lets it continue.
const PAUSE: Duration = Duration::from_millis(5);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Action {
    Exit,
    Error,
    Wait(PathBuf),
}

fn failpoints() -> &'static [(String, Action)] {
    static FAILPOINTS: OnceLock<Vec<(String, Action)>> = OnceLock::new();
    FAILPOINTS.get_or_init(|| parse(&std::env::var("GODWIT_FAILPOINTS").unwrap_or_default()))
}

fn parse(text: &str) -> Vec<(String, Action)> {
    text.split(',')
        .filter_map(|failpoint| {
            let (point, action) = failpoint.split_once('=')?;
            let action = match action.split_once(':') {
                Some(("wait", directory)) => Action::Wait(directory.into()),
                None if action == "exit" => Action::Exit,
                None if action == "error" => Action::Error,
                _ => return None,
            };
            Some((point.to_string(), action))
        })
        .collect()
}

/// Passes a point of the given name.
pub async fn point(name: &str) {
    for (_, action) in failpoints().iter().filter(|(point, _)| point == name) {
        match action {
            Action::Error => {}
            Action::Wait(directory) if directory.join(format!("{name}.go")).exists() => {}
            Action::Wait(directory) => {
                tracing::warn!(point = name, "failpoint: waiting");
                wait(directory, name).await;
            }
            Action::Exit => {
                tracing::warn!(point = name, "failpoint: exiting");
                std::process::abort();
            }
        }
    }
}

/// Passes a point of the given name on a thread that may block.
pub fn blocking_point(name: &str) {
    blocking_point_until(name, || false);
}

/// The same; it waits no longer than until this is so.
pub(crate) fn blocking_point_until(name: &str, is_over: impl Fn() -> bool) {
    for (_, action) in failpoints().iter().filter(|(point, _)| point == name) {
        match action {
            Action::Error => {}
            Action::Wait(directory) if directory.join(format!("{name}.go")).exists() => {}
            Action::Wait(directory) => {
                let go = reached(directory, name);
                while !go.exists() && !is_over() {
                    std::thread::sleep(PAUSE);
                }
            }
            Action::Exit => std::process::abort(),
        }
    }
}

/// Whether what is done at this point is to fail.
pub(crate) fn fails(name: &str) -> bool {
    #[cfg(test)]
    if FAILING.with_borrow(|failing| failing.contains(&name.to_owned())) {
        return true;
    }
    failpoints().iter().any(|(point, action)| point == name && *action == Action::Error)
}

#[cfg(test)]
thread_local! {
    static FAILING: std::cell::RefCell<Vec<String>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Lets what is done at these points of this thread fail, until this is dropped.
#[cfg(test)]
pub(crate) fn failing(points: &[&str]) -> impl Drop + use<> {
    struct Failing;
    impl Drop for Failing {
        fn drop(&mut self) {
            FAILING.with_borrow_mut(Vec::clear);
        }
    }
    FAILING.with_borrow_mut(|failing| *failing = points.iter().copied().map(str::to_owned).collect());
    Failing
}

async fn wait(directory: &Path, name: &str) {
    let go = reached(directory, name);
    while !go.exists() {
        tokio::time::sleep(PAUSE).await;
    }
}

/// Marks a point; the file to wait for.
fn reached(directory: &Path, name: &str) -> PathBuf {
    if let Err(error) = std::fs::write(directory.join(format!("{name}.reached")), b"") {
        tracing::error!(%error, "cannot mark a failpoint");
    }
    directory.join(format!("{name}.go"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_and_nonsense_is_passed_over() {
        let faults = parse("a=exit,b=wait:/tmp/x,c=,d,=,e=burn,f=error");
        let expected = [("a", Action::Exit), ("b", Action::Wait("/tmp/x".into())), ("f", Action::Error)];
        assert_eq!(faults, expected.map(|(point, action)| (point.to_owned(), action)));
    }
}
