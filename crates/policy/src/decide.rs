//! Whether a service moves now, where to, and how: a pure function of what is measured and of what is remembered.
//!
//! Of the nodes that nothing rules out, the one with the greatest `G − C` is taken, if
//!
//! 1. its clients have lost more than a threshold for some time (armed);
//! 2. the gain is at least twice the cost, and there is a gain even if all latencies there are one deviation worse;
//! 3. not being there has cost half of the move's cost so far (debt). So moves never cost more than twice the loss
//!    suffered by waiting, even for a client that walks along a border;
//! 4. budgets allow it.
//!
//! Where its user asks for the best place, 1, 3 and 4 do not matter, but for the gain. A service on a node that is to become
//! empty moves to the best node without any of that: the node shuts down anyway.

use std::fmt;
use std::time::Duration;

use crate::Mode;
use crate::assess::{Assessment, Cause, Losses, Situation, assess, losses_here, losses_there, weight};
use crate::constraint::Refusal;
use crate::latency::Estimate;
use crate::loss::Target;
use crate::quantity::Moment;
use crate::rules::Rules;
use crate::state::{HOUR, NodeId, State};

/// How many times its cost a move has to gain.
const GAIN: f64 = 2.0;

/// The part of a move's cost that has to be lost before it is made.
const DEBT: f64 = 0.5;

/// Destinations that are tried, should the first refuse its reservation.
const TRIES: usize = 3;

/// Why a service stays.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reason {
    /// No client is active.
    NoClients,
    /// Its clients lose too little, or not for long enough.
    NotArmed {
        /// The part of their weight that they lose.
        part: f64,
        /// The part above which it is looked at.
        threshold: f64,
        /// How much longer they have to lose as much; none while they do not.
        left: Option<Duration>,
    },
    /// No node is left that nothing rules out.
    NoCandidate,
    /// The best node is no better.
    NoBetter {
        /// What is lost less there in a second; at most 0.
        delta: f64,
    },
    /// The best node may be no better: latencies are not known well enough.
    Uncertain {
        /// What is lost less there in a second if each latency is one deviation worse; at most 0.
        delta: f64,
    },
    /// The move costs too much for what it gains.
    TooLittle {
        /// What it gains.
        gain: f64,
        /// What it has to gain.
        needed: f64,
    },
    /// The move is not paid for yet.
    Unpaid {
        /// What was lost so far.
        suffered: f64,
        /// What has to be lost before.
        needed: f64,
        /// How long that takes, if all stays as it is.
        left: Duration,
    },
    /// It has moved too often.
    Moves {
        /// Moves in the last hour.
        made: u32,
        /// The most.
        most: u32,
        /// When there are few enough.
        left: Duration,
    },
    /// It has been frozen for too long.
    Frozen {
        /// In the last hour.
        spent: Duration,
        /// By this move, at most.
        needed: Duration,
        /// The most in an hour.
        most: Duration,
    },
    /// It has moved a short time ago.
    Rests {
        /// For how much longer.
        left: Duration,
    },
    /// Its node is sending other services.
    Sending {
        /// How many.
        now: u32,
        /// The most at once.
        most: u32,
    },
}

/// A sentence for events; times are rounded to seconds.
impl fmt::Display for Reason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoClients => write!(out, "no client is active"),
            Self::NotArmed { part, threshold, .. } => write!(
                out,
                "its clients lose {:.0} % of their time, or have not lost more than {:.0} % for long enough",
                part * 100.0,
                threshold * 100.0
            ),
            Self::NoCandidate => write!(out, "no other node can take it, or may be better"),
            Self::NoBetter { .. } => write!(out, "no node is better"),
            Self::Uncertain { .. } => {
                write!(out, "the best node may be no better: latencies there are not known well enough")
            }
            Self::TooLittle { gain, needed } => {
                write!(out, "the move gains {gain:.2} client-seconds, and has to gain {needed:.2}")
            }
            Self::Unpaid { suffered, needed, left } => write!(
                out,
                "{suffered:.2} client-seconds were lost so far, and {needed:.2} have to be: about {} s more",
                left.as_secs()
            ),
            Self::Moves { made, most, left } => {
                write!(
                    out,
                    "it has moved {made} times in an hour, and {most} is the most: {} s more",
                    left.as_secs()
                )
            }
            Self::Frozen { spent, needed, most } => write!(
                out,
                "it was frozen for {:.1} s in an hour, the move may take {:.1} s, and {:.1} s is the most",
                spent.as_secs_f64(),
                needed.as_secs_f64(),
                most.as_secs_f64()
            ),
            Self::Rests { left } => write!(out, "it has moved a short time ago: {} s more", left.as_secs()),
            Self::Sending { now, most } => {
                write!(out, "its node sends {now} other services, and {most} at once is the most")
            }
        }
    }
}

/// Clients whose latency is above their target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Over {
    /// How many.
    pub count: u32,
    /// Their target.
    pub target: Target,
    /// Their latency.
    pub here: Estimate,
}

/// The clients of a service.
#[derive(Debug, Clone, PartialEq)]
pub struct Suffering {
    /// How many are active.
    pub active: u32,
    /// How many of them have a latency that was not measured.
    pub unmeasured: u32,
    /// What all count for.
    pub weight: f64,
    /// Those above their target.
    pub over: Vec<Over>,
    /// What is lost in a second.
    pub losses: Losses,
}

/// A node that was not chosen.
#[derive(Debug, Clone, PartialEq)]
pub enum Other {
    /// It is ruled out.
    Refused(Vec<Refusal>),
    /// It is worth less than the best.
    Less {
        /// What is lost less there in a second.
        delta: f64,
        /// Gain less cost.
        worth: f64,
    },
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    /// The service stays, for these reasons. There is at least one.
    Stay(Vec<Reason>),
    /// The service moves.
    Move {
        /// Where to.
        to: NodeId,
        /// The mode to ask for. In mode `precopy` the rest may follow after the resume, if mode `hybrid` is allowed too.
        mode: Mode,
        /// Where to if that node refuses, one after the other.
        then: Vec<NodeId>,
    },
}

/// A decision, with all it rests on.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// What is to be done.
    pub decision: Decision,
    /// The clients.
    pub suffering: Suffering,
    /// How long a node usually stays the best one.
    pub dwell: Duration,
    /// The best node: the destination, or what would be it.
    pub best: Option<Assessment>,
    /// All other nodes, in the order of the candidates.
    pub others: Vec<(NodeId, Other)>,
}

/// Decides. A move is noted by [`State::moved`] or [`State::kept`] when it has ended; until then nothing is decided
/// about the service.
#[must_use]
pub fn decide(situation: &Situation, rules: &Rules, state: &mut State, now: Moment) -> Verdict {
    let here = losses_here(situation);
    let all = weight(situation.clients).get();
    let passed = state.settle(now);
    let part = if all > 0.0 { here.clients / all } else { 0.0 };
    state.arm(part, now, &rules.thresholds);

    let candidates: Vec<_> = situation
        .candidates
        .iter()
        .filter(|candidate| candidate.node != situation.node)
        .map(|candidate| (candidate, losses_there(situation, candidate)))
        .collect();
    let delta = |there: &Losses| here.clients + here.residence - there.clients - there.residence;
    state.charge(candidates.iter().map(|(candidate, there)| (candidate.node, delta(there))), passed);

    let mut others = Vec::new();
    let mut possible = Vec::new();
    for (candidate, there) in candidates {
        match assess(situation, candidate, (here, there), state, now) {
            Ok(assessment) => possible.push(assessment),
            Err(refusals) => others.push((candidate.node, Other::Refused(refusals))),
        }
    }
    let decider = Decider { situation, rules, state, now, all, part };
    let decision = decider.choose(&mut possible);
    let mut possible = possible.into_iter();
    let best = possible.next();
    others
        .extend(possible.map(|other| (other.node, Other::Less { delta: other.delta, worth: other.worth() })));
    let place = |node: NodeId| situation.candidates.iter().position(|candidate| candidate.node == node);
    others.sort_by_key(|(node, _)| place(*node));
    Verdict { decision, suffering: suffering(situation, here, all), dwell: situation.dwell, best, others }
}

struct Decider<'a> {
    situation: &'a Situation<'a>,
    rules: &'a Rules,
    state: &'a State,
    now: Moment,
    /// The weight of all clients, and the part of it that is lost in a second.
    all: f64,
    part: f64,
}

impl Decider<'_> {
    /// Sorts what is possible, the best first, and decides.
    fn choose(&self, possible: &mut [Assessment]) -> Decision {
        let hindered = self.hindered();
        let rank = |assessment: &Assessment| {
            let draining = self.situation.cause == Cause::Draining;
            let ready = draining || self.against(assessment).is_empty();
            // Where no node is better, the least bad one is shown.
            let better = draining || assessment.delta > 0.0;
            (ready, better, if better { assessment.worth() } else { assessment.delta })
        };
        possible.sort_by(|a, b| {
            let (a, b) = (rank(a), rank(b));
            (b.0, b.1).cmp(&(a.0, a.1)).then(b.2.total_cmp(&a.2))
        });
        let Some(best) = possible.first() else {
            return Decision::Stay([hindered, vec![Reason::NoCandidate]].concat());
        };
        let against = match self.situation.cause {
            Cause::Draining => Vec::new(),
            // There is nobody for whom a node could be better.
            _ if self.all <= 0.0 => Vec::new(),
            Cause::Watched | Cause::Asked => self.against(best),
        };
        let reasons = [hindered, against].concat();
        if !reasons.is_empty() {
            return Decision::Stay(reasons);
        }
        let ready = possible.iter().filter(|assessment| rank(assessment).0);
        let then = ready.skip(1).take(TRIES - 1).map(|assessment| assessment.node).collect();
        Decision::Move { to: best.node, mode: best.priced.mode, then }
    }

    /// What speaks against any move now.
    fn hindered(&self) -> Vec<Reason> {
        let Rules { thresholds, budgets } = self.rules;
        let sending = self.situation.sending;
        let mut reasons = Vec::new();
        if sending >= budgets.sends {
            reasons.push(Reason::Sending { now: sending, most: budgets.sends });
        }
        let cause = self.situation.cause;
        if cause == Cause::Draining {
            return reasons;
        }
        if self.all <= 0.0 {
            reasons.push(Reason::NoClients);
        }
        if cause == Cause::Asked {
            return reasons;
        }
        if self.all > 0.0 && !self.state.armed {
            let left = self.state.over.map(|since| thresholds.time.saturating_sub(self.now.since(since)));
            reasons.push(Reason::NotArmed { part: self.part, threshold: thresholds.arm.get(), left });
        }
        let mut recent: Vec<_> = self.state.recent(self.now).map(|made| made.at).collect();
        recent.sort_unstable();
        let made = u32::try_from(recent.len()).unwrap_or(u32::MAX);
        if let Some(excess) = made.checked_sub(budgets.moves) {
            // There may be more than are allowed, because a node that becomes empty does not heed the budget.
            let ends = usize::try_from(excess).ok().and_then(|excess| recent.get(excess));
            let left = ends.map_or(HOUR, |ends| HOUR.saturating_sub(self.now.since(*ends)));
            reasons.push(Reason::Moves { made, most: budgets.moves, left });
        }
        reasons
    }

    /// What speaks against a move to this node.
    fn against(&self, node: &Assessment) -> Vec<Reason> {
        let (cost, budgets) = (node.priced.cost.total(), &self.rules.budgets);
        let (forecast, upper) = (&node.priced.forecast, node.priced.upper);
        if node.delta <= 0.0 {
            return vec![Reason::NoBetter { delta: node.delta }];
        }
        let mut reasons = Vec::new();
        if node.delta_worse <= 0.0 {
            reasons.push(Reason::Uncertain { delta: node.delta_worse });
        }
        if node.gain < GAIN * cost {
            reasons.push(Reason::TooLittle { gain: node.gain, needed: GAIN * cost });
        }
        if self.situation.cause == Cause::Asked {
            return reasons;
        }
        if node.debt < DEBT * cost {
            let left = crate::quantity::seconds((DEBT * cost - node.debt) / node.delta);
            reasons.push(Reason::Unpaid { suffered: node.debt, needed: DEBT * cost, left });
        }
        let spent: Duration = self.state.recent(self.now).map(|made| made.frozen).sum();
        if spent + upper > budgets.frozen {
            reasons.push(Reason::Frozen { spent, needed: upper, most: budgets.frozen });
        }
        if let Some(last) = self.state.last() {
            let rest = last.took.max(forecast.total).saturating_mul(budgets.rest);
            let left = rest.saturating_sub(self.now.since(last.at));
            if !left.is_zero() {
                reasons.push(Reason::Rests { left });
            }
        }
        reasons
    }
}

fn suffering(situation: &Situation, losses: Losses, weight: f64) -> Suffering {
    let count = |counted: &dyn Fn(&crate::loss::Clients) -> bool| {
        let counts = situation.clients.iter().filter(|clients| counted(clients)).map(|clients| clients.count);
        counts.fold(0, u32::saturating_add)
    };
    let over = situation.clients.iter().filter_map(|clients| {
        let here = clients.here.filter(|here| here.expected > clients.target.get())?;
        Some(Over { count: clients.count, target: clients.target, here })
    });
    Suffering {
        active: count(&|_| true),
        unmeasured: count(&|clients| clients.here.is_none()),
        weight,
        over: over.collect(),
        losses,
    }
}
