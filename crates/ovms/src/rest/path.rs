//! The paths of TensorFlow Serving's REST API.

use percent_encoding::percent_decode_str;
use tonic::Code;

use crate::models::Version;
use crate::triton::Failure;

#[derive(Debug, PartialEq, Eq)]
pub enum Path {
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
pub struct Model {
    pub name: String,
    pub version: Version,
}

impl Path {
    /// Reads a path that is still percent-encoded, without its query.
    pub fn parse(path: &str) -> Result<Self, Failure> {
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
        Err(_) => Err(Failure::new(Code::NotFound, "Model with requested version is not found")),
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
