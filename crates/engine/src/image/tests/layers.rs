//! Layers: what a tar can say, and what it must not be able to do.

use std::os::unix::fs::symlink;

use proptest::prelude::*;

use super::*;
use crate::tree;

/// Unpacks a layer beside a directory that it must not reach; the layer's directory.
fn unpack(scratch: &Path, bytes: &[u8]) -> Result<PathBuf, ImageError> {
    let store = Store::open(&scratch.join("store")).unwrap();
    let digest = put(&store, bytes);
    let result = store.unpack(&digest);
    assert_eq!(store.has_layer(&digest), result.is_ok());
    assert_eq!(fs::read_dir(store.directory().join("tmp")).unwrap().count(), 0);
    result.map(|()| store.layer_path(&digest))
}

fn is_whiteout(path: &Path) -> bool {
    path.symlink_metadata()
        .is_ok_and(|metadata| metadata.rdev() == 0 && metadata.mode() & 0o170_000 == 0o020_000)
}

fn is_opaque(path: &Path) -> bool {
    let mut value = [0; 8];
    rustix::fs::getxattr(path, "trusted.overlay.opaque", &mut value)
        .is_ok_and(|length| &value[..length] == b"y")
}

#[test]
fn whiteouts_become_those_of_overlayfs() {
    let scratch = scratch();
    let layer = Tar::default()
        .file(".wh.removed", "")
        .directory("opaque/")
        .file("opaque/.wh..wh..opq", "")
        .file("opaque/new", "new")
        .file("first/.wh..wh..opq", "")
        .directory("first/")
        .file(".wh.again", "")
        .directory("again/")
        .directory("both/")
        .file(".wh.both", "")
        .file("kept", "kept")
        .file(".wh.kept", "")
        .file(".wh.replaced", "")
        .file("replaced", "file")
        .file(".wh..wh.plnk", "ignored")
        .end();
    let layer = unpack(scratch.path(), &layer).unwrap();
    assert!(is_whiteout(&layer.join("removed")));
    for directory in ["opaque", "first", "again", "both"] {
        assert!(is_opaque(&layer.join(directory)), "{directory}");
    }
    assert_eq!(fs::read(layer.join("kept")).unwrap(), b"kept");
    assert_eq!(fs::read(layer.join("replaced")).unwrap(), b"file");
    let mut names: Vec<_> = fs::read_dir(&layer).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["again", "both", "first", "kept", "opaque", "removed", "replaced"]);
    assert_eq!(fs::read_dir(layer.join("opaque")).unwrap().count(), 1);
}

#[test]
fn no_entry_reaches_outside() {
    let tar = Tar::default;
    let extended = |records: &[u8]| tar().entry("p", b'x', "", records).file("x", "x");
    let long_name = |name: &[u8]| tar().entry("././@LongLink", b'L', "", name).file("x", "x");
    let sparse = [pax("GNU.sparse.size", "10"), pax("GNU.sparse.map", "9,1000")].concat();
    let attribute = pax("SCHILY.xattr.user.note", &"x".repeat(600 << 10));
    let hostile: Vec<(Tar, &str)> = vec![
        (tar().file("../outside/x", "x"), "entry \"../outside/x\" is not allowed"),
        (tar().directory("a/").file("a/../../outside/x", "x"), "is not allowed"),
        (tar().entry("h", b'1', "../outside/secret", b""), "entry \"../outside/secret\" is not allowed"),
        (tar().entry("h", b'1', "/outside/secret", b""), "find the target of the hard link"),
        (
            tar().entry("l", b'2', "../../../../outside", b"").entry("h", b'1', "l/secret", b""),
            "find the target of the hard link",
        ),
        (tar().entry("h", b'1', ".", b""), "hard link to a directory"),
        (tar().directory("d/").entry("h", b'1', "d", b""), "make the hard link"),
        (tar().file("a/.wh...", ""), "it does not name what it removes"),
        (tar().file("a/.wh.", ""), "it does not name what it removes"),
        (long_name(&[b'n'; 300]), "one of its components is longer than 255 bytes"),
        (long_name(&b"x/".repeat(2100)), "longer than 4095 bytes"),
        (extended(&vec![b'1'; (1 << 20) + 1]), "an extended header is larger than 1 MiB"),
        (
            tar().entry("p", b'x', "", &attribute).entry("p", b'x', "", &attribute).file("x", "x"),
            "its extended attributes are larger than 1 MiB",
        ),
        (extended(b"path=../x\n"), "a pax record has no length"),
        (extended(b"99 path=../x\n"), "the length of a pax record is wrong"),
        (extended(b"99999999999999999999999999 path=x\n"), "a pax record has no length"),
        (extended(&pax("path", "../outside/x")), "entry \"../outside/x\" is not allowed"),
        (extended(&pax("path", "a\0b")), "it holds a NUL byte"),
        (extended(&pax("size", "99999999999999999999")), "a pax record is not a number"),
        (extended(&pax("size", "18446744073709551615")), "its size is out of range"),
        (extended(&pax("uid", "4294967295")), "its owner is out of range"),
        (extended(&sparse), "a piece of a sparse file is out of range"),
        (tar().entry("l", b'2', "", b""), "it is a symbolic link to nothing"),
        (tar().file("file", "x").file("file/below", "x"), "open its directory"),
    ];
    for (tar, expected) in hostile {
        let scratch = scratch();
        fs::create_dir(scratch.path().join("outside")).unwrap();
        fs::write(scratch.path().join("outside/secret"), b"untouched").unwrap();
        let error = unpack(scratch.path(), &tar.end()).expect_err(expected).to_string();
        assert!(error.starts_with("layer sha256:") && error.contains(expected), "{expected}: {error}");
        assert_eq!(fs::read(scratch.path().join("outside/secret")).unwrap(), b"untouched", "{expected}");
        assert_eq!(fs::metadata(scratch.path().join("outside/secret")).unwrap().nlink(), 1, "{expected}");
        assert_eq!(fs::read_dir(scratch.path().join("outside")).unwrap().count(), 1, "{expected}");
    }
}

#[test]
fn links_in_a_path_are_followed_within_the_layer_only() {
    let scratch = scratch();
    fs::create_dir(scratch.path().join("outside")).unwrap();
    let outside = scratch.path().join("outside");
    let layer = Tar::default()
        .entry("absolute", b'2', outside.to_str().unwrap(), b"")
        .directory("inside/lib/")
        .entry("lib", b'2', "/inside/lib", b"")
        .file("lib/through", "x")
        .entry("up", b'2', "../../../../../inside", b"")
        .file("up/lib/too", "y")
        .entry("over", b'2', outside.join("file").to_str().unwrap(), b"")
        .file("over", "replaces the link")
        .end();
    let layer = unpack(scratch.path(), &layer).unwrap();
    assert_eq!(fs::read(layer.join("inside/lib/through")).unwrap(), b"x");
    assert_eq!(fs::read(layer.join("inside/lib/too")).unwrap(), b"y");
    assert_eq!(fs::read(layer.join("over")).unwrap(), b"replaces the link");
    assert_eq!(fs::read_link(layer.join("absolute")).unwrap(), outside);
    assert_eq!(fs::read_dir(outside).unwrap().count(), 0);
}

#[test]
fn later_entries_replace_earlier_ones() {
    let layer = Tar::default()
        .file("a", "first")
        .file("a", "second")
        .directory("d/")
        .file("d/x", "x")
        .directory("d/")
        .directory("e/")
        .file("e/x", "x")
        .file("e", "file now")
        .file("f", "x")
        .directory("f/")
        .file("/absolute", "x")
        .file("./dotted//name", "x")
        .entry("h", b'1', "a", b"")
        .end();
    let scratch = scratch();
    let layer = unpack(scratch.path(), &layer).unwrap();
    assert_eq!(fs::read(layer.join("a")).unwrap(), b"second");
    assert_eq!(fs::metadata(layer.join("h")).unwrap().ino(), fs::metadata(layer.join("a")).unwrap().ino());
    assert!(layer.join("d/x").is_file() && layer.join("f").is_dir() && layer.join("absolute").is_file());
    assert_eq!(fs::read(layer.join("e")).unwrap(), b"file now");
    assert!(layer.join("dotted/name").is_file());
    let implied = fs::metadata(layer.join("dotted")).unwrap();
    assert_eq!((implied.mode() & 0o7777, implied.mtime()), (0o755, 0));
    assert_eq!(fs::metadata(layer.join("d")).unwrap().mtime(), 7);
}

#[test]
fn attributes_of_a_layer_cannot_redirect_overlayfs() {
    let scratch = scratch();
    let redirect = pax("SCHILY.xattr.trusted.overlay.redirect", "/x");
    let note = pax("SCHILY.xattr.user.note", "a\nb=\0c");
    let layer = Tar::default().entry("p", b'x', "", &[redirect, note].concat()).directory("d/").end();
    let layer = unpack(scratch.path(), &layer).unwrap();
    let mut value = [0; 20];
    assert!(rustix::fs::getxattr(layer.join("d"), "trusted.overlay.redirect", &mut value).is_err());
    let length = rustix::fs::getxattr(layer.join("d"), "user.note", &mut value).unwrap();
    assert_eq!(&value[..length], b"a\nb=\0c");
}

#[test]
fn what_gnu_tar_writes_in_each_format_comes_back() {
    let scratch = scratch();
    let source = scratch.path().join("source");
    fs::create_dir_all(source.join("directory")).unwrap();
    let deep = format!("directory/{}/{}", "l".repeat(120), "m".repeat(120));
    fs::create_dir_all(source.join(&deep)).unwrap();
    fs::write(source.join(&deep).join("file"), b"deep").unwrap();
    fs::write(source.join("plain"), b"plain").unwrap();
    std::os::unix::fs::chown(source.join("plain"), Some(3_000_000), Some(5)).unwrap();
    run("chmod", &["6755", source.join("plain").to_str().unwrap()]);
    fs::hard_link(source.join("plain"), source.join("zz-hard")).unwrap();
    symlink("s".repeat(200), source.join("link")).unwrap();
    run("mknod", &[source.join("device").to_str().unwrap(), "b", "259", "70000"]);
    run("mkfifo", &[source.join("pipe").to_str().unwrap()]);
    let sparse = File::create(source.join("sparse")).unwrap();
    for piece in 0..60 {
        std::os::unix::fs::FileExt::write_all_at(&sparse, b"piece", piece * 300_000).unwrap();
    }
    sparse.set_len(200 << 20).unwrap();
    drop(sparse);
    run("touch", &["-h", "-d", "@1000000000", source.join("link").to_str().unwrap()]);
    // Formats other than pax keep whole seconds.
    run("sh", &["-c", &format!("find {} -exec touch -h -d @1234567890 {{}} +", source.display())]);
    for arguments in [
        &["--format=gnu"][..],
        &["--format=gnu", "--sparse"],
        &["--format=pax", "--sparse", "--sparse-version=0.0"],
        &["--format=pax", "--sparse", "--sparse-version=0.1"],
        &["--format=pax", "--sparse", "--sparse-version=1.0"],
    ] {
        let archive = scratch.path().join("layer.tar");
        let (from, to) = (source.to_str().unwrap(), archive.to_str().unwrap());
        run("tar", &[arguments, &["--numeric-owner", "-C", from, "-cf", to, "."]].concat());
        let layer = unpack(scratch.path(), &fs::read(&archive).unwrap()).unwrap();
        let differences = tree::compare(&source, &layer).unwrap();
        assert!(differences.is_empty(), "{arguments:?}: {differences:?}");
        let blocks = fs::metadata(layer.join("sparse")).unwrap().blocks();
        assert!(blocks * 512 < 100 << 20, "{arguments:?}: {blocks} blocks");
    }
}

#[test]
fn layers_compressed_in_several_frames_are_read_whole() {
    let plain = simple_layer();
    let (front, back) = plain.split_at(700);
    let gzip = |bytes: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    let zstd = |bytes: &[u8]| zstd::encode_all(bytes, 1).unwrap();
    let skippable = [&[0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0][..], b"note"].concat();
    for bytes in [
        [gzip(front), gzip(back)].concat(),
        [zstd(front), zstd(back)].concat(),
        [skippable.clone(), zstd(&plain), skippable].concat(),
    ] {
        let scratch = scratch();
        let layer = unpack(scratch.path(), &bytes).unwrap();
        assert!(layer.join("bin/run").is_file());
    }
}

#[test]
fn a_tree_deeper_than_the_longest_path_is_removed() {
    let scratch = scratch();
    let mut tar = Tar::default();
    let deep = "d/".repeat(120);
    // Each piece is made below a link to the end of the last, so that no single path is long.
    for turn in 0..20 {
        let base = if turn == 0 { String::new() } else { format!("l{}/", turn - 1) };
        let path = format!("{base}{deep}");
        tar = tar.entry("p", b'x', "", &pax("path", &path)).directory("x");
        tar = tar.entry("p", b'x', "", &pax("linkpath", &path)).entry(&format!("l{turn}"), b'2', "x", b"");
    }
    // What was made is removed again because of this.
    let error = unpack(scratch.path(), &tar.file("../x", "x").end()).unwrap_err().to_string();
    assert!(error.contains("entry \"../x\" is not allowed"), "{error}");
}

fn pax(key: &str, value: &str) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let length = (rest + 1..).find(|length| *length == rest + length.to_string().len()).unwrap();
    format!("{length} {key}={value}\n").into_bytes()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, ..ProptestConfig::default() })]

    #[test]
    fn a_layer_with_flipped_bytes_is_unpacked_or_refused(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 1..6),
    ) {
        let scratch = scratch();
        fs::create_dir(scratch.path().join("outside")).unwrap();
        let mut bytes = Tar::default()
            .entry("p", b'x', "", &pax("SCHILY.xattr.user.note", "value"))
            .directory("d/")
            .entry("l", b'2', "../outside", b"")
            .entry("p", b'x', "", &pax("path", "l/../../outside/x"))
            .file("l/x", "data")
            .entry("h", b'1', "d", b"")
            .end();
        for (place, value, repair) in flips {
            let at = place.index(bytes.len());
            bytes[at] ^= value;
            let header = at / 512 * 512;
            if repair && header + 512 <= bytes.len() {
                // So that what is in the header is looked at, and not its checksum only.
                let mut block = tar::Header::new_old();
                block.as_mut_bytes().copy_from_slice(&bytes[header..header + 512]);
                block.set_cksum();
                bytes[header..header + 512].copy_from_slice(block.as_bytes());
            }
        }
        let _ = unpack(scratch.path(), &bytes);
        prop_assert_eq!(fs::read_dir(scratch.path().join("outside")).unwrap().count(), 0);
        prop_assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 2);
    }
}
