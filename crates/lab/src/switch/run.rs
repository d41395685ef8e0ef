//! The event loop of the link program.
//!
//! One thread: it sleeps until a frame, a request, or the time of a frame that is under way.

use std::{
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::OnceLock,
    time::Instant,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    control::{self, Answer, PortFigures, Request, WayStatus},
    fabric::{Fabric, Output},
    frame,
    tap::Tap,
    wire::{Nanos, Shape, nanos},
};
use crate::{
    config::{Link, UPLINK},
    error::{Context, LabError},
};

/// Frames read from one host before the others have their turn.
const BURST: usize = 32;

/// What the link program is told when it starts.
#[derive(Clone, Debug)]
pub struct Arguments {
    /// Path of the control socket to make.
    pub control: PathBuf,
    /// Name and network namespace of each host.
    pub hosts: Vec<(String, PathBuf)>,
    /// Rate and delay; none: as fast as the machine.
    pub link: Option<Link>,
}

struct Taps(Vec<Tap>);

impl Output for Taps {
    fn deliver(&mut self, port: usize, packet: &[u8]) -> bool {
        self.0.get_mut(port).is_some_and(|tap| tap.write(packet))
    }
}

/// Makes the hosts' uplinks and the control socket, says `ready` on standard output, and forwards
/// frames until it is killed or an uplink goes away.
///
/// # Errors
/// An uplink or the socket cannot be made, or an uplink has gone.
pub fn run(arguments: Arguments) -> Result<(), LabError> {
    let Arguments { control, hosts, link } = arguments;
    let taps = hosts.iter().map(|(_, namespace)| Tap::create(namespace, UPLINK)).collect::<Result<_, _>>()?;
    let names = hosts.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    let listener = control::serve(&control).context("listening at", control.display())?;
    punctual();
    writeln!(io::stdout(), "ready").context("writing to", "standard output")?;
    let fabric = Fabric::new(names.len(), Shape::new(link));
    Loop { fabric, taps: Taps(taps), names, listener, callers: Vec::new(), buffer: vec![0; frame::MAX] }.run()
}

/// Wakes up in time: no timer slack, and before ordinary processes, as a kernel's switch would.
/// Best effort; without it the delays are longer, by up to the scheduler's turn.
fn punctual() {
    // SAFETY: these calls read their arguments only, and concern this process alone.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1_000);
        let priority = libc::sched_param { sched_priority: 1 };
        if libc::sched_setscheduler(0, libc::SCHED_RR, &raw const priority) != 0 {
            libc::setpriority(libc::PRIO_PROCESS, 0, -15);
        }
    }
}

/// Nanoseconds since the first call, never backwards.
fn now() -> Nanos {
    static START: OnceLock<Instant> = OnceLock::new();
    nanos(START.get_or_init(Instant::now).elapsed())
}

struct Loop {
    fabric: Fabric,
    taps: Taps,
    names: Vec<String>,
    listener: OwnedFd,
    callers: Vec<OwnedFd>,
    buffer: Vec<u8>,
}

impl Loop {
    fn run(mut self) -> Result<(), LabError> {
        loop {
            self.fabric.advance(now(), &mut self.taps);
            let (ports, listener, callers) = self.wait()?;
            for port in ports {
                self.drain(port)?;
            }
            for index in callers.into_iter().rev() {
                let caller = self.callers.swap_remove(index);
                self.serve(&caller);
            }
            if listener {
                // A caller that has given up meanwhile is no failure.
                self.callers.extend(control::accept(&self.listener).ok());
            }
        }
    }

    /// Sleeps; returns the ports with frames, whether someone calls, and the callers with requests.
    fn wait(&self) -> Result<(Vec<usize>, bool, Vec<usize>), LabError> {
        let timeout = self.fabric.next().map(|at| {
            let wait = at.saturating_sub(now());
            Timespec {
                tv_sec: i64::try_from(wait / 1_000_000_000).unwrap_or(i64::MAX),
                tv_nsec: i64::try_from(wait % 1_000_000_000).unwrap_or(0),
            }
        });
        let taps = self.taps.0.iter().map(AsFd::as_fd);
        let others = std::iter::once(&self.listener).chain(&self.callers).map(AsFd::as_fd);
        let mut set: Vec<_> =
            taps.chain(others).map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        match poll(&mut set, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("waiting for", "frames"),
        }
        let ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let (taps, others) = set.split_at(self.taps.0.len());
        let indices = |set: &[PollFd<'_>]| {
            set.iter().enumerate().filter(|(_, fd)| ready(fd)).map(|(index, _)| index).collect::<Vec<_>>()
        };
        let (listener, callers) = others.split_at(1);
        Ok((indices(taps), listener.iter().any(ready), indices(callers)))
    }

    fn drain(&mut self, port: usize) -> Result<(), LabError> {
        for _ in 0..BURST {
            let Some(tap) = self.taps.0.get_mut(port) else { break };
            let name = self.names.get(port).map_or("", String::as_str);
            let Some(packet) = tap.read(&mut self.buffer).context("reading from the uplink of", name)? else {
                break;
            };
            self.fabric.receive(now(), port, packet, &mut self.taps);
        }
        Ok(())
    }

    /// Answers one request. A caller that is gone or violates the protocol harms only itself.
    fn serve(&mut self, caller: &OwnedFd) {
        let answer = match control::receive(caller) {
            Ok(Some(request)) => self.answer(request),
            Ok(None) => return,
            Err(error) => Answer::Refused(error.to_string()),
        };
        let _ = control::send(caller, &answer);
    }

    fn answer(&mut self, request: Request) -> Answer {
        let name = |port: usize| self.names.get(port).cloned().unwrap_or_default();
        match request {
            Request::Cut(a, b) => self.set_cut(&a, &b, true),
            Request::Heal(a, b) => self.set_cut(&a, &b, false),
            Request::Link(link) => {
                self.fabric.set_shape(now(), Shape::new(link));
                Answer::Done
            }
            Request::Way(a, b, steps) => self.set_way(&a, &b, |fabric, a, b| {
                fabric.set_way(now(), a, b, &steps);
            }),
            Request::WayOn(a, b, steps) => self.set_way(&a, &b, |fabric, a, b| {
                fabric.extend_way(a, b, &steps);
            }),
            Request::Ways => Answer::Ways(
                self.fabric
                    .ways()
                    .map(|(a, b, conditions)| WayStatus { between: (name(a), name(b)), conditions })
                    .collect(),
            ),
            Request::Cuts => {
                Answer::Cuts(self.fabric.cuts().into_iter().map(|(a, b)| (name(a), name(b))).collect())
            }
            Request::Figures => Answer::Figures(
                self.names
                    .iter()
                    .enumerate()
                    .map(|(port, host)| PortFigures {
                        host: host.clone(),
                        counters: self.fabric.counters(port),
                    })
                    .collect(),
            ),
        }
    }

    fn set_cut(&mut self, a: &str, b: &str, cut: bool) -> Answer {
        match self.two(a, b) {
            Ok((a, b)) => {
                self.fabric.set_cut(a, b, cut);
                Answer::Done
            }
            Err(refused) => refused,
        }
    }

    fn set_way(&mut self, a: &str, b: &str, change: impl FnOnce(&mut Fabric, usize, usize)) -> Answer {
        let (a, b) = match self.two(a, b) {
            Ok(pair) => pair,
            Err(refused) => return refused,
        };
        change(&mut self.fabric, a, b);
        for port in [a, b] {
            if let Some(tap) = self.taps.0.get_mut(port)
                && let Err(error) = tap.set_large(!self.fabric.is_by_frame(port))
            {
                return Answer::Refused(format!("the uplink of a host takes no other frame size: {error}"));
            }
        }
        Answer::Done
    }

    /// The ports of two hosts.
    fn two(&self, a: &str, b: &str) -> Result<(usize, usize), Answer> {
        let port = |host: &str| self.names.iter().position(|name| name == host);
        match (port(a), port(b)) {
            (Some(a), Some(b)) if a != b => Ok((a, b)),
            _ => Err(Answer::Refused(format!("{a} and {b} are not two hosts of this lab"))),
        }
    }
}
