//! mosquitto: a stream of messages at QoS 1, messages that wait in the broker, and many subscribers.
//! Needs root.

use std::{
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use godwit_lab::{Conditions, Step, workload::Workload};
use godwit_tests::{
    Bed,
    mqtt::{MqttClient, Subscribers},
    tier, wait_for,
};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 20);
/// Messages that wait in the broker while it moves: more than the 100 that it has in flight.
const QUEUED: usize = 500;

/// Takes messages `from..to` of a topic, which must come once, in order.
fn take(client: &mut MqttClient, topic: &str, numbers: std::ops::Range<usize>) {
    for number in numbers {
        let message = client.message();
        assert_eq!((message.topic.as_str(), message.text.as_str()), (topic, number.to_string().as_str()));
        assert!(!message.again, "message {number} of {topic} came again");
        client.acknowledge(&message);
    }
}

#[test]
fn moves_deliver_each_message_once_and_in_order() {
    let bed = Bed::up("mosquitto");
    let preset = bed.build(Workload::Mosquitto);
    bed.run("a", "broker", ADDRESS, &preset, &[]);
    let client = |name: &str, clean| MqttClient::new(bed.connect(preset.at(ADDRESS)), name, clean);

    // Its session stays while it is away.
    let mut away = client("away", false);
    assert!(!away.session_present);
    away.subscribe("away");
    away.disconnect();
    // It is connected and does not acknowledge.
    let mut slow = client("slow", true);
    slow.subscribe("slow");
    let mut filler = client("filler", true);
    for number in 0..QUEUED {
        filler.publish("slow", &number.to_string());
        filler.publish("away", &number.to_string());
    }

    // A publisher and a subscriber that go on all the time.
    let mut subscriber = client("subscriber", true);
    subscriber.subscribe("stream");
    let mut publisher = client("publisher", true);
    let (enough, published) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let publishing = thread::spawn({
        let (enough, published) = (Arc::clone(&enough), Arc::clone(&published));
        move || {
            while !enough.load(Ordering::Relaxed) {
                publisher.publish("stream", &published.load(Ordering::Relaxed).to_string());
                published.fetch_add(1, Ordering::Relaxed);
            }
            publisher.publish("stream", "end");
        }
    });
    let subscribing = thread::spawn(move || {
        for number in 0.. {
            let message = subscriber.message();
            subscriber.acknowledge(&message);
            if message.text == "end" {
                return number;
            }
            assert_eq!((message.text, message.again), (number.to_string(), false));
        }
        unreachable!()
    });
    let more = |count| {
        let before = published.load(Ordering::Relaxed);
        let goes_on = || (published.load(Ordering::Relaxed) > before + count).then_some(());
        wait_for("more published messages", goes_on);
    };
    more(50);

    let each = QUEUED / tier::moves();
    let mut taken = 0;
    bed.move_to_and_fro("broker", |_, _| {
        more(50);
        // An equal part of what is queued; as many of the rest go into flight before the next move.
        take(&mut slow, "slow", taken..taken + each);
        taken += each;
        filler.publish("slow", &(QUEUED + taken / each - 1).to_string());
    });
    enough.store(true, Ordering::Relaxed);
    publishing.join().unwrap();
    assert_eq!(subscribing.join().unwrap(), published.load(Ordering::Relaxed));
    println!("{} messages in the stream", published.load(Ordering::Relaxed));
    // One came with each move.
    take(&mut slow, "slow", QUEUED..QUEUED + tier::moves());
    let mut away = client("away", false);
    assert!(away.session_present, "the broker forgot a session");
    take(&mut away, "away", 0..QUEUED);
}

#[test]
fn five_hundred_subscribers_get_each_message_once_over_a_slow_link() {
    const SUBSCRIBERS: usize = 500;
    /// Between two messages. Each is sent to all: 10,000 a second.
    const PERIOD: Duration = Duration::from_millis(50);
    /// Messages that may be on their way: as many as the broker has in flight at once.
    const AHEAD: usize = 20;
    /// Messages that all have to get before each move, so that it meets a stream.
    const BETWEEN: usize = 10;
    let bed = Bed::up("subscribers");
    let preset = bed.build(Workload::Mosquitto);
    bed.run("a", "broker", ADDRESS, &preset, &[]);
    let lte = Step { at: Duration::ZERO, conditions: Conditions::named("lte").unwrap() };
    bed.lab().set_way("a", "b", &[lte]).unwrap();
    let client = |name: &str| MqttClient::new(bed.connect(preset.at(ADDRESS)), name, true);
    let subscribed = |number: usize| {
        let mut client = client(&format!("subscriber-{number}"));
        client.subscribe("news");
        client
    };
    let subscribers = Subscribers::of((0..SUBSCRIBERS).map(subscribed).collect(), "news");
    let mut publisher = client("publisher");
    let (enough, published) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        let publishing = scope.spawn(|| {
            while !enough.load(Ordering::Relaxed) {
                let number = published.load(Ordering::Relaxed);
                if number < subscribers.all_have() + AHEAD {
                    publisher.publish("news", &number.to_string());
                    published.fetch_add(1, Ordering::Relaxed);
                }
                thread::sleep(PERIOD);
            }
        });
        let all_get = |count: usize| {
            let due = published.load(Ordering::Relaxed) + count;
            let got = || (subscribers.all_have() >= due || publishing.is_finished()).then_some(());
            wait_for("messages to all subscribers", got);
        };
        // Whatever fails, the publisher ends, so that what failed is told.
        let moves = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            all_get(BETWEEN);
            bed.move_to_and_fro("broker", |_, _| all_get(BETWEEN));
        }));
        enough.store(true, Ordering::Relaxed);
        publishing.join().unwrap();
        moves.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    let published = published.into_inner();
    wait_for("the last message", || (subscribers.all_have() == published).then_some(()));
    assert_eq!(subscribers.end(), published);
    println!("{published} messages, each to {SUBSCRIBERS} subscribers");
}
