//! What a search is told, the names of its tensors, and the roles of tensors in the graphs that it runs.

use crate::batch::{is_batch_name, is_made_up};
use crate::graph::required_inputs;
use crate::join::part::{JoinError, Read, Result};
use crate::join::wires::{Link, difference, end, find};
use crate::names::StatePair;
use crate::onnx::schema::ValueInfoProto;
use crate::onnx::{Dim, bracketed, is_float, is_integer};

/// What the names of the search's own tensors begin with.
pub const SEARCH: &str = "search";
/// The last tokens: a state.
pub const LAST: &str = "search.last";
pub const LAST_NEXT: &str = "search.last_next";
/// The frames of the next chunk that a jump has skipped already: a state, if tokens have durations.
pub const SKIP: &str = "search.skip";
pub const SKIP_NEXT: &str = "search.skip_next";
/// The outputs: tokens of each row, how many there are, and the frame of each.
pub const TOKENS: &str = "tokens";
pub const LENGTHS: &str = "tokens_length";
pub const FRAMES: &str = "frames";
pub const PIECES: &str = "pieces";
/// What fills a row behind its tokens.
pub const NO_TOKEN: i64 = -1;
/// The version of ONNX's operators that the nodes of a search need.
pub const OPSET: i64 = 13;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Search {
    pub kind: SearchKind,
    pub blank: i64,
    /// The output that has the logits, as `graph.tensor`. Without it, there must be one that may have them.
    pub logits: Option<String>,
    /// The file with the pieces of the tokens, as it is written. [`read_pieces`](super::read_pieces) reads it.
    pub tokens: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SearchKind {
    /// The best token of each frame, without blanks and repeats.
    Ctc,
    /// The best token after those so far, several times in a frame.
    Transducer {
        max_tokens: i64,
        /// How many frames the search goes on by, for each of the last logits. Empty without such logits.
        durations: Vec<i64>,
    },
}

const MOST_DURATION: i64 = 1000;
const MOST_TOKENS: i64 = 1000;

impl Search {
    /// Reads `ctc blank=0`, `transducer blank=0 max_tokens=1`, or the same with `durations=0,1,2`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut words = text.split_whitespace();
        let kind = words.next().unwrap_or_default();
        let (mut blank, mut max_tokens, mut logits, mut tokens, mut durations) = (None, None, None, None, Vec::new());
        let mut given = Vec::new();
        for word in words {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            if given.contains(&key) {
                return Err(format!("'{key}=' is given twice"));
            }
            given.push(key);
            let number = || {
                let number = value.parse::<i64>().ok().filter(|&number| number >= 0);
                number.ok_or_else(|| format!("'{key}' is '{value}', and a number from 0 on is expected"))
            };
            match key {
                "blank" => blank = Some(number()?),
                "max_tokens" => max_tokens = Some(number()?),
                "durations" => durations = read_durations(value)?,
                "logits" if !value.is_empty() => logits = Some(value.to_owned()),
                "tokens" if !value.is_empty() => tokens = Some(value.to_owned()),
                _ => {
                    let known = "blank=, max_tokens=, durations=, logits= and tokens=";
                    return Err(format!("'{word}' isn't known: {known} are"));
                }
            }
        }
        let blank =
            blank.ok_or("blank= is missing: the number of the token that stands for none, such as 0 or the last")?;
        let kind = match (kind, max_tokens) {
            ("ctc", None) if durations.is_empty() => SearchKind::Ctc,
            ("ctc", _) => return Err("max_tokens= and durations= are for a transducer".to_owned()),
            ("transducer", Some(max_tokens)) if (1..=MOST_TOKENS).contains(&max_tokens) => {
                SearchKind::Transducer { max_tokens, durations }
            }
            ("transducer", Some(_)) => return Err(format!("max_tokens= is a number from 1 to {MOST_TOKENS}")),
            ("transducer", None) => {
                return Err("max_tokens= is missing: the most tokens in a frame, such as 1 for icefall or 10 for NeMo"
                    .to_owned());
            }
            _ => return Err(format!("'{kind}' isn't known: ctc and transducer are")),
        };
        Ok(Self { kind, blank, logits, tokens })
    }
}

fn read_durations(text: &str) -> Result<Vec<i64>, String> {
    let number = |word: &str| word.trim().parse().ok().filter(|number| (0..=MOST_DURATION).contains(number));
    let read: Option<Vec<i64>> = text.split(',').map(number).collect();
    // Without a duration above 0, the search would go on by one frame, as without durations.
    read.filter(|all| all.iter().any(|&duration| duration > 0)).ok_or_else(|| {
        format!("'durations' is '{text}', and numbers up to {MOST_DURATION} are expected, as in durations=0,1,2,3,4")
    })
}

// Frames that one turn of the loop gives to the joint: with fewer, the loop has more turns, and with more, a turn
// computes more frames after the token that it finds.
const WINDOW: i64 = 4;
const MOST_CONTEXT: i64 = 1024;

#[derive(Clone, Debug)]
pub struct CtcPlan {
    /// The output with the logits of all frames, `[rows, frames, tokens]`.
    pub logits: String,
    pub blank: i64,
}

pub fn ctc(parts: &[Read], search: &Search) -> Result<CtcPlan> {
    let Some(part) = parts.last() else { return Err(JoinError::NoOutputs(Vec::new())) };
    let output = logits(part, parts, search)?;
    if let Some(dims) = output.dims().filter(|dims| dims.len() != 3) {
        return Err(JoinError::Search(format!(
            "the logits '{}' are {}, and [rows, frames, tokens] is expected: export the graph with an axis of frames",
            part.full(output.name()),
            bracketed(&dims)
        )));
    }
    Ok(CtcPlan { logits: part.full(output.name()), blank: search.blank })
}

/// How a transducer's tokens are found. Names of tensors inside are those of their graph.
#[derive(Clone, Debug)]
pub struct TransducerPlan {
    /// The graph that takes the last tokens.
    pub predictor: usize,
    pub joint: usize,
    /// The frames, by their name in the joined graph: `[rows, frames, features]`, or with the frames on axis 2.
    pub frames: String,
    pub frames_axis: usize,
    pub frames_input: String,
    pub takes: Joint,
    pub window: i64,
    pub tokens: Tokens,
    /// Outputs of the predictor, and the inputs of the joint that take them, if they are two graphs.
    pub passed: Vec<(String, String)>,
    pub states: Vec<PredictorState>,
    pub logits: String,
    pub blank: i64,
    pub max_tokens: i64,
    /// How many frames the search goes on by, for each of the last logits. Empty without such logits.
    pub durations: Vec<i64>,
}

#[derive(Clone, Debug)]
pub struct Tokens {
    pub input: String,
    pub elem: i32,
    /// The input is `[rows]`, without an axis for tokens.
    pub is_flat: bool,
    pub context: i64,
    /// The input for the number of tokens, and its type.
    pub lengths: Option<(String, i32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joint {
    /// Several at once, along this axis.
    Along(usize),
    /// One in each row: `[rows, features]`, or with an axis of 1.
    InRows(Option<usize>),
}

#[derive(Clone, Debug)]
pub struct PredictorState {
    pub pair: StatePair,
    pub elem: i32,
    pub dims: Vec<Dim>,
    /// The axis of the rows. Without one, there is one row.
    pub rows: Option<usize>,
}

fn refused<T>(why: String) -> Result<T> {
    Err(JoinError::Search(why))
}

pub fn transducer(
    parts: &[Read],
    links: &[Link],
    search: &Search,
    (max_tokens, durations): (i64, &[i64]),
) -> Result<TransducerPlan> {
    let Some(joint) = parts.len().checked_sub(1).filter(|&last| last > 0) else {
        return refused("a transducer needs an encoder, and a decoder_joint or a decoder and a joiner".to_owned());
    };
    let predictor = if is_predictor(parts, links, joint) { joint - 1 } else { joint };
    let of_joint = || links.iter().filter(|link| link.to.graph == joint);
    let to_frames: Vec<&Link> = of_joint().filter(|link| link.from.graph != joint - 1 || predictor == joint).collect();
    let full = |graph: usize, name: &str| parts[graph].full(name);
    let [link] = to_frames.as_slice() else {
        let inputs: Vec<String> = to_frames.iter().map(|link| full(joint, &link.to.tensor)).collect();
        return refused(if inputs.is_empty() {
            format!(
                "no wire brings frames to graph '{}': write <<<encoder.output, {}>>>",
                parts[joint].name,
                full(joint, "input")
            )
        } else {
            format!("{} are wired, and the search takes frames by one input only", inputs.join(" and "))
        });
    };
    let (source, target) = (link.source(parts)?, link.target(parts)?);
    let from = full(link.from.graph, &link.from.tensor);
    if !link.is_made || link.from.graph >= predictor {
        let expected = "an output of a graph before the decoder is expected";
        return refused(format!("the frames come from '{from}', and {expected}"));
    }
    if source.elem() != target.elem() {
        return Err(link.disagree(parts, &difference(source, target))?);
    }
    if let Some(dims) = source.dims().filter(|dims| dims.len() != 3) {
        return refused(format!(
            "the frames '{from}' are {}, and [rows, frames, features] or [rows, features, frames] is expected: export the \
             graph with an axis of frames",
            bracketed(&dims)
        ));
    }
    let is_two = predictor != joint;
    let Some((frames_axis, takes, takes_rows)) = frames(source, target) else {
        return Err(link.disagree(parts, "no axis of the frames leaves equal features")?);
    };
    let window = match takes {
        // A blank may go on by several frames as well.
        _ if !durations.is_empty() => 1,
        Joint::Along(_) => WINDOW,
        Joint::InRows(_) if is_two && takes_rows => WINDOW,
        Joint::InRows(_) => 1,
    };
    let mut passed = Vec::new();
    for link in of_joint().filter(|link| link.from.graph == predictor) {
        if !link.is_made {
            let (to, from) = (full(joint, &link.to.tensor), full(predictor, &link.from.tensor));
            return refused(format!(
                "the joint's input '{to}' takes an output of the decoder, and '{from}' is an input"
            ));
        }
        passed.push((link.from.tensor.clone(), link.to.tensor.clone()));
    }
    if is_two {
        let part = &parts[joint];
        let is_fed = |input: &ValueInfoProto| of_joint().any(|link| link.to.tensor == input.name());
        if let Some(input) = required_inputs(&part.graph).find(|input| !is_fed(input)) {
            let input = part.full(input.name());
            return refused(format!("input '{input}' of the joint takes nothing: write a wire to it"));
        }
    }
    let tokens = tokens(parts, links, predictor)?;
    let output = logits(&parts[joint], parts, search)?;
    let takes_one_row = source.dims().is_some_and(|dims| matches!(dims.first(), Some(Dim::Known(_))));
    Ok(TransducerPlan {
        predictor,
        joint,
        frames: from,
        frames_axis,
        frames_input: link.to.tensor.clone(),
        takes,
        window,
        tokens,
        passed,
        states: states(&parts[predictor], takes_one_row)?,
        logits: output.name().to_owned(),
        blank: search.blank,
        max_tokens,
        durations: durations.to_vec(),
    })
}

/// Whether the graph before the last takes tokens, and the last what it makes of them.
fn is_predictor(parts: &[Read], links: &[Link], joint: usize) -> bool {
    if joint < 2 {
        return false;
    }
    let part = &parts[joint - 1];
    let mut free = required_inputs(&part.graph).filter(|input| !part.is_state(input.name())).peekable();
    let is_wired = links.iter().any(|link| link.to.graph == joint - 1);
    let leads_on = links.iter().any(|link| link.from.graph == joint - 1 && link.to.graph == joint);
    free.peek().is_some() && !is_wired && leads_on && free.all(|input| is_integer(input.elem()))
}

/// The axis of the frames, how the joint takes them, and whether it takes any number of rows.
fn frames(source: &ValueInfoProto, target: &ValueInfoProto) -> Option<(usize, Joint, bool)> {
    let (given, taken) = (source.dims().filter(|dims| dims.len() == 3)?, target.dims()?);
    let takes_rows = !matches!(taken.first()?, Dim::Known(_));
    if let [_, features] = taken.as_slice() {
        // Exporters of such joints put the frames first.
        let axis = if given[2].agrees(features) { 1 } else { 2 };
        return given[3 - axis].agrees(features).then_some((axis, Joint::InRows(None), takes_rows));
    }
    if taken.len() != 3 {
        return None;
    }
    let may_be = |&axis: &usize| given[3 - axis].agrees(&taken[3 - axis]) && !matches!(taken[axis], Dim::Known(2..));
    let is_sure = |&axis: &usize| matches!((&given[3 - axis], &taken[3 - axis]), (Dim::Known(_), Dim::Known(_)));
    let possible: Vec<usize> = [1, 2].into_iter().filter(may_be).collect();
    let sure: Vec<usize> = possible.iter().copied().filter(is_sure).collect();
    let axis = match (possible.as_slice(), sure.as_slice()) {
        ([axis], _) | (_, [axis]) => *axis,
        _ => return None,
    };
    let takes = if taken[axis].is_known() { Joint::InRows(Some(axis)) } else { Joint::Along(axis) };
    Some((axis, takes, takes_rows))
}

fn tokens(parts: &[Read], links: &[Link], predictor: usize) -> Result<Tokens> {
    let part = &parts[predictor];
    let is_free = |input: &&ValueInfoProto| {
        let is_wired = links.iter().any(|link| link.to.graph == predictor && link.to.tensor == input.name());
        !part.is_state(input.name()) && !is_wired
    };
    let free: Vec<&ValueInfoProto> = required_inputs(&part.graph).filter(is_free).collect();
    if let Some(other) = free.iter().find(|input| !is_integer(input.elem())) {
        let other = part.full(other.name());
        return refused(format!("input '{other}' takes nothing: write a wire to it, or name it as a state"));
    }
    let of_rank = |rank: usize| {
        free.iter().copied().filter(|input| input.dims().is_some_and(|dims| dims.len() == rank)).collect::<Vec<_>>()
    };
    let (flat, rows) = (of_rank(1), of_rank(2));
    let (input, lengths) = match (rows.as_slice(), flat.as_slice()) {
        ([input], []) | ([], [input]) => (*input, None),
        ([input], [lengths]) => (*input, Some((lengths.name().to_owned(), lengths.elem()))),
        _ => {
            let names: Vec<String> = free.iter().map(|input| part.full(input.name())).collect();
            return refused(format!(
                "graph '{}' needs one input of tokens, INT32 or INT64 [rows, tokens], and at most one of their number, \
                 [rows]; its free inputs are {}",
                part.name,
                if names.is_empty() { "none".to_owned() } else { names.join(", ") }
            ));
        }
    };
    let dims = input.dims().unwrap_or_default();
    let context = dims.get(1).and_then(Dim::known).unwrap_or(1);
    if !(1..=MOST_CONTEXT).contains(&context) {
        let (name, expected) = (part.full(input.name()), format!("at least 1 and at most {MOST_CONTEXT} are expected"));
        return refused(format!("'{name}' takes {context} last tokens: {expected}"));
    }
    Ok(Tokens { input: input.name().to_owned(), elem: input.elem(), is_flat: dims.len() == 1, context, lengths })
}

fn states(part: &Read, takes_one_row: bool) -> Result<Vec<PredictorState>> {
    let mut states = Vec::new();
    for pair in &part.pairs {
        let input = find(part, &part.graph.input, "input", &pair.input)?;
        let dims = input.dims().unwrap_or_default();
        let open: Vec<usize> = (0..dims.len()).filter(|&axis| !dims[axis].is_known()).collect();
        let is_batch =
            |axis: &&usize| matches!(&dims[**axis], Dim::Symbol(name) if is_batch_name(name) || is_made_up(name));
        let named: Vec<&usize> = open.iter().filter(is_batch).collect();
        let rows = match (open.as_slice(), named.as_slice()) {
            ([], _) if takes_one_row => None,
            ([axis], _) => Some(*axis),
            (_, [axis]) => Some(**axis),
            _ => {
                return refused(format!(
                    "state '{}' is {}: it isn't known which dimension is that of the rows; export the graph with one open \
                     dimension there, named batch",
                    part.full(&pair.input),
                    bracketed(&dims)
                ));
            }
        };
        if pair.input == pair.output {
            return refused(format!("state '{}' has one name for both ends", part.full(&pair.input)));
        }
        states.push(PredictorState { pair: pair.clone(), elem: input.elem(), dims, rows });
    }
    Ok(states)
}

fn duration_count(search: &Search) -> i64 {
    match &search.kind {
        SearchKind::Transducer { durations, .. } => durations.len() as i64,
        SearchKind::Ctc => 0,
    }
}

/// How many tokens the logits have, if their graph tells it.
pub fn token_count(logits: &ValueInfoProto, search: &Search) -> Option<i64> {
    Some(logits.dims()?.last()?.known()? - duration_count(search))
}

pub fn logits<'a>(part: &'a Read, parts: &[Read], search: &Search) -> Result<&'a ValueInfoProto> {
    let outputs = &part.graph.output;
    let found = match &search.logits {
        Some(name) => {
            let of = end(parts, name)?;
            if parts[of.graph].name != part.name {
                let last = &part.name;
                return refused(format!("the logits must be an output of the last graph, '{last}', and not '{name}'"));
            }
            find(part, outputs, "output", &of.tensor)?
        }
        None => {
            let may_be = |output: &&ValueInfoProto| {
                let is_state = part.pairs.iter().any(|pair| pair.output == output.name());
                let is_wide = output.dims().is_none_or(|dims| dims.len() > 1);
                !is_state && is_wide && is_float(output.elem())
            };
            let candidates: Vec<&ValueInfoProto> = outputs.iter().filter(may_be).collect();
            let [output] = candidates.as_slice() else {
                let names: Vec<String> = candidates.iter().map(|output| part.full(output.name())).collect();
                return refused(match names.first() {
                    None => format!("graph '{}' has no output of numbers that could be the logits", part.name),
                    Some(first) => {
                        format!("{} could be the logits: name one, as in logits={first}", names.join(" and "))
                    }
                });
            };
            *output
        }
    };
    let blank = search.blank;
    let Some(count) = token_count(found, search).filter(|&count| blank >= count) else { return Ok(found) };
    let durations = duration_count(search);
    let beside = if durations > 0 { format!(" beside {durations} durations") } else { String::new() };
    let (name, last) = (part.full(found.name()), count - 1);
    refused(format!("blank is {blank}, and the logits '{name}' have {count} tokens{beside}, from 0 to {last}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_is_read_or_refused_with_what_is_missing() {
        let transducer = |blank, max_tokens| Search {
            kind: SearchKind::Transducer { max_tokens, durations: Vec::new() },
            blank,
            logits: None,
            tokens: None,
        };
        assert_eq!(Search::parse("transducer blank=1024 max_tokens=10"), Ok(transducer(1024, 10)));
        let (logits, tokens) = (Some("ctc.probs".to_owned()), Some("tokens.txt".to_owned()));
        let ctc = Search { kind: SearchKind::Ctc, blank: 0, logits, tokens };
        assert_eq!(Search::parse(" ctc  logits=ctc.probs blank=0 tokens=tokens.txt"), Ok(ctc));
        let tdt = Search::parse("transducer blank=9 max_tokens=3 durations=0,1,4").unwrap();
        assert_eq!(tdt.kind, SearchKind::Transducer { max_tokens: 3, durations: vec![0, 1, 4] });
        for (text, expected) in [
            ("transducer blank=0 max_tokens=1 durations=0", "'durations' is '0', and numbers up to 1000 are expected"),
            ("transducer blank=0 max_tokens=1 durations=1,x", "'durations' is '1,x'"),
            ("ctc blank=0 durations=0,1", "max_tokens= and durations= are for a transducer"),
            ("", "blank= is missing"),
            ("ctc", "blank= is missing"),
            ("ctc blank=-1", "'blank' is '-1', and a number from 0 on is expected"),
            ("ctc blank=x", "'blank' is 'x'"),
            ("ctc blank=0 max_tokens=1", "max_tokens= and durations= are for a transducer"),
            ("ctc blank=0 beam=4", "'beam=4' isn't known"),
            ("beam blank=0", "'beam' isn't known: ctc and transducer are"),
            ("transducer blank=0", "max_tokens= is missing"),
            ("ctc blank=0 tokens=a.txt blank=1", "'blank=' is given twice"),
            ("transducer blank=0 max_tokens=0", "max_tokens= is a number from 1 to 1000"),
        ] {
            let error = Search::parse(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
