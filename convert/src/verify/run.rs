//! A model in ONNX Runtime.

use std::borrow::Cow;

use ort::environment::Environment;
use ort::session::{Session, SessionInputValue};
use ort::value::{DynValue, Tensor};

use super::element::{Element, of_runtime, with_type};
use super::host::Host;
use super::{Source, VerifyError};
use crate::onnx::type_name;

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
        let wanted = inputs.iter().filter(|(name, _)| self.inputs.contains(name));
        let values = wanted.map(|(name, host)| Ok((name, value(host).map_err(failed)?)));
        // An input that is an output, too, is read behind the run.
        let values = values.collect::<Result<Vec<_>, VerifyError>>()?;
        let feeds: Vec<(Cow<str>, SessionInputValue)> =
            values.iter().map(|(name, value)| (name.as_str().into(), value.into())).collect();
        let made = self.session.run(feeds).map_err(|error| failed(error.to_string()))?;
        let read = |name: &String| match made.get(name) {
            Some(value) => host(value).map_err(failed),
            None => Err(failed(format!("it has no output '{name}'"))),
        };
        outputs.iter().map(read).collect()
    }
}

fn value(host: &Host) -> Result<DynValue, String> {
    fn of<T: Element>(host: &Host) -> Result<DynValue, String> {
        let elements: Vec<T> = host.bytes.chunks_exact(size_of::<T>()).map(T::of_bytes).collect();
        let tensor = Tensor::from_array((host.dims.clone(), elements)).map_err(|error| error.to_string())?;
        Ok(tensor.into_dyn())
    }
    with_type!(host.elem, T => of::<T>(host))
        .unwrap_or_else(|| Err(format!("{} can't be compared", type_name(host.elem))))
}

fn host(value: &DynValue) -> Result<Host, String> {
    fn of<T: Element>(value: &DynValue, elem: i32) -> Result<Host, String> {
        let (shape, elements) = value.try_extract_tensor::<T>().map_err(|error| error.to_string())?;
        Ok(Host { elem, dims: shape.to_vec(), bytes: elements.iter().flat_map(T::bytes).collect() })
    }
    let elem = value.dtype().tensor_type().and_then(of_runtime);
    let read = elem.and_then(|elem| with_type!(elem, T => of::<T>(value, elem)));
    read.unwrap_or_else(|| Err(format!("{} can't be compared", value.dtype())))
}
