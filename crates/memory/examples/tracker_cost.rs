//! What a look costs: a process with so many GiB writes one page in a hundred between looks.
//!
//! `cargo run --release -p godwit-memory --example tracker_cost -- 4`

use std::time::{Duration, Instant};

use godwit_memory::process::Reader;
use godwit_memory::tracker::{Backend, Tracker};

fn cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is a variable of ours.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn main() {
    let gib: usize = std::env::args().nth(1).and_then(|word| word.parse().ok()).unwrap_or(4);
    let pages = gib << 18;
    let (commands, write) = nix::unistd::pipe().expect("a pipe");
    let (read, answers) = nix::unistd::pipe().expect("a pipe");
    // SAFETY: this program has one thread.
    let pid = match unsafe { nix::unistd::fork() }.expect("fork") {
        nix::unistd::ForkResult::Parent { child } => child.as_raw(),
        nix::unistd::ForkResult::Child => {
            drop(write);
            // One page in a hundred, at other offsets each time and nowhere next to each other.
            let mut memory = vec![1_u8; pages << 12];
            let mut byte = [0];
            let mut random = 1_usize;
            let _ = nix::unistd::write(&answers, &byte);
            while nix::unistd::read(&commands, &mut byte) == Ok(1) {
                let begun = Instant::now();
                for _ in 0..pages / 100 {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    memory[((random >> 20) % pages) << 12] ^= 1;
                }
                println!(
                    "  {:.0} ns for each page written",
                    begun.elapsed().as_nanos() as f64 * 100.0 / pages as f64
                );
                let _ = nix::unistd::write(&answers, &byte);
            }
            std::process::exit(0);
        }
    };
    let mut byte = [0];
    nix::unistd::read(&read, &mut byte).expect("the child is ready");
    let mut tracker = Tracker::new(Backend::Uffd);
    let mut reader = Reader::new();
    for look in 0..6 {
        let (begun, before) = (Instant::now(), cpu());
        let round = tracker.round(&[pid], false).expect("a look");
        let space = &round.spaces[0];
        let (took, used) = (begun.elapsed(), cpu() - before);
        let written: u64 = space.written.iter().map(|range| (range.end - range.start) >> 12).sum();
        println!("look {look}: {written} of {} pages, {took:?}, CPU {used:?}", space.populated_pages);
        let begun = Instant::now();
        let mut bytes = 0;
        for range in &space.written {
            let mut pieces = reader.pieces(&space.process, range.clone());
            while let Some(Ok(piece)) = pieces.next() {
                if let godwit_memory::process::Piece::Data { bytes: data, .. } = piece {
                    bytes += data.len();
                }
            }
        }
        println!("  read at {:.1} GB/s", bytes as f64 / begun.elapsed().as_nanos() as f64);
        nix::unistd::write(&write, &byte).expect("the child listens");
        nix::unistd::read(&read, &mut byte).expect("the child answers");
    }
}
