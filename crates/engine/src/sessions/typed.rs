//! What was typed at a terminal and not read yet, taken from it and put back: CRIU dumps a terminal's settings, and not what
//! the kernel holds for its reader as the reader would get it.
//!
//! With the settings of lines (ICANON) the kernel holds whole lines and the beginning of one, which can still be
//! corrected. Both are taken as they are, and put back in the same way, without an echo and without a meaning of keys: all
//! that had an effect has had it.
//!
//! Nothing of this is for a reader that runs: it would see other settings for a moment.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::termios::{self, InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios};
use serde::{Deserialize, Serialize};

/// Most bytes that are put back: what the kernel holds of a terminal's input (`N_TTY_BUF_SIZE`), less the one that it needs.
const HELD: usize = 4095;

/// Most bytes that are taken: what is on the way to the reader may be more than [`HELD`], and comes as that is read.
const MOST: usize = 64 << 10;

/// A piece of what was typed: what one read(2) gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Piece {
    /// The bytes.
    #[serde(with = "super::text")]
    text: Vec<u8>,
    /// Whether a reader gets it as it is, without the end of a line: by the key for the end of input.
    ended: bool,
}

impl Piece {
    /// What waits to be typed.
    pub(super) fn rest(text: Vec<u8>) -> Self {
        Self { text, ended: false }
    }
}

/// The terminal's end at which programs sit, of the end at which a user does.
pub(super) fn programs_end(user: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = (OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC | OFlags::NONBLOCK).bits();
    // SAFETY: the request takes the flags as its argument, and returns a descriptor that is nobody else's.
    unsafe {
        match libc::ioctl(user.as_raw_fd(), libc::TIOCGPTPEER, flags) {
            -1 => Err(io::Error::last_os_error()),
            end => Ok(OwnedFd::from_raw_fd(end)),
        }
    }
}

/// Takes all that was typed and not read.
pub(super) fn take(end: BorrowedFd<'_>) -> io::Result<Vec<Piece>> {
    let settings = termios::tcgetattr(end)?;
    let mut pieces = Vec::new();
    let mut left = MOST;
    if settings.local_modes.contains(LocalModes::ICANON) {
        while left > 0
            && let Some(text) = read(end, left)?
        {
            left -= text.len().max(1).min(left);
            let ended = !text.ends_with(b"\n");
            pieces.push(Piece { text, ended });
        }
    }
    // What has no end yet.
    let mut bare = settings.clone();
    bare.local_modes.remove(LocalModes::ICANON);
    bare.special_codes[SpecialCodeIndex::VMIN] = 1;
    bare.special_codes[SpecialCodeIndex::VTIME] = 0;
    termios::tcsetattr(end, OptionalActions::Now, &bare)?;
    let rest = read_all(end, left);
    termios::tcsetattr(end, OptionalActions::Now, &settings)?;
    let text = rest?;
    if !text.is_empty() {
        pieces.push(Piece { text, ended: false });
    }
    Ok(pieces)
}

/// One piece; none where there is nothing more.
fn read(end: BorrowedFd<'_>, most: usize) -> io::Result<Option<Vec<u8>>> {
    let mut text = vec![0; most.min(HELD + 1)];
    match rustix::io::read(end, &mut text) {
        Ok(length) => {
            text.truncate(length);
            Ok(Some(text))
        }
        Err(Errno::AGAIN | Errno::IO) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

fn read_all(end: BorrowedFd<'_>, mut left: usize) -> io::Result<Vec<u8>> {
    let mut all = Vec::new();
    while left > 0
        && let Some(text) = read(end, left)?.filter(|text| !text.is_empty())
    {
        left -= text.len();
        all.extend(text);
    }
    Ok(all)
}

/// Puts it back before anything else is typed. What does not fit is returned: it is to be typed again.
pub(super) fn put_back(end: BorrowedFd<'_>, pieces: &[Piece]) -> io::Result<Vec<u8>> {
    if pieces.is_empty() {
        return Ok(Vec::new());
    }
    let settings = termios::tcgetattr(end)?;
    let put = put(end, &settings, pieces);
    termios::tcsetattr(end, OptionalActions::Now, &settings)?;
    put
}

fn put(end: BorrowedFd<'_>, settings: &Termios, pieces: &[Piece]) -> io::Result<Vec<u8>> {
    let mut quiet = settings.clone();
    quiet.input_modes &= InputModes::IUTF8;
    let lines = quiet.local_modes & LocalModes::ICANON;
    quiet.local_modes = lines;
    let mut held = 0;
    for (number, piece) in pieces.iter().enumerate() {
        // The key for the end of input is a byte that is not in it.
        let key = (1..=u8::MAX).find(|byte| *byte != b'\n' && !piece.text.contains(byte));
        held += piece.text.len() + 1;
        let Some(key) = key.filter(|_| held <= HELD) else {
            return Ok(pieces[number..].iter().flat_map(|piece| piece.text.clone()).collect());
        };
        if !lines.is_empty() {
            for code in KEYS {
                quiet.special_codes[code] = 0;
            }
            quiet.special_codes[SpecialCodeIndex::VEOF] = key;
        }
        termios::tcsetattr(end, OptionalActions::Now, &quiet)?;
        for byte in &piece.text {
            type_at(end, *byte)?;
        }
        if piece.ended && !lines.is_empty() {
            type_at(end, key)?;
        }
    }
    Ok(Vec::new())
}

/// The keys that have a meaning in a line.
const KEYS: [SpecialCodeIndex; 12] = [
    SpecialCodeIndex::VINTR,
    SpecialCodeIndex::VQUIT,
    SpecialCodeIndex::VERASE,
    SpecialCodeIndex::VKILL,
    SpecialCodeIndex::VEOL,
    SpecialCodeIndex::VEOL2,
    SpecialCodeIndex::VSTART,
    SpecialCodeIndex::VSTOP,
    SpecialCodeIndex::VSUSP,
    SpecialCodeIndex::VREPRINT,
    SpecialCodeIndex::VWERASE,
    SpecialCodeIndex::VLNEXT,
];

/// As if a user had typed it, and before this returns: what is written at the other end comes later.
fn type_at(end: BorrowedFd<'_>, byte: u8) -> io::Result<()> {
    // SAFETY: the request reads one byte.
    match unsafe { libc::ioctl(end.as_fd().as_raw_fd(), libc::TIOCSTI, &raw const byte) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rustix::pty::{self, OpenptFlags};

    use super::*;

    fn terminal(canonical: bool) -> (OwnedFd, OwnedFd) {
        let user = pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        pty::unlockpt(&user).unwrap();
        let end = programs_end(user.as_fd()).unwrap();
        if !canonical {
            let mut raw = termios::tcgetattr(&end).unwrap();
            raw.make_raw();
            termios::tcsetattr(&end, OptionalActions::Now, &raw).unwrap();
        }
        (user, end)
    }

    /// What has been typed has arrived when its echo, or itself, can be read: this flushes what is under way.
    fn shown(user: &OwnedFd) -> Vec<u8> {
        rustix::io::ioctl_fionbio(user, true).unwrap();
        let mut all = Vec::new();
        let mut buffer = [0; 4096];
        while let Ok(length) = rustix::io::read(user, &mut buffer) {
            all.extend_from_slice(&buffer[..length]);
        }
        all
    }

    fn type_text(user: &OwnedFd, text: &[u8]) {
        assert_eq!(rustix::io::write(user, text).unwrap(), text.len());
    }

    #[test]
    fn lines_and_the_beginning_of_one_move_to_another_terminal_where_it_can_still_be_corrected() {
        let ((user, end), (other, other_end)) = (terminal(true), terminal(true));
        type_text(&user, b"one\ntwo\x04three\n\x04fou\x16\x03x");
        let pieces = take(end.as_fd()).unwrap();
        let piece = |text: &[u8], ended| Piece { text: text.to_vec(), ended };
        assert_eq!(
            pieces,
            [
                piece(b"one\n", false),
                piece(b"two", true),
                piece(b"three\n", false),
                piece(b"", true),
                piece(b"fou\x03x", false)
            ]
        );
        assert_eq!(take(end.as_fd()).unwrap(), []);
        let before = termios::tcgetattr(&other_end).unwrap();
        assert!(put_back(other_end.as_fd(), &pieces).unwrap().is_empty());
        assert_eq!(shown(&other), b"");
        let after = termios::tcgetattr(&other_end).unwrap();
        assert_eq!((before.local_modes, before.input_modes), (after.local_modes, after.input_modes));
        assert_eq!(before.special_codes[SpecialCodeIndex::VEOF], after.special_codes[SpecialCodeIndex::VEOF]);
        let read = || read(other_end.as_fd(), MOST).unwrap();
        for piece in &pieces[..4] {
            assert_eq!(read().as_ref(), Some(&piece.text));
        }
        // The end of a line that has none is not there yet.
        assert_eq!(read(), None);
        type_text(&other, b"\x7f\x7fr\n");
        assert_eq!(read().as_deref(), Some(&b"four\n"[..]));
    }

    #[test]
    fn keys_that_a_program_reads_one_by_one_move() {
        let ((user, end), (_other, other_end)) = (terminal(false), terminal(false));
        type_text(&user, b"\x03\x1b[A\r\n\x00\xff");
        let pieces = take(end.as_fd()).unwrap();
        assert!(put_back(other_end.as_fd(), &pieces).unwrap().is_empty());
        assert_eq!(read_all(other_end.as_fd(), MOST).unwrap(), b"\x03\x1b[A\r\n\x00\xff");
    }

    #[test]
    fn what_the_kernel_does_not_hold_is_returned() {
        let (_user, end) = terminal(false);
        let piece = |length| Piece { text: vec![b'x'; length], ended: false };
        assert_eq!(put_back(end.as_fd(), &[piece(4000), piece(200)]).unwrap(), vec![b'x'; 200]);
        assert_eq!(read_all(end.as_fd(), MOST).unwrap().len(), 4000);
    }
}
