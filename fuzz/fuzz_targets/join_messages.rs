//! What two nodes say when one joins: the request with its certificate request, which the CA
//! parses, and the answer's certificate.
#![no_main]

use std::sync::OnceLock;

use arbitrary::Arbitrary;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use godwit_fuzz::block_on;
use godwit_transfer::join::{JoinAnswer, JoinError, MAX_MESSAGE, read_request};
use godwit_transfer::{ClusterAuthority, Fingerprint, Identity, NodeName};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
enum Input<'a> {
    Stream(&'a [u8]),
    Json(&'a [u8]),
    Answer(&'a [u8]),
    /// Bytes of a true certificate request that are replaced, and its length.
    Request(Vec<(u16, u8)>, Option<u16>),
    Pem(&'a str),
    Certificate(&'a [u8]),
}

/// A CA, and a true request's DER.
fn authority() -> &'static (ClusterAuthority, Vec<u8>, NodeName) {
    static AUTHORITY: OnceLock<(ClusterAuthority, Vec<u8>, NodeName)> = OnceLock::new();
    AUTHORITY.get_or_init(|| {
        let directory = tempfile::tempdir().expect("a directory");
        let node = NodeName::new("node").expect("a name");
        let authority = ClusterAuthority::create(directory.path(), "fuzz").expect("a CA");
        let other = tempfile::tempdir().expect("a directory");
        let pem = Identity::create_request(other.path(), &node).expect("a request");
        let text: String = pem.lines().filter(|line| !line.starts_with('-')).collect();
        (authority, STANDARD.decode(text).expect("base64"), node)
    })
}

fn pem(kind: &str, der: &[u8]) -> String {
    format!("-----BEGIN {kind}-----\n{}\n-----END {kind}-----\n", STANDARD.encode(der))
}

fuzz_target!(|input: Input<'_>| {
    let (authority, request, node) = authority();
    match input {
        Input::Stream(bytes) => {
            let _ = block_on(read_request(&mut &bytes[..], "fuzz"));
        }
        Input::Json(json) => {
            let length = u32::try_from(json.len()).expect("a short input");
            let bytes = [&length.to_be_bytes(), json].concat();
            match block_on(read_request(&mut &bytes[..], "fuzz")) {
                Ok(request) => {
                    let _ = authority.issue(&request.node, &request.request_pem);
                }
                Err(error) => assert!(matches!(error, JoinError::Message { .. }), "{error:?}"),
            }
            assert!(json.len() <= MAX_MESSAGE);
        }
        Input::Answer(json) => {
            if let Ok(answer) = serde_json::from_slice::<JoinAnswer>(json) {
                let text = serde_json::to_vec(&answer).expect("JSON");
                assert_eq!(serde_json::from_slice::<JoinAnswer>(&text).expect("its own JSON"), answer);
            }
        }
        Input::Request(edits, length) => {
            let mut der = request.clone();
            for (at, byte) in edits {
                let at = usize::from(at) % der.len();
                der[at] = byte;
            }
            der.truncate(length.map_or(der.len(), usize::from));
            let granted = authority.issue(node, &pem("CERTIFICATE REQUEST", &der));
            assert!(der != *request || granted.is_ok(), "a true request was refused");
        }
        Input::Pem(text) => {
            let _ = authority.issue(node, text);
            let _ = Fingerprint::of_pem(text);
        }
        Input::Certificate(der) => {
            let text = pem("CERTIFICATE", der);
            let _ = Fingerprint::of_pem(&text);
            let _ = godwit_transfer::certificate::node_of(&der.into());
        }
    }
});
