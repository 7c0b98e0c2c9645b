//! The port for gRPC: TensorFlow Serving's services, and Triton's own API, which is passed through.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use prost::Message;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout_at;
use tonic::body::Body;
use tonic::codec::CompressionEncoding;
use tonic::codegen::Service;
use tonic::metadata::MetadataMap;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use crate::connections::{accept, stopped};
use crate::gateway::{Gateway, VersionStatus};
use crate::metrics::Method;
use crate::models::{SEQUENCE_CONTROL_INPUT, SEQUENCE_ID, Signature, Special, Specials, TYPE_URL};
use crate::pass_through;
use crate::predict::{self, Call, Prediction, Tensors};
use crate::proto::tensorflow::serving::model_service_server::{ModelService, ModelServiceServer};
use crate::proto::tensorflow::serving::prediction_service_server::{PredictionService, PredictionServiceServer};
use crate::proto::tensorflow::serving::{
    GetModelMetadataRequest, GetModelMetadataResponse, GetModelStatusRequest, GetModelStatusResponse, ModelSpec,
    ModelVersionStatus, PredictRequest, PredictResponse, StatusProto, UnreadRequest, UnsentResponse,
    model_spec::VersionChoice,
};
use crate::proto::tensorflow::{DataType, TensorProto};
use crate::tensor::{Expansion, Tensor, dimensions, shape_proto};
use crate::triton::Failure;

/// OVMS's limit.
const MESSAGE_BYTES_MAX: usize = 1 << 30;
const PING_INTERVAL: Duration = Duration::from_secs(60);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
const WINDOW_BYTES: u32 = 16 << 20;
const STREAMS_MAX: u32 = 4096;
/// The only `metadata_field` that a client can ask for.
const SIGNATURE_DEF: &str = "signature_def";

/// Serves `listener` until `stop` is true, then finishes the requests that run.
pub async fn serve(listener: TcpListener, gateway: Arc<Gateway>, stop: watch::Receiver<bool>) {
    let api = Services { gateway: gateway.clone() };
    let router = Router {
        prediction: PredictionServiceServer::new(api.clone())
            .accept_compressed(CompressionEncoding::Gzip)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            // The limit is for clients. An answer is as large as the model makes it.
            .max_encoding_message_size(usize::MAX),
        models: ModelServiceServer::new(api).accept_compressed(CompressionEncoding::Gzip),
        gateway,
    };
    accept(listener, stop, |stream, stop| connection(stream, router.clone(), stop)).await;
}

/// Runs the connection and all its requests in one task, so that requests begin in the order in which they arrived.
async fn connection(stream: TcpStream, router: Router, mut stop: watch::Receiver<bool>) {
    // Each client has its own connection to Triton, so one that doesn't read its answers, or cancels requests, holds up
    // no other.
    let triton = router.gateway.triton.connection();
    let service = service_fn(move |request| router.clone().answer(triton.clone(), request));
    let (sender, mut started) = mpsc::unbounded_channel();
    let mut requests = FuturesUnordered::new();
    let mut builder = http2::Builder::new(Requests(sender));
    builder
        .timer(TokioTimer::new())
        // A client that vanishes sends no reset, so only an unanswered ping ends its connection.
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        // So large that a client can send a tensor of some MiB without waiting for permission to continue.
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_concurrent_streams(STREAMS_MAX)
        // As many as may run, because a client may cancel all of its requests at once.
        .max_pending_accept_reset_streams(STREAMS_MAX as usize)
        .max_local_error_reset_streams(STREAMS_MAX as usize);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let mut stopping = false;
    loop {
        tokio::select! {
            biased;
            result = connection.as_mut() => {
                if let Err(error) = result {
                    log::debug!("gRPC connection: {error}");
                }
                // The client of the waiting requests has gone, so they are dropped.
                return;
            }
            Some(request) = started.recv() => requests.push(request),
            Some(()) = requests.next() => {}
            () = stopped(&mut stop), if !stopping => {
                stopping = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

/// Hands the requests of a connection to the task of the connection.
#[derive(Clone)]
struct Requests(mpsc::UnboundedSender<Pin<Box<dyn Future<Output = ()> + Send>>>);

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for Requests {
    fn execute(&self, request: F) {
        // It fails only when the connection has ended.
        let _ = self.0.send(Box::pin(request));
    }
}

#[derive(Clone)]
struct Router {
    prediction: PredictionServiceServer<Services>,
    models: ModelServiceServer<Services>,
    gateway: Arc<Gateway>,
}

impl Router {
    async fn answer(
        mut self,
        triton: Channel,
        request: http::Request<Incoming>,
    ) -> Result<http::Response<Body>, Infallible> {
        let service = request.uri().path().split('/').nth(1).unwrap_or_default();
        match service {
            "tensorflow.serving.PredictionService" => self.prediction.call(request).await,
            "tensorflow.serving.ModelService" => self.models.call(request).await,
            "inference.GRPCInferenceService" | "grpc.health.v1.Health" => {
                Ok(pass_through::grpc(self.gateway, triton, request).await)
            }
            _ => Ok(Status::unimplemented(format!("there is no service '{service}'")).into_http()),
        }
    }
}

#[derive(Clone)]
struct Services {
    gateway: Arc<Gateway>,
}

impl Services {
    /// Answers before the client's deadline, and counts the request.
    async fn answer<T>(
        &self,
        method: &'static str,
        model: &str,
        deadline: Option<Instant>,
        answer: impl Future<Output = Result<T, Failure>>,
    ) -> Result<Response<T>, Status> {
        let counted = self.gateway.metrics.request(Method { api: "grpc", method });
        let result = match deadline {
            Some(deadline) => timeout_at(deadline.into(), answer)
                .await
                .unwrap_or_else(|_| Err(Failure::new(Code::DeadlineExceeded, "Deadline Exceeded"))),
            None => answer.await,
        };
        let code = result.as_ref().err().map_or(Code::Ok, |failure| failure.code);
        // The model is looked up only now, because the request itself may have made it known.
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
            deadline: deadline_of(&metadata),
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
            // Checked inside `run`, so that refused requests are also counted.
            if request.model_spec.is_none() {
                return Err(Failure::invalid("model_spec missing in request"));
            }
            if request.metadata_field != [SIGNATURE_DEF] {
                return Err(Failure::invalid("Invalid signature name"));
            }
            let signature = self.gateway.ask_signature(&spec.name, version(&spec)).await?;
            let value = signature.definition().encode_to_vec();
            let any = prost_types::Any { type_url: TYPE_URL.to_owned(), value };
            Ok(GetModelMetadataResponse {
                model_spec: Some(answered_spec(&spec.name, signature.version)),
                metadata: BTreeMap::from([(SIGNATURE_DEF.to_owned(), any)]),
            })
        };
        self.answer("GetModelMetadata", &spec.name, deadline_of(&metadata), run).await
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
            let versions = self.gateway.statuses_of(&spec.name, version(&spec)).await?;
            let statuses = versions.into_iter().map(|VersionStatus { version, state, error_code, error_message }| {
                let status = Some(StatusProto { error_code: error_code as i32, error_message });
                ModelVersionStatus { version, state: state as i32, status }
            });
            Ok(GetModelStatusResponse { model_version_status: statuses.collect() })
        };
        self.answer("GetModelStatus", &spec.name, deadline_of(&metadata), run).await
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
    // As in OVMS, only the field of the type counts, not the declared type and not bytes in tensor_content.
    let special = |name| inputs.get(name).map(|proto| (proto, dimensions(proto.tensor_shape.as_ref())));
    Specials {
        sequence_id: special(SEQUENCE_ID).map(|(proto, shape)| Special::new(shape, &proto.uint64_val)),
        control: special(SEQUENCE_CONTROL_INPUT).map(|(proto, shape)| Special::new(shape, &proto.uint32_val)),
    }
}

fn tensors(inputs: &BTreeMap<String, TensorProto>, signature: &Signature) -> Result<Tensors, Failure> {
    let mut expansion = Expansion::new();
    let data = inputs.iter().filter(|(name, _)| !signature.has_special(name));
    let tensors = data.map(|(name, proto)| {
        // The name is checked before the values take memory, because a few bytes of a client may stand for many
        // elements.
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
    // The response names the version that answered, because a client that asks for the latest one can't know it
    // otherwise.
    let mut model_spec = answered_spec(&spec.name, prediction.version);
    model_spec.signature_name.clone_from(&spec.signature_name);
    PredictResponse { outputs, model_spec: Some(model_spec) }
}

/// When the client stops waiting; none if its header `grpc-timeout` is absent or malformed.
fn deadline_of(metadata: &MetadataMap) -> Option<Instant> {
    let timeout = parse_timeout(metadata.get("grpc-timeout")?.to_str().ok()?)?;
    // A deadline that the clock can't represent is none.
    Instant::now().checked_add(timeout)
}

fn parse_timeout(text: &str) -> Option<Duration> {
    let unit = text.chars().next_back()?;
    let digits = text.strip_suffix(unit)?;
    // gRPC's specification allows 8 digits. `parse` alone would take a sign.
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let unit = match unit {
        'H' => Duration::from_secs(3600),
        'M' => Duration::from_secs(60),
        'S' => Duration::from_secs(1),
        'm' => Duration::from_millis(1),
        'u' => Duration::from_micros(1),
        'n' => Duration::from_nanos(1),
        _ => return None,
    };
    Some(unit * digits.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_unit_is_read() {
        assert_eq!(parse_timeout("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(parse_timeout("2M"), Some(Duration::from_secs(120)));
        assert_eq!(parse_timeout("9S"), Some(Duration::from_secs(9)));
        assert_eq!(parse_timeout("99999999m"), Some(Duration::from_millis(99_999_999)));
        assert_eq!(parse_timeout("5u"), Some(Duration::from_micros(5)));
        assert_eq!(parse_timeout("5n"), Some(Duration::from_nanos(5)));
    }

    #[test]
    fn what_grpc_does_not_allow_is_no_deadline() {
        for text in ["", "5", "m", "-5m", "+5m", "123456789m", "5x", "5é", "1.5S"] {
            assert_eq!(parse_timeout(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text: String) {
            let _ = parse_timeout(&text);
        }
    }
}
