//! `input_windows`: inputs that requests bring in any length, and that the model gets in windows of one length.

use std::fmt;

use super::error::{ConfigError, bad};
use super::parameters::{self, Assigned, Parameters, parameter_line};
use super::repeat::REPEAT;

/// The parameter.
pub const INPUT_WINDOWS: &str = "input_windows";
/// The parameter that bounds the steps of a request.
pub const MAX_STEPS: &str = "max_steps_per_request";

/// An hour of steps of 32 ms has 112,500.
pub const USUAL_MOST_STEPS: usize = 1 << 17;

/// An input that is cut into windows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Name of the input.
    pub input: String,
    /// New elements of a window, along the axis.
    pub length: usize,
    /// The axis in the model, if it is written.
    pub axis: Option<usize>,
    /// Whether zeros fill up the last window at END.
    pub pads: bool,
}

/// `input_windows` and `max_steps_per_request`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Windows {
    /// The inputs that are cut.
    pub inputs: Vec<Window>,
    /// Most steps of a request, if it is written.
    pub most_steps: Option<usize>,
}

impl Windows {
    pub(super) fn new(parameters: &Parameters) -> Result<Self, ConfigError> {
        let inputs = parameters.text(INPUT_WINDOWS).map(windows).transpose()?.unwrap_or_default();
        let most_steps = parameters.number(MAX_STEPS, 1..=1usize << 32, "a number of steps from 1 to 4294967296")?;
        if let Some(steps) = most_steps.filter(|_| inputs.is_empty() && parameters.text(REPEAT).is_none()) {
            let why = "it needs 'input_windows' or 'repeat': without these, a request is one step";
            return Err(bad(MAX_STEPS, steps, why));
        }
        Ok(Self { inputs, most_steps })
    }

    /// Whether requests have any number of steps.
    pub fn are_cut(&self) -> bool {
        !self.inputs.is_empty()
    }

    /// The windows of an input, if it has any.
    pub fn of(&self, input: &str) -> Option<&Window> {
        self.inputs.iter().find(|window| window.input == input)
    }

    /// The line of config.pbtxt that gives the windows of `input` this axis and leaves the others as they are.
    pub fn line_with_axis(&self, input: &str, axis: usize) -> String {
        let written = |window: &Window| {
            let axis = if window.input == input { Some(axis) } else { window.axis };
            Window { axis, ..window.clone() }.to_string()
        };
        parameter_line(INPUT_WINDOWS, &self.inputs.iter().map(written).collect::<Vec<_>>().join(" "))
    }
}

fn windows(text: &str) -> Result<Vec<Window>, ConfigError> {
    const FORM: &str =
        "'input=elements', then '@axis' and ':pad' if needed, separated by spaces or commas, is expected";
    let window = |(input, value): (String, Assigned)| {
        let Assigned::One(value) = value else { return Err(bad(INPUT_WINDOWS, text, FORM)) };
        let (value, pads) = match value.rsplit_once(':') {
            None => (value.as_str(), false),
            Some((value, "pad")) => (value, true),
            Some((_, word)) => return Err(bad(INPUT_WINDOWS, text, format!("'{word}' is not 'pad'; {FORM}"))),
        };
        let (value, axis) =
            parameters::with_axis(value).map_err(|why| bad(INPUT_WINDOWS, text, format!("{why}; {FORM}")))?;
        match value.parse::<u32>() {
            Ok(length) if length > 0 => Ok(Window { input, length: length as usize, axis, pads }),
            _ => {
                let why = format!("'{input}' has windows of '{value}' elements: 1 or more are expected; {FORM}");
                Err(bad(INPUT_WINDOWS, text, why))
            }
        }
    };
    let windows: Vec<Window> =
        parameters::assignments(INPUT_WINDOWS, text, FORM)?.into_iter().map(window).collect::<Result<_, _>>()?;
    let is_padded = |window: &&Window| window.pads;
    match (windows.iter().find(is_padded), windows.iter().find(|window| !window.pads)) {
        _ if windows.is_empty() => Err(bad(INPUT_WINDOWS, text, FORM)),
        (Some(padded), Some(other)) => {
            let why = format!(
                "'{}' has ':pad' and '{}' has not: all inputs make the same steps, so write it for all or for none",
                padded.input, other.input
            );
            Err(bad(INPUT_WINDOWS, text, why))
        }
        _ => Ok(windows),
    }
}

impl Window {
    /// Whether windows behind a context of this length make a dimension of the model.
    pub fn fits(&self, dim: i64, context: usize) -> bool {
        dim < 0 || dim == (self.length + context) as i64
    }
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.input, self.length)?;
        if let Some(axis) = self.axis {
            write!(f, "@{axis}")?;
        }
        f.write_str(if self.pads { ":pad" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::Config;

    fn config(parameters: &[(&str, &str)]) -> Result<Windows, ConfigError> {
        let config = json!({ "name": "m", "max_batch_size": 4, "sequence_batching": { "direct": {} } });
        Config::for_tests(&config, parameters).map(|config| config.windows)
    }

    #[test]
    fn windows_are_read_and_written_alike() {
        let text = "near=160:pad far=160@1:pad";
        let windows = config(&[("input_windows", text), ("max_steps_per_request", "7")]).unwrap();
        assert_eq!(windows.most_steps, Some(7));
        assert_eq!(windows.inputs[1], Window { input: "far".to_owned(), length: 160, axis: Some(1), pads: true });
        let written: Vec<String> = windows.inputs.iter().map(Window::to_string).collect();
        assert_eq!(written.join(" "), text);
        assert!(windows.line_with_axis("near", 2).contains("near=160@2:pad far=160@1:pad"));
        assert!(!config(&[]).unwrap().are_cut());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, why) in [
            ("audio", "'input=elements'"),
            ("audio=0", "1 or more"),
            ("audio=x", "'x' elements"),
            ("audio=5:fill", "'fill' is not 'pad'"),
            ("audio=5@x", "'x'"),
            ("audio=[5]", "'input=elements'"),
            ("near=5:pad far=5", "write it for all or for none"),
            ("", "'input=elements'"),
        ] {
            let error = config(&[("input_windows", text)]).unwrap_err().to_string();
            assert!(error.contains("input_windows") && error.contains(why), "{text}: {error}");
        }
        let error = config(&[("max_steps_per_request", "5")]).unwrap_err().to_string();
        assert!(error.contains("max_steps_per_request") && error.contains("input_windows"), "{error}");
        let error = config(&[("input_windows", "a=1"), ("max_steps_per_request", "0")]).unwrap_err().to_string();
        assert!(error.contains("from 1 to 4294967296"), "{error}");
    }
}
