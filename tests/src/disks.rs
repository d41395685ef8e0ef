//! Disks that are full, and disks that fail.
//!
//! - [`Small`]: a node's state, or another directory of it, on a file system of its own, which can be filled.
//! - [`Failing`]: the node's daemon gets errors from the disk that its databases are on. The calls are made to fail by
//!   strace(1), which needs no device that this kernel lacks, and lets each call be chosen.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use rustix::{
    fs::{FallocateFlags, fallocate, statvfs},
    io::Errno,
    mount::{MountFlags, mount},
    process::Pid,
};

use crate::{Bed, wait_for};

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The disk of a node's state, or of another directory. It goes away with the lab, or with what unmounts the other.
#[derive(Debug)]
pub struct Small(PathBuf);

impl Small {
    /// Puts the state of a node on a disk of so many bytes. The node has no service yet; its daemon is started anew.
    pub fn of(bed: &Bed, node: &str, bytes: u64) -> Self {
        let lab = bed.lab();
        lab.stop_node(node).unwrap();
        let state = lab.state(node).unwrap();
        let aside = bed.scratch().join(format!("state-{node}"));
        run(Command::new("cp").arg("-a").arg(&state).arg(&aside));
        let small = Self::at(&state, bytes);
        run(Command::new("cp").arg("-a").arg(aside.join(".")).arg(&state));
        lab.start_node(node).unwrap();
        small
    }

    /// Mounts a disk of so many bytes over a directory, which need not be there yet.
    pub fn at(directory: &Path, bytes: u64) -> Self {
        fs::create_dir_all(directory).unwrap();
        let options = std::ffi::CString::new(format!("size={bytes},mode=0700")).unwrap();
        mount("small-disk", directory, "tmpfs", MountFlags::NOSUID, options.as_c_str()).unwrap();
        Self(directory.to_owned())
    }

    /// Fills it, until what is returned is dropped.
    pub fn fill(&self) -> Full {
        let path = self.0.join("fills-the-disk");
        let file = File::create(&path).unwrap();
        let mut size = 0;
        wait_for("the disk to be full", || {
            let disk = statvfs(&self.0).unwrap();
            let free = disk.f_bfree * disk.f_frsize;
            let more = free.max(disk.f_frsize);
            match fallocate(&file, FallocateFlags::empty(), size, more) {
                Ok(()) => size += more,
                // The daemon took a piece in between: all that was to be had is free again.
                Err(Errno::NOSPC) => return (free == 0).then_some(()),
                Err(error) => panic!("{}: {error}", path.display()),
            }
            None
        });
        Full(path)
    }
}

/// What fills a disk.
#[derive(Debug)]
pub struct Full(PathBuf);

impl Drop for Full {
    fn drop(&mut self) {
        fs::remove_file(&self.0).unwrap();
    }
}

/// A daemon whose databases cannot be read, written or synced, until this is dropped.
#[derive(Debug)]
pub struct Failing(Child);

/// Files of the databases in a node's state.
const DATABASES: [&str; 4] = ["journal.db", "journal.db-wal", "node.db", "node.db-wal"];

impl Failing {
    /// Lets all calls of a daemon's threads about its databases fail with this error (its name in errno(3)).
    pub fn of(daemon: Pid, state: &Path, error: &str) -> Self {
        let calls = "pread64,pwrite64,ftruncate,fsync,fdatasync";
        let mut command = Command::new("strace");
        command.args(["-o", "/dev/null", "-e", &format!("inject={calls}:error={error}")]);
        for database in DATABASES {
            command.arg("-P").arg(state.join(database));
        }
        let tasks = fs::read_dir(format!("/proc/{}/task", daemon.as_raw_nonzero())).unwrap();
        let tasks = tasks.map(|task| task.unwrap().file_name().into_string().unwrap());
        // Each thread by itself: programs that the daemon starts are not meant.
        let tasks: Vec<_> = tasks.collect();
        for task in &tasks {
            command.args(["-p", task]);
        }
        let mut tracer = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(tracer.stderr.take().unwrap());
        // A thread may have ended by now.
        let attached = said.lines().map(Result::unwrap).take(tasks.len());
        attached.for_each(|line| println!("strace: {line}"));
        Self(tracer)
    }
}

impl Drop for Failing {
    fn drop(&mut self) {
        let pid = Pid::from_child(&self.0);
        // It lets go of the daemon, unless that has ended, and strace with it.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        self.0.wait().unwrap();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn calls_about_a_database_fail_and_others_do_not() {
        let directory = tempfile::tempdir().unwrap();
        let files = ["node.db", "other"].map(|name| File::create(directory.path().join(name)).unwrap());
        let own = Pid::from_raw(i32::try_from(std::process::id()).unwrap()).unwrap();
        let write = || files.each_ref().map(|file| file.write_all_at(b"x", 0).is_ok());
        assert_eq!(write(), [true, true]);
        let failing = Failing::of(own, directory.path(), "EIO");
        assert_eq!(write(), [false, true]);
        drop(failing);
        assert_eq!(write(), [true, true]);
    }
}
