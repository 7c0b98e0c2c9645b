//! The rule of each operator for steps. Operators that combine elements must not combine those of different steps.

use super::refusal::{ATTENTION, CHECKER, Hint, NORMALIZES, Refusal, Result, UNKNOWN_SHAPE, WHOLE_INPUT, refuse};
use super::tracker::{Layout, Place, Tracker, first};
use super::{carried, layers, moves};
use crate::infer::tensor::{axis_of, list};
use crate::onnx::element_count;
use crate::onnx::operators::{self, StepsRule};
use crate::onnx::schema::NodeProto;

/// The places of a node's outputs. At least one of its inputs depends on steps.
pub fn apply(tracker: &mut Tracker, index: usize, node: &NodeProto, places: &[Place]) -> Result<Vec<Place>> {
    let rule = node.steps_rule();
    let fewest = operators::find(node.op()).map_or(1, |operator| operator.least_inputs);
    if node.input.len() < fewest || node.output.is_empty() {
        return Err(refuse(node, "has too few inputs or outputs", CHECKER));
    }
    // A counter starts anew in each request, so what is computed with it comes before all other rules.
    if places.iter().any(|place| matches!(place, Place::Counter { .. })) {
        return carried::counted(tracker, node, places).map(|place| vec![place; node.output.len()]);
    }
    if places.iter().any(|place| matches!(place, Place::Sequence { .. })) || rule == StepsRule::Sequence {
        return carried::sequence(tracker, node, places).map(|place| vec![place]);
    }
    if !places.iter().any(|place| matches!(place, Place::At(_))) {
        // All inputs are of the last step, so the output is, too.
        if rule != StepsRule::Reshape {
            tracker.check_not_sized(node, &node.input)?;
        }
        return Ok(vec![Place::Last; node.output.len()]);
    }
    if !rule.looks_at_sizes() {
        tracker.check_not_sized(node, &node.input)?;
    }
    let layout = match rule {
        StepsRule::ElementWise => join(tracker, node, places),
        StepsRule::Transpose => moves::transpose(tracker, node, places),
        StepsRule::Reshape => moves::reshape(tracker, node, places),
        StepsRule::Concat => moves::concat(tracker, index, node, places),
        StepsRule::Split => {
            let why = "takes the time axis apart, as an unrolled loop does";
            moves::along(tracker, node, places, node.int("axis").unwrap_or(0), why)
        }
        StepsRule::Slice => return moves::slice(tracker, index, node, places).map(|place| vec![place]),
        StepsRule::Gather => return moves::gather(tracker, node, places).map(|place| vec![place]),
        StepsRule::ScatterND => moves::scatter(tracker, node, places),
        StepsRule::Elements => moves::elements(tracker, node, places),
        StepsRule::OneHot => moves::one_hot(tracker, node, places),
        StepsRule::Resize => moves::resize(tracker, node, places),
        StepsRule::Expand => moves::expand(tracker, node, places),
        StepsRule::ReverseSequence => moves::reversed(tracker, node, places),
        StepsRule::MatMul => mat_mul(tracker, node, places),
        StepsRule::DynamicQuantizeMatMul => {
            tracker.found.quantized.push(node.label().to_owned());
            mat_mul(tracker, node, places)
        }
        StepsRule::QLinearMatMul => operands(node, places).and_then(|(node, places)| mat_mul(tracker, &node, &places)),
        StepsRule::Gemm => gemm(tracker, node, places),
        StepsRule::Einsum => einsum(node, places),
        StepsRule::BatchNormalization => batch_normalization(node, places),
        StepsRule::Quantize => quantize(tracker, node, places),
        StepsRule::DynamicQuantizeLinear => {
            tracker.found.quantized.push(node.label().to_owned());
            return Ok(vec![places[0], Place::Free, Place::Free]);
        }
        StepsRule::Softmax => softmax(tracker, node, places),
        StepsRule::LayerNormalization => layer_normalization(tracker, node, places),
        StepsRule::MeanVarianceNormalization => {
            normalize(tracker, node, places, node.ints("axes").unwrap_or(&[0, 2, 3]))
        }
        StepsRule::LpNormalization => normalize(tracker, node, places, &[node.int("axis").unwrap_or(-1)]),
        StepsRule::TopK => {
            moves::along(tracker, node, places, node.int("axis").unwrap_or(-1), "picks the largest over time")
        }
        StepsRule::CumSum => cumulative(tracker, node, places),
        StepsRule::ArgReduce => reduce(tracker, node, places, Some(&[node.int("axis").unwrap_or(0)])),
        StepsRule::Reduce => {
            reduce(tracker, node, places, list(node, &tracker.short.inputs(node), 1, "axes").as_deref())
        }
        StepsRule::GlobalPool => global(node, places, "reduces over time"),
        StepsRule::GlobalNormalization => global(node, places, NORMALIZES),
        StepsRule::Window => layers::window(tracker, index, node, places),
        StepsRule::QLinearConv => {
            operands(node, places).and_then(|(node, places)| layers::window(tracker, index, &node, &places))
        }
        StepsRule::ConvTranspose => layers::transposed(tracker, index, node, places),
        StepsRule::Pad => layers::pad(tracker, index, node, places),
        StepsRule::Recurrent => return layers::recurrent(tracker, index, node, places),
        StepsRule::Attention => return Err(refuse(node, "attends over the whole input", ATTENTION)),
        StepsRule::Loop
        | StepsRule::Scan
        | StepsRule::If
        | StepsRule::Size
        | StepsRule::Sequence
        | StepsRule::Unknown => {
            return Err(unknown(node));
        }
    };
    Ok(vec![Place::At(layout?); node.output.len()])
}

pub fn unknown(node: &NodeProto) -> Refusal {
    // Also com.microsoft.nchwc and the like, which its optimizations make.
    let is_of_onnx_runtime = node.domain().starts_with("com.microsoft");
    if (is_of_onnx_runtime || !node.op().is_empty()) && node.op_type().ends_with("Attention") {
        return refuse(node, "attends over the whole input", ATTENTION);
    }
    if is_of_onnx_runtime && node.op_type() == "AttnLSTM" {
        let why = "keeps the attention of its last step to itself, which no output gives";
        return refuse(node, why, "export the attention and the LSTM as nodes of their own");
    }
    let help = match node.domain() {
        _ if is_of_onnx_runtime && node.op_type().starts_with("QLinear") => {
            "quantize the model with QuantFormat.QDQ, which needs no operators of com.microsoft"
        }
        _ if is_of_onnx_runtime => {
            "ONNX Runtime's optimizations make such operators: convert the model as it was before them"
        }
        "" | "ai.onnx" | "ai.onnx.ml" => "report the operator, or move it behind the model",
        _ => {
            "if it is a function of the model, inline the functions, as onnx.inliner does; else move it behind the model"
        }
    };
    refuse(node, format!("gets the steps, and it isn't known how {} treats them", node.operator()), help)
}

/// A quantized node without its scales: its two operands, and the zero point of the first.
fn operands(node: &NodeProto, places: &[Place]) -> Result<(NodeProto, [Place; 3])> {
    let &[a, _, zero, b, ..] = places else {
        return Err(refuse(node, "has too few inputs or outputs", CHECKER));
    };
    if [1, 2].into_iter().chain(4..places.len()).any(|other| places[other] != Place::Free) {
        return Err(refuse(node, "takes its scale from the steps", WHOLE_INPUT));
    }
    let input = vec![node.input[0].clone(), node.input[3].clone(), node.input[2].clone()];
    Ok((NodeProto { input, ..node.clone() }, [a, b, zero]))
}

fn join(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let ranks =
        (0..node.input.len()).map(|index| if node.input[index].is_empty() { Ok(0) } else { tracker.rank(node, index) });
    // Shapes broadcast from the last axis, so places are compared from there.
    let ranks = ranks.collect::<Result<Vec<_>, _>>()?;
    let rank = ranks.iter().copied().max().unwrap_or_default();
    let mut joined: Option<Layout> = None;
    for (&place, own) in places.iter().zip(&ranks) {
        let Place::At(layout) = place else { continue };
        let layout = layout.on(layout.axis + rank - own);
        match joined {
            Some(other) if other.axis != layout.axis => {
                return Err(refuse(node, "combines each step with every other", ATTENTION));
            }
            Some(other) if other != layout => {
                return Err(refuse(node, "combines steps of different times", "cut or pad both to the same steps"));
            }
            _ => joined = Some(layout),
        }
    }
    let Some(layout) = joined else { return Err(refuse(node, "takes its parameters from the steps", WHOLE_INPUT)) };
    for ((name, &place), own) in node.input.iter().zip(places).zip(&ranks) {
        if place == Place::Last {
            let why = format!("combines each step with '{name}', which only the last one has");
            return Err(refuse(node, why, WHOLE_INPUT));
        }
        let axis = (layout.axis + own).checked_sub(rank);
        if place != Place::Free || name.is_empty() || tracker.is_steady(name, axis) {
            continue;
        }
        let meets_steps = axis.is_some_and(|axis| tracker.dims(name).is_none_or(|dims| dims.get(axis) != Some(&1)));
        if !meets_steps {
            let why = format!("takes '{name}', which depends on the length of the whole input");
            return Err(refuse(node, why, WHOLE_INPUT));
        }
        let help = "positions and masks over the whole input can't run in steps; if it is an input that has the steps too, name \
                    its axis";
        let why = format!("takes '{name}', which has its own value for each step");
        return Err(refuse(node, why, help).with_hint(Hint::Time));
    }
    Ok(layout)
}

fn mat_mul(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let (left, right) = (tracker.rank(node, 0)?, tracker.rank(node, 1)?);
    let sums = || refuse(node, "sums over time", ATTENTION);
    let is_set = |name: &str| node.int(name).unwrap_or(0) != 0;
    // Weights without steps may be transposed.
    if ["transA", "transBatchA", "transBatchB"].iter().any(|name| is_set(name))
        || is_set("transB") && places[1] != Place::Free
        || places[2..].iter().any(|place| matches!(place, Place::At(_)))
    {
        return Err(refuse(node, "multiplies steps in a way that isn't known", ATTENTION));
    }
    let rank = left.max(right);
    match (places[0], places[1]) {
        (Place::At(a), Place::Free) if a.axis + 1 == left || left == 1 => Err(sums()),
        (Place::Free, Place::At(b)) if right == 1 || b.axis + 2 == right => Err(sums()),
        (Place::At(steps), Place::Free) | (Place::Free, Place::At(steps)) => {
            // The axis of the steps is one of the product's own, or one that the other factor may have as well.
            let (own, other, own_axis, factor) = if places[0] == Place::Free {
                (right, left, steps.axis + 1 == right, &node.input[0])
            } else {
                (left, right, steps.axis + 2 == left, &node.input[1])
            };
            let moved = steps.on(steps.axis + rank - own);
            let axis = if own_axis { None } else { (moved.axis + other).checked_sub(rank) };
            if tracker.is_steady(factor, axis) {
                Ok(moved)
            } else {
                Err(refuse(node, "multiplies each step with its own matrix", ATTENTION))
            }
        }
        // A product for each step.
        (Place::At(a), Place::At(b)) if a.axis + 2 < left && b.axis + 2 < right => {
            let (a, b) = (a.on(a.axis + rank - left), b.on(b.axis + rank - right));
            if a == b { Ok(a) } else { Err(refuse(node, "combines each step with every other", ATTENTION)) }
        }
        (Place::At(_), Place::At(_)) => Err(refuse(node, "combines each step with every other", ATTENTION)),
        _ => Err(refuse(node, "combines each step with one that only the last has", WHOLE_INPUT)),
    }
}

fn gemm(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let layout = first(node, places)?;
    let row = usize::from(node.int("transA").unwrap_or(0) != 0);
    if layout.axis != row {
        return Err(refuse(node, "sums over time", ATTENTION));
    }
    // A bias with an entry for each row would have one for each step.
    let bias = node.input_at(2).is_none_or(|bias| {
        let axis = tracker.dims(bias).and_then(|dims| dims.len().checked_sub(2));
        tracker.is_steady(bias, axis)
    });
    if !tracker.is_steady(&node.input[1], None) || !bias {
        return Err(refuse(node, "takes weights that depend on the length of the whole input", WHOLE_INPUT));
    }
    Ok(layout.on(0))
}

fn einsum(node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let equation = node.text("equation").unwrap_or_default().replace(' ', "");
    let (Some((terms, out)), false) = (equation.split_once("->"), equation.contains("...")) else {
        return Err(refuse(node, format!("has an equation that isn't followed ('{equation}')"), ATTENTION));
    };
    let mut found = None;
    for (term, &place) in terms.split(',').zip(places) {
        let Place::At(layout) = place else { continue };
        let label = term.chars().nth(layout.axis);
        let here = label.and_then(|label| Some((label, layout.on(out.chars().position(|other| other == label)?))));
        match (here, found) {
            (None, _) => return Err(refuse(node, "sums over time", ATTENTION)),
            (Some(here), Some(other)) if here != other => {
                return Err(refuse(node, "combines each step with every other", ATTENTION));
            }
            (here, _) => found = here,
        }
    }
    let Some((label, layout)) = found else {
        return Err(refuse(node, "takes its parameters from the steps", WHOLE_INPUT));
    };
    let others = terms.split(',').zip(places).any(|(term, &place)| {
        place != Place::Free && !matches!(place, Place::At(_)) || place == Place::Free && term.contains(label)
    });
    if others { Err(refuse(node, "multiplies each step with its own matrix", ATTENTION)) } else { Ok(layout) }
}

fn batch_normalization(node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let layout = first(node, places)?;
    if node.int("training_mode").unwrap_or(0) != 0 {
        return Err(refuse(node, NORMALIZES, "export the model for inference").always_mixing());
    }
    // Axis 1 has the channels, each with a scale of its own.
    if layout.axis == 1 {
        return Err(refuse(node, "has its own scale for each step", "export the model for inference"));
    }
    Ok(layout)
}

fn quantize(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let layout = first(node, places)?;
    // One scale for all steps is the same in each request; a scale along another axis, too.
    let is_one = tracker.dims(&node.input[1]).is_some_and(|dims| element_count(dims) == 1);
    let axis = axis_of(node.int("axis").unwrap_or(1), tracker.rank(node, 0)?);
    if is_one || axis.is_ok_and(|axis| axis != layout.axis) {
        Ok(layout)
    } else {
        Err(refuse(node, "has its own scale for each step", WHOLE_INPUT))
    }
}

fn softmax(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let layout = first(node, places)?;
    // Before opset 13, Softmax takes all axes from this one on together.
    let flattens = tracker.opset < 13;
    let axis =
        axis_of(node.int("axis").unwrap_or(if flattens { 1 } else { -1 }), tracker.rank(node, 0)?).unwrap_or_default();
    if layout.axis == axis || flattens && layout.axis > axis {
        return Err(refuse(node, "takes a softmax over time", ATTENTION).always_mixing());
    }
    Ok(layout)
}

fn layer_normalization(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let layout = first(node, places)?;
    let axis = axis_of(node.int("axis").unwrap_or(-1), tracker.rank(node, 0)?).unwrap_or_default();
    if layout.axis >= axis {
        return Err(refuse(node, NORMALIZES, "normalize each step by itself").always_mixing());
    }
    Ok(layout)
}

fn normalize(tracker: &Tracker, node: &NodeProto, places: &[Place], axes: &[i64]) -> Result<Layout> {
    let layout = first(node, places)?;
    let rank = tracker.rank(node, 0)?;
    if axes.iter().any(|&axis| axis_of(axis, rank).is_ok_and(|axis| axis == layout.axis)) {
        return Err(refuse(node, NORMALIZES, "normalize each step by itself").always_mixing());
    }
    Ok(layout)
}

fn cumulative(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let (why, help) = ("sums up along time", "write the running sum as a Scan with a state, or take it in the client");
    let axis = tracker.tensor(&node.input[1]).scalar().ok_or_else(|| refuse(node, why, help))?;
    // The general help speaks of later steps, which a running sum does not need.
    moves::along(tracker, node, places, axis as i64, why)
        .map_err(|refusal| Refusal { help: help.to_owned(), ..refusal })
}

fn reduce(tracker: &Tracker, node: &NodeProto, places: &[Place], axes: Option<&[i64]>) -> Result<Layout> {
    let layout = first(node, places)?;
    let rank = tracker.rank(node, 0)?;
    if axes.is_none() && node.input_at(1).is_some() {
        return Err(refuse(node, "reduces axes that aren't known before it runs", UNKNOWN_SHAPE));
    }
    let noop = node.int("noop_with_empty_axes").unwrap_or(0) != 0;
    let axes: Vec<usize> = match axes {
        Some(axes) if !axes.is_empty() => axes.iter().filter_map(|&axis| axis_of(axis, rank).ok()).collect(),
        _ if noop => return Ok(layout),
        _ => (0..rank).collect(),
    };
    if axes.contains(&layout.axis) {
        return Err(refuse(node, "reduces over time", "take the last step instead, or reduce behind the model"));
    }
    let keeps = node.int("keepdims").unwrap_or(1) != 0;
    // Without keepdims, the axes in front that are reduced are gone.
    let removed = (0..layout.axis).filter(|axis| axes.contains(axis)).count();
    Ok(if keeps { layout } else { layout.on(layout.axis - removed) })
}

/// An operator that mixes all axes after the second.
fn global(node: &NodeProto, places: &[Place], why: &str) -> Result<Layout> {
    let layout = first(node, places)?;
    let is_group = node.op() == "GroupNormalization";
    if layout.axis >= 2 || layout.axis == 1 && is_group {
        let refusal = refuse(node, why, "use a normalization or a reduction of each step by itself");
        return Err(if why == NORMALIZES { refusal.always_mixing() } else { refusal });
    }
    Ok(layout)
}
