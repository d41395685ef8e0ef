//! How exact the links of a lab are: what was asked for beside what datagrams meet.
//!
//! Delay and rate are taken from the kernel's time stamps at the receiver, so that only the sender's
//! system call counts beside the link. Both ends have the same clock.

use std::{
    io::IoSliceMut,
    net::{SocketAddr, UdpSocket},
    os::fd::AsRawFd,
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::{
        socket::{
            ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt,
            sockopt::{RcvBufForce, ReceiveTimestampns, UdpGsoSegment},
        },
        time::TimeSpec,
    },
    time::{ClockId, clock_gettime},
};
use serde::Serialize;

use crate::{
    conditions::{Conditions, Step},
    config::{LabConfig, Link},
    error::{Context, LabError},
    handle::Lab,
    switch::frame_on_wire,
};

/// Datagrams for the delay, and the pause between them.
const PROBES: u32 = 400;
const PAUSE: Duration = Duration::from_millis(5);
/// Bytes of such a datagram.
const SMALL: usize = 64;
/// Bytes of a datagram for the rate, and how long they are sent.
const LARGE: usize = 1400;
const FLOOD: Duration = Duration::from_secs(2);
/// Datagrams in a system call.
const BATCH: usize = 40;
/// The sender is so much faster than the link.
const PRESS: f64 = 1.05;
/// Headers of IPv4 and UDP.
const HEADERS: usize = 28;
/// After the last datagram was sent, so long beyond the delay is waited for one.
const QUIET: Duration = Duration::from_millis(300);
/// Receive buffer, bytes.
const BUFFER: usize = 32 << 20;

/// The greatest errors that are allowed.
const DELAY_ERROR: Duration = Duration::from_micros(200);
const DELAY_SHARE: f64 = 0.01;
const RATE_SHARE: f64 = 0.02;
/// Of a loss by chance, in standard deviations.
const LOSS_SIGMA: f64 = 4.0;

/// One link, as it was asked for and as it is.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// What was asked for.
    pub link: String,
    /// The same, and what it was.
    pub asked: Conditions,
    /// The median of the one-way delay, milliseconds, with what a frame of 130 bytes takes on the wire.
    pub delay_ms: f64,
    /// By how much that differs from what was asked for.
    pub delay_error_ms: f64,
    /// 99 of 100 frames took no longer, milliseconds.
    pub delay_p99_ms: f64,
    /// Bits a second on the wire; none where no rate was asked for.
    pub rate: Option<f64>,
    /// By which share that differs.
    pub rate_error: Option<f64>,
    /// Share of the frames that were lost.
    pub loss: f64,
    /// Whether all errors are within their bounds.
    pub holds: bool,
}

/// Measures links of some kinds in a lab of its own of this name.
///
/// # Errors
/// The lab cannot be brought up, or no datagram arrives.
pub fn run(name: &str, mut seen: impl FnMut(&Measured)) -> Result<(), LabError> {
    if Lab::list().iter().any(|lab| lab == name) {
        Lab::down(name)?;
    }
    let mut config = LabConfig::new(name, ["a", "b"]);
    config.daemons = false;
    let lab = Lab::up(&config)?;
    let outcome = cases().into_iter().try_for_each(|(own, conditions)| {
        seen(&measure(&lab, own, conditions)?);
        Ok(())
    });
    let down = Lab::down(name);
    // Why it failed says more than that the lab could not be taken down after it.
    outcome.and(down)
}

/// Whether it is the hosts' own links, and what is asked for.
fn cases() -> Vec<(bool, Conditions)> {
    let plain = |rate, delay| Conditions {
        rate: Some(rate),
        delay: Duration::from_millis(delay),
        ..Conditions::default()
    };
    let lossy = Conditions { jitter: Duration::from_millis(3), loss: 0.01, ..plain(20_000_000, 25) };
    vec![
        (true, plain(1_000_000_000, 1)),
        (false, plain(1_000_000_000, 1)),
        (false, plain(100_000_000, 1)),
        (false, plain(100_000_000, 50)),
        (false, plain(11_000_000, 60)),
        (false, lossy),
    ]
}

fn measure(lab: &Lab, own: bool, asked: Conditions) -> Result<Measured, LabError> {
    let rate = asked.rate.unwrap_or(0);
    let mut wire = wire_time(SMALL, rate);
    if own {
        lab.set_link(Some(Link { rate, delay: asked.delay }))?;
        lab.set_way("a", "b", &[])?;
        // It crosses two of them.
        wire *= 2;
    } else {
        lab.set_link(None)?;
        lab.set_way("a", "b", &[Step { at: Duration::ZERO, conditions: asked }])?;
    }
    let pair = Pair::new(lab)?;
    pair.warm(asked.delay)?;

    let received = pair.send(asked.delay + asked.jitter, |socket, to| {
        for _ in 0..PROBES {
            let mut datagram = [0; SMALL];
            datagram[..8].copy_from_slice(&now()?.to_le_bytes());
            socket.send_to(&datagram, to)?;
            thread::sleep(PAUSE);
        }
        Ok(u64::from(PROBES))
    })?;
    let mut delays: Vec<i64> = received.iter().map(|(sent, arrived)| arrived - sent).collect();
    delays.sort_unstable();
    let at = |share: usize| delays.get(delays.len() * share / 100).copied().unwrap_or_default() as f64 / 1e6;
    let expected = (asked.delay + wire).as_secs_f64() * 1e3;
    let delay_error_ms = at(50) - expected;
    let bound = (DELAY_ERROR.as_secs_f64() * 1e3).max(expected * DELAY_SHARE);
    // The jitter's median over so many frames is not exactly its middle.
    let chance = 4.0 * asked.jitter.as_secs_f64() * 1e3 / f64::from(PROBES).sqrt();

    let (measured_rate, loss, sent) = flood(&pair, asked)?;
    let rate_error = measured_rate.map(|measured| measured / rate as f64 - 1.0);
    let sigma = (asked.loss * (1.0 - asked.loss) / sent as f64).sqrt();
    let holds = delay_error_ms.abs() <= bound + chance
        && rate_error.is_none_or(|error| error.abs() <= RATE_SHARE)
        && (asked.loss == 0.0 || (loss - asked.loss).abs() <= LOSS_SIGMA * sigma);
    Ok(Measured {
        link: format!("{}{asked}", if own { "hosts' links " } else { "between two " }),
        asked,
        delay_ms: at(50),
        delay_error_ms,
        delay_p99_ms: at(99),
        rate: measured_rate,
        rate_error,
        loss,
        holds,
    })
}

/// The rate and the losses, of so many datagrams. What is lost because the queue is full is no loss of
/// the link: where frames are to be lost, they come more slowly than it carries them.
fn flood(pair: &Pair<'_>, asked: Conditions) -> Result<(Option<f64>, f64, u64), LabError> {
    let press = if asked.loss > 0.0 { 0.8 } else { PRESS };
    let frame = on_wire(LARGE) as f64 * 8.0;
    let each = Duration::from_secs_f64(BATCH as f64 * frame / (asked.rate.unwrap_or(1 << 30) as f64 * press));
    let mut sent = 0;
    let received = pair.send(asked.delay + asked.jitter + Duration::from_millis(200), |socket, to| {
        setsockopt(socket, UdpGsoSegment, &i32::try_from(LARGE).unwrap_or_default())?;
        let begun = Instant::now();
        let batch = [0; BATCH * LARGE];
        let mut next = begun;
        while begun.elapsed() < FLOOD {
            socket.send_to(&batch, to)?;
            sent += BATCH as u64;
            next += each;
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        Ok(sent)
    })?;
    let (Some((_, first)), Some((_, last))) = (received.first(), received.last()) else {
        return Err(nothing());
    };
    // The datagrams of a call arrive at once, when the last of them has crossed.
    let time = (last - first) as f64 / 1e9;
    let rate = received.len().saturating_sub(BATCH) as f64 * frame / time;
    let loss = 1.0 - received.len() as f64 / sent as f64;
    Ok((
        asked.rate.map(|_| rate).filter(|_| asked.loss == 0.0),
        if asked.loss > 0.0 { loss } else { 0.0 },
        sent,
    ))
}

/// Sockets on two hosts.
struct Pair<'l> {
    lab: &'l Lab,
    sender: UdpSocket,
    receiver: UdpSocket,
}

impl<'l> Pair<'l> {
    fn new(lab: &'l Lab) -> Result<Self, LabError> {
        let bind = |host: &str| {
            let address = (lab.address(host)?, 0);
            lab.inside(host, || UdpSocket::bind(address))?.context("opening a socket on", host)
        };
        let (sender, receiver) = (bind("a")?, bind("b")?);
        let option = |result: nix::Result<()>| result.context("setting an option of", "a socket");
        option(setsockopt(&receiver, RcvBufForce, &BUFFER))?;
        option(setsockopt(&receiver, ReceiveTimestampns, &true))?;
        Ok(Self { lab, sender, receiver })
    }

    /// The first datagram waits for the neighbour's address.
    fn warm(&self, delay: Duration) -> Result<(), LabError> {
        let received = self.send(4 * delay, |socket, to| socket.send_to(&[0; SMALL], to).map(|_| 1))?;
        if received.is_empty() { Err(nothing()) } else { Ok(()) }
    }

    /// What arrives of what is sent: what the first eight bytes say, and when it came, nanoseconds.
    fn send(
        &self,
        delay: Duration,
        sending: impl FnOnce(&UdpSocket, SocketAddr) -> std::io::Result<u64> + Send,
    ) -> Result<Vec<(i64, i64)>, LabError> {
        let to = self.receiver.local_addr().context("asking the address of", "a socket")?;
        let host = self.lab.name();
        self.receiver.set_read_timeout(Some(QUIET + delay)).context("setting a time-out on", host)?;
        thread::scope(|scope| {
            let sender = scope.spawn(|| sending(&self.sender, to));
            let mut received = Vec::new();
            loop {
                match self.receive() {
                    Ok(datagram) => received.push(datagram),
                    Err(nix::errno::Errno::EINTR) => {}
                    Err(nix::errno::Errno::EAGAIN) if sender.is_finished() => break,
                    Err(nix::errno::Errno::EAGAIN) => {}
                    Err(error) => return Err(error).context("receiving on", host),
                }
            }
            match sender.join() {
                Ok(sent) => sent.context("sending on", host).map(|_| received),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    fn receive(&self) -> nix::Result<(i64, i64)> {
        let mut datagram = [0; LARGE];
        let mut control = nix::cmsg_space!(TimeSpec);
        let mut parts = [IoSliceMut::new(&mut datagram)];
        let descriptor = self.receiver.as_raw_fd();
        let message =
            recvmsg::<SockaddrStorage>(descriptor, &mut parts, Some(&mut control), MsgFlags::empty())?;
        let arrived = message.cmsgs()?.find_map(|control| match control {
            ControlMessageOwned::ScmTimestampns(time) => Some(time.tv_sec() * 1_000_000_000 + time.tv_nsec()),
            _ => None,
        });
        let mut sent = [0; 8];
        sent.copy_from_slice(&datagram[..8]);
        Ok((i64::from_le_bytes(sent), arrived.unwrap_or_default()))
    }
}

/// The clock of the kernel's time stamps, nanoseconds.
fn now() -> std::io::Result<i64> {
    let time = clock_gettime(ClockId::CLOCK_REALTIME)?;
    Ok(time.tv_sec() * 1_000_000_000 + time.tv_nsec())
}

fn on_wire(payload: usize) -> usize {
    frame_on_wire(payload + HEADERS)
}

fn wire_time(payload: usize, rate: u64) -> Duration {
    match rate {
        0 => Duration::ZERO,
        rate => Duration::from_secs_f64(on_wire(payload) as f64 * 8.0 / rate as f64),
    }
}

fn nothing() -> LabError {
    LabError::Workload { address: "a link of the self-test".into(), problem: "no datagram arrived".into() }
}
