//! An error and its causes as one sentence: for logs, for reports, and for what a pager says to its daemon.

use std::error::Error;

/// An error and all its causes as one sentence.
#[must_use]
pub fn error_chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.ends_with(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Layer(&'static str, #[source] Option<Box<Layer>>);

    #[test]
    fn each_cause_is_said_once() {
        let innermost = || Some(Box::new(Layer("no space left", None)));
        let quoted = Some(Box::new(Layer("cannot write: no space left", innermost())));
        assert_eq!(error_chain(&Layer("it failed", quoted)), "it failed: cannot write: no space left");
        assert_eq!(error_chain(&Layer("it failed", innermost())), "it failed: no space left");
        assert_eq!(error_chain(&Layer("it failed", None)), "it failed");
    }
}
