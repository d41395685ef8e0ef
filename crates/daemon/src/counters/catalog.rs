//! All metrics that this node tells Prometheus, but for those of the process: names, kinds, labels, and what they mean. The
//! table of docs/metrics.md lists the same.
//!
//! Units are base units: seconds, bytes, and ratios of 1. No label has a value of clients' or of other users' making but the
//! names of services and nodes, and none is free text.

use prometheus::{HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts};

/// What a metric is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It only grows, until the daemon, or what it is about, begins anew.
    Counter,
    /// A value of now.
    Gauge,
    /// How many were below each bound.
    Histogram(Bounds),
}

/// The bounds of a histogram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bounds {
    /// Frozen times: from what the smallest service takes to what no client waits for.
    Frozen,
    /// Whole moves: from a small service on a fast link to hours.
    Whole,
    /// Rounds of pre-copy.
    Rounds,
}

impl Bounds {
    fn of(self) -> &'static [f64] {
        match self {
            Self::Frozen => {
                &[0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0]
            }
            Self::Whole => {
                &[0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0]
            }
            Self::Rounds => &[0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0],
        }
    }
}

/// A metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Metric {
    /// Its name.
    pub name: &'static str,
    pub kind: Kind,
    /// The names of its labels.
    pub labels: &'static [&'static str],
    /// What it means, in a sentence.
    pub help: &'static str,
}

impl Metric {
    fn opts(&self) -> Opts {
        Opts::new(self.name, self.help)
    }

    #[allow(clippy::expect_used, reason = "a test makes each of them")]
    pub(super) fn counters(&self) -> IntCounterVec {
        IntCounterVec::new(self.opts(), self.labels).expect("a name and labels that Prometheus takes")
    }

    #[allow(clippy::expect_used, reason = "a test makes each of them")]
    pub(super) fn counter(&self) -> IntCounter {
        IntCounter::with_opts(self.opts()).expect("a name that Prometheus takes")
    }

    #[allow(clippy::expect_used, reason = "a test makes each of them")]
    pub(super) fn histograms(&self) -> HistogramVec {
        let bounds = match self.kind {
            Kind::Histogram(bounds) => bounds.of(),
            Kind::Counter | Kind::Gauge => &[],
        };
        let opts = HistogramOpts::from(self.opts()).buckets(bounds.to_vec());
        HistogramVec::new(opts, self.labels).expect("a name, labels and bounds that Prometheus takes")
    }
}

macro_rules! catalog {
    ($($metric:ident: $kind:expr, $name:literal [$($label:literal)*] $help:literal;)*) => {
        $(pub(crate) const $metric: Metric = Metric {
            name: $name,
            kind: $kind,
            labels: &[$($label),*],
            help: $help,
        };)*

        /// All of them.
        #[cfg(test)]
        pub(crate) const ALL: &[Metric] = &[$($metric),*];
    };
}

use Kind::{Counter, Gauge, Histogram};

catalog! {
    // The node.
    BUILD: Gauge, "godwit_build_info" ["version" "protocol"] "The release of this godwitd, and the newest migration protocol that it speaks; always 1.";
    NODE: Gauge, "godwit_node_info" ["node" "arch" "kernel" "criu"] "This node as it tells others of itself; always 1.";
    CORDONED: Gauge, "godwit_node_cordoned" [] "Whether this node takes no more services.";
    BUSY: Gauge, "godwit_node_busy_ratio" [] "The busy share of this node's processors that it tells other nodes.";
    AVAILABLE: Gauge, "godwit_node_memory_available_bytes" [] "Memory that a service could have here, as this node tells others.";
    CERTIFICATE: Gauge, "godwit_certificate_expiry_timestamp_seconds" [] "When this node's certificate expires, in seconds since 1970.";
    DISK_SIZE: Gauge, "godwit_state_filesystem_size_bytes" [] "Size of the file system of the state directory.";
    DISK_FREE: Gauge, "godwit_state_filesystem_avail_bytes" [] "What is free on the file system of the state directory.";
    LAYERS: Gauge, "godwit_image_layers" [] "Layers of images on this node.";
    LAYER_BYTES: Gauge, "godwit_image_layers_bytes" [] "Bytes of the layers of images on this node, blobs and unpacked.";
    RETAINED_MEMORY: Gauge, "godwit_retained_memory_bytes" [] "Memory for retained pages of services that have left, or that may come.";
    RETAINED_FILES: Gauge, "godwit_retained_files_bytes" [] "Disk for retained files of services that have left, or that may come.";
    COLLECTED: Gauge, "godwit_collect_seconds" [] "How long it took to collect the metrics of this answer.";

    // Other nodes.
    PEER: Gauge, "godwit_peer_info" ["peer" "version"] "Another node of the cluster, with the release that it told last; always 1.";
    PEER_UP: Gauge, "godwit_peer_up" ["peer"] "Whether the other node was heard in the last 5 s.";
    PEER_HEARD: Gauge, "godwit_peer_last_exchange_timestamp_seconds" ["peer"] "When the other node was heard last, in seconds since 1970; absent before.";
    PEER_CLOCK: Gauge, "godwit_peer_clock_offset_seconds" ["peer"] "How far the other node's clock is ahead of this one's.";
    PEER_CORDONED: Gauge, "godwit_peer_cordoned" ["peer"] "Whether the other node takes no more services, as it told last.";

    // Services of this node.
    SERVICES: Gauge, "godwit_services" ["engine" "state"] "Services of this node by engine and state.";
    SERVICE: Gauge, "godwit_service_info" ["service" "engine" "follows"] "A service of this node, and whether it follows its clients; always 1.";
    SERVICE_STATE: Gauge, "godwit_service_state" ["service" "state"] "1 for the state that the service is in, 0 for the others.";
    RESTARTS: Counter, "godwit_service_restarts_total" ["service"] "How often its policy has started the service again since a user did.";
    SERVICE_START: Gauge, "godwit_service_start_time_seconds" ["service"] "When the service's main process was started, in seconds since 1970.";
    SERVICE_CPU: Counter, "godwit_service_cpu_seconds_total" ["service"] "CPU time of the service since its container was made on this node.";
    SERVICE_MEMORY: Gauge, "godwit_service_memory_bytes" ["service"] "What the service's memory limit counts, less the page cache that the kernel would drop first.";
    SERVICE_LIMIT: Gauge, "godwit_service_memory_limit_bytes" ["service"] "The service's memory limit; absent where it has none.";
    SERVICE_PIDS: Gauge, "godwit_service_pids" ["service"] "Processes and threads of the service.";
    SERVICE_RECEIVED: Counter, "godwit_service_network_receive_bytes_total" ["service"] "Bytes that the service has received since it came to this node.";
    SERVICE_SENT: Counter, "godwit_service_network_transmit_bytes_total" ["service"] "Bytes that the service has sent since it came to this node.";
    SERVICE_READ: Counter, "godwit_service_disk_read_bytes_total" ["service"] "Bytes that the service has read from block devices on this node.";
    SERVICE_WRITTEN: Counter, "godwit_service_disk_written_bytes_total" ["service"] "Bytes that the service has written to block devices on this node.";
    AWAITED: Gauge, "godwit_service_awaited_bytes" ["service"] "Memory of the service that is still at the node it came from.";
    SILENCE: Gauge, "godwit_service_awaited_silence_seconds" ["service"] "For how long the node that still has memory of the service has been silent; 0 while it answers.";
    WITHOUT_FIGURES: Gauge, "godwit_services_without_figures" [] "Services that run and whose figures could not be read for this answer.";

    // Services that follow their clients.
    CLIENTS: Gauge, "godwit_service_clients" ["service"] "Active clients of a service that follows them.";
    CLIENTS_OVER: Gauge, "godwit_service_clients_over_target" ["service"] "Of these, those with a latency above the target.";
    CLIENTS_UNMEASURED: Gauge, "godwit_service_clients_unmeasured" ["service"] "Of these, those whose latency is not known.";
    LATENCY_MEDIAN: Gauge, "godwit_service_client_latency_median_seconds" ["service"] "Median latency of its clients; absent where none is known.";
    LATENCY_MOST: Gauge, "godwit_service_client_latency_max_seconds" ["service"] "Highest latency of its clients; absent where none is known.";
    LATENCY_TARGET: Gauge, "godwit_service_client_latency_target_seconds" ["service"] "The latency with which its clients are content.";
    LOSS: Gauge, "godwit_service_client_loss" ["service"] "Client-seconds that its clients lose a second by latency, where it is.";
    UNPAID: Gauge, "godwit_service_move_debt_client_seconds" ["service"] "Client-seconds that its clients still have to lose before a move pays; 0 where that keeps it from no move.";
    FOLLOW_DECISIONS: Counter, "godwit_follow_decisions_total" ["decision"] "Decisions about services that follow their clients.";
    FOLLOW_STAYS: Counter, "godwit_follow_stays_total" ["reason"] "Reasons of decisions to stay; one may have several.";
    FOLLOW_REFUSED: Counter, "godwit_follow_refused_nodes_total" ["reason"] "Reasons for which decisions ruled out other nodes.";
    FOLLOW_MOVES: Counter, "godwit_follow_moves_total" ["outcome"] "Moves of services that follow their clients, which this node has begun by itself.";

    // Moves.
    MIGRATIONS: Counter, "godwit_migrations_total" ["mode" "outcome"] "Migrations from this node that have ended, by the mode that was used.";
    INCOMING: Counter, "godwit_incoming_migrations_total" ["outcome"] "Migrations to this node that have ended.";
    UNFINISHED: Gauge, "godwit_migrations_unfinished" ["role" "stage"] "Migrations in this node's journal that have not ended, by its role and how far they are.";
    IN_DOUBT: Gauge, "godwit_migrations_in_doubt" [] "Services that were restored here and wait for their source to say whether it has committed.";
    TO_RESOLVE: Gauge, "godwit_migrations_to_resolve" [] "Of these, those whose source cannot say it: an operator may have to decide.";
    UNSERVED: Gauge, "godwit_migration_unserved_bytes" [] "Memory of services that have left, which this node has still to send.";
    FROZEN: Histogram(Bounds::Frozen), "godwit_migration_frozen_seconds" ["mode" "outcome"] "Frozen times of migrations from this node.";
    WHOLE: Histogram(Bounds::Whole), "godwit_migration_duration_seconds" ["mode" "outcome"] "Total times of migrations from this node.";
    ROUNDS: Histogram(Bounds::Rounds), "godwit_migration_rounds" ["mode"] "Passes over the memory before the freeze, of services that moved from this node.";
    SENT: Counter, "godwit_migration_sent_bytes_total" ["mode" "phase"] "Layers, files, images and pages that migrations from this node have sent before, in and after the frozen time.";
    WIRE: Counter, "godwit_migration_wire_bytes_total" ["mode"] "All that migrations from this node have put on the wire.";
    FAULTS: Counter, "godwit_migration_faults_total" [] "Pages that processes had to wait for after the resume, of migrations from this node.";
    FRAMES: Counter, "godwit_migration_held_frames_total" ["fate"] "Frames that came in the frozen time of migrations from this node: delivered at the resume, or dropped for want of room.";
    PREPARATIONS: Counter, "godwit_preparations_total" ["outcome"] "Preparations of moves from this node that have ended.";
    PREPARING: Gauge, "godwit_preparations_active" [] "Preparations of moves from this node that are under way.";
    CHECKPOINTS: Counter, "godwit_checkpoints_total" ["outcome"] "Checkpoints of services of this node as files.";
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn each_metric_is_one_that_prometheus_takes_under_a_name_of_its_kind() {
        for metric in ALL {
            match metric.kind {
                Counter => drop(metric.counters()),
                Histogram(_) => drop(metric.histograms()),
                Gauge => {}
            }
            let Metric { name, help, kind, .. } = *metric;
            assert!(name.starts_with("godwit_"), "{name}");
            assert_eq!(name.ends_with("_total"), kind == Counter, "{name}");
            assert!(
                help.ends_with('.') && help.starts_with(|first: char| !first.is_lowercase()),
                "{name}: {help}"
            );
        }
    }

    /// Those of the process, which its library names.
    fn of_process() -> Vec<(String, String)> {
        use prometheus::core::Collector;
        let collector = prometheus::process_collector::ProcessCollector::for_self();
        let names = collector.desc().into_iter().map(|one| one.fq_name.clone());
        let kind = |name: &str| if name.ends_with("_total") { "counter" } else { "gauge" };
        names.map(|name| (kind(&name).to_owned(), name)).map(|(kind, name)| (name, kind)).collect()
    }

    #[test]
    fn the_table_of_the_documentation_lists_exactly_the_metrics_that_there_are() {
        let page = include_str!("../../../../docs/metrics.md");
        let rows = page.lines().filter_map(|line| {
            let cells: Vec<_> = line.strip_prefix("| `")?.split('|').map(str::trim).collect();
            let name = cells.first()?.strip_suffix('`')?;
            let is_metric = name.starts_with("godwit_") || name.starts_with("process_");
            is_metric.then(|| (name.to_owned(), (cells[1].to_owned(), cells[2].replace('`', ""))))
        });
        let listed: BTreeMap<_, _> = rows.collect();
        let own = ALL.iter().map(|metric| {
            let kind = match metric.kind {
                Counter => "counter",
                Gauge => "gauge",
                Histogram(_) => "histogram",
            };
            (metric.name.to_owned(), (kind.to_owned(), metric.labels.join(", ")))
        });
        let of_process = of_process().into_iter().map(|(name, kind)| (name, (kind, String::new())));
        let all: BTreeMap<_, _> = own.chain(of_process).collect();
        assert_eq!(listed, all);
    }
}
