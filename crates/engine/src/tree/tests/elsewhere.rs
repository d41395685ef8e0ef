//! Files whose content comes in another way than their names.

use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, Mutex};

use super::*;

/// A file without a name, and what it was told.
#[derive(Debug, Clone)]
struct Nameless {
    number: u32,
    file: Arc<File>,
    modified: Arc<Mutex<Vec<(i64, u32)>>>,
}

impl Nameless {
    fn new(pair: &Pair, number: u32, content: &[u8]) -> Self {
        let mut how = File::options();
        let file = how.read(true).write(true).custom_flags(libc::O_TMPFILE).open(&pair.copy).unwrap();
        file.write_all_at(content, 0).unwrap();
        Self { number, file: Arc::new(file), modified: Arc::default() }
    }
}

impl Contents for Nameless {
    fn find(&self, number: u32, size: u64) -> Option<String> {
        use std::os::fd::AsRawFd;
        let fits = number == self.number && size == self.file.metadata().unwrap().len();
        fits.then(|| format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }

    fn named(&self, number: u32, modified: (i64, u32)) -> std::io::Result<()> {
        assert_eq!(number, self.number);
        self.modified.lock().unwrap().push(modified);
        Ok(())
    }
}

/// All of the source, with the content of these inodes elsewhere; the items that were sent.
fn carry(pair: &Pair, elsewhere: &Elsewhere, contents: &Nameless) -> Result<Vec<Item>, TreeError> {
    let snapshot = Snapshot::scan(&pair.source).unwrap();
    let mut receiver = Receiver::new(&pair.copy, ROOMY).unwrap().with(Box::new(contents.clone()));
    let mut items = Vec::new();
    send_without(snapshot.root(), &snapshot.everything(), elsewhere, &mut |item| {
        items.push(item.clone());
        receiver.apply(item)
    })?;
    receiver.finish()?;
    Ok(items)
}

#[test]
fn a_file_whose_content_came_gets_its_names_and_its_attributes() {
    let pair = Pair::new();
    fill(&pair.source);
    let large = pair.source.join("large");
    let content = fs::read(&large).unwrap();
    fs::hard_link(&large, pair.source.join("z-also-large")).unwrap();
    let inode = fs::metadata(&large).unwrap().ino();
    let contents = Nameless::new(&pair, 7, &content);
    let items = carry(&pair, &Elsewhere::from([(inode, 7)]), &contents).unwrap();
    let sent = items.iter().filter_map(|item| match item {
        Item::Data(data) => Some(data.bytes.len()),
        _ => None,
    });
    assert!(sent.sum::<usize>() < content.len(), "it was not sent a second time");
    pair.assert_same();
    let copied = fs::metadata(pair.copy.join("z-also-large")).unwrap();
    assert_eq!((copied.ino(), copied.nlink()), (contents.file.metadata().unwrap().ino(), 2));
    let nanoseconds = u32::try_from(copied.mtime_nsec()).unwrap();
    assert_eq!(*contents.modified.lock().unwrap(), [(copied.mtime(), nanoseconds)]);
}

#[test]
fn a_file_whose_content_did_not_come_has_no_name() {
    let pair = Pair::new();
    fs::write(pair.source.join("file"), b"content").unwrap();
    let inode = fs::metadata(pair.source.join("file")).unwrap().ino();
    for (number, content) in [(8, &b"content"[..]), (7, b"less")] {
        let contents = Nameless::new(&pair, number, content);
        let refused = carry(&pair, &Elsewhere::from([(inode, 7)]), &contents).unwrap_err();
        let why = std::error::Error::source(&refused).unwrap().to_string();
        assert!(why.contains("file is refused: its content is to come in another way"), "{why}");
        assert!(!pair.copy.join("file").exists());
    }
}

#[test]
fn the_largest_files_are_found_once_each_and_others_are_not() {
    let pair = Pair::new();
    for (name, bytes) in [("a", 300_000), ("b", 200_000), ("c", 100_000), ("d", 1000)] {
        fs::write(pair.source.join(name), vec![1; bytes]).unwrap();
    }
    fs::hard_link(pair.source.join("a"), pair.source.join("e")).unwrap();
    // It has no content, whatever its size is.
    File::create(pair.source.join("f")).unwrap().set_len(1 << 30).unwrap();
    symlink("/etc/passwd", pair.source.join("g")).unwrap();
    let snapshot = Snapshot::scan(&pair.source).unwrap();
    fs::remove_file(pair.source.join("b")).unwrap();
    let sizes = |least, most| -> Vec<u64> {
        let files = snapshot.large_files(least, most).unwrap();
        files.iter().map(|file| u64::try_from(rustix::fs::fstat(file).unwrap().st_size).unwrap()).collect()
    };
    assert_eq!(sizes(64 << 10, 9), [300_000, 100_000], "one has gone");
    assert_eq!(sizes(64 << 10, 1), [300_000]);
    let inode = fs::metadata(pair.source.join("a")).unwrap().ino();
    let (all, without) = (snapshot.bytes(), snapshot.bytes_without(&Elsewhere::from([(inode, 1)])));
    assert!(all - without >= 300_000 && without >= 300_000, "{all} {without}");
}

#[test]
fn nothing_there_is_of_an_earlier_round() {
    let entry = || Entry { path: b"f".to_vec(), kind: Kind::File.into(), size: 9, ..Entry::default() };
    for item in [
        Item::Hold(Hold { path: b"f".to_vec(), number: 0 }),
        Item::Hole(Hole { offset: 0, length: 1 }),
        Item::Entry(Entry { kept: true, ..entry() }),
        Item::Entry(Entry { held: Some(0), ..entry() }),
    ] {
        let pair = Pair::new();
        let contents = Nameless::new(&pair, 7, b"");
        let mut receiver = Receiver::new(&pair.copy, ROOMY).unwrap().with(Box::new(contents));
        receiver.apply(Item::Entry(entry())).unwrap();
        let error = receiver.apply(item).unwrap_err().to_string();
        assert!(error.contains("it is of an earlier round, and there is only one"), "{error}");
    }
}
