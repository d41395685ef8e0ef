//! `netns-NAMESPACE.img`: the network namespace of a container, which whoever restores it brings.
//!
//! A dump by runc says so if the container was in a namespace that had a path, and else that the restore makes an empty one.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use prost::Message;

use super::rights::Ids;
use super::{COMMON_MAGIC, ImageError, ImageKind, process_tree, single};

/// `NETNS_MAGIC`.
const KIND: u32 = 0x5593_3752;

/// `netns_entry` of a namespace that is brought from outside.
#[derive(Clone, PartialEq, Eq, Message)]
struct Namespace {
    #[prost(string, optional, tag = "8")]
    key: Option<String>,
}

/// Has a restore take the network namespace of all processes from outside, under this key.
///
/// # Errors
/// The images cannot be read or written, or the processes are in several namespaces.
pub fn bring_network(images: &Path, key: &str) -> Result<(), ImageError> {
    let mut found = BTreeSet::new();
    for process in process_tree(images)? {
        let path = images.join(format!("ids-{}.img", process.pid));
        // One that has ended has none.
        if path.exists() {
            found.extend(single::<Ids>(&path, ImageKind::Ids)?.net);
        }
    }
    let [namespace] = found.into_iter().collect::<Vec<_>>()[..] else {
        let reason = "its processes are not in one network namespace".to_owned();
        return Err(ImageError::Damaged { path: images.to_owned(), reason });
    };
    let record = Namespace { key: Some(key.to_owned()) }.encode_to_vec();
    let length = u32::try_from(record.len()).unwrap_or(u32::MAX);
    let mut image: Vec<u8> = [COMMON_MAGIC, KIND, length].into_iter().flat_map(u32::to_le_bytes).collect();
    image.extend(record);
    let path = images.join(format!("netns-{namespace}.img"));
    fs::write(&path, image).map_err(|source| ImageError::Write { path, source })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::tests::image;
    use super::super::{ProcessTreeEntry, inventory};
    use super::*;

    fn images(of: &[u32]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: Vec<u8>| fs::write(directory.path().join(name), bytes).unwrap();
        let mut tree = Vec::new();
        for (pid, net) in (1..).zip(of) {
            tree.push(ProcessTreeEntry { pid, ..ProcessTreeEntry::default() });
            let ids = Ids { net: Some(*net), ..Ids::default() };
            write(&format!("ids-{pid}.img"), image(ImageKind::Ids, &[ids]));
        }
        write("pstree.img", image(ImageKind::ProcessTree, &tree));
        directory
    }

    #[test]
    fn the_image_is_the_one_that_criu_writes() {
        let directory = images(&[10, 10]);
        assert!(inventory(directory.path()).is_err(), "it needs none");
        bring_network(directory.path(), "extRootNetNS").unwrap();
        let written = fs::read(directory.path().join("netns-10.img")).unwrap();
        assert_eq!(written, b"\x19\x43VTR7\x93\x55\x0e\0\0\0\x42\x0cextRootNetNS");
    }

    #[test]
    fn processes_in_several_namespaces_are_refused() {
        for of in [&[10, 11][..], &[]] {
            let error = bring_network(images(of).path(), "x").unwrap_err().to_string();
            assert!(error.contains("not in one network namespace"), "{error}");
        }
    }
}
