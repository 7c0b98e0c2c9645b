//! Conversions, checked in ONNX Runtime against the original model.

#![allow(clippy::unwrap_used, reason = "all of this is a test")]

mod command;
mod common;
mod delays;
mod exports;
mod far;
mod graphs;
mod join;
mod join_command;
mod lengths;
mod odd;
mod types;
mod windows;
