//! Workloads: root filesystems from the distribution's packages, and clients that measure.
