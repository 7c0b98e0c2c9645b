//! A model instance: the path of a payload from Triton's queue to its answers. `run` has the batches, their runs, and
//! the halves of a batch that fails; `steps`, the work that only some models need; `state_api`, what changes or reads a
//! state without a run.

#![forbid(unsafe_code)]

mod run;
mod state_api;
mod steps;

use std::sync::Arc;
use std::time::Instant;

use gpu_rows::Queue;
use sequences::scheduler::Over;
use sequences::{Admission, Finished};

use crate::batch::at_load::{check_padding, warm_up};
use crate::batch::decode::Expected;
use crate::batch::grouping::{Grouping, Isolation};
use crate::batch::respond::{Filled, empty_response};
use crate::batch::{Decoded, Row, fault};
use crate::config::{InstanceKind, Strategy};
use crate::error::{LoadError, RequestError};
use crate::model::{Answered, InitialStep, Lease, LiveSequences, Model, Opened};
use crate::panic;
use crate::report::Report;
use crate::session::{Copier, Step};
use crate::store::{StateStore, StoreLimits};
use crate::triton::{self, Request, Response, Times, monotonic_ns};

/// What one instance needs for its runs. Triton never executes it twice at once.
pub struct Instance {
    triton: triton::Instance,
    model: Arc<Model>,
    pub sequences: Arc<LiveSequences>,
    kind: InstanceKind,
    pub number: u32,
    expected: Expected,
    grouping: Grouping,
    isolation: Isolation,
    copier: Copier,
    step: Step,
    store: StateStore,
    initial: Option<InitialStep>,
    report: Report,
    /// How long a run takes, as a moving average.
    run_ns: u64,
}

impl Instance {
    pub fn new(triton: triton::Instance, model: Arc<Model>) -> Result<Self, LoadError> {
        let number = model.next_instance();
        let gpu = if model.config.is_on_gpu() { triton.gpu()? } else { None };
        let site = model.site(model.kind_of(gpu, number))?;
        let (kind, sequences) = (site.kind, site.sequences.clone());
        // Before the session is opened, because its memory counts as the instance's.
        let used_before = site.used_before_instance()?;
        let Opened { session, stream } = model.sessions.for_instance(site.device.as_ref())?;
        let queue = stream.map(|stream| Queue::new(stream, site.queues.clone())).transpose()?;
        let spec = model.binding.step_spec(model.config.most_rows(), model.config.warmup_batch_sizes.clone());
        let copier = queue.map_or(Copier::default(), Copier::on_device);
        let mut step = Step::new(session, &spec, copier.clone())?;
        let limits = StoreLimits {
            most_rows: model.config.most_rows(),
            resident_batches: model.config.resident_batches,
            sequence_bytes: model.config.states.limits.per_sequence,
        };
        let mut store = StateStore::new(model.binding.clone(), sequences.clone(), copier.clone(), limits);
        // Once for a model, because all of its instances run the same graph.
        if number == 0 {
            check_padding(&model.binding, model.config.max_rows_per_run, &mut store, &mut step, &copier)?;
        }
        for &rows in &model.config.warmup_batch_sizes {
            if let Err(error) = warm_up(&model.binding, rows, &mut store, &mut step) {
                log::warn!("{}: the warm-up with {rows} rows failed: {error}", model.config.model);
            }
            // The next one may have other buffers.
            copier.synchronise()?;
            store.release();
        }
        // After the warm-up, so that the buffers that it has made are counted.
        if let Some(gpu) = site.device.as_ref().and_then(|device| device.cuda_number()) {
            let bytes = site.used_bytes()?.saturating_sub(used_before);
            if let Err(error) = triton.report_memory(gpu, bytes) {
                log::info!("{}: cannot report {bytes} bytes of GPU memory to the server: {error}", model.config.model);
            }
        }
        let initial = model.initial_model.as_ref().map(|of| InitialStep::new(of.session.clone(), &of.binding));
        // The model for initial states reads the inputs, too.
        let gpu = site.device.as_ref().map(|device| device.number()).filter(|_| model.initial_model.is_none());
        Ok(Self {
            triton,
            sequences,
            kind,
            number,
            expected: Expected::new(&model.binding, model.state_api.as_ref(), gpu),
            grouping: Grouping::new(&model.binding),
            isolation: Isolation::new(model.config.max_batch_size),
            copier,
            step,
            store,
            initial: initial.transpose()?,
            report: Report::new(&model.config),
            run_ns: 0,
            model,
        })
    }

    /// Makes the answers of a payload. The caller settles, sends and releases them. If a panic drops requests, they are
    /// not in the result: they have been answered and released.
    pub fn execute(&mut self, requests: Vec<Request>) -> Vec<Answered> {
        self.make_answers(requests.len(), |of, mut times, answered| {
            let decoded = of.decode(requests);
            let mut rows = of.begin(decoded, times, answered);
            loop {
                rows = of.make_step(rows, times, answered);
                if rows.is_empty() {
                    return;
                }
                // The statistics of a run count from its own step.
                times = Times::starting_at(monotonic_ns());
            }
        })
    }

    /// Makes one step of each request in a batch of this backend's scheduler. Those in `new` are admitted first; those
    /// in `under_way` have made steps. Also returns the rows that have steps left.
    pub fn execute_batch(&mut self, new: Vec<Decoded>, under_way: Vec<Row>) -> (Vec<Answered>, Vec<Row>) {
        let mut left = Vec::new();
        let answered = self.make_answers(new.len() + under_way.len(), |of, times, answered| {
            // A panic costs the new rows only.
            let mut rows = panic::catch_and_log(|| of.begin(new, times, answered)).unwrap_or_else(|| {
                of.finish_after_panic();
                Vec::new()
            });
            rows.extend(under_way);
            left = of.make_step(rows, times, answered);
        });
        (answered, left)
    }

    fn make_answers(
        &mut self,
        requests: usize,
        make: impl FnOnce(&mut Self, Times, &mut Vec<Answered>),
    ) -> Vec<Answered> {
        self.sequences.begin_payload(self.number);
        let mut answered = Vec::with_capacity(requests);
        let times = Times::starting_at(monotonic_ns());
        if panic::catch_and_log(|| make(self, times, &mut answered)).is_none() {
            self.finish_after_panic();
        }
        self.exit_if_device_is_lost();
        answered
    }

    fn finish_after_panic(&mut self) {
        // A device may still copy to slots that rows gave back when the panic dropped them.
        if let Err(error) = panic::catch_result(|| self.finish_run()) {
            log::error!("{error}");
        }
    }

    /// About how long the next batch runs, or 0 if there is no other sequence that could be in it.
    pub fn next_run_ns(&self) -> u64 {
        if self.sequences.live() > 1 { self.run_ns } else { 0 }
    }

    /// Ends the process after an error after which only a new one can use the GPU, if the configuration says so. The
    /// clients of all models lose their connections.
    fn exit_if_device_is_lost(&self) {
        if let Some(error) = self.sequences.lost_device().filter(|_| self.model.exits_on_gpu_failure()) {
            log::error!("{}: {error}; the process ends, as 'exit_on_gpu_failure' says", self.model.config.model);
            triton::exit_process();
        }
    }

    pub fn end(&mut self, over: &[Over]) {
        self.sequences.end_lanes(self.number, over, |slot| self.store.drop(slot));
    }

    /// A turn that the clock gives: ends the sequences that are over. Returns when to come again.
    pub fn tick(&mut self) -> Option<Instant> {
        self.sequences.tick(self.number, |slot| self.store.drop(slot))
    }

    fn decode(&self, requests: Vec<Request>) -> Vec<Decoded> {
        let lane = |lane: u32| (self.model.config.strategy == Strategy::Direct).then_some(lane);
        let decode = |(at, request)| self.expected.decode(request, self.number, lane(at));
        // `filter_map` does not know how many there are, so `collect` would grow the list several times.
        let mut rows = Vec::with_capacity(requests.len());
        rows.extend((0..).zip(requests).filter_map(decode));
        self.expected.fetch(rows.iter_mut());
        rows
    }

    /// Leases each request the slot of its sequence. An invalid one gets it too, because its START or END counts, and
    /// is then answered. Returns the rows that can run.
    fn admit(&mut self, decoded: Vec<Decoded>, times: Times, answered: &mut Vec<Answered>) -> Vec<Row> {
        let admission = |of: &Decoded| Some(Admission { key: of.key.clone()?, start: of.start, end: of.end });
        let mut admissions = Vec::with_capacity(decoded.len());
        admissions.extend(decoded.iter().filter_map(admission));
        // Before the leases, so that a panic gives these back before it answers the requests.
        let mut decoded = decoded.into_iter();
        let leases = self.sequences.admit(self.number, &admissions, |slot| self.store.drop(slot));
        fault::point("admit", decoded.as_slice().iter().map(|of| &of.request));
        let mut leases = leases.into_iter();
        let (mut rows, mut departing) = (Vec::with_capacity(decoded.len()), Vec::new());
        for mut of in decoded.by_ref() {
            let mut lease = None;
            if let Some(key) = &of.key {
                match leases.next() {
                    Some(Ok(admitted)) => lease = Some(admitted),
                    Some(Err(refusal)) if of.problem.is_none() => {
                        let refusal = self.model.refusal(self.kind, refusal, key.id.clone());
                        of.problem = Some(Box::new(refusal.into()));
                    }
                    // Its client is told of the problem that it already has.
                    Some(Err(_)) | None => {}
                }
            }
            let (again, problem) = (of.again.take(), of.problem.take());
            let mut row = Row::new(of, lease);
            let answer = match (again, problem) {
                (None, None) => {
                    rows.push(row);
                    continue;
                }
                (Some(kept), _) => panic::catch_result(|| kept.repeat(&row.request, row.told_id())),
                (None, Some(problem)) => Err(*problem),
            };
            self.answer_before_run(&mut row, answer, times);
            departing.push(row);
        }
        departing.into_iter().for_each(|row| self.depart(row, answered));
        self.sift(rows, times, answered, Self::check_admitted)
    }

    /// Keeps the rows for which `check` returns `None`. The others depart with the response or the error that it
    /// returns.
    fn sift(
        &mut self,
        mut rows: Vec<Row>,
        times: Times,
        answered: &mut Vec<Answered>,
        mut check: impl FnMut(&mut Self, &mut Row) -> Result<Option<Response>, RequestError>,
    ) -> Vec<Row> {
        let departs = |row: &mut Row| {
            let answer = panic::catch_result(|| check(self, row)).transpose();
            let departs = answer.is_some();
            answer.into_iter().for_each(|answer| self.answer_before_run(row, answer, times));
            departs
        };
        // A row is large, so none is moved if none departs.
        let departing: Vec<_> = rows.extract_if(.., departs).collect();
        departing.into_iter().for_each(|row| self.depart(row, answered));
        rows
    }

    fn answer_before_run(&self, row: &mut Row, answer: Filled, times: Times) {
        // An END that is sent again finds its sequence in the store, with the steps before it.
        if self.model.keeper.is_some() && answer.as_ref().is_err_and(RequestError::is_sent_again) {
            row.state.lease.iter_mut().for_each(|lease| _ = lease.postpone_end());
            row.asked.iter_mut().for_each(|asked| asked.progress.ends = false);
        }
        self.answer_row(row, answer, times.ending_at(monotonic_ns()));
    }

    /// Refuses a row whose client has gone. Acknowledges an END that is not to be inferred, with all outputs and
    /// without elements.
    fn check_admitted(&mut self, row: &mut Row) -> Result<Option<Response>, RequestError> {
        if row.request.is_cancelled() {
            return Err(RequestError::Cancelled);
        }
        let only_ends = row.end && !row.state.start && row.asked.is_none() && row.state.lease.is_some();
        if only_ends && !self.model.config.infer_end_requests {
            return empty_response(&self.model.binding, row).map(Some);
        }
        Ok(None)
    }

    fn begin(&mut self, decoded: Vec<Decoded>, times: Times, answered: &mut Vec<Answered>) -> Vec<Row> {
        let rows = self.admit(decoded, times, answered);
        let rows = self.operate(rows, times, answered);
        let rows = self.open_courses(rows, times, answered);
        let rows = self.check_lengths(rows, times, answered);
        self.initialise(rows, times, answered)
    }

    /// A row that has its answer goes. A sequence that is over gives its slot back at once, as core does: the next one
    /// may come before the answer has left.
    fn depart(&mut self, mut row: Row, answered: &mut Vec<Answered>) {
        let ends = row.asked.as_ref().is_some_and(|asked| asked.progress.ends);
        row.state.lease.iter_mut().filter(|_| ends).for_each(Lease::end);
        self.undo_steps(&mut row);
        let Row { mut state, answer, request, key, end, keeps, .. } = row;
        let lane = key.and_then(|key| key.lane);
        let finished = lane.map(|lane| match &state.lease {
            Some(lease) => Finished { lane, outcome: lease.outcome(), ends: lease.ends() },
            None => Finished::lost(lane),
        });
        let slot = state.slot().filter(|_| self.model.keeper.is_some());
        let steps = slot.and_then(|slot| self.sequences.change_extras(slot, |of| of.steps));
        let leaves = end && state.lease.as_ref().is_some_and(|lease| !lease.ends());
        if let Some(over) = state.lease.take_if(|lease| lease.ends()) {
            self.store.drop(over.slot());
        }
        answered.push(Answered { finished, steps, keeps, leaves, lease: state.lease, answer, request });
    }

    /// Answers the rows of a batch that could not run. Their states stay as they were, but for those that are spoiled.
    fn fail(&self, batch: &mut [Row], error: RequestError, times: Times) {
        let reason = error.reason();
        let of_start = self.model.binding.empty_starts().map(|states| error.with_empty_start(&states));
        let error = triton::Error::from(error);
        for row in batch.iter_mut().filter(|row| !row.request.is_answered()) {
            self.sequences.metrics.count_failed(reason);
            let error = of_start.as_ref().filter(|_| row.state.is_fresh()).unwrap_or(&error);
            row.answer = row.request.make_answer(Err(row.at_step(error.clone())));
            self.triton.report_request(&row.request, false, times.ending_at(monotonic_ns()));
        }
    }

    fn answer_row(&self, row: &mut Row, answer: Filled, times: Times) {
        let answer = answer.inspect_err(|error| self.sequences.metrics.count_failed(error.reason()));
        let success = answer.is_ok();
        row.answer = row.request.make_answer(answer.map_err(|error| row.at_step(error.into())));
        self.triton.report_request(&row.request, success, times);
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // No other instance knows where the states of its sequences are, so none can go on with them.
        self.sequences.retire_instance(self.number);
    }
}
