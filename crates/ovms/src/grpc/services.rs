//! TensorFlow Serving's services.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use prost::Message;
use tonic::{Code, Request, Response, Status};

use super::deadline;
use crate::failure::Failure;
use crate::gateway::Gateway;
use crate::metadata;
use crate::metrics::Method;
use crate::models::{Signature, is_special};
use crate::predict::specials::{SEQUENCE_CONTROL_INPUT, SEQUENCE_ID, Special, Specials};
use crate::predict::{self, Call, Prediction, Tensors};
use crate::proto::tensorflow::serving::model_service_server::ModelService;
use crate::proto::tensorflow::serving::prediction_service_server::PredictionService;
use crate::proto::tensorflow::serving::{
    GetModelMetadataRequest, GetModelMetadataResponse, GetModelStatusRequest, GetModelStatusResponse, ModelSpec,
    ModelVersionStatus, PredictRequest, PredictResponse, StatusProto, UnreadRequest, UnsentResponse,
    model_spec::VersionChoice,
};
use crate::proto::tensorflow::{DataType, TensorProto};
use crate::status;
use crate::tensor::Tensor;
use crate::tensor::proto::{Expansion, dimensions, shape_proto};

/// The only `metadata_field` that a client can ask for.
const SIGNATURE_DEF: &str = "signature_def";

/// All services of TensorFlow Serving.
#[derive(Clone)]
pub struct Services {
    gateway: Arc<Gateway>,
}

impl Services {
    pub fn new(gateway: Arc<Gateway>) -> Self {
        Self { gateway }
    }

    /// Answers before the client's deadline, and counts the request.
    async fn answer<T>(
        &self,
        method: &'static str,
        model: &str,
        deadline: Option<Instant>,
        answer: impl Future<Output = Result<T, Failure>>,
    ) -> Result<Response<T>, Status> {
        let counted = self.gateway.metrics.request(Method { api: "grpc", method });
        let result = deadline::within(deadline, answer).await;
        let code = result.as_ref().err().map_or(Code::Ok, |failure| failure.code);
        counted.finish(if self.gateway.models.is_known(model) { model } else { "" }, code);
        Ok(Response::new(result?))
    }
}

#[tonic::async_trait]
impl PredictionService for Services {
    async fn predict(&self, request: Request<PredictRequest>) -> Result<Response<PredictResponse>, Status> {
        let (metadata, _, request) = request.into_parts();
        let spec = request.model_spec.unwrap_or_default();
        let call = Call {
            name: &spec.name,
            version: version(&spec),
            deadline: deadline::of(&metadata),
            specials: Ok(specials(&request.inputs)),
            filter: &request.output_filter,
        };
        let run = async {
            let prediction =
                predict::run(&self.gateway, &call, |signature| tensors(&request.inputs, signature)).await?;
            Ok(response(&spec, prediction))
        };
        self.answer("Predict", &spec.name, call.deadline, run).await
    }

    async fn get_model_metadata(
        &self,
        request: Request<GetModelMetadataRequest>,
    ) -> Result<Response<GetModelMetadataResponse>, Status> {
        let (metadata, _, request) = request.into_parts();
        let spec = request.model_spec.clone().unwrap_or_default();
        let run = async {
            if request.model_spec.is_none() {
                return Err(Failure::invalid("model_spec missing in request"));
            }
            if request.metadata_field != [SIGNATURE_DEF] {
                return Err(Failure::invalid("Invalid signature name"));
            }
            let signature = self.gateway.ask_signature(&spec.name, version(&spec)).await?;
            let any = prost_types::Any {
                type_url: metadata::TYPE_URL.to_owned(),
                value: metadata::signature_def_map(&signature).encode_to_vec(),
            };
            Ok(GetModelMetadataResponse {
                model_spec: Some(answered_spec(&spec.name, signature.version)),
                metadata: BTreeMap::from([(SIGNATURE_DEF.to_owned(), any)]),
            })
        };
        self.answer("GetModelMetadata", &spec.name, deadline::of(&metadata), run).await
    }

    async fn classify(&self, _: Request<UnreadRequest>) -> Result<Response<UnsentResponse>, Status> {
        Err(only_predict("Classify"))
    }

    async fn regress(&self, _: Request<UnreadRequest>) -> Result<Response<UnsentResponse>, Status> {
        Err(only_predict("Regress"))
    }

    async fn multi_inference(&self, _: Request<UnreadRequest>) -> Result<Response<UnsentResponse>, Status> {
        Err(only_predict("MultiInference"))
    }
}

#[tonic::async_trait]
impl ModelService for Services {
    async fn get_model_status(
        &self,
        request: Request<GetModelStatusRequest>,
    ) -> Result<Response<GetModelStatusResponse>, Status> {
        let (metadata, _, request) = request.into_parts();
        let spec = request.model_spec.unwrap_or_default();
        let run = async {
            let versions = status::of_model(&self.gateway, &spec.name, version(&spec)).await?;
            let statuses = versions.iter().map(|status| ModelVersionStatus {
                version: status.version,
                state: status.state as i32,
                status: Some(StatusProto {
                    error_code: status.error_code() as i32,
                    error_message: status.error_message().to_owned(),
                }),
            });
            Ok(GetModelStatusResponse { model_version_status: statuses.collect() })
        };
        self.answer("GetModelStatus", &spec.name, deadline::of(&metadata), run).await
    }

    async fn handle_reload_config_request(
        &self,
        _: Request<UnreadRequest>,
    ) -> Result<Response<UnsentResponse>, Status> {
        let text = "the configuration is a file, which is read again when it changes, or with POST /v1/config/reload on \
                    the REST port";
        Err(Status::unimplemented(text))
    }
}

fn only_predict(method: &str) -> Status {
    Status::unimplemented(format!("{method} needs tf.Example, which OpenVINO Model Server hasn't either: use Predict"))
}

/// OVMS takes version 0 and every label for the default version.
fn version(spec: &ModelSpec) -> Option<i64> {
    match spec.version_choice {
        Some(VersionChoice::Version(version)) if version != 0 => Some(version),
        _ => None,
    }
}

fn answered_spec(name: &str, version: i64) -> ModelSpec {
    ModelSpec { name: name.to_owned(), version_choice: Some(VersionChoice::Version(version)), ..ModelSpec::default() }
}

fn specials(inputs: &BTreeMap<String, TensorProto>) -> Specials {
    Specials {
        sequence_id: inputs.get(SEQUENCE_ID).map(|proto| special(proto, &proto.uint64_val)),
        control: inputs.get(SEQUENCE_CONTROL_INPUT).map(|proto| special(proto, &proto.uint32_val)),
    }
}

fn special<T: Copy>(proto: &TensorProto, values: &[T]) -> Special<T> {
    let value = if let [value] = *values { Some(value) } else { None };
    Special { shape: dimensions(proto.tensor_shape.as_ref()), value }
}

fn tensors(inputs: &BTreeMap<String, TensorProto>, signature: &Signature) -> Result<Tensors, Failure> {
    let mut expansion = Expansion::default();
    let data = inputs.iter().filter(|(name, _)| !(signature.is_stateful() && is_special(name)));
    let tensors = data.map(|(name, proto)| {
        // Before it takes memory.
        signature.input(name).ok_or_else(|| Failure::unexpected_input(name))?;
        Ok((name.clone(), Tensor::from_proto(name, proto, &mut expansion)?))
    });
    tensors.collect()
}

fn response(spec: &ModelSpec, prediction: Prediction) -> PredictResponse {
    let mut outputs: BTreeMap<_, _> =
        prediction.outputs.into_iter().map(|(name, tensor)| (name, tensor.into_proto())).collect();
    if let Some(id) = prediction.sequence_id {
        let proto = TensorProto {
            dtype: DataType::DtUint64 as i32,
            tensor_shape: Some(shape_proto(&[1])),
            uint64_val: vec![id],
            ..TensorProto::default()
        };
        outputs.insert(SEQUENCE_ID.to_owned(), proto);
    }
    let mut model_spec = answered_spec(&spec.name, prediction.version);
    model_spec.signature_name.clone_from(&spec.signature_name);
    PredictResponse { outputs, model_spec: Some(model_spec) }
}
