//! Rows whose growing states have different lengths in one run: which states are padded, and which rows can share a run.

use rows::tensor::{PaddingSide, element_count};

use super::bound::{BoundInput, BoundState, Generated, GeneratedValue, GrowingAxis, NewLength, Source, StatePlace};
use super::error::BindingError;
use super::shapes::describe;
use crate::config::{Config, GROWING_PADDING};
use crate::onnx::Signature;

/// How rows whose growing states have different lengths share a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrowingPadding {
    /// Where a row's padding is.
    pub side: PaddingSide,
    /// By how many elements a run makes the states longer.
    pub added: NewLength,
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

/// Finds the states that are padded, and marks them: those that grow along an axis with the same symbolic name as that
/// of the state that a mask names; without names, all that grow along one axis.
pub(super) fn bind_growing_padding(
    config: &Config,
    signature: &Signature,
    inputs: &[BoundInput],
    states: &mut [BoundState],
) -> Result<Option<GrowingPadding>, BindingError> {
    let Some(side) = config.states.growing_padding else { return Ok(None) };
    let error = |why| BindingError::Parameter { parameter: GROWING_PADDING, value: side.to_string(), why };
    let (masked, added) = mask(inputs).map_err(error)?;
    let symbol = |state: &BoundState, axis: usize| {
        let info = signature.inputs.iter().find(|info| info.name == inputs[state.input].name);
        info.and_then(|info| info.symbols.get(axis)).map_or("", String::as_str)
    };
    let wanted = symbol(&states[masked.state], masked.axis).to_owned();
    let mut padded = Vec::new();
    for state in states.iter_mut() {
        let (StatePlace::Beside(beside), Some(_)) = (state.place, state.batch_axis) else { continue };
        let mut open = (0..state.dims.len()).filter(|&axis| state.dims[axis] < 0);
        let (Some(axis), None, Some(element_bytes)) = (open.next(), open.next(), state.data_type.byte_size()) else {
            continue;
        };
        if symbol(state, axis) == wanted {
            state.padded_axis = Some(axis);
            padded.push(PaddedState { beside, axis, element_bytes });
        }
    }
    let state = &states[masked.state];
    if state.padded_axis != Some(masked.axis) {
        return Err(error(format!(
            "the mask is that of state '{}', {}: a state that is padded has a batch dimension and one other open dimension",
            inputs[state.input].name,
            describe(state.data_type, &state.dims)
        )));
    }
    Ok(Some(GrowingPadding { side, added, states: padded }))
}

/// The state whose elements a generated mask marks, and how many follow in it.
fn mask(inputs: &[BoundInput]) -> Result<(GrowingAxis, NewLength), String> {
    let mut masks = inputs.iter().filter_map(|input| match &input.source {
        Source::Generated(Generated { value: GeneratedValue::Mask { state, new }, written, .. }) => {
            Some((input, written, *state, *new))
        }
        _ => None,
    });
    let Some((input, written, state, added)) = masks.next() else {
        return Err("no input tells the model which elements of a state are padding: write a mask in \
                    'generated_inputs', 'MASK=mask(STATE, INPUT)'"
            .to_owned());
    };
    if input.batch_axis.is_none() {
        return Err(format!("the mask '{}' has no batch dimension, so it is the same for all rows", input.name));
    }
    if added == NewLength::Fixed(0) {
        return Err(format!(
            "'{}={written}' leaves out what a run adds to the state: write 'mask(STATE, INPUT)'",
            input.name
        ));
    }
    Ok((state, added))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two padded states, and between them one that grows as well.
    fn padding() -> GrowingPadding {
        let state = |beside, axis, element_bytes| PaddedState { beside, axis, element_bytes };
        GrowingPadding {
            side: PaddingSide::Left,
            added: NewLength::Fixed(1),
            states: vec![state(0, 2, 4), state(2, 1, 8)],
        }
    }

    fn dims(first: [i64; 3], other: [i64; 2], second: [i64; 2]) -> Vec<Vec<i64>> {
        vec![first.to_vec(), other.to_vec(), second.to_vec()]
    }

    #[test]
    fn rows_differ_in_the_one_length_of_their_padded_states_only() {
        let padding = padding();
        let row = dims([1, 3, 7], [1, 2], [1, 7]);
        assert!(padding.is_for(&row, &dims([1, 3, 5], [1, 2], [1, 5])));
        assert!(padding.is_for(&row, &dims([1, 3, 0], [1, 2], [1, 0])));
        for (other, why) in [
            (dims([1, 3, 5], [1, 3], [1, 5]), "a state that is not padded"),
            (dims([1, 4, 5], [1, 2], [1, 5]), "another dimension"),
            (dims([1, 3, 5], [1, 2], [1, 6]), "the padded states of a row"),
            (Vec::new(), "states that are not known"),
        ] {
            assert!(!padding.is_for(&row, &other) && !padding.is_for(&other, &row), "{why}");
        }
    }

    #[test]
    fn a_row_has_the_length_and_the_bytes_of_its_padded_states() {
        let row = dims([1, 3, 7], [1, 100], [1, 7]);
        assert_eq!((padding().length(&row), padding().bytes(&row)), (Some(7), 3 * 7 * 4 + 7 * 8));
        assert_eq!(padding().length(&dims([1, 3, 7], [1, 7], [1, 8])), None);
    }
}
