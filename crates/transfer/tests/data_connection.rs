//! Data connections between two nodes over real sockets: frames, files, silence, speed.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::{Duration, Instant};

use bytes::Bytes;
use godwit_transfer::connection::OpenError;
use godwit_transfer::{Alpn, Connection, ConnectionOptions, FrameError, LinkOptions, Listener};
use support::{Cluster, in_time, listen, node};

/// A connection from `b` (first) to `a` (second).
async fn pair_with(
    cluster: &Cluster,
    from: &ConnectionOptions,
    to: &ConnectionOptions,
) -> (Connection, Connection) {
    let b = cluster.node("b");
    let mut listener: Listener = listen(&cluster.a).await;
    let address = listener.local_addr().to_string();
    let accept = async {
        let accepted = listener.accept().await;
        assert_eq!(accepted.alpn, Alpn::Data);
        Connection::accept(accepted, to).await.unwrap()
    };
    let (opened, accepted) =
        in_time(async { tokio::join!(Connection::open(&b, &address, cluster.a.node(), from), accept) }).await;
    (opened.unwrap(), accepted)
}

async fn pair(cluster: &Cluster) -> (Connection, Connection) {
    let options = ConnectionOptions::default();
    pair_with(cluster, &options, &options).await
}

#[tokio::test]
async fn frames_arrive_in_order_and_close_notify_ends_them() {
    let (mut from, mut to) = pair(&Cluster::found()).await;
    assert_eq!((from.peer(), to.peer()), (&node("a"), &node("b")));
    let big = Bytes::from(vec![0xa5; 300_000]);
    let send = async {
        from.writer.send(1, Bytes::from_static(b"small")).await.unwrap();
        from.writer.send(2, big.clone()).await.unwrap();
        from.writer.send_parts(3, 9, &[b"in ", b"", b"parts"]).await.unwrap();
        from.writer.finish().await.unwrap();
    };
    let receive = async {
        let first = to.reader.recv().await.unwrap();
        assert_eq!((first.kind, first.payload.as_ref()), (1, &b"small"[..]));
        assert_eq!(to.reader.recv().await.unwrap().payload, big);
        let third = to.reader.recv().await.unwrap();
        assert_eq!((third.kind, third.flags, third.payload.as_ref()), (3, 9, &b"in parts"[..]));
        assert!(to.reader.recv().await.unwrap_err().is_closed());
        assert!(to.reader.recv().await.unwrap_err().is_closed());
    };
    in_time(async { tokio::join!(send, receive) }).await;
    assert_eq!(from.writer.wire_bytes(), to.reader.wire_bytes());
    assert!(from.traffic().sent() > from.writer.wire_bytes());
    assert!(to.traffic().received() > to.reader.wire_bytes());
    assert!(matches!(from.writer.send(1, Bytes::new()).await, Err(FrameError::Broken { .. })));
    // The other direction is still there.
    to.writer.send(4, Bytes::new()).await.unwrap();
    to.writer.flush().await.unwrap();
    assert_eq!(from.reader.recv().await.unwrap().kind, 4);
}

#[tokio::test]
async fn a_peer_that_vanishes_is_not_taken_for_one_that_sent_close_notify() {
    let (from, mut to) = pair(&Cluster::found()).await;
    drop(from);
    assert!(matches!(to.reader.recv().await, Err(FrameError::Truncated { .. })));
    assert!(matches!(to.reader.recv().await, Err(FrameError::Broken { .. })));
}

#[tokio::test]
async fn a_silent_peer_is_an_error_with_its_name() {
    let cluster = Cluster::found();
    let impatient = ConnectionOptions { idle_timeout: Some(Duration::from_millis(50)), ..Default::default() };
    let (_from, mut to) = pair_with(&cluster, &ConnectionOptions::default(), &impatient).await;
    let error = to.reader.recv().await.unwrap_err();
    assert!(matches!(error, FrameError::TimedOut { .. }));
    assert!(error.to_string().contains("`b` was silent"), "{error}");
}

#[tokio::test]
async fn a_peer_that_stops_reading_is_an_error() {
    let cluster = Cluster::found();
    let impatient =
        ConnectionOptions { stall_timeout: Some(Duration::from_millis(200)), ..Default::default() };
    let (mut from, _to) = pair_with(&cluster, &impatient, &ConnectionOptions::default()).await;
    let frame = Bytes::from(vec![1; 256 * 1024]);
    let error = loop {
        if let Err(error) = from.writer.send(1, frame.clone()).await {
            break error;
        }
    };
    assert!(matches!(error, FrameError::TimedOut { .. }), "{error:?}");
}

/// What the docs of [`LinkOptions::user_timeout`] warn of, so that nobody is surprised by it.
#[tokio::test]
async fn the_kernel_gives_up_on_a_peer_that_stops_reading() {
    let cluster = Cluster::found();
    let link = LinkOptions { user_timeout: Duration::from_secs(1), keepalive: Duration::from_secs(1) };
    let mut impatient = ConnectionOptions::default();
    impatient.connect.link = link;
    let (mut from, _to) = pair_with(&cluster, &impatient, &ConnectionOptions::default()).await;
    let frame = Bytes::from(vec![1; 256 * 1024]);
    let error = loop {
        if let Err(error) = from.writer.send(1, frame.clone()).await {
            break error;
        }
    };
    match error {
        FrameError::Io { source, .. } => assert_eq!(source.kind(), std::io::ErrorKind::TimedOut),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn an_address_where_nobody_listens_is_named() {
    let cluster = Cluster::found();
    let listener = listen(&cluster.a).await;
    let address = listener.local_addr().to_string();
    drop(listener);
    let error =
        Connection::open(&cluster.a, &address, &node("b"), &ConnectionOptions::default()).await.unwrap_err();
    assert!(matches!(error, OpenError::Connect(_)));
    assert!(error.to_string().contains(&address) && error.to_string().contains("`b`"), "{error}");
}

/// Prints the speed; asserts only that all arrives. `cargo test -p godwit-transfer speed -- --nocapture`
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn speed_of_bulk_frames_is_printed() {
    const FRAMES: usize = 1024;
    let (mut from, mut to) = pair(&Cluster::found()).await;
    let frame = Bytes::from(vec![0x5a; 256 * 1024]);
    let started = Instant::now();
    let sender = tokio::spawn(async move {
        for _ in 0..FRAMES {
            from.writer.send(1, frame.clone()).await.unwrap();
        }
        from.writer.finish().await.unwrap();
        from
    });
    let mut bytes = 0;
    while let Ok(frame) = to.reader.recv().await {
        bytes += frame.payload.len();
    }
    let seconds = started.elapsed().as_secs_f64();
    sender.await.unwrap();
    assert_eq!(bytes, FRAMES * 256 * 1024);
    println!("bulk frames of 256 KiB: {:.0} MB/s", bytes as f64 / 1e6 / seconds);
}
