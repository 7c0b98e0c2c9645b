//! Triton's own gRPC API, passed on as it is: HTTP/2 frames, not messages.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use tonic::body::Body;
use tonic::{Code, Status};
use tower::ServiceExt;

use crate::failure::Failure;
use crate::gateway::Gateway;
use crate::metrics::{self, Method};
use crate::triton;

/// The methods that have a label in the metrics. Others share the empty label, because a client could make up any number of
/// names.
const METHODS: [&str; 20] = [
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelInfer",
    "ModelStreamInfer",
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
pub async fn answer(gateway: Arc<Gateway>, mut request: Request<Incoming>) -> Response<Body> {
    let called = request.uri().path().rsplit('/').next().unwrap_or_default();
    let method = METHODS.into_iter().find(|method| *method == called).unwrap_or_default();
    let counted = gateway.metrics.request(Method { api: "kserve_grpc", method });
    if matches!(method, "RepositoryModelLoad" | "RepositoryModelUnload") && gateway.managed.is_some() {
        let failure = Failure::managed_models();
        counted.finish("", failure.code);
        return Status::from(failure).into_http();
    }
    // Triton's answer to a deadline that passes breaks the connection, which all clients share. The client itself takes its
    // request back then.
    request.headers_mut().remove("grpc-timeout");
    match gateway.triton.channel().oneshot(request.map(Body::new)).await {
        Ok(response) => {
            let code = code(response.headers());
            response.map(|body| Body::new(Answer { body, counted: Some(counted), code }))
        }
        Err(error) => {
            let failure = triton::failure(&Status::from_error(error.into()));
            counted.finish("", failure.code);
            Status::from(failure).into_http()
        }
    }
}

fn code(headers: &HeaderMap) -> Option<Code> {
    Status::from_header_map(headers).map(|status| status.code())
}

/// The body of Triton's answer. It counts the request when it ends.
struct Answer {
    body: Body,
    counted: Option<metrics::Request>,
    code: Option<Code>,
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = match ready!(Pin::new(&mut self.body).poll_frame(context)) {
            // After the headers, a stream that ends without a status would be an unknown error to the client.
            Some(Err(status)) if self.counted.is_some() => {
                Some(Ok(Frame::trailers(trailers(triton::failure(&status)))))
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
        // An answer of headers only is never polled.
        if let (Some(counted), Some(code)) = (self.counted.take(), self.code) {
            counted.finish("", code);
        }
    }
}

fn trailers(failure: Failure) -> HeaderMap {
    let response: Response<()> = Status::from(failure).into_http();
    let mut headers = response.into_parts().0.headers;
    headers.remove(http::header::CONTENT_TYPE);
    headers
}
