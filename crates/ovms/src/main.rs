//! Serves clients of OpenVINO Model Server by the stateful backend of a tritonserver.

mod failure;
mod gateway;
mod grpc;
mod managed;
mod metrics;
mod models;
mod rest;
mod triton;

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use http::uri::Authority;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::gateway::Gateway;
use crate::metrics::Metrics;
use crate::models::Models;
use crate::triton::Triton;

#[derive(Parser)]
struct Options {
    /// gRPC address of a tritonserver that runs.
    #[arg(long)]
    triton: Authority,
    /// Its HTTP address; else port 8000 of the same host.
    #[arg(long = "triton_http")]
    triton_http: Option<Authority>,
    #[arg(long, default_value_t = 9178)]
    port: u16,
    #[arg(long = "rest_port", default_value_t = 0)]
    rest_port: u16,
}

#[tokio::main]
async fn main() -> ExitCode {
    env_logger::init();
    match run(Options::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("stateful-ovms: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: Options) -> Result<(), Box<dyn std::error::Error>> {
    let grpc = TcpListener::bind(("0.0.0.0", options.port)).await?;
    let rest = TcpListener::bind(("0.0.0.0", options.rest_port)).await?;
    let http = match options.triton_http {
        Some(http) => http,
        None => format!("{}:8000", options.triton.host()).parse()?,
    };
    let triton = Triton::new(&options.triton, Some(http))?;
    let gateway = Arc::new(Gateway { triton, models: Models::default(), metrics: Metrics::default(), managed: None });
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(async move {
        let _ = tokio::signal::ctrl_c().await;
        let _ = stop.send(true);
    });
    tokio::try_join!(grpc::serve(grpc, gateway.clone(), stopped.clone()), rest::serve(rest, gateway, stopped))?;
    Ok(())
}
