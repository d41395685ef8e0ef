//! The store keeps whole things only, also after a crash.

use std::io::Read;
use std::time::{Duration, Instant};

use super::*;

fn open(scratch: &TempDir) -> Store {
    Store::open(&scratch.path().join("store")).unwrap()
}

fn left_in(store: &Store, part: &str) -> usize {
    fs::read_dir(store.directory().join(part)).unwrap().count()
}

#[test]
fn a_blob_goes_from_one_store_to_another_and_is_unpacked_there() {
    let (here, there) = (scratch(), scratch());
    let (here, there) = (open(&here), open(&there));
    let digest = put(&here, &simple_layer());
    let (mut blob, length) = here.open_blob(&digest).unwrap();
    assert!(!there.has_blob(&digest));
    let mut writer = there.blob_writer(&digest, length).unwrap();
    std::io::copy(&mut blob, &mut writer).unwrap();
    assert_eq!(writer.written(), length);
    assert_eq!(writer.finish().unwrap(), digest);
    assert!(there.has_blob(&digest) && !there.has_layer(&digest));
    there.unpack(&digest).unwrap();
    assert!(there.has_layer(&digest));
    let mut received = Vec::new();
    there.open_blob(&digest).unwrap().0.read_to_end(&mut received).unwrap();
    assert_eq!(received, simple_layer());
}

#[test]
fn a_blob_of_another_content_or_length_is_refused_and_leaves_nothing() {
    let scratch = scratch();
    let store = open(&scratch);
    let digest = Digest::of(b"content");
    let refused = |length: u64, bytes: &[u8]| {
        let mut writer = store.blob_writer(&digest, length).unwrap();
        let refused = match writer.write_all(bytes) {
            Ok(()) => writer.finish().is_err(),
            Err(_) => {
                drop(writer);
                true
            }
        };
        assert_eq!((left_in(&store, "tmp"), left_in(&store, "blobs/sha256")), (0, 0));
        refused
    };
    assert!(refused(7, b"CONTENT"));
    assert!(refused(7, b"content and more"));
    assert!(refused(7, b"conten"));
    assert!(refused(6, b"content"));
    assert!(refused(8, b"content"));
    let mut writer = store.blob_writer(&digest, 7).unwrap();
    writer.write_all(b"conte").unwrap();
    drop(writer);
    assert_eq!(left_in(&store, "tmp"), 0);
    let mut writer = store.blob_writer(&digest, 9).unwrap();
    writer.write_all(b"other").unwrap();
    let sentence = writer.finish().unwrap_err().to_string();
    let other = Digest::of(b"other");
    let expected = format!(
        "blob {digest}: 5 bytes with digest {other} came where 9 bytes were announced; fetch it again"
    );
    assert_eq!(sentence, expected);
}

#[test]
fn what_a_crash_left_half_made_is_swept_by_the_next_user_but_not_by_a_second_one() {
    let scratch = scratch();
    let store = open(&scratch);
    let half_made = store.directory().join("tmp/layer-of-a-crash/tree/directory");
    let leave = || {
        fs::create_dir_all(&half_made).unwrap();
        fs::write(half_made.join("file"), b"x").unwrap();
    };
    leave();
    let second = open(&scratch);
    assert!(half_made.exists(), "a second user swept what the first may be making");
    drop(store);
    let writer = second.new_blob_writer().unwrap();
    drop(second);
    let third = open(&scratch);
    assert!(half_made.exists(), "swept while a writer was there");
    drop((writer, third));
    // A child of another test has the lock, too, until it executes its program: so it may take more than one.
    let deadline = Instant::now() + Duration::from_secs(60);
    while left_in(&open(&scratch), "tmp") > 0 {
        assert!(Instant::now() < deadline, "no next user swept it");
        std::thread::yield_now();
    }
}

#[test]
fn a_layer_is_unpacked_once_by_many_at_the_same_time() {
    let scratch = scratch();
    let store = open(&scratch);
    let digest = put(&store, &simple_layer());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            let (store, digest) = (store.clone(), digest.clone());
            scope.spawn(move || store.unpack(&digest).unwrap());
        }
    });
    assert!(store.layer_path(&digest).join("bin/run").is_file());
    assert_eq!((left_in(&store, "tmp"), left_in(&store, "layers/sha256")), (0, 1));
}

#[test]
fn unused_layers_are_removed_and_used_ones_stay() {
    let scratch = scratch();
    let store = open(&scratch);
    let layers = ["one", "two"].map(|name| put(&store, &Tar::default().file(name, name).end()));
    layers.iter().for_each(|layer| store.unpack(layer).unwrap());
    let mut collector = store.collector().unwrap();
    collector.remove(&layers[0]).unwrap();
    assert!(!store.has_layer(&layers[0]) && !store.has_blob(&layers[0]));
    collector.delete().unwrap();
    assert!(!store.has_layer(&layers[0]) && !store.has_blob(&layers[0]));
    assert!(store.has_layer(&layers[1]) && store.has_blob(&layers[1]));
    assert!(store.layer_path(&layers[1]).join("two").is_file());
    assert_eq!(left_in(&store, "tmp"), 0);
    assert!(matches!(store.open_blob(&layers[0]), Err(ImageError::NoBlob { .. })));
    assert!(matches!(store.unpack(&layers[0]), Err(ImageError::NoBlob { .. })));
}

#[test]
fn nothing_is_removed_while_somebody_holds_the_store() {
    let scratch = scratch();
    let store = open(&scratch);
    let (first, second) = (store.hold(), store.clone().hold());
    assert!(store.collector().is_none());
    drop(first);
    assert!(store.collector().is_none(), "the other one is still there");
    drop(second);
    let collector = store.collector().unwrap();
    std::thread::scope(|scope| {
        let held = scope.spawn(|| store.hold());
        collector.delete().unwrap();
        drop(held.join().unwrap());
    });
}

#[test]
fn layers_are_listed_with_their_size_those_used_longest_ago_first() {
    let scratch = scratch();
    let store = open(&scratch);
    let content = "x".repeat(100_000);
    let layers = ["one", "two"].map(|name| put(&store, &Tar::default().file(name, &content).end()));
    layers.iter().for_each(|layer| store.unpack(layer).unwrap());
    let listed = |store: &Store| store.layers().unwrap();
    // The blob and the file in it.
    assert!(
        listed(&store).iter().all(|layer| (200_000..400_000).contains(&layer.bytes)),
        "{:?}",
        listed(&store)
    );
    let before = listed(&store);
    store.touch(&before[0].digest).unwrap();
    let after = listed(&store);
    assert_eq!(after[1].digest, before[0].digest);
    assert!(after[1].last_used > before[1].last_used);
    // What is not there is not used.
    store.touch(&Digest::of(b"nothing")).unwrap();
    assert_eq!(listed(&store).len(), 2);
}

#[test]
fn a_layer_that_was_unpacked_before_is_still_checked_against_its_diff_id() {
    let scratch = scratch();
    let store = open(&scratch);
    let digest = put(&store, &simple_layer());
    store.unpack(&digest).unwrap();
    store.unpack_verified(&digest, &Digest::of(&simple_layer())).unwrap();
    let wrong = store.unpack_verified(&digest, &Digest::of(b"other")).unwrap_err();
    assert!(matches!(wrong, ImageError::Layer { fault: LayerFault::DiffId { .. }, .. }), "{wrong}");
}

#[test]
fn the_free_space_is_that_of_the_disk() {
    let scratch = scratch();
    let available = open(&scratch).available_bytes().unwrap();
    assert!(available > 1 << 20, "{available}");
}

#[test]
fn a_store_that_cannot_be_made_is_named() {
    let scratch = scratch();
    fs::write(scratch.path().join("file"), b"").unwrap();
    let error = Store::open(&scratch.path().join("file/store")).unwrap_err().to_string();
    assert!(error.ends_with("file/store: cannot make its directories"), "{error}");
}

#[test]
fn digests_are_read_as_oci_writes_them() {
    let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    assert_eq!(Digest::of(b"").to_string(), empty);
    assert_eq!(empty.parse::<Digest>().unwrap(), Digest::of(b""));
    for wrong in
        ["", "sha256:", "sha256:e3b0", &empty.to_uppercase(), &empty.replace('6', "."), &format!("{empty}0")]
    {
        assert!(wrong.parse::<Digest>().is_err(), "{wrong}");
    }
}

#[test]
fn an_image_has_its_name_while_all_its_layers_are_there() {
    let directory = scratch();
    let store = Store::open(directory.path()).unwrap();
    let layers = [put(&store, &simple_layer()), put(&store, &Tar::default().file("more", "x").end())];
    layers.iter().for_each(|layer| store.unpack(layer).unwrap());
    let image = |reference: &str, layers: &[Digest]| Image {
        layers: layers.to_vec(),
        config: ImageConfig { cmd: vec!["run".into()], ..ImageConfig::default() },
        architecture: "amd64".into(),
        reference: reference.into(),
        id: None,
        platforms: Vec::new(),
        neutral: None,
    };
    let digest = Digest::of(b"manifest");
    let both = store.name(digest.clone(), image("docker.io/library/both:1", &layers)).unwrap();
    store.name(digest.clone(), image("docker.io/library/base:1", &layers[..1])).unwrap();
    assert_eq!(store.named("docker.io/library/both:1").unwrap(), Some(both.clone()));
    assert_eq!(store.named("docker.io/library/both:2").unwrap(), None);
    // It stands for another image only where it stands for the one that is known.
    let (reference, other) = ("docker.io/library/both:1", Digest::of(b"another manifest"));
    let renamed = store.rename(&both, other.clone(), image(reference, &layers)).unwrap().unwrap();
    assert_eq!((&renamed.digest, store.named(reference).unwrap().as_ref()), (&other, Some(&renamed)));
    assert_eq!(store.rename(&both, digest.clone(), image(reference, &layers)).unwrap(), None);
    assert_eq!(store.named(reference).unwrap(), Some(renamed));
    // What could not be read back is not written.
    let mut long = image(reference, &layers);
    long.config.env = vec!["x".repeat(17 << 20)];
    let error = store.name(digest.clone(), long).unwrap_err().to_string();
    assert!(error.contains("cannot note image docker.io/library/both:1"), "{error}");
    drop(store);

    let store = Store::open(directory.path()).unwrap();
    let names = |store: &Store| -> Vec<_> {
        store.all_named().unwrap().into_iter().map(|named| named.image.reference).collect()
    };
    assert_eq!(names(&store), ["docker.io/library/base:1", "docker.io/library/both:1"]);
    // A record that cannot be read is none, and is no obstacle for others.
    fs::write(directory.path().join("names").join(Digest::of(b"x").hex()), "{").unwrap();
    assert_eq!((names(&store).len(), store.named("x").unwrap()), (2, None));
    let mut collector = store.collector().unwrap();
    collector.remove(&layers[1]).unwrap();
    collector.delete().unwrap();
    assert_eq!(names(&store), ["docker.io/library/base:1"]);
    assert_eq!(store.named(&both.image.reference).unwrap(), None);
    let mut collector = store.collector().unwrap();
    assert_eq!(collector.unname_torn().unwrap(), ["docker.io/library/both:1"]);
    assert!(collector.unname("docker.io/library/base:1").unwrap());
    assert!(!collector.unname("docker.io/library/base:1").unwrap());
    drop(collector);
    assert_eq!((names(&store).len(), store.has_layer(&layers[0])), (0, true));
}
