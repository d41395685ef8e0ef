//! The control socket of ovs-vswitchd, by which `ovs-appctl` asks it things: JSON-RPC over a unix socket
//! whose name has its process number (ovs-appctl(8)).

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// Where the daemons of Debian's and Ubuntu's packages have their sockets.
const DEFAULT_RUN: &str = "/var/run/openvswitch";
/// How long an answer may take. It takes a fraction of a millisecond.
const LIMIT: Duration = Duration::from_secs(10);
/// The largest answer that is taken. Those to what is asked here have some bytes.
const LARGEST_ANSWER: usize = 1 << 16;

/// Has the datapath forget all flows that it was given, which it asks for again with the next frame.
pub(super) const PURGE: &str = "revalidator/purge";
/// Is answered when the datapath's flows have been looked through once: by what began before, if that is under way.
pub(super) const LOOKED_THROUGH: &str = "revalidator/wait";
/// Asks which Open vSwitch it is: whether it is there.
pub(super) const VERSION: &str = "version";

/// Where Open vSwitch's daemons have their sockets.
pub(super) fn directory(run: Option<&Path>) -> PathBuf {
    let from_environment = || std::env::var_os("OVS_RUNDIR").map(PathBuf::from);
    run.map(Path::to_owned).or_else(from_environment).unwrap_or_else(|| DEFAULT_RUN.into())
}

/// A connection to ovs-vswitchd, which is made when it is needed and kept.
#[derive(Debug)]
pub(super) struct Control {
    run: PathBuf,
    stream: Option<UnixStream>,
}

impl Control {
    pub(super) fn new(run: PathBuf) -> Self {
        Self { run, stream: None }
    }

    /// One request without parameters.
    ///
    /// # Errors
    /// When it is not there, does not answer in time, or refuses.
    pub(super) async fn ask(&mut self, method: &str) -> io::Result<()> {
        let kept = self.stream.take();
        let asked = tokio::time::timeout(LIMIT, async {
            if let Some(mut stream) = kept
                && request(&mut stream, method).await.is_ok()
            {
                return Ok(stream);
            }
            // Another ovs-vswitchd may be there by now.
            let mut stream = self.connect().await?;
            request(&mut stream, method).await.map(|()| stream)
        });
        self.stream = Some(asked.await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??);
        Ok(())
    }

    /// One request without parameters that is under way while `meanwhile` happens.
    ///
    /// # Errors
    /// As for [`Control::ask`]; `meanwhile` may have happened then.
    pub(super) async fn ask_during<T>(
        &mut self,
        method: &str,
        meanwhile: impl Future<Output = T>,
    ) -> io::Result<T> {
        let kept = self.stream.take();
        let asked = tokio::time::timeout(LIMIT, async {
            let mut stream = match kept {
                Some(stream) => stream,
                None => self.connect().await?,
            };
            send(&mut stream, method).await?;
            let done = meanwhile.await;
            answered(&mut stream).await.map(|()| (stream, done))
        });
        let (stream, done) = asked.await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        self.stream = Some(stream);
        Ok(done)
    }

    async fn connect(&self) -> io::Result<UnixStream> {
        let file = self.run.join("ovs-vswitchd.pid");
        let named = |path: PathBuf| {
            move |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
        };
        let pid = tokio::fs::read_to_string(&file).await.map_err(named(file))?;
        let socket = self.run.join(format!("ovs-vswitchd.{}.ctl", pid.trim()));
        UnixStream::connect(&socket).await.map_err(named(socket))
    }
}

async fn request(stream: &mut UnixStream, method: &str) -> io::Result<()> {
    send(stream, method).await?;
    answered(stream).await
}

async fn send(stream: &mut UnixStream, method: &str) -> io::Result<()> {
    let request = json!({"id": 0, "method": method, "params": []});
    stream.write_all(request.to_string().as_bytes()).await
}

async fn answered(stream: &mut UnixStream) -> io::Result<()> {
    let mut answer = Vec::new();
    // It ends with the object, not with the connection.
    while stream.read_buf(&mut answer).await? > 0 {
        if let Ok(answer) = serde_json::from_slice::<Value>(&answer) {
            let error = &answer["error"];
            return if error.is_null() {
                Ok(())
            } else {
                Err(io::Error::other(format!("it refused: {error}")))
            };
        }
        if answer.len() > LARGEST_ANSWER {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}
