//! A Podman for each node of a lab, with storage, state and runc's state of its own: nodes of a lab share their files.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use godwit_lab::LabConfig;
use godwit_lab::workload::Preset;

use crate::{Bed, wait_for};

/// What every Podman here is told: without systemd, and with no limits that a container here may not have.
const SETTINGS: &str = "\
[network]
network_backend = \"netavark\"
default_subnet = \"10.77.0.0/24\"
[containers]
default_ulimits = [\"nofile=20000:20000\", \"nproc=20000:20000\"]
log_driver = \"k8s-file\"
[engine]
cgroup_manager = \"cgroupfs\"
events_logger = \"file\"
runtime = \"runc\"
[engine.runtimes]
";

/// The directory of the CRIU that Podman and runc are to find.
const CRIU: &str = "/usr/local/lib/godwit/bin";

/// The Podmans of a lab.
#[derive(Debug)]
pub struct Podmans {
    directory: tempfile::TempDir,
}

impl Default for Podmans {
    fn default() -> Self {
        Self::new()
    }
}

impl Podmans {
    /// Those of a lab that is to be made.
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let own = directory.path();
        let own_text = own.display();
        let settings = format!("{SETTINGS}runc = [\"{own_text}/runc\"]\n");
        std::fs::write(own.join("containers.conf"), settings).unwrap();
        let begin = format!("#!/bin/sh\nset -e\nnode=$(ip netns identify)\nnode={own_text}/${{node##*-}}\n");
        let podman = format!(
            "{begin}mkdir -p $node\nwhile [ -e $node.hangs ]; do sleep 0.1; done\nexport CONTAINERS_CONF=${{CONTAINERS_CONF:-{own_text}/containers.conf}}\n\
             export PATH={CRIU}:$PATH\n\
             exec podman --root $node/root --runroot $node/run --tmpdir $node/tmp \"$@\"\n",
        );
        let runc = format!("{begin}exec runc --root $node/runc \"$@\"\n");
        for (name, text) in [("podman", podman), ("runc", runc)] {
            std::fs::write(own.join(name), text).unwrap();
            std::fs::set_permissions(own.join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        Self { directory }
    }

    fn program_in(directory: &Path) -> PathBuf {
        directory.join("podman")
    }

    fn program(&self) -> String {
        Self::program_in(self.directory.path()).to_str().unwrap().to_owned()
    }

    /// Has the daemons of a lab use them.
    pub fn equip(&self, config: &mut LabConfig) {
        config.programs.serve_arguments.extend(["--podman".to_owned(), self.program()]);
        let settings = self.directory.path().join("containers.conf").to_str().unwrap().to_owned();
        config.programs.serve_environment.push(("CONTAINERS_CONF".into(), settings));
    }

    /// Has each Podman that begins on a node hang, or all of them go on.
    pub fn hang(&self, node: &str, hangs: bool) {
        let file = self.directory.path().join(format!("{node}.hangs"));
        let done = if hangs { std::fs::write(file, "") } else { std::fs::remove_file(file) };
        done.unwrap();
    }

    /// Calls the Podman of a node, whatever comes of it.
    pub fn call(&self, bed: &Bed, node: &str, words: &[&str]) -> Output {
        let mut command = bed.lab().command(node, self.program()).unwrap_or_else(|error| panic!("{error}"));
        command.args(words).stdin(Stdio::null()).output().unwrap()
    }

    /// Calls the Podman of a node, which must do what it is asked; what it printed.
    pub fn done(&self, bed: &Bed, node: &str, words: &[&str]) -> String {
        let output = self.call(bed, node, words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "podman {words:?} on {node}: {said}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// The same of a call by which a process ends: Podman 4.3 fails where one ends between two of its signals.
    pub fn ends(&self, bed: &Bed, node: &str, words: &[&str]) {
        wait_for(&format!("podman {words:?} on {node}"), || {
            self.call(bed, node, words).status.success().then_some(())
        });
    }

    /// Where the Podman of a node keeps what it has.
    pub fn storage(&self, node: &str) -> PathBuf {
        self.directory.path().join(node).join("root")
    }

    /// The containers that runc has for the Podman of a node.
    pub fn of_runc(&self, node: &str) -> String {
        let root = self.directory.path().join(node).join("runc");
        let names = std::fs::read_dir(root).into_iter().flatten();
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap() + "\n").collect()
    }

    /// Makes an image of a preset, with a shell, which these nodes have then.
    pub fn image(&self, bed: &Bed, nodes: &[&str], preset: &Preset, name: &str) {
        let (layer, archive) =
            (self.directory.path().join("layer.tar"), self.directory.path().join("image.tar"));
        let bin = preset.rootfs.join("bin");
        std::fs::create_dir_all(&bin).unwrap();
        std::fs::copy("/bin/busybox", bin.join("busybox")).unwrap();
        for name in ["cat", "sh", "sleep", "true"] {
            let _ = std::fs::remove_file(bin.join(name));
            std::os::unix::fs::symlink("busybox", bin.join(name)).unwrap();
        }
        let mut packed = std::process::Command::new("tar");
        packed.arg("-C").arg(&preset.rootfs).arg("-cf").arg(&layer).arg(".");
        assert!(packed.status().unwrap().success());
        let (layer, archive) = (layer.to_str().unwrap(), archive.to_str().unwrap());
        // One ID for all of them.
        let (first, others) = nodes.split_first().unwrap();
        self.done(bed, first, &["import", "--quiet", layer, name]);
        if !others.is_empty() {
            self.done(bed, first, &["save", "--quiet", "--format", "oci-archive", "--output", archive, name]);
            others
                .iter()
                .for_each(|node| drop(self.done(bed, node, &["load", "--quiet", "--input", archive])));
            std::fs::remove_file(archive).unwrap();
        }
        std::fs::remove_file(layer).unwrap();
    }

    /// Removes all containers, before the lab goes.
    pub fn clear(&self, bed: &Bed) {
        for node in ["a", "b"] {
            // Podman 4.3 fails where a process ends between its SIGTERM and its SIGKILL.
            wait_for(&format!("Podman on {node} to remove its containers"), || {
                let output = self.call(bed, node, &["rm", "--all", "--force", "--time", "0"]);
                output.status.success().then_some(())
            });
        }
    }
}

impl Drop for Podmans {
    /// Podman leaves a part of its storage bound on itself.
    fn drop(&mut self) {
        let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let places = text.lines().filter_map(|line| line.split(' ').nth(4));
        for place in places.filter(|place| Path::new(place).starts_with(self.directory.path())) {
            // It may have gone with another, and its place with that.
            let gone = rustix::mount::unmount(place, rustix::mount::UnmountFlags::DETACH);
            let is_gone = matches!(gone, Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT));
            assert!(is_gone, "{place}: {gone:?}");
        }
    }
}
