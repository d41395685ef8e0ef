//! `files.img`: something that processes have open, as far as it depends on the instruction set: the flags with which it
//! was opened, and what of a regular file is checked before it is opened again. All else stays byte for byte.

use super::wire::Fields;

/// Fields of `file_entry`.
mod field {
    pub(super) const KIND: u32 = 1;
    pub(super) const NUMBER: u32 = 2;
    pub(super) const REGULAR: u32 = 3;
    /// What has flags of open(2), and the field in which: regular files, sockets (IP, packets, netlink, Unix),
    /// namespaces, eventfd, epoll, signalfd, timerfd, inotify, fanotify and what its events open, pipes, terminals,
    /// memfd, maps of BPF.
    pub(super) const WITH_FLAGS: [(u32, u32); 18] = [
        (3, 2),
        (4, 9),
        (5, 4),
        (6, 4),
        (7, 6),
        (8, 2),
        (9, 2),
        (10, 2),
        (12, 2),
        (13, 2),
        (14, 2),
        (14, 5),
        (16, 5),
        (18, 3),
        (19, 3),
        (20, 2),
        (21, 2),
        (22, 3),
    ];
}

/// Fields of `reg_file_entry`.
mod regular {
    pub(super) const NUMBER: u32 = 1;
    pub(super) const NAME: u32 = 6;
    pub(super) const SIZE: u32 = 8;
    pub(super) const MODE: u32 = 10;
    /// Build ID, checksum and what of the file it is of.
    pub(super) const CONTENTS: [u32; 4] = [11, 12, 13, 14];
}

/// Most that an epoll or inotify watches, each in a field: as many as a process can have open.
const MOST_WATCHED: usize = 1 << 20;
/// `REG` of CRIU's `fd_types`.
const REGULAR: u64 = 1;

/// An entry, taken apart. Its errors say what is wrong with the image.
#[derive(Clone, Debug)]
pub struct OpenedFile<'a> {
    fields: Fields<'a>,
    /// Its number in the images.
    pub number: u32,
}

impl<'a> OpenedFile<'a> {
    /// Takes the record of an image apart.
    pub fn decode(record: &'a [u8]) -> Result<Self, String> {
        let fields = Fields::decode(record)?;
        let number = fields.number32(field::NUMBER)?.ok_or("a file has no number")?;
        // CRIU goes by the kind, and by the number inside.
        let inside = match fields.bytes(field::REGULAR)? {
            None => None,
            Some(regular) => Some(Fields::decode(regular)?.number32(regular::NUMBER)?),
        };
        let is_regular = fields.number(field::KIND)? == Some(REGULAR);
        if is_regular != inside.is_some() || inside.is_some_and(|inside| inside != Some(number)) {
            return Err(format!("file {number} is of another kind or number than what it has"));
        }
        Ok(Self { fields, number })
    }

    /// The record.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        self.fields.encode()
    }

    /// The path of a regular file, as it was opened in the service.
    pub fn path(&self) -> Result<Option<Vec<u8>>, String> {
        let Some(regular) = self.fields.bytes(field::REGULAR)? else { return Ok(None) };
        Ok(Fields::decode(regular)?.bytes(regular::NAME)?.map(<[u8]>::to_vec))
    }

    /// Says of a regular file that it has another size and `st_mode`, and nothing else by which its contents could be
    /// checked (`validate_file` of CRIU's files-reg.c).
    pub fn set_contents(&mut self, size: u64, mode: u32) -> Result<(), String> {
        self.fields.change(field::REGULAR, |fields| {
            fields.set_number(regular::SIZE, size);
            fields.set_number(regular::MODE, mode.into());
            for tag in regular::CONTENTS {
                fields.remove(tag);
            }
            Ok(())
        })?;
        Ok(())
    }

    /// Opens it with other flags of open(2).
    pub fn change_flags(&mut self, change: impl Fn(u32) -> Result<u32, String>) -> Result<(), String> {
        for (kind, tag) in field::WITH_FLAGS {
            self.fields.change_at_most(MOST_WATCHED, kind, |fields| {
                if let Some(flags) = fields.number32(tag)? {
                    let changed = change(flags)?;
                    if changed != flags {
                        fields.set_number(tag, changed.into());
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn file() -> Fields<'static> {
        let mut regular = Fields::default();
        for (tag, number) in [(1, 7), (2, 0o100_002), (3, 44)] {
            regular.set_number(tag, number);
        }
        regular.set_bytes(regular::NAME, b"/usr/bin/redis-server".to_vec());
        for (tag, number) in [(8, 1000), (10, 0o10_0755), (11, 1), (12, 2), (13, 3), (14, 4), (50, 5)] {
            regular.set_number(tag, number);
        }
        let mut fields = Fields::default();
        fields.set_number(1, 1);
        fields.set_number(field::NUMBER, 7);
        fields.set_bytes(field::REGULAR, regular.encode());
        fields.set_bytes(60, vec![1]);
        fields
    }

    #[test]
    fn another_executable_has_another_size_and_mode_and_no_checksum() {
        let before = file().encode();
        let mut entry = OpenedFile::decode(&before).unwrap();
        assert_eq!((entry.number, entry.path()), (7, Ok(Some(b"/usr/bin/redis-server".to_vec()))));
        entry.set_contents(2000, 0o10_0700).unwrap();
        let after = entry.encode();
        let regular = OpenedFile::decode(&after).unwrap();
        let regular = Fields::decode(regular.fields.bytes(field::REGULAR).unwrap().unwrap()).unwrap();
        let numbers = [1, 2, 3, 8, 10, 11, 12, 13, 14, 50].map(|tag| regular.number(tag).unwrap());
        let kept = [Some(7), Some(0o100_002), Some(44), Some(2000), Some(0o10_0700)];
        assert_eq!(numbers, [&kept[..], &[None, None, None, None, Some(5)]].concat()[..]);
        assert!(after.ends_with(&[1, 1]), "the field that is not known here");
    }

    #[test]
    fn a_file_that_is_another_inside_is_refused() {
        let changed = |tag, inner: bool, value| {
            let mut fields = file();
            if inner {
                fields
                    .change(field::REGULAR, |fields| {
                        fields.set_number(tag, value);
                        Ok(())
                    })
                    .unwrap();
            } else {
                fields.set_number(tag, value);
            }
            OpenedFile::decode(&fields.encode()).map(|file| file.number)
        };
        assert_eq!(changed(field::KIND, false, REGULAR), Ok(7));
        assert!(changed(field::KIND, false, 2).is_err(), "a pipe");
        assert!(changed(field::NUMBER, false, 8).is_err());
        assert!(changed(regular::NUMBER, true, 8).is_err());
    }

    #[test]
    fn flags_of_each_kind_are_changed_and_a_refusal_is_told() {
        // The fields of `file_entry` from `reg` to `pidfd` in CRIU's `fdinfo.proto`, and those of each that are its flags.
        let all: [(u32, &[u32]); 20] = [
            (3, &[2]),
            (4, &[9]),
            (5, &[4]),
            (6, &[4]),
            (7, &[6]),
            (8, &[2]),
            (9, &[2]),
            (10, &[2]),
            (11, &[]),
            (12, &[2]),
            (13, &[2]),
            (14, &[2, 5]),
            (15, &[]),
            (16, &[5]),
            (17, &[]),
            (18, &[3]),
            (19, &[3]),
            (20, &[2]),
            (21, &[2]),
            (22, &[3]),
        ];
        for (kind, flags) in all {
            let mut inner = Fields::default();
            for tag in 1..=12 {
                inner.set_number(tag, 3);
            }
            let mut fields = Fields::default();
            fields.set_number(field::KIND, if kind == 3 { 1 } else { 2 });
            fields.set_number(field::NUMBER, 3);
            fields.set_bytes(kind, inner.encode());
            let before = fields.encode();
            let mut entry = OpenedFile::decode(&before).unwrap();
            entry.change_flags(Ok).unwrap();
            assert_eq!(entry.encode(), before);
            entry.change_flags(|flags| Ok(flags << 4)).unwrap();
            let inner = Fields::decode(entry.fields.bytes(kind).unwrap().unwrap()).unwrap();
            for tag in 1..=12 {
                let expected = if flags.contains(&tag) { 48 } else { 3 };
                assert_eq!(inner.number(tag), Ok(Some(expected)), "{kind} {tag}");
            }
            let refused = entry.change_flags(|_| Err("no".into()));
            assert_eq!(refused, if flags.is_empty() { Ok(()) } else { Err("no".to_owned()) });
        }
    }
}
