//! What a sequence keeps of an input from one request to the next: a context, and what is left over of windows. And how an
//! answer carries the steps of its request.

#![expect(missing_docs, reason = "most names say it")]

use crate::config::FirstRequest;

/// The windows in which the model gets an input that requests bring in any length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundWindow {
    /// The axis, in the model.
    pub axis: usize,
    /// New elements of a window along it.
    pub length: usize,
    /// Bytes of one element of a row.
    pub element_bytes: usize,
    /// Whether zeros fill up the last window at END.
    pub pads: bool,
}

impl BoundWindow {
    /// Elements that a window takes of what requests bring. `is_first`: no window of the sequence has left a context.
    pub fn taken(&self, context: Option<BoundContext>, is_first: bool) -> usize {
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

/// The end of a sequence's last request, kept for the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundContext {
    /// The axis, in the model.
    pub axis: usize,
    /// Steps along it.
    pub length: usize,
    pub first: FirstRequest,
    /// Bytes that are kept: those of the steps, and where an absent context differs from zeros, one that says whether it
    /// is there.
    pub bytes: usize,
    /// Its number in the slot ([`Binding::slot`](super::model::Binding::slot)).
    pub slot_entry: usize,
}

impl BoundContext {
    pub(super) const fn new(axis: usize, length: usize, first: FirstRequest, window_bytes: usize) -> Self {
        let bytes = if matches!(first, FirstRequest::Zeros) { window_bytes } else { window_bytes + 1 };
        // The entry is numbered when the slot is laid out, after all inputs are bound.
        Self { axis, length, first, bytes, slot_entry: 0 }
    }

    /// Whether a sequence without a context differs from one whose context is zeros.
    pub fn can_be_absent(&self) -> bool {
        self.first != FirstRequest::Zeros
    }

    /// The least steps that a request must carry, and how many exactly, if that is known. `of_model`: the model's
    /// dimension. Decoding has checked what is the same for all requests.
    pub fn lengths(&self, of_model: i64, is_first: bool) -> (usize, Option<usize>) {
        match (self.first, is_first) {
            (FirstRequest::Zeros, _) | (FirstRequest::Repeat, false) => (0, None),
            (FirstRequest::Repeat, true) => (1, None),
            (FirstRequest::Whole, is_first) => {
                let in_front = self.in_front(is_first);
                (self.length - in_front, usize::try_from(of_model).ok().map(|dim| dim - in_front))
            }
        }
    }

    /// Steps in front of a request.
    pub fn in_front(&self, is_first: bool) -> usize {
        if is_first && self.first == FirstRequest::Whole { 0 } else { self.length }
    }

    /// The steps in what is kept; `None` if they are absent, as at the start of a sequence.
    pub fn steps<'a>(&self, kept: &'a [u8]) -> Option<&'a [u8]> {
        match (self.can_be_absent(), kept.split_last()) {
            (true, Some((is_there, steps))) => Some(steps).filter(|_| *is_there != 0),
            (true, None) => None,
            (false, _) => Some(kept),
        }
    }

    /// Notes in what is kept that the steps are there.
    pub fn mark(&self, kept: &mut [u8]) {
        if let Some(is_there) = kept.last_mut().filter(|_| self.can_be_absent()) {
            *is_there = 1;
        }
    }
}
