//! What was not acknowledged when a service was frozen is sent again as soon as it goes on, and not when a
//! timer expires that ran on in the pause; and connections of a service to itself stand still with it. Needs root.
//!
//! The client is deaf for a while (a packet filter), so that answers to it are in doubt at the freeze. The
//! pause is so long that TCP's next attempt is seconds away, far longer than a busy machine takes for the rest.

use std::{
    process::Command,
    thread,
    time::{Duration, Instant},
};

use godwit_tests::{
    echo::{Client, Echo, NAME, RESTORED},
    sockets::State,
    victim::Attempt,
    wait_for,
};

const MODES: [&str; 4] = ["cold", "precopy", "postcopy", "hybrid"];
/// Restored sockets try again 1 s and 3 s after the restore, and then 7 s after it (RFC 6298).
const PAUSE: Duration = Duration::from_millis(3300);
/// How long TCP must still mean to wait when the service goes on, and the longest that it then takes in fact.
const FAR: Duration = Duration::from_secs(3);
const SOON: Duration = Duration::from_millis(1500);
/// Bytes of a request.
const LITTLE: usize = 100;

/// Retransmission time-outs in the service's namespace on a node, of which nobody need say that it runs there.
fn timeouts(echo: &Echo, node: &str) -> u64 {
    let run = echo.bed.lab().socket(node).unwrap().parent().unwrap().to_owned();
    let namespace = format!("--net={}", run.join("netns").join(NAME).display());
    let output = Command::new("nsenter").args([&namespace, "cat", "/proc/net/netstat"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut rows = text.lines().filter(|line| line.starts_with("TcpExt:")).map(str::split_whitespace);
    let (names, mut values) = (rows.next().unwrap(), rows.next().unwrap());
    values.nth(names.into_iter().position(|name| name == "TCPTimeouts").unwrap()).unwrap().parse().unwrap()
}

/// Connections with answers that the client has not heard: of the first more than may be sent without an
/// acknowledgement; of the last the service has sent its FIN, too.
struct InDoubt {
    clients: Vec<Client>,
    /// Bytes of the first.
    filled: usize,
    /// One without a doubt, which tells when the service goes on.
    bell: Client,
}

fn in_doubt(echo: &mut Echo) -> InDoubt {
    let mut clients: Vec<_> = (0..8).map(|_| echo.connect()).collect();
    let mut bell = echo.connect();
    bell.goes_on();
    for client in &mut clients {
        client.goes_on();
        echo.order(&format!("keep {}", client.port));
    }
    echo.deafen("");
    for client in &mut clients[1..] {
        client.send(LITTLE);
    }
    let filled = echo.fill(&clients[0]);
    for client in &clients {
        wait_for("an answer that is in doubt", || (echo.socket(client)?.unsent > 0).then_some(()));
    }
    let last = clients.last().unwrap().port;
    echo.order(&format!("finish {last}"));
    InDoubt { clients, filled, bell }
}

impl InDoubt {
    /// Requests of the pause, of some: what these acknowledge again helps TCP to see what is lost.
    fn ask(&mut self) {
        self.bell.send(LITTLE);
        for client in self.clients.iter_mut().step_by(3) {
            client.send(LITTLE);
        }
    }

    /// All that the clients wait for comes soon after the service goes on, byte for byte, and not because a
    /// timer has expired. A busy machine may take its time.
    fn are_answered(mut self, echo: &Echo, node: &str, what: &str) {
        self.bell.takes_back();
        let timeouts = self::timeouts(echo, node);
        let begun = Instant::now();
        let last = self.clients.len() - 1;
        for (number, client) in self.clients.iter_mut().enumerate() {
            if number == 0 {
                client.takes(0, self.filled);
            }
            client.takes_back();
            if number == last {
                client.sees_the_end();
            }
            let (took, more) = (begun.elapsed(), self::timeouts(echo, node) - timeouts);
            assert!(
                took < SOON || more == 0,
                "{what}: connection {number} waited {took:?} after the pause, for {more} time-outs"
            );
        }
        println!("{what}: answered {:?} after the pause", begun.elapsed());
    }
}

fn move_in_doubt(echo: &mut Echo, mode: &str) {
    let mut doubts = in_doubt(echo);
    let asked = |echo: &Echo| {
        echo.hears();
        doubts.ask();
        thread::sleep(PAUSE);
        doubts
    };
    echo.moves_while(mode, asked, |echo, doubts| doubts.are_answered(echo, echo.other(), mode));
}

#[test]
fn answers_in_doubt_are_sent_when_the_service_goes_on() {
    let mut echo = Echo::up("doubt");
    for mode in MODES {
        move_in_doubt(&mut echo, mode);
    }
}

#[test]
fn a_small_write_behind_another_does_not_wait_for_a_timer() {
    let mut echo = Echo::up_as("nagle", None, &["--halves"]);
    for mode in ["precopy", "cold"] {
        move_in_doubt(&mut echo, mode);
    }
}

#[test]
fn answers_in_doubt_are_sent_when_the_service_stays() {
    let mut echo = Echo::up("stays");
    let mut doubts = in_doubt(&mut echo);
    let begin = || Attempt::begin(&echo.bed, NAME, "a", "b", &["--mode", "precopy"]);
    let attempt = Attempt::held(&echo.points, RESTORED, begin);
    echo.hears();
    doubts.ask();
    let clients = &doubts.clients;
    wait_for("attempts that are far away", || {
        clients.iter().all(|client| echo.socket(client).unwrap().timer > FAR).then_some(())
    });
    assert_eq!(echo.socket(&clients[0]).unwrap().state, State::Established);
    let said = echo.bed.godwit("a", &["cancel", NAME]);
    assert_eq!(said.code, 0, "{said:?}");
    doubts.are_answered(&echo, "a", "aborted");
    assert!(attempt.aborted().contains("it was cancelled"));
    echo.points.let_go(RESTORED);
}

#[test]
fn connections_of_a_service_to_itself_move_with_full_queues() {
    let mut echo = Echo::up("ring");
    for round in 0..2 {
        for mode in MODES {
            let filled: u64 = echo.order("ring 1").parse().unwrap();
            echo.moves(mode);
            let read: u64 = echo.order("unring").parse().unwrap();
            println!("round {round}, {mode}: {filled} bytes in the queues, {read} read");
            assert!(filled > 1 << 20 && read > filled, "{mode}: {filled} {read}");
        }
    }
    // Nothing of what held them is left in the service's namespace.
    let service: serde_json::Value = echo.bed.json(echo.on, &["inspect", NAME]);
    wait_for("an empty packet filter", || {
        let net = format!("--net=/proc/{}/ns/net", service["pid"]);
        let tables = Command::new("nsenter").args([&net, "nft", "list", "tables"]).output();
        tables.unwrap().stdout.is_empty().then_some(())
    });
}
