//! Triton's own gRPC API, passed on as it is: HTTP/2 frames, not messages.

use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::sync::oneshot;
use tonic::body::Body;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tower::ServiceExt;

use crate::gateway::Gateway;
use crate::metrics::{self, Method};
use crate::triton::{self, Failure};

/// The one method that isn't unary.
const STREAM: &str = "ModelStreamInfer";

/// The methods that have a label in the metrics.
const METHODS: [&str; 20] = [
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelInfer",
    STREAM,
    "ModelConfig",
    "ModelStatistics",
    "RepositoryIndex",
    "RepositoryModelLoad",
    "RepositoryModelUnload",
    "SystemSharedMemoryStatus",
    "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister",
    "CudaSharedMemoryStatus",
    "CudaSharedMemoryRegister",
    "CudaSharedMemoryUnregister",
    "TraceSetting",
    "LogSettings",
];

/// Passes a request on to Triton, and the answer back as it comes.
pub async fn answer(gateway: Arc<Gateway>, triton: Channel, mut request: Request<Incoming>) -> Response<Body> {
    let called = request.uri().path().rsplit('/').next().unwrap_or_default();
    // Others share the empty label, because a client could make up any number of names.
    let method = METHODS.into_iter().find(|method| *method == called).unwrap_or_default();
    let counted = gateway.metrics.request(Method { api: "kserve_grpc", method });
    if matches!(method, "RepositoryModelLoad" | "RepositoryModelUnload") && gateway.managed.is_some() {
        let failure = Failure::managed_models();
        counted.finish("", failure.code);
        return Status::from(failure).into_http();
    }
    // Triton's answer to a deadline that passes breaks the connection. The client itself takes its request back then.
    request.headers_mut().remove("grpc-timeout");
    let is_unary = method != STREAM;
    let call = triton.oneshot(request.map(Body::new));
    let answered = if is_unary { finished(call).await } else { call.await };
    match answered {
        Ok(response) => {
            let code = code(response.headers());
            response.map(|body| Body::new(Answer { body, counted: Some(counted), code, is_unary }))
        }
        Err(error) => {
            let failure = triton::failure(&Status::from_error(error.into()));
            counted.finish("", failure.code);
            Status::from(failure).into_http()
        }
    }
}

type Answered = Result<Response<Body>, tonic::transport::Error>;

/// Makes a call, and finishes it even if this future is dropped.
async fn finished(call: impl Future<Output = Answered> + Send + 'static) -> Answered {
    // tritonserver 24.10 can crash when unary calls are cancelled.
    let (sender, receiver) = oneshot::channel();
    tokio::spawn(async move {
        if let Err(Ok(response)) = sender.send(call.await) {
            drain(response.into_body()).await;
        }
    });
    // Without an answer, it has panicked, or the program ends.
    receiver.await.unwrap_or_else(|_| Ok(Status::internal("the gateway has lost the request").into_http()))
}

async fn drain(mut body: Body) {
    while let Some(Ok(_)) = body.frame().await {}
}

fn code(headers: &HeaderMap) -> Option<Code> {
    Status::from_header_map(headers).map(|status| status.code())
}

/// The body of Triton's answer. It counts the request when it ends.
struct Answer {
    body: Body,
    counted: Option<metrics::Request>,
    code: Option<Code>,
    is_unary: bool,
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = match ready!(Pin::new(&mut self.body).poll_frame(context)) {
            // After the headers, a stream that ends without a status would be an unknown error to the client.
            Some(Err(status)) if self.counted.is_some() => {
                let mut trailers = HeaderMap::new();
                // It fails only for a text that no header can have, which tonic escapes.
                let _ = Status::from(triton::failure(&status)).add_header(&mut trailers);
                Some(Ok(Frame::trailers(trailers)))
            }
            Some(Err(_)) => None,
            frame => frame,
        };
        if let Some(Ok(frame)) = &frame
            && let Some(trailers) = frame.trailers_ref()
        {
            self.code = code(trailers);
        }
        let ended = frame.as_ref().is_none_or(|frame| frame.as_ref().is_ok_and(Frame::is_trailers));
        if ended && let Some(counted) = self.counted.take() {
            counted.finish("", self.code.unwrap_or(Code::Unknown));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        let Some(counted) = self.counted.take() else { return };
        match self.code {
            // An answer of headers only is never polled.
            Some(code) => counted.finish("", code),
            // The client has gone. A unary call is finished, as above.
            None if self.is_unary => _ = tokio::spawn(drain(mem::take(&mut self.body))),
            None => {}
        }
    }
}
