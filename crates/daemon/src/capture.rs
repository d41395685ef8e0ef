//! Captures of a service's packets: on this node, and on all nodes at once.
//!
//! ```text
//!   godwit capture ◄── CaptureEvent ── everywhere(), on the node that is asked
//!                                        ├─ here()
//!                                        ├─ Peer.Capture ── here() on node b
//!                                        └─ Peer.Capture ── here() on node c …
//! ```
//!
//! Every node captures from the start, whether it has the service or not: when the service comes, its
//! endpoint is captured before anything runs in it ([`godwit_network::capture`]). So a move needs no
//! message between nodes. A node that joins is asked as soon as it is known here; one that cannot be
//! reached is reported as missing, and asked again.
//!
//! What a peer sends is checked before it is passed on, and is shown under that peer's name.

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use godwit_api::innermost;
use godwit_api::v1::{
    self as api, CaptureBatch, CaptureCount, CaptureEvent, CaptureInterface, CaptureNote, CapturePlace,
    CaptureRequest, CaptureStart, CapturedPacket, capture_event::Kind,
};
use godwit_network::capture::{Batch, Place, WHOLE, Wanted};
use godwit_network::{Filter, NetworkError};
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

use crate::convert;
use crate::network::attachment;
use crate::node::Node;
use crate::status::{internal, status};

/// Events that wait for a slow reader; then the nodes' own queues fill, and they count what is lost.
const QUEUE: usize = 32;
/// A peer sends something five times a second; one that is silent for so long counts as missing.
const SILENCE: Duration = Duration::from_secs(5);
/// Between two attempts to reach a peer.
const AGAIN: Duration = Duration::from_secs(1);
/// The kernel's limit for the name of an interface.
const LONGEST_INTERFACE: usize = 15;
/// The longest sentence taken of a peer, in characters, and how many at once.
const LONGEST_SENTENCE: usize = 500;
const MOST_SENTENCES: usize = 16;

/// What a node streams to another.
pub(crate) type Batches = Pin<Box<dyn Stream<Item = Result<CaptureBatch, Status>> + Send>>;
type Events = mpsc::Sender<Result<CaptureEvent, Status>>;

/// Captures on this node, for as long as the stream is read.
pub(crate) async fn here(node: &Node, request: &CaptureRequest) -> Result<Batches, Status> {
    let name = convert::service_name(&request.name)?;
    let invalid = |error: NetworkError| status(Status::invalid_argument, &error);
    let address: Ipv4Addr = request.address.parse().map_err(|_| {
        Status::invalid_argument(format!("{:?} is not a valid IPv4 address", request.address))
    })?;
    let overlay = node.networks().of(address).map_err(invalid)?;
    let nth = u8::try_from(request.nth)
        .map_err(|_| Status::invalid_argument(format!("no service has a network number {}", request.nth)))?;
    let wanted = Wanted {
        name,
        address,
        nth,
        places: places(request)?,
        snaplen: request.snaplen,
        filter: Filter::parse(&request.filter).map_err(invalid)?,
    };
    let capture = overlay.capture(wanted).await;
    let capture = capture.map_err(|error| match error {
        NetworkError::TooManyCaptures { .. } => status(Status::resource_exhausted, &error),
        _ => status(Status::internal, &error),
    })?;
    let of = |(place, name): (Place, String)| CaptureInterface { place: to_api(place).into(), name };
    let mut interfaces: Vec<_> = capture.interfaces.into_iter().map(of).collect();
    let name = node.name.clone();
    let shown = move |batch| Ok(shown(&name, batch, std::mem::take(&mut interfaces)));
    Ok(ReceiverStream::new(capture.batches).map(shown).boxed())
}

/// Captures on all nodes, for as long as the events are taken.
pub(crate) async fn everywhere(
    node: &Arc<Node>,
    mut request: CaptureRequest,
) -> Result<mpsc::Receiver<Result<CaptureEvent, Status>>, Status> {
    let name = convert::service_name(&request.name)?;
    let placement = node.placement(&name).map_err(internal)?;
    let placement = placement.ok_or_else(|| {
        Status::not_found(format!("there is no service {name}; `godwit ps -a` lists all services"))
    })?;
    let Some((address, nth)) = attachment::address_on(node, &placement, &request.network)? else {
        return Err(Status::failed_precondition(format!(
            "service {name} is in a network namespace that godwit did not create, so godwit captures nothing there; capture with `nsenter --net=PATH tcpdump` (`godwit inspect {name}` shows the path)"
        )));
    };
    (request.address, request.nth) = (address.to_string(), nth);
    // Listening starts before the members are read, so that nobody joins in between.
    let joined = node.events.listen();
    let own = here(node, &request).await?;
    let peers = peers(node)?;
    let start = CaptureStart {
        name: name.into(),
        address: request.address.clone(),
        nodes: [&node.name].into_iter().chain(&peers).cloned().collect(),
    };
    let (events, stream) = mpsc::channel(QUEUE);
    tokio::spawn(gather(Arc::clone(node), request, start, own, joined, events));
    Ok(stream)
}

/// The names of the other nodes.
fn peers(node: &Node) -> Result<Vec<String>, Status> {
    let members = node.state.members().map_err(internal)?;
    Ok(members.into_iter().map(|member| member.name).filter(|name| *name != node.name).collect())
}

async fn gather(
    node: Arc<Node>,
    request: CaptureRequest,
    start: CaptureStart,
    own: Batches,
    mut joined: broadcast::Receiver<api::Event>,
    events: Events,
) {
    let mut peers_now = start.nodes.iter().skip(1).cloned().collect::<Vec<_>>();
    if events.send(event(Kind::Start(start))).await.is_err() {
        return;
    }
    let mut followed = HashSet::new();
    // What it runs ends with it.
    let mut tasks = JoinSet::new();
    tasks.spawn(pass_on_own(node.name.clone(), own, events.clone()));
    loop {
        for peer in std::mem::take(&mut peers_now) {
            if followed.insert(peer.clone()) {
                tasks.spawn(follow(Arc::clone(&node), peer, request.clone(), events.clone()));
            }
        }
        let news = tokio::select! {
            () = events.closed() => return,
            news = joined.recv() => news,
        };
        peers_now = match news {
            Ok(event) if event.subject == "node" && event.action == "joined" => vec![event.name],
            Ok(_) => continue,
            Err(RecvError::Lagged(_)) => peers(&node).unwrap_or_default(),
            Err(RecvError::Closed) => return,
        };
    }
}

fn event(kind: Kind) -> Result<CaptureEvent, Status> {
    Ok(CaptureEvent { kind: Some(kind) })
}

fn note(node: &str, text: &str) -> Result<CaptureEvent, Status> {
    event(Kind::Note(CaptureNote { node: node.to_owned(), text: text.to_owned() }))
}

async fn pass_on_own(name: String, mut own: Batches, events: Events) {
    while let Some(batch) = own.next().await {
        if events.send(batch.and_then(|batch| event(Kind::Batch(batch)))).await.is_err() {
            return;
        }
    }
    // The reader may have gone, and that may be why.
    let _ = events.send(note(&name, "its capture has ended unexpectedly; see its log")).await;
}

/// Passes on what a peer sees, and says when it cannot be asked.
async fn follow(node: Arc<Node>, peer: String, request: CaptureRequest, events: Events) {
    let mut said = String::new();
    loop {
        let Err(reason) = follow_once(&node, &peer, &request, &events, &mut said).await else { return };
        let reason = sentence(&reason);
        if reason != said && events.send(note(&peer, &reason)).await.is_err() {
            return;
        }
        said = reason;
        tokio::time::sleep(AGAIN).await;
    }
}

/// One connection to a peer; why it ended, or nothing when the reader has gone.
async fn follow_once(
    node: &Node,
    peer: &str,
    request: &CaptureRequest,
    events: &Events,
    said: &mut String,
) -> Result<(), String> {
    let address = node.member_address(peer).map_err(|error| error.to_string())?;
    let address = address.ok_or("it is no longer a member of the cluster")?;
    let silent = |_| format!("it has been silent for {} s", SILENCE.as_secs());
    let mut client = node.peers.get_patient(peer, &address);
    let asked = timeout(SILENCE, client.capture(request.clone())).await.map_err(silent)?;
    let mut batches = asked.map_err(|status| reason(&status))?.into_inner();
    loop {
        let batch = timeout(SILENCE, batches.message()).await.map_err(silent)?;
        let batch = batch.map_err(|status| reason(&status))?.ok_or("it has ended the capture")?;
        let batch = checked(peer, batch)?;
        said.clear();
        if events.send(event(Kind::Batch(batch))).await.is_err() {
            return Ok(());
        }
    }
}

/// Why a peer does not answer, in its words or the transport's.
fn reason(status: &Status) -> String {
    if status.code() == Code::Unimplemented {
        return "it runs a godwit that cannot capture; install the same one on all nodes".into();
    }
    if let Some(cause) = innermost(status) {
        // Some errors end with the address of a manual page about them.
        let cause = cause.split(": https://").next().unwrap_or_default();
        return format!("it cannot be reached: {cause}");
    }
    status.message().to_owned()
}

/// A batch, reduced to what a node may send, under the name of its sender.
fn checked(peer: &str, mut batch: CaptureBatch) -> Result<CaptureBatch, String> {
    let wrong = |what: &str| format!("it violated the protocol: it sent {what}");
    let most = Place::ALL.len();
    if batch.interfaces.len() > most || batch.counts.len() > most {
        return Err(wrong("more places than exist"));
    }
    for interface in &batch.interfaces {
        let good = interface.name.len() <= LONGEST_INTERFACE
            && interface.name.bytes().all(|byte| byte.is_ascii_graphic());
        if !good || interface.place() == CapturePlace::Unspecified {
            return Err(wrong("an invalid interface"));
        }
    }
    if batch.counts.iter().any(|count| count.place() == CapturePlace::Unspecified) {
        return Err(wrong("counts of an unknown place"));
    }
    for packet in &mut batch.packets {
        if packet.place() == CapturePlace::Unspecified
            || packet.time_ns < 0
            || packet.data.len() > WHOLE as usize
        {
            return Err(wrong("an invalid packet"));
        }
        packet.length = packet.length.max(u32::try_from(packet.data.len()).unwrap_or(u32::MAX));
    }
    batch.troubles.truncate(MOST_SENTENCES);
    batch.troubles.iter_mut().for_each(|text| *text = sentence(text));
    batch.node = peer.to_owned();
    Ok(batch)
}

/// A text of a peer as it may be shown on a terminal.
fn sentence(text: &str) -> String {
    let plain = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    plain.take(LONGEST_SENTENCE).collect()
}

fn places(request: &CaptureRequest) -> Result<Vec<Place>, Status> {
    if request.at.is_empty() {
        return Ok(Place::ALL.to_vec());
    }
    let place = |number: &i32| match CapturePlace::try_from(*number) {
        Ok(CapturePlace::Service) => Ok(Place::Service),
        Ok(CapturePlace::Port) => Ok(Place::Port),
        Ok(CapturePlace::Overlay) => Ok(Place::Overlay),
        Ok(CapturePlace::Uplink) => Ok(Place::Uplink),
        Ok(CapturePlace::Unspecified) | Err(_) => Err(Status::invalid_argument(format!(
            "place {number} is not known; there are service, port, overlay and uplink"
        ))),
    };
    // However long the list is, it names no more than these.
    let mut places = request.at.iter().map(place).collect::<Result<Vec<_>, _>>()?;
    places.sort_unstable();
    places.dedup();
    Ok(places)
}

fn to_api(place: Place) -> CapturePlace {
    match place {
        Place::Service => CapturePlace::Service,
        Place::Port => CapturePlace::Port,
        Place::Overlay => CapturePlace::Overlay,
        Place::Uplink => CapturePlace::Uplink,
    }
}

fn shown(node: &str, batch: Batch, interfaces: Vec<CaptureInterface>) -> CaptureBatch {
    let packet = |packet: godwit_network::capture::Packet| CapturedPacket {
        place: to_api(packet.place).into(),
        time_ns: packet.time_ns,
        outgoing: packet.outgoing,
        length: packet.length,
        data: packet.data.into(),
    };
    let count = |count: godwit_network::capture::Count| CaptureCount {
        place: to_api(count.place).into(),
        received: count.received,
        dropped: count.dropped,
    };
    CaptureBatch {
        node: node.to_owned(),
        interfaces,
        packets: batch.packets.into_iter().map(packet).collect(),
        up_to_ns: batch.up_to_ns,
        counts: batch.counts.into_iter().map(count).collect(),
        troubles: batch.troubles,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn batch() -> CaptureBatch {
        let place = CapturePlace::Uplink.into();
        CaptureBatch {
            node: "somebody else".into(),
            interfaces: vec![CaptureInterface { place, name: "eth0".into() }],
            packets: vec![CapturedPacket {
                place,
                time_ns: 1,
                data: vec![0; 60].into(),
                ..Default::default()
            }],
            counts: vec![CaptureCount { place, received: 1, dropped: 0 }],
            troubles: vec!["a\u{1b}[2J\nb".into()],
            ..CaptureBatch::default()
        }
    }

    #[test]
    fn what_a_peer_tells_is_shown_under_its_own_name_and_does_no_harm() {
        let checked = checked("b", batch()).unwrap();
        assert_eq!(checked.node, "b");
        assert_eq!(checked.packets[0].length, 60, "never shorter than what is there");
        assert_eq!(checked.troubles, ["a [2J b"]);
    }

    #[test]
    fn what_no_node_tells_is_refused() {
        type Spoil = fn(&mut CaptureBatch);
        let spoilt: [(&str, Spoil); 7] = [
            ("too many interfaces", |b| b.interfaces = vec![b.interfaces[0].clone(); 5]),
            ("an interface with a long name", |b| b.interfaces[0].name = "x".repeat(16)),
            ("an interface with an odd name", |b| b.interfaces[0].name = "\n".into()),
            ("counts of an unknown place", |b| b.counts[0].place = 9),
            ("a packet of no place", |b| b.packets[0].place = 0),
            ("a packet before 1970", |b| b.packets[0].time_ns = -1),
            ("a huge packet", |b| b.packets[0].data = vec![0; WHOLE as usize + 1].into()),
        ];
        for (what, spoil) in spoilt {
            let mut batch = batch();
            spoil(&mut batch);
            assert!(checked("b", batch).is_err(), "{what}");
        }
    }

    #[test]
    fn places_are_each_captured_once() {
        let request = |at: Vec<i32>| CaptureRequest { at, ..CaptureRequest::default() };
        assert_eq!(places(&request(vec![])).unwrap(), Place::ALL);
        assert_eq!(places(&request(vec![4, 1, 4])).unwrap(), [Place::Service, Place::Uplink]);
        assert!(places(&request(vec![5])).is_err());
        assert!(places(&request(vec![0])).is_err());
    }
}
