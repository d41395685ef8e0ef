//! A daemon that only pretends: serves the Node API on a unix socket and answers by the service's
//! name, so that a test can see what the command sends and what it makes of each answer.
#![allow(dead_code, unreachable_pub)]

mod drained;

use std::{
    path::{Path, PathBuf},
    pin::Pin,
    process::{Output, Stdio},
    sync::{Arc, Mutex},
};

use godwit_api::v1::{
    self, CancelResponse, CaptureBatch, CaptureCount, CaptureEvent, CaptureInterface, CapturePlace,
    CaptureRequest, CaptureStart, CapturedPacket, Check, ConnectionCount, ConnectionsResponse,
    CreateTokenRequest, CreateTokenResponse, DoctorRequest, DoctorResponse, Event, EventsRequest, ExecInput,
    ExecOutput, ListRequest, ListResponse, LogEntry, LogsRequest, MigrateRequest, MigrationEvent,
    MigrationProgress, MigrationReport, NodeInfo, NodesRequest, NodesResponse, PhaseTime, RemoveNodeRequest,
    RemoveNodeResponse, RemoveRequest, RemoveResponse, ResolveRequest, ResolveResponse, RunRequest, Service,
    ServiceRequest, ServiceState, StopRequest, capture_event, exec_input, exec_output, migration_event,
    node_server::{Node, NodeServer},
};
use tokio::{net::UnixListener, process::Command, sync::Notify};
use tokio_stream::{Stream, StreamExt as _, wrappers::UnixListenerStream};
use tonic::{Request, Response, Status, Streaming};

/// What the fake was asked.
#[derive(Default)]
pub struct Asked {
    pub run: Mutex<Option<RunRequest>>,
    pub exec: Mutex<Option<v1::ExecStart>>,
    pub logs: Mutex<Option<LogsRequest>>,
    pub capture: Mutex<Option<CaptureRequest>>,
    pub token: Mutex<Option<CreateTokenRequest>>,
    pub stop: Mutex<Vec<StopRequest>>,
    pub prepared: Mutex<Vec<MigrateRequest>>,
    pub kill: Mutex<Vec<v1::KillRequest>>,
    pub update: Mutex<Vec<v1::UpdateRequest>>,
    pub policy: Mutex<Vec<v1::PolicyRequest>>,
    pub cordon: Mutex<Vec<v1::CordonRequest>>,
    pub drain: Mutex<Vec<v1::DrainRequest>>,
    pub stats: Mutex<Vec<v1::StatsRequest>>,
    /// Where an archive went, and the archive.
    pub copied: Mutex<Option<(v1::CopyInStart, Vec<u8>)>>,
    /// What `copy_out` gives.
    pub archive: Mutex<Vec<u8>>,
    /// What was asked, and whether the archive was said to be kept.
    pub checkpoint: Mutex<Option<(v1::CheckpointStart, bool)>>,
    /// What was asked, and the archive.
    pub restored: Mutex<Option<(v1::RestoreStart, Vec<u8>)>>,
    pub cancelled: Mutex<Vec<String>>,
    pub cancel: Notify,
}

/// A running fake; it ends with the test.
pub struct Fake {
    directory: tempfile::TempDir,
    pub asked: Arc<Asked>,
}

impl Fake {
    pub fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("godwitd.sock")).unwrap();
        let asked = Arc::new(Asked::default());
        let server = NodeServer::new(Answers { asked: asked.clone() });
        let incoming = UnixListenerStream::new(listener);
        tokio::spawn(tonic::transport::Server::builder().serve_with_incoming(server, incoming));
        Self { directory, asked }
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("godwitd.sock")
    }

    /// `godwit --socket … ARGUMENTS`, without the environment of whoever runs the tests.
    pub fn godwit(&self, arguments: &[&str]) -> Command {
        // After the first word: flags after a verb are godwit's as well, but not after a command to run.
        let (first, rest) = arguments.split_at(arguments.len().min(1));
        let mut command = godwit(first);
        command.arg("--socket").arg(self.socket()).args(rest);
        command
    }

    pub async fn run(&self, arguments: &[&str]) -> Finished {
        Finished::from(self.godwit(arguments).output().await.unwrap())
    }
}

/// The built command, in a plain environment.
pub fn godwit(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_godwit"));
    command
        .args(arguments)
        .env_remove("GODWIT_NODE")
        .env_remove("GODWIT_LAB")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// What a command left.
#[derive(Debug)]
pub struct Finished {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Finished {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl Finished {
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The lines of standard output as JSON documents.
    pub fn json_lines(&self) -> Vec<serde_json::Value> {
        self.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// A socket on which nothing listens any more.
pub fn dead_socket(directory: &Path) -> PathBuf {
    let path = directory.join("dead.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    path
}

struct Answers {
    asked: Arc<Asked>,
}

type Answer<T> = Result<Response<T>, Status>;
type Items<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn items<T: Send + 'static>(items: Vec<T>) -> Answer<Items<T>> {
    Ok(Response::new(Box::pin(tokio_stream::iter(items.into_iter().map(Ok)))))
}

fn unknown(name: &str) -> Status {
    Status::not_found(format!("there is no service named {name}: 'godwit ps -a' lists them"))
}

pub fn redis() -> Service {
    Service {
        name: "redis".into(),
        address: "10.88.0.10".into(),
        networks: ["10.88.0.10", "10.89.0.10"]
            .map(|address| v1::ServiceNetwork { address: address.into(), ..v1::ServiceNetwork::default() })
            .to_vec(),
        node: "a".into(),
        state: ServiceState::Running.into(),
        pid: 42,
        command: ["redis-server", "--save", ""].map(String::from).to_vec(),
        memory_bytes: 256 << 20,
        memory_current_bytes: 200 << 20,
        ..Service::default()
    }
}

fn progress(phase: &str, bytes_done: u64, bytes_total: u64) -> MigrationEvent {
    let step = MigrationProgress {
        id: "1".into(),
        phase: phase.into(),
        bytes_done,
        bytes_total,
        ..MigrationProgress::default()
    };
    MigrationEvent { kind: Some(migration_event::Kind::Progress(step)) }
}

fn report(name: &str, outcome: &str, reason: &str) -> MigrationEvent {
    let report = MigrationReport {
        name: name.into(),
        mode: "cold".into(),
        source: "a".into(),
        destination: "b".into(),
        outcome: outcome.into(),
        reason: reason.into(),
        refused: name == "aborted",
        retained_bytes: 200 << 20,
        retained_file_bytes: 300 << 20,
        frozen_ms: 512.34,
        total_ms: 1930.0,
        dump_bytes: 201 << 20,
        wire_bytes: 202 << 20,
        phases: vec![PhaseTime { phase: "dump".into(), ms: 100.0 }],
        ..MigrationReport::default()
    };
    MigrationEvent { kind: Some(migration_event::Kind::Report(report)) }
}

#[tonic::async_trait]
impl Node for Answers {
    type DrainStream = Items<v1::DrainEvent>;

    async fn cordon(&self, request: Request<v1::CordonRequest>) -> Answer<v1::CordonResponse> {
        let request = request.into_inner();
        self.asked.cordon.lock().unwrap().push(request.clone());
        let v1::CordonRequest { node, lift } = request;
        if node == "missing" {
            return Err(Status::not_found("there is no node missing"));
        }
        let services = vec!["web".into()];
        Ok(Response::new(v1::CordonResponse { node, cordoned: !lift, changed: true, services }))
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Answer<Self::DrainStream> {
        let request = request.into_inner();
        let node = request.node.clone();
        self.asked.drain.lock().unwrap().push(request);
        if node == "missing" {
            return Err(Status::not_found("there is no node missing"));
        }
        let events = tokio_stream::iter(drained::events(&node));
        match node.as_str() {
            "slow" => Ok(Response::new(Box::pin(events.chain(tokio_stream::pending())))),
            _ => Ok(Response::new(Box::pin(events))),
        }
    }

    async fn adopt(&self, request: Request<v1::AdoptRequest>) -> Answer<Service> {
        let request = request.into_inner();
        match request.container.as_str() {
            "podman:none" => Err(Status::failed_precondition(
                "Podman cannot give godwit container none: it has no container none",
            )),
            _ => Ok(Response::new(Service { name: request.name, ..redis() })),
        }
    }

    async fn run(&self, request: Request<RunRequest>) -> Answer<Service> {
        let request = request.into_inner();
        let name = request.name.clone();
        *self.asked.run.lock().unwrap() = Some(request);
        if name == "taken" {
            return Err(Status::already_exists(
                "the name taken is in use on node b: choose another with --name",
            ));
        }
        Ok(Response::new(Service { name, ..redis() }))
    }

    async fn run_by_engine(&self, request: Request<RunRequest>) -> Answer<Service> {
        // As a daemon that does not know this verb.
        if request.get_ref().name == "old" {
            return Err(Status::unimplemented(""));
        }
        assert_ne!(request.get_ref().engine, "runc");
        self.run(request).await
    }

    async fn list(&self, request: Request<ListRequest>) -> Answer<ListResponse> {
        let mut services = vec![
            redis(),
            Service {
                name: "broker".into(),
                node: "b".into(),
                state: ServiceState::Remote.into(),
                ..Service::default()
            },
        ];
        if request.into_inner().all {
            services.push(Service {
                name: "done".into(),
                node: "a".into(),
                state: ServiceState::Stopped.into(),
                exit_code: 3,
                ..Service::default()
            });
        }
        Ok(Response::new(ListResponse { services }))
    }

    async fn inspect(&self, request: Request<ServiceRequest>) -> Answer<Service> {
        match request.into_inner().name.as_str() {
            "redis" => Ok(Response::new(redis())),
            name => Err(unknown(name)),
        }
    }

    async fn connections(&self, request: Request<ServiceRequest>) -> Answer<ConnectionsResponse> {
        if request.into_inner().name != "redis" {
            return Err(unknown("it"));
        }
        let client = v1::Connection {
            protocol: "tcp".into(),
            state: "established".into(),
            local: "10.88.0.10:6379".into(),
            remote: "10.99.0.100:40000".into(),
            ..v1::Connection::default()
        };
        let count = ConnectionCount { protocol: "tcp".into(), state: "established".into(), count: 25 };
        Ok(Response::new(ConnectionsResponse {
            list: vec![client; 25],
            states: vec![count],
            unavailable: Vec::new(),
        }))
    }

    type CaptureStream = Items<CaptureEvent>;
    /// Three packets of two nodes, those of the node `b` between those of `a`.
    async fn capture(&self, request: Request<CaptureRequest>) -> Answer<Self::CaptureStream> {
        let request = request.into_inner();
        let name = request.name.clone();
        *self.asked.capture.lock().unwrap() = Some(request);
        if name != "redis" {
            return Err(unknown(&name));
        }
        let event = |kind| CaptureEvent { kind: Some(kind) };
        let nodes = vec!["a".into(), "b".into()];
        let start = CaptureStart { name, address: "10.88.0.10".into(), nodes };
        let batch = |node: &str, times: &[i64]| {
            let place = CapturePlace::Service.into();
            let packet = |time_ns: &i64| CapturedPacket {
                place,
                time_ns: *time_ns,
                length: 1500,
                data: format!("{node} at {time_ns}").into(),
                outgoing: false,
            };
            event(capture_event::Kind::Batch(CaptureBatch {
                node: node.into(),
                interfaces: vec![CaptureInterface { place, name: "eth0".into() }],
                packets: times.iter().map(packet).collect(),
                up_to_ns: 40,
                counts: vec![CaptureCount { place, received: 9, dropped: 4 }],
                troubles: Vec::new(),
            }))
        };
        items(vec![event(capture_event::Kind::Start(start)), batch("a", &[10, 30]), batch("b", &[20])])
    }

    type LogsStream = Items<LogEntry>;
    async fn logs(&self, request: Request<LogsRequest>) -> Answer<Self::LogsStream> {
        *self.asked.logs.lock().unwrap() = Some(request.into_inner());
        items(vec![
            LogEntry { time_ns: 1_000_000_000, stream: "stdout".into(), data: "one\n".into() },
            LogEntry { time_ns: 2_000_000_000, stream: "stderr".into(), data: "two\n".into() },
        ])
    }

    type ExecStream = Items<ExecOutput>;
    /// Writes standard input back, in capitals to standard error, and ends with 7.
    async fn exec(&self, request: Request<Streaming<ExecInput>>) -> Answer<Self::ExecStream> {
        let mut input = request.into_inner();
        let first = input.message().await?.and_then(|message| message.kind);
        let Some(exec_input::Kind::Start(start)) = first else {
            return Err(Status::invalid_argument("the first message must be start"));
        };
        if start.name != "redis" {
            return Err(unknown(&start.name));
        }
        let with_input = start.stdin;
        *self.asked.exec.lock().unwrap() = Some(start);
        let mut outputs = Vec::new();
        let mut open = with_input;
        while open {
            match input.message().await?.and_then(|message| message.kind) {
                Some(exec_input::Kind::Stdin(data)) if !data.is_empty() => {
                    outputs.push(exec_output::Kind::Stderr(data.to_ascii_uppercase().into()));
                    outputs.push(exec_output::Kind::Stdout(data));
                }
                _ => open = false,
            }
        }
        outputs.push(exec_output::Kind::ExitCode(7));
        items(outputs.into_iter().map(|kind| ExecOutput { kind: Some(kind) }).collect())
    }

    async fn stop(&self, request: Request<StopRequest>) -> Answer<Service> {
        let request = request.into_inner();
        self.asked.stop.lock().unwrap().push(request.clone());
        if request.name == "missing" {
            return Err(unknown("missing"));
        }
        let state = ServiceState::Stopped.into();
        Ok(Response::new(Service { name: request.name, state, ..Service::default() }))
    }

    async fn kill(&self, request: Request<v1::KillRequest>) -> Answer<Service> {
        let request = request.into_inner();
        self.asked.kill.lock().unwrap().push(request.clone());
        match request.name.as_str() {
            "missing" => Err(unknown("missing")),
            _ => Ok(Response::new(Service { name: request.name, ..redis() })),
        }
    }

    async fn wait(&self, request: Request<v1::WaitRequest>) -> Answer<v1::WaitResponse> {
        match request.into_inner().name.as_str() {
            "missing" => Err(unknown("missing")),
            "killed" => Ok(Response::new(v1::WaitResponse { exit_code: 137, reason: String::new() })),
            _ => Ok(Response::new(v1::WaitResponse {
                exit_code: 0,
                reason: "stopped by `godwit stop`".into(),
            })),
        }
    }

    async fn copy_in(&self, request: Request<Streaming<v1::CopyInput>>) -> Answer<v1::CopyInResponse> {
        let mut input = request.into_inner();
        let Some(v1::copy_input::Kind::Start(start)) =
            input.message().await?.and_then(|message| message.kind)
        else {
            return Err(Status::invalid_argument("the first message must be start"));
        };
        if start.name == "full" {
            return Err(Status::internal("cannot write /x of the service: no space left on device"));
        }
        let mut archive = Vec::new();
        while let Some(message) = input.message().await? {
            match message.kind {
                Some(v1::copy_input::Kind::Data(data)) => archive.extend_from_slice(&data),
                _ => return Err(Status::internal("a message of a copy has no data")),
            }
        }
        let bytes = archive.len() as u64;
        *self.asked.copied.lock().unwrap() = Some((start, archive));
        Ok(Response::new(v1::CopyInResponse { files: 1, bytes }))
    }

    type CheckpointStream = Items<v1::CheckpointOutput>;
    async fn checkpoint(
        &self,
        request: Request<Streaming<v1::CheckpointInput>>,
    ) -> Answer<Self::CheckpointStream> {
        use v1::checkpoint_output::Kind::{Data, Ended, Whole};
        let mut input = request.into_inner();
        let Some(v1::checkpoint_input::Kind::Start(start)) =
            input.message().await?.and_then(|message| message.kind)
        else {
            return Err(Status::invalid_argument("the first message must be start"));
        };
        let message = |kind| Ok(v1::CheckpointOutput { kind: Some(kind) });
        let mut first =
            vec![message(Data(b"archive ".as_slice().into())), message(Data(b"of it".as_slice().into()))];
        if start.name == "cut" {
            first.push(Err(Status::aborted("CRIU cannot dump it")));
            return Ok(Response::new(Box::pin(tokio_stream::iter(first))));
        }
        first.push(message(Whole(v1::CheckpointWhole { image: "localhost/x:latest".into(), frozen_us: 5 })));
        let leaves = start.leave_running;
        *self.asked.checkpoint.lock().unwrap() = Some((start, false));
        if leaves {
            return Ok(Response::new(Box::pin(tokio_stream::iter(first))));
        }
        let (sender, rest) = tokio::sync::mpsc::channel(1);
        let asked = self.asked.clone();
        tokio::spawn(async move {
            if let Ok(Some(v1::CheckpointInput { kind: Some(v1::checkpoint_input::Kind::Kept(_)) })) =
                input.message().await
            {
                asked.checkpoint.lock().unwrap().as_mut().unwrap().1 = true;
                let ended = v1::CheckpointOutput { kind: Some(Ended(v1::CheckpointEnded {})) };
                sender.send(Ok(ended)).await.unwrap();
            }
        });
        let all = tokio_stream::iter(first).chain(tokio_stream::wrappers::ReceiverStream::new(rest));
        Ok(Response::new(Box::pin(all)))
    }

    async fn restore(&self, request: Request<Streaming<v1::RestoreInput>>) -> Answer<Service> {
        let mut input = request.into_inner();
        let Some(v1::restore_input::Kind::Start(start)) =
            input.message().await?.and_then(|message| message.kind)
        else {
            return Err(Status::invalid_argument("the first message must be start"));
        };
        if start.name == "taken" {
            return Err(Status::already_exists("the name taken is taken by a service on node b"));
        }
        let mut archive = Vec::new();
        while let Some(message) = input.message().await? {
            match message.kind {
                Some(v1::restore_input::Kind::Data(data)) => archive.extend_from_slice(&data),
                _ => return Err(Status::internal("a message of a restore has no data")),
            }
        }
        let name = if start.name.is_empty() { "redis".to_owned() } else { start.name.clone() };
        *self.asked.restored.lock().unwrap() = Some((start, archive));
        Ok(Response::new(Service { name, ..Service::default() }))
    }

    type CopyOutStream = Items<v1::CopyOutput>;
    async fn copy_out(&self, request: Request<v1::CopyOutRequest>) -> Answer<Self::CopyOutStream> {
        let request = request.into_inner();
        let archive = self.asked.archive.lock().unwrap().clone();
        let mut pieces: Vec<_> =
            archive.chunks(700).map(|data| Ok(v1::CopyOutput { data: data.to_vec().into() })).collect();
        match request.path.as_str() {
            "/missing" => return Err(Status::not_found("cannot find /missing of the service")),
            "/cut" => {
                pieces.pop();
                pieces.push(Err(Status::internal("cannot read a file in /cut of the service")));
            }
            _ => {}
        }
        Ok(Response::new(Box::pin(tokio_stream::iter(pieces))))
    }

    async fn stats(&self, request: Request<v1::StatsRequest>) -> Answer<v1::StatsResponse> {
        let mut asked = self.asked.stats.lock().unwrap();
        asked.push(request.into_inner());
        let nth = asked.len() as u64;
        // A quarter of a CPU.
        let full = v1::ServiceStats {
            name: "redis".into(),
            cpu_ns: Some(nth * 250_000_000),
            time_ns: nth * 1_000_000_000,
            memory_bytes: Some(3 << 20),
            memory_limit_bytes: 256 << 20,
            pids: Some(4),
            received_bytes: Some(5 << 10),
            sent_bytes: Some(6),
            read_bytes: Some(0),
            written_bytes: Some(7),
        };
        let bare = v1::ServiceStats { name: "web".into(), time_ns: nth, ..v1::ServiceStats::default() };
        Ok(Response::new(v1::StatsResponse { services: vec![full, bare] }))
    }

    async fn update(&self, request: Request<v1::UpdateRequest>) -> Answer<Service> {
        let request = request.into_inner();
        self.asked.update.lock().unwrap().push(request.clone());
        Ok(Response::new(Service { name: request.name, ..redis() }))
    }

    async fn start(&self, request: Request<ServiceRequest>) -> Answer<Service> {
        let name = request.into_inner().name;
        if name == "missing" {
            return Err(unknown("missing"));
        }
        Ok(Response::new(Service { name, state: ServiceState::Running.into(), ..Service::default() }))
    }

    async fn restart(&self, request: Request<StopRequest>) -> Answer<Service> {
        let request = request.into_inner();
        self.asked.stop.lock().unwrap().push(request.clone());
        self.start(Request::new(ServiceRequest { name: request.name })).await
    }

    async fn remove(&self, request: Request<RemoveRequest>) -> Answer<RemoveResponse> {
        let request = request.into_inner();
        if request.name == "running" && !request.force {
            return Err(Status::failed_precondition(
                "running still runs: stop it first, or use --force to do both",
            ));
        }
        Ok(Response::new(RemoveResponse {}))
    }

    type PrepareStream = Items<MigrationEvent>;
    async fn prepare(&self, request: Request<MigrateRequest>) -> Answer<Self::PrepareStream> {
        let request = request.into_inner();
        let mut answer = match request.to.as_str() {
            "gone" => return Err(Status::not_found("there is no node gone; `godwit nodes` lists all nodes")),
            "old" => report(&request.name, "aborted", "node old refuses: its godwit is too old"),
            _ => report(&request.name, "prepared", ""),
        };
        if let Some(migration_event::Kind::Report(report)) = &mut answer.kind {
            report.destination.clone_from(&request.to);
            report.not_retained_bytes = if request.to == "full" { 7 << 20 } else { 0 };
            report.files_stay = if request.to == "full" { "the disk is full".into() } else { String::new() };
        }
        self.asked.prepared.lock().unwrap().push(request);
        items(vec![progress("copy", 100 << 20, 201 << 20), answer])
    }

    type MigrateStream = Items<MigrationEvent>;
    async fn migrate(&self, request: Request<MigrateRequest>) -> Answer<Self::MigrateStream> {
        let request = request.into_inner();
        let name = request.name.clone();
        match name.as_str() {
            "redis" => items(vec![
                progress("reserve", 0, 0),
                progress("dump", 10 << 20, 0),
                progress("transfer", 100 << 20, 201 << 20),
                progress("transfer", 201 << 20, 201 << 20),
                report(&name, "moved", ""),
            ]),
            "aborted" => items(vec![
                progress("reserve", 0, 0),
                report(&name, "aborted", "node b has 10 MiB of memory left and 256 MiB are needed"),
            ]),
            "lost" => items(vec![
                progress("serve", 1 << 20, 201 << 20),
                report(&name, "lost", "the processes that held its pages on node a are gone"),
            ]),
            // Never ends by itself.
            "committed" => {
                let steps = tokio_stream::iter([Ok(progress("commit", 0, 0))]);
                Ok(Response::new(Box::pin(steps.chain(tokio_stream::pending()))))
            }
            "breaks" => items(vec![progress("freeze", 0, 0)]),
            // Goes on until it is cancelled.
            "slow" | "late" => {
                let asked = self.asked.clone();
                let last = if name == "slow" {
                    report(&name, "aborted", "cancelled by the user before the commit")
                } else {
                    report(&name, "moved", "")
                };
                let end = async move {
                    asked.cancel.notified().await;
                    Ok(last)
                };
                let steps = tokio_stream::iter([Ok(progress("freeze", 0, 0))]);
                Ok(Response::new(Box::pin(steps.chain(once(end)))))
            }
            name => Err(unknown(name)),
        }
    }

    async fn check_move(&self, request: Request<v1::CheckMoveRequest>) -> Answer<v1::CheckMoveResponse> {
        let asked = request.into_inner().r#move.unwrap();
        let obstacle = v1::Obstacle {
            pid: 4711,
            inside: 7,
            name: "worker".into(),
            what: "has an io_uring open".into(),
            why: "which CRIU cannot dump".into(),
        };
        let forecast = v1::Forecast { mode: "precopy".into(), memory_bytes: 1 << 20, ..Default::default() };
        Ok(Response::new(v1::CheckMoveResponse {
            source: "a".into(),
            destination: asked.to,
            obstacles: if asked.name == "stuck" { vec![obstacle] } else { Vec::new() },
            objections: if asked.name == "stuck" { vec!["node b: no room".into()] } else { Vec::new() },
            warnings: if asked.name == "slow" { vec!["it writes much".into()] } else { Vec::new() },
            forecast: (asked.name != "stuck").then_some(forecast),
            name: asked.name,
        }))
    }

    async fn place(&self, request: Request<v1::PlaceRequest>) -> Answer<v1::PlaceResponse> {
        let request = request.into_inner();
        let name = request.r#move.unwrap().name;
        let reason = v1::PlaceReason { kind: Some(v1::place_reason::Kind::NoCandidate(true)) };
        let moves = name != "alone" && name != "stuck";
        Ok(Response::new(v1::PlaceResponse {
            node: "a".into(),
            to: if moves { "b".into() } else { String::new() },
            mode: if moves { "precopy".into() } else { String::new() },
            then: if name == "aborted" { vec!["c".into()] } else { Vec::new() },
            reasons: if name == "alone" { vec![reason] } else { Vec::new() },
            objections: if name == "stuck" { vec!["it has a pipe".into()] } else { Vec::new() },
            warnings: vec!["it writes much".into()],
            latency_us: request.latency_us,
            stay_ms: request.stay_ms,
            name,
            ..Default::default()
        }))
    }

    /// Of those that are asked for, `alone` has no policy, and for `web` something was decided, 130 minutes ago.
    async fn policy(&self, request: Request<v1::PolicyRequest>) -> Answer<v1::PolicyResponse> {
        let request = request.into_inner();
        self.asked.policy.lock().unwrap().push(request.clone());
        let name = request.name;
        if name == "missing" {
            return Err(unknown(&name));
        }
        let policy = match request.change {
            Some(v1::policy_request::Change::Set(policy)) => Some(policy),
            Some(v1::policy_request::Change::Clear(_)) => None,
            None => (name != "alone").then(v1::Policy::default),
        };
        let unpaid = v1::place_reason::Unpaid { suffered: 0.8, needed: 1.6, left_ms: 900 };
        let reason = v1::PlaceReason { kind: Some(v1::place_reason::Kind::Unpaid(unpaid)) };
        let other = v1::PlaceOther { name: "c".into(), worth: -0.3, ..Default::default() };
        let last = v1::PlaceResponse {
            name: name.clone(),
            node: "a".into(),
            reasons: vec![reason],
            others: vec![other],
            warnings: vec!["it writes much".into()],
            ..Default::default()
        };
        let now = std::time::UNIX_EPOCH.elapsed().unwrap();
        let decided = now.saturating_sub(std::time::Duration::from_secs(130 * 60));
        Ok(Response::new(v1::PolicyResponse {
            last: (name == "web").then_some(last),
            decided_ms: i64::try_from(decided.as_millis()).unwrap(),
            node: "a".into(),
            policy,
            name,
        }))
    }

    async fn cancel(&self, request: Request<ServiceRequest>) -> Answer<CancelResponse> {
        let name = request.into_inner().name;
        self.asked.cancelled.lock().unwrap().push(name.clone());
        self.asked.cancel.notify_one();
        let cancelled = name == "slow";
        let reason = if cancelled { "" } else { "it had committed" };
        Ok(Response::new(CancelResponse { cancelled, reason: reason.into() }))
    }

    async fn resolve(&self, request: Request<ResolveRequest>) -> Answer<ResolveResponse> {
        let ResolveRequest { name, own } = request.into_inner();
        if own && name == "doubtful" {
            return Ok(Response::new(ResolveResponse {}));
        }
        Err(Status::failed_precondition(format!("service {name} needs no decision by hand")))
    }

    async fn nodes(&self, _: Request<NodesRequest>) -> Answer<NodesResponse> {
        let node = |name: &str, is_self: bool| NodeInfo {
            name: name.into(),
            address: "10.99.0.11:7117".into(),
            state: if is_self { "ready" } else { "unreachable" }.into(),
            reason: if is_self { "" } else { "no route to host" }.into(),
            version: "0.1.0".into(),
            memory_bytes: 4 << 30,
            memory_available_bytes: 1 << 30,
            cpus: 2,
            is_self,
            ..NodeInfo::default()
        };
        Ok(Response::new(NodesResponse { nodes: vec![node("b", false), node("a", true)] }))
    }

    type EventsStream = Items<Event>;
    async fn events(&self, _: Request<EventsRequest>) -> Answer<Self::EventsStream> {
        items(vec![Event {
            time_ms: 1_500,
            node: "a".into(),
            subject: "service".into(),
            action: "started".into(),
            name: "redis".into(),
            detail: "epoch 1".into(),
        }])
    }

    async fn network_inspect(&self, _: Request<v1::NetworkInspectRequest>) -> Answer<v1::NetworkInfo> {
        let node = |name: &str, state: &str, reason: &str| v1::NetworkNode {
            name: name.into(),
            vtep: "10.99.0.11".into(),
            state: state.into(),
            reason: reason.into(),
            is_self: state == "self",
            ..v1::NetworkNode::default()
        };
        let keyed = v1::NetworkNode {
            mtu: 1390,
            encryption: "tunnel".into(),
            keys_age_s: 12,
            packets: 345,
            ..node("b", "encrypted", "")
        };
        let by_wireguard = v1::NetworkNode {
            encryption: "wireguard".into(),
            sent_bytes: 3 << 20,
            packets: 0,
            name: "d".into(),
            ..keyed.clone()
        };
        Ok(Response::new(v1::NetworkInfo {
            name: "default".into(),
            crossing: 3,
            node: "a".into(),
            backend: "kernel".into(),
            subnet: "10.88.0.0/16".into(),
            gateway: "10.88.0.1".into(),
            mtu: 1390,
            vni: 88,
            vxlan_port: 4789,
            uplink: "eth0".into(),
            bridge: "gw0".into(),
            encryption: "tunnel".into(),
            guarded: true,
            dropped: 7,
            nodes: vec![node("a", "self", ""), keyed, by_wireguard, node("c", "unknown", "not heard of")],
            ..v1::NetworkInfo::default()
        }))
    }

    async fn network_create(&self, request: Request<v1::NetworkCreateRequest>) -> Answer<v1::Network> {
        let v1::NetworkCreateRequest { name, subnet, subnet6, vni } = request.into_inner();
        let subnet = if subnet.is_empty() { "10.89.0.0/24".into() } else { subnet };
        let id = "01NETWORK".into();
        Ok(Response::new(v1::Network { name, id, subnet, subnet6, vni: vni.max(7), removed: false }))
    }

    async fn network_list(&self, _: Request<v1::NetworkListRequest>) -> Answer<v1::NetworkListResponse> {
        let entry = |name: &str, subnet: &str, services: &[&str], reason: &str| v1::NetworkEntry {
            network: Some(v1::Network {
                name: name.into(),
                subnet: subnet.into(),
                vni: 88,
                ..v1::Network::default()
            }),
            services: services.iter().map(ToString::to_string).collect(),
            reason: reason.into(),
        };
        Ok(Response::new(v1::NetworkListResponse {
            networks: vec![
                entry("default", "10.88.0.0/16", &["db", "web"], ""),
                entry("back", "10.89.0.0/24", &[], "no port"),
            ],
        }))
    }

    async fn image_list(&self, _: Request<v1::ImageListRequest>) -> Answer<v1::ImageListResponse> {
        Ok(Response::new(v1::ImageListResponse { layers: vec![layer()], images: vec![crossing(), image()] }))
    }

    async fn image_add(&self, request: Request<v1::ImageAddRequest>) -> Answer<v1::Image> {
        let v1::ImageAddRequest { reference, digest, path } = request.into_inner();
        match (reference.as_str(), digest.as_str()) {
            ("", _) => Err(Status::invalid_argument(format!("the image in {path} has no whole name there"))),
            // Of an archive.
            (_, "") => Ok(Response::new(v1::Image { reference, ..crossing() })),
            _ => Ok(Response::new(v1::Image { reference, digest, ..image() })),
        }
    }

    async fn image_add_platform(
        &self,
        request: Request<v1::ImageAddPlatformRequest>,
    ) -> Answer<v1::ImageAddPlatformResponse> {
        let v1::ImageAddPlatformRequest { reference, architecture } = request.into_inner();
        match architecture.as_str() {
            "arm64" => Ok(Response::new(v1::ImageAddPlatformResponse {
                left_out: reference.contains("busy").then(|| "web".to_owned()).into_iter().collect(),
                image: Some(v1::Image { reference, ..crossing() }),
            })),
            other => Err(Status::already_exists(format!("image {reference} is for linux/{other} already"))),
        }
    }

    async fn image_remove(
        &self,
        request: Request<v1::ImageRemoveRequest>,
    ) -> Answer<v1::ImageRemoveResponse> {
        match request.into_inner().layers.as_slice() {
            [] => Ok(Response::new(v1::ImageRemoveResponse {
                removed: vec![layer()],
                names: vec![image().reference],
            })),
            [name, ..] => Err(Status::failed_precondition(format!("layer {name} is used by web"))),
        }
    }

    async fn volume_create(&self, request: Request<v1::VolumeCreateRequest>) -> Answer<v1::Volume> {
        Ok(Response::new(v1::Volume { name: request.into_inner().name, ..v1::Volume::default() }))
    }

    async fn volume_list(&self, _: Request<v1::VolumeListRequest>) -> Answer<v1::VolumeListResponse> {
        let volume = |name: &str, service: &str| v1::Volume {
            name: name.into(),
            service: service.into(),
            path: format!("/volumes/{name}"),
            bytes: 3 << 20,
        };
        Ok(Response::new(v1::VolumeListResponse { volumes: vec![volume("data", "web"), volume("old", "")] }))
    }

    async fn volume_remove(
        &self,
        request: Request<v1::VolumeRemoveRequest>,
    ) -> Answer<v1::VolumeRemoveResponse> {
        match request.into_inner().name.as_str() {
            "old" => Ok(Response::new(v1::VolumeRemoveResponse {})),
            name => Err(Status::failed_precondition(format!("service web has volume {name}"))),
        }
    }

    async fn network_remove(
        &self,
        request: Request<v1::NetworkRemoveRequest>,
    ) -> Answer<v1::NetworkRemoveResponse> {
        match request.into_inner().name.as_str() {
            "back" => Ok(Response::new(v1::NetworkRemoveResponse {})),
            name => Err(Status::not_found(format!("there is no network {name}"))),
        }
    }

    async fn doctor(&self, _: Request<DoctorRequest>) -> Answer<DoctorResponse> {
        let check = |name: &str, status: &str, found: &str, advice: &str| Check {
            name: name.into(),
            status: status.into(),
            found: found.into(),
            advice: advice.into(),
        };
        Ok(Response::new(DoctorResponse {
            node: "a".into(),
            checks: vec![
                check("criu", "ok", "4.1.1", ""),
                check("netem", "degraded", "not in this kernel", "lab links are emulated by godwit"),
                check("runc", "missing", "no such program", "run scripts/setup"),
            ],
        }))
    }

    async fn create_token(&self, request: Request<CreateTokenRequest>) -> Answer<CreateTokenResponse> {
        *self.asked.token.lock().unwrap() = Some(request.into_inner());
        Ok(Response::new(CreateTokenResponse { token: "gwt1-secret".into() }))
    }

    async fn remove_node(&self, request: Request<RemoveNodeRequest>) -> Answer<RemoveNodeResponse> {
        assert_eq!(request.into_inner().node, "c");
        Ok(Response::new(RemoveNodeResponse { services: vec!["web".into()] }))
    }
}

/// A stream of the one item that a future yields.
fn once<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> impl Stream<Item = T> + Send {
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        let _ = sender.send(future.await).await;
    });
    tokio_stream::wrappers::ReceiverStream::new(receiver)
}

fn image() -> v1::Image {
    v1::Image {
        reference: "docker.io/library/redis:7".into(),
        digest: format!("sha256:{}", "ab".repeat(32)),
        architecture: "amd64".into(),
        bytes: 40 << 20,
        pulled_ms: 0,
        layers: vec![layer().digest],
        services: vec!["web".into()],
        // As an earlier release has it.
        platforms: Vec::new(),
        run: None,
        modules: Vec::new(),
    }
}

/// One for both instruction sets.
fn crossing() -> v1::Image {
    let platform = |architecture: &str, machine: &str| v1::ImagePlatform {
        architecture: architecture.into(),
        machine: machine.into(),
        id: format!("sha256:{}", "ef".repeat(32)),
        layers: vec![layer().digest],
        bytes: 3 << 20,
    };
    v1::Image {
        reference: "docker.io/library/ledger:1".into(),
        digest: format!("sha256:{}", "cd".repeat(32)),
        bytes: 5 << 20,
        services: Vec::new(),
        platforms: vec![platform("amd64", "x86_64"), platform("arm64", "aarch64")],
        run: Some(v1::ImageRun { entrypoint: vec!["/bin/ledger".into()], ..v1::ImageRun::default() }),
        ..image()
    }
}

fn layer() -> v1::ImageLayer {
    v1::ImageLayer {
        digest: format!("sha256:{}", "0123456789ab".repeat(6).split_at(64).0),
        bytes: 3 << 20,
        last_used_ms: 0,
        services: vec!["web".into()],
    }
}
