//! Whether one operation after another explains what clients saw: linearizability (Herlihy and Wing, 1990).
//!
//! The search is Wing and Gong's with Lowe's memory of what was tried (*Testing for linearizability*, 2017), as in
//! porcupine. It is a loop: stateright's tester of the same kind calls itself once for each operation, and overflows the
//! stack on a long history. A history is checked for each record by itself: operations on single records are linearizable
//! together if those on each record are. That does not cover a swap that compares several records; [`crate::history`] checks
//! by itself what a take-over compares.

use std::collections::HashSet;
use std::hash::Hash;

/// What operations mean when they are done one after another.
pub trait Specification {
    /// What an operation finds and leaves.
    type State: Clone + Eq + Hash;
    /// An operation with what its client was answered.
    type Operation;

    /// Before the first operation.
    fn initial(&self) -> Self::State;

    /// What the operation leaves, if it can have been answered so in this state. `unknown`: it has no answer, and this is
    /// what it leaves if it is done.
    fn step(&self, state: &Self::State, operation: &Self::Operation, unknown: bool) -> Option<Self::State>;
}

/// An operation between its call and its return, which are numbers in the order of all calls and returns.
#[derive(Debug, Clone)]
pub struct Timed<O> {
    /// When it was called.
    pub called: usize,
    /// When it returned. None: the outcome is unknown, and it takes effect at any time after the call, or never.
    pub returned: Option<usize>,
    /// What was done.
    pub operation: O,
}

/// Whether there is an order of the operations that explains all answers.
pub fn is_linearizable<S: Specification>(specification: &S, operations: &[Timed<S::Operation>]) -> bool {
    let all = Piece { operations, begin: 0, end: usize::MAX, without: &[] };
    Search::new(&all).run(specification, specification.initial())
}

/// The shortest piece of a history that no order explains: indices into the operations. None where all is explained.
///
/// It ends with the first answer that contradicts those before it. It begins where none of the states that the history shows
/// would explain what follows. What changes nothing and is not needed is left out.
pub fn shortest<S: Specification>(
    specification: &S,
    operations: &[Timed<S::Operation>],
    shown: &[S::State],
    changes: impl Fn(&S::Operation) -> bool,
) -> Option<Vec<usize>> {
    let contradicts = |piece: &Piece<'_, S::Operation>, state: &S::State| {
        !Search::new(piece).run(specification, state.clone())
    };
    let initial = [specification.initial()];
    let whole = Piece { operations, begin: 0, end: usize::MAX, without: &[] };
    if !contradicts(&whole, &initial[0]) {
        return None;
    }
    let mut returns: Vec<_> = operations.iter().filter_map(|operation| operation.returned).collect();
    returns.sort_unstable();
    // What no order explains stays so when more is added.
    let first = returns.partition_point(|end| !contradicts(&Piece { end: *end, ..whole }, &initial[0]));
    // Only times that are not those of a history lead here: an operation that returns before its call.
    let Some(end) = returns.get(first).copied() else { return Some((0..operations.len()).collect()) };
    let mut begins: Vec<_> =
        operations.iter().map(|operation| operation.called).filter(|at| *at < end).collect();
    begins.sort_unstable();
    let any = |begin: &usize| {
        let piece = Piece { begin: *begin, end, ..whole };
        initial.iter().chain(shown).all(|state| contradicts(&piece, state))
    };
    // 0: the whole beginning is needed, from the first state.
    let begin = begins.partition_point(any).checked_sub(1).map_or(0, |last| begins[last]);
    let states = if begin == 0 { &[] } else { shown };
    let mut without = Vec::new();
    for (index, operation) in operations.iter().enumerate() {
        if (Piece { begin, end, ..whole }).has(index) && !changes(&operation.operation) {
            without.push(index);
            let piece = Piece { begin, end, without: &without, operations };
            if !initial.iter().chain(states).all(|state| contradicts(&piece, state)) {
                without.pop();
            }
        }
    }
    let piece = Piece { begin, end, without: &without, operations };
    Some((0..operations.len()).filter(|index| piece.has(*index)).collect())
}

/// The operations between two times, without some of them. One that returns later has no answer yet.
struct Piece<'a, O> {
    operations: &'a [Timed<O>],
    begin: usize,
    end: usize,
    without: &'a [usize],
}

impl<O> Clone for Piece<'_, O> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<O> Copy for Piece<'_, O> {}

impl<O> Piece<'_, O> {
    fn has(&self, index: usize) -> bool {
        let Timed { called, returned, .. } = self.operations[index];
        called < self.end && returned.is_none_or(|at| at > self.begin) && !self.without.contains(&index)
    }
}

/// A call or a return in the list of those that are not yet in the order.
#[derive(Clone, Copy)]
struct Node {
    operation: usize,
    is_return: bool,
    before: usize,
    after: usize,
}

/// The head of the list, before the first node, and its end.
const HEAD: usize = 0;

struct Search<'a, O> {
    operations: Vec<&'a Timed<O>>,
    /// Whether the outcome is known.
    known: Vec<bool>,
    nodes: Vec<Node>,
    /// The nodes of an operation's call and return.
    places: Vec<(usize, Option<usize>)>,
}

impl<'a, O> Search<'a, O> {
    fn new(piece: &Piece<'a, O>) -> Self {
        let kept = (0..piece.operations.len()).filter(|index| piece.has(*index));
        let operations: Vec<_> = kept.map(|index| &piece.operations[index]).collect();
        let is_known = |operation: &&Timed<O>| operation.returned.is_some_and(|at| at <= piece.end);
        let known: Vec<_> = operations.iter().map(is_known).collect();
        let calls = operations.iter().enumerate().map(|(index, operation)| (operation.called, index, false));
        let returns = operations.iter().enumerate().filter(|(index, _)| known[*index]);
        let returns = returns.filter_map(|(index, operation)| Some((operation.returned?, index, true)));
        let mut order: Vec<_> = calls.chain(returns).collect();
        order.sort_unstable();
        let count = order.len();
        let mut nodes = vec![Node { operation: usize::MAX, is_return: false, before: count, after: 1 }];
        let mut places = vec![(HEAD, None); operations.len()];
        for (at, (_, operation, is_return)) in (1..).zip(order) {
            nodes.push(Node { operation, is_return, before: at - 1, after: at + 1 });
            if is_return { places[operation].1 = Some(at) } else { places[operation].0 = at }
        }
        nodes[count].after = HEAD;
        Self { operations, known, nodes, places }
    }

    fn unlink(&mut self, at: usize) {
        let Node { before, after, .. } = self.nodes[at];
        self.nodes[before].after = after;
        self.nodes[after].before = before;
    }

    fn link(&mut self, at: usize) {
        let Node { before, after, .. } = self.nodes[at];
        self.nodes[before].after = at;
        self.nodes[after].before = at;
    }

    fn lift(&mut self, operation: usize) {
        let (call, end) = self.places[operation];
        self.unlink(call);
        if let Some(end) = end {
            self.unlink(end);
        }
    }

    fn put_back(&mut self, operation: usize) {
        let (call, end) = self.places[operation];
        if let Some(end) = end {
            self.link(end);
        }
        self.link(call);
    }

    fn run<S: Specification<Operation = O>>(mut self, specification: &S, initial: S::State) -> bool {
        let mut left = self.known.iter().filter(|known| **known).count();
        let mut state = initial;
        let mut done = vec![0_u64; self.operations.len().div_ceil(64)];
        let mut tried = HashSet::new();
        let mut order: Vec<(usize, S::State)> = Vec::new();
        let mut at = self.nodes[HEAD].after;
        while left > 0 {
            let Node { operation, is_return, after, .. } = self.nodes[at];
            if !is_return {
                let known = self.known[operation];
                let next = specification.step(&state, &self.operations[operation].operation, !known);
                if let Some(next) = next {
                    done[operation / 64] |= 1 << (operation % 64);
                    if tried.insert((done.clone(), next.clone())) {
                        order.push((operation, std::mem::replace(&mut state, next)));
                        self.lift(operation);
                        left -= usize::from(known);
                        at = self.nodes[HEAD].after;
                        continue;
                    }
                    done[operation / 64] &= !(1 << (operation % 64));
                }
                at = after;
                continue;
            }
            // An operation has returned that nothing in the order so far explains: the last one was not next.
            let Some((last, earlier)) = order.pop() else { return false };
            state = earlier;
            done[last / 64] &= !(1 << (last % 64));
            self.put_back(last);
            left += usize::from(self.known[last]);
            at = self.nodes[self.places[last].0].after;
        }
        true
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A number that is read and written.
    struct Register;

    #[derive(Debug, Clone, Copy)]
    enum Access {
        Read(u32),
        Write(u32),
    }

    impl Specification for Register {
        type State = u32;
        type Operation = Access;

        fn initial(&self) -> u32 {
            0
        }

        fn step(&self, state: &u32, operation: &Access, _: bool) -> Option<u32> {
            match *operation {
                Access::Read(value) => (value == *state).then_some(value),
                Access::Write(value) => Some(value),
            }
        }
    }

    use Access::{Read, Write};

    fn history(operations: &[(usize, Option<usize>, Access)]) -> Vec<Timed<Access>> {
        let timed = |&(called, returned, operation)| Timed { called, returned, operation };
        operations.iter().map(timed).collect()
    }

    fn explains(operations: &[(usize, Option<usize>, Access)]) -> bool {
        is_linearizable(&Register, &history(operations))
    }

    #[test]
    fn operations_at_once_may_be_in_any_order_and_those_one_after_another_in_theirs() {
        assert!(explains(&[]));
        assert!(explains(&[(0, Some(3), Write(1)), (1, Some(2), Read(0))]));
        assert!(explains(&[(0, Some(3), Write(1)), (1, Some(2), Read(1))]));
        assert!(!explains(&[(0, Some(1), Write(1)), (2, Some(3), Read(0))]), "a stale read");
        // The new value, and then the old one again.
        assert!(!explains(&[(0, Some(5), Write(1)), (1, Some(2), Read(1)), (3, Some(4), Read(0))]));
    }

    #[test]
    fn what_has_no_answer_takes_effect_late_or_never_but_not_before_its_call() {
        assert!(explains(&[(0, None, Write(1)), (1, Some(2), Read(0))]));
        assert!(explains(&[(0, None, Write(1)), (1, Some(2), Read(0)), (3, Some(4), Read(1))]));
        assert!(!explains(&[(0, None, Write(1)), (1, Some(2), Read(1)), (3, Some(4), Read(0))]));
        assert!(!explains(&[(0, Some(1), Read(1)), (2, None, Write(1))]));
    }

    #[test]
    fn a_history_of_twenty_thousand_operations_needs_no_deep_stack() {
        let one = |index: usize| {
            let value = u32::try_from(index / 2).unwrap();
            let operation = if index.is_multiple_of(2) { Write(value) } else { Read(value) };
            Timed { called: 2 * index, returned: Some(2 * index + 1), operation }
        };
        // The memory of what was tried has a bit for each operation.
        let operations: Vec<_> = (0..20_000).map(one).collect();
        assert!(is_linearizable(&Register, &operations));
    }

    #[test]
    fn the_same_answer_as_trying_all_orders() {
        fn brute(left: &[Timed<Access>], state: u32) -> bool {
            let first_return = left.iter().filter_map(|operation| operation.returned).min();
            let Some(first_return) = first_return else { return true };
            (0..left.len()).any(|index| {
                let mut rest = left.to_vec();
                let next = rest.remove(index);
                next.called < first_return
                    && Register.step(&state, &next.operation, false).is_some_and(|state| brute(&rest, state))
            })
        }
        let mut random = fastrand::Rng::with_seed(7);
        let mut explained = 0;
        for _ in 0..3000 {
            let count = random.usize(1..7);
            let mut times: Vec<_> = (0..2 * count).collect();
            random.shuffle(&mut times);
            let operations: Vec<_> = times
                .chunks(2)
                .map(|pair| Timed {
                    called: pair[0].min(pair[1]),
                    returned: (random.u8(..) >= 50).then_some(pair[0].max(pair[1])),
                    operation: if random.bool() { Read(random.u32(..3)) } else { Write(random.u32(1..3)) },
                })
                .collect();
            let expected = brute(&operations, 0);
            assert_eq!(is_linearizable(&Register, &operations), expected, "{operations:?}");
            explained += u32::from(expected);
        }
        assert!((500..2500).contains(&explained), "{explained} of 3000: too few of one kind");
    }

    #[test]
    fn what_cannot_be_made_shorter_is_shown_whole_and_never_taken_for_explained() {
        // It returns before its call, which no history has.
        let broken = history(&[(5, Some(3), Read(1))]);
        assert!(!is_linearizable(&Register, &broken));
        assert_eq!(shortest(&Register, &broken, &[], |_| true), Some(vec![0]));
    }

    #[test]
    fn the_shortest_piece_has_what_contradicts_and_nothing_after_it() {
        let operations = history(&[
            (0, Some(1), Read(0)),
            (2, Some(3), Write(1)),
            (4, Some(5), Read(1)),
            (6, Some(7), Read(0)),
            (8, Some(9), Write(3)),
        ]);
        let changes = |operation: &Access| matches!(operation, Write(_));
        assert_eq!(
            shortest(&Register, &operations, &[0, 1, 3], changes),
            Some(vec![2, 3]),
            "the reads contradict"
        );
        assert_eq!(shortest(&Register, &operations[..3], &[0, 1], changes), None);
        // Only the write before it shows that this is wrong.
        let operations = [&operations[..2], &operations[3..4]].concat();
        assert_eq!(shortest(&Register, &operations, &[0, 1], changes), Some(vec![1, 2]));
    }
}
