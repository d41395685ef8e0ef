//! Redis, with its background threads and its Lua: it answers its clients, in order and without a lost write, while it
//! moves between the sets.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use godwit_isa_packages::base::REDIS;
use godwit_isa_packages::package::built;
use godwit_isa_packages::tools::run;
use godwit_isa_packages::travel::{Every, changes, hopping};

use crate::support::{seed, wait_for_changes};

/// A connection, and the protocol as far as it is needed: lines and strings.
struct Client(BufReader<UnixStream>);

impl Client {
    fn send(&mut self, words: &[&str]) -> Result<String> {
        let mut request = format!("*{}\r\n", words.len());
        for word in words {
            request.push_str(&format!("${}\r\n{word}\r\n", word.len()));
        }
        self.0.get_mut().write_all(request.as_bytes())?;
        let mut line = String::new();
        ensure!(self.0.read_line(&mut line)? > 0, "the connection was closed at {words:?}");
        let line = line.trim_end();
        let Some(length) = line.strip_prefix('$') else { return Ok(line.to_owned()) };
        let mut text = vec![0; length.parse::<usize>().with_context(|| format!("{words:?}: {line}"))? + 2];
        self.0.read_exact(&mut text)?;
        text.truncate(text.len() - 2);
        Ok(String::from_utf8(text)?)
    }

    /// Counts, stores, and runs a script, and looks at each answer, until there was enough.
    fn work(&mut self, enough: &AtomicBool) -> Result<u64> {
        let mut count = 0_u64;
        while !enough.load(Ordering::Relaxed) {
            count += 1;
            let value = format!("{count:x}").repeat(usize::try_from(count % 300)?);
            let key = format!("key:{}", count % 50);
            let script = "return string.rep(redis.call('get', KEYS[1]), 2)";
            for (words, expected) in [
                (&["INCR", "visits"][..], format!(":{count}")),
                (&["SET", &key, &value], "+OK".to_owned()),
                (&["EVAL", script, "1", &key], value.repeat(2)),
                (&["RPUSH", "all", &value], format!(":{count}")),
            ] {
                let found = self.send(words)?;
                ensure!(found == expected, "round {count}: {words:?} was answered by {found:?}");
            }
        }
        Ok(count)
    }
}

fn connect(socket: &Path, mut has_ended: impl FnMut() -> Result<bool>) -> Result<Client> {
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return Ok(Client(BufReader::new(stream))),
            Err(_) if !has_ended()? => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => bail!("the server has ended before it listened: {error}"),
        }
    }
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn a_data_base_in_memory_loses_nothing_while_it_moves() -> Result<()> {
    const LEAST: u64 = 8;

    let program = built(REDIS)?.join("src/redis-server");
    let place = tempfile::tempdir()?;
    let socket = place.path().join("redis.sock");
    let mut server = hopping(&program, Every::Time("250ms"), seed())?
        .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
        .arg(&socket)
        .arg("--dir")
        .arg(place.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut client = connect(&socket, || Ok(server.try_wait()?.is_some()))?;
    let enough = AtomicBool::new(false);
    let count = std::thread::scope(|scope| -> Result<u64> {
        let worker = scope.spawn(|| client.work(&enough));
        // Redis's own client beside it, with connections that come and go.
        let benchmark = scope.spawn(|| -> Result<u64> {
            let mut runs = 0;
            while !enough.load(Ordering::Relaxed) {
                let mut command = Command::new("redis-benchmark");
                command.args([
                    "-n",
                    "300",
                    "-c",
                    "8",
                    "-P",
                    "4",
                    "-q",
                    "-t",
                    "set,get,lpush,zadd,lrange_100",
                ]);
                let output = command.arg("-s").arg(&socket).output().context("cannot run redis-benchmark")?;
                ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                runs += 1;
            }
            Ok(runs)
        });
        let lost = || worker.is_finished() || benchmark.is_finished();
        let moved = wait_for_changes(server.id(), "redis-server", LEAST, lost);
        enough.store(true, Ordering::Relaxed);
        let count = worker.join().map_err(|_| anyhow::anyhow!("the client panicked"))??;
        let runs = benchmark.join().map_err(|_| anyhow::anyhow!("the benchmark panicked"))??;
        moved?;
        println!("{count} rounds, {runs} runs of redis-benchmark");
        Ok(count)
    })?;
    ensure!(client.send(&["GET", "visits"])? == count.to_string(), "the last count is another");
    ensure!(client.send(&["LLEN", "all"])? == format!(":{count}"), "the list has another length");
    client.0.get_mut().write_all(b"SHUTDOWN NOSAVE\r\n")?;
    let mut output = server.wait_with_output()?;
    ensure!(output.status.success(), "it ended with {}", output.status);
    let moved = changes(&mut output)?;
    ensure!(moved >= LEAST, "it moved {moved} times only");
    println!("{moved} changes of the set");
    Ok(())
}

/// Of Redis' own tests those of one server and of replicas, as far as they have been tried. `unit/other` is left out since a
/// process cannot change its title: /proc tells the arguments that it was started with.
const SUITE: [&str; 27] = [
    "unit/dump",
    "unit/auth",
    "unit/protocol",
    "unit/keyspace",
    "unit/scan",
    "unit/info",
    "unit/expire",
    "unit/multi",
    "unit/pubsub",
    "unit/bitops",
    "unit/scripting",
    "unit/functions",
    "unit/sort",
    "unit/acl",
    "unit/slowlog",
    "unit/hyperloglog",
    "unit/geo",
    "unit/type/incr",
    "unit/type/string",
    "unit/type/list",
    "unit/type/set",
    "unit/type/hash",
    "unit/type/zset",
    "unit/type/stream",
    "integration/rdb",
    "integration/aof",
    "integration/block-repl",
];

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn its_own_tests_pass() -> Result<()> {
    let directory = built(REDIS)?;
    let place = tempfile::tempdir()?;
    let (tests, source) = (directory.join("tests"), directory.join("src"));
    run(Command::new("cp")
        .arg("-a")
        .args([&tests, &directory.join("runtest"), &directory.join("redis.conf")])
        .arg(place.path()))?;
    let programs = place.path().join("src");
    std::fs::create_dir(&programs)?;
    for name in ["redis-server", "redis-server.x86_64", "redis-server.aarch64"] {
        std::fs::copy(source.join(name), programs.join(name)).with_context(|| name.to_owned())?;
    }
    // By these names it checks files.
    for name in ["redis-check-aof", "redis-check-rdb"] {
        std::os::unix::fs::symlink("redis-server", programs.join(name))?;
    }
    // Its clients are the machine's own.
    for name in ["redis-cli", "redis-benchmark"] {
        std::os::unix::fs::symlink(Path::new("/usr/bin").join(name), programs.join(name))?;
    }
    let mut command = Command::new("./runtest");
    command.current_dir(place.path()).args(["--clients", "2"]).stdin(Stdio::null());
    let said = run(command.args(SUITE.iter().flat_map(|test| ["--single", test])))?;
    ensure!(said.contains("All tests passed without errors!"), "{said}");
    Ok(())
}
