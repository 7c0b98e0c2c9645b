//! Triton's own APIs, passed on as they are: gRPC as frames of HTTP/2, not as messages, and HTTP.

use std::error::Error;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{CONNECTION, HOST, HeaderName, TE, TRAILER, TRANSFER_ENCODING, UPGRADE};
use http::uri::{Authority, Scheme, Uri};
use http::{HeaderMap, Request, Response, Version};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt, Either, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::{self, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use percent_encoding::percent_decode_str;
use tokio::sync::oneshot;
use tonic::body::Body;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tower::ServiceExt;

use crate::gateway::Gateway;
use crate::metrics::{self, Method};
use crate::triton::{self, CONNECT_TIMEOUT, Failure};

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

/// Passes a gRPC request on to Triton, and streams the answer back.
pub async fn grpc(gateway: Arc<Gateway>, triton: Channel, mut request: Request<Incoming>) -> Response<Body> {
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

/// A text of the gateway's own, or what Triton sends.
pub type HttpBody = Either<Full<Bytes>, Incoming>;

pub type Client = legacy::Client<HttpConnector, Incoming>;

/// A client without connections yet. Call it inside a tokio runtime.
pub fn client() -> Client {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    legacy::Client::builder(TokioExecutor::new()).build(connector)
}

/// Passes an HTTP request on to Triton, and streams the answer back.
pub async fn http(
    gateway: &Gateway,
    client: &Client,
    mut request: Request<Incoming>,
) -> Result<Response<HttpBody>, Failure> {
    if gateway.managed.is_some() && loads_or_unloads(request.uri().path()) {
        return Err(Failure::managed_models());
    }
    let authority = &gateway.triton.http;
    *request.uri_mut() =
        at(authority, request.uri()).map_err(|error| Failure::invalid(format!("Invalid request URL: {error}")))?;
    // A client may speak HTTP/1.0, which would end the connection to Triton with this request.
    *request.version_mut() = Version::HTTP_11;
    remove_hop_by_hop(request.headers_mut());
    // It names the gateway. The client sets it to the host that it connects to.
    request.headers_mut().remove(HOST);
    let mut response = client.request(request).await.map_err(|error| {
        let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        Failure::new(Code::Unavailable, format!("tritonserver can't be reached at {authority}: {reason}"))
    })?;
    remove_hop_by_hop(response.headers_mut());
    *response.version_mut() = Version::HTTP_11;
    Ok(response.map(Either::Right))
}

fn at(authority: &Authority, uri: &Uri) -> Result<Uri, http::Error> {
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    Uri::builder().scheme(Scheme::HTTP).authority(authority.clone()).path_and_query(path).build()
}

fn loads_or_unloads(path: &str) -> bool {
    // Decoded, so that no other spelling of the path goes around the check.
    let decoded = percent_decode_str(path).decode_utf8_lossy();
    let mut parts = decoded.split('/').filter(|part| !part.is_empty());
    let starts = parts.by_ref().take(2).eq(["v2", "repository"]);
    starts && parts.next_back().is_some_and(|last| last == "load" || last == "unload")
}

/// Headers that are about one connection, and those that `Connection` names.
fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    // These headers are about one connection. Triton would take the client's for headers of the gateway's connection to
    // it.
    let always = [
        CONNECTION,
        HeaderName::from_static("keep-alive"),
        HeaderName::from_static("proxy-connection"),
        TE,
        TRAILER,
        TRANSFER_ENCODING,
        UPGRADE,
    ];
    for name in named.into_iter().chain(always) {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn headers_of_the_connection_are_removed() {
        let mut headers = HeaderMap::new();
        headers.insert(CONNECTION, HeaderValue::from_static("close, X-Of-This-Hop"));
        headers.insert("x-of-this-hop", HeaderValue::from_static("1"));
        headers.insert(TE, HeaderValue::from_static("trailers"));
        headers.insert("inference-header-content-length", HeaderValue::from_static("7"));
        remove_hop_by_hop(&mut headers);
        assert_eq!(headers.keys().collect::<Vec<_>>(), ["inference-header-content-length"]);
    }

    #[test]
    fn loading_and_unloading_are_found_in_any_spelling() {
        for path in ["/v2/repository/models/m/load", "/v2/repository/models/m/unload", "/v2/repository/models/m/%6coad"]
        {
            assert!(loads_or_unloads(path), "{path}");
        }
        assert!(!loads_or_unloads("/v2/repository/index"));
        assert!(!loads_or_unloads("/v2/models/load/infer"));
    }
}
