//! What a step and its provider need to know of a binding.

use rows::tensor::DataType;

use super::{Binding, BoundInput, Source, trim_lengths};
use crate::session::{InputSpec, OutputSpec, StepSpec};

impl Binding {
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
        let inputs = self.inputs.iter().map(|input| InputSpec {
            name: input.name.clone(),
            data_type: input.data_type,
            batch_axis: input.batch_axis,
            dims: input.dims.clone(),
            is_given: matches!(input.source, Source::State(_)),
        });
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
