//! Real processes of `godwit-cc` at rest, dumped by CRIU, rewritten, and restored by CRIU; as root.

mod service;

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use godwit_criu::images::{Architecture, Pagemap, ProcessImages, ThreadImage, stopped_processes};
use godwit_crossing::{Fate, Target, eligibility, rewrite};
use godwit_isa_plan::Set;

use nix::sys::signal::Signal;
use service::{Dumped, LINES, Service, expected, signal, target};

/// A service that goes on from its images again and again prints what one does that was never disturbed.
#[test]
fn a_service_goes_on_from_rewritten_images_of_the_same_set() -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let target = target("service", Set::X86_64)?;
    let mut service = Service::start("service")?;
    for turn in 1..=3 {
        let rests = service.rest_after(turn * LINES / 5)?;
        let [rest] = &rests[..] else { panic!("one process: {rests:?}") };
        let images = scratch.path().join(turn.to_string());
        let dumped = service.dump(&images)?;
        let before = service.output()?;
        ensure!(before.lines().count() < LINES, "it came to its end before it moved");

        let rewritten = rewrite(&dumped.images, &dumped.records, &target)?;
        let [process] = &rewritten.processes[..] else { panic!("one process: {rewritten:?}") };
        assert_eq!(rest.threads, 2);
        assert_eq!(process.threads, 2);
        assert!(process.dropped_pages > 0 && process.kept_pages > 512, "{process:?}");
        rewritten.changed.write(&images)?;
        let (kept, dropped) = (process.kept_pages, process.dropped_pages);
        println!("turn {turn}: {kept} pages kept, {dropped} left out, rest after {:?}", rest.park_time);
        service.restore(&images)?;
    }
    assert_eq!(service.end()?, expected("service")?);
    Ok(())
}

/// Processes that share memory go on with it, one that was stopped is stopped, and one that has ended says how.
#[test]
fn a_family_goes_on_with_shared_memory_a_stopped_process_and_a_zombie() -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let images = scratch.path().join("images");
    let mut service = Service::start("family")?;
    let rests = service.rest_after(LINES / 3)?;
    assert_eq!(rests.len(), 2, "{rests:?}");
    let children = service.children()?;
    let [ended, other] = children[..] else { panic!("two children: {children:?}") };
    service.is_in_state(ended, 'Z')?;
    let locked = service.locked()?;
    assert_ne!(locked, "0 kB");
    signal(other.into(), Signal::SIGSTOP)?;
    service.is_in_state(other, 'T')?;
    let Dumped { images: found, records } = service.dump(&images)?;
    ensure!(service.output()?.lines().count() < LINES, "it came to its end before it moved");
    assert_eq!(stopped_processes(&images)?, [other]);
    let shared: Vec<_> = found.names().filter(|name| name.starts_with("pagemap-shmem-")).collect();
    assert_eq!(shared.len(), 1, "{shared:?}");

    let [x86, arm] = [target("family", Set::X86_64)?, target("family", Set::Aarch64)?];
    let there = after(&found, rewrite(&found, &records, &arm)?)?;
    let core =
        ThreadImage::decode(there.record(&format!("core-{ended}.img"))?).map_err(anyhow::Error::msg)?;
    assert_eq!((core.has_ended(), core.architecture()), (Ok(true), Ok(Some(Architecture::Aarch64))));
    let rewritten = rewrite(&found, &records, &x86)?;
    assert_eq!(
        rewritten.processes.iter().map(|process| process.pid).collect::<Vec<_>>(),
        [service.pid, other]
    );
    assert_eq!(after(&there, rewrite(&there, &records, &x86)?)?, after(&found, rewritten.clone())?);

    rewritten.changed.write(&images)?;
    service.restore(&images)?;
    service.is_in_state(other, 'T')?;
    service.is_in_state(ended, 'Z')?;
    assert_eq!(service.locked()?, locked);
    signal(other.into(), Signal::SIGCONT)?;
    let output = service.end()?;
    assert!(output.ends_with("child 0: 7\nchild 1: 8\n"), "{output}");
    assert_eq!(output, expected("family")?);
    Ok(())
}

/// To arm64 and back, real images are the same again, but for what a set has alone.
#[test]
fn real_images_come_back_from_the_other_set() -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let Dumped { images: found, records } =
        Service::start("service")?.dump_after(5, &scratch.path().join("images"))?;
    let [x86, arm] = [target("service", Set::X86_64)?, target("service", Set::Aarch64)?];

    let there = after(&found, rewrite(&found, &records, &arm)?)?;
    let back = after(&there, rewrite(&there, &records, &x86)?)?;
    let straight = after(&found, rewrite(&found, &records, &x86)?)?;
    assert_eq!(back, straight);
    // What is rewritten is rewritten to the same.
    assert_eq!(after(&straight, rewrite(&straight, &records, &x86)?)?, straight);
    for (images, target) in [(&there, &arm), (&straight, &x86)] {
        only_neutral_pages(images, target)?;
    }
    let pid = found.tree()?[0].pid;
    assert_ne!(there.image(&format!("core-{pid}.img"))?, found.image(&format!("core-{pid}.img"))?);
    measured(|| Ok(rewrite(&found, &records, &arm).map(drop)?))
}

/// The images after a change, and after their pages were left out.
fn after(images: &ProcessImages, rewritten: godwit_crossing::Rewritten) -> Result<ProcessImages> {
    let mut all: std::collections::BTreeMap<_, _> = images
        .names()
        .map(|name| Ok((name.to_owned(), images.image(name)?.to_vec())))
        .collect::<Result<_>>()?;
    all.extend(rewritten.changed.images);
    let mut pages = std::collections::BTreeMap::new();
    for (_, image) in all.iter().filter(|(name, _)| name.starts_with("pagemap-")) {
        let number = Pagemap::decode(image).map_err(anyhow::Error::msg)?.pages_id;
        let kept = rewritten.changed.pages.get(&number);
        let bytes = kept.map(|ranges| ranges.iter().map(|range| range.end - range.start).sum());
        pages.extend(bytes.or(images.pages(number)).map(|bytes| (number, bytes)));
    }
    Ok(ProcessImages::new(all, pages))
}

/// No page of code, of private data or of a native stack is in the images.
fn only_neutral_pages(images: &ProcessImages, target: &Target) -> Result<()> {
    let pid = images.tree()?[0].pid;
    let pagemap =
        Pagemap::decode(images.image(&format!("pagemap-{pid}.img"))?).map_err(anyhow::Error::msg)?;
    let executable = &target.programs.values().next().expect("one").executable;
    let mut pages = 0;
    for page in pagemap.runs.into_iter().flat_map(|run| run.addresses.step_by(4096)) {
        assert_eq!(Fate::of(page, executable), Fate::Stays, "{page:#x}");
        pages += 1;
    }
    assert!(pages > 512, "{pages}");
    Ok(())
}

/// Tells how long it takes; no test goes by that.
fn measured(work: impl Fn() -> Result<()>) -> Result<()> {
    let mut times = Vec::new();
    for _ in 0..200 {
        let began = Instant::now();
        work()?;
        times.push(began.elapsed());
    }
    times.sort();
    let at = |part: usize| times.get(times.len() * part / 100).copied().unwrap_or(Duration::MAX);
    println!("rewriting a process of two threads: median {:?}, 99 % below {:?}", at(50), at(99));
    Ok(())
}

/// Before anything is done to a service that runs, it is known whether it may go.
#[test]
fn a_running_service_may_go_to_both_sets_and_to_the_smallest_address_space() -> Result<()> {
    let service = Service::start("service")?;
    service.prints(1)?;
    let facts = service.facts()?;
    for set in Set::ALL {
        let mut target = target("service", set)?;
        assert_eq!(eligibility(std::slice::from_ref(&facts), 4096, &target), Ok(()));
        // The least that kernels for arm64 have; the first stack of this one's was above that.
        target.node.address_end = 1 << 39;
        assert_eq!(eligibility(std::slice::from_ref(&facts), 4096, &target), Ok(()));
        target.node.address_end = 1 << 37;
        let refused =
            eligibility(std::slice::from_ref(&facts), 4096, &target).expect_err("it has mappings there");
        let [refused] = &refused[..] else { panic!("one process: {refused:?}") };
        assert!(refused.to_string().contains("processes of the other node end at 0x2000000000"), "{refused}");
    }
    Ok(())
}

/// What does not rest, or is another program, is refused by name.
#[test]
fn a_process_that_does_not_rest_is_refused_by_name() -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let Dumped { images: found, mut records } =
        Service::start("service")?.dump_after(5, &scratch.path().join("images"))?;
    let mut target = target("service", Set::Aarch64)?;
    let pid = found.tree()?[0].pid;
    let refused =
        |records: &_, target: &_| rewrite(&found, records, target).expect_err("it does not fit").to_string();
    let path = service::executable("service", Set::X86_64)?;
    let begin = format!("process {pid} ({}) ", path.display());

    let record = records.get_mut(&pid).expect("it was written");
    let whole = *record;
    record[48] = 0;
    assert_eq!(
        refused(&records, &target),
        format!("{begin}was not at rest when it was dumped; move the service again")
    );
    let mut other = whole;
    other[0] ^= 1;
    records.insert(pid, other);
    assert!(refused(&records, &target).contains(&format!("{begin}is of another build")));
    records.insert(pid, whole);
    target.programs.clear();
    assert!(refused(&records, &target).starts_with(&format!("{begin}has no executable for arm64")));
    Ok(())
}
