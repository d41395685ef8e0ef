//! The links of a lab have the rate and the delay they were given. Needs root.
#![allow(clippy::unwrap_used)]

use std::{
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use godwit_lab::{Conditions, Lab, LabConfig, Step, conditions};

/// Measurements disturb each other: one at a time.
static MACHINE: Mutex<()> = Mutex::new(());

struct Guard {
    lab: Lab,
    _machine: MutexGuard<'static, ()>,
}

impl Guard {
    fn up(name: &str, link: Option<&str>) -> Self {
        let machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut config = LabConfig::new(name, ["a", "b"]);
        config.daemons = false;
        config.link = link.map(|link| link.parse().unwrap());
        Self { lab: Lab::up(&config).unwrap(), _machine: machine }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        Lab::down(self.lab.name()).unwrap();
    }
}

/// Round trips of small UDP packets, shortest first.
fn round_trips(lab: &Lab, from: &str, to: &str, count: usize) -> Vec<Duration> {
    let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    let server = lab.inside(to, || UdpSocket::bind(any).unwrap()).unwrap();
    let target = SocketAddr::from((lab.address(to).unwrap(), server.local_addr().unwrap().port()));
    let client = lab.inside(from, || UdpSocket::bind(any).unwrap()).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    server.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut trips = thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = [0; 64];
            for _ in 0..=count {
                let (length, from) = server.recv_from(&mut buffer).unwrap();
                server.send_to(&buffer[..length], from).unwrap();
            }
        });
        let trip = || {
            let begun = Instant::now();
            client.send_to(b"ping", target).unwrap();
            client.recv(&mut [0; 64]).unwrap();
            begun.elapsed()
        };
        // The first one waits for ARP.
        trip();
        (0..count).map(|_| trip()).collect::<Vec<_>>()
    });
    trips.sort();
    trips
}

/// Bits per second of one TCP connection, measured at the receiver from the first byte on.
fn tcp_rate(lab: &Lab, from: &str, to: &str, address: Ipv4Addr, bytes: usize) -> f64 {
    let listener = lab.inside(to, || TcpListener::bind((address, 0)).unwrap()).unwrap();
    let target = listener.local_addr().unwrap();
    let sender = lab.inside(from, || TcpStream::connect(target).unwrap()).unwrap();
    let mut receiver = listener.accept().unwrap().0;
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut sender = sender;
            let block: Vec<u8> = (0..=255).cycle().take(1 << 17).collect();
            let mut left = bytes;
            while left > 0 {
                let length = left.min(block.len());
                sender.write_all(&block[..length]).unwrap();
                left -= length;
            }
        });
        let pattern: Vec<u8> = (0..=255).cycle().take((1 << 17) + 256).collect();
        let mut buffer = vec![0; 1 << 17];
        let mut begun = None;
        let mut received = 0;
        loop {
            let length = receiver.read(&mut buffer).unwrap();
            if length == 0 {
                break;
            }
            // Damage and disorder would show.
            assert!(buffer[..length] == pattern[received % 256..][..length]);
            received += length;
            begun.get_or_insert((Instant::now(), received));
        }
        assert_eq!(received, bytes);
        let (begun, first) = begun.unwrap();
        #[allow(clippy::cast_precision_loss)]
        let bits = ((received - first) * 8) as f64;
        bits / begun.elapsed().as_secs_f64()
    })
}

/// Others use this machine as well, and who waits for the processor measures that: so it is right once in ten times.
fn sooner_or_later(mut attempt: impl FnMut() -> Result<(), String>) {
    let failed: Vec<String> = (0..10).map_while(|_| attempt().err()).collect();
    assert!(failed.len() < 10, "{failed:#?}");
}

fn assert_rate(asked: f64, measure: impl Fn() -> f64) {
    assert_rate_of(asked, 0.7 * asked, measure);
}

/// The same where the machine itself may be slower than what was asked for.
fn assert_rate_of(asked: f64, least: f64, measure: impl Fn() -> f64) {
    sooner_or_later(|| {
        let rate = measure();
        println!("rate {:.1} Mbit/s of {:.1}", rate / 1e6, asked / 1e6);
        // Headers and framing take 6 % of what is on the wire; the first window comes at once.
        let is_right = rate > least && rate < 1.1 * asked;
        is_right.then_some(()).ok_or_else(|| format!("{rate} of {asked}"))
    });
}

fn assert_delay(one_way: Duration, slack: Duration, measure: impl Fn() -> Vec<Duration>) {
    sooner_or_later(|| {
        let trips = measure();
        println!("round trips {:?} … {:?} … {:?}", trips[0], trips[trips.len() / 2], trips[trips.len() - 1]);
        // Nothing makes a link faster than it was asked to be.
        assert!(trips[0] >= 2 * one_way, "{:?}", trips[0]);
        let is_soon = trips[0] < 2 * one_way + slack;
        is_soon.then_some(()).ok_or_else(|| format!("{:?}", trips[0]))
    });
}

/// Processor time that the link program has used.
fn processor_time(lab: &Lab) -> Duration {
    let pid = Lab::status(lab.name()).unwrap().link_program.unwrap();
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat[stat.rfind(')').unwrap() + 2..].split(' ').collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

#[test]
fn a_gigabit_link_carries_a_gigabit_with_its_delay() {
    let guard = Guard::up("link-gigabit", Some("1gbit,1ms"));
    let lab = &guard.lab;
    assert_delay(Duration::from_millis(1), Duration::from_millis(1), || round_trips(lab, "a", "b", 200));
    // How late frames leave, on the average of these.
    sooner_or_later(|| {
        let of = |host: &str| {
            let figures = lab.figures().unwrap();
            figures.into_iter().find(|port| port.host == host).unwrap().counters
        };
        let before = ["a", "b"].map(of);
        round_trips(lab, "a", "b", 50);
        for (host, before) in ["a", "b"].into_iter().zip(before) {
            let now = of(host);
            let late = (now.late_total_ns - before.late_total_ns) / (now.frames_out - before.frames_out);
            println!("{host} late {late} ns, at most {} ns", now.late_longest_ns);
            if late >= 1_000_000 {
                return Err(format!("{host}: {late} ns"));
            }
        }
        Ok(())
    });
    // As fast as this machine carries frames without any shaping, if that is slower.
    let address = lab.address("b").unwrap();
    let shaped = Lab::status(lab.name()).unwrap().link;
    lab.set_link(None).unwrap();
    let open = tcp_rate(lab, "a", "b", address, 120 << 20);
    lab.set_link(shaped).unwrap();
    let before = processor_time(lab);
    assert_rate_of(1e9, 0.7 * open.min(1e9), || tcp_rate(lab, "a", "b", address, 120 << 20));
    println!("processor time {:?}", processor_time(lab) - before);
    let figures = lab.figures().unwrap();
    let from = figures.iter().find(|port| port.host == "a").unwrap().counters;
    assert!(from.bytes_in > 120 << 20 && from.dropped_cut == 0, "{from:?}");
    println!("{figures:?}");
}

#[test]
fn a_slow_and_long_link_is_slow_and_long() {
    let guard = Guard::up("link-slow", Some("20mbit,25ms"));
    let lab = &guard.lab;
    assert_delay(Duration::from_millis(25), Duration::from_millis(5), || round_trips(lab, "client", "b", 20));
    let address = lab.address("b").unwrap();
    assert_rate(20e6, || tcp_rate(lab, "client", "b", address, 3 << 20));
}

#[test]
fn a_link_changes_while_it_is_used() {
    let guard = Guard::up("link-changes", Some("1gbit,10ms"));
    let lab = &guard.lab;
    assert_delay(Duration::from_millis(10), Duration::from_millis(5), || round_trips(lab, "a", "b", 10));
    let link = "50mbit,2ms".parse().unwrap();
    lab.set_link(Some(link)).unwrap();
    assert_eq!(Lab::status(lab.name()).unwrap().link, Some(link));
    assert_delay(Duration::from_millis(2), Duration::from_millis(2), || round_trips(lab, "a", "b", 10));
    let address = lab.address("b").unwrap();
    assert_rate(50e6, || tcp_rate(lab, "a", "b", address, 5 << 20));
    lab.set_link(None).unwrap();
    assert_delay(Duration::ZERO, Duration::from_millis(2), || round_trips(lab, "a", "b", 10));
}

#[test]
fn an_unshaped_link_is_fast_and_idles_without_work() {
    let guard = Guard::up("link-open", None);
    let lab = &guard.lab;
    assert_delay(Duration::ZERO, Duration::from_millis(1), || round_trips(lab, "a", "b", 200));
    sooner_or_later(|| {
        let rate = tcp_rate(lab, "a", "b", lab.address("b").unwrap(), 1 << 30);
        println!("rate {:.1} Mbit/s", rate / 1e6);
        // More than any link that is shaped in these tests but the gigabit.
        (rate > 200e6).then_some(()).ok_or_else(|| format!("{rate}"))
    });
    let before = processor_time(lab);
    thread::sleep(Duration::from_millis(500));
    assert!(processor_time(lab) - before <= Duration::from_millis(20));
}

#[test]
fn the_way_between_two_hosts_can_be_of_its_own_and_the_others_stay() {
    let guard = Guard::up("link-way", Some("1gbit,1ms"));
    let lab = &guard.lab;
    let conditions =
        Conditions { rate: Some(20_000_000), delay: Duration::from_millis(25), ..Conditions::default() };
    lab.set_way("a", "b", &[Step { at: Duration::ZERO, conditions }]).unwrap();
    let [way] = &lab.ways().unwrap()[..] else { panic!("there is one") };
    assert_eq!((&way.between, way.conditions), (&("a".into(), "b".into()), conditions));
    assert_delay(Duration::from_millis(25), Duration::from_millis(5), || round_trips(lab, "b", "a", 20));
    let address = lab.address("b").unwrap();
    assert_rate(20e6, || tcp_rate(lab, "a", "b", address, 3 << 20));
    assert_delay(Duration::from_millis(1), Duration::from_millis(2), || round_trips(lab, "client", "b", 20));
    lab.set_way("b", "a", &[]).unwrap();
    assert_eq!(lab.ways().unwrap(), []);
    assert_delay(Duration::from_millis(1), Duration::from_millis(2), || round_trips(lab, "a", "b", 20));
    let error = lab.set_way("a", "c", &[]).unwrap_err().to_string();
    assert!(error.contains("a and c are not two hosts"), "{error}");
}

#[test]
fn frames_that_are_lost_are_counted_and_tcp_gets_through() {
    let guard = Guard::up("link-lossy", None);
    let lab = &guard.lab;
    let (delay, jitter) = (Duration::from_millis(2), Duration::from_millis(1));
    let lossy = Conditions { rate: None, delay, jitter, loss: 0.02 };
    lab.set_way("a", "b", &[Step { at: Duration::ZERO, conditions: lossy }]).unwrap();
    // Every byte is checked; a lost large frame would be forty segments.
    tcp_rate(lab, "a", "b", lab.address("b").unwrap(), 2 << 20);
    let figures = lab.figures().unwrap();
    let from = figures.iter().find(|port| port.host == "a").unwrap().counters;
    // 1,450 segments and more; each is a frame of its own.
    assert!(from.frames_in >= 1450 && from.dropped_lost > 0, "{from:?}");
    assert!((5..200).contains(&from.dropped_lost), "{from:?}");
}

#[test]
fn a_way_follows_its_trace() {
    let guard = Guard::up("link-trace", None);
    let lab = &guard.lab;
    // More lines than a request holds: the last of them is what stays.
    let mut text: String = (0..500).map(|n| format!("{n}us 1gbit 1ms 0%\n")).collect();
    text.push_str("1ms 1gbit 20ms 0%\n");
    lab.set_way("a", "client", &conditions::trace(&text).unwrap()).unwrap();
    let delay = || lab.ways().unwrap()[0].conditions.delay;
    let begun = Instant::now();
    while delay() != Duration::from_millis(20) {
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", delay());
        thread::yield_now();
    }
    assert_delay(Duration::from_millis(20), Duration::from_millis(5), || round_trips(lab, "a", "client", 5));
}

/// The overlay's frames are UDP with frames inside: they pass whole, at the link's rate.
#[test]
fn a_tunnel_between_nodes_works_at_the_rate_of_the_link() {
    let guard = Guard::up("link-tunnel", Some("200mbit,1ms"));
    let lab = &guard.lab;
    for (host, other, inner) in [("a", "b", "172.16.0.1/24"), ("b", "a", "172.16.0.2/24")] {
        let (own, remote) = (lab.address(host).unwrap(), lab.address(other).unwrap());
        let script = format!(
            "ip link add vx0 type vxlan id 88 dstport 4789 local {own} remote {remote} dev uplink0 &&
             ip address add {inner} dev vx0 && ip link set vx0 up"
        );
        let status = lab.command(host, "sh").unwrap().args(["-c", &script]).status().unwrap();
        assert!(status.success());
    }
    let inner = Ipv4Addr::new(172, 16, 0, 2);
    assert_rate(200e6, || tcp_rate(lab, "a", "b", inner, 25 << 20));
}
