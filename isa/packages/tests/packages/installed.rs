//! The tool chain installed under a prefix: all that it needs is found from where it is.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use godwit_isa_packages::tools::{isa, programs, run};

const SOURCE: &str = "#include <stdio.h>\n\
    int main(void) {\n\
        unsigned sum = 0;\n\
        for (unsigned i = 0; i < 50000; i++) sum = sum * 31 + i;\n\
        printf(\"sum %u\\n\", sum);\n\
        return 0;\n\
    }\n";

const SOURCE_IN_CXX: &str = "#include <iostream>\n\
    #include <stdexcept>\n\
    int main() {\n\
        unsigned sum = 0;\n\
        for (unsigned i = 0; i < 3000; i++)\n\
            try { if (i % 3 == 0) throw std::runtime_error(std::to_string(i)); sum += i; }\n\
            catch (const std::exception &error) { sum = sum * 31 + error.what()[0]; }\n\
        std::cout << \"sum \" << sum << std::endl;\n\
    }\n";

fn files(directory: &Path) -> Result<String> {
    run(Command::new("find").arg(directory).args(["-type", "f"]))
}

#[test]
fn what_is_installed_under_a_prefix_builds_and_moves_programs() -> Result<()> {
    let place = tempfile::tempdir()?;
    let prefix = place.path().join("usr/local");
    let built = programs()?;
    run(Command::new(isa().join("install")).arg(built).arg(built.with_file_name("isa")).arg(&prefix))?;
    // Nothing of it may lead back to where it was built.
    for link in run(Command::new("find").arg(&prefix).args(["-type", "l"]))?.lines() {
        let target = std::fs::canonicalize(link)?;
        ensure!(target.starts_with(prefix.canonicalize()?), "{link} leads to {}", target.display());
    }

    let bin = prefix.join("bin");
    let work = place.path().join("work");
    std::fs::create_dir(&work)?;
    std::fs::write(work.join("sum.c"), SOURCE)?;
    // A name that is looked for in PATH, as a user types it.
    let path = format!("{}:{}", bin.display(), std::env::var("PATH")?);
    let tool = |name: &str, arguments: &[&str]| {
        run(Command::new(name).args(arguments).current_dir(&work).env("PATH", &path).env_remove("GODWIT_ISA"))
    };
    tool("godwit-cc", &["-O2", "-c", "sum.c"])?;
    tool("godwit-ar", &["rc", "libsum.a", "sum.o"])?;
    tool("godwit-ranlib", &["libsum.a"])?;
    tool("godwit-ld", &["-o", "sum", "sum.o"])?;
    let expected = tool("./sum", &[])?;
    ensure!(expected.starts_with("sum "), "{expected}");
    let found = tool("godwit-state", &["hop", "--every-polls", "9000", "./sum"])?;
    ensure!(found == expected, "{found} instead of {expected}");
    std::fs::write(work.join("thrown.cc"), SOURCE_IN_CXX)?;
    tool("godwit-cxx", &["-O2", "-o", "thrown", "thrown.cc"])?;
    let expected = tool("./thrown", &[])?;
    ensure!(expected.starts_with("sum "), "{expected}");
    let found = tool("godwit-state", &["hop", "--every-polls", "500", "./thrown"])?;
    ensure!(found == expected, "{found} instead of {expected}");
    ensure!(prefix.join("share/man/man1/godwit-state.1").exists(), "the manual is missing");

    run(Command::new(isa().join("install")).arg("--remove").arg(&prefix))?;
    let left = files(&prefix)?;
    ensure!(left.is_empty(), "uninstall leaves {left}");
    Ok(())
}
