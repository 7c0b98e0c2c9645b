#![no_main]

#[path = "../../crates/convert/tests/mutations/fuzzed.rs"]
mod fuzzed;
#[path = "../../crates/convert/tests/mutations/joined.rs"]
mod joined;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| joined::joining(bytes));
