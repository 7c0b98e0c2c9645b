//! Two instances of a model, each on a thread of core's, while sequences expire and until the model goes.

use super::*;

/// Payloads that each thread runs.
const PAYLOADS: usize = 250;

/// A client that loses a sequence to its idle time starts it again.
fn talk(instance: &LoadedInstance, first: u64) {
    let mut random = Random::new(first);
    let mut sums: BTreeMap<u64, Row> = BTreeMap::new();
    for _ in 0..PAYLOADS {
        let mut asked: BTreeMap<u64, u32> = BTreeMap::new();
        for _ in 0..=random.below(4) {
            let id = first + random.below(6);
            let flags = if sums.contains_key(&id) { 0 } else { START } | if random.one_in(5) { END } else { 0 };
            asked.insert(id, flags);
        }
        let payload = instance.run(asked.iter().map(|(&id, &flags)| request(id, flags, [id as f32, 1.0])).collect());
        // Core sends the next request of a sequence when the last one is released.
        wait_for_release(&payload);
        for (request, (id, flags)) in payload.iter().zip(asked) {
            let before = sums.remove(&id).unwrap_or_default();
            match sum(request) {
                Some(sum) => {
                    assert_eq!(sum, [before[0] + id as f32, before[1] + 1.0], "sequence {id}");
                    if flags & END == 0 {
                        sums.insert(id, sum);
                    }
                }
                None if flags & START == 0 => assert_error(request, TRITONSERVER_ERROR_NOT_FOUND, "not live"),
                None => assert_error(request, TRITONSERVER_ERROR_UNAVAILABLE, "all"),
            }
        }
    }
}

#[test]
fn two_instances_share_the_sequences_of_a_model_that_expire_and_go_with_it() {
    let Some(triton) = Triton::start() else { return };
    let mut config = running_sum::config(running_sum::oldest(4), json!({ "count": 2, "kind": "KIND_CPU" }));
    config["sequence_batching"]["max_sequence_idle_microseconds"] = json!(50_000);
    let model = LoadedModel::new("running_sum", &config, &onnx::running_sum());
    model.initialize().unwrap();
    let instances = [LoadedInstance::new(&model), LoadedInstance::new(&model)];
    instances.iter().for_each(|instance| instance.initialize().unwrap());
    std::thread::scope(|scope| {
        for (instance, first) in instances.iter().zip([100, 200]) {
            scope.spawn(move || talk(instance, first));
        }
    });
    // Sequences that were left without END make room.
    for (instance, first) in instances.iter().zip([300, 400]) {
        let has_room = || {
            let payload = (first..first + 4).map(|id| request(id, START | END, [1.0, 1.0]));
            instance.run(payload.collect()).iter().all(|request| sum(request).is_some())
        };
        assert!(becomes_true(has_room), "idle sequences keep their slots");
    }
    instances.iter().for_each(|instance| instance.finalize().unwrap());
    model.finalize().unwrap();
    triton.assert_clean();
}
