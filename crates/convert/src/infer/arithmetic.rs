//! Operators that work element by element: their shapes, and their values where those are known.

use super::tensor::{Tensor, broadcast, spread};
use crate::onnx::DataType;
use crate::onnx::schema::NodeProto;

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
    let elem = elem_of(node, inputs);
    Ok(vec![
        data().map_or_else(|| Tensor::shaped(elem, dims.clone()), |data| Tensor::with_data(elem, dims.clone(), data)),
    ])
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
