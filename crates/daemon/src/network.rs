//! This node's part of the cluster's networks.
//!
//! ```text
//!   cluster_networks   the cluster's networks, the same on every node: learned, brought up, taken down, listed
//!   overlay            what is up of them here: guarded, made again, asked who else has an address
//!   forward            where frames to a service lead that is on another node
//!   attachment         which networks a service is on, and its address on each
//!   names              the DNS servers by which services find each other
//!   joined             the network namespaces that engines of others make for their containers
//!   inspect            a network as this node has it, for `godwit network inspect`
//! ```
//!
//! To make or remove a network all nodes are asked: [`network_changes`](crate::network_changes), which stands above
//! [`cluster`](crate::cluster), as that stands above this. What is there before a network takes frames, its guard and its
//! encryption, is [`protection`](crate::protection).

pub(crate) mod attachment;
pub(crate) mod cluster_networks;
pub(crate) mod forward;
pub(crate) mod inspect;
pub(crate) mod joined;
pub(crate) mod names;
pub(crate) mod overlay;
