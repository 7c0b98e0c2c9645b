//! Good and wrong requests, and what each of them leaves behind.

use super::*;

#[test]
fn good_requests_are_answered_with_their_sums() {
    serve(&oldest(8), |model| {
        for step in 1..=5 {
            let step = step as f32;
            let flags = if step == 1.0 { START } else { 0 };
            let mut named = request(0, flags, [step, 0.0]);
            named.id = Id::name("a sequence");
            // A value may come in pieces that are cut anywhere, empty ones among them.
            let mut cut = request(7, flags, [step, 1.0]);
            let bytes = cut.inputs[0].pieces[0].clone();
            cut.inputs[0].pieces = vec![bytes[..3].to_vec(), vec![], bytes[3..].to_vec()];
            let payload = model.run(vec![request(6, flags, [-step, 0.5]), named, cut]);
            let total = step * (step + 1.0) / 2.0;
            assert_eq!(sums(&payload), [Some([-total, 0.5 * step]), Some([total, 0.0]), Some([total, step])]);
            assert!(payload.iter().all(|request| request.fate.lock().statistics == [true]));
        }
    });
}

#[test]
fn a_wrong_request_fails_alone_and_leaves_its_state_as_it_was() {
    serve(&oldest(8), |model| {
        model.run(vec![request(1, START, [1.0, 2.0]), request(2, START, [10.0, 20.0])]);
        for (count, (bad, code, part)) in (1..).zip(wrong(1, 0)) {
            let payload = model.run(vec![bad, request(2, 0, [1.0, 1.0])]);
            // The other one shows that the model runs.
            let code = if part == "ONNX Runtime" { TRITONSERVER_ERROR_INVALID_ARG } else { code };
            assert_error(&payload[0], code, part);
            assert_eq!(sum(&payload[1]), Some([10.0 + count as f32, 20.0 + count as f32]), "{part}");
            assert_eq!(sum(&model.run(vec![request(1, 0, [0.0, 0.0])])[0]), Some([1.0, 2.0]), "{part}");
        }
    });
}

#[test]
fn a_wrong_start_starts_nothing_and_a_wrong_end_ends() {
    serve(&oldest(2), |model| {
        // Each has an id of its own: what follows a START without state has to come before the next START is released.
        let each_wrong = |first: u64, flags| {
            (first..)
                .zip(wrong(first, flags))
                .map(move |(id, (bad, code, part))| (id, Request { id: Id::Number(id), ..bad }, code, part))
        };
        for (id, bad, code, part) in each_wrong(100, START) {
            assert_error(&model.run(vec![bad])[0], code, part);
            assert_error(&model.run(vec![request(id, 0, [0.0, 0.0])])[0], TRITONSERVER_ERROR_NOT_FOUND, "not live");
        }
        for (id, bad, code, part) in each_wrong(200, END) {
            model.run(vec![request(id, START, [1.0, 1.0])]);
            assert_error(&model.run(vec![bad])[0], code, part);
            assert_error(&model.run(vec![request(id, 0, [0.0, 0.0])])[0], TRITONSERVER_ERROR_NOT_FOUND, "not live");
        }
        for (_, bad, code, part) in each_wrong(300, START | END) {
            assert_error(&model.run(vec![bad])[0], code, part);
        }
        let payload = model.run(vec![request(1, START, [1.0, 1.0]), request(2, START, [2.0, 2.0])]);
        assert!(payload.iter().all(|request| sum(request).is_some()), "both slots are free again");
    });
}

#[test]
fn a_run_that_fails_costs_only_the_rows_at_fault() {
    serve(&oldest(16), |model| {
        let ids = 1..=12u64;
        model.run(ids.clone().map(|id| request(id, START, [id as f32, 0.0])).collect());
        let at_fault = |id: u64| id.is_multiple_of(5) || id == 2;
        let row = |id: u64| {
            let position = if at_fault(id) { 77 } else { -1 };
            Request::new(Id::Number(id), 0, vec![value([1.0, 1.0]), index(position)], &["SUM"])
        };
        let payload = model.run(ids.clone().map(row).collect());
        for (id, request) in ids.clone().zip(&payload) {
            if at_fault(id) {
                assert_error(request, TRITONSERVER_ERROR_INVALID_ARG, "ONNX Runtime");
            } else {
                assert_eq!(sum(request), Some([id as f32 + 1.0, 1.0]));
            }
        }
        let payload = model.run(ids.clone().map(|id| request(id, 0, [0.0, 0.0])).collect());
        for (id, request) in ids.zip(&payload) {
            let expected = if at_fault(id) { [id as f32, 0.0] } else { [id as f32 + 1.0, 1.0] };
            assert_eq!(sum(request), Some(expected), "sequence {id}");
        }
    });
}

#[test]
fn a_full_pool_refuses_a_start_and_takes_it_after_an_end() {
    let Some(triton) = Triton::start() else { return };
    let mut half = oldest(6);
    half["parameters"]["max_candidate_sequence_use_ratio"] = json!({ "string_value": "0.5" });
    let model = load(&triton, &half);
    let payload = model.run((1..=5).map(|id| request(id, START, [1.0, 1.0])).collect());
    for refused in &payload[3..] {
        assert_error(refused, TRITONSERVER_ERROR_UNAVAILABLE, "all 3 that the model may have");
    }
    assert!(payload[..3].iter().all(|request| sum(request) == Some([1.0, 1.0])));
    let payload = model.run(vec![request(1, END, [1.0, 1.0]), request(4, 0, [1.0, 1.0])]);
    assert_eq!(sum(&payload[0]), Some([2.0, 2.0]));
    assert_error(&payload[1], TRITONSERVER_ERROR_NOT_FOUND, "sequence 4 is not live");
    assert_eq!(sum(&model.run(vec![request(4, START, [5.0, 5.0])])[0]), Some([5.0, 5.0]));
    model.unload();
    triton.assert_clean();
}

#[test]
fn fillers_are_released_and_warm_ups_answered() {
    let Some(triton) = Triton::start() else { return };
    for config in [oldest(4), direct()] {
        let model = load(&triton, &config);
        let filler = || Request::new(Id::Number(0), 0, vec![value([9.0, 9.0]), index(4)], &[]);
        let payload = model.run(vec![filler(), request(1, START, [1.0, 2.0]), filler(), request(0, 0, [3.0, 4.0])]);
        assert_eq!(sums(&payload), [None, Some([1.0, 2.0]), None, Some([3.0, 4.0])]);
        let payload = model.run(vec![filler(), request(1, END, [1.0, 2.0]), request(0, START | END, [5.0, 6.0])]);
        assert_eq!(sums(&payload), [None, Some([2.0, 4.0]), Some([5.0, 6.0])]);
        model.run(vec![]);
        model.unload();
    }
    triton.assert_clean();
}

#[test]
fn the_start_of_a_sequence_that_is_live_is_answered_and_released_later() {
    let Some(triton) = Triton::start() else { return };
    let model = load(&triton, &oldest(8));
    model.run(vec![request(1, START, [1.0, 1.0])]);
    let restart = model.run(vec![request(1, START, [5.0, 5.0])]);
    assert_eq!(sum(&restart[0]), Some([5.0, 5.0]), "answered at once");
    wait_for_release(&restart);
    assert_eq!(sum(&model.run(vec![request(1, 0, [1.0, 1.0])])[0]), Some([6.0, 6.0]));
    // Requests of several sequences in one payload. None of them waits.
    model.run(vec![request(2, START, [2.0, 2.0])]);
    let held =
        model.run(vec![request(1, START, [7.0, 7.0]), request(2, START, [8.0, 8.0]), request(2, START, [9.0, 9.0])]);
    assert!(held.iter().all(|request| sum(request).is_some()));
    model.unload();
    assert!(held.iter().all(|request| request.is_released()), "at the latest when the instance goes");
    triton.assert_clean();
}

#[test]
fn one_id_several_times_in_a_payload_is_answered_each_time() {
    let Some(triton) = Triton::start() else { return };
    for config in [oldest(8), direct()] {
        for (count, flags) in
            [[START, 0, 0], [START, START, START], [0, START, END], [END, START, END], [START | END, START, 0]]
                .into_iter()
                .chain([[END, END, END], [START, END, START]])
                .enumerate()
        {
            let model = load(&triton, &config);
            let mut all = Vec::new();
            for id in [1, count as u64 + 2] {
                all.extend(model.run(flags.iter().map(|&flags| request(id, flags, [1.0, 1.0])).collect()));
                all.extend(model.run(flags.iter().map(|&flags| request(id, flags, [1.0, 1.0])).collect()));
            }
            model.unload();
            assert!(all.iter().all(|request| request.is_released()));
        }
    }
    triton.assert_clean();
}

#[test]
fn a_gpu_that_is_not_there_is_a_plain_error_or_the_cpu_where_that_is_allowed() {
    let Some(triton) = Triton::start() else { return };
    if gpu_rows::Device::open(0).is_ok() {
        eprintln!("skipped: this machine has a GPU");
        return;
    }
    let mut config = oldest(8);
    config["instance_group"] = json!([{ "count": 1, "kind": "KIND_GPU", "gpus": [0] }]);
    let (code, text) = triton.load("running_sum", &config, &onnx::running_sum()).err().unwrap();
    assert_eq!(code, TRITONSERVER_ERROR_UNSUPPORTED);
    assert!(text.contains("NVIDIA's driver") && text.contains("libcuda.so.1"), "{text}");
    config["parameters"]["allow_cpu_fallback"] = json!({ "string_value": "1" });
    let model = triton.load_on(Some(0), "running_sum", &config, &onnx::running_sum()).unwrap();
    let answered = model.run(vec![request(5, START, [1.0, 2.0]), request(6, START, [3.0, 4.0])]);
    assert_eq!(sums(&answered), [Some([1.0, 2.0]), Some([3.0, 4.0])]);
    model.unload();
    triton.assert_clean();
}
