//! `generated_inputs`: inputs of the model that this backend fills with counters, lengths and masks.

use std::fmt;

use super::error::ConfigError;
use super::parameters::{Parameters, bad};

/// An input that no request carries, because its values follow from the sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GeneratedInput {
    pub input: String,
    pub kind: GeneratedKind,
    /// Each value is multiplied with this number, and `addend` is added. A mask has neither.
    pub factor: i64,
    pub addend: i64,
    /// The entry's right side, for messages.
    pub written: String,
}

/// What a generated input holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GeneratedKind {
    /// The number of inferences that the sequence has made.
    Steps,
    /// How many elements of this input the sequence has had before the request.
    Elements(NamedAxis),
    /// A value for each element of this input: how many elements the sequence has had before it.
    Positions(NamedAxis),
    /// The length of this state before the run.
    Length(NamedAxis),
    /// 1 for each element of the state, then 1 for each element of the input.
    Mask { state: NamedAxis, input: Option<NamedAxis> },
}

/// A tensor of the model, and perhaps an axis of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedAxis {
    pub name: String,
    pub axis: Option<usize>,
}

pub const GENERATED_INPUTS: &str = "generated_inputs";
const FORM: &str = "'INPUT=steps', 'INPUT=elements(OTHER)', 'INPUT=positions(OTHER)', 'INPUT=length(STATE)' or \
                    'INPUT=mask(STATE, OTHER)', separated by spaces or commas, is expected";

pub(super) fn generated_inputs(parameters: &Parameters) -> Result<Vec<GeneratedInput>, ConfigError> {
    let Some(text) = parameters.text(GENERATED_INPUTS) else { return Ok(Vec::new()) };
    let mut generated: Vec<GeneratedInput> = Vec::new();
    for entry in entries(text) {
        let entry = GeneratedInput::parse(entry).map_err(|why| bad(GENERATED_INPUTS, text, why))?;
        if generated.iter().any(|known| known.input == entry.input) {
            return Err(bad(GENERATED_INPUTS, text, format!("'{}' may be given once only", entry.input)));
        }
        generated.push(entry);
    }
    if generated.is_empty() { Err(bad(GENERATED_INPUTS, text, FORM)) } else { Ok(generated) }
}

/// The entries of a list, which spaces and commas separate, except within parentheses.
fn entries(text: &str) -> impl Iterator<Item = &str> {
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
        let (input, written) = entry.split_once('=').ok_or(FORM)?;
        if input.is_empty() || written.is_empty() {
            return Err(FORM.to_owned());
        }
        let call = written.find(')').map_or_else(|| written.find(['*', '+']), |close| Some(close + 1));
        let (call, behind) = written.split_at(call.unwrap_or(written.len()));
        let kind = GeneratedKind::parse(call)?;
        let (factor, addend) = factor_and_addend(behind)
            .ok_or_else(|| format!("'{behind}' stands behind '{call}': '*FACTOR', '+ADDEND' or both, is expected"))?;
        if matches!(kind, GeneratedKind::Mask { .. }) && !behind.is_empty() {
            return Err(format!("'{behind}' stands behind '{call}', and a mask has no factor and no addend"));
        }
        Ok(Self { input: input.to_owned(), kind, factor, addend, written: written.to_owned() })
    }
}

impl GeneratedKind {
    fn parse(call: &str) -> Result<Self, String> {
        let (kind, arguments) = match call.split_once('(') {
            None => (call, Vec::new()),
            Some((kind, arguments)) => {
                let inner = arguments.strip_suffix(')').ok_or_else(|| format!("'{call}' has no ')': {FORM}"))?;
                (kind, inner.split(',').map(NamedAxis::parse).collect::<Result<_, _>>()?)
            }
        };
        match (kind, <[NamedAxis; 1]>::try_from(arguments)) {
            ("steps", Err(arguments)) if arguments.is_empty() && call == kind => Ok(Self::Steps),
            ("elements", Ok([of])) => Ok(Self::Elements(of)),
            ("positions", Ok([of])) => Ok(Self::Positions(of)),
            ("length", Ok([of])) => Ok(Self::Length(of)),
            ("mask", Ok([state])) => Ok(Self::Mask { state, input: None }),
            ("mask", Err(arguments)) if arguments.len() == 2 => {
                let mut arguments = arguments.into_iter();
                let (state, input) = (arguments.next(), arguments.next());
                state.map(|state| Self::Mask { state, input }).ok_or_else(|| FORM.to_owned())
            }
            ("steps" | "elements" | "positions" | "length" | "mask", _) => {
                Err(format!("'{call}' has not the names that '{kind}' takes: {FORM}"))
            }
            _ => Err(format!("'{kind}' is no kind of value: {FORM}")),
        }
    }
}

impl NamedAxis {
    fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let (name, axis) = match text.rsplit_once('@') {
            None => (text, None),
            Some((name, axis)) => {
                let axis = axis.parse().map_err(|_| format!("'{axis}' is no axis: a whole number is expected"))?;
                (name, Some(axis))
            }
        };
        if name.is_empty() || name.contains(char::is_whitespace) {
            return Err(format!("'{text}' is no name: {FORM}"));
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

/// Reads `*FACTOR+ADDEND`, of which either part may be missing.
fn factor_and_addend(text: &str) -> Option<(i64, i64)> {
    let number = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?;
    let (factor, addend) = match text.split_once('+') {
        None => (text, 0),
        Some((factor, addend)) => (factor, number(addend)?),
    };
    let factor = if factor.is_empty() { 1 } else { number(factor.strip_prefix('*')?)? };
    Some((factor, addend))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::Config;
    use super::*;

    fn read(text: &str) -> Result<Vec<GeneratedInput>, ConfigError> {
        let config = json!({ "name": "m", "max_batch_size": 4, "sequence_batching": { "direct": {} } });
        Config::for_tests(&config, &[(GENERATED_INPUTS, text)]).map(|config| config.generated)
    }

    fn named(name: &str, axis: Option<usize>) -> NamedAxis {
        NamedAxis { name: name.to_owned(), axis }
    }

    #[test]
    fn what_is_written_is_read() {
        let text = "offset=steps*16+64 position_ids=positions(input_ids@1),lens=length(att_cache)+1, \
                    seen=elements( x )*3 n=steps mask=mask(past_key_values.0.key@2, input_ids)\n m2=mask(k)";
        let read = read(text).unwrap();
        let kinds: Vec<_> = read.iter().map(|of| (of.input.as_str(), of.kind.clone(), of.factor, of.addend)).collect();
        let mask = GeneratedKind::Mask {
            state: named("past_key_values.0.key", Some(2)),
            input: Some(named("input_ids", None)),
        };
        assert_eq!(
            kinds,
            [
                ("offset", GeneratedKind::Steps, 16, 64),
                ("position_ids", GeneratedKind::Positions(named("input_ids", Some(1))), 1, 0),
                ("lens", GeneratedKind::Length(named("att_cache", None)), 1, 1),
                ("seen", GeneratedKind::Elements(named("x", None)), 3, 0),
                ("n", GeneratedKind::Steps, 1, 0),
                ("mask", mask, 1, 0),
                ("m2", GeneratedKind::Mask { state: named("k", None), input: None }, 1, 0),
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
            ("offset=steps(x)", "'steps(x)' has not the names"),
            ("offset=steps()", "'' is no name"),
            ("offset=elements", "'elements' has not the names"),
            ("offset=elements(x, y)", "'elements(x, y)' has not the names"),
            ("offset=mask(a, b, c)", "'mask(a, b, c)' has not the names"),
            ("offset=elements(x", "no ')'"),
            ("offset=elements()", "'' is no name"),
            ("offset=elements(x y)", "'x y' is no name"),
            ("offset=elements(x@y)", "'y' is no axis"),
            ("offset=elements(x@-1)", "'-1' is no axis"),
            ("offset=steps*", "'*' stands behind"),
            ("offset=steps*x", "'*x' stands behind"),
            ("offset=steps*-1", "'*-1' stands behind"),
            ("offset=steps+1*2", "'+1*2' stands behind"),
            ("offset=steps*99999999999999999999", "stands behind"),
            ("offset=elements(x)y", "'y' stands behind"),
            ("m=mask(k, x)*2", "a mask has no factor"),
            ("offset=steps offset=steps", "'offset' may be given once only"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!([GENERATED_INPUTS, text, word].iter().all(|part| error.contains(part)), "{text}: {error}");
        }
    }
}
