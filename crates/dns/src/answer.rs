//! What is said to a question.
//!
//! Questions come from services: anybody's bytes. What is no question gets no answer, so that nobody can have two servers
//! answer each other.

use std::net::{IpAddr, Ipv4Addr};

use hickory_proto::op::{Edns, Message, MessageType, OpCode, ResponseCode};
use hickory_proto::rr::rdata::{A, AAAA, PTR};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};

/// How long an answer may be kept, seconds. A service keeps its address when it moves, but another can have its name soon.
const TTL: u32 = 5;
/// Most addresses in an answer: as many as fit without TCP.
const MOST_ADDRESSES: usize = 16;
/// The largest answer over UDP for who names no size (RFC 1035, section 2.3.4), and for who names one: what no path splits
/// (DNS Flag Day 2020).
const UDP_SIZES: (u16, u16) = (512, 1232);

/// The names that there are.
pub trait Names: Send + Sync {
    /// The addresses of the services that have a name, of those that `asker` reaches, with that they have on a network of
    /// `asker`'s; nothing where none has it. The name is in lower case.
    fn addresses(&self, asker: Ipv4Addr, name: &str) -> Option<Vec<IpAddr>>;
    /// The name of the service that has an address, if `asker` reaches it.
    fn name(&self, asker: Ipv4Addr, address: IpAddr) -> Option<String>;
}

/// How a question has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// In a datagram: a large answer has to be asked for again.
    Udp,
    /// On a connection.
    Tcp,
}

/// What becomes of a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// This is said.
    Reply(Vec<u8>),
    /// It is not about services: others are asked.
    Elsewhere,
    /// It is no question.
    Silence,
}

/// Answers a question that `asker` has sent.
#[must_use]
pub fn answer(question: &[u8], asker: Ipv4Addr, transport: Transport, names: &dyn Names) -> Answer {
    let Ok(asked) = Message::from_vec(question) else {
        return failure(question, ResponseCode::FormErr, transport);
    };
    if asked.metadata.message_type == MessageType::Response {
        return Answer::Silence;
    }
    if asked.metadata.op_code != OpCode::Query {
        return failure(question, ResponseCode::NotImp, transport);
    }
    let [query] = asked.queries.as_slice() else {
        return failure(question, ResponseCode::FormErr, transport);
    };
    if query.query_class() != DNSClass::IN {
        return Answer::Elsewhere;
    }
    let (name, wanted) = (query.name(), query.query_type());
    let Some(records) = records(name, wanted, asker, names) else { return Answer::Elsewhere };
    let mut told = reply_to(&asked, ResponseCode::NoError);
    told.insert_answers(records);
    written(&told, &asked, transport)
}

/// The answer to a question that nobody answers.
#[must_use]
pub(crate) fn failure(question: &[u8], code: ResponseCode, transport: Transport) -> Answer {
    if let Ok(asked) = Message::from_vec(question) {
        return written(&reply_to(&asked, code), &asked, transport);
    }
    match question {
        // Of a question whose rest is not understood.
        [high, low, flags, ..] if question.len() >= 12 && flags & 0x80 == 0 => {
            let told = Message::error_msg(u16::from_be_bytes([*high, *low]), OpCode::Query, code);
            told.to_vec().map_or(Answer::Silence, Answer::Reply)
        }
        _ => Answer::Silence,
    }
}

fn reply_to(asked: &Message, code: ResponseCode) -> Message {
    let mut told = Message::response(asked.metadata.id, asked.metadata.op_code);
    told.metadata.recursion_desired = asked.metadata.recursion_desired;
    told.metadata.recursion_available = true;
    told.metadata.response_code = code;
    // As it was written: some clients compare upper and lower case. One, as nobody else asks more.
    told.add_queries(asked.queries.first().cloned());
    if asked.edns.is_some() {
        let mut edns = Edns::new();
        edns.set_max_payload(UDP_SIZES.1);
        told.set_edns(edns);
    }
    told
}

fn written(told: &Message, asked: &Message, transport: Transport) -> Answer {
    let Ok(bytes) = told.to_vec() else { return Answer::Silence };
    let most = match asked.edns {
        None => UDP_SIZES.0,
        Some(_) => asked.max_payload().clamp(UDP_SIZES.0, UDP_SIZES.1),
    };
    if transport == Transport::Tcp || bytes.len() <= usize::from(most) {
        return Answer::Reply(bytes);
    }
    told.truncate().to_vec().map_or(Answer::Silence, Answer::Reply)
}

/// The records of a name of services, none where it has none of this type; nothing where it is no name of theirs.
fn records(name: &Name, wanted: RecordType, asker: Ipv4Addr, names: &dyn Names) -> Option<Vec<Record>> {
    let record = |data| Record::from_rdata(name.clone(), TTL, data);
    if let Some(address) = reversed(name) {
        let known = Name::from_ascii(names.name(asker, address)?).ok()?;
        let asks = matches!(wanted, RecordType::PTR | RecordType::ANY);
        return Some(asks.then(|| record(RData::PTR(PTR(known)))).into_iter().collect());
    }
    let text = name.to_lowercase().to_ascii();
    let mut addresses = names.addresses(asker, text.trim_end_matches('.'))?;
    // Clients take the first: each has another one.
    fastrand::shuffle(&mut addresses);
    let data = |address: &IpAddr| match (address, wanted) {
        (IpAddr::V4(address), RecordType::A | RecordType::ANY) => Some(RData::A(A(*address))),
        (IpAddr::V6(address), RecordType::AAAA | RecordType::ANY) => Some(RData::AAAA(AAAA(*address))),
        _ => None,
    };
    Some(addresses.iter().filter_map(data).take(MOST_ADDRESSES).map(record).collect())
}

/// The address that a name of `in-addr.arpa` or `ip6.arpa` stands for.
fn reversed(name: &Name) -> Option<IpAddr> {
    let network = name.parse_arpa_name().ok()?;
    (network.prefix_len() == network.max_prefix_len()).then(|| network.addr())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use hickory_proto::op::Query;
    use proptest::prelude::*;

    use super::*;

    pub(crate) const ASKER: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 9);

    /// `db` has both kinds of address, `many` more than an answer has, and nobody else has a name.
    pub(crate) struct Two;

    impl Names for Two {
        fn addresses(&self, asker: Ipv4Addr, name: &str) -> Option<Vec<IpAddr>> {
            assert_eq!(asker, ASKER);
            match name {
                "db" => Some(vec!["10.88.0.10".parse().unwrap(), "fd67::a".parse().unwrap()]),
                "many" => Some((0..100).map(|last| IpAddr::from([10, 88, 1, last])).collect()),
                _ => None,
            }
        }

        fn name(&self, _: Ipv4Addr, address: IpAddr) -> Option<String> {
            (address == "10.88.0.10".parse::<IpAddr>().unwrap()).then(|| "db".to_owned())
        }
    }

    pub(crate) fn question(name: &str, wanted: RecordType) -> Message {
        let mut asked = Message::new(7, MessageType::Query, OpCode::Query);
        asked.metadata.recursion_desired = true;
        asked.add_query(Query::query(Name::from_ascii(name).unwrap(), wanted));
        asked
    }

    fn told(asked: &Message) -> Option<Message> {
        match answer(&asked.to_vec().unwrap(), ASKER, Transport::Udp, &Two) {
            Answer::Reply(bytes) => Some(Message::from_vec(&bytes).unwrap()),
            Answer::Elsewhere => None,
            Answer::Silence => panic!("silence to {asked:?}"),
        }
    }

    fn data(told: &Message) -> Vec<String> {
        told.answers.iter().map(|record| record.data.to_string()).collect()
    }

    #[test]
    fn a_name_has_the_addresses_of_its_service_and_no_others() {
        for (name, wanted, expected) in [
            ("db", RecordType::A, vec!["10.88.0.10"]),
            ("DB.", RecordType::A, vec!["10.88.0.10"]),
            ("db", RecordType::AAAA, vec!["fd67::a"]),
            // It has the name, and no such record: not the same as no such name.
            ("db", RecordType::MX, vec![]),
            ("10.0.88.10.in-addr.arpa.", RecordType::A, vec![]),
            ("10.0.88.10.in-addr.arpa.", RecordType::PTR, vec!["db."]),
        ] {
            let told = told(&question(name, wanted)).unwrap();
            assert_eq!(data(&told), expected, "{name} {wanted}");
            assert_eq!(told.metadata.response_code, ResponseCode::NoError);
            assert_eq!((told.metadata.id, told.metadata.recursion_available), (7, true));
            let asked = told.queries[0].name().to_ascii();
            assert_eq!(asked.trim_end_matches('.'), name.trim_end_matches('.'), "in its own letters");
        }
        for (name, wanted) in [
            ("example.org", RecordType::A),
            ("db.example.org", RecordType::A),
            ("9.0.88.10.in-addr.arpa", RecordType::PTR),
            ("88.10.in-addr.arpa", RecordType::PTR),
            (".", RecordType::NS),
        ] {
            assert_eq!(told(&question(name, wanted)), None, "{name} is asked elsewhere");
        }
    }

    #[test]
    fn an_answer_fits_into_what_its_asker_takes() {
        let asked = question("many", RecordType::A);
        let plain = told(&asked).unwrap();
        assert_eq!(plain.answers.len(), MOST_ADDRESSES);
        assert!(plain.edns.is_none());
        let mut larger = asked.clone();
        larger.set_edns(Edns::new());
        assert!(told(&larger).unwrap().edns.is_some(), "who speaks EDNS is answered with it");
        // Every answer that does not fit says so, and has no part of it.
        let mut long = plain.clone();
        long.answers = vec![plain.answers[0].clone(); 200];
        let Answer::Reply(cut) = written(&long, &asked, Transport::Udp) else { panic!("silence") };
        let cut = Message::from_vec(&cut).unwrap();
        assert!(cut.metadata.truncation && cut.answers.is_empty());
        let Answer::Reply(whole) = written(&long, &asked, Transport::Tcp) else { panic!("silence") };
        assert_eq!(Message::from_vec(&whole).unwrap().answers.len(), 200);
    }

    #[test]
    fn what_is_no_question_is_not_answered_as_one() {
        let mut response = question("db", RecordType::A);
        response.metadata.message_type = MessageType::Response;
        let said = |bytes: &[u8]| answer(bytes, ASKER, Transport::Udp, &Two);
        assert_eq!(said(&response.to_vec().unwrap()), Answer::Silence);
        assert_eq!(said(&[0; 11]), Answer::Silence);
        let code = |bytes: &[u8]| match said(bytes) {
            Answer::Reply(bytes) => Message::from_vec(&bytes).unwrap().metadata.response_code,
            other => panic!("{other:?}"),
        };
        // A name that points to itself, and two questions.
        assert_eq!(code(b"\0\x07\x01\0\0\x01\0\0\0\0\0\0\xc0\x0c\0\x01\0\x01"), ResponseCode::FormErr);
        let mut two = question("db", RecordType::A);
        two.add_query(two.queries[0].clone());
        assert_eq!(code(&two.to_vec().unwrap()), ResponseCode::FormErr);
        let mut update = question("db", RecordType::A);
        update.metadata.op_code = OpCode::Status;
        assert_eq!(code(&update.to_vec().unwrap()), ResponseCode::NotImp);
        let mut garbage = response.to_vec().unwrap();
        garbage.truncate(13);
        assert_eq!(said(&garbage), Answer::Silence);
    }

    proptest! {
        #[test]
        fn no_bytes_bring_it_down(bytes in prop::collection::vec(any::<u8>(), 0..600), at in 0..30_usize, byte: u8) {
            let say = |bytes: &[u8]| for transport in [Transport::Udp, Transport::Tcp] {
                if let Answer::Reply(reply) = answer(bytes, ASKER, transport, &Two) {
                    let reply = Message::from_vec(&reply).unwrap();
                    assert_eq!(reply.metadata.message_type, MessageType::Response);
                }
            };
            say(&bytes);
            let mut almost = question("db", RecordType::A).to_vec().unwrap();
            if let Some(place) = almost.get_mut(at) {
                *place = byte;
            }
            say(&almost);
        }
    }
}
