//! Connections in every state, and many of them: nothing is lost, repeated or reset by a move. Needs root.
//!
//! The service is `godwit bench echo`; what each end sends is known byte for byte.

use std::{
    collections::HashMap,
    fs,
    net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream, UdpSocket},
    os::fd::OwnedFd,
    process::Command,
    time::{Duration, Instant},
};

use godwit_lab::{config::CLIENT_ADDRESS, workload::EchoLoad};
use godwit_tests::{
    CLIENT, PATIENCE, TRIES,
    echo::{ADDRESS, BACKLOG, Client, Echo, NAME, PORT, WAITING},
    sockets::{self, State, between},
    wait_for,
};
use nix::sys::{
    resource::{Resource, getrlimit, setrlimit},
    socket::{setsockopt, sockopt},
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt as options};

/// There and back again twice: every mode, and each on both nodes in turn.
const MODES: [&str; 4] = ["cold", "precopy", "postcopy", "hybrid"];
/// What makes the kernel's buffers of a connection grow.
const WARM: usize = 16 << 20;

/// Waits until both ends of a connection are in these states; the service's first.
fn states(echo: &Echo, client: &Client, service: State, other: State) {
    wait_for(&format!("{service:?} at the service and {other:?} at the client"), || {
        let seen = (echo.socket(client)?.state, echo.client_socket(client)?.state);
        (seen == (service, other)).then_some(())
    });
}

#[test]
fn a_client_that_has_finished_gets_the_rest() {
    let mut echo = Echo::up("finished");
    for mode in MODES {
        let mut client = echo.connect();
        client.goes_on();
        echo.order(&format!("keep {}", client.port));
        client.finish();
        states(&echo, &client, State::CloseWait, State::FinWait2);
        // Some of it waits for the client in its own host, and some in the service's.
        let before = echo.fill(&client);
        echo.moves(mode);
        states(&echo, &client, State::CloseWait, State::FinWait2);
        client.takes(0, before);
        let after = echo.fill(&client);
        assert!(after > before, "{mode}: {before} bytes, and none more after the move");
        echo.order(&format!("finish {}", client.port));
        client.takes(before, after - before);
        client.sees_the_end();
    }
}

#[test]
fn a_service_that_has_finished_gets_the_rest() {
    let mut echo = Echo::up("finishing");
    for mode in MODES {
        let mut client = echo.connect();
        client.goes_on();
        echo.order(&format!("finish {}", client.port));
        client.sees_the_end();
        states(&echo, &client, State::FinWait2, State::CloseWait);
        echo.order(&format!("mute {}", client.port));
        client.send_what_fits();
        echo.moves(mode);
        states(&echo, &client, State::FinWait2, State::CloseWait);
        echo.order(&format!("unmute {}", client.port));
        client.send(1 << 20);
        wait_for("everything that the client has sent", || {
            (echo.order(&format!("received {}", client.port)) == client.digest()).then_some(())
        });
    }
}

/// Makes both queues of both ends full, moves, and looks at every byte; what was in the queues.
fn full_queues(echo: &mut Echo, client: &mut Client, mode: &str) -> (usize, usize) {
    echo.order(&format!("mute {}", client.port));
    let before = client.sent;
    let (filled, sockets) = echo.full_queues(client);
    let waiting = client.sent - before;
    println!("{mode}: {waiting} bytes to the service, {filled} from it: {sockets:?}");
    echo.moves(mode);
    let moved = echo.socket(client).unwrap();
    // It may have found room for some more: the kernel counts what it takes, not bytes.
    assert!(moved.state == State::Established && moved.unread >= sockets[0].unread, "{mode}: {moved:?}");
    client.takes(0, filled);
    echo.order(&format!("unmute {}", client.port));
    client.takes_back();
    client.goes_on();
    (waiting, filled)
}

#[test]
fn queues_that_are_full_in_both_directions_arrive_byte_for_byte() {
    let mut echo = Echo::up("queues");
    for mode in MODES {
        let mut client = echo.connect();
        full_queues(&mut echo, &mut client, mode);
    }
}

#[test]
fn queues_as_large_as_the_kernel_makes_them_arrive_byte_for_byte() {
    let mut echo = Echo::up("large");
    for mode in MODES {
        let mut client = echo.connect();
        client.warm_up(WARM);
        let (waiting, filled) = full_queues(&mut echo, &mut client, mode);
        assert!(waiting > 1 << 20 && filled > 1 << 20, "{mode}: {waiting} {filled}");
    }
}

#[test]
fn streams_that_flow_through_a_move_arrive_byte_for_byte() {
    let mut echo = Echo::up("streams");
    for mode in MODES {
        let mut client = echo.connect();
        client.goes_on();
        let longest = client.flows(|| drop(echo.moves(mode)));
        println!("{mode}: {} bytes, nothing came for {longest:?}", client.sent);
        // Nobody but the client has sent anything else, and nothing is left over.
        client.goes_on();
    }
}

/// Options that both ends have agreed on, as ss(8) tells them.
fn agreed(command: &mut Command, filter: [&str; 3]) -> Vec<String> {
    let output = command.args(["-tinoH"]).args(filter).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    // A scale of nothing is what a connection has that did without one, after a move.
    let words = text.split_whitespace().filter(|word| *word != "wscale:0,0");
    let words = words.map(|word| word.split(':').next().unwrap_or_default());
    let known = words.filter(|word| ["ts", "sack", "wscale"].contains(word));
    known.map(str::to_owned).collect()
}

#[test]
fn options_that_both_ends_agreed_on_stay() {
    let mut echo = Echo::up("options");
    let set = |echo: &Echo, name: &str, on: bool| {
        let path = format!("/proc/sys/net/ipv4/tcp_{name}");
        echo.bed.lab().inside(CLIENT, || fs::write(&path, if on { "1" } else { "0" }).unwrap()).unwrap();
    };
    for (timestamps, sack, scaling) in [
        (true, true, true),
        (false, true, true),
        (true, false, true),
        (false, false, true),
        (false, false, false),
    ] {
        let words = [("timestamps", timestamps), ("sack", sack), ("window_scaling", scaling)];
        for (name, on) in words {
            set(&echo, name, on);
        }
        let words = [("ts", timestamps), ("sack", sack), ("wscale", scaling)];
        let due: Vec<_> = words.into_iter().filter(|(_, on)| *on).map(|(word, _)| word).collect();
        for mode in ["cold", "precopy"] {
            let mut client = echo.connect();
            client.goes_on();
            let port = client.port.to_string();
            let look = |echo: &Echo| {
                let service: serde_json::Value = echo.bed.json(echo.on, &["inspect", NAME]);
                let mut inside = Command::new("nsenter");
                inside.arg(format!("--net=/proc/{}/ns/net", service["pid"])).arg("ss");
                let sides = [
                    agreed(&mut inside, ["dport", "=", &port]),
                    agreed(&mut echo.bed.on_client("ss"), ["sport", "=", &port]),
                ];
                assert_eq!(
                    sides,
                    [&due, &due].map(|due| due.iter().map(|&w| w.to_owned()).collect::<Vec<_>>()),
                    "{mode}"
                );
            };
            look(&echo);
            full_queues(&mut echo, &mut client, mode);
            look(&echo);
        }
    }
}

/// Seconds: a connection is idle for one before it is probed, and then has so many for an answer: longer than a move takes.
const PROBED: (u32, u32, u32) = (1, 120, 1);

#[test]
fn keepalive_that_is_near_its_end_is_answered() {
    let mut echo = Echo::up("keepalive");
    let (idle, every, count) = PROBED;
    for mode in MODES {
        // The client has sent the last probe there is, into the pause.
        let mut client = echo.connect();
        client.goes_on();
        let stream = client.stream();
        setsockopt(stream, sockopt::TcpKeepIdle, &idle).unwrap();
        setsockopt(stream, sockopt::TcpKeepInterval, &every).unwrap();
        setsockopt(stream, sockopt::TcpKeepCount, &count).unwrap();
        let probes = |echo: &Echo| echo.client_socket(&client).expect("the client's end has gone").probes;
        let probe = |echo: &Echo| {
            setsockopt(stream, sockopt::KeepAlive, &true).unwrap();
            wait_for("the last probe", || (probes(echo) == count).then_some(()));
        };
        echo.moves_while(mode, probe, |_, ()| {});
        wait_for("the answer to it", || (probes(&echo) == 0).then_some(()));
        setsockopt(stream, sockopt::KeepAlive, &false).unwrap();
        client.goes_on();

        // The service has, and its client cannot be reached from where it is.
        let mut client = echo.connect();
        client.goes_on();
        echo.order(&format!("keepalive {} {idle} {every} {count}", client.port));
        echo.bed.lab().cut(echo.on, CLIENT).unwrap();
        let service = |echo: &Echo| echo.socket(&client).expect("the service's end has gone");
        wait_for("the last probe of the service", || (service(&echo).probes == count).then_some(()));
        let from = echo.on;
        echo.moves(mode);
        wait_for("a new beginning", || (service(&echo).probes == 0).then_some(()));
        client.goes_on();
        echo.bed.lab().heal(from, CLIENT).unwrap();
    }
}

/// Asks for a connection from the client's host, without waiting for the answer.
fn ask(echo: &Echo, port: u16) -> OwnedFd {
    let ask = || {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
        let asked = rustix::net::connect(&socket, &SocketAddrV4::new(ADDRESS, port));
        assert_eq!(asked, Err(rustix::io::Errno::INPROGRESS));
        socket
    };
    echo.bed.lab().inside(CLIENT, ask).unwrap()
}

/// A connection that was asked for, as soon as it is there.
fn answered(echo: &Echo, socket: OwnedFd, port: u16) -> Client {
    let stream = TcpStream::from(socket);
    let own = stream.local_addr().unwrap().port();
    wait_for("a connection", || {
        assert_eq!(options::socket_error(&stream).unwrap(), Ok(()));
        let socket = between(&sockets::of_client(&echo.bed), own, port)?;
        (socket.state == State::Established).then_some(())
    });
    stream.set_nonblocking(false).unwrap();
    Client::of(stream)
}

#[test]
fn connections_asked_for_in_the_pause_come_about_at_the_first_attempt() {
    const AT_ONCE: usize = 5;
    // How long TCP means to wait before it asks again when the service goes on: what is answered sooner was asked before.
    const FAR: Duration = Duration::from_secs(3);
    let mut echo = Echo::up("asked");
    for mode in MODES {
        let mut tries = 1..TRIES;
        loop {
            let (elapsed, counted) = echo.moves_while(
                mode,
                |echo| {
                    let asked: Vec<_> = (0..AT_ONCE).map(|_| ask(echo, PORT)).collect();
                    wait_for("attempts that are far away", || {
                        let sockets = sockets::of_client(&echo.bed);
                        let waiting = sockets.iter().filter(|socket| socket.state == State::SynSent);
                        (waiting.filter(|socket| socket.timer > FAR).count() == AT_ONCE).then_some(())
                    });
                    (Instant::now(), echo.bed.lab().tcp_counters(CLIENT).unwrap(), asked)
                },
                |echo, (begun, before, asked)| {
                    let clients: Vec<_> =
                        asked.into_iter().map(|socket| answered(echo, socket, PORT)).collect();
                    let counted = echo.bed.lab().tcp_counters(CLIENT).unwrap().since(&before);
                    let elapsed = begun.elapsed();
                    for mut client in clients {
                        client.goes_on();
                    }
                    (elapsed, counted)
                },
            );
            if elapsed < FAR {
                assert_eq!((counted.openings, counted.timeouts), (0, 0), "{mode}: {counted:?}");
                break;
            }
            assert!(tries.next().is_some(), "{mode}: {elapsed:?} after the pause at the latest try");
        }
    }
}

#[test]
fn datagrams_of_the_pause_are_answered_each_once() {
    const COUNT: u32 = 100;
    let mut echo = Echo::up("datagrams");
    let socket =
        echo.bed.lab().inside(CLIENT, || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))).unwrap().unwrap();
    socket.connect((ADDRESS, PORT)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let take = |what: &str| {
        let mut answer = [0; 4];
        assert_eq!(socket.recv(&mut answer).unwrap_or_else(|error| panic!("{what}: {error}")), 4, "{what}");
        u32::from_be_bytes(answer)
    };
    for mode in MODES {
        socket.send(&u32::MAX.to_be_bytes()).unwrap();
        assert_eq!(take(mode), u32::MAX, "{mode}: before the move");
        let send = |_: &Echo| {
            for number in 0..COUNT {
                socket.send(&number.to_be_bytes()).unwrap();
            }
        };
        echo.moves_while(mode, send, |_, ()| {});
        // A node that answers a client for the first time asks for its link-layer address before, and Linux
        // lets one datagram overtake those that wait for that.
        let mut answers: Vec<_> = (0..COUNT).map(|_| take(mode)).collect();
        answers.sort_unstable();
        assert_eq!(answers, (0..COUNT).collect::<Vec<_>>(), "{mode}");
        // None comes a second time.
        socket.send(&COUNT.to_be_bytes()).unwrap();
        assert_eq!(take(mode), COUNT, "{mode}: after the move");
    }
}

#[test]
fn datagrams_that_nobody_has_read_move_along() {
    const COUNT: u32 = 100;
    let mut echo = Echo::up("unread");
    let socket =
        echo.bed.lab().inside(CLIENT, || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))).unwrap().unwrap();
    socket.connect((ADDRESS, PORT)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    for mode in MODES {
        assert_eq!(echo.order("leave"), "ok");
        for number in 0..COUNT {
            socket.send(&number.to_be_bytes()).unwrap();
        }
        let waiting = |echo: &Echo| sockets::datagrams_of_service(&echo.bed, echo.on, NAME, PORT);
        wait_for("datagrams in the service's queue", || (waiting(&echo) > 0).then_some(()));
        let report = echo.moves(mode);
        if !report.criu.contains("+tcp-inline") {
            eprintln!("skipped: {} is a CRIU without godwit's patches, and loses datagrams", report.criu);
            return;
        }
        assert!(waiting(&echo) > 0, "{mode}: they are lost");
        assert_eq!(echo.order("take"), "ok");
        let mut answers: Vec<_> = (0..COUNT)
            .map(|_| {
                let mut answer = [0; 5];
                let length = socket.recv(&mut answer).unwrap_or_else(|error| panic!("{mode}: {error}"));
                assert_eq!(length, 4, "{mode}");
                u32::from_be_bytes(answer[..4].try_into().unwrap())
            })
            .collect();
        // Answers may overtake each other: see above.
        answers.sort_unstable();
        assert_eq!(answers, (0..COUNT).collect::<Vec<_>>(), "{mode}");
    }
}

#[test]
fn connections_that_the_service_opened_go_on() {
    const SERVER: u16 = 9000;
    const COUNT: usize = 3;
    let mut echo = Echo::up("outward");
    let listen = || TcpListener::bind((Ipv4Addr::UNSPECIFIED, SERVER)).unwrap();
    let listener = echo.bed.lab().inside(CLIENT, listen).unwrap();
    echo.order(&format!("connect {CLIENT_ADDRESS}:{SERVER} {COUNT}"));
    let mut clients: Vec<_> = (0..COUNT).map(|_| Client::of(listener.accept().unwrap().0)).collect();
    for mode in MODES {
        for client in &mut clients {
            client.goes_on();
            // The service gives it back until nobody takes it: it waits in all queues of both ends.
            client.send_what_fits();
        }
        echo.moves(mode);
        for client in &mut clients {
            client.takes_back();
            client.goes_on();
        }
    }
    // One that is opened after a move is like the others.
    echo.order(&format!("connect {CLIENT_ADDRESS}:{SERVER} 1"));
    Client::of(listener.accept().unwrap().0).goes_on();
}

#[test]
fn connections_that_nobody_has_accepted_keep_the_service_where_it_is() {
    let mut echo = Echo::up("backlog");
    // The kernel takes one more than it was told, and lets others ask again and again.
    let mut clients: Vec<_> =
        (0..=BACKLOG).map(|_| ask(&echo, WAITING)).map(|socket| answered(&echo, socket, WAITING)).collect();
    let asking = ask(&echo, WAITING);
    for client in &mut clients {
        client.send(100_000);
    }
    let full = sockets::of_service(&echo.bed, "a", NAME);
    let listener =
        full.iter().find(|socket| (socket.port, socket.state) == (WAITING, State::Listen)).unwrap();
    assert_eq!(listener.unread, clients.len() as u64);
    for mode in MODES {
        let said = echo.bed.godwit("a", &["--json", "migrate", NAME, "--to", "b", "--mode", mode]);
        let report = said.report();
        assert_eq!((said.code, report.outcome.as_str()), (1, "aborted"), "{mode}: {report:?}");
        println!("{mode}: {}", report.reason);
        assert!(report.reason.contains("accept"), "{mode}: {}", report.reason);
        // Who comes new is let in again.
        echo.connect().goes_on();
    }
    assert_eq!(echo.order("accept"), clients.len().to_string());
    for client in &mut clients {
        client.takes_back();
        client.goes_on();
    }
    // Now there is room for it.
    let mut client = answered(&echo, asking, WAITING);
    wait_for("one more to accept", || (echo.order("accept") == "1").then_some(()));
    clients.push({
        client.goes_on();
        client
    });
    echo.moves("precopy");
    for client in &mut clients {
        client.goes_on();
    }
}

#[test]
fn what_comes_from_the_destination_is_never_older_than_what_came_from_the_source() {
    let mut echo = Echo::up("clocks");
    let service = SocketAddrV4::new(ADDRESS, PORT);
    let load = EchoLoad::start(echo.bed.lab(), CLIENT, service, 100, 1000).unwrap();
    for mode in MODES {
        let before = echo.bed.lab().tcp_counters(CLIENT).unwrap();
        load.all().unwrap();
        echo.moves(mode);
        load.all().unwrap();
        echo.connect().goes_on();
        let counted = echo.bed.lab().tcp_counters(CLIENT).unwrap().since(&before);
        assert_eq!((counted.outdated, counted.resets), (0, 0), "{mode}: {counted:?}");
    }
    let seen = load.stop().unwrap();
    assert!(seen.is_clean() && seen.sent == seen.answered, "{seen:?}");
}

#[test]
fn ten_thousand_connections_move_and_none_is_lost() {
    const CONNECTIONS: u32 = 10_000;
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    assert!(
        most > u64::from(CONNECTIONS) + 1000,
        "a process may have {most} open files here, which is too few for this test"
    );
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
    let mut echo = Echo::up("thousands");
    let load =
        EchoLoad::start(echo.bed.lab(), CLIENT, SocketAddrV4::new(ADDRESS, PORT), CONNECTIONS, 1000).unwrap();
    wait_for("all connections at the service", || {
        (echo.order("count") == CONNECTIONS.to_string()).then_some(())
    });
    let mut sent = HashMap::new();
    for mode in ["precopy", "cold"] {
        // A request over each of them is under way or just answered, and so is one after the move.
        load.all().unwrap();
        let report = echo.moves(mode);
        load.all().unwrap();
        println!("{mode}: {report:?}");
        sent.insert(mode, report.dump_bytes);
        assert_eq!(echo.order("count"), CONNECTIONS.to_string(), "{mode}");
    }
    let seen = load.stop().unwrap();
    println!("{seen:?}; bytes sent while frozen: {sent:?}");
    assert!(seen.is_clean() && seen.sent == seen.answered, "{seen:?}");
    assert!(seen.answered >= 4 * u64::from(CONNECTIONS), "{seen:?}");
}

/// Packets that a firewall of this node has dropped since it was put there: those that the kernel takes for invalid ones.
fn dropped_as_invalid(echo: &Echo, node: &str) -> u64 {
    let mut list = echo.bed.lab().command(node, "nft").unwrap();
    let listed = list.args(["-j", "list", "counter", "inet", "strict", "invalid"]).output().unwrap();
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let counters = listed["nftables"].as_array().unwrap().iter();
    counters.filter_map(|of| of["counter"]["packets"].as_u64()).next().unwrap()
}

#[test]
fn a_firewall_drops_nothing_of_a_connection_that_comes_back_to_its_node() {
    let mut echo = Echo::up("strict");
    // As ufw, firewalld and Podman's netavark have it.
    let rules = "add table inet strict; add counter inet strict invalid; \
                 add chain inet strict forward { type filter hook forward priority 0; }; \
                 add rule inet strict forward ct state invalid counter name invalid drop";
    for node in ["a", "b"] {
        let mut nft = echo.bed.lab().command(node, "nft").unwrap();
        assert!(nft.arg(rules).status().unwrap().success());
    }
    // And nothing that a service begins.
    let further =
        format!("add rule inet strict forward ip saddr {ADDRESS} ct state new counter name invalid drop");
    let mut nft = echo.bed.lab().command("a", "nft").unwrap();
    assert!(nft.arg(further).status().unwrap().success());
    let mut client = echo.connect();
    client.goes_on();
    let mut sent = 0;
    for mode in MODES.iter().chain(&MODES) {
        echo.moves(mode);
        // A firewall that has not followed the connection takes its packets for invalid ones.
        let before = dropped_as_invalid(&echo, echo.on);
        if echo.on == "a" {
            // The service is the first to send.
            let all = echo.fill(&client);
            client.takes(sent, all - sent);
            sent = all;
        }
        client.goes_on();
        assert_eq!(dropped_as_invalid(&echo, echo.on), before, "{mode} to {}", echo.on);
    }
}
