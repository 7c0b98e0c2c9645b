#![no_main]

#[allow(dead_code, unused_imports, reason = "only the tests use the rest")]
#[path = "../../tests/exactly_once/main.rs"]
mod exactly_once;

libfuzzer_sys::fuzz_target!(
    init: assert!(std::env::var_os("ORT_DYLIB_PATH").is_some(), "ORT_DYLIB_PATH must name an ONNX Runtime"),
    |bytes: &[u8]| exactly_once::fuzzed::payloads(bytes)
);
