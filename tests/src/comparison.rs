//! The memory of all processes of a service, read from outside while they do not run, and compared.
//!
//! ```text
//! Snapshot::take(source's cgroup)      areas, rights, every page that there is
//! snapshot.differences(destination's)  the same processes, areas, rights and bytes; what was not
//!                                      populated reads as before too, looked at here and there
//! ```
//!
//! Processes are named by their PID inside the service. Private memory is read by
//! `process_vm_readv`, which at the destination waits for pages that are still to come, and where the
//! process itself may not read through `/proc/PID/mem`, which does not: of pages of that kind that
//! stay at the source until after the commit nobody can tell before it. Memory that is shared with others is read as the file it
//! is (`/proc/PID/map_files`), because its pages need not be in anybody's page table; where that is not as it was, as private
//! memory.
//!
//! Not compared: the content of the kernel's own mappings (vdso, vvar, vsyscall), which belong to the
//! node; numbers of devices and inodes, which are new at each node (but two areas that share one file
//! must do so afterwards); borders between areas that differ in nothing, which the kernel draws by
//! the history of the process.
#![expect(clippy::cast_possible_truncation, reason = "sizes of this machine's own memory")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Mutex,
    thread,
};

use nix::{
    sys::uio::{RemoteIoVec, process_vm_readv},
    unistd::Pid,
};
use rustix::fs::SeekFrom;

use crate::wait_for;

const PAGE: u64 = 4096;
/// Bytes read at once.
const PIECE: u64 = 1 << 20;
/// Entries of a page map read at once: those of 512 MiB.
const ENTRIES: u64 = 1 << 17;
/// Bits of an entry of `/proc/PID/pagemap` (Documentation/admin-guide/mm/pagemap.rst).
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
/// Pages of each area looked at although they are not populated.
const SAMPLES: u64 = 8;
/// Flags of `/proc/PID/smaps` that a program has asked for, and that therefore must move: rights,
/// sharing, growing down, locked, not to be inherited or dumped, huge pages or none, merging, wiping
/// on fork, and without reserve.
const FLAGS: [&str; 13] = ["rd", "wr", "ex", "sh", "gd", "lo", "dc", "dd", "hg", "nh", "mg", "wf", "nr"];
/// Processes at the destination that are read at once.
const READERS: usize = 8;
/// Differences that are told.
const TOLD: usize = 12;

/// What an area is a view of.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Backing {
    /// Private memory.
    Anonymous,
    /// Private, over a file of this name from this offset on.
    PrivateFile(String, u64),
    /// Shared, of the file with this name (or none) from this offset on.
    Shared(String, u64),
    /// Of the kernel.
    Kernel(String),
}

/// Device and inode.
type Identity = (String, u64);

/// One mapping.
#[derive(Clone, Debug)]
struct Area {
    start: u64,
    end: u64,
    flags: BTreeSet<&'static str>,
    backing: Backing,
    /// Device and inode of what is shared.
    identity: Identity,
    /// One of its borders in the kernel's list, by which its file is found.
    parts: Vec<(u64, u64)>,
}

/// One process.
#[derive(Debug)]
struct Process {
    areas: Vec<Area>,
    /// Populated pages, or pieces of shared files, by address.
    content: BTreeMap<u64, Content>,
    /// Pages that are not populated, and what they read as.
    samples: BTreeMap<u64, Content>,
}

#[derive(Debug, PartialEq, Eq)]
enum Content {
    Bytes(Vec<u8>),
    /// It cannot be read: a guard page.
    Refused,
}

/// What was seen of one process at the destination.
#[derive(Debug, Default)]
struct Compared {
    found: Vec<String>,
    /// Areas with the files behind them at the source and here.
    shared: Vec<(String, Identity, Identity)>,
}

/// The memory of a service at one moment.
#[derive(Debug)]
pub struct Snapshot {
    /// By PID in the service; nothing for a zombie.
    processes: BTreeMap<u32, Option<Process>>,
}

/// The processes of a service on a node of a lab, by PID inside: PIDs outside.
pub fn processes(lab: &str, node: &str, name: &str) -> BTreeMap<u32, u32> {
    let root = Path::new("/sys/fs/cgroup");
    let below = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    let cgroups = below.chain([root.to_owned()]);
    let lists = cgroups.filter_map(|cgroup| {
        fs::read_to_string(cgroup.join("godwit-lab").join(lab).join(node).join(name).join("cgroup.procs"))
            .ok()
    });
    let pids: BTreeSet<u32> =
        lists.flat_map(|text| text.lines().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()).collect();
    pids.into_iter()
        .filter_map(|pid| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
            let inside = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
            Some((inside.split_whitespace().last()?.parse().ok()?, pid))
        })
        .collect()
}

impl Snapshot {
    /// Reads all memory of these processes, which must not run.
    pub fn take(processes: &BTreeMap<u32, u32>) -> Self {
        let read = |(&inside, &pid)| {
            (inside, Process::read(pid).unwrap_or_else(|error| panic!("PID {pid} ({inside}): {error}")))
        };
        Self { processes: processes.iter().map(read).collect() }
    }

    /// Processes, areas and bytes in it.
    pub fn size(&self) -> (usize, usize, u64) {
        let live = || self.processes.values().flatten();
        let bytes = |process: &Process| process.content.values().map(Content::length).sum::<u64>();
        (self.processes.len(), live().map(|process| process.areas.len()).sum(), live().map(bytes).sum())
    }

    /// What is different in these processes, in words; empty when nothing is.
    /// `complete` says that pages come also when nobody waits for them.
    pub fn differences(&self, there: &BTreeMap<u32, u32>, complete: bool) -> Vec<String> {
        let mut found = Vec::new();
        let (mine, theirs): (Vec<_>, Vec<_>) = (self.processes.keys().collect(), there.keys().collect());
        if mine != theirs {
            found.push(format!("processes {mine:?} at the source and {theirs:?} at the destination"));
        }
        // Pages that are still to come are waited for, in some processes at once.
        let pairs: Vec<_> = self
            .processes
            .iter()
            .filter_map(|(inside, was)| Some((*inside, was, *there.get(inside)?)))
            .collect();
        let pairs = Mutex::new(pairs.into_iter());
        let work = || {
            let mut results = Vec::new();
            loop {
                let Some((inside, was, pid)) = pairs.lock().unwrap().next() else { return results };
                let compared = match was {
                    Some(was) => was.compare(pid, complete),
                    None if areas_of(pid).is_ok_and(|areas| areas.is_empty()) => Ok(Compared::default()),
                    None => {
                        let found = vec!["a zombie at the source, and not at the destination".to_owned()];
                        Ok(Compared { found, ..Compared::default() })
                    }
                };
                results.push((inside, pid, compared));
            }
        };
        let mut results = thread::scope(|scope| {
            let readers: Vec<_> = (0..READERS).map(|_| scope.spawn(work)).collect();
            readers.into_iter().flat_map(|reader| reader.join().unwrap()).collect::<Vec<_>>()
        });
        results.sort_by_key(|(inside, ..)| *inside);
        let mut identities = BTreeMap::new();
        for (inside, pid, compared) in results {
            match compared {
                Ok(compared) => {
                    found.extend(compared.found.into_iter().map(|what| format!("process {inside}: {what}")));
                    for (area, was, is) in compared.shared {
                        if identities.entry(was).or_insert_with(|| is.clone()) != &is {
                            found.push(format!(
                                "process {inside}: {area} is not shared with what it was shared with"
                            ));
                        }
                    }
                }
                Err(error) => found.push(format!("process {inside} (PID {pid}) at the destination: {error}")),
            }
        }
        found
    }
}

/// The first of these differences and how many there are.
pub fn told(differences: &[String]) -> String {
    let first = differences.iter().take(TOLD).cloned().collect::<Vec<_>>().join("\n  ");
    format!("{} differences:\n  {first}", differences.len())
}

impl Content {
    fn length(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Refused => 0,
        }
    }
}

impl Process {
    /// Nothing for a zombie.
    fn read(pid: u32) -> io::Result<Option<Self>> {
        let areas = areas_of(pid)?;
        if areas.is_empty() {
            return Ok(None);
        }
        let memory = Memory::open(pid)?;
        let (mut content, mut samples) = (BTreeMap::new(), BTreeMap::new());
        for area in &areas {
            match area.backing {
                Backing::Kernel(_) => {}
                Backing::Shared(..) => area.read_shared(pid, &mut content)?,
                Backing::Anonymous | Backing::PrivateFile(..) => {
                    let populated = populated(pid, area)?;
                    for range in &populated {
                        for start in (range.0..range.1).step_by(PIECE as usize) {
                            memory.pages(start, range.1.min(start + PIECE), &mut content)?;
                        }
                    }
                    for page in area.samples() {
                        if !populated.iter().any(|range| (range.0..range.1).contains(&page)) {
                            memory.pages(page, page + PAGE, &mut samples)?;
                        }
                    }
                }
            }
        }
        Ok(Some(Self { areas, content, samples }))
    }

    fn compare(&self, pid: u32, complete: bool) -> io::Result<Compared> {
        let there = areas_of(pid)?;
        let shown = |area: &Area| area.to_string();
        let (mine, theirs): (BTreeSet<_>, BTreeSet<_>) =
            (self.areas.iter().map(shown).collect(), there.iter().map(shown).collect());
        let mut found: Vec<String> = mine.difference(&theirs).map(|area| format!("lacks {area}")).collect();
        found.extend(theirs.difference(&mine).map(|area| format!("has also {area}")));

        let memory = Memory::open(pid)?;
        let mut shared = Vec::new();
        for area in &there {
            let Some(same) = self.areas.iter().find(|mine| shown(mine) == shown(area)) else { continue };
            match area.backing {
                Backing::Kernel(_) => {}
                Backing::Shared(..) => {
                    shared.push((area.to_string(), same.identity.clone(), area.identity.clone()));
                    let mut content = BTreeMap::new();
                    area.read_shared(pid, &mut content)?;
                    let expected = self.content.range(area.start..area.end);
                    let pages: BTreeSet<u64> =
                        expected.clone().map(|(page, _)| *page).chain(content.keys().copied()).collect();
                    for page in pages {
                        // What is a hole on one side may be zeros on the other.
                        let zero = Content::Bytes(vec![0; PAGE as usize]);
                        let was = self.content.get(&page).unwrap_or(&zero);
                        let is = match content.remove(&page) {
                            // The file may have room for it, and no content yet: the process waits for that.
                            Some(is) if is != *was && area.flags.contains("rd") => memory.page(page)?,
                            None if *was != zero && area.flags.contains("rd") => memory.page(page)?,
                            is => is.unwrap_or_else(|| Content::Bytes(vec![0; PAGE as usize])),
                        };
                        tell(area, page, was, &is, &mut found);
                    }
                }
                Backing::Anonymous | Backing::PrivateFile(..) => {
                    let known = self
                        .content
                        .range(area.start..area.end)
                        .chain(self.samples.range(area.start..area.end));
                    for (&page, was) in known {
                        let mut is = memory.page(page)?;
                        if is == Content::Refused && *was != is && !area.flags.contains("rd") {
                            if !complete {
                                continue;
                            }
                            is = wait_for(&format!("page {page:x} of {area}"), || {
                                memory.page(page).ok().filter(|is| *is != Content::Refused)
                            });
                        }
                        tell(area, page, was, &is, &mut found);
                    }
                    // Nothing may have come from anywhere else.
                    for (start, end) in populated(pid, area)? {
                        for page in (start..end).step_by(PAGE as usize) {
                            if area.backing != Backing::Anonymous || self.content.contains_key(&page) {
                                continue;
                            }
                            let is = memory.page(page)?;
                            let zero = Content::Bytes(vec![0; PAGE as usize]);
                            tell(area, page, self.samples.get(&page).unwrap_or(&zero), &is, &mut found);
                        }
                    }
                }
            }
        }
        Ok(Compared { found, shared })
    }
}

/// Notes a page that is not as it was.
fn tell(area: &Area, page: u64, was: &Content, is: &Content, found: &mut Vec<String>) {
    if was == is {
        return;
    }
    let what = match (was, is) {
        (Content::Bytes(was), Content::Bytes(is)) => {
            let at = was.iter().zip(is).position(|(a, b)| a != b).unwrap_or(0);
            let different = was.iter().zip(is).filter(|(a, b)| a != b).count();
            let word =
                |bytes: &[u8], n: usize| u64::from_ne_bytes(bytes[n * 8..n * 8 + 8].try_into().unwrap());
            let words =
                |bytes: &[u8]| (0..4).map(|n| format!("{:x}", word(bytes, n))).collect::<Vec<_>>().join(" ");
            format!("{different} bytes from {at} on: begins with {}, was {}", words(is), words(was))
        }
        (Content::Refused, _) => "was a guard page".to_owned(),
        (_, Content::Refused) => "cannot be read".to_owned(),
    };
    found.push(format!("page {page:x} of {area}: {what}"));
}

/// The private memory of a process.
struct Memory {
    pid: Pid,
    file: File,
}

impl Memory {
    fn open(pid: u32) -> io::Result<Self> {
        let file = File::open(format!("/proc/{pid}/mem"))?;
        Ok(Self { pid: Pid::from_raw(i32::try_from(pid).unwrap()), file })
    }

    /// Reads whole pages, as many as there are without one that cannot be read; 0 where it is the first.
    fn read(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        let remote = RemoteIoVec { base: usize::try_from(at).unwrap(), len: buffer.len() };
        let read = process_vm_readv(self.pid, &mut [io::IoSliceMut::new(buffer)], &[remote]);
        let read = match read {
            Ok(read) if read >= PAGE as usize => read,
            Ok(_) | Err(nix::errno::Errno::EFAULT) => {
                match self.file.read_at(&mut buffer[..PAGE as usize], at) {
                    Err(error) if matches!(error.raw_os_error(), Some(5 | 14)) => 0,
                    read => read?,
                }
            }
            Err(errno) => return Err(errno.into()),
        };
        Ok(read & !(PAGE as usize - 1))
    }

    fn page(&self, at: u64) -> io::Result<Content> {
        let mut bytes = vec![0; PAGE as usize];
        let read = self.read(&mut bytes, at)?;
        Ok(if read == 0 { Content::Refused } else { Content::Bytes(bytes) })
    }

    fn pages(&self, start: u64, end: u64, content: &mut BTreeMap<u64, Content>) -> io::Result<()> {
        let mut buffer = vec![0; (end - start) as usize];
        let mut at = start;
        while at < end {
            let left = &mut buffer[..(end - at) as usize];
            let read = self.read(left, at)?;
            if read == 0 {
                content.insert(at, Content::Refused);
                at += PAGE;
            }
            for page in left[..read].as_chunks::<{ PAGE as usize }>().0 {
                content.insert(at, Content::Bytes(page.to_vec()));
                at += PAGE;
            }
        }
        Ok(())
    }
}

/// Which pages of an area there are, in ascending order.
fn populated(pid: u32, area: &Area) -> io::Result<Vec<(u64, u64)>> {
    let map = File::open(format!("/proc/{pid}/pagemap"))?;
    let mut found: Vec<(u64, u64)> = Vec::new();
    let mut buffer = vec![0; (ENTRIES * 8) as usize];
    let mut page = area.start / PAGE;
    while page < area.end / PAGE {
        let count = ENTRIES.min(area.end / PAGE - page);
        let bytes = &mut buffer[..(count * 8) as usize];
        map.read_exact_at(bytes, page * 8)?;
        for (number, entry) in (page..).zip(bytes.as_chunks().0) {
            if u64::from_ne_bytes(*entry) & (PRESENT | SWAPPED) == 0 {
                continue;
            }
            let start = number * PAGE;
            match found.last_mut() {
                Some(last) if last.1 == start => last.1 += PAGE,
                _ => found.push((start, start + PAGE)),
            }
        }
        page += count;
    }
    Ok(found)
}

/// The mappings of a process; none for a zombie.
fn areas_of(pid: u32) -> io::Result<Vec<Area>> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let mut areas: Vec<Area> = Vec::new();
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let area = areas.last_mut().unwrap();
            area.flags =
                flags.split_whitespace().filter_map(|flag| FLAGS.into_iter().find(|f| *f == flag)).collect();
            if areas.len() > 1 && areas[areas.len() - 2].continues_in(&areas[areas.len() - 1]) {
                let next = areas.pop().unwrap();
                let area = areas.last_mut().unwrap();
                area.end = next.end;
                area.parts.extend(next.parts);
            }
        } else if !line.split_whitespace().next().unwrap_or(":").ends_with(':') {
            areas.push(Area::parse(line));
        }
    }
    Ok(areas)
}

impl std::fmt::Display for Area {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let flags: Vec<_> = self.flags.iter().copied().collect();
        write!(f, "{:x}-{:x} {} {:?}", self.start, self.end, flags.join(" "), self.backing)
    }
}

impl Area {
    fn parse(line: &str) -> Self {
        let mut words = line.splitn(6, ' ');
        let mut word = || words.next().unwrap_or_else(|| panic!("{line}"));
        let (start, end) = word().split_once('-').unwrap();
        let hexadecimal = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let (start, end) = (hexadecimal(start), hexadecimal(end));
        let shared = word().ends_with('s');
        let offset = hexadecimal(word());
        let identity = (word().to_owned(), word().parse().unwrap());
        let name = word().trim_start().to_owned();
        let backing = match (shared, identity.1) {
            // CRIU makes shared anonymous memory anew as what it is or as a memfd; the programs
            // cannot tell.
            (true, _) if name.starts_with("/dev/zero") || name.starts_with("/memfd:") => {
                Backing::Shared("memory".to_owned(), offset)
            }
            (true, _) => Backing::Shared(name, offset),
            (false, 0) if name.is_empty() || ["[heap]", "[stack]"].contains(&name.as_str()) => {
                Backing::Anonymous
            }
            (false, 0) => Backing::Kernel(name),
            (false, _) => Backing::PrivateFile(name, offset),
        };
        Self { start, end, flags: BTreeSet::new(), backing, identity, parts: vec![(start, end)] }
    }

    /// Whether the kernel might have drawn no border before `next`.
    fn continues_in(&self, next: &Self) -> bool {
        let length = self.end - self.start;
        let backing = match (&self.backing, &next.backing) {
            (Backing::Anonymous, Backing::Anonymous) => true,
            (Backing::PrivateFile(a, at), Backing::PrivateFile(b, then))
            | (Backing::Shared(a, at), Backing::Shared(b, then)) => a == b && at + length == *then,
            _ => false,
        };
        backing && self.end == next.start && self.flags == next.flags && self.identity == next.identity
    }

    /// Some of its pages: the first, the last, and others spread between them.
    fn samples(&self) -> BTreeSet<u64> {
        let pages = (self.end - self.start) / PAGE;
        let spread = |n: u64| self.start + (pages - 1) * n / (SAMPLES - 1) * PAGE;
        (0..SAMPLES).map(spread).collect()
    }

    /// Reads the parts of the shared file that hold data, as far as this area shows them.
    fn read_shared(&self, pid: u32, content: &mut BTreeMap<u64, Content>) -> io::Result<()> {
        let Backing::Shared(_, offset) = self.backing else { return Ok(()) };
        let (start, end) = self.parts[0];
        let file = File::open(PathBuf::from(format!("/proc/{pid}/map_files/{start:x}-{end:x}")))?;
        let length = self.end - self.start;
        let mut at = offset;
        while at < offset + length {
            let Ok(data) = rustix::fs::seek(&file, SeekFrom::Data(at)) else { break };
            let hole = rustix::fs::seek(&file, SeekFrom::Hole(data))?;
            let (from, to) = (data & !(PAGE - 1), hole.min(offset + length));
            for page in (from..to).step_by(PAGE as usize) {
                let mut bytes = vec![0; PAGE as usize];
                let read = file.read_at(&mut bytes, page)?;
                bytes[read..].fill(0);
                content.insert(self.start + (page - offset), Content::Bytes(bytes));
            }
            at = hole;
        }
        Ok(())
    }
}
