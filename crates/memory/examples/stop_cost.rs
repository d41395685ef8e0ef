//! How long a process stands still when it is examined for the first time, as one of its threads sees it:
//! that thread reads the clock all the time and notes the longest gap. The other threads sleep.
//!
//! `chrt -f 10 cargo run --release -p godwit-memory --example stop_cost -- THREADS SCANS CONNECTIONS`
//!
//! With `chrt` other programs of the machine do not count, and the thread with the clock does not keep the
//! others of its process from stopping.

use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use godwit_memory::tracker::{Backend, Tracker};

/// What the process and its observer share.
struct Shared {
    /// Longest gap since this was last set to zero, in nanoseconds.
    longest: AtomicU64,
    ready: AtomicBool,
    /// The clock is to be read. The kernel lets no real-time program have a processor all the time.
    reading: AtomicBool,
}

fn watch_the_clock(shared: &Shared, threads: usize, connections: usize) -> ! {
    let _open = connect(connections);
    for _ in 1..threads {
        std::thread::spawn(|| {
            loop {
                std::thread::sleep(Duration::from_secs(3600));
            }
        });
    }
    // SAFETY: the parameter is a variable of ours.
    unsafe {
        if libc::sched_getscheduler(0) == libc::SCHED_FIFO {
            let lowest = libc::sched_param { sched_priority: 1 };
            assert_eq!(libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const lowest), 0);
        }
    }
    let mut last = Instant::now();
    loop {
        if !shared.reading.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_micros(100));
            last = Instant::now();
            shared.ready.store(true, Ordering::Release);
            continue;
        }
        shared.ready.store(false, Ordering::Relaxed);
        let now = Instant::now();
        let gap = u64::try_from((now - last).as_nanos()).unwrap_or(u64::MAX);
        shared.longest.fetch_max(gap, Ordering::Relaxed);
        last = now;
    }
}

/// So many TCP connections, both ends of each.
fn connect(connections: usize) -> Vec<[TcpStream; 2]> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its number");
    let connect = |_| {
        let near = TcpStream::connect(address).expect("a connection");
        [near, listener.accept().expect("its other end").0]
    };
    (0..connections).map(connect).collect()
}

fn main() {
    let mut words = std::env::args().skip(1).filter_map(|word| word.parse().ok());
    let threads: usize = words.next().unwrap_or(1);
    let scans: usize = words.next().unwrap_or(300);
    let connections: usize = words.next().unwrap_or(0);
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, which holds zeros: two numbers and a flag that is not set.
    let shared: &Shared = unsafe {
        let start = libc::mmap(std::ptr::null_mut(), size_of::<Shared>(), access, flags, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        &*start.cast::<Shared>()
    };
    // SAFETY: this program has one thread.
    let pid = match unsafe { nix::unistd::fork() }.expect("fork") {
        nix::unistd::ForkResult::Parent { child } => child,
        nix::unistd::ForkResult::Child => {
            // SAFETY: plain numbers.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            watch_the_clock(shared, threads, connections)
        }
    };
    let reads = |reading: bool| {
        shared.reading.store(reading, Ordering::Release);
        while shared.ready.load(Ordering::Acquire) == reading {
            std::thread::sleep(Duration::from_micros(100));
        }
    };
    reads(false);
    let measure = |scan: &dyn Fn()| {
        let mut gaps: Vec<u64> = (0..scans)
            .map(|_| {
                reads(true);
                shared.longest.store(0, Ordering::Relaxed);
                scan();
                // It has to run again to see that it did not.
                std::thread::sleep(Duration::from_millis(2));
                reads(false);
                std::thread::sleep(Duration::from_millis(10));
                shared.longest.load(Ordering::Relaxed)
            })
            .collect();
        gaps.sort_unstable();
        let us = |part: usize| gaps[(gaps.len() - 1) * part / 100] as f64 / 1e3;
        println!("  median {:.0} µs, p99 {:.0} µs, longest {:.0} µs", us(50), us(99), us(100));
    };
    println!(
        "{threads} threads, {connections} connections, {scans} times; longest gap in the time of a scan and 2 ms:"
    );
    println!(" not examined");
    measure(&|| ());
    println!(" first scan");
    measure(&|| {
        let round = Tracker::new(Backend::Uffd).round(&[pid.as_raw()], false).expect("a scan");
        if let Some(reason) = &round.spaces[0].unwatched {
            println!("  {reason}");
        }
    });
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("it lives");
}
