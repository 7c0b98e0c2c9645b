//! The shapes of the operators that streaming models have. An operator that isn't here has outputs of open shapes.

use super::shaping;
use super::tensor::{MOST_LENGTH, Tensor, axis_of, broadcast, element_wise, list, quantized_elem};
use crate::onnx::operators::ShapeRule;
use crate::onnx::schema::NodeProto;
use crate::onnx::{DataType, element_count};

const MOST_INPUTS: usize = 8;

pub fn infer(node: &NodeProto, inputs: &[Tensor], opset: i64) -> Result<Vec<Tensor>, String> {
    let rule = node.shape_rule();
    match rule {
        ShapeRule::Broadcast => return element_wise(node, inputs),
        ShapeRule::Concat if inputs.is_empty() => return Ok(Vec::new()),
        ShapeRule::Concat => return Ok(vec![shaping::concat(node, inputs)?]),
        _ => {}
    }
    // Inputs that are left out are unknown.
    let mut inputs = inputs.to_vec();
    inputs.resize(inputs.len().max(MOST_INPUTS), Tensor::default());
    let inputs = inputs.as_slice();
    let first = &inputs[0];
    let same = |elem: i32| Tensor { elem, dims: first.dims.clone(), data: None, length: None };
    Ok(match rule {
        ShapeRule::Each => {
            let mut outputs = element_wise(node, &inputs[..1])?;
            if node.op() == "CastLike" {
                outputs[0].elem = inputs[1].elem;
            }
            outputs
        }
        ShapeRule::Same => vec![same(first.elem)],
        ShapeRule::DequantizeLinear => vec![same(inputs[1].elem)],
        ShapeRule::QuantizeLinear => vec![same(quantized_elem(&inputs[2]))],
        ShapeRule::DynamicQuantizeLinear => {
            let scalar = |elem: DataType| Tensor::shaped(elem as i32, vec![]);
            vec![same(DataType::Uint8 as i32), scalar(DataType::Float), scalar(DataType::Uint8)]
        }
        ShapeRule::Constant => vec![shaping::constant(node)],
        ShapeRule::ConstantOfShape => vec![shaping::constant_of_shape(node, inputs)],
        ShapeRule::Shape => vec![shaping::shape(node, inputs)],
        ShapeRule::Size => vec![size(first)],
        ShapeRule::Range => vec![shaping::range(inputs)],
        ShapeRule::Reshape => vec![shaping::reshape(node, inputs)?],
        ShapeRule::Flatten => vec![shaping::flatten(node, inputs)],
        ShapeRule::Squeeze => vec![shaping::squeeze(node, inputs)?],
        ShapeRule::Unsqueeze => vec![shaping::unsqueeze(node, inputs)?],
        ShapeRule::Transpose => vec![shaping::transpose(node, inputs)?],
        ShapeRule::Slice => vec![shaping::slice(node, inputs)?],
        ShapeRule::Gather => vec![shaping::gather(node, inputs)?],
        ShapeRule::Expand => vec![shaping::expand(inputs)?],
        ShapeRule::Tile => vec![shaping::tile(inputs)],
        ShapeRule::Split => shaping::split(node, inputs)?,
        ShapeRule::MatMul => vec![mat_mul(first, &inputs[1], first.elem)?],
        ShapeRule::FusedMatMul => vec![fused_mat_mul(node, first, &inputs[1])?],
        ShapeRule::MatMulIntegerToFloat => vec![mat_mul(first, &inputs[1], DataType::Float as i32)?],
        ShapeRule::QLinearMatMul => vec![mat_mul(first, &inputs[3], inputs[7].elem)?],
        ShapeRule::Gemm => vec![gemm(node, inputs)?],
        ShapeRule::Einsum => vec![einsum(node, inputs)],
        ShapeRule::Conv => vec![window(node, first, Some(&inputs[1]), false)?],
        ShapeRule::ConvTranspose => vec![transposed_window(node, first, &inputs[1])],
        ShapeRule::QLinearConv => {
            let made = window(node, first, Some(&inputs[3]), false)?;
            vec![Tensor { elem: inputs[7].elem, ..made }]
        }
        ShapeRule::Pool => vec![window(node, first, None, true)?],
        ShapeRule::GlobalPool => vec![global_pool(first)],
        ShapeRule::Pad => vec![pad(node, inputs)],
        ShapeRule::Resize => vec![resize(node, inputs, opset)],
        ShapeRule::OneHot => vec![one_hot(node, inputs)?],
        ShapeRule::GatherElements => vec![Tensor { dims: inputs[1].dims.clone(), ..Tensor::open(first.elem) }],
        ShapeRule::Recurrent => recurrent(node, inputs),
        ShapeRule::ArgReduce => {
            let axes = [node.int("axis").unwrap_or(0)];
            vec![reduced(first, Some(&axes), node.int("keepdims").unwrap_or(1) != 0, DataType::Int64 as i32)?]
        }
        ShapeRule::Reduce => vec![reduce(node, inputs, opset)?],
        ShapeRule::TopK => top_k(node, inputs),
        ShapeRule::SequenceEmpty => vec![Tensor { length: Some(0), ..Tensor::default() }],
        ShapeRule::SequenceInsert => {
            let element = &inputs[1];
            vec![Tensor { length: first.length.map(|length| length.saturating_add(1)), data: None, ..element.clone() }]
        }
        ShapeRule::ConcatFromSequence => vec![concat_from_sequence(node, first)],
        ShapeRule::OptionalGetElement => vec![first.clone()],
        // Bodies and branches are followed by the caller, which knows the tensors around them.
        ShapeRule::Loop
        | ShapeRule::Scan
        | ShapeRule::If
        | ShapeRule::Broadcast
        | ShapeRule::Concat
        | ShapeRule::Open => Vec::new(),
    })
}

fn size(of: &Tensor) -> Tensor {
    let count = of.dims.as_ref().map(|dims| vec![element_count(dims) as f64]);
    Tensor::with_data(DataType::Int64 as i32, vec![], count)
}

/// Follows an equation that names its output and has no ellipsis.
fn einsum(node: &NodeProto, inputs: &[Tensor]) -> Tensor {
    // ONNX allows spaces anywhere in an equation.
    let equation = node.text("equation").unwrap_or_default().replace(' ', "");
    let length = |letter: char, terms: &str| {
        let of_term = |(term, input): (&str, &Tensor)| {
            let axis = term.chars().position(|other| other == letter)?;
            input.dims.as_ref()?.get(axis).copied()
        };
        // A length of 1 broadcasts.
        terms.split(',').zip(inputs).filter_map(of_term).max()
    };
    let dims = equation.split_once("->").filter(|_| !equation.contains('.'));
    let dims = dims.and_then(|(terms, out)| out.chars().map(|letter| length(letter, terms)).collect());
    Tensor { dims, ..Tensor::open(inputs[0].elem) }
}

fn mat_mul(a: &Tensor, b: &Tensor, elem: i32) -> Result<Tensor, String> {
    let (Some(a), Some(b)) = (&a.dims, &b.dims) else { return Ok(Tensor::open(elem)) };
    if a.is_empty() || b.is_empty() {
        return Err("a factor is a scalar".to_owned());
    }
    // A vector counts as a matrix of one row or one column, which the product does not keep.
    let left = if a.len() == 1 { vec![1, a[0]] } else { a.clone() };
    let right = if b.len() == 1 { vec![b[0], 1] } else { b.clone() };
    let (rows, inner) = (left[left.len() - 2], left[left.len() - 1]);
    if inner != right[right.len() - 2] {
        return Err(format!("{a:?} and {b:?} don't multiply"));
    }
    let mut dims = broadcast(&[&left[..left.len() - 2], &right[..right.len() - 2]])?;
    if a.len() > 1 {
        dims.push(rows);
    }
    if b.len() > 1 {
        dims.push(right[right.len() - 1]);
    }
    Ok(Tensor::shaped(elem, dims))
}

fn fused_mat_mul(node: &NodeProto, a: &Tensor, b: &Tensor) -> Result<Tensor, String> {
    let is_set = |name: &str| node.int(name).unwrap_or(0) != 0;
    if is_set("transBatchA") || is_set("transBatchB") {
        return Ok(Tensor::open(a.elem));
    }
    let flipped = |factor: &Tensor, flips: bool| {
        let mut factor = factor.clone();
        if let Some([.., rows, columns]) = factor.dims.as_deref_mut().filter(|_| flips) {
            std::mem::swap(rows, columns);
        }
        factor
    };
    mat_mul(&flipped(a, is_set("transA")), &flipped(b, is_set("transB")), a.elem)
}

fn gemm(node: &NodeProto, inputs: &[Tensor]) -> Result<Tensor, String> {
    let elem = inputs[0].elem;
    let (Some(a), Some(b)) = (&inputs[0].dims, &inputs[1].dims) else { return Ok(Tensor::open(elem)) };
    let ordered = |dims: &[i64], flip: &str| match *dims {
        [rows, columns] if node.int(flip).unwrap_or(0) != 0 => Ok((columns, rows)),
        [rows, columns] => Ok((rows, columns)),
        _ => Err(format!("{dims:?} is no matrix")),
    };
    let ((rows, inner), (depth, columns)) = (ordered(a, "transA")?, ordered(b, "transB")?);
    if inner != depth {
        return Err(format!("{a:?} and {b:?} don't multiply"));
    }
    Ok(Tensor::shaped(elem, vec![rows, columns]))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    pub kernel: i64,
    pub stride: i64,
    pub dilation: i64,
    pub before: i64,
    pub behind: i64,
    /// The padding is computed from the input's length (`auto_pad`).
    pub automatic: bool,
}

impl Window {
    /// Elements that a window covers beyond its first.
    pub fn reach(&self) -> i64 {
        (self.kernel - 1) * self.dilation
    }
}

const MOST_WINDOW: i64 = 1 << 20;

/// What a convolution or a pooling does along a spatial axis (0 is the input's axis 2).
pub fn window_at(node: &NodeProto, weights: Option<&[i64]>, spatial: usize, rank: usize) -> Option<Window> {
    let at = |name: &str, default: i64| node.ints(name).map_or(Some(default), |list| list.get(spatial).copied());
    let kernel = match node.ints("kernel_shape") {
        Some(kernel) => *kernel.get(spatial)?,
        None => *weights?.get(spatial + 2)?,
    };
    let (before, behind) = match node.ints("pads") {
        Some(pads) => (*pads.get(spatial)?, *pads.get((spatial + rank).checked_sub(2)?)?),
        None => (0, 0),
    };
    let automatic = node.text("auto_pad").is_some_and(|text| text.starts_with("SAME"));
    let (stride, dilation) = (at("strides", 1)?, at("dilations", 1)?);
    let is_possible = [kernel, stride, dilation].iter().all(|length| (1..=MOST_WINDOW).contains(length))
        && [before, behind].iter().all(|pad| (0..=MOST_WINDOW).contains(pad));
    is_possible.then_some(Window { kernel, stride, dilation, before, behind, automatic })
}

fn window(node: &NodeProto, input: &Tensor, weights: Option<&Tensor>, pools: bool) -> Result<Tensor, String> {
    let elem = input.elem;
    let Some(own) = input.dims.as_deref().filter(|own| own.len() > 2) else { return Ok(Tensor::open(elem)) };
    let weights = match weights.map(|weights| weights.dims.as_deref()) {
        Some(None) => return Ok(Tensor::open(elem)),
        Some(Some([])) => return Err("its weights are a scalar".to_owned()),
        weights => weights.flatten(),
    };
    let mut dims = vec![own[0], weights.map_or(own[1], |weights| weights[0])];
    for spatial in 0..own.len() - 2 {
        let Some(window) = window_at(node, weights, spatial, own.len()) else { return Ok(Tensor::open(elem)) };
        let length = own[spatial + 2];
        // With SAME padding, the output depends on the stride alone.
        if window.automatic {
            dims.push((length + window.stride - 1) / window.stride);
            continue;
        }
        let free = length + window.before + window.behind - window.reach() - 1;
        if free < 0 {
            return Err(format!("a window of {} doesn't fit {length} elements", window.reach() + 1));
        }
        // Convolutions have no ceil_mode.
        let ceils = pools && node.int("ceil_mode").unwrap_or(0) != 0;
        dims.push((if ceils { (free + window.stride - 1) / window.stride } else { free / window.stride }) + 1);
    }
    Ok(Tensor::shaped(elem, dims))
}

fn transposed_window(node: &NodeProto, input: &Tensor, weights: &Tensor) -> Tensor {
    let made = || {
        let (own, weights) = (input.dims.as_deref()?, weights.dims.as_deref().filter(|weights| weights.len() > 2)?);
        let mut dims = vec![*own.first()?, weights[1].saturating_mul(node.int("group").unwrap_or(1))];
        for (spatial, &length) in own.get(2..)?.iter().enumerate() {
            let window = window_at(node, Some(weights), spatial, own.len())?;
            let added = node.ints("output_padding").map_or(Some(0), |added| added.get(spatial).copied())?;
            let free = window.stride * (length - 1) + window.reach() + 1 - window.before - window.behind;
            dims.push(free.saturating_add(added));
        }
        Some(dims)
    };
    // Then the padding follows from the output, and not the output from the padding.
    let is_given =
        node.attribute("output_shape").is_some() || node.attribute("auto_pad").is_some_and(|pad| pad.s() != b"NOTSET");
    Tensor { elem: input.elem, dims: made().filter(|_| !is_given), ..Tensor::default() }
}

fn global_pool(input: &Tensor) -> Tensor {
    let pooled = |dims: &Vec<i64>| dims.iter().enumerate().map(|(axis, &dim)| if axis < 2 { dim } else { 1 }).collect();
    Tensor { elem: input.elem, dims: input.dims.as_ref().map(pooled), ..Tensor::default() }
}

pub fn pads(node: &NodeProto, inputs: &[Tensor], rank: usize) -> Option<Vec<(i64, i64)>> {
    let pads = list(node, inputs, 1, "pads")?;
    let axes: Vec<usize> = match node.input_at(3) {
        Some(_) => inputs.get(3)?.ints()?.iter().map(|&axis| axis_of(axis, rank).ok()).collect::<Option<_>>()?,
        None => (0..rank).collect(),
    };
    let mut all = vec![(0, 0); rank];
    for (index, &axis) in axes.iter().enumerate() {
        all[axis] = (*pads.get(index)?, *pads.get(index + axes.len())?);
    }
    // Padding is added to lengths, which must not overflow.
    let is_possible = |pad: i64| (-MOST_LENGTH..=MOST_LENGTH).contains(&pad);
    all.iter().all(|&(before, behind)| is_possible(before) && is_possible(behind)).then_some(all)
}

fn pad(node: &NodeProto, inputs: &[Tensor]) -> Tensor {
    let elem = inputs[0].elem;
    let Some(own) = &inputs[0].dims else { return Tensor::open(elem) };
    let Some(pads) = pads(node, inputs, own.len()) else { return Tensor::open(elem) };
    Tensor::shaped(elem, own.iter().zip(pads).map(|(dim, (before, behind))| dim + before + behind).collect())
}

/// Follows scales or sizes that are given for all axes.
fn resize(node: &NodeProto, inputs: &[Tensor], opset: i64) -> Tensor {
    // Resize got an input for its region of interest with opset 11.
    let scales = &inputs[if opset < 11 { 1 } else { 2 }];
    let has_axes = node.attribute("axes").is_some() || node.attribute("keep_aspect_ratio_policy").is_some();
    let made = || {
        let own = inputs[0].dims.as_ref().filter(|_| !has_axes)?;
        let sizes = inputs[3].ints().or_else(|| {
            let scales = scales.data.as_deref()?.iter();
            Some(own.iter().zip(scales).map(|(&dim, scale)| (dim as f64 * scale).floor() as i64).collect())
        });
        sizes.filter(|sizes| sizes.len() == own.len())
    };
    Tensor { dims: made(), ..Tensor::open(inputs[0].elem) }
}

fn one_hot(node: &NodeProto, inputs: &[Tensor]) -> Result<Tensor, String> {
    let elem = inputs[2].elem;
    let (Some(own), Some(depth)) = (&inputs[0].dims, inputs[1].data.as_deref().and_then(<[f64]>::first)) else {
        return Ok(Tensor::open(elem));
    };
    let mut dims = own.clone();
    dims.insert(axis_of(node.int("axis").unwrap_or(-1), own.len() + 1)?, *depth as i64);
    Ok(Tensor::shaped(elem, dims))
}

fn recurrent(node: &NodeProto, inputs: &[Tensor]) -> Vec<Tensor> {
    let elem = inputs[0].elem;
    // A bidirectional layer is refused for steps, but may run over another axis.
    let directions = if node.text("direction").as_deref() == Some("bidirectional") { 2 } else { 1 };
    let (Some(x), Some(hidden)) = (inputs[0].dims.as_deref(), hidden_size(node, inputs)) else {
        return vec![Tensor::open(elem); 3];
    };
    let &[steps, batch, _] = x else { return vec![Tensor::open(elem); 3] };
    let last = Tensor::shaped(elem, vec![directions, batch, hidden]);
    vec![Tensor::shaped(elem, vec![steps, directions, batch, hidden]), last.clone(), last]
}

pub fn hidden_size(node: &NodeProto, inputs: &[Tensor]) -> Option<i64> {
    let recurrence = inputs.get(2).and_then(|tensor| tensor.dims.as_deref());
    // Its weights lie the other way around.
    let axis = if node.op() == "DynamicQuantizeLSTM" { 1 } else { 2 };
    node.int("hidden_size").or_else(|| recurrence?.get(axis).copied()).filter(|&hidden| hidden > 0)
}

fn reduce(node: &NodeProto, inputs: &[Tensor], opset: i64) -> Result<Tensor, String> {
    let axes = list(node, inputs, 1, "axes");
    if axes.is_none() && node.input_at(1).is_some() {
        return Ok(Tensor::open(inputs[0].elem));
    }
    if axes.as_ref().is_none_or(Vec::is_empty) && opset >= 13 && node.int("noop_with_empty_axes").unwrap_or(0) != 0 {
        return Ok(inputs[0].clone());
    }
    let keeps = node.int("keepdims").unwrap_or(1) != 0;
    let out = reduced(&inputs[0], axes.as_deref(), keeps, inputs[0].elem)?;
    // Exporters compute shapes with reductions, such as the number of elements.
    let data = inputs[0].data.as_deref().filter(|_| out.dims.as_deref().is_some_and(|dims| element_count(dims) == 1));
    let value = data.and_then(|data| match node.op() {
        "ReduceProd" => Some(data.iter().product()),
        "ReduceSum" => Some(data.iter().sum()),
        "ReduceMax" => data.iter().copied().reduce(f64::max),
        "ReduceMin" => data.iter().copied().reduce(f64::min),
        _ => None,
    });
    Ok(Tensor { data: value.map(|value| [value].into()), ..out })
}

fn reduced(input: &Tensor, axes: Option<&[i64]>, keeps: bool, elem: i32) -> Result<Tensor, String> {
    let Some(own) = &input.dims else { return Ok(Tensor::open(elem)) };
    let axes: Vec<usize> = match axes {
        Some(axes) if !axes.is_empty() => {
            axes.iter().map(|&axis| axis_of(axis, own.len())).collect::<Result<_, _>>()?
        }
        _ => (0..own.len()).collect(),
    };
    let kept = |(axis, &dim): (usize, &i64)| if axes.contains(&axis) { keeps.then_some(1) } else { Some(dim) };
    Ok(Tensor::shaped(elem, own.iter().enumerate().filter_map(kept).collect()))
}

fn top_k(node: &NodeProto, inputs: &[Tensor]) -> Vec<Tensor> {
    // Before opset 10, `k` is an attribute.
    let count = inputs.get(1).and_then(Tensor::scalar).map(|count| count as i64).or_else(|| node.int("k"));
    let made = || {
        let mut dims = inputs[0].dims.clone()?;
        let axis = axis_of(node.int("axis").unwrap_or(-1), dims.len()).ok()?;
        dims[axis] = count?;
        Some(dims)
    };
    let dims = made();
    [inputs[0].elem, DataType::Int64 as i32].map(|elem| Tensor { dims: dims.clone(), ..Tensor::open(elem) }).to_vec()
}

fn concat_from_sequence(node: &NodeProto, sequence: &Tensor) -> Tensor {
    let (Some(own), Some(length)) = (&sequence.dims, sequence.length) else { return Tensor::open(sequence.elem) };
    let mut dims = own.clone();
    let axis = node.int("axis").unwrap_or(0);
    if node.int("new_axis").unwrap_or(0) != 0 {
        let axis = if axis < 0 { axis + own.len() as i64 + 1 } else { axis };
        dims.insert((axis.max(0) as usize).min(own.len()), length);
    } else if let Ok(axis) = axis_of(axis, own.len()) {
        dims[axis] = dims[axis].saturating_mul(length);
    }
    Tensor::shaped(sequence.elem, dims)
}
