//! Generates the messages and services of `proto/`, without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(["serving.proto", "inference.proto"], ["proto"])?;
    tonic_prost_build::configure().bytes(".").btree_map(".").build_transport(false).compile_fds(files)?;
    Ok(())
}
