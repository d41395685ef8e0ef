//! What `/proc` says of a process, as values: its mappings, its state.
//!
//! Which mappings CRIU calls lazy follows from its `vma_entry_can_be_lazy` (include/vma.h) and from
//! how it derives the flags there (`handle_vma` in proc_parse.c): private, without a file, not locked,
//! no huge TLB pages, and none of the kernel's own mappings.

use crate::{PAGE_SIZE, Range, Space};

/// One mapping of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Area {
    /// Where it is.
    pub range: Range,
    /// Whether the process may read it.
    pub readable: bool,
    /// Whether the process may write it.
    pub writable: bool,
    /// Whether the process may execute it.
    pub executable: bool,
    /// Who carries its pages.
    pub kind: AreaKind,
    /// Whether it is the kernel's code for the process, which has system calls in it.
    pub(crate) is_vdso: bool,
}

/// Who carries the pages of a mapping to the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AreaKind {
    /// Private anonymous memory that CRIU calls lazy: the page mover.
    Private,
    /// A private mapping of a file: CRIU, or whoever puts them into its images.
    PrivateFile,
    /// CRIU, or nobody because it is the kernel's or a file's.
    Other,
}

/// What is of use here in `/proc/PID/status`. `godwit-criu` and `godwit-engine` read other fields of it, and these crates
/// and this one do not know each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Status {
    /// PID in the innermost PID namespace.
    pub(crate) space: Option<Space>,
    /// Private anonymous memory in KiB, also where it is swapped out.
    pub(crate) anonymous_kib: u64,
    /// Locked memory in KiB.
    pub(crate) locked_kib: u64,
    /// 0 when no seccomp filter is on it.
    pub(crate) seccomp: u64,
    /// Who traces it; 0 for nobody.
    pub(crate) tracer: u64,
    /// Capabilities that it has, or can get by executing a program.
    pub(crate) capabilities: u64,
    /// Signals that wait for the process as a whole; none where the kernel does not tell.
    pub(crate) pending: Option<u64>,
}

impl Status {
    /// Whether it can open what others have mapped, in `/proc/PID/map_files`: it has, or can get, `CAP_SYS_ADMIN` or
    /// `CAP_CHECKPOINT_RESTORE`.
    pub(crate) fn opens_mapped(&self) -> bool {
        self.capabilities & (1 << 21 | 1 << 40) != 0
    }
}

pub(crate) fn parse_status(text: &str) -> Status {
    let field =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap_or("");
    let number = |name: &str| {
        field(name).split_whitespace().next().and_then(|n| n.parse::<u64>().ok()).unwrap_or_default()
    };
    let told = |name: &str| u64::from_str_radix(field(name).trim(), 16).ok();
    let bits = |name: &str| told(name).unwrap_or(u64::MAX);
    Status {
        space: field("NSpid").split_whitespace().last().and_then(|n| n.parse().ok()),
        anonymous_kib: number("RssAnon").saturating_add(number("VmSwap")),
        locked_kib: number("VmLck"),
        seccomp: number("Seccomp"),
        tracer: number("TracerPid"),
        capabilities: bits("CapPrm") | bits("CapBnd"),
        pending: told("ShdPnd"),
    }
}

/// State letter of `/proc/PID/stat`. The name before it may contain anything.
pub(crate) fn state(stat: &str) -> Option<char> {
    fields(stat)?.next()?.chars().next()
}

/// Start time of `/proc/PID/stat`: field 22, in clock ticks since boot.
pub(crate) fn start_time(stat: &str) -> Option<u64> {
    fields(stat)?.nth(19)?.parse().ok()
}

fn fields(stat: &str) -> Option<impl Iterator<Item = &str>> {
    Some(stat.rsplit_once(')')?.1.split_whitespace())
}

/// Mappings from the text of `maps` or `smaps`, in ascending order and without overlaps; the line
/// that is not understood as error.
pub(crate) fn parse(text: &str) -> Result<Vec<Area>, &str> {
    let mut areas: Vec<Area> = Vec::new();
    // The kernel gives the text page by page and lets the process run in between: a mapping that
    // grew comes again, and what it grew over may be said already.
    let mut end_so_far = 0;
    let mut skipped = false;
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let has = |wanted| flags.split_whitespace().any(|flag| flag == wanted);
            if let (false, Some(area)) = (skipped, areas.last_mut()) {
                area.kind = match area.kind {
                    AreaKind::Private if has("lo") || has("ht") => AreaKind::Other,
                    AreaKind::PrivateFile if has("ht") => AreaKind::Other,
                    kind => kind,
                };
            }
            continue;
        }
        // The other lines of smaps begin with a name and a colon.
        if line.split_whitespace().next().is_some_and(|word| word.ends_with(':')) {
            continue;
        }
        let mut area = parse_line(line).ok_or(line)?;
        area.range.start = area.range.start.max(end_so_far);
        skipped = area.range.start >= area.range.end;
        if !skipped {
            end_so_far = area.range.end;
            areas.push(area);
        }
    }
    Ok(areas)
}

/// One line, as `7f0c000-7f0d000 rw-p 00000000 00:00 0    [heap]`.
fn parse_line(line: &str) -> Option<Area> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let range = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
    if range.start % PAGE_SIZE != 0 || range.end % PAGE_SIZE != 0 || range.start >= range.end {
        return None;
    }
    let permissions = words.next()?.as_bytes();
    let &[read, write, execute, sharing] = permissions else { return None };
    let (_offset, device, inode) = (words.next()?, words.next()?, words.next()?);
    let name = words.next().unwrap_or("").trim_start();
    let kind = match (sharing == b'p', inode == "0") {
        (true, true) if device == "00:00" && is_anonymous(name) => AreaKind::Private,
        // Huge TLB pages of nobody's file.
        (true, false) if name != "/anon_hugepage (deleted)" => AreaKind::PrivateFile,
        _ => AreaKind::Other,
    };
    Some(Area {
        range,
        readable: read == b'r',
        writable: write == b'w',
        executable: execute == b'x',
        kind,
        is_vdso: name == "[vdso]",
    })
}

/// Whether a mapping without a file is the process's own. All other names in brackets are mappings
/// of the kernel: `[vdso]`, `[vvar]`, `[vvar_vclock]`, `[vsyscall]`, `[vectors]`, `[sigpage]`,
/// `[uprobes]` and what is to come.
fn is_anonymous(name: &str) -> bool {
    matches!(name, "" | "[heap]" | "[stack]") || name.starts_with("[anon:") || name.starts_with("[stack:")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn private(text: &str) -> Vec<bool> {
        parse(text).expect("understood").iter().map(|area| area.kind == AreaKind::Private).collect()
    }

    #[test]
    fn areas_that_criu_calls_lazy_are_told_from_the_others() {
        let lazy = "\
55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000021000 rw-p 00000000 00:00 0 
7f0000021000-7f0004000000 ---p 00000000 00:00 0 
7f1000000000-7f1000001000 r-xp 00000000 00:00 0                          [anon:jit code]
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
";
        assert_eq!(private(lazy), vec![true; 5]);
        let other = "\
55d0bf000000-55d0bf021000 rw-p 00001000 fe:00 1234                       /usr/bin/x
7f2000000000-7f2000001000 rw-s 00000000 00:01 5                          /dev/zero (deleted)
7f2000001000-7f2000002000 rw-p 00000000 00:05 6                          /dev/zero
7f2000200000-7f2000400000 rw-p 00000000 00:0f 7                          /anon_hugepage (deleted)
7f2000400000-7f2000401000 rw-s 00000000 00:00 0 
7ffc00100000-7ffc00104000 r--p 00000000 00:00 0                          [vvar]
7ffc00104000-7ffc00106000 r--p 00000000 00:00 0                          [vvar_vclock]
7ffc00106000-7ffc00108000 r-xp 00000000 00:00 0                          [vdso]
7ffc00108000-7ffc00109000 r-xp 00000000 00:00 0                          [uprobes]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
";
        assert_eq!(private(other), vec![false; 10]);
        let files = parse(other).expect("understood").into_iter();
        let files: Vec<_> = files.filter(|area| area.kind == AreaKind::PrivateFile).collect();
        assert_eq!(
            files.iter().map(|area| area.range.start).collect::<Vec<_>>(),
            [0x55d0_bf00_0000, 0x7f20_0000_1000]
        );
    }

    #[test]
    fn locked_areas_are_not_lazy() {
        let smaps = "\
7f0000000000-7f0000001000 rw-p 00000000 00:00 0 
Size:                  4 kB
VmFlags: rd wr mr mw me ac 
7f0000001000-7f0000002000 rw-p 00000000 00:00 0 
Size:                  4 kB
VmFlags: rd wr mr mw me lo ac 
";
        assert_eq!(private(smaps), [true, false]);
    }

    #[test]
    fn areas_that_changed_while_they_were_read_do_not_overlap() {
        let text = "\
7f0000000000-7f0000002000 rw-p 00000000 00:00 0 
7f0000000000-7f0000004000 rw-p 00000000 00:00 0 
7f0000001000-7f0000003000 r--p 00000000 00:00 0 
";
        let ranges: Vec<_> = parse(text).expect("understood").into_iter().map(|area| area.range).collect();
        assert_eq!(ranges, [0x7f00_0000_0000..0x7f00_0000_2000, 0x7f00_0000_2000..0x7f00_0000_4000]);
    }

    #[test]
    fn a_line_of_another_kind_is_an_error() {
        assert_eq!(parse("7f0000000000 rw-p\n"), Err("7f0000000000 rw-p"));
        assert_eq!(parse("7f0000000001-7f0000002000 rw-p 0 00:00 0\n").err().map(str::len), Some(40));
    }

    #[test]
    fn a_process_name_with_brackets_hides_nothing() {
        let stat = "7 (a) Z (b) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4711 8192 1";
        assert_eq!(state(stat), Some('S'));
        assert_eq!(start_time(stat), Some(4711));
    }

    #[test]
    fn the_space_is_the_innermost_pid() {
        let status = parse_status(
            "Name:\tx\nTracerPid:\t3\nNSpid:\t4021\t17\t1\nVmLck:\t      12 kB\nRssAnon:\t 8 kB\nVmSwap:\t 1 kB\nShdPnd:\t0200000000000000\nCapPrm:\t0000000000000400\nCapBnd:\t0000000000000021\nSeccomp:\t2\nSeccomp_filters:\t1\n",
        );
        assert_eq!(
            status,
            Status {
                space: Some(1),
                anonymous_kib: 9,
                locked_kib: 12,
                seccomp: 2,
                tracer: 3,
                capabilities: 0x421,
                pending: Some(1 << 57)
            }
        );
    }
}
