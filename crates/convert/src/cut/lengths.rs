//! Lengths of rows (`sequence_lens`) that requests say. A row may be shorter than its request, and go on in a later
//! one.
//!
//! Rules: a new state must leave out the padding of shorter rows, so it must belong to a layer with the same lengths.
//! The model must keep the order of the rows, because states stay in the order of the sequences.

use std::collections::{HashMap, HashSet};

use super::cutter::{Cutter, base_name};
use crate::analysis::Analysis;
use crate::graph::{Content, inputs_of, producers};
use crate::onnx::schema::{GraphProto, NodeProto, TensorProto};
use crate::onnx::{DataType, int64s};
use crate::time::{Place, Result, refuse};

pub fn of_requests<'a>(node: &'a NodeProto, content: &Content) -> Option<&'a str> {
    let lens = node.input_at(4).filter(|_| node.is_recurrent());
    lens.filter(|&lens| content.get(lens).is_some_and(|inputs| !inputs.is_empty()))
}

/// Refuses states that would take in the padding of rows that another layer takes as shorter.
pub fn check<'a>(graph: &'a GraphProto, analysis: &Analysis, content: &Content) -> Result<()> {
    let producers = producers(graph);
    let source_of = |node: &'a NodeProto| Some(source(graph, &producers, of_requests(node, content)?));
    let mut over_steps = graph.node.iter().filter(|node| runs_over_steps(node, analysis));
    let Some((layer, lens)) = over_steps.find_map(|node| Some((node, source_of(node)?))) else {
        return Ok(());
    };
    let is_cut = |index: usize| analysis.found.cuts.iter().any(|cut| cut.node() == index && cut.makes_state(graph));
    for (index, node) in graph.node.iter().enumerate() {
        // Its state is an input of the model, so no cut leaves out the padding.
        let has_own_state = !is_cut(index) && node.is_recurrent() && runs_over_steps(node, analysis);
        if has_own_state && source_of(node).is_some() {
            let why = "takes lengths of rows (sequence_lens) and starts from a state that the model has: a row without steps \
                       would lose it";
            let help = "export the model without lengths, and send rows of equal length in a request";
            return Err(refuse(node, why, help));
        }
        if !is_cut(index) && !has_own_state {
            continue;
        }
        if source_of(node) != Some(lens) {
            let why = format!(
                "doesn't take the lengths of rows that {} takes (sequence_lens from '{lens}'), so its state would take in the \
                 padding of shorter rows",
                layer.described()
            );
            let help = "export the model without lengths and send rows of equal length in a request, or give this node \
                        the same lengths";
            return Err(refuse(node, why, help));
        }
    }
    Ok(())
}

/// Whether a node passes lengths of rows on: as they are, and in the order of the rows.
pub fn passes_lengths_on(node: &NodeProto) -> bool {
    // A maximum over all lengths is a length that a layer may take for every row.
    let merges = ["Expand", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"];
    keeps_each(node) || merges.contains(&node.op())
}

/// Whether the output has the elements of the input, each as a length.
pub fn keeps_each(node: &NodeProto) -> bool {
    match node.op() {
        // Smaller types don't hold every length.
        "Cast" => {
            let holds = [DataType::Int32, DataType::Int64, DataType::Float, DataType::Double];
            holds.iter().any(|&elem| node.int("to") == Some(elem as i64))
        }
        "Max" | "Min" => node.input.windows(2).all(|pair| pair[0] == pair[1]),
        // Sorts negate lengths, and negate them back.
        op => matches!(op, "Flatten" | "Identity" | "Neg" | "Reshape" | "Squeeze" | "Unsqueeze"),
    }
}

/// Whether a node limits lengths to the number of steps, which no length is above.
pub fn limits_to_steps(node: &NodeProto, analysis: &Analysis, content: &Content) -> bool {
    let is_of_requests = |name: &&String| content.get(*name).is_some_and(|inputs| !inputs.is_empty());
    node.op() == "Min" && node.input.iter().filter(|name| !is_of_requests(name)).all(|name| analysis.is_length(name))
}

/// Refuses other readers of lengths of rows than layers: they would get the lengths of a request, and not those of the
/// whole input. `cut` is the graph with states, in which the sorts of rows are gone.
pub fn check_readers(graph: &GraphProto, cut: &GraphProto, analysis: &Analysis, content: &Content) -> Result<()> {
    let layers = graph.node.iter().filter(|node| runs_over_steps(node, analysis));
    let mut lengths: HashSet<String> =
        layers.filter_map(|node| of_requests(node, content)).flat_map(|lens| &content[lens]).cloned().collect();
    let original = producers(graph);
    let is_new = |node: &NodeProto| !node.named_outputs().any(|name| original.contains_key(name));
    for node in cut.node.iter().filter(|node| !is_new(node) && !node.reads_size()) {
        let passes_on = limits_to_steps(node, analysis, content) || passes_lengths_on(node);
        // The second input of others is a shape, or axes.
        let takes_all = matches!(node.op(), "Max" | "Min");
        let takes = |name: &str| {
            if node.is_recurrent() {
                node.input_at(4) == Some(name)
            } else {
                passes_on && (takes_all || node.input_at(0) == Some(name))
            }
        };
        let inputs = inputs_of(node);
        if !node.is_recurrent() && inputs.iter().any(|name| takes(name) && lengths.contains(name)) {
            lengths.extend(node.named_outputs().map(str::to_owned));
        }
        let others = inputs.iter().filter(|name| !takes(name));
        if let Some(name) = others.into_iter().find(|name| lengths.contains(*name)) {
            let why = format!(
                "reads lengths of rows (sequence_lens) from '{name}', and gets those of a request in place of those of the \
                 whole input"
            );
            let help = "only layers can take lengths of rows: export the model without this node, or without lengths";
            return Err(refuse(node, why, help));
        }
    }
    Ok(())
}

/// Whether the rows of a recurrent node are those of the requests, and not the steps.
fn runs_over_steps(node: &NodeProto, analysis: &Analysis) -> bool {
    let place = node.input_at(0).and_then(|x| analysis.found.places.get(x));
    matches!(place, Some(Place::At(layout)) if layout.axis == 0)
}

/// The tensor that lengths come from. Exporters cast them, and sort them together with the rows.
fn source<'a>(graph: &'a GraphProto, producers: &HashMap<&str, usize>, lens: &'a str) -> &'a str {
    let before = |name: &&'a str| {
        let node = &graph.node[*producers.get(name)?];
        let passes_on = keeps_each(node) || node.op() == "TopK";
        node.input_at(0).filter(|_| passes_on && node.output_at(0) == Some(name))
    };
    std::iter::successors(Some(lens), before).take(graph.node.len()).last().unwrap_or(lens)
}

impl Cutter<'_> {
    /// A tensor that says which rows have no steps, for a recurrent node with lengths of rows: ONNX Runtime gives back
    /// states of zeros for such rows.
    pub fn add_mask_of_empty_rows(&mut self, node: &NodeProto) -> Result<Option<String>> {
        let Some(lens) = of_requests(node, &self.content) else { return Ok(None) };
        // Where came with opset 9.
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
        // A state is [1, rows, hidden], so the mask gets a dimension on both sides.
        self.graph.initializer.push(int64s(&shape, &[3], &[1, -1, 1]));
        let [equal, reshape] = ["is_zero/Equal", "is_empty_row/Reshape"].map(&mut fresh);
        self.graph.node.push(NodeProto::make("Equal", &equal, &[lens, &zero], &[&is_zero]));
        self.graph.node.push(NodeProto::make("Reshape", &reshape, &[&is_zero, &shape], &[&is_empty_row]));
        Ok(Some(is_empty_row))
    }

    /// Removes the sort of the rows by their lengths that PyTorch writes for packed sequences. States stay in the order
    /// of the sequences, so sorted rows would get the states of other rows. ONNX Runtime needs no sort. Refuses lengths
    /// that are made by a node which may put the rows in another order.
    pub fn remove_sorts_of_rows(&mut self, layer: &NodeProto) -> Result<()> {
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
            let is_kept = passes_lengths_on(node) || limits_to_steps(node, self.analysis, &self.content);
            if !is_sort && !is_kept {
                let why = format!(
                    "makes the lengths of rows of {} (sequence_lens), and it isn't known whether it leaves them and their order \
                     as they are; in another order, rows would get the states of others",
                    layer.described()
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
        // A sort of the rows gives as many lengths as it takes; a TopK with a smaller k picks some.
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
        // The order becomes 0, 1, 2 and so on, so the nodes that gather by it leave the rows where they are.
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
    pub fn keep_state_of_empty_rows(
        &mut self,
        index: usize,
        output: usize,
        is_empty_row: &str,
        state_in: &str,
    ) -> usize {
        let made = self.names.fresh(&format!("{state_in}/made"));
        let name = self.names.fresh(&format!("{state_in}/Where"));
        let given = self.graph.node[index].output_at(output).unwrap_or_default().to_owned();
        self.graph.node[index].set_output(output, &made);
        self.graph.node.push(NodeProto::make("Where", &name, &[is_empty_row, state_in, &made], &[&given]));
        self.graph.node.len() - 1
    }
}
