//! The base: busybox and services on it, each built from its source package, as images for both instruction sets. What is
//! done in the directory of a source, and what an image has beside programs, is in `isa/base`.

use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::package::{self, Recipe, built};
use crate::tools::{isa, run};

/// busybox with all applets of its own default, as the base has it.
pub const BUSYBOX: Recipe =
    Recipe { package: "busybox", name: "whole", commands: include_str!("../../base/busybox/build") };

/// A shell and few applets, which is linked in seconds.
pub const BUSYBOX_SMALL: Recipe = Recipe {
    package: "busybox",
    name: "small",
    commands: concat!(
        "cat >choices <<'END'\n",
        include_str!("../../base/busybox/small"),
        "END\nCHOICES=choices\n",
        include_str!("../../base/busybox/build")
    ),
};

/// Redis.
pub const REDIS: Recipe =
    Recipe { package: "redis", name: "server", commands: include_str!("../../base/redis/build") };

/// Debian's source of Lua, which has no tests. Beside the interpreter there is one without capture, in `plain`.
pub const LUA: Recipe =
    Recipe { package: "lua5.4", name: "both", commands: include_str!("../../base/lua/build") };

/// SQLite's shell, and its `speedtest1`.
pub const SQLITE: Recipe =
    Recipe { package: "sqlite3", name: "shell", commands: include_str!("../../base/sqlite/build") };

/// lighttpd.
pub const LIGHTTPD: Recipe =
    Recipe { package: "lighttpd", name: "static", commands: include_str!("../../base/lighttpd/build") };

/// nginx.
pub const NGINX: Recipe =
    Recipe { package: "nginx", name: "server", commands: include_str!("../../base/nginx/build") };

/// The broker mosquitto.
pub const MOSQUITTO: Recipe =
    Recipe { package: "mosquitto", name: "broker", commands: include_str!("../../base/mosquitto/build") };

/// aria2, a program in C++.
pub const ARIA2: Recipe =
    Recipe { package: "aria2", name: "rpc", commands: include_str!("../../base/aria2/build") };

/// gzip.
pub const GZIP: Recipe =
    Recipe { package: "gzip", name: "gzip", commands: include_str!("../../base/gzip/build") };

/// GOCR, which reads text in pictures.
pub const GOCR: Recipe =
    Recipe { package: "gocr", name: "gocr", commands: include_str!("../../base/gocr/build") };

/// A program that a package's build has made, and where an image has it.
type Placed = (&'static str, &'static str);

/// An image: busybox, and a service where it is not the base itself.
#[derive(Debug, Clone, Copy)]
pub struct Image {
    /// `godwit/NAME` is the image's, `NAME.tar` its archive's.
    pub name: &'static str,
    /// The service's package; it gives the image its version.
    pub recipe: Recipe,
    /// Its programs.
    pub programs: &'static [Placed],
    /// What it runs.
    pub command: &'static [&'static str],
}

const BUSYBOX_PROGRAM: Placed = ("busybox_unstripped", "/bin/busybox");

/// All images; the base is the first one.
pub const IMAGES: [Image; 10] = [
    Image { name: "base", recipe: BUSYBOX, programs: &[], command: &["/bin/sh"] },
    Image {
        name: "redis",
        recipe: REDIS,
        programs: &[("src/redis-server", "/usr/bin/redis-server")],
        command: &["/usr/bin/redis-server", "--protected-mode", "no"],
    },
    Image { name: "lua", recipe: LUA, programs: &[("src/lua", "/usr/bin/lua")], command: &["/usr/bin/lua"] },
    // A server: a shell of SQLite for each client, on one database.
    Image {
        name: "sqlite",
        recipe: SQLITE,
        programs: &[("sqlite3", "/usr/bin/sqlite3")],
        command: &["/usr/bin/tcpsvd", "0.0.0.0", "7000", "/usr/bin/sqlite3", "/srv/data.db"],
    },
    Image {
        name: "lighttpd",
        recipe: LIGHTTPD,
        programs: &[("src/lighttpd", "/usr/sbin/lighttpd")],
        command: &["/usr/sbin/lighttpd", "-D", "-f", "/etc/lighttpd.conf"],
    },
    Image {
        name: "nginx",
        recipe: NGINX,
        programs: &[("objs/nginx", "/usr/sbin/nginx")],
        command: &["/usr/sbin/nginx"],
    },
    Image {
        name: "mosquitto",
        recipe: MOSQUITTO,
        programs: &[("src/mosquitto", "/usr/sbin/mosquitto")],
        command: &["/usr/sbin/mosquitto", "-c", "/etc/mosquitto.conf"],
    },
    Image {
        name: "aria2",
        recipe: ARIA2,
        programs: &[("src/aria2c", "/usr/bin/aria2c")],
        command: &[
            "/usr/bin/aria2c",
            "--no-conf",
            "--enable-rpc",
            "--rpc-listen-all",
            "--rpc-listen-port=7000",
        ],
    },
    // A server: what a client sends comes back compressed.
    Image {
        name: "gzip",
        recipe: GZIP,
        programs: &[("gzip", "/usr/bin/gzip")],
        command: &["/usr/bin/tcpsvd", "0.0.0.0", "7000", "/usr/bin/gzip"],
    },
    // A server: a shell for each client, which starts the program for each picture.
    Image {
        name: "gocr",
        recipe: GOCR,
        programs: &[("src/gocr", "/usr/bin/gocr")],
        command: &["/usr/bin/tcpsvd", "0.0.0.0", "7000", "/bin/sh", "/srv/ocr"],
    },
];

impl Image {
    /// One of [`IMAGES`].
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        IMAGES.into_iter().find(|image| image.name == name)
    }

    /// The words of `godwit` that pack it with this busybox into an archive, when all is built and its files are in a
    /// directory.
    ///
    /// # Errors
    /// When something cannot be built, or a file cannot be made.
    pub fn pack(&self, busybox: Recipe, files: &Path, output: &Path) -> Result<Vec<OsString>> {
        let busybox = built(busybox)?;
        let package = if self.programs.is_empty() { busybox.clone() } else { built(self.recipe)? };
        write_files(&busybox, files)?;
        // A program of the package stands in the applet's place.
        for (_, path) in self.programs {
            match fs::remove_file(in_root(files, path)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("cannot remove the link {path}"));
                }
                _ => {}
            }
        }
        copy(&isa().join("base").join(self.name).join("root"), files)?;
        Ok(words(self, &busybox, &package, files, output, &self.version()?))
    }

    /// The package's, as a tag of an image.
    fn version(&self) -> Result<String> {
        let archive = package::archive(self.recipe)?;
        let name = archive.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let version = name.split_once('_').and_then(|(_, rest)| rest.split_once(".orig.tar"));
        let (version, _) = version.with_context(|| format!("{name} tells no version"))?;
        Ok(version.replace(|letter: char| !letter.is_ascii_alphanumeric() && letter != '.', "-"))
    }
}

fn words(
    image: &Image,
    busybox: &Path,
    package: &Path,
    files: &Path,
    output: &Path,
    version: &str,
) -> Vec<OsString> {
    let mut words: Vec<OsString> = ["image", "pack", "-o"].map(OsString::from).into();
    words.extend([output.into(), "--add".into(), files.into()]);
    // The whole command is what a user replaces.
    words.extend(["--entrypoint", "[]", "--cmd"].map(OsString::from));
    let command: Vec<String> = image.command.iter().map(|word| format!("{word:?}")).collect();
    words.push(format!("[{}]", command.join(",")).into());
    words.push(format!("godwit/{}:{version}", image.name).into());
    let busybox = [(busybox, BUSYBOX_PROGRAM)].into_iter();
    for (directory, (file, path)) in busybox.chain(image.programs.iter().map(|placed| (package, *placed))) {
        let mut word = directory.join(file).into_os_string();
        word.push(format!("={path}"));
        words.push(word);
    }
    words
}

/// What all images have beside programs: accounts, empty directories, a link for each applet of this busybox.
///
/// # Errors
/// When a file cannot be made.
pub fn write_files(busybox: &Path, into: &Path) -> Result<()> {
    copy(&isa().join("base/root"), into)?;
    for (directory, mode) in [
        ("tmp", 0o1777),
        ("var/tmp", 0o1777),
        ("root", 0o700),
        ("run", 0o755),
        ("srv", 0o755),
        ("var/log", 0o755),
    ] {
        let path = into.join(directory);
        fs::create_dir_all(&path)
            .and_then(|()| fs::set_permissions(&path, Permissions::from_mode(mode)))
            .with_context(|| format!("cannot make {}", path.display()))?;
    }
    let list = busybox.join("busybox.links");
    let list = fs::read_to_string(&list).with_context(|| format!("cannot read {}", list.display()))?;
    ensure!(list.lines().any(|path| path == "/bin/sh"), "busybox has no shell");
    for path in list.lines() {
        let link = in_root(into, path);
        link.parent()
            .map_or(Ok(()), fs::create_dir_all)
            .and_then(|()| symlink(BUSYBOX_PROGRAM.1, &link))
            .with_context(|| format!("cannot make the link {}", link.display()))?;
    }
    Ok(())
}

/// The path of an image below the directory with its files.
fn in_root(files: &Path, path: &str) -> PathBuf {
    files.join(path.trim_start_matches('/'))
}

/// Copies what is in a directory, if there is one.
fn copy(from: &Path, into: &Path) -> Result<()> {
    if from.is_dir() {
        run(Command::new("cp").args(["-r", "--no-preserve=ownership"]).arg(from.join(".")).arg(into))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_an_image_are_links_of_applets_accounts_and_directories() -> Result<()> {
        let (built, files) = (tempfile::tempdir()?, tempfile::tempdir()?);
        fs::write(built.path().join("busybox.links"), "/bin/sh\n/usr/bin/wc\n")?;
        write_files(built.path(), files.path())?;
        assert_eq!(fs::read_link(files.path().join("usr/bin/wc"))?, Path::new("/bin/busybox"));
        assert!(fs::read_to_string(files.path().join("etc/passwd"))?.starts_with("root:"));
        assert_eq!(fs::metadata(files.path().join("tmp"))?.permissions().mode() & 0o7777, 0o1777);
        fs::write(built.path().join("busybox.links"), "/usr/bin/wc\n")?;
        assert!(write_files(built.path(), files.path()).is_err());
        Ok(())
    }

    #[test]
    fn an_image_is_packed_of_busybox_and_of_its_programs() {
        let image = Image::named("lua").unwrap_or(IMAGES[0]);
        let paths = ["/b", "/p", "/f", "/o.tar"].map(Path::new);
        let words = words(&image, paths[0], paths[1], paths[2], paths[3], "5.4.4");
        let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
        assert_eq!(
            words.join(" "),
            "image pack -o /o.tar --add /f --entrypoint [] --cmd [\"/usr/bin/lua\"] godwit/lua:5.4.4 \
             /b/busybox_unstripped=/bin/busybox /p/src/lua=/usr/bin/lua"
        );
    }
}
