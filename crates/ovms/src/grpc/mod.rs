//! The port for gRPC: TensorFlow Serving's API, and Triton's own passed through.

mod pass_through;
mod services;

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tonic::Status;
use tonic::body::Body;
use tonic::codec::CompressionEncoding;
use tonic::codegen::Service;
use tonic::transport::Channel;

use crate::connections::{accept, stopped};
use crate::gateway::Gateway;
use crate::proto::tensorflow::serving::model_service_server::ModelServiceServer;
use crate::proto::tensorflow::serving::prediction_service_server::PredictionServiceServer;
use services::Services;

/// OVMS's limit.
const MESSAGE_BYTES_MAX: usize = 1 << 30;
const PING_INTERVAL: Duration = Duration::from_secs(60);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
const WINDOW_BYTES: u32 = 16 << 20;
const STREAMS_MAX: u32 = 4096;

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
    // Each client has its own connection to Triton, so one that doesn't read its answers, or cancels requests, holds up no
    // other.
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
    async fn answer(mut self, triton: Channel, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
        let service = request.uri().path().split('/').nth(1).unwrap_or_default();
        match service {
            "tensorflow.serving.PredictionService" => self.prediction.call(request).await,
            "tensorflow.serving.ModelService" => self.models.call(request).await,
            "inference.GRPCInferenceService" | "grpc.health.v1.Health" => {
                Ok(pass_through::answer(self.gateway, triton, request).await)
            }
            _ => Ok(Status::unimplemented(format!("there is no service '{service}'")).into_http()),
        }
    }
}
