//! Docker's API, over dockerd's socket. Each request has a connection of its own, and a limit of time: an engine that hangs
//! must not keep a service from going on.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, Full, Limited, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http1;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::net::UnixStream;
use tokio::sync::mpsc;

use crate::foreign::SHORT;

/// Longest answer taken, bytes; descriptions have some tens of thousands, and lists may have thousands of entries.
const LIMIT: usize = 32 << 20;

/// The body of a request.
type Sent = UnsyncBoxBody<Bytes, std::convert::Infallible>;

/// Why dockerd has not done what it was asked to do.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    #[error("cannot reach dockerd on {}: {source}; start Docker on this node", socket.display())]
    Unreachable {
        socket: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot ask containerd on {}: {reason}", socket.display())]
    Containerd { socket: PathBuf, reason: String },
    #[error("{message}")]
    Refused { status: u16, message: String },
    #[error("it has not answered for {} s", .0.as_secs())]
    Silent(Duration),
    #[error("the connection to dockerd has failed: {0}")]
    Broken(String),
    #[error("its answer is not understood: {0}")]
    Unclear(#[from] serde_json::Error),
}

impl ApiError {
    /// Whether there is nothing of that name.
    pub(super) fn is_missing(&self) -> bool {
        matches!(self, Self::Refused { status: 404, .. })
    }

    /// Whether it is in use, or about to be as it shall be.
    pub(super) fn is_conflict(&self) -> bool {
        matches!(self, Self::Refused { status: 409, .. })
    }
}

impl From<hyper::Error> for ApiError {
    fn from(error: hyper::Error) -> Self {
        Self::Broken(error.to_string())
    }
}

/// What dockerd says of an error.
#[derive(Deserialize)]
struct Message {
    message: String,
}

/// dockerd.
#[derive(Debug, Clone)]
pub(super) struct Api {
    socket: PathBuf,
}

impl Api {
    pub(super) fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned() }
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Asks for a document.
    pub(super) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ApiError> {
        let answer = self.within(SHORT, self.whole(Method::GET, path, empty())).await?;
        Ok(serde_json::from_slice(&answer)?)
    }

    /// The same; nothing where there is none.
    pub(super) async fn find<T: DeserializeOwned>(&self, path: &str) -> Result<Option<T>, ApiError> {
        match self.get(path).await {
            Err(error) if error.is_missing() => Ok(None),
            found => found.map(Some),
        }
    }

    /// Sends a document; what comes back.
    pub(super) async fn post(
        &self,
        path: &str,
        document: Option<&Value>,
        limit: Duration,
    ) -> Result<Bytes, ApiError> {
        let body = document.map_or_else(empty, |document| Full::from(document.to_string()).boxed_unsync());
        self.within(limit, self.whole(Method::POST, path, body)).await
    }

    /// The same, however long it takes.
    pub(super) async fn post_patiently(&self, path: &str) -> Result<(), ApiError> {
        self.whole(Method::POST, path, empty()).await.map(drop)
    }

    /// Removes something; nothing happens where it is not there.
    pub(super) async fn delete(&self, path: &str, limit: Duration) -> Result<(), ApiError> {
        match self.within(limit, self.whole(Method::DELETE, path, empty())).await {
            Err(error) if error.is_missing() => Ok(()),
            deleted => deleted.map(drop),
        }
    }

    /// Asks for what comes in pieces, the first of them within this time.
    pub(super) async fn stream(&self, path: &str, limit: Duration) -> Result<Pieces, ApiError> {
        let response = self.within(limit, self.request(Method::GET, path, empty())).await?;
        Ok(Pieces(response.into_body()))
    }

    /// Sends what comes in pieces, all within this time; what comes back.
    pub(super) async fn send(
        &self,
        path: &str,
        pieces: mpsc::Receiver<Bytes>,
        limit: Duration,
    ) -> Result<Bytes, ApiError> {
        let pieces = futures::stream::unfold(pieces, |mut pieces| async {
            pieces.recv().await.map(|piece| (piece, pieces))
        });
        let body = StreamBody::new(pieces.map(|piece| Ok(Frame::data(piece))));
        self.within(limit, self.whole(Method::POST, path, body.boxed_unsync())).await
    }

    async fn within<T>(
        &self,
        limit: Duration,
        asking: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        tokio::time::timeout(limit, asking).await.unwrap_or(Err(ApiError::Silent(limit)))
    }

    async fn whole(&self, method: Method, path: &str, body: Sent) -> Result<Bytes, ApiError> {
        read(self.request(method, path, body).await?).await
    }

    async fn request(&self, method: Method, path: &str, body: Sent) -> Result<Response<Incoming>, ApiError> {
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|source| ApiError::Unreachable { socket: self.socket.clone(), source })?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // It ends with the answer, or with who waits for that.
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, "docker")
            .header(CONTENT_TYPE, "application/json")
            .body(body)
            .map_err(|error| ApiError::Broken(error.to_string()))?;
        let response = sender.send_request(request).await?;
        // 304 says that it is so already.
        let status = response.status();
        if status.is_success() || status.as_u16() == 304 {
            return Ok(response);
        }
        let status = status.as_u16();
        let answer = read(response).await?;
        let message = serde_json::from_slice(&answer).map(|Message { message }| message);
        let message = message.unwrap_or_else(|_| String::from_utf8_lossy(&answer).trim().to_owned());
        Err(ApiError::Refused { status, message })
    }
}

async fn read(response: Response<Incoming>) -> Result<Bytes, ApiError> {
    let whole = Limited::new(response.into_body(), LIMIT).collect().await;
    Ok(whole.map_err(|error| ApiError::Broken(error.to_string()))?.to_bytes())
}

fn empty() -> Sent {
    Empty::new().boxed_unsync()
}

/// An answer in pieces.
pub(super) struct Pieces(Incoming);

impl Pieces {
    /// The same, within this time.
    pub(super) async fn next_within(&mut self, limit: Duration) -> Result<Option<Bytes>, ApiError> {
        tokio::time::timeout(limit, self.next()).await.unwrap_or(Err(ApiError::Silent(limit)))
    }

    /// The next one; nothing at the end.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, ApiError> {
        while let Some(frame) = self.0.frame().await {
            if let Ok(piece) = frame?.into_data() {
                return Ok(Some(piece));
            }
        }
        Ok(None)
    }
}

/// A name or a document as a part of a path.
pub(super) fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let encode = |byte: u8| match plain(byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}

/// The path of a request with a filter of this name.
pub(super) fn filtered(path: &str, name: &str, value: &str) -> String {
    format!("{path}filters={}", encoded(&serde_json::json!({ name: [value] }).to_string()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[test]
    fn what_is_asked_for_is_one_part_of_a_path() {
        assert_eq!(encoded("a-b/c?d=%"), "a-b%2Fc%3Fd%3D%25");
        assert_eq!(
            filtered("/x?all=1&", "volume", "v"),
            "/x?all=1&filters=%7B%22volume%22%3A%5B%22v%22%5D%7D"
        );
    }

    #[tokio::test]
    async fn a_daemon_that_hangs_in_the_middle_of_an_answer_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("docker.sock");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let serving = tokio::spawn(async move {
            let (mut asked, _) = listener.accept().await.unwrap();
            asked.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npart").await.unwrap();
            // It stays open.
            asked
        });
        let mut pieces = Api::new(&socket).stream("/images/x/get", Duration::from_secs(60)).await.unwrap();
        assert_eq!(pieces.next_within(Duration::from_secs(60)).await.unwrap().unwrap(), "part");
        let limit = Duration::from_millis(10);
        let hung = pieces.next_within(limit).await.unwrap_err();
        assert!(matches!(hung, ApiError::Silent(silent) if silent == limit), "{hung}");
        drop(serving.await.unwrap());
    }

    #[tokio::test]
    async fn a_daemon_that_is_not_there_is_named() {
        let error = Api::new(Path::new("/nowhere/sock")).get::<Value>("/info").await.unwrap_err();
        assert!(error.to_string().contains("dockerd on /nowhere/sock"), "{error}");
    }
}
