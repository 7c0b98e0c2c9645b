"""Models without any state whose configuration has `sequence_batching`: served, with all that sequences have."""

import shutil

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.clients import new_id
from harness.conversations import Conversation, interleave, script, some_at_once, together, windowed
from harness.graphs import BATCH, graph, node
from harness.model import READY, START, Control, Model, Tensor
from harness.models.exports import Bare
from harness.refusals import refused
from harness.strategies import both_strategies, strategy
from support.paths import ROOT


@both_strategies
@pytest.mark.parametrize("corrid", ["uint64", "string"])
def test_controls_are_fed_and_sequences_come_and_go(deployment, direct, corrid):
    model = models.controls(f"stateless_{strategy(direct)}_{corrid}", corrid=corrid, counts=False, direct=direct)
    model = deployment.serve(model)
    client, rng = deployment.connect(), np.random.default_rng(1)
    names = [f"name {i}" if corrid == "string" else new_id() for i in range(5)]
    talks = [Conversation(client, model, np.random.default_rng([1, i]), name) for i, name in enumerate(names)]
    together(talk.start for talk in talks)
    some_at_once(talks, rng, rounds=4)
    together([talks[0].start, *(talk.step for talk in talks[1:])])
    together(talk.end for talk in talks)


@both_strategies
def test_ids_are_used_again_without_waiting(deployment, direct):
    model = deployment.serve(
        models.controls(f"stateless_reused_{strategy(direct)}", counts=False, direct=direct, instances=2)
    )
    rng = np.random.default_rng(2)
    windowed(
        deployment.connect("stream"), model, rng, [script(model, rng, new_id(), lives=5) for _ in range(6)], window=8
    )


def test_sequences_are_counted_and_expire(deployment):
    model = models.controls("stateless_counted", counts=False, idle_us=1_000_000)
    model = deployment.serve(model.with_parameters(model.name, sequence_idle_margin_microseconds=0))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(i)) for i in range(3)]
    with pytest.raises(InferenceServerException, match="START"):
        talks[0].step()
    talks[0].whole(1)
    for talk in talks[1:]:
        talk.start()
    deployment.settles("stateful_sequences_started_total", model, 3)
    deployment.settles("stateful_sequences_ended_total", model, 1)
    deployment.settles("stateful_sequences_expired_total", model, 2)
    deployment.settles("stateful_live_sequences", model, 0)


def test_a_full_pool_refuses_as_with_states(deployment):
    model = models.controls("stateless_full", counts=False, max_batch_size=2, max_candidates=4)
    model = deployment.serve(model.with_parameters(model.name, max_candidate_sequence_use_ratio=0.5))
    talks = [Conversation(deployment.connect(), model, np.random.default_rng(i)) for i in range(3)]
    for talk in talks[:2]:
        talk.start()
    with pytest.raises(InferenceServerException, match="no free slot"):
        talks[2].start()
    for talk in talks[:2]:
        talk.end()
    talks[2].whole(3)


def test_a_bad_request_fails_alone(deployment):
    model = models.controls("stateless_bad_request", counts=False)
    talk = Conversation(deployment.connect(), deployment.serve(model), np.random.default_rng(3))
    talk.start()
    with pytest.raises(InferenceServerException, match="INPUT"):
        talk.step({"INPUT": np.zeros((1, 2), np.int64)})
    talk.step()
    talk.end()


def doubled(name: str, **changes) -> Model:
    """As Triton's own models for sequences: INPUT and OUTPUT have the same type and dims, and are no state."""

    def build():
        row = [("INPUT", "int32", [BATCH, 1])]
        return graph([node("Add", "INPUT INPUT", "OUTPUT")], row, [("OUTPUT", "int32", [BATCH, 1])])

    model = Model(name, build, (Tensor("INPUT", "int32", (1,)),), (Tensor("OUTPUT", "int32", (1,)),), ())
    return model.variant(name, **changes)


@both_strategies
def test_padding_and_warm_up_work(deployment, direct):
    controls = (Control("START", START, "int32"), Control("READY", READY, "int32"))
    model = doubled(f"stateless_padded_{strategy(direct)}", controls=controls, direct=direct)
    model = model.with_parameters(model.name, always_pad_to_max_batch=1, warmup_batch_sizes="1 8")
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(4), sequences=6)


def test_no_batch_dimension_is_needed(deployment):
    model = doubled(
        "stateless_unbatched",
        max_batch_size=0,
        inputs=(Tensor("INPUT", "int32", (-1, 1)),),
        outputs=(Tensor("OUTPUT", "int32", (-1, 1)),),
    )
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(5), sequences=3)


def test_sequence_batching_alone_is_enough_and_the_log_says_that_there_is_no_state(deployment):
    model = doubled("stateless_bare", max_batch_size=64)
    batching = "sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 64 } }"
    written = f'backend: "stateful" {batching}'
    model = deployment.serve(Bare(**vars(model), written=written))
    interleave(deployment.connect(), model, np.random.default_rng(6), sequences=5)
    log = deployment.server.log_text()
    assert "model stateless_bare version 1: no states are kept" in log
    assert "model stateless_bare version 1: state: 0 bytes" not in log


def test_a_recurrence_inside_the_model_is_warned_of(deployment):
    name = "stateless_lstm"
    file = deployment.repository / name / "1" / "model.onnx"
    file.parent.mkdir(parents=True)
    shutil.copy(ROOT / "crates" / "convert" / "tests" / "exports" / "torch_lstm2.onnx", file)
    batching = "sequence_batching { oldest { max_candidate_sequences: 64 } }"
    (deployment.repository / name / "config.pbtxt").write_text(f'backend: "stateful" {batching}')
    deployment.admin.load_model(name)
    lines = [line for line in deployment.server.log_text().splitlines() if f"{name} version 1: no states" in line]
    assert len(lines) == 1 and lines[0].startswith("W"), lines
    assert "(LSTM) begins anew in each run" in lines[0] and "stateful-convert" in lines[0], lines


def test_it_is_served_without_completion_and_a_model_with_states_still_needs_its_pairs(deploy):
    own = deploy(extra_args=["--disable-auto-complete-config"])
    model = own.serve(doubled("stateless_written_out"))
    interleave(own.connect(), model, np.random.default_rng(7), sequences=5)
    with_states = models.counter(name="pairs_forgotten", parameters={"state_pairs": None})
    refused(own, with_states, "state_pairs")


def test_without_sequence_batching_it_is_refused(deployment):
    refused(deployment, doubled("stateless_unsaid", scheduling=""), "state_pairs", "sequence_batching")


@pytest.mark.parametrize(
    ("parameter", "value"), [("state_pairs", "auto"), ("state_pair_patterns", "<<<in_*, out_*>>>")]
)
def test_where_states_are_asked_for_it_is_refused(deployment, parameter, value):
    model = doubled(f"stateless_{parameter}").with_parameters(f"stateless_{parameter}", **{parameter: value})
    refused(deployment, model, parameter, "INPUT", "OUTPUT")
