//! The server in a network namespace of its own, with a name server of the node behind it. Needs root.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use godwit_dns::{Names, Server, Upstream, hears};
use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{Name, RData, Record, RecordType};
use nix::sched::{CloneFlags, unshare};

const GATEWAY: Ipv4Addr = Ipv4Addr::LOCALHOST;
const UPSTREAM: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const SILENT: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 3);
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);
const PATIENCE: Duration = Duration::from_secs(20);

/// `db` is known.
struct One;

impl Names for One {
    fn addresses(&self, _: Ipv4Addr, name: &str) -> Option<Vec<IpAddr>> {
        (name == "db").then(|| vec!["10.88.0.10".parse().unwrap()])
    }

    fn name(&self, _: Ipv4Addr, _: IpAddr) -> Option<String> {
        None
    }
}

/// What the node's name server says: over UDP that it is too long, as to every question about `long`.
fn reply(question: &[u8], udp: bool) -> Vec<u8> {
    let asked = Message::from_vec(question).unwrap();
    let name = asked.queries[0].name().clone();
    let mut told = Message::response(asked.metadata.id, OpCode::Query);
    told.add_queries(asked.queries);
    match name.to_ascii().as_str() {
        "long.example." if udp => told.metadata.truncation = true,
        "none.example." => told.metadata.response_code = ResponseCode::NXDomain,
        _ => {
            told.add_answer(Record::from_rdata(name, 60, RData::A(A(ELSEWHERE))));
        }
    }
    told.to_vec().unwrap()
}

/// A name server of the node, that counts the questions that it gets.
fn serve_upstream() -> Arc<AtomicUsize> {
    let (datagrams, connections) =
        (UdpSocket::bind((UPSTREAM, 53)).unwrap(), TcpListener::bind((UPSTREAM, 53)).unwrap());
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok((length, from)) = datagrams.recv_from(&mut buffer) {
            counted.fetch_add(1, Ordering::SeqCst);
            // First a reply to another question, as somebody who guesses would send it.
            let mut forged = reply(&buffer[..length], true);
            forged[0] ^= 0xff;
            datagrams.send_to(&forged, from).unwrap();
            datagrams.send_to(&reply(&buffer[..length], true), from).unwrap();
        }
    });
    thread::spawn(move || {
        for stream in connections.incoming() {
            let mut stream = stream.unwrap();
            let question = read(&mut stream).unwrap();
            write(&mut stream, &reply(&question, false));
        }
    });
    count
}

fn read(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut length = [0; 2];
    stream.read_exact(&mut length).ok()?;
    let mut message = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut message).unwrap();
    Some(message)
}

fn write(stream: &mut TcpStream, message: &[u8]) {
    let length = u16::try_from(message.len()).unwrap();
    stream.write_all(&[&length.to_be_bytes(), message].concat()).unwrap();
}

fn question(name: &str) -> Vec<u8> {
    let mut asked = Message::new(fastrand::u16(..), MessageType::Query, OpCode::Query);
    asked.add_query(Query::query(Name::from_ascii(name).unwrap(), RecordType::A));
    asked.to_vec().unwrap()
}

fn ask_udp(name: &str) -> Message {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.connect((GATEWAY, 53)).unwrap();
    let asked = question(name);
    socket.send(&asked).unwrap();
    let mut buffer = [0; 4096];
    let length = socket.recv(&mut buffer).unwrap();
    assert_eq!(buffer[..2], asked[..2]);
    Message::from_vec(&buffer[..length]).unwrap()
}

fn addresses(told: &Message) -> Vec<String> {
    told.answers.iter().map(|record| record.data.to_string()).collect()
}

/// Runs `test` in a network namespace with a server whose node has the name servers of this file.
fn with_server(resolv_conf: &str, test: impl FnOnce() + Send) {
    let directory = std::env::temp_dir().join(format!("godwit-dns-{}", fastrand::u64(..)));
    std::fs::write(&directory, resolv_conf).unwrap();
    let upstream = Upstream::new(directory.clone());
    thread::scope(|scope| {
        let ran = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
            // Its thread is in the namespace, too.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let server = runtime.block_on(async { Server::bind(GATEWAY, 53, "lo").unwrap() });
            let (end, ended) = tokio::sync::oneshot::channel::<()>();
            thread::scope(|scope| {
                scope.spawn(move || {
                    runtime.block_on(async {
                        tokio::select! {
                            () = server.serve(Arc::new(One), upstream) => {}
                            _ = ended => {}
                        }
                    });
                });
                test();
                drop(end);
            });
        });
        if let Err(panic) = ran.join() {
            std::panic::resume_unwind(panic);
        }
    });
    std::fs::remove_file(directory).unwrap();
}

#[test]
fn services_are_known_and_everything_else_is_asked_of_the_nodes_name_servers() {
    // The first one does not exist.
    with_server(&format!("nameserver {SILENT}\nnameserver {UPSTREAM}\n"), || {
        let asked = serve_upstream();
        hears(GATEWAY).unwrap();
        assert_eq!(addresses(&ask_udp("db")), ["10.88.0.10"]);
        assert_eq!(asked.load(Ordering::SeqCst), 0, "names of services are told to nobody");
        assert_eq!(addresses(&ask_udp("www.example")), [ELSEWHERE.to_string()]);
        assert_eq!(ask_udp("none.example").metadata.response_code, ResponseCode::NXDomain);
        let long = ask_udp("long.example");
        assert!(long.metadata.truncation && long.answers.is_empty());
        // Several questions on one connection.
        let mut stream = TcpStream::connect((GATEWAY, 53)).unwrap();
        for (name, expected) in [("long.example", ELSEWHERE), ("db", Ipv4Addr::new(10, 88, 0, 10))] {
            write(&mut stream, &question(name));
            let told = Message::from_vec(&read(&mut stream).unwrap()).unwrap();
            assert_eq!(addresses(&told), [expected.to_string()], "{name}");
        }
        // What is no question ends it.
        write(&mut stream, &[0; 5]);
        assert_eq!(read(&mut stream), None);
        assert!(hears(SILENT).is_err());
    });
}

#[test]
fn without_name_servers_there_are_no_other_names_and_with_dead_ones_it_is_said() {
    with_server("# none\n", || {
        assert_eq!(addresses(&ask_udp("db")), ["10.88.0.10"]);
        assert_eq!(ask_udp("www.example").metadata.response_code, ResponseCode::NXDomain);
    });
    with_server(&format!("nameserver {SILENT}\n"), || {
        assert_eq!(addresses(&ask_udp("db")), ["10.88.0.10"]);
        assert_eq!(ask_udp("www.example").metadata.response_code, ResponseCode::ServFail);
    });
}
