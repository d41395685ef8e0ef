//! What cannot move is refused when the program is linked, with file, line, function and reason.

use std::fs;

use anyhow::Result;
use godwit_isa_tests::build;

/// Links a source text; what the link says if it refuses.
fn refusal(source: &str, flags: &[&str]) -> Result<String> {
    let scratch = tempfile::tempdir()?;
    let path = scratch.path().join("refused.c");
    fs::write(&path, source)?;
    let (_directory, result) = build::try_link(&path, flags)?;
    match result {
        Ok(_) => anyhow::bail!("the link accepts what it must refuse:\n{source}"),
        Err(error) => Ok(error.to_string()),
    }
}

/// Asserts that a source is refused with all of these words.
#[track_caller]
fn refused(source: &str, flags: &[&str], words: &[&str]) {
    let said = match refusal(source, flags) {
        Ok(said) => said,
        Err(error) => panic!("{error:#}"),
    };
    for word in words {
        assert!(said.contains(word), "\"{word}\" is missing in: {said}");
    }
}

#[test]
fn inline_assembly_is_refused_with_file_line_and_function() {
    refused(
        "int main(void) {\n  long x;\n  __asm__ volatile(\"mrs %0, cntvct_el0\" : \"=r\"(x));\n  return (int)x;\n}\n",
        &["-g"],
        &["refused.c:3", "'main'", "inline assembly"],
    );
}

#[test]
fn an_instruction_behind_a_comment_is_refused() {
    refused(
        "int main(void) {\n  __asm__ volatile(\"# nothing\\n\\tnop // at all\");\n  return 0;\n}\n",
        &["-g"],
        &["refused.c:2", "'main'", "inline assembly"],
    );
}

#[test]
fn assembly_outside_of_functions_is_refused() {
    refused(
        "__asm__(\".globl other\\nother: ret\");\nint main(void) { return 0; }\n",
        &[],
        &["other", "assembly"],
    );
}

#[test]
fn target_intrinsics_are_refused_by_name() {
    refused(
        "#include <arm_neon.h>\nint main(int argc, char **argv) {\n  (void)argv;\n  int8x16_t v = vdupq_n_s8((signed char)argc);\n  \
         return vaddvq_s8(vqtbl1q_s8(v, vreinterpretq_u8_s8(v)));\n}\n",
        &["-g"],
        &["refused.c:", "llvm.aarch64.neon", "'main'"],
    );
}

#[test]
fn the_address_of_a_native_frame_is_refused() {
    refused(
        "int main(void) { return __builtin_frame_address(0) != 0; }\n",
        &["-g"],
        &["refused.c:1", "native stack frame"],
    );
}

#[test]
fn names_that_the_passes_make_are_refused_by_symbol_and_file() {
    for (definition, name) in [
        ("__attribute__((noinline)) void __gw_run_constructors(void) {}", "__gw_run_constructors"),
        ("__attribute__((noinline)) void __gw_poll_slow(void) {}", "__gw_poll_slow"),
        ("int __gw_sites[4] = {1};", "__gw_sites"),
        ("int __gw_tls_image = 1;", "__gw_tls_image"),
    ] {
        let source = format!("{definition}\nint main(void) {{ return 0; }}\n");
        let (symbol, reserved) = (format!("'{name}'"), "names that begin with __gw_ are reserved");
        refused(&source, &["-g"], &[&symbol, reserved, "gw-prepare"]);
    }
}

#[test]
fn a_function_that_nobody_defines_is_named() {
    refused(
        "int nowhere(int);\nint main(void) { return nowhere(3); }\n",
        &[],
        &["undefined symbol", "nowhere"],
    );
}

#[test]
fn a_function_marked_as_never_suspending_must_not_call_one_that_may() {
    refused(
        "__attribute__((annotate(\"gw_nosuspend\"))) int marked(int (*f)(int)) { return f(3); }\n\
         static int other(int x) { return x + 1; }\nint (*volatile pointer)(int) = other;\n\
         int main(void) { return marked(pointer); }\n",
        &["-g", "-fno-inline"],
        &["refused.c:1", "'marked'", "indirect call"],
    );
}
