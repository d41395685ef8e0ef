//! Generates the messages of CRIU's RPC from `proto/`.
fn main() -> std::io::Result<()> {
    prost_build::compile_protos(&["proto/rpc.proto"], &["proto"])
}
