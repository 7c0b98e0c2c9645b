//! What an ONNX model takes and gives.

use rows::tensor::DataType;
use stateful_convert::{is_batch_name, is_made_up};

/// Inputs and outputs of a model, in the model's order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    pub inputs: Vec<TensorInfo>,
    /// Its overridable initializers: inputs that a run may leave out, because the model has a value for them.
    pub defaults: Vec<TensorInfo>,
    pub outputs: Vec<TensorInfo>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: String,
    pub data_type: DataType,
    /// Dimensions; -1 is open. Empty for a scalar, and where the model says nothing about the rank.
    pub dims: Vec<i64>,
    /// An entry for each of `dims`: the name of an open dimension, or an empty text.
    pub symbols: Vec<String>,
}

impl Signature {
    /// The names that the batch dimension may have: a usual one, else all that every state and another input have.
    /// `state_axes` gives the dimensions of a state that may be the batch, and `None` for what is no state.
    pub fn batch_symbols(&self, state_axes: impl Fn(&TensorInfo) -> Option<Vec<usize>>) -> Vec<&str> {
        let symbols = || self.inputs.iter().flat_map(|info| &info.symbols).filter(|symbol| !symbol.is_empty());
        if let Some(usual) = symbols().find(|symbol| is_batch_name(symbol)) {
            return vec![usual];
        }
        let axes: Vec<_> = self.inputs.iter().map(|info| (info, state_axes(info))).collect();
        let has = |info: &TensorInfo, symbol: &str| info.symbols.iter().any(|other| other == symbol);
        // A state without a batch has no name for it.
        let states =
            || axes.iter().filter_map(|(info, axes)| Some((info, axes.as_ref()?))).filter(|(_, a)| !a.is_empty());
        let is_shared = |symbol: &str| {
            states().all(|(info, axes)| axes.iter().any(|&axis| info.symbols[axis] == symbol))
                && axes.iter().any(|(info, axes)| axes.is_none() && has(info, symbol))
        };
        let mut shared: Vec<&str> = Vec::new();
        for symbol in symbols() {
            if states().next().is_some() && is_shared(symbol) && !shared.contains(&symbol.as_str()) {
                shared.push(symbol);
            }
        }
        shared
    }

    /// The input of this name that has no default.
    pub fn input(&self, name: &str) -> Option<&TensorInfo> {
        self.inputs.iter().find(|info| info.name == name)
    }

    pub fn output(&self, name: &str) -> Option<&TensorInfo> {
        self.outputs.iter().find(|info| info.name == name)
    }

    /// Includes inputs with a default.
    pub fn input_names(&self) -> Vec<&str> {
        self.inputs.iter().chain(&self.defaults).map(|info| info.name.as_str()).collect()
    }

    pub fn output_names(&self) -> Vec<&str> {
        self.outputs.iter().map(|info| info.name.as_str()).collect()
    }
}

impl TensorInfo {
    /// The name of a dimension, if it tells which dimensions of other tensors are the same; else empty. PyTorch's
    /// exporter gives a dimension without a name one that is made of the tensor's name and a number, such as
    /// `audio_signal_dynamic_axes_1`, and tf2onnx one such as `unk__577`. Each tensor then has another name for the same
    /// batch.
    pub fn symbol(&self, axis: usize) -> &str {
        let symbol = self.symbols.get(axis).map_or("", String::as_str);
        let stem = symbol.trim_end_matches(|letter: char| letter.is_ascii_digit());
        let is_numbered = |ending: &str| {
            stem.len() < symbol.len()
                && stem.strip_suffix(ending).is_some_and(|front| front.ends_with(self.name.as_str()))
        };
        if is_made_up(symbol) || ["_dynamic_axes_", "_dim_"].into_iter().any(is_numbered) { "" } else { symbol }
    }
}

/// Whether two dimensions can be the same; an open one can be any.
pub const fn agree(a: i64, b: i64) -> bool {
    a == b || a < 0 || b < 0
}

/// The dimensions that a model leaves open, without the batch.
pub fn open_axes(dims: &[i64], batch_axis: Option<usize>) -> Vec<usize> {
    (0..dims.len()).filter(|&axis| dims[axis] < 0 && Some(axis) != batch_axis).collect()
}

pub fn all_agree(a: &[i64], b: &[i64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(&a, &b)| agree(a, b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_made_of_the_tensors_name_and_a_number_says_nothing() {
        let symbol = |name: &str, symbol: &str| {
            let symbols = vec![symbol.to_owned()];
            TensorInfo { name: name.to_owned(), data_type: DataType::Fp32, dims: vec![-1], symbols }
                .symbol(0)
                .to_owned()
        };
        for (name, numbered) in [
            ("cache_last_time", "cache_last_time_dynamic_axes_2"),
            ("states.1", "states.1_dim_1"),
            ("74", "LSTM74_dim_1"),
            ("h", "unk__577"),
        ] {
            assert_eq!(symbol(name, numbered), "");
        }
        for (name, said) in [
            ("cache", "other_dynamic_axes_1"),
            ("past", "past_length"),
            ("past", "past_dim_"),
            ("x", "batch"),
            ("x", "s77"),
            ("x", "unk__"),
            ("x", "unk__rows"),
            ("x", ""),
        ] {
            assert_eq!(symbol(name, said), said);
        }
    }
}
