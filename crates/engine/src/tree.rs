//! tree (placeholder head, replaced by its owner).
