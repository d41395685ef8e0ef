//! What a destination is told of the processes of a service that may change its instruction set, before it answers; and of
//! those at rest, with the images.

use std::ops::Range;

use godwit_crossing::{Area, Name, Owner, Process, Record, RecordError};

/// Most areas of all processes that are told: a message has one MiB at most. Those of further processes are seen in the
/// images alone.
const MOST_AREAS: usize = 20_000;

/// Most bytes of all else that is told of processes.
const MOST_BYTES: usize = 384 << 10;

/// Part of `Open`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CrossingOffer {
    /// Whether it is to go on under the destination's executables even where that has the same instruction set.
    #[prost(bool, tag = "1")]
    pub always: bool,
    /// The bytes of a page of the source's kernel.
    #[prost(uint64, tag = "2")]
    pub page_bytes: u64,
    /// What runs.
    #[prost(message, repeated, tag = "3")]
    pub processes: Vec<ProcessOffer>,
}

/// A process, as [`Process`] has it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ProcessOffer {
    /// PID inside of the service.
    #[prost(uint32, tag = "1")]
    pub pid: u32,
    /// The path of its executable in the service, or what the kernel calls it.
    #[prost(bytes = "vec", tag = "2")]
    pub executable: Vec<u8>,
    /// That is on another mount than its root directory.
    #[prost(bool, tag = "3")]
    pub is_on_mount: bool,
    /// What it says about rest, as it is in its memory; empty where it says nothing.
    #[prost(bytes = "vec", tag = "4")]
    pub record: Vec<u8>,
    /// What it has mapped.
    #[prost(message, repeated, tag = "5")]
    pub areas: Vec<AreaOffer>,
    /// It has a seccomp filter.
    #[prost(bool, tag = "6")]
    pub has_filter: bool,
    /// It has rings of io_uring or of asynchronous input and output.
    #[prost(bool, tag = "7")]
    pub has_rings: bool,
}

/// Mapped memory.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct AreaOffer {
    /// Its first address.
    #[prost(uint64, tag = "1")]
    pub start: u64,
    /// That behind it.
    #[prost(uint64, tag = "2")]
    pub end: u64,
    /// It may be executed.
    #[prost(bool, tag = "3")]
    pub is_executable: bool,
    /// Who has put it there.
    #[prost(enumeration = "OwnerOffer", tag = "4")]
    pub owner: i32,
}

/// Who has put memory where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum OwnerOffer {
    /// The program.
    Program = 0,
    /// The kernel, for its own.
    Kernel = 1,
    /// The kernel, as the first stack.
    FirstStack = 2,
}

/// A process at rest in the dump. Part of `ImagesEnd`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct AtRest {
    /// PID inside of the service.
    #[prost(uint32, tag = "1")]
    pub pid: u32,
    /// What it says about rest, as it is in its memory.
    #[prost(bytes = "vec", tag = "2")]
    pub record: Vec<u8>,
    /// The path of its executable in the service.
    #[prost(bytes = "vec", tag = "3")]
    pub executable: Vec<u8>,
}

impl CrossingOffer {
    /// That of these processes, with the records as they are in their memory; none where a message has no room for them.
    pub(crate) fn of(processes: Vec<(Process, Vec<u8>)>, page_bytes: u64, always: bool) -> Option<Self> {
        let bytes = |(process, record): &(Process, Vec<u8>)| process.executable.len() + record.len() + 32;
        if processes.iter().map(bytes).sum::<usize>() > MOST_BYTES {
            return None;
        }
        let mut left = MOST_AREAS;
        let of_process = |(process, record): (Process, Vec<u8>)| {
            let Process { name, executable, is_on_mount, mut areas, has_filter, has_rings, .. } = process;
            if areas.len() > left {
                areas.clear();
            }
            left -= areas.len();
            ProcessOffer {
                pid: name.pid,
                executable,
                is_on_mount,
                record,
                areas: areas.iter().map(AreaOffer::from).collect(),
                has_filter,
                has_rings,
            }
        };
        Some(Self { always, page_bytes, processes: processes.into_iter().map(of_process).collect() })
    }

    /// The processes; none where they are not as a source tells them.
    #[must_use]
    pub fn processes(&self) -> Option<Vec<Process>> {
        self.processes.iter().map(ProcessOffer::process).collect()
    }
}

impl ProcessOffer {
    fn process(&self) -> Option<Process> {
        let record = match self.record.first_chunk() {
            Some(record) => Record::decode(record),
            None => Err(RecordError::Foreign),
        };
        Some(Process {
            name: Name { pid: self.pid, name: String::from_utf8_lossy(&self.executable).into_owned() },
            executable: self.executable.clone(),
            is_on_mount: self.is_on_mount,
            record,
            areas: self.areas.iter().map(AreaOffer::area).collect::<Option<_>>()?,
            has_filter: self.has_filter,
            has_rings: self.has_rings,
        })
    }
}

impl From<&Area> for AreaOffer {
    fn from(area: &Area) -> Self {
        let owner = match area.owner {
            Owner::Program => OwnerOffer::Program,
            Owner::Kernel => OwnerOffer::Kernel,
            Owner::FirstStack => OwnerOffer::FirstStack,
        };
        let Range { start, end } = area.range;
        Self { start, end, is_executable: area.is_executable, owner: owner.into() }
    }
}

impl AreaOffer {
    fn area(&self) -> Option<Area> {
        let owner = match OwnerOffer::try_from(self.owner).ok()? {
            OwnerOffer::Program => Owner::Program,
            OwnerOffer::Kernel => Owner::Kernel,
            OwnerOffer::FirstStack => Owner::FirstStack,
        };
        let Self { start, end, is_executable, .. } = *self;
        (start < end).then_some(Area { range: start..end, is_executable, owner })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn process(areas: usize) -> Process {
        let area = |number: usize| Area {
            range: number as u64 * 0x2000..number as u64 * 0x2000 + 0x1000,
            is_executable: number == 0,
            owner: [Owner::Program, Owner::Kernel, Owner::FirstStack][number % 3],
        };
        Process {
            name: Name { pid: 7, name: "/bin/service".into() },
            executable: b"/bin/service".to_vec(),
            is_on_mount: true,
            record: Err(RecordError::Foreign),
            areas: (0..areas).map(area).collect(),
            has_filter: true,
            has_rings: false,
        }
    }

    #[test]
    fn what_is_told_is_what_was_seen() {
        let offer = CrossingOffer::of(vec![(process(4), Vec::new())], 4096, true).unwrap();
        assert_eq!(offer.processes().unwrap(), [process(4)]);
        let mut damaged = offer.clone();
        damaged.processes[0].areas[1].end = 0;
        assert_eq!(damaged.processes(), None);
        damaged = offer;
        damaged.processes[0].areas[1].owner = 9;
        assert_eq!(damaged.processes(), None);
    }

    #[test]
    fn the_message_of_many_processes_is_not_too_long() {
        let many = (0..5).map(|_| (process(MOST_AREAS / 4), Vec::new())).collect();
        let offer = CrossingOffer::of(many, 4096, false).unwrap();
        let told: Vec<_> = offer.processes.iter().map(|process| process.areas.len()).collect();
        assert_eq!(told, [MOST_AREAS / 4, MOST_AREAS / 4, MOST_AREAS / 4, MOST_AREAS / 4, 0]);
        assert!(prost::Message::encoded_len(&offer) < 1 << 19);
        let long = |length| Process { executable: vec![b'x'; length], ..process(0) };
        let many = |length| (0..90).map(|_| (long(length), vec![0; 80])).collect();
        assert!(CrossingOffer::of(many(4096), 4096, true).is_some());
        assert_eq!(CrossingOffer::of(many(4300), 4096, true), None);
    }
}
