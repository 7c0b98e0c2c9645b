//! Triton's own HTTP API, passed on as it is.

use bytes::Bytes;
use http::header::{CONNECTION, HOST, HeaderName, TE, TRAILER, TRANSFER_ENCODING, UPGRADE};
use http::uri::{Authority, Scheme, Uri};
use http::{HeaderMap, Request, Response, Version};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::{self, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use percent_encoding::percent_decode_str;
use tonic::Code;

use crate::gateway::Gateway;
use crate::triton::{CONNECT_TIMEOUT, Failure};

/// A text of the gateway's own, or what Triton sends.
pub type Body = Either<Full<Bytes>, Incoming>;

pub type Client = legacy::Client<HttpConnector, Incoming>;

/// A client without connections yet. Call it inside a tokio runtime.
pub fn client() -> Client {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    legacy::Client::builder(TokioExecutor::new()).build(connector)
}

/// Passes a request on to Triton, and the answer back as it comes.
pub async fn answer(
    gateway: &Gateway,
    client: &Client,
    mut request: Request<Incoming>,
) -> Result<Response<Body>, Failure> {
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
        let reason = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
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
    // These headers are about one connection. Triton would take the client's for headers of the gateway's connection to it.
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
