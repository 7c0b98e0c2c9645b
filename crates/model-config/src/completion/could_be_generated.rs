//! Inputs of requests that the backend can make instead, because their names and the names of their dims say exactly
//! what they are.

use crate::config::{GENERATED_INPUTS, StatePair, TensorConfig, parameter_line};
use crate::onnx::{Signature, TensorInfo};

const POSITION_IDS: &str = "position_ids";
const ATTENTION_MASK: &str = "attention_mask";

/// Says which of the inputs of `requests` these are, with the line to write; `None` if there are none.
pub fn note(signature: &Signature, requests: &[TensorConfig], pairs: &[StatePair]) -> Option<String> {
    let model = Model { signature, requests, pairs };
    let entries: Vec<String> = model.position_ids().into_iter().chain(model.attention_mask()).collect();
    let line = parameter_line(GENERATED_INPUTS, &entries.join(" "));
    (!entries.is_empty()).then(|| {
        format!(
            "the backend can make inputs of requests itself, so that clients need not send them: write {line} and take \
             them out of 'input' if they are listed there"
        )
    })
}

struct Model<'a> {
    signature: &'a Signature,
    requests: &'a [TensorConfig],
    pairs: &'a [StatePair],
}

impl<'a> Model<'a> {
    fn position_ids(&self) -> Option<String> {
        let symbol = self.requested(POSITION_IDS)?.symbols.last().filter(|symbol| !symbol.is_empty())?;
        Some(format!("{POSITION_IDS}=positions({})", self.data_with(symbol)?.name))
    }

    fn attention_mask(&self) -> Option<String> {
        let symbol = self.requested(ATTENTION_MASK)?.symbols.last()?;
        // Optimum names the sum, and onnxruntime-genai's builder the total.
        let (past, new) = if let Some((past, new)) = symbol.split_once(" + ") {
            (past.to_owned(), new)
        } else {
            let new = symbol.strip_prefix("total_")?;
            (format!("past_{new}"), new)
        };
        let is_state = |info: &&TensorInfo| self.pairs.iter().any(|pair| pair.input == info.name);
        let state = self.signature.inputs.iter().filter(is_state).find(|info| has_symbol(info, &past))?;
        Some(format!("{ATTENTION_MASK}=mask({}, {})", state.name, self.data_with(new)?.name))
    }

    /// The input of this name, if requests carry it.
    fn requested(&self, name: &str) -> Option<&'a TensorInfo> {
        self.requested_inputs().find(|info| info.name == name)
    }

    /// The first input of requests, besides the two, that has a dimension of this name.
    fn data_with(&self, symbol: &str) -> Option<&'a TensorInfo> {
        let is_data = |info: &&TensorInfo| ![POSITION_IDS, ATTENTION_MASK].contains(&info.name.as_str());
        self.requested_inputs().filter(is_data).find(|info| has_symbol(info, symbol))
    }

    fn requested_inputs(&self) -> impl Iterator<Item = &'a TensorInfo> {
        let is_requested = |info: &&TensorInfo| self.requests.iter().any(|tensor| tensor.name == info.name);
        self.signature.inputs.iter().filter(is_requested)
    }
}

fn has_symbol(info: &TensorInfo, symbol: &str) -> bool {
    info.symbols.iter().any(|other| other == symbol)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rows::tensor::DataType;

    fn info(name: &str, symbols: &[&str]) -> TensorInfo {
        TensorInfo {
            name: name.to_owned(),
            data_type: DataType::Int64,
            dims: vec![-1; symbols.len()],
            symbols: symbols.iter().map(|&symbol| symbol.to_owned()).collect(),
        }
    }

    fn noted(inputs: &[TensorInfo], requests: &[&str]) -> Option<String> {
        let signature = Signature { inputs: inputs.to_vec(), defaults: Vec::new(), outputs: Vec::new() };
        let tensor = |&name: &&str| TensorConfig {
            name: name.to_owned(),
            data_type: DataType::Int64,
            dims: vec![-1],
            optional: false,
        };
        let requests: Vec<TensorConfig> = requests.iter().map(tensor).collect();
        note(&signature, &requests, &[StatePair { input: "past.0".to_owned(), output: "present.0".to_owned() }])
    }

    #[test]
    fn what_names_and_dims_say_is_noted_with_the_line_to_write() {
        let decoder = [
            info("input_ids", &["batch", "length"]),
            info("attention_mask", &["batch", "past + length"]),
            info("position_ids", &["batch", "length"]),
            info("past.0", &["batch", "past"]),
        ];
        let (ids, mask) = ("position_ids=positions(input_ids)", "attention_mask=mask(past.0, input_ids)");
        let of = |requests: &[&str]| {
            let note = noted(&decoder, requests).unwrap_or_default();
            [ids, mask].map(|entry| note.contains(entry))
        };
        assert_eq!(of(&["input_ids", "attention_mask", "position_ids"]), [true, true]);
        assert_eq!(of(&["input_ids", "position_ids"]), [true, false]);
        assert_eq!(of(&["input_ids"]), [false, false]);
        assert_eq!(of(&["attention_mask", "position_ids"]), [false, false], "no data has the new elements");
        let of_builder = [
            info("input_ids", &["batch", "length"]),
            info("attention_mask", &["batch", "total_length"]),
            info("past.0", &["batch", "past_length"]),
        ];
        assert!(noted(&of_builder, &["input_ids", "attention_mask"]).unwrap().contains(mask));
    }

    #[test]
    fn other_names_of_dims_say_nothing() {
        let decoder = [
            info("input_ids", &["batch", "length"]),
            info("attention_mask", &["batch", "total"]),
            info("position_ids", &["batch", ""]),
            info("past.0", &["batch", "past"]),
        ];
        assert_eq!(noted(&decoder, &["input_ids", "attention_mask", "position_ids"]), None);
    }
}
