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

/// Of a client's connections those count on which data was sent within this time of the last one.
const AS_NEW: Duration = Duration::from_secs(1);

/// While a client's connections show too long a latency, it is sent an echo so often: one that does not answer less often.
const ECHOES: Duration = Duration::from_secs(2);
const ECHOES_OF_SILENT: Duration = Duration::from_secs(30);

/// For so long such an echo counts.
const COUNTS: Duration = Duration::from_secs(5);

/// A client that has sent something lately.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    pub(crate) address: IpAddr,
    /// Its latency by its connections, and by an echo where there was one; none where they show none.
    pub(crate) here: Option<Reading>,
}

/// What looks have shown of one client.
#[derive(Debug, Default)]
struct Seen {
    samples: Samples,
    connections: usize,
    /// When an echo was sent to it last, how many it has not answered since, and how far it was by the last answer.
    asked: Option<Moment>,
    silent: u32,
    echo: Option<(Moment, Duration)>,
}

impl Seen {
    /// What its connections show, beside an echo that counts.
    fn beside(&self, shown: Reading, now: Moment) -> Reading {
        let echo = self.echo.map(|(sent, found)| (now.since(sent), found)).filter(|(age, _)| *age <= COUNTS);
        echo.map_or(shown, |(age, found)| shown.beside(Reading { age, ..reading(found) }))
    }

    /// Its latency as it was seen last; none where its connections show none.
    fn newest(&self, now: Moment) -> Option<Duration> {
        Some(self.beside(reading(self.samples.newest()?), now).latency)
    }

    /// Whether its connections show too long a latency, and only an echo tells whether they are right.
    fn is_in_doubt(&self, target: Target, now: Moment) -> bool {
        // One may be lost.
        let every = if self.silent > 1 { ECHOES_OF_SILENT } else { ECHOES };
        self.samples.newest().is_some_and(|newest| newest > target.get())
            && self.asked.is_none_or(|asked| now.since(asked) >= every)
    }
}

/// How far clients are from a node, by ICMP echoes. Who is not there does not answer.
pub(crate) type Echoes = BTreeMap<IpAddr, Duration>;

/// The clients of a service, as looks at its connections show them.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    seen: BTreeMap<IpAddr, Seen>,
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
        for (address, (connections, round_trips)) in active {
            let samples = || self.came.map_or_else(Samples::default, Samples::after_move);
            let fresh = || Seen { samples: samples(), ..Seen::default() };
            let seen = self.seen.entry(address).or_insert_with(fresh);
            seen.connections = connections;
            seen.samples.add(now(), round_trips);
        }
        Ok(())
    }

    /// Sends echoes to clients whose connections show too long a latency.
    pub(crate) async fn listen(&mut self, target: Target, now: impl Fn() -> Moment) {
        let begun = now();
        let in_doubt = self.heeded().into_iter().filter(|(_, seen)| seen.is_in_doubt(target, begun));
        let hosts: Vec<IpAddr> = in_doubt.map(|(address, _)| address).collect();
        if hosts.is_empty() {
            return;
        }
        let found = distances(&hosts).await;
        self.note(hosts.into_iter().zip(found), begun);
    }

    /// Notes how far clients were from this node at a moment, by echoes; none where one did not answer.
    pub(crate) fn note(&mut self, echoes: impl Iterator<Item = (IpAddr, Option<Duration>)>, sent: Moment) {
        for (address, found) in echoes {
            if let Some(seen) = self.seen.get_mut(&address) {
                seen.asked = Some(sent);
                seen.silent = if found.is_some() { 0 } else { seen.silent.saturating_add(1) };
                seen.echo = found.map(|found| (sent, found)).or(seen.echo);
            }
        }
    }

    /// Whether a client had too long a latency when it was seen last.
    pub(crate) fn is_over(&self, target: Target, now: Moment) -> bool {
        let is_over = |seen: &Seen| seen.newest(now).is_some_and(|newest| newest > target.get());
        self.heeded().into_iter().any(|(_, seen)| is_over(seen))
    }

    pub(crate) fn clients(&self, now: Moment) -> Vec<Client> {
        let here = |seen: &Seen| Some(seen.beside(seen.samples.reading(now)?, now));
        self.heeded().into_iter().map(|(address, seen)| Client { address, here: here(seen) }).collect()
    }

    /// Those with the most connections.
    fn heeded(&self) -> Vec<(IpAddr, &Seen)> {
        let mut all: Vec<_> = self.seen.iter().map(|(address, seen)| (*address, seen)).collect();
        all.sort_by_key(|(_, seen)| std::cmp::Reverse(seen.connections));
        all.truncate(MOST);
        all
    }
}

/// Leaves out of latencies what connections show beyond an echo from here.
pub(super) fn compare(clients: &mut [Client], echoes: &Echoes) {
    for client in clients {
        if let Some((here, echo)) = client.here.as_mut().zip(echoes.get(&client.address)) {
            *here = here.beside(reading(*echo));
        }
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

/// How many connections each client has that has sent something lately, and their round trips. A connection that the service
/// has begun is not a client's.
fn active(found: &Connections) -> BTreeMap<IpAddr, (usize, Vec<Duration>)> {
    let tcp = || found.list.iter().filter(|connection| connection.protocol == Protocol::Tcp);
    let listening: BTreeSet<u16> = tcp()
        .filter(|connection| connection.state == "listen")
        .map(|connection| connection.local.port())
        .collect();
    let mut clients = BTreeMap::<IpAddr, Vec<(Duration, Duration)>>::new();
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
            let answered = Duration::from_millis(details.last_sent_ms.into());
            let round_trip = Duration::from_micros(details.rtt_us.into());
            clients.entry(client).or_default().push((answered, round_trip));
        }
    }
    // A connection shows how far the client was when it was answered last; one of a service that has just come, nothing.
    let newest = |all: Vec<(Duration, Duration)>| {
        let shown = || all.iter().filter(|(_, round_trip)| !round_trip.is_zero());
        let last = shown().map(|(answered, _)| *answered).min().unwrap_or_default();
        let new = shown().filter(|(answered, _)| answered.saturating_sub(last) <= AS_NEW);
        (all.len(), new.map(|(_, round_trip)| *round_trip).collect())
    };
    clients.into_iter().map(|(client, all)| (client, newest(all))).collect()
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

    /// Nothing has come to it.
    const SILENT_PORT: &str = "10.88.0.6:80";

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
                last_sent_ms: silent_ms,
                last_received_ms: silent_ms,
                received: u64::from(local != SILENT_PORT),
            }),
        }
    }

    #[test]
    fn a_client_is_who_has_connected_and_sent_something_lately() {
        let list = vec![
            connection("10.88.0.5:80", "0.0.0.0:0", "listen", (0, 0)),
            connection(SILENT_PORT, "0.0.0.0:0", "listen", (0, 0)),
            connection("10.88.0.5:80", "192.0.2.1:4000", "established", (30, 100)),
            connection("[::ffff:10.88.0.5]:80", "[::ffff:192.0.2.1]:4001", "established", (25, 100)),
            // It was used when the client was elsewhere; and it shows nothing since the service has moved.
            connection("10.88.0.5:80", "192.0.2.1:4002", "established", (3, 5_000)),
            connection("10.88.0.5:80", "192.0.2.1:4003", "established", (0, 0)),
            // Silent, begun by the service, its own, and over.
            connection("10.88.0.5:80", "192.0.2.2:4000", "established", (30, 60_000)),
            connection("10.88.0.5:5000", "192.0.2.3:5432", "established", (30, 100)),
            connection("127.0.0.1:80", "127.0.0.1:4000", "established", (1, 100)),
            connection("10.88.0.5:80", "192.0.2.4:4000", "time-wait", (30, 100)),
            // It has sent nothing yet.
            connection(SILENT_PORT, "192.0.2.5:4000", "established", (30, 100)),
        ];
        let found = active(&Connections { list, ..Connections::default() });
        let one: IpAddr = "192.0.2.1".parse().unwrap();
        assert_eq!(found, BTreeMap::from([(one, (4, vec![ms(30), ms(25)]))]));
    }

    #[test]
    fn what_connections_show_beyond_an_echo_counts_no_more_for_a_while() {
        let (one, at): (IpAddr, _) = ("192.0.2.1".parse().unwrap(), |s| Moment(Duration::from_secs(s)));
        let target = Target::new(ms(20)).unwrap();
        let mut seen = Seen { connections: 1, ..Seen::default() };
        for second in 0..5 {
            seen.samples.add(at(second), [ms(50)]);
        }
        let mut watched = Watched { seen: BTreeMap::from([(one, seen)]), came: None };
        let latency = |watched: &Watched, second| watched.clients(at(second))[0].here.unwrap().latency;
        let doubts = |watched: &Watched, second| watched.seen[&one].is_in_doubt(target, at(second));
        assert!(watched.is_over(target, at(5)) && latency(&watched, 5) == ms(50) && doubts(&watched, 5));
        watched.note([(one, None)].into_iter(), at(5));
        assert!(
            latency(&watched, 5) == ms(50) && !doubts(&watched, 6) && doubts(&watched, 7),
            "one may be lost"
        );
        watched.note([(one, None)].into_iter(), at(7));
        assert!(!doubts(&watched, 34) && doubts(&watched, 37), "it answers none");
        watched.note([(one, Some(ms(15)))].into_iter(), at(35));
        assert!(!watched.is_over(target, at(36)) && latency(&watched, 36) == ms(15));
        // The client goes away, and the next echo tells.
        assert!(!doubts(&watched, 36) && doubts(&watched, 37));
        watched.note([(one, Some(ms(30)))].into_iter(), at(38));
        assert!(watched.is_over(target, at(38)) && latency(&watched, 38) == ms(30));
        watched.note([(one, None)].into_iter(), at(40));
        assert_eq!(latency(&watched, 41), ms(30), "one may be lost");
        // Without a further one only its connections are known.
        assert_eq!((latency(&watched, 43), latency(&watched, 44)), (ms(30), ms(50)));
        // A client that is near by its connections is sent none.
        watched.seen.get_mut(&one).unwrap().samples.add(at(50), [ms(12)]);
        assert!(!doubts(&watched, 80) && !watched.is_over(target, at(50)));
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
