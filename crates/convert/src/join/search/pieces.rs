//! The texts of tokens, as a recogniser's `tokens.txt` lists them: a piece and its number in each line.

use std::fs;
use std::path::Path;

use super::options::{PIECES, TOKENS};
use crate::join::part::{JoinError, Result};
use crate::onnx::DataType;
use crate::onnx::schema::{GraphProto, NodeProto, TensorProto};

// Most tokens of a file, so that a wrong number takes no memory.
const MOST_PIECES: usize = 1 << 20;
// Most bytes of a file, so that a wrong one takes no memory.
const MOST_BYTES: u64 = 64 << 20;
// Most characters of a line in an error: a wrong file may be one long line.
const MOST_SHOWN: usize = 80;

pub fn read_pieces(file: &Path) -> Result<Vec<String>, String> {
    let unreadable = |error| format!("it can't be read: {error}");
    let bytes = fs::metadata(file).map_err(unreadable)?.len();
    if bytes > MOST_BYTES {
        return Err(format!("it has {bytes} bytes, and at most {MOST_BYTES} are expected"));
    }
    pieces(&fs::read_to_string(file).map_err(unreadable)?)
}

/// Reads `tokens.txt`: `▁the 42` in each line, in any order. A line with a number alone stands for a space. The error names
/// the line.
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
    let missing = found.iter().position(Option::is_none);
    missing
        .map_or_else(|| Ok(found.into_iter().flatten().collect()), |number| Err(format!("number {number} has no line")))
}

/// Refuses fewer pieces than the logits have tokens. `count` is the number of these, if the graph tells it.
pub fn check(pieces: &[String], count: Option<i64>, logits: &str) -> Result<()> {
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

pub fn add(graph: &mut GraphProto, pieces: &[String]) {
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
