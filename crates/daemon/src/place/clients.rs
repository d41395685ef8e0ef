//! The clients of a service: who has connections to it, and how far they are from where it is and from other nodes, by what
//! the connections show and by ICMP echoes from all nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use godwit_api::v1 as api;
use godwit_network::Protocol;
use godwit_network::connections::{self, Connections};
use godwit_policy::latency::{Estimate, Evidence, Part, Reading, estimate, here};
use godwit_policy::loss::{Clients, Target, weight};
use godwit_policy::quantity::{Moment, Weight};
use godwit_policy::samples::Samples;
use tokio::sync::Semaphore;
use tonic::Status;

use crate::node::Node;
use crate::status::internal;
use crate::trust::is_host;

/// Looks at the connections, of which the median counts, and the time between two of them.
const LOOKS: u32 = 5;
const APART: Duration = Duration::from_millis(200);

/// Most clients that are heeded: those with the most connections.
pub(super) const MOST: usize = 64;

/// Echoes at the same time.
const AT_ONCE: usize = 16;

/// How long echoes are waited for, and how long another node may take to tell of them.
const LISTENING: Duration = Duration::from_secs(15);
const PATIENCE: Duration = Duration::from_secs(20);

/// The deviation of an echo that was sent three times, as a part of it.
const ECHO_DEVIATION: u32 = 10;

/// A client that has sent something lately.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    pub(crate) address: IpAddr,
    /// Its latency by its connections; none where they show none.
    pub(crate) here: Option<Reading>,
}

/// How far clients are from a node, by ICMP echoes. Who is not there does not answer.
pub(crate) type Echoes = BTreeMap<IpAddr, Duration>;

/// The clients of a service, as looks at its connections show them.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    seen: BTreeMap<IpAddr, (Samples, usize)>,
    /// When the service came; none where its connections are as old as they look.
    came: Option<Moment>,
}

impl Watched {
    /// Those of a service that may have come just now: its connections show the move for a while.
    pub(crate) fn of_newcomer(now: Moment) -> Self {
        Self { seen: BTreeMap::new(), came: Some(now) }
    }

    /// Looks at the connections to the ports on which the service listens, in a network namespace.
    pub(crate) async fn look(&mut self, netns: &Path, now: impl Fn() -> Moment) -> Result<(), Status> {
        let active = active(&connections::inside(netns).await.map_err(internal)?);
        // Who has gone meanwhile is no client any more.
        self.seen.retain(|address, _| active.contains_key(address));
        for (address, round_trips) in active {
            let fresh = || (self.came.map_or_else(Samples::default, Samples::after_move), 0);
            let (samples, count) = self.seen.entry(address).or_insert_with(fresh);
            *count = round_trips.len();
            samples.add(now(), round_trips);
        }
        Ok(())
    }

    /// Those with the most connections.
    pub(crate) fn clients(&self, now: Moment) -> Vec<Client> {
        let mut all: Vec<_> = self.seen.iter().collect();
        all.sort_by_key(|(_, (_, count))| std::cmp::Reverse(*count));
        all.truncate(MOST);
        let client = |(address, (samples, _)): (&IpAddr, &(Samples, usize))| Client {
            address: *address,
            here: samples.reading(now),
        };
        all.into_iter().map(client).collect()
    }
}

/// Who has connections to the ports on which the service listens, in a network namespace.
pub(super) async fn find(netns: &Path) -> Result<Vec<Client>, Status> {
    let mut watched = Watched::default();
    let mut looks = tokio::time::interval(APART);
    let begun = tokio::time::Instant::now();
    let now = || Moment(begun.elapsed());
    for _ in 0..LOOKS {
        looks.tick().await;
        watched.look(netns, now).await?;
    }
    Ok(watched.clients(now()))
}

/// The round trips of the connections of each client that has sent something lately. A connection that the service has begun
/// is not a client's.
fn active(found: &Connections) -> BTreeMap<IpAddr, Vec<Duration>> {
    let tcp = || found.list.iter().filter(|connection| connection.protocol == Protocol::Tcp);
    let listening: BTreeSet<u16> = tcp()
        .filter(|connection| connection.state == "listen")
        .map(|connection| connection.local.port())
        .collect();
    let mut clients = BTreeMap::<IpAddr, Vec<Duration>>::new();
    for connection in tcp().filter(|connection| connection.state == "established") {
        let (Some(details), client) = (connection.tcp, connection.remote.ip().to_canonical()) else {
            continue;
        };
        let sent = Duration::from_millis(details.last_received_ms.into());
        let one = Weight::clamped(1.0);
        if listening.contains(&connection.local.port())
            && is_near(client)
            && details.received > 0
            && weight(Some(sent), one) == one
        {
            clients.entry(client).or_default().push(Duration::from_micros(details.rtt_us.into()));
        }
    }
    clients
}

/// Whether it is an address to which echoes are sent: one of a host, and not of whoever happens to be on this link.
fn is_near(address: IpAddr) -> bool {
    let is_of_link = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    is_host(address) && !is_of_link
}

/// As the policy counts them: each is one.
pub(super) fn counted(clients: &[Client], target: Target) -> Vec<Clients> {
    let one = |client: &Client| Clients {
        count: 1,
        weight: Weight::clamped(1.0),
        target,
        here: client.here.and_then(here),
    };
    clients.iter().map(one).collect()
}

/// The latency of each client with the service at another node, by the echoes from here and from there, and by what is
/// between the nodes.
pub(super) fn there(
    clients: &[Client],
    (from_here, from_there, age): (&Echoes, &Echoes, Duration),
    between: Option<Duration>,
) -> Vec<Option<Estimate>> {
    let echo = |all: &Echoes, client: &Client| {
        all.get(&client.address).map(|found| Reading { age, ..reading(*found) })
    };
    let one = |client: &Client| {
        let probe =
            echo(from_here, client).zip(echo(from_there, client)).map(|(here, there)| Part { here, there });
        let evidence =
            Evidence { here: client.here, probe, between: between.map(reading), ..Evidence::default() };
        estimate(&evidence)
    };
    clients.iter().map(one).collect()
}

fn reading(latency: Duration) -> Reading {
    Reading { latency, deviation: latency / ECHO_DEVIATION, age: Duration::ZERO }
}

/// How far these hosts are from this node; none where one does not answer in time, or cannot be asked.
pub(super) async fn distances(hosts: &[IpAddr]) -> Vec<Option<Duration>> {
    // Whoever asks: this node sends no more of them at once.
    static TURNS: Semaphore = Semaphore::const_new(AT_ONCE);
    let deadline = tokio::time::Instant::now() + LISTENING;
    let ask = |host: IpAddr| async move {
        let _turn = TURNS.acquire().await.ok()?;
        godwit_network::round_trip(host).await.unwrap_or_else(|error| {
            tracing::debug!(%host, error = godwit_migration::error_chain(&error), "a host cannot be asked");
            None
        })
    };
    // Those that answer count, however many are silent.
    let one = |host: IpAddr| async move { tokio::time::timeout_at(deadline, ask(host)).await.ok().flatten() };
    futures::future::join_all(hosts.iter().copied().map(one)).await
}

/// The same, asked by another node.
pub(crate) async fn of_this_node(
    from: &str,
    request: api::DistancesRequest,
) -> Result<api::DistancesResponse, Status> {
    let hosts = asked(&request)?;
    tracing::debug!(from, hosts = hosts.len(), "echoes are sent for another node");
    let found = distances(&hosts).await;
    let told = |found: Option<Duration>| {
        found.map_or(0, |found| u64::try_from(found.as_micros()).unwrap_or(u64::MAX).max(1))
    };
    Ok(api::DistancesResponse { round_trip_us: found.into_iter().map(told).collect() })
}

/// The hosts that another node asks about.
fn asked(request: &api::DistancesRequest) -> Result<Vec<IpAddr>, Status> {
    if request.hosts.len() > MOST {
        return Err(Status::invalid_argument(format!("more than {MOST} hosts are asked about at once")));
    }
    let host = |text: &String| text.parse().ok().filter(|host: &IpAddr| is_near(*host));
    let hosts: Option<Vec<IpAddr>> = request.hosts.iter().map(host).collect();
    let hosts =
        hosts.ok_or_else(|| Status::invalid_argument("a host is not an address that one can have"))?;
    if hosts.iter().collect::<BTreeSet<_>>().len() < hosts.len() {
        return Err(Status::invalid_argument("a host is asked about twice"));
    }
    Ok(hosts)
}

/// How far these hosts are from another node. A node that does not say leaves that unknown.
pub(super) async fn distances_from(node: &Node, (of, address): (&str, &str), hosts: &[IpAddr]) -> Echoes {
    let mut peer = node.peers.get_patient(of, address);
    let request = api::DistancesRequest { hosts: hosts.iter().map(IpAddr::to_string).collect() };
    match tokio::time::timeout(PATIENCE, peer.distances(request)).await {
        Ok(Ok(answer)) => {
            let found = answer.into_inner().round_trip_us;
            let answered = hosts.iter().copied().zip(found).filter(|(_, found)| *found > 0);
            answered.map(|(host, found)| (host, Duration::from_micros(found))).collect()
        }
        Ok(Err(status)) => {
            tracing::info!(node = of, why = status.message(), "a node does not say how far clients are");
            Echoes::new()
        }
        Err(_) => {
            tracing::info!(node = of, "a node does not say in time how far clients are");
            Echoes::new()
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use godwit_network::connections::{Connection, TcpDetails};
    use godwit_policy::latency::Origin;

    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn connection(
        local: &str,
        remote: &str,
        state: &'static str,
        (rtt_ms, silent_ms): (u32, u32),
    ) -> Connection {
        Connection {
            protocol: Protocol::Tcp,
            state,
            local: local.parse().unwrap(),
            remote: remote.parse().unwrap(),
            receive_queue: 0,
            send_queue: 0,
            timer: "",
            timer_ms: 0,
            retransmits: 0,
            tcp: Some(TcpDetails {
                rtt_us: rtt_ms * 1000,
                rtt_var_us: 0,
                rto_us: 200_000,
                total_retransmits: 0,
                unacked: 0,
                congestion_window: 10,
                last_received_ms: silent_ms,
                received: u64::from(rtt_ms),
            }),
        }
    }

    #[test]
    fn a_client_is_who_has_connected_and_sent_something_lately() {
        let list = vec![
            connection("10.88.0.5:80", "0.0.0.0:0", "listen", (0, 0)),
            connection("10.88.0.5:80", "192.0.2.1:4000", "established", (30, 100)),
            connection("[::ffff:10.88.0.5]:80", "[::ffff:192.0.2.1]:4001", "established", (25, 100)),
            // Silent, begun by the service, its own, and over.
            connection("10.88.0.5:80", "192.0.2.2:4000", "established", (30, 60_000)),
            connection("10.88.0.5:5000", "192.0.2.3:5432", "established", (30, 100)),
            connection("127.0.0.1:80", "127.0.0.1:4000", "established", (1, 100)),
            connection("10.88.0.5:80", "192.0.2.4:4000", "time-wait", (30, 100)),
            // It has sent nothing yet.
            connection("10.88.0.5:80", "192.0.2.5:4000", "established", (0, 100)),
        ];
        let found = active(&Connections { list, ..Connections::default() });
        let one: IpAddr = "192.0.2.1".parse().unwrap();
        assert_eq!(found, BTreeMap::from([(one, vec![ms(30), ms(25)])]));
    }

    #[test]
    fn what_a_client_takes_itself_it_takes_everywhere() {
        let here = |ms: u64| Client {
            address: "192.0.2.1".parse().unwrap(),
            here: Some(Reading {
                latency: Duration::from_millis(ms),
                deviation: Duration::from_millis(1),
                age: Duration::ZERO,
            }),
        };
        let echo = |latency| Echoes::from([("192.0.2.1".parse().unwrap(), latency)]);
        // Of 30 ms the way takes 21; from there it takes 6.
        let found = there(&[here(30)], (&echo(ms(21)), &echo(ms(6)), ms(0)), Some(ms(15)))[0].unwrap();
        assert_eq!((found.expected, found.from), (ms(15), Origin::Probe));
        // Who does not answer is somewhere between.
        let bounds = there(&[here(30)], (&Echoes::new(), &Echoes::new(), ms(0)), Some(ms(20)))[0].unwrap();
        assert_eq!((bounds.expected, bounds.from), (ms(30), Origin::Bounds));
        assert!(bounds.deviation > ms(10));
        assert_eq!(there(&[here(30)], (&Echoes::new(), &Echoes::new(), ms(0)), None), [None]);
    }

    #[test]
    fn another_node_asks_about_few_hosts_and_each_once() {
        let ask = |hosts: Vec<String>| asked(&api::DistancesRequest { hosts });
        let many = |count: usize| (0..count).map(|last| format!("192.0.2.{last}")).collect::<Vec<_>>();
        assert_eq!(ask(many(MOST)).unwrap().len(), MOST);
        assert!(ask(many(MOST + 1)).is_err());
        for host in
            ["localhost", "127.0.0.1", "224.0.0.1", "255.255.255.255", "0.0.0.0", "fe80::1", "ff02::1"]
        {
            assert!(ask(vec![host.to_owned()]).is_err(), "{host}");
        }
        assert!(ask(vec!["192.0.2.1".to_owned(); 2]).is_err());
    }
}
