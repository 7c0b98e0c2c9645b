//! Times triton-stateful in process, through Triton's C API, side by side with ONNX Runtime alone and with a backend
//! that does nothing. Prints a JSON object a line; `scripts/bench` calls it and makes tables of that.

mod clients;
mod measure;
mod model;
mod rounds;
mod server;

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand};
use clients::{Clients, Throughput};
use measure::{Cost, median, pin};
use model::{Raw, Spec};
use ort::environment::Environment;
use rounds::{Growing, Live, Step};
use serde_json::{Value, json};
use server::Server;

/// Times a model in a tritonserver in this process.
#[derive(Parser)]
struct Cli {
    /// libtritonserver.so.
    #[arg(long)]
    server_library: PathBuf,
    /// libonnxruntime.so, the one that the backend uses.
    #[arg(long)]
    onnxruntime: PathBuf,
    /// The model repository.
    #[arg(long)]
    repository: PathBuf,
    /// The backends' folder.
    #[arg(long)]
    backends: PathBuf,
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Rounds of one batch, pinned to one CPU.
    Step(Step),
    /// As many requests as come back, on all CPUs.
    Throughput(Throughput),
    /// Clients of a model: as many requests as come back, or so many a second.
    Clients(Clients),
    /// Sequences whose state grows with each step.
    Growing(Growing),
    /// What many live sequences cost.
    Live(Live),
    /// The time to load a model.
    Load(Load),
    /// ONNX Runtime alone, without a server.
    Raw(RawOnly),
}

#[derive(Args)]
struct RawOnly {
    /// What the model takes and gives (JSON).
    #[arg(long)]
    spec: PathBuf,
    /// Rows of the batch.
    #[arg(long)]
    batch: usize,
    /// How long.
    #[arg(long)]
    seconds: f64,
}

#[derive(Args)]
struct Load {
    /// The names of a model: each is loaded once, because [no model is unloaded here](Server::load).
    #[arg(long, value_delimiter = ',')]
    models: Vec<String>,
}

fn main() {
    let cli = Cli::parse();
    let on_one_cpu = match &cli.what {
        What::Step(_) | What::Growing(_) | What::Live(_) => true,
        What::Throughput(throughput) => throughput.one_cpu,
        What::Clients(_) | What::Load(_) | What::Raw(_) => false,
    };
    if on_one_cpu {
        pin();
    }
    // The floor and the backend use one library, so that they share its code in the caches, too.
    let environment = || {
        let loaded = ort::init_from(&cli.onnxruntime).unwrap_or_else(|error| panic!("{error}"));
        loaded.with_telemetry(false).build().unwrap_or_else(|error| panic!("{error}"))
    };
    let server = || Server::start(&cli.server_library, &cli.repository, &cli.backends);
    let result = match &cli.what {
        What::Raw(raw) => return println!("{}", raw.run(&environment())),
        What::Step(step) => step.run(server(), &environment()),
        What::Throughput(throughput) => throughput.run(server(), &environment()),
        What::Growing(growing) => growing.run(server(), &environment()),
        What::Clients(clients) => clients.run(server()),
        What::Live(live) => live.run(server()),
        What::Load(load) => load.run(server()),
    };
    println!("{result}");
    // Not stopped: what was measured is printed, and sequences that are live would be waited for. Exit handlers would
    // take what the server's threads still use.
    let _ = std::io::stdout().flush();
    // SAFETY: ends the process, as it is.
    unsafe { libc::_exit(0) }
}

impl RawOnly {
    fn run(&self, environment: &Environment) -> Value {
        let spec = Spec::read(&self.spec);
        let mut raw = Raw::new(environment, &spec, self.batch, 1);
        let (until, mut steps) = (Instant::now() + Duration::from_secs_f64(self.seconds), 0);
        let cost = Cost::of(1, || {
            while Instant::now() < until {
                raw.step();
                steps += 1;
            }
        });
        let rows = f64::from(steps) * self.batch as f64;
        json!({ "batch": self.batch, "rows_per_s": rows * 1e6 / cost.wall_us, "cpu_us_per_row": cost.cpu_us / rows })
    }
}

impl Load {
    fn run(&self, server: &'static Server) -> Value {
        let times = self.models.iter().map(|model| Cost::of(1, || server.load(model)).wall_us / 1e3);
        json!({ "load_ms": median(times) })
    }
}
