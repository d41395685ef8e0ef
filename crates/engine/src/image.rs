//! image (placeholder head, replaced by its owner).
