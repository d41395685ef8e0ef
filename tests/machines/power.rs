//! Power cuts: a disk with a volatile cache.

use std::process::Stdio;

use godwit_lab::Machine;
use godwit_tests::Bed;

use crate::run;

/// How often a disk may have written by chance what it was not asked to: the kernel flushes for its own journal, too.
const CHANCES: u32 = 3;

#[test]
#[ignore = "boots virtual machines: make test-machines"]
fn a_volatile_disk_loses_in_a_power_cut_what_was_not_flushed_and_nothing_else() {
    let bed = Bed::up_with("disk", |config| {
        config.nodes = vec!["a".to_owned()];
        config.daemons = false;
        let machine: Machine = "debian13:disk=volatile".parse().unwrap();
        config.machines.insert("a".to_owned(), machine);
    });
    let lab = bed.lab();
    // Whatever else writes in the machine would flush the disk, too.
    let write = |file: &str, number: u32, how: &str| {
        format!("printf '%4096d' {number} | dd of=/srv/{file} bs=4096 conv=notrunc{how} status=none\n")
    };
    let mut kept = Vec::new();
    run(lab, "a", &(write("flushed", 0, "") + &write("sent", 0, "") + "sync"));
    for number in 1..=CHANCES {
        let script = format!(
            "sync\n{}{}echo written",
            write("flushed", number, ",fsync"),
            // Past the machine's own cache: its disk has it when dd ends.
            write("sent", number, " oflag=direct"),
        );
        let mut command = lab.command("a", "bash").unwrap();
        let output = command.args(["-c", &script]).stdin(Stdio::null()).output().unwrap();
        assert_eq!(output.stdout, b"written\n", "{}", String::from_utf8_lossy(&output.stderr));
        lab.cut_power("a").unwrap();
        lab.power_on("a").unwrap();
        let read = |file| run(lab, "a", &format!("cat /srv/{file}")).trim().parse::<u32>().unwrap();
        assert_eq!(read("flushed"), number, "a disk may not lose what was flushed");
        let sent = read("sent");
        assert!(sent <= number);
        kept.push(sent == number);
        if sent < number {
            return;
        }
    }
    panic!("what was written and not flushed is there after each power cut: {kept:?}");
}
