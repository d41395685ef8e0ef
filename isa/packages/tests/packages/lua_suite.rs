//! Lua's own test suite, whole: interpreters that it starts are captured as it is. Debian's source package lacks it;
//! lupa's brings Lua 5.4.4 with its tests, the release that Debian has.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, Result, ensure};
use godwit_isa_packages::base::LUA;
use godwit_isa_packages::package::built;
use godwit_isa_packages::sdist::Sdist;
use godwit_isa_packages::tools::run;
use godwit_isa_packages::travel::{Every, SETS, changes, hopping, turning, whole};

use crate::support::seed;

const LUPA: Sdist = Sdist {
    name: "lupa",
    version: "2.0",
    sha256: "ad3fef486be7adddd349fe9a9c393789061312cf98ebc533b489be34f484cb79",
};

/// Before the suite begins: musl takes every name of a locale, and has one locale.
const BEFORE: &str = r#"
    local set = os.setlocale
    os.setlocale = function (name, ...)
        if name and name ~= "" and name ~= "C" then return nil end
        return set(name, ...)
    end"#;

/// What is changed in the tests of the interpreter, each from one text to another: first what is said, then what takes
/// its place.
const CHANGES: [[&str; 2]; 2] = [
    // The answer to a prompt is its input, which GNU Readline would repeat. Without it only the prompts are there.
    ["1 --\n2a = 2\n3\n", "123"],
    // A script that runs beside the shell must not write before the shell has told its process id.
    [
        r#"'%s -e "%s" & echo $!'"#,
        r#"'gate=$(mktemp -u); mkfifo $gate; (read go <$gate; exec %s -e "%s") & echo $!; echo >$gate; rm $gate'"#,
    ],
];

struct Suite {
    lua: PathBuf,
    plain: PathBuf,
}

impl Suite {
    fn new() -> Result<Self> {
        let directory = built(LUA)?;
        Ok(Self { lua: directory.join("src/lua"), plain: directory.join("plain/lua") })
    }

    /// Its scripts, in a directory of one run's own.
    fn unpacked() -> Result<tempfile::TempDir> {
        let place = tempfile::tempdir()?;
        let tests = "lupa-2.0/third-party/lua54/testes";
        run(Command::new("tar")
            .arg("-C")
            .arg(place.path())
            .arg("--strip-components=4")
            .arg("-xf")
            .arg(LUPA.fetched()?)
            .arg(tests))?;
        std::fs::write(place.path().join("before.lua"), BEFORE)?;
        let interpreter = place.path().join("main.lua");
        let mut text = std::fs::read_to_string(&interpreter)?;
        for [from, to] in CHANGES {
            ensure!(text.matches(from).count() == 1, "main.lua does not have {from:?} where it was expected");
            text = text.replace(from, to);
        }
        std::fs::write(interpreter, text)?;
        Ok(place)
    }

    /// Runs it; it says so when it has come to its end.
    fn passes(mut command: Command, what: &str) -> Result<Output> {
        let place = Self::unpacked()?;
        command.args(["-W", "-e", "dofile 'before.lua'", "all.lua"]);
        let output = with_pipe(&mut command, place.path())?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(
            output.status.success() && said.contains("\nfinal OK !!!\n"),
            "{what}: {}: {}\n{}",
            output.status,
            tail(&said),
            tail(&String::from_utf8_lossy(&output.stderr))
        );
        Ok(output)
    }
}

/// One of its tests wants a standard input in which nothing can be sought.
fn with_pipe(command: &mut Command, directory: &Path) -> Result<Output> {
    let mut child = command
        .current_dir(directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {command:?}"))?;
    drop(child.stdin.take());
    Ok(child.wait_with_output()?)
}

fn tail(text: &str) -> &str {
    let begin = text.char_indices().rev().nth(2000).map_or(0, |(at, _)| at);
    &text[begin..]
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn lua_passes_its_own_tests_on_both_sets_and_when_it_is_captured_in_place() -> Result<()> {
    let suite = Suite::new()?;
    let mut random = fastrand::Rng::with_seed(seed());
    Suite::passes(whole(&suite.plain, SETS[0])?, "the plain build")?;
    for set in SETS {
        Suite::passes(whole(&suite.lua, set)?, &format!("whole on {set}"))?;
    }
    for (set, most) in [(SETS[0], 50), (SETS[0], 1_000), (SETS[0], 20_000), (SETS[1], 20_000)] {
        let polls = random.u64(most / 2 + 1..=most);
        let what = format!("captured every {polls} polls on {set}");
        Suite::passes(turning(&suite.lua, set, polls)?, &what)?;
    }
    Ok(())
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn lua_passes_its_own_tests_on_journeys() -> Result<()> {
    let suite = Suite::new()?;
    let seed = seed();
    for every in [Every::Polls(3_000_000), Every::Time("100ms")] {
        let what = format!("on a journey, {every:?}");
        let mut output = Suite::passes(hopping(&suite.lua, every, seed)?, &what)?;
        let changes = changes(&mut output)?;
        println!("{what}: {changes} changes");
        ensure!(changes >= 10, "{what}: it moved {changes} times only");
    }
    Ok(())
}
