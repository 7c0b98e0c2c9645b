//! Panics on request, for the tests of what a panic does to a server. Empty in a normal build.

use super::Row;

/// Panics if the library was built with `fault-injection` and a row's request has the parameter `inject_panic` with
/// the name of this stage.
#[cfg(feature = "fault-injection")]
pub fn point(stage: &str, batch: &[Row]) {
    if batch.iter().any(|row| row.request.parameter("inject_panic").as_deref() == Some(stage)) {
        panic!("injected at {stage}");
    }
}

/// Does nothing.
#[cfg(not(feature = "fault-injection"))]
pub const fn point(_stage: &str, _batch: &[Row]) {}
