//! Which rows can run together.
//!
//! Rows that differ only in the length of an input or of states that are padded can, but a long one must not make many
//! short ones take its room: see [`Lengths`].

use rows::tensor::{STRING_BYTES, element_count};
use smallvec::SmallVec;

use super::Row;
use super::gather::shared_values;
use crate::binding::{Binding, GrowingPadding, ShapeForm};
use crate::config::FirstRequest;

/// Bytes to which an input, or the padded states, may be filled up whatever the lengths of the rows are: 64 rows of a
/// second of speech, in fp32 at 16 kHz.
const PADDED_BYTES: usize = 64 * 16_000 * 4;

/// What two rows must have in common. Made once per instance; a model in which nothing varies asks for nothing.
#[derive(Default)]
pub struct Grouping {
    optional: Vec<usize>,
    shapes: Vec<Shape>,
    shared: Vec<usize>,
    has_shared_values: bool,
    pub has_open_states: bool,
    /// How states of different lengths share a run, if they do.
    pub padding: Option<GrowingPadding>,
}

struct Shape {
    position: usize,
    /// The dimension of a request in which rows may differ, as they are padded.
    padded: Option<usize>,
    /// The dimension of a request in which the first one of a sequence is longer than others, and by how much.
    first_is_longer: Option<(usize, usize)>,
    element_bytes: usize,
}

/// How long the rows of a padded input, or of the padded states, are, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lengths {
    shortest: usize,
    longest: usize,
}

impl Lengths {
    const NONE: Self = Self { shortest: usize::MAX, longest: 0 };

    fn with(self, row: usize) -> Self {
        Self { shortest: self.shortest.min(row), longest: self.longest.max(row) }
    }

    /// Whether as many rows may be filled up to the longest: at most half of the bytes are padding, or they are few.
    const fn may_share(self, rows: usize) -> bool {
        self.longest.div_ceil(2) <= self.shortest || self.longest.saturating_mul(rows) <= PADDED_BYTES
    }
}

pub struct Joining<'a> {
    grouping: &'a Grouping,
    most: usize,
    pub rows: Vec<Row>,
    /// Of the inputs whose shape varies, and last of the padded states.
    lengths: SmallVec<[Lengths; 3]>,
}

impl Joining<'_> {
    /// Takes the row if it can run with those that are there; returns it if it cannot.
    pub fn join(&mut self, row: Row) -> Option<Row> {
        let is_like = |first: &Row| self.grouping.together(&row, first);
        let bytes = self.grouping.shapes.iter().map(|shape| shape.bytes(&row));
        let of_states = self.grouping.padding.as_ref().map_or(0, |padding| padding.bytes(&row.state.dims));
        let bytes = bytes.chain(std::iter::once(of_states));
        let lengths: SmallVec<[_; 3]> = self.lengths.iter().zip(bytes).map(|(of, bytes)| of.with(bytes)).collect();
        let rows = self.rows.len() + 1;
        if rows > self.most
            || !self.rows.first().is_none_or(is_like)
            || !lengths.iter().all(|lengths| lengths.may_share(rows))
        {
            return Some(row);
        }
        self.rows.push(row);
        self.lengths = lengths;
        None
    }
}

impl Grouping {
    pub fn new(binding: &Binding) -> Self {
        let mut grouping = Self {
            has_shared_values: binding.generated().any(|(input, _)| input.batch_axis.is_none()),
            has_open_states: binding.states.iter().any(|state| state.dims.contains(&-1)),
            padding: binding.growing_padding.clone(),
            ..Self::default()
        };
        for (input, request) in binding.request_inputs() {
            if request.optional {
                grouping.optional.push(request.position);
            }
            if request.form == ShapeForm::Unbatched {
                grouping.shared.push(request.position);
            }
            let varies = |(axis, &dim): (usize, &i64)| dim < 0 && input.batch_axis != Some(axis);
            if input.dims.iter().enumerate().any(varies) {
                let in_front = if request.form == ShapeForm::Plain { 0 } else { 1 };
                grouping.shapes.push(Shape {
                    position: request.position,
                    padded: request.ragged_axis.filter(|_| request.is_padded).map(|axis| axis + in_front),
                    first_is_longer: request
                        .context
                        .filter(|context| context.first == FirstRequest::Whole)
                        .map(|context| (context.axis + in_front, context.length)),
                    element_bytes: input.data_type.byte_size().unwrap_or(STRING_BYTES),
                });
            }
        }
        grouping
    }

    /// Whether all rows of the model can run together.
    pub fn is_any(&self) -> bool {
        self.optional.is_empty()
            && self.shapes.is_empty()
            && self.shared.is_empty()
            && !self.has_shared_values
            && !self.has_open_states
    }

    pub fn batch(&self, most: usize) -> Joining<'_> {
        let lengths = (0..=self.shapes.len()).map(|_| Lengths::NONE).collect();
        Joining { grouping: self, most, rows: Vec::new(), lengths }
    }

    /// Whether two rows can run together, if their lengths allow it.
    fn together(&self, a: &Row, b: &Row) -> bool {
        let input = |row: &Row, position: usize| row.request.input(position).is_some();
        self.optional.iter().all(|&position| input(a, position) == input(b, position))
            && self.shapes.iter().all(|shape| shape.is_same(a, b))
            // Decoding has copied both, so that the value that runs is the one that is compared here.
            && self.shared.iter().all(|&position| match (a.request.input(position), b.request.input(position)) {
                (Some(a), Some(b)) => a.is_same(b),
                _ => true,
            })
            && shared_values(a) == shared_values(b)
            && (a.state.dims == b.state.dims
                || self.padding.as_ref().is_some_and(|padding| padding.is_for(&a.state.dims, &b.state.dims)))
    }
}

impl Shape {
    fn is_same(&self, a: &Row, b: &Row) -> bool {
        let (Some(of_a), Some(of_b)) = (a.request.input(self.position), b.request.input(self.position)) else {
            return true;
        };
        let (a, b) = (self.in_model(a, of_a.dims()), self.in_model(b, of_b.dims()));
        // A row without elements has nothing to be filled up from: what a model makes of it is its own affair.
        let differ = |axis: usize| a[axis] != b[axis] && (self.padded != Some(axis) || a[axis] == 0 || b[axis] == 0);
        a.len() == b.len() && !(0..a.len()).any(differ)
    }

    /// The dims of a row's request as if it were the first of its sequence.
    fn in_model(&self, row: &Row, dims: &[i64]) -> SmallVec<[i64; 8]> {
        let mut dims = SmallVec::from_slice(dims);
        if let Some((axis, by)) = self.first_is_longer.filter(|_| !row.state.is_first) {
            dims[axis] += by as i64;
        }
        dims
    }

    /// Bytes of a row; they differ in the length alone where rows can run together.
    fn bytes(&self, row: &Row) -> usize {
        let count = row.request.input(self.position).and_then(|input| element_count(input.dims()));
        count.unwrap_or(0).saturating_mul(self.element_bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The lengths of the rows that join, in their order.
    fn join(rows: &[usize]) -> Vec<usize> {
        let (mut joined, mut lengths) = (Vec::new(), Lengths::NONE);
        for &row in rows {
            if lengths.with(row).may_share(joined.len() + 1) {
                lengths = lengths.with(row);
                joined.push(row);
            }
        }
        joined
    }

    #[test]
    fn small_inputs_are_filled_up_whatever_the_lengths() {
        assert_eq!(join(&[4, 64_000, 0, 1]), [4, 64_000, 0, 1]);
        assert_eq!(join(&[64_000; 100]).len(), 100);
    }

    #[test]
    fn a_long_row_runs_without_the_short_ones_and_with_those_half_as_long() {
        let long = 20 << 20;
        assert_eq!(join(&[long, 64, 64, long / 2, long / 2 - 1]), [long, long / 2]);
        assert_eq!(join(&[64, long, 64]), [64, 64]);
        assert_eq!(join(&[usize::MAX, 1]), [usize::MAX]);
    }

    proptest! {
        #[test]
        fn at_most_half_of_a_large_input_is_padding(rows in prop::collection::vec(0usize..30_000_000, 1..64)) {
            let joined = join(&rows);
            prop_assert_eq!(joined.first(), rows.first(), "the first row runs, however long it is");
            let filled = joined.len() * joined.iter().max().unwrap();
            prop_assert!(filled <= PADDED_BYTES || filled <= 2 * joined.iter().sum::<usize>() + joined.len());
        }
    }
}
