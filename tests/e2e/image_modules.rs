//! Images with the neutral modules of their programs (`godwit image pack --modules`), and executables that a node makes of them
//! (`godwit image add-platform`). Needs root, and what `scripts/setup --isa` installs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use godwit_crossing::Binding;
use godwit_tests::Bed;
use godwit_tests::hold::Points;
use godwit_tests::ledger::{ADDRESS, Client, NAME, PORT, program_with};
use godwit_tests::victim::Attempt;
use rustix::process::Signal;
use serde_json::Value;

use crate::registry::{Registry, digest_of};

/// This machine's platform as OCI calls it.
const OWN: &str = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
/// The other one, and its machine.
const OTHER: (&str, &str) =
    if cfg!(target_arch = "aarch64") { ("amd64", "x86_64") } else { ("arm64", "aarch64") };
/// The image.
const IMAGE: &str = "shop/ledger:1";
const WHOLE: &str = "docker.io/shop/ledger:1";

/// Packs the program with its module, for these platforms; the archive and the image's digest.
fn packed(bed: &Bed, program: &Path, platforms: &[&str]) -> (PathBuf, String) {
    let archive = bed.scratch().join(format!("{}.tar", platforms.join("-")));
    let (to, port) = (archive.to_str().unwrap(), PORT.to_string());
    let mut words = vec!["image", "pack", "--modules", "-o", to, "--cmd", &port];
    words.extend(platforms.iter().flat_map(|platform| ["--platform", platform]));
    words.extend([IMAGE, program.to_str().unwrap()]);
    let digest = bed.done("a", &words).trim_end().split_once('@').unwrap().1.to_owned();
    (archive, digest)
}

fn shown(bed: &Bed, image: &str) -> Value {
    let shown: Vec<Value> = bed.json("a", &["image", "inspect", image]);
    shown.into_iter().next().unwrap()
}

fn add(bed: &Bed, image: &str) -> godwit_tests::Said {
    bed.godwit("a", &["image", "add-platform", image, OTHER.0])
}

/// A file of a layer that is not unpacked.
fn of_layer(bed: &Bed, digest: &Value, path: &str) -> Vec<u8> {
    let hex = digest.as_str().unwrap().strip_prefix("sha256:").unwrap();
    let blob = bed.lab().state("a").unwrap().join("images/blobs/sha256").join(hex);
    let tar = Command::new("tar").arg("-xOf").arg(blob).arg(path).output().unwrap();
    assert!(tar.status.success(), "{tar:?}");
    tar.stdout
}

#[test]
fn an_executable_that_is_made_of_a_module_is_the_one_that_was_built_at_once() {
    let bed = Bed::up("modules");
    let program = program_with(&bed, "ledger", &["--save-module"]);
    let (small, _) = packed(&bed, &program, &[OWN]);
    let (_, both) = packed(&bed, &program, &[OWN, OTHER.0]);
    // It comes from a registry with its modules.
    let registry = Registry::start(&bed);
    registry.push_archive(&small, "ledger:1");
    let [plain, authfile] = registry.reached();
    let pulled = registry.reference("ledger:1");
    bed.done("a", &["pull", &plain, &authfile, &pulled]);
    let here = shown(&bed, &pulled);
    assert_eq!(
        (here["modules"][0]["path"].as_str(), here["platforms"].as_array().unwrap().len()),
        (Some("/bin/ledger"), 1)
    );
    let module = fs::read(program.with_extension("module")).unwrap();
    assert_eq!(here["modules"][0]["digest"], digest_of(&module));

    let address = ADDRESS.to_string();
    bed.done("a", &["run", "--name", NAME, "--ip", &address, &pulled]);
    let mut client = Client::connect(&bed);
    client.asks().unwrap();
    let service: Value = bed.json("a", &["inspect", NAME]);
    assert_eq!(service["platforms"].as_array().unwrap().len(), 0);
    let added = add(&bed, &pulled);
    assert_eq!(added.stdout, format!("{pulled}@{both}\n"), "{added:?}");

    // The same as if it had been packed for both, to the byte.
    let grown = shown(&bed, &pulled);
    assert_eq!(grown["digest"], both.as_str());
    let platform = &grown["platforms"][1];
    assert_eq!((&platform["architecture"], &platform["machine"]), (&OTHER.0.into(), &OTHER.1.into()));
    let built = fs::read(program.with_extension(OTHER.1)).unwrap();
    assert!(of_layer(&bed, &platform["layers"][0], "bin/ledger") == built, "it is another executable");
    let again = add(&bed, &pulled);
    assert!(
        again.code == 1 && again.stderr.contains(&format!("is for linux/{} already", OTHER.0)),
        "{again:?}"
    );

    // The service has it, too, and takes it along.
    let service: Value = bed.json("a", &["inspect", NAME]);
    assert_eq!(service["platforms"][1]["layers"], platform["layers"]);
    bed.migrate_so(NAME, "a", "b", &["--cross", "--max-park-ms", "20000"]);
    client.asks().unwrap();
    let there: Value = bed.json("b", &["inspect", NAME]);
    assert_eq!(there["platforms"], service["platforms"]);
    // All of it goes with the image, its former index, too.
    bed.done("a", &["image", "rm", &pulled]);
    assert_eq!(bed.done("a", &["image", "ls", "--layers", "-q"]), "");
}

#[test]
fn a_service_that_is_busy_while_its_image_grows_gets_the_platform_by_the_same_command() {
    const HELD: &str = "destination.prepared";
    let mut points = None;
    let bed = Bed::up_with("busy-modules", |config| points = Some(Points::among(config, &[HELD])));
    let points = points.unwrap();
    let program = program_with(&bed, "ledger", &["--save-module"]);
    let (archive, _) = packed(&bed, &program, &[OWN]);
    bed.done("a", &["image", "import", archive.to_str().unwrap()]);
    let address = ADDRESS.to_string();
    bed.done("a", &["run", "--name", NAME, "--ip", &address, IMAGE]);
    // All of an image whose service runs stays, also what no service has.
    assert_eq!(bed.done("a", &["image", "prune"]), "");
    assert_eq!(shown(&bed, IMAGE)["modules"][0]["path"], "/bin/ledger");

    let attempt = Attempt::held(&points, HELD, || Attempt::begin(&bed, NAME, "a", "b", &[]));
    let added = add(&bed, IMAGE);
    let words = format!("{NAME} does not have the platform yet");
    assert!(added.code == 1 && added.stderr.contains(&words) && added.stdout.starts_with(WHOLE), "{added:?}");
    attempt.signal(Signal::INT);
    points.let_go(HELD);
    attempt.kept_with(130);
    let platforms = || bed.json::<Value>("a", &["inspect", NAME])["platforms"].as_array().unwrap().len();
    assert_eq!(platforms(), 0);
    assert_eq!(add(&bed, IMAGE).code, 0);
    assert_eq!(platforms(), 2);
    let again = add(&bed, IMAGE);
    assert!(again.code == 1 && again.stderr.contains("already"), "{again:?}");
}

/// Gives a program another module or tool chain: what it is bound by, and its executables say so.
fn rebind(program: &Path, module: &[u8], change: impl FnOnce(&mut Binding)) {
    let script = fs::read_to_string(program).unwrap();
    let said = |key: &str| {
        let begins = format!("# {key}: ");
        let line = script.lines().find_map(|line| line.strip_prefix(&begins)).unwrap();
        bytes(line)
    };
    let old = said("identity");
    let digest = digest_of(module);
    let mut binding = Binding {
        module: bytes(digest.strip_prefix("sha256:").unwrap()),
        layout: said("layout"),
        toolchain: said("toolchain"),
    };
    change(&mut binding);
    let hex = |bytes: [u8; 32]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let text = script.replace(&hex(said("toolchain")), &hex(binding.toolchain));
    let text = text.replace(&hex(old), &hex(binding.identity()));
    fs::write(program, text).unwrap();
    fs::write(program.with_extension("module"), module).unwrap();
    for machine in ["x86_64", "aarch64"] {
        let file = program.with_extension(machine);
        let mut executable = fs::read(&file).unwrap();
        let at = executable.windows(32).position(|window| window == old).unwrap();
        executable[at..at + 32].copy_from_slice(&binding.identity());
        fs::write(file, executable).unwrap();
    }
}

fn bytes(hex: &str) -> [u8; 32] {
    let bytes: Vec<u8> =
        (0..32).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap()).collect();
    bytes.try_into().unwrap()
}

#[test]
fn a_module_that_does_not_fit_is_refused_by_name_and_nothing_is_left() {
    let bed = Bed::up("other-modules");
    let program = program_with(&bed, "ledger", &["--save-module"]);
    let module = fs::read(program.with_extension("module")).unwrap();
    let (archive, _) = packed(&bed, &program, &[OWN]);
    let archive = archive.to_str().unwrap();
    let layers = || bed.done("a", &["image", "ls", "--layers", "-q"]);
    let refused = |words: &[&str]| {
        let before = layers();
        let said = add(&bed, IMAGE);
        assert!(said.code == 1 && words.iter().all(|word| said.stderr.contains(word)), "{words:?}: {said:?}");
        assert_eq!(layers(), before);
        assert_eq!(shown(&bed, IMAGE)["platforms"].as_array().unwrap().len(), 1);
        let tmp = bed.lab().state("a").unwrap().join("images/tmp");
        assert_eq!(fs::read_dir(&tmp).unwrap().count(), 0);
    };
    let import = || {
        assert!(bed.done("a", &["image", "import", archive]).starts_with(WHOLE));
    };

    // What binds it says another build.
    let layout = bed.scratch().join("layout");
    fs::create_dir(&layout).unwrap();
    let tar = |arguments: &[&str]| {
        assert!(
            Command::new("tar").args(arguments).arg("-C").arg(&layout).arg(".").status().unwrap().success()
        );
    };
    assert!(Command::new("tar").args(["-xf", archive]).arg("-C").arg(&layout).status().unwrap().success());
    let blob = |digest: &Value| {
        layout.join("blobs/sha256").join(digest.as_str().unwrap().strip_prefix("sha256:").unwrap())
    };
    let read = |path: &Path| serde_json::from_slice::<Value>(&fs::read(path).unwrap()).unwrap();
    let write = |value: &Value| {
        let text = value.to_string();
        let digest = Value::from(digest_of(text.as_bytes()));
        fs::write(blob(&digest), &text).unwrap();
        (digest, Value::from(text.len()))
    };
    let mut top = read(&layout.join("index.json"));
    let mut index = read(&blob(&top["manifests"][0]["digest"]));
    let mut manifest = read(&blob(&index["manifests"][1]["digest"]));
    manifest["layers"][0]["annotations"]["io.godwit.layout"] = "0a".repeat(32).into();
    let entry = &mut index["manifests"][1];
    (entry["digest"], entry["size"]) = write(&manifest);
    let entry = &mut top["manifests"][0];
    (entry["digest"], entry["size"]) = write(&index);
    fs::write(layout.join("index.json"), top.to_string()).unwrap();
    let other = bed.scratch().join("other.tar");
    tar(&["-cf", other.to_str().unwrap()]);
    let said = bed.godwit("a", &["image", "import", other.to_str().unwrap()]);
    assert!(
        said.code == 1 && said.stderr.contains("/bin/ledger was not made from the neutral module"),
        "{said:?}"
    );
    assert_eq!(bed.done("a", &["image", "ls", "-q"]), "");
    bed.done("a", &["image", "prune"]);

    // Built by another tool chain: godwit-cc makes it, and it is another program.
    rebind(&program, &module, |binding| binding.toolchain[0] ^= 1);
    packed(&bed, &program, &[OWN]);
    import();
    refused(&["/bin/ledger", "its identity would be", "The tool chain of node a is not the one"]);
    // What is no module, and what looks like one: LLVM does not take it, and the node is none the worse.
    for hostile in
        [&b"\x7fELF"[..], b"BC\xc0\xde", &[&b"BC\xc0\xde"[..], &module[4..module.len() / 2]].concat()]
    {
        rebind(&program, hostile, |_| ());
        packed(&bed, &program, &[OWN]);
        import();
        refused(&["neutral module of /bin/ledger", "godwit-cc says: "]);
    }
    // None at all.
    let without = bed.scratch().join("without.tar");
    let words = [
        "image",
        "pack",
        "-o",
        without.to_str().unwrap(),
        "--platform",
        OWN,
        IMAGE,
        program.to_str().unwrap(),
    ];
    bed.done("a", &words);
    bed.done("a", &["image", "import", without.to_str().unwrap()]);
    refused(&["has no neutral modules", "--save-module"]);
}

#[test]
fn where_the_tool_chain_is_missing_that_is_said() {
    let bed = Bed::up_with("no-godwit-cc", |config| {
        config.programs.serve_environment.push(("GODWIT_ISA".into(), "/nonexistent/isa".into()));
    });
    let program = program_with(&bed, "ledger", &["--save-module"]);
    let (archive, _) = packed(&bed, &program, &[OWN]);
    bed.done("a", &["image", "import", archive.to_str().unwrap()]);
    let said = add(&bed, IMAGE);
    assert!(said.code == 1 && said.stderr.contains("none of /nonexistent/isa"), "{said:?}");
    let unknown = add(&bed, "shop/none:1");
    assert!(
        unknown.code == 1 && unknown.stderr.contains("has no image docker.io/shop/none:1"),
        "{unknown:?}"
    );
}
