//! Generates the messages of `proto/onnx.proto`, without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let schema = protox::compile(["onnx.proto"], ["proto"])?;
    // Weights stay slices of the file's bytes. Rust would read the comments of the schema as documentation.
    prost_build::Config::new().bytes([".onnx.TensorProto.raw_data"]).disable_comments(["."]).compile_fds(schema)?;
    Ok(())
}
