//! The keys of godwit's own tunnel.
//!
//! ```text
//!   a: secret for b, newest session with b ──── Keys ───►  b: both secrets make the session;
//!   a: the same session, and sends with it ◄─── secret ──     takes its packets, and sends with it
//!                                                             once a has it
//! ```
//!
//! Every node asks every other once a second, and gets the same answer until a secret changes: after
//! a restart of either node, and every hour. So nothing has to be found out about the other side, and
//! what went wrong is mended at the next turn.
//!
//! The one that is asked keeps sending with the older keys until the other one says that it has the
//! newer, so that a renewal loses nothing. One that was restarted has none of the older: it is sent
//! the new ones at once.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_api::v1::{KeysRequest, KeysResponse};
use godwit_network::{Secret, Session, Tunnel};
use tonic::Status;

use super::port_of;

/// How long a secret of this node is used.
pub(super) const RENEW: Duration = Duration::from_secs(3600);

/// What this node has with another one.
struct Pair {
    /// What it gives to the session.
    secret: Secret,
    made: Instant,
    /// Where the other node was then.
    vtep: Ipv4Addr,
    /// The newest session; 0 for none.
    session: u64,
    /// Why there were no keys at the last turn; empty when there were.
    trouble: String,
}

/// What takes and uses sessions.
pub(crate) trait Sessions {
    /// Takes packets of this session from now on.
    fn install(&self, at: SocketAddrV4, session: Session);
    /// Whether packets of it are taken.
    fn knows(&self, session: u64) -> bool;
    /// Encrypts packets to the node of this session with it.
    fn send_with(&self, session: u64);
}

impl Sessions for Tunnel {
    fn install(&self, at: SocketAddrV4, session: Session) {
        Self::install(self, at, session);
    }

    fn knows(&self, session: u64) -> bool {
        Self::knows(self, session)
    }

    fn send_with(&self, session: u64) {
        Self::send_with(self, session);
    }
}

/// The secrets of a node, and what is made of them.
pub(crate) struct Secrets<T = Tunnel> {
    /// What they are for.
    pub tunnel: T,
    /// Where this node takes encrypted packets.
    port: u16,
    node: String,
    pairs: Mutex<HashMap<String, Pair>>,
}

fn no_random(error: &std::io::Error) -> Status {
    Status::internal(format!("cannot make keys: {error}"))
}

impl<T: Sessions> Secrets<T> {
    /// None yet.
    pub(crate) fn new(node: &str, port: u16, tunnel: T) -> Self {
        Self { tunnel, port, node: node.to_owned(), pairs: Mutex::default() }
    }

    fn pairs(&self) -> MutexGuard<'_, HashMap<String, Pair>> {
        // Every change under this lock is an insertion or an assignment: nothing is half done.
        self.pairs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What this node gives to its session with another, and the newest session with it. A secret is
    /// made where there is none, where the other node has moved, and where `renew` says so.
    fn own(
        &self,
        other: &str,
        vtep: Ipv4Addr,
        renew: impl FnOnce(Duration) -> bool,
    ) -> std::io::Result<(Secret, u64)> {
        let mut pairs = self.pairs();
        if let Some(pair) = pairs.get(other)
            && pair.vtep == vtep
            && !renew(pair.made.elapsed())
        {
            return Ok((pair.secret.clone(), pair.session));
        }
        let secret = Secret::new()?;
        let session = pairs.get(other).filter(|pair| pair.vtep == vtep).map_or(0, |pair| pair.session);
        let pair =
            Pair { secret: secret.clone(), made: Instant::now(), vtep, session, trouble: String::new() };
        pairs.insert(other.to_owned(), pair);
        Ok((secret, session))
    }

    /// Makes the session of both secrets and takes its packets; its name.
    fn agree(&self, own: &Secret, other: &str, at: SocketAddrV4, theirs: &Secret) -> u64 {
        let session = Session::agree((&self.node, own), (other, theirs));
        let id = session.id();
        self.tunnel.install(at, session);
        if let Some(pair) = self.pairs().get_mut(other) {
            pair.session = id;
            pair.trouble.clear();
        }
        id
    }

    /// What another node is asked.
    pub(super) fn request(
        &self,
        other: &str,
        vtep: Ipv4Addr,
        renew: impl FnOnce(Duration) -> bool,
    ) -> std::io::Result<(Secret, KeysRequest)> {
        let (own, session) = self.own(other, vtep, renew)?;
        let secret = own.as_bytes().to_vec().into();
        let request = KeysRequest { secret, session, port: self.port.into(), ..KeysRequest::default() };
        Ok((own, request))
    }

    /// Takes another node's answer to a request with this secret.
    pub(super) fn answered(
        &self,
        own: &Secret,
        other: &str,
        vtep: Ipv4Addr,
        answer: &KeysResponse,
    ) -> Result<(), Status> {
        let (at, theirs) = understood(vtep, &answer.secret, answer.port)?;
        // It has the session since before it answered.
        self.tunnel.send_with(self.agree(own, other, at, &theirs));
        Ok(())
    }

    /// Answers another node.
    pub(super) fn answer(
        &self,
        from: &str,
        vtep: Ipv4Addr,
        request: &KeysRequest,
    ) -> Result<KeysResponse, Status> {
        let (at, theirs) = understood(vtep, &request.secret, request.port)?;
        let (own, _) = self.own(from, vtep, |_| false).map_err(|e| no_random(&e))?;
        let id = self.agree(&own, from, at, &theirs);
        if request.session == id || !self.tunnel.knows(request.session) {
            self.tunnel.send_with(id);
        }
        let secret = own.as_bytes().to_vec().into();
        Ok(KeysResponse { secret, port: self.port.into(), ..KeysResponse::default() })
    }

    /// Why there are no keys for a node; empty where there are, or nothing is known yet.
    pub(super) fn trouble(&self, other: &str) -> String {
        self.pairs().get(other).map(|pair| pair.trouble.clone()).unwrap_or_default()
    }

    pub(super) fn failed(&self, other: &str, trouble: &str) {
        let mut pairs = self.pairs();
        let Some(pair) = pairs.get_mut(other) else { return };
        if pair.trouble != trouble {
            tracing::warn!(node = other, %trouble, "no keys could be agreed on");
            trouble.clone_into(&mut pair.trouble);
        }
    }
}

fn understood(vtep: Ipv4Addr, secret: &[u8], port: u32) -> Result<(SocketAddrV4, Secret), Status> {
    let both = port_of(port).zip(Secret::from_bytes(secret));
    let (port, secret) =
        both.ok_or_else(|| Status::invalid_argument("no secret, or no port, for a tunnel"))?;
    Ok((SocketAddrV4::new(vtep, port), secret))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const A: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 11);
    const B: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 12);

    /// Remembers sessions in place of a tunnel.
    #[derive(Default)]
    struct Noted {
        known: Mutex<Vec<u64>>,
        sends: Mutex<u64>,
    }

    impl Sessions for Noted {
        fn install(&self, _: SocketAddrV4, session: Session) {
            self.known.lock().unwrap().push(session.id());
        }

        fn knows(&self, session: u64) -> bool {
            self.known.lock().unwrap().contains(&session)
        }

        fn send_with(&self, session: u64) {
            assert!(self.knows(session), "{session:x} is not known");
            *self.sends.lock().unwrap() = session;
        }
    }

    fn keys(node: &str) -> Secrets<Noted> {
        Secrets::new(node, 7119, Noted::default())
    }

    fn sends(keys: &Secrets<Noted>) -> u64 {
        *keys.tunnel.sends.lock().unwrap()
    }

    /// One turn of `a` with `b`: its request, and the answer as it is on its way back.
    fn asks(a: &Secrets<Noted>, b: &Secrets<Noted>, renew: bool) -> (Secret, KeysResponse) {
        let (own, request) = a.request("b", B, |_| renew).unwrap();
        (own, b.answer("a", A, &request).unwrap())
    }

    fn turn(a: &Secrets<Noted>, b: &Secrets<Noted>, renew: bool) {
        let (own, answer) = asks(a, b, renew);
        a.answered(&own, "b", B, &answer).unwrap();
    }

    #[test]
    fn two_nodes_agree_at_their_first_turn_and_turns_change_nothing() {
        let (a, b) = (keys("a"), keys("b"));
        turn(&a, &b, false);
        let first = sends(&a);
        assert_eq!(sends(&b), first);
        for _ in 0..3 {
            turn(&a, &b, false);
            let (own, request) = b.request("a", A, |_| false).unwrap();
            let answer = a.answer("b", B, &request).unwrap();
            b.answered(&own, "a", A, &answer).unwrap();
        }
        assert_eq!((sends(&a), sends(&b)), (first, first));
    }

    #[test]
    fn neither_node_sends_with_newer_keys_before_the_other_takes_them() {
        let (a, b) = (keys("a"), keys("b"));
        turn(&a, &b, false);
        let older = sends(&a);
        let (own, answer) = asks(&a, &b, true);
        // The answer is on its way: what b sends must be understood.
        assert_eq!(sends(&b), older);
        a.answered(&own, "b", B, &answer).unwrap();
        let newer = sends(&a);
        assert_ne!(newer, older);
        assert!(b.tunnel.knows(newer) && a.tunnel.knows(older));
        assert_eq!(sends(&b), older, "b does not know yet that a has it");
        turn(&a, &b, false);
        assert_eq!((sends(&a), sends(&b)), (newer, newer));

        // An answer that is lost costs nothing either.
        asks(&a, &b, true);
        assert_eq!((sends(&a), sends(&b)), (newer, newer));
        turn(&a, &b, false);
        turn(&a, &b, false);
        assert_eq!(sends(&a), sends(&b));
        assert_ne!(sends(&a), newer);
    }

    #[test]
    fn a_node_that_was_restarted_is_sent_new_keys_at_once_whoever_asks() {
        let (a, b) = (keys("a"), keys("b"));
        turn(&a, &b, false);
        let older = sends(&b);
        let a = keys("a");
        turn(&a, &b, false);
        assert_ne!(sends(&b), older, "the older keys are gone with the node's earlier life");
        assert_eq!(sends(&a), sends(&b));
        let b = keys("b");
        turn(&a, &b, false);
        assert_eq!(sends(&a), sends(&b));
    }

    #[test]
    fn a_node_that_has_moved_gets_another_session() {
        let (a, b) = (keys("a"), keys("b"));
        turn(&a, &b, false);
        let before = sends(&b);
        let (own, request) = a.request("b", B, |_| false).unwrap();
        let answer = b.answer("a", Ipv4Addr::new(10, 99, 0, 13), &request).unwrap();
        a.answered(&own, "b", B, &answer).unwrap();
        assert_ne!(sends(&a), before);
    }

    #[test]
    fn what_is_no_secret_is_refused() {
        let (a, b) = (keys("a"), keys("b"));
        let (_, good) = a.request("b", B, |_| false).unwrap();
        for bad in [
            KeysRequest { secret: vec![1; 31].into(), ..good.clone() },
            KeysRequest { port: 0, ..good.clone() },
            KeysRequest { port: 65_536, ..good },
        ] {
            assert_eq!(b.answer("a", A, &bad).unwrap_err().code(), tonic::Code::InvalidArgument);
        }
        assert_eq!(b.tunnel.known.lock().unwrap().len(), 0);
        assert_eq!(
            format!("{:?}", KeysRequest { secret: vec![7; 32].into(), ..KeysRequest::default() }),
            "KeysRequest { .. }"
        );
    }
}
