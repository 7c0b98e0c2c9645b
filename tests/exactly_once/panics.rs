//! Panics at each stage of a payload.

use super::*;

/// Hides the messages of injected panics.
pub fn silence() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let injected = info.payload().downcast_ref::<String>().is_some_and(|text| text.starts_with("injected at"));
        if !injected {
            usual(info);
        }
    }));
}

/// A payload in which request 2 of the sequences 1 to 3 panics at a stage, and sequence 4 starts.
fn payload_with_a_panic(stage: &str) -> Vec<Request> {
    let injected = request(2, 0, [9.0, 9.0]).with_parameter("inject_panic", stage);
    vec![request(1, 0, [9.0, 9.0]), injected, request(3, 0, [9.0, 9.0]), request(4, START | END, [9.0, 9.0])]
}

#[test]
fn a_panic_costs_the_request_that_it_is_for_and_no_other() {
    silence();
    serve(&oldest(8), |model| {
        for stage in ["decode", "gather", "run", "respond"] {
            model.run((1..=3).map(|id| request(id, START, [id as f32, 0.0])).collect());
            let payload = model.run(payload_with_a_panic(stage));
            assert_error(&payload[1], TRITONSERVER_ERROR_INTERNAL, &format!("panicked: injected at {stage}"));
            let others = [0, 2, 3].map(|at| sum(&payload[at]));
            assert_eq!(others, [Some([10.0, 9.0]), Some([12.0, 9.0]), Some([9.0, 9.0])], "{stage}");
            let payload = model.run((1..=3).map(|id| request(id, END, [0.0, 0.0])).collect());
            assert_eq!(sums(&payload), [Some([10.0, 9.0]), Some([2.0, 0.0]), Some([12.0, 9.0])], "{stage}");
        }
    });
}

#[test]
fn a_panic_while_a_state_is_kept_ends_its_sequence_and_no_other() {
    silence();
    serve(&oldest(8), |model| {
        model.run((1..=3).map(|id| request(id, START, [id as f32, 0.0])).collect());
        let payload = model.run(payload_with_a_panic("complete"));
        assert_error(&payload[1], TRITONSERVER_ERROR_INTERNAL, "panicked: injected at complete");
        let payload = model.run((1..=3).map(|id| request(id, END, [0.0, 0.0])).collect());
        assert_eq!((sum(&payload[0]), sum(&payload[2])), (Some([10.0, 9.0]), Some([12.0, 9.0])));
        assert_error(&payload[1], TRITONSERVER_ERROR_NOT_FOUND, "sequence 2");
    });
}

/// Its START is not held as it should be, so core may send what follows it.
#[test]
fn what_follows_the_lost_start_of_a_live_sequence_does_not_get_its_state() {
    silence();
    serve(&oldest(4), |model| {
        model.run(vec![request(1, START, [5.0, 5.0]), request(2, START, [7.0, 7.0])]);
        model.run(vec![request(1, START, [1.0, 1.0]).with_parameter("inject_panic", "admit")]);
        let payload = model.run(vec![request(1, 0, [1.0, 1.0]), request(2, 0, [1.0, 1.0])]);
        assert_error(&payload[0], TRITONSERVER_ERROR_NOT_FOUND, "sequence 1");
        assert_eq!(sum(&payload[1]), Some([8.0, 8.0]));
        model.run(vec![request(1, END, [1.0, 1.0])]);
        let payload = model.run(vec![request(1, START | END, [2.0, 2.0])]);
        assert_error(&payload[0], TRITONSERVER_ERROR_NOT_FOUND, "cannot be told apart");
    });
}

#[test]
fn a_panic_outside_of_a_batch_costs_the_payload_and_no_state() {
    silence();
    serve(&oldest(3), |model| {
        model.run((1..=2).map(|id| request(id, START, [id as f32, 0.0])).collect());
        let injected = request(2, 0, [9.0, 9.0]).with_parameter("inject_panic", "admit");
        let payload = model.run(vec![request(1, 0, [9.0, 9.0]), injected, request(4, START, [9.0, 9.0])]);
        for request in &payload {
            let (code, text) = request.error().unwrap();
            assert!(code == TRITONSERVER_ERROR_INTERNAL && text.contains("lost this request"), "{text}");
        }
        let payload = model.run((1..=2).map(|id| request(id, 0, [0.0, 0.0])).collect());
        assert_eq!((sum(&payload[0]), sum(&payload[1])), (Some([1.0, 0.0]), Some([2.0, 0.0])));
        let payload = model.run(vec![request(5, START | END, [1.0, 1.0])]);
        assert_eq!(sum(&payload[0]), Some([1.0, 1.0]), "no slot was lost");
    });
}

#[test]
fn panics_and_failures_by_chance_leave_nothing_behind() {
    let Some(triton) = Triton::start() else { return };
    silence();
    let mut random = Random::new(5);
    let model = load(&triton, &oldest(6));
    let mut all = Vec::new();
    for _ in 0..300 {
        let count = 1 + random.below(6);
        let payload = (0..count).map(|_| {
            let flags = random.pick(&[0, 0, START, END, START | END]);
            let request = request(1 + random.below(8), flags, [1.0, 1.0]);
            if random.one_in(5) { request.with_parameter("inject_panic", random.pick(&STAGES)) } else { request }
        });
        let payload: Vec<_> = payload.collect();
        let faults = Faults::Random { random: random.clone(), one_in: 30 };
        all.extend(model.run_with(faults, payload).0);
    }
    model.unload();
    assert!(all.iter().all(|request| request.is_released()));
    triton.assert_clean();
}
