//! Payloads that any bytes choose.
//!
//! Rules: the bytes decide everything, so that the same bytes are the same payloads. Whatever they are, each request is
//! answered once and released once; an answer has the sum of its own sequence; and a request with which nothing is
//! wrong succeeds, whatever the others of its payload are.

use super::own::{asked_of_states, assert_in_order, end_all, own, send, stateful_config};
use super::traffic::{Lanes, Traffic};
use super::*;

/// Payloads that an input makes at most.
const PAYLOADS_MAX: usize = 200;

/// Plays an input: its first byte chooses the model, the others its payloads.
pub fn payloads(bytes: &[u8]) {
    let Some((&first, bytes)) = bytes.split_first() else { return };
    let Some(triton) = Triton::start() else { return };
    let mut random = Random::of_bytes(bytes);
    match first % 8 {
        0..=2 => oldest_traffic(&triton, random, (first % 8 == 2).then_some(20)),
        3 => {
            let model = load(&triton, &direct());
            let mut lanes = Lanes::default();
            for _ in 0..PAYLOADS_MAX {
                if random.is_used_up() {
                    break;
                }
                lanes.step(&model, &mut random, true);
            }
            model.unload();
        }
        4..=6 => {
            let workers = (first % 8 - 3).to_string();
            let model = load(&triton, &own(&[("worker_count", &workers)]));
            let sent = send_all(&model, &mut random, |random, request| {
                // A START that fails may or may not be over when the next request arrives.
                if request.flags & START == 0 && random.one_in(4) { altered(random, request) } else { request }
            });
            // A request as it was made has its two inputs.
            assert_in_order(&sent, |request| !is_plain(request));
            model.unload();
        }
        _ => {
            let model = load(&triton, &stateful_config(&[("worker_count", "2"), ("max_sequence_number", "6")]));
            send_all(&model, &mut random, |random, request| {
                let request = asked_of_states(random, request);
                if random.one_in(4) { altered(random, request) } else { request }
            });
            end_all(&model);
            model.unload();
        }
    }
    triton.assert_clean();
}

fn oldest_traffic(triton: &Triton, random: Random, faults: Option<u64>) {
    let model = load(triton, &oldest(6));
    let mut traffic = Traffic::of_bytes(random, 9);
    for _ in 0..PAYLOADS_MAX {
        if traffic.is_over() {
            break;
        }
        traffic.step(&model, faults);
    }
    wait_for_release(&traffic.held);
    model.unload();
}

fn send_all(model: &Loaded, random: &mut Random, alter: impl Fn(&mut Random, Request) -> Request) -> Vec<Arc<Request>> {
    let mut sent = Vec::new();
    for _ in 0..PAYLOADS_MAX {
        if random.is_used_up() {
            break;
        }
        sent.extend(send(model, random, 1, &alter));
    }
    wait_for_release(&sent);
    sent
}

/// Whether a request is as [`request`] makes it.
fn is_plain(request: &Request) -> bool {
    let plain = super::request(1, 0, [0.0, 0.0]);
    let same = |(has, of): (&Input, &Input)| {
        (&has.name, has.data_type, &has.dims, has.gpu) == (&of.name, of.data_type, &of.dims, of.gpu)
            && has.pieces.concat().len() == of.pieces.concat().len()
    };
    request.inputs.len() == plain.inputs.len()
        && request.inputs.iter().zip(&plain.inputs).all(same)
        && request.inputs[1].pieces.concat() == plain.inputs[1].pieces.concat()
        && request.parameters.is_empty()
        && request.outputs == plain.outputs
        && request.outputs_gpu.is_none()
}

/// Alters a request in up to three ways. Some of them leave it right.
pub fn altered(random: &mut Random, mut request: Request) -> Request {
    const DIMS: [i64; 8] = [-2, -1, 0, 1, 2, 3, 1 << 32, i64::MAX];
    const PARAMETERS: [&str; 8] =
        ["commit", "get_state", "snapshot", "clone_of", "sequence_step", "reset_state", "delete", "nobody knows this"];
    for _ in 0..=random.below(2) {
        match random.below(4) {
            0 => {
                let name = random.pick(&PARAMETERS);
                let number = random.pick(&[-1, 0, 1, 7, i64::MAX]);
                let text = random.pick(&["", "true", "1", "SUM_IN", "x"]);
                request = if random.one_in(2) {
                    request.with_number(name, number)
                } else {
                    request.with_parameter(name, text)
                };
            }
            1 if random.one_in(4) => request.outputs_gpu = Some(random.below(2) as i64),
            1 if random.one_in(4) => request.outputs.push(c(random.pick(&["SUM_OUT", "OTHER", ""]))),
            1 => request.cancelled = true,
            _ if request.inputs.is_empty() => {}
            _ => {
                let at = random.below(request.inputs.len() as u64) as usize;
                if random.one_in(8) {
                    request.inputs.remove(at);
                    continue;
                }
                let input = &mut request.inputs[at];
                match random.below(7) {
                    0 => input.dims = (0..random.below(4)).map(|_| random.pick(&DIMS)).collect(),
                    1 => input.data_type.0 = random.below(18) as u32,
                    2 => input.gpu = Some(random.below(2) as i64),
                    3 => input.name = c(random.pick(&["VALUE ", "SUM_IN", "state_snapshot", "state.SUM_IN", ""])),
                    4 => {
                        let mut bytes = input.pieces.concat();
                        bytes.resize(random.below(40) as usize, random.below(256) as u8);
                        input.pieces = vec![bytes];
                    }
                    // Small whole numbers have exact sums. As indices, half of them are within the table.
                    5 if input.data_type == TRITONSERVER_TYPE_INT64 => {
                        input.pieces = vec![(random.below(16) as i64 - 8).to_ne_bytes().to_vec()];
                    }
                    5 => {
                        let row = [random.below(200) as f32 - 100.0, random.below(200) as f32 - 100.0];
                        input.pieces = vec![bytemuck::bytes_of(&row).to_vec()];
                    }
                    _ => {
                        let mut rest = input.pieces.concat();
                        input.pieces.clear();
                        while !rest.is_empty() {
                            let behind = rest.split_off(random.below(1 + rest.len() as u64) as usize);
                            input.pieces.push(std::mem::replace(&mut rest, behind));
                        }
                    }
                }
            }
        }
    }
    request
}

#[path = "../../fuzz/inputs.rs"]
mod inputs;

#[test]
fn whatever_payloads_come_each_request_is_answered_once_and_no_state_is_foreign() {
    inputs::run("payloads", 60, payloads);
}

fn c(text: &str) -> CString {
    CString::new(text).unwrap()
}
