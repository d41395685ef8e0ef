//! The platforms of an image whose service crosses to nodes of another instruction set.
//!
//! A node unpacks the layers of its own platform. Of an image that is marked by [`godwit_isa_plan::image::CROSSING`] it keeps
//! the blobs of the other platforms too, so that it can send them to a node of theirs. Other images of several platforms
//! count for the node's own platform alone.

use serde::{Deserialize, Deserializer, Serialize, de};

use super::Digest;
use crate::rootfs::MAX_LAYERS;

/// Most platforms of an image beside a node's own: there are two instruction sets between which services cross.
pub const MAX_PLATFORMS: usize = 4;
/// Longest name of a machine that is read, in bytes.
const MAX_MACHINE: usize = 32;
/// What OCI calls an instruction set, and what `uname -m` calls it.
const MACHINES: [(&str, &str); 2] = [("amd64", "x86_64"), ("arm64", "aarch64")];

/// What an image has for one platform.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlatformLayers {
    /// Its instruction set as `uname -m` names it, e.g. `aarch64`.
    pub machine: String,
    /// Digests of the layers' blobs, lowest first.
    pub layers: Vec<Digest>,
    /// The digest of its configuration there, by which other engines know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<Digest>,
}

/// What `uname -m` calls an instruction set that OCI calls so; none of one to which no service crosses.
#[must_use]
pub fn machine_of(architecture: &str) -> Option<&'static str> {
    MACHINES.iter().find(|(name, _)| *name == architecture).map(|(_, machine)| *machine)
}

/// What OCI calls an instruction set that `uname -m` calls so; of one that is not known the same word.
#[must_use]
pub fn architecture_of(machine: &str) -> &str {
    MACHINES.iter().find(|(_, known)| *known == machine).map_or(machine, |(name, _)| name)
}

/// Reads the further platforms of an image or a service, which come from outside.
///
/// # Errors
/// There are more than [`MAX_PLATFORMS`], one twice, or one has a name or layers that none can have.
pub fn bounded<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<PlatformLayers>, D::Error> {
    let platforms = Vec::<PlatformLayers>::deserialize(from)?;
    if platforms.len() > MAX_PLATFORMS {
        let count = platforms.len();
        return Err(de::Error::custom(format!(
            "{count} further platforms; {MAX_PLATFORMS} are the most that an image can have"
        )));
    }
    for (nth, PlatformLayers { machine, layers, .. }) in platforms.iter().enumerate() {
        // A later release may know more of them.
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        if machine.is_empty() || machine.len() > MAX_MACHINE || !machine.bytes().all(is_name) {
            let machine: String = machine.chars().take(MAX_MACHINE).collect();
            return Err(de::Error::custom(format!("{machine:?} cannot be the name of a machine")));
        }
        if platforms[..nth].iter().any(|other| other.machine == *machine) {
            return Err(de::Error::custom(format!("{machine} is among the platforms twice")));
        }
        if layers.len() > MAX_LAYERS {
            let count = layers.len();
            return Err(de::Error::custom(format!(
                "{count} layers for {machine}, and at most {MAX_LAYERS} can be stacked"
            )));
        }
    }
    Ok(platforms)
}
