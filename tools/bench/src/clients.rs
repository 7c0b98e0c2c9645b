//! Clients that send as many requests as come back, or so many a second.

use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use ort::environment::Environment;
use serde_json::{Value, json};

use crate::measure::{Cost, Spread, median, pinned, quantile, rounds_in, wake_on_time};
use crate::model::{Model, Raw};
use crate::server::{Client, END, Inbox, START, Server, Wants};

#[derive(Args)]
pub struct Throughput {
    #[command(flatten)]
    model: Model,
    /// The same model on the backend that does nothing.
    #[arg(long)]
    trivial: String,
    /// Sequences. Each waits for an answer before it sends its next request.
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
    pub one_cpu: bool,
}

#[derive(Args)]
pub struct Clients {
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

impl Throughput {
    pub fn run(&self, server: &'static Server, environment: &Environment) -> Value {
        let spec = self.model.spec();
        server.load(&self.model.model);
        server.load(&self.trivial);
        let clients = [&self.model.model, &self.trivial].map(|model| Client::new(server, model, &spec));
        let mut raw = Raw::new(environment, &spec, self.sequences, 1);
        let mut blocks = Vec::new();
        for _ in 0..self.blocks {
            let [ours, trivial] = [(&clients[0], &self.model.model), (&clients[1], &self.trivial)]
                .map(|(client, model)| Served::to(server, model, || closed_loop(client, self.sequences, self.seconds)));
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
}

impl Clients {
    pub fn run(&self, server: &'static Server) -> Value {
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
        let before = server.batches(model);
        let Timed { cost, latencies_us } = clients();
        let after = server.batches(model);
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
    timed(client, Wants::EachAnswer, sequences, seconds, |inbox, sequences, seconds| {
        let (until, mut latencies_us) = (Instant::now() + Duration::from_secs_f64(seconds), Vec::new());
        let mut ready = Vec::new();
        sequences.iter().for_each(|&sequence| client.send(inbox, sequence, 0));
        while Instant::now() < until {
            inbox.wait_for_some(&mut ready);
            latencies_us.extend(ready.iter().map(|answer| answer.latency_us));
            ready.drain(..).for_each(|answer| client.send(inbox, answer.sequence, 0));
        }
        // Requests that have no answer when the time is over also count. Without them, the slowest answers would be
        // missing.
        latencies_us.extend(inbox.wait_for_all().iter().map(|answer| answer.latency_us));
        latencies_us
    })
}

/// The sequences send in turn, each request when it is due, whether or not the one before it has its answer, as streams
/// of sensors do. A latency counts from the time at which the request was due, so waiting in a queue is part of it.
fn open_loop(client: &Client, sequences: usize, rate: f64, seconds: f64) -> Timed {
    wake_on_time();
    timed(client, Wants::Answers, sequences, seconds, |inbox, sequences, seconds| {
        let begin = Instant::now();
        for number in 0..(rate * seconds) as usize {
            let due = begin + Duration::from_secs_f64(number as f64 / rate);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            client.send_due(inbox, sequences[number % sequences.len()], 0, due);
        }
        inbox.wait_for_all().iter().map(|answer| answer.latency_us).collect()
    })
}

/// What `serve` costs, with sequences that live for longer. It returns the latencies of answers.
fn timed(
    client: &Client,
    wants: Wants,
    sequences: usize,
    seconds: f64,
    serve: impl Fn(&Arc<Inbox>, &[u64], f64) -> Vec<f64>,
) -> Timed {
    let (inbox, sequences) = (Inbox::new(wants), (1..=sequences as u64).collect::<Vec<_>>());
    client.round(&inbox, &sequences, START);
    // These requests are not timed, because the first ones also pay for what is made once.
    serve(&inbox, &sequences, seconds * 0.2);
    let mut latencies_us = Vec::new();
    let cost = Cost::of(1, || latencies_us = serve(&inbox, &sequences, seconds));
    client.round(&inbox, &sequences, END);
    Timed { cost, latencies_us }
}
