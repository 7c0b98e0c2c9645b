//! The model [`super::onnx::delay`] as its users see it: a configuration, requests, and the rows in their answers.

use serde_json::{Value, json};
use triton_sys::TRITONSERVER_TYPE_FP32;

use super::{Answer, Id, Input, Request, running_sum};

/// Batches of up to 4 rows of so many columns, -1 for any number, with this group of instances.
pub fn config(columns: i64, instances: Value) -> Value {
    json!({
        "name": "delay",
        "max_batch_size": 4,
        "input": [{ "name": "VALUE", "data_type": "TYPE_FP32", "dims": [columns] }],
        "output": [{ "name": "LAST", "data_type": "TYPE_FP32", "dims": [columns] }],
        "sequence_batching": running_sum::oldest(64),
        "instance_group": [instances],
        "parameters": { "state_pairs": { "string_value": "<<<HELD_IN, HELD_OUT>>>" } },
    })
}

pub fn request(id: u64, flags: u32, row: &[f32]) -> Request {
    let dims = [1, row.len() as i64];
    let value = Input::new("VALUE", TRITONSERVER_TYPE_FP32, &dims, bytemuck::cast_slice(row).to_vec());
    Request::new(Id::Number(id), flags, vec![value], &["LAST"])
}

/// The row of the request before.
pub fn last(request: &Request) -> Vec<f32> {
    match request.answer() {
        Some(Answer::Outputs(outputs)) => outputs["LAST"].1.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect(),
        answer => panic!("{answer:?}"),
    }
}
