//! What is known about one tensor, and how its elements are found.

use std::sync::Arc;

use crate::onnx::schema::{NodeProto, TensorProto};
use crate::onnx::{element_count, numbers};

/// Contents of larger tensors aren't followed.
pub const MOST_ELEMENTS: i64 = 1 << 14;

/// No tensor has more elements or a longer axis. So sums of lengths, and products of a length and a window, fit an i64.
/// Products of lengths saturate.
pub const MOST_LENGTH: i64 = 1 << 40;

const MOST_AXES: usize = 64;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tensor {
    /// The data type; 0 if unknown.
    pub elem: i32,
    /// The shape; that of an element for a sequence.
    pub dims: Option<Vec<i64>>,
    pub data: Option<Arc<[f64]>>,
    /// For a sequence, how many tensors it has.
    pub length: Option<i64>,
}

impl Tensor {
    pub fn shaped(elem: i32, dims: Vec<i64>) -> Self {
        Self { elem, dims: Some(dims), ..Self::default() }
    }

    pub fn open(elem: i32) -> Self {
        Self { elem, ..Self::default() }
    }

    pub fn with_data(elem: i32, dims: Vec<i64>, data: Vec<f64>) -> Self {
        let fits = element_count(&dims) <= MOST_ELEMENTS && usize::try_from(element_count(&dims)) == Ok(data.len());
        Self { elem, dims: Some(dims), data: fits.then(|| data.into()), length: None }
    }

    /// The tensor, with an unknown shape if no tensor can have this one.
    pub fn possible(self) -> Self {
        let is_possible = |dims: &[i64]| {
            // A zero would hide lengths that overflow elsewhere.
            let counts = dims.iter().map(|&dim| dim.max(1)).collect::<Vec<_>>();
            dims.len() <= MOST_AXES && dims.iter().all(|&dim| dim >= 0) && element_count(&counts) <= MOST_LENGTH
        };
        if self.dims.as_deref().is_none_or(is_possible) {
            self
        } else {
            Self { length: self.length, ..Self::open(self.elem) }
        }
    }

    pub fn ints(&self) -> Option<Vec<i64>> {
        self.data.as_ref().map(|data| data.iter().map(|&value| value as i64).collect())
    }

    pub fn is_full_of(&self, value: f64) -> bool {
        self.data.as_ref().is_some_and(|data| data.iter().all(|&element| element == value))
    }

    pub fn scalar(&self) -> Option<f64> {
        match self.data.as_deref() {
            Some(&[value]) => Some(value),
            _ => None,
        }
    }

    pub fn of_weight(tensor: &TensorProto) -> Self {
        let small = element_count(&tensor.dims) <= MOST_ELEMENTS;
        let data = if small { numbers(tensor) } else { None };
        Self { elem: tensor.data_type(), dims: Some(tensor.dims.clone()), data: data.map(Into::into), length: None }
    }
}

pub fn axis_of(axis: i64, rank: usize) -> Result<usize, String> {
    let rank = i64::try_from(rank).unwrap_or(i64::MAX);
    let counted = if axis < 0 { axis + rank } else { axis };
    if (0..rank).contains(&counted) { Ok(counted as usize) } else { Err(format!("axis {axis} of rank {rank}")) }
}

/// A list that newer versions of ONNX take as an input and older ones as an attribute.
pub fn list(node: &NodeProto, inputs: &[Tensor], index: usize, attribute: &str) -> Option<Vec<i64>> {
    match node.input_at(index) {
        Some(_) => inputs.get(index)?.ints(),
        None => node.ints(attribute).map(<[i64]>::to_vec),
    }
}

/// A tensor of this shape. `position` says where each of its elements is in the input.
pub fn pick(from: &Tensor, dims: &[i64], position: impl Fn(&[i64]) -> Vec<i64>) -> Tensor {
    let picked = || -> Option<Vec<f64>> {
        let (own, data) = (from.dims.as_deref()?, from.data.as_deref()?);
        let count = element_count(dims);
        if count > MOST_ELEMENTS {
            return None;
        }
        let mut at = vec![0; dims.len()];
        let mut out = Vec::new();
        for flat in 0..count {
            let mut rest = flat;
            for axis in (0..dims.len()).rev() {
                at[axis] = rest % dims[axis];
                rest /= dims[axis];
            }
            let mut index = 0;
            for (&at, &dim) in position(&at).iter().zip(own) {
                // An index of the model may lie outside; ONNX Runtime refuses it when the model runs.
                if !(0..dim).contains(&at) {
                    return None;
                }
                index = index * dim + at;
            }
            out.push(*data.get(usize::try_from(index).ok()?)?);
        }
        Some(out)
    };
    match picked() {
        Some(data) => Tensor::with_data(from.elem, dims.to_vec(), data),
        None => Tensor::shaped(from.elem, dims.to_vec()),
    }
}

pub fn broadcast(all: &[&[i64]]) -> Result<Vec<i64>, String> {
    let rank = all.iter().map(|dims| dims.len()).max().unwrap_or_default();
    let mut out = vec![1; rank];
    for dims in all {
        for (slot, &dim) in out[rank - dims.len()..].iter_mut().zip(*dims) {
            if *slot == 1 {
                *slot = dim;
            } else if dim != 1 && dim != *slot {
                return Err(format!("the shapes {all:?} don't broadcast"));
            }
        }
    }
    Ok(out)
}

pub fn spread(tensor: &Tensor, dims: &[i64]) -> Option<Vec<f64>> {
    let (own, data) = (tensor.dims.as_deref()?, tensor.data.as_deref()?);
    if own == dims {
        return Some(data.to_vec());
    }
    let count = element_count(dims);
    if count > MOST_ELEMENTS {
        return None;
    }
    let front = dims.len().checked_sub(own.len())?;
    let mut strides = vec![0; dims.len()];
    let mut stride = 1;
    for axis in (0..own.len()).rev() {
        // An axis of 1 repeats its only entry.
        strides[front + axis] = if own[axis] == 1 { 0 } else { stride };
        stride *= own[axis];
    }
    let at = |flat: i64| {
        let mut rest = flat;
        let mut position = 0;
        for axis in (0..dims.len()).rev() {
            position += rest % dims[axis] * strides[axis];
            rest /= dims[axis];
        }
        usize::try_from(position).ok()
    };
    (0..count).map(|flat| data.get(at(flat)?).copied()).collect()
}
