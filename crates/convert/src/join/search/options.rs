//! What a search is told, and the names of its tensors.

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
