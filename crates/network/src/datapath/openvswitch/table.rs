//! What flows a bridge must have, kept beside it: what is lost of them can then be told and written again,
//! whoever removed them.

use std::collections::BTreeMap;
use std::fmt;

use super::flows;
use super::openflow::{Change, Flow, Match};

/// Flows by what there can be only one for: table, priority and match.
#[derive(Debug, Default)]
pub(super) struct Table(BTreeMap<(u8, u16, Match), (u64, Vec<u8>)>);

/// In what a bridge's flows differ from those it must have.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Difference {
    lost: Vec<Flow>,
    /// Of the kinds that godwit writes, but not there by its will.
    foreign: Vec<Flow>,
}

impl Table {
    /// Takes over what a bridge has of our flows, from an earlier life of the daemon.
    pub(super) fn adopt(seen: Vec<Flow>) -> Self {
        let mut table = Self::default();
        seen.into_iter().filter(flows::is_ours).for_each(|flow| table.put(flow));
        table
    }

    fn put(&mut self, flow: Flow) {
        let Flow { table, priority, cookie, matched, instructions } = flow;
        self.0.insert((table, priority, matched), (cookie, instructions));
    }

    /// Follows a change that the switch has made.
    pub(super) fn apply(&mut self, change: Change) {
        match change {
            Change::Add(flow) => self.put(flow),
            Change::Delete { table, cookie, matched } => self.0.retain(|(in_table, _, flow), (has, _)| {
                *in_table != table || cookie.is_some_and(|cookie| *has != cookie) || !matched.covers(flow)
            }),
            Change::DeleteOne { table, priority, matched } => {
                self.0.remove(&(table, priority, matched));
            }
        }
    }

    pub(super) fn flows(&self) -> impl Iterator<Item = Flow> {
        self.0.iter().map(|((table, priority, matched), (cookie, instructions))| Flow {
            table: *table,
            priority: *priority,
            cookie: *cookie,
            matched: matched.clone(),
            instructions: instructions.clone(),
        })
    }

    /// Compares with what a bridge says that it has. Instructions are not compared: a switch may write
    /// the same in another way.
    pub(super) fn compare(&self, seen: &[Flow]) -> Difference {
        let place = |flow: &Flow| (flow.table, flow.priority, flow.matched.clone());
        let cookies: BTreeMap<_, _> = seen.iter().map(|flow| (place(flow), flow.cookie)).collect();
        Difference {
            lost: self.flows().filter(|flow| cookies.get(&place(flow)) != Some(&flow.cookie)).collect(),
            foreign: seen
                .iter()
                .filter(|flow| flows::is_ours(flow) && !self.0.contains_key(&place(flow)))
                .cloned()
                .collect(),
        }
    }
}

impl Difference {
    pub(super) fn is_none(&self) -> bool {
        self.lost.is_empty() && self.foreign.is_empty()
    }

    /// What undoes it.
    pub(super) fn changes(self) -> Vec<Change> {
        let remove = |flow: Flow| Change::DeleteOne {
            table: flow.table,
            priority: flow.priority,
            matched: flow.matched,
        };
        self.foreign.into_iter().map(remove).chain(self.lost.into_iter().map(Change::Add)).collect()
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.lost.len(), self.foreign.len()) {
            (lost, 0) => write!(f, "{lost} flows are lost"),
            (0, foreign) => write!(f, "{foreign} flows are there that should not be"),
            (lost, foreign) => write!(f, "{lost} flows are lost and {foreign} are there that should not be"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::Mac;

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
    const MAC: Mac = [2, 0x67, 10, 88, 0, 10];

    fn table(changes: &[Vec<Change>]) -> Table {
        let mut table = Table::default();
        changes.concat().into_iter().for_each(|change| table.apply(change));
        table
    }

    #[test]
    fn changes_are_followed_as_a_switch_makes_them() {
        let count = |changes: &[Vec<Change>]| table(changes).0.len();
        let here = || flows::entry_here(ADDRESS, MAC, 5);
        assert_eq!(count(&[here(), flows::entry_there(ADDRESS, MAC, 1)]), 2, "one replaces the other");
        assert_eq!(count(&[here(), flows::delete_entry(ADDRESS, MAC, 1)]), 2, "it is not there");
        assert_eq!(count(&[here(), flows::delete_entry(ADDRESS, MAC, 5)]), 0);
        assert_eq!(count(&[flows::open(5), flows::open(6), flows::close(5)]), 2);
        assert_eq!(count(&[flows::open(5), here(), flows::open(6), flows::forget(5)]), 2);
    }

    #[test]
    fn what_is_lost_and_what_was_added_is_found_and_undone() {
        let wanted = table(&[flows::base(1, ADDRESS, MAC), flows::open(5)]);
        let all: Vec<Flow> = wanted.flows().collect();
        assert!(wanted.compare(&all).is_none());

        let some = &all[1..];
        let difference = wanted.compare(some);
        assert_eq!(difference.to_string(), "1 flows are lost");
        assert_eq!(difference.changes(), [Change::Add(all[0].clone())]);

        let other = table(&[flows::open(6)]).flows().chain(all.clone()).collect::<Vec<_>>();
        let difference = wanted.compare(&other);
        assert_eq!(difference.to_string(), "2 flows are there that should not be");
        let mut mended = Table::adopt(other);
        difference.changes().into_iter().for_each(|change| mended.apply(change));
        assert_eq!(mended.flows().collect::<Vec<_>>(), all);

        let mut elsewhere = all.clone();
        elsewhere[0].cookie += 1;
        assert_eq!(wanted.compare(&elsewhere).changes(), [Change::Add(all[0].clone())]);

        let mut somebodys = all.clone();
        somebodys.push(Flow { priority: 7, ..all[0].clone() });
        assert!(wanted.compare(&somebodys).is_none(), "what others write is theirs");
    }
}
