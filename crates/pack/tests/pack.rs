//! What is packed is what nodes and usual tools take, and what cannot be packed is refused with a sentence.
#![allow(missing_docs, clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use godwit_engine::image::{Image, Store};
use godwit_pack::{PackError, Recipe, Run, Set, Twins};
use tempfile::TempDir;

mod support;

use support::{IDENTITY, MACHINES, executable, of_set, places, program};

fn recipe(programs: &[(&Path, Option<&str>)]) -> Recipe {
    let programs: Vec<_> = programs.iter().map(|(file, path)| Twins::new(file, *path).unwrap()).collect();
    let run = Run { entrypoint: vec![programs[0].path()], ..Run::default() };
    Recipe { name: "ledger:1".into(), programs, run, ..Recipe::default() }
}

/// What a recipe is refused with; nothing is left then.
fn refused(recipe: &Recipe) -> String {
    let out = tempfile::tempdir().unwrap();
    let error = recipe.write(&out.path().join("image.tar")).unwrap_err();
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
    let source = std::error::Error::source(&error).map(|source| format!(": {source}")).unwrap_or_default();
    format!("{error}{source}")
}

fn import(scratch: &TempDir, archive: &Path) -> (Store, Image) {
    let store = Store::open(&scratch.path().join("store")).unwrap();
    let image = store.import_oci(archive).unwrap();
    (store, image)
}

/// The files of a directory that both sets have.
fn files(directory: &Path) -> PathBuf {
    let files = directory.join("files");
    fs::create_dir_all(files.join("etc/deep")).unwrap();
    fs::create_dir(files.join("tmp")).unwrap();
    fs::set_permissions(files.join("tmp"), fs::Permissions::from_mode(0o1777)).unwrap();
    fs::write(files.join("etc/passwd"), "root:x:0:0::/:/bin/ledger\n").unwrap();
    fs::write(files.join("etc/deep").join("n".repeat(200)), "long\n").unwrap();
    symlink("../etc/passwd", files.join("etc/link")).unwrap();
    files
}

#[test]
fn a_node_runs_its_own_programs_and_keeps_those_of_the_other_set() {
    let scratch = TempDir::new_in("/var/tmp").unwrap();
    let file = program(scratch.path(), "ledger");
    let run = Run {
        user: "7:8".into(),
        env: vec!["A=b".into()],
        entrypoint: vec!["/srv/bin/ledger".into()],
        cmd: vec!["7000".into()],
        working_dir: "/srv".into(),
    };
    let files = Some(files(scratch.path()));
    let recipe = Recipe { files, run, ..recipe(&[(&file, None), (&file, Some("/srv/bin/ledger"))]) };
    let archive = scratch.path().join("ledger.tar");
    let packed = recipe.write(&archive).unwrap();
    let metadata = fs::metadata(&archive).unwrap();
    assert_eq!((metadata.len(), metadata.mode() & 0o111), (packed.bytes, 0));

    let (store, image) = import(&scratch, &archive);
    assert_eq!((image.reference.as_str(), image.layers.len()), ("ledger:1", 2));
    let config = &image.config;
    assert_eq!((config.user.as_str(), config.working_dir.as_str()), ("7:8", "/srv"));
    assert_eq!((&config.env[..], &config.cmd[..]), (&["A=b".to_owned()][..], &["7000".to_owned()][..]));
    assert_eq!(config.entrypoint, ["/srv/bin/ledger"]);
    let at = |layer: usize, name: &str| store.layer_path(&image.layers[layer]).join(name);
    let (own, other) = places();
    for path in ["bin/ledger", "srv/bin/ledger"] {
        assert_eq!(fs::read(at(1, path)).unwrap(), executable(MACHINES[own]), "{path}");
        let metadata = fs::metadata(at(1, path)).unwrap();
        assert_eq!((metadata.mode() & 0o7777, metadata.uid(), metadata.mtime()), (0o755, 0, 0), "{path}");
    }
    assert_eq!(fs::metadata(at(0, "tmp")).unwrap().mode() & 0o7777, 0o1777);
    assert_eq!(fs::read_link(at(0, "etc/link")).unwrap(), Path::new("../etc/passwd"));
    assert_eq!(fs::read_to_string(at(0, "etc/deep").join("n".repeat(200))).unwrap(), "long\n");

    let [platform] = &image.platforms[..] else { panic!("{:?}", image.platforms) };
    assert_eq!(platform.machine, Set::ALL[other].name());
    assert_eq!(platform.layers[0], image.layers[0], "the files of both are one layer");
    assert!(store.has_blob(&platform.layers[1]) && !store.has_layer(&platform.layers[1]));
    store.unpack(&platform.layers[1]).unwrap();
    let there = fs::read(store.layer_path(&platform.layers[1]).join("bin/ledger")).unwrap();
    assert_eq!(there, executable(MACHINES[other]));
}

#[test]
fn the_same_programs_and_files_give_the_same_archive() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let written = |scratch: &TempDir, order: &[&str]| {
        let programs: Vec<_> = order.iter().map(|name| program(scratch.path(), name)).collect();
        let programs: Vec<_> = programs.iter().map(|file| (file.as_path(), None)).collect();
        let files = Some(files(scratch.path()));
        let run = Run { entrypoint: vec!["/bin/a".into()], ..Run::default() };
        let recipe = Recipe { files, run, ..recipe(&programs) };
        let packed = recipe.write(&scratch.path().join("image.tar")).unwrap();
        (packed, fs::read(scratch.path().join("image.tar")).unwrap())
    };
    let first = written(&one, &["a", "b"]);
    assert_eq!(written(&two, &["b", "a"]), first);
    fs::write(two.path().join("files/etc/passwd"), "another\n").unwrap();
    let image = Recipe { files: Some(two.path().join("files")), ..recipe(&[(&two.path().join("a"), None)]) };
    assert_ne!(image.write(&two.path().join("image.tar")).unwrap().digest, first.0.digest);
}

#[test]
fn skopeo_finds_the_image_of_each_platform() {
    let scratch = tempfile::tempdir().unwrap();
    let file = program(scratch.path(), "ledger");
    let archive = scratch.path().join("ledger.tar");
    recipe(&[(&file, None)]).write(&archive).unwrap();
    for set in ["amd64", "arm64"] {
        let image = format!("oci-archive:{}:ledger:1", archive.display());
        let shown =
            Command::new("skopeo").args(["--override-arch", set, "inspect", &image]).output().unwrap();
        assert!(shown.status.success(), "{}", String::from_utf8_lossy(&shown.stderr));
        let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
        assert_eq!((&shown["Architecture"], &shown["Os"]), (&set.into(), &"linux".into()));
    }
}

#[test]
fn programs_that_are_no_twins_are_refused_by_name() {
    let scratch = tempfile::tempdir().unwrap();
    let file = program(scratch.path(), "ledger");
    let [x86, arm] = Set::ALL.map(|set| of_set(&file, set));
    let shown = |path: &Path| path.display().to_string();
    let with = |change: &dyn Fn()| {
        program(scratch.path(), "ledger");
        change();
        refused(&recipe(&[(&file, None)]))
    };
    let said = with(&|| fs::remove_file(&arm).unwrap());
    assert!(said.starts_with(&format!("{} is not there; godwit-cc", shown(&arm))), "{said}");
    let said = with(&|| assert!(fs::copy(&x86, &arm).unwrap() > 0));
    assert_eq!(said, format!("{} is a program for x86_64, and its name says aarch64", shown(&arm)));
    let said = with(&|| {
        let mut bytes = fs::read(&arm).unwrap();
        bytes[IDENTITY] ^= 1;
        fs::write(&arm, bytes).unwrap();
    });
    assert_eq!(
        said,
        format!(
            "{} and {} are not one program: their build identities differ; build it anew, for both in one run of godwit-cc",
            shown(&x86),
            shown(&arm)
        )
    );
    let said = with(&|| fs::write(&x86, "#!/bin/sh\n").unwrap());
    assert!(
        said.starts_with(&format!("{} is not packed: the file is no ELF executable", shown(&x86))),
        "{said}"
    );
    let said = with(&|| {
        fs::remove_file(&x86).unwrap();
        let made = Command::new("mkfifo").arg(&x86).status().unwrap();
        assert!(made.success());
    });
    assert!(said.ends_with("it is not a regular file"), "{said}");
}

#[test]
fn a_recipe_that_makes_no_image_is_refused_with_a_sentence() {
    let scratch = tempfile::tempdir().unwrap();
    let file = program(scratch.path(), "ledger");
    for path in ["bin/x", "/", "/bin/", "/bin//x", "/bin/../x", "/./x", "/bin/.wh.x"] {
        let said = Twins::new(&file, Some(path)).unwrap_err().to_string();
        assert!(said.starts_with(&format!("{path:?} cannot be a program's path")), "{said}");
    }
    assert!(matches!(Twins::new(Path::new("/"), None), Err(PackError::Nameless(_))));
    for name in ["", "-x", "x/", "a b", "x\n", &"x".repeat(256)] {
        let said = refused(&Recipe { name: name.into(), ..recipe(&[(&file, None)]) });
        assert!(said.contains("cannot be an image's name"), "{said}");
    }
    let said = refused(&Recipe { programs: Vec::new(), ..recipe(&[(&file, None)]) });
    assert!(said.starts_with("an image needs a program"), "{said}");
    for (first, second) in [("/bin/x", "/bin/x"), ("/bin/x", "/bin/x/y"), ("/bin/x/y", "/bin/x")] {
        let said = refused(&recipe(&[(&file, Some(first)), (&file, Some(second))]));
        assert!(said.starts_with("two programs cannot be at /bin/x and at "), "{said}");
    }
    let with_files = |name: &str| {
        let files = files(scratch.path());
        assert!(Command::new("mkfifo").arg(files.join(name)).status().unwrap().success());
        let said = refused(&Recipe { files: Some(files.clone()), ..recipe(&[(&file, None)]) });
        fs::remove_dir_all(&files).unwrap();
        said
    };
    assert!(with_files("pipe").ends_with(
        "pipe is neither a file, nor a directory, nor a symbolic link; an image's files are these alone"
    ));
    assert!(with_files(".wh.passwd").contains("means in an image that a file is removed"));
    let said = refused(&Recipe { files: Some(of_set(&file, Set::X86_64)), ..recipe(&[(&file, None)]) });
    assert!(said.contains("cannot be read: not a directory"), "{said}");
}
