//! CRIU's image files from another node, alone and as a directory, and CRIU's log.
#![no_main]

use std::fs;

use arbitrary::Arbitrary;
use godwit_criu::images::{
    Core, ImageKind, Inventory, ProcessTreeEntry, decode, inventory, stopped_processes,
};
use godwit_fuzz::Scratch;
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
enum Input<'a> {
    Raw(&'a [u8]),
    Log(&'a str),
    /// Records under right heads and lengths: inventory, tree, and the core of each number.
    Directory {
        inventory: Vec<&'a [u8]>,
        tree: Vec<&'a [u8]>,
        cores: Vec<(u8, Vec<&'a [u8]>)>,
    },
}

fn image(head: &[u32], records: &[&[u8]]) -> Vec<u8> {
    let mut bytes: Vec<u8> = head.iter().flat_map(|word| word.to_le_bytes()).collect();
    for record in records {
        bytes.extend(u32::try_from(record.len()).expect("a short input").to_le_bytes());
        bytes.extend_from_slice(record);
    }
    bytes
}

fuzz_target!(|input: Input<'_>| {
    /// The first word of all but the inventory.
    const COMMON: u32 = 0x5456_4319;
    match input {
        Input::Raw(bytes) => {
            let _ = decode::<Inventory>(bytes, ImageKind::Inventory);
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
        Input::Directory { inventory: records, tree, cores } => {
            let scratch = Scratch::new();
            let write =
                |name: &str, bytes: &[u8]| fs::write(scratch.inside().join(name), bytes).expect("a file");
            write("inventory.img", &image(&[ImageKind::Inventory as u32], &records));
            write("pstree.img", &image(&[COMMON, ImageKind::ProcessTree as u32], &tree));
            for (pid, records) in cores {
                write(&format!("core-{pid}.img"), &image(&[COMMON, ImageKind::Core as u32], &records));
            }
            let _ = inventory(&scratch.inside());
            if let Ok(stopped) = stopped_processes(&scratch.inside()) {
                assert!(stopped.len() <= tree.len());
            }
        }
    }
});
