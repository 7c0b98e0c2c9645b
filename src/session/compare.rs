//! Compares a converted model with its original.

#![forbid(unsafe_code)]

use stateful_convert::report::Report;
use stateful_convert::verify::{Compared, Given, Models, VerifyError, verify};

use super::library::Library;

/// Runs both models on the CPU, on random data: the converted one in chunks, and rows together and alone.
pub fn compare(library: &Library, models: &Models, report: &Report) -> Result<Vec<Compared>, VerifyError> {
    verify(library.environment(), models, report, &Given::default())
}
