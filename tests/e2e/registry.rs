//! Images from a registry of Debian's `docker-registry`, with credentials: pulled once, run, moved, removed; and what is
//! refused. Layers that a destination fetches from it itself. Needs root.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream},
    os::unix::fs::{FileExt, PermissionsExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc::{self, Receiver},
};

use godwit_lab::{LabConfig, workload::Workload};
use godwit_tests::{Bed, CLIENT, PATIENCE, Report, Said, programs, tier, victim::programs_of, wait_for};

use crate::engine_nodes::Engine;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 85);
/// `user:secret`, for htpasswd by the cheapest bcrypt, since each request pays for it; and as clients send it.
const HASHED: &str = "user:$2b$04$sJ.ZTKnGplL.e48L9qCXoO0XeImDNJatxgT63IkS7bZK5n7to86E.\n";
const SENT: &str = "dXNlcjpzZWNyZXQ=";

/// A registry on this machine, or on the client host of the lab; it ends with the test.
pub(crate) struct Registry<'a> {
    child: Child,
    /// The lab on whose client host it is.
    on_client: Option<&'a Bed>,
    /// HOST:PORT.
    address: String,
    data: PathBuf,
    pub(crate) authfile: PathBuf,
}

impl<'a> Registry<'a> {
    pub(crate) fn start(bed: &Bed) -> Self {
        Self::begin(bed, Command::new("docker-registry"), "127.0.0.1:0", None)
    }

    /// Where nodes reach it.
    fn start_on_client(bed: &'a Bed, address: &str) -> Self {
        Self::begin(bed, bed.on_client("docker-registry"), address, Some(bed))
    }

    fn begin(bed: &Bed, mut command: Command, listen: &str, on_client: Option<&'a Bed>) -> Self {
        let home = bed.scratch().join(format!("registry-{listen}"));
        let data = home.join("data");
        fs::create_dir_all(&data).unwrap();
        fs::write(home.join("htpasswd"), HASHED).unwrap();
        let config = serde_json::json!({
            "version": "0.1", "log": {"level": "info", "formatter": "json"},
            "storage": {"filesystem": {"rootdirectory": data}},
            "http": {"addr": listen},
            "auth": {"htpasswd": {"realm": "test", "path": home.join("htpasswd")}},
        });
        // JSON is YAML.
        fs::write(home.join("config.yml"), config.to_string()).unwrap();
        command.arg("serve").arg(home.join("config.yml")).env("OTEL_TRACES_EXPORTER", "none");
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let listens = log.find_map(|line| Some(line.split_once("listening on ")?.1.to_owned()));
        let listens = listens.expect("docker-registry ended");
        let address: String =
            listens.chars().take_while(|c| c.is_ascii_digit() || ".:".contains(*c)).collect();
        std::thread::spawn(move || log.count());
        let authfile = home.join("auth.json");
        let auths = serde_json::json!({"auths": {&address: {"auth": SENT}}});
        fs::write(&authfile, auths.to_string()).unwrap();
        Self { child, on_client, address, data, authfile }
    }

    pub(crate) fn reference(&self, name: &str) -> String {
        format!("{}/test/{name}", self.address)
    }

    /// Copies an image of a layout to the registry.
    fn push(&self, source: &str, name: &str) {
        self.copy(&[], &format!("oci:{source}"), name);
    }

    /// Copies the image of an archive to the registry, for all its platforms.
    pub(crate) fn push_archive(&self, archive: &Path, name: &str) {
        self.copy(&["--preserve-digests"], &format!("oci-archive:{}", archive.display()), name);
    }

    fn copy(&self, flags: &[&str], source: &str, name: &str) {
        let authfile = format!("--dest-authfile={}", self.authfile.display());
        let target = format!("docker://{}", self.reference(name));
        let skopeo = self.on_client.map_or_else(|| Command::new("skopeo"), |bed| bed.on_client("skopeo"));
        let to = ["--dest-tls-verify=false", &authfile, source, &target];
        succeeds(skopeo, &[&["copy", "--all"], flags, &to].concat());
    }

    /// Gives it a document under a tag as no client could push it; its digest and length.
    pub(crate) fn plant(
        &self,
        name: &str,
        tag: &str,
        media_type: &str,
        document: &serde_json::Value,
    ) -> (String, usize) {
        assert_eq!(document["mediaType"], media_type);
        let bytes = document.to_string().into_bytes();
        let digest = digest_of(&bytes);
        let hex = digest.strip_prefix("sha256:").unwrap();
        self.replace(&digest, &bytes);
        let manifests = self.data.join("docker/registry/v2/repositories/test").join(name).join("_manifests");
        let tag = manifests.join("tags").join(tag);
        for link in [
            manifests.join("revisions/sha256").join(hex),
            tag.join("current"),
            tag.join("index/sha256").join(hex),
        ] {
            fs::create_dir_all(&link).unwrap();
            fs::write(link.join("link"), &digest).unwrap();
        }
        (digest, bytes.len())
    }

    /// What it has of a digest.
    pub(crate) fn blob(&self, digest: &str) -> Vec<u8> {
        fs::read(self.blob_path(digest)).unwrap()
    }

    /// Has it give out this for a digest.
    pub(crate) fn replace(&self, digest: &str, bytes: &[u8]) {
        let path = self.blob_path(digest);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn blob_path(&self, digest: &str) -> PathBuf {
        let hex = digest.strip_prefix("sha256:").unwrap();
        self.data.join("docker/registry/v2/blobs/sha256").join(&hex[..2]).join(hex).join("data")
    }

    /// `flags` that reach it, after a verb.
    pub(crate) fn reached(&self) -> [String; 2] {
        ["--tls-verify=false".into(), format!("--authfile={}", self.authfile.display())]
    }

    /// The blobs on its disk, with their sizes.
    fn blobs(&self) -> Vec<(u64, PathBuf)> {
        let mut blobs = Vec::new();
        for entry in fs::read_dir(self.data.join("docker/registry/v2/blobs/sha256")).unwrap() {
            for blob in fs::read_dir(entry.unwrap().path()).unwrap() {
                let data = blob.unwrap().path().join("data");
                blobs.push((fs::metadata(&data).unwrap().len(), data));
            }
        }
        blobs
    }

    fn stop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Registry<'_> {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The digest of bytes as OCI writes it.
pub(crate) fn digest_of(bytes: &[u8]) -> String {
    let mut sha256sum =
        Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    sha256sum.stdin.take().unwrap().write_all(bytes).unwrap();
    let output = sha256sum.wait_with_output().unwrap();
    format!("sha256:{}", &String::from_utf8(output.stdout).unwrap()[..64])
}

/// Makes a blob another than its name says.
fn spoil((length, path): &(u64, PathBuf)) {
    let blob = fs::File::options().write(true).open(path).unwrap();
    blob.write_all_at(b"not what was pushed", length / 2).unwrap();
}

pub(crate) fn tool(program: &str, arguments: &[&str]) -> String {
    succeeds(Command::new(program), arguments)
}

/// Keys of GnuPG in a directory, of which one signs images; its agent ends with this.
struct Keys(PathBuf);

impl Keys {
    const OWNER: &'static str = "founder@example.org";

    fn make(directory: &Path) -> Self {
        let home = directory.join("keys");
        fs::create_dir(&home).unwrap();
        fs::set_permissions(&home, fs::Permissions::from_mode(0o700)).unwrap();
        let keys = Self(home);
        let unlocked =
            ["--batch", "--passphrase", "", "--quick-gen-key", Self::OWNER, "default", "default", "never"];
        succeeds(keys.command("gpg"), &unlocked);
        keys
    }

    /// A program that uses them.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("GNUPGHOME", &self.0);
        command
    }

    /// The public key, in a file.
    fn public(&self) -> PathBuf {
        let file = self.0.join("public.gpg");
        succeeds(self.command("gpg"), &["--output", file.to_str().unwrap(), "--export", Self::OWNER]);
        file
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        let _ = self.command("gpgconf").args(["--kill", "all"]).status();
    }
}

fn succeeds(mut command: Command, arguments: &[&str]) -> String {
    let output = command.args(arguments).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Makes a layout with two images, `1` and `2`, that have their lower layer in common.
pub(crate) fn layout(bed: &Bed) -> PathBuf {
    layout_of(bed, &["1", "2"], 0)
}

/// The same with these images, each of which has so many bytes in its upper layer that nothing can compress.
fn layout_of(bed: &Bed, versions: &[&str], noise: usize) -> PathBuf {
    let preset = bed.build(Workload::Busybox);
    let layout = bed.scratch().join("layout");
    let path = layout.to_str().unwrap();
    tool("umoci", &["init", "--layout", path]);
    let base = format!("{path}:base");
    tool("umoci", &["new", "--image", &base]);
    let from = |image: &str, change: &dyn Fn(&Path)| {
        let bundle = bed.scratch().join("bundle");
        tool("umoci", &["unpack", "--image", image, bundle.to_str().unwrap()]);
        change(&bundle.join("rootfs"));
        tool("umoci", &["repack", "--image", image, bundle.to_str().unwrap()]);
        fs::remove_dir_all(&bundle).unwrap();
    };
    from(&base, &|root| {
        tool("cp", &["-a", &format!("{}/.", preset.rootfs.display()), root.to_str().unwrap()]);
        fs::create_dir(root.join("www")).unwrap();
    });
    tool(
        "umoci",
        &[
            "config",
            "--image",
            &base,
            "--config.workingdir",
            "/www",
            "--config.cmd",
            "httpd",
            "--config.cmd",
            "-f",
        ],
    );
    for version in versions {
        tool("umoci", &["tag", "--image", &base, version]);
        from(&format!("{path}:{version}"), &|root| {
            fs::write(root.join("www/version"), version).unwrap();
            let mut bytes = vec![0; noise];
            fs::File::open("/dev/urandom").unwrap().read_exact(&mut bytes).unwrap();
            fs::write(root.join("www/noise"), bytes).unwrap();
        });
    }
    layout
}

/// Gives a layout an index of images: the one that is called `1`, and its double for another platform, or that alone.
fn index(layout: &Path, name: &str, with_ours: bool) {
    let path = layout.join("index.json");
    let mut top: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let manifests = top["manifests"].as_array_mut().unwrap();
    let named = |entry: &&serde_json::Value| entry["annotations"]["org.opencontainers.image.ref.name"] == "1";
    let one = manifests.iter().find(named).unwrap().clone();
    let entry = |architecture: &str| {
        serde_json::json!({
            "mediaType": one["mediaType"], "digest": one["digest"], "size": one["size"],
            "platform": {"os": "linux", "architecture": architecture},
        })
    };
    let ours = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let platforms: Vec<_> = ["s390x"].into_iter().chain(with_ours.then_some(ours)).map(entry).collect();
    let media_type = "application/vnd.oci.image.index.v1+json";
    let document =
        serde_json::json!({"schemaVersion": 2, "mediaType": media_type, "manifests": platforms}).to_string();
    let scratch = layout.join(name);
    fs::write(&scratch, &document).unwrap();
    let hex = tool("sha256sum", &[scratch.to_str().unwrap()])[..64].to_owned();
    fs::rename(&scratch, layout.join("blobs/sha256").join(&hex)).unwrap();
    manifests.push(serde_json::json!({
        "mediaType": media_type, "digest": format!("sha256:{hex}"), "size": document.len(),
        "annotations": {"org.opencontainers.image.ref.name": name},
    }));
    fs::write(&path, top.to_string()).unwrap();
}

/// Runs a command that looks for a place for large files in a directory of the test's own; what is left there.
fn godwit(bed: &Bed, arguments: &[&str]) -> (Said, usize) {
    let scratch = bed.scratch().join("tmp");
    fs::create_dir_all(&scratch).unwrap();
    let output = bed.command("a", arguments).env("TMPDIR", &scratch).output().unwrap();
    let said = Said {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    };
    (said, fs::read_dir(&scratch).unwrap().count())
}

/// What a service serves as its version.
fn version(bed: &Bed, address: Ipv4Addr) -> String {
    let mut stream = bed.connect(SocketAddrV4::new(address, 80));
    stream.write_all(b"GET /version HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.rsplit('\n').next().unwrap().to_owned()
}

#[test]
fn an_image_is_pulled_once_run_moved_and_removed() {
    let bed = Bed::up("registry");
    let layout = layout(&bed);
    index(&layout, "multi", true);
    index(&layout, "foreign", false);
    let mut registry = Registry::start(&bed);
    for name in ["1", "2", "multi", "foreign"] {
        registry.push(&format!("{}:{name}", layout.display()), &format!("web:{name}"));
    }
    let [plain, authfile] = registry.reached();
    let first = registry.reference("web:1");

    // Refused, with what to do; nothing is left.
    let refused = |arguments: &[&str], words: &str| {
        let (said, left) = godwit(&bed, arguments);
        assert!(matches!(said.code, 1 | 125) && said.stderr.contains(words), "{arguments:?}: {said:?}");
        assert_eq!((left, said.stderr.matches("secret").count()), (0, 0), "{said:?}");
    };
    refused(&["pull", &authfile, &first], "--tls-verify=false");
    refused(&["pull", &plain, &first], "skopeo login 127.0.0.1");
    refused(&["run", &plain, &authfile, &registry.reference("web:none")], "not this tag");
    refused(
        &["run", &plain, &authfile, &registry.reference("web:foreign")],
        "there are images for linux/s390x",
    );
    refused(&["run", &plain, &authfile, "--pull", "never", &first], "--pull never");
    refused(&["run", "no-such-file.tar"], "no-such-file.tar");
    refused(&["run", &first, "--name", "x"], "before the image");
    assert_eq!(bed.done("a", &["images"]).lines().count(), 1);

    // The first word after the flags is the image, all others are the command.
    let address = ADDRESS.to_string();
    let (said, left) = godwit(&bed, &["run", &plain, &authfile, "--name", "web", "--ip", &address, &first]);
    assert_eq!((said.code, said.stdout.as_str(), left), (0, "web\n", 0), "{said:?}");
    wait_for("the server", || (version(&bed, ADDRESS) == "1").then_some(()));
    let images: serde_json::Value = bed.json("a", &["images"]);
    let image = &images[0];
    assert_eq!((image["reference"].as_str(), image["services"][0].as_str()), (Some(&*first), Some("web")));
    let raw = ["inspect", "--raw", "--tls-verify=false", &authfile, &format!("docker://{first}")];
    let manifest = bed.scratch().join("manifest");
    fs::write(&manifest, tool("skopeo", &raw)).unwrap();
    let digest = format!("sha256:{}", &tool("sha256sum", &[manifest.to_str().unwrap()])[..64]);
    assert_eq!(image["digest"], digest.as_str());

    // A checkpoint names it: another node brings it from the registry.
    let file = bed.scratch().join("web.tar.zst");
    let file = file.to_str().unwrap();
    bed.done("a", &["checkpoint", "web", "-R", "-o", file]);
    let restore = ["restore", file, "--name", "copy", "--ip", "10.88.0.92"];
    let lacks = bed.godwit("b", &restore);
    assert!(lacks.code == 1 && lacks.stderr.contains(&format!("was made from {first}")), "{lacks:?}");
    bed.done("b", &[&restore[..], &[&plain, &authfile, "--image", &first]].concat());
    wait_for("the server", || (version(&bed, Ipv4Addr::new(10, 88, 0, 92)) == "1").then_some(()));
    bed.done("b", &["rm", "--force", "copy"]);

    // Of another image with the same lower layer the upper one comes alone.
    let second = registry.reference("web:2");
    let (said, left) = godwit(&bed, &["pull", &plain, &authfile, &second]);
    assert!(said.code == 0 && said.stderr.contains("in 1 layer; 1 more are here"), "{said:?}");
    assert!(said.stdout.starts_with(&registry.reference("web@sha256:")) && left == 0, "{said:?}");
    // What one pull prints, the next command takes; an index is known by its own digest.
    let pinned = said.stdout.trim_end();
    let run = |image: &str, more: &[&str], name: &str, last: u8| {
        let address = Ipv4Addr::new(10, 88, 0, last);
        let flags = ["run", &plain, &authfile, "--name", name, "--ip", &address.to_string()];
        let (said, left) = godwit(&bed, &[&flags[..], more, &[image]].concat());
        assert_eq!((said.code, left), (0, 0), "{said:?}");
        address
    };
    let by_digest = run(pinned, &[], "digest", 86);
    wait_for("the server", || (version(&bed, by_digest) == "2").then_some(()));
    let multi = run(&registry.reference("web:multi"), &[], "multi", 87);
    wait_for("the server", || (version(&bed, multi) == "1").then_some(()));

    // A tag that is given to another image.
    registry.push(&format!("{}:2", layout.display()), "web:1");
    let same = run(&first, &[], "same", 88);
    wait_for("the server", || (version(&bed, same) == "1").then_some(()));
    let newer = run(&first, &["--pull", "newer"], "newer", 89);
    wait_for("the server", || (version(&bed, newer) == "2").then_some(()));

    // Without its registry a node has what it has.
    registry.stop();
    let offline = run(&first, &["--pull", "newer"], "offline", 90);
    let by_digest_offline = run(pinned, &["--pull", "never"], "pinned", 91);
    wait_for("the server", || (version(&bed, by_digest_offline) == "2").then_some(()));
    wait_for("the server", || (version(&bed, offline) == "2").then_some(()));
    refused(&["run", &plain, "--pull", "always", &first], "cannot be reached");

    bed.migrate("web", "a", "b");
    wait_for("the server", || (version(&bed, ADDRESS) == "1").then_some(()));
    // The layers of what is removed stay with the services that have them.
    let removed = bed.done("a", &["image", "rm", pinned]);
    assert_eq!(removed, format!("{first}\n{second}\n"), "both tags stand for it now");
    let refusal = bed.godwit("a", &["image", "rm", &second]);
    assert!(refusal.code == 1 && refusal.stderr.contains("is neither an image"), "{refusal:?}");
    for name in ["digest", "multi", "same", "newer", "offline", "pinned"] {
        bed.done("a", &["rm", "--force", name]);
    }
    let pruned: serde_json::Value = bed.json("a", &["image", "prune"]);
    assert_eq!(pruned["removed"].as_array().unwrap().len(), 3, "{pruned}");
    assert_eq!(bed.done("a", &["images"]).lines().count(), 1);
    bed.migrate("web", "b", "a");
    wait_for("the server", || (version(&bed, ADDRESS) == "1").then_some(()));
}

/// By the policy that the user has for Podman.
#[test]
fn an_image_comes_only_with_the_signatures_that_its_policy_wants() {
    let bed = Bed::up("signed");
    let layout = layout(&bed);
    let registry = Registry::start(&bed);
    let home = bed.scratch().join("home");
    let containers = home.join(".config/containers");
    fs::create_dir_all(containers.join("registries.d")).unwrap();
    let keys = Keys::make(bed.scratch());
    let signatures = format!("file://{}", home.join("signatures").display());
    let place = format!("{{sigstore: \"{signatures}\", sigstore-staging: \"{signatures}\"}}");
    let places = format!("docker: {{\"{}\": {place}}}\n", registry.address);
    fs::write(containers.join("registries.d/registry.yaml"), places).unwrap();
    registry.push(&format!("{}:1", layout.display()), "web:unsigned");
    let mut skopeo = keys.command("skopeo");
    skopeo.env("HOME", &home).args(["copy", "--sign-by", Keys::OWNER, "--dest-tls-verify=false"]);
    let authfile = format!("--dest-authfile={}", registry.authfile.display());
    let [from, to] = [format!("oci:{}:2", layout.display()), registry.reference("web:signed")];
    succeeds(skopeo, &[&authfile, &from, &format!("docker://{to}")]);

    let [plain, authfile] = registry.reached();
    let pull = |name: &str, rule: &serde_json::Value| {
        let policy = serde_json::json!({"default": [rule]});
        fs::write(containers.join("policy.json"), policy.to_string()).unwrap();
        let words = ["pull", &plain, &authfile, &registry.reference(name)];
        let output = bed.command("a", &words).env("HOME", &home).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let signed = serde_json::json!({"type": "signedBy", "keyType": "GPGKeys", "keyPath": keys.public()});
    for (name, rule, words) in [
        ("web:signed", serde_json::json!({"type": "reject"}), "rejected by policy"),
        ("web:unsigned", signed.clone(), "A signature was required"),
    ] {
        let (code, said) = pull(name, &rule);
        assert!(code == 1 && said.contains(words), "{name}: {said}");
        assert_eq!(bed.done("a", &["images"]).lines().count(), 1, "{name}");
    }
    let (code, said) = pull("web:signed", &signed);
    assert_eq!(code, 0, "{said}");
    assert_eq!(bed.done("a", &["images"]).lines().count(), 2);
}

#[test]
fn credentials_are_those_of_the_usual_files() {
    let bed = Bed::up("credentials");
    let layout = layout(&bed);
    let registry = Registry::start(&bed);
    registry.push(&format!("{}:1", layout.display()), "web:1");
    let [plain, _] = registry.reached();
    for (number, file) in
        ["run/containers/auth.json", "home/.config/containers/auth.json", "home/.docker/config.json"]
            .into_iter()
            .enumerate()
    {
        let user = bed.scratch().join(number.to_string());
        let pull = || {
            let mut command = bed.command("a", &["pull", &plain, &registry.reference("web:1")]);
            for name in ["REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_CONFIG_HOME"] {
                command.env_remove(name);
            }
            command.env("HOME", user.join("home")).env("XDG_RUNTIME_DIR", user.join("run"));
            let output = command.output().unwrap();
            (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
        };
        let file = user.join(file);
        fs::create_dir_all(user.join("home")).unwrap();
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let (code, said) = pull();
        assert!(code == 1 && said.contains("skopeo login 127.0.0.1"), "{said}");
        fs::copy(&registry.authfile, &file).unwrap();
        let (code, said) = pull();
        assert_eq!(code, 0, "{}: {said}", file.display());
    }
}

/// Both take all of it, and the node keeps one.
#[test]
fn two_pulls_of_an_image_at_once_are_one_image() {
    let bed = Bed::up("two-pulls");
    let layout = layout(&bed);
    let registry = Registry::start(&bed);
    registry.push(&format!("{}:1", layout.display()), "web:1");
    let [plain, authfile] = registry.reached();
    let reference = registry.reference("web:1");
    let words = ["pull", &plain, &authfile, &reference];
    let pulls = [0, 1].map(|_| bed.command("a", &words).stdout(Stdio::piped()).spawn().unwrap());
    let said = pulls.map(|pull| {
        let output = pull.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        output.stdout
    });
    assert_eq!(said[0], said[1]);
    assert_eq!(bed.json::<Vec<serde_json::Value>>("a", &["images"]).len(), 1);
    let tmp = bed.lab().state("a").unwrap().join("images/tmp");
    assert_eq!(fs::read_dir(&tmp).unwrap().count(), 0, "nothing half-made is left");
    let address = ADDRESS.to_string();
    bed.done("a", &["run", "--name", "web", "--ip", &address, &reference]);
    wait_for("the server", || (version(&bed, ADDRESS) == "1").then_some(()));
}

#[test]
fn a_layer_that_lies_is_refused() {
    let bed = Bed::up("liar");
    let layout = layout(&bed);
    let registry = Registry::start(&bed);
    registry.push(&format!("{}:1", layout.display()), "web:1");
    // The registry hands out what it has on its disk.
    let largest = registry.blobs().into_iter().max().unwrap();
    spoil(&largest);
    let [plain, authfile] = registry.reached();
    let (said, left) = godwit(&bed, &["run", &plain, &authfile, &registry.reference("web:1")]);
    assert!(said.code == 125 && said.stderr.contains("Digest did not match"), "{said:?}");
    assert_eq!(left, 0);
    assert_eq!(bed.done("a", &["images"]).lines().count(), 1);
    assert_eq!(bed.done("a", &["image", "ls", "--layers"]).lines().count(), 1);
    assert_eq!(bed.done("a", &["ps", "-aq"]), "");
}

/// A registry with one image, of whose layer the first half comes.
fn stalls() -> (SocketAddrV4, Receiver<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let std::net::SocketAddr::V4(address) = listener.local_addr().unwrap() else { unreachable!() };
    let (stalled, streams) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, stalled) = (stream.unwrap(), stalled.clone());
            std::thread::spawn(move || {
                let mut requests = BufReader::new(stream.try_clone().unwrap());
                while let Some(path) = request(&mut requests) {
                    let layer = format!("sha256:{}", "ab".repeat(32));
                    // Of `{}`.
                    let config = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a";
                    let body = if path.contains("/manifests/") {
                        serde_json::json!({
                            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
                            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": config, "size": 2},
                            "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": layer, "size": 2 << 20}],
                        })
                        .to_string()
                    } else {
                        "{}".into()
                    };
                    if path.contains(&layer) {
                        stream
                            .write_all(
                                format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", 2 << 20).as_bytes(),
                            )
                            .unwrap();
                        stream.write_all(&vec![7; 1 << 20]).unwrap();
                        stalled.send(stream).unwrap();
                        return;
                    }
                    let head = format!(
                        "HTTP/1.1 200 OK\r\nContent-Type: application/vnd.oci.image.manifest.v1+json\r\nContent-Length: {}\r\n\r\n",
                        body.len()
                    );
                    if stream.write_all((head + &body).as_bytes()).is_err() {
                        return;
                    }
                }
            });
        }
    });
    (address, streams)
}

/// The path of the next request; `None` when the client has gone.
fn request(stream: &mut impl BufRead) -> Option<String> {
    let mut first = String::new();
    stream.read_line(&mut first).ok().filter(|read| *read > 0)?;
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).ok().filter(|read| *read > 0)?;
        if line == "\r\n" {
            return first.split(' ').nth(1).map(str::to_owned);
        }
    }
}

#[test]
fn a_pull_that_is_interrupted_leaves_nothing() {
    let bed = Bed::up("stalled");
    let (address, streams) = stalls();
    let scratch = bed.scratch().join("tmp");
    fs::create_dir(&scratch).unwrap();
    let reference = format!("{address}/test/web");
    let mut command = bed.command("a", &["run", "--tls-verify=false", &reference]);
    let mut child = command.env("TMPDIR", &scratch).stderr(Stdio::piped()).spawn().unwrap();
    let mut stream = streams.recv_timeout(PATIENCE).expect("the layer is asked for");
    wait_for("a part of the layer", || {
        let directory = fs::read_dir(&scratch).unwrap().next()?.unwrap().path();
        let files = fs::read_dir(directory).unwrap().filter_map(|file| file.ok()?.metadata().ok());
        files.map(|file| file.len()).find(|length| *length > 1 << 10)
    });
    let id = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(id, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(fs::read_dir(&scratch).unwrap().count(), 0);
    // skopeo has gone, too.
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    match stream.read(&mut [0]) {
        Ok(0) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        other => panic!("skopeo is still there: {other:?}"),
    }
    assert_eq!(bed.done("a", &["images"]).lines().count(), 1);
}

/// Bytes of an upper layer.
const NOISE: usize = 6 << 20;

#[test]
fn the_podman_of_a_destination_fetches_an_image_from_a_registry_that_it_may_ask() {
    is_fetched_by("podman");
}

#[test]
fn the_docker_of_a_destination_fetches_an_image_from_a_registry_that_it_may_ask() {
    is_fetched_by("docker");
}

fn is_fetched_by(name: &str) {
    let home = tempfile::tempdir().unwrap();
    let mut engine = Engine::new(name);
    let mut allowed = String::new();
    let bed = Bed::up_with(&format!("{name}-asks"), |config| {
        engine.equip(config);
        allowed = format!("{}:5000", config.address(CLIENT).unwrap());
        may_ask(config, home.path(), &allowed, &[&allowed]);
    });
    engine.start(&bed);
    let versions = ["1", "2"];
    let layout = layout_of(&bed, &versions, NOISE);
    let mut registry = Registry::start_on_client(&bed, &allowed);
    for (version, last) in versions.into_iter().zip([107, 108]) {
        registry.push(&format!("{}:{version}", layout.display()), &format!("web:{version}"));
        let (service, address) = (format!("web{version}"), Ipv4Addr::new(10, 88, 0, last));
        let image = registry.reference(&format!("web:{version}"));
        bed.done("a", &["run", "--engine", name, "--name", &service, "--ip", &address.to_string(), &image]);
        if version == "2" {
            registry.stop();
        }
        let report = bed.migrate(&service, "a", "b");
        let (there, here) = (report.layers_from_registry_bytes, report.layers_from_source_bytes);
        match version {
            "1" => {
                assert!(there > NOISE as u64 && here == 0 && report.file_bytes < NOISE as u64, "{report:?}")
            }
            _ => assert!(there == 0 && here > NOISE as u64, "{report:?}"),
        }
        assert_eq!(self::version(&bed, address), version);
        bed.migrate(&service, "b", "a");
    }
    engine.clear(&bed);
}

/// Nodes may ask a registry for layers, and reach these: what root of a machine has for them, here for the nodes alone.
fn may_ask(config: &mut LabConfig, home: &Path, allowed: &str, all: &[&str]) {
    let (containers, authfile) = (home.join(".config/containers"), home.join(".docker/config.json"));
    fs::create_dir_all(&containers).unwrap();
    fs::create_dir_all(home.join(".docker")).unwrap();
    config.programs.serve_arguments.extend(["--pull-layers", allowed].map(str::to_owned));
    let plain = |address: &&str| format!("[[registry]]\nlocation = \"{address}\"\ninsecure = true\n");
    fs::write(containers.join("registries.conf"), all.iter().map(plain).collect::<String>()).unwrap();
    fs::write(&authfile, serde_json::json!({"auths": {allowed: {"auth": SENT}}}).to_string()).unwrap();
    for (name, path) in [("HOME", home), ("REGISTRY_AUTH_FILE", &authfile)] {
        config.programs.serve_environment.push((name.into(), path.to_str().unwrap().into()));
    }
}

#[test]
fn a_destination_fetches_layers_from_a_registry_that_it_may_ask_and_has_the_others_from_the_source() {
    let home = tempfile::tempdir().unwrap();
    let (mut allowed, mut other) = (String::new(), String::new());
    let bed = Bed::up_with("fetches", |config| {
        let client = config.address(CLIENT).unwrap();
        (allowed, other) = (format!("{client}:5000"), format!("{client}:5001"));
        may_ask(config, home.path(), &allowed, &[&allowed, &other]);
    });
    let versions = ["1", "2", "3", "4", "5", "6"];
    let layout = layout_of(&bed, &versions, NOISE);
    index(&layout, "multi", true);
    let mut registry = Registry::start_on_client(&bed, &allowed);
    let mut unlisted = Registry::start_on_client(&bed, &other);
    let run = |registry: &Registry<'_>, source: &str, name: &str, last: u8| {
        registry.push(&format!("{}:{source}", layout.display()), &format!("web:{source}"));
        let address = Ipv4Addr::new(10, 88, 0, last);
        let mut godwit = bed.lab().command(CLIENT, programs().join("godwit")).unwrap();
        godwit.env("GODWIT_LAB", bed.lab().name()).env("GODWIT_NODE", "a").stdin(Stdio::null());
        let [plain, authfile] = registry.reached();
        let image = registry.reference(&format!("web:{source}"));
        let ip = address.to_string();
        succeeds(godwit, &["run", &plain, &authfile, "--name", name, "--ip", &ip, &image]);
        address
    };
    let noise = u64::try_from(NOISE).unwrap();
    let moved = |name: &str, from: &str, to: &str, address: Ipv4Addr, serves: &str| -> Report {
        let report = bed.migrate(name, from, to);
        wait_for("the server", || (version(&bed, address) == serves).then_some(()));
        let tmp = bed.lab().state(to).unwrap().join("images/tmp");
        assert_eq!(fs::read_dir(&tmp).unwrap().count(), 0, "nothing half-made is left");
        println!(
            "{name}: {} bytes from the registry, {} from the source",
            report.layers_from_registry_bytes, report.layers_from_source_bytes
        );
        report
    };
    let from_registry = |report: &Report| {
        assert_eq!(report.layers_from_source_bytes, 0, "{report:?}");
        assert!(report.file_bytes < noise && report.layers_from_registry_bytes > noise, "{report:?}");
        report.layers_from_registry_bytes
    };
    let from_source = |report: &Report| {
        assert_eq!(report.layers_from_registry_bytes, 0, "{report:?}");
        assert!(report.file_bytes > noise && report.layers_from_source_bytes > noise, "{report:?}");
    };

    let doctor = bed.godwit("b", &["doctor"]);
    assert!(doctor.stdout.contains("skopeo version"), "{doctor:?}");
    let first = run(&registry, "1", "first", 100);
    let said = bed.godwit("a", &["check", "first", "--to", "b"]);
    assert!(matches!(said.code, 0 | 2), "{said:?}");
    assert_eq!(bed.done("b", &["image", "ls", "--layers"]).lines().count(), 1, "a check fetches nothing");
    let whole = from_registry(&moved("first", "a", "b", first, "1"));
    let back = moved("first", "b", "a", first, "1");
    assert_eq!(back.layers_from_registry_bytes + back.layers_from_source_bytes, 0, "{back:?}");
    // The lower layer is there, and the upper one is fetched ahead.
    let second = run(&registry, "2", "second", 101);
    let said = bed.godwit("a", &["--json", "prepare", "second", "--to", "b"]);
    assert_eq!(said.code, 0, "{said:?}");
    let upper = from_registry(&said.report());
    assert!(upper < whole, "{upper} of {whole}");
    let after = moved("second", "a", "b", second, "2");
    assert_eq!(after.layers_from_registry_bytes + after.layers_from_source_bytes, 0, "{after:?}");
    if tier::is_full() {
        // What the registry has is an index.
        bed.done("b", &["image", "prune"]);
        let multi = run(&registry, "multi", "multi", 102);
        from_registry(&moved("multi", "a", "b", multi, "1"));
    }

    // A registry that lies, one that is not allowed, and one that is gone.
    let third = run(&registry, "3", "third", 103);
    registry.blobs().iter().filter(|(bytes, _)| *bytes > noise).for_each(spoil);
    from_source(&moved("third", "a", "b", third, "3"));
    let fourth = run(&unlisted, "4", "fourth", 104);
    unlisted.stop();
    let listener = bed.lab().inside(CLIENT, || TcpListener::bind(&other).unwrap()).unwrap();
    listener.set_nonblocking(true).unwrap();
    from_source(&moved("fourth", "a", "b", fourth, "4"));
    let asked = listener.accept().map(|(_, from)| from);
    assert_eq!(asked.unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "it was not contacted");
    let fifth = run(&registry, "5", "fifth", 105);
    let sixth = run(&registry, "6", "sixth", 106);
    registry.stop();
    if tier::is_full() {
        from_source(&moved("fifth", "a", "b", fifth, "5"));
    }
    // One that does not answer: what asks it ends with the daemon that has started it, however that ends.
    let listener = bed.lab().inside(CLIENT, || TcpListener::bind(&allowed).unwrap()).unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut moving = bed.command("a", &["migrate", "sixth", "--to", "b"]).spawn().unwrap();
    let fetching = || programs_of(&bed, "b", "skopeo").len();
    wait_for("skopeo to ask", || (fetching() > 0 && listener.accept().is_ok()).then_some(()));
    bed.lab().stop_node("b").unwrap();
    wait_for("skopeo to end", || (fetching() == 0).then_some(()));
    assert!(!moving.wait().unwrap().success());
    assert_eq!(version(&bed, sixth), "6");
}
