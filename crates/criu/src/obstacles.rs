//! What CRIU cannot dump, looked for in `/proc` while the service runs and before anything is done.
//!
//! CRIU itself says so only when the service is frozen and all but its last pages have been sent.
//!
//! - [`tasks`]: processes in a state that cannot be restored.
//! - [`files`], [`devices`], [`sockets`], [`epoll`], [`terminals`]: what they have open.
//! - [`mappings`]: what they have mapped.
//! - [`nameless`]: files that a restore would find by no name.
//! - [`memory`]: what they have reserved, where CRIU is not godwit's, and what a destination cannot restore of it.
//! - [`unix`]: connections that have not been accepted yet, or that go out of the container.
//!
//! A check stops nothing: processes come and go meanwhile, and much of what it finds passes by
//! itself. An obstacle that two checks find is more certain; see [`Obstacle`]. What is looked for
//! is what CRIU 4.2 refuses in every case; where that depends on more than `/proc` shows, nothing is said.

mod devices;
mod epoll;
mod files;
mod mappings;
mod memory;
mod nameless;
mod sockets;
mod tasks;
mod terminals;
mod unix;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::Path;

pub use memory::{Restores, most_at_once, not_restored};
pub use unix::UnixSockets;

use tasks::Task;

use crate::Places;

/// Something that CRIU cannot dump. Equal to another when it is the same thing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    /// The process, in the node's PID namespace.
    pub pid: u32,
    /// The same in the PID namespace of the service.
    pub inside: u32,
    /// The process's name (`comm`).
    pub name: String,
    /// What is the matter with it: a verb and its objects.
    pub what: String,
    /// Why that is an obstacle, and what to do about it.
    pub why: &'static str,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, inside, name, what, why } = self;
        write!(f, "process {pid} ({name}, PID {inside} in the service) {what}, {why}")
    }
}

impl Obstacle {
    fn new(task: &Task, what: String, why: &'static str) -> Self {
        Self { pid: task.pid, inside: task.inside, name: task.name.clone(), what, why }
    }
}

/// What to check.
#[derive(Debug)]
pub struct Subject<'a> {
    /// `/proc`.
    pub proc: &'a Path,
    /// The main process of the service.
    pub main: u32,
    /// All of its processes, in the node's PID namespace.
    pub processes: &'a [u32],
    /// The unix sockets of its network namespace, where they can be asked for.
    pub unix: Option<&'a UnixSockets>,
    /// Where its files are, where that is known.
    pub places: Option<&'a Places>,
    /// Whether CRIU looks at the memory in a lazy dump: not [`Criu::lazy_external`](crate::Criu::lazy_external).
    pub looks_at_memory: bool,
}

impl Subject<'_> {
    /// Checks once, and returns all that it finds. It reads some files for each process and thread and some
    /// microseconds' worth for each open file: not for an asynchronous thread.
    #[must_use]
    pub fn check(&self) -> Vec<Obstacle> {
        let tasks: Vec<Task> = self.processes.iter().filter_map(|pid| tasks::read(self.proc, *pid)).collect();
        let mut found = tasks::obstacles(self.proc, &tasks, self.main);
        let mut seen = files::Seen::default();
        let most = if self.looks_at_memory { memory::most_at_once(self.proc) } else { None };
        for (place, task) in tasks.iter().enumerate() {
            found.extend(most.and_then(|most| memory::obstacle(self.proc, task, most)));
            found.extend(files::obstacles(self.proc, task, self.processes, place, &mut seen));
        }
        found.extend(seen.epolls.obstacles(&tasks));
        found.extend(seen.terminals.obstacles(&tasks));
        found.extend(nameless::elsewhere(self.proc, &tasks, &seen.files));
        if let Some(places) = self.places {
            found.extend(nameless::obstacles(self.proc, &tasks, self.main, places, &seen.files));
        }
        if let Some(main) = tasks.iter().find(|task| task.pid == self.main) {
            found.extend(files::message_queue(self.proc, main, &found));
        }
        if let Some(unix) = self.unix {
            match of_unix(self, unix, &tasks, &seen.unix) {
                Ok(obstacles) => found.extend(obstacles),
                // Then CRIU asks in vain as well, and says so.
                Err(error) => tracing::warn!(%error, "cannot list the unix sockets of a service"),
            }
        }
        found
    }
}

/// What is the matter with unix sockets that these processes have open: by inode, the place of one of them.
fn of_unix(
    subject: &Subject<'_>,
    unix: &UnixSockets,
    tasks: &[Task],
    sockets: &HashMap<u64, usize>,
) -> io::Result<Vec<Obstacle>> {
    let of = |inode: u64, what: String, why| {
        let task = tasks.get(*sockets.get(&inode)?)?;
        Some(Obstacle::new(task, what, why))
    };
    let waiting = unix.waiting()?;
    let waiting = waiting.iter().filter_map(|one| of(one.listener, one.what(), unix::WAITING));
    let network = |pid: u32| std::fs::read_link(subject.proc.join(pid.to_string()).join("ns/net")).ok();
    let here = network(subject.main);
    let is_here = |place: usize| {
        here.is_some() && tasks.get(place).is_some_and(|task: &Task| network(task.pid) == here)
    };
    let outside = unix.outside(sockets, is_here)?;
    let outside = outside.iter().filter_map(|one| of(one.inode, one.what(), unix::OUTSIDE));
    Ok(waiting.chain(outside).collect())
}

/// Those of one check that another one found as well.
#[must_use]
pub fn still_there(before: Vec<Obstacle>, now: &[Obstacle]) -> Vec<Obstacle> {
    before.into_iter().filter(|obstacle| now.contains(obstacle)).collect()
}

/// A sentence for each kind of obstacle: the first of the kind, and how many more there are.
#[must_use]
pub fn sentences(obstacles: &[Obstacle]) -> Vec<String> {
    let mut kinds: Vec<(&Obstacle, usize)> = Vec::new();
    for obstacle in obstacles {
        match kinds.iter_mut().find(|(first, _)| first.why == obstacle.why) {
            Some((_, count)) => *count += 1,
            None => kinds.push((obstacle, 1)),
        }
    }
    let sentence = |(first, count): (&Obstacle, usize)| match count {
        1 => first.to_string(),
        more => format!("{first} (and {} more like this)", more - 1),
    };
    kinds.into_iter().map(sentence).collect()
}
