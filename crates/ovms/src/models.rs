//! Signatures of models, from Triton and for TensorFlow Serving's clients; and the special inputs `sequence_id` and
//! `sequence_control_input`.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::RwLock;

use crate::proto::inference::{ModelMetadataResponse, model_metadata_response::TensorMetadata};
use crate::proto::tensorflow::serving::SignatureDefMap;
use crate::proto::tensorflow::{DataType as TensorFlow, SignatureDef, TensorInfo as TensorInfoProto};
use crate::tensor::{DataType, shape_proto, tensorflow};
use crate::triton::Failure;

/// The type of the message inside `GetModelMetadataResponse.metadata`.
pub const TYPE_URL: &str = "type.googleapis.com/tensorflow.serving.SignatureDefMap";
pub const SIGNATURE_NAME: &str = "serving_default";
/// An input, and an output with the same id.
pub const SEQUENCE_ID: &str = "sequence_id";
pub const SEQUENCE_CONTROL_INPUT: &str = "sequence_control_input";

const START: u32 = 1;
const END: u32 = 2;

/// A version that a request asks for; none is the latest one.
pub type Version = Option<i64>;

pub fn version_text(version: Version) -> String {
    version.map(|version| version.to_string()).unwrap_or_default()
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: String,
    /// None for a type that TensorFlow Serving's clients can't send.
    pub data_type: Option<DataType>,
    /// With the batch; open dimensions are -1.
    pub shape: Vec<i64>,
}

/// The inputs and outputs of a model, without the special ones, as in OVMS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    pub version: i64,
    pub inputs: Vec<TensorInfo>,
    pub outputs: Vec<TensorInfo>,
    /// The shape in which Triton takes one sequence's special inputs; none for a model without them.
    pub special_shape: Option<Vec<i64>>,
}

impl Signature {
    pub fn new(metadata: ModelMetadataResponse, version: Version) -> Self {
        // Without a version in the request, Triton serves the latest one.
        let latest = metadata.versions.iter().filter_map(|version| version.parse().ok()).max();
        let special =
            |name: &str| metadata.inputs.iter().find(|input| input.name == name).map(|input| input.shape.len());
        // A model with one of the two only has an input of its own that happens to have the name.
        let special_shape = match (special(SEQUENCE_ID), special(SEQUENCE_CONTROL_INPUT)) {
            (Some(rank), Some(_)) => Some(vec![1; rank]),
            _ => None,
        };
        let stateful = special_shape.is_some();
        let info = |TensorMetadata { name, datatype, shape }: TensorMetadata| {
            let is_ordinary = !(stateful && is_special(&name));
            is_ordinary.then(|| TensorInfo { data_type: DataType::from_protocol_name(&datatype), name, shape })
        };
        Self {
            version: version.or(latest).unwrap_or_default(),
            inputs: metadata.inputs.into_iter().filter_map(info).collect(),
            outputs: metadata.outputs.into_iter().filter_map(info).collect(),
            special_shape,
        }
    }

    pub fn input(&self, name: &str) -> Option<&TensorInfo> {
        self.inputs.iter().find(|input| input.name == name)
    }

    pub fn is_stateful(&self) -> bool {
        self.special_shape.is_some()
    }

    /// Whether this name is that of a special input or output of the model.
    pub fn has_special(&self, name: &str) -> bool {
        self.is_stateful() && is_special(name)
    }

    pub fn definition(&self) -> SignatureDefMap {
        let protos = |infos: &[TensorInfo]| infos.iter().map(|info| (info.name.clone(), info.proto())).collect();
        let definition =
            SignatureDef { inputs: protos(&self.inputs), outputs: protos(&self.outputs), method_name: String::new() };
        SignatureDefMap { signature_def: BTreeMap::from([(SIGNATURE_NAME.to_owned(), definition)]) }
    }
}

impl TensorInfo {
    pub fn data_type(&self) -> TensorFlow {
        self.data_type.map_or(TensorFlow::DtInvalid, tensorflow)
    }

    fn proto(&self) -> TensorInfoProto {
        TensorInfoProto {
            name: self.name.clone(),
            dtype: self.data_type() as i32,
            tensor_shape: Some(shape_proto(&self.shape)),
        }
    }
}

pub fn is_special(name: &str) -> bool {
    name == SEQUENCE_ID || name == SEQUENCE_CONTROL_INPUT
}

/// A cache of signatures. An entry may be older than the model, so a request that fails with one asks Triton again.
#[derive(Debug, Default)]
pub struct Models {
    // By name first, because a model that is gone, or was loaded again, is forgotten with all of its versions.
    signatures: RwLock<HashMap<String, HashMap<Version, Arc<Signature>>>>,
}

impl Models {
    pub fn get(&self, name: &str, version: Version) -> Option<Arc<Signature>> {
        self.signatures.read().get(name)?.get(&version).cloned()
    }

    pub fn insert(&self, name: &str, version: Version, signature: Arc<Signature>) {
        self.signatures.write().entry(name.to_owned()).or_default().insert(version, signature);
    }

    pub fn remove(&self, name: &str) {
        self.signatures.write().remove(name);
    }

    pub fn clear(&self) {
        self.signatures.write().clear();
    }

    /// Whether Triton has served a model of this name since it was last forgotten.
    pub fn is_known(&self, name: &str) -> bool {
        self.signatures.read().contains_key(name)
    }
}

/// A special input as it came: nothing is checked yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Special<T> {
    /// Empty if the client sent no shape.
    pub shape: Vec<i64>,
    /// The value, if there is exactly one in the field for the type.
    pub value: Option<T>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Specials {
    pub sequence_id: Option<Special<u64>>,
    pub control: Option<Special<u32>>,
}

/// Special inputs that have passed the checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// 0: the server chooses it.
    pub id: u64,
    /// 0, 1 for START, 2 for END.
    pub control: u32,
}

impl Specials {
    /// The id, or 0.
    pub fn id(&self) -> u64 {
        // The id counts even if the rest is wrong, because the request still has its place in the order of the
        // sequence.
        self.sequence_id.as_ref().and_then(|special| special.value).unwrap_or(0)
    }

    /// In OVMS's order: the id's shape and value, those of the control, the control's meaning, the id's presence.
    pub fn check(&self) -> Result<Sequence, Failure> {
        let text = "Could not find sequence id in expected tensor proto field uint64_val";
        let id = self.sequence_id.as_ref().map_or(Ok(0), |special| special.check(SEQUENCE_ID, text))?;
        let text = "Could not find sequence control input in expected tensor proto field uint32_val";
        let control = self.control.as_ref().map_or(Ok(0), |special| special.check(SEQUENCE_CONTROL_INPUT, text))?;
        if control > END {
            return Err(Failure::invalid("Unexpected value of sequence control input"));
        }
        // A START without an id lets the server choose one.
        if control != START && id == 0 {
            return Err(Failure::invalid("Sequence ID has not been provided in request inputs"));
        }
        Ok(Sequence { id, control })
    }
}

impl<T: Copy> Special<T> {
    pub fn new(shape: Vec<i64>, values: &[T]) -> Self {
        Self { shape, value: if let [value] = *values { Some(value) } else { None } }
    }

    fn check(&self, name: &str, no_value: &str) -> Result<T, Failure> {
        let wrong = |what: &str| Failure::invalid(format!("{what} - Required shape for {name} is: (1)"));
        match self.shape[..] {
            [] => Err(Failure::invalid("Special input proto does not contain tensor shape information")),
            [1] => self.value.ok_or_else(|| Failure::invalid(no_value)),
            [_] => Err(wrong("Invalid input shape")),
            _ => Err(wrong("Invalid number of shape dimensions")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, datatype: &str, shape: &[i64]) -> TensorMetadata {
        TensorMetadata { name: name.into(), datatype: datatype.into(), shape: shape.to_vec() }
    }

    fn metadata(inputs: Vec<TensorMetadata>) -> ModelMetadataResponse {
        let outputs = vec![tensor("y", "FP32", &[-1, 1]), tensor("sequence_id", "UINT64", &[-1, 1])];
        let versions = vec!["9".into(), "10".into()];
        ModelMetadataResponse { versions, inputs, outputs, ..ModelMetadataResponse::default() }
    }

    #[test]
    fn a_stateful_model_has_no_special_inputs_in_its_signature() {
        let inputs = vec![
            tensor("x", "FP32", &[-1, 512]),
            tensor("sequence_id", "UINT64", &[-1, 1]),
            tensor("sequence_control_input", "UINT32", &[-1, 1]),
        ];
        let signature = Signature::new(metadata(inputs), None);
        assert_eq!(signature.inputs.len(), 1);
        assert_eq!(signature.outputs.len(), 1);
        assert_eq!(signature.special_shape, Some(vec![1, 1]));
        assert_eq!(signature.version, 10, "versions are numbers");
    }

    #[test]
    fn without_a_batch_the_special_inputs_have_one_dimension() {
        let inputs = vec![tensor("sequence_id", "UINT64", &[1]), tensor("sequence_control_input", "UINT32", &[1])];
        assert_eq!(Signature::new(metadata(inputs), Some(9)).special_shape, Some(vec![1]));
    }

    #[test]
    fn a_model_without_special_inputs_keeps_all_names() {
        let signature = Signature::new(metadata(vec![tensor("sequence_id", "FP8", &[1])]), Some(9));
        assert!(!signature.is_stateful());
        assert_eq!(signature.input("sequence_id").map(|input| input.data_type), Some(None));
        assert_eq!(signature.outputs.len(), 2);
        assert_eq!(signature.version, 9);
    }

    fn specials(id: Option<(&[i64], Option<u64>)>, control: Option<(&[i64], Option<u32>)>) -> Specials {
        Specials {
            sequence_id: id.map(|(shape, value)| Special { shape: shape.to_vec(), value }),
            control: control.map(|(shape, value)| Special { shape: shape.to_vec(), value }),
        }
    }

    fn message(specials: &Specials) -> String {
        let failure = specials.check().unwrap_err();
        assert_eq!(failure.code, tonic::Code::InvalidArgument);
        failure.message
    }

    #[test]
    fn a_start_needs_no_id_and_everything_else_does() {
        let start = Some((&[1][..], Some(START)));
        assert_eq!(specials(None, start).check(), Ok(Sequence { id: 0, control: START }));
        assert_eq!(specials(Some((&[1], Some(0))), start).check(), Ok(Sequence { id: 0, control: START }));
        assert_eq!(specials(Some((&[1], Some(7))), None).check(), Ok(Sequence { id: 7, control: 0 }));
        let absent = "Sequence ID has not been provided in request inputs";
        assert_eq!(message(&specials(None, None)), absent);
        assert_eq!(message(&specials(None, Some((&[1], Some(END))))), absent);
        assert_eq!(message(&specials(Some((&[1], Some(0))), Some((&[1], Some(0))))), absent);
    }

    #[test]
    fn the_id_s_shape_is_checked_before_its_value_and_before_the_control() {
        let bad_control = Some((&[][..], Some(999)));
        assert_eq!(
            message(&specials(Some((&[], Some(1))), bad_control)),
            "Special input proto does not contain tensor shape information"
        );
        assert_eq!(
            message(&specials(Some((&[1, 1], None)), bad_control)),
            "Invalid number of shape dimensions - Required shape for sequence_id is: (1)"
        );
        assert_eq!(
            message(&specials(Some((&[2], None)), bad_control)),
            "Invalid input shape - Required shape for sequence_id is: (1)"
        );
        assert_eq!(
            message(&specials(Some((&[1], None)), bad_control)),
            "Could not find sequence id in expected tensor proto field uint64_val"
        );
    }

    #[test]
    fn the_control_s_value_is_checked_before_the_id_s_presence() {
        assert_eq!(
            message(&specials(None, Some((&[1], None)))),
            "Could not find sequence control input in expected tensor proto field uint32_val"
        );
        assert_eq!(
            message(&specials(None, Some((&[3], Some(0))))),
            "Invalid input shape - Required shape for sequence_control_input is: (1)"
        );
        assert_eq!(message(&specials(None, Some((&[1], Some(3))))), "Unexpected value of sequence control input");
    }
}
