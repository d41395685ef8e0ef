//! Executables of neutral modules: `godwit-cc --from-module` on a module that comes from elsewhere.
//!
//! Code generators and linker are not made for hostile input, so they get nothing to reach:
//!
//! ```text
//! godwitd ── setpriv, unshare ── sh (root, the first process of namespaces of its own) ── chroot, setpriv ── godwit-cc ── llc, ld.lld
//!   module: standard input          a root of /usr and the tool chain, read-only   a user that nobody is, no capability
//!   executable: standard output     /tmp: memory alone; no network, no process     limits of time, memory and files
//! ```
//! The first process keeps its user, since the kernel forgets what a process is to do at its parent's end when that changes.
//! All others end with it. In a root of its own a process may make no user namespace, in which it would have all capabilities.
//! What comes out is as hostile as the module: who takes it looks at it as at any executable of an image.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use godwit_isa_plan::image::MOST_EXECUTABLE;
use tokio::process::Command;
use tokio::time::Instant;

use super::registry::{read, start};

/// The program.
const PROGRAM: &str = "godwit-cc";
/// How long it may take for all modules of an image.
pub const LONGEST_BUILD: Duration = Duration::from_secs(1800);
/// As much as is read of what it says, bytes.
const MOST_SAID: u64 = 64 << 10;
/// The namespaces that it is alone in. The kernel ends all of it when the thread has ended that started it, or `unshare`.
const ALONE: [&str; 16] = [
    "setpriv",
    "--pdeathsig",
    "KILL",
    "--",
    "unshare",
    "--mount",
    "--propagation",
    "private",
    "--net",
    "--ipc",
    "--uts",
    "--pid",
    "--fork",
    "--kill-child=KILL",
    "--mount-proc",
    "--",
];
/// Takes the directories of the programs and of the tool chain's files, and the set. The user is of a range that nobody gives
/// out (systemd's "Users, Groups, UIDs and GIDs"). Memory is 8 GiB for each process, the files are 2 GiB of memory; where the
/// machine has too little, the kernel ends these processes first.
const SCRIPT: &str = r#"
user=1900000018
mount -t tmpfs -o "nosuid,nodev,noexec,size=2g,mode=0755" godwit-modules /dev/shm
cd /dev/shm
mkdir tmp root root/dev root/etc root/proc root/tmp root/usr root/godwit root/godwit/bin root/godwit/isa
chown $user:$user tmp
show() { mount --bind "$1" "$2"; mount -o "remount,bind,ro,nosuid,nodev${3-}" "$2"; }
show /usr root/usr
for place in bin lib lib32 lib64 sbin; do
    if [ -L /$place ]; then
        cp -P /$place root/$place
    elif [ -d /$place ]; then
        mkdir root/$place
        show /$place root/$place
    fi
done
[ ! -e /etc/ld.so.cache ] || cp /etc/ld.so.cache root/etc/
touch root/dev/null
mount --bind /dev/null root/dev/null
mount -t proc -o nosuid,nodev,noexec proc root/proc
mount --bind tmp root/tmp
show "$1" root/godwit/bin
show "$2" root/godwit/isa ,noexec
mount --rbind root root
mount -o remount,bind,ro root
choom --adjust 1000 -- prlimit --cpu=1800 --as=8589934592 --nofile=256 --nproc=64 --core=0 -- chroot root     setpriv --reuid $user --regid $user --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all --     setsid --wait env -i PATH=/usr/bin:/bin TMPDIR=/tmp GODWIT_ISA=/godwit/isa     /godwit/bin/godwit-cc --from-module - --set "$3" -o -
exit $?
"#;

/// Why no executable was made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum BuildError {
    #[error(
        "godwit-cc is neither beside godwitd ({beside}) nor in a directory of $PATH: install it there (the package godwit-isa), or add the platform on a node that has it"
    )]
    NoProgram { beside: String },
    #[error(
        "the files of godwit-cc's tool chain are in none of {places}: install them (the package godwit-isa)"
    )]
    NoFiles { places: String },
    #[error("godwit-cc cannot be run: {0}; it needs the package util-linux")]
    Start(io::Error),
    #[error("godwit-cc says: {0}")]
    Refused(String),
    #[error("it takes longer than {} s", LONGEST_BUILD.as_secs())]
    Slow,
    #[error("what godwit-cc has made has more than {MOST_EXECUTABLE} bytes")]
    Large,
}

/// What makes executables of modules.
#[derive(Debug, Clone)]
pub struct Builder {
    /// The directory of godwit-cc.
    programs: PathBuf,
    /// The directory of its tool chain's files.
    files: PathBuf,
}

impl Builder {
    /// Finds godwit-cc beside this program, else in `$PATH`, and its files as it does itself.
    ///
    /// # Errors
    /// It is not there.
    pub fn find() -> Result<Self, BuildError> {
        let beside = std::env::current_exe().ok().and_then(|own| own.parent().map(Path::to_owned));
        let path = std::env::var_os("PATH").unwrap_or_default();
        let named = std::env::var_os("GODWIT_ISA").map(PathBuf::from);
        Self::find_in(beside.as_deref(), &path, named)
    }

    fn find_in(beside: Option<&Path>, path: &OsString, named: Option<PathBuf>) -> Result<Self, BuildError> {
        let mut places = beside.map(Path::to_owned).into_iter().chain(std::env::split_paths(path));
        let programs = places.find(|place| place.is_absolute() && place.join(PROGRAM).is_file());
        let programs = programs.ok_or_else(|| BuildError::NoProgram {
            beside: beside.map(|place| place.display().to_string()).unwrap_or_default(),
        })?;
        let own = std::fs::canonicalize(programs.join(PROGRAM)).ok();
        let own = own.as_deref().and_then(Path::parent).unwrap_or(&programs).to_owned();
        let places: Vec<_> = match named {
            Some(named) => vec![named],
            None => ["../isa", "../lib/godwit/isa"].map(|place| own.join(place)).into(),
        };
        let files = places.iter().find(|place| place.join("externals").exists()).cloned();
        let files = files.ok_or_else(|| BuildError::NoFiles {
            places: places.iter().map(|place| place.display().to_string()).collect::<Vec<_>>().join(", "),
        })?;
        Ok(Self { programs: own, files })
    }

    /// The executable of a module for a set, as `uname -m` names that; by then, or not at all.
    ///
    /// # Errors
    /// godwit-cc cannot be run, does not take the module, takes too long, or makes too much of it.
    pub async fn build(&self, module: File, machine: &str, until: Instant) -> Result<Vec<u8>, BuildError> {
        let (first, others) =
            ALONE.split_first().ok_or_else(|| BuildError::Start(io::ErrorKind::NotFound.into()))?;
        let mut command = Command::new(first);
        command.args(others).args(["/bin/sh", "-euc", SCRIPT, "sh"]);
        command.arg(&self.programs).arg(&self.files).arg(machine);
        command.stdin(Stdio::from(module)).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.process_group(0).kill_on_drop(true);
        let building = async {
            let (_stays, mut child) = start(command).await.map_err(BuildError::Start)?;
            let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
            let executable = async {
                let made = read(stdout, MOST_EXECUTABLE + 1).await.map_err(BuildError::Start)?;
                // What makes more than is read does not end by itself.
                if made.len() as u64 > MOST_EXECUTABLE { Err(BuildError::Large) } else { Ok(made) }
            };
            let words = async { read(stderr, MOST_SAID).await.map_err(BuildError::Start) };
            let (made, said) = tokio::try_join!(executable, words)?;
            let status = child.wait().await.map_err(BuildError::Start)?;
            if status.success() { Ok(made) } else { Err(BuildError::Refused(words_of(&said, status))) }
        };
        tokio::time::timeout_at(until, building).await.unwrap_or(Err(BuildError::Slow))
    }
}

/// What it said, without what a terminal would not show as text: a module has chosen some of its words.
fn words_of(said: &[u8], status: std::process::ExitStatus) -> String {
    let said = String::from_utf8_lossy(said);
    let shown: String = said.trim().chars().filter(|c| *c == '\n' || !c.is_control()).take(1000).collect();
    if shown.is_empty() { format!("nothing ({status})") } else { shown.replace('\n', "; ") }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use tempfile::TempDir;

    use super::*;

    /// A tool chain with a program in place of godwit-cc.
    fn builder(script: &str) -> (TempDir, Builder) {
        let scratch = TempDir::new_in("/var/tmp").unwrap();
        let (bin, isa) = (scratch.path().join("bin"), scratch.path().join("isa"));
        for directory in [&bin, &isa] {
            fs::create_dir_all(directory).unwrap();
        }
        fs::write(isa.join("externals"), "").unwrap();
        let program = bin.join(PROGRAM);
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let builder = Builder::find_in(Some(&bin), &OsString::new(), None).unwrap();
        (scratch, builder)
    }

    async fn built(script: &str) -> Result<String, BuildError> {
        let (scratch, builder) = builder(script);
        let module = scratch.path().join("module");
        fs::write(&module, "the module").unwrap();
        let made =
            builder.build(File::open(&module).unwrap(), "aarch64", Instant::now() + LONGEST_BUILD).await?;
        Ok(String::from_utf8(made).unwrap())
    }

    #[tokio::test]
    async fn it_reads_the_module_writes_the_executable_and_reaches_nothing_else() {
        let said = built(
            "echo \"$*\"; cat; echo; id -u; id -G; grep -E 'CapEff|CapBnd|NoNewPrivs|Seccomp:' /proc/self/status
             ls /proc | grep -c '^[0-9]'; cat /proc/net/dev | grep -c :; ls /run /tmp 2>/dev/null | wc -l
             touch /tmp/own && echo may || echo not; touch /godwit/isa/x 2>/dev/null && echo may || echo not
             touch /var/lib/x /etc/x /x 2>/dev/null && echo may || echo not; cat /etc/shadow 2>/dev/null || echo not
             unshare --user --map-root-user true 2>/dev/null && echo may || echo not; ls -d /var /root /home /sys 2>/dev/null || echo not
             env | cut -d= -f1 | sort | tr '\\n' ' '",
        );
        let said = said.await.unwrap();
        let lines: Vec<_> = said.lines().map(str::trim).collect();
        assert_eq!(
            lines[..4],
            ["--from-module - --set aarch64 -o -", "the module", "1900000018", "1900000018"],
            "{said}"
        );
        for line in &lines[4..6] {
            assert!(line.ends_with("0000000000000000"), "{said}");
        }
        assert!(lines[6].starts_with("NoNewPrivs:") && lines[6].ends_with('1'), "{said}");
        let rest = lines.iter().position(|line| *line == "may").unwrap();
        // Itself and its shell, the loopback alone, and nobody's files.
        let counts: Vec<u32> = lines[rest - 3..rest].iter().map(|line| line.parse().unwrap()).collect();
        assert!(counts[0] <= 4 && counts[1] == 1 && counts[2] <= 3, "{said}");
        assert_eq!(lines[rest..rest + 6], ["may", "not", "not", "not", "not", "not"], "{said}");
        assert!(lines[rest + 6].starts_with("GODWIT_ISA") && !said.contains("CARGO"), "{said}");
    }

    #[tokio::test]
    async fn what_it_refuses_is_said_and_what_is_too_large_is_not_taken() {
        let refused = built("printf 'no \\033[2Jmodule\\n' >&2; exit 3").await.unwrap_err();
        assert_eq!(refused.to_string(), "godwit-cc says: no [2Jmodule");
        let silent = built("exit 3").await.unwrap_err();
        assert!(silent.to_string().contains("nothing (exit status: 3)"), "{silent}");
        let large = built("exec yes").await.unwrap_err();
        assert!(matches!(large, BuildError::Large), "{large}");
    }

    /// Whether a process has this word in its command.
    fn runs(word: &str) -> bool {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let commands = processes.filter_map(|process| fs::read(process.path().join("cmdline")).ok());
        commands
            .into_iter()
            .any(|command| command.split(|byte| *byte == 0).any(|found| found == word.as_bytes()))
    }

    #[tokio::test]
    async fn nothing_of_it_outlives_a_build_that_is_ended() {
        // It holds on to life: not the pipe's end, and not its session's, ends it.
        const SLEEP: &str = "100017";
        let script = format!(
            "trap '' PIPE HUP TERM; (setsid sleep {SLEEP} &); yes | head -c 270000000; sleep {SLEEP}"
        );
        let large = built(&script).await.unwrap_err();
        assert!(matches!(large, BuildError::Large), "{large}");
        let ending = async {
            while runs(SLEEP) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), ending).await.expect("all of it to end");
    }

    #[test]
    fn where_it_is_missing_that_is_said() {
        let scratch = TempDir::new_in("/var/tmp").unwrap();
        let none = Builder::find_in(Some(scratch.path()), &OsString::from("/nonexistent"), None).unwrap_err();
        assert!(none.to_string().contains("is neither beside godwitd"), "{none}");
        fs::write(scratch.path().join(PROGRAM), "").unwrap();
        let incomplete = Builder::find_in(Some(scratch.path()), &OsString::new(), None).unwrap_err();
        assert!(matches!(incomplete, BuildError::NoFiles { .. }), "{incomplete}");
    }
}
