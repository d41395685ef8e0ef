//! The keys of the overlay's tunnel: agreed between each two nodes over their mutually authenticated
//! connection, kept in memory only.
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

use godwit_api::v1::{KeysRequest, KeysResponse, Member};
use godwit_network::{Secret, Session, Tunnel};
use tonic::Status;

use crate::node::Node;

/// How long a secret of this node is used.
const RENEW: Duration = Duration::from_secs(3600);

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

/// The keys of a node.
pub(crate) struct Keys {
    /// What they are for.
    pub tunnel: Tunnel,
    node: String,
    pairs: Mutex<HashMap<String, Pair>>,
}

fn no_random(error: &std::io::Error) -> Status {
    Status::internal(format!("no keys can be made: {error}"))
}

impl Keys {
    pub(crate) fn new(node: &str, tunnel: Tunnel) -> Self {
        Self { tunnel, node: node.to_owned(), pairs: Mutex::default() }
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

    /// Answers another node.
    pub(crate) fn answer(
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
        Ok(KeysResponse { secret, port: self.tunnel.config().port.into() })
    }

    /// Why there are no keys for a node; empty where there are, or nothing is known yet.
    pub(crate) fn trouble(&self, other: &str) -> String {
        self.pairs().get(other).map(|pair| pair.trouble.clone()).unwrap_or_default()
    }

    fn failed(&self, other: &str, trouble: &str) {
        let mut pairs = self.pairs();
        let Some(pair) = pairs.get_mut(other) else { return };
        if pair.trouble != trouble {
            tracing::warn!(node = other, %trouble, "no keys could be agreed");
            trouble.clone_into(&mut pair.trouble);
        }
    }
}

fn understood(vtep: Ipv4Addr, secret: &[u8], port: u32) -> Result<(SocketAddrV4, Secret), Status> {
    let port = u16::try_from(port).ok().filter(|port| *port != 0);
    let both = port.zip(Secret::from_bytes(secret));
    let (port, secret) =
        both.ok_or_else(|| Status::invalid_argument("no secret, or no port, for a tunnel"))?;
    Ok((SocketAddrV4::new(vtep, port), secret))
}

/// Where a member takes other nodes' packets.
pub(crate) fn vtep_of(member: &Member) -> Option<Ipv4Addr> {
    member.vtep.parse().ok()
}

/// Agrees on keys with another node, if this one encrypts at all.
pub(crate) async fn exchange(node: &Node, member: &Member) {
    let Some(keys) = node.network.keys() else { return };
    let Some(vtep) = vtep_of(member) else { return };
    let (own, session) = match keys.own(&member.name, vtep, |age| age >= RENEW) {
        Ok(own) => own,
        Err(error) => {
            tracing::error!(%error, "no keys can be made");
            return;
        }
    };
    let request = KeysRequest {
        secret: own.as_bytes().to_vec().into(),
        session,
        port: keys.tunnel.config().port.into(),
    };
    let answered = match node.peers.get(&member.name, &member.address).keys(request).await {
        Ok(answer) => {
            let answer = answer.into_inner();
            understood(vtep, &answer.secret, answer.port)
        }
        Err(status) => Err(status),
    };
    match answered {
        Ok((at, theirs)) => keys.tunnel.send_with(keys.agree(&own, &member.name, at, &theirs)),
        Err(status) => keys.failed(&member.name, status.message()),
    }
}

/// Answers a node that wants to agree on keys.
pub(crate) fn answer(node: &Node, from: &str, request: &KeysRequest) -> Result<KeysResponse, Status> {
    let Some(keys) = node.network.keys() else {
        return Err(Status::failed_precondition(format!(
            "node {} does not encrypt what it sends; start godwitd on all nodes with the same --encrypt",
            node.name
        )));
    };
    let members = node.state.members().map_err(|e| Status::internal(e.to_string()))?;
    let member = members.iter().find(|member| member.name == from);
    let vtep = member.and_then(vtep_of).ok_or_else(|| {
        Status::unavailable(format!("node {} has not heard yet where node {from} is", node.name))
    })?;
    keys.answer(from, vtep, request)
}
