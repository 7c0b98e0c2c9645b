"""States of every type and form: what comes out is what went in, bit by bit."""

import dataclasses

import numpy as np
import pytest

from harness import models
from harness.conversations import Conversation, interleave, together
from harness.graphs import BATCH, graph, node
from harness.model import START, TYPES, Control, Model, Tensor
from harness.repetitions import every_type
from harness.strategies import both_strategies
from harness.values import bits

pytestmark = pytest.mark.simulated_device

FLOATS = {"fp16": np.uint16, "bf16": np.uint16, "fp32": np.uint32, "fp64": np.uint64}
MANTISSA = {"fp16": 10, "bf16": 7, "fp32": 23, "fp64": 52}


def special(type: str) -> np.ndarray:
    """Values that a conversion on the way would change: as bits, in the type."""
    dtype = TYPES[type][0]
    if type == "bool":
        return np.array([True, False, True, True])
    if type not in FLOATS:
        ends = np.iinfo(dtype)
        return np.array([ends.min, ends.max, ends.max - 1, 1], dtype)
    word = FLOATS[type]
    size = np.dtype(word).itemsize * 8
    mantissa = MANTISSA[type]
    exponent = ((1 << (size - 1 - mantissa)) - 1) << mantissa
    sign, quiet = 1 << (size - 1), 1 << (mantissa - 1)
    bits = [
        0,
        sign,  # minus zero
        1,  # the smallest denormal
        sign | ((1 << mantissa) - 1),  # the largest, negative
        exponent,
        sign | exponent,  # infinities
        exponent | quiet,
        exponent | quiet | 0x2B,  # NaNs with something in them
        sign | exponent | quiet | 1,
        exponent | 1,  # a signalling one
        exponent - 1,  # the largest number
        1 << mantissa,  # the smallest normal one
    ]
    return np.array(bits, word).view(dtype)


@pytest.mark.parametrize("protocol", ["unary", "http", "stream"])
@every_type(but=("string",))
def test_a_bit_pattern_in_is_the_bit_pattern_out(deployment, type, protocol):
    values = special(type)
    model = deployment.serve(models.echo(type, f"echo_bits_{type}", dims=(len(values),)))
    client = deployment.connect(protocol)
    before = np.zeros_like(values)
    fed = [values, values[::-1], np.roll(values, 1), values]
    for i, now in enumerate(fed):
        answer = client.step(model.name, 7, {"INPUT": now[None]}, start=i == 0, end=i == len(fed) - 1)
        assert answer["OUTPUT"].shape == (1, len(values))
        assert bits(answer["OUTPUT"]) == bits(before), f"step {i}: {answer['OUTPUT']}, not {before}"
        before = now


@every_type(but=("string",))
@pytest.mark.host_and_device
def test_random_bits_of_many_sequences_in_one_batch(deployment, type):
    width = 37  # no multiple of anything
    model = deployment.serve(models.echo(type, f"echo_batched_{type}", dims=(width,)))
    client = deployment.connect()
    dtype = np.dtype(TYPES[type][0])

    def draw(rng):
        if type == "bool":
            return rng.integers(0, 2, (1, width)).astype(np.bool_)
        return np.frombuffer(rng.bytes(width * dtype.itemsize), dtype).reshape(1, width)

    def talk(seed):
        rng = np.random.default_rng(seed)
        before = np.zeros((1, width), dtype)
        for i in range(6):
            now = draw(rng)
            answer = client.step(model.name, 1000 + seed, {"INPUT": now}, start=i == 0, end=i == 5)
            assert bits(answer["OUTPUT"]) == bits(before)
            before = now

    together(lambda seed=seed: talk(seed) for seed in range(12))


@pytest.mark.parametrize("type", ["int16", "uint16", "uint32", "uint64"])
def test_types_that_the_original_did_not_have_compute_too(deployment, type):
    adds = type in ("uint32", "uint64")  # ONNX Runtime itself; the others in int32, between casts

    def build():
        shape = [BATCH, 4]
        wide = TYPES["int32"][1]
        nodes = [
            node("Cast", "STATE_IN", "WIDE_STATE", to=wide),
            node("Cast", "INPUT", "WIDE_INPUT", to=wide),
            node("Add", "WIDE_STATE WIDE_INPUT", "WIDE_SUM"),
            node("Cast", "WIDE_SUM", "STATE_OUT", to=TYPES[type][1]),
        ]
        if adds:
            nodes = [node("Add", "STATE_IN INPUT", "STATE_OUT")]
        return graph(
            [*nodes, node("Identity", "STATE_OUT", "OUTPUT")],
            [("INPUT", type, shape), ("STATE_IN", type, shape)],
            [("OUTPUT", type, shape), ("STATE_OUT", type, shape)],
        )

    model = models.counter(
        "int32",
        name=f"counter_of_{type}",
        build=build,
        inputs=(Tensor("INPUT", type, (4,)),),
        outputs=(Tensor("OUTPUT", type, (4,)),),
    )
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(1), sequences=6)


# ---- number and form of tensors


def wide(name: str, count: int) -> Model:
    """`count` inputs, outputs and states, of the types in turn: OUT_i = S_i = S_i + IN_i."""
    turn = ("fp32", "int64", "fp64", "int32")

    def build():
        nodes, inputs, outputs = [], [], []
        for i in range(count):
            type, shape = turn[i % 4], [BATCH, 1 + i % 3]
            nodes += [node("Add", f"S{i}_IN IN_{i}", f"S{i}_OUT"), node("Identity", f"S{i}_OUT", f"OUT_{i}")]
            inputs += [(f"IN_{i}", type, shape), (f"S{i}_IN", type, shape)]
            outputs += [(f"OUT_{i}", type, shape), (f"S{i}_OUT", type, shape)]
        return graph(nodes, inputs, outputs)

    return Model(
        name,
        build,
        inputs=tuple(Tensor(f"IN_{i}", turn[i % 4], (1 + i % 3,)) for i in range(count)),
        outputs=tuple(Tensor(f"OUT_{i}", turn[i % 4], (1 + i % 3,)) for i in range(count)),
        states=tuple((f"S{i}_IN", f"S{i}_OUT") for i in range(count)),
    )


@pytest.mark.parametrize("count", [6, 24])
def test_more_inputs_and_outputs_than_five_are_served(deployment, count):
    model = deployment.serve(wide(f"wide_{count}", count))
    client = deployment.connect()
    interleave(client, model, np.random.default_rng(2), sequences=4, longest=4)
    together(lambda seed=seed: Conversation(client, model, np.random.default_rng(seed)).whole(4) for seed in range(6))


@both_strategies
def test_a_scalar_is_a_state_where_there_is_no_batch(deployment, direct):
    """max_batch_size 0 ended the original's server at load."""

    def build():
        return graph(
            [
                node("ReduceSum", "INPUT", "SUM", keepdims=0),
                node("Add", "COUNT_IN SUM", "COUNT_OUT"),
                node("Add", "SEEN_IN ONE", "SEEN_OUT"),
                node("Reshape", "COUNT_OUT LIST", "OUTPUT"),
                node("Cast", "SEEN_OUT", "SEEN_64", to=TYPES["int64"][1]),
                node("Reshape", "SEEN_64 LIST", "SEEN"),
            ],
            [("INPUT", "int64", [3]), ("COUNT_IN", "int64", []), ("SEEN_IN", "int32", [])],
            [
                ("OUTPUT", "int64", [1]),
                ("SEEN", "int64", [1]),
                ("COUNT_OUT", "int64", []),
                ("SEEN_OUT", "int32", []),
            ],
            {"ONE": np.array(1, np.int32), "LIST": np.array([1], np.int64)},
        )

    model = Model(
        f"scalar_{'oldest' if direct is None else 'direct'}",
        build,
        inputs=(Tensor("INPUT", "int64", (3,)),),
        outputs=(Tensor("OUTPUT", "int64", (1,)), Tensor("SEEN", "int64", (1,))),
        states=(("COUNT_IN", "COUNT_OUT"), ("SEEN_IN", "SEEN_OUT")),
        max_batch_size=0,
        direct=direct,
    )
    client = deployment.connect()
    deployment.serve(model)
    Conversation(client, model, np.random.default_rng(3)).whole(5)
    together(lambda seed=seed: Conversation(client, model, np.random.default_rng(seed)).whole(5) for seed in range(4))


@both_strategies
def test_a_state_may_be_one_number_a_row(deployment, direct):
    def build():
        return graph(
            [
                node("Squeeze", "INPUT LAST", "FLAT"),
                node("Add", "COUNT_IN FLAT", "COUNT_OUT"),
                node("Unsqueeze", "COUNT_OUT LAST", "OUTPUT"),
            ],
            [("INPUT", "int64", [BATCH, 1]), ("COUNT_IN", "int64", [BATCH])],
            [("OUTPUT", "int64", [BATCH, 1]), ("COUNT_OUT", "int64", [BATCH])],
            {"LAST": np.array([1], np.int64)},
        )

    model = Model(
        f"flat_{'oldest' if direct is None else 'direct'}",
        build,
        inputs=(Tensor("INPUT", "int64", (1,)),),
        outputs=(Tensor("OUTPUT", "int64", (1,)),),
        states=(("COUNT_IN", "COUNT_OUT"),),
        direct=direct,
    )
    client = deployment.connect()
    deployment.serve(model)
    interleave(client, model, np.random.default_rng(4), sequences=6)
    together(lambda seed=seed: Conversation(client, model, np.random.default_rng(seed)).whole(6) for seed in range(8))


@pytest.mark.parametrize(
    ("name", "dims", "inside"),
    [
        ("first", [BATCH, 3, 5], (-1, 3, 5)),
        ("middle", [3, BATCH, 5], (3, -1, 5)),
        ("last", [3, 5, BATCH], (3, 5, -1)),
    ],
)
def test_the_batch_axis_may_be_marked_anywhere(deployment, name, dims, inside):
    def build():
        return graph(
            [node("Add", "STATE_IN INPUT", "STATE_OUT"), node("Identity", "STATE_OUT", "OUTPUT")],
            [("INPUT", "fp32", dims), ("STATE_IN", "fp32", dims)],
            [("OUTPUT", "fp32", dims), ("STATE_OUT", "fp32", dims)],
        )

    model = models.counter(
        name=f"marked_{name}",
        build=build,
        inputs=(Tensor("INPUT", "fp32", inside, batch_inside=True),),
        outputs=(Tensor("OUTPUT", "fp32", inside, batch_inside=True),),
    )
    client = deployment.connect()
    deployment.serve(model)
    talk = Conversation(client, model, np.random.default_rng(5))
    answer = talk.start()
    assert answer["OUTPUT"].shape == tuple(1 if dim == BATCH else dim for dim in dims)
    talk.end()
    interleave(client, model, np.random.default_rng(6), sequences=5)
    together(lambda seed=seed: Conversation(client, model, np.random.default_rng(seed)).whole(6) for seed in range(8))


# ---- beginnings


@pytest.mark.parametrize("reset", ["bool", "int32", "fp32"])
def test_a_reset_input_of_any_type_puts_the_model_s_own_values_in(deployment, reset):
    """Not zeros: what the model's Where has for it. The control is in the model's type."""
    made = models.accumulate(f"resets_{reset}", reset=reset)

    def build():
        model = made.build()
        (zero,) = [found for found in model.graph.initializer if found.name == "ZERO"]
        zero.raw_data = np.array([[1234.5]], np.float32).tobytes()
        return model

    model = deployment.serve(dataclasses.replace(made, build=build))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(7))
    assert talk.start({"INPUT": np.ones((1, 2), np.float32)})["OUTPUT"].item() == 1236.5
    talk.step()
    assert talk.start({"INPUT": np.zeros((1, 1), np.float32)})["OUTPUT"].item() == 1234.5
    talk.end()


def test_a_reset_input_may_be_as_long_as_the_batch(deployment):
    """[batch], not [batch, 1]."""

    def build():
        return graph(
            [
                node("Unsqueeze", "RESET LAST", "WIDE"),
                node("Where", "WIDE ZERO STATE_IN", "KEPT"),
                node("Add", "KEPT INPUT", "STATE_OUT"),
                node("Identity", "STATE_OUT", "OUTPUT"),
            ],
            [("INPUT", "fp32", [BATCH, 4]), ("STATE_IN", "fp32", [BATCH, 4]), ("RESET", "bool", [BATCH])],
            [("OUTPUT", "fp32", [BATCH, 4]), ("STATE_OUT", "fp32", [BATCH, 4])],
            {"LAST": np.array([1], np.int64), "ZERO": np.array(-3, np.float32)},
        )

    model = deployment.serve(
        models.counter(name="resets_flat", build=build, controls=(Control("RESET", START, "bool"),))
    )
    client = deployment.connect()
    for seed in range(3):
        rng = np.random.default_rng(seed)
        total, sequence_id = np.float32(-3), 500 + seed
        for i in range(4):
            fed = model.draw(rng)
            total = total + fed["INPUT"]
            answer = client.step(model.name, sequence_id, fed, start=i == 0, end=i == 3)
            np.testing.assert_array_equal(answer["OUTPUT"], total)


# ---- states as fp16


def halved(make, name: str, *arguments, **changes) -> Model:
    return make(*arguments, name=name, **changes).with_parameters(name, store_states_as_fp16=1)


ROUNDING = {
    "exact": [0.0, -0.0, 1.0, -2.5, 65504.0],
    "to_nearest_even": [1 + 2**-11, 1 + 3 * 2**-11, 2049.0, 2051.0, -2049.0, 1 + 2**-11 + 2**-20],
    "largest": [65519.0, -65519.0],
    "infinite": [np.inf, -np.inf, np.nan, -np.nan],
    "small": [2.0**-24, 2.0**-25, 3 * 2.0**-25, 6e-8, 1e-40, -(2.0**-14), 2.0**-15 + 2.0**-25],
}


@pytest.mark.parametrize("case", ROUNDING)
def test_fp32_states_kept_as_fp16_round_to_the_nearest(deployment, case):
    values = np.array([ROUNDING[case]], np.float32)
    model = deployment.serve(halved(models.echo, f"halved_{case}", dims=(values.shape[1],)))
    client = deployment.connect()
    client.step(model.name, 9, {"INPUT": values}, start=True)
    answer = client.step(model.name, 9, {"INPUT": values}, end=True)["OUTPUT"]
    with np.errstate(over="ignore"):
        wanted = values.astype(np.float16).astype(np.float32)
    assert np.isnan(answer).tolist() == np.isnan(wanted).tolist()
    numbers = ~np.isnan(wanted)
    assert bits(answer[numbers]) == bits(wanted[numbers]), f"{answer}, not {wanted}"


@pytest.mark.parametrize("type", ["fp64", "int32", "fp16", "bf16", "bool"])
def test_states_of_other_types_are_kept_as_they_are(deployment, type):
    values = special(type)
    model = deployment.serve(halved(models.echo, f"halved_{type}", type, dims=(len(values),)))
    client = deployment.connect()
    client.step(model.name, 9, {"INPUT": values[None]}, start=True)
    answer = client.step(model.name, 9, {"INPUT": values[None]}, end=True)["OUTPUT"]
    assert bits(answer) == bits(values)


def test_states_kept_as_fp16_take_half_the_memory(deployment):
    sizes = {}
    for name, value in (("whole", 0), ("half", 1)):
        model = models.echo(name=f"echo_{name}", dims=(4096,), max_candidates=100)
        deployment.serve(model.with_parameters(model.name, store_states_as_fp16=value))
        text = deployment.server.log_text()
        sizes[name] = 100 * 4096 * (4 - 2 * value)
        assert f"= {sizes[name]} bytes" in text.rpartition(f"loading: {model.name}")[2]
    assert sizes["half"] * 2 == sizes["whole"]


@pytest.mark.parametrize("make", [models.axes, models.many_states, models.accumulate_fp32])
@pytest.mark.host_and_device
def test_states_of_every_layout_may_be_kept_as_fp16(deployment, make):
    """With small whole numbers, which fp16 keeps exactly."""
    model = halved(make, f"{make.__name__}_halved")
    small = tuple(dataclasses.replace(tensor, between=(-3, 3)) for tensor in model.inputs)
    model = deployment.serve(dataclasses.replace(model, inputs=small))
    client = deployment.connect()
    interleave(client, model, np.random.default_rng(8), sequences=6)
    together(lambda seed=seed: Conversation(client, model, np.random.default_rng(seed)).whole(5) for seed in range(8))


def test_the_model_computes_in_fp32_all_the_same(deployment):
    """Only what is kept is rounded: an answer is not."""
    model = deployment.serve(halved(models.counter, "halved_answer"))
    fed = {"INPUT": np.array([[1 + 2**-20, 0.1, 1e-6, 3.0]], np.float32)}
    answer = deployment.connect().step(model.name, 9, fed, start=True, end=True)
    assert bits(answer["OUTPUT"]) == bits(fed["INPUT"])
