//! A row of a batch, as the store sees it: its lease, what the run reads as its states, and the outputs
//! of the run, taken apart into rows. And the values of a sequence's states, away from where the store keeps them.

use rows::strings::Strings;
use rows::tensor::{Gap, Part, RowAt, RowLayout, StorageType, WindowLayout};
use rows::{copies, strings};
use sequences::pool::SlotId;

use crate::binding::{Binding, BoundOutput, Initial, InitialContent, StatePlace};
use crate::error::{RequestError, RunError, StateApiError};
use crate::memory::{Bytes, Charge};
use crate::model::{Lease, StateMemory};
use crate::session::{OutputView, RowContent};

#[derive(Default)]
pub struct RowState {
    /// Its lease; `None` for a request without one (warm-up), which starts from the initial state and
    /// leaves none.
    pub lease: Option<Lease>,
    pub start: bool,
    /// Values, by state, that the run reads instead of the sequence's own or initial ones; empty if there are none.
    /// They come from the model for initial states or from the request. The state of a sequence that continues must
    /// have been evicted ([`super::StateStore::evict`]).
    pub given: Vec<Option<Initial>>,
    pub contexts: Contexts,
    /// No run of the sequence has left contexts, as [`super::StateStore::note_first`] has noted. It matters only for
    /// contexts that can be absent.
    pub is_first: bool,
    /// The run leaves the state as it is (`commit: false`).
    pub discards: bool,
    /// More steps of its request follow. Until the last one, the sequence has the state after a step, but the lease
    /// counts it as lost: a row that stops earlier restores the state from before the request
    /// ([`super::StateStore::save`]).
    pub is_partial: bool,
    /// Dimensions of the states of varying size before the run, where [`super::StateStore::note_dims`] has noted them.
    pub dims: Vec<Vec<i64>>,
}

/// A row with what its sequence keeps.
pub(super) type RowAndMemory<'a> = (&'a RowState, Option<&'a StateMemory>);

/// What a run reads before the inputs of a row.
#[derive(Default)]
pub enum Contexts {
    /// What the sequence has; nothing at its start.
    #[default]
    Kept,
    /// Nothing, as at the start.
    Reset,
    /// These bytes, in the order of [`Binding::contexts`].
    Given(Vec<Vec<u8>>),
}

impl RowState {
    /// Whether its state is the initial one rather than the sequence's.
    pub const fn is_fresh(&self) -> bool {
        self.start || self.lease.is_none()
    }

    /// The state is lost, so the sequence ends with this request.
    pub fn spoil(&mut self) {
        if let Some(lease) = &mut self.lease {
            lease.spoil();
        }
    }

    pub fn slot(&self) -> Option<SlotId> {
        self.lease.as_ref().map(Lease::slot)
    }

    /// The slot of its sequence, if the state that it needs is the sequence's.
    pub(super) fn slot_with_state(&self) -> Option<SlotId> {
        self.slot().filter(|_| !self.start)
    }

    /// The slot of its sequence, if the run reads all states of the sequence and no other.
    pub(super) fn slot_in_place(&self) -> Option<SlotId> {
        self.slot_with_state().filter(|_| self.given.is_empty())
    }

    /// Whether its sequence has the state after the run.
    pub(super) fn keeps(&self) -> bool {
        let is_kept = |lease: &Lease| self.is_partial || (!self.discards && !lease.ends());
        self.lease.as_ref().is_some_and(is_kept)
    }

    /// Its lease, if its sequence has the state after the run.
    pub(super) fn lease_that_keeps(&mut self) -> Option<&mut Lease> {
        if self.keeps() { self.lease.as_mut() } else { None }
    }
}

pub trait HasState {
    fn state(&self) -> &RowState;
    fn state_mut(&mut self) -> &mut RowState;
    /// Steps that the model sees of an input along an axis; `None` if the request leaves it out.
    fn steps(&self, binding: &Binding, input: usize, axis: usize) -> Option<usize>;
}

impl HasState for RowState {
    fn state(&self) -> &RowState {
        self
    }

    fn state_mut(&mut self) -> &mut RowState {
        self
    }

    fn steps(&self, _: &Binding, _: usize, _: usize) -> Option<usize> {
        None
    }
}

#[derive(Clone, Copy)]
pub struct StateRow<'a> {
    /// Dimensions, with 1 for the batch axis.
    pub dims: &'a [i64],
    pub content: StateContent<'a>,
}

#[derive(Clone, Copy)]
pub enum StateContent<'a> {
    /// Zeros, or empty strings.
    Zeros,
    /// Numbers that are stored as this type.
    Stored(StorageType, Bytes<'a>),
    Strings(&'a Strings),
    /// Strings in Triton's form.
    WrittenStrings(&'a [u8]),
}

impl<'a> StateRow<'a> {
    /// State number `number` of a row: what the request gives, what is in `memory`, or what its sequence starts
    /// with.
    pub fn of(binding: &'a Binding, number: usize, row: &'a RowState, memory: Option<&'a StateMemory>) -> Self {
        if let Some(given) = row.given.get(number).and_then(Option::as_ref) {
            return Self::initial(given);
        }
        let kept = memory.filter(|_| !row.is_fresh()).and_then(|memory| Self::kept(binding, number, memory));
        kept.unwrap_or_else(|| Self::initial(&binding.states[number].initial))
    }

    /// State number `number` as a sequence keeps it in its slot or beside it.
    pub fn kept(binding: &'a Binding, number: usize, memory: &'a StateMemory) -> Option<Self> {
        let state = &binding.states[number];
        match state.place {
            StatePlace::Slot(_) => {
                let from = binding.slot.offset(number);
                let bytes = memory.slot.part(from..from + state.slot_bytes());
                Some(Self { dims: &state.dims, content: StateContent::Stored(state.storage, bytes) })
            }
            StatePlace::Beside(number) => memory.varying.get(number).map(|varying| Self {
                dims: varying.dims(),
                content: match state.data_type.byte_size() {
                    Some(_) => StateContent::Stored(state.storage, varying.bytes()),
                    None => StateContent::WrittenStrings(varying.bytes().host()),
                },
            }),
        }
    }

    pub fn initial(initial: &'a Initial) -> Self {
        let content = match &initial.content {
            InitialContent::Zeros | InitialContent::Model => StateContent::Zeros,
            InitialContent::Bytes(bytes) => StateContent::Stored(StorageType::Exact, Bytes::Host(bytes)),
            InitialContent::Strings(strings) => StateContent::Strings(strings),
        };
        Self { dims: &initial.dims, content }
    }
}

impl<'a> StateContent<'a> {
    pub const fn of_row(self) -> RowContent<'a> {
        match self {
            Self::Zeros | Self::Strings(_) | Self::WrittenStrings(_) => RowContent::Zeros,
            Self::Stored(storage, bytes) => RowContent::Stored(storage, bytes),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// It is not a state of this model.
    #[error("{0}")]
    Misfit(String),
    /// There is no room for it.
    #[error(transparent)]
    Store(#[from] RunError),
    /// A device has failed, and the state may be half-way: the sequence has to be ended.
    #[error(transparent)]
    Copy(RunError),
}

impl From<WriteError> for RequestError {
    fn from(error: WriteError) -> Self {
        match error {
            WriteError::Misfit(why) => StateApiError::Conflict(why).into(),
            WriteError::Store(error) | WriteError::Copy(error) => error.into(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceState {
    /// The value of each state, in the order of the binding.
    pub states: Vec<Initial>,
    /// The bytes of each context, in the order of [`crate::binding::Binding::contexts`].
    pub contexts: Vec<Vec<u8>>,
}

/// The state of a sequence before a request of several steps.
pub struct Saved {
    pub state: SequenceState,
    /// What its states of varying size use of the bytes that all sequences share.
    pub charge: Option<Charge>,
}

pub struct OutputRows<'a> {
    /// Which output of the step.
    pub index: usize,
    pub bound: &'a BoundOutput,
    pub view: OutputView<'a>,
    layout: RowLayout,
    /// Shape of a row, with its padding.
    pub dims: Vec<i64>,
    pub rows: usize,
    /// The axis along which rows have padding, and the padding of each row; empty if no row has any.
    pub padding: (usize, &'a [Gap]),
}

impl<'a> OutputRows<'a> {
    /// Output number `index` of a run over `rows` rows.
    pub fn new(binding: &'a Binding, index: usize, mut view: OutputView<'a>, rows: usize) -> Result<Self, RunError> {
        let bound = &binding.outputs[index];
        // If a batch has only one row, an output for the whole batch is that row's output.
        if view.dims.is_empty() && bound.batch_axis.is_some() && rows == 1 {
            view.dims = &[1];
        }
        let uneven = || RunError::OutputRows { name: bound.name.clone(), dims: view.dims.to_vec(), rows };
        if bound.batch_axis.is_some_and(|axis| view.dims.get(axis) != Some(&(rows as i64))) {
            return Err(uneven());
        }
        let layout = RowLayout::new(bound.data_type, view.dims, bound.batch_axis).ok_or_else(uneven)?;
        let mut dims = view.dims.to_vec();
        if let Some(axis) = bound.batch_axis {
            dims[axis] = 1;
        }
        Ok(Self { index, bound, view, layout, dims, rows, padding: (0, &[]) })
    }

    /// The row at `position`, without its padding. An output without a batch axis is every row's.
    pub fn row(&self, position: usize) -> Part {
        let (axis, gaps) = self.padding;
        let at = match self.bound.batch_axis {
            Some(_) => RowAt { position, rows: self.rows },
            None => RowAt { position: 0, rows: 1 },
        };
        let gapped = gaps.get(position).filter(|gap| !gap.is_none()).and_then(|&gap| {
            let layout = WindowLayout::new(self.bound.data_type, self.view.dims, self.bound.batch_axis, axis)?;
            layout.around(at, gap)
        });
        gapped.unwrap_or_else(|| self.layout.row(at))
    }

    /// Shape of the row at `position`, without its padding.
    pub fn row_dims(&self, position: usize) -> impl Iterator<Item = i64> {
        let (padded_axis, gaps) = self.padding;
        let padding = gaps.get(position).map_or(0, |gap| gap.length as i64);
        self.dims.iter().enumerate().map(move |(axis, &dim)| if axis == padded_axis { dim - padding } else { dim })
    }

    /// Whether fp16 can hold each finite fp32 value of the row at `position`. On a device that isn't known: true.
    pub(super) fn fits_fp16(&self, position: usize) -> bool {
        let bytes = self.view.bytes;
        bytes.is_empty() || copies::pieces(&self.row(position), bytes).all(copies::fits_fp16)
    }

    pub fn strings(&self, position: usize) -> impl Iterator<Item = &[u8]> + Clone {
        strings::positions(&self.row(position)).map(|index| self.view.strings.get(index))
    }

    pub fn uneven(&self) -> RunError {
        RunError::OutputRows { name: self.bound.name.clone(), dims: self.view.dims.to_vec(), rows: self.rows }
    }
}
