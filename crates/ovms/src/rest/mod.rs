//! The port for REST: TensorFlow Serving's API, Triton's own passed through, and the metrics.

mod json;
mod request;

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt, Either, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use percent_encoding::percent_decode_str;
use serde_json::{Map, Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tonic::Code;

use crate::connections::{accept, stopped};
use crate::gateway::{Gateway, VERSION_MISSING, VersionStatus};
use crate::metrics::{Method, code_name};
use crate::models::{SIGNATURE_NAME, TYPE_URL, TensorInfo, Version};
use crate::pass_through::{self, Client, HttpBody};
use crate::predict::{self, Call};
use crate::triton::Failure;
use request::Request as PredictRequest;

/// OVMS's limit.
const BODY_BYTES_MAX: usize = 1 << 30;
/// Parsing or writing more than this would delay other requests of the thread.
const BLOCKING_BYTES: usize = 1 << 20;

const HEADER_READ_TIMEOUT: Duration = Duration::from_secs(30);

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const OPEN_METRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");

/// Serves `listener` until `stop` is true, then finishes the requests that run.
pub async fn serve(listener: TcpListener, gateway: Arc<Gateway>, stop: watch::Receiver<bool>) {
    // Here, so that its idle connections are closed with the port: tritonserver waits for them when it stops.
    let client = pass_through::client();
    accept(listener, stop, |stream, stop| connection(stream, gateway.clone(), client.clone(), stop)).await;
}

async fn connection(stream: TcpStream, gateway: Arc<Gateway>, client: Client, mut stop: watch::Receiver<bool>) {
    let service = service_fn(move |request| {
        let (gateway, client) = (gateway.clone(), client.clone());
        async move { Ok::<_, Infallible>(answer(&gateway, &client, request).await) }
    });
    let mut builder = http1::Builder::new();
    // A client that never ends its headers would hold a file descriptor for ever.
    builder.timer(TokioTimer::new()).header_read_timeout(HEADER_READ_TIMEOUT);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = stopped(&mut stop) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        log::debug!("HTTP connection: {error}");
    }
}

async fn answer(gateway: &Gateway, client: &Client, request: Request<Incoming>) -> Response<HttpBody> {
    let path = match Path::parse(request.uri().path()) {
        Ok(path) => path,
        Err(failure) => return error(&failure),
    };
    let (api, method, allow) = match &path {
        Path::Predict(_) => ("rest", "Predict", "POST"),
        Path::Metadata(_) => ("rest", "GetModelMetadata", "GET, HEAD"),
        Path::Status(_) => ("rest", "GetModelStatus", "GET, HEAD"),
        Path::Config => ("rest", "ConfigStatus", "GET, HEAD"),
        Path::ConfigReload => ("rest", "ConfigReload", "POST"),
        Path::Metrics => ("rest", "", "GET, HEAD"),
        // Triton decides which methods it allows.
        Path::Triton => ("kserve_rest", "", ""),
        Path::NoSuchMethod => return error(&Failure::new(Code::NotFound, "Requested REST resource not found")),
    };
    if !allow.is_empty() && !allow.split(", ").any(|allowed| request.method() == allowed) {
        let mut response = text(StatusCode::METHOD_NOT_ALLOWED, JSON, error_json("Unsupported method"));
        response.headers_mut().insert(ALLOW, HeaderValue::from_static(allow));
        return response;
    }
    if path == Path::Metrics {
        // This request is not counted, because then each look at the figures would change them.
        return text(StatusCode::OK, OPEN_METRICS, gateway.metrics.text());
    }
    let counted = gateway.metrics.request(Method { api, method });
    let result = match &path {
        Path::Predict(model) => predict(gateway, model, request.into_body()).await,
        Path::Metadata(model) => metadata(gateway, model).await,
        Path::Status(model) => status(gateway, model).await,
        Path::Config => config(gateway).await,
        Path::ConfigReload => reload(gateway).await,
        _ => pass_through::http(gateway, client, request).await,
    };
    let code = match &result {
        Ok(response) if response.status().is_success() => Code::Ok,
        // Triton's: HTTP has fewer statuses than gRPC has codes.
        Ok(response) => code_of(response.status()),
        Err(failure) => failure.code,
    };
    let model = match &path {
        Path::Predict(model) | Path::Metadata(model) | Path::Status(model) => &model.name,
        _ => "",
    };
    counted.finish(if gateway.models.is_known(model) { model } else { "" }, code);
    result.unwrap_or_else(|failure| error(&failure))
}

async fn predict(gateway: &Gateway, model: &Model, body: Incoming) -> Result<Response<HttpBody>, Failure> {
    let body = read(body).await?;
    let request = heavy(body.len(), || PredictRequest::parse(&body));
    let specials = request.as_ref().map_err(Failure::clone).and_then(PredictRequest::specials);
    let call = Call { name: &model.name, version: model.version, deadline: None, specials, filter: &[] };
    let prediction = predict::run(gateway, &call, |signature| {
        let request = request.as_ref().map_err(Failure::clone)?;
        heavy(body.len(), || request.tensors(signature))
    })
    .await?;
    let format = request?.format;
    let bytes = prediction.outputs.values().map(|tensor| tensor.content.len()).sum();
    Ok(ok(heavy(bytes, || json::body(prediction, format))?))
}

/// `GetModelMetadataResponse`, as protobuf writes it in JSON: 64-bit numbers are texts.
async fn metadata(gateway: &Gateway, model: &Model) -> Result<Response<HttpBody>, Failure> {
    let signature = gateway.ask_signature(&model.name, model.version).await?;
    Ok(pretty(&json!({
        "modelSpec": { "name": model.name, "signatureName": "", "version": signature.version.to_string() },
        "metadata": {
            "signature_def": {
                "@type": TYPE_URL,
                "signatureDef": {
                    SIGNATURE_NAME: {
                        "inputs": tensors(&signature.inputs),
                        "outputs": tensors(&signature.outputs),
                        "methodName": "",
                        "defaults": {},
                    },
                },
            },
        },
    })))
}

fn tensors(infos: &[TensorInfo]) -> Value {
    let tensor = |info: &TensorInfo| {
        let dimensions: Vec<_> =
            info.shape.iter().map(|size| json!({ "size": size.to_string(), "name": "" })).collect();
        json!({
            "dtype": info.data_type().as_str_name(),
            "tensorShape": { "dim": dimensions, "unknownRank": false },
            "name": info.name,
        })
    };
    infos.iter().map(|info| (info.name.clone(), tensor(info))).collect::<Map<_, _>>().into()
}

async fn status(gateway: &Gateway, model: &Model) -> Result<Response<HttpBody>, Failure> {
    Ok(pretty(&statuses(&gateway.statuses_of(&model.name, model.version).await?)))
}

async fn config(gateway: &Gateway) -> Result<Response<HttpBody>, Failure> {
    let models = gateway.statuses().await?.into_iter().map(|(name, versions)| (name, statuses(&versions)));
    Ok(pretty(&models.collect::<Map<_, _>>().into()))
}

fn statuses(versions: &[VersionStatus]) -> Value {
    let version = |status: &VersionStatus| {
        json!({
            "version": status.version.to_string(),
            "state": status.state.as_str_name(),
            "status": { "error_code": code_name(status.error_code), "error_message": status.error_message },
        })
    };
    json!({ "model_version_status": versions.iter().map(version).collect::<Vec<_>>() })
}

/// 201 if something was loaded or unloaded, else 200; with the states of all models, as in OVMS.
async fn reload(gateway: &Gateway) -> Result<Response<HttpBody>, Failure> {
    let Some(managed) = &gateway.managed else {
        let text = "the gateway runs in front of a tritonserver, which has the models: load them there, with \
                    POST /v2/repository/models/NAME/load for example";
        return Err(Failure::new(Code::Unimplemented, text));
    };
    let reloaded = managed.reload().await;
    // The known models are forgotten even after an error, because other models may have been loaded again.
    gateway.models.clear();
    let changed = reloaded.map_err(|failure| {
        let text = format!("Reloading config file failed. Check server logs for more info. {}", failure.message);
        Failure::new(failure.code, text)
    })?;
    let mut response = config(gateway).await?;
    if changed {
        *response.status_mut() = StatusCode::CREATED;
    }
    Ok(response)
}

fn pretty(value: &Value) -> Response<HttpBody> {
    ok(format!("{value:#}\n"))
}

async fn read(body: Incoming) -> Result<Bytes, Failure> {
    match Limited::new(body, BODY_BYTES_MAX).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => {
            let text = format!("the body has more than {BODY_BYTES_MAX} bytes");
            Err(Failure::new(Code::ResourceExhausted, text))
        }
        Err(error) => Err(Failure::invalid(format!("the body could not be read: {error}"))),
    }
}

/// Runs `work`. If it handles many bytes, other requests of the thread move to another one meanwhile.
fn heavy<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    if bytes > BLOCKING_BYTES { tokio::task::block_in_place(work) } else { work() }
}

fn ok(json: String) -> Response<HttpBody> {
    text(StatusCode::OK, JSON, json)
}

fn error(failure: &Failure) -> Response<HttpBody> {
    text(status_of(failure.code), JSON, error_json(&failure.message))
}

fn error_json(message: &str) -> String {
    json!({ "error": message }).to_string()
}

fn text(status: StatusCode, content_type: HeaderValue, text: String) -> Response<HttpBody> {
    let mut response = Response::new(Either::Left(Full::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

const fn status_of(code: Code) -> StatusCode {
    match code {
        Code::Ok => StatusCode::OK,
        Code::InvalidArgument | Code::OutOfRange => StatusCode::BAD_REQUEST,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::AlreadyExists | Code::Aborted => StatusCode::CONFLICT,
        Code::FailedPrecondition => StatusCode::PRECONDITION_FAILED,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        Code::ResourceExhausted => StatusCode::PAYLOAD_TOO_LARGE,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::Cancelled | Code::Unknown | Code::Internal | Code::DataLoss => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

fn code_of(status: StatusCode) -> Code {
    match status {
        StatusCode::NOT_FOUND => Code::NotFound,
        StatusCode::SERVICE_UNAVAILABLE => Code::Unavailable,
        StatusCode::NOT_IMPLEMENTED | StatusCode::METHOD_NOT_ALLOWED => Code::Unimplemented,
        status if status.is_client_error() => Code::InvalidArgument,
        _ => Code::Internal,
    }
}

/// A path of TensorFlow Serving's REST API, of the metrics, or of Triton.
#[derive(Debug, PartialEq, Eq)]
enum Path {
    Predict(Model),
    Metadata(Model),
    Status(Model),
    /// `:classify` and `:regress`, which OVMS hasn't.
    NoSuchMethod,
    Config,
    ConfigReload,
    Metrics,
    Triton,
}

#[derive(Debug, PartialEq, Eq)]
struct Model {
    name: String,
    version: Version,
}

impl Path {
    /// Reads a path that is still percent-encoded, without its query.
    fn parse(path: &str) -> Result<Self, Failure> {
        match path {
            "/v1/config" => Ok(Self::Config),
            "/v1/config/reload" => Ok(Self::ConfigReload),
            "/metrics" => Ok(Self::Metrics),
            "/v2" => Ok(Self::Triton),
            path if path.starts_with("/v2/") => Ok(Self::Triton),
            "/v1/models" => Ok(Self::Status(Model { name: String::new(), version: None })),
            path => match path.strip_prefix("/v1/models/") {
                Some(rest) => Self::of_model(rest),
                None => Err(invalid_url()),
            },
        }
    }

    fn of_model(rest: &str) -> Result<Self, Failure> {
        let (model, verb) = match rest.rsplit_once(':') {
            Some((model, verb)) => (model, Some(verb)),
            None => (rest, None),
        };
        let mut parts: Vec<&str> = model.split('/').collect();
        let is_metadata = verb.is_none() && parts.len() > 1 && parts.last() == Some(&"metadata");
        if is_metadata {
            parts.pop();
        }
        let (name, version) = match parts[..] {
            [name] => (name, None),
            [name, "versions", version] => (name, self::version(version)?),
            // OVMS reads a label and takes the default version.
            [name, "labels", label] if !label.is_empty() => (name, None),
            _ => return Err(invalid_url()),
        };
        if name.is_empty() || name.contains(':') {
            return Err(invalid_url());
        }
        let model = Model { name: percent_decode_str(name).decode_utf8_lossy().into_owned(), version };
        match verb {
            Some("predict") => Ok(Self::Predict(model)),
            Some("classify" | "regress") => Ok(Self::NoSuchMethod),
            Some(_) => Err(invalid_url()),
            None if is_metadata => Ok(Self::Metadata(model)),
            None => Ok(Self::Status(model)),
        }
    }
}

/// 0 is the default version, as in OVMS.
fn version(text: &str) -> Result<Version, Failure> {
    if text.is_empty() || !text.bytes().all(|digit| digit.is_ascii_digit()) {
        return Err(invalid_url());
    }
    match text.parse() {
        Ok(0) => Ok(None),
        Ok(version) => Ok(Some(version)),
        Err(_) => Err(Failure::new(Code::NotFound, VERSION_MISSING)),
    }
}

fn invalid_url() -> Failure {
    Failure::invalid("Invalid request URL")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn model(name: &str, version: Version) -> Model {
        Model { name: name.to_owned(), version }
    }

    #[test]
    fn each_path_names_its_model_and_version() {
        let parse = |path| Path::parse(path).unwrap();
        assert_eq!(parse("/v1/models/m:predict"), Path::Predict(model("m", None)));
        assert_eq!(parse("/v1/models/m/versions/3:predict"), Path::Predict(model("m", Some(3))));
        assert_eq!(parse("/v1/models/m/versions/0:predict"), Path::Predict(model("m", None)));
        assert_eq!(parse("/v1/models/m/labels/stable:predict"), Path::Predict(model("m", None)));
        assert_eq!(parse("/v1/models/a%20b%2fc%3a"), Path::Status(model("a b/c:", None)));
        assert_eq!(parse("/v1/models/m/versions/3"), Path::Status(model("m", Some(3))));
        assert_eq!(parse("/v1/models/m/metadata"), Path::Metadata(model("m", None)));
        assert_eq!(parse("/v1/models/m/versions/3/metadata"), Path::Metadata(model("m", Some(3))));
        assert_eq!(parse("/v1/models/metadata"), Path::Status(model("metadata", None)));
        assert_eq!(parse("/v1/models/m:classify"), Path::NoSuchMethod);
        assert_eq!(parse("/v2/models/m/infer"), Path::Triton);
        assert_eq!(parse("/v2"), Path::Triton);
    }

    #[test]
    fn other_paths_are_invalid() {
        for path in [
            "/",
            "/v1",
            "/v1/models/",
            "/v1/models/m/x",
            "/v1/models/m:predict/x",
            "/v1/models/:predict",
            "/v1/models/m:explain",
            "/v1/models/m/versions/:predict",
            "/v1/models/m/versions/-1",
            "/v1/models/m/metadata:predict",
            "/v22",
            "/v3/models",
        ] {
            assert_eq!(Path::parse(path), Err(invalid_url()), "{path}");
        }
        let too_large = Path::parse("/v1/models/m/versions/99999999999999999999").unwrap_err();
        assert_eq!(too_large.code, Code::NotFound);
    }

    proptest! {
        #[test]
        fn no_path_panics(path in "/v1/models/[a-z0-9:/%.]{0,30}") {
            let _ = Path::parse(&path);
        }
    }
}
