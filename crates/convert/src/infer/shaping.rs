//! Operators that move elements and leave them as they are: their shapes, and their values where those are known.

use super::tensor::{MOST_ELEMENTS, Tensor, axis_of, broadcast, list, pick, spread};
use crate::onnx::schema::NodeProto;
use crate::onnx::{DataType, element_count, numbers};

fn reshaped(from: &Tensor, dims: Vec<i64>) -> Tensor {
    Tensor { elem: from.elem, dims: Some(dims), data: from.data.clone(), length: None }
}

pub fn constant(node: &NodeProto) -> Tensor {
    if let Some(tensor) = node.attribute("value").and_then(|attribute| attribute.t.as_ref()) {
        return Tensor::of_weight(tensor);
    }
    let (int, float) = (DataType::Int64 as i32, DataType::Float as i32);
    let list = |elem, data: Vec<f64>| Tensor::with_data(elem, vec![data.len() as i64], data);
    // A Constant has exactly one attribute.
    let Some(value) = node.attribute.first() else { return Tensor::default() };
    match value.name() {
        "value_int" => Tensor::with_data(int, vec![], vec![value.i() as f64]),
        "value_float" => Tensor::with_data(float, vec![], vec![value.f().into()]),
        "value_ints" => list(int, value.ints.iter().map(|&value| value as f64).collect()),
        "value_floats" => list(float, value.floats.iter().map(|&value| value.into()).collect()),
        _ => Tensor::default(),
    }
}

pub fn constant_of_shape(node: &NodeProto, inputs: &[Tensor]) -> Tensor {
    let value = node.attribute("value").and_then(|attribute| attribute.t.as_ref());
    let elem = value.map_or(DataType::Float as i32, |value| value.data_type());
    let fill = value.and_then(numbers).and_then(|numbers| numbers.first().copied()).unwrap_or_default();
    let Some(dims) = inputs[0].ints() else { return Tensor::open(elem) };
    let count = usize::try_from(element_count(&dims).min(MOST_ELEMENTS)).unwrap_or_default();
    Tensor::with_data(elem, dims, vec![fill; count])
}

pub fn shape(node: &NodeProto, inputs: &[Tensor]) -> Tensor {
    let elem = DataType::Int64 as i32;
    let Some(dims) = &inputs[0].dims else { return Tensor::open(elem) };
    let rank = dims.len() as i64;
    // ONNX clamps the bounds of a Shape in place of refusing them.
    let bound = |value: i64| (if value < 0 { value + rank } else { value }).clamp(0, rank);
    let (start, end) = (bound(node.int("start").unwrap_or(0)), bound(node.int("end").unwrap_or(rank)));
    let part = &dims[start as usize..end.max(start) as usize];
    Tensor::with_data(elem, vec![part.len() as i64], part.iter().map(|&dim| dim as f64).collect::<Vec<_>>())
}

pub fn range(inputs: &[Tensor]) -> Tensor {
    let elem = inputs[0].elem;
    match (inputs[0].scalar(), inputs[1].scalar(), inputs[2].scalar()) {
        (Some(start), Some(end), Some(step)) if step != 0.0 => {
            let count = ((end - start) / step).ceil().max(0.0) as i64;
            // The length of a long range is still known, and shapes are computed with it.
            if count > MOST_ELEMENTS {
                return Tensor::shaped(elem, vec![count]);
            }
            Tensor::with_data(
                elem,
                vec![count],
                (0..count).map(|index| start + index as f64 * step).collect::<Vec<_>>(),
            )
        }
        _ => Tensor::open(elem),
    }
}

pub fn reshape(node: &NodeProto, inputs: &[Tensor]) -> Result<Tensor, String> {
    let target = list(node, inputs, 1, "shape");
    let (Some(own), Some(mut dims)) = (&inputs[0].dims, target) else { return Ok(Tensor::open(inputs[0].elem)) };
    if node.int("allowzero").unwrap_or(0) == 0 {
        // A 0 copies the length of the input, unless the node says that it means none.
        for (axis, dim) in dims.iter_mut().enumerate().filter(|(_, dim)| **dim == 0) {
            *dim = *own.get(axis).ok_or_else(|| format!("axis {axis} is copied from a shape of rank {}", own.len()))?;
        }
    }
    let count = element_count(own);
    if let Some(open) = dims.iter().position(|&dim| dim == -1) {
        let others = dims.iter().filter(|&&dim| dim != -1).fold(1, |count: i64, &dim| count.saturating_mul(dim));
        if others <= 0 || count % others != 0 {
            return Err(format!("{count} elements of {own:?} don't fit {dims:?}"));
        }
        dims[open] = count / others;
    }
    if element_count(&dims) != count {
        return Err(format!("{count} elements of {own:?} don't fit {dims:?}"));
    }
    Ok(reshaped(&inputs[0], dims))
}

pub fn flatten(node: &NodeProto, inputs: &[Tensor]) -> Tensor {
    let Some(own) = &inputs[0].dims else { return Tensor::open(inputs[0].elem) };
    let axis = node.int("axis").unwrap_or(1);
    let axis = (if axis < 0 { axis + own.len() as i64 } else { axis }).clamp(0, own.len() as i64) as usize;
    reshaped(&inputs[0], vec![element_count(&own[..axis]), element_count(&own[axis..])])
}

pub fn squeeze(node: &NodeProto, inputs: &[Tensor]) -> Result<Tensor, String> {
    let Some(own) = &inputs[0].dims else { return Ok(Tensor::open(inputs[0].elem)) };
    // Without axes, ONNX removes all of length 1.
    let axes: Vec<usize> = match list(node, inputs, 1, "axes") {
        Some(axes) => axes.iter().map(|&axis| axis_of(axis, own.len())).collect::<Result<_, _>>()?,
        None if node.input_at(1).is_some() => return Ok(Tensor::open(inputs[0].elem)),
        None => (0..own.len()).filter(|&axis| own[axis] == 1).collect(),
    };
    if let Some(axis) = axes.iter().find(|&&axis| own[axis] != 1) {
        return Err(format!("axis {axis} of {own:?} is not 1"));
    }
    let dims = (0..own.len()).filter(|axis| !axes.contains(axis)).map(|axis| own[axis]).collect();
    Ok(reshaped(&inputs[0], dims))
}

pub fn unsqueeze(node: &NodeProto, inputs: &[Tensor]) -> Result<Tensor, String> {
    let (Some(own), Some(axes)) = (&inputs[0].dims, list(node, inputs, 1, "axes")) else {
        return Ok(Tensor::open(inputs[0].elem));
    };
    let rank = own.len() + axes.len();
    let axes = axes.iter().map(|&axis| axis_of(axis, rank)).collect::<Result<Vec<_>, _>>()?;
    let mut left = own.iter();
    let dims = (0..rank).map(|axis| if axes.contains(&axis) { 1 } else { left.next().copied().unwrap_or(1) }).collect();
    Ok(reshaped(&inputs[0], dims))
}

pub fn permutation(node: &NodeProto, rank: usize) -> Vec<usize> {
    match node.ints("perm") {
        Some(axes) => axes.iter().map(|&axis| axis as usize).collect(),
        None => (0..rank).rev().collect(),
    }
}

pub fn transpose(node: &NodeProto, inputs: &[Tensor]) -> Result<Tensor, String> {
    let Some(own) = &inputs[0].dims else { return Ok(Tensor::open(inputs[0].elem)) };
    let order = permutation(node, own.len());
    if order.len() != own.len() || order.iter().any(|&axis| axis >= own.len()) {
        return Err(format!("the order {order:?} is none of {own:?}"));
    }
    let dims: Vec<i64> = order.iter().map(|&axis| own[axis]).collect();
    Ok(pick(&inputs[0], &dims, |at| {
        let mut position = vec![0; at.len()];
        for (&axis, &index) in order.iter().zip(at) {
            position[axis] = index;
        }
        position
    }))
}

pub fn concat(node: &NodeProto, inputs: &[Tensor]) -> Result<Tensor, String> {
    let elem = inputs.iter().map(|tensor| tensor.elem).find(|&elem| elem != 0).unwrap_or_default();
    let Some(shapes) = inputs.iter().map(|tensor| tensor.dims.as_deref()).collect::<Option<Vec<_>>>() else {
        return Ok(Tensor::open(elem));
    };
    let rank = shapes[0].len();
    let axis = axis_of(node.int("axis").unwrap_or(0), rank)?;
    let fits =
        |dims: &&[i64]| dims.len() == rank && (0..rank).all(|other| other == axis || dims[other] == shapes[0][other]);
    if !shapes.iter().all(fits) {
        return Err(format!("the shapes {shapes:?} don't join along axis {axis}"));
    }
    let mut dims = shapes[0].to_vec();
    dims[axis] = shapes.iter().map(|dims| dims[axis]).sum();
    // Each block of the outer axes takes one piece from every part.
    let outer = element_count(&dims[..axis]);
    if outer > MOST_ELEMENTS {
        return Ok(Tensor::shaped(elem, dims));
    }
    let parts =
        || inputs.iter().map(|tensor| Some((tensor.data.as_deref()?, element_count(&tensor.dims.as_deref()?[axis..]))));
    let data = parts().collect::<Option<Vec<_>>>().map(|parts| {
        let row = |row: i64| {
            parts.iter().flat_map(move |&(data, size)| &data[(row * size) as usize..((row + 1) * size) as usize])
        };
        (0..outer).flat_map(row).copied().collect::<Vec<f64>>()
    });
    Ok(Tensor::with_data(elem, dims, data))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    pub axis: usize,
    pub start: i64,
    pub step: i64,
    pub count: i64,
}

/// What a `Slice` takes, an entry for each axis that it names.
pub fn slices(node: &NodeProto, inputs: &[Tensor]) -> Result<Option<Vec<Taken>>, String> {
    let Some(own) = &inputs[0].dims else { return Ok(None) };
    let (Some(starts), Some(ends)) = (list(node, inputs, 1, "starts"), list(node, inputs, 2, "ends")) else {
        return Ok(None);
    };
    let axes = match list(node, inputs, 3, "axes") {
        Some(axes) => axes,
        None if node.input_at(3).is_some() => return Ok(None),
        None => (0..starts.len() as i64).collect(),
    };
    let steps = match (node.input_at(4), inputs.get(4).and_then(Tensor::ints)) {
        (_, Some(steps)) => steps,
        (Some(_), None) => return Ok(None),
        (None, None) => vec![1; starts.len()],
    };
    let mut taken = Vec::new();
    for (((&axis, &start), &end), &step) in axes.iter().zip(&starts).zip(&ends).zip(&steps) {
        let axis = axis_of(axis, own.len())?;
        let length = own[axis];
        let counted = |value: i64| if value < 0 { value.saturating_add(length) } else { value };
        let (start, count) = if step > 0 {
            let (start, end) = (counted(start).clamp(0, length), counted(end).clamp(0, length));
            (start, (end - start).max(0).saturating_add(step - 1) / step)
        } else if step == 0 {
            return Err("a step is 0".to_owned());
        } else {
            // The smallest number has no positive counterpart, and the count divides by that.
            let step = step.max(-i64::MAX);
            let (start, end) = (counted(start).clamp(-1, length - 1), counted(end).clamp(-1, length - 1));
            (start, (start - end).max(0).saturating_add(-step - 1) / -step)
        };
        taken.push(Taken { axis, start, step, count });
    }
    Ok(Some(taken))
}

pub fn slice(node: &NodeProto, inputs: &[Tensor]) -> Result<Tensor, String> {
    let (Some(own), Some(taken)) = (&inputs[0].dims, slices(node, inputs)?) else {
        return Ok(Tensor::open(inputs[0].elem));
    };
    let mut dims = own.clone();
    for part in &taken {
        dims[part.axis] = part.count;
    }
    Ok(pick(&inputs[0], &dims, |at| {
        let mut position = at.to_vec();
        for part in &taken {
            position[part.axis] = part.start + at[part.axis] * part.step;
        }
        position
    }))
}

pub fn gather(node: &NodeProto, inputs: &[Tensor]) -> Result<Tensor, String> {
    let (Some(own), Some(of)) = (&inputs[0].dims, &inputs[1].dims) else { return Ok(Tensor::open(inputs[0].elem)) };
    let axis = axis_of(node.int("axis").unwrap_or(0), own.len())?;
    let dims: Vec<i64> = own[..axis].iter().chain(of).chain(&own[axis + 1..]).copied().collect();
    let Some(indices) = inputs[1].ints() else { return Ok(Tensor::shaped(inputs[0].elem, dims)) };
    let (rank, length) = (of.len(), own[axis]);
    Ok(pick(&inputs[0], &dims, |at| {
        let flat = at[axis..axis + rank].iter().zip(of).fold(0, |flat, (&at, &dim)| flat * dim + at);
        let index = indices.get(flat as usize).copied().unwrap_or(i64::MAX);
        // ONNX counts negative indices from the end.
        let index = if index < 0 { index + length } else { index };
        at[..axis].iter().chain(&[index]).chain(&at[axis + rank..]).copied().collect()
    }))
}

pub fn expand(inputs: &[Tensor]) -> Result<Tensor, String> {
    let (Some(own), Some(target)) = (&inputs[0].dims, inputs[1].ints()) else {
        return Ok(Tensor::open(inputs[0].elem));
    };
    let dims = broadcast(&[own, &target])?;
    let data = spread(&inputs[0], &dims);
    Ok(Tensor::with_data(inputs[0].elem, dims, data))
}

pub fn tile(inputs: &[Tensor]) -> Tensor {
    let (Some(own), Some(repeats)) = (&inputs[0].dims, inputs[1].ints()) else { return Tensor::open(inputs[0].elem) };
    if repeats.len() != own.len() {
        return Tensor::open(inputs[0].elem);
    }
    let dims: Vec<i64> = own.iter().zip(&repeats).map(|(dim, repeat)| dim.saturating_mul(*repeat)).collect();
    pick(&inputs[0], &dims, |at| at.iter().zip(own).map(|(at, dim)| at % dim).collect())
}

pub fn split(node: &NodeProto, inputs: &[Tensor]) -> Result<Vec<Tensor>, String> {
    let open = || vec![Tensor::open(inputs[0].elem); node.output.len()];
    let Some(own) = &inputs[0].dims else { return Ok(open()) };
    let axis = axis_of(node.int("axis").unwrap_or(0), own.len())?;
    let sizes = match list(node, inputs, 1, "split") {
        Some(sizes) => sizes,
        None if node.input_at(1).is_some() => return Ok(open()),
        None => {
            // Without sizes, the last part may be smaller.
            let (parts, length) = (node.output.len().max(1) as i64, own[axis]);
            let size = (length + parts - 1) / parts;
            (0..parts).map(|part| size.min(length - part * size)).collect()
        }
    };
    let sum = sizes.iter().fold(0, |sum: i64, &size| sum.saturating_add(size));
    if sum != own[axis] || sizes.iter().any(|&size| size < 0) {
        return Err(format!("parts of {sizes:?} don't make up axis {axis} of {own:?}"));
    }
    let mut start = 0;
    let part = |&size: &i64| {
        let from = start;
        start += size;
        let mut dims = own.clone();
        dims[axis] = size;
        pick(&inputs[0], &dims, |at| {
            let mut position = at.to_vec();
            position[axis] += from;
            position
        })
    };
    Ok(sizes.iter().map(part).collect())
}
