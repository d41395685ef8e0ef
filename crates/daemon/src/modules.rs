//! The neutral modules of images: whether they are those that the image's executables were made from.

use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use godwit_api::v1 as api;
use godwit_crossing::Program;
use godwit_engine::image::{Image, Module, Store};
use godwit_engine::rootfs::{OfLayers, file_of_layers};
use godwit_isa_plan::image::MOST_EXECUTABLE;

/// A module as users see it.
pub(crate) fn shown(module: &Module) -> api::ImageModule {
    api::ImageModule {
        path: module.path.clone(),
        digest: module.digest.to_string(),
        bytes: module.bytes,
        identity: hex(&module.identity()),
    }
}

/// Bytes in hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Looks whether the executables that an image has here were made from its modules.
///
/// # Errors
/// They were not: why, in words.
pub(crate) fn check(store: &Store, image: &Image) -> Result<(), String> {
    let lower: Vec<PathBuf> = image.layers.iter().map(|layer| store.layer_path(layer)).collect();
    image.neutral.iter().flat_map(|neutral| &neutral.modules).try_for_each(|module| {
        let path = &module.path;
        let file = match file_of_layers(&lower, None, path.as_bytes()) {
            Ok(OfLayers::File(file)) => file,
            Ok(_) => return Err(format!("it has a neutral module for {path}, and no such program")),
            Err(error) => return Err(format!("{path} cannot be read: {error}")),
        };
        let read = || -> io::Result<(Vec<u8>, u32)> {
            let mode = file.metadata()?.mode();
            let mut bytes = Vec::new();
            (&file).take(MOST_EXECUTABLE + 1).read_to_end(&mut bytes)?;
            if bytes.len() as u64 > MOST_EXECUTABLE {
                return Err(io::Error::other(format!("it has more than {} MiB", MOST_EXECUTABLE >> 20)));
            }
            Ok((bytes, mode))
        };
        let (bytes, mode) = read().map_err(|error| format!("{path} cannot be read: {error}"))?;
        let program = Program::decode(&bytes, mode)
            .map_err(|error| format!("it has a neutral module for {path}: {error}"))?;
        match program.executable.identity == module.identity() {
            true => Ok(()),
            false => Err(format!(
                "{path} was not made from the neutral module that the image has for it: their identities differ; pack both of one run of godwit-cc"
            )),
        }
    })
}
