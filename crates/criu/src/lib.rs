//! CRIU as a program that answers over its RPC, and its image files as typed values.
//!
//! ```text
//!  obstacles: can it be dumped? ──▶ Prepared ──▶ dump ──▶ CRIU ──▶ image files ──▶ repair ──▶ (the engine restores)
//!                                                 │        └─ killed: remains        └──▶ images: what godwit looks into
//!                                                 └─ watches, linked, limits: what CRIU has to be told or given
//! ```
//!
//! - [`Criu`]: one CRIU binary. Asks its version and features, runs its self check, and dumps a
//!   process tree ([`Criu::dump`]), with its memory or without ([`Memory`]); [`Prepared`] is one that
//!   has started before there is something to dump.
//! - [`images`]: reads the few image files that godwit itself looks into, and puts memory into those
//!   of a lazy dump.
//! - [`repair`]: corrects images of frozen processes.
//! - [`remains`]: puts processes right whose CRIU was killed.
//! - [`obstacles`]: what of a process tree cannot be dumped, told before anything is done.
//! - [`log`]: finds the reason of a failure in CRIU's log and says what it means to a user.
//!
//! Nothing here knows of containers, networks or page contents. Restores go through the container
//! engine, which makes the namespaces and cgroups that CRIU restores into.

mod dump;
mod error;
pub mod images;
mod kernel_cache;
mod lazy;
mod limits;
mod linked;
pub mod log;
pub mod obstacles;
mod open_files;
mod places;
pub mod remains;
pub mod repair;
mod rpc;
mod status;
mod watches;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::OnceCell;

pub use dump::{
    DumpOptions, DumpResult, GHOST_LIMIT_BYTES, LOG_LEVEL_WARNINGS, Memory, MemoryWay, Prepared, kill,
    settled,
};
pub use error::CriuError;
pub use open_files::not_external;
pub use places::Places;

/// Oldest CRIU that godwit uses: 4.1 dumps and restores on kernels with today's vDSO.
pub const OLDEST_VERSION: Version = Version::release(4, 1, 0);

/// What the version of a CRIU with godwit's patches ends with, before the number of their series.
const SERIES_MARK: &str = "+godwit.";

/// The patches of godwit and their number.
const SERIES: &str = include_str!("../../../packaging/criu/series");

/// The series of patches that this godwit was made with.
#[must_use]
pub fn own_series() -> u32 {
    let numbers = SERIES.lines().filter_map(|line| line.strip_prefix("number "));
    numbers.filter_map(|number| number.parse().ok()).next().unwrap_or(0)
}

/// The kind of external resource that our patch external-shmem adds, as `criu --help` names it.
const SHARED_EXTERNAL: &str = "shmem[SHMID]";

/// The kind of external resource that our patch external-sysvshm adds, as `criu --help` names it.
const SYSTEM_V_EXTERNAL: &str = "sysvshm[ID]";

/// The kind of external resource that our patch external-smaps adds, as `criu --help` names it.
const MAPPINGS_EXTERNAL: &str = "smaps[]:DIR";

/// Pages that processes have written in private mappings of files, but for executable ones, among the external resources of
/// a dump: their contents are not in the images, into which [`images::bring`] puts them. It is also the name that our patch
/// external-file-pages has in `criu --help`; a CRIU without it dumps them.
pub const EXTERNAL_FILE_PAGES: &str = "file-pages[]";

/// The directory in which a dump finds the mappings of a process in a file named by its PID, in the form of its smaps, among
/// the external resources. A CRIU without our patch does not look there.
#[must_use]
pub fn external_mappings_in(directory: &Path) -> String {
    format!("smaps[]:{}", directory.display())
}

/// The name of shared memory with this inode among the external resources of a dump.
#[must_use]
pub fn external_shared(inode: u64) -> String {
    format!("shmem[{inode}]")
}

/// The name of a System V segment with this identifier among the external resources of a dump.
#[must_use]
pub fn external_system_v(identifier: u64) -> String {
    format!("sysvshm[{identifier}]")
}

/// The IPC namespace that a restore enters, with what is in it already, if it is there, among the external resources. A CRIU
/// without our patch does not look there.
#[must_use]
pub fn external_ipc(namespace: &Path) -> String {
    format!("ipc[]:{}", namespace.display())
}

/// The directory in which a restore finds shared memory under its inode at the dump, among the external resources. A CRIU
/// without our patch does not look there.
#[must_use]
pub fn external_shared_in(directory: &Path) -> String {
    format!("shmem[]:{}", directory.display())
}

/// One CRIU binary.
#[derive(Debug, Clone)]
pub struct Criu {
    path: PathBuf,
    /// Where it looks first for programs that it starts.
    programs: Option<PathBuf>,
    /// Asked once: the answer costs a start of CRIU.
    version: Arc<OnceCell<Version>>,
    patches: Arc<OnceCell<Patches>>,
    as_stock: bool,
}

/// Which of godwit's patches that add an option a binary has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Patches {
    lazy_external: bool,
    tcp_inline: bool,
    shared_external: bool,
    system_v_external: bool,
    mappings_external: bool,
    file_pages_external: bool,
}

/// A CRIU release, `major.minor.sublevel`, with the number of godwit's patches where it has them:
/// `4.2.1+godwit.2`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
    /// Sublevel; 0 when CRIU does not give one.
    pub sublevel: u32,
    /// Number of the series of godwit's patches (`packaging/criu/series`) that it was built with; 0 when
    /// it has none.
    pub series: u32,
}

impl Version {
    /// A release as its authors made it.
    pub const fn release(major: u32, minor: u32, sublevel: u32) -> Self {
        Self { major, minor, sublevel, series: 0 }
    }
}

/// The series that the text of `criu --version` tells, whose first line is `Version: 4.2.1+godwit.1`.
/// CRIU's own protocol has no place for it.
fn series_of(text: &str) -> u32 {
    let version = text.lines().find_map(|line| line.strip_prefix("Version: "));
    let series = version.and_then(|version| version.split_once(SERIES_MARK));
    series.and_then(|(_, series)| series.trim().parse().ok()).unwrap_or(0)
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)?;
        if self.sublevel != 0 {
            write!(f, ".{}", self.sublevel)?;
        }
        if self.series != 0 {
            write!(f, "{SERIES_MARK}{}", self.series)?;
        }
        Ok(())
    }
}

/// What this CRIU can do on this kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features {
    /// Soft-dirty tracking of memory, for CRIU's own pre-dump.
    pub mem_track: bool,
    /// Restoring with pages that come later, by userfaultfd.
    pub lazy_pages: bool,
    /// Keeping pidfds between pre-dumps.
    pub pidfd_store: bool,
}

impl Criu {
    /// The CRIU binary at this path; nothing is run yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let (version, patches) = (Arc::default(), Arc::default());
        Self { path: path.into(), programs: None, version, patches, as_stock: false }
    }

    /// The same binary, which looks in this directory first for programs that it starts.
    #[must_use]
    pub fn with_programs(self, directory: Option<PathBuf>) -> Self {
        Self { programs: directory, ..self }
    }

    /// The same binary, of which nothing is asked that takes godwit's patches.
    #[must_use]
    pub fn as_stock(self) -> Self {
        Self { as_stock: true, ..self }
    }

    /// Where the binary is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The release of the binary, without a series if its patches are not made use of; asked once per value and
    /// its clones.
    pub async fn version(&self) -> Result<Version, CriuError> {
        let version = self.version.get_or_try_init(|| self.ask_version()).await.copied()?;
        Ok(self.as_used(version))
    }

    fn as_used(&self, version: Version) -> Version {
        if self.as_stock { Version { series: 0, ..version } } else { version }
    }

    /// The same without asking: none before it was asked for the first time.
    #[must_use]
    pub fn known_version(&self) -> Option<Version> {
        self.version.get().map(|version| self.as_used(*version))
    }

    async fn ask_version(&self) -> Result<Version, CriuError> {
        // `criu check` does not find that out.
        let own = std::fs::read_to_string("/proc/self/status");
        if own.is_ok_and(|own| status::has_filter(&own)) {
            return Err(CriuError::Filtered { path: self.path.clone() });
        }
        let mut service = rpc::Service::start(&self.path, None, None)?;
        let answer = service.ask(rpc::CriuReq::of_type(rpc::CriuReqType::Version)).await?;
        service.end().await.map_err(|source| CriuError::Start { path: self.path.clone(), source })?;
        let version = answer.version.ok_or_else(|| CriuError::Answer {
            path: self.path.clone(),
            reason: "its answer to a version request has no version".into(),
        })?;
        let number = |value: i32| u32::try_from(value).unwrap_or(0);
        let release = Version::release(
            number(version.major_number),
            number(version.minor_number),
            version.sublevel.map_or(0, number),
        );
        if release < OLDEST_VERSION {
            return Err(CriuError::Old { path: self.path.clone(), version: release });
        }
        Ok(Version { series: series_of(&self.output("--version").await?), ..release })
    }

    /// Whether a lazy dump leaves memory untouched ([`MemoryWay::Untouched`]), which takes our patch;
    /// without, it works too, but its time grows with the memory. Asked once per value and its clones.
    /// [`Criu::dump`] needs no answer.
    ///
    /// # Errors
    /// The binary does not start.
    pub async fn lazy_external(&self) -> Result<bool, CriuError> {
        Ok(self.patches().await?.is_some_and(|patches| patches.lazy_external))
    }

    /// Whether a dump can put TCP connections into the image of the files, and a restore find them there
    /// ([`DumpOptions::tcp_inline`]), which takes our patch. Asked once per value and its clones.
    ///
    /// # Errors
    /// The binary does not start.
    pub async fn tcp_inline(&self) -> Result<bool, CriuError> {
        Ok(self.patches().await?.is_some_and(|patches| patches.tcp_inline))
    }

    /// Whether a dump can leave the contents of shared memory to others, and a restore take it from them
    /// ([`external_shared`]), which takes our patch. Asked once per value and its clones.
    ///
    /// # Errors
    /// The binary does not start.
    pub async fn shared_external(&self) -> Result<bool, CriuError> {
        Ok(self.patches().await?.is_some_and(|patches| patches.shared_external))
    }

    /// Whether a dump can leave the contents of System V segments to others, and a restore find them in an IPC namespace
    /// ([`external_ipc`]), which takes our patch. Asked once per value and its clones.
    ///
    /// # Errors
    /// The binary does not start.
    pub async fn system_v_external(&self) -> Result<bool, CriuError> {
        Ok(self.patches().await?.is_some_and(|patches| patches.system_v_external))
    }

    /// Whether a dump can be told the mappings of processes ([`external_mappings_in`]), which takes our patch. Asked once
    /// per value and its clones.
    ///
    /// # Errors
    /// The binary does not start.
    pub async fn mappings_external(&self) -> Result<bool, CriuError> {
        Ok(self.patches().await?.is_some_and(|patches| patches.mappings_external))
    }

    /// Whether a dump can leave out what processes have written in private mappings of files
    /// ([`EXTERNAL_FILE_PAGES`]), which takes our patch. Asked once per value and its clones.
    ///
    /// # Errors
    /// The binary does not start.
    pub async fn file_pages_external(&self) -> Result<bool, CriuError> {
        Ok(self.patches().await?.is_some_and(|patches| patches.file_pages_external))
    }

    /// Whether a restore maps what is not writable as it was, which takes our patches: all of them, as no option
    /// tells of this one.
    ///
    /// # Errors
    /// The binary does not start.
    pub async fn keeps_rights(&self) -> Result<bool, CriuError> {
        Ok(self.version().await?.series != 0)
    }

    /// The binary's patches, where they may be made use of.
    async fn patches(&self) -> Result<Option<Patches>, CriuError> {
        if self.as_stock {
            return Ok(None);
        }
        self.patches.get_or_try_init(|| self.ask_patches()).await.copied().map(Some)
    }

    async fn ask_patches(&self) -> Result<Patches, CriuError> {
        let help = self.output("--help").await?;
        Ok(Patches {
            lazy_external: help.contains(lazy::EXTERNAL_OPTION),
            tcp_inline: help.contains(dump::TCP_INLINE_OPTION),
            shared_external: help.contains(SHARED_EXTERNAL),
            system_v_external: help.contains(SYSTEM_V_EXTERNAL),
            mappings_external: help.contains(MAPPINGS_EXTERNAL),
            file_pages_external: help.contains(EXTERNAL_FILE_PAGES),
        })
    }

    /// Runs the binary with this argument alone.
    async fn run(&self, argument: &str) -> Result<std::process::Output, CriuError> {
        tokio::process::Command::new(&self.path)
            .arg(argument)
            .stdin(std::process::Stdio::null())
            .kill_on_drop(true)
            .output()
            .await
            .map_err(|source| CriuError::Start { path: self.path.clone(), source })
    }

    /// What the binary prints when it is started with this option.
    async fn output(&self, option: &str) -> Result<String, CriuError> {
        Ok(String::from_utf8_lossy(&self.run(option).await?.stdout).into_owned())
    }

    /// What the binary can do on this kernel.
    pub async fn features(&self) -> Result<Features, CriuError> {
        let mut service = rpc::Service::start(&self.path, None, None)?;
        let mut request = rpc::CriuReq::of_type(rpc::CriuReqType::FeatureCheck);
        request.features = Some(rpc::CriuFeatures {
            mem_track: Some(true),
            lazy_pages: Some(true),
            pidfd_store: Some(true),
        });
        let answer = service.ask(request).await?;
        service.end().await.map_err(|source| CriuError::Start { path: self.path.clone(), source })?;
        let flags = answer.features.unwrap_or_default();
        Ok(Features {
            mem_track: flags.mem_track.unwrap_or(false),
            lazy_pages: flags.lazy_pages.unwrap_or(false),
            pidfd_store: flags.pidfd_store.unwrap_or(false),
        })
    }

    /// Runs `criu check`: whether this kernel has what a dump and a restore need. The error says
    /// what is missing.
    pub async fn check(&self) -> Result<(), CriuError> {
        let output = self.run("check").await?;
        if output.status.success() {
            return Ok(());
        }
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.push_str(&String::from_utf8_lossy(&output.stderr));
        let reason = log::first_error(&text)
            .or_else(|| text.lines().rfind(|line| !line.trim().is_empty()).map(str::to_owned))
            .unwrap_or_else(|| format!("it ended with {}", output.status));
        Err(CriuError::Check { path: self.path.clone(), reason })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_version_tells_the_series_of_patches() {
        for (text, series) in [
            ("Version: 4.2.1+godwit.12\nGitID: v4.2\n", 12),
            ("Version: 4.2+godwit.1", 1),
            ("Version: 4.2.1\nGitID: 1+godwit.3\n", 0),
            ("Version: 4.2.1+godwit.x\n", 0),
            ("", 0),
        ] {
            assert_eq!(series_of(text), series, "{text}");
        }
        assert!(own_series() > 0 && SERIES.contains(&format!("{SERIES_MARK}{},", own_series())));
        let version = Version { series: 12, ..Version::release(4, 2, 1) };
        assert_eq!(version.to_string(), "4.2.1+godwit.12");
        assert!(version > Version::release(4, 2, 1) && version > OLDEST_VERSION);
    }
}
