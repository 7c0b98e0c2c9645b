//! Built-in graphs: what stands in front of models of speech, and behind them. Each is an ordinary ONNX graph of opset
//! 17 whose states are inputs and outputs, with names that the backend pairs. Its rows are independent of each other.
//!
//! What a chunk gives doesn't depend on where chunks are cut: `fbank:kaldi` and `mel:nemo` keep the samples of frames
//! that aren't complete, in a state of varying length, and take chunks of any length. `stft` and `istft` have states of
//! fixed length, as the denoisers that they are for, so `stft` takes multiples of the hop.

mod builder;
mod fbank;
mod fourier;
mod framing;
mod options;

pub use options::BuiltinError;

use crate::onnx::schema::ModelProto;
use options::Options;

type Make = fn(&mut Options) -> Result<ModelProto, BuiltinError>;

const GRAPHS: [(&str, Make); 6] = [
    ("fbank:kaldi", fbank::kaldi),
    ("mel:nemo", fbank::nemo),
    ("stft", fourier::stft),
    ("istft", fourier::istft),
    ("irfft", fourier::irfft),
    ("overlap_add", fourier::overlap_add),
];

pub fn builtin_names() -> impl Iterator<Item = &'static str> {
    GRAPHS.iter().map(|(name, _)| *name)
}

/// The built-in graph of this name, with options such as `num_mel_bins=40`. `docs/convert.md` lists them.
pub fn builtin(name: &str, options: &[&str]) -> Result<ModelProto, BuiltinError> {
    let Some((graph, make)) = GRAPHS.iter().find(|(known, _)| *known == name) else {
        let known = builtin_names().collect::<Vec<_>>().join(", ");
        return Err(BuiltinError(format!("there is no built-in graph '{name}': {known} are known")));
    };
    make(&mut Options::new(graph, options)?)
}
