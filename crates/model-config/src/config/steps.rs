//! Reads the parameters that act along an axis of an input: contexts (`input_context`), padding (`padded_inputs`,
//! `padded_outputs`) and windows (`input_windows`). Also `repeat` and `repeat_until`, which make a request run in
//! several steps: each step reads outputs of the one before it.

use std::fmt;

use super::parameters::{self, Parameters, parameter_line, with_axis};
use super::raw::{Result, bad};

/// An input that gets the end of the sequence's previous input in front.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    pub input: String,
    /// Elements of the previous input, along the axis.
    pub length: usize,
    /// Elements behind them that the model's window has, if they are written.
    pub new: Option<usize>,
    /// The axis in the model, if it is written.
    pub axis: Option<usize>,
    pub first: FirstRequest,
}

/// What the first inference of a sequence has in front, where no request has left a context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FirstRequest {
    #[default]
    Zeros,
    /// The first element of the request, as often as the context is long.
    Repeat,
    /// Nothing: the request carries the whole window, and later ones what is new in it.
    Whole,
}

const FIRST: [(&str, FirstRequest); 3] =
    [("zeros", FirstRequest::Zeros), ("repeat", FirstRequest::Repeat), ("whole", FirstRequest::Whole)];

/// An input whose rows are filled up to one length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PaddedInput {
    pub input: String,
    /// The input that takes each row's own length.
    pub lengths: String,
    pub axis: Option<usize>,
}

/// An output of a padded run. Each row's response gets the part that belongs to the row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PaddedOutput {
    pub output: String,
    /// The output that gives the length of each row's part; `None` if a row has all of it.
    pub lengths: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ragged {
    pub inputs: Vec<PaddedInput>,
    pub outputs: Vec<PaddedOutput>,
}

const CONTEXT: &str = "input_context";

pub(super) fn contexts(parameters: &Parameters) -> Result<Vec<Context>> {
    const FORM: &str = "'input=elements', then '+new_elements', '@axis' and ':zeros', ':repeat' or ':whole' if needed, \
                        separated by spaces or commas, is expected";
    parameters.assigned(CONTEXT, FORM, None, |input, value| {
        let value = value.one(FORM)?;
        let (value, first) = match value.rsplit_once(':') {
            None => (value.as_str(), FirstRequest::default()),
            Some((value, word)) => {
                let first = FIRST.iter().find(|(known, _)| *known == word);
                let none = || format!("'{word}' is none of 'zeros', 'repeat', 'whole'; {FORM}");
                (value, first.ok_or_else(none)?.1)
            }
        };
        let (value, axis) = with_axis(value).map_err(|why| format!("{why}; {FORM}"))?;
        let elements = |number: &str| match number.parse::<u32>() {
            Ok(0) | Err(_) => Err(format!("'{input}' has '{number}' elements: 1 or more are expected; {FORM}")),
            Ok(elements) => Ok(elements as usize),
        };
        let (length, new) = match value.split_once('+') {
            Some((length, new)) => (elements(length)?, Some(elements(new)?)),
            None => (elements(value)?, None),
        };
        Ok(Context { input, length, new, axis, first })
    })
}

/// The line of config.pbtxt that gives the context of `input` this axis and leaves the others as they are.
pub fn context_line(contexts: &[Context], input: &str, axis: usize) -> String {
    let written = |context: &Context| {
        let axis = if context.input == input { Some(axis) } else { context.axis };
        Context { axis, ..context.clone() }.to_string()
    };
    parameter_line(CONTEXT, &contexts.iter().map(written).collect::<Vec<_>>().join(" "))
}

impl Context {
    /// The model's window along a dimension of the model: -1 for any length.
    pub fn window(&self, dim: i64) -> i64 {
        self.new.filter(|_| dim < 0).map_or(dim, |new| (self.length + new) as i64)
    }

    /// What clients send along a dimension of the model: -1 for different lengths, `None` if the context cannot stand
    /// along it.
    pub fn sent(&self, dim: i64) -> Option<i64> {
        let window = self.window(dim);
        // The model takes any length, so requests may bring any.
        if window < 0 {
            return Some(-1);
        }
        let new = window - self.length as i64;
        let fits = self.new.map_or(new > 0, |written| written as i64 == new);
        fits.then_some(if self.first == FirstRequest::Whole { -1 } else { new })
    }

    /// Which dimension of the model it can stand along.
    pub fn wanted(&self) -> String {
        match self.new {
            Some(new) => format!("{}, or open", self.length + new),
            None => format!("longer than {}", self.length),
        }
    }
}

impl fmt::Display for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.input, self.length)?;
        if let Some(new) = self.new {
            write!(f, "+{new}")?;
        }
        if let Some(axis) = self.axis {
            write!(f, "@{axis}")?;
        }
        match FIRST.iter().find(|(_, first)| *first == self.first && *first != FirstRequest::Zeros) {
            Some((word, _)) => write!(f, ":{word}"),
            None => Ok(()),
        }
    }
}

impl Ragged {
    pub(super) fn new(parameters: &Parameters) -> Result<Self> {
        const OUTPUTS: &str = "padded_outputs";
        const INPUT_FORM: &str =
            "'input=lengths_input' or 'input=lengths_input@axis', separated by spaces or commas, is expected";
        const OUTPUT_FORM: &str = "'output=lengths_output' or 'output=all', separated by spaces or commas, is expected";
        let inputs = parameters.assigned("padded_inputs", INPUT_FORM, None, |input, value| {
            let value = value.one(INPUT_FORM)?;
            let (lengths, axis) = with_axis(&value).map_err(|why| format!("{why}; {INPUT_FORM}"))?;
            Ok(PaddedInput { input, lengths: lengths.to_owned(), axis })
        })?;
        let outputs = parameters.assigned(OUTPUTS, OUTPUT_FORM, None, |output, value| {
            Ok(PaddedOutput { output, lengths: Some(value.one(OUTPUT_FORM)?).filter(|name| name != "all") })
        })?;
        if inputs.is_empty() && !outputs.is_empty() {
            parameters.refuse(OUTPUTS, "it needs 'padded_inputs'")?;
        }
        Ok(Self { inputs, outputs })
    }
}

pub const INPUT_WINDOWS: &str = "input_windows";
pub const MAX_STEPS: &str = "max_steps_per_request";
pub const REPEAT: &str = "repeat";
pub const REPEAT_UNTIL: &str = "repeat_until";

// An hour of steps of 32 ms has 112,500.
pub const USUAL_MOST_STEPS: usize = 1 << 17;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Windows {
    pub inputs: Vec<Window>,
    pub most_steps: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    pub input: String,
    /// New elements of a window, along the axis.
    pub length: usize,
    pub axis: Option<usize>,
    /// Whether zeros fill up the last window at END.
    pub pads: bool,
}

/// What a step of a request gives to the next one, and what ends the steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repeat {
    /// Empty if a request is not repeated.
    pub feeds: Vec<Feed>,
    /// Empty if only the number of steps ends them.
    pub until: Vec<Stop>,
}

/// An output that becomes an input of the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feed {
    pub output: String,
    pub input: String,
}

/// An output that ends the steps when one of its elements has one of these values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stop {
    pub output: String,
    pub values: Vec<String>,
}

impl Windows {
    pub(super) fn new(parameters: &Parameters) -> Result<Self> {
        const FORM: &str =
            "'input=elements', then '@axis' and ':pad' if needed, separated by spaces or commas, is expected";
        let inputs = parameters.assigned(INPUT_WINDOWS, FORM, None, |input, value| {
            let value = value.one(FORM)?;
            let (value, pads) = match value.rsplit_once(':') {
                None => (value.as_str(), false),
                Some((value, "pad")) => (value, true),
                Some((_, word)) => return Err(format!("'{word}' is not 'pad'; {FORM}")),
            };
            let (value, axis) = with_axis(value).map_err(|why| format!("{why}; {FORM}"))?;
            // As u32, so that its sum with a context's length can't overflow.
            match value.parse::<u32>() {
                Ok(length) if length > 0 => Ok(Window { input, length: length as usize, axis, pads }),
                _ => Err(format!("'{input}' has windows of '{value}' elements: 1 or more are expected; {FORM}")),
            }
        })?;
        if inputs.is_empty() {
            parameters.refuse(INPUT_WINDOWS, FORM)?;
        }
        // One step takes a window of each input, so all of them must end in the same step.
        let [padded, other] = [true, false].map(|pads| inputs.iter().find(|window| window.pads == pads));
        if let (Some(padded), Some(other)) = (padded, other) {
            let why = format!(
                "'{}' has ':pad' and '{}' has not: all inputs make the same steps, so write it for all or for none",
                padded.input, other.input
            );
            parameters.refuse(INPUT_WINDOWS, &why)?;
        }
        let most_steps = parameters.number(MAX_STEPS, 1..=1usize << 32, "a number of steps from 1 to 4294967296")?;
        if inputs.is_empty() && parameters.text(REPEAT).is_none() {
            let why = "it needs 'input_windows' or 'repeat': without these, a request is one step";
            parameters.refuse(MAX_STEPS, why)?;
        }
        Ok(Self { inputs, most_steps })
    }

    pub fn are_cut(&self) -> bool {
        !self.inputs.is_empty()
    }

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

impl Repeat {
    /// Reads `<<<output, input>>>`, in the form of `state_pairs`. In `repeat_until`, `output` is short for
    /// `output=true`.
    pub(super) fn new(parameters: &Parameters) -> Result<Self> {
        const FEED_FORM: &str =
            "pairs '<<<output, input>>>' separated by spaces are expected, each name in one pair only";
        const FORM: &str = "'output=value', 'output=[value, value]', or the name of an output of TYPE_BOOL, separated by \
                            spaces or commas, is expected";
        let Some(text) = parameters.text(REPEAT) else {
            parameters.refuse(REPEAT_UNTIL, "it needs 'repeat', which says what a step gives to the next one")?;
            return Ok(Self::default());
        };
        let pairs = parameters::state_pairs(text).map_err(|_| bad(REPEAT, text, FEED_FORM))?;
        // A pair of `state_pairs` has the input first.
        let feeds = pairs.into_iter().map(|pair| Feed { output: pair.input, input: pair.output }).collect();
        let until = parameters.assigned(REPEAT_UNTIL, FORM, Some("true"), |output, values| {
            Ok(Stop { output, values: values.values(FORM)? })
        })?;
        if until.is_empty() {
            parameters.refuse(REPEAT_UNTIL, FORM)?;
        }
        Ok(Self { feeds, until })
    }

    pub fn is_any(&self) -> bool {
        !self.feeds.is_empty()
    }
}

impl fmt::Display for Repeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let feeds: Vec<String> = self.feeds.iter().map(Feed::to_string).collect();
        f.write_str(&feeds.join(" "))
    }
}

impl fmt::Display for Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<<<{}, {}>>>", self.output, self.input)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn what_is_written_is_read() {
        let config = Config::with_parameters(&[
            ("input_context", "audio=64 features=7@1 x=13+32@1:whole, z=2:repeat w=2@0:zeros"),
            ("padded_inputs", "audio=len, features=flen@1"),
            ("padded_outputs", "y=ylen z=all"),
            ("warmup_batch_sizes", "1, 4"),
        ]);
        let config = config.unwrap();
        let context =
            |input: &str, length, axis, first| Context { input: input.to_owned(), length, new: None, axis, first };
        let expected = [
            context("audio", 64, None, FirstRequest::Zeros),
            context("features", 7, Some(1), FirstRequest::Zeros),
            Context { new: Some(32), ..context("x", 13, Some(1), FirstRequest::Whole) },
            context("z", 2, None, FirstRequest::Repeat),
            context("w", 2, Some(0), FirstRequest::Zeros),
        ];
        assert_eq!(config.contexts, expected);
        let written: Vec<String> = expected.iter().map(Context::to_string).collect();
        assert_eq!(written.join(" "), "audio=64 features=7@1 x=13+32@1:whole z=2:repeat w=2@0");
        assert_eq!(config.ragged.inputs[1].lengths, "flen");
        assert_eq!((config.ragged.inputs[0].axis, config.ragged.inputs[1].axis), (None, Some(1)));
        assert_eq!(config.ragged.outputs[0].lengths.as_deref(), Some("ylen"));
        assert_eq!(config.ragged.outputs[1].lengths, None);
        assert_eq!(config.warmup_batch_sizes, [1, 4]);
    }

    #[test]
    fn what_cannot_be_read_is_refused_with_the_parameter_and_the_value() {
        for (name, value, word) in [
            ("input_context", "audio", "input=elements"),
            ("input_context", "audio=0", "1 or more"),
            ("input_context", "audio=-3", "1 or more"),
            ("input_context", "audio=3+", "'audio' has '' elements: 1 or more"),
            ("input_context", "audio=3+0@1", "'audio' has '0' elements: 1 or more"),
            ("input_context", "audio=3@1+2", "'1+2' is no axis"),
            ("input_context", "audio=[1]", "input=elements"),
            ("input_context", "audio=3@x", "'x' is no axis"),
            ("input_context", "audio=3:all", "'all' is none of 'zeros', 'repeat', 'whole'"),
            ("input_context", "audio=3:whole@1", "'whole@1' is none of"),
            ("input_context", "audio=3 audio=4", "once only"),
            ("padded_inputs", "audio", "lengths_input"),
            ("padded_inputs", "audio=len@-1", "'-1' is no axis"),
            ("padded_outputs", "y=all", "'padded_inputs'"),
            ("warmup_batch_sizes", "0", "from 1 to 4"),
            ("warmup_batch_sizes", "1, 5", "'5'"),
            ("warmup_batch_sizes", "x", "'x'"),
        ] {
            let error = Config::with_parameters(&[(name, value)]).unwrap_err().to_string();
            assert!([name, value, word].iter().all(|part| error.contains(part)), "{error}");
        }
    }

    #[test]
    fn windows_are_read_and_written_alike() {
        let text = "near=160:pad far=160@1:pad";
        let windows = Config::with_parameters(&[("input_windows", text), ("max_steps_per_request", "7")])
            .unwrap()
            .written
            .windows;
        assert_eq!(windows.most_steps, Some(7));
        assert_eq!(windows.inputs[1], Window { input: "far".to_owned(), length: 160, axis: Some(1), pads: true });
        let written: Vec<String> = windows.inputs.iter().map(Window::to_string).collect();
        assert_eq!(written.join(" "), text);
        assert!(windows.line_with_axis("near", 2).contains("near=160@2:pad far=160@1:pad"));
        assert!(!Config::with_parameters(&[]).unwrap().windows.are_cut());
    }

    #[test]
    fn wrong_windows_are_named() {
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
            let error = Config::with_parameters(&[("input_windows", text)]).unwrap_err().to_string();
            assert!(error.contains("input_windows") && error.contains(why), "{text}: {error}");
        }
        let error = Config::with_parameters(&[("max_steps_per_request", "5")]).unwrap_err().to_string();
        assert!(error.contains("max_steps_per_request") && error.contains("input_windows"), "{error}");
        let error = Config::with_parameters(&[("input_windows", "a=1"), ("max_steps_per_request", "0")])
            .unwrap_err()
            .to_string();
        assert!(error.contains("from 1 to 4294967296"), "{error}");
    }

    #[test]
    fn feeds_and_ends_are_read() {
        let repeat = Config::with_parameters(&[
            ("repeat", "<<<next, ids>>> <<<a, b>>>"),
            ("repeat_until", "next=[2, 3], done level = 0.5"),
        ])
        .unwrap()
        .written
        .repeat;
        let feed = |output: &str, input: &str| Feed { output: output.to_owned(), input: input.to_owned() };
        assert_eq!(repeat.feeds, [feed("next", "ids"), feed("a", "b")]);
        let until: Vec<_> = repeat.until.iter().map(|stop| (stop.output.as_str(), stop.values.join("|"))).collect();
        assert_eq!(until, [("next", "2|3".to_owned()), ("done", "true".to_owned()), ("level", "0.5".to_owned())]);
        assert!(!Config::with_parameters(&[]).unwrap().repeat.is_any());
    }

    #[test]
    fn wrong_feeds_and_ends_are_named() {
        for (repeat, until, why) in [
            ("a, b", "a=1", "'<<<output, input>>>'"),
            ("<<<a, b>>> <<<c, b>>>", "a=1", "one pair only"),
            ("<<<a, b>>>", "", "'output=value'"),
            ("<<<a, b>>>", "a=", "'output=value'"),
            ("<<<a, b>>>", "=1", "'output=value'"),
            ("<<<a, b>>>", "a=[1", "'output=value'"),
            ("<<<a, b>>>", "a=[1,]", "'output=value'"),
            ("<<<a, b>>>", "a=1 a=2", "once only"),
        ] {
            let error =
                Config::with_parameters(&[("repeat", repeat), ("repeat_until", until)]).unwrap_err().to_string();
            assert!(error.contains("repeat") && error.contains(why), "{repeat} {until}: {error}");
        }
        let error = Config::with_parameters(&[("repeat_until", "a=1")]).unwrap_err().to_string();
        assert!(error.contains("it needs 'repeat'"), "{error}");
    }
}
