//! What an instance logs of its work, as configured: a line for each batch, and a report from time to time.

#![forbid(unsafe_code)]

use std::time::Instant;

use crate::batch::Row;
use crate::config::{Config, Logging};
use crate::model::LiveSequences;
use crate::triton::Times;

/// Sums since the last report.
#[derive(Default)]
struct Sums {
    batches: u64,
    requests: u64,
    largest: usize,
    gather_ns: u64,
    run_ns: u64,
    respond_ns: u64,
}

pub struct Report {
    model: String,
    logging: Logging,
    since: Instant,
    sums: Sums,
}

impl Report {
    pub fn new(config: &Config) -> Self {
        Self { model: config.model.clone(), logging: config.logging, since: Instant::now(), sums: Sums::default() }
    }

    /// Notes a batch that ran.
    pub fn batch(&mut self, batch: &[Row], times: Times) {
        let (gather, run, respond) = (
            times.compute_start - times.execute_start,
            times.compute_end - times.compute_start,
            times.execute_end - times.compute_end,
        );
        if let Some(level) = self.logging.batch {
            let starts = batch.iter().filter(|row| row.state.start).count();
            let ends = batch.iter().filter(|row| row.end).count();
            log::log!(
                level,
                "{}: batch of {}: {starts} start and {ends} end their sequence; {} µs gather, {} µs run, {} µs respond",
                self.model,
                batch.len(),
                gather / 1000,
                run / 1000,
                respond / 1000
            );
        }
        if self.logging.report_every.is_some() {
            let sums = &mut self.sums;
            sums.batches += 1;
            sums.requests += batch.len() as u64;
            sums.largest = sums.largest.max(batch.len());
            sums.gather_ns += gather;
            sums.run_ns += run;
            sums.respond_ns += respond;
        }
    }

    /// Logs the report if it is due.
    pub fn payload_over(&mut self, sequences: &LiveSequences) {
        let Some(every) = self.logging.report_every else { return };
        if self.since.elapsed() < every {
            return;
        }
        let sums = std::mem::take(&mut self.sums);
        let time = std::mem::replace(&mut self.since, Instant::now()).elapsed();
        let name = &self.model;
        if let Some(level) = self.logging.report {
            let average = sums.requests as f64 / sums.batches.max(1) as f64;
            let slots = sequences.snapshot();
            log::log!(
                level,
                "{name}, last {:.1} s: {} requests in {} batches, average batch size {average:.2}, largest {}; {} slots \
                 used of {} in {} slabs, at most {}",
                time.as_secs_f64(),
                sums.requests,
                sums.batches,
                sums.largest,
                slots.live,
                slots.slots,
                slots.slabs,
                slots.capacity
            );
        }
        if let Some(level) = self.logging.detailed_report {
            let ms = |ns: u64| ns as f64 / 1e6;
            log::log!(
                level,
                "{name}, last {:.1} s: {:.3} ms gather, {:.3} ms run, {:.3} ms respond and keep states",
                time.as_secs_f64(),
                ms(sums.gather_ns),
                ms(sums.run_ns),
                ms(sums.respond_ns)
            );
        }
    }
}
