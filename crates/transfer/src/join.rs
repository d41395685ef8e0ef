//! How a new node gets its certificate.
//!
//! ```text
//!   new node                                        a node with the CA
//!      | -- TLS, server's chain ends in the token's CA --> |
//!      | -- JoinRequest {node, secret, request} ---------> |  secret known, fresh, for this name?
//!      | <-- JoinAnswer::Granted {ca, certificate} ------- |  or Refused {reason}
//! ```
//!
//! Each message is a u32 length (big-endian, at most [`MAX_MESSAGE`]) and JSON.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::Path;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::certificate::{Fingerprint, node_of, parse_certificate};
use crate::error::IdentityError;
use crate::identity::Identity;
use crate::listen::{ConnectError, handshake};
use crate::node::NodeName;
use crate::options::ConnectOptions;
use crate::tls::join_client_config;
use crate::token::{JoinToken, Secret};

/// Longest message, in bytes: two PEM texts of the longest kind and their names.
pub const MAX_MESSAGE: usize = 64 * 1024;

/// How long either side waits for the other's message.
pub const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a join failed.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The inviting node was not reached, or is of another cluster.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The cluster did not let the node in.
    #[error("the cluster refused node `{node}`: {reason}")]
    Refused {
        /// The name that was asked for.
        node: NodeName,
        /// The cluster's reason.
        reason: String,
    },
    /// The conversation broke off.
    #[error("the join conversation with {address} broke off")]
    Io {
        /// The other side.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// A message is not of the join protocol.
    #[error("{address} sent a message that is not of the join protocol")]
    Message {
        /// The other side.
        address: String,
    },
    /// TLS could not be set up.
    #[error("TLS could not be set up for the join")]
    Tls(#[from] rustls::Error),
    /// The answer is of another CA than the token, for another name, or of another node than it says.
    #[error("{address} answered with a certificate that the token does not promise")]
    WrongAnswer {
        /// The other side.
        address: String,
    },
    /// The identity could not be made or installed.
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// What a new node asks. Its secret is not shown by `Debug`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JoinRequest {
    /// The name the node wants to have.
    pub node: NodeName,
    /// The token's secret.
    pub secret: SecretField,
    /// The certificate request, PEM.
    pub request_pem: String,
}

/// A [`Secret`] in a message.
#[derive(Clone, Serialize, Deserialize)]
pub struct SecretField([u8; 32]);

impl SecretField {
    /// The secret.
    pub fn secret(&self) -> Secret {
        Secret::from(self.0)
    }
}

impl fmt::Debug for SecretField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretField(..)")
    }
}

/// What the cluster answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JoinAnswer {
    /// The node is one of the cluster's.
    Granted {
        /// The CA's certificate, PEM.
        ca_pem: String,
        /// The node's certificate, PEM.
        certificate_pem: String,
        /// The node that granted it: the first one the new node talks to.
        inviter: NodeName,
        /// `host:port` of the inviter's peer API.
        inviter_address: String,
        /// What all nodes of the cluster do alike, by name.
        #[serde(default)]
        settings: BTreeMap<String, String>,
    },
    /// The node is not let in.
    Refused {
        /// A sentence for the operator.
        reason: String,
    },
}

/// What a node has once it is let in.
#[derive(Debug)]
pub struct Joined {
    /// The installed identity.
    pub identity: Identity,
    /// The node that let it in.
    pub inviter: NodeName,
    /// `host:port` of that node's peer API.
    pub inviter_address: String,
    /// What all nodes of the cluster do alike, by name.
    pub settings: BTreeMap<String, String>,
}

/// Joins the cluster of `token`: makes a key in `dir`, asks for a certificate, installs it.
///
/// If anything fails, nothing but the key is left in `dir`, and the next attempt uses it.
pub async fn join(token: &JoinToken, dir: &Path, options: ConnectOptions) -> Result<Joined, JoinError> {
    let request_pem = Identity::create_request(dir, &token.node)?;
    let address = token.address.as_str();
    let config = join_client_config(token.ca_sha256)?;
    // The server name in the handshake means nothing here; the new node's own will do.
    let mut stream = handshake(config, address, &token.node, "that invites", options).await?;
    let secret = SecretField(*token.secret.expose());
    write_message(&mut stream, address, &JoinRequest { node: token.node.clone(), secret, request_pem })
        .await?;
    match read_message(&mut stream, address).await? {
        JoinAnswer::Refused { reason } => Err(JoinError::Refused { node: token.node.clone(), reason }),
        JoinAnswer::Granted { ca_pem, certificate_pem, inviter, inviter_address, settings } => {
            let wrong = || JoinError::WrongAnswer { address: address.to_owned() };
            let certificate = parse_certificate(certificate_pem.as_bytes(), "the answer")?;
            let named = node_of(&certificate);
            let answering = stream.get_ref().1.peer_certificates().and_then(|chain| node_of(chain.first()?));
            if Fingerprint::of_pem(&ca_pem)? != token.ca_sha256
                || named.as_ref() != Some(&token.node)
                || answering.as_ref() != Some(&inviter)
            {
                return Err(wrong());
            }
            let identity = Identity::install(dir, &ca_pem, &certificate_pem)?;
            Ok(Joined { identity, inviter, inviter_address, settings })
        }
    }
}

/// Reads a new node's request. `from` names it in errors.
pub async fn read_request<S: AsyncRead + Unpin>(
    stream: &mut S,
    from: &str,
) -> Result<JoinRequest, JoinError> {
    read_message(stream, from).await
}

/// Answers a new node's request, and ends the conversation.
pub async fn answer<S: AsyncWrite + Unpin>(
    stream: &mut S,
    to: &str,
    answer: &JoinAnswer,
) -> Result<(), JoinError> {
    write_message(stream, to, answer).await?;
    stream.shutdown().await.map_err(|source| JoinError::Io { address: to.to_owned(), source })
}

async fn write_message<S: AsyncWrite + Unpin>(
    stream: &mut S,
    address: &str,
    message: &impl Serialize,
) -> Result<(), JoinError> {
    let failed = |source| JoinError::Io { address: address.to_owned(), source };
    let json = serde_json::to_vec(message).map_err(|error| failed(error.into()))?;
    let length = match u32::try_from(json.len()) {
        Ok(length) if json.len() <= MAX_MESSAGE => length,
        _ => return Err(failed(io::ErrorKind::FileTooLarge.into())),
    };
    let write = async {
        stream.write_all(&length.to_be_bytes()).await?;
        stream.write_all(&json).await?;
        stream.flush().await
    };
    in_time(write).await.map_err(failed)
}

async fn read_message<S: AsyncRead + Unpin, M: DeserializeOwned>(
    stream: &mut S,
    address: &str,
) -> Result<M, JoinError> {
    let failed = |source| JoinError::Io { address: address.to_owned(), source };
    let foreign = || JoinError::Message { address: address.to_owned() };
    let read = async {
        let length = stream.read_u32().await? as usize;
        if length > MAX_MESSAGE {
            return Ok(None);
        }
        let mut json = vec![0; length];
        stream.read_exact(&mut json).await?;
        Ok(Some(json))
    };
    let json = in_time(read).await.map_err(failed)?.ok_or_else(foreign)?;
    serde_json::from_slice(&json).map_err(|_| foreign())
}

async fn in_time<T>(operation: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    match tokio::time::timeout(MESSAGE_TIMEOUT, operation).await {
        Ok(result) => result,
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}
