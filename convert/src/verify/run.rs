//! A model in ONNX Runtime.

use std::borrow::Cow;

use half::f16;
use ort::environment::Environment;
use ort::session::{Session, SessionInputValue};
use ort::value::{DynValue, PrimitiveTensorElementType, Tensor, TensorElementType};

use super::host::Host;
use super::{Source, VerifyError};
use crate::onnx::{DataType, type_name};

/// A model that runs.
pub struct Graph {
    session: Session,
    model: &'static str,
    inputs: Vec<String>,
}

impl Graph {
    pub fn open(environment: &Environment, source: Source, model: &'static str) -> Result<Self, VerifyError> {
        let failed = |why: String| VerifyError::Load { model, why: why.trim_end().to_owned() };
        let builder = Session::builder(environment).map_err(|error| failed(error.to_string()))?;
        let mut builder = builder.with_intra_threads(1).map_err(|error| failed(error.to_string()))?;
        let session = match source {
            Source::File(path) => builder.commit_from_file(path),
            Source::Bytes(bytes) => builder.commit_from_memory(bytes),
        };
        let session = session.map_err(|error| failed(error.to_string()))?;
        let inputs = session.inputs().iter().map(|input| input.name().to_owned()).collect();
        Ok(Self { session, model, inputs })
    }

    /// The outputs of these names. Inputs that the model hasn't are left out.
    pub fn run(&mut self, inputs: &[(String, Host)], outputs: &[String]) -> Result<Vec<Host>, VerifyError> {
        let model = self.model;
        let failed = |why: String| VerifyError::Run { model, why: why.trim_end().to_owned() };
        let mut feeds: Vec<(Cow<str>, SessionInputValue)> = Vec::new();
        for (name, host) in inputs.iter().filter(|(name, _)| self.inputs.contains(name)) {
            feeds.push((name.as_str().into(), value(host).map_err(failed)?.into()));
        }
        let made = self.session.run(feeds).map_err(|error| failed(error.to_string()))?;
        let read = |name: &String| match made.get(name) {
            Some(value) => host(value).map_err(failed),
            None => Err(failed(format!("it has no output '{name}'"))),
        };
        outputs.iter().map(read).collect()
    }
}

fn value(host: &Host) -> Result<DynValue, String> {
    fn of<T: PrimitiveTensorElementType + std::fmt::Debug + Clone + 'static, const N: usize>(
        host: &Host,
        read: impl Fn([u8; N]) -> T,
    ) -> Result<DynValue, String> {
        let elements: Vec<T> = host.bytes.as_chunks::<N>().0.iter().map(|&bytes| read(bytes)).collect();
        let tensor = Tensor::from_array((host.dims.clone(), elements)).map_err(|error| error.to_string())?;
        Ok(tensor.into_dyn())
    }
    match DataType::try_from(host.elem).unwrap_or(DataType::Undefined) {
        DataType::Float => of(host, f32::from_le_bytes),
        DataType::Double => of(host, f64::from_le_bytes),
        DataType::Float16 => of(host, f16::from_le_bytes),
        DataType::Int64 => of(host, i64::from_le_bytes),
        DataType::Int32 => of(host, i32::from_le_bytes),
        DataType::Int8 => of(host, i8::from_le_bytes),
        DataType::Uint8 => of(host, u8::from_le_bytes),
        DataType::Bool => of(host, |[byte]: [u8; 1]| byte != 0),
        _ => Err(format!("tensors of type {} can't be compared", type_name(host.elem))),
    }
}

fn host(value: &DynValue) -> Result<Host, String> {
    fn of<T: PrimitiveTensorElementType, const N: usize>(
        value: &DynValue,
        elem: DataType,
        write: impl Fn(&T) -> [u8; N],
    ) -> Result<Host, String> {
        let (shape, elements) = value.try_extract_tensor::<T>().map_err(|error| error.to_string())?;
        Ok(Host { elem: elem.into(), dims: shape.to_vec(), bytes: elements.iter().flat_map(write).collect() })
    }
    match value.dtype().tensor_type() {
        Some(TensorElementType::Float32) => of(value, DataType::Float, |x: &f32| x.to_le_bytes()),
        Some(TensorElementType::Float64) => of(value, DataType::Double, |x: &f64| x.to_le_bytes()),
        Some(TensorElementType::Float16) => of(value, DataType::Float16, |x: &f16| x.to_le_bytes()),
        Some(TensorElementType::Int64) => of(value, DataType::Int64, |x: &i64| x.to_le_bytes()),
        Some(TensorElementType::Int32) => of(value, DataType::Int32, |x: &i32| x.to_le_bytes()),
        Some(TensorElementType::Int8) => of(value, DataType::Int8, |x: &i8| x.to_le_bytes()),
        Some(TensorElementType::Uint8) => of(value, DataType::Uint8, |x: &u8| x.to_le_bytes()),
        Some(TensorElementType::Bool) => of(value, DataType::Bool, |&x: &bool| [u8::from(x)]),
        other => Err(format!("tensors of type {other:?} can't be compared")),
    }
}
