//! Rounds of one batch beside ONNX Runtime alone and a backend that does nothing, sequences whose states grow, and many
//! live ones.

use clap::{Args, ValueEnum};
use ort::environment::Environment;
use serde_json::{Value, json};

use crate::measure::{Cost, Spread, median, resident_bytes, rounds_in};
use crate::model::{Model, Raw};
use crate::server::{COPIED, Client, END, Inbox, START, Server, Wants};

#[derive(Args)]
pub struct Step {
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

/// How the sequences of a batch change from round to round.
#[derive(Clone, Copy, ValueEnum)]
pub enum Composition {
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
    pub fn run(&self, server: &'static Server, environment: &Environment) -> Value {
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
        let before = (copied(server), server.batches(&self.model.model));
        let trivial_before = server.batches(&self.trivial);
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
        let (copied, after) = (copied(server), server.batches(&self.model.model));
        let ran = (self.blocks * rounds) as f64;
        before.1.must_be_exactly(&after, ran, self.batch, &self.model.model);
        let trivial_after = server.batches(&self.trivial);
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

#[derive(Args)]
pub struct Growing {
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
pub struct Live {
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

impl Growing {
    pub fn run(&self, server: &'static Server, environment: &Environment) -> Value {
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
    pub fn run(&self, server: &'static Server) -> Value {
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

/// A random choice of live sequences, as many as `same` has and none twice, so that no batch can be prepared for.
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
