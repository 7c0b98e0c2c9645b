//! `repeat` and `repeat_until`: a step of a request feeds the next one, until an output says that the request is done.

use std::fmt;

use super::error::{ConfigError, bad};
use super::parameters::{self, Parameters};

/// The parameter with the outputs that become inputs.
pub const REPEAT: &str = "repeat";
/// The parameter with what ends the steps.
pub const REPEAT_UNTIL: &str = "repeat_until";

/// What a step of a request gives to the next one, and what ends the steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repeat {
    /// Outputs that become inputs of the next step; empty if a request is not repeated.
    pub feeds: Vec<Feed>,
    /// Outputs that end the steps; empty if only the number of steps does.
    pub until: Vec<Stop>,
}

/// An output that becomes an input of the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feed {
    /// Name of the output.
    pub output: String,
    /// Name of the input.
    pub input: String,
}

/// An output that ends the steps when one of its elements has one of these values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stop {
    /// Name of the output.
    pub output: String,
    /// The values as written.
    pub values: Vec<String>,
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

impl Repeat {
    pub(super) fn new(parameters: &Parameters) -> Result<Self, ConfigError> {
        let feeds = parameters.text(REPEAT).map(feeds).transpose()?.unwrap_or_default();
        match parameters.text(REPEAT_UNTIL) {
            None => Ok(Self { feeds, until: Vec::new() }),
            Some(text) if feeds.is_empty() => {
                Err(bad(REPEAT_UNTIL, text, "it needs 'repeat', which says what a step gives to the next one"))
            }
            Some(text) => Ok(Self { feeds, until: stops(text)? }),
        }
    }

    /// Whether requests are repeated.
    pub fn is_any(&self) -> bool {
        !self.feeds.is_empty()
    }
}

/// Reads `<<<output, input>>>`, in the form of `state_pairs`.
fn feeds(text: &str) -> Result<Vec<Feed>, ConfigError> {
    const FORM: &str = "pairs '<<<output, input>>>' separated by spaces are expected, each name in one pair only";
    // A pair of `state_pairs` has the input first.
    let pairs = parameters::state_pairs(text).map_err(|_| bad(REPEAT, text, FORM))?;
    Ok(pairs.into_iter().map(|pair| Feed { output: pair.input, input: pair.output }).collect())
}

/// Reads `output=value`, `output=[value, value]` and `output`, which is short for `output=true`.
fn stops(text: &str) -> Result<Vec<Stop>, ConfigError> {
    const FORM: &str = "'output=value', 'output=[value, value]', or the name of an output of TYPE_BOOL, separated by spaces \
                        or commas, is expected";
    // Not `parameters::assignments`, because an output may stand alone.
    const BETWEEN: [char; 4] = [',', ' ', '\t', '\n'];
    let wrong = || bad(REPEAT_UNTIL, text, FORM);
    let (mut stops, mut rest): (Vec<Stop>, _) = (Vec::new(), text.trim());
    while !rest.is_empty() {
        let (output, behind) =
            rest.split_at(rest.find(|letter| letter == '=' || BETWEEN.contains(&letter)).unwrap_or(rest.len()));
        let (values, behind) = match behind.trim_start().strip_prefix('=').map(str::trim_start) {
            None => ("true", behind),
            Some(list) if list.starts_with('[') => list[1..].split_once(']').ok_or_else(wrong)?,
            Some(value) => value.split_at(value.find(BETWEEN).unwrap_or(value.len())),
        };
        let values: Vec<String> = values.split(',').map(|value| value.trim().to_owned()).collect();
        if output.is_empty() || values.iter().any(String::is_empty) {
            return Err(wrong());
        }
        if stops.iter().any(|stop| stop.output == output) {
            return Err(bad(REPEAT_UNTIL, text, format!("'{output}' may be given once only")));
        }
        stops.push(Stop { output: output.to_owned(), values });
        rest = behind.trim_start_matches(BETWEEN);
    }
    if stops.is_empty() { Err(wrong()) } else { Ok(stops) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::Config;

    fn config(parameters: &[(&str, &str)]) -> Result<Repeat, ConfigError> {
        let config = json!({ "name": "m", "max_batch_size": 4, "sequence_batching": { "direct": {} } });
        Config::for_tests(&config, parameters).map(|config| config.repeat)
    }

    #[test]
    fn feeds_and_ends_are_read() {
        let repeat =
            config(&[("repeat", "<<<next, ids>>> <<<a, b>>>"), ("repeat_until", "next=[2, 3], done level = 0.5")])
                .unwrap();
        let feed = |output: &str, input: &str| Feed { output: output.to_owned(), input: input.to_owned() };
        assert_eq!(repeat.feeds, [feed("next", "ids"), feed("a", "b")]);
        let until: Vec<_> = repeat.until.iter().map(|stop| (stop.output.as_str(), stop.values.join("|"))).collect();
        assert_eq!(until, [("next", "2|3".to_owned()), ("done", "true".to_owned()), ("level", "0.5".to_owned())]);
        assert!(!config(&[]).unwrap().is_any());
    }

    #[test]
    fn what_is_wrong_is_named() {
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
            let error = config(&[("repeat", repeat), ("repeat_until", until)]).unwrap_err().to_string();
            assert!(error.contains("repeat") && error.contains(why), "{repeat} {until}: {error}");
        }
        let error = config(&[("repeat_until", "a=1")]).unwrap_err().to_string();
        assert!(error.contains("it needs 'repeat'"), "{error}");
    }
}
