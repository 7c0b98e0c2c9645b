//! The steps of requests: one each, unless the model has `input_windows` (`batch/course.rs`).

use std::time::Instant;

use rows::tensor::RowAt;

use super::Instance;
use super::state_api::Change;
use crate::batch::respond::empty_response;
use crate::batch::{Row, fault};
use crate::error::RequestError;
use crate::model::{Answered, Lease};
use crate::panic;
use crate::triton::{Response, Times};

impl Instance {
    /// Admits rows, and prepares their first step.
    pub(super) fn begin(&mut self, rows: Vec<Row>, times: Times, answered: &mut Vec<Answered>) -> Vec<Row> {
        let rows = self.admit(rows);
        fault::point("admit", rows.iter().map(|row| &row.request));
        let rows = self.sift(rows, times, answered, Self::check_admitted);
        let rows = self.operate(rows, times, answered);
        let rows = self.open_courses(rows, times, answered);
        let rows = self.check_lengths(rows, times, answered);
        self.initialise(rows, times, answered)
    }

    /// Makes a step of each row. Returns those that have steps left.
    pub(super) fn make_step(&mut self, rows: Vec<Row>, times: Times, answered: &mut Vec<Answered>) -> Vec<Row> {
        let mut rows = self.check_under_way(rows, times, answered);
        if self.grouping.has_open_states() {
            self.store.note_dims(&mut rows);
        }
        let mut rows = self.count(rows, times, answered);
        let (mut others_ran, mut at_fault, mut left) = (false, Vec::new(), Vec::new());
        while !rows.is_empty() {
            let mut batch = self.next_batch(&mut rows);
            others_ran |= self.run_or_split(&mut batch, times, rows.is_empty());
            for row in batch {
                if row.problem.is_some() {
                    at_fault.push(row);
                } else if row.has_more_steps() && !row.request.is_answered() {
                    left.push(row);
                } else {
                    self.depart(row, answered);
                }
            }
        }
        for mut row in at_fault {
            if let Some(error) = row.problem.take() {
                let error = if others_ran { error.while_others_ran() } else { *error };
                self.fail(std::slice::from_mut(&mut row), error, times);
            }
            row.state.lease.iter_mut().for_each(Lease::fail_run);
            self.depart(row, answered);
        }
        self.report.payload_over(&self.sequences);
        left
    }

    /// Divides what rows bring into windows. Answers those that make no step.
    fn open_courses(&mut self, mut rows: Vec<Row>, times: Times, answered: &mut Vec<Answered>) -> Vec<Row> {
        if !self.model.binding.is_cut() {
            return rows;
        }
        self.store.note_first(&mut rows);
        let kept = self.sequences.all_extras(rows.iter().map(|row| row.state.lease.as_ref().map(Lease::slot)));
        let mut kept = kept.into_iter();
        self.sift(rows, times, answered, |of, row| {
            let kept = kept.next().unwrap_or_default();
            let extras = row.extras.take().map_or(kept, |extras| *extras);
            row.open_course(&of.model.binding, extras)?;
            if row.makes_no_step() {
                return of.answer_without_step(row).map(Some);
            }
            // Later steps read what the row carries, and the sequence keeps its state in its slot until the last one.
            let slot = row.state.lease.as_ref().map(Lease::slot).filter(|_| row.state.is_partial && !row.state.start);
            slot.map_or(Ok(()), |slot| of.store.evict(&[slot]))?;
            Ok(None)
        })
    }

    /// Keeps what a request brings that makes no step, and answers it.
    fn answer_without_step(&mut self, row: &mut Row) -> Result<Response, RequestError> {
        let response = empty_response(&self.model.binding, row)?;
        let slot = row.state.lease.as_ref().map(Lease::slot);
        if let Some(slot) = slot.filter(|_| !row.state.discards) {
            let (given, contexts) = (std::mem::take(&mut row.state.given), std::mem::take(&mut row.state.contexts));
            let extras = row.extras.take().map(|extras| *extras);
            self.apply(row, slot, Change { given, contexts, extras })?;
        }
        if let Some(asked) = row.asked.take() {
            let read = panic::catch_result(|| self.answer_reads(row, &asked, &response));
            // It may have a postponed END.
            row.asked = Some(asked);
            read?;
        }
        row.state.lease.iter_mut().for_each(Lease::advance);
        Ok(response)
    }

    /// Refuses rows between two steps whose client has gone, or whose time is over.
    fn check_under_way(&mut self, rows: Vec<Row>, times: Times, answered: &mut Vec<Answered>) -> Vec<Row> {
        if !rows.iter().any(Row::is_under_way) {
            return rows;
        }
        self.sift(rows, times, answered, |_, row| {
            if row.is_under_way() && row.request.is_cancelled() {
                return Err(RequestError::Cancelled);
            }
            if row.is_overdue(Instant::now) { Err(RequestError::Overdue) } else { Ok(None) }
        })
    }

    /// Takes the outputs of a step. Those of a last one become the response to the request.
    pub(super) fn gather_steps(
        &self,
        batch: &mut [Row],
        responses: Vec<Result<Response, RequestError>>,
    ) -> Vec<Result<Response, RequestError>> {
        if !self.model.binding.is_cut() {
            return responses;
        }
        let gather = |(row, response): (&mut Row, Result<Response, RequestError>)| {
            panic::catch_result(|| row.gather_step(&self.model.binding, response?))
        };
        batch.iter_mut().zip(responses).map(gather).collect()
    }

    /// Lets the rows of a batch of `rows` rows that has run carry their states to their next steps.
    pub(super) fn carry(&mut self, batch: &mut [Row], rows: usize, responses: &mut [Result<Response, RequestError>]) {
        for (position, (row, response)) in batch.iter_mut().zip(responses).enumerate() {
            if response.is_err() || !row.state.is_partial {
                continue;
            }
            let carried = panic::catch_result(|| {
                let captured = self.store.capture(&self.step, RowAt { position, rows }, row)?;
                row.carry(&self.model.binding, captured)
            });
            if let Err(error) = carried {
                *response = Err(error);
            }
        }
    }
}
