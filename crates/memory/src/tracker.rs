//! Which pages exist and which were written since the last look.
