//! Why a process does not come to rest: what a thread of it does.

use std::fs;
use std::path::Path;

use godwit_memory::process::Process as Handle;

/// A thread that keeps a process from coming to rest, and what it does: the first that is not asleep, or sleeps where no
/// thread does that stands still.
pub(crate) fn waits(process: &Handle) -> String {
    let one = process.directory().ok();
    let all = one.as_deref().and_then(Path::parent).map(threads).unwrap_or_default();
    all.iter()
        .min_by_key(|thread| thread.rank())
        .map_or_else(|| "it has no thread".to_owned(), Thread::sentence)
}

fn threads(directory: &Path) -> Vec<Thread> {
    let all = fs::read_dir(directory).into_iter().flatten().flatten();
    let told = all.filter_map(|thread| {
        let text = |name: &str| fs::read_to_string(thread.path().join(name)).ok();
        let status = text("status")?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        // Inside of the service, as its own tools show it.
        let id = field("NSpid:")?.split_whitespace().last()?.to_owned();
        let state = field("State:")?.chars().next()?;
        let place = text("wchan").unwrap_or_default();
        Some(Thread { id, state, place })
    });
    told.filter(|thread| !"ZX".contains(thread.state)).collect()
}

/// What a thread does.
struct Thread {
    id: String,
    state: char,
    /// The kernel's function in which it sleeps.
    place: String,
}

impl Thread {
    /// The lower, the more it is to blame.
    fn rank(&self) -> u32 {
        match self.state {
            'D' | 'T' | 't' => 0,
            'R' => 1,
            // Those that stand still sleep there, and others.
            'S' if self.place.contains("futex") || self.place.contains("sigtimedwait") => 3,
            _ => 2,
        }
    }

    fn sentence(&self) -> String {
        let Self { id, state, place } = self;
        let place = if place.is_empty() || place == "0" { String::new() } else { format!(" ({place})") };
        match state {
            'R' => format!("its thread {id} computes"),
            'T' => format!("its thread {id} is stopped by a signal"),
            't' => format!("its thread {id} is traced"),
            'D' => format!("its thread {id} waits for a device{place}"),
            _ => format!("its thread {id} waits in the kernel{place}"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::Command;
    use std::time::{Duration, Instant};

    use super::super::processes::open;
    use super::*;

    #[test]
    fn what_keeps_a_process_from_rest_is_said_of_the_thread_that_is_most_to_blame() {
        let thread = |id: &str, state, place: &str| Thread { id: id.into(), state, place: place.into() };
        let all = [
            thread("1", 'S', "futex_wait_queue"),
            thread("2", 'S', "do_sys_poll"),
            thread("3", 'R', "0"),
            thread("4", 'D', "nfs_wait"),
        ];
        let ranks: Vec<_> = all.iter().map(Thread::rank).collect();
        assert!(ranks.is_sorted_by(|more, less| more > less), "{ranks:?}");
        assert_eq!(all[1].sentence(), "its thread 2 waits in the kernel (do_sys_poll)");
        assert_eq!(all[2].sentence(), "its thread 3 computes");
        assert_eq!(all[3].sentence(), "its thread 4 waits for a device (nfs_wait)");

        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = open(child.id()).unwrap().unwrap();
        process.signal(libc::SIGSTOP).unwrap();
        let due = format!("its thread {} is stopped by a signal", child.id());
        // The kernel tells nobody but the parent when it has stopped.
        let begun = Instant::now();
        while waits(&process) != due {
            assert!(begun.elapsed() < Duration::from_secs(60), "{}", waits(&process));
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(waits(&process), "it has no thread");
    }
}
