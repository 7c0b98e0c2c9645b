//! A sample binding, for tests and fuzz targets that run without ONNX Runtime.

#![allow(clippy::unwrap_used, reason = "only tests and fuzz targets use this")]

use rows::layout::SlotLayout;
use rows::tensor::StorageType::{self, Exact, Fp16};
use rows::tensor::{DataType, RowLayout};

use super::*;
use crate::binding::{
    BoundInput, BoundOutput, BoundState, Initial, InitialContent, MostSteps, RequestInput, ShapeForm, Source,
    StatePlace,
};

fn state(number: usize, data_type: DataType, dims: &[i64], place: StatePlace, storage: StorageType) -> BoundState {
    let open: Vec<i64> = dims.iter().map(|&dim| dim.max(0)).collect();
    let initial = Initial { dims: open, content: InitialContent::Zeros };
    BoundState {
        input: number,
        output: number,
        data_type,
        batch_axis: Some(0),
        dims: dims.to_vec(),
        place,
        storage,
        padded_axis: None,
        initial,
    }
}

/// [`binding_of`] with all states, or without those that vary in size.
pub fn binding(with_varying: bool) -> Arc<Binding> {
    binding_of(if with_varying { 4 } else { 2 })
}

/// The first of these states: one of two numbers, one of four that are kept as fp16, a growing one, one of strings. And
/// a context of 8 bytes.
pub fn binding_of(count: usize) -> Arc<Binding> {
    let fixed = |count: i64| StatePlace::Slot(RowLayout::new(DataType::Fp32, &[1, count], Some(0)).unwrap());
    let mut states = vec![
        state(0, DataType::Fp32, &[1, 2], fixed(2), Exact),
        state(1, DataType::Fp32, &[1, 4], fixed(4), Fp16),
        state(2, DataType::Fp32, &[1, -1], StatePlace::Beside(0), Exact),
        state(3, DataType::Bytes, &[1, -1], StatePlace::Beside(1), Exact),
    ];
    states.truncate(count);
    let input = |name: String, data_type, dims: &[i64], source| BoundInput {
        name,
        data_type,
        dims: dims.to_vec(),
        batch_axis: Some(0),
        source,
    };
    let mut sizes: Vec<_> = states.iter().map(BoundState::slot_bytes).collect();
    let context = BoundContext {
        axis: 1,
        length: 2,
        first: crate::config::FirstRequest::Zeros,
        bytes: 8,
        slot_entry: sizes.len(),
    };
    sizes.push(context.bytes);
    let mut inputs: Vec<_> = states
        .iter()
        .enumerate()
        .map(|(number, state)| input(format!("S{number}"), state.data_type, &state.dims, Source::State(number)))
        .collect();
    let request = RequestInput {
        is_held: true,
        position: 0,
        form: ShapeForm::Plain,
        optional: false,
        context: Some(context),
        window: None,
        ragged_axis: None,
        is_padded: false,
        steps_multiple: None,
    };
    inputs.push(input("X".to_owned(), DataType::Fp32, &[-1, -1], Source::Request(request)));
    let outputs = states.iter().map(|state| BoundOutput {
        batch_axis: Some(0),
        is_only_kept: true,
        ..BoundOutput::new(&format!("O{}", state.output), state.data_type)
    });
    let outputs = outputs.collect();
    Arc::new(Binding {
        inputs,
        outputs,
        states,
        counters: Vec::new(),
        growing_padding: None,
        slot: SlotLayout::new(&sizes).unwrap(),
        repeat: None,
        answers_each_step: false,
        most_steps: MostSteps { steps: 1, answer_bytes: usize::MAX },
        is_cut: false,
        needs_steps: None,
    })
}
