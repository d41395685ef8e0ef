//! The mode of a container's root directory, which each engine makes with its own: Podman's containers have 0555, whatever the
//! image says. CRIU refuses to open a directory that has another mode than at the dump; without one in the images it does not look.

use std::borrow::Cow;
use std::path::Path;

use prost::Message;

use crate::images::wire::Fields;
use crate::images::{FileEntry, ImageError, ImageKind, rewrite};

/// The field of a `file_entry` that is its `reg_file_entry`.
const REGULAR: u32 = 3;
/// The field of a `reg_file_entry` that is the mode.
const MODE: u32 = 10;
/// Kind of file in `st_mode`, and that of a directory.
const KIND: u32 = 0o17_0000;
const DIRECTORY: u32 = 0o4_0000;

/// Takes the mode of the root directory out of the images; whether it was there.
///
/// # Errors
/// The images cannot be read, are damaged, or cannot be written.
pub fn forget_root_mode(images: &Path) -> Result<bool, ImageError> {
    let mut found = false;
    rewrite(&images.join("files.img"), ImageKind::Files, |records| {
        let mut changed = Vec::with_capacity(records.len());
        for record in records {
            let entry = FileEntry::decode(*record).map_err(|error| error.to_string())?;
            let is_root = entry.regular.is_some_and(|file| {
                matches!(&file.name[..], b"/" | b".")
                    && file.mode.is_some_and(|mode| mode & KIND == DIRECTORY)
            });
            changed.push(match is_root {
                true => Cow::Owned(without_mode(record)?),
                false => Cow::Borrowed(*record),
            });
            found |= is_root;
        }
        Ok(found.then_some(changed))
    })?;
    Ok(found)
}

/// A record without the mode.
fn without_mode(record: &[u8]) -> Result<Vec<u8>, String> {
    let mut fields = Fields::decode(record)?;
    fields.change(REGULAR, |fields| {
        fields.remove(MODE);
        Ok(())
    })?;
    Ok(fields.encode())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::images::{RegularFile, split};

    #[test]
    fn the_root_alone_loses_its_mode_and_nothing_else() {
        let file = |id, name: &str, mode| FileEntry {
            kind: 1,
            id,
            regular: Some(RegularFile { name: name.into(), mode: Some(mode) }),
        };
        let all = [file(1, "/", 0o4_0755), file(2, "/etc", 0o4_0755), file(3, "/", 0o10_0644)];
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("files.img");
        let mut bytes = [0x5456_4319_u32, 0x5630_3138].map(u32::to_le_bytes).concat();
        for entry in &all {
            // Field 40, which is not known here.
            let record = [&entry.encode_to_vec()[..], &[0xc0, 2, 7]].concat();
            bytes.extend(u32::try_from(record.len()).unwrap().to_le_bytes());
            bytes.extend(record);
        }
        std::fs::write(&path, &bytes).unwrap();
        assert!(forget_root_mode(directory.path()).unwrap());
        let changed = std::fs::read(&path).unwrap();
        let (_, records) = split(&changed, ImageKind::Files).unwrap();
        assert!(records.iter().all(|record| record.ends_with(&[0xc0, 2, 7])));
        let read: Vec<_> = records.iter().map(|record| FileEntry::decode(*record).unwrap()).collect();
        assert_eq!(read[0].regular.as_ref().unwrap().mode, None);
        assert_eq!(read[1..], all[1..]);
        assert!(!forget_root_mode(directory.path()).unwrap());
    }
}
