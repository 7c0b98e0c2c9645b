//! What an ONNX model takes and gives.

use ort::value::{Outlet, TensorElementType, ValueType};

use super::open::SessionError;
use crate::tensor::DataType;

/// Inputs and outputs of a model, in the model's order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// What it takes.
    pub inputs: Vec<TensorInfo>,
    /// What it takes if it is given, and has a value of its own for: its overridable initializers.
    pub defaults: Vec<TensorInfo>,
    /// What it gives.
    pub outputs: Vec<TensorInfo>,
}

/// One input or output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in the model.
    pub name: String,
    /// Element type.
    pub data_type: DataType,
    /// Dimensions; -1 is open. Empty for a scalar, and where the model says nothing about the rank.
    pub dims: Vec<i64>,
    /// Names of the open dimensions, empty where there is none; as many as `dims`.
    pub symbols: Vec<String>,
}

impl Signature {
    pub(super) fn of(session: &ort::session::Session) -> Result<Self, SessionError> {
        let infos = |outlets: &[Outlet]| {
            outlets.iter().map(|outlet| TensorInfo::new(outlet.name(), outlet.dtype())).collect::<Result<_, _>>()
        };
        let defaults = session.overridable_initializers();
        let defaults = defaults.iter().filter_map(|default| TensorInfo::new(default.name(), default.dtype()).ok());
        Ok(Self { inputs: infos(session.inputs())?, defaults: defaults.collect(), outputs: infos(session.outputs())? })
    }
}

impl TensorInfo {
    fn new(name: &str, value: &ValueType) -> Result<Self, SessionError> {
        let name = name.to_owned();
        let unsupported = |what: String| SessionError::Unsupported { name: name.clone(), what };
        let ValueType::Tensor { ty, shape, dimension_symbols } = value else {
            return Err(unsupported(format!("{value}")));
        };
        let data_type = data_type(*ty).ok_or_else(|| unsupported(format!("{ty}")))?;
        let symbols = dimension_symbols.iter().map(|symbol| symbol.to_string()).collect();
        Ok(Self { name, data_type, dims: shape.to_vec(), symbols })
    }
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
