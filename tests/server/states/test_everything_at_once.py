"""A model with one of each: what keeps the parts right alone has to keep them right together."""

import dataclasses

import numpy as np
import pytest
from onnx import TensorProto

from harness.conversations import Conversation, interleave, outcome, script, together, windowed
from harness.graphs import BATCH, checked_gather, graph, node, numbers
from harness.model import START, Control, Model, Tensor

pytestmark = pytest.mark.simulated_device


def everything(name: str, **changes) -> Model:
    """FRAMES [N, T] with a context of 2; KNOB, one number for a batch; GAIN, which has a default;
    TAG, words. States: TOTAL [N, 1]; CACHE [P, N], which grows by what was brought; WORDS, the last
    TAG; COUNT int64 [1, N, 1], which begins at 7. START clears TOTAL in the model.

    INDEX of 4 and more is out of TABLE, and Run fails.
    """

    def build():
        return graph(
            [
                *checked_gather("TABLE", "INDEX", "WORTH", TensorProto.FLOAT),
                node("Cast", "KNOB", "FACTOR", to=TensorProto.FLOAT),
                node("ReduceSum", "FRAMES LAST", "LOUDNESS", keepdims=1),
                node("Mul", "LOUDNESS FACTOR", "SCALED"),
                node("Mul", "SCALED GAIN", "GAINED"),
                node("Mul", "GAINED WORTH", "BROUGHT"),
                node("Where", "RESET ZERO TOTAL_IN", "KEPT"),
                node("Add", "KEPT BROUGHT", "TOTAL_OUT"),
                node("Transpose", "BROUGHT", "ROW", perm=[1, 0]),
                node("Concat", "CACHE_IN ROW", "CACHE_OUT", axis=0),
                node("Identity", "TAG", "WORDS_OUT"),
                node("Identity", "WORDS_IN", "BEFORE"),
                node("Add", "COUNT_IN ONE", "COUNT_OUT"),
                node("Transpose", "CACHE_OUT", "HISTORY", perm=[1, 0]),
                node("Squeeze", "COUNT_OUT FIRST", "COUNT"),
            ],
            [
                ("FRAMES", "fp32", [BATCH, "T"]),
                ("TAG", "string", [BATCH, 2]),
                ("INDEX", "int64", [BATCH, 1]),
                ("KNOB", "int32", []),
                ("GAIN", "fp32", [1]),
                ("RESET", "bool", [BATCH, 1]),
                ("TOTAL_IN", "fp32", [BATCH, 1]),
                ("CACHE_IN", "fp32", ["P", BATCH]),
                ("WORDS_IN", "string", [BATCH, 2]),
                ("COUNT_IN", "int64", [1, BATCH, 1]),
            ],
            [
                ("TOTAL_OUT", "fp32", [BATCH, 1]),
                ("CACHE_OUT", "fp32", ["Q", BATCH]),
                ("WORDS_OUT", "string", [BATCH, 2]),
                ("COUNT_OUT", "int64", [1, BATCH, 1]),
                ("HISTORY", "fp32", [BATCH, "Q"]),
                ("BEFORE", "string", [BATCH, 2]),
                ("COUNT", "int64", [BATCH, 1]),
            ],
            {
                "TABLE": numbers(1, 2, 3, 4),
                "GAIN": np.array([2], np.float32),
                "LAST": np.array([-1], np.int64),
                "FIRST": np.array([0], np.int64),
                "ZERO": np.zeros((1, 1), np.float32),
                "ONE": np.ones((1, 1, 1), np.int64),
            },
        )

    model = Model(
        name,
        build,
        inputs=(
            Tensor("FRAMES", "fp32", (-1,), between=(-9, 9), context=(2, 1), ragged=True),
            Tensor("TAG", "string", (2,)),
            Tensor("INDEX", "int64", (1,), between=(0, 3)),
            Tensor("KNOB", "int32", (1,), between=(1, 2), unbatched=()),
            Tensor("GAIN", "fp32", (1,), between=(1, 3), unbatched=(1,), optional=True),
        ),
        outputs=(
            Tensor("TOTAL_OUT", "fp32", (1,)),
            Tensor("HISTORY", "fp32", (-1,)),
            Tensor("BEFORE", "string", (2,)),
            Tensor("COUNT", "int64", (1,)),
        ),
        states=(
            ("TOTAL_IN", "TOTAL_OUT"),
            ("CACHE_IN", "CACHE_OUT"),
            ("WORDS_IN", "WORDS_OUT"),
            ("COUNT_IN", "COUNT_OUT"),
        ),
        controls=(Control("RESET", START, "bool"),),
        parameters={"input_context": "FRAMES=2", "initial_states": "COUNT_IN=7"},
        initial={"COUNT_IN": np.full((1, 1, 1), 7, np.int64)},
        lengths_at_start={"P": 0},
    )
    return dataclasses.replace(model, **changes)


HOW = {
    "oldest": {},
    # a place for each sequence: one that waits for a place would wait for those that wait for it
    "direct": {"direct": "max_queue_delay_microseconds: 1000", "max_batch_size": 32},
    "two_instances": {"instances": 2},
    "one_row": {"max_batch_size": 1},
    "waiting": {"oldest": "max_queue_delay_microseconds: 3000"},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.host_and_device
def test_one_request_at_a_time_is_right(deployment, how):
    model = deployment.serve(everything(f"everything_{how}", **HOW[how]))
    rng = np.random.default_rng(2)
    together(
        lambda seed=seed: interleave(deployment.connect(), model, np.random.default_rng(seed), 4) for seed in range(6)
    )
    interleave(deployment.connect(), model, rng, sequences=8)
    deployment.settles("stateful_growing_state_bytes", model, 0)


@pytest.mark.parametrize("how", ["oldest", "direct", "two_instances", "waiting"])
@pytest.mark.host_and_device
def test_many_sequences_on_one_stream_are_right(deployment, how):
    model = deployment.serve(everything(f"everything_{how}", **HOW[how]))
    rng = np.random.default_rng(3)
    stream = deployment.connect("stream")
    windowed(stream, model, rng, [script(model, rng, 90_000 + number, lives=3) for number in range(16)], window=8)


@pytest.mark.parametrize("parameters", [{"store_states_as_fp16": 1}, {"always_pad_to_max_batch": 1}], ids=str)
@pytest.mark.host_and_device
def test_other_ways_to_keep_and_run_are_right(deployment, parameters):
    [name] = parameters
    model = everything(f"everything_{name}").with_parameters(f"everything_{name}", **parameters)
    model = deployment.serve(model)
    together(
        lambda seed=seed: interleave(deployment.connect(), model, np.random.default_rng(seed), 4) for seed in range(6)
    )


@pytest.mark.host_and_device
def test_runs_that_fail_leave_every_kind_of_state_as_it_was(deployment):
    model = deployment.serve(everything("everything_failing", oldest="max_queue_delay_microseconds: 3000"))

    def talk(seed):
        rng = np.random.default_rng(seed)
        client = deployment.connect()
        conversation = Conversation(client, model, rng)
        conversation.start()
        for _ in range(12):
            if rng.integers(3) == 0:
                wrong = {**model.draw(rng), "INDEX": np.array([[9]], np.int64)}
                came = outcome(lambda fed=wrong: client.step(model.name, conversation.sequence_id, fed))
                assert "ONNX Runtime" in str(came), came
            conversation.step()
        conversation.end()

    together(lambda seed=seed: talk(seed) for seed in range(8))
