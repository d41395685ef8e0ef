//! Who may ask what of this node: every verb of both APIs, in one place. What has no line here is refused.
//!
//! The lines are those of the table in docs/security.md. Messages of a migration are not verbs: each goes to the
//! migration that it names, if it comes from that one's other end.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::{Request, Response};
use tonic::server::NamedService;
use tonic::{Code, Status};

/// Who may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Who {
    /// Users of this node, on its own socket alone.
    Operator,
    /// A member, of itself and of what it has: what else it says is passed over or refused.
    Itself,
    /// The other end of the migration that is named.
    Party,
    /// The node that has the service that is named, and those of `--verbs-from`.
    Owner,
    /// Those of `--verbs-from`.
    Let,
    /// A member that knows the secret of what it asks for.
    Token,
    /// Any member.
    Member,
}

/// The API of users.
const NODE: &[(&str, Who)] = &[
    ("Run", Who::Operator),
    ("RunByEngine", Who::Operator),
    ("Adopt", Who::Operator),
    ("List", Who::Operator),
    ("Inspect", Who::Operator),
    ("Connections", Who::Operator),
    ("Capture", Who::Operator),
    ("Logs", Who::Operator),
    ("Exec", Who::Operator),
    ("Stop", Who::Operator),
    ("Start", Who::Operator),
    ("Restart", Who::Operator),
    ("Kill", Who::Operator),
    ("Wait", Who::Operator),
    ("CopyIn", Who::Operator),
    ("CopyOut", Who::Operator),
    ("Checkpoint", Who::Operator),
    ("Restore", Who::Operator),
    ("Stats", Who::Operator),
    ("Update", Who::Operator),
    ("Remove", Who::Operator),
    ("Migrate", Who::Operator),
    ("Prepare", Who::Operator),
    ("CheckMove", Who::Operator),
    ("Place", Who::Operator),
    ("Policy", Who::Operator),
    ("Cordon", Who::Operator),
    ("Drain", Who::Operator),
    ("Cancel", Who::Operator),
    ("Resolve", Who::Operator),
    ("Nodes", Who::Operator),
    ("Events", Who::Operator),
    ("Doctor", Who::Operator),
    ("NetworkInspect", Who::Operator),
    ("NetworkCreate", Who::Operator),
    ("NetworkList", Who::Operator),
    ("NetworkRemove", Who::Operator),
    ("ImageAdd", Who::Operator),
    ("ImageAddPlatform", Who::Operator),
    ("ImageList", Who::Operator),
    ("ImageRemove", Who::Operator),
    ("VolumeCreate", Who::Operator),
    ("VolumeList", Who::Operator),
    ("VolumeRemove", Who::Operator),
    ("CreateToken", Who::Operator),
    ("RemoveNode", Who::Operator),
];

/// The API of other nodes.
const PEER: &[(&str, Who)] = &[
    ("Sync", Who::Itself),
    ("Renew", Who::Itself),
    ("Keys", Who::Itself),
    ("Decision", Who::Party),
    ("Check", Who::Member),
    ("CheckNetwork", Who::Member),
    ("Wait", Who::Member),
    ("Attach", Who::Token),
    ("Migrate", Who::Owner),
    ("Prepare", Who::Owner),
    ("CheckMove", Who::Owner),
    ("Place", Who::Owner),
    ("Policy", Who::Owner),
    ("Cordon", Who::Let),
    ("Drain", Who::Let),
    ("Distances", Who::Member),
    ("Cancel", Who::Owner),
    ("Connections", Who::Owner),
    ("Capture", Who::Owner),
];

/// Who may ask another node for a verb; none: nobody.
pub(crate) fn of_peer(verb: &str) -> Option<Who> {
    PEER.iter().find(|(name, _)| *name == verb).map(|(_, who)| *who)
}

/// Who may ask for the verb of a request's path, `/PACKAGE.API/VERB`.
fn of_path(path: &str) -> Option<Who> {
    let mut parts = path.rsplit('/');
    let (verb, api) = (parts.next()?, parts.next()?);
    match api.rsplit('.').next()? {
        "Node" => NODE.iter().find(|(name, _)| *name == verb).map(|(_, who)| *who),
        "Peer" => of_peer(verb),
        _ => None,
    }
}

/// An API of which nothing is served but what has a line here.
#[derive(Debug, Clone)]
pub(crate) struct Listed<S>(pub(crate) S);

/// What is said of a verb that is not on the list, since release 0.2.0.
const UNLISTED: &str = "no node may ask for this verb; install the same godwit on both nodes";

/// Whether a peer answers so because it does not know the verb.
pub(crate) fn is_unknown(answer: &Status) -> bool {
    match answer.code() {
        Code::Unimplemented => true,
        Code::PermissionDenied => answer.message() == UNLISTED,
        _ => false,
    }
}

impl<S: NamedService> NamedService for Listed<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for Listed<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if of_path(request.uri().path()).is_some() {
            return Box::pin(self.0.call(request));
        }
        Box::pin(std::future::ready(Ok(Status::permission_denied(UNLISTED).into_http())))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The verbs of an API, by its definition.
    fn verbs(definition: &str) -> Vec<&str> {
        let lines = definition.lines().filter_map(|line| line.trim().strip_prefix("rpc "));
        lines.map(|line| line.split('(').next().unwrap()).collect()
    }

    fn read(path: &str) -> String {
        std::fs::read_to_string(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path))
            .unwrap()
    }

    #[test]
    fn every_verb_of_both_apis_has_one_line_and_no_line_is_for_another() {
        for (definition, table) in [("node", NODE), ("peer", PEER)] {
            let definition = read(&format!("crates/api/proto/godwit/v1/{definition}.proto"));
            assert_eq!(definition.matches("\nservice ").count(), 1);
            let (mut defined, mut listed) =
                (verbs(&definition), table.iter().map(|(verb, _)| *verb).collect::<Vec<_>>());
            assert!(defined.len() > 5, "{defined:?}");
            defined.sort_unstable();
            listed.sort_unstable();
            assert_eq!(defined, listed);
        }
    }

    #[test]
    fn a_peer_that_does_not_know_a_verb_is_told_from_one_that_denies_it() {
        assert!(is_unknown(&Status::permission_denied(UNLISTED)) && is_unknown(&Status::unimplemented("")));
        assert!(!is_unknown(&Status::permission_denied("its users may not ask")));
    }

    #[test]
    fn the_documentation_has_the_same_table() {
        let page = read("docs/security.md");
        let word = |who: Who| match who {
            Who::Operator => "users of the node, on its socket",
            Who::Itself => "a member, of itself and of what it has",
            Who::Party => "the other end of the migration",
            Who::Owner => "the node that has the service, and those of `--verbs-from`",
            Who::Let => "those of `--verbs-from`",
            Who::Token => "the node whose user has the terminal: it knows its token",
            Who::Member => "any member",
        };
        for (verb, who) in PEER {
            let line = page.lines().find(|line| line.starts_with(&format!("| `{verb}` |")));
            let line = line.unwrap_or_else(|| panic!("{verb} is not in docs/security.md"));
            assert!(line.contains(&format!("| {} |", word(*who))), "{verb}: {line}");
        }
        let listed = page.lines().filter(|line| line.starts_with("| `") && line.matches('|').count() == 4);
        assert_eq!(listed.count(), PEER.len());
        assert!(page.contains(&format!("| all of the users' API | {} |", word(Who::Operator))));
        assert!(NODE.iter().all(|(_, who)| *who == Who::Operator), "one line is for all of them");
    }

    #[test]
    fn a_path_without_a_line_is_for_nobody() {
        assert_eq!(of_path("/godwit.v1.Peer/Migrate"), Some(Who::Owner));
        assert_eq!(of_path("/godwit.v1.Node/Exec"), Some(Who::Operator));
        for path in [
            "",
            "/",
            "/godwit.v1.Peer/Exec",
            "/godwit.v1.Other/Sync",
            "Sync",
            "/godwit.v1.Peer/",
            "/godwit.v1.Peer/sync",
        ] {
            assert_eq!(of_path(path), None, "{path}");
        }
    }

    #[tokio::test]
    async fn what_has_no_line_does_not_reach_its_service() {
        #[derive(Clone)]
        struct All;
        impl Service<Request<Body>> for All {
            type Response = Response<Body>;
            type Error = Infallible;
            type Future = std::future::Ready<Result<Response<Body>, Infallible>>;
            fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
                Poll::Ready(Ok(()))
            }
            fn call(&mut self, _: Request<Body>) -> Self::Future {
                std::future::ready(Ok(Response::new(Body::empty())))
            }
        }
        let answered = async |path: &str| {
            let request = Request::builder().uri(path).body(Body::empty()).unwrap();
            let answer = Listed(All).call(request).await.unwrap();
            answer.headers().get("grpc-status").map(|status| status.to_str().unwrap().to_owned())
        };
        assert_eq!(answered("/godwit.v1.Peer/Sync").await, None);
        assert_eq!(answered("/godwit.v1.Peer/Later").await.as_deref(), Some("7"));
    }
}
