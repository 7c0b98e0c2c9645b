//! Conversions, checked in ONNX Runtime against the original model.

mod command;
mod common;
mod exports;
mod graphs;
