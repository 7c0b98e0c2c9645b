//! States: their batch axis, their dims, whether their two ends agree, and where they are kept. And of rows whose
//! growing states have different lengths in one run: which states are padded, and which rows can share a run.

use rows::tensor::{DataType, PaddingSide, RowLayout, StorageType, element_count};

use super::bound::{
    BoundInput, BoundOutput, BoundState, Generated, GeneratedValue, GrowingAxis, Initial, NewLength, Source,
    StatePlace, fetched,
};
use super::error::{BindingError, Result, bad, wrong_dims};
use super::fit::{batches, check_type, describe, empty_dims, find_output, is_batch, state_dims};
use super::inputs::Feeds;
use crate::config::{Config, DeclaredState, GROWING_PADDING, InitialSources, StateDims, StatePair, state_dims_line};
use crate::onnx::{Signature, TensorInfo, all_agree, open_axes};

pub(super) struct StateBinder<'a> {
    pub config: &'a Config,
    pub initial_sources: &'a InitialSources,
    pub signature: &'a Signature,
    pub pairs: &'a [StatePair],
    pub batch_symbol: Option<&'a str>,
    /// Whether an input of requests has an open batch dimension.
    pub batch_is_open: bool,
    /// The names that requests and all states share, if none is a usual one of the batch and there are several.
    pub shared: &'a [&'a str],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum BatchAxis {
    At(usize),
    /// The state has none. Open dimensions vary.
    Absent,
    /// No dimension can be the batch, and a run has several rows.
    Missing,
    /// Several readings are possible.
    Unclear,
}

impl StateBinder<'_> {
    /// Binds a state that comes after those `before` it: feeds its input and fetches its output. `None` if the model
    /// does not take the state.
    pub fn bind(
        &self,
        pair: &StatePair,
        feeds: &mut Feeds,
        outputs: &mut Vec<BoundOutput>,
        before: &[BoundState],
    ) -> Result<Option<BoundState>> {
        let declared = self.config.states.declaration(pair);
        let named_by = if declared.is_some() { "'sequence_batching.state'" } else { "'state_pairs'" };
        let fits = |input: &str, output: &str| {
            self.signature.input(input).is_some() && self.signature.output(output).is_some()
        };
        if !fits(&pair.input, &pair.output) && fits(&pair.output, &pair.input) {
            let (input, output) = (pair.input.clone(), pair.output.clone());
            return Err(BindingError::Swapped { named_by, input, output });
        }
        let (index, info) = match feeds.find(&pair.input, named_by) {
            // An optimiser may have dropped the input, as with controls. If the name is misspelt, another input is
            // unfed, which is an error.
            Err(_) if declared.is_some() => return Ok(None),
            found => found?,
        };
        let next = find_output(self.signature, &pair.output, named_by)?;
        let input = self.input(info, next, declared, before.len())?;
        let (dims, data_type) = (input.row_dims(), input.data_type);
        // Strings vary in size even where their number is fixed.
        let place = if dims.contains(&-1) || data_type == DataType::Bytes {
            StatePlace::Beside(before.iter().filter(|state| !state.is_in_slot()).count())
        } else {
            let layout = RowLayout::new(data_type, &dims, input.batch_axis);
            StatePlace::Slot(layout.ok_or_else(|| state_error(info, "its size overflows"))?)
        };
        let state = BoundState {
            input: index,
            output: state_output(outputs, &input, next),
            data_type,
            batch_axis: input.batch_axis,
            place,
            storage: match data_type {
                DataType::Fp32 if self.config.store_states_as_fp16 => StorageType::Fp16,
                _ => StorageType::Exact,
            },
            padded_axis: None,
            initial: Initial::new(&input.name, data_type, &dims, declared, self.config, self.initial_sources)?,
            dims,
        };
        feeds.add(index, input)?;
        Ok(Some(state))
    }

    /// `next`: the output at the state's other end.
    fn input(
        &self,
        info: &TensorInfo,
        next: &TensorInfo,
        declared: Option<&DeclaredState>,
        number: usize,
    ) -> Result<BoundInput> {
        let written = self.config.states.written_dims(&info.name);
        let batch_axis = match written {
            Some(written) => written.batch_axis,
            None => self.batch_axis(info, declared)?,
        };
        let mut input = BoundInput::new(info, batch_axis, Source::State(number));
        if let Some(written) = written {
            narrow_to_written(&mut input, written, self.config)?;
        }
        if let Some(declared) = declared {
            narrow(&mut input, declared)?;
        }
        let output_is = describe(next.data_type, &next.dims);
        // Exporters leave the dims of state outputs open or say nothing about them. A run checks them. A dimension that
        // varies may be fixed at one end.
        let dims_agree = next.dims.is_empty() || all_agree(&input.dims, &next.dims);
        if input.data_type != next.data_type || !dims_agree {
            let (input, output) = (info.name.clone(), next.name.clone());
            let input_is = describe(info.data_type, &info.dims);
            return Err(BindingError::StateEnds { input, output, input_is, output_is });
        }
        if let Some(axis) = batch_axis.filter(|&axis| has_batch_elsewhere(info, next, axis)) {
            let why = format!(
                "its batch is dimension {axis}, but its output '{}', {output_is}, has the batch elsewhere: both must \
                 have it in the same place",
                next.name
            );
            return Err(state_error(info, why));
        }
        Ok(input)
    }

    fn batch_axis(&self, info: &TensorInfo, declared: Option<&DeclaredState>) -> Result<Option<usize>> {
        let why = match self.find_batch_axis(info, declared)? {
            BatchAxis::At(axis) => return Ok(Some(axis)),
            BatchAxis::Absent => return Ok(None),
            BatchAxis::Missing => format!(
                "no dimension is open for the batch; set max_batch_size to 0 or 1, export the model with a dynamic batch \
                 dimension, or write {}, with which each request has a run of its own",
                state_dims_line([state_dims(info, &info.dims, None)])
            ),
            BatchAxis::Unclear => format!(
                "the names of its open dimensions do not say which is the batch, if any; write each dimension as 'batch', \
                 as -1 if it varies (it starts at 0), or as its length: {}",
                self.lines_to_write()
            ),
        };
        Err(state_error(info, why))
    }

    /// The line for the states whose batch cannot be told.
    fn lines_to_write(&self) -> String {
        let info = |pair: &StatePair| self.signature.input(&pair.input);
        let is_unclear = |info: &&TensorInfo| {
            self.config.states.written_dims(&info.name).is_none()
                && matches!(self.find_batch_axis(info, None), Ok(BatchAxis::Unclear))
        };
        let dims = |info: &TensorInfo| state_dims(info, &info.dims, info.dims.iter().position(|&dim| dim < 0));
        let undeclared = self.pairs.iter().filter(|pair| self.config.states.declaration(pair).is_none());
        state_dims_line(undeclared.filter_map(info).filter(is_unclear).map(dims))
    }

    fn find_batch_axis(&self, info: &TensorInfo, declared: Option<&DeclaredState>) -> Result<BatchAxis> {
        let (config, is_batched) = (self.config, self.config.is_batched());
        let candidates = match declared {
            Some(declared) if is_batched => declared_axes(config, info, declared)?,
            // The declared dims are those of the whole tensor.
            Some(_) => return Ok(BatchAxis::Absent),
            None => open_axes(&info.dims, None),
        };
        let named = |batch: Option<&str>| -> Vec<usize> {
            candidates.iter().copied().filter(|&axis| is_batch(info.symbol(axis), batch)).collect()
        };
        let as_in_requests = if self.batch_symbol.is_some() { named(self.batch_symbol) } else { Vec::new() };
        let as_usual = named(None);
        let is_shared = |axis: &&usize| self.shared.contains(&info.symbol(**axis));
        if !is_batched && candidates.iter().filter(is_shared).count() > 1 {
            return Ok(BatchAxis::Unclear);
        }
        let all_have_names = candidates.iter().all(|&axis| !info.symbols[axis].is_empty());
        let all_are_told = candidates.iter().all(|&axis| !info.symbol(axis).is_empty());
        // Where Triton has no batch, or the model has a batch of one, a dimension with a name of its own varies.
        let own_names_vary = declared.is_none() && (!is_batched || (config.max_batch_size == 1 && !self.batch_is_open));
        Ok(match (as_in_requests.as_slice(), as_usual.as_slice(), candidates.as_slice()) {
            (&[axis], ..) | (&[], &[axis], _) => BatchAxis::At(axis),
            (&[], &[], &[_, ..]) if own_names_vary && all_are_told => BatchAxis::Absent,
            // An exporter's number may be that of a batch only if requests have room for one, too.
            (&[], &[], &[_, ..]) if !is_batched && all_have_names && !self.batch_is_open => BatchAxis::Absent,
            (.., &[axis]) if is_batched || !all_have_names => BatchAxis::At(axis),
            // Dims that leave the batch out mean Triton's batch dimension, which is the first.
            (.., &[0, ..]) if declared.is_some() => BatchAxis::At(0),
            (.., []) if config.max_batch_size <= 1 => BatchAxis::Absent,
            (.., []) => BatchAxis::Missing,
            _ => BatchAxis::Unclear,
        })
    }
}

fn state_error(info: &TensorInfo, why: impl Into<String>) -> BindingError {
    BindingError::State { name: info.name.clone(), dims: describe(info.data_type, &info.dims), why: why.into() }
}

/// The axes that can be the batch, because the other dimensions are the declared ones. The declared dims leave the
/// batch out or have -1 in its place.
fn declared_axes(config: &Config, info: &TensorInfo, declared: &DeclaredState) -> Result<Vec<usize>> {
    let (model, dims) = (&info.dims, &declared.dims);
    let can_be = |&axis: &usize| {
        if model.len() == dims.len() {
            return model[axis] < 0 && dims[axis] < 0 && all_agree(model, dims);
        }
        let mut rest = model.clone();
        batches(rest.remove(axis), config) && all_agree(&rest, dims)
    };
    let axes: Vec<usize> = (0..model.len()).filter(can_be).collect();
    let unbatched = config.max_batch_size == 1 && all_agree(model, dims);
    if axes.is_empty() && !unbatched {
        let what = format!("sequence_batching.state '{}'", info.name);
        let rule = "with the batch dimension left out, or -1 in its place, they must agree";
        return Err(wrong_dims(what, dims, model, rule));
    }
    Ok(axes)
}

/// Fixes the dimensions that the model leaves open and `state_dims` does not.
fn narrow_to_written(input: &mut BoundInput, written: &StateDims, config: &Config) -> Result<()> {
    let has_room =
        |axis: usize| if config.is_batched() { batches(input.dims[axis], config) } else { input.dims[axis] <= 1 };
    if !all_agree(&input.dims, &written.dims) || written.batch_axis.is_some_and(|axis| !has_room(axis)) {
        let what = format!("state_dims '{}'", input.name);
        let rule = "they must agree, with 'batch' only where the model takes batches";
        return Err(wrong_dims(what, &written.dims, &input.dims, rule));
    }
    open_axes(&input.dims, None).into_iter().for_each(|axis| input.dims[axis] = written.dims[axis]);
    Ok(())
}

/// Fixes the dimensions that the model leaves open and the declaration does not.
fn narrow(input: &mut BoundInput, declared: &DeclaredState) -> Result<()> {
    let what = format!("sequence_batching.state '{}'", input.name);
    check_type(what.clone(), declared.data_type, input.data_type)?;
    let mut declared_dims = declared.dims.clone();
    if let Some(axis) = input.batch_axis.filter(|_| declared_dims.len() < input.dims.len()) {
        declared_dims.insert(axis, -1);
    }
    if !all_agree(&input.dims, &declared_dims) {
        return Err(wrong_dims(what, &declared.dims, &input.dims, "they must be the same"));
    }
    open_axes(&input.dims, input.batch_axis).into_iter().for_each(|axis| input.dims[axis] = declared_dims[axis]);
    Ok(())
}

/// Whether a state's output says that its batch is not at `axis`: by the name of the dimension that is the input's
/// batch, or by the only dimension that is open there and fixed in the input.
fn has_batch_elsewhere(input: &TensorInfo, output: &TensorInfo, axis: usize) -> bool {
    let others = || (0..output.dims.len()).filter(|&other| other != axis);
    let (Some(&dim), Some(name)) = (output.dims.get(axis), input.symbols.get(axis)) else { return false };
    let is_named_elsewhere = !name.is_empty()
        && output.symbols.get(axis) != Some(name)
        && others().any(|other| output.symbols.get(other) == Some(name));
    let is_open_elsewhere = dim > 1 && others().any(|other| output.dims[other] < 0 && input.dims[other] >= 0);
    is_named_elsewhere || is_open_elsewhere
}

/// The output of a state, which is fetched once, even if responses also carry it.
fn state_output(outputs: &mut Vec<BoundOutput>, input: &BoundInput, info: &TensorInfo) -> usize {
    let index = fetched(outputs, info);
    let output = &mut outputs[index];
    // The output's dims may be open, so only the input shows where the batch is.
    output.batch_axis = input.batch_axis;
    // ONNX Runtime allocates strings and states of varying size itself.
    let is_known = open_axes(&input.dims, input.batch_axis).is_empty() && input.data_type != DataType::Bytes;
    output.dims = is_known.then(|| input.dims.clone());
    // With steps, an answer without elements has another shape, which `response_output` has set.
    if output.gathered.is_none() {
        output.empty_dims = empty_dims(&input.dims, input.batch_axis);
    }
    index
}

/// How rows whose growing states have different lengths share a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrowingPadding {
    pub side: PaddingSide,
    pub added: NewLength,
    states: Vec<PaddedState>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct PaddedState {
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
) -> Result<Option<GrowingPadding>> {
    let Some(side) = config.states.growing_padding else { return Ok(None) };
    let error = |why: String| bad(GROWING_PADDING, side.to_string(), why);
    let (masked, added) = mask(inputs).map_err(error)?;
    let symbol = |state: &BoundState, axis: usize| {
        let info = signature.input(&inputs[state.input].name);
        info.and_then(|info| info.symbols.get(axis)).map_or("", String::as_str)
    };
    let wanted = symbol(&states[masked.state], masked.axis).to_owned();
    let mut padded = Vec::new();
    for state in states.iter_mut() {
        // Rows that share a run need a batch, and a slot has room for one length only.
        let (StatePlace::Beside(beside), Some(_)) = (state.place, state.batch_axis) else { continue };
        let (&[axis], Some(element_bytes)) = (&*open_axes(&state.dims, None), state.data_type.byte_size()) else {
            continue;
        };
        // States that grow along a dimension of another name may have other lengths, and the mask does not describe
        // those.
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
    let found = inputs.iter().find_map(|input| match &input.source {
        Source::Generated(Generated { value: GeneratedValue::Mask { state, new }, written, .. }) => {
            Some((input, written, *state, *new))
        }
        _ => None,
    });
    let Some((input, written, state, added)) = found else {
        return Err("no input tells the model which elements of a state are padding: write a mask in \
                    'generated_inputs', 'MASK=mask(STATE, INPUT)'"
            .to_owned());
    };
    if input.batch_axis.is_none() {
        return Err(format!("the mask '{}' has no batch dimension, so it is the same for all rows", input.name));
    }
    if added == NewLength::Fixed(0) {
        let entry = format!("'{}={written}'", input.name);
        return Err(format!("{entry} leaves out what a run adds to the state: write 'mask(STATE, INPUT)'"));
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
