//! C++: which sources are taken for it, what is linked, and plain executables, which have exceptions without an early return.

use std::path::Path;
use std::process::Command;

use crate::common::{CC, SETS, cc, executable, home, refuse, scratch, succeed, write};

const THROWN: &str = r#"
#include <cstdlib>
#include <iostream>
#include <stdexcept>
#include <string>
extern "C" int calls_back(int (*function)(int), int value);
struct Said {
    ~Said() { std::cout << "cleaned, " << std::uncaught_exceptions() << " on the way\n"; }
};
static int fall(int n) {
    Said said;
    return n == 0 ? throw std::runtime_error("the bottom") : fall(n - 1) + 1;
}
int main(int count, char **) {
    try {
        return fall(2);
    } catch (const std::exception &error) {
        std::cout << error.what() << std::endl;
    }
    std::set_terminate([] {
        std::cout << "C lets nothing through" << std::endl;
        std::_Exit(7);
    });
    try {
        return calls_back([](int value) -> int { throw value; }, count);
    } catch (int) {
        std::cout << "wrong: came through C" << std::endl;
    }
}
"#;

const C: &str =
    "int calls_back(int (*function)(int), int value) { int class = function(value); return class + 1; }\n";

const SAID: &str = "cleaned, 1 on the way\ncleaned, 1 on the way\ncleaned, 1 on the way\nthe bottom\nC lets nothing through\n";

fn cxx(directory: &Path) -> Command {
    home();
    let mut command = Command::new(Path::new(CC).with_file_name("godwit-cxx"));
    command.current_dir(directory);
    command
}

#[test]
fn exceptions_go_through_c_plus_plus_and_end_at_c_in_plain_executables_and_in_those_that_move() {
    let directory = scratch();
    let path = directory.path();
    write(path, "thrown.cc", THROWN);
    write(path, "back.c", C);
    succeed(cc(path).args(["-O2", "-c", "back.c"]));
    // By either driver, with the library or by its name.
    succeed(cxx(path).args(["-O2", "--plain", "thrown.cc", "back.o", "-o", "plain"]));
    succeed(cc(path).args(["-O2", "thrown.cc", "back.o", "-lstdc++", "-o", "moves"]));
    for name in ["plain", "moves"] {
        for (set, runner) in SETS {
            let output = executable(&path.join(name), set, runner).output();
            let output = output.unwrap_or_else(|error| panic!("{name} does not start on {set}: {error}"));
            assert_eq!(String::from_utf8_lossy(&output.stdout), SAID, "{name} on {set}");
            assert_eq!(output.status.code(), Some(7), "{name} on {set}");
        }
    }
    // What a configure script runs.
    succeed(cxx(path).args(["thrown.cc", "back.o", "-o", "conftest"]));
    let output = Command::new(path.join("conftest")).output();
    let output = output.unwrap_or_else(|error| panic!("conftest does not start: {error}"));
    assert_eq!(String::from_utf8_lossy(&output.stdout), SAID);
}

#[test]
fn the_compiler_of_c_plus_plus_takes_all_sources_for_it_and_options_mean_what_they_say() {
    let directory = scratch();
    let path = directory.path();
    write(
        path,
        "which.c",
        "#ifndef __cplusplus\n#error C\n#endif\n#ifdef __cpp_exceptions\n#error exceptions\n#endif\nint x;\n",
    );
    let said = refuse(cc(path).args(["-c", "which.c"]));
    assert!(said.contains("error: C"), "{said}");
    let said = refuse(cxx(path).args(["-c", "which.c"]));
    assert!(said.contains("error: exceptions"), "{said}");
    succeed(cxx(path).args(["-fno-exceptions", "-c", "which.c"]));
    succeed(cc(path).args(["-x", "c++", "-fno-exceptions", "-c", "which.c"]));
    let version = succeed(cxx(path).arg("--version"));
    assert!(version.starts_with("godwit-cxx "), "{version}");
}

#[test]
fn a_project_of_cmake_in_c_plus_plus_is_configured_and_built() {
    let directory = scratch();
    let path = directory.path();
    let lists = "cmake_minimum_required(VERSION 3.18)\nproject(both C CXX)\nset(CMAKE_CXX_STANDARD 20)\n\
                 find_package(Threads REQUIRED)\nadd_executable(both main.cpp)\n\
                 target_link_libraries(both PRIVATE Threads::Threads)\n";
    let source = "#include <cstdio>\n#include <thread>\n\
                  int main() { std::thread([] { std::puts(\"a thread\"); }).join(); }\n";
    write(path, "CMakeLists.txt", lists);
    write(path, "main.cpp", source);
    let beside = |name: &str| Path::new(CC).with_file_name(name).display().to_string();
    let configure = [
        format!("-DCMAKE_C_COMPILER={CC}"),
        format!("-DCMAKE_CXX_COMPILER={}", beside("godwit-cxx")),
        format!("-DCMAKE_AR={}", beside("godwit-ar")),
        format!("-DCMAKE_RANLIB={}", beside("godwit-ranlib")),
    ];
    succeed(Command::new("cmake").current_dir(path).args(["-B", "out", "-S", "."]).args(configure));
    succeed(Command::new("cmake").current_dir(path).args(["--build", "out"]));
    for (set, runner) in SETS {
        assert_eq!(succeed(&mut executable(&path.join("out/both"), set, runner)), "a thread\n", "on {set}");
    }
}
