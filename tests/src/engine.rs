//! The end-to-end tests with containers of another engine: with `GODWIT_TEST_ENGINE=podman` or `docker`, [`Bed::run`] has that
//! start them, and godwit adopt them.

use std::net::Ipv4Addr;

use godwit_lab::LabConfig;
use godwit_lab::workload::Preset;

use crate::Bed;
use crate::docker::Dockers;
use crate::podman::Podmans;

/// The environment variable that names the engine.
pub const ENGINE_VARIABLE: &str = "GODWIT_TEST_ENGINE";

/// An engine on each node of a lab.
#[derive(Debug)]
pub(crate) enum Engine {
    Podman(Podmans),
    Docker(Dockers),
}

/// A volume as an engine understands it, and what godwit is told at the adoption: `/PATH:TARGET:move=copy` is `/PATH:TARGET`
/// and `TARGET=copy`.
fn said_of_its_move(volume: &str) -> (String, Option<String>) {
    match volume.split_once(":move=") {
        Some((plain, policy)) => {
            let target = plain.split(':').nth(1).unwrap_or_default();
            (plain.to_owned(), Some(format!("{target}={policy}")))
        }
        None => (volume.to_owned(), None),
    }
}

impl Engine {
    /// The one that is asked for, in a lab that is to be made; none for godwit's own containers.
    pub(crate) fn wanted(config: &mut LabConfig) -> Option<Self> {
        match std::env::var(ENGINE_VARIABLE).unwrap_or_default().as_str() {
            "" => None,
            "podman" => {
                let podmans = Podmans::new();
                podmans.equip(config);
                Some(Self::Podman(podmans))
            }
            "docker" => {
                let dockers = Dockers::new();
                dockers.equip(config);
                Some(Self::Docker(dockers))
            }
            other => panic!("{ENGINE_VARIABLE} is {other:?}, not podman or docker"),
        }
    }

    pub(crate) fn start(&mut self, bed: &Bed) {
        if let Self::Docker(dockers) = self {
            dockers.start(bed);
        }
    }

    /// Starts a container of a preset on a node, and has godwit adopt it.
    pub(crate) fn run(
        &self,
        bed: &Bed,
        node: &str,
        name: &str,
        address: Ipv4Addr,
        preset: &Preset,
        more: &[&str],
    ) {
        let image = format!("localhost/{name}:1");
        // What is said of volumes is for the engine that makes the container.
        let (volumes, more): (Vec<&[&str]>, Vec<_>) = more.chunks(2).partition(|words| words[0] == "-v");
        let (volumes, more) = (volumes.concat(), more.concat());
        // What becomes of a mount is godwit's to know.
        let (volumes, moves): (Vec<_>, Vec<_>) = volumes.into_iter().map(said_of_its_move).unzip();
        let mut words = vec!["run", "--detach", "--network", "none", "--name", name];
        words.extend(volumes.iter().map(String::as_str));
        words.extend(preset.env.iter().flat_map(|entry| ["--env", entry]));
        words.extend(preset.user.iter().flat_map(|user| ["--user", user]));
        words.push(&image);
        words.extend(preset.command.iter().map(String::as_str));
        let engine = match self {
            Self::Podman(podmans) => {
                podmans.image(bed, &[node], preset, &image);
                podmans.done(bed, node, &words);
                "podman"
            }
            Self::Docker(dockers) => {
                dockers.image(&[node], preset, &image);
                dockers.done(node, &words);
                "docker"
            }
        };
        let (container, address) = (format!("{engine}:{name}"), address.to_string());
        let moves: Vec<_> = moves.iter().flatten().flat_map(|said| ["--mount", said]).collect();
        let words = [&["adopt", &container, "--ip", &address], more.as_slice(), &moves].concat();
        assert_eq!(bed.done(node, &words), format!("{name}\n"));
    }

    /// Removes all containers, before the lab goes.
    pub(crate) fn clear(&self, bed: &Bed) {
        match self {
            Self::Podman(podmans) => podmans.clear(bed),
            Self::Docker(dockers) => dockers.clear(),
        }
    }
}
