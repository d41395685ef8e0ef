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
/// - How the state that a program saves is laid out (`xsave…`), which the restore needs as well. The kernel lists of vectors,
///   keys and tiles only those whose state it saves (XCR0); and CRIU has each part of the state by itself in its images, so
///   that a processor which has them at other places (CPUID leaf 13) restores them, too.
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

/// What GLIBC_TUNABLES can hide from the C library, by its words and the kernel's (glibc's `cpu-tunables.c`).
const TUNABLES: &[(&str, &str)] = &[
    ("AVX", "avx"),
    ("AVX2", "avx2"),
    ("AVX512BW", "avx512bw"),
    ("AVX512CD", "avx512cd"),
    ("AVX512DQ", "avx512dq"),
    ("AVX512ER", "avx512er"),
    ("AVX512F", "avx512f"),
    ("AVX512PF", "avx512pf"),
    ("AVX512VL", "avx512vl"),
    ("BMI1", "bmi1"),
    ("BMI2", "bmi2"),
    ("ERMS", "erms"),
    ("FMA", "fma"),
    ("FMA4", "fma4"),
    ("LZCNT", "abm"),
    ("MOVBE", "movbe"),
    ("POPCNT", "popcnt"),
    ("RTM", "rtm"),
    ("SSE4_1", "sse4_1"),
    ("SSE4_2", "sse4_2"),
    ("SSSE3", "ssse3"),
    ("XSAVEC", "xsavec"),
];

/// Of these, those for which a C library of before 2.33 has a second word, and looks at that.
const USABLE: [&str; 7] = ["AVX", "AVX2", "AVX512DQ", "AVX512F", "FMA", "FMA4", "XSAVEC"];

/// The words that hide a feature from any C library that knows GLIBC_TUNABLES; none where nothing does.
fn words(flag: &str) -> Option<Vec<String>> {
    let (word, _) = TUNABLES.iter().find(|(_, known)| *known == flag)?;
    let more = USABLE.contains(word).then(|| format!("-{word}_Usable"));
    Some(std::iter::once(format!("-{word}")).chain(more).collect())
}

/// Of these features, those that a program needs which was started with this environment (`NAME=VALUE`): it may have told
/// its C library to leave some alone.
pub(crate) fn needed(flags: Vec<String>, env: &[String]) -> Vec<String> {
    let tunables = env.iter().find_map(|pair| pair.strip_prefix("GLIBC_TUNABLES="));
    let mut masks =
        tunables.unwrap_or_default().split(':').filter_map(|one| one.strip_prefix("glibc.cpu.hwcaps="));
    // Of several the last one counts.
    let hidden: Vec<&str> = masks.next_back().unwrap_or_default().split(',').collect();
    let is_hidden = |flag: &String| {
        words(flag).is_some_and(|words| words.iter().all(|word| hidden.contains(&word.as_str())))
    };
    flags.into_iter().filter(|flag| !is_hidden(flag)).collect()
}

/// What to do about features that a destination lacks.
pub(crate) fn remedy(lacking: &[String]) -> String {
    let machines = "give both nodes the same CPU model, or mask these features in that of the source, where they are virtual machines";
    let hiding: Option<Vec<Vec<String>>> = lacking.iter().map(|flag| words(flag)).collect();
    match hiding {
        Some(hiding) => format!(
            "if only its C library (glibc) uses them, start it with GLIBC_TUNABLES=glibc.cpu.hwcaps={} in its environment; or {machines} (docs/limits.md)",
            hiding.concat().join(",")
        ),
        None => format!("{machines} (docs/limits.md)"),
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn what_the_c_library_is_told_to_leave_alone_is_not_needed() {
        let flags = || ["avx2", "avx512f", "sha_ni"].map(str::to_owned).to_vec();
        let with = |value: &str| needed(flags(), &["A=b".into(), format!("GLIBC_TUNABLES={value}")]);
        assert_eq!(needed(flags(), &["A=b".into()]), flags());
        let all = "glibc.cpu.hwcaps=-AVX512F,-AVX512F_Usable,-AVX2,-AVX2_Usable";
        assert_eq!(with(&format!("glibc.malloc.check=3:{all}")), ["sha_ni"]);
        for other in [
            "glibc.cpu.hwcaps=AVX2,AVX2_Usable",
            // An older C library would use it.
            "glibc.cpu.hwcaps=-AVX2",
            "glibc.cpu.hwcaps=-avx2,-avx2_Usable,-SHA_NI",
            "hwcaps=-AVX2,-AVX2_Usable",
            &format!("{all}:glibc.cpu.hwcaps="),
            "",
        ] {
            assert_eq!(with(other), flags(), "{other}");
        }
    }

    #[test]
    fn a_remedy_is_one_that_helps() {
        let of = |flags: &[&str]| remedy(&flags.iter().map(|flag| (*flag).to_owned()).collect::<Vec<_>>());
        let tunable = of(&["avx512f", "abm"]);
        let value = "GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F,-AVX512F_Usable,-LZCNT";
        assert!(tunable.contains(&format!("{value} in its environment")), "{tunable}");
        assert!(needed(vec!["avx512f".into(), "abm".into()], &[value.into()]).is_empty());
        // Others look at the CPU themselves.
        assert!(of(&["avx2", "sha_ni"]).starts_with("give both nodes the same CPU model, or mask"));
    }

    #[test]
    fn what_only_the_kernel_uses_is_no_reason_to_stay() {
        let text = "processor\t: 0\nflags\t\t: fpu vme pse tsc msr smep arat pti ibrs avx2 avx512_vnni \
                    sse4_2 xsavec xsaves hypervisor constant_tsc sha_ni user_shstk\n";
        let flags = ["fpu", "tsc", "avx2", "avx512_vnni", "sse4_2", "xsavec", "sha_ni", "user_shstk"];
        assert_eq!(flags_of(text), flags);
        assert!(flags_of("").is_empty());
    }
}
