//! Gives a graph its state inputs and outputs.

mod cutter;
pub mod lengths;

use std::cell::OnceCell;
use std::collections::HashSet;

use crate::analysis::Analysis;
use crate::graph::{Names, ancestors, content_inputs, producers, prune, sort, used};
use crate::infer::ops::{hidden_size, pads};
use crate::infer::scan_counts;
use crate::onnx::schema::{GraphProto, NodeProto, ValueInfoProto};
use crate::onnx::{DataType, Dim, int64s};
use crate::time::{Cut, Result, refuse};
use cutter::{Cutter, base_name};
pub use cutter::{NewState, Start};

/// Cuts a graph where the analysis says, and gives it states.
pub fn cut(graph: &GraphProto, opset: i64, analysis: &Analysis) -> Result<(GraphProto, Vec<NewState>)> {
    let content = content_inputs(graph);
    lengths::check(graph, analysis, &content)?;
    let mut cutter = Cutter {
        analysis,
        opset,
        used: used(graph),
        names: Names::of(graph),
        graph: graph.clone(),
        original: graph,
        states: Vec::new(),
        content,
        rows: OnceCell::new(),
    };
    for cut in &analysis.found.cuts {
        match cut {
            Cut::Recurrent { node } => cutter.recurrent(*node)?,
            Cut::Scan { node } => {
                let (states, _) = scan_counts(&cutter.graph.node[*node]);
                cutter.carried(*node, 0, &(0..states).collect::<Vec<_>>())?;
            }
            Cut::Loop { node, carried } => cutter.carried(*node, 2, carried)?,
            Cut::Frames { node, axis, frames, cropped, fill } => {
                cutter.frames(*node, *axis, *frames, *cropped, *fill)?;
            }
            Cut::Prefix { node, axis, frames } => cutter.prefix(*node, *axis, *frames)?,
            // The state replaces the padding, so nothing is left that the node could cut off.
            Cut::Crop { node } => {
                let node = &mut cutter.graph.node[*node];
                *node = NodeProto::make("Identity", node.name(), &[&node.input[0]], &[&node.output[0]]);
            }
        }
    }
    // After the cuts, because only then the sorts of rows are gone.
    lengths::check_readers(graph, &cutter.graph, analysis, &cutter.content)?;
    Ok((cutter.graph, cutter.states))
}

impl Cutter<'_> {
    fn recurrent(&mut self, index: usize) -> Result<()> {
        let node = self.graph.node[index].clone();
        let inputs = self.analysis.probes.short.inputs(&node);
        // The rows of a layer are those of its input, whatever the batch is called.
        let x = self.dims(&node, &node.input[0])?;
        let hidden = hidden_size(&node, &inputs)
            .ok_or_else(|| refuse(&node, "has a hidden state of unknown size", "give it the attribute hidden_size"))?;
        let dims = vec![Dim::Known(1), x[1].clone(), Dim::Known(hidden)];
        // Weights may be quantized; the input has the type of the states.
        let elem =
            [0, 3, 1].iter().map(|&input| inputs.get(input).map_or(0, |tensor| tensor.elem)).find(|&elem| elem != 0);
        let elem = elem.unwrap_or(DataType::Float as i32);
        let is_empty_row = self.add_mask_of_empty_rows(&node)?;
        if is_empty_row.is_some() {
            self.remove_sorts_of_rows(&node)?;
        }
        // Of these operators, only LSTMs have a second state.
        let has_cell = node.op().ends_with("LSTM");
        let parts: &[(&str, usize, usize)] = if has_cell { &[("h", 5, 1), ("c", 6, 2)] } else { &[("h", 5, 1)] };
        for &(part, input, output) in parts {
            let start = self.graph.node[index].input_at(input).map(str::to_owned);
            let (state_in, state_out) = self.state(&node, part, (elem, dims.clone()), start.as_deref(), 0.0)?;
            self.graph.node[index].set_input(input, &state_in);
            let (index, output) = match &is_empty_row {
                Some(is_empty_row) => (self.keep_state_of_empty_rows(index, output, is_empty_row, &state_in), 0),
                None => (index, output),
            };
            self.give(index, output, &state_out);
        }
        Ok(())
    }

    fn carried(&mut self, index: usize, front: usize, carried: &[usize]) -> Result<()> {
        let node = self.graph.node[index].clone();
        for &number in carried {
            let start = node.input_at(front + number).map(str::to_owned).unwrap_or_default();
            let dims = self.dims(&node, &start)?;
            // The body states the type of what it carries, where a shape of the graph may be unknown.
            let of_body =
                node.graph("body").and_then(|body| body.input.get(front + number)).map_or(0, ValueInfoProto::elem);
            let elem = if of_body == 0 { self.tensor(&start).elem } else { of_body };
            let (state_in, state_out) = self.state(&node, &number.to_string(), (elem, dims), Some(&start), 0.0)?;
            self.graph.node[index].set_input(front + number, &state_in);
            self.give(index, number, &state_out);
        }
        Ok(())
    }

    fn frames(&mut self, index: usize, axis: usize, frames: i64, cropped: i64, fill: f64) -> Result<()> {
        let node = self.graph.node[index].clone();
        let source = node.input[0].clone();
        let mut dims = self.dims(&node, &source)?;
        dims[axis] = Dim::Known(frames);
        let elem = self.tensor(&source).elem;
        let (state_in, state_out) = self.state(&node, "frames", (elem, dims.clone()), None, fill)?;
        let label = base_name(node.label());
        // A Pad becomes the join itself; other nodes keep their work and get a join in front.
        let joined = if node.op() == "Pad" {
            let inputs = self.analysis.probes.short.inputs(&node);
            let mut pads = pads(&node, &inputs, dims.len()).unwrap_or_default();
            // The state replaces the padding along time; that along other axes stays.
            pads[axis] = (0, 0);
            let pads_others = pads.iter().any(|&pad| pad != (0, 0));
            let output = node.output[0].clone();
            let joined =
                if cropped > 0 || pads_others { self.names.fresh(&format!("{label}.joined")) } else { output.clone() };
            let join = NodeProto::make("Concat", node.name(), &[&state_in, &source], &[&joined]);
            self.graph.node[index] = join.with_int("axis", axis as i64);
            let mut steps = joined.clone();
            if cropped > 0 {
                steps = if pads_others { self.names.fresh(&format!("{label}.cropped")) } else { output };
                self.slice(&label, &joined, axis, (0, -cropped), &steps);
            }
            if pads_others {
                self.pad(&node, &steps, &pads);
            }
            joined
        } else {
            let joined = self.names.fresh(&format!("{label}.joined"));
            let name = self.names.fresh(&format!("{label}/Concat"));
            let join =
                NodeProto::make("Concat", &name, &[&state_in, &source], &[&joined]).with_int("axis", axis as i64);
            self.graph.node.push(join);
            let spatial = dims.len() - 2;
            let mut pads = node.ints("pads").map_or_else(|| vec![0; 2 * spatial], <[i64]>::to_vec);
            // Padding of a transposed convolution cuts its output: here the kept frames, and what later steps will add
            // to.
            let of_time = if node.op() == "ConvTranspose" { frames } else { 0 };
            pads[axis - 2] = of_time;
            pads[axis - 2 + spatial] = of_time;
            let target = &mut self.graph.node[index];
            target.set_input(0, &joined);
            // The state brings the frames, so the node must not pad them again.
            *target = std::mem::take(target).with_ints("pads", &pads);
            joined
        };
        // Counted from the end, because a request may have any number of steps.
        self.slice(&label, &joined, axis, (-frames, i64::MAX), &state_out);
        Ok(())
    }

    /// Keeps the padding along other axes, for a `Pad` whose padding along time became a state.
    fn pad(&mut self, node: &NodeProto, steps: &str, pads: &[(i64, i64)]) {
        let mut pad = node.clone();
        pad.name = Some(self.names.fresh(&format!("{}/other_axes", node.label())));
        pad.set_input(0, steps);
        let (before, behind): (Vec<i64>, Vec<i64>) = pads.iter().copied().unzip();
        let pads = [before, behind].concat();
        if node.input_at(1).is_some() {
            let name = self.names.fresh(&format!("{}.pads", base_name(node.label())));
            self.graph.initializer.push(int64s(&name, &[pads.len() as i64], &pads));
            pad.set_input(1, &name);
            pad.input.truncate(3);
        } else {
            pad = pad.with_ints("pads", &pads);
        }
        self.graph.node.push(pad);
    }

    fn prefix(&mut self, index: usize, axis: usize, frames: i64) -> Result<()> {
        let node = self.graph.node[index].clone();
        let start = node.input[0].clone();
        let dims = self.dims(&node, &start)?;
        let elem = self.tensor(&start).elem;
        let (state_in, state_out) = self.state(&node, "frames", (elem, dims), Some(&start), 0.0)?;
        self.graph.node[index].set_input(0, &state_in);
        self.slice(&base_name(node.label()), &node.output[0], axis, (-frames, i64::MAX), &state_out);
        Ok(())
    }
}

/// The part of the original graph that computes where states start. It has an output for each state, with its name.
pub fn starts(original: &GraphProto, states: &[NewState]) -> Option<GraphProto> {
    let mut graph = original.clone();
    graph.output.clear();
    for state in states {
        let Start::Tensor(tensor) = &state.start else { continue };
        let (mut op, mut inputs, shape) = ("Identity", vec![tensor.as_str()], format!("{}/shape", state.input));
        if let Some(split) = &state.split {
            graph.initializer.push(int64s(&shape, &[split.len() as i64], split));
            op = "Reshape";
            inputs.push(&shape);
        }
        graph.node.push(NodeProto::make(op, &format!("{}/{op}", state.input), &inputs, &[&state.input]));
        graph.output.push(ValueInfoProto::tensor(&state.input, state.elem, &state.dims));
    }
    if graph.output.is_empty() {
        return None;
    }
    sort(&mut graph);
    prune(&mut graph);
    let made: HashSet<String> = producers(&graph).into_keys().map(str::to_owned).collect();
    let needed = ancestors(&graph, graph.output.iter().map(|output| output.name().to_owned()));
    // The model of initial states takes only what they depend on, so that requests need not carry the rest.
    graph.input.retain(|input| needed.contains(input.name()) && !made.contains(input.name()));
    // The shapes were those of the whole model.
    graph.value_info.clear();
    Some(graph)
}
