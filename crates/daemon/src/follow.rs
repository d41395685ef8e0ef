//! Services that follow their clients: each is watched by a task of the node that has it, which moves it when that pays.
//!
//! ```text
//!  every second:  look at the connections ──▶ what clients lose ──▶ decide ──▶ move, or stay and say why
//!  while armed:   echoes of all nodes, twice a minute ──▶ those that may be better are asked, and their links measured
//! ```
//! What is remembered of a service's moves goes with it in its record ([`godwit_migration::follows`]).

pub(crate) mod policy;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::v1::{self as api, migration_event::Kind};
use godwit_migration::follows::Made;
use godwit_migration::{Follows, Mode, Options, Service, error_chain};
use godwit_names::ServiceName;
use godwit_policy::assess::Cause;
use godwit_policy::decide::{Decision, Reason, Verdict};
use godwit_policy::dwell::{Watch, of_cluster};
use godwit_policy::loss::{Target, Usage};
use godwit_policy::quantity::{Cores, Moment};
use godwit_policy::state::{self, NodeId, State};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::directory::nodes;
use crate::engine_changes;
use crate::migrate;
use crate::node::Node;
use crate::place::clients::{Client, Echoes, Watched};
use crate::place::decision::{HERE, Matter};
use crate::place::survey::{Place, Surveyor, may_be_better};
use crate::place::{LATENCY, facts, told};
use crate::state::now_ms;
use crate::status::internal;

/// Between two decisions about a service, and the longest time: the policy forgets what it has seen when none is made for
/// longer than 5 s.
const TICK: Duration = Duration::from_secs(1);
const LONGEST_TICK: Duration = Duration::from_secs(4);

/// A look at many connections takes long: the pause before the next is so many times as long.
const REST: u32 = 100;

/// Between two rounds of echoes, while it may move.
const ECHOES: Duration = Duration::from_secs(30);

/// Before a node is asked again, which fills the link to it: longer each time nothing has come of it.
const ASKS: Duration = Duration::from_secs(60);
const LONGEST_ASKS: Duration = Duration::from_secs(600);

/// Before the same reasons are an event again.
const SAID: Duration = Duration::from_secs(600);

/// Watches the services of this node that follow their clients, until it ends.
pub(crate) async fn run(node: &Arc<Node>) {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut watched = HashMap::<String, tokio::task::JoinHandle<()>>::new();
    loop {
        ticks.tick().await;
        watched.retain(|_, task| !task.is_finished());
        let services = match node.state.services() {
            Ok(services) => services,
            Err(error) => {
                tracing::error!(error = %error_chain(&error), "it is not known which services follow their clients");
                continue;
            }
        };
        for owned in services.into_iter().filter(|owned| owned.exit_code.is_none()) {
            let Service { id, name, follows, .. } = owned.service;
            if let Some(follows) = follows
                && !watched.contains_key(&id)
            {
                let follower = Follower::new(node, &id, name, &follows);
                watched.insert(id, node.checks.spawn(follower.watch()));
            }
        }
    }
}

/// A service that follows its clients.
struct Follower {
    node: Arc<Node>,
    id: String,
    name: ServiceName,
    ending: CancellationToken,
    clients: Watched,
    /// How long the last look at them took.
    looked: Duration,
    /// The numbers that the policy has for nodes are places in this list.
    names: Vec<String>,
    /// What is known of other nodes, while it may move.
    places: Vec<Place>,
    from_here: Echoes,
    echoed: Option<Instant>,
    /// Before a node is asked again.
    patience: Duration,
    usage: Usage,
    /// What was found when other nodes were asked last: whether it can leave at all.
    found: api::PlaceResponse,
    state: State,
    dwell: Watch,
    /// The reasons that were events, and when.
    said: HashMap<Vec<std::mem::Discriminant<Reason>>, Instant>,
    failed: String,
}

/// What becomes of a service that was to move.
#[derive(Debug, PartialEq, Eq)]
enum Moved {
    Away,
    Stays,
}

impl Follower {
    fn new(node: &Arc<Node>, id: &str, name: ServiceName, follows: &Follows) -> Self {
        let found = told::answer(&name, &node.name);
        Self {
            node: Arc::clone(node),
            id: id.to_owned(),
            name,
            ending: node.local().ending.clone(),
            clients: Watched::of_newcomer(now()),
            looked: Duration::ZERO,
            names: Vec::new(),
            places: Vec::new(),
            from_here: Echoes::new(),
            echoed: None,
            patience: ASKS,
            usage: nothing_used(),
            found,
            state: State { moves: follows.moves.iter().map(remembered).collect(), ..State::default() },
            dwell: Watch { best: None, seconds: follows.watched_s as f64, changes: follows.changes as f64 },
            said: HashMap::new(),
            failed: String::new(),
        }
    }

    async fn watch(mut self) {
        loop {
            let pause = tokio::time::sleep(self.looked.saturating_mul(REST).clamp(TICK, LONGEST_TICK));
            if self.ending.run_until_cancelled(pause).await.is_none() {
                break;
            }
            let Some((service, follows)) = self.service() else { break };
            let is_whole = self.node.local().waits.of(&self.name).await.is_none();
            if self.node.migration(&self.name).is_some() || self.node.is_busy(&self.name) || !is_whole {
                continue;
            }
            match self.step(&service, &follows).await {
                Ok(Moved::Away) => break,
                Ok(Moved::Stays) => self.failed.clear(),
                Err(status) if status.message() == self.failed => {}
                Err(status) => {
                    status.message().clone_into(&mut self.failed);
                    tracing::warn!(service = %self.name, why = self.failed, "it cannot be told where the service is best");
                }
            }
        }
        self.node.forget_decision(&self.id);
    }

    /// The service as it is recorded; none once it is not to be watched any more.
    fn service(&self) -> Option<(Service, Follows)> {
        let recorded = self.node.state.service(&self.name).inspect_err(|error| {
            tracing::error!(service = %self.name, error = %error_chain(error), "it is not watched any more");
        });
        let owned = recorded.ok().flatten()?;
        let follows = owned.service.follows.clone()?;
        (owned.service.id == self.id && owned.exit_code.is_none()).then_some((owned.service, follows))
    }

    /// Looks, decides, and acts.
    async fn step(&mut self, service: &Service, follows: &Follows) -> Result<Moved, Status> {
        let config = self.node.local().config(service);
        let begun = Instant::now();
        self.clients.look(&config.network_namespace, now).await?;
        self.looked = begun.elapsed();
        let clients = self.clients.clients(now());
        let (options, target) = (options(follows), target(follows));
        if self.state.armed {
            self.survey(service, &options, target, &clients).await?;
        } else if self.echoed.is_some() {
            (self.places, self.from_here, self.echoed) = (Vec::new(), Echoes::new(), None);
            self.patience = ASKS;
        }
        let (mut verdict, mut answer) = self.decide(&options, target, &clients)?;
        if self.state.armed && self.echoed.is_none() {
            self.survey(service, &options, target, &clients).await?;
            (verdict, answer) = self.decide(&options, target, &clients)?;
        }
        self.node.note_decision(&self.id, answer);
        if verdict.suffering.active > 0 {
            let better = verdict.best.as_ref().filter(|best| best.delta > 0.0);
            self.dwell.see(better.map_or(HERE, |best| best.node), now());
        }
        match &verdict.decision {
            Decision::Stay(reasons) => {
                self.say(reasons);
                Ok(Moved::Stays)
            }
            Decision::Move { to, mode, then } => {
                let all: Vec<NodeId> = [*to].into_iter().chain(then.iter().copied()).collect();
                Ok(self.go(&all, *mode, follows, &verdict).await)
            }
        }
    }

    /// Decides, with what is known now.
    fn decide(
        &mut self,
        options: &Options,
        target: Target,
        clients: &[Client],
    ) -> Result<(Verdict, api::PlaceResponse), Status> {
        let infos = nodes(&self.node).map_err(internal)?;
        let matter = Matter {
            cause: Cause::Watched,
            options,
            target,
            dwell: self.dwell.mean(of_cluster(std::iter::empty())),
            usage: self.usage,
            host: facts::own(&infos, &self.node.name),
            sending: u32::try_from(self.node.migrations().len()).unwrap_or(u32::MAX),
            clients,
            from_here: &self.from_here,
            places: &self.places,
        };
        let mut verdict = matter.decide(&mut self.state, now());
        if let Decision::Stay(reasons) = &mut verdict.decision
            && self.echoed.is_none()
        {
            // No node was asked.
            reasons.retain(|why| *why != Reason::NoCandidate);
        }
        let mut answer = self.found.clone();
        told::tell(&mut answer, &verdict, &matter);
        Ok((verdict, answer))
    }

    /// Tells why it stays though its clients lose, when that is new.
    fn say(&mut self, reasons: &[Reason]) {
        if !self.state.armed {
            return;
        }
        self.said.retain(|_, at| at.elapsed() < SAID);
        let kinds = reasons.iter().map(std::mem::discriminant).collect();
        if let std::collections::hash_map::Entry::Vacant(new) = self.said.entry(kinds) {
            new.insert(Instant::now());
            let words: Vec<_> = reasons.iter().map(Reason::to_string).collect();
            self.node.events.tell("policy", "stays", &self.name, &words.join("; "));
        }
    }

    /// What a decision needs to know of other nodes, while it may move.
    async fn survey(
        &mut self,
        service: &Service,
        options: &Options,
        target: Target,
        clients: &[Client],
    ) -> Result<(), Status> {
        let infos = nodes(&self.node).map_err(internal)?;
        self.renew_places(&infos);
        let (node, ending) = (Arc::clone(&self.node), self.ending.child_token());
        let surveyor = Surveyor { node: &node, service, options, target, cancel: &ending };
        if self.echoed.is_none_or(|at| at.elapsed() >= ECHOES) {
            self.from_here = surveyor.listen_for_echoes(&mut self.places, clients).await?;
            self.echoed = Some(Instant::now());
        }
        let (from_here, patience) = (&self.from_here, self.patience);
        let is_worth_it = |place: &Place| {
            place.refused.is_empty()
                && place.asked.is_none_or(|at| at.elapsed() >= patience)
                && may_be_better(place, clients, from_here, target)
        };
        if !self.places.iter().any(is_worth_it) {
            return Ok(());
        }
        let cancel = ending.child_token();
        // A user's command goes before.
        let Ok(_looking) = node.begin_look(&self.name, cancel.clone()) else { return Ok(()) };
        let service = &engine_changes::taken_over(&node, service.clone()).await?;
        let surveyor = Surveyor { service, cancel: &cancel, ..surveyor };
        let mut seen = None;
        let (found, usage) = match surveyor.examine(&mut seen).await {
            Err(_) if cancel.is_cancelled() => return Ok(()),
            examined => examined?,
        };
        self.usage = usage;
        self.found = told::answer(&self.name, &node.name);
        if told::keeps(&mut self.found, &found) {
            for place in self.places.iter_mut().filter(|place| is_worth_it(place)) {
                (place.asked, place.measured) = (Some(Instant::now()), None);
            }
        } else {
            let with = (clients, from_here);
            match surveyor.ask(&mut self.places, with, is_worth_it, &mut seen).await {
                Err(_) if cancel.is_cancelled() => return Ok(()),
                asked => asked?,
            }
        }
        self.patience = self.patience.saturating_mul(2).min(LONGEST_ASKS);
        Ok(())
    }

    /// All other nodes as they are now, with what is known of them already.
    fn renew_places(&mut self, infos: &[api::NodeInfo]) {
        let host = facts::own(infos, &self.node.name);
        let mut before: HashMap<NodeId, Place> =
            std::mem::take(&mut self.places).into_iter().map(|place| (place.id, place)).collect();
        for info in infos {
            if info.name == self.node.name {
                continue;
            }
            let id = self.number(&info.name);
            let mut place = Place::new(id, info, &self.usage, &host);
            if let Some(before) = before.remove(&id) {
                (place.echoes, place.words) = (before.echoes, before.words);
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

    fn name_of(&self, id: NodeId) -> &str {
        usize::try_from(id.0).ok().and_then(|index| self.names.get(index)).map_or("", String::as_str)
    }

    /// Moves to the first of these nodes that takes it.
    async fn go(&mut self, all: &[NodeId], mode: Mode, follows: &Follows, verdict: &Verdict) -> Moved {
        let node = Arc::clone(&self.node);
        // Another service of this node goes first: its move makes this one's slower.
        let Ok(_turn) = node.follows.try_acquire() else { return Moved::Stays };
        let mut because = why(&node.name, verdict);
        for id in all {
            let to = self.name_of(*id).to_owned();
            node.events.tell("policy", "follows", &self.name, &format!("to node {to}: {because}"));
            because = format!("node {to} has refused it");
            let request = api::MigrateRequest {
                name: self.name.to_string(),
                to: to.clone(),
                mode: mode.name().to_owned(),
                max_frozen_ms: follows.max_frozen_ms,
                allow_postcopy: follows.postcopy,
                ..api::MigrateRequest::default()
            };
            let made = expected(verdict);
            if let Err(status) = self.record(|follows| follows.moving(made)).await {
                tracing::warn!(service = %self.name, why = status.message(), "it does not move yet");
                return Moved::Stays;
            }
            let ended = match migrate::start(&node, self.name.clone(), &request).await {
                Ok(stream) => report(stream).await,
                Err(status) => Err(status),
            };
            match &ended {
                Ok(report) if report.outcome != "aborted" => return Moved::Away,
                // It is being stopped, moved by a user, or looked at.
                Err(status) if status.code() == Code::Aborted => {}
                // What has become of it only its record tells.
                Err(status) if status.code() == Code::Unavailable => return Moved::Stays,
                Ok(_) | Err(_) => self.state.kept(*id, now()),
            }
            if let Err(status) = self.record(|follows| follows.stays(&made)).await {
                tracing::warn!(service = %self.name, why = status.message(), "a move that was not made counts as one");
            }
            if !ended.is_ok_and(|report| report.refused) {
                break;
            }
        }
        Moved::Stays
    }

    /// Changes what is remembered of the service.
    async fn record(&self, change: impl FnOnce(&mut Follows)) -> Result<(), Status> {
        let (seconds, changes) = (self.dwell.seconds, self.dwell.changes);
        policy::record(&self.node, &self.name, &self.id, |follows| {
            (follows.watched_s, follows.changes) = (whole(seconds), whole(changes));
            change(follows);
        })
        .await
    }
}

/// The end of a move.
async fn report(mut stream: migrate::Stream) -> Result<api::MigrationReport, Status> {
    while let Some(event) = stream.recv().await {
        if let Some(Kind::Report(report)) = event?.kind {
            return Ok(report);
        }
    }
    Err(Status::unavailable("its migration ended without a report; see godwitd's log"))
}

/// Since the epoch: it goes with the service to nodes with clocks of their own.
fn now() -> Moment {
    Moment(Duration::from_millis(now_ms().try_into().unwrap_or(0)))
}

/// As many whole things, where it is a number of them.
fn whole(number: f64) -> u64 {
    Duration::try_from_secs_f64(number.round()).map_or(0, |number| number.as_secs())
}

fn nothing_used() -> Usage {
    Usage { cores: Cores::LEAST, memory: 0, request: None }
}

fn target(follows: &Follows) -> Target {
    let latency = Duration::from_micros(follows.latency_us);
    #[allow(clippy::expect_used, reason = "20 ms is such a latency")]
    Target::new(latency).or_else(|| Target::new(LATENCY)).expect("a latency of which clients are content")
}

fn options(follows: &Follows) -> Options {
    let max = Duration::from_millis(follows.max_frozen_ms.into());
    Options { max_frozen: (!max.is_zero()).then_some(max), postcopy: follows.postcopy, ..Options::default() }
}

fn remembered(made: &Made) -> state::Made {
    state::Made {
        at: Moment(Duration::from_millis(made.at_ms.try_into().unwrap_or(0))),
        frozen: Duration::from_millis(made.frozen_ms),
        took: Duration::from_millis(made.took_ms),
    }
}

/// The move that is about to be made.
fn expected(verdict: &Verdict) -> Made {
    let forecast = verdict.best.as_ref().map(|best| &best.priced.forecast);
    let ms =
        |time: Option<Duration>| time.map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
    Made {
        at_ms: now_ms(),
        frozen_ms: ms(forecast.map(|forecast| forecast.frozen)),
        took_ms: ms(forecast.map(|forecast| forecast.total)),
    }
}

/// Why it moves, in a sentence.
fn why(from: &str, verdict: &Verdict) -> String {
    let suffering = &verdict.suffering;
    let over: u32 = suffering.over.iter().map(|over| over.count).sum();
    let (there, move_to) = verdict.best.as_ref().map_or_else(Default::default, |best| {
        (
            best.losses.clients,
            format!("; the move costs {:.2} and gains {:.2}", best.priced.cost.total(), best.gain),
        )
    });
    format!(
        "{over} of {} clients have too long a latency and lose {:.2} client-seconds a second on {from}, and {there:.2} there{move_to}",
        suffering.active, suffering.losses.clients
    )
}
