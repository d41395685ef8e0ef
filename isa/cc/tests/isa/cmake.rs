//! A project of CMake: its probes of the compiler, a static library, threads, tests and an installation.

use std::path::Path;
use std::process::Command;

use crate::common::{CC, SETS, executable, home, scratch, succeed, write};

const LISTS: &str = r#"
cmake_minimum_required(VERSION 3.18)
project(counting C)
include(CheckFunctionExists)
include(CheckTypeSize)
include(CheckIncludeFile)
check_function_exists(strlcpy HAVE_STRLCPY)
check_function_exists(no_such_function HAVE_NO_SUCH_FUNCTION)
check_include_file(sys/epoll.h HAVE_SYS_EPOLL_H)
check_type_size("long double" LONG_DOUBLE)
find_package(Threads REQUIRED)
add_library(count STATIC count.c)
target_include_directories(count PUBLIC ${CMAKE_SOURCE_DIR})
target_compile_definitions(count PRIVATE LONG_DOUBLE=${LONG_DOUBLE})
foreach(has STRLCPY NO_SUCH_FUNCTION SYS_EPOLL_H)
    target_compile_definitions(count PRIVATE HAS_${has}=$<BOOL:${HAVE_${has}}>)
endforeach()
add_executable(counting main.c)
target_link_libraries(counting PRIVATE count Threads::Threads m)
enable_testing()
add_test(NAME counts COMMAND counting 3)
set_tests_properties(counts PROPERTIES PASS_REGULAR_EXPRESSION "3 threads, 30000")
"#;

const COUNT_H: &str = "void count(int threads);\n";

const COUNT_C: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include "count.h"
static int total;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static void *work(void *unused) {
    for (int i = 0; i < 10000; i++) {
        pthread_mutex_lock(&mutex);
        total++;
        pthread_mutex_unlock(&mutex);
    }
    return unused;
}
void count(int threads) {
    pthread_t all[8];
    for (int i = 0; i < threads; i++)
        pthread_create(&all[i], 0, work, 0);
    for (int i = 0; i < threads; i++)
        pthread_join(all[i], 0);
    printf("%d threads, %d; %d %d %d %d\n", threads, total, LONG_DOUBLE, HAS_STRLCPY, HAS_NO_SUCH_FUNCTION, HAS_SYS_EPOLL_H);
}
"#;

const MAIN_C: &str = "#include <stdlib.h>\n#include \"count.h\"\nint main(int n, char **a) { count(n > 1 ? atoi(a[1]) : 1); }\n";

fn cmake(directory: &Path) -> Command {
    let mut command = Command::new("cmake");
    command.current_dir(directory);
    command
}

#[test]
fn a_project_of_cmake_is_configured_built_and_tested() {
    home();
    let directory = scratch();
    for (name, contents) in
        [("CMakeLists.txt", LISTS), ("count.h", COUNT_H), ("count.c", COUNT_C), ("main.c", MAIN_C)]
    {
        write(directory.path(), name, contents);
    }
    let beside = |name: &str| Path::new(CC).with_file_name(name).display().to_string();
    let configured = succeed(
        cmake(directory.path())
            .args(["-B", "out", "-S", ".", "-DCMAKE_BUILD_TYPE=Release"])
            .arg(format!("-DCMAKE_C_COMPILER={CC}"))
            .arg(format!("-DCMAKE_AR={}", beside("godwit-ar")))
            .arg(format!("-DCMAKE_RANLIB={}", beside("godwit-ranlib"))),
    );
    assert!(configured.contains("Found Threads: TRUE"), "{configured}");
    succeed(cmake(directory.path()).args(["--build", "out"]));
    // Captured in place every few polls as well.
    for polls in ["0", "50"] {
        let mut tests = Command::new("ctest");
        tests.current_dir(directory.path().join("out")).arg("--output-on-failure");
        let tested = succeed(if polls == "0" { &mut tests } else { tests.env("GODWIT_STATE_TURN", polls) });
        assert!(tested.contains("100% tests passed, 0 tests failed out of 1"), "{tested}");
    }
    for (set, runner) in SETS {
        let said = succeed(executable(&directory.path().join("out/counting"), set, runner).arg("8"));
        assert_eq!(said, "8 threads, 80000; 16 1 0 1\n", "on {set}");
    }
}
