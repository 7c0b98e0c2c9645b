//! An output of a run, taken apart into rows.

use rows::tensor::{Gap, GappedRow, RowAt, RowLayout};
use rows::{copies, strings};

use crate::binding::{Binding, BoundOutput, BoundState};
use crate::error::RequestError;
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
    pub layout: RowLayout,
    /// Shape of a row, with its padding.
    pub dims: Vec<i64>,
    /// Number of rows.
    pub rows: usize,
    /// The axis along which rows have padding, and that of each row; empty if no row has any.
    padding: (usize, &'a [Gap]),
}

impl<'a> OutputRows<'a> {
    /// Output number `index` of a run over `rows` rows.
    pub fn new(
        binding: &'a Binding,
        index: usize,
        mut view: OutputView<'a>,
        rows: usize,
    ) -> Result<Self, RequestError> {
        let bound = &binding.outputs[index];
        // What the model says of a batch as a whole is the row's if there is only one.
        if view.dims.is_empty() && bound.batch_axis.is_some() && rows == 1 {
            view.dims = &[1];
        }
        let uneven = || RequestError::OutputRows { name: bound.name.clone(), dims: view.dims.to_vec(), rows };
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

    /// Where the row at `position` lies around its padding; `None` if it has none.
    pub fn gapped(&self, position: usize) -> Option<GappedRow> {
        let (axis, gaps) = self.padding;
        let gap = *gaps.get(position).filter(|gap| !gap.is_none())?;
        let at = RowAt { position, rows: self.rows };
        GappedRow::new(self.bound.data_type, self.view.dims, self.bound.batch_axis, axis, gap, at)
    }

    /// Shape of the row at `position`, without its padding.
    pub fn row_dims(&self, position: usize) -> Vec<i64> {
        let (axis, gaps) = self.padding;
        let mut dims = self.dims.clone();
        if let Some(gap) = gaps.get(position) {
            dims[axis] -= gap.length as i64;
        }
        dims
    }

    /// Bytes of the row at `position`, without its padding.
    pub fn row_bytes(&self, position: usize) -> usize {
        self.gapped(position).map_or(self.layout.row_bytes(), |row| row.row_bytes())
    }

    /// Whether fp16 can hold each finite fp32 value of the row at `position`. On a device that isn't known: true.
    pub(super) fn fits_fp16(&self, position: usize) -> bool {
        let bytes = self.view.bytes;
        match self.gapped(position) {
            _ if bytes.is_empty() => true,
            Some(row) => copies::pieces_of_window(row.chunks(), bytes).all(copies::fits_fp16),
            None => copies::pieces_of(self.layout, bytes, self.at(position)).all(copies::fits_fp16),
        }
    }

    /// The elements of a row of strings.
    pub fn strings(&self, position: usize) -> impl Iterator<Item = &[u8]> + Clone {
        let RowAt { position, rows } = self.at(position);
        strings::positions(self.layout, position, rows).map(|index| self.view.strings.get(index))
    }

    /// Where a row is. An output without a batch axis is every row's.
    pub fn at(&self, position: usize) -> RowAt {
        if self.bound.batch_axis.is_none() {
            return RowAt { position: 0, rows: 1 };
        }
        RowAt { position, rows: self.rows }
    }

    /// The rows are not what they should be.
    pub fn uneven(&self) -> RequestError {
        RequestError::OutputRows { name: self.bound.name.clone(), dims: self.view.dims.to_vec(), rows: self.rows }
    }

    /// Whether the rows are what a state of varying size can be.
    pub(super) fn is_row_of(&self, state: &BoundState) -> bool {
        let fits = |(&dim, &wanted): (&i64, &i64)| dim == wanted || wanted < 0;
        self.dims.len() == state.dims.len() && self.dims.iter().zip(&state.dims).all(fits)
    }
}
