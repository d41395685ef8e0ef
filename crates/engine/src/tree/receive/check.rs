//! The rules that an entry must keep, whatever is there already.

use super::{Entry, Kind, MAX_NAME, MAX_PATH, MAX_XATTR_TOTAL};
use crate::beneath;

/// Longest value of an extended attribute, in bytes: the kernel's `XATTR_SIZE_MAX`.
const MAX_XATTR_VALUE: usize = 64 << 10;
/// Namespaces of extended attributes that are taken; all that a filesystem below an overlay keeps.
const XATTR_NAMESPACES: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
/// Access lists, the only ones of the `system` namespace.
const XATTR_ACCESS_LISTS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];

/// Checks all that can be checked of an entry by itself.
pub(super) fn check(entry: &Entry) -> Result<Kind, &'static str> {
    let kind = Kind::try_from(entry.kind).unwrap_or(Kind::Invalid);
    beneath::check_path(&entry.path)?;
    if kind == Kind::Invalid {
        return Err("its kind is unknown");
    }
    if entry.path.is_empty() && kind != Kind::Directory {
        return Err("the root is not a directory");
    }
    if entry.mode > 0o7777 || entry.mtime_nanoseconds >= 1_000_000_000 {
        return Err("its mode or its time is out of range");
    }
    // The highest id means "leave as it is" to chown(2).
    if entry.uid == u32::MAX || entry.gid == u32::MAX {
        return Err("its owner is out of range");
    }
    if entry.content.is_some() && kind != Kind::File {
        return Err("its content is to come in another way, and it is no file");
    }
    if (entry.kept || entry.held.is_some()) && (kind != Kind::File || entry.content.is_some()) {
        return Err("it is to be a file of an earlier round, and is no file itself");
    }
    if entry.kept && entry.held.is_some() {
        return Err("it is to be two files of an earlier round");
    }
    if entry.size > 0 && kind != Kind::File || i64::try_from(entry.size).is_err() {
        return Err("its size is out of range");
    }
    let link = &entry.link_target;
    if link.is_empty() == (kind == Kind::Symlink) || link.len() > MAX_PATH || link.contains(&0) {
        return Err("its link target is missing, too long or not allowed");
    }
    let target = &entry.hard_link_of;
    if target.is_empty() == (kind == Kind::HardLink) || *target == entry.path && !target.is_empty() {
        return Err("its hard link's target is missing or not allowed");
    }
    beneath::check_path(target).map_err(|_| "its hard link's target is not a path within the tree")?;
    let is_device = matches!(kind, Kind::CharacterDevice | Kind::BlockDevice);
    if !is_device && (entry.rdev_major, entry.rdev_minor) != (0, 0) {
        return Err("it has a device number but is not a device");
    }
    check_xattrs(entry)?;
    Ok(kind)
}

fn check_xattrs(entry: &Entry) -> Result<(), &'static str> {
    let mut total = 0;
    let mut previous: Option<&[u8]> = None;
    for xattr in &entry.xattrs {
        let name = xattr.name.as_slice();
        let known = XATTR_NAMESPACES.iter().any(|space| name.starts_with(space) && name.len() > space.len())
            || XATTR_ACCESS_LISTS.contains(&name);
        if !known || name.len() > MAX_NAME || name.contains(&0) {
            return Err("the name of an extended attribute is not allowed");
        }
        if previous.is_some_and(|previous| previous >= name) {
            return Err("its extended attributes are not in order");
        }
        previous = Some(name);
        total += name.len() + xattr.value.len();
        if xattr.value.len() > MAX_XATTR_VALUE || total > MAX_XATTR_TOTAL {
            return Err("its extended attributes are too large");
        }
    }
    Ok(())
}
