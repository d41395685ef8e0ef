//! CPU features by which a running program may have chosen its code.
//!
//! `/proc/cpuinfo` lists much else beside them: what only the kernel uses (`smep`, `arat`, `pti`), how the CPU is
//! watched and powered, and words that a newer kernel prints of the same CPU. Two nodes may differ in those. What
//! counts is what a program can execute without the kernel's help, or sees in CPUID or the auxiliary vector
//! and then relies upon.

/// On x86-64, by what the words in `/proc/cpuinfo` begin with or are (arch/x86/include/asm/cpufeatures.h).
///
/// - Instructions for vectors and their kin: whole families, so that later members count as well.
const FAMILIES: &[&str] = &["sse", "ssse", "avx", "amx_", "sha_", "sha5", "sm3", "sm4"];

/// - Instructions one by one: bits, cryptography, random numbers, atomics, moves, cache and state.
/// - How the state that a program saves is laid out (`xsave…`), which the restore needs as well.
/// - Protection that programs use themselves: keys, shadow stacks, their segments.
const WORDS: &[&str] = &[
    "3dnow",
    "3dnowext",
    "3dnowprefetch",
    "abm",
    "adx",
    "aes",
    "bmi1",
    "bmi2",
    "cldemote",
    "clflush",
    "clflushopt",
    "clwb",
    "clzero",
    "cmov",
    "cmpccxadd",
    "cx16",
    "cx8",
    "enqcmd",
    "erms",
    "f16c",
    "fma",
    "fma4",
    "fpu",
    "fsgsbase",
    "fsrm",
    "fxsr",
    "fxsr_opt",
    "gfni",
    "hle",
    "lahf_lm",
    "lwp",
    "misalignsse",
    "mmx",
    "mmxext",
    "monitorx",
    "movbe",
    "movdir64b",
    "movdiri",
    "ospke",
    "pclmulqdq",
    "pku",
    "pni",
    "popcnt",
    "prefetchi",
    "rdpid",
    "rdrand",
    "rdseed",
    "rdtscp",
    "rtm",
    "serialize",
    "tbm",
    "tsc",
    "tsxldtrk",
    "user_shstk",
    "vaes",
    "vpclmulqdq",
    "waitpkg",
    "wbnoinvd",
    "xgetbv1",
    "xop",
    "xsave",
    "xsavec",
    "xsaveopt",
];

/// Whether a program can use what this word of `/proc/cpuinfo` names. On other machines than x86-64 the kernel
/// lists only what it offers to programs (arm64: elf_hwcaps).
#[must_use]
pub fn is_usable(word: &str) -> bool {
    !cfg!(target_arch = "x86_64")
        || WORDS.contains(&word)
        || FAMILIES.iter().any(|family| word.starts_with(family))
}

/// Those that this machine has.
#[must_use]
pub fn cpu_flags() -> Vec<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    flags_of(&text)
}

fn flags_of(text: &str) -> Vec<String> {
    text.lines()
        .find(|line| line.starts_with("flags") || line.starts_with("Features"))
        .and_then(|line| line.split_once(':'))
        .map(|(_, flags)| {
            flags.split_whitespace().filter(|word| is_usable(word)).map(str::to_owned).collect()
        })
        .unwrap_or_default()
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn what_only_the_kernel_uses_is_no_reason_to_stay() {
        let text = "processor\t: 0\nflags\t\t: fpu vme pse tsc msr smep arat pti ibrs avx2 avx512_vnni \
                    sse4_2 xsavec xsaves hypervisor constant_tsc sha_ni user_shstk\n";
        let flags = ["fpu", "tsc", "avx2", "avx512_vnni", "sse4_2", "xsavec", "sha_ni", "user_shstk"];
        assert_eq!(flags_of(text), flags);
        assert!(flags_of("").is_empty());
    }
}
