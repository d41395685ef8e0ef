//! rootfs (placeholder head, replaced by its owner).
