//! The connections between two nodes: who a node is, how two nodes meet, and how bytes travel.
//!
//! ```text
//!   certificate, files    certificates and keys, and the small files that they are in
//!   identity, authority   who a node is: the cluster's CA, a node's certificate and key
//!   token, join           how a new node gets its certificate
//!   removal               nodes whose certificates are believed no more
//!   verify, tls           which certificates are believed, and for what
//!   listen, socket        TCP and TLS connections, made and accepted
//!   admission             which unfinished handshakes there is room for
//!   gauge                 what the kernel knows of a connection, and its rate
//!   frame                 the data plane's frames on such a connection
//!   connection            a data connection: peer, reader, writer, traffic
//! ```
//!
//! Every connection is TLS 1.3. A peer without a certificate of this cluster's CA gets a TLS alert
//! and not one byte of application data; what it can see is what TLS shows any client, the server's
//! certificate with the node's name. What a frame means is not known here.

mod admission;
pub mod authority;
pub mod certificate;
pub mod connection;
mod cryptography;
pub mod error;
mod files;
pub mod frame;
pub mod gauge;
pub mod identity;
pub mod join;
pub mod listen;
pub mod node;
mod options;
pub mod removal;
pub mod socket;
pub mod tls;
pub mod token;
mod verify;

pub use admission::KnownAddresses;
pub use authority::ClusterAuthority;
pub use certificate::Fingerprint;
pub use connection::{Carrier, Connection, ConnectionOptions, DataReader, DataWriter};
pub use error::IdentityError;
pub use frame::{Frame, FrameError, FrameReader, FrameWriter, MAX_PAYLOAD};
pub use gauge::{Gauge, Reading};
pub use identity::Identity;
pub use listen::{Accepted, ConnectError, ListenError, Listener, connect};
pub use node::{NodeName, NodeNameError};
pub use options::{ConnectOptions, ListenOptions};
pub use removal::{Membership, Removal, RemovalError, Removals};
pub use socket::{LinkOptions, SecureStream, Socket, Traffic};
pub use tls::{Alpn, TlsError};
pub use token::{JoinToken, Secret, TokenError};
