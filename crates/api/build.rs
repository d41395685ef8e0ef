//! Generates the gRPC types from `proto/`.
fn main() -> std::io::Result<()> {
    tonic_prost_build::configure()
        .type_attribute(".", "#[derive(serde::Serialize)]")
        .type_attribute(".", "#[serde(rename_all = \"snake_case\")]")
        .type_attribute("godwit.v1.PublishedPort", "#[derive(serde::Deserialize)]")
        .bytes(".")
        .compile_protos(&["proto/godwit/v1/node.proto", "proto/godwit/v1/peer.proto"], &["proto"])
}
