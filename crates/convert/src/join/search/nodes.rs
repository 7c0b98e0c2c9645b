//! The nodes of a greedy search: of CTC, of a transducer, and those that pack the tokens of each row to the left. Each
//! node is named after its output.
//!
//! Rule: the width of the outputs depends on the number of frames only. Otherwise the width of a row's answer would
//! tell how many tokens its neighbours have.

use super::plan::{
    CtcPlan, FRAMES, Joint, LAST, LAST_NEXT, LENGTHS, PredictorState, SEARCH, SKIP, SKIP_NEXT, TOKENS, TransducerPlan,
};
use crate::join::part::{Names, Read, take_graph};
use crate::names::StatePair;
use crate::onnx::schema::{GraphProto, NodeProto, TensorProto, ValueInfoProto};
use crate::onnx::{DataType, Dim, int64s, type_bytes};

const INT64: i32 = DataType::Int64 as i32;
const INT32: i32 = DataType::Int32 as i32;
const BOOL: i32 = DataType::Bool as i32;

/// Constants of every search: axes, a shape without dimensions, and numbers.
pub const CONSTANTS: [(&str, &[i64], &[i64]); 6] = [
    ("search.0", &[1], &[0]),
    ("search.1", &[1], &[1]),
    ("search.2", &[1], &[2]),
    ("search.-1", &[1], &[-1]),
    ("search.end", &[1], &[i64::MAX]),
    ("search.scalar", &[0], &[]),
];

#[derive(Default)]
struct Nodes(Vec<NodeProto>);

impl Nodes {
    /// Adds a node, and answers with the name of its output. `own` is that name without the search's.
    fn add(&mut self, op: &str, own: &str, inputs: &[&str]) -> String {
        self.with(op, own, inputs, |node| node)
    }

    fn with(&mut self, op: &str, own: &str, inputs: &[&str], edit: impl FnOnce(NodeProto) -> NodeProto) -> String {
        let output = format!("{SEARCH}.{own}");
        self.push(op, &output, inputs, edit);
        output
    }

    fn along(&mut self, op: &str, axis: i64, own: &str, inputs: &[&str]) -> String {
        self.with(op, own, inputs, |node| node.with_int("axis", axis))
    }

    fn push(&mut self, op: &str, output: &str, inputs: &[&str], edit: impl FnOnce(NodeProto) -> NodeProto) {
        self.0.push(edit(NodeProto::make(op, &format!("{output}/{op}"), inputs, &[output])));
    }

    fn cast(&mut self, own: &str, input: &str, elem: i32) -> String {
        self.with("Cast", own, &[input], |node| node.with_int("to", elem.into()))
    }
}

/// The greedy search of CTC: the best token of each frame, without blanks and repeats. The last frame's token is a
/// state, so that a repeat across chunks counts once.
pub fn add_ctc(graph: &mut GraphProto, plan: &CtcPlan) {
    let mut nodes = Nodes::default();
    graph.initializer.push(int64s("search.blank", &[1], &[plan.blank]));
    let best = nodes.with("ArgMax", "best", &[&plan.logits], |node| node.with_int("axis", 2).with_int("keepdims", 0));
    let all = nodes.along("Concat", 1, "with_last", &[LAST, &best]);
    let before = nodes.add("Slice", "before", &[&all, "search.0", "search.-1", "search.1"]);
    nodes.push("Slice", LAST_NEXT, &[&all, "search.-1", "search.end", "search.1"], |node| node);
    let is_blank = nodes.add("Equal", "is_blank", &[&best, "search.blank"]);
    let repeats = nodes.add("Equal", "repeats", &[&best, &before]);
    let is_none = nodes.add("Or", "is_none", &[&is_blank, &repeats]);
    let found = nodes.add("Not", "found", &[&is_none]);
    let shape = nodes.add("Shape", "best_shape", &[&best]);
    let count = nodes.add("Gather", "frame_count", &[&shape, "search.1"]);
    let [count, zero, one] = [("frame_end", count.as_str()), ("frame_start", "search.0"), ("frame_step", "search.1")]
        .map(|(own, value)| nodes.add("Reshape", own, &[value, "search.scalar"]));
    let frame = nodes.add("Range", "frame", &[&zero, &count, &one]);
    let frames = nodes.add("Expand", "frames", &[&frame, &shape]);
    pack(&mut nodes, [&best, &frames], &found, "search.frame_count");
    graph.node.append(&mut nodes.0);
}

/// Adds the outputs of a search: the entries of `tokens` and `frames` (both `[rows, turns]`) that `found` marks, with
/// rows filled up to `width`.
fn pack(nodes: &mut Nodes, [tokens, frames]: [&str; 2], found: &str, width: &str) {
    let ones = nodes.cast("found_ones", found, INT64);
    nodes.push("ReduceSum", LENGTHS, &[&ones, "search.1"], |node| node.with_int("keepdims", 0));
    // TopK gives no more entries than there are turns, so `Pad` fills the rest of the width.
    let most = nodes.with("ReduceMax", "most_tokens", &[LENGTHS], |node| node.with_int("keepdims", 0));
    let most = nodes.add("Reshape", "most", &[&most, "search.1"]);
    let filling = nodes.add("Sub", "filling", &[width, &most]);
    let filling = nodes.along("Concat", 0, "filling_of_rows", &["search.0", "search.0", "search.0", &filling]);
    let no_token = nodes.add("Reshape", "no_token", &["search.-1", "search.scalar"]);
    // The largest keys are those of the first tokens, and their order is that of the tokens.
    let shape = nodes.add("Shape", "found_shape", &[found]);
    let turns = nodes.add("Gather", "turns", &[&shape, "search.1"]);
    let last = nodes.add("Reshape", "turns_scalar", &[&turns, "search.scalar"]);
    let zero = nodes.add("Reshape", "zero", &["search.0", "search.scalar"]);
    let one = nodes.add("Reshape", "one", &["search.1", "search.scalar"]);
    let turn = nodes.add("Range", "turn", &[&zero, &last, &one]);
    let before = nodes.add("Sub", "turns_left", &[&turns, &turn]);
    let key = nodes.add("Mul", "key", &[&ones, &before]);
    let sorted = nodes.with("TopK", "sorted_keys", &[&key, &most], |mut node| {
        node.output.push("search.sorted_at".to_owned());
        node.with_int("axis", 1)
    });
    let is_token = nodes.add("Greater", "is_token", &[&sorted, "search.0"]);
    for (name, values) in [(TOKENS, tokens), (FRAMES, frames)] {
        let packed = nodes.along("GatherElements", 1, &format!("packed_{name}"), &[values, "search.sorted_at"]);
        let packed = nodes.add("Where", &format!("own_{name}"), &[&is_token, &packed, "search.-1"]);
        nodes.push("Pad", name, &[&packed, &filling, &no_token], |node| node);
    }
}

/// The name of a state's current value, inside the loop.
fn kept(name: &str) -> String {
    format!("{name}/kept")
}

/// The name of a state's next value, if a token is found.
fn found(name: &str) -> String {
    format!("{name}/found")
}

/// The greedy search of a transducer: a `Loop` whose turns go from one token to the next.
///
/// Between two tokens the predictor doesn't change. So a turn asks the joint for several frames, and goes on at the
/// first one that isn't blank. The predictor's state is kept only in rows where a token was found. Each row has its own
/// position in time; the loop ends when the last one is at the end of the chunk.
///
/// If the last logits are durations (TDT), they say how many frames a turn goes on by, with a token or without one. A
/// turn then asks for one frame, and a jump past the end of the chunk becomes a state.
pub fn add_transducer(
    graph: &mut GraphProto,
    plan: &TransducerPlan,
    inside: &mut [Read],
    names: &mut [Names],
    rows: &Dim,
) {
    let states: Vec<PredictorState> = plan.states.iter().map(|state| named_state(plan, state, names, rows)).collect();
    let passed = name_inputs(plan, names);
    let mut nodes = Nodes::default();
    let [turns, start] = &before_loop(graph, &mut nodes, plan);
    let mut body = Nodes::default();
    if matches!(plan.takes, Joint::InRows(_)) {
        for (number, from) in passed.iter().enumerate() {
            body.push("Gather", &repeated(number), &[from, "search.row_repeated"], |node| node);
        }
    }
    for (part, names) in inside.iter_mut().zip(&names[plan.predictor..]) {
        let mut inner = take_graph(part, names);
        graph.initializer.append(&mut inner.initializer);
        graph.sparse_initializer.append(&mut inner.sparse_initializer);
        body.0.append(&mut inner.node);
    }
    let logits = names[plan.joint].tensor(&plan.logits);
    let body = in_loop(plan, body, &states, &logits, rows);
    let has_durations = !plan.durations.is_empty();
    let mut inputs = vec![turns.as_str(), "", if has_durations { SKIP } else { start }];
    inputs.extend((plan.max_tokens > 1).then_some(start.as_str()));
    inputs.push(LAST);
    inputs.extend(states.iter().map(|state| state.pair.input.as_str()));
    let mut outputs = vec!["search.t_end"];
    outputs.extend((plan.max_tokens > 1).then_some("search.count_end"));
    outputs.push(LAST_NEXT);
    outputs.extend(states.iter().map(|state| state.pair.output.as_str()));
    outputs.extend(["search.token_turns", "search.frame_turns"]);
    nodes.0.push(NodeProto::make("Loop", "search.Loop", &inputs, &outputs).with_graph("body", body));
    if has_durations {
        nodes.push("Sub", SKIP_NEXT, &["search.t_end", "search.count"], |node| node);
    }
    let [tokens, frames] = [("tokens", "search.token_turns"), ("frames", "search.frame_turns")]
        .map(|(own, turns)| nodes.with("Transpose", own, &[turns], |node| node.with_ints("perm", &[1, 0])));
    let is_found = nodes.add("Greater", "found", &[&tokens, "search.-1"]);
    let width = nodes.add("Mul", "width", &["search.count", "search.max_tokens"]);
    pack(&mut nodes, [&tokens, &frames], &is_found, &width);
    graph.node.append(&mut nodes.0);
    for state in &states {
        graph.input.push(ValueInfoProto::tensor(&state.pair.input, state.elem, &state.dims));
        graph.output.push(ValueInfoProto::tensor(&state.pair.output, state.elem, &state.dims));
    }
}

/// A state of the predictor, by its names in the joined graph.
fn named_state(plan: &TransducerPlan, state: &PredictorState, names: &[Names], rows: &Dim) -> PredictorState {
    let names = &names[plan.predictor];
    let dim = |(axis, dim): (usize, &Dim)| match dim {
        _ if state.rows == Some(axis) => rows.clone(),
        Dim::Symbol(name) => Dim::Symbol(names.symbol(name)),
        other => other.clone(),
    };
    PredictorState {
        pair: StatePair::new(&names.tensor(&state.pair.input), &names.tensor(&state.pair.output)),
        elem: state.elem,
        dims: state.dims.iter().enumerate().map(dim).collect(),
        rows: state.rows,
    }
}

/// Gives the inputs of the graphs inside the names of what the loop gives them. Answers with what the predictor passes
/// on.
fn name_inputs(plan: &TransducerPlan, names: &mut [Names]) -> Vec<String> {
    let is_rows = matches!(plan.takes, Joint::InRows(_));
    let of_predictor = &mut names[plan.predictor];
    for PredictorState { pair, .. } in &plan.states {
        let (input, output) = (of_predictor.tensor(&pair.input), of_predictor.tensor(&pair.output));
        of_predictor.tensors.insert(pair.input.clone(), kept(&input));
        of_predictor.tensors.insert(pair.output.clone(), found(&output));
    }
    let tokens = if plan.tokens.is_flat { format!("{SEARCH}.last_token") } else { kept(LAST) };
    of_predictor.tensors.insert(plan.tokens.input.clone(), tokens);
    if let Some((input, _)) = &plan.tokens.lengths {
        of_predictor.tensors.insert(input.clone(), format!("{SEARCH}.token_counts"));
    }
    let passed: Vec<(String, String)> =
        plan.passed.iter().map(|(from, to)| (of_predictor.tensor(from), to.clone())).collect();
    let of_joint = &mut names[plan.joint];
    for (number, (from, to)) in passed.iter().enumerate() {
        of_joint.tensors.insert(to.clone(), if is_rows { repeated(number) } else { from.clone() });
    }
    of_joint.tensors.insert(plan.frames_input.clone(), format!("{SEARCH}.frames_in"));
    passed.into_iter().map(|(from, _)| from).collect()
}

/// What the predictor gives, once for each frame of a turn.
fn repeated(number: usize) -> String {
    format!("{SEARCH}.predicted_{number}")
}

/// The inputs of the loop: the most turns, and zero for each row.
fn before_loop(graph: &mut GraphProto, nodes: &mut Nodes, plan: &TransducerPlan) -> [String; 2] {
    let elem = graph.output.iter().find(|value| value.name() == plan.frames).map_or(1, ValueInfoProto::elem);
    let offsets: Vec<i64> = (0..plan.window).collect();
    let constants = [
        int64s("search.window", &[1], &[plan.window]),
        int64s("search.offsets", &[1, plan.window], &offsets),
        int64s("search.zeros", &[1, plan.window], &vec![0; offsets.len()]),
        int64s("search.blank", &[1], &[plan.blank]),
        int64s("search.max_tokens", &[1], &[plan.max_tokens]),
        int64s("search.turns_of_frame", &[1], &[plan.max_tokens + 1]),
    ];
    graph.initializer.extend(constants);
    if !plan.durations.is_empty() {
        let count = plan.durations.len() as i64;
        graph.initializer.push(int64s("search.durations", &[count], &plan.durations));
        graph.initializer.push(int64s("search.first_duration", &[1], &[-count]));
    }
    // Frames come second, so that a row of a matrix is a frame.
    let frames = if plan.frames_axis == 2 {
        nodes.with("Transpose", "frames_second", &[&plan.frames], |node| node.with_ints("perm", &[0, 2, 1]))
    } else {
        plan.frames.clone()
    };
    let shape = nodes.add("Shape", "shape", &[&frames]);
    let [rows, count, features] = [("rows", "search.0"), ("count", "search.1"), ("features", "search.2")]
        .map(|(own, index)| nodes.add("Gather", own, &[&shape, index]));
    // Zeros behind the chunk, so that the window of its last frame has frames, too.
    let padding = nodes.along("Concat", 0, "padding_shape", &[&rows, "search.window", &features]);
    let padding =
        nodes.with("ConstantOfShape", "padding", &[&padding], |node| node.with_tensor("value", zero_of(elem)));
    let padded = nodes.along("Concat", 1, "padded", &[&frames, &padding]);
    let matrix = nodes.along("Concat", 0, "matrix_shape", &["search.-1", &features]);
    nodes.add("Reshape", "matrix", &[&padded, &matrix]);
    let [zero, end, one] = [("row_start", "search.0"), ("row_end", rows.as_str()), ("row_step", "search.1")]
        .map(|(own, value)| nodes.add("Reshape", own, &[value, "search.scalar"]));
    let row = nodes.add("Range", "row", &[&zero, &end, &one]);
    let stride = nodes.add("Add", "frames_of_row", &[&count, "search.window"]);
    let first = nodes.add("Mul", "first", &[&row, &stride]);
    let first = nodes.add("Unsqueeze", "first_column", &[&first, "search.1"]);
    nodes.add("Add", "first_window", &[&first, "search.offsets"]);
    nodes.along("Concat", 0, "logits_shape", &[&rows, "search.window", "search.-1"]);
    if let Joint::InRows(axis) = plan.takes {
        let column = nodes.add("Unsqueeze", "row_column", &[&row, "search.1"]);
        let grid = nodes.add("Add", "row_grid", &[&column, "search.zeros"]);
        nodes.add("Reshape", "row_repeated", &[&grid, "search.-1"]);
        let parts: &[&str] = match axis {
            None => &["search.-1", &features],
            Some(1) => &["search.-1", "search.1", &features],
            Some(_) => &["search.-1", &features, "search.1"],
        };
        nodes.along("Concat", 0, "frames_in_shape", parts);
    }
    if let Some((_, elem)) = &plan.tokens.lengths {
        let context = number(*elem, plan.tokens.context);
        nodes.with("ConstantOfShape", "token_counts", &[&rows], |node| node.with_tensor("value", context));
    }
    let start = nodes.with("ConstantOfShape", "start", &[&rows], |node| node.with_tensor("value", zero_of(INT64)));
    // Each turn finds a token or goes on by a frame. The first turn is made without frames, too.
    let turns = nodes.add("Mul", "turns_of_frames", &[&count, "search.turns_of_frame"]);
    let turns = nodes.add("Add", "most_turns", &[&turns, "search.1"]);
    let turns = nodes.add("Reshape", "most_turns_scalar", &[&turns, "search.scalar"]);
    [turns, start]
}

fn zero_of(elem: i32) -> TensorProto {
    element(elem, vec![0; type_bytes(elem)])
}

fn number(elem: i32, value: i64) -> TensorProto {
    element(elem, if elem == INT32 { (value as i32).to_le_bytes().to_vec() } else { value.to_le_bytes().to_vec() })
}

fn element(elem: i32, bytes: Vec<u8>) -> TensorProto {
    TensorProto { data_type: Some(elem), dims: vec![1], raw_data: Some(bytes.into()), ..TensorProto::default() }
}

fn in_loop(plan: &TransducerPlan, graphs: Nodes, states: &[PredictorState], logits: &str, rows: &Dim) -> GraphProto {
    let mut nodes = Nodes::default();
    // A jump may have ended behind the frames.
    let at = match plan.durations.as_slice() {
        [] => "search.t".to_owned(),
        _ => nodes.add("Min", "t_inside", &["search.t", "search.count"]),
    };
    let column = nodes.add("Unsqueeze", "t_column", &[&at, "search.1"]);
    window(&mut nodes, plan, &column);
    if plan.tokens.is_flat {
        nodes.add("Squeeze", "last_token", &[&kept(LAST), "search.1"]);
    }
    nodes.0.extend(graphs.0);
    let logits = nodes.add("Reshape", "logits", &[logits, "search.logits_shape"]);
    let next = if plan.durations.is_empty() {
        let [first, frame, is_hit] = first_hit(&mut nodes, &logits, &column);
        next_by_token(&mut nodes, [&first, &frame, &is_hit], plan.max_tokens > 1)
    } else {
        let (logits, duration) = without_durations(&mut nodes, &logits);
        let [.., is_hit] = first_hit(&mut nodes, &logits, &column);
        next_by_duration(&mut nodes, &duration, &is_hit, plan.max_tokens > 1)
    };
    last_tokens(&mut nodes, plan);
    for state in states {
        keep_state(&mut nodes, state);
    }
    let is_active = nodes.add("Less", "is_active", &[&next, "search.count"]);
    let is_active = nodes.cast("is_active_number", &is_active, INT64);
    let active = nodes.with("ReduceSum", "active", &[&is_active], |node| node.with_int("keepdims", 0));
    let goes_on = nodes.add("Greater", "active_some", &[&active, "search.0"]);
    nodes.add("Reshape", "goes_on", &[&goes_on, "search.scalar"]);
    body(plan, nodes, states, rows)
}

/// The first frame of the window whose best token isn't blank: its position in the window, its number, and whether it
/// exists. Makes `search.token_of_turn` and `search.frame_of_turn`.
fn first_hit(nodes: &mut Nodes, logits: &str, column: &str) -> [String; 3] {
    let best = nodes.with("ArgMax", "best", &[logits], |node| node.with_int("axis", 2).with_int("keepdims", 0));
    let is_blank = nodes.add("Equal", "is_blank", &[&best, "search.blank"]);
    let is_other = nodes.add("Not", "is_other", &[&is_blank]);
    let at = nodes.add("Add", "at", &[column, "search.offsets"]);
    let is_inside = nodes.add("Less", "is_inside", &[&at, "search.count"]);
    let hit = nodes.add("And", "hit", &[&is_other, &is_inside]);
    // ArgMax takes no booleans, and gives the first of equal values: the first frame with a token.
    let hit = nodes.cast("hit_number", &hit, INT32);
    let first = nodes.with("ArgMax", "first_hit", &[&hit], |node| node.with_int("axis", 1).with_int("keepdims", 1));
    let [token, is_hit] = [("token_column", &best), ("hit_column", &hit)]
        .map(|(own, values)| nodes.along("GatherElements", 1, own, &[values, &first]));
    let is_hit = nodes.cast("is_hit_column", &is_hit, BOOL);
    let is_hit = nodes.add("Squeeze", "is_hit", &[&is_hit, "search.1"]);
    let frame = nodes.add("Add", "frame_column", &[column, &first]);
    let frame = nodes.add("Squeeze", "frame_of_turn", &[&frame, "search.1"]);
    let token = nodes.add("Squeeze", "token", &[&token, "search.1"]);
    nodes.add("Where", "token_of_turn", &[&is_hit, &token, "search.-1"]);
    [first, frame, is_hit]
}

fn without_durations(nodes: &mut Nodes, logits: &str) -> (String, String) {
    let [from, to, axis] = ["search.first_duration", "search.end", "search.2"];
    let last = nodes.add("Slice", "duration_logits", &[logits, from, to, axis]);
    let best = nodes.with("ArgMax", "best_duration", &[&last], |node| node.with_int("axis", 2).with_int("keepdims", 0));
    let frames = nodes.add("Gather", "duration_column", &["search.durations", &best]);
    let duration = nodes.add("Squeeze", "duration", &[&frames, "search.1"]);
    (nodes.add("Slice", "token_logits", &[logits, "search.0", from, axis]), duration)
}

fn body(plan: &TransducerPlan, nodes: Nodes, states: &[PredictorState], rows: &Dim) -> GraphProto {
    let row = std::slice::from_ref(rows);
    let tokens = [rows.clone(), Dim::Known(plan.tokens.context)];
    let value = ValueInfoProto::tensor;
    let mut body = GraphProto { name: Some(SEARCH.to_owned()), node: nodes.0, ..GraphProto::default() };
    body.input = vec![
        value("search.turn_number", INT64, &[]),
        value("search.went_on", BOOL, &[]),
        value("search.t", INT64, row),
    ];
    body.output = vec![value("search.goes_on", BOOL, &[]), value("search.t_next", INT64, row)];
    if plan.max_tokens > 1 {
        body.input.push(value("search.tokens_of_frame", INT64, row));
        body.output.push(value("search.tokens_of_frame_next", INT64, row));
    }
    body.input.push(value(&kept(LAST), plan.tokens.elem, &tokens));
    body.output.push(value(&format!("{LAST_NEXT}/turn"), plan.tokens.elem, &tokens));
    for state in states {
        body.input.push(value(&kept(&state.pair.input), state.elem, &state.dims));
        body.output.push(value(&format!("{}/turn", state.pair.output), state.elem, &state.dims));
    }
    body.output.extend(["search.token_of_turn", "search.frame_of_turn"].map(|name| value(name, INT64, row)));
    body
}

/// The next position: that of the token, as long as its frame has room for more, or behind the window.
fn next_by_token(nodes: &mut Nodes, [first, frame, is_hit]: [&str; 3], several: bool) -> String {
    let behind = nodes.add("Add", "behind_window", &["search.t", "search.window"]);
    // A row that is finished waits at the end of the chunk for the others.
    let behind = nodes.add("Min", "behind", &[&behind, "search.count"]);
    let next = if several {
        let skipped = nodes.add("Squeeze", "first_row", &[first, "search.1"]);
        let is_same = nodes.add("Equal", "is_same_frame", &[&skipped, "search.0"]);
        let so_far = nodes.add("Where", "count_of_frame", &[&is_same, "search.tokens_of_frame", "search.0"]);
        let count = nodes.add("Add", "count_with_token", &[&so_far, "search.1"]);
        let is_room = nodes.add("Less", "is_room", &[&count, "search.max_tokens"]);
        let stays = nodes.add("And", "stays", &[is_hit, &is_room]);
        nodes.add("Where", "tokens_of_frame_next", &[&stays, &count, "search.0"]);
        let step = nodes.add("Where", "step", &[&is_room, "search.0", "search.1"]);
        nodes.add("Add", "next_of_token", &[frame, &step])
    } else {
        nodes.add("Add", "next_of_token", &[frame, "search.1"])
    };
    nodes.add("Where", "t_next", &[is_hit, &next, &behind])
}

/// The next position: as many frames on as the duration says. The search stays only for a token of duration 0, as long
/// as the frame has room for more.
fn next_by_duration(nodes: &mut Nodes, duration: &str, is_hit: &str, several: bool) -> String {
    let moved = nodes.add("Max", "moved", &[duration, "search.1"]);
    let step = if several {
        let count = nodes.add("Add", "count_with_token", &["search.tokens_of_frame", "search.1"]);
        let is_room = nodes.add("Less", "is_room", &[&count, "search.max_tokens"]);
        let is_zero = nodes.add("Equal", "is_zero", &[duration, "search.0"]);
        let may_stay = nodes.add("And", "may_stay", &[&is_zero, &is_room]);
        let stays = nodes.add("And", "stays", &[is_hit, &may_stay]);
        nodes.add("Where", "tokens_of_frame_next", &[&stays, &count, "search.0"]);
        nodes.add("Where", "step", &[&stays, "search.0", &moved])
    } else {
        moved
    };
    let next = nodes.add("Add", "t_moved", &["search.t", &step]);
    let is_inside = nodes.add("Less", "was_inside", &["search.t", "search.count"]);
    // A row that is behind its frames waits for the others.
    nodes.add("Where", "t_next", &[&is_inside, &next, "search.t"])
}

/// The frames from each row's position on, as the joint takes them; and the predictor's outputs for each of them.
fn window(nodes: &mut Nodes, plan: &TransducerPlan, column: &str) {
    let index = nodes.add("Add", "window_index", &["search.first_window", column]);
    let matrix = "search.matrix";
    match plan.takes {
        Joint::Along(2) => {
            let frames = nodes.add("Gather", "window_frames", &[matrix, &index]);
            nodes.with("Transpose", "frames_in", &[&frames], |node| node.with_ints("perm", &[0, 2, 1]));
        }
        Joint::Along(_) => _ = nodes.add("Gather", "frames_in", &[matrix, &index]),
        Joint::InRows(_) => {
            let frames = nodes.add("Gather", "window_frames", &[matrix, &index]);
            nodes.add("Reshape", "frames_in", &[&frames, "search.frames_in_shape"]);
        }
    }
}

fn last_tokens(nodes: &mut Nodes, plan: &TransducerPlan) {
    let (last, token) = (kept(LAST), "search.token_column");
    let token =
        if plan.tokens.elem == INT64 { token.to_owned() } else { nodes.cast("token_typed", token, plan.tokens.elem) };
    let new = if plan.tokens.context == 1 {
        token
    } else {
        let later = nodes.add("Slice", "last_later", &[&last, "search.1", "search.end", "search.1"]);
        nodes.along("Concat", 1, "last_new", &[&later, &token])
    };
    nodes.push("Where", &format!("{LAST_NEXT}/turn"), &["search.is_hit_column", &new, &last], |node| node);
}

fn keep_state(nodes: &mut Nodes, state: &PredictorState) {
    let mut shape = vec![1; state.dims.len()];
    if let Some(axis) = state.rows {
        shape[axis] = -1;
    }
    let name = format!("{}/shape", state.pair.output);
    let value = int64s("", &[shape.len() as i64], &shape);
    nodes.push("Constant", &name, &[], |node| node.with_tensor("value", value));
    let flag = format!("{}/is_hit", state.pair.output);
    nodes.push("Reshape", &flag, &["search.is_hit", &name], |node| node);
    let (new, old) = (found(&state.pair.output), kept(&state.pair.input));
    nodes.push("Where", &format!("{}/turn", state.pair.output), &[&flag, &new, &old], |node| node);
}
