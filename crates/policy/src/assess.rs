//! A node as the place of a service, compared with where the service is.
//!
//! ```text
//!  Δ(m) = ℓ(n) + κ(n) − ℓ(m) − κ(m)          what is lost less in each second, with the service at m in place of n
//!  G    = Δ · θ · e^(−T/θ)                   over the time that m stays the best node, θ, as far as the move leaves of it
//! ```

use std::time::Duration;

use crate::constraint::{Facts, Needs, Refusal, refusals};
use crate::cost::{Allowed, Priced, Prospect, cheapest};
use crate::degradation::Behaviour;
use crate::latency::Estimate;
use crate::loss::{Clients, Host, Prices, Usage, lost};
use crate::quantity::{Moment, Weight, bounded};
use crate::state::{NodeId, State};

/// Why a service may move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Cause {
    /// It is watched all the time: it moves when its clients have lost enough, and not too often.
    #[default]
    Watched,
    /// Its user asks for the best place now: what was lost before and how often it has moved do not matter.
    Asked,
    /// Its node is to become empty: it moves, to whatever place is the best.
    Draining,
}

impl Cause {
    /// Whether this rules a node out. A busy node is better than one that shuts down; its price says how busy it is.
    #[must_use]
    pub fn heeds(self, refusal: &Refusal) -> bool {
        self != Self::Draining || !matches!(refusal, Refusal::Cpu { .. })
    }
}

/// A service, where it is, and where it could be.
#[derive(Debug, Clone, Copy)]
pub struct Situation<'a> {
    /// The node where it is.
    pub node: NodeId,
    /// That node's cores and memory; the service is among what uses them.
    pub host: Host,
    /// Services that are on their way from that node to others.
    pub sending: u32,
    /// Why it may move.
    pub cause: Cause,
    /// What the service needs.
    pub needs: &'a Needs,
    /// What it uses.
    pub usage: Usage,
    /// How it behaves.
    pub behaviour: Behaviour,
    /// How it may move.
    pub allowed: Allowed,
    /// Its clients.
    pub clients: &'a [Clients],
    /// Where it could be. Nodes that have a debt ([`State::debts`]) have to be among them, or the debt is forgotten.
    pub candidates: &'a [Candidate<'a>],
    /// How long a node usually stays the best one for it.
    pub dwell: Duration,
    /// What resources are worth.
    pub prices: Prices,
}

/// A node where a service could be.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// Which.
    pub node: NodeId,
    /// What is known of it.
    pub facts: &'a Facts,
    /// The latency of each of the service's [`Clients`] there, in their order.
    pub there: &'a [Option<Estimate>],
    /// The move to it.
    pub prospect: Prospect<'a>,
}

/// What is lost in a second with the service at a node.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Losses {
    /// By clients.
    pub clients: f64,
    /// By clients, if each latency is one deviation worse.
    pub worse: f64,
    /// What CPU and memory of the node are worth.
    pub residence: f64,
    /// Weight of the clients whose latency there is not known. They count as if they lost everything.
    pub unknown: f64,
}

/// A node that is compared with where the service is.
#[derive(Debug, Clone, PartialEq)]
pub struct Assessment {
    /// Which node.
    pub node: NodeId,
    /// The clients' latency there, in their order.
    pub there: Vec<Option<Estimate>>,
    /// What would be lost there.
    pub losses: Losses,
    /// What is lost less there in a second.
    pub delta: f64,
    /// The same if each latency there is one deviation worse.
    pub delta_worse: f64,
    /// The cheapest move to it.
    pub priced: Priced,
    /// What is lost less in the end.
    pub gain: f64,
    /// What was lost so far by not being there.
    pub debt: f64,
}

impl Assessment {
    /// What is left of the gain after the cost.
    #[must_use]
    pub fn worth(&self) -> f64 {
        self.gain - self.priced.cost.total()
    }

    /// The same for each byte that crosses. Of the services of a node, that with the most moves first.
    #[must_use]
    pub fn worth_per_byte(&self) -> f64 {
        self.worth() / (self.priced.forecast.bytes as f64).max(1.0)
    }
}

/// What is lost where the service is.
#[must_use]
pub fn losses_here(situation: &Situation) -> Losses {
    let request = situation.usage.request.unwrap_or_default();
    let mut losses = Losses {
        residence: situation.host.residence(&situation.usage, &situation.prices),
        ..Losses::default()
    };
    for clients in situation.clients {
        let Some(here) = clients.here else {
            losses.unknown += clients.weight.get();
            continue;
        };
        losses.clients += lost(clients.weight, clients.target, with(here.expected, request));
        losses.worse += lost(clients.weight, clients.target, with(here.worse(), request));
    }
    losses
}

/// What would be lost at another node, by those clients whose latency here is known.
#[must_use]
pub fn losses_there(situation: &Situation, candidate: &Candidate) -> Losses {
    let usage = situation.usage.moved(&situation.host, &candidate.facts.host);
    let request = usage.request.unwrap_or_default();
    let mut losses = Losses {
        residence: candidate.facts.host.residence_with(&usage, &situation.prices),
        ..Losses::default()
    };
    for (index, clients) in situation.clients.iter().enumerate() {
        if clients.here.is_none() {
            continue;
        }
        let Some(there) = candidate.there.get(index).copied().flatten() else {
            losses.unknown += clients.weight.get();
            losses.clients += clients.weight.get();
            losses.worse += clients.weight.get();
            continue;
        };
        losses.clients += lost(clients.weight, clients.target, with(there.expected, request));
        losses.worse += lost(clients.weight, clients.target, with(there.worse(), request));
    }
    losses
}

fn with(latency: Duration, request: Duration) -> Duration {
    bounded(bounded(latency) + bounded(request))
}

/// The weight of all clients.
#[must_use]
pub fn weight(clients: &[Clients]) -> Weight {
    Weight::clamped(clients.iter().map(|clients| clients.weight.get()).sum())
}

/// Compares a node; or all that rules it out.
///
/// # Errors
/// The refusals.
pub(crate) fn assess(
    situation: &Situation,
    candidate: &Candidate,
    (here, there): (Losses, Losses),
    state: &State,
    now: Moment,
) -> Result<Assessment, Vec<Refusal>> {
    let Situation { needs, usage, host, allowed, behaviour, prices, .. } = situation;
    let mut refused = refusals(needs, usage, host, candidate.facts);
    refused.retain(|refusal| situation.cause.heeds(refusal));
    if let Some(left) = state.waits(candidate.node, now) {
        refused.push(Refusal::Waits { left });
    }
    let priced = match cheapest(&candidate.prospect, allowed, behaviour, weight(situation.clients), prices) {
        Ok(priced) if refused.is_empty() => priced,
        Ok(_) => return Err(refused),
        Err(refusal) => {
            refused.push(refusal);
            return Err(refused);
        }
    };
    let delta = here.clients + here.residence - there.clients - there.residence;
    Ok(Assessment {
        node: candidate.node,
        there: candidate.there.to_vec(),
        losses: there,
        delta,
        delta_worse: here.clients + here.residence - there.worse - there.residence,
        gain: gain(delta, situation.dwell, priced.forecast.total),
        priced,
        debt: state.debt(candidate.node),
    })
}

/// What is lost less in the end by a move that takes so long.
#[must_use]
pub fn gain(delta: f64, dwell: Duration, total: Duration) -> f64 {
    // The time during which the node stays the best one is memoryless: it lasts as long again, unless it ends before
    // the move.
    let (dwell, total) = (bounded(dwell).as_secs_f64(), bounded(total).as_secs_f64());
    if dwell == 0.0 {
        return 0.0;
    }
    // What is worse there is so however long the move takes.
    if delta <= 0.0 {
        return delta * dwell;
    }
    delta * dwell * (-total / dwell).exp()
}
