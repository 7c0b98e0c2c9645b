//! The connection to tritonserver, and why a request fails: a gRPC code and a text, for both protocols.

use std::error::Error;
use std::time::Duration;

use http::uri::{Authority, Uri};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

use crate::proto::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use crate::proto::inference::{
    ModelInferRequest, ModelInferResponse, ModelMetadataRequest, ModelMetadataResponse, RepositoryIndexRequest,
    RepositoryModelLoadRequest, RepositoryModelUnloadRequest, ServerReadyRequest,
    repository_index_response::ModelIndex,
};

const WINDOW_BYTES: u32 = 16 << 20;
const MESSAGE_BYTES_MAX: usize = i32::MAX as usize;
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    pub code: Code,
    pub message: String,
}

impl Failure {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    /// Refuses a client's load or unload: the configuration decides which models a managed tritonserver has.
    pub fn managed_models() -> Self {
        let text = "the gateway loads and unloads the models itself: change config.json, and POST /v1/config/reload if \
                    you don't want to wait";
        Self::new(Code::PermissionDenied, text)
    }

    pub fn unexpected_input(name: &str) -> Self {
        Self::invalid(format!("Unexpected input - the model has no input '{name}'"))
    }
}

impl From<Failure> for Status {
    fn from(failure: Failure) -> Self {
        Status::new(failure.code, failure.message)
    }
}

/// A tritonserver, by its gRPC address and its HTTP address. Connects with the first request, and again after
/// the connection breaks.
#[derive(Clone, Debug)]
pub struct Triton {
    endpoint: Endpoint,
    channel: Channel,
    pub http: Authority,
}

impl Triton {
    /// Call it inside a tokio runtime, where the task of the connection will run.
    pub fn new(grpc: &Authority, http: Authority) -> Result<Self, http::Error> {
        let uri = Uri::builder().scheme("http").authority(grpc.clone()).path_and_query("/").build()?;
        let endpoint = Endpoint::from(uri)
            .tcp_nodelay(true)
            .connect_timeout(CONNECT_TIMEOUT)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            // A host that vanishes sends no reset, so only an unanswered ping tells that requests under way have
            // failed.
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT);
        Ok(Self { channel: endpoint.connect_lazy(), endpoint, http })
    }

    /// Runs a model, and gives `held` back with the answer. If this future is dropped, the call continues, and `held`
    /// is dropped when Triton has answered.
    pub async fn infer<T: Send + 'static>(
        &self,
        request: ModelInferRequest,
        held: T,
    ) -> (Result<ModelInferResponse, Failure>, Option<T>) {
        let mut client = self.client();
        // A task, and no `grpc-timeout`: tritonserver 24.10 can crash when unary calls are cancelled, and breaks the
        // connection, with the requests of all clients, when a deadline passes.
        let call = tokio::spawn(async move { (answer(client.model_infer(request).await), held) });
        match call.await {
            Ok((answer, held)) => (answer, Some(held)),
            Err(error) => (Err(Failure::new(Code::Internal, format!("the gateway has failed: {error}"))), None),
        }
    }

    /// What Triton says about a model; an empty version is the latest one.
    pub async fn metadata(&self, name: &str, version: &str) -> Result<ModelMetadataResponse, Failure> {
        let request = ModelMetadataRequest { name: name.to_owned(), version: version.to_owned() };
        answer(self.client().model_metadata(request).await)
    }

    /// All versions of all models, served or not.
    pub async fn index(&self) -> Result<Vec<ModelIndex>, Failure> {
        let answered = self.client().repository_index(RepositoryIndexRequest::default()).await;
        Ok(answer(answered)?.models)
    }

    pub async fn load(&self, name: &str) -> Result<(), Failure> {
        let request = RepositoryModelLoadRequest { repository_name: String::new(), model_name: name.to_owned() };
        answer(self.client().repository_model_load(request).await).map(drop)
    }

    pub async fn unload(&self, name: &str) -> Result<(), Failure> {
        let request = RepositoryModelUnloadRequest { repository_name: String::new(), model_name: name.to_owned() };
        answer(self.client().repository_model_unload(request).await).map(drop)
    }

    pub async fn is_ready(&self) -> bool {
        self.client().server_ready(ServerReadyRequest {}).await.is_ok_and(|answer| answer.into_inner().ready)
    }

    /// One more connection, for requests that are passed through as they are. Connects with the first one.
    pub fn connection(&self) -> Channel {
        self.endpoint.connect_lazy()
    }

    fn client(&self) -> GrpcInferenceServiceClient<Channel> {
        // tonic's default of 4 MiB for answers is less than some models give.
        GrpcInferenceServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }
}

fn answer<T>(answer: Result<Response<T>, Status>) -> Result<T, Failure> {
    answer.map(Response::into_inner).map_err(|status| failure(&status))
}

pub fn failure(status: &Status) -> Failure {
    // A status that Triton sent has no source. One that has a source was made here, because the connection failed. The
    // innermost source names the cause; those around it only say which layer met it.
    match std::iter::successors(status.source(), |&error| error.source()).last() {
        Some(reason) => Failure::new(Code::Unavailable, format!("tritonserver can't be reached: {reason}")),
        None => Failure::new(status.code(), status.message()),
    }
}
