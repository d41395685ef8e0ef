//! Programs from the distribution's source packages, unmodified: built as their manuals say with
//! `CC=godwit-cc`, and run on both sets. Slow, so `make test-isa-full` runs them.

use crate::common::{CC, SETS, executable, home, isa, scratch, succeed, write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Unpacks a package's upstream archive, and gives its top directory.
fn unpack(package: &str, into: &Path) -> PathBuf {
    let cache = std::env::var_os("GODWIT_CACHE").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| "/root".into())).join(".cache/godwit"),
        PathBuf::from,
    );
    let archive = succeed(Command::new(isa().join("libc/fetch")).arg(cache.join("sources")).arg(package));
    succeed(Command::new("tar").arg("-C").arg(into).arg("-xf").arg(archive.trim()));
    let mut directories: Vec<PathBuf> = std::fs::read_dir(into)
        .unwrap_or_else(|error| panic!("{}: {error}", into.display()))
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.is_dir())
        .collect();
    assert_eq!(directories.len(), 1, "{package} unpacks to {directories:?}");
    directories.remove(0)
}

/// A build command with the drivers in the place of the machine's own.
fn build(directory: &Path, program: &str, arguments: &[&str], options: &str) -> String {
    home();
    let tool = |name: &str| Path::new(CC).with_file_name(name).display().to_string();
    succeed(
        Command::new(program)
            .args(arguments)
            .current_dir(directory)
            .env("CC", format!("{CC} {options}").trim())
            .env("AR", tool("godwit-ar"))
            .env("RANLIB", tool("godwit-ranlib"))
            .env("NM", "llvm-nm-19"),
    )
}

/// The output of a program on each set, which must be the same.
fn same_on_both(program: &Path, arguments: &[&str], directory: &Path) -> String {
    let outputs = SETS.map(|(set, runner)| {
        succeed(executable(program, set, runner).args(arguments).current_dir(directory))
    });
    assert_eq!(outputs[0], outputs[1], "{} {arguments:?} on the two sets", program.display());
    let [output, _] = outputs;
    output
}

/// Something to compress: the build's own sources, a few hundred kilobytes.
fn corpus(directory: &Path) -> PathBuf {
    let command = format!("cat {}/cc/src/*.rs {}/cc/tests/programs/*.c", isa().display(), isa().display());
    write(directory, "corpus", &succeed(Command::new("sh").args(["-c", &command])).repeat(4))
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn gzip_passes_its_own_tests_and_reads_what_the_other_set_wrote() {
    let scratch = scratch();
    let directory = unpack("gzip", scratch.path());
    build(&directory, "./configure", &[], "--plain");
    build(&directory, "make", &["-j2"], "--plain");
    let tests = build(&directory, "make", &["check"], "--plain");
    assert!(
        tests.contains("# FAIL:  0") && tests.contains("# ERROR: 0") && !tests.contains("# PASS:  0"),
        "{tests}"
    );
    corpus(scratch.path());
    let gzip = directory.join("gzip");
    for ((writer, write_with), (reader, read_with)) in [(SETS[0], SETS[1]), (SETS[1], SETS[0])] {
        succeed(
            executable(&gzip, writer, write_with)
                .args(["-9", "-k", "-f", "corpus"])
                .current_dir(scratch.path()),
        );
        let text = succeed(
            executable(&gzip, reader, read_with).args(["-dc", "corpus.gz"]).current_dir(scratch.path()),
        );
        assert!(
            text == std::fs::read_to_string(scratch.path().join("corpus")).unwrap_or_default(),
            "{writer} to {reader}"
        );
    }
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn bzip2_passes_its_own_tests_and_writes_the_same_on_both_sets() {
    let scratch = scratch();
    let directory = unpack("bzip2", scratch.path());
    // Its makefile sets the tools by itself.
    let tool = |name: &str| Path::new(CC).with_file_name(name).display().to_string();
    let (cc, ar, ranlib) = (
        format!("CC={CC} --plain"),
        format!("AR={}", tool("godwit-ar")),
        format!("RANLIB={}", tool("godwit-ranlib")),
    );
    // The default target compares what was packed and unpacked with the samples that come along.
    build(&directory, "make", &[&cc, &ar, &ranlib], "");
    corpus(scratch.path());
    let command = |set: &str, runner: &[&str]| {
        let mut command = executable(&directory.join("bzip2"), set, runner);
        command.args(["-k", "-f", "corpus"]).current_dir(scratch.path());
        succeed(&mut command);
        std::fs::read(scratch.path().join("corpus.bz2")).unwrap_or_default()
    };
    let [first, second] = SETS.map(|(set, runner)| command(set, runner));
    assert!(!first.is_empty() && first == second, "{} and {} bytes", first.len(), second.len());
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn zlib_passes_its_own_tests_on_both_sets() {
    let scratch = scratch();
    let directory = unpack("zlib", scratch.path());
    build(&directory, "./configure", &["--static"], "--plain");
    build(&directory, "make", &["-j2"], "--plain");
    let tests = build(&directory, "make", &["test"], "--plain");
    assert!(tests.contains("*** zlib test OK ***"), "{tests}");
    let output = same_on_both(&directory.join("example"), &["foo.gz"], scratch.path());
    assert!(output.contains("inflate(): hello, hello!"), "{output}");
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn lua_says_the_same_on_both_sets() {
    let scratch = scratch();
    let directory = unpack("lua5.4", scratch.path());
    let tool = |name: &str| Path::new(CC).with_file_name(name).display().to_string();
    // POSIX without loadable modules.
    let cc = format!("CC={CC} --plain");
    let ar = format!("AR={} rcu", tool("godwit-ar"));
    let ranlib = format!("RANLIB={}", tool("godwit-ranlib"));
    build(&directory, "make", &["generic", "MYCFLAGS=-DLUA_USE_POSIX", &cc, &ar, &ranlib], "");
    write(
        scratch.path(),
        "test.lua",
        "local t = {} for i = 1, 20000 do t[i] = (i * 7919) % 10007 end table.sort(t, function(a, b) return a > b end)\n\
         print(t[1], t[20000], #t)\n\
         local co = coroutine.wrap(function(a) for i = 1, 3 do a = coroutine.yield(a * i) end return 'end' end)\n\
         print(co(2), co(3), co(4), co(5))\n\
         print(pcall(error, {code = 7}), select('#', pcall(string.rep)))\n\
         print(string.format('%.17g %a %5.1f %q', 0.1, 1/3, 2.25, 'a\\nb'), 7 // -2, 7 % -2, 7.5 // -2, 2^53 | 0)\n\
         print(('x'):rep(3, ','), ('key=value'):match('(%w+)=(%w+)'), #string.pack('i4d', 1, 2.5))\n\
         print(os.time{year=2024, month=2, day=29, hour=12} % 60, math.tointeger(3.0), math.maxinteger + 1 == math.mininteger)\n\
         local s = 0 for i = 1, 1e6 do s = s + math.sin(i) end print(s)\n",
    );
    let output = same_on_both(&directory.join("src/lua"), &["test.lua"], scratch.path());
    assert!(output.contains("10006\t0\t20000") && output.contains("2\t6\t12\tend"), "{output}");
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn sqlite_writes_the_same_database_on_both_sets() {
    let scratch = scratch();
    let directory = unpack("sqlite3", scratch.path());
    build(
        &directory,
        "./configure",
        &["--disable-shared", "--disable-tcl", "--disable-load-extension", "--disable-readline"],
        "--plain",
    );
    // What makes the sources runs on the machine.
    build(&directory, "make", &["speedtest1", "BCC=cc"], "--plain");
    let databases = SETS.map(|(set, runner)| {
        let output = succeed(
            executable(&directory.join("speedtest1"), set, runner)
                .args(["--size", "5", "--verify", &format!("{set}.db")])
                .current_dir(scratch.path()),
        );
        let hash = output.lines().find(|line| line.contains("Verification Hash")).map(str::to_owned);
        assert!(hash.is_some(), "{output}");
        (hash, std::fs::read(scratch.path().join(format!("{set}.db"))).unwrap_or_default())
    });
    assert!(databases[0] == databases[1] && !databases[0].1.is_empty());
}
