//! Rows with a gap: rows that are shorter than their batch along one axis.
//!
//! A batch is as long as its longest row. In a shorter row, the steps that are missing are a [`Gap`], which may be in
//! front of the row's own steps, between them or behind them. Alone, the row has no gap.

use std::fmt;
use std::ops::Range;

/// Steps of a row of a batch that are padding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gap {
    /// The first of them.
    pub from: usize,
    /// How many there are.
    pub length: usize,
}

impl Gap {
    /// No padding.
    pub const NONE: Self = Self { from: 0, length: 0 };

    /// The steps.
    pub const fn steps(self) -> Range<usize> {
        self.from..self.from + self.length
    }

    /// Whether there is no padding.
    pub const fn is_none(self) -> bool {
        self.length == 0
    }
}

/// Where the padding of rows is that are shorter than their batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PaddingSide {
    /// In front of the row.
    Left,
    /// Behind the row.
    Right,
}

impl PaddingSide {
    /// The gap of a row with so many steps in a batch of `padded` steps.
    pub const fn gap(self, steps: usize, padded: usize) -> Gap {
        let from = match self {
            Self::Left => 0,
            Self::Right => steps,
        };
        Gap { from, length: padded.saturating_sub(steps) }
    }
}

impl fmt::Display for PaddingSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Left => "left",
            Self::Right => "right",
        })
    }
}
