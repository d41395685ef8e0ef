//! A service of many connections that puts them into states on order (`godwit bench echo`), on one of two
//! nodes, and what a client does with one connection.

use std::{
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpStream},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use godwit_lab::{
    Link,
    workload::{Preset, Rootfs, stream},
};

use crate::{
    Bed, Report,
    hold::Points,
    programs,
    sockets::{self, Socket},
    wait_for,
};

/// The service's name.
pub const NAME: &str = "echo";
/// Its address.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 60);
/// Where every byte and every datagram comes back.
pub const PORT: u16 = 7010;
/// Where nobody accepts before it is ordered.
pub const WAITING: u16 = PORT + 1;
/// How many connections may wait there; the kernel takes one more.
pub const BACKLOG: usize = 4;
/// Where orders are taken.
const ORDERS: u16 = PORT + 2;
/// Frozen, and all frames for it are held.
pub const FROZEN: &str = "source.frozen";
/// All is at the destination, and does not run.
pub const RESTORED: &str = "destination.restored";
/// Bytes that are written at once.
const PIECE: usize = 64 << 10;

/// The service.
#[derive(Debug)]
pub struct Echo {
    orders: BufReader<TcpStream>,
    /// Where it is.
    pub on: &'static str,
    /// Where a move can be held.
    pub points: Points,
    /// The lab.
    pub bed: Bed,
}

impl Echo {
    /// Runs it on node `a` of a lab of the test's own.
    pub fn up(test: &str) -> Self {
        Self::up_over(test, None)
    }

    /// The same, with links of rate and delay between all hosts.
    pub fn up_over(test: &str, link: Option<Link>) -> Self {
        Self::up_as(test, link, &[])
    }

    /// The same, with more words to the service.
    pub fn up_as(test: &str, link: Option<Link>, more: &[&str]) -> Self {
        let mut points = None;
        let bed = Bed::up_with(test, |config| {
            points = Some(Points::among(config, &[FROZEN, RESTORED]));
            config.link = link;
        });
        let program = programs().join("godwit-lab");
        let rootfs = Rootfs::new(bed.scratch().join("echo")).and_then(|rootfs| rootfs.binary(&program));
        let rootfs = rootfs.unwrap_or_else(|error| panic!("{error}")).path().to_owned();
        let (program, port, backlog) =
            (program.to_string_lossy().into_owned(), PORT.to_string(), BACKLOG.to_string());
        let words = [program.as_str(), "bench", "echo", "--port", &port, "--backlog", &backlog];
        let command = words.iter().chain(more).map(|&word| word.to_owned()).collect();
        let preset = Preset { rootfs, command, env: Vec::new(), user: None, port: PORT };
        bed.run("a", NAME, ADDRESS, &preset, &[]);
        let orders = BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, ORDERS)));
        Self { orders, on: "a", points: points.unwrap(), bed }
    }

    /// Gives an order; the answer.
    pub fn order(&mut self, order: &str) -> String {
        self.orders.get_mut().write_all(format!("{order}\n").as_bytes()).unwrap();
        let mut answer = String::new();
        self.orders.read_line(&mut answer).unwrap();
        let answer = answer.trim().to_owned();
        assert!(!answer.is_empty() && !answer.starts_with("no:"), "{order}: {answer:?}");
        answer
    }

    /// Another connection to it from the client's host.
    pub fn connect(&self) -> Client {
        let stream = self.bed.connect(SocketAddrV4::new(ADDRESS, PORT));
        let port = stream.local_addr().unwrap().port();
        Client { stream, port, sent: 0, returned: 0 }
    }

    /// Lets no TCP segment of the service's port reach the client's programs that nftables selects by `which` (empty: all).
    pub fn deafen(&self, which: &str) {
        self.filter(&format!(
            "add table inet deaf; add chain inet deaf in {{ type filter hook input priority 0; }}; \
             add rule inet deaf in tcp sport {PORT} {which} drop"
        ));
    }

    /// They hear the service again.
    pub fn hears(&self) {
        self.filter("delete table inet deaf");
    }

    fn filter(&self, script: &str) {
        assert!(self.bed.on_client("nft").arg(script).status().unwrap().success(), "{script}");
    }

    /// The service's end of a client's connection.
    pub fn socket(&self, client: &Client) -> Option<Socket> {
        sockets::between(&sockets::of_service(&self.bed, self.on, NAME), PORT, client.port)
    }

    /// The client's end of it.
    pub fn client_socket(&self, client: &Client) -> Option<Socket> {
        sockets::between(&sockets::of_client(&self.bed), client.port, PORT)
    }

    /// The other node.
    pub fn other(&self) -> &'static str {
        if self.on == "a" { "b" } else { "a" }
    }

    /// Moves it to the other node, which must succeed.
    pub fn moves(&mut self, mode: &str) -> Report {
        let report = self.bed.migrate_so(NAME, self.on, self.other(), &["--mode", mode]);
        self.on = self.other();
        println!("{mode}: frozen {:.1} ms", report.frozen_ms);
        report
    }

    /// The same, with something done while it is frozen and all of it is at the destination, and something
    /// with what came of that as soon as nothing holds the move any more.
    pub fn moves_while<T, U>(
        &mut self,
        mode: &str,
        held: impl FnOnce(&Self) -> T,
        then: impl FnOnce(&Self, T) -> U,
    ) -> U {
        let to = self.other();
        self.points.hold(RESTORED);
        let this = &*self;
        let done = thread::scope(|scope| {
            let moving = scope.spawn(|| this.bed.migrate_so(NAME, this.on, to, &["--mode", mode]));
            this.points.reached(RESTORED);
            let done = held(this);
            this.points.let_go(RESTORED);
            let done = then(this, done);
            println!("{mode}: frozen {:.1} ms", moving.join().unwrap().frozen_ms);
            done
        });
        self.on = to;
        done
    }

    /// Sends of the client's stream what the service's socket takes now; bytes of it in all.
    pub fn fill(&mut self, client: &Client) -> usize {
        self.order(&format!("fill {}", client.port)).parse().unwrap()
    }

    /// Lets a client that does not read, and the service, which is mute for it, send until neither can send
    /// any more: each has what the other did not read, and both windows are zero. Bytes of the client's
    /// stream that the service has sent in all, and both sockets, the service's first.
    pub fn full_queues(&mut self, client: &mut Client) -> (usize, [Socket; 2]) {
        let (mut last, mut same) = (None, 0);
        wait_for("full queues at both ends", || {
            client.send_what_fits();
            let filled = self.fill(client);
            let sockets = [self.socket(client)?, self.client_socket(client)?];
            let now = (client.sent, filled, sockets.map(|socket| (socket.unsent, socket.unread)));
            // What is under way makes room for more.
            same = if last == Some(now) { same + 1 } else { 0 };
            last = Some(now);
            let full = sockets.iter().all(|socket| socket.unsent > 0 && socket.unread > 0);
            (full && same >= 3).then_some((filled, sockets))
        })
    }
}

/// A client of the service with one connection.
///
/// What it sends is the stream with the number of its port and 65,536; what the service sends by `fill` is
/// the one with the number of its port.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    /// Its port.
    pub port: u16,
    /// Bytes that it has sent.
    pub sent: usize,
    /// Bytes of these that have come back.
    returned: usize,
}

impl Client {
    /// One whose connection is there already.
    pub fn of(stream: TcpStream) -> Self {
        let port = stream.local_addr().unwrap().port();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(crate::PATIENCE)).unwrap();
        Self { stream, port, sent: 0, returned: 0 }
    }

    fn own(&self) -> u64 {
        u64::from(self.port) + 65_536
    }

    /// The connection.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Sends so many bytes, of which nobody need read any.
    pub fn send(&mut self, bytes: usize) {
        let piece = stream::part(self.own(), self.sent as u64, bytes);
        self.stream.write_all(&piece).unwrap();
        self.sent += bytes;
    }

    /// Sends what the socket takes now.
    pub fn send_what_fits(&mut self) {
        self.stream.set_nonblocking(true).unwrap();
        loop {
            let piece = stream::part(self.own(), self.sent as u64, PIECE);
            match self.stream.write(&piece) {
                Ok(length) => self.sent += length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
        }
        self.stream.set_nonblocking(false).unwrap();
    }

    /// Sends and takes back so much that the kernel makes the buffers of both ends large.
    pub fn warm_up(&mut self, bytes: usize) {
        let mut writing = self.stream.try_clone().unwrap();
        let (number, from) = (self.own(), self.sent as u64);
        let writer = thread::spawn(move || writing.write_all(&stream::part(number, from, bytes)).unwrap());
        self.sent += bytes;
        self.takes_back();
        writer.join().unwrap();
    }

    /// Sends and takes back as fast as it can while something is done. The longest time in which nothing
    /// came back.
    pub fn flows(&mut self, meanwhile: impl FnOnce()) -> Duration {
        let (number, begin) = (self.own(), self.sent);
        // Bytes that will have been sent in the end; known before the last of them is.
        let (enough, total) = (AtomicBool::new(false), AtomicUsize::new(usize::MAX));
        let mut writing = self.stream.try_clone().unwrap();
        let longest = thread::scope(|scope| {
            scope.spawn(|| {
                let mut sent = begin;
                while total.load(Ordering::Relaxed) == usize::MAX {
                    if enough.load(Ordering::Relaxed) {
                        total.store(sent + PIECE, Ordering::Relaxed);
                    }
                    writing.write_all(&stream::part(number, sent as u64, PIECE)).unwrap();
                    sent += PIECE;
                }
            });
            let reader = scope.spawn(|| {
                let mut longest = Duration::ZERO;
                while self.returned < total.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    self.reads(number, self.returned, 4096);
                    self.returned += 4096;
                    longest = longest.max(begun.elapsed());
                }
                longest
            });
            let flowing = Flowing(&enough);
            meanwhile();
            drop(flowing);
            reader.join().unwrap()
        });
        self.sent = total.into_inner();
        longest
    }

    /// Everything that it has sent comes back, byte for byte.
    pub fn takes_back(&mut self) {
        let (number, from) = (self.own(), self.returned);
        self.returned = self.sent;
        self.reads(number, from, self.sent - from);
    }

    /// So many bytes of what the service sends by `fill` come, from this one on, byte for byte.
    pub fn takes(&mut self, from: usize, count: usize) {
        self.reads(self.port.into(), from, count);
    }

    fn reads(&mut self, number: u64, mut from: usize, mut count: usize) {
        let mut buffer = vec![0; PIECE];
        while count > 0 {
            let most = count.min(PIECE);
            let length = self.stream.read(&mut buffer[..most]).unwrap_or_else(|error| {
                panic!("after byte {from} of stream {number}, with {count} to come: {error}")
            });
            assert!(length > 0, "closed after byte {from} of stream {number}, with {count} to come");
            let right = stream::part(number, from as u64, length);
            assert!(buffer[..length] == right, "other bytes after byte {from} of stream {number}");
            from += length;
            count -= length;
        }
    }

    /// The other end has nothing more to say.
    pub fn sees_the_end(&mut self) {
        assert_eq!(self.stream.read(&mut [0]).unwrap(), 0, "more came than was sent");
    }

    /// Sends a FIN.
    pub fn finish(&self) {
        self.stream.shutdown(Shutdown::Write).unwrap();
    }

    /// Count and digest of all that it has sent, as the service tells them.
    pub fn digest(&self) -> String {
        format!("{} {:x}", self.sent, stream::digest(0, &stream::part(self.own(), 0, self.sent)))
    }

    /// It still is a connection in both directions.
    pub fn goes_on(&mut self) {
        self.send(PIECE / 4);
        self.takes_back();
    }
}

/// What is sent ends with this, also when what was done meanwhile fails.
struct Flowing<'a>(&'a AtomicBool);

impl Drop for Flowing<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
