//! A model instance: the way of a payload from Triton's queue to its answers.

#![forbid(unsafe_code)]

mod state_api;
mod steps;

use std::sync::Arc;
use std::time::Instant;

use gpu_rows::Queue;
use sequences::scheduler::Over;
use sequences::{Admission, Finished};

use crate::batch::at_load::{check_padding, warm_up};
use crate::batch::decode::Expected;
use crate::batch::gather::gather;
use crate::batch::grouping::{Grouping, Isolation, Standing};
use crate::batch::respond::{Answers, Filled, empty_response};
use crate::batch::{Row, fault};
use crate::config::{InstanceKind, Strategy};
use crate::error::{LoadError, RequestError, RunError};
use crate::model::{Answered, InitialStep, Lease, LiveSequences, Model, Opened, Ran};
use crate::panic;
use crate::report::Report;
use crate::responder;
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

    /// Makes the answers of a payload. The caller settles, sends and releases them. If a panic drops requests, they are not
    /// in the result: they have been answered and released.
    pub fn execute(&mut self, requests: Vec<Request>) -> Vec<Answered> {
        self.make_answers(requests.len(), |of, mut times, answered| {
            let rows = of.decode(requests);
            let mut rows = of.begin(rows, times, answered);
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

    /// Like [`Instance::execute`], for a step of each row of a batch of this backend's scheduler, whose rows have different
    /// lanes. Also returns the rows that have steps left.
    pub fn execute_rows(&mut self, rows: Vec<Row>) -> (Vec<Answered>, Vec<Row>) {
        let mut left = Vec::new();
        let answered = self.make_answers(rows.len(), |of, times, answered| {
            let (under_way, new) = if of.model.binding.makes_steps() {
                rows.into_iter().partition(Row::is_under_way)
            } else {
                (Vec::new(), rows)
            };
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
    pub fn tick(&mut self) -> Instant {
        self.sequences.tick(self.number, |slot| self.store.drop(slot))
    }

    /// Decode: requests become rows.
    fn decode(&self, requests: Vec<Request>) -> Vec<Row> {
        let lane = |lane: u32| (self.model.config.strategy == Strategy::Direct).then_some(lane);
        let decode = |(at, request)| self.expected.decode(request, self.number, lane(at));
        // `filter_map` does not know how many there are, so `collect` would grow the list several times.
        let mut rows = Vec::with_capacity(requests.len());
        rows.extend((0..).zip(requests).filter_map(decode));
        self.expected.fetch(rows.iter_mut());
        rows
    }

    /// Admit: each row gets its sequence's slot, also the one that cannot run: its START or END counts.
    fn admit(&mut self, mut rows: Vec<Row>) -> Vec<Row> {
        let admission = |row: &Row| Some(Admission { key: row.key.clone()?, start: row.state.start, end: row.end });
        let mut admissions = Vec::with_capacity(rows.len());
        admissions.extend(rows.iter().filter_map(admission));
        let leases = self.sequences.admit(self.number, &admissions, |slot| self.store.drop(slot));
        for (row, lease) in rows.iter_mut().filter(|row| row.key.is_some()).zip(leases) {
            match (lease, &row.key) {
                (Ok(lease), _) => row.state.lease = Some(lease),
                (Err(refusal), Some(key)) if row.problem.is_none() => {
                    let refusal = self.model.refusal(self.kind, refusal, key.id.clone());
                    row.problem = Some(Box::new(refusal.into()));
                }
                // Its client is told of the problem that the row already has.
                (Err(_), _) => {}
            }
        }
        rows
    }

    /// Keeps the rows for which `check` returns `None`. The others depart with the response or the error that it returns.
    fn sift(
        &mut self,
        mut rows: Vec<Row>,
        times: Times,
        answered: &mut Vec<Answered>,
        mut check: impl FnMut(&mut Self, &mut Row) -> Result<Option<Response>, RequestError>,
    ) -> Vec<Row> {
        let departs = |row: &mut Row| {
            let answer = panic::catch_result(|| check(self, row)).transpose();
            let Some(answer) = answer else { return false };
            // An END that is sent again finds its sequence in the store, with the steps before it.
            if self.model.keeper.is_some() && answer.as_ref().is_err_and(RequestError::is_sent_again) {
                row.state.lease.iter_mut().for_each(|lease| _ = lease.postpone_end());
                row.asked.iter_mut().for_each(|asked| asked.progress.ends = false);
            }
            self.answer_row(row, answer, times.ending_at(monotonic_ns()));
            true
        };
        // A row is large, so none is moved if none departs.
        let departing: Vec<_> = rows.extract_if(.., departs).collect();
        departing.into_iter().for_each(|row| self.depart(row, answered));
        rows
    }

    /// Answers a row that has run before. Refuses one with a problem, or whose client has gone. Acknowledges an END that is not
    /// to be inferred, with all outputs and without elements.
    fn check_admitted(&mut self, row: &mut Row) -> Result<Option<Response>, RequestError> {
        if let Some(answer) = row.again.take() {
            return row.answer_again(&answer).map(Some);
        }
        if let Some(problem) = row.problem.take() {
            return Err(*problem);
        }
        if row.request.is_cancelled() {
            return Err(RequestError::Cancelled);
        }
        let only_ends = row.end && !row.state.start && row.asked.is_none() && row.state.lease.is_some();
        if only_ends && !self.model.config.infer_end_requests {
            return empty_response(&self.model.binding, row).map(Some);
        }
        Ok(None)
    }

    fn begin(&mut self, rows: Vec<Row>, times: Times, answered: &mut Vec<Answered>) -> Vec<Row> {
        let rows = self.admit(rows);
        fault::point("admit", rows.iter().map(|row| &row.request));
        let rows = self.sift(rows, times, answered, Self::check_admitted);
        let rows = self.operate(rows, times, answered);
        let rows = self.open_courses(rows, times, answered);
        let rows = self.check_lengths(rows, times, answered);
        self.initialise(rows, times, answered)
    }

    /// Makes a step of each row. Returns those that have steps left.
    fn make_step(&mut self, rows: Vec<Row>, times: Times, answered: &mut Vec<Answered>) -> Vec<Row> {
        let mut rows = self.check_under_way(rows, times, answered);
        if self.grouping.has_open_states {
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
        // These rows get their errors only now, because an error depends on whether others ran.
        for mut row in at_fault {
            if let Some(error) = row.problem.take() {
                let error = if others_ran { error.while_others_ran() } else { *error };
                self.fail(std::slice::from_mut(&mut row), error, times);
            }
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
    /// fail: a failed run has changed no state. A row that fails alone gets its problem, and no answer yet. `is_last`: no
    /// other batch of the payload is to run. Returns whether any rows ran.
    fn run_or_split(&mut self, batch: &mut [Row], times: Times, is_last: bool) -> bool {
        let ran = panic::catch_result(|| self.run(batch, times, is_last));
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
                return true;
            }
            // The new states may not have been copied, so they can't be used.
            (Ok(()), Err(_)) => {
                batch.iter_mut().for_each(|row| row.state.spoil());
                return false;
            }
            (Err(error), Ok(())) if error.may_be_one_rows_fault() && batch.iter().all(Row::is_untouched) => {
                if let [row] = batch {
                    self.isolation.failed(Instant::now());
                    row.problem = Some(Box::new(error));
                    return false;
                }
                let (first, second) = batch.split_at_mut(batch.len() / 2);
                let first_ran = self.run_or_split(first, times, false);
                return self.run_or_split(second, times, false) || first_ran;
            }
            (Err(error), _) => error,
        };
        self.fail(batch, error, times);
        false
    }

    /// Waits for the device, so that states that were copied are in their slots before the slots change hands, and
    /// nothing uses the memory that the store and the step give back.
    fn finish_run(&mut self) -> Result<(), RequestError> {
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

    /// A row that has its answer goes. A sequence that is over gives its slot back at once, as core does: the next one may
    /// come before the answer has left.
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
