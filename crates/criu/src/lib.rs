//! godwit-criu (placeholder head, replaced by its owner).
