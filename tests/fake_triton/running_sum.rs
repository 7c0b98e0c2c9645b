//! The model [`super::onnx::running_sum`] as its users see it: a configuration, requests, and the sums in their
//! answers.

use serde_json::{Value, json};
use triton_sys::{TRITONSERVER_TYPE_FP32, TRITONSERVER_TYPE_INT64};

use super::{Answer, Id, Input, Request};

/// A row of VALUE and of SUM.
pub type Row = [f32; 2];

/// Batches of up to 4, with this scheduler and this group of instances.
pub fn config(scheduler: Value, instances: Value) -> Value {
    json!({
        "name": "running_sum",
        "max_batch_size": 4,
        "input": [
            { "name": "VALUE", "data_type": "TYPE_FP32", "dims": [2] },
            { "name": "INDEX", "data_type": "TYPE_INT64", "dims": [1] },
        ],
        "output": [{ "name": "SUM", "data_type": "TYPE_FP32", "dims": [2] }],
        "sequence_batching": scheduler,
        "instance_group": [instances],
        "parameters": {
            "state_pairs": { "string_value": "<<<SUM_IN, SUM_OUT>>>" },
            "max_candidate_sequence_use_ratio": { "string_value": "1" },
        },
    })
}

/// The scheduler `oldest`.
pub fn oldest(capacity: usize) -> Value {
    json!({
        "max_sequence_idle_microseconds": 60_000_000,
        "oldest": { "max_candidate_sequences": capacity },
    })
}

pub fn value(row: Row) -> Input {
    Input::new("VALUE", TRITONSERVER_TYPE_FP32, &[1, 2], bytemuck::bytes_of(&row).to_vec())
}

pub fn index(index: i64) -> Input {
    Input::new("INDEX", TRITONSERVER_TYPE_INT64, &[1, 1], index.to_ne_bytes().to_vec())
}

pub fn request(id: u64, flags: u32, row: Row) -> Request {
    Request::new(Id::Number(id), flags, vec![value(row), index(0)], &["SUM"])
}

/// The running sum in a response; `None` for an error.
pub fn sum(request: &Request) -> Option<Row> {
    match request.answer()? {
        Answer::Outputs(outputs) => {
            let (dims, bytes) = &outputs["SUM"];
            assert_eq!((dims.as_slice(), outputs.len()), (&[1, 2][..], 1));
            Some(bytemuck::pod_read_unaligned(bytes))
        }
        Answer::End | Answer::Error(..) => None,
    }
}
