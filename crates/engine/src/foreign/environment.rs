//! An environment that an engine's program passes on, which nobody is to see who lists processes: in a file (`--env-file`),
//! what is one line; the rest in the environment of the program itself, where `--env NAME` finds it.

use std::collections::HashSet;

/// Longest line of a file with an environment, bytes: Podman and Docker read lines of up to 64 KiB.
const LONGEST_LINE: usize = 32 << 10;

/// Names that mean something to Podman or Docker itself, or to what it is loaded and run by, and how those of others begin.
const OF_ENGINES: &[&str] = &[
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "TMPDIR",
    "NOTIFY_SOCKET",
    "STORAGE_DRIVER",
    "STORAGE_OPTS",
    "REGISTRY_AUTH_FILE",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "DBUS_SESSION_BUS_ADDRESS",
    "DBUS_SYSTEM_BUS_ADDRESS",
    "GLIBC_TUNABLES",
    "GCONV_PATH",
    "GODEBUG",
    "GOGC",
    "GOMAXPROCS",
    "GOMEMLIMIT",
    "GOTRACEBACK",
    "GOCOVERDIR",
];
const BEGIN_OF_ENGINES: &[&str] = &[
    "BUILDKIT_",
    "COMPOSE_",
    "CONTAINER_",
    "DOCKER_",
    "CONTAINERS_",
    "_CONTAINERS_",
    "PODMAN_",
    "_PODMAN_",
    "BUILDAH_",
    "_OCI_",
    "XDG_",
    "LD_",
    "LISTEN_",
];

/// An environment, of which each name is there once.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Environment {
    /// The text of a file with what is one line there, taken as it stands.
    pub(crate) file: String,
    /// What the program finds in its own environment.
    pub(crate) passed: Vec<(String, String)>,
}

impl Environment {
    /// That of these pairs, or what speaks against it.
    pub(crate) fn of(pairs: &[String]) -> Result<Self, String> {
        let (mut seen, mut lines, mut passed) = (HashSet::new(), Vec::new(), Vec::new());
        // The last of a name counts.
        for pair in pairs.iter().rev() {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            // As engines take it.
            let name = name.trim_start_matches([' ', '\t']);
            if !seen.insert(name) {
                continue;
            }
            let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte));
            if name.is_empty() || name.ends_with('*') || name.contains(['\n', '\r']) {
                return Err(format!("{name:?} cannot be the name of an environment variable"));
            }
            if plain && pair.len() <= LONGEST_LINE && !value.contains(['\n', '\r']) {
                lines.push(format!("{name}={value}\n"));
            } else if OF_ENGINES.contains(&name)
                || BEGIN_OF_ENGINES.iter().any(|begin| name.starts_with(begin))
            {
                return Err(format!(
                    "the value of {name} has a line break or more than {LONGEST_LINE} bytes, and the engine would take it for its own; set another variable"
                ));
            } else {
                passed.push((name.to_owned(), value.to_owned()));
            }
        }
        lines.reverse();
        passed.reverse();
        Ok(Self { file: lines.concat(), passed })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(pairs: &[&str]) -> Result<Environment, String> {
        Environment::of(&pairs.iter().map(|pair| (*pair).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn what_is_no_line_is_passed_on_and_the_rest_is_in_the_file() {
        let passed = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
        for (odd, name, value) in [
            ("A=b\nc", "A", "b\nc"),
            ("A=b\rc", "A", "b\rc"),
            ("#A=b", "#A", "b"),
            (&format!("A={}", "x".repeat(LONGEST_LINE)), "A", &"x".repeat(LONGEST_LINE)),
        ] {
            let found = of(&["B=c", odd, "PATH=/x"]).unwrap();
            assert_eq!(found, Environment { file: "B=c\nPATH=/x\n".into(), passed: passed(name, value) });
        }
        // The last of a name, wherever it is.
        let found = of(&["A=b\nc", "A=d", "B=e", "B=f\ng", " C=h"]).unwrap();
        assert_eq!(found, Environment { file: "A=d\nC=h\n".into(), passed: passed("B", "f\ng") });
    }

    #[test]
    fn what_would_change_the_engine_or_tell_more_is_refused_by_its_name() {
        for name in [
            "PATH",
            "HOME",
            "CONTAINERS_CONF",
            "_CONTAINERS_ROOTLESS_UID",
            "XDG_RUNTIME_DIR",
            "LD_PRELOAD",
            "DOCKER_TLS_VERIFY",
        ] {
            assert!(of(&[&format!("{name}=a\nb")]).unwrap_err().contains(name), "{name}");
            assert!(of(&[&format!("{name}=a")]).is_ok(), "{name}");
        }
        for name in ["", " ", "*", "SECRET*", "A\nB"] {
            assert!(of(&[&format!("{name}=a")]).unwrap_err().contains("cannot be the name"), "{name:?}");
        }
    }
}
