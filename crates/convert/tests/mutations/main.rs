//! Changed models, under the fuzz targets `conversion` and `joining`.

#![allow(clippy::unwrap_used, reason = "all of this is a test")]

mod fuzzed;
#[path = "../../../../fuzz/inputs.rs"]
mod inputs;
mod joined;

#[test]
fn any_fuzzed_graph_is_converted_or_refused() {
    inputs::run("conversion", 200, fuzzed::conversion);
}

#[test]
fn any_fuzzed_graphs_are_joined_or_refused() {
    inputs::run("joining", 400, joined::joining);
}
