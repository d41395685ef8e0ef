//! How a cluster begins and grows: founding it, inviting a node, and joining.

mod arguments;

use std::collections::VecDeque;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use godwit_api::v1::{CreateTokenRequest, Member};
use godwit_migration::error_chain;
use godwit_transfer::join::{self, JoinAnswer};
use godwit_transfer::listen::JoinListener;
use godwit_transfer::token::MAX_TOKEN;
use godwit_transfer::{ClusterAuthority, ConnectOptions, JoinToken, NodeName, SecureStream};
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;

pub(crate) use arguments::{InitArgs, JoinArgs};

use crate::node::Node;
use crate::own::{Place, Toward};
use crate::peers::IDENTITY;
use crate::protection::encrypt::{Encrypt, setting};
use crate::removals;
use crate::state::{State, now_ms};
use crate::unit::Systemd;

/// How long a token is good for when the user does not say.
const TOKEN_VALID: Duration = Duration::from_secs(3600);

/// How many hosts are answered at the same time: a few kilobytes and a descriptor each.
const ANSWERING: usize = 64;

/// The port for new nodes is the one after the peers'.
pub(crate) fn join_address(listen: &str) -> Option<String> {
    let (host, port) = listen.rsplit_once(':')?;
    Some(format!("{host}:{}", port.parse::<u16>().ok()?.checked_add(1)?))
}

fn member(name: &str, listen: &str) -> anyhow::Result<Member> {
    let (host, _) = listen.rsplit_once(':').with_context(|| format!("{listen:?} is not HOST:PORT"))?;
    let revision = u64::try_from(now_ms()).unwrap_or(1);
    Ok(Member { name: name.into(), address: listen.into(), vtep: host.into(), revision })
}

/// Founds a cluster on this node, and starts its daemon.
pub(crate) async fn init(args: &InitArgs) -> anyhow::Result<()> {
    // A node that cannot encrypt must not ask the others to.
    let encryption = args.encrypt.map(Encrypt::resolve).transpose()?;
    let asked = args.asked();
    let name = asked.name_of_founder()?;
    let place = asked.place(Toward::Outside).await?;
    let member = member(name.as_str(), &place.listen.to_string())?;
    let identity = args.state.join(IDENTITY);
    std::fs::create_dir_all(&args.state)
        .with_context(|| format!("cannot create {}", args.state.display()))?;
    let authority = ClusterAuthority::create(&identity, &args.cluster)?;
    authority.issue_own(&identity, &name)?;
    let state = State::open(&args.state.join("node.db"))?;
    state.put_settings(&encryption.map(setting).into_iter().collect())?;
    state.put_member(&member)?;
    drop(state);
    say(&format!("node {name} has founded the cluster {}; {}", args.cluster, reached(&place)));
    begin(&place, &args.state, args.no_start)
}

/// A token from somewhere else than the arguments, which all users of a machine can see.
fn read_token(from: impl std::io::Read) -> anyhow::Result<String> {
    // A few bytes more than a token may have are enough to see that it is not one.
    let most = u64::try_from(MAX_TOKEN).unwrap_or(u64::MAX).saturating_add(8);
    let mut text = String::new();
    std::io::Read::read_to_string(&mut from.take(most), &mut text)
        .context("the join token cannot be read from standard input")?;
    Ok(text)
}

/// Joins the cluster that a token invites to, and starts this node's daemon.
pub(crate) async fn join(args: &JoinArgs) -> anyhow::Result<()> {
    let token = match args.token.as_str() {
        "-" => JoinToken::decode(&read_token(std::io::stdin().lock())?)?,
        token => JoinToken::decode(token)?,
    };
    let (asked, name) = (args.asked(), token.node.as_str());
    if let Some(other) = asked.name.as_deref().filter(|asked| *asked != name) {
        bail!(
            "the token is for node {name}, not for {other}; ask for one with `godwit cluster token {other}`"
        );
    }
    let place = match asked.listen {
        // Wherever the founding node is.
        Some(_) => asked.place(Toward::Outside).await?,
        None => asked.place(Toward::founder(&token.address)?).await?,
    };
    let own = member(name, &place.listen.to_string())?;
    let identity = args.state.join(IDENTITY);
    std::fs::create_dir_all(&args.state)
        .with_context(|| format!("cannot create {}", args.state.display()))?;
    let joined = join::join(&token, &identity, ConnectOptions::default()).await?;
    let state = State::open(&args.state.join("node.db"))?;
    state.forget_hearsay(name)?;
    state.put_settings(&joined.settings)?;
    state.put_member(&own)?;
    // Revision 0: whatever the inviter says of itself later is newer.
    let inviter = member(joined.inviter.as_str(), &joined.inviter_address)?;
    state.put_member(&Member { revision: 0, ..inviter })?;
    drop(state);
    say(&format!("node {name} has joined the cluster of node {}; {}", joined.inviter, reached(&place)));
    begin(&place, &args.state, args.no_start)
}

/// Records where the node is reached, and has its daemon started.
fn begin(place: &Place, state_dir: &Path, leave: bool) -> anyhow::Result<()> {
    place.record(&state_dir.join(IDENTITY))?;
    say(&Systemd::of_machine().start(state_dir, leave)?);
    Ok(())
}

fn reached(place: &Place) -> String {
    let at = format!("other nodes reach it at {}", place.listen);
    match &place.uplink {
        Some(uplink) => format!("{at}, by the interface {uplink}"),
        None => at,
    }
}

/// What is done counts, also where its line cannot be written.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Makes a token for one more node.
pub(crate) fn create_token(node: &Node, request: &CreateTokenRequest) -> Result<String, Status> {
    let name = NodeName::new(&request.node).map_err(|e| Status::invalid_argument(error_chain(&e)))?;
    if node.member_address(&request.node).map_err(|e| Status::internal(error_chain(&e)))?.is_some() {
        return Err(Status::already_exists(format!(
            "node {name} is a member of the cluster already; give the new node another name"
        )));
    }
    // It has a certificate of this cluster; a second one would let two machines be the same node.
    let granted = node.state.granted(&request.node).map_err(|e| Status::internal(error_chain(&e)))?;
    if let Some(granted) = granted.filter(|_| !request.again) {
        return Err(Status::already_exists(format!(
            "node {name} was admitted {} s ago and has not connected yet: start its godwitd; if its join failed, `godwit cluster token --again {name}` makes another token",
            now_ms().saturating_sub(granted) / 1000
        )));
    }
    let authority = removals::authority(node)?;
    let own =
        node.member_address(&node.name).map_err(|e| Status::internal(error_chain(&e)))?.unwrap_or_default();
    let address = join_address(&own)
        .ok_or_else(|| Status::internal(format!("this node's address {own:?} has no port for new nodes")))?;
    let token = JoinToken::new(&address, authority.fingerprint(), name)
        .map_err(|e| Status::internal(error_chain(&e)))?;
    let valid = match request.valid_s {
        0 => TOKEN_VALID,
        seconds => Duration::from_secs(seconds.into()),
    };
    let expires = now_ms().saturating_add(i64::try_from(valid.as_millis()).unwrap_or(i64::MAX));
    node.state
        .put_token(&token.secret.sha256(), &request.node, expires)
        .map_err(|e| Status::internal(error_chain(&e)))?;
    token.encode().map_err(|e| Status::internal(error_chain(&e)))
}

/// Admits hosts that show a valid token, for as long as the node lives.
pub(crate) async fn invite(node: Arc<Node>, mut listener: JoinListener) {
    let mut identities = node.peers.identities();
    let mut answers = Answers::default();
    loop {
        let (stream, remote) = tokio::select! {
            accepted = listener.accept() => accepted,
            Ok(()) = identities.changed() => {
                let identity = Arc::clone(&identities.borrow_and_update());
                if let Err(error) = listener.set_identity(&identity) {
                    tracing::error!(error = %error_chain(&error), "cannot use the renewed certificate; new nodes see the old one");
                }
                continue;
            }
        };
        let node = Arc::clone(&node);
        answers.begin(async move {
            if let Err(error) = answer(&node, stream, &remote.to_string()).await {
                tracing::warn!(%remote, error = format!("{error:#}"), "a join failed");
            }
        });
    }
}

/// The answers under way, in the order in which their hosts came.
#[derive(Default)]
struct Answers(VecDeque<AbortOnDropHandle<()>>);

impl Answers {
    /// Begins one more, in the place of the oldest where there are too many.
    fn begin(&mut self, answer: impl Future<Output = ()> + Send + 'static) {
        self.0.retain(|answer| !answer.is_finished());
        if self.0.len() >= ANSWERING {
            // An honest host takes a round trip: the one that came first has had its time.
            self.0.pop_front();
        }
        self.0.push_back(AbortOnDropHandle::new(tokio::spawn(answer)));
    }
}

async fn answer(node: &Node, mut stream: SecureStream, remote: &str) -> anyhow::Result<()> {
    let request = join::read_request(&mut stream, remote).await?;
    let granted = grant(node, &request);
    let answer = match granted {
        Ok(answer) => answer,
        Err(reason) => {
            tracing::warn!(%remote, wanted = %request.node, %reason, "a join was refused");
            JoinAnswer::Refused { reason }
        }
    };
    join::answer(&mut stream, remote, &answer).await?;
    Ok(())
}

fn grant(node: &Node, request: &join::JoinRequest) -> Result<JoinAnswer, String> {
    let secret = request.secret.secret().sha256();
    if !node.state.take_token(&secret, request.node.as_str()).map_err(|e| error_chain(&e))? {
        return Err("the token is not valid: it was used, has expired, or is for another node; make a new one with `godwit cluster token`".into());
    }
    let authority =
        ClusterAuthority::load(&node.local().layout.state.join(IDENTITY)).map_err(|e| error_chain(&e))?;
    let authority = node.lasting(authority);
    // One certificate of a name is valid: a node that was admitted before under this name is no longer a member.
    let granted = node.state.granted(request.node.as_str()).map_err(|e| error_chain(&e))?;
    let after = match granted {
        Some(_) => removals::take_back(node, &authority, &request.node)?.until,
        None => node.peers.identity().removals().of(&request.node).unwrap_or(0),
    };
    // Before it has it: a name whose grant is not recorded could be granted twice.
    node.state.put_granted(request.node.as_str()).map_err(|e| error_chain(&e))?;
    let certificate_pem =
        authority.issue_after(&request.node, &request.request_pem, after).map_err(|e| error_chain(&e))?;
    Ok(JoinAnswer::Granted {
        ca_pem: authority.pem().to_string(),
        certificate_pem,
        inviter: NodeName::new(&node.name).map_err(|e| error_chain(&e))?,
        inviter_address: node.member_address(&node.name).map_err(|e| error_chain(&e))?.unwrap_or_default(),
        settings: node.state.settings().map_err(|e| error_chain(&e))?,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use godwit_transfer::{Fingerprint, TokenError};
    use tokio::sync::oneshot;
    use tokio::time::timeout;

    use super::*;

    /// It is reached only when something is broken.
    const PATIENCE: Duration = Duration::from_secs(10);

    #[tokio::test]
    async fn hosts_that_say_nothing_are_answered_in_bounded_number_and_keep_no_other_out() {
        let mut answers = Answers::default();
        let mut silent = Vec::new();
        for _ in 0..=ANSWERING {
            let (held, ended) = oneshot::channel::<()>();
            silent.push(ended);
            answers.begin(async move {
                let _held = held;
                std::future::pending().await
            });
        }
        // The one that came first makes place for the last.
        timeout(PATIENCE, &mut silent[0]).await.unwrap().unwrap_err();
        let (served, serving) = oneshot::channel();
        answers.begin(async move { served.send(()).unwrap() });
        timeout(PATIENCE, serving).await.unwrap().unwrap();
        timeout(PATIENCE, &mut silent[1]).await.unwrap().unwrap_err();
        for (number, ended) in silent.iter_mut().enumerate().skip(2) {
            assert!(futures::poll!(ended).is_pending(), "the answer to host {number} has ended");
        }
    }

    #[test]
    fn a_token_is_read_from_standard_input_with_or_without_the_end_of_its_line() {
        let node = NodeName::new("b").unwrap();
        let token = JoinToken::new("10.99.0.11:7118", Fingerprint::from([7; 32]), node).unwrap();
        let text = token.encode().unwrap();
        for end in ["", "\n", "\r\n"] {
            let line = format!("{text}{end}");
            let read = read_token(line.as_bytes()).unwrap();
            assert_eq!(JoinToken::decode(&read).unwrap(), token, "{end:?}");
        }
    }

    #[test]
    fn what_is_no_token_is_not_read_to_its_end_and_refused() {
        let long = format!("gwt1.{}", "A".repeat(1 << 20));
        let read = read_token(long.as_bytes()).unwrap();
        assert!(read.len() < 2 * MAX_TOKEN, "{} bytes are read", read.len());
        assert!(matches!(JoinToken::decode(&read), Err(TokenError::TooLong { .. })));
        let none = read_token(&b""[..]).unwrap();
        assert!(matches!(JoinToken::decode(&none), Err(TokenError::Prefix)));
        let binary = read_token(&b"gwt1.\xff"[..]).unwrap_err().to_string();
        assert!(binary.contains("standard input"), "{binary}");
    }
}
