//! Puts the same load on the gateway and on Triton directly, or opens many sequences. `scripts/bench ovms` runs it.
//!
//! Each stream is a client with a connection of its own, which sends the requests of one sequence after the other, each
//! when the one before has been answered. The two ways take turns, so that a machine that changes its speed changes
//! both.

use std::error::Error;
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Parser;
use futures_util::future::try_join_all;
use tonic::transport::{Channel, Endpoint};

use proto::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use proto::inference::infer_parameter::ParameterChoice;
use proto::inference::model_infer_request::InferInputTensor;
use proto::inference::{InferParameter, ModelInferRequest};
use proto::tensorflow::serving::prediction_service_client::PredictionServiceClient;
use proto::tensorflow::serving::{ModelSpec, PredictRequest};
use proto::tensorflow::{DataType, TensorProto, TensorShapeProto, tensor_shape_proto::Dim};

#[path = "../src/proto.rs"]
mod proto;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Requests of a sequence.
const LENGTH: u64 = 100;
const WARM_UP: Duration = Duration::from_millis(300);
/// Clients that open sequences at the same time.
const OPENERS: u64 = 16;

#[derive(Parser)]
#[command(rename_all = "snake_case")]
struct Options {
    /// gRPC address of the gateway.
    #[arg(long)]
    gateway: String,
    /// gRPC address of tritonserver.
    #[arg(long)]
    triton: String,
    /// A model with one input of FP32 and shape [1, WIDTH].
    #[arg(long)]
    model: String,
    #[arg(long, default_value = "INPUT")]
    input: String,
    #[arg(long, default_value_t = 1)]
    width: usize,
    /// Numbers of clients.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16])]
    streams: Vec<u64>,
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// How often each way is measured.
    #[arg(long, default_value_t = 3)]
    blocks: u32,
    /// Instead: starts so many sequences through the gateway, and leaves them open.
    #[arg(long)]
    open: Option<u64>,
}

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Direct,
    Gateway,
}

struct Client<'a> {
    channel: Channel,
    way: Way,
    options: &'a Options,
}

#[derive(Clone, Copy)]
struct Step {
    id: u64,
    start: bool,
    end: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let options = Options::parse();
    if let Some(sequences) = options.open {
        return open(&options, sequences).await;
    }
    let mut first_id = 1;
    for &streams in &options.streams {
        for block in 0..options.blocks {
            for way in [Way::Direct, Way::Gateway] {
                let mut times = measure(&options, way, streams, first_id).await?;
                first_id += streams * 1_000_000;
                times.sort_unstable();
                let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
                let row = serde_json::json!({
                    "way": if way == Way::Direct { "direct" } else { "gateway" },
                    "streams": streams,
                    "block": block,
                    "requests_per_s": times.len() as f64 / options.seconds,
                    "p50_us": at(0.5),
                    "p99_us": at(0.99),
                });
                println!("{row}");
            }
        }
    }
    Ok(())
}

/// The time of each request that was answered in the window.
async fn measure(options: &Options, way: Way, streams: u64, first_id: u64) -> Result<Vec<Duration>> {
    let begin = Instant::now() + WARM_UP;
    let end = begin + Duration::from_secs_f64(options.seconds);
    let clients = (0..streams).map(|at| async move {
        let client = Client::connect(options, way).await?;
        let mut times = Vec::new();
        for id in first_id + at * 1_000_000.. {
            for i in 0..LENGTH {
                let sent = Instant::now();
                client.ask(Step { id, start: i == 0, end: i == LENGTH - 1 }).await?;
                let answered = Instant::now();
                if answered >= begin && answered < end {
                    times.push(answered - sent);
                }
            }
            // The last sequence is finished, so that none is left.
            if Instant::now() >= end {
                break;
            }
        }
        Result::Ok(times)
    });
    let times = try_join_all(clients).await?.concat();
    if times.is_empty() { Err("no request was answered in the window".into()) } else { Ok(times) }
}

async fn open(options: &Options, sequences: u64) -> Result<()> {
    let clients = (0..OPENERS).map(|at| async move {
        let client = Client::connect(options, Way::Gateway).await?;
        for id in (1..=sequences).filter(|id| id % OPENERS == at) {
            client.ask(Step { id, start: true, end: false }).await?;
        }
        Result::Ok(())
    });
    try_join_all(clients).await?;
    Ok(())
}

impl<'a> Client<'a> {
    async fn connect(options: &'a Options, way: Way) -> Result<Self> {
        let address = if way == Way::Direct { &options.triton } else { &options.gateway };
        let channel = Endpoint::from_shared(format!("http://{address}"))?.tcp_nodelay(true).connect().await?;
        Ok(Self { channel, way, options })
    }

    async fn ask(&self, step: Step) -> Result<()> {
        let channel = self.channel.clone();
        match self.way {
            Way::Direct => GrpcInferenceServiceClient::new(channel).model_infer(self.infer(step)).await.map(drop)?,
            Way::Gateway => PredictionServiceClient::new(channel).predict(self.predict(step)).await.map(drop)?,
        }
        Ok(())
    }

    fn infer(&self, step: Step) -> ModelInferRequest {
        let mut request = ModelInferRequest { model_name: self.options.model.clone(), ..ModelInferRequest::default() };
        let mut parameter = |name: &str, choice| {
            request.parameters.insert(name.to_owned(), InferParameter { parameter_choice: Some(choice) });
        };
        parameter("sequence_id", ParameterChoice::Int64Param(step.id.cast_signed()));
        if step.start {
            parameter("sequence_start", ParameterChoice::BoolParam(true));
        }
        if step.end {
            parameter("sequence_end", ParameterChoice::BoolParam(true));
        }
        let shape = vec![1, self.options.width as i64];
        request.inputs.push(InferInputTensor { name: self.options.input.clone(), datatype: "FP32".to_owned(), shape });
        request.raw_input_contents.push(self.content());
        request
    }

    fn predict(&self, step: Step) -> PredictRequest {
        let spec = ModelSpec { name: self.options.model.clone(), ..ModelSpec::default() };
        let mut request = PredictRequest { model_spec: Some(spec), ..PredictRequest::default() };
        let mut add = |name: &str, tensor| request.inputs.insert(name.to_owned(), tensor);
        let data = tensor(DataType::DtFloat, &[1, self.options.width as i64]);
        add(&self.options.input, TensorProto { tensor_content: self.content(), ..data });
        add("sequence_id", TensorProto { uint64_val: vec![step.id], ..tensor(DataType::DtUint64, &[1]) });
        if step.start || step.end {
            let control = if step.start { 1 } else { 2 };
            let tensor = TensorProto { uint32_val: vec![control], ..tensor(DataType::DtUint32, &[1]) };
            add("sequence_control_input", tensor);
        }
        request
    }

    fn content(&self) -> Bytes {
        Bytes::from(vec![0; 4 * self.options.width])
    }
}

fn tensor(data_type: DataType, shape: &[i64]) -> TensorProto {
    let dim = shape.iter().map(|size| Dim { size: *size, ..Dim::default() }).collect();
    let tensor_shape = Some(TensorShapeProto { dim, ..TensorShapeProto::default() });
    TensorProto { dtype: data_type.into(), tensor_shape, ..TensorProto::default() }
}
