//! How far a host is from this node: the round trip of ICMP echoes (RFC 792, RFC 4443).

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use surge_ping::{Client, Config, ICMP, IcmpPacket, PingIdentifier, PingSequence, SurgeError};
use tokio::time::MissedTickBehavior;

use crate::NetworkError;

/// Echoes, of which the shortest counts: what is in the way only makes one longer.
const ECHOES: u16 = 3;

/// The time between two of them.
const APART: Duration = Duration::from_millis(100);

/// How long an echo is waited for. A client farther away than this is near no node.
const PATIENCE: Duration = Duration::from_secs(1);

/// Bytes of an echo beside its headers, as ping(8) sends them.
const PAYLOAD: [u8; 56] = [0; 56];

/// The round trip to a host; none where it does not answer.
///
/// # Errors
/// This node cannot ask.
pub async fn round_trip(host: IpAddr) -> Result<Option<Duration>, NetworkError> {
    let host = host.to_canonical();
    let failed = |error| NetworkError::system(format!("send an ICMP echo to {host}"))(error);
    let config = match host {
        IpAddr::V4(_) => Config::default(),
        IpAddr::V6(_) => Config::builder().kind(ICMP::V6).build(),
    };
    let client = Client::new(&config).map_err(failed)?;
    // Who does not see the echo cannot answer it.
    let [_, _, .., high, low] = RandomState::new().hash_one(host).to_be_bytes();
    let mut pinger = client.pinger(host, PingIdentifier(u16::from_be_bytes([high, low]))).await;
    pinger.timeout(PATIENCE);
    let mut apart = tokio::time::interval(APART);
    apart.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut least = None::<Duration>;
    for sequence in 0..ECHOES {
        apart.tick().await;
        match pinger.ping(PingSequence(sequence), &PAYLOAD).await {
            Ok((packet, took)) if is_answer(&packet) => {
                least = Some(least.map_or(took, |least| least.min(took)));
            }
            // A router on the way says that it does not come through.
            Ok(_) => {}
            // One echo may be lost. Who does not answer two answers none, and others wait for their turn.
            Err(SurgeError::Timeout { .. }) if least.is_none() && sequence > 0 => return Ok(None),
            Err(SurgeError::Timeout { .. }) => {}
            // No way there is no answer, too.
            Err(SurgeError::IOError(error)) if is_unreachable(&error) => return Ok(None),
            Err(SurgeError::IOError(error)) => return Err(failed(error)),
            Err(error) => return Err(failed(io::Error::other(error))),
        }
    }
    Ok(least)
}

fn is_unreachable(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable)
}

/// Whether it is the host's answer: a raw socket gets what routers say of an echo, too.
fn is_answer(packet: &IcmpPacket) -> bool {
    match packet {
        IcmpPacket::V4(packet) => packet.get_icmp_type().0 == 0,
        IcmpPacket::V6(packet) => packet.get_icmpv6_type().0 == 129,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_host_that_answers_is_as_far_as_its_answer_takes() {
        for host in ["127.0.0.1", "::ffff:127.0.0.1"] {
            let near = round_trip(host.parse().unwrap()).await.unwrap();
            assert!(near.is_some_and(|near| near < PATIENCE), "{host}: {near:?}");
        }
    }
}
