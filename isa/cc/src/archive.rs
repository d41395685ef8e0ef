//! Reading `ar` archives: where each member's bytes are.
//!
//! ```text
//! "!<arch>\n"  ( header of 60 bytes, contents, padding to an even offset )*
//! header: name 16, time 12, owner 6, group 6, mode 8, size 10 (decimal), "`\n"
//! ```
//! Names of more than 15 bytes are in a member called `//`, and the header has `/OFFSET`; `/` and
//! `/SYM64/` are tables of symbols. BSD's form (`#1/LENGTH`) has the name before the contents.

use std::ops::Range;

/// What an archive begins with.
pub const MAGIC: &[u8] = b"!<arch>\n";
/// A thin archive's members are files elsewhere.
pub const THIN_MAGIC: &[u8] = b"!<thin>\n";
const HEADER: usize = 60;

/// One member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Its name; several may have the same.
    pub name: String,
    /// Where its contents are in the archive.
    pub range: Range<usize>,
}

/// The bytes are no archive, or it ends too early.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the archive is damaged at byte {at}: {what}")]
pub struct DamagedArchive {
    /// Where.
    pub at: usize,
    /// What is wrong there.
    pub what: &'static str,
}

/// The members in their order, without the tables.
///
/// # Errors
/// When the bytes are not an archive.
pub fn members(bytes: &[u8]) -> Result<Vec<Member>, DamagedArchive> {
    if !bytes.starts_with(MAGIC) {
        return Err(DamagedArchive { at: 0, what: "it does not begin like one" });
    }
    let mut members = Vec::new();
    let mut names: &[u8] = &[];
    let mut at = MAGIC.len();
    while at < bytes.len() {
        let damaged = |what| DamagedArchive { at, what };
        let header = bytes.get(at..at + HEADER).ok_or(damaged("a header is cut off"))?;
        if &header[58..60] != b"`\n" {
            return Err(damaged("there is no header"));
        }
        let size = number(&header[48..58]).ok_or(damaged("the size is not a number"))?;
        let start = at + HEADER;
        let end = start
            .checked_add(size)
            .filter(|end| *end <= bytes.len())
            .ok_or(damaged("a member is cut off"))?;
        let name = text(&header[..16]);
        match name.as_str() {
            "/" | "/SYM64/" | "__.SYMDEF" | "__.SYMDEF SORTED" => {}
            "//" => names = &bytes[start..end],
            _ => {
                let (name, skip) =
                    full_name(&name, names, &bytes[start..end]).ok_or(damaged("a name is missing"))?;
                if !name.starts_with("__.SYMDEF") {
                    members.push(Member { name, range: start + skip..end });
                }
            }
        }
        at = end + end % 2;
    }
    Ok(members)
}

/// The name, and how many bytes of the contents it takes.
fn full_name(short: &str, names: &[u8], contents: &[u8]) -> Option<(String, usize)> {
    if let Some(offset) = short.strip_prefix('/') {
        let rest = names.get(offset.parse::<usize>().ok()?..)?;
        let end = rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len());
        let name = String::from_utf8_lossy(&rest[..end]);
        return Some((name.strip_suffix('/').unwrap_or(&name).to_owned(), 0));
    }
    if let Some(length) = short.strip_prefix("#1/") {
        let length = length.parse().ok()?;
        let name = contents.get(..length)?;
        return Some((text(name).trim_end_matches('\0').to_owned(), length));
    }
    Some((short.strip_suffix('/').unwrap_or(short).to_owned(), 0))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end().to_owned()
}

fn number(bytes: &[u8]) -> Option<usize> {
    text(bytes).parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, contents: &[u8]) -> Vec<u8> {
        let mut bytes =
            format!("{name:<16}{:<12}{:<6}{:<6}{:<8}{:<10}`\n", 0, 0, 0, 644, contents.len()).into_bytes();
        bytes.extend_from_slice(contents);
        if bytes.len() % 2 == 1 {
            bytes.push(b'\n');
        }
        bytes
    }

    #[test]
    fn members_of_all_kinds_of_names_are_found() {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(member("/", b"table"));
        bytes.extend(member("//", b"a_very_long_member_name.o/\nanother_very_long_name.o/\n"));
        bytes.extend(member("short.o/", b"one"));
        bytes.extend(member("/0", b"two!"));
        bytes.extend(member("/27", b"three"));
        bytes.extend(member("#1/8", b"bsd.o\0\0\0four"));
        let found = members(&bytes).unwrap_or_default();
        let seen: Vec<(&str, &[u8])> =
            found.iter().map(|member| (member.name.as_str(), &bytes[member.range.clone()])).collect();
        assert_eq!(
            seen,
            [
                ("short.o", b"one".as_slice()),
                ("a_very_long_member_name.o", b"two!"),
                ("another_very_long_name.o", b"three"),
                ("bsd.o", b"four"),
            ]
        );
    }

    #[test]
    fn an_archive_that_is_cut_off_anywhere_is_refused_or_whole() {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(member("a.o/", b"contents"));
        bytes.extend(member("b.o/", b"more"));
        let first = MAGIC.len() + HEADER + 8;
        for length in 0..bytes.len() {
            let found = members(&bytes[..length]);
            assert_eq!(found.is_ok(), length == MAGIC.len() || length == first, "cut at {length}: {found:?}");
        }
    }

    #[test]
    fn a_size_beyond_the_end_is_refused() {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(format!("{:<16}{:<32}{:<10}`\n", "a.o/", "", 9_999_999_999_u64).into_bytes());
        assert!(members(&bytes).is_err());
    }
}
