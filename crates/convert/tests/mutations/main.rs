//! Changed models, under the fuzz target `conversion`.

#![allow(clippy::unwrap_used, reason = "all of this is a test")]

mod fuzzed;
#[path = "../../../../fuzz/inputs.rs"]
mod inputs;

#[test]
fn any_fuzzed_graph_is_converted_or_refused() {
    inputs::run("conversion", 200, fuzzed::conversion);
}
