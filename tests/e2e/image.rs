//! OCI images made by other programs: run from a layout and from an archive, and moved layer by
//! layer. Needs root.

use std::{
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddrV4},
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use godwit_lab::workload::Workload;
use godwit_tests::hold::{Points, UNPACKING};
use godwit_tests::{Bed, wait_for};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 80);
/// Data of the lower and of the upper layer, which nothing can compress.
const BASE: usize = 12 << 20;
const TOP: usize = 2 << 20;
/// What a move of a small service needs besides layers: its memory and its files.
const REST: u64 = 2 << 20;

fn tool(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn noise(length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    fs::File::open("/dev/urandom").unwrap().read_exact(&mut bytes).unwrap();
    bytes
}

/// Adds a layer with what `change` does to the root filesystem of an image.
fn layer(layout: &str, bundle: &Path, change: impl FnOnce(&Path)) {
    let bundle_text = bundle.to_str().unwrap();
    tool("umoci", &["unpack", "--image", layout, bundle_text]);
    change(&bundle.join("rootfs"));
    tool("umoci", &["repack", "--image", layout, bundle_text]);
    fs::remove_dir_all(bundle).unwrap();
}

/// Two images that have their lower layer in common: a layout, and an archive.
fn images(bed: &Bed) -> (PathBuf, PathBuf) {
    let preset = bed.build(Workload::Busybox);
    let (layout, bundle) = (bed.scratch().join("layout"), bed.scratch().join("bundle"));
    let tag = format!("{}:latest", layout.display());
    tool("umoci", &["init", "--layout", layout.to_str().unwrap()]);
    tool("umoci", &["new", "--image", &tag]);
    layer(&tag, &bundle, |root| {
        let sources = format!("{}/.", preset.rootfs.display());
        tool("cp", &["-a", &sources, root.to_str().unwrap()]);
        fs::create_dir(root.join("www")).unwrap();
        fs::write(root.join("www/base"), noise(BASE)).unwrap();
        fs::write(root.join("www/name"), "base\n").unwrap();
        fs::write(root.join("www/deleted"), "in the base\n").unwrap();
    });
    let config = ["config", "--image", &tag, "--config.workingdir", "/www", "--config.env", "FROM=the image"];
    tool("umoci", &[&config[..], &["--config.cmd", "httpd", "--config.cmd", "-f"]].concat());
    let other = bed.scratch().join("other");
    tool("cp", &["-a", layout.to_str().unwrap(), other.to_str().unwrap()]);
    let other_tag = format!("{}:latest", other.display());
    for (tag, name) in [(&tag, "first\n"), (&other_tag, "second\n")] {
        layer(tag, &bundle, |root| {
            fs::write(root.join("www/top"), noise(TOP)).unwrap();
            fs::write(root.join("www/name"), name).unwrap();
            fs::remove_file(root.join("www/deleted")).unwrap();
        });
    }
    let archive = bed.scratch().join("other.tar");
    tool(
        "skopeo",
        &["copy", &format!("oci:{other_tag}"), &format!("oci-archive:{}:latest", archive.display())],
    );
    (layout, archive)
}

/// What a service serves under a path.
fn get(bed: &Bed, address: Ipv4Addr, path: &str) -> Vec<u8> {
    let mut stream = bed.connect(SocketAddrV4::new(address, 80));
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let body = answer.windows(4).position(|window| window == b"\r\n\r\n").unwrap() + 4;
    answer.split_off(body)
}

#[test]
fn what_the_image_says_to_run_and_its_environment_are_replaced_by_flags() {
    let bed = Bed::up("entrypoint");
    let (layout, _archive) = images(&bed);
    let file = bed.scratch().join("env");
    fs::write(&file, "# a comment\nFROM=the file\nMORE=two words\nNODE_LACKS_THIS\n").unwrap();
    let words = ["run", "--name", "first", "--image", layout.to_str().unwrap(), "--env-file"];
    let program =
        ["--entrypoint", r#"["sh", "-c", "echo $0 $1, from $FROM, $MORE; sleep 100000"]"#, "zero", "one"];
    bed.done("a", &[&words[..], &[file.to_str().unwrap()], &program].concat());
    let said = || Some(bed.done("a", &["logs", "first"])).filter(|text| !text.is_empty());
    assert_eq!(wait_for("its words", said), "zero one, from the file, two words\n");
    let shown: serde_json::Value = bed.json("a", &["inspect", "first"]);
    let env = shown["env"].to_string();
    assert!(!env.contains("NODE_LACKS_THIS") && !env.contains("the image"), "{env}");
}

#[test]
fn each_layer_travels_once_to_a_node() {
    let bed = Bed::up("image");
    let (layout, archive) = images(&bed);
    let run = |name: &str, address: Ipv4Addr, image: &Path| {
        let (address, image) = (address.to_string(), image.to_str().unwrap());
        bed.done("a", &["run", "--name", name, "--ip", &address, "--image", image]);
    };
    let second = Ipv4Addr::new(10, 88, 0, 81);
    run("first", ADDRESS, &layout);
    run("second", second, &archive);
    let (base, top) = (u64::try_from(BASE).unwrap(), u64::try_from(TOP).unwrap());
    let whole = |address, name: &str| {
        wait_for("the server", || (get(&bed, address, "/name") == name.as_bytes()).then_some(()));
        assert_eq!((get(&bed, address, "/base").len(), get(&bed, address, "/top").len()), (BASE, TOP));
        assert!(get(&bed, address, "/deleted").starts_with(b"<"), "a file that the upper layer deletes");
    };
    whole(ADDRESS, "first\n");
    whole(second, "second\n");
    let travelled = |name: &str, from: &str, to: &str, layers: u64| {
        let report = bed.migrate(name, from, to);
        let bytes = report.wire_bytes;
        assert!(
            (layers..layers + REST).contains(&bytes),
            "{name} to {to}: {bytes} bytes, layers of {layers}"
        );
        println!("{name} from {from} to {to}: {bytes} bytes, layers of {layers}");
    };
    travelled("first", "a", "b", base + top);
    // The lower layer is there already.
    travelled("second", "a", "b", top);
    travelled("first", "b", "a", 0);
    travelled("second", "b", "a", 0);
    travelled("first", "a", "b", 0);
    whole(ADDRESS, "first\n");
    whole(second, "second\n");
    let environment = bed.done("b", &["exec", "first", "--", "sh", "-c", "echo $FROM; pwd"]);
    assert_eq!(environment, "the image\n/www\n");

    // Node a has the layers of both, and only "second" is there; node b the other way round, "first" stays whole.
    let layers = |node: &str, count: usize| {
        let layers: serde_json::Value = bed.json(node, &["image", "ls", "--layers"]);
        assert_eq!(layers.as_array().unwrap().len(), count, "{layers}");
        layers
    };
    let users = |layer: &serde_json::Value| layer["services"].to_string();
    let listed = layers("b", 3);
    let used: Vec<_> = listed.as_array().unwrap().iter().filter(|l| users(l) != "[]").collect();
    assert_eq!(used.len(), 2, "{listed}");
    let refused = bed.godwit("b", &["image", "rm", used[0]["digest"].as_str().unwrap()]);
    assert!(refused.code == 1 && refused.stderr.contains("is used by first"), "{}", refused.stderr);
    let pruned: serde_json::Value = bed.json("b", &["image", "prune"]);
    assert_eq!(pruned["removed"].as_array().unwrap().len(), 1, "{pruned}");
    assert!(layers("b", 2).as_array().unwrap().iter().all(|layer| users(layer) == "[\"first\"]"));
    whole(ADDRESS, "first\n");
    bed.done("b", &["rm", "--force", "first"]);
    assert_eq!(bed.done("b", &["image", "prune"]).lines().count(), 2);
    layers("b", 0);
    // It brings along what has gone.
    travelled("second", "a", "b", base + top);
    whole(second, "second\n");
}

/// Layers of an image, each with a file of its number.
const MANY: usize = 6;
/// Bytes of each.
const EACH: usize = 3 << 20;
/// How many of them a destination takes at once, as docs/migration.md says.
const AT_ONCE: usize = 3;

#[test]
fn many_layers_cross_at_once_and_are_told_in_advance_and_a_damaged_one_ends_the_move() {
    let mut points = None;
    let bed = Bed::up_with("layers", |config| points = Some(Points::among(config, &[UNPACKING])));
    let points = points.unwrap();
    let preset = bed.build(Workload::Busybox);
    let (layout, bundle) = (bed.scratch().join("layout"), bed.scratch().join("bundle"));
    let tag = format!("{}:latest", layout.display());
    tool("umoci", &["init", "--layout", layout.to_str().unwrap()]);
    tool("umoci", &["new", "--image", &tag]);
    for number in 0..MANY {
        layer(&tag, &bundle, |root| {
            if number == 0 {
                let sources = format!("{}/.", preset.rootfs.display());
                tool("cp", &["-a", &sources, root.to_str().unwrap()]);
                fs::create_dir(root.join("www")).unwrap();
            }
            fs::write(root.join(format!("www/{number}")), noise(EACH)).unwrap();
        });
    }
    tool(
        "umoci",
        &[
            "config",
            "--image",
            &tag,
            "--config.workingdir",
            "/www",
            "--config.cmd",
            "httpd",
            "--config.cmd",
            "-f",
        ],
    );
    let address = ADDRESS.to_string();
    bed.done("a", &["run", "--name", "many", "--ip", &address, "--image", layout.to_str().unwrap()]);
    let whole = || {
        for number in 0..MANY {
            assert_eq!(get(&bed, ADDRESS, &format!("/{number}")).len(), EACH);
        }
    };
    whole();

    // One blob of the source's is damaged on its disk, in the middle of the others: the move ends, and b keeps what is whole.
    let blobs = bed.lab().state("a").unwrap().join("images/blobs/sha256");
    let layers: serde_json::Value = bed.json("a", &["inspect", "many"]);
    let third = layers["layers"][2].as_str().unwrap().strip_prefix("sha256:").unwrap().to_owned();
    let (blob, good) = (blobs.join(&third), fs::read(blobs.join(&third)).unwrap());
    let mut bad = good.clone();
    bad[good.len() / 2] ^= 1;
    fs::write(&blob, &bad).unwrap();
    let said = bed.godwit("a", &["migrate", "many", "--to", "b"]);
    assert_eq!(said.code, 1, "{said:?}");
    assert!(said.stderr.contains("stays on a") && said.stderr.contains(&third), "{said:?}");
    let there = bed.lab().state("b").unwrap().join("images");
    // Others that were under way come to their end.
    let tmp = there.join("tmp");
    wait_for("nothing half-made", || (fs::read_dir(&tmp).unwrap().count() == 0).then_some(()));
    assert!(
        !there.join("layers/sha256").join(&third).exists()
            && !there.join("blobs/sha256").join(&third).exists()
    );
    whole();

    fs::write(&blob, &good).unwrap();
    let lacking = MANY - fs::read_dir(there.join("layers/sha256")).unwrap().count();
    let said = bed.godwit("a", &["migrate", "many", "--to", "b"]);
    assert_eq!(said.code, 0, "{said:?}");
    let words = format!("b lacks {lacking} of {MANY} layers of {}, ", layout.display());
    assert!(said.stderr.contains(&words), "{words}: {said:?}");
    assert!(said.stderr.find(&words) < said.stderr.find("layers ("), "in advance: {said:?}");
    whole();

    // As JSON it is an event of its own, before the first step that follows.
    bed.done("b", &["image", "prune"]);
    let said = bed.godwit("b", &["--json", "migrate", "many", "--to", "a"]);
    assert_eq!(said.code, 0, "{said:?}");
    let events: Vec<serde_json::Value> =
        said.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let told: Vec<_> = events.iter().filter(|event| event["event"] == "layers").collect();
    assert_eq!(told.len(), 1, "{said:?}");
    let layers = &told[0]["layers"];
    assert_eq!((&layers["node"], &layers["layers"], &layers["of"]), (&"a".into(), &0.into(), &MANY.into()));

    // Sent ahead, they keep to the bandwidth that is allowed.
    const ALLOWED: usize = 6_000_000;
    bed.done("b", &["image", "prune"]);
    let begun = Instant::now();
    bed.done("a", &["prepare", "many", "--to", "b", "--max-bandwidth", "6MB/s"]);
    assert!(begun.elapsed().as_secs_f64() > (MANY - 1) as f64 * EACH as f64 / ALLOWED as f64);

    // While none is unpacked, as many others come as are taken at once.
    bed.done("b", &["image", "prune"]);
    points.hold(UNPACKING);
    let moving = bed.command("a", &["migrate", "many", "--to", "b"]).spawn().unwrap();
    wait_for("the layers that are taken at once", || {
        (fs::read_dir(&tmp).unwrap().count() == AT_ONCE).then_some(())
    });
    points.let_go(UNPACKING);
    let moved = moving.wait_with_output().unwrap();
    assert!(moved.status.success(), "{moved:?}");
    whole();
}
