//! Operations on the state of a sequence other than a run: the calls of the State API, with a run or without one, and
//! moves of sequences from and to a store.

use sequences::pool::SlotId;
use sequences::{Admission, Key, SequenceId};

use super::Instance;
use crate::batch::Row;
use crate::batch::gather::counts_after;
use crate::batch::respond::{Filled, empty_response};
use crate::batch::state_api::{StateAnswer, StateRequest, conflict};
use crate::binding::{Flag, Initial, InitialContent};
use crate::config::Strategy;
use crate::error::{AdmissionError, InputError, RequestError, StateApiError, StoredError};
use crate::model::{Answered, Extras, Lease, RepeatKey};
use crate::panic;
use crate::snapshot::Snapshot;
use crate::store::{Contexts, SequenceState, WriteError};
use crate::triton::{HeldInput, Response, Times};

/// What a request changes of the state that its run reads, or that its sequence has.
pub(super) struct Change {
    /// New values, by state; empty if there are none.
    pub given: Vec<Option<Initial>>,
    pub contexts: Contexts,
    /// What the sequence keeps from now on, if it goes on from another one or from a snapshot.
    pub extras: Option<Extras>,
}

impl Instance {
    /// Prepares the rows that use the State API or held inputs. Answers those that do not run.
    pub(super) fn operate(&mut self, mut rows: Vec<Row>, times: Times, answered: &mut Vec<Answered>) -> Vec<Row> {
        if !self.model.has_held_inputs() && rows.iter().all(|row| row.asked.is_none()) {
            return rows;
        }
        // A clone has the state before the requests of the other sequence that arrived after it.
        rows.sort_by_key(|row| row.asked.as_ref().is_none_or(|asked| asked.clone_of.is_none()));
        self.sift(rows, times, answered, |of, row| {
            let mut asked = row.asked.take();
            let runs = match &mut asked {
                Some(asked) => of.prepare(row, asked)?,
                None => of.hold(row, None).map(|()| true)?,
            };
            if !runs {
                return of.answer_without_run(row, asked.as_deref()).map(Some);
            }
            row.asked = asked;
            Ok(None)
        })
    }

    /// Does what comes before the run. Without a run, does all that the request asks for. Returns whether it runs.
    fn prepare(&mut self, row: &mut Row, asked: &mut StateRequest) -> Result<bool, RequestError> {
        let Some(slot) = row.state.slot() else {
            return Err(conflict("a request without a sequence cannot use the State API").into());
        };
        if row.end && !row.state.start && !self.model.config.infer_end_requests {
            // Such an END is acknowledged without a run, even if it brings inputs.
            asked.progress.runs = false;
        }
        self.check(row, asked, slot)?;
        let mut origin = match (asked.restore.take(), &asked.clone_of) {
            (Some(snapshot), _) => Some(*snapshot),
            (None, Some(id)) => Some(self.read_source(id, asked.progress.clone_lane)?),
            (None, None) => None,
        };
        if let Some(origin) = &mut origin {
            self.charge_held(&mut origin.extras.held)?;
        }
        let brings_all = !asked.set.is_empty() && asked.set.iter().all(Option::is_some);
        asked.progress.goes_on = origin.is_some() || (row.state.start && brings_all);
        asked.progress.restarts = asked.resets_all && asked.set.is_empty();
        if self.model.binding.inputs.iter().any(|input| input.is_flag(Flag::Start)) {
            check_start_control(row, asked)?;
        }
        let change = Change {
            given: self.given(row, asked, origin.as_ref())?,
            extras: self.extras(asked, slot, origin.as_ref()),
            contexts: match origin {
                _ if asked.resets_all => Contexts::Reset,
                Some(origin) => Contexts::Given(origin.state.contexts),
                None => Contexts::Kept,
            },
        };
        if asked.progress.runs {
            self.prepare_run(row, asked, slot, change)?;
        } else {
            self.apply(row, slot, change)?;
        }
        Ok(asked.progress.runs)
    }

    /// What the sequence keeps from now on besides its states, if the request changes that before a run.
    fn extras(&self, asked: &StateRequest, slot: SlotId, origin: Option<&Snapshot>) -> Option<Extras> {
        let binding = &self.model.binding;
        let begins_counting = asked.resets_all && (!binding.counters.is_empty() || binding.is_cut);
        let mut extras = match origin {
            Some(origin) => origin.extras.clone(),
            None if begins_counting => self.sequences.extras(slot)?,
            None => return None,
        };
        if begins_counting {
            extras.counts.clear();
            extras.left.clear();
        }
        Some(extras)
    }

    fn check(&self, row: &Row, asked: &StateRequest, slot: SlotId) -> Result<(), StateApiError> {
        if asked.resume && !matches!(self.model.config.strategy, Strategy::Own(_)) {
            return Err(conflict(
                "'resume' needs a model without 'sequence_batching': core's sequence batcher forgets a sequence without \
                 telling the backend, so nothing is parked",
            ));
        }
        if asked.delete && !row.end {
            return Err(conflict("with 'sequence_batching', 'delete' also needs sequence_end"));
        }
        let Some(key) = &row.key else { return Ok(()) };
        let extras = self.sequences.extras(slot).unwrap_or_default();
        let (made, left) = (extras.steps, self.left_over(&extras).unwrap_or(0));
        if let Some(step) = asked.step.filter(|&step| step != made) {
            return Err(StateApiError::StepConflict { id: key.id.clone(), step, made });
        }
        if let Some(wanted) = asked.left.filter(|&wanted| wanted != left) {
            return Err(StateApiError::LeftConflict { id: key.id.clone(), wanted, left, made });
        }
        Ok(())
    }

    /// Elements of the first input that is cut which a sequence has left over. `None` if none is cut.
    pub(super) fn left_over(&self, extras: &Extras) -> Option<u64> {
        let (_, _, window) = self.model.binding.windows().next()?;
        Some((extras.left.first().map_or(0, Vec::len) / window.element_bytes.max(1)) as u64)
    }

    fn prepare_run(
        &mut self,
        row: &mut Row,
        asked: &mut StateRequest,
        slot: SlotId,
        Change { mut given, contexts, extras }: Change,
    ) -> Result<(), RequestError> {
        self.hold(row, extras)?;
        if row.state.start && asked.discards {
            // The sequence begins with the state that the run reads, so this is kept first.
            let extras = row.extras.take().map(|extras| *extras);
            self.apply(row, slot, Change { given: std::mem::take(&mut given), contexts, extras })?;
            (row.state.start, asked.progress.began) = (false, true);
        } else {
            if !row.state.start && !given.is_empty() {
                // The run reads the states that are not given from the slot.
                self.store.evict(&[slot])?;
            }
            row.state.contexts = contexts;
        }
        (row.state.given, row.state.discards) = (given, asked.discards);
        if asked.reads() {
            asked.progress.ends = row.state.lease.as_mut().is_some_and(Lease::postpone_end);
        }
        Ok(())
    }

    pub(super) fn apply(&mut self, row: &mut Row, slot: SlotId, change: Change) -> Result<(), RequestError> {
        let Change { given, contexts, extras } = change;
        if row.state.start || !given.is_empty() || !matches!(contexts, Contexts::Kept) {
            let mut state = if row.state.start { self.first_state() } else { self.read(slot)? };
            for (state, given) in state.states.iter_mut().zip(given) {
                given.into_iter().for_each(|given| *state = given);
            }
            match contexts {
                Contexts::Kept => {}
                Contexts::Reset => state.contexts.iter_mut().for_each(|bytes| bytes.fill(0)),
                Contexts::Given(bytes) => state.contexts = bytes,
            }
            self.write(row, &state)?;
        }
        if let Some(extras) = extras {
            self.sequences.change_extras(slot, |kept| std::mem::replace(kept, extras));
        }
        Ok(())
    }

    /// The values that replace those of the sequence, or that it begins with; empty if there are none.
    fn given(
        &mut self,
        row: &Row,
        asked: &mut StateRequest,
        origin: Option<&Snapshot>,
    ) -> Result<Vec<Option<Initial>>, RequestError> {
        let binding = &self.model.binding;
        let mut given: Vec<Option<Initial>> =
            origin.map_or_else(Vec::new, |origin| origin.state.states.iter().cloned().map(Some).collect());
        let begins = row.state.start && origin.is_none();
        if begins || !asked.reset.is_empty() || !asked.set.is_empty() {
            given.resize(binding.states.len(), None);
        }
        let is_from_model = |&number: &usize| {
            let is_set = asked.set.get(number).is_some_and(Option::is_some);
            let is_initial = begins || asked.reset.contains(&number);
            is_initial && !is_set && binding.states[number].initial.content == InitialContent::Model
        };
        let from_model: Vec<usize> = (0..given.len()).filter(is_from_model).collect();
        for &number in &asked.reset {
            given[number] = Some(binding.states[number].initial.clone());
        }
        if !from_model.is_empty() {
            if !asked.progress.runs {
                let why = "the initial state comes from the initial_state_model, which reads the inputs of the \
                           request: send them, or the state";
                return Err(conflict(why).into());
            }
            if let (Some(step), Some(model)) = (&mut self.initial, &self.model.initial_model) {
                let mut initial = step.run(binding, &model.binding, Some(&row.request))?;
                from_model.into_iter().for_each(|number| given[number] = initial[number].take());
            }
        }
        for (given, set) in given.iter_mut().zip(std::mem::take(&mut asked.set)) {
            *given = set.or_else(|| given.take());
        }
        if given.iter().all(Option::is_none) {
            given.clear();
        }
        Ok(given)
    }

    /// The first state of a sequence that starts without a run and without given values.
    fn first_state(&self) -> SequenceState {
        let binding = &self.model.binding;
        SequenceState {
            states: binding.states.iter().map(|state| state.initial.clone()).collect(),
            contexts: binding.contexts().map(|(_, _, of)| vec![0; of.bytes]).collect(),
        }
    }

    /// Gives a row the held inputs that it leaves out, and notes those that it brings. `origin`: what the sequence goes
    /// on from, if not from its own.
    fn hold(&mut self, row: &mut Row, origin: Option<Extras>) -> Result<(), RequestError> {
        let Some(slot) = row.state.slot() else {
            let mut held = self.model.binding.request_inputs().filter(|(_, of)| of.is_held && !of.optional);
            let missing = held.find(|(_, of)| row.request.input(of.position).is_none());
            return missing.map_or(Ok(()), |(input, _)| Err(InputError::Missing(input.name.clone()).into()));
        };
        let mut changed = origin.is_some();
        let mut extras = origin.unwrap_or_else(|| self.sequences.extras(slot).unwrap_or_default());
        let brought = row.hold_inputs(&self.model.binding)?;
        extras.held.resize(brought.len(), None);
        for (position, brought) in brought.into_iter().enumerate() {
            changed |= brought.is_some();
            extras.held[position] = brought.or_else(|| extras.held[position].take());
        }
        // All are charged before the row gets any of them, so that a request over the limit changes nothing.
        self.charge_held(&mut extras.held)?;
        for (input, of) in self.model.binding.request_inputs().filter(|(_, of)| of.is_held) {
            match &extras.held[of.position] {
                Some(held) => row.request.set_input(of.position, held),
                None if !of.optional => return Err(InputError::Missing(input.name.clone()).into()),
                None => {}
            }
        }
        row.extras = changed.then(|| Box::new(extras));
        Ok(())
    }

    /// Charges what a sequence is to hold to the model's limit, unless it shares that with another sequence.
    pub(super) fn charge_held(&self, held: &mut [Option<HeldInput>]) -> Result<(), StateApiError> {
        let bytes = held.iter().flatten().map(|input| input.elements.byte_len()).fold(0, usize::saturating_add);
        let limit = self.model.config.states.limits.per_sequence;
        if bytes > limit {
            return Err(StateApiError::HeldTooLarge { bytes, limit });
        }
        for input in held.iter_mut().flatten().filter(|input| input.charge.is_none()) {
            let charge = self.sequences.charge(input.elements.byte_len()).map_err(StateApiError::HeldRoom)?;
            input.charge = Some(charge.into());
        }
        Ok(())
    }

    /// The state of the sequence that a START clones. `lane`: its lane, if this backend schedules the sequences.
    fn read_source(&mut self, id: &SequenceId, lane: Option<u32>) -> Result<Snapshot, RequestError> {
        let missing = || AdmissionError::CloneSource(id.clone());
        let source = match lane {
            Some(lane) => self.sequences.slot_in_lane(self.number, lane),
            None => self.sequences.slot_of(self.number, id),
        };
        let source = source.ok_or_else(missing)?;
        let extras = self.sequences.extras(source).ok_or_else(missing)?;
        let state = self.store.read(source)?.ok_or_else(missing)?;
        Ok(Snapshot { state, extras })
    }

    fn read(&mut self, slot: SlotId) -> Result<SequenceState, RequestError> {
        Ok(self.store.read(slot)?.ok_or_else(|| conflict("the sequence is over"))?)
    }

    fn write(&mut self, row: &mut Row, state: &SequenceState) -> Result<(), RequestError> {
        let Some(lease) = &mut row.state.lease else { return Ok(()) };
        let written = self.store.write(lease.slot(), state, None);
        if matches!(written, Err(WriteError::Copy(_))) {
            lease.spoil();
        }
        written?;
        Ok(())
    }

    fn answer_without_run(&mut self, row: &mut Row, asked: Option<&StateRequest>) -> Result<Response, RequestError> {
        let response = match asked {
            Some(asked) if !row.end || asked.delete || asked.reads() => {
                let response = row.response()?;
                row.answer_id(&response)?;
                self.answer_reads(row, asked, &response)?;
                response
            }
            _ => empty_response(&self.model.binding, row)?,
        };
        row.state.lease.iter_mut().for_each(Lease::advance);
        Ok(response)
    }

    pub(super) fn answer_reads(
        &mut self,
        row: &Row,
        asked: &StateRequest,
        response: &Response,
    ) -> Result<(), RequestError> {
        let Some(slot) = row.state.slot().filter(|_| asked.reads()) else { return Ok(()) };
        let extras = self.sequences.extras(slot).unwrap_or_default();
        let over = || conflict("the sequence is over");
        let states = if asked.get.is_empty() { Some(Vec::new()) } else { self.store.read_states(slot, &asked.get)? };
        let read = StateAnswer {
            id: row.key.as_ref().map(|key| &key.id),
            steps: extras.steps,
            left: self.left_over(&extras),
            states: states.ok_or_else(over)?,
            info: if asked.query { Some(self.store.describe(slot).ok_or_else(over)?) } else { None },
            snapshot: if asked.snapshot { Some(Snapshot { state: self.read(slot)?, extras }) } else { None },
        };
        let Some(api) = &self.model.state_api else { return Ok(()) };
        read.answer(asked, api, &self.model.binding, response)
    }

    /// What comes after the run of a batch whose states have been stored: counts the steps, keeps the held inputs, and
    /// adds what requests ask for of the state to their responses.
    pub(super) fn finish_operations(
        &mut self,
        batch: &mut [Row],
        responses: &mut [Filled],
    ) -> Result<(), RequestError> {
        let binding = &self.model.binding;
        let keeps_nothing =
            self.model.state_api.is_none() && !self.model.has_held_inputs() && self.model.keeper.is_none();
        if keeps_nothing && binding.counters.is_empty() && !binding.is_cut {
            return Ok(());
        }
        let is_last = |row: &Row| !row.state.discards && !row.has_more_steps();
        for (row, _) in batch.iter_mut().zip(&*responses).filter(|(row, of)| of.is_ok() && is_last(row)) {
            let Some(slot) = row.state.slot() else { continue };
            let (extras, counts) = (row.extras.take(), counts_after(binding, row));
            self.sequences.change_extras(slot, |kept| {
                let before = extras.map(|extras| std::mem::replace(kept, *extras));
                kept.steps = kept.steps.saturating_add(1);
                kept.counts = counts;
                before
            });
        }
        if batch.iter().all(|row| row.asked.as_ref().is_none_or(|asked| !asked.reads())) {
            return Ok(());
        }
        // Reading takes the memory of slots, which the batch holds until then.
        self.copier.synchronise()?;
        self.store.release();
        for (row, response) in batch.iter_mut().zip(responses) {
            // `asked` stays with a row whose response has failed: it may have a postponed END.
            let Ok(filled) = &*response else { continue };
            if row.has_more_steps() {
                continue;
            }
            let Some(asked) = row.asked.take() else { continue };
            if row.state.discards {
                // It reads the state that its sequence keeps.
                self.undo_steps(row);
            }
            if let Err(error) = panic::catch_result(|| self.answer_reads(row, &asked, filled)) {
                *response = Err(error);
                // A START that fails leaves no sequence.
                row.state.lease.iter_mut().filter(|_| row.state.start || asked.progress.began).for_each(Lease::end);
            }
            row.asked = Some(asked);
        }
        Ok(())
    }
}

/// The work of an instance for sequences that are kept in a store: it takes them in, and gives their bytes.
impl Instance {
    /// Begins a sequence with a state that a store had. Its lane has no other. Returns how many steps it has made.
    pub fn adopt(&mut self, key: &Key, bytes: &[u8]) -> Result<u64, RequestError> {
        let decoded = Snapshot::decode(bytes, &self.model.binding);
        let Snapshot { state, mut extras } =
            decoded.map_err(|source| StoredError::Damaged { id: key.id.clone(), source })?;
        let steps = extras.steps;
        self.charge_held(&mut extras.held)?;
        let admission = Admission { key: key.clone(), start: true, end: false };
        let leases = self.sequences.admit(self.number, &[admission], |slot| self.store.drop(slot));
        for lease in leases {
            let mut lease = lease.map_err(|refusal| self.model.refusal(self.kind, refusal, key.id.clone()))?;
            self.store.write(lease.slot(), &state, None)?;
            let extras = std::mem::take(&mut extras);
            self.sequences.change_extras(lease.slot(), |kept| std::mem::replace(kept, extras));
            // If an error drops the lease before this, it leaves no sequence.
            lease.advance();
        }
        Ok(steps)
    }

    /// The sequence in a slot as bytes, after `answer`; `None` if it is over.
    pub fn saveable(&mut self, slot: SlotId, answer: &[u8]) -> Result<Option<Vec<u8>>, RequestError> {
        let Some(state) = self.store.read(slot)? else { return Ok(None) };
        let Some(extras) = self.sequences.extras(slot) else { return Ok(None) };
        Ok(Some(Snapshot { state, extras }.encode_after(answer, &self.model.binding)?))
    }

    /// The same for the sequence in a lane, which has no request running.
    pub fn saveable_in(&mut self, lane: u32) -> Result<Option<Vec<u8>>, RequestError> {
        let Some(slot) = self.sequences.slot_in_lane(self.number, lane) else { return Ok(None) };
        self.saveable(slot, b"")
    }

    /// Whether the sequence in a lane is at the step that a request names. It has no request running.
    pub fn is_at(&self, lane: u32, RepeatKey { step, left, .. }: RepeatKey) -> bool {
        let slot = self.sequences.slot_in_lane(self.number, lane);
        let Some(extras) = slot.and_then(|slot| self.sequences.extras(slot)) else { return false };
        step == extras.steps && left.is_none_or(|left| Some(left) == self.left_over(&extras))
    }

    pub fn has(&self, lane: u32) -> bool {
        self.sequences.slot_in_lane(self.number, lane).is_some()
    }
}

/// Refuses what a model that is told of START by an input cannot do: only an inference with that input gives a sequence
/// its first state.
fn check_start_control(row: &Row, asked: &StateRequest) -> Result<(), StateApiError> {
    let starts = row.state.start && (!asked.progress.goes_on || asked.progress.restarts);
    if starts && (!asked.progress.runs || asked.discards || !asked.set.is_empty()) {
        return Err(conflict(
            "the model takes START as an input, so the sequence must begin with an inference that commits: send the \
             inputs of the model and no state; or send all states, a snapshot, or 'clone_of'",
        ));
    }
    let begins_again = asked.progress.runs && asked.progress.restarts;
    if !asked.reset.is_empty() && !begins_again {
        return Err(conflict(
            "the model takes START as an input, so the sequence must begin again with an inference: reset all states, \
             and send the inputs of the model",
        ));
    }
    Ok(())
}
