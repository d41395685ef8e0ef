//! Builds a container's root filesystem out of programs that are installed on this machine.
//!
//! The shared libraries of each program come along, as `ldd` tells them. The result has the layout of
//! a merged /usr and the few files of /etc that programs look for.

use std::{
    collections::{BTreeSet, HashSet},
    fs, io,
    io::Read,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Component, Path, PathBuf},
    process::{Command, Stdio},
};

use crate::error::{Context, LabError};

/// Directories every root filesystem has, with their modes.
const DIRECTORIES: [(&str, u32); 15] = [
    ("dev", 0o755),
    ("etc", 0o755),
    ("home", 0o755),
    ("proc", 0o555),
    ("root", 0o700),
    ("run", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("usr/bin", 0o755),
    ("usr/lib", 0o755),
    ("usr/lib64", 0o755),
    ("usr/sbin", 0o755),
    ("var/lib", 0o755),
    ("var/log", 0o755),
    ("var/tmp", 0o1777),
];
/// Where the old places of programs and libraries point to.
const LINKS: [(&str, &str); 5] = [
    ("bin", "usr/bin"),
    ("lib", "usr/lib"),
    ("lib64", "usr/lib64"),
    ("sbin", "usr/sbin"),
    ("var/run", "../run"),
];
/// Files given to one run of `ldd`.
const LDD_BATCH: usize = 200;

/// A root filesystem under construction.
#[derive(Debug)]
pub struct Rootfs {
    root: PathBuf,
    copied: HashSet<PathBuf>,
}

impl Rootfs {
    /// Begins in a directory that does not exist yet or is empty.
    ///
    /// # Errors
    /// The directory cannot be made or is not empty.
    pub fn new(root: impl Into<PathBuf>) -> Result<Self, LabError> {
        let root = root.into();
        fs::create_dir_all(&root).context("creating", root.display())?;
        if fs::read_dir(&root).context("reading", root.display())?.next().is_some() {
            return Err(io::Error::from(io::ErrorKind::DirectoryNotEmpty))
                .context("building a root filesystem in", root.display());
        }
        fs::set_permissions(&root, fs::Permissions::from_mode(0o755))
            .context("setting mode of", root.display())?;
        let this = Self { root, copied: HashSet::new() };
        for (directory, mode) in DIRECTORIES {
            this.directory(&Path::new("/").join(directory), mode)?;
        }
        for (link, target) in LINKS {
            symlink(target, this.root.join(link)).context("linking", link)?;
        }
        this.text(
            "/etc/passwd",
            "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
        )?
        .text("/etc/group", "root:x:0:\nnogroup:x:65534:\n")?
        .text("/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")?
        .text("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// Copies one file, what its name links to, with the libraries it needs.
    ///
    /// # Errors
    /// It is missing, or one of its libraries is.
    pub fn binary(mut self, path: impl AsRef<Path>) -> Result<Self, LabError> {
        let path = path.as_ref();
        if !path.is_file() {
            return Err(missing(path));
        }
        self.copy(path)?;
        self.libraries_of(&[path.to_owned()])?;
        Ok(self)
    }

    /// Copies a directory with all below it but the entries whose names are in `without`, and the
    /// libraries that programs and modules in it need. Links in it stay links.
    ///
    /// # Errors
    /// It is missing, or a library is.
    pub fn tree(mut self, path: impl AsRef<Path>, without: &[&str]) -> Result<Self, LabError> {
        let path = path.as_ref();
        if !path.is_dir() {
            return Err(missing(path));
        }
        let mut programs = Vec::new();
        self.copy_tree(path, without, &mut programs)?;
        self.libraries_of(&programs)?;
        Ok(self)
    }

    /// Writes a file of mode 0644.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn file(self, path: impl AsRef<Path>, content: impl AsRef<[u8]>) -> Result<Self, LabError> {
        let target = self.inside(path.as_ref());
        self.parents(&target)?;
        fs::write(&target, content).context("writing", target.display())?;
        fs::set_permissions(&target, fs::Permissions::from_mode(0o644))
            .context("setting mode of", target.display())?;
        Ok(self)
    }

    fn text(self, path: &str, content: &str) -> Result<Self, LabError> {
        self.file(path, content)
    }

    /// Makes a symbolic link at `path`.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn link(self, path: impl AsRef<Path>, target: impl AsRef<Path>) -> Result<Self, LabError> {
        let link = self.inside(path.as_ref());
        self.parents(&link)?;
        symlink(target, &link).context("linking", link.display())?;
        Ok(self)
    }

    /// Adds a user with a group of the same name and number, and `home` owned by it.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn user(self, name: &str, id: u32, home: impl AsRef<Path>) -> Result<Self, LabError> {
        let home = home.as_ref();
        for (file, line) in [
            ("etc/passwd", format!("{name}:x:{id}:{id}:{name}:{}:/bin/false\n", home.display())),
            ("etc/group", format!("{name}:x:{id}:\n")),
        ] {
            let path = self.root.join(file);
            let mut text = fs::read_to_string(&path).context("reading", path.display())?;
            text.push_str(&line);
            fs::write(&path, text).context("writing", path.display())?;
        }
        self.owned_directory(home, 0o750, id)
    }

    /// Makes a directory that belongs to user and group `id`.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn owned_directory(self, path: impl AsRef<Path>, mode: u32, id: u32) -> Result<Self, LabError> {
        let directory = self.directory(path.as_ref(), mode)?;
        std::os::unix::fs::chown(&directory, Some(id), Some(id))
            .context("giving away", directory.display())?;
        Ok(self)
    }

    fn directory(&self, path: &Path, mode: u32) -> Result<PathBuf, LabError> {
        let directory = self.inside(path);
        fs::create_dir_all(&directory).context("creating", directory.display())?;
        fs::set_permissions(&directory, fs::Permissions::from_mode(mode))
            .context("setting mode of", directory.display())?;
        Ok(directory)
    }

    /// The place of an absolute path in here. Parent components are dropped, so it stays in here.
    fn inside(&self, path: &Path) -> PathBuf {
        self.root
            .join(path.components().filter(|part| matches!(part, Component::Normal(_))).collect::<PathBuf>())
    }

    fn parents(&self, target: &Path) -> Result<(), LabError> {
        match target.parent() {
            Some(parent) => fs::create_dir_all(parent).context("creating", parent.display()),
            None => Ok(()),
        }
    }

    /// Copies a file under the name it was asked for by; symbolic links are followed.
    fn copy(&mut self, path: &Path) -> Result<(), LabError> {
        if !self.copied.insert(path.to_owned()) {
            return Ok(());
        }
        let target = self.inside(path);
        self.parents(&target)?;
        fs::copy(path, &target).map(|_| ()).context("copying", path.display())
    }

    fn copy_tree(
        &mut self,
        path: &Path,
        without: &[&str],
        programs: &mut Vec<PathBuf>,
    ) -> Result<(), LabError> {
        let target = self.inside(path);
        fs::create_dir_all(&target).context("creating", target.display())?;
        for entry in fs::read_dir(path).context("reading", path.display())? {
            let entry = entry.context("reading", path.display())?;
            let (name, source) = (entry.file_name(), entry.path());
            if without.iter().any(|excluded| name == *excluded) {
                continue;
            }
            let kind = entry.file_type().context("reading", source.display())?;
            if kind.is_dir() {
                self.copy_tree(&source, without, programs)?;
            } else if kind.is_symlink() {
                let link = fs::read_link(&source).context("reading", source.display())?;
                symlink(link, target.join(name)).context("linking", source.display())?;
            } else if kind.is_file() {
                self.copy(&source)?;
                if is_elf(&source) {
                    programs.push(source);
                }
            }
        }
        Ok(())
    }

    fn libraries_of(&mut self, programs: &[PathBuf]) -> Result<(), LabError> {
        for batch in programs.chunks(LDD_BATCH) {
            let output =
                Command::new("ldd").args(batch).stdin(Stdio::null()).output().context("running", "ldd")?;
            // It fails if any of the files is static; what it says of the others holds all the same.
            let libraries =
                parse_ldd(&String::from_utf8_lossy(&output.stdout)).map_err(|library| LabError::Rootfs {
                    object: library,
                    problem: "is not installed".to_owned(),
                    advice: "install the package that has it".to_owned(),
                })?;
            for library in libraries {
                self.copy(&library)?;
            }
        }
        Ok(())
    }
}

fn missing(path: &Path) -> LabError {
    LabError::Rootfs {
        object: path.display().to_string(),
        problem: "is not installed".to_owned(),
        advice: "run scripts/setup, or install the package that has it".to_owned(),
    }
}

fn is_elf(path: &Path) -> bool {
    let mut magic = [0; 4];
    fs::File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == *b"\x7fELF"
}

/// The libraries and the loader that `ldd` names, or the first it did not find.
fn parse_ldd(output: &str) -> Result<BTreeSet<PathBuf>, String> {
    let mut libraries = BTreeSet::new();
    for line in output.lines().filter(|line| line.starts_with('\t')) {
        let line = line.trim();
        if let Some((name, "not found")) = line.split_once(" => ") {
            return Err(name.to_owned());
        }
        let place = line.split_once(" => ").map_or(line, |(_, place)| place);
        if let Some((path, _)) = place.rsplit_once(" (0x").filter(|(path, _)| path.starts_with('/')) {
            libraries.insert(PathBuf::from(path));
        }
    }
    Ok(libraries)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_ldd_says_is_understood() {
        let output = "/usr/bin/a:\n\tlinux-vdso.so.1 (0x00007ffc)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                      \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n/usr/bin/b:\n\tstatically linked\n\tnot a dynamic executable\n";
        let expected = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(parse_ldd(output).unwrap(), BTreeSet::from(expected));
        assert_eq!(parse_ldd("\tlibx.so.1 => not found\n").unwrap_err(), "libx.so.1");
    }

    #[test]
    fn paths_stay_inside() {
        let scratch = tempfile::tempdir().unwrap();
        let rootfs = Rootfs::new(scratch.path().join("root")).unwrap().file("/../../escape", "x").unwrap();
        assert!(rootfs.path().join("escape").exists() && !scratch.path().join("escape").exists());
    }

    #[test]
    fn a_missing_program_is_named() {
        let scratch = tempfile::tempdir().unwrap();
        let error = Rootfs::new(scratch.path()).unwrap().binary("/usr/bin/no-such-program").unwrap_err();
        assert!(error.to_string().contains("/usr/bin/no-such-program, which is not installed"), "{error}");
        let error = Rootfs::new(scratch.path()).unwrap_err();
        assert!(error.to_string().contains("not empty"), "{error}");
    }
}
