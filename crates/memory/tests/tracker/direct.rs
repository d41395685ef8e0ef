//! Reads past the page cache, which a device ends some time after the kernel noted the write.

use godwit_memory::Range;
use godwit_memory::tracker::{Backend, Tracker};

use crate::child::{Child, pipe, poke, read_byte};

#[test]
fn what_a_device_may_still_write_counts_as_written_again() {
    for direct in [false, true] {
        let (read, write) = pipe();
        let (answers, answer) = pipe();
        let mut page = vec![1_u8; 3 * 4096];
        let at = (page.as_ptr().addr() as u64).next_multiple_of(4096);
        let offset = usize::try_from(at).expect("an address") - page.as_ptr().addr();
        let mut child = Child::fork(|| {
            let flags = libc::O_RDONLY | if direct { libc::O_DIRECT } else { 0 };
            // SAFETY: the path is a constant.
            if unsafe { libc::open(c"/proc/self/exe".as_ptr(), flags) } < 0 {
                return 1;
            }
            page[offset] = 3;
            poke(&answer);
            while read_byte(&read) {
                page[offset] += 1;
                poke(&answer);
            }
            0
        });
        assert!(read_byte(&answers));
        let mut tracker = Tracker::new(Backend::Uffd);
        let mut written = || {
            let round = tracker.round(&[child.pid], false).expect("a scan");
            round.spaces[0].written.iter().any(|range: &Range| range.contains(&at))
        };
        assert!(written(), "at first sight");
        assert!(!written(), "nothing was written");
        poke(&write);
        assert!(read_byte(&answers));
        assert!(written(), "it was written");
        assert_eq!(written(), direct, "a read may be under way");
        child.signal(nix::sys::signal::Signal::SIGKILL);
        child.wait();
    }
}
