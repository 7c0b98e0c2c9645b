//! A model whose tensors are bound: what a step feeds and fetches, and questions about that.

use rows::layout::SlotLayout;
use rows::tensor::{DataType, StorageType};

use super::bound::{
    BoundContext, BoundControl, BoundInput, BoundOutput, BoundState, Counter, Flag, Generated, Initial, RequestInput,
    Source, StatePlace, TrimBy,
};
use super::growing_padding::GrowingPadding;
use super::step_spec::{InputSpec, OutputSpec, StepSpec};
use crate::config::Context;

/// What a step of the model feeds and fetches, and how requests and states map to that.
#[derive(Clone, Debug)]
pub struct Binding {
    /// The model's inputs, in its order.
    pub inputs: Vec<BoundInput>,
    /// The outputs that are fetched: those of states and those that responses may carry.
    pub outputs: Vec<BoundOutput>,
    /// The states, in the order of their pairs.
    pub states: Vec<BoundState>,
    /// What is counted for each sequence, for generated inputs.
    pub counters: Vec<Counter>,
    /// How rows whose growing states have different lengths share a run; `None` if they don't.
    pub growing_padding: Option<GrowingPadding>,
    /// Where a slot has the states, and behind them the contexts.
    pub slot: SlotLayout,
    /// A node that must not run over no steps, so that no input may be empty.
    pub needs_steps: Option<String>,
}

impl Binding {
    /// Sets the initial values of states; `None` leaves one as it is.
    pub fn set_initial(&mut self, initial: Vec<Option<Initial>>) {
        for (state, initial) in self.states.iter_mut().zip(initial) {
            state.initial = initial.unwrap_or_else(|| state.initial.clone());
        }
    }

    /// The inputs that requests carry, in their order.
    pub fn request_inputs(&self) -> impl Iterator<Item = (&BoundInput, &RequestInput)> + Clone {
        self.inputs.iter().filter_map(|input| match &input.source {
            Source::Request(request) => Some((input, request)),
            _ => None,
        })
    }

    /// The contexts, with the index of their input.
    pub fn contexts(&self) -> impl Iterator<Item = (usize, &RequestInput, BoundContext)> + Clone {
        self.inputs.iter().enumerate().filter_map(|(index, input)| match &input.source {
            Source::Request(request) => Some((index, request, request.context?)),
            _ => None,
        })
    }

    /// Whether anything of a row is copied to its sequence after a run.
    pub fn is_copied_back(&self) -> bool {
        self.has_varying_states() || self.contexts().next().is_some()
    }

    /// Whether an input tells the model that a sequence starts.
    pub fn has_start_control(&self) -> bool {
        let is_start =
            |input: &BoundInput| matches!(input.source, Source::Control(BoundControl::Flag { flag: Flag::Start, .. }));
        self.inputs.iter().any(is_start)
    }

    /// Whether a sequence has states of varying size.
    pub fn has_varying_states(&self) -> bool {
        self.states.iter().any(|state| matches!(state.place, StatePlace::Beside(_)))
    }

    /// Bytes of a row's states in a batch buffer.
    pub fn batch_bytes(&self) -> usize {
        let layouts = self.states.iter().filter_map(|state| match state.place {
            StatePlace::Slot(layout) => Some(layout.row_bytes()),
            StatePlace::Beside(_) => None,
        });
        layouts.sum()
    }

    /// The states of varying size, if their tensors may stay as ONNX Runtime makes them, which strings and states that
    /// are rounded may not: the number of each state, and its number beside the slot.
    pub fn growing_that_may_stay(&self) -> Vec<(usize, usize)> {
        let beside = self.states.iter().enumerate().filter_map(|(number, state)| match state.place {
            StatePlace::Slot(_) => None,
            StatePlace::Beside(beside) => Some((number, beside)),
        });
        let beside: Vec<_> = beside.collect();
        let can_stay = |state: &BoundState| state.data_type != DataType::Bytes && state.storage == StorageType::Exact;
        if beside.iter().all(|(number, _)| can_stay(&self.states[*number])) { beside } else { Vec::new() }
    }

    /// Whether an output is read whatever requests ask for: as a state, or as the lengths of another.
    pub fn is_needed(&self, output: usize) -> bool {
        self.states.iter().any(|state| state.output == output) || trim_lengths(&self.outputs).contains(&output)
    }

    /// Bytes of a slot that are where the model runs: the states. The contexts behind them are on the host, where
    /// inputs are gathered.
    pub fn device_bytes(&self) -> usize {
        self.slot.part_bytes(self.states.len())
    }

    /// What a snapshot calls a context of an input: its entry of `input_context`, with the axis.
    pub fn context_name(&self, input: usize, of: BoundContext) -> String {
        let input = self.inputs[input].name.clone();
        Context { input, length: of.length, new: None, axis: Some(of.axis), first: of.first }.to_string()
    }

    /// The dims of what one row of an input leaves as its context.
    pub fn context_dims(&self, input: usize, of: BoundContext) -> Vec<i64> {
        let BoundInput { dims, batch_axis, .. } = &self.inputs[input];
        let mut dims = dims.clone();
        batch_axis.iter().for_each(|&axis| dims[axis] = 1);
        dims[of.axis] = of.length as i64;
        dims
    }

    /// The generated inputs.
    pub fn generated(&self) -> impl Iterator<Item = (&BoundInput, &Generated)> + Clone {
        self.inputs.iter().filter_map(|input| match &input.source {
            Source::Generated(generated) => Some((input, generated)),
            _ => None,
        })
    }

    /// A counter as snapshots call it.
    pub fn counter_name(&self, counter: Counter) -> String {
        match counter {
            Counter::Steps => "steps".to_owned(),
            Counter::Elements(of) => format!("elements({}@{})", self.inputs[of.input].name, of.axis),
        }
    }

    /// The smallest, the usual and the largest shapes of the inputs, as TensorRT takes them, for runs of up to
    /// `most_rows` rows; and the inputs with dimensions that may be any.
    pub fn profile_shapes(&self, most_rows: usize) -> ([String; 3], Vec<String>) {
        let fed = || self.inputs.iter().filter(|input| input.data_type != DataType::Bytes);
        let shapes = |rows: usize| {
            let shape = |input: &BoundInput| {
                let dim = |(axis, &dim): (usize, &i64)| {
                    if Some(axis) == input.batch_axis { rows.to_string() } else { dim.to_string() }
                };
                let dims: Vec<_> = input.dims.iter().enumerate().map(dim).collect();
                format!("{}:{}", input.name, dims.join("x"))
            };
            fed().filter(|input| !input.dims.is_empty()).map(shape).collect::<Vec<_>>().join(",")
        };
        let is_open = |input: &&BoundInput| {
            input.dims.iter().enumerate().any(|(axis, &dim)| dim < 0 && Some(axis) != input.batch_axis)
        };
        let open = fed().filter(is_open).map(|input| format!("'{}'", input.name)).collect();
        ([shapes(1), shapes(most_rows), shapes(most_rows)], open)
    }

    /// Why runs cannot be CUDA graphs: a tensor is not the same each time. `None` if they can.
    pub fn unfit_for_graphs(&self) -> Option<String> {
        let (_, open) = self.profile_shapes(1);
        if let Some(name) = open.first() {
            return Some(format!("dimensions of {name} are open"));
        }
        let strings = self.inputs.iter().find(|input| input.data_type == DataType::Bytes);
        if let Some(input) = strings {
            return Some(format!("'{}' has strings", input.name));
        }
        let is_optional = |input: &&BoundInput| matches!(&input.source, Source::Request(request) if request.optional);
        if let Some(input) = self.inputs.iter().find(is_optional) {
            return Some(format!("'{}' is optional", input.name));
        }
        let open = self.outputs.iter().find(|output| output.dims.is_none());
        open.map(|output| format!("dimensions of '{}' are open", output.name))
    }

    /// For runs of up to `most_rows` rows. Those of `graph_rows` rows can be CUDA graphs.
    pub fn step_spec(&self, most_rows: usize, graph_rows: Vec<usize>) -> StepSpec {
        let inputs = self.inputs.iter().map(input_spec);
        let lengths = trim_lengths(&self.outputs);
        let outputs = self.outputs.iter().enumerate().map(|(index, output)| OutputSpec {
            name: output.name.clone(),
            data_type: output.data_type,
            batch_axis: output.batch_axis,
            dims: output.dims.clone(),
            is_read: output.is_response || lengths.contains(&index),
            stays: self.states.iter().any(|state| state.output == index),
        });
        StepSpec { inputs: inputs.collect(), outputs: outputs.collect(), most_rows, graph_rows }
    }
}

/// The outputs that have the lengths of others.
pub(super) fn trim_lengths(outputs: &[BoundOutput]) -> Vec<usize> {
    let lengths = |output: &BoundOutput| match output.trim?.by {
        TrimBy::Output(index) => Some(index),
        TrimBy::Input(_) => None,
    };
    outputs.iter().filter_map(lengths).collect()
}

pub(super) fn input_spec(input: &BoundInput) -> InputSpec {
    InputSpec {
        name: input.name.clone(),
        data_type: input.data_type,
        batch_axis: input.batch_axis,
        dims: input.dims.clone(),
        is_given: matches!(input.source, Source::State(_)),
    }
}
