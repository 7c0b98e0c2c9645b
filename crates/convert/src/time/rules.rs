//! What each operator does to steps.

use super::place::{Layout, Place};
use super::refusal::{ATTENTION, CHECKER, Hint, NORMALIZES, Refusal, Result, WHOLE_INPUT, refuse};
use super::tracker::Tracker;
use super::{carried, layers, mixing, moves};
use crate::infer::tensor::list;
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
        StepsRule::MatMul => mixing::mat_mul(tracker, node, places),
        StepsRule::DynamicQuantizeMatMul => {
            tracker.found.quantized.push(node.label().to_owned());
            mixing::mat_mul(tracker, node, places)
        }
        StepsRule::QLinearMatMul => {
            operands(node, places).and_then(|(node, places)| mixing::mat_mul(tracker, &node, &places))
        }
        StepsRule::Gemm => mixing::gemm(tracker, node, places),
        StepsRule::Einsum => mixing::einsum(node, places),
        StepsRule::BatchNormalization => mixing::batch_normalization(node, places),
        StepsRule::Quantize => mixing::quantize(tracker, node, places),
        StepsRule::DynamicQuantizeLinear => {
            tracker.found.quantized.push(node.label().to_owned());
            return Ok(vec![places[0], Place::Free, Place::Free]);
        }
        StepsRule::Softmax => mixing::softmax(tracker, node, places),
        StepsRule::LayerNormalization => mixing::layer_normalization(tracker, node, places),
        StepsRule::MeanVarianceNormalization => {
            mixing::normalize(tracker, node, places, node.ints("axes").unwrap_or(&[0, 2, 3]))
        }
        StepsRule::LpNormalization => mixing::normalize(tracker, node, places, &[node.int("axis").unwrap_or(-1)]),
        StepsRule::TopK => {
            moves::along(tracker, node, places, node.int("axis").unwrap_or(-1), "picks the largest over time")
        }
        StepsRule::CumSum => mixing::cumulative(tracker, node, places),
        StepsRule::ArgReduce => mixing::reduce(tracker, node, places, Some(&[node.int("axis").unwrap_or(0)])),
        StepsRule::Reduce => {
            let inputs: Vec<_> = node.input.iter().map(|name| tracker.tensor(name)).collect();
            mixing::reduce(tracker, node, places, list(node, &inputs, 1, "axes").as_deref())
        }
        StepsRule::GlobalPool => mixing::global(node, places, "reduces over time"),
        StepsRule::GlobalNormalization => mixing::global(node, places, NORMALIZES),
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
