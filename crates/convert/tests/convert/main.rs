//! Conversions, checked in ONNX Runtime against the original model.

#![allow(clippy::unwrap_used, reason = "all of this is a test")]

mod builtin;
mod builtin_options;
mod command;
mod common;
mod delays;
mod exports;
mod far;
mod graphs;
mod lengths;
mod odd;
mod types;
mod windows;
