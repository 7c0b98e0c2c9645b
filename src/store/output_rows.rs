//! An output of a run, taken apart into rows.

use rows::tensor::{Gap, Part, RowAt, RowLayout, WindowLayout};
use rows::{copies, strings};

use crate::binding::{Binding, BoundOutput, BoundState};
use crate::error::RunError;
use crate::session::OutputView;

/// An output of a run, taken apart into rows.
pub struct OutputRows<'a> {
    /// Which output of the step.
    pub index: usize,
    /// What it is for.
    pub bound: &'a BoundOutput,
    /// The whole of it.
    pub view: OutputView<'a>,
    /// Layout of its rows.
    layout: RowLayout,
    /// Shape of a row, with its padding.
    pub dims: Vec<i64>,
    /// Number of rows.
    pub rows: usize,
    /// The axis along which rows have padding, and that of each row; empty if no row has any.
    padding: (usize, &'a [Gap]),
}

impl<'a> OutputRows<'a> {
    /// Output number `index` of a run over `rows` rows.
    pub fn new(binding: &'a Binding, index: usize, mut view: OutputView<'a>, rows: usize) -> Result<Self, RunError> {
        let bound = &binding.outputs[index];
        // What the model says of a batch as a whole is the row's if there is only one.
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

    /// The output of a state whose rows had this padding along `axis` in the run.
    pub(super) fn padded(self, axis: usize, gaps: &'a [Gap]) -> Self {
        Self { padding: (axis, gaps), ..self }
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

    /// The elements of a row of strings.
    pub fn strings(&self, position: usize) -> impl Iterator<Item = &[u8]> + Clone {
        strings::positions(&self.row(position)).map(|index| self.view.strings.get(index))
    }

    /// The rows are not what they should be.
    pub fn uneven(&self) -> RunError {
        RunError::OutputRows { name: self.bound.name.clone(), dims: self.view.dims.to_vec(), rows: self.rows }
    }

    /// Whether the rows are what a state of varying size can be.
    pub(super) fn is_row_of(&self, state: &BoundState) -> bool {
        let fits = |(&dim, &wanted): (&i64, &i64)| dim == wanted || wanted < 0;
        self.dims.len() == state.dims.len() && self.dims.iter().zip(&state.dims).all(fits)
    }
}
