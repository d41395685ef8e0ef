//! Mounts of overlayfs (Documentation/filesystems/overlayfs.rst).
//!
//! From Linux 6.5 on layers are given one by one to the new mount interface. Before, all of them
//! must fit in one page of options, as text in which `:` and `,` mean something; there the layers
//! are opened and named by their descriptors (`/proc/self/fd/N`), which keeps them short and free
//! of such characters.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_string, fsmount, fsopen, move_mount, unmount,
};

use super::RootfsError;

/// Most layers below a root filesystem. overlayfs stacks 500; descriptors of this many fit in a
/// page of options on kernels before 6.5. The largest images have 127 (Docker's bound).
pub const MAX_LAYERS: usize = 200;
/// The type in statfs(2) (`OVERLAYFS_SUPER_MAGIC`).
const OVERLAYFS_MAGIC: i64 = 0x794c_7630;
/// Longest string fsconfig(2) takes.
const MAX_PARAMETER: usize = 255;
/// How often a target is unmounted when something was mounted over it again and again.
const MAX_STACKED: usize = 16;
/// What is switched off: everything that would tie the upper directory to this node's layers by
/// more than names, so that it can be carried to another node.
const OPTIONS: [(&str, &str); 4] =
    [("index", "off"), ("metacopy", "off"), ("redirect_dir", "nofollow"), ("xino", "off")];

/// A container's root filesystem: layers that are shared and read only, and its own changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overlay {
    /// Directories of the layers, lowest first; at least one.
    pub lower: Vec<PathBuf>,
    /// Directory of the changes.
    pub upper: PathBuf,
    /// Directory overlayfs works in; on the same filesystem as `upper`, and empty.
    pub work: PathBuf,
    /// Where the root filesystem appears.
    pub target: PathBuf,
}

impl Overlay {
    /// Mounts it; `upper`, `work` and `target` are made when they are not there. A new upper
    /// directory gets owner and mode of the topmost layer's root, for overlayfs shows the upper
    /// directory's as those of `/`. Nothing happens when it is mounted already.
    pub fn mount(&self) -> Result<(), RootfsError> {
        if self.is_mounted()? {
            return Ok(());
        }
        if self.lower.len() > MAX_LAYERS {
            let (target, layers) = (self.target.clone(), self.lower.len());
            return Err(RootfsError::TooManyLayers { target, layers, limit: MAX_LAYERS });
        }
        let is_new = !self.upper.exists();
        for directory in [&self.upper, &self.work, &self.target] {
            std::fs::create_dir_all(directory)
                .map_err(|error| self.fault(format!("make the directory {}", directory.display()), error))?;
        }
        if is_new && let Some(top) = self.lower.last() {
            let copied = std::fs::metadata(top).and_then(|metadata| {
                std::os::unix::fs::chown(&self.upper, Some(metadata.uid()), Some(metadata.gid()))?;
                std::fs::set_permissions(&self.upper, metadata.permissions())
            });
            copied.map_err(|error| self.no_directory(top, error))?;
        }
        match self.mount_layer_by_layer() {
            Ok(()) => Ok(()),
            Err(Refusal::NotKnown) => self.mount_by_options(),
            Err(Refusal::Failed(error)) => Err(error),
        }
    }

    /// Whether an overlayfs is mounted at the target.
    pub fn is_mounted(&self) -> Result<bool, RootfsError> {
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        let stat = match rustix::fs::statx(CWD, &self.target, flags, StatxFlags::BASIC_STATS) {
            Ok(stat) => stat,
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(false),
            Err(error) => return Err(self.fault("examine it".into(), error.into())),
        };
        if !stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
            return Ok(false);
        }
        let stat = rustix::fs::statfs(&self.target)
            .map_err(|error| self.fault("examine it".into(), error.into()))?;
        Ok(stat.f_type == OVERLAYFS_MAGIC)
    }

    /// Unmounts it, with all that is mounted on the target; no error when nothing is. What is in
    /// use goes away once it is not.
    pub fn unmount(&self) -> Result<(), RootfsError> {
        for _ in 0..MAX_STACKED {
            let result = match unmount(&self.target, UnmountFlags::NOFOLLOW) {
                Err(Errno::BUSY) => unmount(&self.target, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH),
                other => other,
            };
            match result {
                Ok(()) => {}
                Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
                Err(error) => return Err(self.fault("unmount it".into(), error.into())),
            }
        }
        Err(self.fault("unmount it".into(), io::ErrorKind::ResourceBusy.into()))
    }

    /// The way of Linux 6.5 and newer.
    fn mount_layer_by_layer(&self) -> Result<(), Refusal> {
        let context = match fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC) {
            Ok(context) => context,
            Err(Errno::NOSYS) => return Err(Refusal::NotKnown),
            Err(error) => return Err(self.failed("open overlayfs", error)),
        };
        // Descriptors that stand for paths too long for the interface live until the mount is made.
        let mut held = Vec::new();
        for layer in self.lower.iter().rev() {
            let text = parameter(layer, &mut held).map_err(|error| self.no_directory(layer, error))?;
            match fsconfig_set_string(&context, "lowerdir+", &text) {
                Ok(()) => {}
                // Kernels before 6.5 either do not know it, or gather all options as text, and then
                // refuse a comma in it or more than a page of them.
                Err(Errno::INVAL | Errno::OPNOTSUPP) => return Err(Refusal::NotKnown),
                Err(error) => return Err(Refusal::Failed(self.no_directory(layer, error.into()))),
            }
        }
        for (name, directory) in [("upperdir", &self.upper), ("workdir", &self.work)] {
            let text =
                parameter(directory, &mut held).map_err(|error| self.no_directory(directory, error))?;
            fsconfig_set_string(&context, name, &text)
                .map_err(|error| Refusal::Failed(self.no_directory(directory, error.into())))?;
        }
        for (name, value) in OPTIONS {
            fsconfig_set_string(&context, name, value)
                .map_err(|error| self.failed(&format!("set {name}={value} of overlayfs"), error))?;
        }
        match fsconfig_create(&context) {
            Ok(()) => {}
            Err(error) => {
                let reason = messages(&context);
                // A kernel that gathered all options as text refuses lowerdir+ only now.
                if reason.contains("lowerdir+") || error == Errno::INVAL && reason.is_empty() {
                    return Err(Refusal::NotKnown);
                }
                return Err(self.failed(&format!("make the overlayfs {reason}"), error));
            }
        }
        let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
            .map_err(|error| self.failed("mount the overlayfs", error))?;
        move_mount(&mount, "", CWD, &self.target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
            .map_err(|error| self.failed("mount it there", error))
    }

    /// The way of older kernels.
    pub(super) fn mount_by_options(&self) -> Result<(), RootfsError> {
        let mut held = Vec::new();
        let mut name = |directory: &Path| {
            let opened = open_directory(directory).map_err(|error| self.no_directory(directory, error))?;
            let text = format!("/proc/self/fd/{}", opened.as_raw_fd());
            held.push(opened);
            Ok::<String, RootfsError>(text)
        };
        let lower: Result<Vec<String>, RootfsError> =
            self.lower.iter().rev().map(|layer| name(layer)).collect();
        let (lower, upper, work) = (lower?.join(":"), name(&self.upper)?, name(&self.work)?);
        let mut options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
        for (name, value) in OPTIONS {
            options.push_str(&format!(",{name}={value}"));
        }
        let options = std::ffi::CString::new(options)
            .map_err(|error| self.fault("name its layers".into(), error.into()))?;
        rustix::mount::mount("overlay", &self.target, "overlay", MountFlags::empty(), options.as_c_str())
            .map_err(|error| self.fault("mount the overlayfs".into(), error.into()))
    }

    fn fault(&self, action: String, source: io::Error) -> RootfsError {
        RootfsError::Mount { target: self.target.clone(), action, source }
    }

    fn failed(&self, action: &str, error: Errno) -> Refusal {
        Refusal::Failed(self.fault(action.to_owned(), error.into()))
    }

    fn no_directory(&self, directory: &Path, error: io::Error) -> RootfsError {
        self.fault(format!("use the directory {}", directory.display()), error)
    }
}

/// Why the newer interface did not mount.
enum Refusal {
    /// The kernel does not have it.
    NotKnown,
    /// It has it, and failed.
    Failed(RootfsError),
}

impl From<RootfsError> for Refusal {
    fn from(error: RootfsError) -> Self {
        Self::Failed(error)
    }
}

/// A directory as a parameter of fsconfig(2): its path, or its descriptor when that is too long or
/// holds a backslash, which overlayfs takes as an escape in some parameters.
fn parameter(directory: &Path, held: &mut Vec<OwnedFd>) -> io::Result<OsString> {
    let path = directory.as_os_str();
    if path.len() <= MAX_PARAMETER && !path.as_encoded_bytes().contains(&b'\\') {
        return Ok(path.to_owned());
    }
    let opened = open_directory(directory)?;
    let text = format!("/proc/self/fd/{}", opened.as_raw_fd());
    held.push(opened);
    Ok(text.into())
}

fn open_directory(directory: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(CWD, directory, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// What the kernel has to say of a mount that failed.
fn messages(context: &OwnedFd) -> String {
    let mut text = String::new();
    let mut buffer = [0; 1024];
    while let Ok(read) = rustix::io::read(context.as_fd(), &mut buffer) {
        if read == 0 {
            break;
        }
        text.push_str(&String::from_utf8_lossy(&buffer[..read]));
    }
    text.trim().replace('\n', "; ")
}
