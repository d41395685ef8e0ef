//! Services that can cross: of images that `make base-image` has built, and of programs of this crate that godwit-cc builds.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};
use godwit_api::v1::{RunRequest, Ulimit, run_request::Source};
use godwit_cli::client::Connection;
use godwit_lab::Lab;

use crate::trial::{SOURCE, blocking};

/// A program in C, which needs nothing beside it.
#[derive(Clone, Copy)]
pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) source: &'static str,
}

impl Program {
    /// Builds it in a directory; its executable for this machine.
    pub(crate) fn build(self, compiler: &Path, directory: &Path) -> anyhow::Result<PathBuf> {
        let Self { name, source } = self;
        let path = directory.join(format!("{name}.c"));
        fs::write(&path, source).with_context(|| format!("writing {}", path.display()))?;
        let mut command = Command::new(compiler);
        command.arg("-O2").arg(&path).arg("-o").arg(directory.join(name));
        let output = command.output().with_context(|| {
            format!(
                "{} does not start; install the package godwit-isa, or name it with --compiler",
                compiler.display()
            )
        })?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{} failed: {}", compiler.display(), said.trim());
        Ok(directory.join(format!("{name}.{}", std::env::consts::ARCH)))
    }

    /// A root filesystem in the lab's directory, with nothing but its executable for this machine, which is `/NAME` there.
    pub(crate) async fn root(self, lab: &Lab, compiler: &Path) -> anyhow::Result<Source> {
        let directory = lab.state(SOURCE)?.with_file_name(self.name);
        let compiler = compiler.to_owned();
        let root = blocking(move || {
            let root = directory.join("root");
            fs::create_dir_all(&root).with_context(|| format!("making {}", root.display()))?;
            let executable = self.build(&compiler, &directory)?;
            let copied = fs::copy(&executable, root.join(self.name));
            copied.with_context(|| format!("copying {}", executable.display()))?;
            Ok(root)
        });
        Ok(Source::Rootfs(root.await?.to_string_lossy().into_owned()))
    }
}

/// An image that `make base-image` has put into a directory.
pub(crate) fn image(images: &Path, name: &str) -> anyhow::Result<Source> {
    let path = images.join(name).with_extension("tar");
    let path = path.canonicalize().with_context(|| {
        format!(
            "the image {} cannot be read: `make base-image BASE={name}` builds it in target/base",
            path.display()
        )
    })?;
    Ok(Source::Image(path.to_string_lossy().into_owned()))
}

/// A service to run.
pub(crate) struct Service<'a> {
    pub(crate) name: &'a str,
    pub(crate) address: std::net::Ipv4Addr,
    pub(crate) source: Source,
    /// The image's own one if there are no words.
    pub(crate) command: Vec<String>,
    pub(crate) ulimits: Vec<Ulimit>,
}

impl Service<'_> {
    pub(crate) async fn run(self, node: &Connection) -> anyhow::Result<()> {
        let request = RunRequest {
            name: self.name.to_owned(),
            address: self.address.to_string(),
            source: Some(self.source),
            command: self.command,
            ulimits: self.ulimits,
            ..RunRequest::default()
        };
        node.node.clone().run(request).await.map_err(|status| node.explain(&status))?;
        Ok(())
    }
}
