//! The built `godwit` against a fake daemon: what it sends, prints, and ends with.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used)]

mod fake;

use std::process::Stdio;

use fake::{Fake, Finished, godwit};
use godwit_api::v1::run_request::Source;
use tokio::io::AsyncWriteExt as _;

#[tokio::test]
async fn run_sends_every_flag_and_prints_the_name() {
    let fake = Fake::start();
    let finished = fake
        .run(&[
            "run",
            "-d",
            "--name",
            "redis",
            "--ip",
            "10.88.0.10",
            "--rootfs",
            "some/dir",
            "-e",
            "A=1",
            "--env",
            "B=2",
            "--mount",
            "type=tmpfs,dst=/tmp,size=1m",
            "-v",
            "/data:/data:ro",
            "-m",
            "256m",
            "--cpus",
            "1.5",
            "-p",
            "8080:80",
            "-p",
            "53:53/udp",
            "--hostname",
            "h",
            "-u",
            "1000:1000",
            "-w",
            "/srv",
            "--label",
            "x=y",
            "--restart",
            "on-failure:3",
            "--",
            "redis-server",
            "--save",
            "",
        ])
        .await;
    assert_eq!((finished.code, finished.stdout.as_str()), (0, "redis\n"), "{finished:?}");
    let asked = fake.asked.run.lock().unwrap().take().unwrap();
    let directory = std::env::current_dir().unwrap().join("some/dir").to_str().unwrap().to_owned();
    assert_eq!(asked.source, Some(Source::Rootfs(directory)));
    assert_eq!(asked.address, "10.88.0.10");
    assert_eq!(asked.command, ["redis-server", "--save", ""]);
    assert_eq!(asked.env, ["A=1", "B=2"]);
    assert_eq!(asked.mounts.len(), 2);
    assert_eq!((asked.memory_bytes, asked.cpu_millis), (256 << 20, 1500));
    assert_eq!(asked.publish[1].protocol, "udp");
    assert_eq!(
        (asked.hostname.as_str(), asked.user.as_str(), asked.workdir.as_str()),
        ("h", "1000:1000", "/srv")
    );
    assert_eq!(asked.labels, ["x=y"]);
    assert_eq!(asked.restart, "on-failure:3");
    assert!(finished.stderr.contains("/data does not move with redis"), "{finished:?}");
}

#[tokio::test]
async fn run_sends_how_the_service_is_to_be_held() {
    let fake = Fake::start();
    let directory = tempfile::tempdir().unwrap();
    let (profile, env) = (directory.path().join("profile.json"), directory.path().join("env"));
    std::fs::write(&profile, "{\"defaultAction\":\"SCMP_ACT_ALLOW\"}").unwrap();
    std::fs::write(&env, "A=0\nC=3\n").unwrap();
    let seccomp = format!("seccomp={}", profile.display());
    let held = ["--cap-drop", "ALL", "--cap-add", "CHOWN,KILL", "--pids-limit", "-1", "--read-only"];
    let more = ["--ulimit", "core=0:5", "--security-opt", &seccomp, "--security-opt", "no-new-privileges"];
    let env = ["-e", "A=1", "--env-file", env.to_str().unwrap(), "--entrypoint", "[\"/bin/sh\"]"];
    let whole = [&["run", "--image", "/i.tar"][..], &held, &more, &env, &["sleep", "100", "-q"]].concat();
    let finished = fake.run(&whole).await;
    assert_eq!(finished.code, 0, "{finished:?}");
    let asked = fake.asked.run.lock().unwrap().take().unwrap();
    assert_eq!(
        (asked.cap_add, asked.cap_drop),
        (vec!["CHOWN".into(), "KILL".into()], vec!["ALL".to_owned()])
    );
    assert_eq!((asked.pids_limit, asked.read_only, asked.no_new_privileges), (Some(0), true, true));
    assert_eq!((asked.ulimits[0].soft, asked.ulimits[0].hard), (0, 5));
    assert_eq!(asked.seccomp, "{\"defaultAction\":\"SCMP_ACT_ALLOW\"}");
    assert_eq!(asked.env, ["A=0", "C=3", "A=1"]);
    assert_eq!(asked.entrypoint.unwrap().words, ["/bin/sh"]);
    assert_eq!(asked.command, ["sleep", "100", "-q"], "no `--` was needed");

    for (arguments, said) in [
        (&["--security-opt", "label=x"][..], "write seccomp=unconfined"),
        (&["--security-opt", "seccomp=/nowhere"], "/nowhere cannot be read"),
        (&["sleep", "9", "--name", "x"], "put --name before sleep"),
    ] {
        let finished = fake.run(&[&["run", "--image", "/i.tar"], arguments].concat()).await;
        assert_eq!(finished.code, 125, "{finished:?}");
        assert!(finished.stderr.contains(said), "{finished:?}");
        assert!(fake.asked.run.lock().unwrap().is_none(), "{finished:?}");
    }
}

#[tokio::test]
async fn a_flag_that_there_is_not_is_not_taken_for_a_command() {
    let finished = Finished::from(godwit(&["run", "--image", "/i", "--frob", "x"]).output().await.unwrap());
    assert_eq!(finished.code, 2, "{finished:?}");
    assert!(finished.stderr.contains("unexpected argument '--frob'"), "{finished:?}");
    assert!(!finished.stderr.contains("-- --frob"), "{finished:?}");
}

#[tokio::test]
async fn run_without_a_name_makes_one_from_the_command() {
    let fake = Fake::start();
    let finished = fake.run(&["run", "--image", "/i.tar", "--", "/bin/sleep", "1"]).await;
    assert_eq!(finished.code, 0, "{finished:?}");
    assert!(finished.stdout.starts_with("sleep-"), "{finished:?}");
}

#[tokio::test]
async fn run_refused_by_the_daemon_ends_with_125_and_its_sentence() {
    let fake = Fake::start();
    let finished = fake.run(&["run", "--name", "taken", "--image", "/i.tar"]).await;
    assert_eq!(finished.code, 125);
    assert_eq!(finished.stderr, "Error: the name taken is in use on node b: choose another with --name\n");
    assert_eq!(finished.stdout, "");
}

#[tokio::test]
async fn wrong_values_are_refused_before_the_daemon_is_asked() {
    for (arguments, expected) in [
        (&["run", "--image", "/i", "-m", "256MB"][..], "could mean 1000 or 1024"),
        (&["run", "--image", "/i", "--cpus", "0"], "a number of CPUs is decimal"),
        (&["run", "--image", "/i", "-p", "80"], "write 80:80"),
        (&["run", "--image", "/i", "-p", "a:80"], "write HOST:CONTAINER"),
        (&["run", "--image", "/i", "--ip", "10.88.0"], "invalid IPv4 address"),
        (&["run", "--name", "x"], "--rootfs <DIR>|--image <IMAGE>|IMAGE COMMAND"),
        (&["run", "--image", "/i", "--rootfs", "/r"], "cannot be used with"),
        (&["migrate", "redis"], "--to <NODE>"),
        (&["migrate", "redis", "--to", "b", "--mode", "warm"], "cold"),
        (&["logs", "--since", "yesterday", "redis"], "write a time as"),
        (&["frobnicate"], "unrecognized subcommand"),
    ] {
        let finished = Finished::from(godwit(arguments).output().await.unwrap());
        assert_eq!(finished.code, 2, "{finished:?}");
        assert!(finished.stderr.starts_with("Error: "), "{finished:?}");
        assert!(finished.stderr.contains(expected), "{finished:?}");
    }
}

#[tokio::test]
async fn ps_lists_in_a_table_as_names_and_as_json() {
    let fake = Fake::start();
    let table = fake.run(&["ps", "-a"]).await;
    let lines: Vec<_> = table.stdout.lines().collect();
    assert!(lines[0].starts_with("NAME    NODE  ADDRESS"), "{table:?}");
    assert!(lines[1].starts_with("broker  b"), "{table:?}");
    assert!(lines[2].contains("stopped (3)"), "{table:?}");
    assert!(lines[3].contains("200.0 MiB of 256.0 MiB"), "{table:?}");
    assert!(lines[3].contains("10.88.0.10, 10.89.0.10"), "{table:?}");
    assert!(lines[3].ends_with("redis-server --save ''"), "{table:?}");
    assert_eq!(fake.run(&["ps", "-q"]).await.stdout, "broker\nredis\n");
    let json = fake.run(&["ps", "--json"]).await.json();
    assert_eq!(json[1]["name"], "redis");
    assert_eq!(json[1]["state"], "running");
    assert_eq!(json[0]["state"], "remote");
}

#[tokio::test]
async fn inspect_prints_json_and_connections_and_names_an_unknown_service() {
    let fake = Fake::start();
    let finished = fake.run(&["inspect", "redis"]).await;
    let end = finished.stdout.find("\n}\n").unwrap() + 3;
    let (json, connections) = finished.stdout.split_at(end);
    assert_eq!(serde_json::from_str::<serde_json::Value>(json).unwrap()["pid"], 42);
    assert!(json.lines().count() > 10);
    assert!(
        connections.starts_with("connections: 25 tcp established; the first 20 of 25:\n"),
        "{connections}"
    );
    assert_eq!(connections.matches("10.99.0.100:40000").count(), 20, "{connections}");
    let finished = fake.run(&["--json", "inspect", "redis"]).await;
    assert_eq!(finished.stdout.lines().count(), 1);
    let connections = &finished.json()["connections"];
    assert_eq!(connections["states"]["tcp"]["established"], 25);
    assert_eq!(connections["list"].as_array().unwrap().len(), 25);
    let finished = fake.run(&["inspect", "nix"]).await;
    assert_eq!(finished.code, 1);
    assert_eq!(finished.stderr, "Error: there is no service named nix: 'godwit ps -a' lists them\n");
}

/// The packets of a pcapng file: the number of the interface, and the data.
fn packets(file: &[u8]) -> Vec<(u32, String)> {
    let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
    let (mut at, mut packets) = (0, Vec::new());
    while at < file.len() {
        if word(at) == 6 {
            let data = &file[at + 28..at + 28 + word(at + 20) as usize];
            packets.push((word(at + 8), String::from_utf8(data.to_vec()).unwrap()));
        }
        at += word(at + 4) as usize;
    }
    packets
}

#[tokio::test]
async fn capture_writes_the_packets_of_all_nodes_in_the_order_of_time() {
    let fake = Fake::start();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("redis.pcapng");
    let file = path.to_str().unwrap();
    let arguments =
        ["capture", "redis", "-o", file, "--count", "3", "--at", "service,uplink", "tcp", "port", "6379"];
    let finished = fake.run(&arguments).await;
    assert_eq!(finished.code, 0, "{finished:?}");
    assert!(finished.stderr.contains("capturing redis on a, b"), "{finished:?}");
    assert!(finished.stderr.contains("8 packets were dropped"), "{finished:?}");
    assert!(finished.stdout.starts_with(&format!("3 packets in {file}\n")), "{finished:?}");
    assert!(finished.stdout.contains("b:eth0     service  1        4"), "{finished:?}");
    let asked = fake.asked.capture.lock().unwrap().take().unwrap();
    assert_eq!((asked.at, asked.filter.as_str(), asked.snaplen), (vec![1, 4], "tcp port 6379", 256 << 10));
    let expected = [(0, "a at 10"), (1, "b at 20"), (0, "a at 30")].map(|(n, text)| (n, text.to_owned()));
    assert_eq!(packets(&std::fs::read(&path).unwrap()), expected);

    let finished = fake.run(&["--json", "capture", "redis", "-o", file, "--count", "2"]).await;
    let lines = finished.json_lines();
    assert_eq!(lines[0]["event"], "capturing");
    assert_eq!(lines[1]["event"], "captured");
    assert_eq!(lines[1]["packets"], 2);
    assert_eq!(lines[1]["dropped"], 8);
}

#[tokio::test]
async fn a_capture_that_breaks_keeps_what_it_has_and_one_that_is_refused_writes_nothing() {
    let fake = Fake::start();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("redis.pcapng");
    let file = path.to_str().unwrap();
    // Whoever serves it ends it, which nobody has asked for.
    let finished = fake.run(&["capture", "redis", "-o", file]).await;
    assert_eq!(finished.code, 1, "{finished:?}");
    assert!(finished.stderr.contains("the capture is not complete"), "{finished:?}");
    assert_eq!(packets(&std::fs::read(&path).unwrap()).len(), 3);

    let before = std::fs::read(&path).unwrap();
    let finished = fake.run(&["capture", "nix", "-o", file]).await;
    assert_eq!(finished.code, 1);
    assert_eq!(finished.stderr, "Error: there is no service named nix: 'godwit ps -a' lists them\n");
    assert_eq!(std::fs::read(&path).unwrap(), before);
    let finished = fake.run(&["--json", "capture", "redis", "-o", "-"]).await;
    assert!(finished.stderr.contains("name a file"), "{finished:?}");
}

#[tokio::test]
async fn logs_keep_the_two_streams_apart() {
    let fake = Fake::start();
    let finished = fake.run(&["logs", "-f", "--tail", "5", "--since", "1700000000", "redis"]).await;
    assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("one\n", "two\n"));
    let asked = fake.asked.logs.lock().unwrap().take().unwrap();
    assert_eq!((asked.follow, asked.tail, asked.since_ms), (true, 5, 1_700_000_000_000));
    let finished = fake.run(&["logs", "-t", "redis"]).await;
    assert_eq!(finished.stdout, "1970-01-01T00:00:01.000000000Z one\n");
    assert_eq!(fake.asked.logs.lock().unwrap().take().unwrap().tail, -1);
    let lines = fake.run(&["logs", "redis", "--json"]).await.json_lines();
    assert_eq!(lines[1]["stream"], "stderr");
    assert_eq!(lines[1]["data"], "two\n");
}

#[tokio::test]
async fn exec_passes_input_output_and_exit_code_on() {
    let fake = Fake::start();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, "A=0\n# a comment\nB=2\n").unwrap();
    let file_flag = format!("--env-file={}", file.path().display());
    let mut command = fake
        .godwit(&["exec", &file_flag, "-i", "-e", "A=1", "-u", "5", "-w", "/", "redis", "--", "cat", "-n"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"some text").await.unwrap();
    drop(stdin);
    let finished = Finished::from(child.wait_with_output().await.unwrap());
    assert_eq!(finished.code, 7, "{finished:?}");
    assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("some text", "SOME TEXT"));
    let asked = fake.asked.exec.lock().unwrap().take().unwrap();
    assert_eq!(asked.command, ["cat", "-n"]);
    assert_eq!(
        (asked.env.as_slice(), asked.user.as_str(), asked.workdir.as_str()),
        (&["A=0", "B=2", "A=1"].map(str::to_owned)[..], "5", "/")
    );
}

#[tokio::test]
async fn exec_ends_while_its_own_standard_input_stays_open() {
    let fake = Fake::start();
    let mut child = fake.godwit(&["exec", "redis", "--", "true"]).stdin(Stdio::piped()).spawn().unwrap();
    let status = child.wait().await.unwrap();
    assert_eq!(status.code(), Some(7));
}

#[tokio::test]
async fn exec_that_cannot_start_ends_with_125() {
    let fake = Fake::start();
    let finished = fake.run(&["exec", "nix", "--", "true"]).await;
    assert_eq!(finished.code, 125);
    assert!(finished.stderr.starts_with("Error: there is no service named nix"), "{finished:?}");
}

#[tokio::test]
async fn start_and_restart_take_several_and_go_on_after_an_error() {
    let fake = Fake::start();
    for verb in [&["start"][..], &["restart", "-t", "3"]] {
        let finished = fake.run(&[verb, &["missing", "redis"]].concat()).await;
        assert_eq!((finished.code, finished.stdout.as_str()), (1, "redis\n"), "{verb:?}");
        assert!(finished.stderr.starts_with("Error: there is no service named missing"), "{finished:?}");
    }
    assert!(fake.asked.stop.lock().unwrap().iter().all(|request| request.timeout_ms == 3000));
}

#[tokio::test]
async fn stop_and_rm_take_several_and_go_on_after_an_error() {
    let fake = Fake::start();
    let finished = fake.run(&["stop", "-t", "3", "missing", "redis"]).await;
    assert_eq!((finished.code, finished.stdout.as_str()), (1, "redis\n"));
    assert!(finished.stderr.starts_with("Error: there is no service named missing"));
    let asked = std::mem::take(&mut *fake.asked.stop.lock().unwrap());
    assert!(asked.iter().all(|request| request.timeout_ms == 3000), "{asked:?}");
    for verb in ["stop", "restart"] {
        assert_eq!(fake.run(&[verb, "-t", "0", "redis"]).await.code, 0);
    }
    let asked = std::mem::take(&mut *fake.asked.stop.lock().unwrap());
    assert!(
        asked.len() == 2 && asked.iter().all(|request| request.timeout_ms == 1),
        "not its own time: {asked:?}"
    );
    let finished = fake.run(&["rm", "running", "redis"]).await;
    assert_eq!((finished.code, finished.stdout.as_str()), (1, "redis\n"));
    assert_eq!(fake.run(&["rm", "-f", "running"]).await.code, 0);
}

#[tokio::test]
async fn a_doubt_is_decided_one_way_or_the_other_and_never_without_a_word() {
    let fake = Fake::start();
    let owned = fake.run(&["resolve", "--own", "doubtful"]).await;
    assert_eq!((owned.code, owned.stdout.as_str()), (0, "doubtful\n"));
    let dropped = fake.run(&["resolve", "--drop", "redis"]).await;
    assert_eq!(dropped.code, 1);
    assert!(dropped.stderr.contains("redis needs no decision"), "{}", dropped.stderr);
    for wrong in [&["resolve", "redis"][..], &["resolve", "--own", "--drop", "redis"]] {
        assert_eq!(fake.run(wrong).await.code, 2, "{wrong:?}");
    }
}

#[tokio::test]
async fn nodes_mark_the_one_that_was_asked() {
    let fake = Fake::start();
    let table = fake.run(&["nodes"]).await.stdout;
    assert!(table.contains("\na*    ready"), "{table}");
    assert!(table.contains("unreachable (no route to host)"), "{table}");
    assert_eq!(fake.run(&["nodes", "-q"]).await.stdout, "a\nb\n");
    assert_eq!(fake.run(&["nodes", "--json"]).await.json()[0]["is_self"], true);
}

#[tokio::test]
async fn events_are_lines() {
    let fake = Fake::start();
    assert_eq!(
        fake.run(&["events"]).await.stdout,
        "1970-01-01T00:00:01.500Z a service redis started: epoch 1\n"
    );
    assert_eq!(fake.run(&["events", "--json"]).await.json_lines()[0]["action"], "started");
}

#[tokio::test]
async fn doctor_ends_with_1_when_something_is_missing() {
    let fake = Fake::start();
    let finished = fake.run(&["doctor"]).await;
    assert_eq!(finished.code, 1);
    assert!(finished.stdout.contains("run scripts/setup"), "{finished:?}");
    assert!(finished.stdout.ends_with("node a lacks runc\n"), "{finished:?}");
    let finished = fake.run(&["doctor", "--json"]).await;
    assert_eq!(finished.code, 1);
    assert_eq!(finished.json()["checks"][2]["status"], "missing");
}

#[tokio::test]
async fn the_services_of_a_node_that_is_removed_are_told() {
    let fake = Fake::start();
    let finished = fake.run(&["cluster", "remove", "c"]).await;
    assert_eq!(finished.code, 0, "{finished:?}");
    assert!(finished.stdout.starts_with("node c is removed\n"), "{finished:?}");
    assert!(finished.stdout.contains("`godwit rm web` forgets it"), "{finished:?}");
}

#[tokio::test]
async fn a_token_is_printed_alone() {
    let fake = Fake::start();
    assert_eq!(fake.run(&["cluster", "token", "c", "--valid", "15m"]).await.stdout, "gwt1-secret\n");
    let asked = fake.asked.token.lock().unwrap().take().unwrap();
    assert_eq!((asked.node.as_str(), asked.valid_s), ("c", 900));
}

#[tokio::test]
async fn init_and_join_become_godwitd_with_the_same_flags() {
    // Links, since a program that was just written cannot be started while another test forks.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let program = directory.path().join("godwit");
    std::fs::hard_link(env!("CARGO_BIN_EXE_godwit"), &program).unwrap();
    let run = async |arguments: &[&str]| {
        let mut command = tokio::process::Command::new(&program);
        Finished::from(command.args(arguments).env_remove("GODWIT_NODE").output().await.unwrap())
    };
    let finished = run(&["cluster", "init", "--node", "a", "--listen", "192.0.2.1:7117"]).await;
    assert_eq!(finished.code, 1);
    assert!(finished.stderr.contains("godwitd cannot be started: install it beside godwit"), "{finished:?}");

    std::os::unix::fs::symlink("/bin/echo", directory.path().join("godwitd")).unwrap();
    let finished =
        run(&["cluster", "init", "--node", "a", "--listen", "192.0.2.1:7117", "--state", "/s"]).await;
    assert_eq!(finished.stdout, "init --node a --listen 192.0.2.1:7117 --state /s\n");
    assert_eq!(run(&["cluster", "init"]).await.stdout, "init\n");
    assert_eq!(
        run(&["cluster", "init", "--name", "a", "--no-start"]).await.stdout,
        "init --name a --no-start\n"
    );
    assert_eq!(run(&["cluster", "join", "-"]).await.stdout, "join -\n");
    let finished = run(&["cluster", "join", "TOKEN", "--listen", "192.0.2.2:7117", "--node", "b"]).await;
    assert_eq!(finished.stdout, "join TOKEN --listen 192.0.2.2:7117 --node b\n");
}

#[tokio::test]
async fn a_socket_counts_more_than_a_node_from_the_environment() {
    let fake = Fake::start();
    let output = fake.godwit(&["ps", "-q"]).env("GODWIT_NODE", "zzz").output().await.unwrap();
    assert_eq!(Finished::from(output).stdout, "broker\nredis\n");
}

#[tokio::test]
async fn version_answers_with_and_without_a_daemon() {
    let fake = Fake::start();
    assert_eq!(fake.run(&["version", "--json"]).await.json()["godwitd"], "0.1.0");
    let finished = Finished::from(godwit(&["version", "--socket", "/nowhere"]).output().await.unwrap());
    assert_eq!(finished.code, 0);
    assert!(finished.stdout.ends_with("godwitd does not answer\n"), "{finished:?}");
}

#[tokio::test]
async fn a_daemon_that_is_not_there_is_named_with_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let dead = fake::dead_socket(directory.path());
    for (socket, reason) in
        [(directory.path().join("none.sock"), "there is no such socket"), (dead, "nothing listens there")]
    {
        let socket = socket.to_str().unwrap();
        let finished = Finished::from(godwit(&["ps", "--socket", socket]).output().await.unwrap());
        assert_eq!(finished.code, 1);
        assert_eq!(
            finished.stderr,
            format!(
                "Error: godwitd does not answer on {socket}: {reason}; start it with `systemctl start godwitd` or name a lab node with --node\n"
            )
        );
    }
}

#[tokio::test]
async fn a_daemon_that_goes_away_before_it_answers_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("godwitd.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    // Reads the request and ends without an answer, as a daemon does that is killed.
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        std::io::Read::read(&mut stream, &mut [0; 64]).unwrap();
    });
    let arguments = ["migrate", "redis", "--to", "b", "--socket", socket.to_str().unwrap()];
    let finished = Finished::from(godwit(&arguments).output().await.unwrap());
    assert_eq!(finished.code, 4, "{finished:?}");
    let expected =
        format!("Error: the connection to godwitd on {} broke before it answered", socket.display());
    assert!(finished.stderr.starts_with(&expected), "{finished:?}");
}

#[tokio::test]
async fn a_lab_that_is_not_there_is_named() {
    let arguments = ["ps", "--lab", "no-such-lab", "--node", "a"];
    let finished = Finished::from(godwit(&arguments).output().await.unwrap());
    assert_eq!(finished.code, 1);
    assert!(finished.stderr.starts_with("Error: there is no lab named no-such-lab"), "{finished:?}");
}

#[tokio::test]
async fn a_reader_that_goes_away_is_no_error() {
    let fake = Fake::start();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let child = fake.godwit(&["ps"]).stdout(writer).spawn().unwrap();
    let finished = Finished::from(child.wait_with_output().await.unwrap());
    assert_eq!((finished.code, finished.stderr.as_str()), (0, ""));
}

#[tokio::test]
async fn every_verb_has_a_man_page_and_completions_know_them() {
    let directory = tempfile::tempdir().unwrap();
    let pages = directory.path().join("man/man1");
    let status = godwit(&["man", pages.to_str().unwrap()]).status().await.unwrap();
    assert!(status.success());
    for verb in [
        "run",
        "ps",
        "inspect",
        "logs",
        "exec",
        "stop",
        "start",
        "restart",
        "rm",
        "policy",
        "policy-set",
        "policy-show",
        "policy-clear",
        "migrate",
        "cancel",
        "resolve",
        "nodes",
        "network",
        "network-create",
        "network-inspect",
        "network-ls",
        "network-rm",
        "events",
        "doctor",
        "capture",
        "cluster",
        "cluster-init",
        "cluster-token",
        "cluster-remove",
        "cluster-join",
        "version",
    ] {
        let page = std::fs::read_to_string(pages.join(format!("godwit-{verb}.1"))).unwrap();
        assert!(page.contains(".SH DESCRIPTION"), "{verb}");
    }
    for shell in ["bash", "zsh", "fish"] {
        let finished = Finished::from(godwit(&["completions", shell]).output().await.unwrap());
        assert_eq!(finished.code, 0);
        assert!(finished.stdout.contains("migrate"), "{shell}");
    }
}

#[tokio::test]
async fn check_prints_what_is_in_the_way_and_ends_with_what_a_script_can_act_on() {
    let fake = Fake::start();
    let can = fake.run(&["check", "redis", "--to", "b"]).await;
    assert_eq!(can.code, 0, "{can:?}");
    assert!(can.stdout.starts_with("redis can move from a to b\n  mode           precopy\n"), "{can:?}");
    let leaves = fake.run(&["check", "redis"]).await;
    assert!(leaves.stdout.starts_with("redis can leave a\n"), "{leaves:?}");
    let warned = fake.run(&["check", "slow", "--to", "b"]).await;
    assert_eq!(warned.code, 2, "{warned:?}");
    assert!(warned.stdout.ends_with("warning: it writes much\n"), "{warned:?}");
    let cannot = fake.run(&["check", "stuck", "--to", "b"]).await;
    assert_eq!(
        (cannot.code, cannot.stdout.as_str()),
        (
            1,
            "stuck cannot move from a to b:\n  node b: no room\n  process 4711 (worker, PID 7 in the service) has an io_uring open, which CRIU cannot dump\n"
        )
    );
    let json = fake.run(&["--json", "check", "stuck", "--to", "b"]).await;
    assert_eq!(json.code, 1, "{json:?}");
    let told: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!((&told["obstacles"][0]["pid"], &told["forecast"]), (&4711.into(), &serde_json::Value::Null));
}

#[tokio::test]
async fn place_says_why_and_moves_where_the_daemon_has_decided_for_it() {
    let fake = Fake::start();
    let moved = fake.run(&["place", "redis"]).await;
    assert_eq!(moved.code, 0, "{moved:?}");
    assert!(moved.stdout.starts_with("redis is better on b than on a\nredis moved from "), "{moved:?}");
    let dry = fake.run(&["place", "redis", "--dry-run", "--explain"]).await;
    assert_eq!(
        (dry.code, dry.stdout.as_str()),
        (0, "redis is better on b than on a\nwarning: it writes much\n"),
        "{dry:?}"
    );
    let alone = fake.run(&["place", "alone"]).await;
    assert_eq!((alone.code, alone.stdout.as_str()), (0, "alone stays on a: no other node can take it\n"));
    let stuck = fake.run(&["place", "stuck"]).await;
    assert_eq!((stuck.code, stuck.stdout.as_str()), (1, "stuck cannot leave a:\n  it has a pipe\n"));
    // What is asked for goes along, and what does not move is tried elsewhere.
    let json = fake.run(&["--json", "place", "aborted", "--latency", "500us", "--stay", "2m"]).await;
    let lines: Vec<serde_json::Value> =
        json.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&lines[0]["latency_us"], &lines[0]["stay_ms"]), (&500.into(), &120_000.into()));
    let reports = lines.iter().filter(|line| line["outcome"] == "aborted").count();
    assert_eq!((json.code, reports), (1, 2), "{json:?}");
}

#[tokio::test]
async fn a_health_check_is_for_an_engine_and_for_a_daemon_that_knows_of_it() {
    let fake = Fake::start();
    let run = async |words: &str| fake.run(&words.split(' ').collect::<Vec<_>>()).await;
    let check = "--health-cmd true --health-interval 1m30s --health-retries 2 --health-timeout 500ms";
    let finished = run(&format!("run --engine docker --name redis {check} redis:7")).await;
    assert_eq!(finished.code, 0, "{finished:?}");
    let health = fake.asked.run.lock().unwrap().take().unwrap().health.unwrap();
    assert_eq!((health.command.as_str(), health.none), ("true", false));
    assert_eq!((health.interval_ms, health.timeout_ms), (Some(90_000), Some(500)));
    assert_eq!((health.retries, health.start_period_ms), (Some(2), None));
    let finished = run("run --engine podman --name redis --no-healthcheck redis:7").await;
    assert_eq!(finished.code, 0, "{finished:?}");
    assert!(fake.asked.run.lock().unwrap().take().unwrap().health.unwrap().none);
    // Each of the flags.
    for flag in [
        "--health-cmd true",
        "--health-interval 1s",
        "--health-retries 1",
        "--health-start-period 0s",
        "--health-timeout 1s",
        "--no-healthcheck",
    ] {
        let refused = run(&format!("run --name redis {flag} --image i.tar")).await;
        assert!(refused.code == 125 && refused.stderr.contains("--engine podman"), "{flag}: {refused:?}");
    }
    for (flags, words) in [
        ("--health-interval 5", "with its unit"),
        ("--health-cmd none", "--no-healthcheck"),
        ("--health-cmd [\"true\"]", "for the image's shell"),
        ("--no-healthcheck --health-retries 1", "cannot be used with"),
    ] {
        let refused = run(&format!("run --engine podman --name redis {flags} redis:7")).await;
        assert!(refused.code == 2 && refused.stderr.contains(words), "{flags}: {refused:?}");
    }
    assert!(fake.asked.run.lock().unwrap().is_none());
    let old = run("run --engine podman --name old redis:7").await;
    assert!(old.code == 125 && old.stderr.contains("does not know this request"), "{old:?}");
}

#[tokio::test]
async fn run_leaves_a_reference_to_the_engine_that_makes_the_container() {
    let fake = Fake::start();
    let finished =
        fake.run(&["run", "--engine", "podman", "--name", "redis", "redis:7", "redis-server"]).await;
    assert_eq!(finished.code, 0, "{finished:?}");
    let asked = fake.asked.run.lock().unwrap().take().unwrap();
    assert_eq!((asked.engine.as_str(), asked.command), ("podman", vec!["redis-server".to_owned()]));
    assert_eq!(asked.source, Some(godwit_api::v1::run_request::Source::Reference("redis:7".into())));
}
