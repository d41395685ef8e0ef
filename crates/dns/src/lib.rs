//! The DNS server of a network: services ask the gateway for names of services, and of everything else.
//!
//! ```text
//!   answer     what is said to a question, out of the names of services
//!   upstream   the node's own name servers, which are asked for everything else
//!   server     both, for who asks over UDP and TCP
//! ```
//!
//! Every node has the gateway's address, so a service asks the node that it is on, wherever that is. The server takes packets
//! of the network's bridge alone: it answers neither the uplink nor other networks. It caches nothing, as services come and go.

mod answer;
mod server;
mod upstream;

pub use answer::{Answer, Names, Transport, answer};
pub use server::{Server, hears};
pub use upstream::Upstream;

/// Where DNS is served (RFC 1035, section 4.2).
const PORT: u16 = 53;
