//! States: their batch axis, their size, and whether their two ends agree.

use super::error::BindingError;
use super::shapes::{bound, empty_dims};
use super::{BoundInput, BoundOutput, Source, all_agree, describe};
use crate::config::Config;
use crate::session::{Signature, TensorInfo};
use crate::tensor::{DataType, RowLayout};

/// The name that the model gives its batch dimension, where an input of requests has it.
pub(super) fn batch_symbol<'a>(config: &Config, signature: &'a Signature) -> Option<&'a str> {
    let is_request = |info: &&TensorInfo| config.inputs.iter().any(|tensor| tensor.name == info.name);
    let first = signature.inputs.iter().find(is_request)?;
    first.symbols.first().map(String::as_str).filter(|symbol| !symbol.is_empty())
}

pub(super) fn state_input(
    config: &Config,
    number: usize,
    info: &TensorInfo,
    batch_symbol: Option<&str>,
) -> Result<BoundInput, BindingError> {
    let error = |why: &str| BindingError::State {
        name: info.name.clone(),
        dims: describe(info.data_type, &info.dims),
        why: why.to_owned(),
    };
    let open: Vec<usize> = (0..info.dims.len()).filter(|&axis| info.dims[axis] < 0).collect();
    let named: Vec<usize> =
        open.iter().copied().filter(|&axis| batch_symbol == Some(info.symbols[axis].as_str())).collect();
    let batch_axis = match (config.max_batch_size, open.as_slice(), named.as_slice()) {
        (_, &[axis], _) | (1.., _, &[axis]) => Some(axis),
        (0 | 1, [], _) => None,
        (_, [], _) => {
            return Err(error(
                "no dimension is open for the batch; set max_batch_size to 0 or 1, or export the model with a dynamic batch dimension",
            ));
        }
        (_, [..], _) => return Err(error("more than one dimension is open; which one is the batch cannot be told")),
    };
    if open.iter().any(|&axis| Some(axis) != batch_axis) {
        return Err(error(
            "another dimension than the batch is open; states that change their size are not supported yet",
        ));
    }
    Ok(bound(info, batch_axis, Source::State(number)))
}

pub(super) fn check_state_ends(
    input: &BoundInput,
    input_info: &TensorInfo,
    output_info: &TensorInfo,
) -> Result<(), BindingError> {
    // Exporters leave the dims of state outputs open, or say nothing about them; a run checks them.
    let dims_agree = output_info.dims.is_empty() || all_agree(&input.dims, &output_info.dims);
    match input.data_type == output_info.data_type && dims_agree {
        true => Ok(()),
        false => Err(BindingError::StateEnds {
            input: input.name.clone(),
            output: output_info.name.clone(),
            input_is: describe(input_info.data_type, &input_info.dims),
            output_is: describe(output_info.data_type, &output_info.dims),
        }),
    }
}

pub(super) fn state_layout(input: &BoundInput) -> Result<RowLayout, BindingError> {
    RowLayout::new(input.data_type, &input.dims, input.batch_axis).ok_or_else(|| BindingError::State {
        name: input.name.clone(),
        dims: describe(input.data_type, &input.dims),
        why: "its size overflows".to_owned(),
    })
}

/// The output end of a state; one that responses carry too is fetched once.
pub(super) fn state_output(outputs: &mut Vec<BoundOutput>, input: &BoundInput, info: &TensorInfo) -> usize {
    let index = outputs.iter().position(|output| output.name == info.name).unwrap_or_else(|| {
        let (name, data_type) = (info.name.clone(), info.data_type);
        outputs.push(BoundOutput {
            name,
            data_type,
            batch_axis: None,
            dims: None,
            is_response: false,
            empty_dims: Vec::new(),
        });
        outputs.len() - 1
    });
    let output = &mut outputs[index];
    output.batch_axis = input.batch_axis;
    // ONNX Runtime allocates strings itself.
    output.dims = Some(input.dims.clone()).filter(|_| input.data_type != DataType::Bytes);
    output.empty_dims = empty_dims(&input.dims, input.batch_axis);
    index
}
