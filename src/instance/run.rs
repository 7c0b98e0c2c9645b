//! Runs the rows of a payload once: groups them into batches, runs each, and runs a failed batch again in halves.

use std::time::Instant;

use super::Instance;
use crate::batch::gather::gather;
use crate::batch::grouping::Standing;
use crate::batch::respond::{Answers, Filled};
use crate::batch::{Row, fault};
use crate::error::{RequestError, RunError};
use crate::model::{Answered, Lease, Ran};
use crate::panic;
use crate::responder;
use crate::triton::{Response, Times, monotonic_ns};

impl Instance {
    /// Makes a step of each row. Returns those that have steps left.
    pub(super) fn make_step(&mut self, rows: Vec<Row>, times: Times, answered: &mut Vec<Answered>) -> Vec<Row> {
        let mut rows = self.check_under_way(rows, times, answered);
        if self.grouping.has_open_states {
            self.store.note_dims(&mut rows);
        }
        let mut rows = self.count(rows, times, answered);
        let (mut others_ran, mut at_fault, mut left) = (false, Vec::new(), Vec::new());
        while !rows.is_empty() {
            let batch = self.next_batch(&mut rows);
            let (batch, any_ran) = self.run_or_split(batch, times, rows.is_empty(), &mut at_fault);
            others_ran |= any_ran;
            for row in batch {
                if row.has_more_steps() && !row.request.is_answered() {
                    left.push(row);
                } else {
                    self.depart(row, answered);
                }
            }
        }
        // These rows get their errors only now, because an error depends on whether others ran.
        for (mut row, error) in at_fault {
            let error = if others_ran { error.while_others_ran() } else { error };
            self.fail(std::slice::from_mut(&mut row), error, times);
            // Before `fail_run`, which changes nothing while the state counts as lost.
            self.undo_steps(&mut row);
            row.state.lease.iter_mut().for_each(Lease::fail_run);
            self.depart(row, answered);
        }
        self.report.payload_over(&self.sequences);
        left
    }

    fn next_batch(&self, rows: &mut Vec<Row>) -> Vec<Row> {
        let most = self.model.config.max_rows_per_run;
        if rows.len() <= most && self.grouping.is_any() && self.isolation.is_over() {
            return std::mem::take(rows);
        }
        rows.sort_by_key(|row| self.isolation.standing(row.good()));
        let standing = rows.first().map(|first| self.isolation.standing(first.good()));
        // Alone, a row that fails again costs one run, its own.
        let most = if standing == Some(Standing::Failed) { 1 } else { most };
        let mut batch = self.grouping.batch(most);
        for row in std::mem::take(rows) {
            // A batch has rows of one standing only, so that a row that may fail makes no trusted row run again.
            let is_like_first = standing == Some(self.isolation.standing(row.good()));
            rows.extend(if is_like_first { batch.join(row) } else { Some(row) });
        }
        batch.rows
    }

    /// Runs a batch of rows of one standing. One that fails is run again in halves, so that only the requests at fault
    /// fail: a failed run has changed no state. A row that fails alone goes to `at_fault`, without an answer.
    /// `is_last`: no other batch of the payload is to run. Returns the other rows, and whether any rows ran.
    fn run_or_split(
        &mut self,
        mut batch: Vec<Row>,
        times: Times,
        is_last: bool,
        at_fault: &mut Vec<(Row, RequestError)>,
    ) -> (Vec<Row>, bool) {
        let ran = panic::catch_result(|| self.run(&mut batch, times, is_last));
        let finished = self.finish_run();
        if let (Err(error @ RequestError::Run(RunError::PaddedState { .. })), true) =
            (&ran, self.grouping.padding.is_some())
        {
            log::warn!(
                "{}: {error}; from now on, rows whose states have different lengths run apart",
                self.model.config.model
            );
            self.grouping.padding = None;
        }
        let error = match (ran, finished) {
            (Ok(()), Ok(())) => {
                self.isolation.ran(batch.iter().map(Row::good));
                return (batch, true);
            }
            // The new states may not have been copied, so they can't be used.
            (Ok(()), Err(_)) => {
                batch.iter_mut().for_each(|row| row.state.spoil());
                return (batch, false);
            }
            (Err(error), Ok(())) if error.may_be_one_rows_fault() && batch.iter().all(Row::is_untouched) => {
                if batch.len() == 1 {
                    self.isolation.failed(Instant::now());
                    at_fault.extend(batch.pop().map(|row| (row, error)));
                    return (batch, false);
                }
                let second = batch.split_off(batch.len() / 2);
                let (mut rows, first_ran) = self.run_or_split(batch, times, false, at_fault);
                let (others, second_ran) = self.run_or_split(second, times, false, at_fault);
                rows.extend(others);
                return (rows, first_ran || second_ran);
            }
            (Err(error), _) => error,
        };
        self.fail(&mut batch, error, times);
        (batch, false)
    }

    /// Waits for the device, so that states that were copied are in their slots before the slots change hands, and
    /// nothing uses the memory that the store and the step give back.
    pub(super) fn finish_run(&mut self) -> Result<(), RequestError> {
        let synchronised = self.copier.synchronise();
        self.store.release();
        synchronised?;
        self.step.give_back();
        Ok(())
    }

    /// Load, gather, run, respond, store, answer. States are loaded first, as that decides the order of the rows.
    fn run(&mut self, batch: &mut [Row], mut times: Times, is_last: bool) -> Result<(), RequestError> {
        let rows = self.model.config.padding.rows(batch.len());
        self.store.load(batch, rows)?;
        fault::point("gather", batch.iter().map(|row| &row.request));
        let overlays = gather(&self.model.binding, batch, rows, &self.store, &mut self.step)?;
        times.compute_start = monotonic_ns();
        fault::point("run", batch.iter().map(|row| &row.request));
        self.step.run(self.store.run(batch, rows, &overlays))?;
        times.compute_end = monotonic_ns();
        self.run_ns = responder::average(self.run_ns, times.compute_end - times.compute_start);
        // Before states change, so that the batch can still run again in parts.
        self.store.check(&self.step, rows)?;
        let mut responses = self.respond(batch, rows)?;
        // The tensors of one sequence may always stay. Those that several share stay for the last batch only, because
        // one sequence would keep the memory of all.
        let may_share = is_last || rows == 1;
        let stored = panic::catch_result(|| {
            self.store.store(batch, rows, &mut self.step, may_share, &mut responses)?;
            fault::point("store", batch.iter().map(|row| &row.request));
            Ok(())
        });
        if let Err(error) = stored {
            // States may be half-way, so nothing is run again.
            batch.iter_mut().for_each(|row| row.state.spoil());
            self.fail(batch, error, times);
            return Ok(());
        }
        self.go_on(batch, &mut responses);
        if let Err(error) = panic::catch_result(|| self.finish_operations(batch, &mut responses)) {
            self.fail(batch, error, times);
            return Ok(());
        }
        self.answer_batch(batch, responses, times);
        Ok(())
    }

    fn respond(&self, batch: &mut [Row], rows: usize) -> Result<Vec<Filled>, RequestError> {
        let answers = Answers::new(&self.model.binding, &self.store, &self.step, batch, rows)?;
        let mut responses: Vec<_> = batch.iter().map(|row| Ok(row.step_response(&self.model.binding)?)).collect();
        answers.fill_responses(batch, &mut responses)?;
        Ok(self.gather_steps(&answers, batch, responses))
    }

    fn answer_batch(&mut self, batch: &mut [Row], responses: Vec<Filled>, mut times: Times) {
        times.execute_end = monotonic_ns();
        let each = self.model.binding.answers_each_step;
        for (row, response) in batch.iter_mut().zip(responses) {
            let of_request = row.times(times);
            if let (Ok(_), true) = (&response, row.has_more_steps()) {
                response.into_iter().filter(|_| each).for_each(Response::send_part);
                continue;
            }
            let response = response.and_then(|response| {
                panic::catch(|| fault::point("complete", [&row.request])).inspect_err(|_| row.state.spoil())?;
                Ok(response)
            });
            self.answer_row(row, response, of_request);
        }
        self.triton.report_batch(batch.len(), times);
        let nanoseconds = times.execute_end - times.execute_start;
        self.sequences.metrics.ran(Ran { rows: batch.len(), nanoseconds, copied_bytes: self.store.take_copied() });
        self.report.batch(batch, times);
    }
}
