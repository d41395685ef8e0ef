//! A link that dies without a word: in a network namespace of its own, whose only link is cut.
//! Needs root.
#![allow(clippy::unwrap_used)]

mod support;

use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use godwit_transfer::{Connection, ConnectionOptions, FrameError, LinkOptions, ListenOptions, Listener};
use support::{Cluster, localhost};

fn set_link(state: &str) {
    // A child of this thread is in this thread's namespace.
    let status = Command::new("ip").args(["link", "set", "lo", state]).status().unwrap();
    assert!(status.success(), "ip link set lo {state}");
}

/// Connects two nodes, cuts the link, and gives what the two directions say, and when.
fn cut_link(link: LinkOptions) -> (FrameError, FrameError, Duration) {
    let cut = move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("this test needs root");
        set_link("up");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let cluster = Cluster::found();
            let b = cluster.node("b");
            // No limits of our own: only the kernel can notice.
            let mut options =
                ConnectionOptions { idle_timeout: None, stall_timeout: None, ..Default::default() };
            options.connect.link = link;
            let listen = ListenOptions { link, ..Default::default() };
            let mut listener = Listener::bind(localhost(), &cluster.a, listen).await.unwrap();
            let address = listener.local_addr().to_string();
            let accept = async { Connection::accept(listener.accept().await, &options).await.unwrap() };
            let (from, mut to) =
                tokio::join!(Connection::open(&b, &address, cluster.a.node(), &options), accept);
            let mut from = from.unwrap();
            set_link("down");
            let started = Instant::now();
            let sending = async {
                loop {
                    let frame = Bytes::from_static(&[0; 100_000]);
                    if let Err(error) = from.writer.send(1, frame).await {
                        break error;
                    }
                }
            };
            // The receiver waits and sends nothing: only keep-alive can tell it.
            let (sending, receiving) = tokio::join!(sending, to.reader.recv());
            (sending, receiving.unwrap_err(), started.elapsed())
        })
    };
    std::thread::spawn(cut).join().unwrap()
}

#[test]
fn a_dead_link_is_noticed_by_the_sender_and_by_the_receiver() {
    let link = LinkOptions { user_timeout: Duration::from_secs(2), keepalive: Duration::from_secs(1) };
    let (sending, receiving, after) = cut_link(link);
    for error in [sending, receiving] {
        match error {
            FrameError::Io { ref source, .. } => {
                let kind = source.kind();
                use std::io::ErrorKind::{HostUnreachable, NetworkUnreachable, TimedOut};
                assert!(matches!(kind, TimedOut | NetworkUnreachable | HostUnreachable), "{error:?}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(after >= Duration::from_secs(1), "a short outage must not end a connection: {after:?}");
    // The kernel's own limits are many minutes.
    assert!(after < Duration::from_secs(60), "{after:?}");
}
