//! The archive of an image: a tar of an OCI image layout (image-spec v1.1, image-layout.md).

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use godwit_crossing::Set;
use tar::{Builder, EntryType};

use crate::documents::{
    Descriptor, EMPTY, configuration, layout_index, manifest, marked_index, modules_manifest,
};
use crate::layer::{self, Blob, directory_of, header};
use crate::program::Programs;
use crate::{PackError, Packed, Recipe};

/// What says that it is a layout.
const LAYOUT: (&str, &[u8]) = ("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#);

/// Writes the archive of a recipe with these programs, for these sets.
pub(crate) fn write(
    recipe: &Recipe,
    programs: &Programs,
    sets: &[Set],
    output: &Path,
) -> Result<Packed, PackError> {
    let failed = |error| PackError::Write(output.to_owned(), error);
    let document = |written: serde_json::Result<Vec<u8>>| {
        let bytes = written.map_err(|error| failed(error.into()))?;
        Blob::new(output, |into| into.write_all(&bytes).map_err(failed))
    };
    let files = recipe.files.as_deref().map(|directory| layer::files(directory, output)).transpose()?;
    let (mut blobs, mut manifests) = (Vec::new(), Vec::new());
    for &set in sets {
        let own = programs.iter();
        let own =
            own.filter_map(|(path, program)| Some((path.as_str(), &program.executables.get(&set)?[..])));
        let own = layer::programs(&own.collect(), output)?;
        let layers: Vec<_> = files.iter().chain([&own]).collect();
        let configured = document(configuration(set, &recipe.run, &layers))?;
        let image = document(manifest(&configured, &layers))?;
        manifests.push(Descriptor::of_manifest(set, &image));
        blobs.extend([own, configured, image]);
    }
    let modules: Vec<_> = programs.values().filter_map(|program| program.module.as_ref()).collect();
    if !modules.is_empty() {
        let mut kept = Vec::new();
        for (module, bytes) in modules {
            kept.push((module, Blob::new(output, |into| into.write_all(bytes).map_err(failed))?));
        }
        let empty = document(Ok(EMPTY.to_vec()))?;
        let manifest = document(modules_manifest(&empty, &kept))?;
        manifests.push(Descriptor::of_modules(&manifest));
        blobs.extend(kept.into_iter().map(|(_, blob)| blob).chain([empty, manifest]));
    }
    let index = document(marked_index(manifests))?;
    let digest = index.digest();
    let layout =
        layout_index(Descriptor::of_index(&recipe.name, &index)).map_err(|error| failed(error.into()))?;
    blobs.extend(files.into_iter().chain([index]));
    let bytes = persist(&layout, &blobs, output).map_err(failed)?;
    Ok(Packed { digest, bytes })
}

/// Writes a layout to a file beside its place, and moves it there.
fn persist(index: &[u8], blobs: &[Blob], output: &Path) -> io::Result<u64> {
    let file = tempfile::Builder::new()
        .prefix(".godwit-pack-")
        // Those that the user's umask leaves.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(directory_of(output))?;
    let mut archive = Builder::new(io::BufWriter::new(file));
    let document = |bytes: &[u8]| header(EntryType::Regular, 0o644, bytes.len() as u64);
    archive.append_data(&mut document(LAYOUT.1), LAYOUT.0, LAYOUT.1)?;
    archive.append_data(&mut document(index), "index.json", index)?;
    for directory in ["blobs/", "blobs/sha256/"] {
        archive.append_data(&mut header(EntryType::Directory, 0o755, 0), directory, io::empty())?;
    }
    // By their names, each once.
    let blobs: BTreeMap<_, _> = blobs.iter().map(|blob| (&blob.hex, blob)).collect();
    for (hex, blob) in blobs {
        let mut header = header(EntryType::Regular, 0o644, blob.bytes);
        archive.append_data(&mut header, format!("blobs/sha256/{hex}"), blob.open()?)?;
    }
    let mut out = archive.into_inner()?;
    out.flush()?;
    let file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.as_file().sync_all()?;
    let bytes = file.as_file().metadata()?.len();
    file.persist(output)?;
    Ok(bytes)
}
