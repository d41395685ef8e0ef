//! The process that holds a service's pages and serves its faults at the destination.
