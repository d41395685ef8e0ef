//! godwit-transfer (placeholder head, replaced by its owner).
