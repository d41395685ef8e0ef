//! Processes that have their session's terminal open as `/dev/tty`, and nobody by its own name: CRIU restores the one by
//! means of the other.

use std::collections::HashSet;

use super::Obstacle;
use super::tasks::Task;

const NAMELESS: &str =
    "and CRIU cannot dump that; end the process, or let it keep the terminal open by its own name";

#[derive(Default)]
pub(super) struct Terminals {
    /// Processes, by their places in the order of calls, and the descriptors of `/dev/tty` that they have.
    any: Vec<(usize, i32)>,
    /// The sessions in which a process has a terminal open by its name.
    named: HashSet<u32>,
}

impl Terminals {
    pub(super) fn any(&mut self, place: usize, number: i32) {
        self.any.push((place, number));
    }

    pub(super) fn named(&mut self, session: u32) {
        self.named.insert(session);
    }

    pub(super) fn obstacles(&self, tasks: &[Task]) -> Vec<Obstacle> {
        let nameless = self.any.iter().filter_map(|(place, number)| {
            let task = tasks.get(*place)?;
            (!self.named.contains(&task.session)).then_some((task, number))
        });
        let obstacle = |(task, number)| {
            let what = format!(
                "has its terminal open as /dev/tty (descriptor {number}), which no process of its session has open as \
                 itself"
            );
            Obstacle::new(task, what, NAMELESS)
        };
        nameless.map(obstacle).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_without_a_name_is_told_where_no_process_of_the_session_has_it_by_name() {
        let tasks = [Task::example(1, 0), Task::example(2, 1)];
        let mut terminals = Terminals::default();
        terminals.any(1, 5);
        let found = terminals.obstacles(&tasks);
        assert!(
            matches!(&found[..], [one] if one.pid == 2 && one.what.contains("descriptor 5")),
            "{found:?}"
        );
        terminals.named(7);
        assert_eq!(terminals.obstacles(&tasks).len(), 1);
        terminals.named(1);
        assert_eq!(terminals.obstacles(&tasks), []);
    }
}
