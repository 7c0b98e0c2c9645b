//! Panics on request, for the tests of what a panic does to a server. Empty in a normal build.

use crate::triton::Request;

/// Panics if the library was built with `fault-injection` and one of the requests has the parameter `inject_panic` with
/// the name of this stage.
#[cfg(feature = "fault-injection")]
pub fn point<'a>(stage: &str, requests: impl IntoIterator<Item = &'a Request>) {
    if requests.into_iter().any(|request| request.parameter("inject_panic").as_deref() == Some(stage)) {
        panic!("injected at {stage}");
    }
}

/// Does nothing.
#[cfg(not(feature = "fault-injection"))]
pub fn point<'a>(_stage: &str, _requests: impl IntoIterator<Item = &'a Request>) {}
