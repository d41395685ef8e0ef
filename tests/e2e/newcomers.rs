//! Clients that come while a service moves: each gets its connection and its answer, whatever the moment.
//! Needs root.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, SocketAddrV4, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use godwit_tests::{
    CLIENT, MODES, PATIENCE,
    echo::{ADDRESS, Echo, FROZEN, NAME, PORT, RESTORED},
    sockets::{self, State},
    victim::Attempt,
    wait_for, wait_for_within,
};

/// Clients at once, each of which comes again and again.
const CLIENTS: usize = 16;
/// Between two connections of a client: not so many that the client's ports run out.
const THINKING: Duration = Duration::from_millis(1);

/// Connects, asks, is answered, and leaves.
fn visit(at: SocketAddr) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&at, 4 * PATIENCE)?;
    let port = stream.local_addr()?.port();
    stream.set_read_timeout(Some(PATIENCE))?;
    let answered = stream.write_all(b"?").and_then(|()| stream.read_exact(&mut [0]));
    answered.map_err(|error| io::Error::other(format!("the connection from port {port}: {error}")))
}

/// Clients that come again and again until [`Clients::were_all_answered`], or one is turned away.
struct Clients {
    start: Instant,
    over: Arc<AtomicBool>,
    visits: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Result<(), String>>>,
}

impl Clients {
    fn come(echo: &Echo) -> Self {
        let at = SocketAddr::V4(SocketAddrV4::new(ADDRESS, PORT));
        let (over, visits) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let start = Instant::now();
        let threads = (0..CLIENTS).map(|_| {
            let (over, visits, lab) = (Arc::clone(&over), Arc::clone(&visits), echo.bed.lab().clone());
            thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let came = start.elapsed();
                    let visited = lab.inside(CLIENT, || visit(at)).unwrap();
                    visited.map_err(|error| format!("{came:?} to {:?}: {error}", start.elapsed()))?;
                    visits.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(THINKING);
                }
                Ok(())
            })
        });
        let threads = threads.collect();
        Self { start, over, visits, threads }
    }

    /// Does something while they come, and waits for another of them.
    fn during(&self, what: &str, done: impl FnOnce()) {
        let (before, begun) = (self.visits.load(Ordering::Relaxed), self.start.elapsed());
        done();
        println!("{what}: {begun:?} to {:?}", self.start.elapsed());
        wait_for("clients that come", || (self.visits.load(Ordering::Relaxed) > before).then_some(()));
    }

    /// They come no more; each was answered whenever it came.
    fn were_all_answered(self) {
        self.over.store(true, Ordering::Relaxed);
        let ended = self.threads.into_iter().map(|thread| thread.join().unwrap());
        let turned_away: Vec<_> = ended.filter_map(Result::err).collect();
        assert!(turned_away.is_empty(), "{turned_away:#?}");
        println!("{} connections", self.visits.load(Ordering::Relaxed));
    }
}

/// Far clients: of every sixteen some are in the middle of it at any moment.
fn far(test: &str) -> Echo {
    Echo::up_over(test, Some("1gbit,5ms".parse().unwrap()))
}

#[test]
fn nobody_who_comes_at_whatever_moment_of_a_move_is_turned_away() {
    let mut echo = far("newcomers");
    let clients = Clients::come(&echo);
    for mode in MODES.iter().cycle().take(2 * MODES.len()) {
        clients.during(mode, || drop(echo.moves(mode)));
    }
    clients.were_all_answered();
}

#[test]
fn nobody_who_comes_while_a_move_is_given_up_is_turned_away() {
    let echo = far("given-up");
    let clients = Clients::come(&echo);
    for point in [FROZEN, RESTORED].iter().cycle().take(6) {
        clients.during(point, || {
            let begin = || Attempt::begin(&echo.bed, NAME, "a", "b", &["--mode", "precopy"]);
            let attempt = Attempt::held(&echo.points, point, begin);
            let said = echo.bed.godwit("a", &["cancel", NAME]);
            assert_eq!(said.code, 0, "{said:?}");
            echo.points.let_go(point);
            assert!(attempt.aborted().contains("it was cancelled"));
        });
    }
    clients.were_all_answered();
}

#[test]
fn who_missed_the_services_answer_begins_anew_at_the_destination() {
    let mut echo = Echo::up("begins-anew");
    let at = SocketAddr::V4(SocketAddrV4::new(ADDRESS, PORT));
    echo.deafen("tcp flags & (syn | ack) == (syn | ack)");
    let lab = echo.bed.lab().clone();
    let visitor = thread::spawn(move || lab.inside(CLIENT, || visit(at)).unwrap());
    let asks = || sockets::of_client(&echo.bed).into_iter().find(|socket| socket.peer == PORT);
    wait_for("a connection that is half made", || {
        let service = sockets::of_service(&echo.bed, "a", NAME);
        service.into_iter().find(|socket| socket.port == PORT && socket.state == State::SynReceived)
    });
    echo.points.hold(FROZEN);
    thread::scope(|scope| {
        let moving = scope.spawn(|| echo.bed.migrate_so(NAME, "a", "b", &["--mode", "precopy"]));
        echo.points.reached(FROZEN);
        echo.hears();
        let before = asks().unwrap();
        assert_eq!(before.state, State::SynSent);
        // When it asks again, the kernel of the source, which has waited as long, would answer again.
        wait_for_within(4 * PATIENCE, "another SYN, or an answer", || {
            let now = asks()?;
            (now.retransmits > before.retransmits || now.state != State::SynSent).then_some(())
        });
        echo.points.let_go(FROZEN);
        moving.join().unwrap();
    });
    echo.on = "b";
    visitor.join().unwrap().unwrap();
}
