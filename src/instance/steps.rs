//! Work around a run that only some models need: lengths that differ at START, a model for initial states, counts for
//! generated inputs, and several steps for a request, with `input_windows` or `repeat` (`batch/course.rs`).

use std::time::Instant;

use sequences::Outcome;

use super::Instance;
use super::state_api::Change;
use crate::batch::Row;
use crate::batch::gather::note_counts;
use crate::batch::respond::{Answers, Filled, empty_response};
use crate::batch::state_api::conflict;
use crate::error::RequestError;
use crate::model::{Answered, Extras, Lease};
use crate::panic;
use crate::store::Saved;
use crate::triton::{Response, Times};

impl Instance {
    /// Refuses rows of a wrong length. The first inference of a sequence and later ones take different lengths, and
    /// only now is it known which of them a row is.
    pub(super) fn check_lengths(&mut self, mut rows: Vec<Row>, times: Times, answered: &mut Vec<Answered>) -> Vec<Row> {
        if !self.model.binding.contexts().any(|(_, _, context)| context.can_be_absent()) {
            return rows;
        }
        self.store.note_first(&mut rows);
        self.sift(rows, times, answered, |of, row| Ok(row.check_lengths(&of.model.binding).map(|()| None)?))
    }

    /// Runs the model for initial states, if there is one, for rows that start a sequence.
    pub(super) fn initialise(&mut self, rows: Vec<Row>, times: Times, answered: &mut Vec<Answered>) -> Vec<Row> {
        if self.initial.is_none() {
            return rows;
        }
        self.sift(rows, times, answered, |of, row| {
            if let (Some(step), Some(model)) = (&mut of.initial, &of.model.initial_model)
                && row.asked.is_none()
                && row.state.is_fresh()
            {
                row.state.given = step.run(&of.model.binding, &model.binding, Some(&row.request))?;
            }
            Ok(None)
        })
    }

    /// Gives the rows what their sequences have counted. Refuses those whose numbers an input cannot hold.
    pub(super) fn count(&mut self, rows: Vec<Row>, times: Times, answered: &mut Vec<Answered>) -> Vec<Row> {
        if self.model.binding.generated().next().is_none() {
            return rows;
        }
        let mut counts =
            self.sequences.look_at_each(rows.iter().map(|row| row.state.slot()), |of| of.counts.clone()).into_iter();
        self.sift(rows, times, answered, |of, row| {
            let kept = counts.next().unwrap_or_default();
            let counts = row.extras.as_ref().map_or(kept, |extras| extras.counts.clone());
            Ok(note_counts(&of.model.binding, row, counts).map(|()| None)?)
        })
    }

    /// Decides how many steps rows make, and saves the states that several steps may change. Answers rows that make no
    /// step.
    pub(super) fn open_courses(&mut self, mut rows: Vec<Row>, times: Times, answered: &mut Vec<Answered>) -> Vec<Row> {
        if !self.model.binding.makes_steps() {
            return rows;
        }
        self.store.note_first(&mut rows);
        let kept = self.sequences.look_at_each(rows.iter().map(|row| row.state.slot()), Extras::clone);
        let mut kept = kept.into_iter();
        self.sift(rows, times, answered, |of, row| {
            let kept = kept.next().unwrap_or_default();
            let extras = row.extras.take().map_or(kept, |extras| *extras);
            row.open_course(&of.model.binding, extras)?;
            if row.course.as_ref().is_some_and(|course| course.steps == 0) {
                return of.answer_without_step(row).map(Some);
            }
            let slot = row.state.slot();
            let may_be_undone = row.may_be_undone(of.model.keeper.is_some());
            if let (true, Some(slot), Some(course)) = (may_be_undone, slot, &mut row.course) {
                course.before = Some(of.store.save(slot)?.ok_or_else(|| conflict("the sequence is over"))?);
            }
            Ok(None)
        })
    }

    /// Keeps what a request brings that makes no step, and answers it.
    fn answer_without_step(&mut self, row: &mut Row) -> Result<Response, RequestError> {
        let response = empty_response(&self.model.binding, row)?;
        let slot = row.state.slot();
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
    pub(super) fn check_under_way(&mut self, rows: Vec<Row>, times: Times, answered: &mut Vec<Answered>) -> Vec<Row> {
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

    /// Takes the outputs of a step, and those that the next step reads. After the last step, makes the response to the
    /// request.
    pub(super) fn gather_steps(&self, answers: &Answers, batch: &mut [Row], responses: Vec<Filled>) -> Vec<Filled> {
        if !self.model.binding.makes_steps() {
            return responses;
        }
        let gather = |(position, (row, response)): (usize, (&mut Row, Filled))| {
            panic::catch_result(|| {
                let response = response?;
                answers.repeat(position, row)?;
                row.gather_step(&self.model.binding, response)
            })
        };
        batch.iter_mut().zip(responses).enumerate().map(gather).collect()
    }

    /// Prepares the next steps of the rows of a batch whose states have been stored. After the last step, the state
    /// from before the request is not needed, unless the request leaves it as it was.
    pub(super) fn go_on(&self, batch: &mut [Row], responses: &mut [Filled]) {
        for (row, response) in batch.iter_mut().zip(responses).filter(|(_, of)| of.is_ok()) {
            if !row.state.is_partial {
                row.forget_before();
            } else if let Err(error) = panic::catch_result(|| row.go_on(&self.model.binding)) {
                *response = Err(error);
            }
        }
    }

    /// Restores the state from before a row's request, if the request has made steps but must not change its sequence.
    /// If that fails, the sequence ends.
    pub(super) fn undo_steps(&mut self, row: &mut Row) {
        let Some(Saved { state, charge }) = row.take_before() else { return };
        let Some(lease) = &mut row.state.lease else { return };
        // The budget may be used up by now, so the state is restored with what was charged when it was saved.
        let restored: Result<_, RequestError> =
            panic::catch_result(|| Ok(self.store.write(lease.slot(), &state, charge)?));
        match restored {
            Ok(_) if lease.outcome() == Outcome::Lost => lease.undo(),
            Ok(_) => {}
            Err(error) => {
                log::error!(
                    "{}: a sequence ends, because its state from before a request cannot be restored: {error}",
                    self.model.config.model
                );
                lease.spoil();
            }
        }
    }
}
