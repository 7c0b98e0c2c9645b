//! Calls to Triton that fail, each in turn.

use super::*;

/// Requests of three live sequences and of three new ones, some of them wrong.
fn mixed_payload(first: u64) -> Vec<Request> {
    let mut named = request(0, START | END, [1.0, 1.0]);
    named.id = Id::name("once");
    vec![
        request(first, 0, [1.0, 1.0]),
        request(first + 1, END, [1.0, 1.0]),
        Request::new(Id::Number(first + 2), 0, vec![value([1.0, 1.0]), index(9)], &["SUM"]),
        request(first + 3, START, [1.0, 1.0]),
        Request::new(Id::Number(first + 4), START, vec![index(0)], &["SUM"]),
        Request::new(Id::Number(0), 0, vec![], &[]),
        named,
    ]
}

#[test]
fn each_function_of_triton_fails_in_turn() {
    let Some(triton) = Triton::start() else { return };
    let model = load(&triton, &oldest(64));
    let mut first = 1;
    let mut faults = BTreeMap::new();
    for &function in FALLIBLE {
        for after in 0.. {
            model.run((first..first + 3).map(|id| request(id, START, [2.0, 2.0])).collect());
            let (payload, failed) = model.run_with(Faults::Nth { function, after }, mixed_payload(first));
            *faults.entry(function).or_insert(0) += failed;
            wait_for_release(&payload);
            assert_next_payload(&model, first, &payload);
            first += 10;
            if failed == 0 {
                break;
            }
        }
        let (payload, _) = model.run_with(Faults::Always(function), mixed_payload(first));
        wait_for_release(&payload);
        first += 10;
    }
    model.unload();
    triton.assert_clean();
    for needed in ["ModelInstanceState", "RequestFlags", "RequestInput", "ResponseNew", "OutputBuffer", "ResponseSend"]
    {
        let times = faults[format!("TRITONBACKEND_{needed}").as_str()];
        assert!(times > 0, "{needed} was never called");
    }
}

/// After a payload with a failure somewhere, the live sequences go on from where their last answer says, and end.
fn assert_next_payload(model: &Loaded, first: u64, payload: &[Arc<Request>]) {
    let next = model.run(vec![request(first, END, [0.0, 0.0]), request(first + 2, END, [0.0, 0.0])]);
    // An answer that was lost on its way may have left a state behind.
    let lost = payload[0].answer().is_none();
    let expected = if sum(&payload[0]).is_some() { [3.0, 3.0] } else { [2.0, 2.0] };
    assert!(sum(&next[0]) == Some(expected) || lost, "{:?} after {:?}", next[0].answer(), payload[0].answer());
    assert_eq!(sum(&next[1]), Some([2.0, 2.0]), "its run had failed");
    model.run(vec![request(first + 1, END, [0.0, 0.0]), request(first + 3, END, [0.0, 0.0])]);
}

#[test]
fn each_function_of_triton_fails_in_turn_while_models_come_and_go() {
    let Some(triton) = Triton::start() else { return };
    let mut stayed = 0;
    for &function in FALLIBLE {
        for after in 0.. {
            ledger::set_faults(Faults::Nth { function, after });
            stayed += usize::from(come_and_go());
            let failed = ledger::set_faults(Faults::None);
            let is_gone = || threads("stateful-clock") <= stayed;
            assert!(becomes_true(is_gone), "a model stayed behind when {function} failed");
            if failed == 0 {
                break;
            }
        }
    }
    triton.assert_clean();
}

/// Loads a model, runs one request, and unloads, as core does whatever fails. Returns whether the backend was kept
/// from getting its own objects back, which it then cannot free.
fn come_and_go() -> bool {
    let model = LoadedModel::new("running_sum", &oldest(4), &onnx::running_sum());
    let mut leaks = false;
    if model.initialize().is_ok() {
        let instance = LoadedInstance::new(&model);
        if instance.initialize().is_ok() {
            let loaded = Loaded { model, instance };
            loaded.run(vec![request(1, START, [1.0, 1.0])]);
            leaks |= loaded.instance.finalize().is_err();
            return leaks | loaded.model.finalize().is_err();
        }
        leaks |= instance.finalize().is_err();
    }
    leaks | model.finalize().is_err()
}

/// Threads of this process with that name. The system may still list one for a moment after it has been joined.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|comm| comm.trim_end() == name).count()
}
