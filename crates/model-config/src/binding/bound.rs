//! What the tensors of a model are for.

#![expect(missing_docs, reason = "most names say it")]

use std::ffi::CString;
use std::fmt;
use std::num::NonZeroUsize;

use rows::strings::Strings;
use rows::tensor::{DataType, Dims, Gap, Part, RowAt, RowLayout, StorageType, WindowLayout};

use super::chunks::{BoundContext, BoundWindow, Gathered};
use crate::config::FirstRequest;
use crate::onnx::TensorInfo;

/// An input of the model.
#[derive(Clone, Debug)]
pub struct BoundInput {
    pub name: String,
    pub data_type: DataType,
    /// Dimensions in the model; -1 is open.
    pub dims: Vec<i64>,
    /// Which dimension is the number of rows.
    pub batch_axis: Option<usize>,
    /// What fills it.
    pub source: Source,
}

impl BoundInput {
    /// An input with the model's name, type and dims.
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

    /// How requests carry it, if they do.
    pub(super) const fn request(&self) -> Option<&RequestInput> {
        if let Source::Request(request) = &self.source { Some(request) } else { None }
    }

    pub(super) const fn request_mut(&mut self) -> Option<&mut RequestInput> {
        if let Source::Request(request) = &mut self.source { Some(request) } else { None }
    }

    /// Whether it is a control that tells the model this of a row.
    pub(super) fn is_flag(&self, wanted: Flag) -> bool {
        matches!(self.source, Source::Control(BoundControl::Flag { flag, .. }) if flag == wanted)
    }

    pub(super) fn row_dims(&self) -> Vec<i64> {
        row_dims(&self.dims, self.batch_axis)
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

/// What fills an input.
#[derive(Clone, Debug)]
pub enum Source {
    Request(RequestInput),
    /// The length of each row of this input.
    Lengths {
        /// Index in [`Binding::inputs`](super::model::Binding::inputs).
        of: usize,
    },
    /// The state of this number in [`Binding::states`](super::model::Binding::states).
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
    /// The entry of the configuration.
    pub written: String,
}

/// What a generated input holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeneratedValue {
    /// What this counter of [`Binding::counters`](super::model::Binding::counters) has before the request.
    Count { counter: usize },
    /// A value for each element of an input, from what its counter has before the request.
    Positions { counter: usize, of: InputAxis },
    /// The length of a growing state before the run.
    Length(GrowingAxis),
    /// 1 for each element of a growing state, then 1 for each new element.
    Mask { state: GrowingAxis, new: NewLength },
    /// As many ones as this counter has before the request, with the factor and the addend, at the end of `length`
    /// elements, and 0 in front of them.
    Last { counter: usize, length: usize },
}

/// How many elements a run adds to a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewLength {
    Fixed(usize),
    /// One for each element of an input.
    Of(InputAxis),
}

/// What is counted for each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counter {
    /// Inferences.
    Steps,
    /// Elements of an input.
    Elements(InputAxis),
}

/// An axis of an input that requests carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputAxis {
    /// Index in [`Binding::inputs`](super::model::Binding::inputs).
    pub input: usize,
    /// The axis, in the model.
    pub axis: usize,
}

/// The axis along which a state grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrowingAxis {
    /// Number in [`Binding::states`](super::model::Binding::states).
    pub state: usize,
    /// Its number among the states beside the slot.
    pub beside: usize,
    pub axis: usize,
}

impl Generated {
    /// The indices of the inputs have changed.
    pub(super) fn move_inputs(&mut self, moved: &[usize]) {
        match &mut self.value {
            GeneratedValue::Positions { of, .. } | GeneratedValue::Mask { new: NewLength::Of(of), .. } => {
                of.move_input(moved)
            }
            GeneratedValue::Count { .. }
            | GeneratedValue::Length(_)
            | GeneratedValue::Mask { new: NewLength::Fixed(_), .. }
            | GeneratedValue::Last { .. } => {}
        }
    }
}

impl Counter {
    /// The indices of the inputs have changed.
    pub(super) fn move_inputs(&mut self, moved: &[usize]) {
        if let Self::Elements(of) = self {
            of.move_input(moved);
        }
    }
}

impl InputAxis {
    fn move_input(&mut self, moved: &[usize]) {
        self.input = moved[self.input];
    }
}

/// How requests carry an input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestInput {
    /// Number among the inputs that requests carry.
    pub position: usize,
    pub form: ShapeForm,
    /// Whether a request may leave it out; the model then has a value of its own.
    pub optional: bool,
    /// Whether a sequence keeps it, so that only START must carry it.
    pub is_held: bool,
    /// What goes in front of each request's elements.
    pub context: Option<BoundContext>,
    /// How it is cut, if a request may have any number of windows.
    pub window: Option<BoundWindow>,
    /// The axis along which rows may have different lengths.
    pub ragged_axis: Option<usize>,
    /// Whether rows of different lengths share a batch, in which the shorter ones are filled up.
    pub is_padded: bool,
    /// What the number of steps must be a multiple of.
    pub steps_multiple: Option<StepsMultiple>,
}

/// A request's length along an axis of the model must be a multiple of a number, because the model has a stride over time.
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
        self.context.map(|context| context.axis).or(self.ragged_axis.filter(|_| self.is_padded))
    }
}

/// A control, in the type that the model takes.
#[derive(Clone, Debug)]
pub enum BoundControl {
    /// The element `yes` if the request has the flag, else `no`.
    Flag {
        flag: Flag,
        no: Vec<u8>,
        yes: Vec<u8>,
    },
    CorrelationId(DataType),
}

/// What a control input tells the model of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flag {
    /// It starts a sequence.
    Start,
    /// It ends its sequence.
    End,
    /// It is a request and no padding.
    Ready,
}

/// How a request's shape relates to the shape in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShapeForm {
    /// As in the model, with 1 for the batch axis, which is the first one. This is Triton's form.
    Plain,
    /// The configuration's dims are the model's, with -1 for the batch axis wherever it is. Requests have Triton's
    /// batch dimension in front of them, and responses have not. This is the form of NVIDIA's stateful_backend.
    BatchInside,
    /// Requests and responses have a dimension more, which is 1. The model's tensor has no batch axis, and Triton puts a
    /// batch dimension in front; or it is a scalar, which Triton doesn't have.
    Unbatched,
}

impl ShapeForm {
    /// The model's part of a request's dims.
    pub fn model_dims(self, request: &[i64]) -> &[i64] {
        match self {
            Self::Plain => request,
            Self::BatchInside | Self::Unbatched => request.get(1..).unwrap_or_default(),
        }
    }
}

/// An output that is fetched.
#[derive(Clone, Debug)]
pub struct BoundOutput {
    pub name: String,
    pub data_type: DataType,
    /// Which dimension is the number of rows.
    pub batch_axis: Option<usize>,
    /// How responses carry it.
    pub form: ShapeForm,
    /// `None` if a dimension other than the batch axis is open.
    pub dims: Option<Vec<i64>>,
    /// Whether responses may carry it.
    pub is_response: bool,
    /// Its shape in a response without elements: 0 for the batch axis and for open dimensions.
    pub empty_dims: Vec<i64>,
    /// How an answer carries the steps of a request, if a request may have any number.
    pub gathered: Option<Gathered>,
    /// The part that belongs to a row, if rows of different lengths share a batch; `None` for all.
    pub trim: Option<Trim>,
    /// Its name as Triton takes it.
    pub c_name: CString,
    /// Whether it is only a state that stays where the run wrote it, so that nothing reads it after the run.
    pub is_only_kept: bool,
}

impl BoundOutput {
    /// An output of the model that nothing uses yet.
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
            c_name: c_name(name),
            is_only_kept: false,
        }
    }
}

/// The part of an output that belongs to a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trim {
    /// The axis, in the model.
    pub axis: usize,
    pub by: TrimBy,
}

/// How much of an output belongs to a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrimBy {
    /// As much as the row has of this input in [`Binding::inputs`](super::model::Binding::inputs).
    Input(usize),
    /// As much as this output in [`Binding::outputs`](super::model::Binding::outputs) says.
    Output(usize),
}

/// The index of an output, which is fetched from now on.
pub(super) fn fetched(outputs: &mut Vec<BoundOutput>, info: &TensorInfo) -> usize {
    if let Some(index) = outputs.iter().position(|output| output.name == info.name) {
        return index;
    }
    outputs.push(BoundOutput::new(&info.name, info.data_type));
    outputs.len() - 1
}

/// A tensor's name for Triton. No name has a NUL; one that had would become empty.
pub(super) fn c_name(name: &str) -> CString {
    CString::new(name).unwrap_or_default()
}

/// A state: which input and output of the binding are its ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundState {
    /// Index in [`Binding::inputs`](super::model::Binding::inputs).
    pub input: usize,
    /// Index in [`Binding::outputs`](super::model::Binding::outputs).
    pub output: usize,
    pub data_type: DataType,
    /// Which dimension is the number of rows.
    pub batch_axis: Option<usize>,
    /// Dimensions of a row: 1 for the batch axis, -1 where the size varies.
    pub dims: Vec<i64>,
    pub place: StatePlace,
    pub storage: StorageType,
    /// The axis along which rows of different lengths are padded to share a run; `None` if they cannot.
    pub padded_axis: Option<usize>,
    /// Its value when a sequence starts.
    pub initial: Initial,
}

/// A state's initial value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Initial {
    /// The dimensions of a row. None is open.
    pub dims: Vec<i64>,
    pub content: InitialContent,
}

/// The elements of an initial value.
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

/// Where a sequence keeps a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatePlace {
    /// In its slot. Every row has this layout.
    Slot(RowLayout),
    /// Beside its slot, because it varies in size, under this number.
    Beside(usize),
}

impl BoundState {
    /// Whether it is kept in the sequence's slot.
    pub const fn is_in_slot(&self) -> bool {
        matches!(self.place, StatePlace::Slot(_))
    }

    /// Bytes that a row of `layout` takes when it is kept.
    pub const fn kept_bytes(&self, layout: RowLayout) -> usize {
        self.storage.bytes(layout.row_bytes())
    }

    /// Bytes of the state in its slot.
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
        (0..dims.len())
            .filter(|&axis| initial.content == InitialContent::Zeros && dims[axis] < 0 && initial.dims[axis] == 0)
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
