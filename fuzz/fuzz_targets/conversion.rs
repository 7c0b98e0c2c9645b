#![no_main]

#[path = "../../crates/convert/tests/mutations/fuzzed.rs"]
mod fuzzed;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzzed::conversion(bytes));
