//! The known facts about one tensor, the search for its elements, and operators that work element by element.

use std::sync::Arc;

use crate::onnx::schema::{NodeProto, TensorProto};
use crate::onnx::{DataType, element_count, numbers};

/// Contents of larger tensors aren't followed.
pub const MOST_ELEMENTS: i64 = 1 << 14;
// No tensor has more elements or a longer axis. So sums of lengths, and products of a length and a window, fit an i64.
// Products of lengths saturate.
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

    /// A tensor with its content if that is known. Content that is large or doesn't fit is dropped.
    pub fn with_data(elem: i32, dims: Vec<i64>, data: impl Into<Option<Vec<f64>>>) -> Self {
        let count = element_count(&dims);
        let fits = |data: &Vec<f64>| count <= MOST_ELEMENTS && usize::try_from(count) == Ok(data.len());
        Self { elem, dims: Some(dims), data: data.into().filter(fits).map(Into::into), length: None }
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
    Tensor::with_data(from.elem, dims.to_vec(), picked())
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

fn unary(op: &str) -> Option<fn(f64) -> f64> {
    Some(match op {
        "Identity" | "Cast" | "CastLike" | "Dropout" => |x| x,
        "Neg" => |x| -x,
        "Abs" => f64::abs,
        "Not" => |x| f64::from(x == 0.0),
        "Floor" => f64::floor,
        "Ceil" => f64::ceil,
        "Round" => f64::round_ties_even,
        "Sqrt" => f64::sqrt,
        "Exp" => f64::exp,
        "Log" => f64::ln,
        "Tanh" => f64::tanh,
        "Relu" => |x| x.max(0.0),
        "Sigmoid" => |x| 1.0 / (1.0 + (-x).exp()),
        "Reciprocal" => |x| 1.0 / x,
        "Sign" => |x| if x == 0.0 { 0.0 } else { x.signum() },
        _ => return None,
    })
}

fn binary(op: &str, integers: bool) -> Option<fn(f64, f64) -> f64> {
    Some(match op {
        "Add" | "Sum" => |a, b| a + b,
        "Sub" => |a, b| a - b,
        "Mul" => |a, b| a * b,
        // The result of an integer division by zero is undefined, so any number does.
        "Div" if integers => |a, b| if b == 0.0 { 0.0 } else { (a / b).trunc() },
        "Div" => |a, b| a / b,
        "Mod" => |a, b| if b == 0.0 { 0.0 } else { a - b * (a / b).floor() },
        "Pow" => f64::powf,
        "Min" => f64::min,
        "Max" => f64::max,
        "Equal" => |a, b| f64::from(a == b),
        "Less" => |a, b| f64::from(a < b),
        "LessOrEqual" => |a, b| f64::from(a <= b),
        "Greater" => |a, b| f64::from(a > b),
        "GreaterOrEqual" => |a, b| f64::from(a >= b),
        "And" => |a, b| f64::from(a != 0.0 && b != 0.0),
        "Or" => |a, b| f64::from(a != 0.0 || b != 0.0),
        "Xor" => |a, b| f64::from((a != 0.0) != (b != 0.0)),
        _ => return None,
    })
}

fn is_integer(elem: i32) -> bool {
    use DataType::{Bool, Int8, Int16, Int32, Int64, Uint8, Uint16, Uint32, Uint64};
    [Bool, Int8, Int16, Int32, Int64, Uint8, Uint16, Uint32, Uint64].iter().any(|&known| elem == known as i32)
}

pub fn element_wise(node: &NodeProto, inputs: &[Tensor]) -> Result<Vec<Tensor>, String> {
    let op = node.op();
    if inputs.is_empty() {
        return Ok(Vec::new());
    }
    let present: Vec<&Tensor> =
        // Optional inputs may be left out by an empty name, as in Clip.
        inputs.iter().zip(&node.input).filter(|(_, name)| !name.is_empty()).map(|(tensor, _)| tensor).collect();
    let Some(shapes) = present.iter().map(|tensor| tensor.dims.as_deref()).collect::<Option<Vec<_>>>() else {
        return Ok(vec![Tensor::open(elem_of(node, inputs))]);
    };
    let dims = broadcast(&shapes)?;
    let data = || -> Option<Vec<f64>> {
        let columns = present.iter().map(|tensor| spread(tensor, &dims)).collect::<Option<Vec<_>>>()?;
        let rows = 0..columns.first()?.len();
        match columns.as_slice() {
            [only] => {
                let of = unary(op)?;
                // Contents are f64 here, whatever the type of the tensor.
                let truncates = op == "Cast" && is_integer(elem_of(node, inputs)) && !is_integer(inputs[0].elem);
                let is_bool = elem_of(node, inputs) == DataType::Bool as i32;
                let cast = |x: f64| {
                    if is_bool {
                        f64::from(x != 0.0)
                    } else if truncates {
                        x.trunc()
                    } else {
                        x
                    }
                };
                Some(only.iter().map(|&x| cast(of(x))).collect())
            }
            [condition, yes, no] if op == "Where" => {
                Some(rows.map(|row| if condition[row] != 0.0 { yes[row] } else { no[row] }).collect())
            }
            // Max, Min and Sum take any number of inputs.
            [first, others @ ..] => {
                let of = binary(op, is_integer(inputs[0].elem))?;
                Some(rows.map(|row| others.iter().fold(first[row], |value, other| of(value, other[row]))).collect())
            }
            [] => None,
        }
    };
    let data = data();
    Ok(vec![Tensor::with_data(elem_of(node, inputs), dims, data)])
}

fn elem_of(node: &NodeProto, inputs: &[Tensor]) -> i32 {
    let elem = |index: usize| inputs.get(index).map_or(0, |tensor| tensor.elem);
    match node.op() {
        "Cast" => node.int("to").and_then(|to| i32::try_from(to).ok()).unwrap_or_default(),
        "CastLike" | "Where" => elem(1),
        "Equal" | "Less" | "LessOrEqual" | "Greater" | "GreaterOrEqual" | "And" | "Or" | "Xor" | "Not" | "IsNaN"
        | "IsInf" => DataType::Bool as i32,
        _ => elem(0),
    }
}

/// The type that a quantization makes: that of its zero point.
pub fn quantized_elem(zero_point: &Tensor) -> i32 {
    if zero_point.elem == 0 { DataType::Uint8 as i32 } else { zero_point.elem }
}
