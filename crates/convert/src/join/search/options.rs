//! What a search is told, and the names of its tensors.

/// What the names of the search's own tensors begin with.
pub const SEARCH: &str = "search";
/// The last tokens: a state.
pub const LAST: &str = "search.last";
/// The next value of the last tokens.
pub const LAST_NEXT: &str = "search.last_next";
/// The outputs: tokens of each row, how many there are, and the frame of each.
pub const TOKENS: &str = "tokens";
#[expect(missing_docs, reason = "the names say it")]
pub const LENGTHS: &str = "tokens_length";
#[expect(missing_docs, reason = "the names say it")]
pub const FRAMES: &str = "frames";
/// What fills a row behind its tokens.
pub const NO_TOKEN: i64 = -1;
/// The version of ONNX's operators that the nodes of a search need.
pub const OPSET: i64 = 13;

/// What a search may be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Search {
    /// What kind of model it searches.
    pub kind: SearchKind,
    /// The token that stands for none.
    pub blank: i64,
    /// The output that has the logits, as `graph.tensor`. Without it, there must be one that may have them.
    pub logits: Option<String>,
}

/// What a search searches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchKind {
    /// The best token of each frame, without blanks and repeats.
    Ctc,
    /// The best token after those so far, several times in a frame.
    Transducer {
        /// Most tokens in a frame.
        max_tokens: i64,
    },
}

/// Most tokens in a frame that may be asked for.
const MOST_TOKENS: i64 = 1000;

impl Search {
    /// Reads `ctc blank=0` or `transducer blank=0 max_tokens=1`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut words = text.split_whitespace();
        let kind = words.next().unwrap_or_default();
        let (mut blank, mut max_tokens, mut logits) = (None, None, None);
        for word in words {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            let number = || {
                let number = value.parse::<i64>().ok().filter(|&number| number >= 0);
                number.ok_or_else(|| format!("'{key}' is '{value}', and a number from 0 on is expected"))
            };
            match key {
                "blank" => blank = Some(number()?),
                "max_tokens" => max_tokens = Some(number()?),
                "logits" if !value.is_empty() => logits = Some(value.to_owned()),
                _ => return Err(format!("'{word}' isn't known: blank=, max_tokens= and logits= are")),
            }
        }
        let blank =
            blank.ok_or("blank= is missing: the number of the token that stands for none, such as 0 or the last")?;
        let kind = match (kind, max_tokens) {
            ("ctc", None) => SearchKind::Ctc,
            ("ctc", Some(_)) => return Err("max_tokens= is for a transducer".to_owned()),
            ("transducer", Some(max_tokens)) if (1..=MOST_TOKENS).contains(&max_tokens) => {
                SearchKind::Transducer { max_tokens }
            }
            ("transducer", Some(_)) => return Err(format!("max_tokens= is a number from 1 to {MOST_TOKENS}")),
            ("transducer", None) => {
                return Err("max_tokens= is missing: the most tokens in a frame, such as 1 for icefall or 10 for NeMo"
                    .to_owned());
            }
            _ => return Err(format!("'{kind}' isn't known: ctc and transducer are")),
        };
        Ok(Self { kind, blank, logits })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_is_read_or_refused_with_what_is_missing() {
        let transducer =
            |blank, max_tokens| Search { kind: SearchKind::Transducer { max_tokens }, blank, logits: None };
        assert_eq!(Search::parse("transducer blank=1024 max_tokens=10"), Ok(transducer(1024, 10)));
        let ctc = Search { kind: SearchKind::Ctc, blank: 0, logits: Some("ctc.probs".to_owned()) };
        assert_eq!(Search::parse(" ctc  logits=ctc.probs blank=0 "), Ok(ctc));
        for (text, expected) in [
            ("", "blank= is missing"),
            ("ctc", "blank= is missing"),
            ("ctc blank=-1", "'blank' is '-1', and a number from 0 on is expected"),
            ("ctc blank=x", "'blank' is 'x'"),
            ("ctc blank=0 max_tokens=1", "max_tokens= is for a transducer"),
            ("ctc blank=0 beam=4", "'beam=4' isn't known"),
            ("beam blank=0", "'beam' isn't known: ctc and transducer are"),
            ("transducer blank=0", "max_tokens= is missing"),
            ("transducer blank=0 max_tokens=0", "max_tokens= is a number from 1 to 1000"),
        ] {
            let error = Search::parse(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
