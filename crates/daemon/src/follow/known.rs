//! What is known of other nodes while a service may move: how far its clients are from them, and what a move to them would be.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::v1 as api;
use godwit_migration::{Options, Service};
use godwit_policy::assess::Cause;
use godwit_policy::loss::{Target, Usage};
use godwit_policy::quantity::Cores;
use godwit_policy::state::NodeId;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::directory::nodes;
use crate::engine_changes;
use crate::node::Node;
use crate::place::clients::{Client, Echoes};
use crate::place::decision::HERE;
use crate::place::survey::{Place, Surveyor, may_be_better};
use crate::place::{facts, told};
use crate::plain::plain;
use crate::status::internal;

/// Between two rounds of echoes, once clients have lost for some time: longer each time.
const ECHOES: Duration = Duration::from_secs(30);

/// The same when they begin to lose, or a client or a possible place is new.
const ECHOES_SOON: Duration = Duration::from_secs(5);

/// For how long clients have to be content before nothing of this matters any more.
const QUIET: Duration = Duration::from_secs(60);

/// Before a node is asked again, which fills the link to it: longer each time nothing has come of it; and half of that where
/// nothing came of it.
const ASKS: Duration = Duration::from_secs(60);
const LONGEST_ASKS: Duration = Duration::from_secs(600);

/// The same before what is too old for a move is measured again.
const RENEWS: Duration = Duration::from_secs(15);

/// What is older is measured again before a move rests on it; or twice the time that measuring took, if that is longer.
const FRESH: Duration = Duration::from_secs(10);

/// What is measured with.
pub(super) struct With<'a> {
    pub(super) node: &'a Arc<Node>,
    pub(super) service: &'a Service,
    pub(super) options: &'a Options,
    pub(super) target: Target,
    pub(super) clients: &'a [Client],
}

/// What was measured, if anything. What was seen of the clients may be older than that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Heard {
    Nothing,
    /// How far clients are from all nodes.
    Echoes,
    /// Whether nodes take the service, and what the links to them carry.
    Nodes,
}

pub(super) struct Known {
    /// The numbers that the policy has for nodes are places in this list.
    names: Vec<String>,
    pub(super) places: Vec<Place>,
    pub(super) from_here: Echoes,
    pub(super) usage: Usage,
    /// Whether the service can leave at all, as an answer to its user.
    pub(super) found: api::PlaceResponse,
    /// When the last round of echoes began, and how long it took.
    echoed: Option<Instant>,
    listened: Duration,
    /// When the next one is due, after its end, and to whom it went.
    every: Duration,
    hosts: BTreeSet<IpAddr>,
    /// Since when clients are content.
    rests: Option<Instant>,
    /// Before a node is asked again.
    patience: Duration,
    /// How long the last survey took.
    took: Duration,
    /// The nodes to which a move would rest on what is too old: they are measured again next.
    stale: Vec<NodeId>,
    /// When that was decided last, and how long it is not from then on.
    renewed: Option<Instant>,
    renews: Duration,
}

impl Known {
    /// Nothing, of a service of this node.
    pub(super) fn nothing(found: api::PlaceResponse) -> Self {
        Self {
            names: Vec::new(),
            places: Vec::new(),
            from_here: Echoes::new(),
            usage: Usage { cores: Cores::LEAST, memory: 0, request: None },
            found,
            echoed: None,
            listened: Duration::ZERO,
            every: ECHOES_SOON / 2,
            hosts: BTreeSet::new(),
            rests: None,
            patience: ASKS / 2,
            took: Duration::ZERO,
            stale: Vec::new(),
            renewed: None,
            renews: RENEWS,
        }
    }

    /// The service does not move for now.
    pub(super) fn rest(&mut self) {
        if self.rests.get_or_insert_with(Instant::now).elapsed() >= QUIET {
            self.forget();
        }
    }

    /// Forgets all but the numbers of nodes.
    fn forget(&mut self) {
        let found = api::PlaceResponse {
            name: std::mem::take(&mut self.found.name),
            node: std::mem::take(&mut self.found.node),
            ..api::PlaceResponse::default()
        };
        *self = Self { names: std::mem::take(&mut self.names), ..Self::nothing(found) };
    }

    /// How far clients were from this node; none where one did not answer.
    pub(super) fn echoes(&self) -> impl Iterator<Item = (IpAddr, Option<Duration>)> {
        self.hosts.iter().map(|host| (*host, self.from_here.get(host).copied()))
    }

    /// How old the echoes are; none before the first ones.
    pub(super) fn age(&self) -> Option<Duration> {
        self.echoed.map(|at| at.elapsed())
    }

    /// Whether the service can leave, and there is a place that could take it, as far as is known from afar, and was not
    /// asked: no less is lost there.
    pub(super) fn has_others(&self) -> bool {
        self.found.objections.is_empty()
            && self.found.obstacles.is_empty()
            && self.places.iter().any(|place| place.refused.is_empty() && place.asked.is_none())
    }

    /// Whether a move to this node would rest on what was measured just now. If not, the next survey measures it again, with
    /// those nodes that come next.
    pub(super) fn is_fresh(&mut self, id: NodeId, next: &[NodeId]) -> bool {
        // A node that answers late, or not at all, keeps no service from moving.
        let limit = |took: Duration| FRESH.max(took.saturating_mul(2));
        let asked = self.places.iter().find(|place| place.id == id).and_then(|place| place.asked);
        let is_fresh = |at: Option<Instant>, took| at.is_some_and(|at| at.elapsed() <= limit(took));
        let all = is_fresh(self.echoed, self.listened + self.took) && is_fresh(asked, self.took);
        // A decision that goes to and fro costs no more than that.
        let is_due = self.renewed.is_none_or(|at| at.elapsed() >= self.renews);
        if !all && is_due {
            self.stale = [&[id], next].concat();
            self.renewed = Some(Instant::now());
            self.renews = self.renews.saturating_mul(2).min(LONGEST_ASKS);
        }
        all
    }

    /// A move was decided, and could not be begun for now: what it rests on is measured again when it is the service's turn.
    pub(super) fn waits(&mut self) {
        (self.renewed, self.renews) = (None, RENEWS);
    }

    /// Measures one thing that is due.
    pub(super) async fn survey(
        &mut self,
        with: &With<'_>,
        ending: &CancellationToken,
    ) -> Result<Heard, Status> {
        let With { node, service, options, target, clients } = *with;
        let begun = Instant::now();
        self.renew_places(&nodes(node).map_err(internal)?, &node.name);
        if self.rests.take().is_some() {
            // They lose again: what did not pay then may pay now.
            (self.every, self.patience, self.renews) = (ECHOES_SOON / 2, ASKS / 2, RENEWS);
        }
        let surveyor = Surveyor { node, service, options, target, cancel: ending };
        let is_new = self.places.iter().any(|place| place.refused.is_empty() && !place.listened);
        let is_new = is_new || clients.iter().any(|client| !self.hosts.contains(&client.address));
        let every = match (self.stale.is_empty(), is_new) {
            (false, _) => ECHOES_SOON,
            // There may be new ones all the time.
            (true, true) => (self.every / 3).max(ECHOES_SOON),
            (true, false) => self.every.max(ECHOES_SOON),
        };
        if self.age().is_none_or(|age| age >= self.listened + every) {
            self.from_here = surveyor.listen_for_echoes(&mut self.places, clients).await?;
            // Some may have come long before the last one.
            (self.echoed, self.listened) = (Some(begun), begun.elapsed());
            self.every = self.every.saturating_mul(2).min(ECHOES);
            self.hosts = clients.iter().map(|client| client.address).collect();
            return Ok(Heard::Echoes);
        }
        let stale = std::mem::take(&mut self.stale);
        let is_due = |place: &Place| {
            let patience = if place.measured.is_some() { self.patience } else { self.patience / 2 };
            place.asked.is_none_or(|at| at.elapsed() >= patience)
        };
        let worth: BTreeSet<NodeId> = self
            .places
            .iter()
            .filter(|place| place.refused.is_empty())
            .filter(|place| {
                stale.contains(&place.id)
                    || is_due(place) && may_be_better(place, clients, &self.from_here, target)
            })
            .map(|place| place.id)
            .collect();
        if worth.is_empty() {
            return Ok(Heard::Nothing);
        }
        let cancel = ending.child_token();
        // What a user asks for goes before.
        let Ok(_looking) = node.begin_look(&service.name, cancel.clone()) else {
            self.stale = stale;
            return Ok(Heard::Nothing);
        };
        // Before anything can fail: what fails is not tried each second.
        self.note_asked(&worth, Some(Instant::now()));
        let surveyor = Surveyor { cancel: &cancel, ..surveyor };
        let asked = self.ask(&surveyor, clients, &worth).await;
        self.note_asked(&worth, Some(Instant::now()));
        self.took = begun.elapsed();
        match asked {
            // It was cut off, and is tried again once the service is free.
            Err(_) if cancel.is_cancelled() => {
                self.note_asked(&worth, None);
                self.stale = stale;
                return Ok(Heard::Nodes);
            }
            Err(status) => {
                self.found.objections.push(plain(status.message()));
                self.forget_measured();
            }
            Ok(()) => {}
        }
        if stale.is_empty() {
            self.patience = self.patience.saturating_mul(2).min(LONGEST_ASKS);
        }
        Ok(Heard::Nodes)
    }

    async fn ask(
        &mut self,
        surveyor: &Surveyor<'_>,
        clients: &[Client],
        worth: &BTreeSet<NodeId>,
    ) -> Result<(), Status> {
        self.found = told::answer(&surveyor.service.name, &surveyor.node.name);
        let service = &engine_changes::taken_over(surveyor.node, surveyor.service.clone()).await?;
        let surveyor = Surveyor { service, ..*surveyor };
        let mut seen = None;
        let (found, usage) = surveyor.examine(&mut seen).await?;
        self.usage = usage;
        if told::keeps(&mut self.found, &found) {
            self.forget_measured();
            return Ok(());
        }
        let is_worth_it = |place: &Place| worth.contains(&place.id);
        surveyor.ask(&mut self.places, (clients, &self.from_here), is_worth_it, &mut seen).await
    }

    fn note_asked(&mut self, which: &BTreeSet<NodeId>, at: Option<Instant>) {
        for place in self.places.iter_mut().filter(|place| which.contains(&place.id)) {
            place.asked = at;
        }
    }

    /// The service cannot leave: no move rests on what was measured before.
    fn forget_measured(&mut self) {
        for place in &mut self.places {
            place.measured = None;
        }
    }

    /// All other nodes as they are now, with what is known of them already.
    fn renew_places(&mut self, infos: &[api::NodeInfo], own: &str) {
        let host = facts::own(infos, own);
        let mut before: HashMap<NodeId, Place> =
            std::mem::take(&mut self.places).into_iter().map(|place| (place.id, place)).collect();
        for info in infos.iter().filter(|info| info.name != own) {
            let id = self.number(&info.name);
            let mut place = Place::new(id, info, &self.usage, &host, Cause::Watched);
            if let Some(before) = before.remove(&id) {
                (place.echoes, place.listened) = (before.echoes, before.listened);
                place.words = before.words;
                (place.measured, place.asked) = (before.measured, before.asked);
            }
            self.places.push(place);
        }
    }

    fn number(&mut self, name: &str) -> NodeId {
        let known = self.names.iter().position(|known| known == name);
        let index = known.unwrap_or_else(|| {
            self.names.push(name.to_owned());
            self.names.len() - 1
        });
        NodeId(u32::try_from(index).unwrap_or(HERE.0))
    }

    /// The name of the node that the policy knows by this number.
    pub(super) fn name_of(&self, id: NodeId) -> &str {
        usize::try_from(id.0).ok().and_then(|index| self.names.get(index)).map_or("", String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(name: &str) -> api::NodeInfo {
        api::NodeInfo { name: name.into(), ..Default::default() }
    }

    fn known() -> Known {
        let mut known = Known::nothing(api::PlaceResponse { name: "web".into(), ..Default::default() });
        known.renew_places(&["a", "b", "c"].map(info), "a");
        known
    }

    #[test]
    fn a_node_keeps_its_number_and_what_is_known_of_it_for_as_long_as_it_is_a_member() {
        let mut known = known();
        let c = known.number("c");
        known.note_asked(&BTreeSet::from([c]), Some(Instant::now()));
        known.renew_places(&["c", "d", "a"].map(info), "a");
        let ids: Vec<_> = known.places.iter().map(|place| known.name_of(place.id).to_owned()).collect();
        assert_eq!((ids, known.number("c")), (vec!["c".to_owned(), "d".to_owned()], c));
        let asked: Vec<_> = known.places.iter().map(|place| place.asked.is_some()).collect();
        assert_eq!(asked, [true, false]);
        known.rest();
        assert_eq!(known.places.len(), 2, "clients may be content for a moment only");
        known.rests = Instant::now().checked_sub(QUIET);
        known.rest();
        assert_eq!((known.places.len(), known.number("c"), known.found.name.as_str()), (0, c, "web"));
    }

    #[test]
    fn only_a_place_that_was_not_asked_is_no_better() {
        let mut known = known();
        for place in &mut known.places {
            place.refused.clear();
        }
        assert!(known.has_others());
        known.found.obstacles.push(api::Obstacle::default());
        assert!(!known.has_others(), "the service cannot leave");
        known.found.obstacles.clear();
        let all = known.places.iter().map(|place| place.id).collect();
        known.note_asked(&all, Some(Instant::now()));
        assert!(!known.has_others());
    }

    #[test]
    fn a_move_rests_on_what_was_measured_just_now() {
        let mut known = known();
        let (b, c) = (known.number("b"), known.number("c"));
        assert!(!known.is_fresh(b, &[c]) && known.stale == [b, c]);
        known.stale.clear();
        known.echoed = Some(Instant::now());
        known.note_asked(&BTreeSet::from([b]), Some(Instant::now()));
        assert!(known.is_fresh(b, &[c]) && known.stale.is_empty());
        let ago = |time: Duration| Instant::now().checked_sub(time + Duration::from_secs(1));
        known.echoed = ago(FRESH);
        (known.renewed, known.renews) = (None, RENEWS);
        assert!(!known.is_fresh(b, &[]) && known.stale == [b]);
        // It was measured again a moment ago, in vain; then it waits for twice as long.
        known.stale.clear();
        assert!(!known.is_fresh(b, &[]) && known.stale.is_empty());
        known.renewed = ago(RENEWS);
        assert!(!known.is_fresh(b, &[]) && known.stale.is_empty());
        known.renewed = ago(RENEWS * 2);
        assert!(!known.is_fresh(b, &[]) && known.stale == [b]);
        known.stale.clear();
        // Where measuring takes long, what was measured counts for longer.
        known.listened = FRESH;
        assert!(known.is_fresh(b, &[]) && known.stale.is_empty());
    }
}
