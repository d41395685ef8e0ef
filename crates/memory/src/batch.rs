//! Pages as bytes for the wire.
