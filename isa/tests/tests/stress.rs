//! Programs whose output must not tell that they changed the instruction set, at every poll and at random ones.

use anyhow::{Result, ensure};
use godwit_isa_link::Set;
use godwit_isa_tests::{build, run};

/// Both directions, beginning with this machine's set.
const THERE_AND_BACK: [Set; 2] = [Set::X86_64, Set::Aarch64];

/// Runs a program of `isa/tests/programs` in every way there is and compares.
fn stress(name: &str) -> Result<()> {
    let program = build::program(&build::isa().join("tests/programs").join(name))?;
    let expected = run::whole(&program, Set::X86_64)?;
    ensure!(!expected.output.is_empty(), "{name} prints nothing");
    ensure!(
        expected == run::whole(&program, Set::Aarch64)?,
        "{name} differs between the sets, without any move"
    );

    // Every single poll on this machine's set; under emulation some, since it is twenty times slower.
    for (set, every) in [(Set::X86_64, &[1, 2, 5][..]), (Set::Aarch64, &[3, 17])] {
        for &polls in every {
            let turned = run::turning(&program, set, polls)?;
            ensure!(turned == expected, "{name} on {}, turning every {polls} polls", set.name());
        }
    }
    let seed = std::env::var("GODWIT_ISA_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| fastrand::u64(..));
    println!("{name}: GODWIT_ISA_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    // Far enough apart that a run ends within a second or two, since a leg costs 20 ms.
    let most = polls_of(&program)? / 20 + 2;
    for _ in 0..2 {
        let journey = run::journey(&program, &THERE_AND_BACK, |_| random.u64(1..most))?;
        ensure!(journey.legs > 2, "{name} has moved {} times only", journey.legs - 1);
        ensure!(
            journey.outcome == expected,
            "{name} with seed {seed} after {} legs: {}",
            journey.legs,
            String::from_utf8_lossy(&journey.outcome.output)
        );
    }
    Ok(())
}

/// How many polls a run meets, by trying how far it gets.
fn polls_of(program: &build::Program) -> Result<u64> {
    let mut polls = 64;
    while polls < 1 << 40 {
        let first_leg =
            run::journey(program, &[Set::X86_64], |leg| if leg == 1 { polls } else { u64::MAX / 32 })?;
        if first_leg.legs == 1 {
            break;
        }
        polls *= 2;
    }
    Ok(polls)
}

macro_rules! programs {
    ($($name:ident),* $(,)?) => { $(
        #[test]
        fn $name() {
            if let Err(error) = stress(concat!(stringify!($name), ".c")) {
                panic!("{error:#}");
            }
        }
    )* };
}

programs!(basics, control, jumps, shapes, threads, types);
