//! The way to the answer: HTTP without authentication or encryption, as exporters have it, for a network of the operator's.
//!
//! Whoever reaches it may be slow, or many. Each connection has one request and an end; of too many, the oldest is closed.

use std::collections::VecDeque;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

use super::collect::Collecting;

/// How long a request may take to come.
const REQUEST: Duration = Duration::from_secs(5);

/// How long a connection may be there: the request, the answer's collection, and its way over a slow link.
const WHOLE: Duration = Duration::from_secs(30);

/// Most connections at a time.
const MOST: usize = 64;

/// Longest request, bytes: its line and its headers.
const LONGEST: usize = 16 << 10;

/// Before the next connection is taken when one could not be, as for want of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Answers for as long as it is awaited.
pub(super) async fn serve(listener: TcpListener, collecting: Collecting) {
    let routes = Router::new().route("/metrics", get(metrics)).with_state(collecting);
    serve_routes(listener, routes).await;
}

async fn serve_routes(listener: TcpListener, routes: Router) {
    let mut open = VecDeque::<AbortHandle>::new();
    let mut is_said = false;
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                if !std::mem::replace(&mut is_said, true) {
                    tracing::warn!(%error, "a connection for metrics cannot be taken");
                }
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        is_said = false;
        open.retain(|connection| !connection.is_finished());
        if open.len() >= MOST
            && let Some(oldest) = open.pop_front()
        {
            oldest.abort();
        }
        open.push_back(tokio::spawn(converse(stream, routes.clone())).abort_handle());
    }
}

/// One request and its answer.
async fn converse(stream: TcpStream, routes: Router) {
    let mut http = http1::Builder::new();
    http.keep_alive(false).max_buf_size(LONGEST).timer(TokioTimer::new()).header_read_timeout(REQUEST);
    let conversing = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    match tokio::time::timeout(WHOLE, conversing).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a connection for metrics has failed"),
        Err(_) => tracing::debug!("a connection for metrics has taken too long"),
    }
}

async fn metrics(State(collecting): State<Collecting>) -> Response {
    match collecting.answer().await {
        Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Err(error) => {
            tracing::warn!(%error, "metrics cannot be collected");
            (StatusCode::INTERNAL_SERVER_ERROR, "the metrics cannot be collected; see godwitd's log\n")
                .into_response()
        }
    }
}

/// The text format of Prometheus.
const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::SocketAddr;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn up() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = Router::new().route("/metrics", get(async || "the answer"));
        tokio::spawn(serve_routes(listener, routes));
        address
    }

    async fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn one_path_is_answered_and_only_to_who_reads() {
        let address = up().await;
        let of = async |request: &str| ask(address, &format!("{request} HTTP/1.1\r\nHost: a\r\n\r\n")).await;
        let answer = of("GET /metrics").await;
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n\r\nthe answer"), "{answer}");
        for (request, status) in [
            ("GET /", "404"),
            ("GET /metrics/more", "404"),
            ("POST /metrics", "405"),
            ("DELETE /metrics", "405"),
            ("nonsense", "400"),
        ] {
            let answer = of(request).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {answer}");
        }
        let long = of(&format!("GET /metrics?{}", "x".repeat(2 * LONGEST))).await;
        assert!(!long.contains("200"), "{long}");
    }

    #[tokio::test]
    async fn connections_that_say_nothing_do_not_keep_others_from_an_answer() {
        let address = up().await;
        let mut silent = Vec::new();
        for _ in 0..3 * MOST {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let answer = ask(address, "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert!(answer.ends_with("the answer"), "{answer}");
        // The oldest has made room.
        assert_eq!(silent[0].read(&mut [0]).await.unwrap_or(0), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_does_not_come_to_its_end_is_given_up() {
        let address = up().await;
        let answer = ask(address, "GET /metrics HTTP/1.1\r\nHost:").await;
        assert!(!answer.contains("the answer"), "{answer}");
    }
}
