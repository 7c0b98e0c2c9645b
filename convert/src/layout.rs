//! Layers with the batch in front (`layout` 1), which ONNX Runtime doesn't run.

use crate::graph::Names;
use crate::onnx::schema::{GraphProto, NodeProto};

/// Puts time in front in each such layer, by transposes around it. Whether there was one.
pub fn put_time_in_front(graph: &mut GraphProto) -> bool {
    let names = &mut Names::of(graph);
    in_graph(graph, names)
}

fn in_graph(graph: &mut GraphProto, names: &mut Names) -> bool {
    let mut found = false;
    for index in 0..graph.node.len() {
        let attributes = graph.node[index].attribute.iter_mut();
        for inner in attributes.flat_map(|attribute| attribute.g.iter_mut().chain(&mut attribute.graphs)) {
            found |= in_graph(inner, names);
        }
        let node = &graph.node[index];
        if node.is_recurrent() && node.int("layout") == Some(1) {
            transpose_around(graph, index, names);
            found = true;
        }
    }
    found
}

fn transpose_around(graph: &mut GraphProto, index: usize, names: &mut Names) {
    let mut node = graph.node[index].clone();
    node.remove("layout");
    let mut fresh =
        |tensor: &str| (names.fresh(&format!("{tensor}/by_time")), names.fresh(&format!("{tensor}/Transpose")));
    // The input and the initial states.
    for input in [0, 5, 6] {
        let Some(given) = node.input_at(input).map(str::to_owned) else { continue };
        let (by_time, name) = fresh(&given);
        let transpose = NodeProto::make("Transpose", &name, &[&given], &[&by_time]);
        graph.node.push(transpose.with_ints("perm", &[1, 0, 2]));
        node.set_input(input, &by_time);
    }
    for (output, order) in [(0, &[2, 0, 1, 3][..]), (1, &[1, 0, 2]), (2, &[1, 0, 2])] {
        let Some(wanted) = node.output_at(output).map(str::to_owned) else { continue };
        let (by_time, name) = fresh(&wanted);
        graph.node.push(NodeProto::make("Transpose", &name, &[&by_time], &[&wanted]).with_ints("perm", order));
        node.set_output(output, &by_time);
    }
    graph.node[index] = node;
}
