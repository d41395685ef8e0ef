//! The drivers' command lines: what a build asks of `cc`, and what is refused and how.

use crate::common::{SETS, cc, executable, isa, refuse, scratch, succeed, write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

const HELLO: &str =
    "#include <stdio.h>\nint main(int n, char **a) { printf(\"%s %d\\n\", a[0], n); return 3; }\n";

fn other_tool(name: &str) -> Command {
    Command::new(Path::new(crate::common::CC).with_file_name(name))
}

/// What this process denies the files that it makes.
fn umask() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    line.and_then(|octal| u32::from_str_radix(octal.trim(), 8).ok()).unwrap_or_else(|| panic!("{status}"))
}

/// Runs a program and gives its output and exit code.
fn outcome(command: &mut Command) -> (String, Option<i32>) {
    match command.output() {
        Ok(output) => (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.code()),
        Err(error) => panic!("{command:?} does not start: {error}"),
    }
}

#[test]
fn a_program_has_an_index_and_an_executable_for_each_set() {
    let directory = scratch();
    write(directory.path(), "hello.c", HELLO);
    succeed(cc(directory.path()).args(["--plain", "hello.c", "-o", "hello"]));
    let program = directory.path().join("hello");
    for (set, runner) in SETS {
        let (output, code) = outcome(executable(&program, set, runner).args(["x", "y"]));
        assert_eq!((output.ends_with(&format!("hello.{set} 3\n")), code), (true, Some(3)), "{output}");
    }
    // The index starts the one for this machine under its own name, also through a link elsewhere.
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(&program, &link).unwrap_or_else(|error| panic!("{error}"));
    for name in [&program, &link] {
        assert_eq!(outcome(&mut Command::new(name)), (format!("{} 1\n", name.display()), Some(3)));
    }
    let index = std::fs::read_to_string(&program).unwrap_or_default();
    assert!(index.contains("# executable: aarch64 hello.aarch64\n"), "{index}");
}

/// What ends where the smallest address spaces end can go on everywhere.
#[test]
fn a_program_has_its_arguments_in_one_piece_and_no_stack_of_the_kernels() {
    let directory = scratch();
    let source = isa().join("cc/tests/programs/arguments.c");
    succeed(cc(directory.path()).args(["-O2", "-Wall", "-Werror", "-o", "arguments"]).arg(source));
    let program = directory.path().join("arguments");
    // QEMU's user mode does not let a program tell the kernel where its arguments are.
    let holds = |setting: Option<&str>, stack| {
        let mut command = executable(&program, "x86_64", &[]);
        command.args([stack, "two words", "last"]).env_clear();
        if stack != "empty" {
            command.envs([("A", "1"), ("B", "2")]);
        }
        command.envs(setting.map(|name| (name, "/nowhere")));
        assert_eq!(outcome(&mut command), ("all checks hold\n".to_owned(), Some(0)), "{setting:?}");
    };
    holds(None, "");
    holds(None, "empty");
    // What the runtime is told by name is on the kernel's stack.
    holds(Some("GODWIT_STATE_SAVE"), "stack");
}

#[test]
fn a_probe_is_one_executable_for_this_machine() {
    let directory = scratch();
    write(directory.path(), "conftest.c", HELLO);
    succeed(cc(directory.path()).args(["-o", "conftest", "conftest.c"]));
    let conftest = directory.path().join("conftest");
    assert!(std::fs::read(&conftest).is_ok_and(|bytes| bytes.starts_with(b"\x7fELF")));
    assert_eq!(outcome(&mut Command::new(&conftest)).1, Some(3));
    assert!(!conftest.with_extension("x86_64").exists());
    succeed(cc(directory.path()).arg("conftest.c"));
    assert_eq!(outcome(&mut Command::new(directory.path().join("a.out"))).1, Some(3));
    let mode = std::fs::metadata(&conftest).map(|metadata| metadata.permissions().mode());
    assert_eq!(mode.ok().map(|mode| mode & 0o111), Some(0o111 & !umask()));
}

#[test]
fn sources_see_the_kernels_headers_of_arm64_beside_those_of_the_c_library() {
    let directory = scratch();
    let source = "#include <stdio.h>\n#include <sys/ioctl.h>\n#include <linux/fs.h>\n#include <linux/kd.h>\n\
                  #include <linux/netlink.h>\n#include <mtd/ubi-user.h>\n#include <asm/unistd.h>\n\
                  #include <asm/stat.h>\n_Static_assert(__NR_openat == 56, \"numbers\");\n\
                  _Static_assert(sizeof(struct nlmsghdr) == 16, \"layouts\");\n\
                  int main(void) { return printf(\"%lx\", (unsigned long)BLKGETSIZE64); }\n";
    write(directory.path(), "kernel.c", source);
    succeed(cc(directory.path()).args(["-Wall", "-Werror", "-c", "kernel.c"]));
}

#[test]
fn a_program_without_a_name_of_its_own_is_whole() {
    let directory = scratch();
    write(directory.path(), "main.c", HELLO);
    succeed(cc(directory.path()).arg("main.c"));
    let program = directory.path().join("a.out");
    for (set, runner) in SETS {
        assert_eq!(outcome(&mut executable(&program, set, runner)).1, Some(3), "on {set}");
    }
}

#[test]
fn a_launcher_that_was_copied_alone_says_what_is_missing_and_what_to_do() {
    let directory = scratch();
    write(directory.path(), "hello.c", HELLO);
    succeed(cc(directory.path()).args(["--plain", "hello.c", "-o", "hello"]));
    let copy = directory.path().join("copy");
    std::fs::copy(directory.path().join("hello"), &copy).unwrap_or_else(|error| panic!("{error}"));
    let said = refuse(Command::new("sh").arg(&copy));
    let missing = format!("the executable {}.x86_64 is missing", copy.display());
    for part in
        [&*missing, "hello, hello.x86_64 and hello.aarch64", "Copy or install all three", "NEW.aarch64"]
    {
        assert!(said.contains(part), "{part} in: {said}");
    }
}

#[test]
fn objects_archives_libraries_and_response_files_make_a_program() {
    let directory = scratch();
    let path = directory.path();
    write(
        path,
        "main.c",
        "int one(void), two(void); double cos(double); int main(void) { return one() + two() + (int)cos(0); }",
    );
    write(path, "one.c", "int one(void) { return 1; }");
    write(path, "two.c", "int helper(void); int two(void) { return helper(); }");
    write(path, "helper.c", "int helper(void) { return 2; } ");
    write(path, "unused.c", "int unused(void) { extern int nowhere(void); return nowhere(); }");
    succeed(cc(path).args(["-c", "one.c", "two.c", "helper.c", "unused.c", "-MD"]));
    assert!(std::fs::read_to_string(path.join("one.d")).is_ok_and(|text| text.starts_with("one.o:")));
    succeed(other_tool("godwit-ar").current_dir(path).args(["cr", "libtwo.a", "two.o", "unused.o"]));
    succeed(other_tool("godwit-ar").current_dir(path).args(["cr", "libhelper.a", "helper.o"]));
    succeed(other_tool("godwit-ranlib").current_dir(path).arg("libhelper.a"));
    write(
        path,
        "arguments",
        "-L . '-lhelper'\n\"-ltwo\" -lm -lpthread -Wl,--as-needed,-rpath,/nowhere -Wl,-O1",
    );
    succeed(cc(path).args(["main.c", "one.o", "@arguments", "-o", "conftest"]));
    assert_eq!(outcome(&mut Command::new(path.join("conftest"))).1, Some(4));
    // The linker by itself, with what a compiler would have given it.
    succeed(cc(path).args(["-c", "main.c"]));
    succeed(other_tool("godwit-ld").current_dir(path).args([
        "-o",
        "conftest.2",
        "-m",
        "elf_x86_64",
        "--hash-style=gnu",
        "main.o",
        "one.o",
        "-L.",
        "-ltwo",
        "-lhelper",
        "-lc",
    ]));
    assert_eq!(outcome(&mut Command::new(path.join("conftest.2"))).1, Some(4));
    // Objects joined into one.
    succeed(cc(path).args(["-r", "main.o", "one.o", "two.o", "helper.o", "-o", "all.o"]));
    succeed(cc(path).args(["all.o", "-o", "conftest.3"]));
    assert_eq!(outcome(&mut Command::new(path.join("conftest.3"))).1, Some(4));
    let missing = refuse(cc(path).args([
        "main.o",
        "one.o",
        "-Wl,--whole-archive",
        "libtwo.a",
        "-Wl,--no-whole-archive",
        "-o",
        "conftest",
    ]));
    assert!(missing.contains("undefined reference to 'nowhere', in libtwo.a(unused.o)"), "{missing}");
    assert!(missing.contains("undefined reference to 'helper', in libtwo.a(two.o)"), "{missing}");
}

#[test]
fn sources_see_no_instruction_set() {
    let directory = scratch();
    write(
        directory.path(),
        "see.c",
        "#ifndef __godwit__\n#error no godwit\n#endif\n\
        #if defined __aarch64__ || defined __x86_64__ || defined __ARM_NEON || defined __SSE2__ || defined __FP_FAST_FMA\n\
        #error a set is seen\n#endif\n_Static_assert(sizeof(long double) == 16 && sizeof(long) == 8, \"\");\n",
    );
    succeed(cc(directory.path()).args(["-c", "see.c"]));
    let macros = succeed(cc(directory.path()).args(["-E", "-dM", "-x", "c", "/dev/null"]));
    let named: Vec<&str> = macros
        .lines()
        .filter(|line| line.contains("aarch64") || line.contains("__ARM") || line.contains("AARCH64"))
        .collect();
    assert!(named.is_empty(), "{named:?}");
    // The readable form is LLVM's; and what goes to standard output goes there.
    assert!(succeed(cc(directory.path()).args(["-S", "-o", "-", "see.c"])).contains("source_filename"));
}

#[test]
fn what_cannot_be_neutral_is_refused_with_its_name_and_reason() {
    let directory = scratch();
    let path = directory.path();
    write(path, "main.c", "int main(void) { return 0; }");
    write(path, "load.c", "#include <dlfcn.h>\nint main(void) { return !dlopen(\"x\", 0); }");
    write(path, "start.s", "nop");
    // Needs no runtime.
    succeed(cc(path).args(["-fopenmp-simd", "-c", "main.c"]));
    write(path, "part.cpp", "int *part() { return new int; } int main() { return 0; }");
    write(path, "vector.c", "#include <emmintrin.h>\nint main(void) { return 0; }");
    write(path, "text.o", "not an object");
    succeed(cc(path).args(["-c", "load.c"]));
    // An object of the machine's own compiler.
    succeed(Command::new("clang-19").current_dir(path).args(["-c", "main.c", "-o", "native.o"]));
    let expected: [(&[&str], &[&str]); 16] = [
        (&["load.o", "-o", "conftest"], &["load.o uses dlopen: code that is loaded"]),
        (&["load.c", "-o", "conftest"], &["error: load.c uses dlopen: code that is loaded"]),
        (&["native.o", "-o", "conftest"], &["native.o: native code of one instruction set", "CC=godwit-cc"]),
        (&["text.o", "-o", "conftest"], &["text.o: a file of an unknown kind"]),
        (&["start.s", "-c"], &["start.s: assembly is of one instruction set"]),
        (&["vector.c", "-c"], &["vector.c:1", "<emmintrin.h> is for one instruction set", "__godwit__"]),
        (&["part.cpp", "-o", "conftest"], &["part.cpp uses _Znwm", "link with godwit-cxx"]),
        (&["part.cpp", "-c", "-stdlib=libstdc++"], &["-stdlib=libstdc++", "is libc++"]),
        (&["-shared", "main.c", "-o", "libx.so"], &["-shared", "--disable-shared"]),
        (&["-mavx2", "-c", "main.c"], &["-mavx2", "instruction-set extension"]),
        (&["-fsanitize=address", "main.c"], &["-fsanitize=address", "sanitizer"]),
        (&["-m32", "-c", "main.c"], &["-m32", "64 bits wide"]),
        (&["-Wl,-T,script.ld", "main.c"], &["-T", "layout"]),
        (&["main.c", "-lnothing", "-o", "conftest"], &["cannot find -lnothing", "libnothing.a"]),
        (&["main.c", "main.c", "-o", "conftest"], &["main is defined in", "and in"]),
        (&["-o", "conftest"], &["no input files"]),
    ];
    for (arguments, words) in expected {
        let said = refuse(cc(path).args(arguments));
        for word in words {
            assert!(said.contains(word), "{arguments:?} should speak of {word:?}: {said}");
        }
    }
}

#[test]
fn inline_assembly_is_refused_with_its_file_and_line_also_without_debug_information() {
    let directory = scratch();
    let source = "int main(void)\n{\n    int x = 1;\n    __asm__ volatile(\"\" : : : \"memory\");\n    __asm__(\"nop %0\" : \"+r\"(x));\n    return x;\n}\n";
    write(directory.path(), "assembly.c", source);
    let said = refuse(cc(directory.path()).args(["assembly.c", "-o", "program"]));
    assert!(said.contains("assembly.c:5") && !said.contains("assembly.c:4"), "{said}");
}

#[test]
fn names_of_the_runtime_are_refused_with_symbol_and_file_unless_no_other_file_sees_them() {
    let directory = scratch();
    let path = directory.path();
    write(
        path,
        "main.c",
        "int other(int); int main(int count, char **words) { (void)words; return other(count); }",
    );
    let reserved = "names that begin with __gw_ are those of godwit's runtime";
    // Made by the plugin, of the private runtime, of the neutral one, and of nobody.
    for (text, name) in [
        ("__attribute__((noinline)) void __gw_run_constructors(void) {}", "__gw_run_constructors"),
        ("__attribute__((weak)) void __gw_run_destructors(void) {}", "__gw_run_destructors"),
        ("int __gw_sites[3];", "__gw_sites"),
        ("_Thread_local int __gw_tls_size;", "__gw_tls_size"),
        ("long __gw_kernel(long nr) { return nr; }", "__gw_kernel"),
        ("long __gw_syscall(long nr) { return nr; }", "__gw_syscall"),
        ("int __gw_main(void) { return 0; }", "__gw_main"),
        ("int __gw_anything;", "__gw_anything"),
    ] {
        write(path, "other.c", &format!("{text}\nint other(int x) {{ return x; }}\n"));
        succeed(cc(path).args(["-c", "other.c"]));
        let said = refuse(cc(path).args(["main.c", "other.o", "-o", "program"]));
        assert!(said.contains(&format!("other.o defines {name}: {reserved}")), "{said}");
        assert!(!path.join("program.x86_64").exists());
        // Measured programs have them too.
        let said = refuse(cc(path).args(["--plain", "main.c", "other.o", "-o", "program"]));
        assert!(said.contains(&format!("other.o defines {name}: {reserved}")), "{said}");
    }
    write(
        path,
        "other.c",
        "void *memcpy(void *a, const void *b, unsigned long n) { (void)b; (void)n; return a; }\nint other(int x) { return x; }\n",
    );
    succeed(cc(path).args(["-fno-builtin", "-c", "other.c"]));
    let said = refuse(cc(path).args(["main.c", "other.o", "-o", "program"]));
    assert!(said.contains("other.o defines memcpy: godwit's runtime has this function"), "{said}");

    // A name of one file only, and one that the runtime's own files share, are the program's.
    write(
        path,
        "other.c",
        "static volatile int __gw_sites[3] = {3, 4, 5};\n\
         __attribute__((noinline)) static int __gw_poll_slow(int x) { return __gw_sites[x]; }\n\
         int gw_lock_memory(int x) { return x; }\n\
         int other(int x)\n{\n    int sum = 0;\n    for (int i = 0; i < 1000; i++)\n        sum = (sum + __gw_poll_slow(x)) & 127;\n    return gw_lock_memory(sum);\n}\n",
    );
    succeed(cc(path).args(["main.c", "other.c", "-o", "program"]));
    for (set, runner) in SETS {
        let mut command = executable(&path.join("program"), set, runner);
        assert_eq!(outcome(command.env("GODWIT_STATE_TURN", "1")).1, Some(4000 & 127), "on {set}");
    }
}

#[test]
fn a_program_that_would_load_code_is_told_so_when_it_is_built_without_loading() {
    let directory = scratch();
    let path = directory.path();
    let source = isa().join("cc/tests/programs/no_loading.c");
    succeed(cc(path).args(["-Wall", "-Werror", "-o", "program"]).arg(source).arg("-lgodwit-nodl"));
    let why = "code cannot be loaded into a program of godwit-cc: it would be of one instruction set";
    let failed = |what: &str| format!("{what}: 1, {why}\nagain: nothing\n");
    let expected = [
        "before: 0, nothing\nagain: nothing\n".to_owned(),
        failed("dlopen"),
        failed("dlopen of itself"),
        failed("dlsym"),
        failed("dlclose"),
        "dladdr: 0\nanother thread: nothing\n".to_owned(),
        failed("behind the thread"),
    ]
    .concat();
    for (set, runner) in SETS {
        let mut command = executable(&path.join("program"), set, runner);
        assert_eq!(succeed(&mut command), expected, "on {set}");
        assert_eq!(succeed(command.env("GODWIT_STATE_TURN", "3")), expected, "captured, on {set}");
    }
}

#[test]
fn questions_of_builds_are_answered() {
    let directory = scratch();
    let path = directory.path();
    assert_eq!(succeed(cc(path).arg("-dumpmachine")), "aarch64-linux-musl\n");
    assert!(succeed(cc(path).arg("--version")).starts_with("godwit-cc "));
    assert!(succeed(cc(path).arg("-print-prog-name=ld")).ends_with("godwit-ld\n"));
    assert!(succeed(cc(path).arg("-print-file-name=libc.a")).ends_with("/lib/libc.a\n"));
    assert_eq!(succeed(cc(path).arg("-print-file-name=nothing.a")), "nothing.a\n");
    assert!(succeed(other_tool("godwit-ld").arg("--version")).contains("GNU"));
    write(path, "main.c", "int main(void) { return 0; }");
    let dry = cc(path).args(["-###", "-c", "main.c"]).output();
    assert!(dry.is_ok_and(|output| String::from_utf8_lossy(&output.stderr).contains("aarch64-unknown-linux-musl")));
    assert!(!path.join("main.o").exists());
}

#[test]
fn both_columns_of_the_system_call_table_are_the_kernel_s() {
    let directory = scratch();
    let table = isa().join("runtime/kernel/calls.h");
    let check = |column: &str, header: &str, name: &str| {
        let file = format!(
            "#define __BITS_PER_LONG 64\n#define __ARCH_WANT_RENAMEAT\n#define __ARCH_WANT_NEW_STAT\n\
             #define __ARCH_WANT_SET_GET_RLIMIT\n#define __ARCH_WANT_MEMFD_SECRET\n#include <{header}>\n\
             #define CALL(generic, name, own, kind) _Static_assert(__NR_##name == {column}, #name);\n\
             #include \"{}\"\n",
            table.display()
        );
        let path = write(directory.path(), name, &file);
        // The kernel's headers are those of the machine's own compiler.
        succeed(Command::new("cc").args(["-fsyntax-only", "-I/usr/include"]).arg(path));
    };
    check("generic", "asm-generic/unistd.h", "generic.c");
    if cfg!(target_arch = "x86_64") {
        check("own", "asm/unistd_64.h", "own.c");
    }
}
