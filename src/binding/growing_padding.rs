//! Rows whose growing states have different lengths in one run: which states are padded, and which rows can share a run.

use super::error::BindingError;
use super::{BoundInput, BoundState};
use crate::config::Config;
use crate::session::Signature;
use crate::tensor::{PaddingSide, element_count};

/// How rows whose growing states have different lengths share a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrowingPadding {
    /// Where a row's padding is.
    pub side: PaddingSide,
    /// The input, and its axis, by whose elements a run makes the states longer.
    pub added: (usize, usize),
    states: Vec<PaddedState>,
}

/// A state that is padded. All of a row have the same length.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PaddedState {
    /// Its number among the states beside the slot.
    beside: usize,
    axis: usize,
    element_bytes: usize,
}

impl GrowingPadding {
    /// The length of a row's padded states, if the states beside the slot have these dims; `None` if the padded ones
    /// have different lengths: then the row shares no run with rows of other lengths.
    pub fn length(&self, dims: &[Vec<i64>]) -> Option<i64> {
        let mut lengths = self.states.iter().map(|state| dims.get(state.beside)?.get(state.axis).copied());
        let first = lengths.next()??;
        lengths.all(|length| length == Some(first)).then_some(first)
    }

    /// Whether rows with these dims of the states beside the slot can be padded to one length.
    pub fn is_for(&self, a: &[Vec<i64>], b: &[Vec<i64>]) -> bool {
        let is_padded = |beside, axis| self.states.iter().any(|state| (state.beside, state.axis) == (beside, axis));
        let is_like = |(beside, (a, b)): (usize, (&Vec<i64>, &Vec<i64>))| {
            a.len() == b.len() && (0..a.len()).all(|axis| a[axis] == b[axis] || is_padded(beside, axis))
        };
        self.length(a).is_some() && self.length(b).is_some() && a.iter().zip(b).enumerate().all(is_like)
    }

    /// Bytes of a row's padded states in the model, without padding.
    pub fn bytes(&self, dims: &[Vec<i64>]) -> usize {
        let bytes = |state: &PaddedState| {
            let count = dims.get(state.beside).and_then(|dims| element_count(dims)).unwrap_or(0);
            count.saturating_mul(state.element_bytes)
        };
        self.states.iter().map(bytes).fold(0, usize::saturating_add)
    }
}

pub(super) fn bind_growing_padding(
    _config: &Config,
    _signature: &Signature,
    _inputs: &[BoundInput],
    _states: &mut [BoundState],
) -> Result<Option<GrowingPadding>, BindingError> {
    Ok(None)
}
