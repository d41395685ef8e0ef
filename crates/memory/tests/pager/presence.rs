//! Pages and areas that a restored process has, or has not, other than the pager expects.

use godwit_memory::pager::{Event, PagerError, Restored};

use crate::BASE;
use crate::child::{Child, Op, P};
use crate::service::{Criu, Pager, tags};

/// Pages of a huge page.
const HUGE: u64 = 512;

/// A child under its own number, as the pager compares it, and what it is to have.
struct Arriving {
    child: Child,
    pid: u32,
    wanted: Vec<u64>,
}

impl Arriving {
    /// A child with an area of so many pages at [`BASE`], which are all in the store.
    fn new(pager: &Pager, pages: u64) -> Self {
        let child = Child::new();
        let pid = u32::try_from(child.ask(Op::Pid, 0, 0, 0)[0]).unwrap();
        let wanted = tags(7, BASE, pages, 0);
        pager.put(pid, BASE, &wanted);
        child.ask(Op::Map, BASE, pages, 0);
        Self { child, pid, wanted }
    }

    /// CRIU leaves these pages of it to be filled, and is done.
    fn restored(&self, pager: &Pager, from: u64, pages: u64) {
        let mut criu = Criu::connect(pager);
        criu.process(i32::try_from(self.pid).unwrap(), &self.child.ask_fd(Op::Uffd));
        self.child.ask(Op::Watch, BASE + from * P, pages, 0);
        self.child.ask(Op::Close, 0, 0, 0);
        criu.finished();
        assert_eq!(pager.event(), Event::RestoreFinished);
    }

    fn verify(&self, pager: &Pager) -> Result<(), PagerError> {
        pager.client.verify(&[Restored { space: self.pid, pid: self.pid }])
    }

    /// The pager has failed, and says of which page.
    fn is_refused(&self, pager: &Pager, result: Result<(), PagerError>, page: u64) {
        let Err(PagerError::Refused { reason, .. }) = result else { panic!("{result:?}") };
        for part in [format!("process {}", self.pid), format!("{:#x}", BASE + page * P)] {
            assert!(reason.contains(&part), "{reason:?} does not say {part}");
        }
        assert_eq!(pager.event(), Event::Failed { reason });
    }
}

#[test]
fn a_page_of_unknown_origin_is_found_before_the_push() {
    let pager = Pager::new();
    let arriving = Arriving::new(&pager, 100);
    arriving.child.ask(Op::Write, BASE + 60 * P, 1, 0);
    arriving.restored(&pager, 0, 100);
    arriving.is_refused(&pager, arriving.verify(&pager), 60);
    assert!(!pager.client.state().unwrap().failed.is_empty());
}

#[test]
fn a_page_of_unknown_origin_that_the_push_meets_fails_the_pager() {
    let pager = Pager::new();
    let arriving = Arriving::new(&pager, 100);
    arriving.child.ask(Op::Write, BASE + 60 * P, 1, 0);
    arriving.restored(&pager, 0, 100);
    pager.client.push().unwrap();
    let Event::Failed { reason } = pager.event() else { panic!("it has not failed") };
    assert!(reason.contains(&format!("{:#x}", BASE + 60 * P)), "{reason}");
    let state = pager.client.state().unwrap();
    assert!(!state.done && state.spaces == 1, "it lets nobody go on: {state:?}");
    assert_eq!(state.failed, reason);
}

#[test]
fn one_page_that_criu_restored_into_a_huge_page_hides_none_in_silence() {
    let pager = Pager::new();
    let arriving = Arriving::new(&pager, 2 * HUGE);
    // BASE is at a border of huge pages.
    arriving.child.ask(Op::Huge, BASE, 2 * HUGE, 0);
    arriving.child.ask(Op::Write, BASE + 5 * P, 1, arriving.wanted[5]);
    pager.in_images(arriving.pid, BASE + 5 * P, 1);
    arriving.restored(&pager, 0, 2 * HUGE);
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if setting.contains("[always]") || setting.contains("[madvise]") {
        arriving.is_refused(&pager, arriving.verify(&pager), 0);
    } else {
        arriving.verify(&pager).unwrap();
    }
}

#[test]
fn pages_that_criu_restored_from_its_images_are_left_as_they_are() {
    let pager = Pager::new();
    let mut arriving = Arriving::new(&pager, 100);
    for page in [0, 41, 42, 99] {
        arriving.child.ask(Op::Write, BASE + page * P, 1, 1000 + page);
        pager.in_images(arriving.pid, BASE + page * P, 1);
        arriving.wanted[usize::try_from(page).unwrap()] = 1000 + page;
    }
    // One that is in the images, and is not there all the same, comes from here.
    pager.in_images(arriving.pid, BASE + 50 * P, 1);
    arriving.restored(&pager, 0, 100);
    arriving.verify(&pager).unwrap();
    pager.client.push().unwrap();
    pager.wait_for(&Event::Done);
    assert_eq!(arriving.child.ask(Op::Read, BASE, 100, 0), arriving.wanted);
    pager.wait_for_empty_store();
}

#[test]
fn a_page_that_the_process_has_made_a_guard_is_no_alarm() {
    let pager = Pager::new();
    let arriving = Arriving::new(&pager, 100);
    pager.pending(arriving.pid, BASE, 100);
    arriving.restored(&pager, 0, 100);
    arriving.verify(&pager).unwrap();
    let son = arriving.child.another(Op::Fork);
    if arriving.child.ask(Op::Guard, BASE + 20 * P, 1, 0) == [0] {
        return println!("this kernel has no guard pages");
    }
    son.ask(Op::Guard, BASE + 30 * P, 2, 0);
    pager.put(arriving.pid, BASE, &arriving.wanted);
    pager.client.push().unwrap();
    pager.wait_for(&Event::Done);
    for (process, from, to) in [(&arriving.child, 20, 21), (&son, 30, 32)] {
        let page = |n: u64| usize::try_from(n).unwrap();
        assert_eq!(process.ask(Op::Read, BASE, from, 0), arriving.wanted[..page(from)]);
        assert_eq!(process.ask(Op::Read, BASE + to * P, 100 - to, 0), arriving.wanted[page(to)..]);
    }
}

#[test]
fn pages_for_memory_that_criu_has_not_left_to_be_filled_fail_the_pager() {
    let pager = Pager::new();
    let arriving = Arriving::new(&pager, 100);
    arriving.restored(&pager, 0, 70);
    arriving.verify(&pager).unwrap();
    pager.client.push().unwrap();
    let Event::Failed { reason } = pager.event() else { panic!("it has not failed") };
    assert!(reason.contains("no place") && reason.contains(&format!("process {}", arriving.pid)), "{reason}");
}

#[test]
fn a_restored_process_that_is_not_named_is_missed() {
    let pager = Pager::new();
    let arriving = Arriving::new(&pager, 10);
    arriving.restored(&pager, 0, 10);
    let Err(PagerError::Refused { reason, .. }) = pager.client.verify(&[]) else {
        panic!("it is not missed")
    };
    assert!(reason.contains(&format!("process {}", arriving.pid)), "{reason}");
}

#[test]
fn a_process_with_another_number_inside_is_not_taken_for_the_one_that_came() {
    let pager = Pager::new();
    let (arriving, other) = (Arriving::new(&pager, 10), Child::new());
    arriving.restored(&pager, 0, 10);
    let pid = u32::try_from(other.ask(Op::Pid, 0, 0, 0)[0]).unwrap();
    let Err(error) = pager.client.verify(&[Restored { space: arriving.pid, pid }]) else { panic!("it is") };
    assert!(error.to_string().contains("cannot check"), "{error}");
}
