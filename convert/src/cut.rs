//! Gives a graph its state inputs and outputs.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};

use crate::analysis::{Analysis, InputAxis};
use crate::batch;
use crate::graph::{Names, inputs_of, producers, required_inputs};
use crate::infer::Tensor;
use crate::infer::loops::scan_counts;
use crate::infer::ops::hidden_size;
use crate::lengths::{self, Content};
use crate::onnx::schema::{GraphProto, NodeProto, TensorProto, ValueInfoProto};
use crate::onnx::{DataType, Dim, bracketed, int64s, is_float};
use crate::report::Pair;
use crate::time::{Cut, Hint, Place, Refusal, refuse};

/// Where a state starts.
#[derive(Clone, Debug, PartialEq)]
pub enum Start {
    /// Each element has this value.
    Fill(f64),
    /// At this tensor of the original model.
    Tensor(String),
}

/// A state that a cut made.
#[derive(Clone, Debug, PartialEq)]
pub struct NewState {
    pub input: String,
    pub output: String,
    pub elem: i32,
    pub dims: Vec<Dim>,
    pub start: Start,
    /// The node that it belongs to, and its operator.
    pub node: String,
    pub operator: String,
    /// Starts at constants that aren't zero.
    pub starts_at_constant: bool,
    /// The target of a `Reshape` to `dims`, if the original has the batch and another axis in one.
    split: Option<Vec<i64>>,
}

/// A graph with states.
pub struct CutGraph {
    pub graph: GraphProto,
    /// The original graph, with the tensors that states start at.
    pub original: GraphProto,
    pub states: Vec<NewState>,
}

/// Cuts a graph at the places that the analysis found.
pub fn cut(graph: &GraphProto, opset: i64, analysis: &Analysis) -> Result<CutGraph, Refusal> {
    let content = content_inputs(graph);
    lengths::check(graph, analysis, &content)?;
    let mut cutter = Cutter {
        analysis,
        opset,
        uses: crate::graph::uses(graph),
        names: Names::of(graph),
        graph: graph.clone(),
        original: graph.clone(),
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
            Cut::Prefix { node, input, axis, frames } => cutter.prefix(*node, *input, *axis, *frames)?,
            Cut::Crop { node } => {
                let input = cutter.graph.node[*node].input[0].clone();
                let (name, output) =
                    (cutter.graph.node[*node].name().to_owned(), cutter.graph.node[*node].output[0].clone());
                cutter.graph.node[*node] = NodeProto::make("Identity", &name, &[&input], &[&output]);
            }
        }
    }
    lengths::check_readers(graph, &cutter.graph, analysis, &cutter.content)?;
    Ok(CutGraph { graph: cutter.graph, original: cutter.original, states: cutter.states })
}

struct Cutter<'a> {
    analysis: &'a Analysis,
    opset: i64,
    uses: HashMap<String, usize>,
    names: Names,
    graph: GraphProto,
    original: GraphProto,
    states: Vec<NewState>,
    content: Content,
    /// Where tensors have the rows of the batch, once that is asked.
    rows: OnceCell<Result<HashMap<String, Place>, Refusal>>,
}

/// The inputs whose content each tensor depends on. Shapes are no content.
fn content_inputs(graph: &GraphProto) -> Content {
    let mut content: Content = crate::graph::required_inputs(graph)
        .map(|input| (input.name().to_owned(), HashSet::from([input.name().to_owned()])))
        .collect();
    for node in &graph.node {
        if node.reads_size() {
            continue;
        }
        let found: HashSet<String> =
            crate::graph::inputs_of(node).iter().filter_map(|name| content.get(name)).flatten().cloned().collect();
        for output in node.named_outputs() {
            content.insert(output.to_owned(), found.clone());
        }
    }
    content
}

/// A name for states that clients and configurations can write: the node's, without what would need quotes.
fn base_name(label: &str) -> String {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() || "._-".contains(letter) { letter } else { '.' };
    let name: String = label.trim_matches('/').chars().map(plain).collect();
    if name.is_empty() { "state".to_owned() } else { name }
}

impl Cutter<'_> {
    /// Adds a state with the rows of the node's first input. Returns the names of its two ends, in the shape of `dims`.
    fn state(
        &mut self,
        node: &NodeProto,
        part: &str,
        (elem, dims): (i32, Vec<Dim>),
        start: Option<&str>,
        fill: f64,
    ) -> Result<(String, String), Refusal> {
        let base = format!("{}.{part}", base_name(node.label()));
        let (input, output) = (self.names.fresh(&format!("{base}_in")), self.names.fresh(&format!("{base}_out")));
        let constant = start.is_some_and(|start| self.content.get(start).is_none_or(HashSet::is_empty));
        let start = match start {
            None => Start::Fill(fill),
            Some(name) if self.analysis.is_zero(name) => Start::Fill(0.0),
            Some(name) => {
                if let Some(from) = self.content.get(name).and_then(|inputs| inputs.iter().min()) {
                    let pairs: Vec<String> = self.given_states().iter().map(Pair::to_string).collect();
                    let help = format!(
                        "if the model has its states as inputs, name all of them and their outputs: '{}'; if requests carry \
                         '{from}', export the model with its states as inputs and outputs",
                        pairs.join(" ")
                    );
                    let refusal = refuse(node, format!("starts from input '{from}'"), &help);
                    return Err(Refusal { hint: Some(Hint::States), ..refusal });
                }
                Start::Tensor(name.to_owned())
            }
        };
        // An integer isn't learned: it is a counter that starts at this number.
        let starts_at_constant = constant && matches!(start, Start::Tensor(_)) && is_float(elem);
        let merged = dims;
        let dims = self.split(node, &merged)?;
        let split = (dims != merged).then(|| shape(&dims));
        let ends = match &split {
            None => (input.clone(), output.clone()),
            Some(split) => {
                let ends =
                    (self.names.fresh(&format!("{input}/merged")), self.names.fresh(&format!("{output}/merged")));
                self.reshape(&input, &shape(&merged), &ends.0);
                self.reshape(&ends.1, split, &output);
                ends
            }
        };
        self.graph.input.push(ValueInfoProto::tensor(&input, elem, &dims));
        self.graph.output.push(ValueInfoProto::tensor(&output, elem, &dims));
        self.states.push(NewState {
            input,
            output,
            elem,
            dims,
            start,
            node: node.label().to_owned(),
            operator: node.operator(),
            starts_at_constant,
            split,
        });
        Ok(ends)
    }

    /// The inputs at which recurrences start, and the outputs that give the last state; OUTPUT if none is seen to.
    fn given_states(&self) -> Vec<Pair> {
        let mut given: Vec<Pair> = Vec::new();
        for cut in &self.analysis.found.cuts {
            let node = &self.original.node[cut.node()];
            let ends: Vec<(usize, usize)> = match cut {
                Cut::Recurrent { .. } => vec![(5, 1), (6, 2)],
                Cut::Scan { .. } => (0..scan_counts(node).0).map(|state| (state, state)).collect(),
                Cut::Loop { carried, .. } => carried.iter().map(|&state| (state + 2, state)).collect(),
                _ => continue,
            };
            for (input, output) in ends {
                let content = node.input_at(input).and_then(|name| self.content.get(name));
                let Some(from) = content.and_then(|inputs| inputs.iter().min()) else { continue };
                if given.iter().all(|pair| pair.input != *from) {
                    let output = node.output_at(output).and_then(|name| self.given_out(name));
                    given.push(Pair { input: from.clone(), output: output.unwrap_or_else(|| "OUTPUT".to_owned()) });
                }
            }
        }
        given
    }

    /// The output of the graph that a tensor becomes, in another shape or joined with others.
    fn given_out(&self, name: &str) -> Option<String> {
        let mut name = name.to_owned();
        // The nodes are in order, so each reader stands behind.
        for node in &self.original.node {
            if self.original.output.iter().any(|output| output.name() == name) {
                return Some(name);
            }
            let moves = ["Cast", "Concat", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"];
            if moves.contains(&node.op()) && node.input.contains(&name) {
                name = node.output_at(0)?.to_owned();
            }
        }
        self.original.output.iter().any(|output| output.name() == name).then_some(name)
    }

    /// The dims of a state with the batch in a dimension of its own. The rows of a layer may be those of the batch times
    /// another axis, such as frequencies.
    fn split(&self, node: &NodeProto, dims: &[Dim]) -> Result<Vec<Dim>, Refusal> {
        let (Some(batch), Some(axis)) = (&self.analysis.batch, dims.iter().position(|dim| *dim == Dim::Open)) else {
            return Ok(dims.to_vec());
        };
        let refused = |why: String| {
            let help = "export the model with a fixed batch, which its sequences then can't share";
            Err(refuse(
                node,
                format!("has a state {}, which has the batch and others in one axis{why}", bracketed(dims)),
                help,
            ))
        };
        let rows = self.rows.get_or_init(|| self.followed_rows(batch));
        let place = match rows {
            Ok(rows) => node.input_at(0).and_then(|input| rows.get(input)),
            Err(refusal) => {
                let Refusal { operator, node, why, .. } = refusal;
                return refused(format!("; they can't be taken apart, because {operator} '{node}' {why}"));
            }
        };
        let is_known = |(index, dim): (usize, &Dim)| index == axis || matches!(dim, Dim::Known(_));
        let layout = match place {
            Some(Place::At(layout)) if layout.axis == axis && dims.iter().enumerate().all(is_known) => layout,
            _ => return refused(String::new()),
        };
        let (outer, inner) = (Dim::Known(layout.outer), Dim::Known(layout.inner));
        let split = [&dims[..axis], &[outer, Dim::Symbol(batch.clone()), inner], &dims[axis + 1..]].concat();
        let is_one = |index: usize| index <= axis + 2 && split[index] == Dim::Known(1);
        Ok(split.iter().enumerate().filter(|(index, _)| !is_one(*index)).map(|(_, dim)| dim.clone()).collect())
    }

    /// Follows the rows through the original. States take the place of what layers start at.
    fn followed_rows(&self, batch: &str) -> Result<HashMap<String, Place>, Refusal> {
        let mut graph = self.original.clone();
        for cut in self.analysis.found.cuts.iter().filter(|cut| matches!(cut, Cut::Recurrent { .. })) {
            graph.node[cut.node()].input.iter_mut().skip(5).take(2).for_each(String::clear);
        }
        batch::rows(&graph, self.opset, &self.batch_axes(batch))
    }

    /// The axes of the inputs that have the batch.
    fn batch_axes(&self, batch: &str) -> Vec<InputAxis> {
        let mut axes = Vec::new();
        for input in required_inputs(&self.original) {
            let time = self.analysis.time.iter().find(|seed| seed.input == input.name());
            for (axis, dim) in input.dims().unwrap_or_default().into_iter().enumerate() {
                let is_unnamed = dim == Dim::Open && time.is_some_and(|time| time.axis != axis);
                if is_unnamed || matches!(&dim, Dim::Symbol(name) if name == batch) {
                    axes.push(InputAxis { input: input.name().to_owned(), axis });
                }
            }
        }
        axes
    }

    fn reshape(&mut self, from: &str, shape: &[i64], to: &str) {
        let (name, constant) = (self.names.fresh(&format!("{to}/Reshape")), self.names.fresh(&format!("{to}/shape")));
        self.graph.initializer.push(int64s(&constant, &[shape.len() as i64], shape));
        self.graph.node.push(NodeProto::make("Reshape", &name, &[from, &constant], &[to]));
    }

    /// Makes a node's output the state's: under its own name if nothing else uses it.
    fn give(&mut self, node: usize, output: usize, name: &str) {
        match self.graph.node[node].output_at(output).map(str::to_owned) {
            Some(used) if self.uses.contains_key(&used) => {
                let label = self.names.fresh(&format!("{name}/Identity"));
                self.graph.node.push(NodeProto::make("Identity", &label, &[&used], &[name]));
            }
            _ => self.graph.node[node].set_output(output, name),
        }
    }

    fn tensor(&self, name: &str) -> Tensor {
        self.analysis.probes.short.get(name)
    }

    fn dims(&self, node: &NodeProto, name: &str) -> Result<Vec<Dim>, Refusal> {
        let help = "run ONNX's shape inference on the model, or export it with a newer exporter";
        self.analysis.dims(name).ok_or_else(|| refuse(node, format!("has a state of unknown shape ('{name}')"), help))
    }

    fn recurrent(&mut self, index: usize) -> Result<(), Refusal> {
        let node = self.graph.node[index].clone();
        let inputs: Vec<Tensor> = node.input.iter().map(|name| self.tensor(name)).collect();
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

    /// A tensor that says which rows have no steps, for a recurrent node with lengths of rows: ONNX Runtime gives back
    /// states of zeros for such rows.
    fn add_mask_of_empty_rows(&mut self, node: &NodeProto) -> Result<Option<String>, Refusal> {
        let Some(lens) = lengths::of_requests(node, &self.content) else { return Ok(None) };
        if self.opset < 9 {
            let why = "takes sequence_lens, which needs the operator Where to keep the state of a row without steps";
            return Err(refuse(node, why, "convert the model to opset 9 or newer"));
        }
        let label = base_name(node.label());
        let mut fresh = |part: &str| self.names.fresh(&format!("{label}.{part}"));
        let [zero, shape, is_zero, is_empty_row] = ["zero", "rows", "is_zero", "is_empty_row"].map(&mut fresh);
        self.graph.initializer.push(TensorProto {
            name: Some(zero.clone()),
            data_type: Some(DataType::Int32.into()),
            int32_data: vec![0],
            ..TensorProto::default()
        });
        self.graph.initializer.push(int64s(&shape, &[3], &[1, -1, 1]));
        let [equal, reshape] = ["is_zero/Equal", "is_empty_row/Reshape"].map(&mut fresh);
        self.graph.node.push(NodeProto::make("Equal", &equal, &[lens, &zero], &[&is_zero]));
        self.graph.node.push(NodeProto::make("Reshape", &reshape, &[&is_zero, &shape], &[&is_empty_row]));
        Ok(Some(is_empty_row))
    }

    /// Removes the sort of the rows by their lengths that PyTorch writes for packed sequences. States stay in the order of
    /// the sequences, so sorted rows would get the states of other rows. ONNX Runtime needs no sort. Refuses lengths that
    /// are made by a node which may put the rows in another order.
    fn remove_sorts_of_rows(&mut self, layer: &NodeProto) -> Result<(), Refusal> {
        let mut open: Vec<String> = layer.input_at(4).map(str::to_owned).into_iter().collect();
        let mut seen = HashSet::new();
        while let Some(name) = open.pop() {
            let is_of_requests = self.content.get(&name).is_some_and(|inputs| !inputs.is_empty());
            let makes = |node: &NodeProto| node.named_outputs().any(|output| output == name);
            let Some(index) = self.graph.node.iter().position(makes) else { continue };
            if !is_of_requests || !seen.insert(name.clone()) {
                continue;
            }
            let is_sort = self.graph.node[index].output_at(0) == Some(&name) && self.remove_sort(index);
            let node = &self.graph.node[index];
            let is_kept =
                lengths::passes_lengths_on(node) || lengths::limits_to_steps(node, self.analysis, &self.content);
            if !is_sort && !is_kept {
                let why = format!(
                    "makes the lengths of rows of {} '{}' (sequence_lens), and it isn't known whether it leaves them and their \
                     order as they are; in another order, rows would get the states of others",
                    layer.operator(),
                    layer.label()
                );
                let help = "export the model without this node: let requests say the lengths, and don't sort the rows";
                return Err(refuse(node, why, help));
            }
            open.extend(inputs_of(node));
        }
        Ok(())
    }

    /// Puts the rows that a `TopK` sorts by their lengths back in their order. Whether it was such a sort.
    fn remove_sort(&mut self, index: usize) -> bool {
        let sort = self.graph.node[index].clone();
        let dims = |name: Option<&str>| name.and_then(|name| self.analysis.dims(name)).filter(|dims| dims.len() == 1);
        let (lens, order) = (sort.input_at(0), sort.output_at(1));
        if sort.op() != "TopK" || dims(lens).is_none() || dims(lens) != dims(sort.output_at(0)) {
            return false;
        }
        let lens = lens.unwrap_or_default();
        self.graph.node[index] = NodeProto::make("Identity", sort.name(), &[lens], &[&sort.output[0]]);
        let Some(order) = order else { return true };
        let label = base_name(sort.label());
        let mut fresh = |part: &str| self.names.fresh(&format!("{label}.{part}"));
        let [all, rows, ones, numbers] = ["all", "rows", "ones", "numbers"].map(&mut fresh);
        let [shape, fill, non_zero, reshape] = ["Shape", "ConstantOfShape", "NonZero", "Reshape"].map(&mut fresh);
        self.graph.initializer.push(int64s(&all, &[1], &[-1]));
        // `Range` needs opset 11, and PyTorch sorts rows from opset 9 on.
        self.graph.node.extend([
            NodeProto::make("Shape", &shape, &[lens], &[&rows]),
            NodeProto::make("ConstantOfShape", &fill, &[&rows], &[&ones]).with_tensor("value", int64s("", &[1], &[1])),
            NodeProto::make("NonZero", &non_zero, &[&ones], &[&numbers]),
            NodeProto::make("Reshape", &reshape, &[&numbers, &all], &[order]),
        ]);
        true
    }

    /// Puts a `Where` behind an output of a recurrent node. Rows without steps keep their state. Returns the new node.
    fn keep_state_of_empty_rows(&mut self, index: usize, output: usize, is_empty_row: &str, state_in: &str) -> usize {
        let made = self.names.fresh(&format!("{state_in}/made"));
        let name = self.names.fresh(&format!("{state_in}/Where"));
        let given = self.graph.node[index].output_at(output).unwrap_or_default().to_owned();
        self.graph.node[index].set_output(output, &made);
        self.graph.node.push(NodeProto::make("Where", &name, &[is_empty_row, state_in, &made], &[&given]));
        self.graph.node.len() - 1
    }

    /// The carried values of a `Loop` (behind two other inputs) or the states of a `Scan`.
    fn carried(&mut self, index: usize, front: usize, carried: &[usize]) -> Result<(), Refusal> {
        let node = self.graph.node[index].clone();
        for &number in carried {
            let start = node.input_at(front + number).map(str::to_owned).unwrap_or_default();
            let dims = self.dims(&node, &start)?;
            let of_body =
                node.graph("body").and_then(|body| body.input.get(front + number)).map_or(0, ValueInfoProto::elem);
            let elem = if of_body == 0 { self.tensor(&start).elem } else { of_body };
            let (state_in, state_out) = self.state(&node, &number.to_string(), (elem, dims), Some(&start), 0.0)?;
            self.graph.node[index].set_input(front + number, &state_in);
            self.give(index, number, &state_out);
        }
        Ok(())
    }

    /// Keeps the last frames of a node's input in place of the padding in front of it.
    fn frames(&mut self, index: usize, axis: usize, frames: i64, cropped: i64, fill: f64) -> Result<(), Refusal> {
        let node = self.graph.node[index].clone();
        let source = node.input[0].clone();
        let mut dims = self.dims(&node, &source)?;
        dims[axis] = Dim::Known(frames);
        let elem = self.tensor(&source).elem;
        let (state_in, state_out) = self.state(&node, "frames", (elem, dims.clone()), None, fill)?;
        let label = base_name(node.label());
        let joined = if node.op() == "Pad" {
            let inputs: Vec<Tensor> = node.input.iter().map(|name| self.tensor(name)).collect();
            let mut pads = crate::infer::ops::pads(&node, &inputs, dims.len()).unwrap_or_default();
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
            // Padding of a transposed convolution cuts off what it gives: the kept frames, and what later steps add to.
            let of_time = if node.op() == "ConvTranspose" { frames } else { 0 };
            pads[axis - 2] = of_time;
            pads[axis - 2 + spatial] = of_time;
            let target = &mut self.graph.node[index];
            target.set_input(0, &joined);
            *target = target.clone().with_ints("pads", &pads);
            joined
        };
        self.keep_last(&label, &joined, axis, frames, &state_out);
        Ok(())
    }

    /// Pads the other axes of what a `Pad` padded along time, too.
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

    fn prefix(&mut self, index: usize, input: usize, axis: usize, frames: i64) -> Result<(), Refusal> {
        let node = self.graph.node[index].clone();
        let start = node.input[input].clone();
        let dims = self.dims(&node, &start)?;
        let elem = self.tensor(&start).elem;
        let (state_in, state_out) = self.state(&node, "frames", (elem, dims), Some(&start), 0.0)?;
        self.graph.node[index].set_input(input, &state_in);
        self.keep_last(&base_name(node.label()), &node.output[0], axis, frames, &state_out);
        Ok(())
    }

    /// Adds a `Slice` of the last frames of a tensor.
    fn keep_last(&mut self, label: &str, of: &str, axis: usize, frames: i64, output: &str) {
        self.slice(label, of, axis, (-frames, i64::MAX), output);
    }

    fn slice(&mut self, label: &str, of: &str, axis: usize, (start, end): (i64, i64), output: &str) {
        let name = self.names.fresh(&format!("{label}/Slice"));
        if self.opset < 10 {
            let node = NodeProto::make("Slice", &name, &[of], &[output]);
            let node = node.with_ints("starts", &[start]).with_ints("ends", &[end]).with_ints("axes", &[axis as i64]);
            self.graph.node.push(node);
            return;
        }
        let mut constant = |part: &str, value: i64| {
            let name = self.names.fresh(&format!("{label}.{part}"));
            self.graph.initializer.push(TensorProto { name: Some(name.clone()), ..int64s("", &[1], &[value]) });
            name
        };
        let (start, end, axes) = (constant("start", start), constant("end", end), constant("axis", axis as i64));
        self.graph.node.push(NodeProto::make("Slice", &name, &[of, &start, &end, &axes], &[output]));
    }
}

/// The target of a `Reshape`: -1 stands for the one dimension that isn't fixed.
fn shape(dims: &[Dim]) -> Vec<i64> {
    dims.iter().map(|dim| if let Dim::Known(length) = dim { *length } else { -1 }).collect()
}

/// The part of the original graph that computes where states start: a model with an output for each, of its name.
pub fn starts(cut: &CutGraph) -> Option<GraphProto> {
    let mut graph = cut.original.clone();
    graph.output.clear();
    for state in &cut.states {
        if let Start::Tensor(tensor) = &state.start {
            match &state.split {
                None => {
                    let name = format!("{}/Identity", state.input);
                    graph.node.push(NodeProto::make("Identity", &name, &[tensor], &[&state.input]));
                }
                Some(split) => {
                    let (name, shape) = (format!("{}/Reshape", state.input), format!("{}/shape", state.input));
                    graph.initializer.push(int64s(&shape, &[split.len() as i64], split));
                    graph.node.push(NodeProto::make("Reshape", &name, &[tensor, &shape], &[&state.input]));
                }
            }
            graph.output.push(ValueInfoProto::tensor(&state.input, state.elem, &state.dims));
        }
    }
    if graph.output.is_empty() {
        return None;
    }
    crate::graph::sort(&mut graph);
    crate::graph::prune(&mut graph);
    let made: HashSet<String> = producers(&graph).into_keys().map(str::to_owned).collect();
    let needed = crate::graph::ancestors(&graph, graph.output.iter().map(|output| output.name().to_owned()));
    graph.input.retain(|input| needed.contains(input.name()) && !made.contains(input.name()));
    graph.value_info.clear();
    Some(graph)
}
