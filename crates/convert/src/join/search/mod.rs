//! A greedy search inside the joined graph: its last graphs find tokens, so that responses have these, and their texts
//! if a file lists them.
//!
//! Rules: each row has its own position in time, so rows don't change each other's tokens. Tokens are packed to the
//! left of their row, `tokens_length` says how many there are, and the width depends on the frames only, so that an
//! answer tells nothing about other rows.

mod nodes;
mod plan;

use std::fs;
use std::path::Path;

use super::part::{JoinError, Names, Read, Result};
use super::wires::Link;
use crate::batch::{is_batch_name, is_made_up};
use crate::names::StatePair;
use crate::onnx::schema::{GraphProto, NodeProto, TensorProto, ValueInfoProto};
use crate::onnx::{DataType, Dim, int64s};
use crate::report::InitialState;

pub use plan::{
    CtcPlan, FRAMES, Joint, LAST, LAST_NEXT, LENGTHS, NO_TOKEN, OPSET, PIECES, SEARCH, SKIP, SKIP_NEXT, Search,
    SearchKind, TOKENS, TransducerPlan,
};

#[derive(Clone, Debug)]
pub enum SearchPlan {
    Ctc(CtcPlan),
    Transducer(Box<TransducerPlan>),
}

/// The plan of a search over these graphs. `pieces` are the texts of the tokens, if responses have them.
pub fn plan(parts: &[Read], links: &[Link], search: &Search, pieces: Option<&[String]>) -> Result<SearchPlan> {
    if let (Some(pieces), Some(part)) = (pieces, parts.last()) {
        let output = plan::logits(part, parts, search)?;
        check_pieces(pieces, plan::token_count(output, search), &part.full(output.name()))?;
    }
    match &search.kind {
        SearchKind::Ctc => plan::ctc(parts, search).map(SearchPlan::Ctc),
        SearchKind::Transducer { max_tokens, durations } => {
            plan::transducer(parts, links, search, (*max_tokens, durations))
                .map(|plan| SearchPlan::Transducer(plan.into()))
        }
    }
}

impl SearchPlan {
    pub fn first_inside(&self, parts: usize) -> usize {
        match self {
            Self::Ctc(_) => parts,
            Self::Transducer(plan) => plan.predictor,
        }
    }

    /// Whether the search takes frames by this link, one or several at a time.
    pub fn takes_frames(&self, link: &Link) -> bool {
        match self {
            Self::Ctc(_) => false,
            Self::Transducer(plan) => link.to.graph == plan.joint && link.to.tensor == plan.frames_input,
        }
    }

    /// The tensor of the joined graph that the search reads.
    pub fn source(&self) -> &str {
        match self {
            Self::Ctc(plan) => &plan.logits,
            Self::Transducer(plan) => &plan.frames,
        }
    }

    /// Whether a jump may end behind the chunk.
    pub fn has_durations(&self) -> bool {
        matches!(self, Self::Transducer(plan) if !plan.durations.is_empty())
    }

    /// Where the last tokens start, unless that is 0.
    pub fn initial(&self) -> Option<InitialState> {
        let blank = match self {
            Self::Ctc(plan) => plan.blank,
            Self::Transducer(plan) => plan.blank,
        };
        (blank != 0).then(|| InitialState { state: LAST.to_owned(), value: Some(blank.to_string()) })
    }

    /// Adds the search to the joined graph, and its state. `inside` are the graphs that it runs.
    pub fn add(
        &self,
        graph: &mut GraphProto,
        inside: &mut [Read],
        names: &mut [Names],
        pieces: Option<&[String]>,
    ) -> Vec<StatePair> {
        let mut values = graph.output.iter().chain(&graph.input);
        let rows = values.find(|value| value.name() == self.source()).and_then(|value| value.dims()?.first().cloned());
        // Exporters may number the batch of each tensor. The backend knows it by its usual name.
        let rows = match rows {
            Some(Dim::Known(rows)) => Dim::Known(rows),
            Some(Dim::Symbol(name)) if is_batch_name(&name) || is_made_up(&name) => Dim::Symbol(name),
            _ => Dim::Symbol("batch".to_owned()),
        };
        match self {
            Self::Ctc(plan) => nodes::add_ctc(graph, plan),
            Self::Transducer(plan) => nodes::add_transducer(graph, plan, inside, names, &rows),
        }
        let (elem, context) = match self {
            Self::Ctc(_) => (DataType::Int64.into(), 1),
            Self::Transducer(plan) => (plan.tokens.elem, plan.tokens.context),
        };
        let int64 = DataType::Int64.into();
        let found = [rows.clone(), Dim::Symbol(TOKENS.to_owned())];
        let last = [rows.clone(), Dim::Known(context)];
        graph.input.push(ValueInfoProto::tensor(LAST, elem, &last));
        graph.output.push(ValueInfoProto::tensor(TOKENS, int64, &found));
        graph.output.push(ValueInfoProto::tensor(LENGTHS, int64, &[rows]));
        graph.output.push(ValueInfoProto::tensor(FRAMES, int64, &found));
        if let Some(texts) = pieces {
            add_pieces(graph, texts);
            graph.output.push(ValueInfoProto::tensor(PIECES, DataType::String.into(), &found));
        }
        graph.output.push(ValueInfoProto::tensor(LAST_NEXT, elem, &last));
        graph.initializer.extend(nodes::CONSTANTS.map(|(name, dims, values)| int64s(name, dims, values)));
        let mut states = vec![StatePair::new(LAST, LAST_NEXT)];
        if self.has_durations() {
            graph.input.push(ValueInfoProto::tensor(SKIP, int64, std::slice::from_ref(&last[0])));
            graph.output.push(ValueInfoProto::tensor(SKIP_NEXT, int64, std::slice::from_ref(&last[0])));
            states.push(StatePair::new(SKIP, SKIP_NEXT));
        }
        states
    }
}

// Most tokens of a file, so that a wrong number takes no memory.
const MOST_PIECES: usize = 1 << 20;
// Most bytes of a file, so that a wrong one takes no memory.
const MOST_BYTES: u64 = 64 << 20;
// Most characters of a line in an error: a wrong file may be one long line.
const MOST_SHOWN: usize = 80;

/// Reads the texts of tokens, as a recogniser's `tokens.txt` lists them.
pub fn read_pieces(file: &Path) -> Result<Vec<String>, String> {
    let unreadable = |error| format!("it can't be read: {error}");
    let bytes = fs::metadata(file).map_err(unreadable)?.len();
    if bytes > MOST_BYTES {
        return Err(format!("it has {bytes} bytes, and at most {MOST_BYTES} are expected"));
    }
    pieces(&fs::read_to_string(file).map_err(unreadable)?)
}

/// Reads `tokens.txt`: `▁the 42` in each line, in any order. A line with a number alone stands for a space. The error
/// names the line.
fn pieces(text: &str) -> Result<Vec<String>, String> {
    // Some editors begin a file with this mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut found: Vec<Option<String>> = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let wrong = |why: String| {
            let shown: String = line.chars().take(MOST_SHOWN).collect();
            let rest = if shown.len() < line.len() { "…" } else { "" };
            format!("line {}, '{shown}{rest}': {why}", at + 1)
        };
        // Only the last word is the number: pieces may have spaces.
        let trimmed = line.trim_end();
        if trimmed.is_empty() {
            continue;
        }
        let (piece, number) = trimmed.rsplit_once([' ', '\t']).unwrap_or((" ", trimmed));
        let piece = if piece.trim().is_empty() { " " } else { piece.trim() };
        let number = number.parse::<usize>().ok().filter(|&number| number < MOST_PIECES);
        let number = number.ok_or_else(|| {
            wrong(format!("a piece and its number are expected, such as '▁the 42', with a number below {MOST_PIECES}"))
        })?;
        if found.len() <= number {
            found.resize(number + 1, None);
        }
        if found[number].replace(piece.to_owned()).is_some() {
            return Err(wrong(format!("number {number} has another line")));
        }
    }
    if found.is_empty() {
        return Err("it has no pieces".to_owned());
    }
    let there = |(number, piece): (usize, Option<String>)| piece.ok_or_else(|| format!("number {number} has no line"));
    found.into_iter().enumerate().map(there).collect()
}

/// Refuses fewer pieces than the logits have tokens. `count` is the number of these, if the graph tells it.
fn check_pieces(pieces: &[String], count: Option<i64>, logits: &str) -> Result<()> {
    match count {
        Some(count) if count <= pieces.len() as i64 => Ok(()),
        Some(count) => {
            let has = pieces.len();
            let why = format!("tokens: the file has {has} pieces, and the logits '{logits}' have {count} tokens");
            Err(JoinError::Search(why))
        }
        None => Err(JoinError::Search(format!(
            "tokens: the number of tokens isn't known, because the last dimension of the logits '{logits}' is open: give it \
             with dims"
        ))),
    }
}

fn add_pieces(graph: &mut GraphProto, pieces: &[String]) {
    let table = "search.pieces";
    // Rows are filled up with -1, which counts from the end, where the empty text is.
    let texts = pieces.iter().map(|piece| piece.clone().into_bytes()).chain([Vec::new()]);
    graph.initializer.push(TensorProto {
        name: Some(table.to_owned()),
        data_type: Some(DataType::String.into()),
        dims: vec![pieces.len() as i64 + 1],
        string_data: texts.collect(),
        ..TensorProto::default()
    });
    graph.node.push(NodeProto::make("Gather", &format!("{PIECES}/Gather"), &[table, TOKENS], &[PIECES]));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_read_in_the_order_of_their_numbers() {
        let expected = ["<blk>", "▁the", " ", "a b"];
        assert_eq!(pieces("▁the 1\n<blk> 0\r\n  2\n\na b\t3\n").unwrap(), expected);
        assert_eq!(pieces("a 0\n1\n").unwrap(), ["a", " "]);
        assert_eq!(pieces("\u{feff}a 0\n1\n").unwrap(), ["a", " "]);
    }

    #[test]
    fn a_large_file_is_refused_and_a_long_line_is_shortened() {
        let path = std::env::temp_dir().join(format!("triton-stateful-pieces-{}.txt", std::process::id()));
        fs::File::create(&path).unwrap().set_len(MOST_BYTES + 1).unwrap();
        let error = read_pieces(&path).unwrap_err();
        let _ = fs::remove_file(&path);
        assert_eq!(error, "it has 67108865 bytes, and at most 67108864 are expected");
        let error = pieces(&"é".repeat(1_000_000)).unwrap_err();
        assert!(error.contains("é…': a piece and its number are expected") && error.len() < 400, "{error}");
    }

    #[test]
    fn an_error_has_the_line() {
        for (text, expected) in [
            ("<blk> 0\n▁the", "line 2, '▁the': a piece and its number are expected"),
            ("a 0\nb -1", "line 2, 'b -1': a piece and its number"),
            ("a 0\nb 9999999999", "line 2"),
            ("a 0\nb 0", "line 2, 'b 0': number 0 has another line"),
            ("a 0\nb 2", "number 1 has no line"),
            ("\n", "it has no pieces"),
        ] {
            let error = pieces(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
