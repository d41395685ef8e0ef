//! One session between two nodes: keys for both directions, made of a secret of each node, and what
//! a packet looks like on the wire.
//!
//! ```text
//!   0        8          16                       n+16      n+32
//!   ┌────────┬──────────┬────────────────────────┬─────────┐
//!   │ session│ number   │ IP packet, encrypted   │ tag     │     payload of a UDP packet
//!   └────────┴──────────┴────────────────────────┴─────────┘
//!    big endian, both authenticated
//! ```
//!
//! The cipher is ChaCha20-Poly1305 (RFC 8439), as quick on small processors as on large ones; the
//! nonce is the packet's number, which never comes twice under one key. Keys are derived from both
//! secrets with HKDF (RFC 5869). A node makes its secrets anew in each of its lives, so a session is
//! new as soon as either node was restarted, and its numbers can begin at zero.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::error::Unspecified;
use ring::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use ring::rand::{SecureRandom, SystemRandom};

use super::window::Window;

/// Session and number.
pub(super) const HEADER: usize = 16;
/// Poly1305's tag.
pub(super) const TAG: usize = 16;
/// Packets under one key, after which there must be another. The cipher allows 2^64; nobody gets
/// here, as the keys are renewed by time.
const MOST_PACKETS: u64 = 1 << 60;
/// Changed when the wire changes, so that two versions share no session.
const SALT: &[u8] = b"godwit tunnel, version 1";

/// What one node gives to a session with another. It is told to that node only.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    /// A new one.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub fn new() -> std::io::Result<Self> {
        let mut bytes = [0; 32];
        let filled = SystemRandom::new().fill(&mut bytes);
        filled.map_err(|Unspecified| std::io::Error::other("the system gives no random numbers"))?;
        Ok(Self(bytes))
    }

    /// Another node's, as it told it; nothing if it is none.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// For the other node, over a connection that nobody else can read.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// Keys that two nodes share.
pub struct Session {
    id: u64,
    made: Instant,
    seal: LessSafeKey,
    open: LessSafeKey,
    next: AtomicU64,
    window: Mutex<Window>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Session({:016x})", self.id)
    }
}

/// The length of what HKDF is asked for.
struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

impl Session {
    /// The session between this node and another, from the secret and the name of each. Both sides
    /// come to the same, and each with the other's keys reversed.
    #[must_use]
    pub fn agree(own: (&str, &Secret), other: (&str, &Secret)) -> Self {
        let (first, second) = if own.0 <= other.0 { (own, other) } else { (other, own) };
        let both = [first.1.0, second.1.0].concat();
        let root = Salt::new(HKDF_SHA256, SALT).extract(&both);
        let mut id = [0; 8];
        derive(&root, &["session", first.0, second.0], &mut id);
        Self {
            id: u64::from_be_bytes(id),
            made: Instant::now(),
            seal: key(&root, own.0, other.0),
            open: key(&root, other.0, own.0),
            next: AtomicU64::new(0),
            window: Mutex::new(Window::new()),
        }
    }

    /// What both sides call it.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// When this side made it.
    #[must_use]
    pub fn made(&self) -> Instant {
        self.made
    }

    /// Packets that this side sent.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// Encrypts the packet of `length` bytes that lies in `buffer` behind room for the header, with
    /// room for the tag behind it, and makes it what goes on the wire: that many bytes. Nothing when
    /// there is no room, or the keys are used up.
    pub(super) fn seal(&self, buffer: &mut [u8], length: usize) -> Option<usize> {
        let (head, rest) = buffer.split_first_chunk_mut::<HEADER>()?;
        let (body, rest) = rest.split_at_mut_checked(length)?;
        let end = rest.first_chunk_mut::<TAG>()?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        if number >= MOST_PACKETS {
            return None;
        }
        head[..8].copy_from_slice(&self.id.to_be_bytes());
        head[8..].copy_from_slice(&number.to_be_bytes());
        let tag = self.seal.seal_in_place_separate_tag(nonce(number), Aad::from(&*head), body).ok()?;
        end.copy_from_slice(tag.as_ref());
        Some(HEADER + length + TAG)
    }

    /// The packet in what came from the wire; nothing when it is not genuine, or came before.
    pub(super) fn open<'a>(&self, packet: &'a mut [u8]) -> Option<&'a [u8]> {
        let (header, body) = packet.split_first_chunk_mut::<HEADER>()?;
        let number = number_of(header);
        let window = || self.window.lock().unwrap_or_else(PoisonError::into_inner);
        if !window().is_new(number) {
            return None;
        }
        let plain = self.open.open_in_place(nonce(number), Aad::from(&*header), body).ok()?;
        window().take(number).then_some(&*plain)
    }
}

/// The session that a packet from the wire says it is of.
pub(super) fn session_of(packet: &[u8]) -> Option<u64> {
    (packet.len() >= HEADER + TAG).then(|| packet.first_chunk::<8>().map(|id| u64::from_be_bytes(*id)))?
}

fn number_of(header: &[u8; HEADER]) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&header[8..]);
    u64::from_be_bytes(number)
}

fn nonce(number: u64) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[NONCE_LEN - 8..].copy_from_slice(&number.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

/// The key of one direction.
fn key(root: &Prk, from: &str, to: &str) -> LessSafeKey {
    let mut bytes = [0; 32];
    derive(root, &["key", from, to], &mut bytes);
    #[allow(clippy::expect_used, reason = "the length is the cipher's own")]
    LessSafeKey::new(UnboundKey::new(&CHACHA20_POLY1305, &bytes).expect("32 bytes are a key"))
}

/// HKDF's output for these words; each is ended by a zero, which no name contains.
fn derive(root: &Prk, words: &[&str], out: &mut [u8]) {
    let info: Vec<&[u8]> = words.iter().flat_map(|word| [word.as_bytes(), b"\0".as_slice()]).collect();
    let made = root.expand(&info, Length(out.len())).and_then(|made| made.fill(out));
    #[allow(clippy::expect_used, reason = "HKDF gives up to 8,160 bytes")]
    made.expect("a few bytes of HKDF");
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn pair() -> (Session, Session) {
        let (at_a, at_b) = (Secret::new().unwrap(), Secret::new().unwrap());
        (Session::agree(("a", &at_a), ("b", &at_b)), Session::agree(("b", &at_b), ("a", &at_a)))
    }

    fn sealed(session: &Session, packet: &[u8]) -> Vec<u8> {
        let mut buffer = [[0; HEADER].as_slice(), packet, &[0; TAG]].concat();
        assert_eq!(session.seal(&mut buffer, packet.len()), Some(buffer.len()));
        buffer
    }

    #[test]
    fn what_one_node_seals_the_other_opens_once() {
        let (a, b) = pair();
        assert_eq!(a.id(), b.id());
        for (from, to) in [(&a, &b), (&b, &a)] {
            let packet = [b"secret".as_slice(), &[7; 1400]].concat();
            let mut wire = sealed(from, &packet);
            assert_eq!(wire.len(), packet.len() + HEADER + TAG);
            assert!(!wire.windows(6).any(|window| window == b"secret"));
            assert_eq!(session_of(&wire), Some(to.id()));
            let mut again = wire.clone();
            assert_eq!(to.open(&mut wire).unwrap(), packet);
            assert_eq!(to.open(&mut again), None, "a second time");
        }
        assert_eq!((a.sent(), b.sent()), (1, 1));
    }

    #[test]
    fn a_changed_or_cut_packet_is_not_opened_and_does_not_spoil_the_genuine_one() {
        let (a, b) = pair();
        let wire = sealed(&a, b"packet");
        assert_eq!(a.seal(&mut [0; HEADER + TAG], 1), None, "there is no room");
        for place in 0..wire.len() {
            let mut changed = wire.clone();
            changed[place] ^= 1;
            // The session's name is looked up before; here it is only authenticated.
            assert_eq!(b.open(&mut changed), None, "byte {place}");
            assert_eq!(b.open(&mut wire[..place].to_vec()), None, "cut to {place} bytes");
        }
        assert_eq!(b.open(&mut wire.clone()).unwrap(), b"packet");
    }

    #[test]
    fn another_secret_or_another_name_is_another_session() {
        let (own, other, third) = (Secret::new().unwrap(), Secret::new().unwrap(), Secret::new().unwrap());
        let session = Session::agree(("a", &own), ("b", &other));
        for foreign in [
            Session::agree(("b", &other), ("a", &third)),
            Session::agree(("b", &third), ("a", &own)),
            Session::agree(("c", &other), ("a", &own)),
        ] {
            assert_ne!(foreign.id(), session.id());
            assert_eq!(foreign.open(&mut sealed(&session, b"packet")), None);
        }
        // Nor does a node take its own packet for the other's.
        assert_eq!(session.open(&mut sealed(&session, b"packet")), None);
    }

    #[test]
    fn a_secret_is_not_shown_and_has_its_length() {
        let secret = Secret::new().unwrap();
        assert_eq!(format!("{secret:?}"), "Secret");
        assert_eq!(Secret::from_bytes(secret.as_bytes()), Some(secret));
        assert_eq!(Secret::from_bytes(&[0; 31]), None);
    }
}
