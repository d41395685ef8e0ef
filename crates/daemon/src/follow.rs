//! Services that follow their clients: each is watched by a task of the node that has it, which moves it when that pays.
//!
//! ```text
//!  every second:        look at the connections ──▶ what clients lose ──▶ decide ──▶ move, or stay and say why
//!  while clients lose:  echoes of all nodes ──▶ those that may be better are asked, and their links measured
//! ```
//! What is remembered of a service's moves goes with it in its record ([`godwit_migration::follows`]).

mod known;
pub(crate) mod policy;

use std::collections::HashMap;
use std::mem::Discriminant;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::v1::{self as api, migration_event::Kind};
use godwit_migration::follows::Made;
use godwit_migration::{Follows, Mode, Options, Service, error_chain};
use godwit_names::ServiceName;
use godwit_policy::assess::Cause;
use godwit_policy::decide::{Decision, Reason, Verdict};
use godwit_policy::dwell::{Watch, of_cluster};
use godwit_policy::loss::Target;
use godwit_policy::quantity::Moment;
use godwit_policy::state::{self, NodeId, State};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use self::known::{Heard, Known, With};
use crate::directory::nodes;
use crate::migrate;
use crate::node::Node;
use crate::place::clients::{Client, Watched};
use crate::place::decision::{HERE, Matter};
use crate::place::{LATENCY, facts, told};
use crate::state::now_ms;
use crate::status::internal;

/// Between two decisions about a service, and the longest time: the policy forgets what it has seen when none is made for
/// longer than 5 s.
const TICK: Duration = Duration::from_secs(1);
const LONGEST_TICK: Duration = Duration::from_secs(4);

/// The same while a client has too long a latency and it is not decided whether that lasts.
const SHORT_TICK: Duration = Duration::from_millis(250);

/// For no longer than this.
const PRESSES: Duration = Duration::from_secs(5);

/// A look at many connections takes long: the pause before the next is so many times as long.
const REST: u32 = 100;

/// Before the same reasons are an event again.
const SAID: Duration = Duration::from_secs(600);

/// After a move that could not be begun.
const PAUSE: Duration = Duration::from_secs(10);

/// Watches the services of this node that follow their clients, until it ends.
pub(crate) async fn run(node: &Arc<Node>) {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut watched = HashMap::<String, tokio::task::JoinHandle<()>>::new();
    loop {
        ticks.tick().await;
        watched.retain(|_, task| !task.is_finished());
        let services = match node.state.followers() {
            Ok(services) => services,
            Err(error) => {
                tracing::error!(error = %error_chain(&error), "it is not known which services follow their clients");
                continue;
            }
        };
        for owned in services {
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
    /// What its looks at clients count from: no clock that is set.
    begun: Instant,
    clients: Watched,
    /// How long the last look at them took.
    looked: Duration,
    /// Whether the next look is made sooner: a client has too long a latency, and the service is not armed yet; or nodes are
    /// asked next.
    presses: bool,
    /// Since when that was so, and when it was so last.
    pressed: Option<(Instant, Instant)>,
    known: Known,
    state: State,
    dwell: Watch,
    /// The reasons that were events, and when.
    said: HashMap<Vec<Discriminant<Reason>>, Instant>,
    /// When a move could not be begun.
    paused: Option<Instant>,
    failed: String,
}

/// What becomes of a service.
#[derive(Debug, PartialEq, Eq)]
enum Moved {
    Away,
    Stays,
}

impl Follower {
    fn new(node: &Arc<Node>, id: &str, name: ServiceName, follows: &Follows) -> Self {
        Self {
            node: Arc::clone(node),
            id: id.to_owned(),
            ending: node.local().ending.clone(),
            begun: Instant::now(),
            clients: Watched::of_newcomer(Moment::default()),
            looked: Duration::ZERO,
            presses: false,
            pressed: None,
            known: Known::nothing(told::answer(&name, &node.name)),
            name,
            state: State { moves: follows.moves.iter().map(remembered).collect(), ..State::default() },
            dwell: Watch { best: None, seconds: follows.watched_s as f64, changes: follows.changes as f64 },
            said: HashMap::new(),
            paused: None,
            failed: String::new(),
        }
    }

    async fn watch(mut self) {
        loop {
            let pause = tokio::time::sleep(self.pause());
            if self.ending.run_until_cancelled(pause).await.is_none() {
                break;
            }
            let Some((service, follows)) = self.service() else { break };
            if self.is_occupied().await {
                self.presses = false;
                continue;
            }
            match self.step(&service, &follows).await {
                Ok(Moved::Away) => break,
                Ok(Moved::Stays) => self.failed.clear(),
                Err(status) if status.message() == self.failed => self.presses = false,
                Err(status) => {
                    self.presses = false;
                    status.message().clone_into(&mut self.failed);
                    tracing::warn!(service = %self.name, why = self.failed, "it cannot be told where the service is best");
                }
            }
        }
        self.node.forget_decision(&self.id);
    }

    /// Until the next look.
    fn pause(&self) -> Duration {
        let is_short = self.presses && self.pressed.is_some_and(|(since, _)| since.elapsed() < PRESSES);
        let shortest = if is_short { SHORT_TICK } else { TICK };
        self.looked.saturating_mul(REST).clamp(shortest, LONGEST_TICK)
    }

    /// Whether something else is done with the service, which goes before; or its pages are not all here.
    async fn is_occupied(&self) -> bool {
        self.node.migration(&self.name).is_some()
            || self.node.is_busy(&self.name)
            || self.node.is_prepared(&self.name)
            || self.node.local().waits.of(&self.name).await.is_some()
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
        let (options, target) = (options(follows), target(follows));
        let mut clients = self.look(service, target).await?;
        let mut heard = Heard::Nothing;
        if self.loses() {
            let with = With { node: &self.node, service, options: &options, target, clients: &clients };
            let surveyed = Moment(self.begun.elapsed());
            heard = self.known.survey(&with, &self.ending).await?;
            if heard == Heard::Echoes {
                self.clients.note(self.known.echoes(), surveyed);
            }
            if heard != Heard::Nothing {
                clients = self.look(service, target).await?;
            }
        } else {
            self.known.rest();
        }
        let (verdict, answer) = self.decide(&options, target, &clients)?;
        self.press(
            heard == Heard::Echoes
                || !self.state.armed && self.clients.is_over(target, Moment(self.begun.elapsed())),
        );
        if self.state.armed && self.known.age().is_none() {
            // It is armed since now, and other nodes are asked next.
            return Ok(Moved::Stays);
        }
        self.node.note_decision(&self.id, answer);
        if verdict.suffering.active > 0 {
            let better = verdict.best.as_ref().filter(|best| best.delta > 0.0);
            self.dwell.see(better.map_or(HERE, |best| best.node), now());
        }
        match &verdict.decision {
            // Nodes that were only heard are asked before that is final.
            Decision::Stay(_) if heard == Heard::Echoes => {}
            Decision::Stay(reasons) => self.say(reasons),
            Decision::Move { to, mode, then } => {
                let is_paused = self.paused.is_some_and(|at| at.elapsed() < PAUSE);
                if !is_paused && self.known.is_fresh(*to, then) && !self.is_occupied().await {
                    return Ok(self.go(*to, *mode, follows, &verdict).await);
                }
            }
        }
        Ok(Moved::Stays)
    }

    /// Whether clients have lost too much: it may have to move.
    fn loses(&self) -> bool {
        self.state.armed || self.state.over.is_some()
    }

    /// Notes whether the next look is to be made sooner.
    fn press(&mut self, presses: bool) {
        self.presses = presses;
        if presses {
            let before = self.pressed.filter(|(_, last)| last.elapsed() < PRESSES);
            self.pressed = Some((before.map_or_else(Instant::now, |(since, _)| since), Instant::now()));
        }
    }

    /// The clients as they are now, by their connections, and by echoes where those may be wrong.
    async fn look(&mut self, service: &Service, target: Target) -> Result<Vec<Client>, Status> {
        let config = self.node.local().config(service);
        let (begun, looking) = (self.begun, Instant::now());
        self.clients.look(&config.network_namespace, || Moment(begun.elapsed())).await?;
        self.looked = looking.elapsed();
        let listening = self.clients.listen(target, || Moment(begun.elapsed()));
        self.ending.run_until_cancelled(listening).await;
        Ok(self.clients.clients(Moment(begun.elapsed())))
    }

    /// Decides, with what is known now.
    fn decide(
        &mut self,
        options: &Options,
        target: Target,
        clients: &[Client],
    ) -> Result<(Verdict, api::PlaceResponse), Status> {
        let infos = nodes(&self.node).map_err(internal)?;
        // While they are content, what was found when they were not is of no matter.
        let loses = self.loses();
        let matter = Matter {
            cause: Cause::Watched,
            options,
            target,
            dwell: self.dwell.mean(of_cluster(std::iter::empty())),
            usage: self.known.usage,
            host: facts::own(&infos, &self.node.name),
            sending: u32::try_from(self.node.migrations().len()).unwrap_or(u32::MAX),
            clients,
            from_here: &self.known.from_here,
            echoed: self.known.age().unwrap_or_default(),
            places: if loses { &self.known.places } else { &[] },
        };
        let debts = (!loses).then(|| self.state.debts.clone());
        let mut verdict = matter.decide(&mut self.state, now());
        if let Some(debts) = debts.filter(|_| self.known.age().is_some()) {
            // They count until clients were content for long.
            self.state.debts = debts;
        }
        if let Decision::Stay(reasons) = &mut verdict.decision
            && let Some(at) = reasons.iter().position(|why| *why == Reason::NoCandidate)
        {
            if !loses || self.known.age().is_none() {
                // No node was asked.
                reasons.remove(at);
            } else if self.known.has_others() {
                reasons[at] = Reason::NoBetter { delta: 0.0 };
            }
        }
        let mut answer =
            if loses { self.known.found.clone() } else { told::answer(&self.name, &self.node.name) };
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
            let found = &self.known.found;
            let keeps = found.objections.iter().cloned();
            let obstacles = found.obstacles.iter().map(|found| format!("{} {}", found.name, found.what));
            let words: Vec<_> =
                keeps.chain(obstacles).take(1).chain(reasons.iter().map(Reason::to_string)).collect();
            self.node.events.tell("policy", "stays", &self.name, &words.join("; "));
        }
    }

    /// Moves it.
    async fn go(&mut self, to: NodeId, mode: Mode, follows: &Follows, verdict: &Verdict) -> Moved {
        let node = Arc::clone(&self.node);
        // Another service of this node goes first: its move makes this one's slower.
        let Ok(_turn) = node.follows.try_acquire() else {
            self.known.waits();
            return Moved::Stays;
        };
        let request = api::MigrateRequest {
            name: self.name.to_string(),
            to: self.known.name_of(to).to_owned(),
            mode: mode.name().to_owned(),
            max_frozen_ms: follows.max_frozen_ms,
            allow_postcopy: follows.postcopy,
            ..api::MigrateRequest::default()
        };
        let made = expected(verdict);
        if let Err(status) = self.record(Some(follows), |follows| follows.moving(made)).await {
            return self.pauses(&status);
        }
        if node.is_prepared(&self.name) {
            self.forget_move(&made, None).await;
            return Moved::Stays;
        }
        let stream = match migrate::start(&node, self.name.clone(), &request).await {
            Ok(stream) => stream,
            Err(status) => {
                node.counters.followed(None, false);
                self.forget_move(&made, None).await;
                if status.code() != Code::Aborted {
                    self.state.kept(to, now());
                }
                return self.pauses(&status);
            }
        };
        let detail = format!("to node {}: {}", request.to, why(&node.name, verdict));
        node.events.tell("policy", "follows", &self.name, &detail);
        let ended = report(stream).await;
        let told = ended.as_ref().ok();
        node.counters
            .followed(told.map(|report| report.outcome.as_str()), told.is_some_and(|report| report.refused));
        match ended {
            Ok(report) if report.outcome == "aborted" => {
                let froze = (report.frozen_ms > 0.0).then(|| Duration::from_secs_f64(report.frozen_ms / 1e3));
                self.forget_move(&made, froze).await;
                // What was lost by not being at others counts on.
                let debts = self.state.debts.iter().filter(|debt| debt.node != to).copied().collect();
                self.state.kept(to, now());
                if report.refused {
                    self.state.debts = debts;
                }
                Moved::Stays
            }
            Ok(_) => Moved::Away,
            // What has become of it only its record tells. It was frozen, perhaps for long.
            Err(status) => {
                self.state.moves.push(remembered(&made));
                self.state.kept(to, now());
                self.pauses(&status)
            }
        }
    }

    /// A move could not be begun, or its end is not known.
    fn pauses(&mut self, why: &Status) -> Moved {
        tracing::warn!(service = %self.name, why = why.message(), "it does not move yet");
        self.paused = Some(Instant::now());
        Moved::Stays
    }

    /// A move that was not made does not count, unless the service was frozen for so long.
    async fn forget_move(&mut self, made: &Made, froze: Option<Duration>) {
        let frozen = froze
            .map(|froze| Made { frozen_ms: u64::try_from(froze.as_millis()).unwrap_or(u64::MAX), ..*made });
        self.state.moves.extend(frozen.iter().map(remembered));
        let changed = self.record(None, |follows| {
            follows.stays(made);
            if let Some(frozen) = frozen {
                follows.moving(frozen);
            }
        });
        if let Err(status) = changed.await {
            tracing::warn!(service = %self.name, why = status.message(), "a move that was not made counts as one");
        }
    }

    /// Changes what is remembered of the service; where a policy is given, only while it is that one.
    async fn record(&self, by: Option<&Follows>, change: impl FnOnce(&mut Follows)) -> Result<(), Status> {
        let (seconds, changes) = (self.dwell.seconds, self.dwell.changes);
        policy::record(&self.node, (&self.name, &self.id), by, |follows| {
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
