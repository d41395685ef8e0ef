//! The digests of a program's parts, of which its identity is made.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use godwit_isa_plan::Binding;
use sha2::{Digest as _, Sha256};

use crate::{Layout, LinkError, Set};

/// The binding of a program of this module, with what is linked to it on all sets.
pub(crate) fn binding(
    module: &Path,
    layout: &Layout,
    natives: &BTreeMap<Set, Vec<PathBuf>>,
) -> Result<Binding, LinkError> {
    let mut toolchain = Sha256::new();
    for (set, files) in natives {
        for file in files {
            toolchain.update(set.name());
            toolchain.update(digest(file)?);
        }
    }
    Ok(Binding {
        module: digest(module)?,
        layout: Sha256::digest(layout.script(&[0; 32])).into(),
        toolchain: toolchain.finalize().into(),
    })
}

fn digest(path: &Path) -> Result<[u8; 32], LinkError> {
    let failed = |source| LinkError::File { path: path.to_owned(), source };
    let mut hash = Sha256::new();
    io::copy(&mut File::open(path).map_err(failed)?, &mut hash).map_err(failed)?;
    Ok(hash.finalize().into())
}
