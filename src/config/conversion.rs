//! How the model is to be converted at load.

use super::error::ConfigError;
use super::parameters::{Parameters, bad, names, with_axis};

const LOW_LATENCY: &str = "low_latency_transformation";
const OPEN_BATCH: &str = "open_batch";
const CONST_INITIALIZER: &str = "use_const_initializer";

/// What the configuration asks of the conversion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversion {
    /// `low_latency_transformation`: recurrences inside the model get states. The axes that have the steps, as far as
    /// they are written.
    pub recurrences: Option<Vec<(String, usize)>>,
    /// `open_batch`: a batch of 1 is opened. The axes that are the batch, as far as they are written.
    pub batch: Option<Vec<(String, usize)>>,
    /// `use_const_initializer`: the states start at zero instead of at learned or constant values. Padding of convolutions
    /// and pooling keeps its value.
    pub zero_initial_states: bool,
}

impl Conversion {
    pub(super) fn new(parameters: &Parameters) -> Result<Self, ConfigError> {
        let recurrences = axes(LOW_LATENCY, parameters)?;
        let zero_initial_states = parameters.flag(CONST_INITIALIZER, false)?;
        if zero_initial_states && recurrences.is_none() {
            let rule = format!("it has an effect only with '{LOW_LATENCY}'");
            return Err(bad(CONST_INITIALIZER, "true", rule));
        }
        Ok(Self { recurrences, batch: axes(OPEN_BATCH, parameters)?, zero_initial_states })
    }
}

/// Reads a switch that may have axes in place of `true`: `INPUT@AXIS`, separated by spaces or commas.
fn axes(name: &'static str, parameters: &Parameters) -> Result<Option<Vec<(String, usize)>>, ConfigError> {
    let text = parameters.text(name).unwrap_or("false");
    let refused = || bad(name, text, "'true', 'false', or axes as 'INPUT@AXIS' are expected");
    match text {
        "true" | "1" => return Ok(Some(Vec::new())),
        "false" | "0" => return Ok(None),
        _ => {}
    }
    let axis = |text: String| match with_axis(&text) {
        Ok((input, Some(axis))) if !input.is_empty() => Ok((input.to_owned(), axis)),
        _ => Err(refused()),
    };
    let axes = names(name, parameters).into_iter().map(axis).collect::<Result<Vec<_>, _>>()?;
    if axes.is_empty() { Err(refused()) } else { Ok(Some(axes)) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::PartialConfig;

    fn conversion(parameters: &[(&str, &str)]) -> Result<Conversion, ConfigError> {
        let mut config = json!({ "name": "m" });
        for (name, value) in parameters {
            config["parameters"][name] = json!({ "string_value": value });
        }
        Ok(PartialConfig::from_json(config.to_string().as_bytes())?.conversion)
    }

    #[test]
    fn a_switch_may_name_axes() {
        let none = conversion(&[(LOW_LATENCY, "false")]).unwrap();
        assert_eq!((none.recurrences, none.batch), (None, None));
        let all = conversion(&[(LOW_LATENCY, "true"), (OPEN_BATCH, "1"), (CONST_INITIALIZER, "true")]).unwrap();
        assert_eq!((all.recurrences, all.batch, all.zero_initial_states), (Some(Vec::new()), Some(Vec::new()), true));
        let named = conversion(&[(OPEN_BATCH, "x@0, a@b@2")]).unwrap();
        assert_eq!(named.batch, Some(vec![("x".to_owned(), 0), ("a@b".to_owned(), 2)]));
    }

    #[test]
    fn another_value_is_refused() {
        for name in [LOW_LATENCY, OPEN_BATCH] {
            for value in ["perhaps", "", "x@", "@1", "x@-1", "true,x@1"] {
                let error = conversion(&[(name, value)]).unwrap_err().to_string();
                assert!(error.contains(name) && error.contains("'INPUT@AXIS'"), "{error}");
            }
        }
        let error = conversion(&[(CONST_INITIALIZER, "true")]).unwrap_err().to_string();
        assert!(error.contains(CONST_INITIALIZER) && error.contains(LOW_LATENCY), "{error}");
    }
}
