//! The options of a built-in graph, `NAME=VALUE` each, and what is wrong with one.

use std::collections::HashMap;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// An error in the name or the options of a built-in graph.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BuiltinError(pub(super) String);

/// The options that are given for a graph. Each is read once; then [`Options::finish`] refuses those that no one read.
pub struct Options<'a> {
    graph: &'static str,
    given: HashMap<&'a str, &'a str>,
    read: Vec<(&'static str, String)>,
}

impl<'a> Options<'a> {
    pub fn new(graph: &'static str, given: &[&'a str]) -> Result<Self, BuiltinError> {
        let mut options = HashMap::new();
        for text in given {
            let form = || BuiltinError(format!("{graph}: an option is NAME=VALUE, not '{text}'"));
            let (option, value) = text.split_once('=').ok_or_else(form)?;
            if options.insert(option, value).is_some() {
                return Err(BuiltinError(format!("{graph}: option '{option}' is given twice")));
            }
        }
        Ok(Self { graph, given: options, read: Vec::new() })
    }

    pub fn int(
        &mut self,
        option: &'static str,
        default: usize,
        range: RangeInclusive<usize>,
    ) -> Result<usize, BuiltinError> {
        self.within("a whole number", option, default, &range)
    }

    /// A number in a range that includes its ends.
    pub fn number(
        &mut self,
        option: &'static str,
        default: f64,
        range: RangeInclusive<f64>,
    ) -> Result<f64, BuiltinError> {
        self.within("a number", option, default, &range)
    }

    fn within<T: Display + FromStr + PartialOrd>(
        &mut self,
        kind: &str,
        option: &'static str,
        default: T,
        range: &RangeInclusive<T>,
    ) -> Result<T, BuiltinError> {
        let text = self.text(option, default);
        let allowed = || format!("{kind} from {} to {} is expected", range.start(), range.end());
        let value = text.parse().ok().filter(|value| range.contains(value));
        value.ok_or_else(|| self.wrong(option, allowed()))
    }

    pub fn flag(&mut self, option: &'static str, default: bool) -> Result<bool, BuiltinError> {
        // The first choice is the default.
        self.choice(option, &[default, !default].map(|value| (if value { "true" } else { "false" }, value)))
    }

    /// One of several words. The first is the default.
    pub fn choice<T: Copy>(&mut self, option: &'static str, choices: &[(&str, T)]) -> Result<T, BuiltinError> {
        let text = self.text(option, choices.first().map_or("", |(word, _)| word));
        let found = choices.iter().find(|(word, _)| *word == text).map(|(_, value)| *value);
        let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
        found.ok_or_else(|| self.wrong(option, format!("{} is expected", words.join(" or "))))
    }

    /// An option with one possible value; `why` says what is in the way of others.
    pub fn only(&mut self, option: &'static str, value: &str, why: &str) -> Result<(), BuiltinError> {
        let text = self.text(option, value);
        // 0 and 0.0 are the same.
        let is_same = text == value || text.parse::<f64>().is_ok_and(|text| value.parse() == Ok(text));
        if is_same { Ok(()) } else { Err(self.wrong(option, format!("only {value} is possible, because {why}"))) }
    }

    pub fn finish(&self) -> Result<(), BuiltinError> {
        let known: Vec<&str> = self.read.iter().map(|(option, _)| *option).collect();
        // A map has no order, and a message should have one.
        let Some(option) = self.given.keys().filter(|option| !known.contains(option)).min() else { return Ok(()) };
        Err(BuiltinError(format!("{} has no option '{option}': {} are known", self.graph, known.join(", "))))
    }

    /// Refuses the value of an option that doesn't fit the others.
    pub fn wrong(&self, option: &'static str, allowed: impl Display) -> BuiltinError {
        let value = self.read.iter().find(|(read, _)| *read == option).map_or("", |(_, value)| value);
        BuiltinError(format!("{}: {option}={value}: {allowed}", self.graph))
    }

    pub fn described(&self) -> String {
        let options = self.read.iter().map(|(option, value)| format!(" {option}={value}"));
        format!("{}{}", self.graph, options.collect::<String>())
    }

    fn text(&mut self, option: &'static str, default: impl Display) -> String {
        let text = self.given.get(option).map_or_else(|| default.to_string(), |&value| value.to_owned());
        self.read.push((option, text.clone()));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(given: &[&str]) -> String {
        let read = |mut options: Options| {
            options.int("bins", 80, 1..=512)?;
            options.number("scale", 1.0, 0.5..=2.0)?;
            options.choice("window", &[("povey", 1), ("hann", 2)])?;
            options.only("dither", "0", "noise differs in each run")?;
            options.finish()
        };
        Options::new("graph", given).and_then(read).unwrap_err().to_string()
    }

    #[test]
    fn values_are_read_and_described() {
        let mut options = Options::new("graph", &["bins=40", "dither=0.0"]).unwrap();
        assert_eq!(options.int("bins", 80, 1..=512), Ok(40));
        assert_eq!(options.number("scale", 1.0, 0.5..=2.0), Ok(1.0));
        assert_eq!(options.choice("window", &[("povey", 1), ("hann", 2)]), Ok(1));
        assert_eq!(options.only("dither", "0", ""), Ok(()));
        assert_eq!(options.finish(), Ok(()));
        assert_eq!(options.described(), "graph bins=40 scale=1 window=povey dither=0.0");
    }

    #[test]
    fn an_error_has_the_option_the_value_and_what_is_allowed() {
        assert_eq!(error(&["bins=0"]), "graph: bins=0: a whole number from 1 to 512 is expected");
        assert_eq!(error(&["bins=many"]), "graph: bins=many: a whole number from 1 to 512 is expected");
        assert_eq!(error(&["scale=nan"]), "graph: scale=nan: a number from 0.5 to 2 is expected");
        assert_eq!(error(&["window=box"]), "graph: window=box: povey or hann is expected");
        let dither = "graph: dither=1: only 0 is possible, because noise differs in each run";
        assert_eq!(error(&["dither=1"]), dither);
        assert_eq!(error(&["bin=8"]), "graph has no option 'bin': bins, scale, window, dither are known");
        assert_eq!(error(&["bins=8", "bins=8"]), "graph: option 'bins' is given twice");
        assert_eq!(error(&["bins"]), "graph: an option is NAME=VALUE, not 'bins'");
    }
}
