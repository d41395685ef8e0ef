//! What a running process has mapped, of the text of its `/proc/PID/maps` (proc_pid_maps(5)):
//!
//! ```text
//! 00400000-00415000 r-xp 00010000 fe:00 10772719      /bin/service
//! 7fff4a022000-7fff4a043000 rw-p 00000000 00:00 0     [stack]
//! ```

use crate::eligibility::{Area, Owner};

/// The areas, in order; none where a line is not one of an area.
#[must_use]
pub fn areas_of_maps(text: &[u8]) -> Option<Vec<Area>> {
    let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines.map(area).collect()
}

fn area(line: &[u8]) -> Option<Area> {
    // Only the name, the last field, can have other bytes, and blanks.
    let mut fields = line.splitn(6, |byte| *byte == b' ');
    let mut field = || std::str::from_utf8(fields.next()?).ok();
    let (start, end) = field()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let range = number(start)?..number(end)?;
    let is_executable = match field()?.as_bytes() {
        [_, _, execute, _] => *execute == b'x',
        _ => return None,
    };
    let name = fields.nth(3).unwrap_or_default().trim_ascii_start();
    let owner = match name {
        b"[vdso]" | b"[vvar]" | b"[vvar_vclock]" | b"[vsyscall]" => Owner::Kernel,
        b"[stack]" => Owner::FirstStack,
        _ => Owner::Program,
    };
    (!range.is_empty()).then_some(Area { range, is_executable, owner })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_area_is_told_with_its_owner() {
        let text = b"00400000-00415000 r-xp 00010000 fe:00 10772719                           /bin/a b\xff\n\
                     3004000000-3004002000 ---p 00000000 00:00 0 \n\
                     7fff4a022000-7fff4a043000 rw-p 00000000 00:00 0                          [stack]\n\
                     7fff4a0ed000-7fff4a0ef000 r-xp 00000000 00:00 0                          [vdso]\n\
                     ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]\n";
        let found = areas_of_maps(text).expect("they are lines of the kernel's");
        let area = |range, is_executable, owner| Area { range, is_executable, owner };
        let expected = [
            area(0x40_0000..0x41_5000, true, Owner::Program),
            area(0x30_0400_0000..0x30_0400_2000, false, Owner::Program),
            area(0x7fff_4a02_2000..0x7fff_4a04_3000, false, Owner::FirstStack),
            area(0x7fff_4a0e_d000..0x7fff_4a0e_f000, true, Owner::Kernel),
            area(0xffff_ffff_ff60_0000..0xffff_ffff_ff60_1000, true, Owner::Kernel),
        ];
        assert_eq!(found, expected);
        assert_eq!(areas_of_maps(b""), Some(Vec::new()));
    }

    #[test]
    fn what_is_no_line_of_the_kernels_is_none() {
        for text in ["x-2 rwxp 0 0:0 0", "1-2 rwx 0 0:0 0", "2-1 rwxp 0 0:0 0", "1-2", "1 rwxp"] {
            assert_eq!(areas_of_maps(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn this_process_has_areas() {
        let maps = std::fs::read("/proc/self/maps").expect("proc is mounted");
        let areas = areas_of_maps(&maps).expect("they are lines of the kernel's");
        assert!(areas.iter().any(|area| area.owner == Owner::FirstStack));
        assert!(areas.iter().any(|area| area.is_executable && area.owner == Owner::Program));
    }

    proptest! {
        #[test]
        fn any_text_is_told_or_not(text in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = areas_of_maps(&text);
        }
    }
}
