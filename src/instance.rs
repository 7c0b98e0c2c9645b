//! A model instance: the way of a payload from Triton's queue to its answers.

use std::sync::Arc;

use crate::batch::decode::{Decoded, Expected};
use crate::batch::gather::{gather, same_shapes};
use crate::batch::respond::Answers;
use crate::batch::{Row, fault};
use crate::config::Strategy;
use crate::error::Error;
use crate::model::{Admission, Lease, Model};
use crate::panic;
use crate::session::Step;
use crate::triton::{self, Request, Times, monotonic_ns};

/// What one instance needs for its runs. Triton never executes it twice at once.
pub struct Instance {
    triton: triton::Instance,
    model: Arc<Model>,
    number: u32,
    expected: Expected,
    step: Step,
}

/// Requests that have been answered, on their way to release.
type Answered = Vec<(Option<Lease>, Request)>;

impl Instance {
    /// An instance of a loaded model.
    pub fn new(triton: triton::Instance, model: Arc<Model>) -> Result<Self, Error> {
        let step = Step::new(model.session.clone(), &model.binding.step_spec())?;
        let number = model.next_instance();
        Ok(Self { triton, number, expected: Expected::new(&model.binding), step, model })
    }

    /// Answers and releases every request of a payload.
    pub fn execute(&mut self, requests: Vec<Request>) {
        let times = Times::starting_at(monotonic_ns());
        let (count, short) = (requests.len(), self.empties_the_queue(requests.len()));
        let rows = self.decode(requests, times);
        let mut rows = self.admit(rows, times);
        let mut answered = Answered::with_capacity(rows.len());
        while !rows.is_empty() {
            let mut batch = self.next_batch(&mut rows);
            let ran = panic::catch(|| self.run(&mut batch, times)).and_then(|ran| ran);
            if let Err(error) = ran {
                self.fail(&mut batch, &error.into(), times);
            }
            answered.extend(batch.into_iter().map(|row| (row.lease, row.request)));
        }
        self.model.sequences.settle(self.number, answered, count, short);
    }

    /// Decode: requests become rows that fit the model; the others are answered here.
    fn decode(&self, requests: Vec<Request>, times: Times) -> Vec<Row> {
        let mut rows = Vec::with_capacity(requests.len());
        for (lane, request) in (0..).zip(requests) {
            let lane = (self.model.config.strategy == Strategy::Direct).then_some(lane);
            match self.expected.decode(request, self.number, lane) {
                Decoded::Row(row) => rows.push(row),
                Decoded::Null => {}
                Decoded::Refused(request, error) => self.refuse(request, error, times),
            }
        }
        rows
    }

    /// Admit: each row gets its sequence's slot; the rows that have none are answered here.
    fn admit(&self, rows: Vec<Row>, times: Times) -> Vec<Row> {
        let admission = |row: &Row| Some(Admission { key: row.key.clone()?, start: row.start, end: row.end });
        let admissions: Vec<_> = rows.iter().filter_map(admission).collect();
        let mut leases = self.model.sequences.admit(self.number, &admissions).into_iter();
        let mut admitted = Vec::with_capacity(rows.len());
        for mut row in rows {
            let Some(id) = row.key.as_ref().map(|key| key.id.clone()) else {
                admitted.push(row);
                continue;
            };
            match leases.next() {
                Some(Ok(lease)) => {
                    row.lease = Some(lease);
                    admitted.push(row);
                }
                Some(Err(refusal)) => self.refuse(row.request, self.model.refusal(refusal, id), times),
                None => self.refuse(row.request, Error::SequenceBusy(id), times),
            }
        }
        admitted
    }

    /// Takes the rows that can run together with the first one.
    fn next_batch(&self, rows: &mut Vec<Row>) -> Vec<Row> {
        let most = self.model.config.max_batch_size.max(1);
        let inputs = self.expected.inputs();
        if rows.len() <= most && rows.iter().all(|row| same_shapes(row, &rows[0], inputs)) {
            return std::mem::take(rows);
        }
        let mut batch: Vec<Row> = Vec::new();
        for row in std::mem::take(rows) {
            let joins = batch.len() < most && batch.first().is_none_or(|first| same_shapes(&row, first, inputs));
            if joins { batch.push(row) } else { rows.push(row) }
        }
        batch
    }

    /// Gather, run, respond, and keep the states.
    fn run(&mut self, batch: &mut [Row], mut times: Times) -> Result<(), Error> {
        let binding = &self.model.binding;
        fault::point("gather", batch);
        gather(binding, batch, &mut self.step)?;
        times.compute_start = monotonic_ns();
        fault::point("run", batch);
        self.step.run(batch.len())?;
        times.compute_end = monotonic_ns();
        let answers = Answers::new(binding, &self.step, batch.len())?;
        for (place, row) in batch.iter_mut().enumerate() {
            let response = answers.response(place, &row.request);
            let success = response.is_ok();
            row.request.answer(response.map_err(triton::Error::from));
            if success {
                answers.keep_state(binding, place, row);
            }
            times.execute_end = monotonic_ns();
            self.triton.report_request(&row.request, success, times);
            fault::point("respond", std::slice::from_ref(row));
        }
        self.triton.report_batch(batch.len(), times);
        Ok(())
    }

    /// Answers the rows of a batch that could not run. Their states stay as they were.
    fn fail(&self, batch: &mut [Row], error: &triton::Error, times: Times) {
        for row in batch.iter_mut().filter(|row| !row.request.is_answered()) {
            row.request.answer(Err(error.clone()));
            self.triton.report_request(&row.request, false, times.ending_at(monotonic_ns()));
        }
    }

    /// Answers a request that never became part of a batch, and lets it go.
    fn refuse(&self, mut request: Request, error: Error, times: Times) {
        request.answer(Err(error.into()));
        self.triton.report_request(&request, false, times.ending_at(monotonic_ns()));
    }

    /// Whether a payload of this size leaves nothing in core's queue (see [`crate::sequence`]).
    fn empties_the_queue(&self, requests: usize) -> bool {
        match self.model.config.strategy {
            // Each payload takes the next request of every slot.
            Strategy::Direct => true,
            // A request of another shape may have cut the payload short.
            Strategy::Oldest { full_batch } => requests < full_batch && self.expected.has_fixed_shapes(),
        }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.model.sequences.retire_instance(self.number);
    }
}
