//! Single passes, on LLVM IR as text.

use anyhow::{Result, ensure};
use godwit_isa_tests::build;

/// Facts of the optimiser, known ones and those of a later LLVM, beside what says how code is made.
const FACTS: &str = r#"
declare preserve_allcc void @__gw_poll_slow()

define dso_local noundef nonnull dereferenceable(8) ptr @callee(ptr nocapture nofree noundef readonly %p, i8 zeroext %c) #0 {
  call preserve_allcc void @__gw_poll_slow()
  ret ptr %p
}

define dso_local i64 @caller(ptr nocapture nofree noundef %p) #0 {
  %r = call noundef nonnull align 16 ptr @callee(ptr nocapture nofree noundef %p, i8 zeroext 1) #1, !noalias !0, !of-a-later-llvm !0
  %n = ptrtoint ptr %r to i64
  ret i64 %n
}

attributes #0 = { nofree noinline willreturn mustprogress memory(argmem: read) "of-a-later-llvm"="fact" "alloc-family"="malloc" "no-trapping-math"="true" "no-builtin-printf" }
attributes #1 = { nofree willreturn memory(none) "of-a-later-llvm"="fact" }
!0 = !{!1}
!1 = distinct !{!1, !2}
!2 = distinct !{!2}
"#;

#[test]
fn functions_and_calls_that_may_suspend_keep_no_facts_but_how_code_is_made() -> Result<()> {
    let text = build::optimised(FACTS, "gw-capture")?;
    // LLVM's own intrinsics, which the pass calls, have theirs.
    let text = text.lines().filter(|line| !line.contains("nocallback")).collect::<Vec<_>>().join("\n");
    for fact in [
        "nocapture",
        "captures(",
        "nofree",
        "noundef",
        "nonnull",
        "readonly",
        "dereferenceable",
        "align 16",
        "willreturn",
        "mustprogress",
        "memory(",
        "alloc-family",
        "of-a-later-llvm",
        "!noalias",
    ] {
        ensure!(!text.contains(fact), "{fact} is left in:\n{text}");
    }
    for kept in ["noinline", "\"no-trapping-math\"=\"true\"", "\"no-builtin-printf\""] {
        ensure!(text.contains(kept), "{kept} is gone in:\n{text}");
    }
    ensure!(text.matches("i8 zeroext").count() == 2, "zeroext is gone in:\n{text}");
    Ok(())
}

/// A call whose exception a landing pad would catch, as the front end makes it; and what the exceptions pass makes of it.
const UNWINDS: &str = r"
declare void @throws()
declare i32 @__gxx_personality_v0(...)

define void @catches() personality ptr @__gxx_personality_v0 {
  invoke void @throws() to label %done unwind label %caught
done:
  ret void
caught:
  %exception = landingpad { ptr, i32 } cleanup
  resume { ptr, i32 } %exception
}
";

#[test]
fn what_would_unwind_native_stacks_is_refused_at_the_end() -> Result<()> {
    let Err(refused) = build::optimised(UNWINDS, "gw-verify") else {
        anyhow::bail!("an invoke is left, and the last look takes it");
    };
    let said = format!("{refused:#}");
    ensure!(said.contains("'catches'") && said.contains("would unwind the native stack"), "{said}");
    Ok(())
}
