//! Images with the neutral modules of their programs: what nodes keep of them, what binds them, and what a further platform makes
//! of them.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use godwit_crossing::Binding;
use godwit_engine::image::{Digest, Imported, Store};
use godwit_pack::{Documents, GrowthError, Recipe, Run, Set, Twins, add_platform};
use tempfile::TempDir;

mod support;

use support::{IDENTITY, MACHINES, executable, of_set, places};

const MODULE: &[u8] = b"BC\xc0\xde a module";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn binding() -> Binding {
    Binding { module: Digest::of(MODULE).bytes(), layout: [5; 32], toolchain: [6; 32] }
}

/// An executable of the module for a set.
fn made(nth: usize) -> Vec<u8> {
    let mut bytes = executable(MACHINES[nth]);
    bytes[IDENTITY..IDENTITY + 32].copy_from_slice(&binding().identity());
    bytes
}

/// A program that was built with `--save-module`.
fn program(directory: &Path) -> PathBuf {
    let file = directory.join("ledger");
    for (nth, set) in Set::ALL.into_iter().enumerate() {
        fs::write(of_set(&file, set), made(nth)).unwrap();
    }
    fs::write(directory.join("ledger.module"), MODULE).unwrap();
    let Binding { layout, toolchain, .. } = binding();
    let script = format!(
        "#!/bin/sh\n# identity: x\n# layout: {}\n# toolchain: {}\nexit 1\n",
        hex(&layout),
        hex(&toolchain)
    );
    fs::write(&file, script).unwrap();
    file
}

fn recipe(scratch: &Path, sets: &[Set]) -> Recipe {
    let files = scratch.join("files");
    fs::create_dir_all(files.join("etc")).unwrap();
    fs::write(files.join("etc/motd"), "for all\n").unwrap();
    let file = program(scratch);
    let programs = vec![Twins::new(&file, None).unwrap(), Twins::new(&file, Some("/srv/ledger")).unwrap()];
    let run = Run { entrypoint: vec!["/bin/ledger".into()], env: vec!["A=b".into()], ..Run::default() };
    Recipe {
        name: "shop/ledger:1".into(),
        programs,
        sets: sets.into(),
        modules: true,
        files: Some(files),
        run,
    }
}

fn import(scratch: &TempDir, archive: &Path) -> (Store, Imported) {
    let store = Store::open(&scratch.path().join("store")).unwrap();
    let imported = store.import_known(archive).unwrap();
    (store, imported)
}

#[test]
fn a_node_keeps_modules_and_documents_and_unpacks_none_of_them() {
    let scratch = TempDir::new_in("/var/tmp").unwrap();
    let (own, _) = places();
    let archive = scratch.path().join("ledger.tar");
    let packed = recipe(scratch.path(), &[Set::ALL[own]]).write(&archive).unwrap();
    let (store, Imported { image, digest, name }) = import(&scratch, &archive);
    assert_eq!((digest.to_string(), name.unwrap()), (packed.digest, "shop/ledger:1".to_owned()));
    assert_eq!((image.layers.len(), image.platforms.len()), (2, 0));
    let neutral = image.neutral.clone().unwrap();
    let paths: Vec<_> = neutral.modules.iter().map(|module| module.path.as_str()).collect();
    assert_eq!(paths, ["/bin/ledger", "/srv/ledger"]);
    for module in &neutral.modules {
        assert_eq!((module.identity(), &module.digest), (binding().identity(), &Digest::of(MODULE)));
        assert!(store.has_blob(&module.digest) && !store.has_layer(&module.digest));
    }
    assert_eq!(neutral.documents.index, digest);
    assert!(image.blobs().all(|blob| store.has_blob(blob)));
    // Only with a name: who runs it from the file needs none of them.
    assert_eq!(store.import_oci(&archive).unwrap().neutral, None);
    let named = store.name(digest.clone(), image.clone()).unwrap();
    assert_eq!(store.named("shop/ledger:1").unwrap(), Some(named));
    let mut collector = store.collector().unwrap();
    collector.remove(&neutral.modules[0].digest).unwrap();
    collector.delete().unwrap();
    assert_eq!(store.named("shop/ledger:1").unwrap(), None, "it is not whole any more");
    for (layer, only) in image.layers.iter().zip([false, true]) {
        assert_eq!(store.has_only(layer, &paths).unwrap(), only, "{layer}");
    }
    assert!(!store.has_only(&image.layers[1], &paths[..1]).unwrap(), "there is a further program");
}

#[test]
fn an_image_that_gets_a_platform_is_the_one_that_was_packed_for_both_at_once() {
    for (there, added) in [(0, 1), (1, 0)] {
        let scratch = TempDir::new_in("/var/tmp").unwrap();
        let both = recipe(scratch.path(), &[]).write(&scratch.path().join("both.tar")).unwrap();
        let archive = scratch.path().join("one.tar");
        let one = recipe(scratch.path(), &[Set::ALL[there]]).write(&archive).unwrap();
        assert_ne!(one.digest, both.digest);
        // What a node of that set has.
        let unpacked = scratch.path().join("unpacked");
        fs::create_dir(&unpacked).unwrap();
        let tar =
            std::process::Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&unpacked).status();
        assert!(tar.unwrap().success());
        let blob = |digest: &str| {
            fs::read(unpacked.join("blobs/sha256").join(digest.strip_prefix("sha256:").unwrap())).unwrap()
        };
        let index = blob(&one.digest);
        let parsed: serde_json::Value = serde_json::from_slice(&index).unwrap();
        let digest = parsed["manifests"][0]["digest"].as_str().unwrap();
        let manifest = blob(digest);
        let parsed: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
        let configuration = blob(parsed["config"]["digest"].as_str().unwrap());
        let documents =
            Documents { index: &index, manifest: &manifest, configuration: &configuration, digest };
        let executables: BTreeMap<_, _> =
            ["/bin/ledger", "/srv/ledger"].map(|path| (path.to_owned(), made(added))).into();
        let grow =
            |stay: &[bool]| add_platform(documents, Set::ALL[added], &executables, stay, scratch.path());
        let grown = grow(&[true, false]).unwrap();
        assert_eq!(grown.index.digest(), both.digest, "{added} is added");
        assert_eq!(grown.layers.len(), 2);
        // A layer with more than programs stays.
        let more = grow(&[true, true]).unwrap();
        assert_eq!((more.layers.len(), more.layers.last()), (3, Some(&grown.layer.digest())));
        assert!(matches!(grow(&[true]), Err(GrowthError::Document("configuration", _))));
        let there = add_platform(documents, Set::ALL[there], &executables, &[true, false], scratch.path());
        assert!(matches!(there, Err(GrowthError::There(_))), "{there:?}");
        for broken in [&b"{"[..], b"[]", b"{}", br#"{"manifests":{}}"#, br#"{"manifests":[]}"#] {
            let documents = Documents { index: broken, ..documents };
            let refused =
                add_platform(documents, Set::ALL[added], &executables, &[true, false], scratch.path());
            assert!(matches!(refused, Err(GrowthError::Document("index", _))), "{refused:?}");
        }
    }
}

#[test]
fn a_module_that_the_executables_were_not_made_from_is_not_packed() {
    let scratch = tempfile::tempdir().unwrap();
    let out = tempfile::tempdir().unwrap();
    let refused = |change: &dyn Fn(&Path)| {
        let recipe = recipe(scratch.path(), &[]);
        change(scratch.path());
        let said = recipe.write(&out.path().join("image.tar")).unwrap_err().to_string();
        assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
        said
    };
    let said = refused(&|directory| fs::remove_file(directory.join("ledger.module")).unwrap());
    assert!(said.contains("ledger.module is not there") && said.contains("--save-module"), "{said}");
    let said = refused(&|directory| fs::remove_file(directory.join("ledger")).unwrap());
    assert!(said.contains("does not say what it is bound by"), "{said}");
    let said =
        refused(&|directory| fs::write(directory.join("ledger"), "#!/bin/sh\nexit\n# layout: 00\n").unwrap());
    assert!(said.contains("does not say what it is bound by"), "{said}");
    let said =
        refused(&|directory| fs::write(directory.join("ledger.module"), b"BC\xc0\xde another").unwrap());
    assert!(said.contains("is not the module that the executables were made from"), "{said}");
    let said = refused(&|directory| {
        let script = fs::read_to_string(directory.join("ledger")).unwrap();
        fs::write(directory.join("ledger"), script.replace("0505", "0504")).unwrap();
    });
    assert!(said.contains("is not the module that the executables were made from"), "{said}");
    // Without them it is packed, and for one set, whatever the other executable is.
    let recipe = Recipe { modules: false, sets: vec![Set::X86_64], ..recipe(scratch.path(), &[]) };
    fs::remove_file(of_set(&scratch.path().join("ledger"), Set::Aarch64)).unwrap();
    recipe.write(&out.path().join("image.tar")).unwrap();
}
