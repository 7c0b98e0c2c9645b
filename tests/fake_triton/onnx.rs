//! Small ONNX models, written as the bytes of their protobuf messages.
//!
//! [`running_sum`]: `SUM = SUM_IN + VALUE + TABLE[INDEX]`, a row a request; TABLE has four zeros, so that an INDEX
//! beyond them makes the run fail and no other changes the sum. SUM_OUT, the next SUM_IN, is the same.
//!
//! [`delay`] and [`delay_of_strings`]: `LAST = HELD_IN`, `HELD_OUT = VALUE`: copies alone, each answer is the request
//! before.
//!
//! [`shifted_sum`]: `SUM = SUM_IN + VALUE + SHIFT`, where SHIFT is one for the whole batch.

/// Tensors that [`delay_with_concat`] joins: more than a kernel takes as its arguments.
pub const JOINED: usize = 40;

/// Data types as ONNX numbers them.
const FLOAT: u64 = 1;
const INT64: u64 = 7;
const STRING: u64 = 8;

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

fn number(field: u64, value: u64) -> Vec<u8> {
    [varint(field << 3), varint(value)].concat()
}

fn bytes(field: u64, content: &[u8]) -> Vec<u8> {
    [varint(field << 3 | 2), varint(content.len() as u64), content.to_vec()].concat()
}

fn text(field: u64, content: &str) -> Vec<u8> {
    bytes(field, content.as_bytes())
}

fn node(operator: &str, inputs: &[&str], output: &str) -> Vec<u8> {
    let inputs: Vec<u8> = inputs.iter().flat_map(|input| text(1, input)).collect();
    [inputs, text(2, output), text(4, operator)].concat()
}

/// A tensor `[N, columns]`.
fn info(name: &str, data_type: u64, columns: u64) -> Vec<u8> {
    matrix(name, data_type, &number(1, columns))
}

/// A tensor `[N, T]`.
fn open_info(name: &str, data_type: u64) -> Vec<u8> {
    matrix(name, data_type, &text(2, "T"))
}

fn matrix(name: &str, data_type: u64, columns: &[u8]) -> Vec<u8> {
    tensor(name, data_type, &[bytes(1, &text(2, "N")), bytes(1, columns)].concat())
}

fn tensor(name: &str, data_type: u64, dims: &[u8]) -> Vec<u8> {
    let tensor = [number(1, data_type), bytes(2, dims)].concat();
    [text(1, name), bytes(2, &bytes(1, &tensor))].concat()
}

/// The model.
pub fn running_sum() -> Vec<u8> {
    let table = [number(1, 4), number(2, FLOAT), text(8, "TABLE"), bytes(9, &[0; 16])].concat();
    let nodes = [
        node("Add", &["SUM_IN", "VALUE"], "added"),
        node("Gather", &["TABLE", "INDEX"], "looked_up"),
        node("Add", &["added", "looked_up"], "SUM_OUT"),
        node("Identity", &["SUM_OUT"], "SUM"),
    ];
    let inputs = [info("VALUE", FLOAT, 2), info("INDEX", INT64, 1), info("SUM_IN", FLOAT, 2)];
    let outputs = [info("SUM", FLOAT, 2), info("SUM_OUT", FLOAT, 2)];
    model("running_sum", &nodes, &inputs, &outputs, &bytes(5, &table))
}

/// The model with rows of two columns, or of any number.
pub fn delay(grows: bool) -> Vec<u8> {
    let info = |name: &str| if grows { open_info(name, FLOAT) } else { info(name, FLOAT, 2) };
    let nodes = [node("Identity", &["HELD_IN"], "LAST"), node("Identity", &["VALUE"], "HELD_OUT")];
    model("delay", &nodes, &[info("VALUE"), info("HELD_IN")], &[info("LAST"), info("HELD_OUT")], &[])
}

/// The model with rows of two columns, and an output JOINED of `2 * JOINED` columns, for which ONNX Runtime's CUDA
/// provider copies addresses to the device.
pub fn delay_with_concat() -> Vec<u8> {
    let axis = [text(1, "axis"), number(3, 1), number(20, 2)].concat();
    let nodes = [
        node("Identity", &["HELD_IN"], "LAST"),
        node("Identity", &["VALUE"], "HELD_OUT"),
        [node("Concat", &["VALUE"; JOINED], "JOINED"), bytes(5, &axis)].concat(),
    ];
    let inputs = [info("VALUE", FLOAT, 2), info("HELD_IN", FLOAT, 2)];
    let outputs = [info("LAST", FLOAT, 2), info("HELD_OUT", FLOAT, 2), info("JOINED", FLOAT, 2 * JOINED as u64)];
    model("delay", &nodes, &inputs, &outputs, &[])
}

/// The model with rows of two columns, whose inputs ONNX Runtime reads on the host: it has no strings on a device.
pub fn delay_on_host() -> Vec<u8> {
    let to = |data_type: u64| bytes(5, &[text(1, "to"), number(3, data_type), number(20, 2)].concat());
    let cast = |from: &str, into: &str, data_type| [node("Cast", &[from], into), to(data_type)].concat();
    let nodes = [
        cast("HELD_IN", "held", STRING),
        cast("held", "LAST", FLOAT),
        cast("VALUE", "value", STRING),
        cast("value", "HELD_OUT", FLOAT),
    ];
    let inputs = [info("VALUE", FLOAT, 2), info("HELD_IN", FLOAT, 2)];
    model("delay", &nodes, &inputs, &[info("LAST", FLOAT, 2), info("HELD_OUT", FLOAT, 2)], &[])
}

/// The model with rows of two columns, and an output SHAPED: VALUE in the shape SHAPE, an input that a kernel reads on
/// the host.
pub fn delay_with_shape() -> Vec<u8> {
    let nodes = [
        node("Identity", &["HELD_IN"], "LAST"),
        node("Identity", &["VALUE"], "HELD_OUT"),
        node("Reshape", &["VALUE", "SHAPE"], "SHAPED"),
    ];
    let shape = tensor("SHAPE", INT64, &bytes(1, &number(1, 2)));
    let inputs = [info("VALUE", FLOAT, 2), shape, info("HELD_IN", FLOAT, 2)];
    let outputs = [info("LAST", FLOAT, 2), info("HELD_OUT", FLOAT, 2), info("SHAPED", FLOAT, 2)];
    model("delay", &nodes, &inputs, &outputs, &[])
}

/// The model with rows of two columns, and a node that CUDA graphs can't repeat.
pub fn delay_with_nonzero() -> Vec<u8> {
    let nodes = [
        node("Identity", &["HELD_IN"], "LAST"),
        node("Identity", &["VALUE"], "HELD_OUT"),
        node("NonZero", &["VALUE"], "found"),
    ];
    let inputs = [info("VALUE", FLOAT, 2), info("HELD_IN", FLOAT, 2)];
    model("delay", &nodes, &inputs, &[info("LAST", FLOAT, 2), info("HELD_OUT", FLOAT, 2)], &[])
}

/// The model with rows of two strings.
pub fn delay_of_strings() -> Vec<u8> {
    let info = |name: &str| info(name, STRING, 2);
    let nodes = [node("Identity", &["HELD_IN"], "LAST"), node("Identity", &["VALUE"], "HELD_OUT")];
    model("delay_of_strings", &nodes, &[info("VALUE"), info("HELD_IN")], &[info("LAST"), info("HELD_OUT")], &[])
}

/// The model.
pub fn shifted_sum() -> Vec<u8> {
    let nodes = [
        node("Add", &["SUM_IN", "VALUE"], "added"),
        node("Add", &["added", "SHIFT"], "SUM_OUT"),
        node("Identity", &["SUM_OUT"], "SUM"),
    ];
    let shift = tensor("SHIFT", FLOAT, &bytes(1, &number(1, 2)));
    let inputs = [info("VALUE", FLOAT, 2), shift, info("SUM_IN", FLOAT, 2)];
    model("shifted_sum", &nodes, &inputs, &[info("SUM", FLOAT, 2), info("SUM_OUT", FLOAT, 2)], &[])
}

fn model(name: &str, nodes: &[Vec<u8>], inputs: &[Vec<u8>], outputs: &[Vec<u8>], more: &[u8]) -> Vec<u8> {
    let fields = |field: u64, parts: &[Vec<u8>]| parts.iter().flat_map(|part| bytes(field, part)).collect::<Vec<u8>>();
    let graph = [&fields(1, nodes), &text(2, name), more, &fields(11, inputs), &fields(12, outputs)];
    let graph: Vec<u8> = graph.into_iter().flatten().copied().collect();
    let opset = number(2, 13);
    [number(1, 8), bytes(7, &graph), bytes(8, &opset)].concat()
}
