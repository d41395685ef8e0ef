//! godwit-migration (placeholder head, replaced by its owner).
