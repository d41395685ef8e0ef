//! The file that a container has from its image at a path, found in the layers themselves.
//!
//! A mount shows what the container has made of its files. Who needs the file that came with the image reads the
//! layers, by the rules of overlayfs (Documentation/filesystems/overlayfs.rst, and `ovl_lookup` of
//! `fs/overlayfs/namei.c`), from the topmost layer down to the lowest:
//!
//! ```text
//! a layer has at the path or at a prefix of it   and then
//! nothing                                        the layer below is asked
//! a directory, at a prefix                       goes on in it, and in those of the layers below
//! an opaque directory, at a prefix               goes on in it, and no layer below is asked
//! a whiteout, or anything else at a prefix       there is no file
//! a regular file, at the path                    it is the file
//! anything else at the path                      there is no file
//! a redirect, or a file without its data         an error: what overlayfs shows lies elsewhere
//! ```
//!
//! Layers come from strangers: no symbolic link is followed, no mount is entered, and devices are never opened.

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::FileType;

use crate::beneath::{self, Links, Node, Root};

/// The attributes of overlayfs, as root's and as a user's (the mount option `userxattr`).
const PREFIXES: [&str; 2] = ["trusted.overlay.", "user.overlay."];
/// Hides what the layers below have in the directory, by the value `y`.
const OPAQUE: &str = "opaque";
/// The directory has another name in the layers below, or the file has.
const REDIRECT: &str = "redirect";
/// The file's data are in a layer below.
const METACOPY: &str = "metacopy";
/// The file is a whiteout (Linux 6.7).
const WHITEOUT: &str = "whiteout";

/// What a container has from its image at a path.
#[derive(Debug)]
pub enum OfLayers {
    /// This regular file, open for reading.
    File(File),
    /// No regular file.
    Absent,
    /// Not what the layers have, for the container has changed the path or a directory of it.
    Changed,
}

/// Finds the regular file that a container's root filesystem has at a path. `lower` has the directories of the unpacked
/// layers, lowest first, as overlayfs takes them, and `upper` is the directory of the container's own changes. The path
/// is absolute and has no links, as the kernel tells it in `/proc/PID/exe`.
///
/// # Errors
/// When the path is not of this form, a layer cannot be read, or refers to another place for the file.
pub fn file_of_layers(lower: &[PathBuf], upper: Option<&Path>, path: &[u8]) -> io::Result<OfLayers> {
    let invalid = |reason: &str| {
        let text = format!("there is no file {}: {reason}", beneath::display(path).escape_debug());
        io::Error::new(io::ErrorKind::InvalidInput, text)
    };
    let below = path.strip_prefix(b"/").ok_or_else(|| invalid("it is not an absolute path"))?;
    beneath::check_path(below).map_err(invalid)?;
    if below.is_empty() {
        return Ok(OfLayers::Absent);
    }
    if let Some(upper) = upper
        && !matches!(said_by(upper, below)?, Said::Nothing)
    {
        return Ok(OfLayers::Changed);
    }
    for layer in lower.iter().rev() {
        match said_by(layer, below)? {
            Said::Nothing => {}
            Said::Hidden => return Ok(OfLayers::Absent),
            Said::Elsewhere => {
                let (layer, path) = (layer.display(), beneath::display(path));
                let text = format!("layer {layer} refers to another place for {path}");
                return Err(io::Error::new(io::ErrorKind::Unsupported, text));
            }
            // Through the descriptor, so that it is the file that was examined.
            Said::File(file) => return Ok(OfLayers::File(File::open(file.magic())?)),
        }
    }
    Ok(OfLayers::Absent)
}

/// What a layer says of a path.
enum Said {
    /// Nothing, so that the layer below is asked.
    Nothing,
    /// There is no file, whatever the layers below have.
    Hidden,
    /// What is there has its data, or what belongs into it, in another place.
    Elsewhere,
    /// This regular file is there.
    File(Node),
}

fn said_by(layer: &Path, path: &[u8]) -> io::Result<Said> {
    // overlayfs merges the roots of all layers, whatever attributes they have.
    let mut directory = Root::open(layer, Links::Refused)?.without_mounts();
    let mut nothing = Said::Nothing;
    let mut names = path.split(|byte| *byte == b'/').peekable();
    while let Some(name) = names.next() {
        let Some(node) = directory.node_if_any(name)? else { return Ok(nothing) };
        let stat = node.statx()?;
        match (FileType::from_raw_mode(stat.stx_mode.into()), names.peek()) {
            (FileType::Directory, Some(_)) => {}
            (FileType::RegularFile, None) => return said_of_file(node),
            _ => return Ok(Said::Hidden),
        }
        if has(&node, REDIRECT, |_| true)? {
            return Ok(Said::Elsewhere);
        }
        if has(&node, OPAQUE, |value| value == b"y")? {
            nothing = Said::Hidden;
        }
        directory = Root::of(node.into(), Links::Refused).without_mounts();
    }
    Ok(nothing)
}

fn said_of_file(file: Node) -> io::Result<Said> {
    if has(&file, WHITEOUT, |_| true)? {
        return Ok(Said::Hidden);
    }
    let is_elsewhere = has(&file, METACOPY, |_| true)? || has(&file, REDIRECT, |_| true)?;
    Ok(if is_elsewhere { Said::Elsewhere } else { Said::File(file) })
}

/// Whether one of overlayfs's attributes is there, with such a value.
fn has(node: &Node, name: &str, is_meant: impl Fn(&[u8]) -> bool) -> io::Result<bool> {
    for prefix in PREFIXES {
        let value = node.xattr(format!("{prefix}{name}").as_bytes())?;
        if value.is_some_and(|value| is_meant(&value)) {
            return Ok(true);
        }
    }
    Ok(false)
}
