//! Why a call did not arrive, or its answer did not.

use std::error::Error;

/// The innermost cause of an error of the transport, which says most: the outer ones say "transport error". None for the
/// answer of a daemon, which has no causes.
#[must_use]
pub fn innermost(error: &(dyn Error + 'static)) -> Option<String> {
    std::iter::successors(error.source(), |&cause| cause.source()).last().map(ToString::to_string)
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use tonic::Status;

    use super::*;

    #[derive(Debug)]
    struct Layer(&'static str, Option<Box<Layer>>);

    impl fmt::Display for Layer {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Layer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|cause| cause as _)
        }
    }

    #[test]
    fn the_innermost_cause_is_told_and_an_answer_has_none() {
        let transport = Layer("transport error", Some(Box::new(Layer("refused", None))));
        assert_eq!(innermost(&transport).as_deref(), Some("refused"));
        let status = Status::from_error(Box::new(transport));
        assert_eq!(innermost(&status).as_deref(), Some("refused"));
        assert_eq!(innermost(&Status::not_found("there is no service x")), None);
    }
}
