//! Builds `godwit-exec`, which the engine carries and brings into containers: see `monitor/main.rs`.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=monitor/main.rs");
    println!("cargo:rerun-if-changed=build.rs");
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"));
    let program = Path::new(&variable("OUT_DIR")).join("godwit-exec");
    let mut rustc = Command::new(variable("RUSTC"));
    rustc.args([
        "monitor/main.rs",
        "--crate-name",
        "godwit_exec",
        "--crate-type",
        "bin",
        "--edition",
        "2024",
    ]);
    rustc.args(["--target", &variable("TARGET"), "-o"]).arg(&program);
    // The same on every machine, and as small as it can be: it crosses with each service that has one.
    rustc.args([
        "-C",
        "panic=abort",
        "-C",
        "opt-level=s",
        "-C",
        "strip=symbols",
        "-C",
        "relocation-model=static",
    ]);
    rustc.args(["-C", "target-feature=+crt-static", "-C", "codegen-units=1"]);
    for argument in ["-nostartfiles", "-nostdlib", "-static", "-Wl,--build-id=none", "-Wl,-z,noexecstack"] {
        rustc.arg("-C").arg(format!("link-arg={argument}"));
    }
    if let Ok(linker) = std::env::var("RUSTC_LINKER") {
        rustc.arg("-C").arg(format!("linker={linker}"));
    }
    let status = rustc.status().unwrap_or_else(|error| panic!("rustc does not start: {error}"));
    assert!(status.success(), "monitor/main.rs cannot be compiled: {status}");
}
