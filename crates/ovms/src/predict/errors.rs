//! Triton's errors in OVMS's words.

use tonic::Code;

use crate::failure::Failure;

/// The backend's code words, and what OVMS says instead.
const OVMS_TEXTS: [(&str, &str); 6] = [
    ("SEQUENCE_MISSING", "Sequence with provided ID does not exist"),
    ("SEQUENCE_ALREADY_EXISTS", "Sequence with provided ID already exists"),
    ("MAX_SEQUENCE_NUMBER_REACHED", "Max sequence number has been reached. Could not create new sequence."),
    ("SEQUENCE_ID_NOT_PROVIDED", "Sequence ID has not been provided in request inputs"),
    ("INVALID_SEQUENCE_CONTROL_INPUT", "Unexpected value of sequence control input"),
    ("SEQUENCE_ID_BAD_TYPE", "Required shape"),
];

/// Whether an outdated signature may be why the request was refused. The backend's errors about a sequence have other
/// causes, except a missing id: the model of the old signature may have had no sequences.
pub fn may_come_from_an_old_signature(failure: &Failure) -> bool {
    let refused = matches!(failure.code, Code::InvalidArgument | Code::NotFound | Code::Unavailable);
    refused && code_word(&failure.message).is_none_or(|word| word == "SEQUENCE_ID_NOT_PROVIDED")
}

fn code_word(message: &str) -> Option<&str> {
    let (word, _) = message.split_once(": ")?;
    let is_word = word.contains('_') && word.chars().all(|c| c == '_' || c.is_ascii_uppercase());
    is_word.then_some(word)
}

/// A failure of an inference as OVMS would put it. The backend's details follow OVMS's text.
pub fn translate(failure: Failure) -> Failure {
    let message = failure.message.strip_prefix("[request id: <id_unknown>] ").unwrap_or(&failure.message);
    let message = in_ovms_words(message).unwrap_or_else(|| message.to_owned());
    Failure { message, ..failure }
}

fn in_ovms_words(message: &str) -> Option<String> {
    let (word, rest) = message.split_once(": ")?;
    let (_, text) = OVMS_TEXTS.iter().find(|entry| entry.0 == word)?;
    let details = rest.strip_prefix(text.trim_end_matches('.'))?;
    let separator = if text.ends_with('.') && !details.is_empty() { " " } else { "" };
    let details = if separator.is_empty() { details } else { details.trim_start_matches([':', ' ']) };
    Some(format!("{text}{separator}{details}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(message: &str) -> String {
        translate(Failure::new(Code::NotFound, message)).message
    }

    #[test]
    fn ovms_s_text_comes_first() {
        assert_eq!(
            translated("SEQUENCE_MISSING: Sequence with provided ID does not exist: 42"),
            "Sequence with provided ID does not exist: 42"
        );
        assert_eq!(
            translated(
                "MAX_SEQUENCE_NUMBER_REACHED: Max sequence number has been reached. Could not create new sequence: 5"
            ),
            "Max sequence number has been reached. Could not create new sequence. 5"
        );
    }

    #[test]
    fn texts_that_ovms_lacks_stay() {
        let queue = "SEQUENCE_QUEUE_FULL: the queue is full";
        assert_eq!(translated(queue), queue);
        assert_eq!(translated("[request id: <id_unknown>] unexpected shape"), "unexpected shape");
        assert_eq!(translated("SEQUENCE_MISSING: another text"), "SEQUENCE_MISSING: another text");
    }
}
