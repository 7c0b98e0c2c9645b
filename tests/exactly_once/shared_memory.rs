//! Inputs in memory that their client changes while the request runs.

use super::*;

/// Strings as Triton carries them.
fn carried(elements: &[&str]) -> Vec<u8> {
    elements.iter().flat_map(|one| [&(one.len() as u32).to_le_bytes()[..], one.as_bytes()].concat()).collect()
}

/// A request whose first input lies in memory that its client changes when the input has been decoded.
fn changing(mut request: Request, to: &[u8]) -> Request {
    let (shared, to) = (Shared::new(&request.inputs[0].pieces.concat()), to.to_vec());
    request.inputs[0].shared = Some(shared.clone());
    request.meanwhile = Some(Box::new(move || shared.write(&to)));
    request
}

#[test]
fn strings_are_read_once_whatever_their_client_writes_meanwhile() {
    let Some(triton) = Triton::start() else { return };
    let mut config = oldest(8);
    config["name"] = json!("delay_of_strings");
    config["input"] = json!([{ "name": "VALUE", "data_type": "TYPE_STRING", "dims": [2] }]);
    config["output"] = json!([{ "name": "LAST", "data_type": "TYPE_STRING", "dims": [2] }]);
    config["parameters"]["state_pairs"] = json!({ "string_value": "<<<HELD_IN, HELD_OUT>>>" });
    let model = triton.load("delay_of_strings", &config, &onnx::delay_of_strings()).unwrap();
    let ask = |id: u64, flags: u32, elements: [&str; 2]| {
        let value = Input::new("VALUE", TRITONSERVER_TYPE_BYTES, &[1, 2], carried(&elements));
        Request::new(Id::Number(id), flags, vec![value], &["LAST"])
    };
    let last = |request: &Request| match request.answer() {
        Some(Answer::Outputs(outputs)) => outputs["LAST"].1.clone(),
        answer => panic!("{answer:?}"),
    };
    model.run(vec![ask(1, START, ["mine", "first"]), ask(2, START, ["its", "own"])]);
    let mut before = ["mine", "first"];
    // More elements, fewer, and what is none at all.
    for (now, to) in [
        (["mine", "three"], carried(&["", "", "other"])),
        (["mine", "fewer"], carried(&["one for both "])),
        (["mine", "wrong"], vec![0xff; 17]),
    ] {
        let payload = model.run(vec![changing(ask(1, 0, now), &to), ask(2, 0, ["its", "own"])]);
        assert_eq!([last(&payload[0]), last(&payload[1])], [carried(&before), carried(&["its", "own"])]);
        before = now;
    }
    assert_eq!(last(&model.run(vec![ask(1, END, ["", ""])])[0]), carried(&before));
    model.unload();
    triton.assert_clean();
}

#[test]
fn a_value_for_the_whole_batch_is_the_one_that_its_rows_were_compared_by() {
    let Some(triton) = Triton::start() else { return };
    let mut config = oldest(8);
    config["name"] = json!("shifted_sum");
    config["input"][1] = json!({ "name": "SHIFT", "data_type": "TYPE_FP32", "dims": [2] });
    let model = triton.load("shifted_sum", &config, &onnx::shifted_sum()).unwrap();
    let ask = |id: u64, flags: u32, shift: Row| {
        let shift = Input::new("SHIFT", TRITONSERVER_TYPE_FP32, &[1, 2], bytemuck::bytes_of(&shift).to_vec());
        Request::new(Id::Number(id), flags, vec![shift, value([0.0, 0.0])], &["SUM"])
    };
    let changed = [100.0f32, 100.0];
    let payload = model.run(vec![
        changing(ask(1, START, [1.0, 2.0]), bytemuck::bytes_of(&changed)),
        ask(2, START, [1.0, 2.0]),
        ask(3, START, [3.0, 4.0]),
    ]);
    assert_eq!(sums(&payload), [Some([1.0, 2.0]), Some([1.0, 2.0]), Some([3.0, 4.0])]);
    model.unload();
    triton.assert_clean();
}
