//! The rule of *Container Migration for Mobile Services*, to compare with: once the client's latency passes a threshold,
//! the service moves to the node that is nearest then.
//!
//! Steps 1 to 3 of the thesis (its section on the decision), each second. There is no hysteresis, no debt and no budget.

use std::{
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use godwit_api::v1::migration_event;
use godwit_cli::{
    client::Connection,
    migration::{self, How, Mode},
    output,
};
use godwit_lab::{Lab, config::CLIENT, workload::RedisLoad};

use super::{THRESHOLD, road::NODES};
use crate::trial::blocking;

/// How often the client's latency is looked at.
const EACH: Duration = Duration::from_secs(1);
/// A node is measured so often; the least counts.
const TRIES: usize = 3;
/// A node that takes longer than this is not near.
const PATIENCE: Duration = Duration::from_secs(1);

/// What decides for one service.
pub(super) struct Threshold {
    pub(super) lab: Lab,
    /// The longest round trip with which the client is content.
    pub(super) latency: Duration,
}

impl Threshold {
    /// Watches and moves until a moment.
    pub(super) async fn run(
        self,
        load: Arc<RedisLoad>,
        connection: Connection,
        until: Instant,
    ) -> anyhow::Result<()> {
        let lab = self.lab.clone();
        let listener = lab.inside(CLIENT, || TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
        let listener = Arc::new(listener.context("the client's host has no port to measure with")?);
        listener.set_nonblocking(true).context("what a port accepts cannot be waited for")?;
        let mut here = NODES[0];
        let mut tick = tokio::time::interval(EACH);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // The first look has nothing to look at.
        tick.tick().await;
        loop {
            tick.tick().await;
            if Instant::now() >= until {
                return Ok(());
            }
            let (there, load) = (Arc::clone(&listener), Arc::clone(&load));
            let (lab, latency) = (self.lab.clone(), self.latency);
            let measured = blocking(move || {
                if Duration::from_micros(load.lap()?.median_us) <= latency {
                    return Ok(None);
                }
                round_trips(&lab, &there).map(Some)
            });
            let Some(to) = measured.await?.and_then(|all| nearest(&all)).filter(|to| *to != here) else {
                continue;
            };
            match self.moved(&connection, to).await {
                Ok(()) => here = to,
                // The rule has no memory: if the latency is still too long, it moves again.
                Err(why) => output::note(&format!("{THRESHOLD} does not move to {to}: {why}")),
            }
        }
    }

    /// Moves the service; else why not.
    async fn moved(&self, connection: &Connection, to: &str) -> Result<(), String> {
        let request = How::default().request(Mode::default(), THRESHOLD, to);
        let mut events = migration::start(connection.clone(), request);
        while let Some(event) = events.recv().await {
            match event {
                Ok(migration_event::Kind::Report(report)) => {
                    return migration::failure(&report).map_or(Ok(()), Err);
                }
                Ok(_) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Err("godwitd ended the migration without a report".to_owned())
    }
}

/// How long each node takes to reach the client's host and hear of it: a connection and its confirmation. A node that does
/// not reach it has no time.
fn round_trips(lab: &Lab, listener: &TcpListener) -> anyhow::Result<Vec<(&'static str, Option<Duration>)>> {
    let address = SocketAddrV4::new(lab.address(CLIENT)?, listener.local_addr()?.port());
    let all = thread::scope(|scope| {
        let each = NODES.map(|node| scope.spawn(move || round_trip(lab, node, address)));
        NODES.into_iter().zip(each).map(|(node, thread)| Some((node, thread.join().ok()?.ok()?))).collect()
    });
    // Connections that nobody takes would fill the queue.
    while listener.accept().is_ok() {}
    let all: Option<Vec<_>> = all;
    all.context("the round trips of the nodes to the client could not be measured")
}

fn round_trip(lab: &Lab, node: &str, address: SocketAddrV4) -> anyhow::Result<Option<Duration>> {
    let measure = || {
        let begun = Instant::now();
        let connected = TcpStream::connect_timeout(&SocketAddr::V4(address), PATIENCE);
        connected.is_ok().then(|| begun.elapsed())
    };
    Ok(lab.inside(node, || (0..TRIES).filter_map(|_| measure()).min())?)
}

/// The node with the shortest round trip; of those that are alike the first.
fn nearest(all: &[(&'static str, Option<Duration>)]) -> Option<&'static str> {
    let known = all.iter().filter_map(|(node, time)| Some((*time.as_ref()?, *node)));
    known.min_by_key(|(time, _)| *time).map(|(_, node)| node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_with_the_shortest_round_trip_is_the_nearest() {
        let ms = |ms| Some(Duration::from_millis(ms));
        assert_eq!(nearest(&[("a", ms(9)), ("b", ms(4)), ("c", None)]), Some("b"));
        assert_eq!(nearest(&[("a", ms(4)), ("b", ms(4)), ("c", ms(8))]), Some("a"));
        assert_eq!(nearest(&[("a", None), ("b", None), ("c", None)]), None);
    }
}
