//! Services as files: `godwit checkpoint` and `godwit restore`, with Podman at the other end too, and what is left after a
//! failure. Needs root and Podman.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use godwit_lab::workload::{Preset, RedisClient, Workload};
use godwit_tests::disks::Small;
use godwit_tests::hold::{CHECKPOINTS, Points};
use godwit_tests::podman::Podmans;
use godwit_tests::victim::programs_of;
use godwit_tests::{Bed, CLIENT, PATIENCE, Said, wait_for};
use serde_json::Value;

const NAME: &str = "cache";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 97);
const IMAGE: &str = "localhost/redis:1";
/// Data in Redis.
const FILL: u64 = 8 << 20;

/// Redis in a lab, with a Podman on each node.
struct Cache {
    bed: Bed,
    podmans: Podmans,
    preset: Preset,
    file: PathBuf,
}

impl Cache {
    fn up(test: &str, change: impl FnOnce(&mut godwit_lab::LabConfig)) -> Self {
        let podmans = Podmans::new();
        let bed = Bed::up_with(test, |config| {
            podmans.equip(config);
            change(config);
        });
        let preset = bed.build(Workload::Redis);
        podmans.image(&bed, &["b"], &preset, IMAGE);
        let file = bed.scratch().join("cache.tar");
        Self { bed, podmans, preset, file }
    }

    /// Redis runs on `a`, with data, and with a file that it has changed.
    fn run(&self, more: &[&str]) -> RedisClient {
        self.run_from(&["--rootfs", self.preset.rootfs.to_str().unwrap()], more)
    }

    /// From these files.
    fn run_from(&self, files: &[&str], more: &[&str]) -> RedisClient {
        let address = ADDRESS.to_string();
        let mut words = vec!["run", "--name", NAME, "--ip", &address];
        words.extend(files.iter().chain(more));
        words.extend(self.preset.env.iter().flat_map(|entry| ["--env", entry]));
        words.extend(self.preset.user.iter().flat_map(|user| ["--user", user]));
        words.push("--");
        words.extend(self.preset.command.iter().map(String::as_str));
        self.bed.done("a", &words);
        let mut client = self.connect(ADDRESS);
        client.fill(FILL).unwrap();
        self.bed.done("a", &["exec", NAME, "sh", "-c", "echo changed > /changed; busybox rm /bin/true"]);
        client
    }

    /// The same of Podman's, on `b`.
    fn run_by_podman(&self, more: &[&str]) {
        let mut words = vec!["run", "--detach", "--name", NAME, "--network", "none"];
        words.extend(more);
        words.extend(self.preset.env.iter().flat_map(|entry| ["--env", entry]));
        words.extend(self.preset.user.iter().flat_map(|user| ["--user", user]));
        words.push(IMAGE);
        words.extend(self.preset.command.iter().map(String::as_str));
        self.podmans.done(&self.bed, "b", &words);
    }

    fn connect(&self, address: Ipv4Addr) -> RedisClient {
        RedisClient::connect(self.bed.lab(), CLIENT, self.preset.at(address), PATIENCE).unwrap()
    }

    fn has_all(&self, address: Ipv4Addr) {
        self.connect(address).check_fill(FILL).unwrap();
    }

    fn file(&self) -> &str {
        self.file.to_str().unwrap()
    }

    /// Once Redis has noticed that clients have gone.
    fn checkpoint(&self, more: &[&str]) -> Value {
        let words = [&["--json", "checkpoint", NAME, "-o", self.file()], more].concat();
        let said = wait_for("the end of all connections", || {
            let said = self.bed.godwit("a", &words);
            (!said.stderr.contains("has established TCP connections")).then_some(said)
        });
        assert_eq!(said.code, 0, "{said:?}");
        serde_json::from_str(&said.stdout).unwrap()
    }

    fn state(&self, node: &str, name: &str) -> Value {
        self.bed.json::<Value>(node, &["inspect", name])["state"].clone()
    }

    /// Node a has no service, no volume, and nothing of a checkpoint.
    fn has_nothing(&self) {
        for words in [["ps", "-a"], ["volume", "ls"]] {
            assert_eq!(self.bed.json::<Value>("a", &words), Value::Array(Vec::new()));
        }
        assert_eq!(self.under_way("a"), 0);
    }

    /// What a node has of checkpoints that are under way.
    fn under_way(&self, node: &str) -> usize {
        let directory = self.bed.lab().state(node).unwrap().join("checkpoints");
        fs::read_dir(directory).map_or(0, Iterator::count)
    }
}

fn refused(said: &Said, words: &[&str]) {
    assert_ne!(said.code, 0, "{said:?}");
    for word in words {
        assert!(said.stderr.contains(word), "no {word:?} in {said:?}");
    }
}

#[test]
fn a_service_ends_in_its_file_and_goes_on_from_it() {
    let cache = Cache::up("cp-file", |_| ());
    let (bed, file) = (&cache.bed, cache.file());
    drop(cache.run(&["--restart", "always", "-v", "data:/data"]));
    bed.done("a", &["exec", NAME, "sh", "-c", "echo volume > /data/changed"]);
    let told = cache.checkpoint(&[]);
    assert_eq!(fs::metadata(file).unwrap().len(), told["bytes"].as_u64().unwrap());
    assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
    // Its policy does not start it, nor does a new daemon.
    bed.lab().restart_node("a").unwrap();
    assert_eq!(cache.state("a", NAME), "stopped");
    assert_eq!(cache.under_way("a"), 0);

    refused(&bed.godwit("a", &["restore", file]), &["the name cache is taken"]);
    refused(&bed.godwit("a", &["restore", file, "--name", "copy"]), &["volume data"]);
    bed.done("a", &["rm", NAME]);
    refused(
        &bed.godwit("a", &["restore", file]),
        &["volume data is on this node already", "--ignore-volumes"],
    );
    bed.done("a", &["volume", "rm", "data"]);
    refused(
        &bed.godwit("b", &["restore", file]),
        &["does not have its layer sha256:", "give the image with --image"],
    );
    let other = bed.scratch().join("other");
    fs::create_dir_all(other.join("x")).unwrap();
    let other = ["restore", file, "--rootfs", other.to_str().unwrap()];
    refused(&bed.godwit("b", &other), &["is another image than", "other layers"]);
    assert_eq!(bed.done("a", &["restore", file]), "cache\n");
    cache.has_all(ADDRESS);
    let files = ["exec", NAME, "cat", "/changed", "/data/changed"];
    assert_eq!(bed.done("a", &files), "changed\nvolume\n");
    refused(&bed.godwit("a", &["exec", NAME, "/bin/true"]), &["there is no command"]);
    assert_eq!(cache.under_way("a"), 0);
    // It is a service like others.
    bed.migrate(NAME, "a", "b");
    cache.has_all(ADDRESS);
    assert_eq!(bed.done("b", &files), "changed\nvolume\n");
}

#[test]
fn a_service_that_runs_on_has_a_copy_beside_it() {
    let cache = Cache::up("cp-copy", |_| ());
    let (bed, file) = (&cache.bed, cache.file());
    let mut client = cache.run(&[]);
    refused(
        &bed.godwit("a", &["checkpoint", NAME, "-R", "-o", file]),
        &["established TCP connections", "--tcp-established"],
    );
    assert!(!cache.file.exists());
    client.call(&["PING"]).unwrap();
    drop(client);
    cache.checkpoint(&["-R", "-c", "gzip"]);
    cache.has_all(ADDRESS);
    assert_eq!(bed.done("a", &["restore", file, "--name", "copy"]), "copy\n");
    let shown: Value = bed.json("a", &["inspect", "copy"]);
    let address: Ipv4Addr = shown["address"].as_str().unwrap().parse().unwrap();
    assert_ne!(address, ADDRESS);
    cache.has_all(address);
    cache.has_all(ADDRESS);
}

#[test]
fn a_service_is_written_again_and_again_and_the_latest_files_stay() {
    let cache = Cache::up("cp-series", |_| ());
    let bed = &cache.bed;
    drop(cache.run(&[]));
    // Before, the first file would be refused.
    cache.checkpoint(&["-R"]);
    let directory = bed.scratch().join("series");
    fs::create_dir(&directory).unwrap();
    let words = ["checkpoint", NAME, "--every", "1s", "--keep", "2", "-o", directory.to_str().unwrap()];
    let mut writing = bed.command("a", &words).spawn().unwrap();
    let files = || {
        let entries =
            fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        // One that is being written has another name.
        let mut files: Vec<_> = entries.filter(|name| name.starts_with("cache-")).collect();
        files.sort();
        files
    };
    wait_for("the first file", || files().pop());
    bed.done("a", &["exec", NAME, "redis-cli", "SET", "later", "yes"]);
    // Another may have been begun before. The second one from here on was not.
    let first = files().pop().unwrap();
    let later = |files: &Vec<String>| files.iter().all(|file| *file > first) && files.len() == 2;
    wait_for("two later ones", || Some(files()).filter(later));
    let id = rustix::process::Pid::from_child(&writing);
    rustix::process::kill_process(id, rustix::process::Signal::INT).unwrap();
    assert_eq!(writing.wait().unwrap().code(), Some(0));
    let stay = files();
    assert!(stay.len() == 2 && fs::read_dir(&directory).unwrap().count() == 2, "{stay:?}");
    cache.has_all(ADDRESS);
    let latest = directory.join(&stay[1]);
    bed.done("a", &["restore", latest.to_str().unwrap(), "--name", "copy"]);
    assert_eq!(bed.done("a", &["exec", "copy", "redis-cli", "GET", "later"]), "yes\n");
}

#[test]
fn connections_continue_where_the_service_has_its_address_again() {
    let cache = Cache::up("cp-conn", |_| ());
    let (bed, file) = (&cache.bed, cache.file());
    let mut client = cache.run(&["-v", "data:/data"]);
    cache.checkpoint(&["--tcp-established", "--compress", "none"]);
    bed.done("a", &["rm", NAME]);
    bed.done("a", &["volume", "rm", "data"]);
    refused(
        &bed.godwit("a", &["restore", file]),
        &["has 1 established TCP connections", "--tcp-established"],
    );
    // CRIU finds out, when all files are in their places.
    let elsewhere = ["restore", file, "--tcp-established", "--ip", "10.88.0.98"];
    refused(&bed.godwit("a", &elsewhere), &["CRIU cannot restore container cache"]);
    cache.has_nothing();
    bed.done("a", &["restore", file, "--tcp-established"]);
    // The same connection: its end was not told of the pause.
    client.set_patience(PATIENCE).unwrap();
    client.check_fill(FILL).unwrap();
}

/// checkpointctl shows what is in it, if this machine has that (`scripts/setup-engines`).
fn is_read_by_checkpointctl(file: &str) {
    let said = |words: &[&str]| {
        let output = match std::process::Command::new("checkpointctl").args(words).output() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
            output => output.unwrap(),
        };
        assert!(output.status.success(), "{words:?}: {output:?}");
        Some(String::from_utf8(output.stdout).unwrap())
    };
    let Some(shown) = said(&["show", file]) else {
        println!("not tried: checkpointctl is not in PATH; `make test-engines` builds it");
        return;
    };
    let row = shown.lines().find(|line| line.contains("runc")).unwrap_or_else(|| panic!("{shown}"));
    for word in [NAME, "localhost/image:latest", "Podman"] {
        assert!(row.contains(word), "no {word:?} in {shown}");
    }
    let inspected = said(&["inspect", file, "--format", "json", "--all"]).unwrap();
    let inspected: Value = serde_json::from_str(&inspected).unwrap();
    assert_eq!(inspected[0]["container_name"], NAME);
    assert_eq!(inspected[0]["process_tree"]["command"], "redis-server");
    let memory = inspected[0]["checkpoint_size"]["memory_pages_size"].as_u64().unwrap();
    assert!(memory > FILL, "{memory}");
    let open = inspected[0]["file_descriptors"][0]["open_files"].to_string();
    assert!(open.contains("EVENTPOLL"), "{open}");
}

#[test]
fn podman_continues_what_godwit_has_written() {
    let cache = Cache::up("cp-podman", |_| ());
    let (bed, podmans) = (&cache.bed, &cache.podmans);
    // It was run from the image that Podman has.
    let image = bed.scratch().join("image.tar");
    let image = image.to_str().unwrap();
    podmans.done(bed, "b", &["save", "--quiet", "--format", "oci-archive", "--output", image, IMAGE]);
    drop(cache.run_from(&["--image", image], &[]));
    let told = cache.checkpoint(&[]);
    is_read_by_checkpointctl(cache.file());
    podmans.done(bed, "b", &["tag", IMAGE, told["image"].as_str().unwrap()]);
    podmans.done(bed, "b", &["container", "restore", "--import", cache.file()]);
    let inspected: Value = serde_json::from_str(&podmans.done(bed, "b", &["inspect", NAME])).unwrap();
    assert_eq!(inspected[0]["State"]["Status"], "running");
    let answers = |words: &[&str]| podmans.done(bed, "b", &[&["exec", NAME], words].concat());
    assert_eq!(answers(&["cat", "/changed"]), "changed\n");
    assert_ne!(podmans.call(bed, "b", &["exec", NAME, "/bin/true"]).status.code(), Some(0));
    // In the network namespace that Podman has made for it.
    let pid = inspected[0]["State"]["Pid"].to_string();
    let cgroups = fs::read_to_string(Path::new("/proc").join(&pid).join("cgroup")).unwrap();
    assert!(cgroups.contains("libpod-") && !cgroups.contains("godwit"), "{cgroups}");
    let mut asked = std::process::Command::new("nsenter");
    asked.args(["--net", "--target", &pid, "bash", "-c"]);
    asked.arg("exec 3<>/dev/tcp/127.0.0.1/6379; echo DBSIZE >&3; read -r line <&3; echo $line");
    let said = asked.output().unwrap();
    let keys: u64 = String::from_utf8_lossy(&said.stdout).trim().trim_start_matches(':').parse().unwrap();
    assert!(keys > 0, "{said:?}");
    podmans.clear(bed);
}

#[test]
fn a_container_of_podmans_in_godwits_care_is_written_by_podman_and_continued_by_godwit() {
    let cache = Cache::up("cp-adopted", |_| ());
    let (bed, podmans, file) = (&cache.bed, &cache.podmans, cache.file());
    cache.run_by_podman(&[]);
    bed.done("b", &["adopt", "podman:cache", "--ip", &ADDRESS.to_string()]);
    let advice = "`podman container checkpoint --export FILE` does this";
    refused(&bed.godwit("b", &["checkpoint", NAME, "-o", file]), &["is a container of Podman's", advice]);
    wait_for("Redis", || {
        let set = bed.godwit("b", &["exec", NAME, "redis-cli", "SET", "adopted", "yes"]);
        (set.stdout == "OK\n").then_some(())
    });
    podmans.done(bed, "b", &["container", "checkpoint", "--export", file, "--leave-running", NAME]);
    let image = bed.scratch().join("image.tar");
    let image = image.to_str().unwrap();
    podmans.done(bed, "b", &["save", "--quiet", "--format", "oci-archive", "--output", image, IMAGE]);
    bed.done("a", &["restore", file, "--image", image, "--name", "copy"]);
    for (node, name) in [("a", "copy"), ("b", NAME)] {
        assert_eq!(bed.done(node, &["exec", name, "redis-cli", "GET", "adopted"]), "yes\n", "{name}");
    }
    podmans.clear(bed);
}

#[test]
fn godwit_continues_what_podman_has_written() {
    let cache = Cache::up("cp-ofpodman", |_| ());
    let (bed, podmans, file) = (&cache.bed, &cache.podmans, cache.file());
    cache.run_by_podman(&["--volume", "data:/data", "--tmpfs", "/scratch:size=1m"]);
    let script = "echo changed > /data/changed; echo shared > /dev/shm/x; echo scratch > /scratch/x";
    podmans.done(bed, "b", &["exec", NAME, "sh", "-c", script]);
    podmans.done(bed, "b", &["container", "checkpoint", "--export", file, NAME]);
    let image = bed.scratch().join("image.tar");
    let image = image.to_str().unwrap();
    podmans.done(bed, "b", &["save", "--quiet", "--format", "oci-archive", "--output", image, IMAGE]);
    refused(&bed.godwit("a", &["restore", file]), &["made from the image localhost/redis:1", "podman save"]);
    assert_eq!(bed.done("a", &["restore", file, "--image", image]), "cache\n");
    let shown: Value = bed.json("a", &["inspect", NAME]);
    let address: Ipv4Addr = shown["address"].as_str().unwrap().parse().unwrap();
    let mut client = cache.connect(address);
    client.fill(FILL).unwrap();
    let inside =
        |node: &str| bed.done(node, &["exec", NAME, "cat", "/data/changed", "/dev/shm/x", "/scratch/x"]);
    assert_eq!(inside("a"), "changed\nshared\nscratch\n");
    bed.migrate(NAME, "a", "b");
    client.check_fill(FILL).unwrap();
    assert_eq!(inside("b"), "changed\nshared\nscratch\n");
    podmans.clear(bed);
}

#[test]
fn of_a_file_that_is_not_whole_nothing_is_made() {
    let cache = Cache::up("cp-broken", |_| ());
    let (bed, file) = (&cache.bed, cache.file());
    drop(cache.run(&["-v", "data:/data"]));
    cache.checkpoint(&["-R", "--ignore-volumes"]);
    refused(
        &bed.godwit("a", &["restore", file, "--name", "copy"]),
        &["does not have volume data", "restore it with --ignore-volumes"],
    );
    cache.checkpoint(&["--compress", "none"]);
    bed.done("a", &["rm", NAME]);
    bed.done("a", &["volume", "rm", "data"]);
    let whole = fs::read(file).unwrap();
    let broken = bed.scratch().join("broken.tar");
    let broken_text = broken.to_str().unwrap();
    let nothing = |words: &[&str], bytes: &[u8]| {
        fs::write(&broken, bytes).unwrap();
        refused(&bed.godwit("a", &["restore", broken_text]), words);
        cache.has_nothing();
    };
    nothing(&["no whole checkpoint archive", "cut off"], &whole[..whole.len() / 2]);
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    nothing(&["the checksum of", "is wrong"], &flipped);
    nothing(&["it is no tar archive"], &[7; 4096]);
    nothing(&["it is no tar archive"], b"");
    bed.done("a", &["restore", file]);
    cache.has_all(ADDRESS);
}

#[test]
fn a_service_goes_on_whatever_happens_to_its_checkpoint() {
    let mut points = None;
    let cache = Cache::up("cp-faults", |config| points = Some(Points::among(config, &CHECKPOINTS)));
    let points = points.unwrap();
    let (bed, file) = (&cache.bed, cache.file());
    drop(cache.run(&["-v", "data:/data"]));
    cache.checkpoint(&["-R"]);
    for point in ["checkpoint.frozen", "checkpoint.dumped", "checkpoint.kept"] {
        // The daemon dies.
        points.hold(point);
        let mut checkpoint = bed.command("a", &["checkpoint", NAME, "-o", file]).spawn().unwrap();
        points.reached(point);
        bed.lab().stop_node("a").unwrap();
        assert!(!checkpoint.wait().unwrap().success());
        points.let_go(point);
        bed.lab().start_node("a").unwrap();
        assert_eq!(cache.state("a", NAME), "running", "{point}");
        cache.has_all(ADDRESS);
        // What had the name stays, or has it now.
        assert_eq!((cache.under_way("a"), left(&cache.file)), (0, 0), "{point}");
        cache.checkpoint(&["-R"]);
    }
    // The user leaves.
    points.hold("checkpoint.dumped");
    let mut checkpoint = bed.command("a", &["checkpoint", NAME, "-o", file]).spawn().unwrap();
    points.reached("checkpoint.dumped");
    // timeout(1) hands it on.
    let process = rustix::process::Pid::from_child(&checkpoint);
    rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
    checkpoint.wait().unwrap();
    points.let_go("checkpoint.dumped");
    cache.has_all(ADDRESS);
    wait_for("the checkpoint to end", || (cache.under_way("a") == 0).then_some(()));
    assert_eq!(cache.state("a", NAME), "running");
    assert_eq!(left(&cache.file), 0);
    cache.checkpoint(&[]);
    let shown: Value = bed.json("a", &["inspect", NAME]);
    assert_eq!(
        (&shown["state"], &shown["reason"]),
        (&"stopped".into(), &"stopped by `godwit checkpoint`".into())
    );
    // A restore is cut off: nothing is left of it.
    bed.done("a", &["rm", NAME]);
    bed.done("a", &["volume", "rm", "data"]);
    points.hold("restore.files");
    let mut restore = bed.command("a", &["restore", file]).spawn().unwrap();
    points.reached("restore.files");
    bed.lab().stop_node("a").unwrap();
    assert!(!restore.wait().unwrap().success());
    points.let_go("restore.files");
    bed.lab().start_node("a").unwrap();
    cache.has_nothing();
    // Where disks are full, a daemon that starts removes what no service uses.
    let rootfs = cache.preset.rootfs.to_str().unwrap();
    bed.done("a", &["restore", file, "--rootfs", rootfs]);
    cache.has_all(ADDRESS);
}

#[test]
fn what_does_not_fit_or_no_archive_has_is_refused_by_name() {
    let cache = Cache::up("cp-refused", |_| {});
    let disk = Small::of(&cache.bed, "a", 512 << 20);
    drop(cache.run(&["-v", "data:/data", "--cap-add", "MKNOD"]));
    let checkpoint = || cache.bed.godwit("a", &["checkpoint", NAME, "--tcp-established", "-o", cache.file()]);
    let full = disk.fill();
    refused(&checkpoint(), &["a checkpoint of service cache cannot be made in /", "its memory of", "free"]);
    drop(full);
    for (directory, what) in [("/", "the changed files"), ("/data", "volume data")] {
        let device = format!("{directory}/device");
        cache.bed.done("a", &["exec", NAME, "busybox", "mknod", &device, "c", "1", "3"]);
        refused(&checkpoint(), &[what, "device", "cannot go into an archive", "rename or remove it"]);
        cache.bed.done("a", &["exec", NAME, "busybox", "rm", &device]);
    }
    assert_eq!((cache.under_way("a"), left(&cache.file)), (0, 0));
    assert_eq!(cache.state("a", NAME), "running");
    cache.has_all(ADDRESS);
    cache.checkpoint(&[]);
}

#[test]
fn a_service_goes_on_after_godwitd_was_killed_while_criu_dumped_it() {
    let cache = Cache::up("cp-dump", |_| {});
    let bed = &cache.bed;
    let mut client = cache.run(&[]);
    let large = 96 << 20;
    client.fill(large).unwrap();
    let mut checkpoint =
        bed.command("a", &["checkpoint", NAME, "--tcp-established", "-o", cache.file()]).spawn().unwrap();
    let checkpoints = bed.lab().state("a").unwrap().join("checkpoints");
    wait_for("pages of a dump", || {
        let staging = fs::read_dir(&checkpoints).ok()?.next()?.ok()?.path();
        let images = fs::read_dir(staging.join("checkpoint")).ok()?.flatten();
        let mut pages = images.filter(|image| image.file_name().to_string_lossy().starts_with("pages-"));
        pages.any(|image| image.metadata().is_ok_and(|image| image.len() > 1 << 20)).then_some(())
    });
    bed.lab().stop_node("a").unwrap();
    assert!(!checkpoint.wait().unwrap().success());
    bed.lab().start_node("a").unwrap();
    assert_eq!(cache.state("a", NAME), "running");
    client.check_fill(large).unwrap();
    // CRIU outlives the daemon.
    wait_for("CRIU to end", || programs_of(bed, "a", "criu").is_empty().then_some(()));
    client.check_fill(large).unwrap();
    assert_eq!((cache.under_way("a"), left(&cache.file)), (0, 0));
}

/// Files of a checkpoint that did not come to its end.
fn left(file: &Path) -> usize {
    let names = fs::read_dir(file.parent().unwrap()).unwrap();
    names.filter(|entry| entry.as_ref().unwrap().path().extension().is_some_and(|end| end == "part")).count()
}
