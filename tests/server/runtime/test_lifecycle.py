"""Loading, unloading, ending: a model comes and goes, and takes its memory with it."""

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.conversations import Conversation, together
from harness.deployment import eventually

MIB = 1 << 20


def test_a_model_unloads_with_open_sequences_and_forgets_them(deployment):
    model = models.counter(name="unloaded")
    rng = np.random.default_rng(1)
    client = deployment.connect()
    deployment.serve(model)
    talks = [Conversation(client, model, rng) for _ in range(5)]
    for talk in talks:
        talk.start()
    deployment.unload(model)
    with pytest.raises(InferenceServerException):
        talks[0].step()
    deployment.serve(model)
    with pytest.raises(InferenceServerException):
        talks[0].step()
    for talk in talks:
        talk.start()
        talk.end()
    deployment.unload(model)


def test_loading_and_unloading_again_and_again_keeps_the_memory_flat(deploy):
    own = deploy()
    # 32 sequences of 128 KiB: a pool that stays behind is 4 MiB a round at least
    model = models.counter(name="coming_and_going", width=32768, instances=2)
    rng = np.random.default_rng(2)
    client = own.connect()

    def come_and_go():
        own.serve(model)
        talks = [Conversation(client, model, rng) for _ in range(32)]
        together(talk.start for talk in talks)
        for talk in talks[:8]:
            talk.end()
        own.unload(model)

    for _ in range(6):
        come_and_go()
    before = own.resident_bytes()
    for _ in range(20):
        come_and_go()
    # what is unloaded goes a moment after the server says so
    eventually(lambda: (own.resident_bytes() - before) / MIB, lambda grown: grown < 32)


def test_a_model_may_go_while_its_sequences_are_being_served(deploy):
    """On a server of its own: on a machine with too much else to do, core itself may crash here (docs/sequences.md)."""
    own = deploy()
    model = models.slow("going_while_busy", products=40)
    client = own.connect()

    def talk(seed):
        talk = Conversation(client, model, np.random.default_rng(seed))
        try:
            talk.start()
            while True:
                talk.step()
        except InferenceServerException:
            return talk.count  # answers until then were right, or assert_same had raised

    for _ in range(3):
        own.serve(model)

        def go():
            # every client has had an answer or two by then
            eventually(lambda: own.statistics(model).inference_count, lambda n: n > 20)
            own.unload(model)

        together([*(lambda seed=seed: talk(seed) for seed in range(6)), go])


def test_a_reload_with_another_configuration_takes_effect(deployment):
    model = models.counter(name="changing", max_candidates=10)
    deployment.serve(model)
    assert deployment.metric("stateful_slot_capacity", model) == 10
    deployment.unload(model)
    model = deployment.serve(models.counter(name="changing", max_candidates=30))
    assert deployment.metric("stateful_slot_capacity", model) == 30
    Conversation(deployment.connect(), model, np.random.default_rng(3)).whole(3)
    deployment.unload(model)


def test_a_model_that_is_replaced_while_it_is_loaded_leaves_its_metrics_to_the_new_one(deployment):
    model = models.counter(name="replaced", max_candidates=10)
    deployment.serve(model)
    Conversation(deployment.connect(), model, np.random.default_rng(3)).whole(3)
    # core loads the new one before it lets the old one go
    del deployment.loaded[model.name]
    model = deployment.serve(models.counter(name="replaced", max_candidates=30))
    deployment.settles("stateful_slot_capacity", model, 30)
    deployment.settles("stateful_live_sequences", model, 0)
    Conversation(deployment.connect(), model, np.random.default_rng(3)).whole(3)
    assert deployment.metric("stateful_slot_capacity", model) == 30
    deployment.unload(model)


@pytest.mark.parametrize(
    ("name", "file_name", "changes"),
    [
        ("onnx_file_name", "speech-2.onnx", {"parameters": {"onnx_file_name": "speech-2.onnx"}}),
        ("default_model_filename", "other.onnx", {"more": 'default_model_filename: "other.onnx"'}),
        ("model_onnx", "model.onnx", {}),
        ("the_only_one", "whatever.onnx", {}),
    ],
)
def test_the_onnx_file_is_found_by_its_name(deployment, name, file_name, changes):
    model = models.counter(name=f"file_by_{name}", file_name=file_name, **changes)
    if name != "the_only_one":  # another file beside it is no reason to doubt
        folder = model.write(deployment.repository)
        (folder / "1" / "decoy.onnx").write_bytes(b"not a model")
    model = deployment.serve(model)
    Conversation(deployment.connect(), model, np.random.default_rng(4)).whole(3)


def test_warm_up_touches_no_sequence(deployment):
    model = deployment.serve(
        models.accumulate(
            "warmed_up",
            more="""model_warmup {
  name: "zeros" batch_size: 1 count: 3
  inputs { key: "INPUT" value: { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } }
}""",
        )
    )
    deployment.settles("stateful_live_sequences", model, 0)
    deployment.settles("stateful_sequences_started_total", model, 0)
    Conversation(deployment.connect(), model, np.random.default_rng(5)).whole(3)


def test_the_server_stops_cleanly_with_open_sequences(deploy):
    own = deploy()
    model = own.serve(models.counter(idle_us=1_000_000))
    talk = Conversation(own.connect(), model, np.random.default_rng(6))
    talk.start()
    talk.step()
    own.stop()
    assert own.server.exit_code == 0, own.server.log_text()[-3000:]


def test_a_wrong_path_of_onnx_runtime_is_an_error_that_names_it(deploy, tmp_path):
    missing = tmp_path / "libonnxruntime.so.of.nobody"
    own = deploy(backend_config={"ort-library-path": str(missing)}, control_model=False)
    text = own.load_error(models.counter(name="without_library"))
    assert str(missing) in text
    assert own.server.is_alive()


def test_a_model_that_could_not_clean_up_after_its_clients_does_not_load(deploy):
    # No thread can have a stack of this size.
    deployed = deploy(control_model=False, env={"RUST_MIN_STACK": str(1 << 60)})
    refused = deployed.load_error(models.counter(name="threadless"))
    assert "no thread could be started to end idle sequences and late requests" in refused
    assert "raise the limit of threads or processes" in refused
