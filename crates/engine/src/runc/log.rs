//! Reading a container's log: its end, since a time, and as it grows.
