//! The cgroups of a dump: those of the node, which CRIU makes again where it restores, unless it is told not to look at cgroups.
//!
//! Whoever starts CRIU is in a cgroup of the images' too (`root_cg_set` of the inventory), and a process that is in the same one
//! stays where CRIU is started.

use std::borrow::Cow;
use std::path::Path;

use prost::Message;

use super::{ImageError, ImageKind, process_tree, rewrite, single};

/// `core_entry`, as far as it tells of cgroups.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct Core {
    #[prost(message, optional, tag = "3")]
    task: Option<Task>,
    #[prost(message, optional, tag = "5")]
    thread: Option<Thread>,
}

/// `task_core_entry`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct Task {
    #[prost(uint32, optional, tag = "9")]
    cgroups: Option<u32>,
}

/// `thread_core_entry`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct Thread {
    #[prost(uint32, optional, tag = "16")]
    cgroups: Option<u32>,
}

/// `inventory_entry`. Of a field that is there twice the last counts (protobuf's encoding).
#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct Inventory {
    #[prost(uint32, optional, tag = "5")]
    cgroups: Option<u32>,
}

/// Has a restore leave the processes in the cgroup in which it is started, as the main process's is.
///
/// # Errors
/// The images cannot be read or written.
pub fn stay_in_cgroup(images: &Path) -> Result<(), ImageError> {
    let Some(main) = process_tree(images)?.into_iter().next() else { return Ok(()) };
    let core: Core = single(&images.join(format!("core-{}.img", main.pid)), ImageKind::Core)?;
    let cgroups = core.thread.and_then(|thread| thread.cgroups).or(core.task.and_then(|task| task.cgroups));
    let Some(cgroups) = cgroups else { return Ok(()) };
    let added = Inventory { cgroups: Some(cgroups) }.encode_to_vec();
    rewrite(&images.join("inventory.img"), ImageKind::Inventory, |records| match records {
        [inventory] => Ok(Some(vec![Cow::Owned([*inventory, &added].concat())])),
        _ => Err(format!("it has {} records, and must have one", records.len())),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::tests::image;
    use super::super::{ProcessTreeEntry, inventory};
    use super::*;

    #[test]
    fn whoever_starts_a_restore_is_where_the_main_process_was() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: Vec<u8>| std::fs::write(directory.path().join(name), bytes).unwrap();
        write(
            "pstree.img",
            image(ImageKind::ProcessTree, &[ProcessTreeEntry { pid: 1, ..Default::default() }]),
        );
        let core = Core { task: None, thread: Some(Thread { cgroups: Some(2) }) };
        write("core-1.img", image(ImageKind::Core, &[core]));
        let before = super::super::Inventory { img_version: 2, ..Default::default() };
        write("inventory.img", image(ImageKind::Inventory, &[before]));
        stay_in_cgroup(directory.path()).unwrap();
        let path = directory.path().join("inventory.img");
        assert_eq!(single::<Inventory>(&path, ImageKind::Inventory).unwrap().cgroups, Some(2));
        assert_eq!(inventory(directory.path()).unwrap().img_version, 2);
    }
}
