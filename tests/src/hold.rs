//! Points of a migration at which a test can hold it: a directory of `<point>.go` files; a migration
//! passes the points whose file is there, and leaves `<point>.reached` where it waits
//! (`GODWIT_FAILPOINTS`, see the module `failpoint` of godwit-migration).

use std::{fs, path::PathBuf};

use godwit_lab::LabConfig;

use crate::{crossing, victim::HELD, wait_for_within};

/// Every point at which a migration can be held, in the order in which it passes them.
pub const POINTS: [&str; 20] = [
    "destination.reserved",
    "destination.prepared",
    "source.copying",
    "source.copied",
    "source.frozen",
    "source.needed",
    "source.sending",
    "destination.receiving",
    "destination.received",
    "destination.restoring",
    "destination.restored",
    "source.restored",
    "source.committed",
    "destination.committing",
    "destination.committed",
    "source.serving",
    "source.pushing",
    "destination.filling",
    "destination.lost",
    "destination.dropping",
];

/// Where a new service runs, and stands in no book.
pub const STARTED: &str = "service.started";

/// Where an engine has made the container of a new service, and not started it.
pub const MADE: &str = "service.made";

/// Where a layer has come, and is neither verified nor unpacked.
pub const UNPACKING: &str = "destination.unpacking";

/// Where a checkpoint and a restore can be held: frozen, dumped, kept by the user, and with its files in their places.
pub const CHECKPOINTS: [&str; 4] =
    ["checkpoint.frozen", "checkpoint.dumped", "checkpoint.kept", "restore.files"];

/// Where the user at a terminal of a service that has moved looks for it.
pub const FOLLOW: &str = "exec.follow";

/// Where the processes of a service that goes on under the destination's executables have been asked to rest, and where its
/// images are rewritten.
pub const CROSSING: [&str; 2] = ["source.asked", "destination.rewriting"];

/// Lets what is done at a point fail, on all nodes of the lab that is made from `config`.
pub fn inject(config: &mut LabConfig, point: &str) {
    let environment = &mut config.programs.serve_environment;
    match environment.iter_mut().find(|(name, _)| name == "GODWIT_FAILPOINTS") {
        Some((_, faults)) => *faults = format!("{faults},{point}=error"),
        None => environment.push(("GODWIT_FAILPOINTS".to_owned(), format!("{point}=error"))),
    }
}

/// The points of all daemons of a lab. None is held at first.
#[derive(Debug)]
pub struct Points {
    directory: tempfile::TempDir,
}

impl Points {
    /// Tells the daemons of the lab that is made from `config` about them.
    pub fn of(config: &mut LabConfig) -> Self {
        match crossing::is_wanted() {
            true => Self::among(config, &[&POINTS[..], &CROSSING].concat()),
            false => Self::among(config, &POINTS),
        }
    }

    /// Tells them about these only: some are passed with each batch of pages, and to look whether one is
    /// held there takes time.
    pub fn among(config: &mut LabConfig, some: &[&str]) -> Self {
        let points = Self { directory: tempfile::tempdir().unwrap() };
        let place = |point: &&str| {
            points.let_go(point);
            format!("{point}=wait:{}", points.directory.path().display())
        };
        let places: Vec<_> = some.iter().map(place).collect();
        config.programs.serve_environment.push(("GODWIT_FAILPOINTS".to_owned(), places.join(",")));
        points
    }

    fn file(&self, point: &str, what: &str) -> PathBuf {
        let known = [&POINTS[..], &CHECKPOINTS, &CROSSING, &[MADE, STARTED, FOLLOW, UNPACKING]].concat();
        assert!(known.contains(&point), "{point}");
        self.directory.path().join(format!("{point}.{what}"))
    }

    /// The next migration that comes to this point waits there.
    pub fn hold(&self, point: &str) {
        let _ = fs::remove_file(self.file(point, "reached"));
        fs::remove_file(self.file(point, "go")).unwrap();
    }

    /// Whether a migration is held, or was, since this point was last to be held at.
    pub fn has_reached(&self, point: &str) -> bool {
        self.file(point, "reached").exists()
    }

    /// Waits until a migration is held at this point.
    pub fn reached(&self, point: &str) {
        wait_for_within(HELD, &format!("point {point} of the migration"), || {
            self.has_reached(point).then_some(())
        });
    }

    /// What is held at this point goes on.
    pub fn let_go(&self, point: &str) {
        fs::write(self.file(point, "go"), b"").unwrap();
    }
}
