//! What the tensors of a model are for, and the parts of an input that a sequence keeps from one request to the next:
//! contexts, and elements that windows leave over.

use std::ffi::CString;
use std::fmt;
use std::num::NonZeroUsize;

use rows::strings::Strings;
use rows::tensor::{DataType, Dims, Gap, Part, RowAt, RowLayout, StorageType, WindowLayout};

use super::fit::ShapeForm;
use crate::config::{FirstRequest, Flag};
use crate::onnx::TensorInfo;

#[derive(Clone, Debug)]
pub struct BoundInput {
    pub name: String,
    pub data_type: DataType,
    /// Dimensions in the model; -1 is open.
    pub dims: Vec<i64>,
    pub batch_axis: Option<usize>,
    pub source: Source,
}

impl BoundInput {
    pub(super) fn new(info: &TensorInfo, batch_axis: Option<usize>, source: Source) -> Self {
        let TensorInfo { name, data_type, dims, .. } = info.clone();
        Self { name, data_type, dims, batch_axis, source }
    }

    /// An input with one element a row, even where the model leaves other dims than the batch open.
    pub(super) fn of_elements(info: &TensorInfo, batch_axis: Option<usize>, source: Source) -> Self {
        let dim = |(axis, &dim)| if Some(axis) == batch_axis { dim } else { 1 };
        let dims = info.dims.iter().enumerate().map(dim).collect();
        Self { dims, ..Self::new(info, batch_axis, source) }
    }

    /// Whether shorter rows of a run are filled up to the longest (`padded_inputs`).
    pub fn is_padded(&self) -> bool {
        self.request().is_some_and(|request| request.is_padded)
    }

    pub const fn request(&self) -> Option<&RequestInput> {
        if let Source::Request(request) = &self.source { Some(request) } else { None }
    }

    pub(super) const fn request_mut(&mut self) -> Option<&mut RequestInput> {
        if let Source::Request(request) = &mut self.source { Some(request) } else { None }
    }

    pub fn is_flag(&self, wanted: Flag) -> bool {
        matches!(self.source, Source::Control(BoundControl::Flag { flag, .. }) if flag == wanted)
    }

    pub(super) fn row_dims(&self) -> Vec<i64> {
        row_dims(&self.dims, self.batch_axis)
    }

    /// The dims of one row with `elements` elements along `axis`.
    pub fn dims_of_part(&self, axis: usize, elements: i64) -> Vec<i64> {
        let mut dims = self.row_dims();
        dims[axis] = elements;
        dims
    }
}

/// The dims of one row: 1 for the batch.
pub(super) fn row_dims(dims: &[i64], batch_axis: Option<usize>) -> Vec<i64> {
    let mut dims = dims.to_vec();
    if let Some(axis) = batch_axis {
        dims[axis] = 1;
    }
    dims
}

#[derive(Clone, Debug)]
pub enum Source {
    Request(RequestInput),
    /// The length of each row of the input with the index `of` in `Binding::inputs`.
    Lengths {
        of: usize,
    },
    /// The state of this number in `Binding::states`.
    State(usize),
    Control(BoundControl),
    Generated(Generated),
    /// These bytes; those of one row, if there is a batch axis.
    Constant(Vec<u8>),
}

/// An input whose values follow from the sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    pub value: GeneratedValue,
    /// Each number is multiplied with this, and `addend` is added.
    pub factor: i64,
    pub addend: i64,
    /// The axis of the input along which a row has several values; `None` if all its elements have one value.
    pub axis: Option<usize>,
    /// 1 in the type of the input, for masks.
    pub one: Vec<u8>,
    pub written: String,
}

/// What a generated input holds. A counter has its index in `Binding::counters`, and its value from before the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeneratedValue {
    /// One number, the counter's.
    Count { counter: usize },
    /// A value for each element of an input, from the counter's up.
    Positions { counter: usize, of: InputAxis },
    /// The length of a growing state before the run.
    Length(GrowingAxis),
    /// 1 for each element of a growing state, then 1 for each new element.
    Mask { state: GrowingAxis, new: NewLength },
    /// Zeros and then ones, `length` elements in all. The number of ones is the counter's value, with the factor and
    /// the addend.
    Last { counter: usize, length: usize },
}

/// How many elements a run adds to a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewLength {
    Fixed(usize),
    /// One for each element of an input.
    Of(InputAxis),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counter {
    Steps,
    Elements(InputAxis),
}

/// An axis, in the model, of an input that requests carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputAxis {
    /// Index in `Binding::inputs`.
    pub input: usize,
    pub axis: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrowingAxis {
    pub state: usize,
    /// Its number among the states beside the slot.
    pub beside: usize,
    pub axis: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestInput {
    /// Number among the inputs that requests carry.
    pub position: usize,
    pub form: ShapeForm,
    /// Whether a request may leave it out; the model then has a value of its own.
    pub optional: bool,
    /// Whether a sequence keeps it, so that only START must carry it.
    pub is_held: bool,
    pub context: Option<BoundContext>,
    pub window: Option<BoundWindow>,
    /// The axis along which rows may have different lengths.
    pub ragged_axis: Option<usize>,
    /// Whether rows of different lengths share a batch, in which the shorter ones are filled up.
    pub is_padded: bool,
    pub steps_multiple: Option<StepsMultiple>,
}

/// A request's length along an axis of the model must be a multiple of a number, because the model has a stride over
/// time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepsMultiple {
    pub axis: usize,
    pub multiple: NonZeroUsize,
}

impl RequestInput {
    /// The dims of a request of one row; -1 is open.
    pub fn request_dims(&self, input: &BoundInput) -> Vec<i64> {
        let mut dims = input.row_dims();
        if let Some(context) = self.context {
            let of_model = dims[context.axis];
            // The first request has more. Its length is checked when it is known which request is the first.
            let is_any = of_model < 0 || context.first == FirstRequest::Whole;
            dims[context.axis] = if is_any { -1 } else { of_model - context.length as i64 };
        }
        if let Some(window) = self.window {
            dims[window.axis] = -1;
        }
        if self.form != ShapeForm::Plain {
            dims.insert(0, 1);
        }
        dims
    }

    /// Steps that the model sees along `axis` of a request with these dims: the context's and the request's own.
    /// `is_first`: no request of the sequence has left a context.
    pub fn row_length(&self, request: &[i64], axis: usize, is_first: bool) -> usize {
        let context = self.context.filter(|context| context.axis == axis);
        context.map_or(0, |context| context.in_front(is_first)) + self.own_length(request, axis)
    }

    /// Steps along `axis` that a request with these dims carries.
    pub fn own_length(&self, request: &[i64], axis: usize) -> usize {
        self.form.model_dims(request).get(axis).map_or(0, |&dim| usize::try_from(dim).unwrap_or(0))
    }

    /// The axis along which a row has more than the request's elements, if there is one.
    pub fn window_axis(&self) -> Option<usize> {
        // If both exist, they are the same axis: `WrittenContext::check_padding` has made sure of that.
        self.context.map(|context| context.axis).or(self.ragged_axis.filter(|_| self.is_padded))
    }
}

/// The end of a sequence's last request, kept for the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundContext {
    pub axis: usize,
    /// Steps along it.
    pub length: usize,
    pub first: FirstRequest,
    /// Bytes that are kept: the steps, and one more byte if an absent context differs from zeros. That byte says
    /// whether the context is there.
    pub bytes: usize,
    /// Its number in the slot (`Binding::slot`).
    pub slot_entry: usize,
}

impl BoundContext {
    /// Whether a sequence without a context differs from one whose context is zeros.
    pub fn can_be_absent(&self) -> bool {
        self.first != FirstRequest::Zeros
    }

    /// The fewest steps that a request must carry, and the exact number, if it is known. `of_model`: the model's
    /// dimension. Decoding has checked what is the same for all requests.
    pub fn lengths(&self, of_model: i64, is_first: bool) -> (usize, Option<usize>) {
        match (self.first, is_first) {
            (FirstRequest::Zeros, _) | (FirstRequest::Repeat, false) => (0, None),
            // There must be an element to repeat.
            (FirstRequest::Repeat, true) => (1, None),
            (FirstRequest::Whole, is_first) => {
                let in_front = self.in_front(is_first);
                (self.length - in_front, usize::try_from(of_model).ok().map(|dim| dim - in_front))
            }
        }
    }

    pub fn in_front(&self, is_first: bool) -> usize {
        if is_first && self.first == FirstRequest::Whole { 0 } else { self.length }
    }

    /// The steps in the kept bytes; `None` if they are absent, as at the start of a sequence.
    pub fn steps<'a>(&self, kept: &'a [u8]) -> Option<&'a [u8]> {
        if !self.can_be_absent() {
            return Some(kept);
        }
        kept.split_last().and_then(|(&is_there, steps)| (is_there != 0).then_some(steps))
    }

    /// Marks in the kept bytes that the steps are there.
    pub fn mark(&self, kept: &mut [u8]) {
        if let Some(is_there) = kept.last_mut().filter(|_| self.can_be_absent()) {
            *is_there = 1;
        }
    }
}

/// The windows of an input that requests bring in any length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundWindow {
    pub axis: usize,
    /// New elements of a window along it.
    pub length: usize,
    pub element_bytes: usize,
    /// Whether zeros fill up the last window at END.
    pub pads: bool,
}

impl BoundWindow {
    /// The number of elements that a window takes from requests. `is_first`: no window of the sequence has left a
    /// context.
    pub fn taken(&self, context: Option<BoundContext>, is_first: bool) -> usize {
        // With ':whole', the first window also takes the elements in the place where a later window has its context.
        self.length + context.map_or(0, |context| context.length - context.in_front(is_first))
    }
}

/// How an answer carries an output of several steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gathered {
    /// The steps have a dimension of their own, which is this one.
    Stacked { at: usize },
    /// The steps stand one after the other along this dimension.
    Joined { axis: usize },
}

/// A control, in the type that the model takes.
#[derive(Clone, Debug)]
pub enum BoundControl {
    /// The element `yes` if the request has the flag, else `no`.
    Flag { flag: Flag, no: Vec<u8>, yes: Vec<u8> },
    /// The sequence id, as this type.
    CorrelationId(DataType),
}

#[derive(Clone, Debug)]
pub struct BoundOutput {
    pub name: String,
    pub data_type: DataType,
    pub batch_axis: Option<usize>,
    pub form: ShapeForm,
    /// `None` if a dimension other than the batch axis is open.
    pub dims: Option<Vec<i64>>,
    pub is_response: bool,
    /// Its shape in a response without elements: 0 for the batch axis and for open dimensions.
    pub empty_dims: Vec<i64>,
    /// How an answer carries the steps of a request, if a request may have any number.
    pub gathered: Option<Gathered>,
    /// The part that belongs to a row, if rows of different lengths share a batch; `None` for all.
    pub trim: Option<Trim>,
    pub c_name: CString,
    /// Whether it is only a state that stays where the run wrote it, so that nothing reads it after the run.
    pub is_only_kept: bool,
}

impl BoundOutput {
    pub fn new(name: &str, data_type: DataType) -> Self {
        Self {
            name: name.to_owned(),
            data_type,
            batch_axis: None,
            form: ShapeForm::Plain,
            dims: None,
            is_response: false,
            empty_dims: Vec::new(),
            gathered: None,
            trim: None,
            // Made once, so that no response allocates it.
            c_name: c_name(name),
            is_only_kept: false,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trim {
    pub axis: usize,
    pub by: TrimBy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrimBy {
    /// By the length that the row has in this input of `Binding::inputs`.
    Input(usize),
    /// By the length that this output of `Binding::outputs` gives.
    Output(usize),
}

/// The index of an output, which is fetched from now on.
pub(super) fn fetched(outputs: &mut Vec<BoundOutput>, info: &TensorInfo) -> usize {
    outputs.iter().position(|output| output.name == info.name).unwrap_or_else(|| {
        outputs.push(BoundOutput::new(&info.name, info.data_type));
        outputs.len() - 1
    })
}

pub(super) fn c_name(name: &str) -> CString {
    // ONNX Runtime gives names as C strings, so none has a NUL inside.
    CString::new(name).unwrap_or_default()
}

/// A state: which input and output of the binding are its ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundState {
    /// Index in `Binding::inputs`.
    pub input: usize,
    /// Index in `Binding::outputs`.
    pub output: usize,
    pub data_type: DataType,
    pub batch_axis: Option<usize>,
    /// Dimensions of a row: 1 for the batch axis, -1 where the size varies.
    pub dims: Vec<i64>,
    pub place: StatePlace,
    pub storage: StorageType,
    /// The axis along which rows of different lengths are padded to share a run; `None` if they cannot.
    pub padded_axis: Option<usize>,
    pub initial: Initial,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Initial {
    /// The dimensions of a row. None is open.
    pub dims: Vec<i64>,
    pub content: InitialContent,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InitialContent {
    /// Zeros or empty strings.
    Zeros,
    Bytes(Vec<u8>),
    Strings(Strings),
    /// What the model for initial states gives, which runs for each START.
    Model,
}

impl fmt::Display for Initial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.content {
            InitialContent::Zeros => write!(f, "zeros {}", Dims(&self.dims)),
            InitialContent::Bytes(_) | InitialContent::Strings(_) => write!(f, "given values, {}", Dims(&self.dims)),
            InitialContent::Model => write!(f, "from the initial_state_model"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatePlace {
    /// In its slot. Every row has this layout.
    Slot(RowLayout),
    /// Beside its slot, because it varies in size, under this number.
    Beside(usize),
}

impl BoundState {
    pub const fn is_in_slot(&self) -> bool {
        matches!(self.place, StatePlace::Slot(_))
    }

    /// Bytes that a row of `layout` takes when it is kept.
    pub const fn kept_bytes(&self, layout: RowLayout) -> usize {
        self.storage.bytes(layout.row_bytes())
    }

    pub const fn slot_bytes(&self) -> usize {
        match self.place {
            StatePlace::Slot(layout) => self.kept_bytes(layout),
            StatePlace::Beside(_) => 0,
        }
    }

    /// The axes that the model leaves open and along which a sequence starts with no elements, unless its request says
    /// otherwise.
    pub fn empty_axes(&self) -> impl Iterator<Item = usize> {
        let Self { dims, initial, .. } = self;
        // A length that comes with a given value is intended.
        let is_given = initial.content != InitialContent::Zeros;
        (0..dims.len()).filter(move |&axis| !is_given && dims[axis] < 0 && initial.dims[axis] == 0)
    }

    /// The row at `at` of a batch with these dims, without its gap; and the gap, if it has one. `None` if a product
    /// overflows.
    pub fn row(&self, dims: &[i64], gap: Gap, at: RowAt) -> Option<(Part, Option<Part>)> {
        match self.padded_axis.filter(|_| !gap.is_none()) {
            Some(axis) => {
                let layout = WindowLayout::new(self.data_type, dims, self.batch_axis, axis)?;
                Some((layout.around(at, gap)?, Some(layout.window(at, gap.steps()))))
            }
            None => Some((self.layout(dims)?.row(at), None)),
        }
    }

    /// The layout of a batch whose rows have these dims; `None` if a product overflows.
    pub fn layout(&self, dims: &[i64]) -> Option<RowLayout> {
        RowLayout::new(self.data_type, dims, self.batch_axis)
    }
}
