//! The port for gRPC: TensorFlow Serving's API, and Triton's own passed through.

mod deadline;
mod pass_through;
mod services;

use std::convert::Infallible;
use std::sync::Arc;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::service::service_fn;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tonic::Status;
use tonic::body::Body;
use tonic::codec::CompressionEncoding;
use tonic::codegen::Service;
use tonic::transport::Channel;

use crate::connections;
use crate::gateway::Gateway;
use crate::proto::tensorflow::serving::model_service_server::ModelServiceServer;
use crate::proto::tensorflow::serving::prediction_service_server::PredictionServiceServer;
use services::Services;

/// OVMS's limit.
const MESSAGE_BYTES_MAX: usize = 1 << 30;

/// Serves `listener` until `stop` is true, then finishes the requests that run.
pub async fn serve(listener: TcpListener, gateway: Arc<Gateway>, stop: watch::Receiver<bool>) {
    let api = Services::new(gateway.clone());
    let router = Router {
        prediction: PredictionServiceServer::new(api.clone())
            .accept_compressed(CompressionEncoding::Gzip)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(usize::MAX),
        models: ModelServiceServer::new(api).accept_compressed(CompressionEncoding::Gzip),
        gateway,
    };
    let service = move || {
        let router = router.clone();
        // Of this client alone: one that doesn't read its answers, or takes requests back, holds up no other.
        let triton = router.gateway.triton.connection();
        service_fn(move |request| router.clone().answer(triton.clone(), request))
    };
    connections::serve_http2(listener, service, stop).await;
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
