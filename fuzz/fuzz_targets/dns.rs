//! Questions of services for names: an answer is one, and can be read.
#![no_main]

use std::net::{IpAddr, Ipv4Addr};

use godwit_dns::{Answer, Names, Transport, answer};
use libfuzzer_sys::fuzz_target;

/// Names of an even length are known.
struct Few;

impl Names for Few {
    fn addresses(&self, asker: Ipv4Addr, name: &str) -> Option<Vec<IpAddr>> {
        name.len().is_multiple_of(2).then(|| vec![asker.into(), asker.to_ipv6_mapped().into()])
    }

    fn name(&self, _: Ipv4Addr, address: IpAddr) -> Option<String> {
        address.is_ipv4().then(|| "db".to_owned())
    }
}

fuzz_target!(|input: (bool, [u8; 4], &[u8])| {
    let (udp, asker, question) = input;
    let transport = if udp { Transport::Udp } else { Transport::Tcp };
    if let Answer::Reply(reply) = answer(question, asker.into(), transport, &Few) {
        assert_eq!(reply[..2], question[..2], "it has the number of its question");
        assert!(reply[2] & 0x80 != 0, "it is no question itself");
        assert!(!udp || reply.len() <= 1232, "it fits");
        assert_eq!(answer(&reply, asker.into(), transport, &Few), Answer::Silence);
    }
});
