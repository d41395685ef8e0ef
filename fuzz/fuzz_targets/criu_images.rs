//! CRIU's image files from another node, alone and as a directory that is made plain, and CRIU's log.
#![no_main]

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::ops::Range;

use arbitrary::Arbitrary;
use godwit_criu::images::{
    Allowed, Core, ImageKind, Inventory, LazyPages, Pagemap, ProcessTreeEntry, Refused, RefusedOf, archives,
    decode, excess, inventory, lazy_areas, make_plain, page_size, stopped_processes, unacknowledged,
};
use godwit_criu::repair::{Here, Hidden, external_mounts, fit_kernel};
use godwit_fuzz::Scratch;
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
enum Input<'a> {
    Raw(&'a [u8]),
    Log(&'a str),
    /// Records under right heads and lengths: inventory, tree, and the core of each number; of the
    /// same numbers the areas, the pagemap and the contents of pages; what is in lazy pages; the open
    /// files, with a connection that has an image of its own; and the namespaces of each number, with mounts,
    /// filters of system calls and a deleted file.
    Directory {
        inventory: Vec<&'a [u8]>,
        tree: Vec<&'a [u8]>,
        cores: Vec<(u8, Vec<&'a [u8]>)>,
        memory: Vec<(u8, &'a [u8], Vec<&'a [u8]>, &'a [u8])>,
        lazy: BTreeMap<u16, u8>,
        files: Vec<&'a [u8]>,
        connection: &'a [u8],
        ids: Vec<(u8, &'a [u8])>,
        mounts: Vec<(u8, Vec<&'a [u8]>)>,
        filters: &'a [u8],
        /// In place of `filters`, for deep programs: each of instructions, the number before it and flags.
        programs: Vec<(Vec<(u16, u8, u8, u32)>, Option<u8>, u8)>,
        deleted: Vec<&'a [u8]>,
    },
}

/// Lazy pages by their number.
struct Store(BTreeMap<u16, u8>);

impl LazyPages for Store {
    fn next(&mut self, _: u32, within: Range<u64>) -> io::Result<Option<Range<u64>>> {
        let addresses = self.0.keys().map(|number| u64::from(*number) * page_size());
        Ok(addresses.map(|start| start..start + page_size()).find(|page| within.contains(&page.start)))
    }

    fn read(&mut self, _: u32, address: u64, buffer: &mut [u8]) -> io::Result<()> {
        let number = u16::try_from(address / page_size()).expect("a page that was given");
        buffer.fill(self.0[&number]);
        Ok(())
    }
}

fn image(head: &[u32], records: &[&[u8]]) -> Vec<u8> {
    let mut bytes: Vec<u8> = head.iter().flat_map(|word| word.to_le_bytes()).collect();
    for record in records {
        bytes.extend(u32::try_from(record.len()).expect("a short input").to_le_bytes());
        bytes.extend_from_slice(record);
    }
    bytes
}

/// `seccomp_entry` of these programs.
fn filters_of(programs: &[(Vec<(u16, u8, u8, u32)>, Option<u8>, u8)]) -> Vec<u8> {
    let length = |length: usize| {
        let low = u8::try_from(length & 0x7f).expect("seven bits") | 0x80;
        [low, u8::try_from(length >> 7 & 0x7f).expect("seven bits")]
    };
    let mut all = Vec::new();
    for (program, before, flags) in programs {
        let instructions: Vec<u8> = program
            .iter()
            .take(1000)
            .flat_map(|(code, yes, no, k)| [&code.to_ne_bytes()[..], &[*yes, *no], &k.to_ne_bytes()].concat())
            .collect();
        let mut filter = [&[1 << 3 | 2][..], &length(instructions.len()), &instructions].concat();
        if let Some(before) = before {
            filter.extend([2 << 3, before & 0x7f]);
        }
        filter.extend([3 << 3, flags & 0x7f]);
        all.extend([&[1 << 3 | 2][..], &length(filter.len()), &filter].concat());
    }
    all
}

/// A service that may hardly anything.
fn allowed() -> Allowed {
    let with = vec![(41, "socket", [16, 0, 9, 0, 0, 0])];
    let of = RefusedOf { architecture: 0xc000_003e, name: "x86-64", always: vec![(321, "bpf")], with };
    let refused = Some(Refused { of: vec![of] });
    Allowed { uid: 1000, gid: 1000, no_new_privileges: true, refused, ..Allowed::default() }
}

/// Whether mounts that were made to fit a kernel fit it.
fn fits(scratch: &Scratch) {
    let hidden = |brings_directories| Hidden {
        covered: vec!["/proc/keys", "/proc/kcore", "/proc/acpi", "/sys/firmware"],
        read_only: vec!["/proc/sys", "/proc/irq"],
        file_key: "/dev/null",
        brings_directories,
    };
    let here = |path: &str| match path {
        "/proc/kcore" => Here::File,
        "/proc/acpi" | "/proc/sys" => Here::Directory,
        _ => Here::Nothing,
    };
    let contents = || -> BTreeMap<_, _> {
        let files =
            fs::read_dir(scratch.inside()).expect("a directory").map(|entry| entry.expect("a file").path());
        files
            .map(|path| (fs::read(&path).expect("a file"), path))
            .map(|(bytes, path)| (path, bytes))
            .collect()
    };
    for brings_directories in [true, false] {
        if fit_kernel(&scratch.inside(), &hidden(brings_directories), here).is_ok() {
            let fit = contents();
            fit_kernel(&scratch.inside(), &hidden(brings_directories), here).expect("what fits");
            assert!(fit == contents(), "nothing is left to be changed");
        }
    }
    let _ = external_mounts(&scratch.inside(), &["/proc/kcore"], "cover");
}

fuzz_target!(|input: Input<'_>| {
    /// The first word of all but the inventory.
    const COMMON: u32 = 0x5456_4319;
    match input {
        Input::Raw(bytes) => {
            let _ = decode::<Inventory>(bytes, ImageKind::Inventory);
            let headed = [&COMMON.to_le_bytes(), &(ImageKind::Pagemap as u32).to_le_bytes(), bytes].concat();
            for bytes in [bytes, &headed] {
                if let Ok(pagemap) = Pagemap::decode(bytes) {
                    assert_eq!(
                        Pagemap::decode(&pagemap.encode()).expect("our own").pages_id,
                        pagemap.pages_id
                    );
                }
            }
            for kind in [ImageKind::Core, ImageKind::ProcessTree] {
                let headed = [&COMMON.to_le_bytes(), &(kind as u32).to_le_bytes(), bytes].concat();
                for bytes in [bytes, &headed] {
                    let cores = decode::<Core>(bytes, kind).map_or(0, |cores| cores.len());
                    let entries = decode::<ProcessTreeEntry>(bytes, kind).map_or(0, |entries| entries.len());
                    assert!(cores.max(entries) <= bytes.len() / 4);
                }
            }
        }
        Input::Log(text) => {
            let _ = (godwit_criu::log::first_error(text), godwit_criu::log::hint(text));
        }
        Input::Directory {
            inventory: records,
            tree,
            cores,
            memory,
            lazy,
            files,
            connection,
            ids,
            mounts,
            filters,
            programs,
            deleted,
        } => {
            let scratch = Scratch::new();
            let write =
                |name: &str, bytes: &[u8]| fs::write(scratch.inside().join(name), bytes).expect("a file");
            write("inventory.img", &image(&[ImageKind::Inventory as u32], &records));
            write("pstree.img", &image(&[COMMON, ImageKind::ProcessTree as u32], &tree));
            for (pid, records) in cores {
                write(&format!("core-{pid}.img"), &image(&[COMMON, ImageKind::Core as u32], &records));
            }
            for (pid, areas, pagemap, pages) in memory {
                write(&format!("mm-{pid}.img"), &image(&[COMMON, ImageKind::Memory as u32], &[areas]));
                write(&format!("pagemap-{pid}.img"), &image(&[COMMON, ImageKind::Pagemap as u32], &pagemap));
                write(&format!("pages-{pid}.img"), pages);
            }
            write("files.img", &image(&[COMMON, ImageKind::Files as u32], &files));
            write("tcp-stream-0.img", &[&image(&[COMMON, 0x5146_5506], &[]), connection].concat());
            if let Ok(connections) = unacknowledged(&scratch.inside()) {
                assert!(connections.len() <= files.len());
            }
            for (pid, ids) in ids {
                write(&format!("ids-{pid}.img"), &image(&[COMMON, ImageKind::Ids as u32], &[ids]));
            }
            for (namespace, mounts) in mounts {
                let name = format!("mountpoints-{namespace}.img");
                write(&name, &image(&[COMMON, ImageKind::Mountpoints as u32], &mounts));
            }
            let made = filters_of(&programs);
            let filters = if programs.is_empty() { filters } else { &made };
            write("seccomp.img", &image(&[COMMON, ImageKind::Seccomp as u32], &[filters]));
            write("ghost-file-1.img", &image(&[COMMON, ImageKind::Ghost as u32], &deleted));
            if let Ok(found) = excess(&scratch.inside(), &allowed()) {
                let sound = |text: &String| text.len() < 2000 && !text.chars().any(char::is_control);
                assert!(found.iter().all(sound), "{found:?}");
            }
            fits(&scratch);
            let _ = archives(&scratch.inside());
            let _ = inventory(&scratch.inside());
            if let Ok(areas) = lazy_areas(&scratch.inside()) {
                assert!(areas.len() <= tree.len());
                let most = lazy.len() * areas.len();
                if let Ok(added) = make_plain(&scratch.inside(), &mut Store(lazy)) {
                    assert!(usize::try_from(added).is_ok_and(|added| added <= most));
                }
            }
            scratch.assert_outside_untouched();
            if let Ok(stopped) = stopped_processes(&scratch.inside()) {
                assert!(stopped.len() <= tree.len());
            }
        }
    }
});
