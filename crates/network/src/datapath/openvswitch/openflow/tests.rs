//! What Open vSwitch says is understood, and what nobody would say is an error.
#![allow(clippy::unwrap_used)]
use proptest::prelude::*;

use super::*;

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<char> = hex.chars().filter(char::is_ascii_hexdigit).collect();
    let byte = |pair: &[char]| u8::from_str_radix(&pair.iter().collect::<String>(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

fn taken(bytes: &[u8]) -> Message {
    let mut received = bytes.to_vec();
    let message = Message::take(&mut received).unwrap().unwrap();
    assert!(received.is_empty());
    message
}

/// The flows of a bridge, as ovs-vswitchd 3.1.0 told them.
const FLOWS: &str = "041300b800000001000100000000000000480000000000000b626dc000640000000000000000000000000000\
    00000000000000000000000000000000000000000001000c80000004fffffffe000000000001000801000000\
    00600100000000000a3140c00064000000000000000000000000000000000005000000000000000000000000\
    000000000001000e8000060602670a58000a0000000400180000000000190010000100040000000500000000\
    0001000802000000";
/// Its ports.
const PORTS: &str = "0413009000000002000d000000000000fffffffe00000000e2e64cff29430000677730000000000000000000\
    0000000000000001000000010000084000000000000000000000000000989680000000000000000100000000\
    42b082d15d680000677774306135383030306100000000000000000100000001000008400000000000000000\
    000000000098968000000000";

#[test]
fn flows_are_read_as_open_vswitch_writes_them() {
    let (flows, more) = taken(&bytes(FLOWS)).flows().unwrap();
    assert!(!more);
    let matched = Match::default().with(Field::InPort, LOCAL.to_be_bytes());
    let instructions = Actions::default().then(Some(1));
    let entered = Flow { table: 0, priority: 100, cookie: 0, matched, instructions };
    let matched = Match::default().with(Field::EthDst, [2, 0x67, 10, 88, 0, 10]);
    let instructions = Actions::default().set(Field::Reg0, 5_u32.to_be_bytes()).then(Some(2));
    let entry = Flow { table: 1, priority: 100, cookie: 5, matched, instructions };
    assert_eq!(flows, [entered, entry]);
}

#[test]
fn ports_are_read_as_open_vswitch_writes_them() {
    let (ports, more) = taken(&bytes(PORTS)).ports().unwrap();
    let port = |number, name: &str| Port { number, name: name.to_owned() };
    assert_eq!((ports, more), (vec![port(LOCAL, "gw0"), port(1, "gwt0a58000a")], false));
}

#[test]
fn what_cannot_be_is_an_error_and_what_is_not_whole_is_waited_for() {
    let flows = bytes(FLOWS);
    for length in 0..flows.len() {
        assert_eq!(Message::take(&mut flows[..length].to_vec()), Ok(None), "{length} bytes");
    }
    assert_eq!(Message::take(&mut bytes("04 13 0007 00000001")), Err(Malformed::Length("a message")));
    assert_eq!(Message::take(&mut bytes("01 13 0008 00000001")), Err(Malformed::Version(1)));
    // A flow that is longer than the message, and one without its own length.
    let head = "04 13 0014 00000001 0001 0000 00000000";
    let short = taken(&bytes(&format!("{head} 00ff 0000"))).flows();
    assert_eq!(short, Err(Malformed::Short("a flow")));
    let none = taken(&bytes(&format!("{head} 0001 0000"))).flows();
    assert_eq!(none, Err(Malformed::Length("a flow")));
}

#[test]
fn a_hello_tells_which_versions_are_spoken() {
    let says = |hex: &str| taken(&bytes(hex)).speaks_our_version();
    assert!(says("04 00 0008 00000001"), "this version is its newest");
    assert!(!says("01 00 0008 00000001"));
    assert!(says("05 00 0010 00000001 0001 0008 00000030"), "1.3 and 1.4");
    assert!(!says("05 00 0010 00000001 0001 0008 00000020"), "1.4 only");
    assert!(says("05 00 0018 00000001 0007 0006 0000 0000 0001 0008 00000030"), "after something else");
    assert!(taken(&hello(0)).speaks_our_version());
}

proptest! {
    #[test]
    fn any_bytes_are_read_to_an_end(
        rest in proptest::collection::vec(any::<u8>(), 0..300),
        cut in 0_usize..300,
        piece in 1_usize..64,
    ) {
        let mut bytes = bytes(FLOWS);
        bytes.truncate(cut);
        bytes.extend(rest);
        read_anything(&bytes, piece);
    }
}
