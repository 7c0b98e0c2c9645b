//! Varying states (growing tensors and strings), and copying states and contexts to their sequences after a run.
//!
//! They are kept beside the slot. Growing states can also stay in the tensors that a run made of them ([`Grown`]),
//! which the sequences of the batch share: a next batch of exactly the same sequences reads them as they are, so a
//! sequence that runs alone never copies its state. Before any other batch each is copied to memory of its sequence. So
//! are the states of the sequences that wait for their next request: otherwise one of them would keep the memory of
//! all.

use std::sync::{Arc, Weak};

use rows::tensor::{DataType, Gap, RowAt, StorageType, WindowLayout, dims_fit};
use rows::{copies, strings};
use sequences::pool::SlotId;

use super::row::{HasState, OutputRows, RowAndMemory, RowState, StateContent, StateRow};
use crate::binding::{Binding, BoundState, StatePlace};
use crate::error::{InputError, RequestError, RunError};
use crate::memory::{PAGES_FROM, Shared};
use crate::model::{Grown, StateMemory, VaryingSize};
use crate::session::{BatchTensor, Copier, Given, MadeTensor, Step, Value};

pub(super) struct VaryingStates {
    binding: Arc<Binding>,
    copier: Copier,
    /// The number of each in the binding.
    pub numbers: Vec<usize>,
    /// What the next run reads each from, if it is neither lent nor in shared tensors.
    inputs: Vec<Option<Input>>,
    /// Their tensors may stay as ONNX Runtime makes them.
    may_stay: bool,
    /// What the next run reads them from, if those of all rows are in the tensors of one batch.
    pub grown: Option<Arc<Grown>>,
    /// The tensors of the last batch of several sequences, and the slots of the sequences that may have their states
    /// there.
    last_grown: (Weak<Grown>, Vec<SlotId>),
    /// The padding of each row in the next run; empty if no row has any.
    pub gaps: Vec<Gap>,
    /// The length that the run must give the padded states, if rows have padding.
    padded_after: usize,
    pub padding: u8,
}

enum Input {
    Rows(BatchTensor),
    Strings(Value),
}

impl VaryingStates {
    pub fn new(binding: &Arc<Binding>, copier: &Copier) -> Self {
        let numbers: Vec<_> =
            (0..binding.states.len()).filter(|&number| !binding.states[number].is_in_slot()).collect();
        Self {
            binding: binding.clone(),
            copier: copier.clone(),
            inputs: numbers.iter().map(|_| None).collect(),
            numbers,
            may_stay: binding.varying_may_stay(),
            grown: None,
            last_grown: (Weak::new(), Vec::new()),
            gaps: Vec::new(),
            padded_after: 0,
            padding: 0,
        }
    }

    pub fn dims(&self, row: &RowState, memory: Option<&StateMemory>) -> Vec<Vec<i64>> {
        self.numbers.iter().map(|&number| StateRow::of(&self.binding, number, row, memory).dims.to_vec()).collect()
    }

    /// Decides the padding of the rows in the next run, which adds `added` elements to each: the longest has none. In
    /// tensors of an earlier run, rows have the padding that they had there.
    pub fn pad(&mut self, rows: &[RowAndMemory], added: usize) {
        self.gaps.clear();
        let Some(padding) = &self.binding.growing_padding else { return };
        let length = |&(row, memory): &RowAndMemory| {
            let length = padding.length(&self.dims(row, memory))?;
            usize::try_from(length).ok()
        };
        let lengths: Vec<_> = rows.iter().map(length).collect::<Option<_>>().unwrap_or_default();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if let Some(grown) = &self.grown {
            self.gaps.clone_from(&grown.gaps);
        } else if lengths.iter().any(|&length| length < longest) {
            self.gaps.extend(lengths.iter().map(|&length| padding.side.gap(length, longest)));
        }
        self.padded_after =
            lengths.iter().zip(&self.gaps).map(|(length, gap)| length + gap.length + added).next().unwrap_or(0);
    }

    /// The tensors of a batch of exactly these rows, in which all have their growing states; and at which positions.
    pub fn common<'a, R: HasState>(
        &self,
        batch: &[R],
        held: &'a [Option<StateMemory>],
        run_rows: usize,
    ) -> Option<(Arc<Grown>, Vec<usize>)> {
        if !self.may_stay || batch.len() != run_rows {
            return None;
        }
        let shared = |(row, memory): (&R, &'a Option<StateMemory>)| {
            row.state().slot_in_place()?;
            memory.as_ref()?.varying.first()?.shared()
        };
        let rows = batch.iter().zip(held).map(shared).collect::<Option<Vec<_>>>()?;
        let grown = rows.first()?.tensors.clone();
        let is_common = grown.rows == run_rows && rows.iter().all(|at| Arc::ptr_eq(&at.tensors, &grown));
        is_common.then(|| (grown, rows.iter().map(|at| at.position).collect()))
    }

    /// The sequences that may still have their states in the tensors of the last batch.
    pub fn sharing(&self) -> Vec<SlotId> {
        let (last, slots) = &self.last_grown;
        if last.strong_count() > 0 { slots.clone() } else { Vec::new() }
    }

    /// Copies the growing states of a sequence to memory of its own, if they are in shared tensors. Returns the bytes.
    pub fn copy_out(&mut self, memory: &mut StateMemory) -> Result<usize, RunError> {
        let mut copied = 0;
        for (index, (varying, number)) in memory.varying.iter_mut().zip(&self.numbers).enumerate() {
            let shared = varying.shared().map(|at| (at.tensors.clone(), at.position, at.bytes));
            let Some((tensors, position, bytes)) = shared else { continue };
            let Some(tensor) = tensors.tensors.get(index) else { continue };
            let (state, at) = (&self.binding.states[*number], RowAt { position, rows: tensors.rows });
            let row = state.row(&tensor.dims, tensors.gap(position), at);
            let (Some((row, _)), Some(room)) = (row, varying.room_for_shared()?) else { continue };
            copied += bytes;
            tensor.take(&self.copier, &row, room, StorageType::Exact)?;
            varying.forget_shared();
        }
        self.last_grown.1.retain(|&slot| slot != memory.id());
        Ok(copied)
    }

    /// Puts the states of a batch together that are neither lent nor in shared tensors. Those beyond the batch repeat
    /// its first. Returns the bytes that were copied.
    pub fn fill(
        &mut self,
        rows: &[RowAndMemory],
        run_rows: usize,
        is_lent: impl Fn(usize) -> bool,
    ) -> Result<usize, RequestError> {
        if self.grown.is_some() {
            return Ok(0);
        }
        let Self { binding, copier, numbers, inputs, gaps, padding, .. } = self;
        let inputs = numbers.iter().zip(inputs).filter(|(number, _)| !is_lent(**number));
        inputs.map(|(&number, input)| fill(input, binding, number, rows, run_rows, (gaps, *padding), copier)).sum()
    }

    /// The tensors that the next run reads, by input; those that are lent are there already.
    pub fn give<'a>(&'a mut self, inputs: &mut [Option<Given<'a>>]) {
        for (index, (&number, input)) in self.numbers.iter().zip(&mut self.inputs).enumerate() {
            let given = &mut inputs[self.binding.states[number].input];
            if given.is_some() {
                continue;
            }
            *given = match (&self.grown, input) {
                (Some(grown), _) => grown.tensors.get(index).map(Given::Made),
                (None, Some(Input::Rows(tensor))) => Some(Given::Batch(tensor)),
                (None, Some(Input::Strings(tensor))) => Some(Given::Strings(tensor)),
                (None, None) => None,
            };
        }
    }

    pub fn release(&mut self) {
        self.grown = None;
        self.gaps.clear();
        for input in &mut self.inputs {
            match input {
                Some(Input::Rows(tensor)) => tensor.give_back(PAGES_FROM),
                _ => *input = None,
            }
        }
    }

    /// The new states, as the last run over `run_rows` rows gave them.
    pub fn outputs<'a>(
        &'a self,
        step: &'a Step,
        run_rows: usize,
    ) -> Result<Vec<(&'a BoundState, OutputRows<'a>)>, RunError> {
        let output = |&number: &usize| {
            let state = &self.binding.states[number];
            let output = OutputRows::new(&self.binding, state.output, step.output(state.output, None)?, run_rows)?;
            // Where the model left a state's shape open, this is the first time to see it.
            if !dims_fit(&output.dims, &state.dims) {
                return Err(output.uneven());
            }
            self.check_padding(state, &output)?;
            Ok((state, self.without_padding(state, output)))
        };
        self.numbers.iter().map(output).collect()
    }

    /// Whether the padding is where it was before the run. It is, if the model has only added elements.
    fn check_padding(&self, state: &BoundState, output: &OutputRows) -> Result<(), RunError> {
        let Some(axis) = state.padded_axis.filter(|_| !self.gaps.is_empty()) else { return Ok(()) };
        if output.dims[axis] == self.padded_after as i64 {
            return Ok(());
        }
        let (name, dims, wanted) = (output.bound.name.clone(), output.view.dims.to_vec(), self.padded_after);
        Err(RunError::PaddedState { name, dims, axis, wanted })
    }

    /// The output of a state, whose rows have the padding that they had in the run.
    pub fn without_padding<'a>(&'a self, state: &BoundState, mut output: OutputRows<'a>) -> OutputRows<'a> {
        if let Some(axis) = state.padded_axis {
            output.padding = (axis, &self.gaps);
        }
        output
    }

    /// Whether the new states of a batch over `run_rows` rows may stay in the tensors that the run made.
    pub fn can_stay<R: HasState>(&self, batch: &[R], run_rows: usize, step: &Step) -> bool {
        self.may_stay
            && batch.len() == run_rows
            && batch.iter().all(|row| row.state().keeps())
            && self.numbers.iter().all(|&number| step.has_made(self.binding.states[number].output))
    }

    /// Leaves the new states of a batch in the tensors that the last run made.
    pub fn stay(&mut self, held: &mut [Option<StateMemory>], step: &mut Step) {
        let made = self.numbers.iter().filter_map(|&number| step.take_made(self.binding.states[number].output));
        let grown = Arc::new(Grown { tensors: made.collect(), rows: held.len(), gaps: std::mem::take(&mut self.gaps) });
        for (position, memory) in held.iter_mut().enumerate() {
            let Some(memory) = memory else { continue };
            for (index, (varying, &number)) in memory.varying.iter_mut().zip(&self.numbers).enumerate() {
                let state = &self.binding.states[number];
                let Some(mut dims) = grown.tensors.get(index).map(|tensor: &MadeTensor| tensor.dims.clone()) else {
                    continue;
                };
                if let Some(dim) = state.batch_axis.and_then(|axis| dims.get_mut(axis)) {
                    *dim = 1;
                }
                if let Some(dim) = state.padded_axis.and_then(|axis| dims.get_mut(axis)) {
                    *dim -= grown.gap(position).length as i64;
                }
                let Some(layout) = state.layout(&dims) else { continue };
                let bytes = state.kept_bytes(layout);
                varying.share(&dims, Shared { tensors: grown.clone(), position, bytes });
            }
        }
        // The tensors of one sequence keep the memory of no other.
        if held.len() > 1 {
            self.last_grown = (Arc::downgrade(&grown), held.iter().flatten().map(StateMemory::id).collect());
        }
    }
}

/// Puts a state of all rows together. Returns the bytes, where it is not one of strings.
fn fill(
    input: &mut Option<Input>,
    binding: &Binding,
    number: usize,
    rows: &[RowAndMemory],
    run_rows: usize,
    (gaps, padding): (&[Gap], u8),
    copier: &Copier,
) -> Result<usize, RequestError> {
    let state = &binding.states[number];
    let of = |&(row, memory): &(_, _)| StateRow::of(binding, number, row, memory);
    let gap_of = |position: usize| gaps.get(if position < rows.len() { position } else { 0 }).copied();
    let Some(first) = rows.first() else { return Ok(0) };
    let mut dims = of(first).dims.to_vec();
    if let (Some(axis), Some(gap)) = (state.padded_axis, gap_of(0)) {
        dims[axis] += gap.length as i64;
    }
    let too_large = || {
        let input = &binding.inputs[state.input];
        InputError::Shape { name: input.name.clone(), came: dims.clone(), wanted: input.dims.clone() }
    };
    let layout = state.layout(&dims).ok_or_else(too_large)?;
    let contents = rows.iter().chain(std::iter::repeat(first)).take(run_rows).map(|row| of(row).content).enumerate();
    if state.data_type == DataType::Bytes {
        let elements = |(position, content)| {
            let elements: Box<dyn Iterator<Item = &[u8]>> = match content {
                StateContent::Strings(elements) => Box::new(elements.iter()),
                StateContent::WrittenStrings(written) => Box::new(strings::elements(written).flatten()),
                _ => return None,
            };
            Some(strings::positions(&layout.row(RowAt { position, rows: run_rows })).zip(elements))
        };
        let mut dims = dims.clone();
        if let Some(axis) = binding.inputs[state.input].batch_axis {
            dims[axis] = run_rows as i64;
        }
        *input = Some(Input::Strings(Value::of_strings(contents.filter_map(elements).flatten(), &dims)?));
        return Ok(0);
    }
    if input.is_none() {
        let batch_axis = binding.inputs[state.input].batch_axis;
        *input = Some(Input::Rows(BatchTensor::new(state.data_type, batch_axis, copier.device())?));
    }
    let Some(Input::Rows(tensor)) = input else { return Ok(0) };
    tensor.shape(&dims, run_rows)?;
    // A BOOL is 0 or 1.
    let padding = if state.data_type == DataType::Bool { padding.min(1) } else { padding };
    let mut copied = 0;
    for (position, content) in contents {
        let at = RowAt { position, rows: run_rows };
        let (row, gap) = state.row(&dims, gap_of(position).unwrap_or_default(), at).ok_or_else(too_large)?;
        if let Some(gap) = gap {
            tensor.fill(copier, &gap, padding)?;
        }
        tensor.put(copier, &row, content.of_row())?;
        if rows.get(position).is_some_and(|(row, _)| !row.is_fresh()) {
            copied += state.storage.bytes(row.bytes());
        }
    }
    Ok(copied)
}

/// Bytes that the new state of the row at `position` takes.
fn size(state: &BoundState, output: &OutputRows, position: usize) -> VaryingSize {
    match state.data_type {
        DataType::Bytes => VaryingSize::Strings(strings::written_bytes(output.strings(position))),
        _ => VaryingSize::Bytes(state.storage.bytes(output.row(position).bytes())),
    }
}

/// Copies the new state of the row at `position` to memory of its sequence, where room has been made. Returns the
/// bytes.
fn copy_in(
    state: &BoundState,
    output: &OutputRows,
    position: usize,
    memory: &mut StateMemory,
    step: &Step,
) -> Result<usize, RunError> {
    let StatePlace::Beside(number) = state.place else { return Ok(0) };
    let bytes = size(state, output, position).bytes();
    let dims: Vec<_> = output.row_dims(position).collect();
    let kept = memory.varying[number].write(&dims, bytes);
    if state.data_type == DataType::Bytes {
        strings::write(output.strings(position), kept.host());
    } else {
        step.take_output(state.output, &output.row(position), kept, state.storage)?;
    }
    Ok(bytes)
}

/// The states after a run, as its outputs have them.
pub(super) struct NewStates<'a> {
    pub binding: &'a Binding,
    /// The new states of varying size.
    pub outputs: Vec<(&'a BoundState, OutputRows<'a>)>,
    pub step: &'a Step,
    pub run_rows: usize,
    pub limit: usize,
}

impl NewStates<'_> {
    /// Makes room for the varying states of a row, so that keeping them cannot fail; if they stay in the tensors of the
    /// run, they are only paid for.
    pub fn make_room<R: HasState>(
        &self,
        position: usize,
        row: &mut R,
        memory: &mut Option<StateMemory>,
        stays: bool,
    ) -> Result<(), RunError> {
        let (Some(_), Some(memory)) = (row.state_mut().lease_that_keeps(), memory) else { return Ok(()) };
        let too_large = |(state, output): &&(&BoundState, OutputRows)| {
            state.storage == StorageType::Fp16 && !output.fits_fp16(position)
        };
        if let Some((state, _)) = self.outputs.iter().find(too_large) {
            return Err(RunError::StateNotFp16 { name: self.binding.inputs[state.input].name.clone() });
        }
        let sizes = || self.outputs.iter().map(|(state, output)| size(state, output, position));
        let bytes = sizes().map(VaryingSize::bytes).fold(0, usize::saturating_add);
        if bytes > self.limit {
            return Err(RunError::StateTooLarge { bytes, limit: self.limit });
        }
        Ok(memory.reserve(sizes(), stays)?)
    }

    /// Copies a row's contexts and, unless they stay, its varying states. Returns the bytes of the latter.
    pub fn keep<R: HasState>(
        &self,
        position: usize,
        row: &mut R,
        memory: &mut Option<StateMemory>,
        stays: bool,
    ) -> Result<usize, RunError> {
        if !stays {
            self.make_room(position, row, memory, false)?;
        }
        let (Some(lease), Some(memory)) = (row.state_mut().lease_that_keeps(), memory) else { return Ok(0) };
        // Until `commit`: the copies overwrite the state from before the run.
        lease.spoil();
        for (input, _, context) in self.binding.contexts() {
            // The end of this row's input becomes the context of the next request.
            let Some(length) = row.steps(self.binding, input, context.axis) else { continue };
            let bound = &self.binding.inputs[input];
            let (dims, bytes) = self.step.filled(input);
            let layout = WindowLayout::new(bound.data_type, dims, bound.batch_axis, context.axis);
            let Some(layout) = layout else { continue };
            let at = RowAt { position, rows: self.run_rows };
            let window = layout.window(at, length - context.length..length);
            let from = self.binding.slot.offset(context.slot_entry);
            let kept = memory.slot.part_mut(from..from + context.bytes).host();
            copies::take(&window, StorageType::Exact, bytes, &mut kept[..window.bytes()]);
            context.mark(kept);
        }
        let outputs = self.outputs.iter().filter(|_| !stays);
        outputs.map(|(state, output)| copy_in(state, output, position, memory, self.step)).sum()
    }
}
