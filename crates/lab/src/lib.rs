//! godwit-lab (placeholder head, replaced by its owner).
