//! godwit-network (placeholder head, replaced by its owner).
