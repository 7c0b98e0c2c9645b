//! One inference, whatever protocol asked for it.

use std::collections::BTreeMap;
use std::time::Instant;

use bytes::Bytes;
use prost::Message;
use tonic::Code;

use crate::gateway::{Gateway, Turn};
use crate::models::{
    SEQUENCE_CONTROL_INPUT, SEQUENCE_ID, Sequence, Signature, Specials, Version, is_special, version_text,
};
use crate::proto::inference::infer_parameter::ParameterChoice;
use crate::proto::inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use crate::proto::inference::{InferParameter, ModelInferRequest, ModelInferResponse};
use crate::tensor::{DataType, Tensor};
use crate::triton::Failure;

const ANSWERED_ID: &str = "stateful_sequence_id";
/// The parameter of requests for their longest wait in Triton, in microseconds.
const TIMEOUT: &str = "timeout";
/// The largest message that Triton takes.
const REQUEST_BYTES_MAX: usize = i32::MAX as usize;

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

pub type Tensors = Vec<(String, Tensor)>;

pub struct Call<'a> {
    pub name: &'a str,
    pub version: Version,
    /// When the client stops waiting.
    pub deadline: Option<Instant>,
    /// A failure if the request could not be read. OVMS checks the model first, so the failure is reported only if the
    /// model exists.
    pub specials: Result<Specials, Failure>,
    /// The outputs that are wanted; all if empty.
    pub filter: &'a [String],
}

#[derive(Debug)]
pub struct Prediction {
    pub version: i64,
    pub outputs: BTreeMap<String, Tensor>,
    /// None for a model without sequences.
    pub sequence_id: Option<u64>,
}

/// Runs the model on the inputs that `decode` reads with the help of the signature.
pub async fn run(
    gateway: &Gateway,
    call: &Call<'_>,
    decode: impl Fn(&Signature) -> Result<Tensors, Failure>,
) -> Result<Prediction, Failure> {
    // First of all, because asking Triton for the signature takes time in which a later request could overtake this
    // one.
    let id = call.specials.as_ref().map_or(0, Specials::id);
    let mut turn = if id == 0 { None } else { Some(gateway.order.turn(call.name, id).await?) };

    let known = gateway.models.get(call.name, call.version);
    let signature = match &known {
        Some(signature) => signature.clone(),
        None => gateway.wait_for_signature(call.name, call.version).await?,
    };
    let mut answer = attempt(gateway, call, &signature, &decode, &mut turn).await;
    if let Err(failure) = &answer
        && known.is_some()
        && may_come_from_an_old_signature(failure)
    {
        // Such a request has not run, so it may be sent again.
        let current = gateway.wait_for_signature(call.name, call.version).await?;
        if current != signature {
            answer = attempt(gateway, call, &current, &decode, &mut turn).await;
        }
    }
    answer.map_err(translate)
}

/// `turn` is kept by Triton's call until it is answered, also if this future is dropped.
async fn attempt(
    gateway: &Gateway,
    call: &Call<'_>,
    signature: &Signature,
    decode: impl Fn(&Signature) -> Result<Tensors, Failure>,
    turn: &mut Option<Turn>,
) -> Result<Prediction, Failure> {
    // In OVMS's order: the model, then the special inputs, then the data.
    let specials = call.specials.as_ref().map_err(Failure::clone)?;
    let sequence = if signature.is_stateful() { Some(specials.check()?) } else { None };
    let mut inputs = decode(signature)?;
    inputs.extend(special_tensors(sequence, signature));
    let request = request(call, signature, inputs)?;
    let (response, held) = gateway.triton.infer(request, turn.take()).await;
    *turn = held.flatten();
    prediction(response?, call, sequence)
}

fn special_tensors(sequence: Option<Sequence>, signature: &Signature) -> Tensors {
    let (Some(Sequence { id, control }), Some(shape)) = (sequence, &signature.special_shape) else { return Vec::new() };
    let tensor = |name: &str, data_type, value: &[u8]| {
        let content = Bytes::copy_from_slice(value);
        (name.to_owned(), Tensor { data_type, shape: shape.clone(), content })
    };
    let id = (id != 0).then(|| tensor(SEQUENCE_ID, DataType::Uint64, &id.to_le_bytes()));
    let control = (control != 0).then(|| tensor(SEQUENCE_CONTROL_INPUT, DataType::Uint32, &control.to_le_bytes()));
    id.into_iter().chain(control).collect()
}

fn request(call: &Call<'_>, signature: &Signature, inputs: Tensors) -> Result<ModelInferRequest, Failure> {
    let mut outputs = Vec::new();
    for name in call.filter {
        if signature.is_stateful() && name == SEQUENCE_ID {
            // Each response has this output. Triton's model need not list it, because the id comes in a parameter of
            // the answer.
            continue;
        }
        if !signature.outputs.iter().any(|output| output.name == *name) {
            return Err(Failure::invalid(format!("Missing output with specific name - output_filter: {name}")));
        }
        outputs.push(InferRequestedOutputTensor { name: name.clone() });
    }
    let mut request = ModelInferRequest {
        model_name: call.name.to_owned(),
        model_version: version_text(call.version),
        outputs,
        ..ModelInferRequest::default()
    };
    if let Some(deadline) = call.deadline {
        // A request that still waits when its client has gone doesn't run. Zero would be no limit.
        let left = deadline.saturating_duration_since(Instant::now()).as_micros().max(1);
        let parameter_choice = Some(ParameterChoice::Int64Param(i64::try_from(left).unwrap_or(i64::MAX)));
        request.parameters.insert(TIMEOUT.to_owned(), InferParameter { parameter_choice });
    }
    for (name, tensor) in inputs {
        let datatype = tensor.data_type.protocol_name().to_owned();
        request.inputs.push(InferInputTensor { name, datatype, shape: tensor.shape });
        request.raw_input_contents.push(tensor.content);
    }
    // The values of a client's message can take eight times as many bytes as there.
    let bytes = request.encoded_len();
    if bytes > REQUEST_BYTES_MAX {
        let text = format!("The inputs have {bytes} bytes for Triton, which takes at most {REQUEST_BYTES_MAX}");
        return Err(Failure::new(Code::ResourceExhausted, text));
    }
    Ok(request)
}

fn prediction(
    response: ModelInferResponse,
    call: &Call<'_>,
    sequence: Option<Sequence>,
) -> Result<Prediction, Failure> {
    let broken = |what: String| Failure::new(Code::Internal, format!("tritonserver has answered wrongly: {what}"));
    if response.outputs.len() != response.raw_output_contents.len() {
        let (outputs, contents) = (response.outputs.len(), response.raw_output_contents.len());
        return Err(broken(format!("{outputs} outputs and {contents} contents")));
    }
    let mut answered_id = response.parameters.get(ANSWERED_ID).and_then(|parameter| match parameter.parameter_choice {
        // Triton's parameters have no unsigned numbers, so the backend gives a large id as a negative one.
        Some(ParameterChoice::Int64Param(id)) => Some(id.cast_unsigned()),
        _ => None,
    });
    let mut outputs = BTreeMap::new();
    for (output, content) in response.outputs.into_iter().zip(response.raw_output_contents) {
        if sequence.is_some() && is_special(&output.name) {
            answered_id = answered_id.or_else(|| content.first_chunk().copied().map(u64::from_le_bytes));
        } else if call.filter.is_empty() || call.filter.contains(&output.name) {
            let data_type = DataType::from_protocol_name(&output.datatype).ok_or_else(|| {
                let text = format!("output '{}' has type {}, which clients can't read", output.name, output.datatype);
                Failure::new(Code::Unimplemented, text)
            })?;
            // Checked, because answers are written by their shapes.
            let tensor = Tensor::new(data_type, output.shape, content)
                .map_err(|what| broken(format!("output '{}' has {what}", output.name)))?;
            outputs.insert(output.name, tensor);
        }
    }
    Ok(Prediction {
        version: response.model_version.parse().unwrap_or_default(),
        outputs,
        sequence_id: sequence.map(|sequence| answered_id.unwrap_or(sequence.id)),
    })
}

/// Whether an outdated signature may be why the request was refused before it ran.
fn may_come_from_an_old_signature(failure: &Failure) -> bool {
    let refused = match failure.code {
        Code::InvalidArgument | Code::NotFound => true,
        // Other requests with this code may have run: the connection broke before their answer.
        Code::Unavailable => failure.message.starts_with(NOT_SERVED),
        _ => false,
    };
    // The backend's errors about a sequence have other causes, except a missing id: the model of the old signature may
    // have had no sequences.
    let (word, _) = failure.message.split_once(": ").unwrap_or_default();
    let is_of_backend = word.contains('_') && word.chars().all(|c| c == '_' || c.is_ascii_uppercase());
    refused && (!is_of_backend || word == "SEQUENCE_ID_NOT_PROVIDED")
}

/// A failure of an inference as OVMS would put it.
fn translate(failure: Failure) -> Failure {
    // Core puts this before some texts, because the gateway's requests have no id.
    let message = failure.message.strip_prefix("[request id: <id_unknown>] ").unwrap_or(&failure.message);
    let message = in_ovms_words(message).unwrap_or_else(|| message.to_owned());
    Failure { message, ..failure }
}

/// The backend's text without its code word. Its details follow OVMS's text.
fn in_ovms_words(message: &str) -> Option<String> {
    let (word, rest) = message.split_once(": ")?;
    let (_, text) = OVMS_TEXTS.iter().find(|entry| entry.0 == word)?;
    let details = rest.strip_prefix(text.trim_end_matches('.'))?;
    if text.ends_with('.') && !details.is_empty() {
        Some(format!("{text} {}", details.trim_start_matches([':', ' '])))
    } else {
        Some(format!("{text}{details}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_is_too_large_for_triton_is_refused() {
        let call = Call { name: "m", version: None, deadline: None, specials: Ok(Specials::default()), filter: &[] };
        let signature = Signature { version: 1, inputs: Vec::new(), outputs: Vec::new(), special_shape: None };
        // Zeros that are only read take no memory.
        let content = Bytes::from(vec![0; 1 << 30]);
        let tensor = Tensor { data_type: DataType::Uint8, shape: vec![1 << 30], content };
        let inputs = |count| (0..count).map(|at| (at.to_string(), tensor.clone())).collect();
        assert!(request(&call, &signature, inputs(1)).is_ok());
        assert_eq!(request(&call, &signature, inputs(2)).map_err(|failure| failure.code), Err(Code::ResourceExhausted));
    }

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
