//! Any graph is converted or refused: models of `exports/` with changes that the input chooses.
//!
//! The backend converts at load, in the process of the server, so no graph may end in a panic.

use std::path::Path;
use std::sync::OnceLock;

use stateful_convert::onnx::schema::{
    AttributeProto, GraphProto, ModelProto, NodeProto, ValueInfoProto, attribute_proto::AttributeType,
};
use stateful_convert::onnx::{DataType, Dim, element_count, read, write};
use stateful_convert::{InputAxis, Options, StatePair, convert};

/// Changes of a model at most.
const CHANGES_MAX: usize = 4;

/// Converts a changed model. The converted model has what its report names.
pub fn conversion(bytes: &[u8]) {
    static MODELS: OnceLock<Vec<ModelProto>> = OnceLock::new();
    let models = MODELS.get_or_init(models);
    let mut choices = Choices(bytes);
    let mut model = models[choices.below(models.len())].clone();
    let Some(graph) = model.graph.as_mut() else { return };
    let options = options(&mut choices, graph);
    for _ in 0..=choices.below(CHANGES_MAX) {
        change(&mut choices, graph);
    }
    if choices.below(8) == 0 {
        model.opset_import[0].version = Some(choices.pick(&[7, 9, 10, 12, 17, 0, -1, i64::MAX]));
    }
    match convert(write(&model).into(), &options) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(converted) => {
            let graph = read(converted.model.into()).unwrap().graph.unwrap();
            let has = |values: &[ValueInfoProto], name: &str| values.iter().any(|value| value.name() == name);
            for pair in converted.report.states.iter().map(|state| &state.pair) {
                assert!(has(&graph.input, &pair.input) && has(&graph.output, &pair.output), "{pair}");
            }
            if let Some(initial) = converted.initial_states {
                assert!(!read(initial.into()).unwrap().graph.unwrap().output.is_empty());
            }
        }
    }
}

/// The models of `exports/`. This file is a part of `fuzz/` too, so the folder is searched for.
pub fn models() -> Vec<ModelProto> {
    let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let mut folders = above.map(|folder| folder.join("crates/convert/tests/exports"));
    let folder = folders.find(|folder| folder.is_dir()).unwrap();
    let mut files: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "onnx"));
    files.sort();
    files.iter().map(|file| read(std::fs::read(file).unwrap().into()).unwrap()).collect()
}

/// What decides: each byte of the input makes a choice. Behind the end, the first is taken.
pub struct Choices<'a>(pub &'a [u8]);

impl Choices<'_> {
    pub fn below(&mut self, limit: usize) -> usize {
        let mut next = || {
            let Some((&first, rest)) = self.0.split_first() else { return 0 };
            self.0 = rest;
            usize::from(first)
        };
        if limit == 0 {
            0
        } else if limit > 256 {
            (next() * 256 + next()) % limit
        } else {
            next() % limit
        }
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

const NUMBERS: [i64; 19] = [
    0,
    -1,
    1,
    2,
    3,
    4,
    -2,
    16,
    48,
    96,
    5000,
    1 << 20,
    1 << 31,
    1 << 32,
    1 << 62,
    i64::MAX / 2,
    i64::MAX - 1,
    i64::MAX,
    i64::MIN,
];

/// Attributes of one integer, then those of several.
const ATTRIBUTES: [&str; 26] = [
    "allowzero",
    "axis",
    "batch_dims",
    "ceil_mode",
    "end",
    "group",
    "hidden_size",
    "k",
    "keepdims",
    "layout",
    "new_axis",
    "noop_with_empty_axes",
    "num_scan_inputs",
    "start",
    "to",
    "axes",
    "dilations",
    "kernel_shape",
    "output_padding",
    "pads",
    "perm",
    "scan_input_axes",
    "scan_output_axes",
    "shape",
    "split",
    "strides",
];
const OF_ONE: usize = 15;

const OPERATORS: [&str; 44] = [
    "Add",
    "ArgMax",
    "AveragePool",
    "Cast",
    "Concat",
    "ConcatFromSequence",
    "ConstantOfShape",
    "Conv",
    "ConvTranspose",
    "CumSum",
    "Einsum",
    "Equal",
    "Expand",
    "Flatten",
    "GRU",
    "Gather",
    "Gemm",
    "GlobalAveragePool",
    "Identity",
    "If",
    "LSTM",
    "LayerNormalization",
    "Loop",
    "MatMul",
    "MaxPool",
    "Mul",
    "Pad",
    "QuantizeLinear",
    "Range",
    "ReduceProd",
    "ReduceSum",
    "Reshape",
    "Scan",
    "ScatterND",
    "SequenceInsert",
    "Shape",
    "Size",
    "Slice",
    "Softmax",
    "Split",
    "Squeeze",
    "Tile",
    "TopK",
    "Transpose",
];

fn options(choices: &mut Choices, graph: &GraphProto) -> Options {
    let mut options =
        Options { open_batch: choices.below(5) == 0, keep_recurrences: choices.below(8) == 0, ..Options::default() };
    let axes = |choices: &mut Choices| {
        let input = graph.input[choices.below(graph.input.len())].name().to_owned();
        vec![InputAxis { input, axis: choices.below(3) }]
    };
    if choices.below(4) == 0 {
        options.time = axes(choices);
    }
    if choices.below(8) == 0 {
        options.batch = axes(choices);
    }
    if choices.below(16) == 0 {
        let input = graph.input[choices.below(graph.input.len())].name().to_owned();
        let output = graph.output[choices.below(graph.output.len())].name().to_owned();
        options.states = vec![StatePair { input, output }];
    }
    options
}

/// The graph itself, or one inside its nodes.
fn some_graph<'a>(choices: &mut Choices, graph: &'a mut GraphProto) -> &'a mut GraphProto {
    let has_graph = |node: &NodeProto| node.graphs().next().is_some();
    let inside = graph.node.iter().position(has_graph).filter(|_| choices.below(2) == 0);
    let Some(index) = inside else { return graph };
    let mut inner = graph.node[index].attribute.iter_mut().filter_map(|attribute| attribute.g.as_mut());
    some_graph(choices, inner.next().unwrap())
}

pub fn change(choices: &mut Choices, graph: &mut GraphProto) {
    let graph = some_graph(choices, graph);
    if graph.node.is_empty() {
        return;
    }
    let (node, other) = (choices.below(graph.node.len()), choices.below(graph.node.len()));
    match choices.below(16) {
        0..=2 => change_attribute(choices, &mut graph.node[node]),
        3 | 4 => change_weight(choices, graph),
        5 | 6 => change_value(choices, graph),
        7 => {
            let names: Vec<String> = graph.node.iter().flat_map(|node| node.input.clone()).collect();
            let name = names.get(choices.below(names.len())).cloned().unwrap_or_default();
            let input = choices.below(graph.node[node].input.len() + 1);
            graph.node[node].set_input(input, &name);
        }
        8 => {
            let inputs = &mut graph.node[node].input;
            if choices.below(2) == 0 {
                inputs.truncate(choices.below(inputs.len() + 1));
            } else if let Some(input) = inputs.get_mut(choices.below(8)) {
                input.clear();
            }
        }
        9 => {
            let outputs = &mut graph.node[node].output;
            outputs.truncate(choices.below(outputs.len() + 1));
        }
        10 => {
            let copied = graph.node[node].clone();
            graph.node.insert(other, copied);
        }
        11 => {
            // Mostly of a node in front of it, else possibly a circle.
            let is_any = choices.below(8) == 0;
            let (node, other) = if is_any { (node, other) } else { (node.max(other), node.min(other)) };
            let made = graph.node[other].output.first().cloned().unwrap_or_default();
            let input = choices.below(graph.node[node].input.len() + 1);
            graph.node[node].set_input(input, &made);
        }
        12 => graph.node[node].op_type = Some(choices.pick(&OPERATORS).to_owned()),
        13 => _ = graph.node.remove(node),
        14 => graph.node.swap(node, other),
        _ => {
            let attributes = &mut graph.node[node].attribute;
            if !attributes.is_empty() {
                attributes.remove(choices.below(attributes.len()));
            }
        }
    }
}

fn change_attribute(choices: &mut Choices, node: &mut NodeProto) {
    if choices.below(3) == 0 || node.attribute.is_empty() {
        let which = choices.below(ATTRIBUTES.len());
        let mut added = AttributeProto { name: Some(ATTRIBUTES[which].to_owned()), ..AttributeProto::default() };
        if which < OF_ONE {
            added.r#type = Some(AttributeType::Int.into());
            added.i = Some(choices.pick(&NUMBERS));
        } else {
            added.r#type = Some(AttributeType::Ints.into());
            added.ints = (0..choices.below(5)).map(|_| choices.pick(&NUMBERS)).collect();
        }
        return node.set(added);
    }
    let index = choices.below(node.attribute.len());
    let attribute = &mut node.attribute[index];
    if let Some(value) = attribute.t.as_mut().and_then(|tensor| tensor.dims.first_mut()) {
        *value = choices.pick(&NUMBERS);
    } else if attribute.ints.is_empty() {
        attribute.i = Some(choices.pick(&NUMBERS));
    } else if choices.below(4) == 0 {
        attribute.ints.pop();
    } else {
        let at = choices.below(attribute.ints.len());
        attribute.ints[at] = choices.pick(&NUMBERS);
    }
}

/// Another shape, other numbers or another type, in a weight or a constant.
fn change_weight(choices: &mut Choices, graph: &mut GraphProto) {
    let constants = graph.node.iter_mut().flat_map(|node| &mut node.attribute).filter_map(|held| held.t.as_mut());
    let mut all: Vec<_> = graph.initializer.iter_mut().chain(constants).collect();
    // The small ones, such as shapes, decide more.
    if choices.below(2) == 0 {
        all.retain(|tensor| tensor.dims.iter().all(|&dim| dim < 9) && tensor.dims.len() < 2);
    }
    if all.is_empty() {
        return;
    }
    let which = choices.below(all.len());
    let tensor = &mut *all[which];
    let at = choices.below(tensor.dims.len());
    match choices.below(5) {
        0 if !tensor.dims.is_empty() => tensor.dims[at] = choices.pick(&NUMBERS),
        1 => tensor.data_type = Some(choices.below(18) as i32),
        2 => tensor.dims.insert(at, choices.pick(&NUMBERS)),
        _ => {
            let count = element_count(&tensor.dims).clamp(0, 64) as usize;
            let wide = tensor.data_type() == DataType::Int64 as i32;
            tensor.raw_data = None;
            tensor.int64_data.clear();
            tensor.int32_data.clear();
            for _ in 0..count {
                let number = choices.pick(&NUMBERS);
                if wide { tensor.int64_data.push(number) } else { tensor.int32_data.push(number as i32) }
            }
        }
    }
}

/// Other dimensions of an input, an output or what is known about a tensor.
fn change_value(choices: &mut Choices, graph: &mut GraphProto) {
    let mut all: Vec<&mut ValueInfoProto> = graph.input.iter_mut().collect();
    if choices.below(3) == 0 {
        all = graph.output.iter_mut().chain(&mut graph.value_info).collect();
    }
    if all.is_empty() {
        return;
    }
    let which = choices.below(all.len());
    let value = &mut *all[which];
    let elem = value.elem();
    let mut dims = value.dims().unwrap_or_default();
    let dim = match choices.below(6) {
        0 => Dim::Open,
        1 => Dim::Symbol(choices.pick(&["batch", "time", "N", ""]).to_owned()),
        _ => Dim::Known(choices.pick(&NUMBERS)),
    };
    let at = choices.below(dims.len());
    match choices.below(8) {
        0 => _ = dims.pop(),
        1 => dims.insert(at, dim),
        2 => return value.r#type = None,
        3 => return value.set_tensor(choices.below(18) as i32, &dims),
        4 => value.name = Some(choices.pick(&["", "x", "other"]).to_owned()),
        _ if !dims.is_empty() => dims[at] = dim,
        _ => {}
    }
    value.set_tensor(elem, &dims);
}
