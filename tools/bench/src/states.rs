//! Sequences whose states grow, and many live ones.

use clap::Args;
use ort::environment::Environment;
use serde_json::{Value, json};

use crate::measure::{Cost, Spread, median, resident_bytes};
use crate::model::{COPIED, Model};
use crate::raw::Raw;
use crate::server::{Client, END, Inbox, START, Server, Wants};

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
}
