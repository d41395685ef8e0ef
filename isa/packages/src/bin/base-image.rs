//! `base-image DIRECTORY [NAME…]`: builds busybox and services on it from the distribution's source packages, and packs each
//! as `DIRECTORY/NAME.tar` by `godwit image pack`; without names all of `isa/base`. `make base-image` runs it.

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail};
use godwit_isa_packages::base::{BUSYBOX, IMAGES, Image};
use godwit_isa_packages::tools::{self, run};

fn main() -> ExitCode {
    match make(std::env::args().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("base-image: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn make(mut arguments: impl Iterator<Item = String>) -> Result<()> {
    let known = IMAGES.map(|image| image.name).join(", ");
    let Some(directory) = arguments.next() else {
        bail!("name the directory for the archives, and images of these if not all: {known}");
    };
    let mut images = Vec::new();
    for name in arguments {
        let image =
            Image::named(&name).with_context(|| format!("there is no image {name}; name one of {known}"));
        images.push(image?);
    }
    if images.is_empty() {
        images.extend(IMAGES);
    }
    let directory = Path::new(&directory);
    std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    let godwit = tools::godwit()?;
    for image in images {
        let files = tempfile::tempdir()?;
        let output = directory.join(image.name).with_extension("tar");
        let words =
            image.pack(BUSYBOX, files.path(), &output).with_context(|| format!("image {}", image.name))?;
        print!("{}: {}", output.display(), run(Command::new(&godwit).args(words))?);
    }
    Ok(())
}
