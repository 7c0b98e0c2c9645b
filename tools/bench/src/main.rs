//! Times triton-stateful in process, through Triton's C API, side by side with ONNX Runtime alone and with a backend that
//! does nothing. Prints a JSON object a line; `scripts/bench` calls it and makes tables of that.

mod measure;
mod raw;
mod server;
mod spec;

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand, ValueEnum};
use measure::{Cost, Spread, median, pin, pinned, quantile, resident_bytes, wake_on_time};
use ort::environment::Environment;
use raw::Raw;
use serde_json::{Value, json};
use server::{Client, END, Inbox, START, Server, Wants};
use spec::Spec;

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

/// A model in the repository.
#[derive(Args)]
struct Model {
    /// Its name.
    #[arg(long)]
    model: String,
    /// What it takes and gives (JSON).
    #[arg(long)]
    spec: PathBuf,
}

#[derive(Args)]
struct Step {
    #[command(flatten)]
    model: Model,
    /// The same model on the backend that does nothing.
    #[arg(long)]
    trivial: String,
    /// How the sequences of a batch change from round to round.
    #[arg(long)]
    composition: Composition,
    /// Rows of the batch.
    #[arg(long)]
    batch: usize,
    /// Repetitions, each of all that is compared.
    #[arg(long, default_value_t = 15)]
    blocks: usize,
    /// Time for each of them.
    #[arg(long, default_value_t = 0.1)]
    seconds: f64,
}

#[derive(Args)]
struct Throughput {
    #[command(flatten)]
    model: Model,
    /// The same model on the backend that does nothing.
    #[arg(long)]
    trivial: String,
    /// Sequences, each of which sends its next request when it has its answer.
    #[arg(long)]
    sequences: usize,
    /// Repetitions.
    #[arg(long, default_value_t = 5)]
    blocks: usize,
    /// Time for each of them.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// All on one CPU: without the wakes between CPUs, which cost more than a small request.
    #[arg(long)]
    one_cpu: bool,
}

#[derive(Args)]
struct Clients {
    #[command(flatten)]
    model: Model,
    /// Sequences.
    #[arg(long)]
    sequences: usize,
    /// Requests a second of all sequences, sent when they are due. Without it, each sequence sends its next request
    /// when it has its answer.
    #[arg(long)]
    rate: Option<f64>,
    /// How long.
    #[arg(long)]
    seconds: f64,
}

#[derive(Args)]
struct Growing {
    #[command(flatten)]
    model: Model,
    /// The same model on the backend that does nothing.
    #[arg(long)]
    trivial: String,
    /// Steps of each sequence.
    #[arg(long, default_value_t = 2000)]
    steps: usize,
    /// Sequences at once.
    #[arg(long)]
    batch: usize,
    /// Repetitions.
    #[arg(long, default_value_t = 5)]
    blocks: usize,
}

#[derive(Args)]
struct Live {
    #[command(flatten)]
    model: Model,
    /// Numbers of live sequences, growing.
    #[arg(long, value_delimiter = ',')]
    sequences: Vec<u64>,
    /// Rows of the batches that are timed.
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Rounds that are timed.
    #[arg(long, default_value_t = 2000)]
    rounds: usize,
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

impl Model {
    fn spec(&self) -> Spec {
        Spec::read(&self.spec).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// How the sequences of a batch change from round to round.
#[derive(Clone, Copy, ValueEnum)]
enum Composition {
    /// The same ones in another order.
    Same,
    /// Any of twice as many.
    Random,
    /// Four sets in turn.
    Alternate,
}

impl Composition {
    const fn sets(self) -> usize {
        match self {
            Self::Same => 1,
            Self::Random => 2,
            Self::Alternate => 4,
        }
    }

    /// The sequences of round number `round`, of those given.
    fn pick(self, sequences: &mut [u64], batch: usize, round: usize) -> &mut [u64] {
        let from = match self {
            Self::Same => 0,
            Self::Random => {
                fastrand::shuffle(sequences);
                0
            }
            Self::Alternate => round % 4 * batch,
        };
        let set = &mut sequences[from..from + batch];
        fastrand::shuffle(set);
        set
    }
}

impl Step {
    fn run(&self, server: &'static Server, environment: &Environment) -> Value {
        let spec = self.model.spec();
        server.load(&self.trivial);
        let (trivial, inbox) = (Client::new(server, &self.trivial, &spec), Inbox::new(Wants::End));
        let sets = if matches!(self.composition, Composition::Alternate) { self.composition.sets() } else { 1 };
        let mut raw = Raw::new(environment, &spec, self.batch, sets);
        let raw_rounds = rounds_in(self.seconds, || raw.step());
        server.load(&self.model.model);
        let ours = Client::new(server, &self.model.model, &spec);
        let mut sequences: Vec<u64> = (1..=(self.batch * self.composition.sets()) as u64).collect();
        for client in [&ours, &trivial] {
            sequences.chunks(self.batch).for_each(|set| client.round(&inbox, set, START));
        }
        let mut round = 0;
        let mut our_round = |client: &Client| {
            client.round(&inbox, self.composition.pick(&mut sequences, self.batch, round), 0);
            round += 1;
        };
        let rounds = rounds_in(self.seconds, || our_round(&ours)).max(8);
        let copied = |server: &Server| server.metric(COPIED, &self.model.model);
        let before = (copied(server), batches(&server.statistics(&self.model.model)));
        let trivial_before = batches(&server.statistics(&self.trivial));
        let blocks: Vec<[Cost; 4]> = (0..self.blocks)
            .map(|_| {
                [
                    Cost::of(rounds, || our_round(&ours)),
                    Cost::of(rounds, || {
                        our_round(&trivial);
                        raw.step();
                    }),
                    Cost::of(rounds, || our_round(&trivial)),
                    Cost::of(raw_rounds, || raw.step()),
                ]
            })
            .collect();
        let (copied, after) = (copied(server), batches(&server.statistics(&self.model.model)));
        let ran = (self.blocks * rounds) as f64;
        before.1.must_be_exactly(&after, ran, self.batch, &self.model.model);
        let trivial_after = batches(&server.statistics(&self.trivial));
        trivial_before.must_be_exactly(&trivial_after, 2.0 * ran, self.batch, &self.trivial);
        let of = |cost: fn(&[Cost; 4]) -> f64| median(blocks.iter().map(cost));
        let stage = |name: &str| (after.stage_ns(name) - before.1.stage_ns(name)) / 1e3 / ran;
        let (gather, infer, respond) = (stage("compute_input"), stage("compute_infer"), stage("compute_output"));
        // Everything but Triton, over a run alone, and over one whose caches Triton has used before it.
        let whole = |[ours, _, trivial, _]: &[Cost; 4]| ours.wall_us - trivial.wall_us;
        let over_raw = Spread::of(blocks.iter().map(|block| whole(block) / block[3].wall_us));
        let cpu = |[ours, _, trivial, raw]: &[Cost; 4]| (ours.cpu_us - trivial.cpu_us) / raw.cpu_us;
        let cpu_over_raw = Spread::of(blocks.iter().map(cpu));
        let floor = |[_, both, trivial, _]: &[Cost; 4]| both.wall_us - trivial.wall_us;
        let over_floor = Spread::of(blocks.iter().map(|block| whole(block) / floor(block)));
        let mut found = json!({
            "ours_us": of(|[ours, ..]| ours.wall_us),
            "trivial_and_raw_us": of(|[_, both, ..]| both.wall_us),
            "trivial_us": of(|[.., trivial, _]| trivial.wall_us),
            "raw_us": of(|[.., raw]| raw.wall_us),
            "our_cpu_us_per_request": of(|[ours, both, ..]| ours.cpu_us - both.cpu_us) / self.batch as f64,
            "our_cpu_us_per_request_over_raw":
                of(|[ours, _, trivial, raw]| ours.cpu_us - trivial.cpu_us - raw.cpu_us) / self.batch as f64,
            "ours_cpu_us": of(|[ours, ..]| ours.cpu_us),
            "trivial_cpu_us": of(|[.., trivial, _]| trivial.cpu_us),
            "raw_cpu_us": of(|[.., raw]| raw.cpu_us),
            // Well below 1: others ran on this CPU, and no ratio of times means much but that of CPU times.
            "own_share_of_cpu": of(|[.., raw]| raw.cpu_us / raw.wall_us),
            "gather_us": gather,
            "infer_us": infer,
            "respond_us": respond,
            "copied_bytes_per_round": copied.zip(before.0).map(|(after, before)| (after - before) / ran),
        });
        over_raw.put(&mut found, "whole_over_raw");
        over_floor.put(&mut found, "whole_over_floor");
        cpu_over_raw.put(&mut found, "whole_cpu_over_raw");
        found
    }
}

/// How many repetitions fit in that many seconds.
fn rounds_in(seconds: f64, mut work: impl FnMut()) -> usize {
    (0..8).for_each(|_| work());
    let us = Cost::of(8, &mut work).wall_us;
    ((seconds * 1e6 / us) as usize).clamp(2, 100_000)
}

/// The backend's metric of the bytes that its states were copied.
const COPIED: &str = "stateful_state_bytes_copied_total";

/// What the server counted of a model's runs.
struct Batches {
    runs: f64,
    rows: f64,
    batch_stats: Value,
}

fn batches(statistics: &Value) -> Batches {
    let model = &statistics["model_stats"][0];
    let number = |name: &str| model[name].as_f64().unwrap_or_default();
    let (runs, rows) = (number("execution_count"), number("inference_count"));
    Batches { runs, rows, batch_stats: model["batch_stats"].clone() }
}

impl Batches {
    /// Ends the program unless each of `rounds` since then was one batch of `batch` rows: anything else would be timed
    /// as what it is not.
    fn must_be_exactly(&self, after: &Self, rounds: f64, batch: usize, model: &str) {
        let (runs, rows) = (after.runs - self.runs, after.rows - self.rows);
        if runs != rounds || rows != rounds * batch as f64 {
            eprintln!("{model}: {rounds} rounds of {batch} rows were {runs} runs of {rows} rows in all");
            std::process::exit(1);
        }
    }

    fn stage_ns(&self, stage: &str) -> f64 {
        let sizes = self.batch_stats.as_array().into_iter().flatten();
        sizes.map(|size| size[stage]["ns"].as_f64().unwrap_or_default()).sum()
    }
}

impl Throughput {
    fn run(&self, server: &'static Server, environment: &Environment) -> Value {
        let spec = self.model.spec();
        server.load(&self.model.model);
        server.load(&self.trivial);
        let clients = [&self.model.model, &self.trivial].map(|model| Client::new(server, model, &spec));
        let mut raw = Raw::new(environment, &spec, self.sequences, 1);
        let mut blocks = Vec::new();
        for _ in 0..self.blocks {
            let ours = self.closed_loop(server, &clients[0], &self.model.model);
            let trivial = self.closed_loop(server, &clients[1], &self.trivial);
            let raw_us = pinned(|| {
                let rounds = rounds_in(self.seconds / 2.0, || raw.step());
                Cost::of(rounds, || raw.step()).wall_us
            });
            blocks.push((ours, trivial, raw_us));
        }
        let of = |what: &dyn Fn(&(Served, Served, f64)) -> f64| median(blocks.iter().map(what));
        let rows = self.sequences as f64;
        let to_raw = blocks.iter().map(|(ours, _, raw_us)| ours.per_s / (rows * 1e6 / raw_us));
        let to_both =
            blocks.iter().map(|(ours, trivial, raw_us)| ours.per_s * (raw_us / rows + 1e6 / trivial.per_s) / 1e6);
        let mut found = json!({
            "model": self.model.model,
            "sequences": self.sequences,
            "one_cpu": self.one_cpu,
            "requests_per_s": of(&|(ours, ..)| ours.per_s),
            "batch": of(&|(ours, ..)| ours.batch),
            "cpu_us_per_request": of(&|(ours, ..)| ours.cpu_us),
            "trivial_per_s": of(&|(_, trivial, _)| trivial.per_s),
            "raw_rows_per_s": of(&|(.., raw_us)| rows * 1e6 / raw_us),
        });
        Spread::of(to_raw).put(&mut found, "ratio_to_raw");
        Spread::of(to_both).put(&mut found, "ratio_to_raw_and_trivial");
        found
    }

    fn closed_loop(&self, server: &Server, client: &Client, model: &str) -> Served {
        Served::to(server, model, || closed_loop(client, self.sequences, self.seconds))
    }
}

impl Clients {
    fn run(&self, server: &'static Server) -> Value {
        server.load(&self.model.model);
        let client = Client::new(server, &self.model.model, &self.model.spec());
        let served = Served::to(server, &self.model.model, || match self.rate {
            Some(rate) => open_loop(&client, self.sequences, rate, self.seconds),
            None => closed_loop(&client, self.sequences, self.seconds),
        });
        let latency = |part| quantile(served.latencies_us.iter().copied(), part);
        json!({
            "requests_per_s": served.per_s,
            "batch": served.batch,
            "cpu_us_per_request": served.cpu_us,
            "switches_per_request": served.switches,
            "p50_us": latency(0.5),
            "p90_us": latency(0.9),
            "p99_us": latency(0.99),
        })
    }
}

/// What clients got.
struct Served {
    per_s: f64,
    batch: f64,
    cpu_us: f64,
    switches: f64,
    latencies_us: Vec<f64>,
}

impl Served {
    /// What `clients` got from a model, and in which batches. They return the latency of each answer.
    fn to(server: &Server, model: &str, clients: impl FnOnce() -> Timed) -> Self {
        let before = batches(&server.statistics(model));
        let Timed { cost, latencies_us } = clients();
        let after = batches(&server.statistics(model));
        let answers = latencies_us.len() as f64;
        Self {
            per_s: answers * 1e6 / cost.wall_us,
            batch: (after.rows - before.rows) / (after.runs - before.runs),
            cpu_us: cost.cpu_us / answers,
            switches: cost.switches / answers,
            latencies_us,
        }
    }
}

/// What a loop of clients cost, and the latency of each answer.
struct Timed {
    cost: Cost,
    latencies_us: Vec<f64>,
}

/// Each sequence sends its next request when it has its answer.
fn closed_loop(client: &Client, sequences: usize, seconds: f64) -> Timed {
    let (inbox, mut ready) = (Inbox::new(Wants::EachAnswer), Vec::new());
    let sequences: Vec<u64> = (1..=sequences as u64).collect();
    client.round(&inbox, &sequences, START);
    let mut serve_for = |seconds: f64| {
        let (until, mut latencies_us) = (Instant::now() + Duration::from_secs_f64(seconds), Vec::new());
        sequences.iter().for_each(|&sequence| client.send(&inbox, sequence, 0));
        while Instant::now() < until {
            inbox.wait_for_some(&mut ready);
            latencies_us.extend(ready.iter().map(|answer| answer.latency_us));
            ready.drain(..).for_each(|answer| client.send(&inbox, answer.sequence, 0));
        }
        latencies_us.extend(inbox.wait_for_all().iter().map(|answer| answer.latency_us));
        latencies_us
    };
    serve_for(seconds * WARM_UP);
    let mut latencies_us = Vec::new();
    let cost = Cost::of(1, || latencies_us = serve_for(seconds));
    client.round(&inbox, &sequences, END);
    Timed { cost, latencies_us }
}

/// The sequences send in turn, each request when it is due, whether or not the one before it has its answer, as streams
/// of sensors do. A latency counts from the time at which the request was due, so waiting in a queue is part of it.
fn open_loop(client: &Client, sequences: usize, rate: f64, seconds: f64) -> Timed {
    let inbox = Inbox::new(Wants::Answers);
    let sequences: Vec<u64> = (1..=sequences as u64).collect();
    client.round(&inbox, &sequences, START);
    let serve_for = |seconds: f64| {
        let begin = Instant::now();
        for number in 0..(rate * seconds) as usize {
            let due = begin + Duration::from_secs_f64(number as f64 / rate);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            client.send_due(&inbox, sequences[number % sequences.len()], 0, due);
        }
        inbox.wait_for_all().iter().map(|answer| answer.latency_us).collect::<Vec<_>>()
    };
    wake_on_time();
    serve_for(seconds * WARM_UP);
    let mut latencies_us = Vec::new();
    let cost = Cost::of(1, || latencies_us = serve_for(seconds));
    client.round(&inbox, &sequences, END);
    Timed { cost, latencies_us }
}

/// The part of a loop's time that it runs before it is timed.
const WARM_UP: f64 = 0.2;

impl Growing {
    fn run(&self, server: &'static Server, environment: &Environment) -> Value {
        let spec = self.model.spec();
        server.load(&self.model.model);
        server.load(&self.trivial);
        let [client, trivial] = [&self.model.model, &self.trivial].map(|model| Client::new(server, model, &spec));
        let before = server.metric(COPIED, &self.model.model);
        let blocks: Vec<[[Cost; 2]; 3]> = (0..self.blocks)
            .map(|_| {
                let mut raw = Raw::new(environment, &spec, self.batch, 1);
                [self.lives(&client), self.lives(&trivial), self.halves(|_| raw.step())]
            })
            .collect();
        let copied = server.metric(COPIED, &self.model.model).zip(before).map(|(after, before)| after - before);
        let (steps, lives) = (self.steps / 2 * 2, (self.blocks * self.batch) as f64);
        let of = |cost: &dyn Fn(&[[Cost; 2]; 3]) -> f64| median(blocks.iter().map(cost));
        let whole = |[first, second]: &[Cost; 2]| (first.wall_us + second.wall_us) / 2.0;
        let over_raw = |[ours, trivial, raw]: &[[Cost; 2]; 3]| (whole(ours) - whole(trivial)) / whole(raw);
        let mut found = json!({
            "model": self.model.model,
            "batch": self.batch,
            "steps": steps,
            "written_bytes_per_sequence": spec.state_bytes_written(steps),
            "copied_bytes_per_sequence": copied.map(|copied| copied / lives),
            "ours_us_per_step": of(&|[ours, ..]| whole(ours)),
            "ours_us_per_step_first_half": of(&|[ours, ..]| ours[0].wall_us),
            "ours_us_per_step_second_half": of(&|[ours, ..]| ours[1].wall_us),
            "trivial_us_per_step": of(&|[_, trivial, _]| whole(trivial)),
            "raw_us_per_step": of(&|[.., raw]| whole(raw)),
            "raw_us_per_step_first_half": of(&|[.., raw]| raw[0].wall_us),
            "raw_us_per_step_second_half": of(&|[.., raw]| raw[1].wall_us),
            "ours_ms": of(&|[ours, ..]| whole(ours)) * steps as f64 / 1e3,
            "raw_ms": of(&|[.., raw]| whole(raw)) * steps as f64 / 1e3,
            "ratio": of(&|[ours, _, raw]| whole(ours) / whole(raw)),
        });
        Spread::of(blocks.iter().map(over_raw)).put(&mut found, "whole_over_raw");
        found
    }

    /// What the sequences' steps cost, from START to END.
    fn lives(&self, client: &Client) -> [Cost; 2] {
        let (inbox, sequences) = (Inbox::new(Wants::End), (1..=self.batch as u64).collect::<Vec<_>>());
        let costs = self.halves(|step| client.round(&inbox, &sequences, if step == 0 { START } else { 0 }));
        client.round(&inbox, &sequences, END);
        costs
    }

    /// What a step costs in the first half and in the second, where states are larger.
    fn halves(&self, mut work: impl FnMut(usize)) -> [Cost; 2] {
        let (half, mut step) = (self.steps / 2, 0);
        let mut next = || {
            work(step);
            step += 1;
        };
        [Cost::of(half, &mut next), Cost::of(half, &mut next)]
    }
}

impl Live {
    fn run(&self, server: &'static Server) -> Value {
        let spec = self.model.spec();
        server.load(&self.model.model);
        let (client, inbox) = (Client::new(server, &self.model.model, &spec), Inbox::new(Wants::EachAnswer));
        let (mut live, mut found) = (0, Vec::new());
        let mut timed: Vec<u64> = (1..=self.batch as u64).collect();
        client.answers(&inbox, &timed, START);
        (0..200).for_each(|_| client.answers(&inbox, &timed, 0));
        let at_first = resident_bytes();
        for &wanted in &self.sequences {
            let others: Vec<u64> = (live..wanted).map(|number| OTHERS + number).collect();
            others.chunks(self.batch).for_each(|set| client.answers(&inbox, set, START));
            others.chunks(self.batch).for_each(|set| client.answers(&inbox, set, 0));
            live = wanted.max(live);
            // The buffers of the first few are more than their states.
            let bytes = (live >= 100).then(|| (resident_bytes() - at_first) / live as f64);
            (0..50).for_each(|_| client.answers(&inbox, &timed, 0));
            // In turn, so that both have the same of what else the machine does.
            let blocks: Vec<[Cost; 2]> = (0..10)
                .map(|_| {
                    let same = Cost::of(self.rounds / 10, || {
                        fastrand::shuffle(&mut timed);
                        client.answers(&inbox, &timed, 0);
                    });
                    let any = Cost::of(self.rounds / 10, || client.answers(&inbox, &any_of(live, &timed), 0));
                    [same, any]
                })
                .collect();
            let [same, any] = [0, 1].map(|which| median(blocks.iter().map(|block| block[which].wall_us)));
            found.push(json!({
                "live": live,
                "us_per_batch": same,
                "us_per_random_batch": any,
                "resident_bytes_per_sequence": bytes,
            }));
        }
        inbox.wait_for_all();
        json!({ "model": self.model.model, "batch": self.batch, "live": found })
    }
}

/// Ids of the sequences that are live and not in the batch that stays the same begin here.
const OTHERS: u64 = 1_000_000_000;

/// As many different sequences as stay the same, of all that are live: a batch that nobody could have prepared for.
fn any_of(others: u64, same: &[u64]) -> Vec<u64> {
    let known = same.len() as u64;
    let mut picked = Vec::with_capacity(same.len());
    while picked.len() < same.len() {
        let sequence = match fastrand::u64(..others + known) {
            number if number < known => same[number as usize],
            number => OTHERS + number - known,
        };
        if !picked.contains(&sequence) {
            picked.push(sequence);
        }
    }
    picked
}

impl RawOnly {
    fn run(&self, environment: &Environment) -> Value {
        let spec = Spec::read(&self.spec).unwrap_or_else(|error| panic!("{error}"));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_sequences_come_in_every_round() {
        let mut sequences: Vec<u64> = (1..=8).collect();
        for round in 0..20 {
            let mut picked = Composition::Same.pick(&mut sequences, 8, round).to_vec();
            picked.sort_unstable();
            assert_eq!(picked, (1..=8).collect::<Vec<_>>());
        }
    }

    #[test]
    fn random_batches_are_of_all_sequences_and_have_none_twice() {
        let mut sequences: Vec<u64> = (1..=16).collect();
        let mut seen = std::collections::BTreeSet::new();
        for round in 0..100 {
            let picked = Composition::Random.pick(&mut sequences, 8, round).to_vec();
            let different: std::collections::BTreeSet<u64> = picked.iter().copied().collect();
            assert_eq!(different.len(), 8);
            seen.extend(different);
        }
        assert_eq!(seen.len(), 16);
    }

    #[test]
    fn four_sets_take_turns() {
        let mut sequences: Vec<u64> = (0..32).collect();
        for round in 0..20 {
            let picked = Composition::Alternate.pick(&mut sequences, 8, round).to_vec();
            assert!(picked.iter().all(|sequence| *sequence / 8 == round as u64 % 4), "{round}: {picked:?}");
        }
    }

    #[test]
    fn any_batch_is_of_live_sequences_and_has_none_twice() {
        let same: Vec<u64> = (1..=16).collect();
        for others in [0, 10, 10_000] {
            let picked = any_of(others, &same);
            let different: std::collections::BTreeSet<u64> = picked.iter().copied().collect();
            assert_eq!(different.len(), 16);
            let is_live = |id: &u64| same.contains(id) || (OTHERS..OTHERS + others).contains(id);
            assert!(picked.iter().all(is_live));
        }
    }

    #[test]
    fn statistics_are_summed_over_batch_sizes() {
        let size = |rows: u64, ns: u64| json!({ "batch_size": rows, "compute_infer": { "count": 1, "ns": ns } });
        let of_model = json!({ "execution_count": 2, "inference_count": 17, "batch_stats": [size(1, 5), size(16, 7)] });
        let found = batches(&json!({ "model_stats": [of_model] }));
        assert_eq!((found.runs, found.rows), (2.0, 17.0));
        assert_eq!(found.stage_ns("compute_infer"), 12.0);
        assert_eq!(found.stage_ns("compute_output"), 0.0);
    }
}
