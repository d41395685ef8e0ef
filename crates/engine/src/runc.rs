//! runc (placeholder head, replaced by its owner).
