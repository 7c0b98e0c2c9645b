//! The connection to tritonserver.

use std::error::Error;
use std::time::Duration;

use http::uri::{Authority, Uri};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

use crate::failure::Failure;
use crate::proto::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use crate::proto::inference::{
    ModelInferRequest, ModelInferResponse, ModelMetadataRequest, ModelMetadataResponse, RepositoryIndexRequest,
    RepositoryModelLoadRequest, RepositoryModelUnloadRequest, ServerReadyRequest,
    repository_index_response::ModelIndex,
};

const WINDOW_BYTES: u32 = 16 << 20;
const MESSAGE_BYTES_MAX: usize = i32::MAX as usize;
/// How long a connection may take to be made.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
// A host that vanishes sends no reset, so only an unanswered ping tells that requests under way have failed.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// A tritonserver, by its gRPC address and its HTTP address. Connects with the first request, and again after
/// the connection breaks.
#[derive(Clone, Debug)]
pub struct Triton {
    endpoint: Endpoint,
    channel: Channel,
    http: Authority,
}

impl Triton {
    /// Connects later: call it inside a tokio runtime.
    pub fn new(grpc: &Authority, http: Authority) -> Result<Self, http::Error> {
        let uri = Uri::builder().scheme("http").authority(grpc.clone()).path_and_query("/").build()?;
        let endpoint = Endpoint::from(uri)
            .tcp_nodelay(true)
            .connect_timeout(CONNECT_TIMEOUT)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT);
        Ok(Self { channel: endpoint.connect_lazy(), endpoint, http })
    }

    /// Runs a model, and gives `held` back with the answer. If this future is dropped, the call goes on, and `held` is dropped
    /// when Triton has answered. The call has no `grpc-timeout`. tritonserver 24.10 can crash when unary calls are cancelled,
    /// and breaks the connection, with the requests of all clients, when a deadline passes.
    pub async fn infer<T: Send + 'static>(
        &self,
        request: ModelInferRequest,
        held: T,
    ) -> (Result<ModelInferResponse, Failure>, Option<T>) {
        let mut client = self.client();
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

    /// Loads a model, or loads it again.
    pub async fn load(&self, name: &str) -> Result<(), Failure> {
        let request = RepositoryModelLoadRequest { repository_name: String::new(), model_name: name.to_owned() };
        answer(self.client().repository_model_load(request).await).map(drop)
    }

    /// Unloads a model.
    pub async fn unload(&self, name: &str) -> Result<(), Failure> {
        let request = RepositoryModelUnloadRequest { repository_name: String::new(), model_name: name.to_owned() };
        answer(self.client().repository_model_unload(request).await).map(drop)
    }

    /// Whether the server answers and calls itself ready.
    pub async fn is_ready(&self) -> bool {
        match self.client().server_ready(ServerReadyRequest {}).await {
            Ok(answer) => answer.into_inner().ready,
            Err(_) => false,
        }
    }

    /// One more connection, for requests that are passed through as they are. Connects with the first one.
    pub fn connection(&self) -> Channel {
        self.endpoint.connect_lazy()
    }

    /// The HTTP address.
    pub fn http(&self) -> &Authority {
        &self.http
    }

    fn client(&self) -> GrpcInferenceServiceClient<Channel> {
        GrpcInferenceServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }
}

fn answer<T>(answer: Result<Response<T>, Status>) -> Result<T, Failure> {
    answer.map(Response::into_inner).map_err(|status| failure(&status))
}

/// A status that Triton sent has no source. One that has a source was made here, because the connection failed.
pub fn failure(status: &Status) -> Failure {
    let mut source = status.source();
    let mut reason = None;
    while let Some(error) = source {
        reason = Some(error.to_string());
        source = error.source();
    }
    match reason {
        Some(reason) => Failure::new(Code::Unavailable, format!("tritonserver can't be reached: {reason}")),
        None => Failure::new(status.code(), status.message()),
    }
}
