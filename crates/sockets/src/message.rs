//! Netlink's envelope: the header of a request, the messages in an answer, and the attributes behind a message.
//! The layouts are those of `linux/netlink.h` and `linux/sock_diag.h`.

use std::io;

/// What one read of a dump takes at most; the kernel's pieces have at most 32 KiB.
pub(crate) const ANSWERS: usize = 64 << 10;
/// What the answer about one socket takes at most.
pub(crate) const ANSWER: usize = 4096;

/// Asks for all sockets (`NLM_F_DUMP`).
pub(crate) const DUMP: u16 = 0x300;
const NLM_F_REQUEST: u16 = 1;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// Bytes of `struct nlmsghdr` and of `struct rtattr`.
const HEADER: usize = 16;
const ATTRIBUTE: usize = 4;

/// Whether more of an answer follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Piece {
    Middle,
    Last,
}

/// About sockets: which there are, and that one is to end.
pub(crate) const BY_FAMILY: u16 = 20;
pub(crate) const DESTROY: u16 = 21;
/// An answer is wanted where nothing is told (`NLM_F_ACK`).
pub(crate) const ACKNOWLEDGED: u16 = 4;

/// A request with its header. Sequence number and port are zero: one request is under way at a time, so that no
/// answer has to be told from another.
pub(crate) fn request(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let length = HEADER + body.len();
    let mut request = Vec::with_capacity(length);
    request.extend(u32::try_from(length).unwrap_or_default().to_ne_bytes());
    request.extend(kind.to_ne_bytes());
    request.extend((NLM_F_REQUEST | flags).to_ne_bytes());
    request.extend([0; 8]);
    request.extend(body);
    request
}

/// Reads one piece of an answer, which holds several messages, and hands on the body of each that is a socket.
pub(crate) fn read(mut rest: &[u8], mut take: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<Piece> {
    while !rest.is_empty() {
        let length = word(rest, 0).ok_or_else(|| malformed("half a header"))? as usize;
        let kind = short(rest, 4).ok_or_else(|| malformed("half a header"))?;
        let body = rest.get(HEADER..length).ok_or_else(|| malformed("a message longer than its answer"))?;
        match kind {
            NLMSG_DONE | NLMSG_ERROR => {
                // Both carry an error number, which is zero or negative.
                let errno = word(body, 0).ok_or_else(|| malformed("half an error"))?.cast_signed();
                if errno < 0 {
                    return Err(io::Error::from_raw_os_error(errno.saturating_neg()));
                }
                return Ok(if kind == NLMSG_DONE { Piece::Last } else { Piece::Middle });
            }
            BY_FAMILY => take(body)?,
            _ => {}
        }
        rest = rest.get(aligned(length)..).unwrap_or_default();
    }
    Ok(Piece::Middle)
}

/// Finds an attribute among those behind a message; none behind one that is cut off.
pub(crate) fn attribute(mut rest: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let (kind, value, behind) = first_attribute(rest)?;
        if kind == wanted {
            return Some(value);
        }
        rest = behind;
    }
}

/// The kind and the value of the first attribute, and the attributes behind it.
pub(crate) fn first_attribute(attributes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let (length, kind) = (usize::from(short(attributes, 0)?), short(attributes, 2)?);
    let value = attributes.get(ATTRIBUTE..length)?;
    Some((kind, value, attributes.get(aligned(length)..).unwrap_or_default()))
}

pub(crate) fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the kernel sent {what}"))
}

pub(crate) fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes)
}

pub(crate) fn short(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().copied().map(u16::from_ne_bytes)
}

/// Messages and attributes begin at multiples of four.
fn aligned(length: usize) -> usize {
    length.saturating_add(3) & !3
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A message as the kernel sends it.
    pub(crate) fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let mut message = u32::try_from(HEADER + body.len()).unwrap().to_ne_bytes().to_vec();
        message.extend(kind.to_ne_bytes());
        message.extend([0; 10]);
        message.extend(body);
        message.resize(aligned(message.len()), 0);
        message
    }

    /// One that is about a socket.
    fn socket(body: &[u8]) -> Vec<u8> {
        message(BY_FAMILY, body)
    }

    fn bodies(answer: &[u8]) -> io::Result<(Vec<Vec<u8>>, Piece)> {
        let mut found = Vec::new();
        let piece = read(answer, |body| {
            found.push(body.to_vec());
            Ok(())
        })?;
        Ok((found, piece))
    }

    #[test]
    fn an_answer_is_read_to_its_last_message() {
        let mut answer = socket(b"first");
        answer.extend(message(99, b"of another kind"));
        answer.extend(socket(b"second"));
        let both = vec![b"first".to_vec(), b"second".to_vec()];
        assert_eq!(bodies(&answer).unwrap(), (both.clone(), Piece::Middle));
        answer.extend(message(NLMSG_DONE, &[0; 4]));
        assert_eq!(bodies(&answer).unwrap(), (both, Piece::Last));
    }

    #[test]
    fn a_refusal_of_the_kernel_is_its_error() {
        for kind in [NLMSG_ERROR, NLMSG_DONE] {
            let refused = message(kind, &(-2_i32).to_ne_bytes());
            assert_eq!(bodies(&refused).unwrap_err().kind(), io::ErrorKind::NotFound);
        }
        let worst = message(NLMSG_ERROR, &i32::MIN.to_ne_bytes());
        assert_eq!(bodies(&worst).unwrap_err().raw_os_error(), Some(i32::MAX));
    }

    #[test]
    fn what_is_cut_off_is_refused_and_not_guessed() {
        let whole = socket(&[1; 20]);
        for length in 1..whole.len() {
            assert!(bodies(&whole[..length]).is_err(), "{length}");
        }
        assert!(bodies(&message(NLMSG_ERROR, &[0; 3])).is_err());
        // A message that says it has no length must not be read for ever.
        assert!(bodies(&[0; 64]).is_err());
    }

    #[test]
    fn an_attribute_is_found_behind_others() {
        let mut attributes = vec![7, 0, 5, 0, b'o', b'n', b'e', 0];
        attributes.extend([8, 0, 2, 0, 1, 2, 3, 4]);
        assert_eq!(attribute(&attributes, 5), Some(&b"one"[..]));
        assert_eq!(attribute(&attributes, 2), Some(&[1, 2, 3, 4][..]));
        assert_eq!(attribute(&attributes, 3), None);
        assert_eq!(attribute(&attributes[..14], 2), None);
        assert_eq!(attribute(&[0; 16], 5), None, "one without a length");
    }

    proptest! {
        #[test]
        fn no_bytes_bring_it_down(bytes in prop::collection::vec(any::<u8>(), 0..400), wanted in 0_u16..8) {
            let _ = bodies(&bytes);
            let _ = attribute(&bytes, wanted);
            prop_assert_eq!(bodies(&socket(&bytes)).unwrap().0, vec![bytes]);
        }
    }
}
