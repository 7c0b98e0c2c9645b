//! Conversions, checked in ONNX Runtime against the original model.

#![allow(clippy::unwrap_used, reason = "all of this is a test")]

mod batches;
mod builtin;
mod builtin_options;
mod command;
mod command_files;
mod command_recordings;
mod common;
mod contexts;
mod delays;
mod exports;
mod far;
#[expect(dead_code, reason = "another test uses the rest")]
#[path = "../mutations/fuzzed.rs"]
mod fuzzed;
mod graphs;
#[path = "../../../../fuzz/inputs.rs"]
mod inputs;
mod join;
mod join_command;
#[expect(dead_code, reason = "another test uses the rest")]
#[path = "../mutations/joined.rs"]
mod joined;
mod layers;
mod lengths;
mod loops;
mod odd;
mod odd_loops;
mod quantized;
mod refusals;
mod search;
mod types;
mod windows;
