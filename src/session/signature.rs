//! The signature of a model, as its session tells it.

#![forbid(unsafe_code)]

use ort::session::Session;
use ort::value::{Outlet, TensorElementType, ValueType};
use rows::tensor::DataType;

use super::error::OpenError;
use crate::onnx::{Signature, TensorInfo};

/// What the model of a session takes and gives. A default of a type that this backend doesn't know is left out.
pub(super) fn signature_of(session: &Session) -> Result<Signature, OpenError> {
    let infos = |outlets: &[Outlet]| {
        outlets.iter().map(|outlet| tensor_info(outlet.name(), outlet.dtype())).collect::<Result<_, _>>()
    };
    let defaults = session.overridable_initializers();
    let defaults = defaults.iter().filter_map(|default| tensor_info(default.name(), default.dtype()).ok());
    Ok(Signature { inputs: infos(session.inputs())?, defaults: defaults.collect(), outputs: infos(session.outputs())? })
}

fn tensor_info(name: &str, value: &ValueType) -> Result<TensorInfo, OpenError> {
    let name = name.to_owned();
    let unsupported = |what: String| OpenError::Unsupported { name: name.clone(), what };
    let ValueType::Tensor { ty, shape, dimension_symbols } = value else {
        return Err(unsupported(format!("{value}")));
    };
    let data_type = data_type(*ty).ok_or_else(|| unsupported(format!("{ty}")))?;
    let symbols = dimension_symbols.iter().map(|symbol| symbol.to_string()).collect();
    Ok(TensorInfo { name, data_type, dims: shape.to_vec(), symbols })
}

fn data_type(element: TensorElementType) -> Option<DataType> {
    Some(match element {
        TensorElementType::Bool => DataType::Bool,
        TensorElementType::Uint8 => DataType::Uint8,
        TensorElementType::Uint16 => DataType::Uint16,
        TensorElementType::Uint32 => DataType::Uint32,
        TensorElementType::Uint64 => DataType::Uint64,
        TensorElementType::Int8 => DataType::Int8,
        TensorElementType::Int16 => DataType::Int16,
        TensorElementType::Int32 => DataType::Int32,
        TensorElementType::Int64 => DataType::Int64,
        TensorElementType::Float16 => DataType::Fp16,
        TensorElementType::Float32 => DataType::Fp32,
        TensorElementType::Float64 => DataType::Fp64,
        TensorElementType::Bfloat16 => DataType::Bf16,
        TensorElementType::String => DataType::Bytes,
        _ => return None,
    })
}
