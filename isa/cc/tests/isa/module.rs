//! The neutral module that `--save-module` keeps, and executables that are made from it.

use crate::common::{SETS, cc, executable, refuse, scratch, succeed, write};
use godwit_crossing::{Binding, Executable};
use std::path::Path;
use std::process::{Command, Stdio};

/// With what both sets have otherwise: constants in a pool, a jump table, and binary128.
const SOURCE: &str = "#include <stdio.h>\n\
    static int f(int n) { switch (n % 6) { case 0: return 7; case 1: return 91; case 2: return n * n;\n\
    case 3: return 5; case 4: return -n; default: return 3; } }\n\
    int main(int n, char **a) { long double x = 1.5L * n; int s = 0; for (int i = 0; i < 40; i++) s += f(i * n);\n\
    printf(\"%d %.3Lf %s\\n\", s, x / 3.25L, a[1]); return 0; }\n";

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The 64 digits behind a word of the index.
fn said(index: &str, key: &str) -> String {
    let begins = format!("# {key}: ");
    let digits = index.lines().find_map(|line| line.strip_prefix(&begins));
    digits.unwrap_or_else(|| panic!("no {key}: {index}")).to_owned()
}

fn bytes(hex: &str) -> [u8; 32] {
    let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16);
    std::array::from_fn(|at| byte(at).unwrap_or_else(|error| panic!("{hex}: {error}")))
}

#[test]
fn the_executable_that_is_made_of_a_module_is_byte_for_byte_the_one_that_was_made_at_once() {
    let directory = scratch();
    write(directory.path(), "p.c", SOURCE);
    succeed(cc(directory.path()).args(["-O2", "--save-module", "p.c", "-o", "p"]));
    let program = directory.path().join("p");
    let index = String::from_utf8_lossy(&read(&program)).into_owned();
    assert!(index.contains("# module: p.module\n"), "{index}");
    for (set, runner) in SETS {
        let made = format!("made.{set}");
        succeed(cc(directory.path()).args(["--from-module", "p.module", "--set", set, "-o", &made]));
        let at_once = read(&program.with_extension(set));
        assert!(read(&directory.path().join(&made)) == at_once, "they differ on {set}");
        let run = executable(&directory.path().join("made"), set, runner).arg("x").output();
        let run = run.unwrap_or_else(|error| panic!("{error}"));
        assert!(run.status.success() && run.stdout.ends_with(b" x\n"), "{run:?}");

        // Through pipes.
        let module = std::fs::File::open(program.with_extension("module"));
        let mut piped = cc(directory.path());
        piped.args(["-o", "-", "--set", set, "--from-module", "-"]);
        piped.stdin(module.unwrap_or_else(|error| panic!("{error}"))).stderr(Stdio::inherit());
        let piped = piped.output().unwrap_or_else(|error| panic!("{error}"));
        assert!(piped.status.success() && piped.stdout == at_once, "they differ on {set} through pipes");

        let identity = Executable::decode(&at_once).map(|executable| executable.identity);
        let sum = succeed(Command::new("sha256sum").arg(program.with_extension("module")));
        let (layout, toolchain) = (bytes(&said(&index, "layout")), bytes(&said(&index, "toolchain")));
        let binding = Binding { module: bytes(&sum), layout, toolchain };
        assert_eq!(identity.ok(), Some(binding.identity()));
        assert_eq!(bytes(&said(&index, "identity")), binding.identity());
    }
    // Without being asked it keeps none, and a probe has none.
    write(directory.path(), "q.c", SOURCE);
    succeed(cc(directory.path()).args(["-O2", "q.c", "-o", "q"]));
    write(directory.path(), "conftest.c", SOURCE);
    succeed(cc(directory.path()).args(["--save-module", "conftest.c", "-o", "conftest"]));
    assert!(
        !directory.path().join("q.module").exists() && !directory.path().join("conftest.module").exists()
    );
}

#[test]
fn what_is_no_module_is_refused_by_name() {
    let directory = scratch();
    write(directory.path(), "text", "no module");
    write(directory.path(), "short", "BC");
    for file in ["text", "short"] {
        let words = ["--from-module", file, "--set", "aarch64", "-o", "made"];
        let refused = refuse(cc(directory.path()).args(words));
        assert!(refused.contains(&format!("{file} is no neutral module")), "{refused}");
    }
    std::fs::write(directory.path().join("bitcode"), b"BC\xc0\xde and nothing of it")
        .unwrap_or_else(|error| panic!("{error}"));
    let refused =
        refuse(cc(directory.path()).args(["--from-module", "bitcode", "--set", "x86_64", "-o", "made"]));
    assert!(refused.contains("llc failed"), "{refused}");
    let missing =
        refuse(cc(directory.path()).args(["--from-module", "none", "--set", "x86_64", "-o", "made"]));
    assert!(missing.contains("cannot read none"), "{missing}");
    let other =
        refuse(cc(directory.path()).args(["--from-module", "text", "--set", "riscv64", "-o", "made"]));
    assert!(other.contains("--set riscv64: programs are made for"), "{other}");
    assert!(!directory.path().join("made").exists());
    let plain = refuse(cc(directory.path()).args(["--plain", "--save-module", "text", "-o", "made"]));
    assert!(plain.contains("has no neutral module"), "{plain}");
}
