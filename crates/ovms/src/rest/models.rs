//! JSON about the models: their signatures, their states, and the reload of the configuration.

use std::collections::BTreeMap;

use http::StatusCode;
use serde::Serialize;
use serde_json::{Map, Value, json};
use tonic::Code;

use super::path::Model;
use crate::gateway::{Gateway, VersionStatus};
use crate::metrics::code_name;
use crate::models::{SIGNATURE_NAME, TYPE_URL, TensorInfo};
use crate::triton::Failure;

/// `GetModelMetadataResponse`, as protobuf writes it in JSON: 64-bit numbers are texts.
pub async fn metadata(gateway: &Gateway, model: &Model) -> Result<String, Failure> {
    let signature = gateway.ask_signature(&model.name, model.version).await?;
    let body = json!({
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
    });
    Ok(pretty(&body))
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

pub async fn status(gateway: &Gateway, model: &Model) -> Result<String, Failure> {
    Ok(pretty(&statuses(&gateway.statuses_of(&model.name, model.version).await?)))
}

pub async fn config(gateway: &Gateway) -> Result<String, Failure> {
    let models = gateway.statuses().await?;
    let models: BTreeMap<_, _> = models.into_iter().map(|(name, versions)| (name, statuses(&versions))).collect();
    Ok(pretty(&models))
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
pub async fn reload(gateway: &Gateway) -> Result<(StatusCode, String), Failure> {
    let Some(managed) = &gateway.managed else {
        let text = "the gateway runs in front of a tritonserver, which has the models: load them there, with \
                    POST /v2/repository/models/NAME/load for example";
        return Err(Failure::new(Code::Unimplemented, text));
    };
    let reloaded = managed.reload().await;
    // Also after an error, because other models may have been loaded again.
    gateway.models.clear();
    let changed = reloaded.map_err(|failure| {
        let text = format!("Reloading config file failed. Check server logs for more info. {}", failure.message);
        Failure::new(failure.code, text)
    })?;
    Ok((if changed { StatusCode::CREATED } else { StatusCode::OK }, config(gateway).await?))
}

fn pretty(value: &impl Serialize) -> String {
    // Only keys that are no texts could fail.
    let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
    text.push('\n');
    text
}
