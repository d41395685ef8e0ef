//! An operator's directory of hooks, one of which notes what it is told.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::Value;

/// The directory; gone with this.
#[derive(Debug)]
pub struct Hooks(tempfile::TempDir);

/// What has services run the hook at each moment, for `godwit run`.
pub const EVERY_MOMENT: [&str; 6] =
    ["--hook", "pre-freeze=notes", "--hook", "post-resume=notes", "--hook", "aborted=notes"];

impl Default for Hooks {
    fn default() -> Self {
        let hooks = Self(tempfile::tempdir().unwrap());
        fs::create_dir(hooks.0.path().join("hooks")).unwrap();
        hooks.then("");
        hooks
    }
}

impl Hooks {
    /// A directory of the test's own, for what its hooks look at.
    pub fn scratch(&self) -> &Path {
        self.0.path()
    }

    /// What godwitd has to be told.
    pub fn arguments(&self) -> [String; 2] {
        ["--hooks".to_owned(), self.0.path().join("hooks").to_str().unwrap().to_owned()]
    }

    /// From now on the hook does this after it has noted what it was told, which is in `$state`; `$at` is
    /// the scratch directory.
    pub fn then(&self, more: &str) {
        let path = self.0.path().join("hooks/notes");
        let at = self.0.path().display();
        let text = format!("#!/bin/sh\nat={at}\nstate=$(cat)\necho \"$state\" >> $at/states\n{more}\n");
        // Not in place: one that runs must not change under its shell.
        let new = path.with_extension("new");
        fs::write(&new, text).unwrap();
        fs::set_permissions(&new, PermissionsExt::from_mode(0o755)).unwrap();
        fs::rename(new, path).unwrap();
    }

    /// What the hook was told, oldest first.
    pub fn states(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.0.path().join("states")).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The moments of what it was told, oldest first.
    pub fn moments(&self) -> Vec<String> {
        let moment = |state: &Value| state["annotations"]["godwit.hook"].as_str().unwrap().to_owned();
        self.states().iter().map(moment).collect()
    }
}
