//! Why processes cannot go on under another executable, in a sentence that names the process.

use std::fmt;
use std::ops::Range;

use godwit_isa_plan::Set;

use crate::record::RecordError;
use crate::target::called;
use crate::threads::ThreadError;

/// A process, for those who read of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// PID inside of the PID namespace.
    pub pid: u32,
    /// The path of its executable, or what the kernel calls it.
    pub name: String,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({})", self.pid, self.name.escape_debug())
    }
}

/// A service cannot go on at a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// The plan of addresses is one of pages.
    #[error(
        "this node's pages have {here} bytes and those of the other node {there}, and both must have 4096; choose another node"
    )]
    PageSize {
        /// Where it is.
        here: u64,
        /// Where it is to go.
        there: u64,
    },
    /// What it has open.
    #[error(
        "{what} is open with the flags {flags:#o}, of which some have no counterpart on another instruction set; close it before the move"
    )]
    Flags {
        /// The path of a file, or the number in the images of something else.
        what: String,
        /// As open(2) has them.
        flags: u32,
    },
    /// One of its processes.
    #[error("{process} {cause}")]
    Process {
        /// Which.
        process: Name,
        /// Why.
        cause: Cause,
    },
}

/// What of a process stands in the way.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// Its executable is none of ours.
    #[error("was not built by godwit-cc for {}", called(*.0))]
    NotBuilt(Set),
    /// Of another godwit-cc.
    #[error("was built by another version of godwit-cc: {0}; build it anew")]
    Record(RecordError),
    /// The target has no such file.
    #[error("has no executable for {} at that path in the image; add that platform to the image", called(*.0))]
    NoTwin(Set),
    /// Its executable is not in the root filesystem.
    #[error(
        "has its executable in a volume or on another mount; put it into the image, where each platform has its own"
    )]
    OnMount,
    /// Nothing says which of them its executable is seen in.
    #[error(
        "is of a service with several mount namespaces, of which each can have other files; run it without those of its own"
    )]
    MountNamespaces,
    /// What the container has at that path is not its image's.
    #[error("has an executable that was changed in the container; put the change into the image")]
    Changed,
    /// The target's is another program.
    #[error(
        "is of another build than its executable for {}; build both at once, and put both into the image",
        called(*.0)
    )]
    OtherBuild(Set),
    /// The target's executable is one of another machine.
    #[error("has an executable for {} in the image where one for {} belongs", called(*.there), called(*.wanted))]
    OtherSet {
        /// What it is for.
        there: Set,
        /// What the node has.
        wanted: Set,
    },
    /// It has code that did not come from its executable.
    #[error(
        "has memory from {start:#x} to {end:#x} that may be executed and is not of its executable",
        start = .0.start,
        end = .0.end
    )]
    Executable(Range<u64>),
    /// It has memory where no program has any.
    #[error(
        "has memory from {start:#x} to {end:#x}, where programs of godwit-cc have none",
        start = .0.start,
        end = .0.end
    )]
    Outside(Range<u64>),
    /// It has its variables mapped in another way than its executable says.
    #[error(
        "has changed how its variables from {start:#x} to {end:#x} are mapped (mmap, mprotect), which cannot go along",
        start = .0.start,
        end = .0.end
    )]
    Variables(Range<u64>),
    /// The kernel has been told of something at an address where no program has it.
    #[error("has its {what} at {address:#x}, where programs of godwit-cc have none")]
    Bounds {
        /// What is there.
        what: &'static str,
        /// Where.
        address: u64,
    },
    /// It has memory of a kind that is not known here.
    #[error(
        "has memory from {start:#x} to {end:#x} of a kind that cannot change its instruction set",
        start = .0.start,
        end = .0.end
    )]
    Kind(Range<u64>),
    /// Its memory does not fit the addresses of the target.
    #[error(
        "has memory at {address:#x}, and processes of the other node end at {end:#x}; choose another node"
    )]
    TaskSize {
        /// Where.
        address: u64,
        /// What the target has.
        end: u64,
    },
    /// System calls have other numbers on another set.
    #[error(
        "has a seccomp filter, which would refuse other system calls on another instruction set; start it without"
    )]
    Filter,
    /// The kernel writes into its memory.
    #[error("uses io_uring or asynchronous input and output of the kernel (io_setup), which cannot move")]
    Rings,
    /// Requests are not heard yet.
    #[error("has not begun to listen for requests to rest; try again")]
    NotReady,
    /// It was at as many rests as can be asked for.
    #[error("has been asked to rest as often as it can be; start the service anew")]
    NoNumber,
    /// It runs.
    #[error("was not at rest when it was dumped; move the service again")]
    NotAtRest,
    /// A request to go on is in its queue of signals.
    #[error("was told to go on in place while it was dumped; move the service again")]
    GoesOn,
    /// Other threads were dumped than stand still.
    #[error("has {there} threads in the images, and {said} were at rest; move the service again")]
    Threads {
        /// In its record.
        said: u32,
        /// In the images.
        there: usize,
    },
    /// A thread is none of the runtime's.
    #[error("has a thread that its runtime does not know: {0}")]
    Thread(ThreadError),
}
