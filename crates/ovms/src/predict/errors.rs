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

/// How Triton's text begins if no version of the model is ready.
const NOT_SERVED: &str = "Request for unknown model: ";

/// Whether an outdated signature may be why the request was refused before it ran. The backend's errors about a sequence
/// have other causes, except a missing id: the model of the old signature may have had no sequences.
pub fn may_come_from_an_old_signature(failure: &Failure) -> bool {
    let refused = match failure.code {
        Code::InvalidArgument | Code::NotFound => true,
        // Other requests that end so may have run: the connection broke before their answer.
        Code::Unavailable => failure.message.starts_with(NOT_SERVED),
        _ => false,
    };
    refused && code_word(&failure.message).is_none_or(|word| word == "SEQUENCE_ID_NOT_PROVIDED")
}

fn code_word(message: &str) -> Option<&str> {
    let (word, _) = message.split_once(": ")?;
    let is_word = word.contains('_') && word.chars().all(|c| c == '_' || c.is_ascii_uppercase());
    is_word.then_some(word)
}

/// A failure of an inference as OVMS would put it. The backend's details follow OVMS's text.
pub fn translate(failure: Failure) -> Failure {
    // Core puts this in front of some texts, because the gateway's requests have no id.
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
    fn a_request_that_may_have_run_is_not_sent_again() {
        let again = |code, message: &str| may_come_from_an_old_signature(&Failure::new(code, message));
        assert!(again(Code::InvalidArgument, "unexpected shape for input 'x'"));
        assert!(again(Code::InvalidArgument, "SEQUENCE_ID_NOT_PROVIDED: Sequence ID has not been provided"));
        assert!(again(Code::NotFound, "Request for unknown model: 'm' version 2 is not found"));
        assert!(again(Code::Unavailable, "Request for unknown model: 'm' has no available versions"));
        assert!(!again(Code::Unavailable, "tritonserver can't be reached: connection reset"));
        assert!(!again(Code::Unavailable, "MAX_SEQUENCE_NUMBER_REACHED: Max sequence number has been reached"));
        assert!(!again(Code::NotFound, "SEQUENCE_MISSING: Sequence with provided ID does not exist"));
        assert!(!again(Code::Internal, "the run failed"));
    }

    #[test]
    fn texts_that_ovms_lacks_stay() {
        let queue = "SEQUENCE_QUEUE_FULL: the queue is full";
        assert_eq!(translated(queue), queue);
        assert_eq!(translated("[request id: <id_unknown>] unexpected shape"), "unexpected shape");
        assert_eq!(translated("SEQUENCE_MISSING: another text"), "SEQUENCE_MISSING: another text");
    }
}
