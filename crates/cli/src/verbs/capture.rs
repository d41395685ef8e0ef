//! `godwit capture`: the packets of a service in a file, from every node, also while it moves.
//!
//! ```text
//!   godwitd of each node ── batches ──► the daemon that is asked ──► merge.rs ──► pcapng.rs ──► file
//! ```
//!
//! It ends when the packets until then have come: at Ctrl-C, after the time or the number that was
//! asked for.

mod merge;
mod pcapng;

use std::{
    collections::{BTreeMap, HashSet},
    fs::File,
    io::{self, BufWriter, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::Context as _;
use clap::ValueEnum;
use godwit_api::v1::{
    CaptureBatch, CaptureEvent, CapturePlace, CaptureRequest, CaptureStart, capture_event::Kind,
};
use serde::Serialize;

use self::{
    merge::Merge,
    pcapng::{Interface, Packet, Statistics, Writer},
};
use crate::{
    client::Connection,
    global::Global,
    interrupts::Interrupts,
    output::{self, Table},
    values,
};

/// What the daemon captures of a packet by default.
const WHOLE: u32 = 256 << 10;
/// Between two readings of the clock.
const TICK: Duration = Duration::from_millis(100);
/// How long the end waits for what nodes have seen until then: longer than a packet waits for its turn.
const LAST: Duration = Duration::from_secs(3);

/// Write the packets of a service to a file, even while it moves
///
/// The file is pcapng, which Wireshark, tshark and tcpdump read. All nodes capture from the start, so
/// that a move leaves no gap; each node and place is an interface of the file, named NODE:INTERFACE.
/// FILTER is a subset of tcpdump's language: ip, ip6, arp, tcp, udp, icmp, icmp6, host ADDRESS and
/// port NUMBER (after src or dst, if wanted), joined with and, or, not and parentheses; it applies to the
/// service's own packets, even inside VXLAN. Ctrl-C ends the capture.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The service
    name: String,
    /// The file to write; - for standard output
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Where to capture
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PLACE", default_value = "service")]
    at: Vec<At>,
    /// Which of the service's networks [default: the first of them]
    #[arg(long, value_name = "NAME")]
    network: Option<String>,
    /// Bytes of each packet that are written
    #[arg(long, value_name = "BYTES", default_value_t = WHOLE, value_parser = clap::value_parser!(u32).range(1..=i64::from(WHOLE)))]
    snaplen: u32,
    /// End after so many packets
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// End after this time: 90s, 15m, 2h
    #[arg(long, value_name = "TIME", value_parser = values::duration)]
    duration: Option<Duration>,
    /// Only such packets, for example: tcp port 6379 and not host 10.88.0.1
    filter: Vec<String>,
}

/// Where to capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum At {
    /// The service's own interface, in its network namespace
    Service,
    /// Its port of the node's bridge
    Port,
    /// The interface that leads to other nodes
    Overlay,
    /// The interface that carries the overlay, and by which clients reach the node
    Uplink,
    /// All of these
    All,
}

impl At {
    fn places(self) -> &'static [CapturePlace] {
        match self {
            Self::Service => &[CapturePlace::Service],
            Self::Port => &[CapturePlace::Port],
            Self::Overlay => &[CapturePlace::Overlay],
            Self::Uplink => &[CapturePlace::Uplink],
            Self::All => {
                &[CapturePlace::Service, CapturePlace::Port, CapturePlace::Overlay, CapturePlace::Uplink]
            }
        }
    }
}

fn word(place: CapturePlace) -> &'static str {
    match place {
        CapturePlace::Unspecified => "unknown",
        CapturePlace::Service => "service",
        CapturePlace::Port => "port",
        CapturePlace::Overlay => "overlay",
        CapturePlace::Uplink => "uplink",
    }
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let to_stdout = args.output == Path::new("-");
    if to_stdout && global.json {
        anyhow::bail!("--json and --output - both want standard output: name a file");
    }
    let mut connection = Connection::open(global).await?;
    let mut interrupts = Interrupts::new()?;
    let request = CaptureRequest {
        name: args.name.clone(),
        at: args.at.iter().flat_map(|at| at.places()).map(|place| i32::from(*place)).collect(),
        snaplen: args.snaplen,
        filter: args.filter.join(" "),
        network: args.network.clone().unwrap_or_default(),
        ..CaptureRequest::default()
    };
    let answer = connection.node.capture(request.clone()).await;
    let mut events = answer.map_err(|status| connection.explain(&status))?.into_inner();
    // Only now: a capture that is refused must not cost an older file.
    let out: Box<dyn Write> = if to_stdout {
        Box::new(io::stdout())
    } else {
        // What services say to their clients is not for the machine's other users.
        let made = File::options().write(true).create(true).truncate(true).mode(0o600).open(&args.output);
        Box::new(made.with_context(|| format!("cannot write {}", args.output.display()))?)
    };
    let mut recording = Recording::begin(BufWriter::new(out), &request, args.count)?;
    let mut clock = tokio::time::interval(TICK);
    let mut said = false;
    let mut end_at = None;
    let mut ending: Option<Ending> = None;
    let broken = loop {
        tokio::select! {
            event = events.message() => match event {
                Ok(Some(event)) => recording.take(event)?,
                Ok(None) => break Some(anyhow::anyhow!(
                    "godwitd on {} ended the capture", connection.socket().display()
                )),
                Err(status) => break Some(connection.explain(&status).into()),
            },
            () = interrupts.next() => {
                if ending.is_some() {
                    break None;
                }
                ending = Some(Ending::now());
            }
            _ = clock.tick() => {}
        }
        if !said && recording.is_looking() {
            said = true;
            recording.say_that_it_looks(global, &args)?;
            end_at = args.duration.map(|duration| Instant::now() + duration);
        }
        if ending.is_none() && end_at.is_some_and(|end| Instant::now() >= end) {
            ending = Some(Ending::now());
        }
        recording.write_ready(false)?;
        if recording.is_full() || ending.as_ref().is_some_and(|ending| recording.is_done(ending)) {
            break None;
        }
    };
    let summary = recording.finish()?;
    if global.json {
        output::json(&summary)?;
    } else {
        summary.print(if to_stdout { None } else { Some(&args.output) })?;
    }
    match broken {
        None => Ok(ExitCode::SUCCESS),
        Some(error) => Err(error.context("the capture is not complete")),
    }
}

/// The end of a capture: packets until then are waited for, but not for ever.
struct Ending {
    time_ns: i64,
    at: Instant,
}

impl Ending {
    fn now() -> Self {
        Self { time_ns: now_ns(), at: Instant::now() }
    }
}

fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// A file that is being written.
struct Recording<W: Write> {
    writer: Writer<W>,
    merge: Merge,
    request: CaptureRequest,
    /// Packets after which it is full.
    most: Option<u64>,
    begun_ns: i64,
    written: u64,
    places: BTreeMap<(String, i32), Seen>,
    /// Nodes that are asked; nothing until that is known.
    nodes: Option<Vec<String>>,
    /// Of these, the ones that capture or that cannot.
    answered: HashSet<String>,
    /// Nodes that cannot be asked now.
    missing: HashSet<String>,
}

/// An interface of the file.
struct Seen {
    number: u32,
    label: String,
    written: u64,
    /// What the node has counted since it began to capture.
    received: u64,
    dropped: u64,
    /// What it had counted before, when it had to begin anew.
    earlier: (u64, u64),
}

impl<W: Write> Recording<W> {
    fn begin(out: W, request: &CaptureRequest, most: Option<u64>) -> io::Result<Self> {
        let mut writer = Writer::begin(out)?;
        writer.flush()?;
        Ok(Self {
            writer,
            merge: Merge::default(),
            request: request.clone(),
            most,
            begun_ns: now_ns(),
            written: 0,
            places: BTreeMap::new(),
            nodes: None,
            answered: HashSet::new(),
            missing: HashSet::new(),
        })
    }

    fn take(&mut self, event: CaptureEvent) -> io::Result<()> {
        match event.kind {
            Some(Kind::Start(start)) => self.start(start),
            Some(Kind::Batch(batch)) => return self.take_batch(batch),
            Some(Kind::Note(note)) => {
                output::note(&format!("node {}: {}", note.node, note.text));
                self.merge.leave(&note.node);
                self.answered.insert(note.node.clone());
                self.missing.insert(note.node);
            }
            None => {}
        }
        Ok(())
    }

    fn start(&mut self, start: CaptureStart) {
        let now = Instant::now();
        start.nodes.iter().for_each(|node| self.merge.expect(node, now));
        self.nodes = Some(start.nodes);
    }

    fn take_batch(&mut self, batch: CaptureBatch) -> io::Result<()> {
        let now = Instant::now();
        if self.missing.remove(&batch.node) {
            output::note(&format!("node {} captures again", batch.node));
        }
        for interface in &batch.interfaces {
            let seen = self.seen(&batch.node, interface.place, &interface.name)?;
            seen.earlier.0 += std::mem::take(&mut seen.received);
            seen.earlier.1 += std::mem::take(&mut seen.dropped);
        }
        for count in &batch.counts {
            let seen = self.seen(&batch.node, count.place, word(count.place()))?;
            (seen.received, seen.dropped) = (count.received, count.dropped);
        }
        for packet in batch.packets {
            let number = self.seen(&batch.node, packet.place, word(packet.place()))?.number;
            self.merge.add(number, packet, now);
        }
        for text in &batch.troubles {
            output::note(&format!("node {}: {text}", batch.node));
        }
        self.merge.told(&batch.node, batch.up_to_ns, now);
        self.answered.insert(batch.node);
        Ok(())
    }

    /// The interface of a place of a node, which is added to the file when it is first heard of.
    fn seen(&mut self, node: &str, place: i32, interface: &str) -> io::Result<&mut Seen> {
        let key = (node.to_owned(), place);
        if !self.places.contains_key(&key) {
            let mut label = format!("{node}:{interface}");
            if self.places.values().any(|other| other.label == label) {
                // The service's interface and the uplink may have the same name.
                label = format!("{label}@{}", word(CapturePlace::try_from(place).unwrap_or_default()));
            }
            let at = match CapturePlace::try_from(place).unwrap_or(CapturePlace::Unspecified) {
                CapturePlace::Unspecified => "an unknown place",
                CapturePlace::Service => "its own interface",
                CapturePlace::Port => "its port of the bridge",
                CapturePlace::Overlay => "the overlay",
                CapturePlace::Uplink => "the uplink",
            };
            let number = self.writer.interface(Interface {
                name: &label,
                description: &format!("service {} on node {node}, {at}", self.request.name),
                filter: &self.request.filter,
                snaplen: self.request.snaplen,
            })?;
            let new = Seen { number, label, written: 0, received: 0, dropped: 0, earlier: (0, 0) };
            self.places.insert(key.clone(), new);
        }
        self.places.get_mut(&key).ok_or_else(|| io::Error::other("an interface was lost"))
    }

    /// Whether each of the nodes captures, or cannot be asked.
    fn is_looking(&self) -> bool {
        self.nodes.as_ref().is_some_and(|nodes| nodes.iter().all(|node| self.answered.contains(node)))
    }

    fn is_full(&self) -> bool {
        self.most.is_some_and(|most| self.written >= most)
    }

    /// Whether all packets until the end have come, or have been waited for long enough.
    fn is_done(&self, ending: &Ending) -> bool {
        let now = Instant::now();
        self.merge.horizon(now) >= ending.time_ns || now.duration_since(ending.at) >= LAST
    }

    /// Writes the packets whose turn has come, or all.
    fn write_ready(&mut self, all: bool) -> io::Result<()> {
        let before = self.written;
        while !self.is_full()
            && let Some((number, packet)) = self.merge.next(all, Instant::now())
        {
            self.writer.packet(
                number,
                Packet {
                    time_ns: packet.time_ns,
                    outgoing: packet.outgoing,
                    length: packet.length,
                    data: &packet.data,
                },
            )?;
            self.written += 1;
            if let Some(seen) = self.places.values_mut().find(|seen| seen.number == number) {
                seen.written += 1;
            }
        }
        // A reader of the file sees whole packets meanwhile.
        if self.written > before { self.writer.flush() } else { Ok(()) }
    }

    fn say_that_it_looks(&self, global: &Global, args: &Args) -> io::Result<()> {
        let nodes = self.nodes.as_deref().unwrap_or_default();
        if global.json {
            return output::json(&Looking { event: "capturing", name: &args.name, nodes });
        }
        let until = if args.duration.is_some() || args.count.is_some() { "" } else { "; Ctrl-C ends it" };
        output::note(&format!("capturing {} on {}{until}", args.name, nodes.join(", ")));
        Ok(())
    }

    /// Writes what is left, and what became of the packets.
    fn finish(mut self) -> io::Result<Summary> {
        self.write_ready(true)?;
        let (begun_ns, ended_ns) = (self.begun_ns, now_ns());
        let mut interfaces = Vec::new();
        for ((node, place), seen) in self.places {
            let received = seen.earlier.0 + seen.received;
            let dropped = seen.earlier.1 + seen.dropped;
            let written = seen.written;
            self.writer
                .statistics(seen.number, Statistics { begun_ns, ended_ns, received, dropped, written })?;
            interfaces.push(SummaryLine {
                name: seen.label,
                node,
                at: word(CapturePlace::try_from(place).unwrap_or(CapturePlace::Unspecified)),
                packets: written,
                received,
                dropped,
            });
        }
        self.writer.flush()?;
        let dropped = interfaces.iter().map(|interface| interface.dropped).sum();
        Ok(Summary { event: "captured", packets: self.written, dropped, interfaces })
    }
}

/// That all nodes capture.
#[derive(Serialize)]
struct Looking<'a> {
    event: &'static str,
    name: &'a str,
    nodes: &'a [String],
}

/// What a capture brought.
#[derive(Debug, Serialize)]
struct Summary {
    event: &'static str,
    /// In the file.
    packets: u64,
    dropped: u64,
    interfaces: Vec<SummaryLine>,
}

#[derive(Debug, Serialize)]
struct SummaryLine {
    name: String,
    node: String,
    at: &'static str,
    /// In the file.
    packets: u64,
    /// By the kernel, those dropped among them.
    received: u64,
    dropped: u64,
}

impl Summary {
    /// Prints what the file holds; on standard error where standard output is the file.
    fn print(&self, file: Option<&Path>) -> io::Result<()> {
        if self.dropped > 0 {
            output::note(&format!(
                "{} packets were dropped, as they came faster than they could be written: capture at fewer places (--at), less of each packet (--snaplen), or fewer packets (FILTER)",
                self.dropped
            ));
        }
        let Some(file) = file else {
            output::note(&format!("{} packets", self.packets));
            return Ok(());
        };
        output::line(&format!("{} packets in {}", self.packets, file.display()))?;
        let mut table = Table::new(["INTERFACE", "AT", "PACKETS", "DROPPED"]);
        for line in &self.interfaces {
            let (packets, dropped) = (line.packets.to_string(), line.dropped.to_string());
            table.row([line.name.clone(), line.at.to_owned(), packets, dropped]);
        }
        table.print()
    }
}
