//! The node's own name servers. They are asked for what is no name of a service, with the asker's own words.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use crate::{PORT, Transport};

/// As many as resolv.conf(5) allows.
const MOST_SERVERS: usize = 3;
/// How long each may take: all together less than a client waits (5 s).
const PATIENCE: Duration = Duration::from_millis(1500);
/// DNS messages have no more.
const LARGEST: usize = 65_535;
/// Codes of an answer after which another server is asked: it failed, does not know how, or does not want to.
const ASK_ANOTHER: [u8; 3] = [2, 4, 5];

/// The name servers that a file names, as resolv.conf(5) says.
#[derive(Debug, Clone)]
pub struct Upstream {
    file: PathBuf,
}

/// What they say.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// This.
    Reply(Vec<u8>),
    /// Nothing that helps.
    Nothing,
    /// The node has none.
    NoServers,
}

impl Upstream {
    /// Those of a file, which is read at each question: it changes when the machine gets another network.
    #[must_use]
    pub fn new(file: PathBuf) -> Self {
        Self { file }
    }

    /// None where the node has no name servers; an error where it has, and they are not known.
    fn servers(&self) -> io::Result<Option<Vec<SocketAddr>>> {
        let text = match std::fs::read_to_string(&self.file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        let found = servers(&text);
        match (found.is_empty(), text.lines().any(is_server)) {
            (true, false) => Ok(None),
            (true, true) => Err(io::Error::other("its name servers are not understood")),
            (false, _) => Ok(Some(found)),
        }
    }

    /// Asks one after the other.
    pub(crate) async fn ask(&self, question: &[u8], transport: Transport) -> Said {
        let servers = match self.servers() {
            Ok(Some(servers)) => servers,
            Ok(None) => return Said::NoServers,
            Err(error) => {
                tracing::debug!(file = %self.file.display(), %error, "the node's name servers are not known");
                return Said::Nothing;
            }
        };
        let mut last = Said::Nothing;
        for server in servers {
            let asked = async {
                match transport {
                    Transport::Udp => ask_udp(server, question).await,
                    Transport::Tcp => ask_tcp(server, question).await,
                }
            };
            match timeout(PATIENCE, asked).await {
                Ok(Ok(reply)) => {
                    let code = reply.get(3).map_or(0, |flags| flags & 0x0f);
                    last = Said::Reply(reply);
                    if !ASK_ANOTHER.contains(&code) {
                        break;
                    }
                }
                Ok(Err(error)) => {
                    tracing::debug!(%server, %error, "a name server of the node cannot be asked")
                }
                Err(_) => tracing::debug!(%server, "a name server of the node does not answer"),
            }
        }
        last
    }
}

fn is_server(line: &str) -> bool {
    line.split_whitespace().next() == Some("nameserver")
}

fn servers(text: &str) -> Vec<SocketAddr> {
    let lines = text.lines().filter(|line| is_server(line));
    let named = lines.filter_map(|line| line.split_whitespace().nth(1)?.parse::<IpAddr>().ok());
    named.take(MOST_SERVERS).map(|address| SocketAddr::new(address, PORT)).collect()
}

/// Whether it is the reply to this question.
fn replies(reply: &[u8], question: &[u8]) -> bool {
    reply.len() >= 12
        && reply.get(..2) == question.get(..2)
        && reply.get(2).is_some_and(|flags| flags & 0x80 != 0)
}

async fn ask_udp(server: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let any: SocketAddr = match server {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    // A port of its own for each question: nobody else can guess where the reply is awaited.
    let socket = UdpSocket::bind(any).await?;
    socket.connect(server).await?;
    socket.send(question).await?;
    let mut buffer = vec![0; LARGEST];
    loop {
        let length = socket.recv(&mut buffer).await?;
        if let Some(reply) = buffer.get(..length).filter(|reply| replies(reply, question)) {
            return Ok(reply.to_vec());
        }
    }
}

async fn ask_tcp(server: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(server).await?;
    write_message(&mut stream, question).await?;
    let reply = read_message(&mut stream).await?;
    if replies(&reply, question) { Ok(reply) } else { Err(io::ErrorKind::InvalidData.into()) }
}

/// A message on a connection begins with its length (RFC 1035, section 4.2.2).
pub(crate) async fn read_message(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    let mut message = vec![0; length.into()];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

pub(crate) async fn write_message(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(|_| io::ErrorKind::InvalidData)?;
    let whole = [&length.to_be_bytes(), message].concat();
    stream.write_all(&whole).await
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_are_those_of_the_file_in_its_order() {
        let text = "# nameserver 192.0.2.9\nsearch lan\nnameserver 127.0.0.53\nnameserver\t2001:db8::1 # x\nnameserver fe80::1%eth0\nnameserver x\nnameserver 192.0.2.1\nnameserver 192.0.2.2\n";
        let found: Vec<_> = servers(text).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["127.0.0.53:53", "[2001:db8::1]:53", "192.0.2.1:53"]);
        assert_eq!(Upstream::new("/does/not/exist".into()).servers().unwrap(), None);
        assert!(Upstream::new("/".into()).servers().is_err(), "it cannot be read");
    }

    #[test]
    fn only_the_reply_to_a_question_is_one() {
        let question = [0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        let mut reply = question;
        assert!(!replies(&reply, &question), "an echo");
        reply[2] |= 0x80;
        assert!(replies(&reply, &question));
        assert!(!replies(&reply[..11], &question));
        reply[1] = 8;
        assert!(!replies(&reply, &question), "of another question");
    }
}
