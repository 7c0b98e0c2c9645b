//! A signature as TensorFlow Serving's clients read it.

use std::collections::BTreeMap;

use crate::models::{Signature, TensorInfo};
use crate::proto::tensorflow::serving::SignatureDefMap;
use crate::proto::tensorflow::{DataType, SignatureDef, TensorInfo as TensorInfoProto};
use crate::tensor::data_type::tensorflow;
use crate::tensor::proto::shape_proto;

/// The type of the message inside `GetModelMetadataResponse.metadata`.
pub const TYPE_URL: &str = "type.googleapis.com/tensorflow.serving.SignatureDefMap";
/// The one signature of each model.
pub const SIGNATURE_NAME: &str = "serving_default";

/// The signature as a message. Its special inputs aren't part of it, as in OVMS.
pub fn signature_def_map(signature: &Signature) -> SignatureDefMap {
    let definition = SignatureDef {
        inputs: protos(&signature.inputs),
        outputs: protos(&signature.outputs),
        method_name: String::new(),
    };
    SignatureDefMap { signature_def: BTreeMap::from([(SIGNATURE_NAME.to_owned(), definition)]) }
}

/// TensorFlow's type of a tensor.
pub fn data_type(info: &TensorInfo) -> DataType {
    info.data_type.map_or(DataType::DtInvalid, tensorflow)
}

fn protos(infos: &[TensorInfo]) -> BTreeMap<String, TensorInfoProto> {
    let proto = |info: &TensorInfo| TensorInfoProto {
        name: info.name.clone(),
        dtype: data_type(info) as i32,
        tensor_shape: Some(shape_proto(&info.shape)),
    };
    infos.iter().map(|info| (info.name.clone(), proto(info))).collect()
}
