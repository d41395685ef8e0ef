//! The program skopeo: what it is asked, and what went wrong in words that say what to do.

use std::{
    ffi::{OsStr, OsString},
    io,
    path::Path,
    process::Stdio,
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::{Child, ChildStderr, Command},
};

use super::{
    Reach,
    manifest::{Manifest, digest_of},
};

/// Largest manifest or configuration that is read, bytes: what registries allow.
const MAX_DOCUMENT: u64 = 4 << 20;
/// As much as is read of what skopeo says, bytes.
const MAX_SAID: u64 = 64 << 10;
/// How long a registry may take to answer a question.
const PATIENCE: Duration = Duration::from_secs(120);
/// How often skopeo tries again where a network failed.
const RETRIES: &str = "3";

/// Why an image was not pulled.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub(crate) enum PullError {
    #[error(
        "godwit pulls images from registries with skopeo, which is not here: install the package skopeo, or give an archive (`godwit run --image FILE`)"
    )]
    NoSkopeo,
    #[error("skopeo cannot be run: {cause}")]
    Skopeo { cause: io::Error },
    #[error("{reference} cannot be pulled: {said}{advice}")]
    Refused { reference: String, said: String, advice: String },
    #[error("what the registry has for {reference} is no manifest: {cause}")]
    Manifest { reference: String, cause: serde_json::Error },
    #[error("what the registry has as the configuration of {reference} is none: {cause}")]
    Configuration { reference: String, cause: serde_json::Error },
    #[error(
        "what the registry has for {reference} has {bytes} bytes or more, too many for a manifest or a configuration"
    )]
    Large { reference: String, bytes: u64 },
    #[error("what the registry gives for {reference} has the digest {found}: it is not what was asked for")]
    Digest { reference: String, found: String },
    #[error(
        "{reference} cannot be pulled: skopeo has heard nothing for {seconds} s, from the registry or from a credential helper"
    )]
    Silent { reference: String, seconds: u64 },
    #[error(
        "{reference} is not pulled: its index has {images} images, and one whose services cross between instruction sets has {most} at most"
    )]
    Images { reference: String, images: usize, most: usize },
    #[error(
        "there is no image {reference} for {wanted}, which this machine is; there are images for {found}"
    )]
    Platform { reference: String, wanted: String, found: String },
}

/// Asks registries.
pub(super) struct Skopeo<'a>(&'a Reach);

impl<'a> Skopeo<'a> {
    pub(super) fn new(flags: &'a Reach) -> Self {
        Self(flags)
    }

    /// What a registry has under a reference, of which the digest may be known.
    pub(super) async fn manifest(
        &self,
        reference: &str,
        digest: Option<&str>,
    ) -> Result<Manifest, PullError> {
        let document = self.ask(reference, &["--raw"]).await?;
        let manifest = Manifest::read(reference, &document)?;
        match digest {
            Some(digest) if digest != manifest.digest => {
                Err(PullError::Digest { reference: reference.to_owned(), found: manifest.digest })
            }
            _ => Ok(manifest),
        }
    }

    /// The configuration of one image, by its reference with a digest, as its registry has it: a copy to a layout need not have
    /// all of it.
    pub(super) async fn configuration(&self, image: &str, digest: &str) -> Result<Vec<u8>, PullError> {
        let document = self.ask(image, &["--raw", "--config"]).await?;
        let found = digest_of(&document);
        if found == digest {
            return Ok(document);
        }
        Err(PullError::Digest { reference: format!("the configuration of {image}"), found })
    }

    async fn ask(&self, reference: &str, what: &[&str]) -> Result<Vec<u8>, PullError> {
        let asked = tokio::time::timeout(PATIENCE, self.inspect(reference, what));
        asked
            .await
            .map_err(|_| PullError::Silent { reference: reference.to_owned(), seconds: PATIENCE.as_secs() })?
    }

    async fn inspect(&self, reference: &str, what: &[&str]) -> Result<Vec<u8>, PullError> {
        let mut command = Command::new("skopeo");
        command.arg("inspect").args(what).args(["--retry-times", RETRIES]);
        command.args(self.reached("")).arg(format!("docker://{reference}")).stdout(Stdio::piped());
        let mut running = Running::start(command, reference)?;
        let answer = running.child.stdout.take();
        let (document, ended) = tokio::join!(read(answer, MAX_DOCUMENT), running.ended());
        ended?;
        let document = document.map_err(|cause| PullError::Skopeo { cause })?;
        if document.len() as u64 >= MAX_DOCUMENT {
            return Err(PullError::Large { reference: reference.to_owned(), bytes: MAX_DOCUMENT });
        }
        Ok(document)
    }

    /// Begins to copy this machine's image to a layout directory, or a whole index with its images: `pinned` is what the
    /// reference stands for.
    pub(super) fn copy(
        &self,
        reference: &str,
        pinned: &str,
        whole: bool,
        directory: &Path,
    ) -> Result<Running, PullError> {
        let mut layout = OsString::from("oci:");
        layout.push(directory);
        let mut command = Command::new("skopeo");
        command.args(["copy", "--quiet", "--retry-times", RETRIES]).args(self.reached("src-"));
        // They were verified, if the machine's policy wants that; a layout has no place for them. Layers stay as they are.
        command.args(["--remove-signatures", "--dest-oci-accept-uncompressed-layers"]);
        if whole {
            // An index that had to be written anew would be another.
            command.args(["--all", "--preserve-digests"]);
        }
        command.arg(format!("docker://{pinned}")).arg(layout).stdout(Stdio::null());
        Running::start(command, reference)
    }

    /// The flags that say how a registry is reached, which have a prefix where there could be two registries.
    fn reached(&self, prefix: &str) -> Vec<OsString> {
        let mut flags = Vec::new();
        let mut flag = |name: &str, value: &OsStr| {
            let mut flag = OsString::from(format!("--{prefix}{name}="));
            flag.push(value);
            flags.push(flag);
        };
        if let Some(file) = &self.0.authfile {
            flag("authfile", file.as_os_str());
        }
        if let Some(directory) = &self.0.cert_dir {
            flag("cert-dir", directory.as_os_str());
        }
        if let Some(verify) = self.0.tls_verify {
            flag("tls-verify", if verify { "true" } else { "false" }.as_ref());
        }
        flags
    }
}

/// A skopeo that works; it ends when this is dropped.
pub(super) struct Running {
    child: Child,
    stderr: Option<ChildStderr>,
    said: Vec<u8>,
    reference: String,
}

impl Running {
    fn start(mut command: Command, reference: &str) -> Result<Self, PullError> {
        // Ctrl-C is for this program, which ends skopeo.
        command.process_group(0).stdin(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().map_err(|cause| match cause.kind() {
            io::ErrorKind::NotFound => PullError::NoSkopeo,
            _ => PullError::Skopeo { cause },
        })?;
        let stderr = child.stderr.take();
        Ok(Self { child, stderr, said: Vec::new(), reference: reference.to_owned() })
    }

    /// Ends it, and returns when it has ended.
    pub(super) async fn kill(&mut self) -> Result<(), PullError> {
        self.child.kill().await.map_err(|cause| PullError::Skopeo { cause })
    }

    /// Returns when it has ended; can be called again when it was dropped before.
    pub(super) async fn ended(&mut self) -> Result<(), PullError> {
        let failed = |cause| PullError::Skopeo { cause };
        if let Some(stderr) = &mut self.stderr {
            let mut piece = [0; 4096];
            loop {
                let read = stderr.read(&mut piece).await.map_err(failed)?;
                if read == 0 {
                    break;
                }
                // What it says last counts.
                self.said.extend_from_slice(&piece[..read]);
                let excess = (self.said.len() as u64).saturating_sub(MAX_SAID);
                self.said.drain(..usize::try_from(excess).unwrap_or(0));
            }
            self.stderr = None;
        }
        if self.child.wait().await.map_err(failed)?.success() {
            return Ok(());
        }
        let said = plain(&message(&String::from_utf8_lossy(&self.said)));
        let advice = advice(&said, &self.reference);
        Err(PullError::Refused { reference: self.reference.clone(), said, advice })
    }
}

async fn read(stream: Option<impl AsyncRead + Unpin>, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(mut stream) = stream {
        (&mut stream).take(most).read_to_end(&mut bytes).await?;
        // Whoever has more to say than fits must not wait for a reader for ever.
        tokio::io::copy(&mut stream, &mut tokio::io::sink()).await?;
    }
    Ok(bytes)
}

/// The message of the last line of skopeo's log: `time="…" level=fatal msg="…"`.
fn message(log: &str) -> String {
    let line =
        log.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("skopeo failed and said nothing");
    let Some((_, quoted)) = line.split_once("msg=") else { return line.trim().to_owned() };
    // Go's quotes are JSON's but for bytes that no message has.
    serde_json::from_str(quoted).unwrap_or_else(|_| quoted.trim_matches('"').to_owned())
}

/// A registry's words without what a terminal would not show as text.
pub(super) fn plain(text: &str) -> String {
    let is_text = |c: char| c == ' ' || !(c.is_control() || c.is_whitespace() || is_direction(c));
    text.chars().map(|c| if is_text(c) { c } else { ' ' }).take(2000).collect()
}

/// Whether it changes the order in which letters are shown.
fn is_direction(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// What to do, for what is known to be usual.
fn advice(said: &str, reference: &str) -> String {
    let registry = reference.split('/').next().unwrap_or_default();
    // Names may hold any of the words.
    let said = said.replace(reference, "");
    // Under sudo the logins of root count.
    let sudo = if std::env::var_os("SUDO_UID").is_some() { "sudo " } else { "" };
    let has = |words: &[&str]| words.iter().any(|word| said.contains(word));
    if has(&["docker-credential-"]) {
        "; the credential helper that your containers-auth.json(5) names does not work here".into()
    } else if has(&["permission denied"]) {
        String::new()
    } else if has(&["gave HTTP response to HTTPS"]) {
        "; give --tls-verify=false if you trust the network to this registry".into()
    } else if has(&["unknown authority"]) {
        format!("; put the registry's CA into /etc/containers/certs.d/{registry}/ca.crt, or give --cert-dir")
    } else if has(&["unauthorized", "authentication required", "denied", "invalid username/password"]) {
        format!("; there is no such image, or you have to log in: `{sudo}skopeo login {registry}`")
    } else if has(&["manifest unknown", "name unknown", "not found"]) {
        "; the registry has no image of this name, or not this tag".into()
    } else if has(&[
        "no such host",
        "connection refused",
        "timeout",
        "no route to host",
        "deadline exceeded",
        "unreachable",
    ]) {
        format!("; {registry} cannot be reached from this machine: see its name, and this machine's network")
    } else {
        String::new()
    }
}

#[cfg(test)]
mod tests {
    use super::{advice, message, plain};

    #[test]
    fn what_skopeo_says_last_is_told_with_what_to_do() {
        let log = "time=\"2026-11-26T14:43:02Z\" level=warning msg=\"Failed, retrying\"\n\
            time=\"2026-11-26T14:43:02Z\" level=fatal msg=\"Error parsing image name \\\"docker://h:5/x\\\": http: server gave HTTP response to HTTPS client\"\n";
        let said = message(log);
        assert_eq!(
            said,
            "Error parsing image name \"docker://h:5/x\": http: server gave HTTP response to HTTPS client"
        );
        assert!(advice(&said, "h:5/x").contains("--tls-verify=false"));
        assert!(
            advice("x509: certificate signed by unknown authority", "h:5/x").contains("certs.d/h:5/ca.crt")
        );
        assert!(advice("requested access to the resource is denied", "h:5/x").contains("skopeo login h:5"));
        assert!(
            advice("dial tcp 1.2.3.4:5: connect: connection refused", "h:5/x").contains("cannot be reached")
        );
        assert!(advice("manifest unknown: manifest unknown", "h:5/x").contains("not this tag"));
        let helper = "exec: \"docker-credential-desktop\": executable file not found in $PATH";
        assert!(advice(helper, "h:5/x").contains("credential helper"));
        for other in ["open /root/auth.json: permission denied", "reading manifest of h:5/denied: EOF"] {
            assert_eq!(advice(other, "h:5/denied"), "", "{other}");
        }
        assert_eq!(plain("a\u{1b}[2Jb\nc\u{202e}d"), "a [2Jb c d");
        assert_eq!(message("panic\n\n"), "panic");
        assert_eq!(message(""), "skopeo failed and said nothing");
    }
}
