//! `generated_inputs`: inputs of the model that this backend fills with counters, lengths and masks.

use std::fmt;
use std::str::FromStr;

use super::parameters::{Parameters, with_axis};
use super::raw::{Result, bad};

/// An input that no request carries, because its values follow from the sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GeneratedInput {
    pub input: String,
    pub kind: GeneratedKind,
    /// Each number is multiplied with this, and `addend` is added; of [`GeneratedKind::Last`], the number of ones. A
    /// mask has neither.
    pub factor: i64,
    pub addend: i64,
    /// The entry's right side, for messages.
    pub written: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GeneratedKind {
    /// One number.
    Count(NamedCounter),
    /// A value for each element of this input: how many elements the sequence has had before it.
    Positions(NamedAxis),
    /// The length of this state before the run.
    Length(NamedAxis),
    /// 1 for each element of the state, then 1 for each new element.
    Mask { state: NamedAxis, new: NewElements },
    /// As many ones as are counted, at the end of `length` elements, and 0 in front of them. Without `length`, there
    /// are as many elements as the model's input has.
    Last { count: NamedCounter, length: Option<u32> },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamedCounter {
    Steps,
    /// How many elements of this input it has had before the request.
    Elements(NamedAxis),
}

/// The elements that an inference adds to a state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewElements {
    Number(u32),
    Of(NamedAxis),
}

/// A tensor of the model, and perhaps an axis of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedAxis {
    pub name: String,
    pub axis: Option<usize>,
}

pub const GENERATED_INPUTS: &str = "generated_inputs";
const GENERATED_FORM: &str = "'INPUT=steps', 'INPUT=elements(OTHER)', 'INPUT=positions(OTHER)', 'INPUT=length(STATE)', \
                    'INPUT=mask(STATE, OTHER)' or 'INPUT=last(steps, LENGTH)', separated by spaces or commas, is expected";

pub(super) fn generated_inputs(parameters: &Parameters) -> Result<Vec<GeneratedInput>> {
    let Some(text) = parameters.text(GENERATED_INPUTS) else { return Ok(Vec::new()) };
    let mut generated: Vec<GeneratedInput> = Vec::new();
    for entry in entries(text) {
        let entry = GeneratedInput::parse(entry).map_err(|why| bad(GENERATED_INPUTS, text, why))?;
        if generated.iter().any(|known| known.input == entry.input) {
            return Err(bad(GENERATED_INPUTS, text, format!("'{}' may be given once only", entry.input)));
        }
        generated.push(entry);
    }
    if generated.is_empty() { Err(bad(GENERATED_INPUTS, text, GENERATED_FORM)) } else { Ok(generated) }
}

/// The entries of a list, which spaces and commas separate, except within parentheses.
fn entries(text: &str) -> impl Iterator<Item = &str> {
    // Spaces and commas also separate the arguments of a call.
    let mut depth = 0_usize;
    let separates = move |letter: char| {
        match letter {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0 && (letter == ',' || letter.is_whitespace())
    };
    text.split(separates).filter(|entry| !entry.is_empty())
}

impl GeneratedInput {
    fn parse(entry: &str) -> Result<Self, String> {
        let (input, written) = entry.split_once('=').ok_or(GENERATED_FORM)?;
        if input.is_empty() || written.is_empty() {
            return Err(GENERATED_FORM.to_owned());
        }
        let last = written.strip_prefix("last(");
        let (kind, factor, addend) = last.map_or_else(|| numbers(written), last_ones)?;
        Ok(Self { input: input.to_owned(), kind, factor, addend, written: written.to_owned() })
    }
}

fn numbers(written: &str) -> Result<(GeneratedKind, i64, i64), String> {
    // A name within the parentheses may have '*' and '+', so the factor and the addend are looked for behind them.
    let call = written.find(')').map_or_else(|| written.find(['*', '+']), |close| Some(close + 1));
    let (call, behind) = written.split_at(call.unwrap_or(written.len()));
    let kind = GeneratedKind::parse(call)?;
    let (factor, addend) = factor_and_addend(behind)
        .ok_or_else(|| format!("'{behind}' follows '{call}': '*FACTOR', '+ADDEND' or both, is expected"))?;
    if matches!(kind, GeneratedKind::Mask { .. }) && !behind.is_empty() {
        return Err(format!("'{behind}' follows '{call}', but a mask has no factor and no addend"));
    }
    Ok((kind, factor, addend))
}

/// Reads what follows `last(`.
fn last_ones(behind: &str) -> Result<(GeneratedKind, i64, i64), String> {
    let arguments = behind.strip_suffix(')').ok_or_else(|| {
        format!("'last({behind}' does not end with ')': '*FACTOR' and '+ADDEND' stand within the parentheses of 'last'")
    })?;
    let (ones, length) =
        arguments.split_once(',').map_or((arguments, None), |(ones, length)| (ones, Some(length.trim())));
    let number = |text: &str| {
        let most = u32::MAX;
        whole_number(text).ok_or_else(|| format!("'{text}' is no length: a whole number up to {most} is expected"))
    };
    let length = length.map(number).transpose()?;
    match numbers(ones.trim())? {
        (GeneratedKind::Count(count), factor, addend) => Ok((GeneratedKind::Last { count, length }, factor, addend)),
        _ => Err(format!("'{ones}' is no number of 'last': 'steps' or 'elements(OTHER)' is expected")),
    }
}

impl GeneratedKind {
    fn parse(call: &str) -> Result<Self, String> {
        let (kind, arguments) = match call.split_once('(') {
            None => (call, Vec::new()),
            Some((kind, arguments)) => {
                let inner =
                    arguments.strip_suffix(')').ok_or_else(|| format!("'{call}' has no ')': {GENERATED_FORM}"))?;
                (kind, inner.split(',').map(NamedAxis::parse).collect::<Result<_, _>>()?)
            }
        };
        match (kind, arguments.as_slice()) {
            ("steps", []) => Ok(Self::Count(NamedCounter::Steps)),
            ("elements", [of]) => Ok(Self::Count(NamedCounter::Elements(of.clone()))),
            ("positions", [of]) => Ok(Self::Positions(of.clone())),
            ("length", [of]) => Ok(Self::Length(of.clone())),
            ("mask", [state]) => Ok(Self::Mask { state: state.clone(), new: NewElements::Number(0) }),
            ("mask", [state, new]) => {
                // Digits alone are a number. An input that has digits as its name is written with its axis.
                let number = whole_number(&new.name).filter(|_| new.axis.is_none());
                let new = number.map_or_else(|| NewElements::Of(new.clone()), NewElements::Number);
                Ok(Self::Mask { state: state.clone(), new })
            }
            ("steps" | "elements" | "positions" | "length" | "mask" | "last", _) => {
                Err(format!("'{kind}' takes other arguments than '{call}' has: {GENERATED_FORM}"))
            }
            _ => Err(format!("'{kind}' is no kind of value: {GENERATED_FORM}")),
        }
    }
}

impl NamedAxis {
    fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let (name, axis) = with_axis(text)?;
        if name.is_empty() || name.contains(char::is_whitespace) {
            return Err(format!("'{text}' is no name: {GENERATED_FORM}"));
        }
        Ok(Self { name: name.to_owned(), axis })
    }
}

impl fmt::Display for NamedAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.axis.map_or(Ok(()), |axis| write!(f, "@{axis}"))
    }
}

/// Reads `*FACTOR+ADDEND`. Either part may be missing.
fn factor_and_addend(text: &str) -> Option<(i64, i64)> {
    let (factor, addend) = match text.split_once('+') {
        None => (text, 0),
        Some((factor, addend)) => (factor, whole_number(addend)?),
    };
    let factor = if factor.is_empty() { 1 } else { whole_number(factor.strip_prefix('*')?)? };
    Some((factor, addend))
}

fn whole_number<T: FromStr>(digits: &str) -> Option<T> {
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn read(text: &str) -> Result<Vec<GeneratedInput>> {
        Config::with_parameters(&[(GENERATED_INPUTS, text)]).map(|config| config.written.generated)
    }

    fn named(name: &str, axis: Option<usize>) -> NamedAxis {
        NamedAxis { name: name.to_owned(), axis }
    }

    #[test]
    fn what_is_written_is_read() {
        let text = "offset=steps*16+64 position_ids=positions(input_ids@1),lens=length(att_cache)+1, \
                    seen=elements( x )*3 n=steps mask=mask(past_key_values.0.key@2, input_ids)\n m2=mask(k) \
                    m3=mask(k,16) m4=mask(k, 16@1) l1=last(steps*16+16) l2=last( elements(x@1)+3, 80 )";
        let read = read(text).unwrap();
        let kinds: Vec<_> = read.iter().map(|of| (of.input.as_str(), of.kind.clone(), of.factor, of.addend)).collect();
        let mask = |state, new| GeneratedKind::Mask { state, new };
        let input_ids = NewElements::Of(named("input_ids", None));
        let count = GeneratedKind::Count;
        let last = |count, length| GeneratedKind::Last { count, length };
        assert_eq!(
            kinds,
            [
                ("offset", count(NamedCounter::Steps), 16, 64),
                ("position_ids", GeneratedKind::Positions(named("input_ids", Some(1))), 1, 0),
                ("lens", GeneratedKind::Length(named("att_cache", None)), 1, 1),
                ("seen", count(NamedCounter::Elements(named("x", None))), 3, 0),
                ("n", count(NamedCounter::Steps), 1, 0),
                ("mask", mask(named("past_key_values.0.key", Some(2)), input_ids), 1, 0),
                ("m2", mask(named("k", None), NewElements::Number(0)), 1, 0),
                ("m3", mask(named("k", None), NewElements::Number(16)), 1, 0),
                ("m4", mask(named("k", None), NewElements::Of(named("16", Some(1)))), 1, 0),
                ("l1", last(NamedCounter::Steps, None), 16, 16),
                ("l2", last(NamedCounter::Elements(named("x", Some(1))), Some(80)), 1, 3),
            ]
        );
        assert_eq!(read[0].written, "steps*16+64");
    }

    #[test]
    fn what_cannot_be_read_is_refused_with_the_value_and_the_reason() {
        for (text, word) in [
            ("", "INPUT=steps"),
            ("offset", "INPUT=steps"),
            ("=steps", "INPUT=steps"),
            ("offset=", "INPUT=steps"),
            ("offset=counter", "'counter' is no kind"),
            ("offset=counter(x)", "'counter' is no kind"),
            ("offset=steps(x)", "'steps' takes other arguments than 'steps(x)'"),
            ("offset=steps()", "'' is no name"),
            ("offset=elements", "'elements' takes other arguments than 'elements'"),
            ("offset=elements(x, y)", "'elements' takes other arguments than 'elements(x, y)'"),
            ("offset=mask(a, b, c)", "'mask' takes other arguments than 'mask(a, b, c)'"),
            ("offset=elements(x", "no ')'"),
            ("offset=elements()", "'' is no name"),
            ("offset=elements(x y)", "'x y' is no name"),
            ("offset=elements(x@y)", "'y' is no axis"),
            ("offset=elements(x@-1)", "'-1' is no axis"),
            ("offset=steps*", "'*' follows"),
            ("offset=steps*x", "'*x' follows"),
            ("offset=steps*-1", "'*-1' follows"),
            ("offset=steps+1*2", "'+1*2' follows"),
            ("offset=steps*99999999999999999999", "follows"),
            ("offset=elements(x)y", "'y' follows"),
            ("m=mask(k, x)*2", "a mask has no factor"),
            ("m=last", "'last' takes other arguments than 'last'"),
            ("m=last(steps", "'last(steps' does not end with ')'"),
            ("m=last(steps)*16", "'last(steps)*16' does not end with ')': '*FACTOR'"),
            ("m=last(steps*x)", "'*x' follows"),
            ("m=last(counter)", "'counter' is no kind"),
            ("m=last(length(k))", "'length(k)' is no number of 'last'"),
            ("m=last(mask(k, x))", "'x)' is no length"),
            ("m=last()", "'' is no kind"),
            ("m=last(steps, x)", "'x' is no length"),
            ("m=last(steps, )", "'' is no length"),
            ("m=last(steps, 80, 80)", "'80, 80' is no length"),
            ("m=last(steps, 4294967296)", "'4294967296' is no length"),
            ("offset=steps offset=steps", "'offset' may be given once only"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!([GENERATED_INPUTS, text, word].iter().all(|part| error.contains(part)), "{text}: {error}");
        }
    }
}
