"""What a state is at START: zeros, a file, values of the configuration, or what a model makes of the first
request. Each sequence of these tests is started more than once, and always begins with the same."""

import dataclasses
import os

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.clients import new_id
from harness.conversations import Conversation, interleave, outcome, script, some_at_once, together, windowed
from harness.graphs import BATCH, graph, node
from harness.model import TYPES, Model, State, Tensor
from harness.models import implicit
from harness.refusals import refused
from harness.repetitions import every_type
from harness.strategies import both_strategies, strategy

F32 = np.float32

pytestmark = pytest.mark.simulated_device


def raw(value) -> bytes:
    """The content of a file with these elements: little-endian, strings with their lengths in front."""
    value = np.asarray(value)
    if value.dtype != np.object_:
        return value.tobytes()
    texts = [text if isinstance(text, bytes) else text.encode() for text in value.ravel()]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def folder(**values) -> dict[str, bytes]:
    """Files of `initial_state/`, `NAME.bin` each."""
    return {f"initial_state/{name}.bin": raw(value) for name, value in values.items()}


def sequences_come_and_go(client, model: Model, seed: int, sequences: int = 5) -> None:
    """One at a time, then several at once, with restarts and ids that are used again."""
    rng = np.random.default_rng(seed)
    interleave(client, model, rng, sequences, longest=4)
    talks = [Conversation(client, model, np.random.default_rng([seed, i])) for i in range(sequences)]
    together(talk.start for talk in talks)
    some_at_once(talks, rng, rounds=3)
    together([talks[0].start, *(talk.step for talk in talks[1:])])
    together(talk.end for talk in talks)
    together(talk.start for talk in talks)
    together(talk.end for talk in talks)


def random_row(type: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if type == "string":
        words = [rng.bytes(int(rng.integers(0, 30))) + b"." for _ in range(int(np.prod(shape)))]
        return np.array(words, np.object_).reshape(shape)
    if type == "bool":
        return rng.integers(0, 2, shape).astype(np.bool_)
    dtype = np.dtype(TYPES[type][0])
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def first_answers(deployment, model: Model, fed: np.ndarray) -> np.ndarray:
    """What an `echo` model says to a START: its initial state. The same for each START."""
    client = deployment.connect()
    sequence_id, answers = new_id(), []
    for end in (False, True, False, False):
        answers.append(client.step(model.name, sequence_id, {"INPUT": fed}, start=True, end=end)["OUTPUT"])
        if not end:
            client.step(model.name, sequence_id, {"INPUT": fed})
    for answer in answers[1:]:
        assert answer.tolist() == answers[0].tolist() or answer.tobytes() == answers[0].tobytes()
    return answers[0]


def same(came: np.ndarray, wanted: np.ndarray) -> bool:
    if wanted.dtype == np.object_:
        return came.shape == wanted.shape and came.tolist() == wanted.tolist()
    return came.dtype == wanted.dtype and came.shape == wanted.shape and came.tobytes() == wanted.tobytes()


# ---- zeros, and files


@pytest.mark.parametrize("type", ["fp32", "int64", "bool", "string"])
def test_zero_data_is_zeros_of_the_type(deployment, type):
    model = implicit(models.echo(type), f"initial_zero_{type}", initial_dims=(4,))
    came = first_answers(deployment, deployment.serve(model), random_row(type, (1, 4), 1))
    nothing = np.full((1, 4), b"", np.object_) if type == "string" else np.zeros((1, 4), TYPES[type][0])
    assert same(came, nothing), came


@pytest.mark.parametrize("source", ["data_file", "initial_states"])
@every_type()
def test_a_file_gives_a_state_of_every_type_bit_by_bit(deployment, type, source):
    value = random_row(type, (1, 4), 2)
    name = f"initial_{source}_{type}"
    if source == "data_file":
        model = implicit(models.echo(type), name, initial_dims=(4,), initial_file="row.bin")
    else:
        model = models.echo(type).with_parameters(name, initial_states="STATE_IN=file:row.bin")
    model = deployment.serve(model.variant(name, files=folder(row=value)))
    came = first_answers(deployment, model, random_row(type, (1, 4), 3))
    assert same(came, value), f"{came}, not {value}"


AXES = {
    "FIRST_IN": np.arange(2, dtype=F32).reshape(1, 2) + 100,
    "MIDDLE_IN": np.arange(6, dtype=F32).reshape(3, 1, 2) - 50,
    "LAST_IN": np.arange(6, dtype=F32).reshape(2, 3, 1) * 7,
}


@both_strategies
@pytest.mark.parametrize("inside", [False, True], ids=["dims_without_batch", "batch_inside"])
@pytest.mark.host_and_device
def test_files_are_rows_wherever_the_batch_axis_is(deployment, inside, direct):
    name = f"initial_axes_{'inside' if inside else 'without'}_{strategy(direct)}"
    model = implicit(models.axes(direct=direct), name, inside=inside)
    entries = tuple(
        dataclasses.replace(
            state,
            initial_dims=tuple(1 if dim == -1 else dim for dim in state.dims),
            initial_file=f"{state.input}.bin",
        )
        for state in model.implicit
    )
    model = model.variant(name, implicit=entries, initial=AXES, files=folder(**AXES))
    sequences_come_and_go(deployment.connect(), deployment.serve(model), seed=4)


@pytest.mark.parametrize("instances", [1, 2])
def test_files_of_the_parameter_are_rows_wherever_the_batch_axis_is(deployment, instances):
    said = ", ".join(f"{name}=file:{name}.bin" for name in AXES)
    model = models.axes(instances=instances, initial=AXES, files=folder(**AXES))
    model = model.with_parameters(f"initial_axes_parameter_{instances}", initial_states=said)
    sequences_come_and_go(deployment.connect(), deployment.serve(model), seed=5)


def test_a_file_in_a_folder_of_the_folder_is_found(deployment):
    value = np.array([[1, 2, 3, 4]], F32)
    model = models.counter(files={"initial_state/more/row.bin": raw(value)}, initial={"STATE_IN": value})
    model = model.with_parameters("initial_nested_file", initial_states="STATE_IN=file:more/row.bin")
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(6), sequences=3)


def test_a_state_without_initial_state_beside_one_that_has_it_is_zeros(deployment):
    model = implicit(models.crossed(), "initial_of_one")
    with_file = dataclasses.replace(model.implicit[1], initial_dims=(3,), initial_file="b.bin")
    value = np.array([[5, -6, 7]], F32)
    model = model.variant(
        model.name,
        implicit=(model.implicit[0], with_file),
        initial={"B_IN": value},
        files=folder(b=value),
    )
    sequences_come_and_go(deployment.connect(), deployment.serve(model), seed=7)


# ---- values in the configuration


VALUES = {
    "fp32": ("1.5", "[0.1, -2.5e-3, 3, 1e30]"),
    "fp64": ("0.1", "[0.1, -2.5e-300, 3, 1e300]"),
    "fp16": ("-0.25", "[1.5, inf, 65504, 0.333251953125]"),
    "bf16": ("2.5", "[1.5, -2, 256, 0.5]"),
    "int8": ("-128", "[-128, 127, 0, 5]"),
    "int16": ("-32768", "[-32768, 32767, 0, 5]"),
    "int32": ("-5", "[-2147483648, 2147483647, 0, 5]"),
    "int64": ("9007199254740993", "[-9223372036854775808, 9223372036854775807, 9007199254740993, 1]"),
    "uint8": ("255", "[255, 0, 1, 2]"),
    "uint16": ("65535", "[65535, 0, 1, 2]"),
    "uint32": ("4294967295", "[4294967295, 0, 1, 2]"),
    "uint64": ("18446744073709551615", "[18446744073709551615, 0, 9007199254740993, 2]"),
    "bool": ("true", "[true, false, 1, 0]"),
}


def read(type: str, text: str) -> np.ndarray:
    """The values as numpy reads them, one number at a time."""
    dtype = TYPES[type][0]
    numbers = [part.strip() for part in text.strip("[]").split(",")]
    if type == "bool":
        row = [part in ("true", "1") for part in numbers]
    elif np.issubdtype(dtype, np.integer):
        row = [int(part) for part in numbers]
    else:
        row = [float(part) for part in numbers]
    return np.array([row * 4 if len(row) == 1 else row], dtype)


@pytest.mark.parametrize("written", ["value", "list"])
@every_type(but=("string",))
def test_values_are_read_exactly_in_every_type(deployment, type, written):
    text = VALUES[type][written == "list"]
    name = f"initial_{written}_{type}"
    model = deployment.serve(models.echo(type).with_parameters(name, initial_states=f"STATE_IN={text}"))
    came = first_answers(deployment, model, random_row(type, (1, 4), 8))
    assert same(came, read(type, text)), f"{came}, not {text}"


@pytest.mark.parametrize(
    ("written", "words"),
    [("hello", [b"hello"] * 4), ("[a, bc, ü, 1.50]", [b"a", b"bc", "ü".encode(), b"1.50"])],
    ids=["value", "list"],
)
def test_strings_are_words_as_they_are_written(deployment, written, words):
    model = models.echo("string").with_parameters(f"initial_words_{len(written)}", initial_states=f"STATE_IN={written}")
    came = first_answers(deployment, deployment.serve(model), random_row("string", (1, 4), 36))
    assert came.tolist() == [words]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("spaces", "A_IN=1.5 B_IN=[1,2,3]"),
        ("commas", "A_IN=1.5,B_IN=[1,2,3]"),
        ("both", "B_IN=[1, 2, 3], A_IN=1.5"),
    ],
)
@pytest.mark.parametrize("implicitly", [False, True], ids=["state_pairs", "state"])
def test_several_states_are_given_in_one_parameter(deployment, name, said, implicitly):
    name = f"initial_{name}_{'state' if implicitly else 'pairs'}"
    model = models.crossed(
        initial={"A_IN": np.full((1, 3), 1.5, F32), "B_IN": np.array([[1, 2, 3]], F32)}
    ).with_parameters(name, initial_states=said)
    model = deployment.serve(implicit(model, name) if implicitly else model)
    sequences_come_and_go(deployment.connect(), model, seed=9)


def test_a_list_is_a_row_in_the_order_of_the_models_dims(deployment):
    said = "LAST_IN=[1,2,3,4,5,6] MIDDLE_IN=[10,20,30,40,50,60]"
    initial = {
        "LAST_IN": np.arange(1, 7, dtype=F32).reshape(2, 3, 1),
        "MIDDLE_IN": np.arange(10, 70, 10, dtype=F32).reshape(3, 1, 2),
    }
    model = models.axes(initial=initial).with_parameters("initial_axes_list", initial_states=said)
    sequences_come_and_go(deployment.connect(), deployment.serve(model), seed=10)


def test_a_scalar_state_has_one_value(deployment):
    def build():
        return graph(
            [
                node("ReduceSum", "INPUT", "SUM", keepdims=0),
                node("Add", "COUNT_IN SUM", "COUNT_OUT"),
                node("Reshape", "COUNT_OUT LIST", "OUTPUT"),
            ],
            [("INPUT", "int64", [3]), ("COUNT_IN", "int64", [])],
            [("OUTPUT", "int64", [1]), ("COUNT_OUT", "int64", [])],
            {"LIST": np.array([1], np.int64)},
        )

    model = Model(
        "initial_scalar",
        build,
        inputs=(Tensor("INPUT", "int64", (3,)),),
        outputs=(Tensor("OUTPUT", "int64", (1,)),),
        states=(("COUNT_IN", "COUNT_OUT"),),
        max_batch_size=0,
        initial={"COUNT_IN": np.array(42, np.int64)},
    )
    model = deployment.serve(model.with_parameters(model.name, initial_states="COUNT_IN=42"))
    interleave(deployment.connect(), model, np.random.default_rng(11), sequences=3)


def test_half_precision_storage_keeps_the_initial_value(deployment):
    value = np.array([[0.5, -2, 1024, 3]], F32)  # exact in fp16
    model = models.counter(initial={"STATE_IN": value})
    model = model.with_parameters("initial_halved", initial_states="STATE_IN=[0.5,-2,1024,3]", store_states_as_fp16=1)
    sequences_come_and_go(deployment.connect(), deployment.serve(model), seed=12)


def test_padding_takes_nothing_from_initial_values(deployment):
    value = np.array([[1, 2, 3, 4]], F32)
    model = models.counter(initial={"STATE_IN": value}, max_batch_size=4)
    model = model.with_parameters("initial_padded", initial_states="STATE_IN=[1,2,3,4]", always_pad_to_max_batch=1)
    sequences_come_and_go(deployment.connect(), deployment.serve(model), seed=13, sequences=4)


@both_strategies
def test_an_id_used_again_without_waiting_begins_at_the_initial_value(deployment, direct):
    model = models.counter(initial={"STATE_IN": np.full((1, 4), 7, F32)}, direct=direct)
    name = f"initial_reused_{strategy(direct)}"
    model = deployment.serve(model.with_parameters(name, initial_states="STATE_IN=7"))
    rng = np.random.default_rng(14)
    windowed(
        deployment.connect("stream"),
        model,
        rng,
        [script(model, rng, new_id(), lives=4, ends=True) for _ in range(6)],
        window=8,
    )


def test_the_models_own_reset_comes_after_the_initial_value(deployment):
    """The state that the model is fed is the initial one; what its reset makes of it is its business."""
    made = models.accumulate(initial={"SUM_IN": np.array([[1000]], F32)})
    model = deployment.serve(made.with_parameters("initial_and_reset", initial_states="SUM_IN=1000"))
    interleave(deployment.connect(), model, np.random.default_rng(15), sequences=4)


# ---- growing states


LAYOUTS = {"NTW": (1, 3, 2), "TNW": (3, 1, 2), "WNT": (2, 1, 3)}


def rows(layout: str) -> np.ndarray:
    return np.arange(1, 7, dtype=F32).reshape(LAYOUTS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", ["list", "file", "data_file", "zero_data"])
def test_a_growing_state_begins_as_long_as_its_initial_value(deployment, layout, source):
    value = rows(layout)
    name = f"initial_growing_{source}_{layout}"
    made = models.append(layout=layout, initial={"CACHE_IN": value}, files=folder(cache=value))
    dims = tuple(dim for at, dim in enumerate(value.shape) if layout[at] != "N")
    if source == "list":
        model = made.with_parameters(name, initial_states="CACHE_IN=[1,2,3,4,5,6]")
    elif source == "file":
        model = made.with_parameters(name, initial_states="CACHE_IN=file:cache.bin")
    elif source == "data_file":
        model = implicit(made, name, initial_dims=dims, initial_file="cache.bin")
    else:
        model = implicit(made, name, initial_dims=dims)
        model = model.variant(name, initial={"CACHE_IN": np.zeros_like(value)})
    sequences_come_and_go(deployment.connect(), deployment.serve(model), seed=16)


def test_an_initial_state_of_length_zero_is_an_empty_state(deployment):
    """Without it the state would have one row."""
    model = deployment.serve(implicit(models.append(), "initial_growing_empty", initial_dims=(0, 2)))
    interleave(deployment.connect(), model, np.random.default_rng(17), sequences=3)


def test_a_growing_string_state_begins_with_the_strings_of_its_file(deployment):
    value = np.array([["", "two words"], ["ü☎", "x" * 300]], np.object_).reshape(1, 2, 2)
    model = models.append("string", initial={"CACHE_IN": value}, files=folder(words=value))
    model = model.with_parameters("initial_growing_strings", initial_states="CACHE_IN=file:words.bin")
    sequences_come_and_go(deployment.connect(), deployment.serve(model), seed=18)


def test_several_growing_states_begin_with_their_own_lengths(deployment):
    initial = {
        "FAST_IN": np.arange(4, dtype=F32).reshape(1, 2, 2),
        "SLOW_IN": np.arange(6, dtype=np.int64).reshape(2, 3, 1),
        "COUNT_IN": np.array([[10]], F32),
    }
    model = models.caches(initial=initial).with_parameters(
        "initial_caches", initial_states="FAST_IN=[0,1,2,3] SLOW_IN=[0,1,2,3,4,5] COUNT_IN=10"
    )
    sequences_come_and_go(deployment.connect(), deployment.serve(model), seed=19)


# ---- a model that makes them


def made_by(maker, name: str, base: Model, file_name: str = "start.onnx", **changes) -> Model:
    """`base` with an initial-state model beside it."""
    files = {**base.files, f"1/{file_name}": maker.SerializeToString()}
    model = base.variant(name, files=files, **changes)
    return model.with_parameters(name, initial_state_model=file_name)


def constant(**values):
    """A model without inputs whose outputs are these values."""
    types = {np.dtype(TYPES[type][0]): type for type in TYPES if type != "string"}
    arrays = {name: np.asarray(value) for name, value in values.items()}
    return graph(
        [node("Identity", f"{name}__VALUE", name) for name in arrays],
        [],
        [(name, types[value.dtype], list(value.shape)) for name, value in arrays.items()],
        {f"{name}__VALUE": value for name, value in arrays.items()},
    )


def doubled(state: str = "STATE_IN", width: int = 4, type: str = "fp32"):
    """STATE = INPUT * 2."""
    return graph(
        [node("Add", "INPUT INPUT", state)],
        [("INPUT", type, [BATCH, width])],
        [(state, type, [BATCH, width])],
    )


def twice(fed):
    return fed["INPUT"] * 2


@pytest.mark.parametrize("implicitly", [False, True], ids=["state_pairs", "state"])
@both_strategies
def test_a_model_without_inputs_gives_constants(deployment, direct, implicitly):
    base = models.axes(initial=AXES, direct=direct)
    base = implicit(base, base.name) if implicitly else base
    name = f"made_constant_{strategy(direct)}_{'state' if implicitly else 'pairs'}"
    model = deployment.serve(made_by(constant(**AXES), name, base))
    sequences_come_and_go(deployment.connect(), model, seed=20)


@pytest.mark.parametrize("implicitly", [False, True], ids=["state_pairs", "state"])
@both_strategies
def test_a_model_with_inputs_makes_them_of_the_first_request(deployment, direct, implicitly):
    base = models.counter(initial={"STATE_IN": twice}, direct=direct)
    base = implicit(base, base.name) if implicitly else base
    name = f"made_doubled_{strategy(direct)}_{'state' if implicitly else 'pairs'}"
    model = deployment.serve(made_by(doubled(), name, base))
    sequences_come_and_go(deployment.connect(), model, seed=21)


@pytest.mark.parametrize("type", ["bool", "uint8", "fp16", "bf16", "int64", "fp64", "string"])
def test_such_a_model_may_make_states_of_every_type(deployment, type):
    maker = graph(
        [node("Identity", "INPUT", "STATE_IN")],
        [("INPUT", type, [BATCH, 4])],
        [("STATE_IN", type, [BATCH, 4])],
    )
    model = deployment.serve(made_by(maker, f"made_{type}", models.echo(type)))
    client = deployment.connect()
    for seed in range(3):
        fed = random_row(type, (1, 4), seed)
        for end in (False, True):
            came = client.step(model.name, 5, {"INPUT": fed}, start=True, end=end)["OUTPUT"]
            assert same(came, fed), f"{came}, not {fed}"


def test_it_need_not_take_every_input_nor_make_every_state(deployment):
    def twice_the_input(fed):
        return fed["INPUT"] * 2

    base = models.crossed(initial={"A_IN": np.full((1, 3), 3, F32), "B_IN": twice_the_input})
    base = base.with_parameters(base.name, initial_states="A_IN=3")
    model = deployment.serve(made_by(doubled("B_IN", 3), "made_in_part", base))
    sequences_come_and_go(deployment.connect(), model, seed=22)

    left = graph(
        [node("Neg", "LEFT", "TOTAL_IN")],
        [("LEFT", "fp32", [BATCH, 2])],
        [("TOTAL_IN", "fp32", [1, 2])],
    )
    base = models.two_inputs(initial={"TOTAL_IN": lambda fed: -fed["LEFT"]})
    model = deployment.serve(made_by(left, "made_of_one_input", base))
    sequences_come_and_go(deployment.connect(), model, seed=23)


def test_inputs_and_constants_may_make_states_side_by_side(deployment):
    maker = graph(
        [node("Add", "INPUT INPUT", "A_IN"), node("Identity", "NINE", "B_IN")],
        [("INPUT", "fp32", [BATCH, 3])],
        [("A_IN", "fp32", [BATCH, 3]), ("B_IN", "fp32", [1, 3])],
        {"NINE": np.full((1, 3), 9, F32)},
    )
    base = models.crossed(initial={"A_IN": twice, "B_IN": np.full((1, 3), 9, F32)})
    sequences_come_and_go(deployment.connect(), deployment.serve(made_by(maker, "made_mixed", base)), seed=24)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_gives_a_growing_state_its_length(deployment, layout):
    """As long as the first chunk, which is turned round: each sequence has its own length."""
    order = ["NTW".index(axis) for axis in layout]
    maker = graph(
        [
            node("Slice", "INPUT LAST BEFORE TIME BACK", "TURNED"),
            node("Transpose", "TURNED", "CACHE_IN", perm=order),
        ],
        [("INPUT", "fp32", [BATCH, "chunk", 2])],
        [("CACHE_IN", "fp32", [{"N": BATCH, "T": "chunk", "W": 2}[axis] for axis in layout])],
        {
            "LAST": np.array([-1], np.int64),
            "BEFORE": np.array([-(2**62)], np.int64),
            "TIME": np.array([1], np.int64),
            "BACK": np.array([-1], np.int64),
        },
    )
    base = models.append(layout=layout, initial={"CACHE_IN": lambda fed: fed["INPUT"][:, ::-1].transpose(order)})
    model = deployment.serve(made_by(maker, f"made_growing_{layout}", base))
    sequences_come_and_go(deployment.connect(), model, seed=25)


def test_constants_give_growing_states_their_lengths(deployment):
    initial = {
        "FAST_IN": np.arange(4, dtype=F32).reshape(1, 2, 2),
        "LAST_IN": np.array([[True, False]]),
        "SLOW_IN": np.zeros((2, 0, 1), np.int64),
    }
    base = models.caches(initial=initial)
    model = deployment.serve(made_by(constant(**initial), "made_growing_constant", base))
    sequences_come_and_go(deployment.connect(), model, seed=26)


def test_it_takes_inputs_in_the_models_shapes_where_the_batch_is_inside(deployment):
    def build():
        dims = [3, BATCH, 5]
        return graph(
            [node("Add", "STATE_IN INPUT", "STATE_OUT"), node("Identity", "STATE_OUT", "OUTPUT")],
            [("INPUT", "fp32", dims), ("STATE_IN", "fp32", dims)],
            [("OUTPUT", "fp32", dims), ("STATE_OUT", "fp32", dims)],
        )

    maker = graph(
        [node("Add", "INPUT INPUT", "STATE_IN")],
        [("INPUT", "fp32", [3, BATCH, 5])],
        [("STATE_IN", "fp32", [3, BATCH, 5])],
    )
    base = models.counter(
        build=build,
        inputs=(Tensor("INPUT", "fp32", (3, -1, 5), batch_inside=True),),
        outputs=(Tensor("OUTPUT", "fp32", (3, -1, 5), batch_inside=True),),
        initial={"STATE_IN": twice},
    )
    model = deployment.serve(made_by(maker, "made_inside", base))
    sequences_come_and_go(deployment.connect(), model, seed=27)


def test_a_start_in_a_batch_of_others_gets_its_own_initial_state(deployment):
    base = models.counter(
        initial={"STATE_IN": twice},
        max_batch_size=4,
        oldest="preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 1000000",
    )
    model = deployment.serve(made_by(doubled(), "made_in_a_batch", base))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(i)) for i in range(4)]
    together(talk.start for talk in talks)
    together([talks[0].step, talks[1].start, talks[2].step, talks[3].start])  # two start over
    together([talks[0].end, talks[1].step, talks[2].step, talks[3].end])
    talks[0] = Conversation(client, model, np.random.default_rng(8))  # one new, one id used again
    together([talks[0].start, talks[1].step, talks[2].step, talks[3].start])
    together(talk.end for talk in talks)
    sizes = {batch.batch_size for batch in deployment.statistics(model).batch_stats}
    assert 4 in sizes, f"batches of {sizes}"


def test_a_start_whose_initial_state_fails_is_refused_alone(deployment):
    """A first INPUT of 4 and more is out of the table of the initial-state model only."""
    maker = graph(
        [node("Gather", "TABLE INPUT", "STATE_IN")],
        [("INPUT", "int64", [BATCH, 4])],
        [("STATE_IN", "int64", [BATCH, 4])],
        {"TABLE": np.array([1, 10, 100, 1000], np.int64)},
    )
    base = models.counter(
        "int64",
        initial={"STATE_IN": lambda fed: np.array([1, 10, 100, 1000])[fed["INPUT"]]},
        max_batch_size=4,
        oldest="preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 1000000",
    )
    model = deployment.serve(made_by(maker, "made_or_failed", base))
    client = deployment.connect()
    good, bad = {"INPUT": np.array([[0, 1, 2, 3]])}, {"INPUT": np.array([[0, 1, 2, 99]])}
    talks = [Conversation(client, model, np.random.default_rng(i)) for i in range(4)]
    together(lambda talk=talk: talk.start(good) for talk in talks[:3])

    came = together([lambda: outcome(lambda: talks[3].start(bad)), *(lambda t=talk: t.step(bad) for talk in talks[:3])])
    assert isinstance(came[0], InferenceServerException), came[0]
    assert "out of data bounds" in came[0].message()
    with pytest.raises(InferenceServerException) as unknown:
        client.step(model.name, talks[3].sequence_id, good)
    assert unknown.value.status() == "StatusCode.NOT_FOUND"
    deployment.settles("stateful_live_sequences", model, 3)

    # a restart that fails ends the old life; the others do not notice
    assert isinstance(outcome(lambda: talks[2].start(bad)), InferenceServerException)
    with pytest.raises(InferenceServerException):
        client.step(model.name, talks[2].sequence_id, good)
    talks[3].start(good)
    live = [talks[0], talks[1], talks[3]]
    together(talk.step for talk in live)
    together(talk.end for talk in live)
    deployment.settles("stateful_live_sequences", model, 0)


def test_a_start_whose_initial_state_has_other_dims_than_the_model_takes_is_refused(deployment):
    """Its length is the first chunk's, and the state has four columns: only a run tells."""
    maker = graph(
        [node("Identity", "INPUT", "STATE_IN")],
        [("INPUT", "fp32", [BATCH, "any"])],
        [("STATE_IN", "fp32", [BATCH, "any"])],
    )

    def build():
        return graph(
            [
                node("ReduceSum", "INPUT LAST", "SUM", keepdims=1),
                node("Add", "STATE_IN SUM", "STATE_OUT"),
                node("Identity", "STATE_OUT", "OUTPUT"),
            ],
            [("INPUT", "fp32", [BATCH, "any"]), ("STATE_IN", "fp32", [BATCH, 4])],
            [("OUTPUT", "fp32", [BATCH, 4]), ("STATE_OUT", "fp32", [BATCH, 4])],
            {"LAST": np.array([-1], np.int64)},
        )

    base = models.counter(
        build=build,
        inputs=(Tensor("INPUT", "fp32", (-1,), between=(-9, 9)),),
        initial={"STATE_IN": lambda fed: fed["INPUT"]},
    )
    model = deployment.serve(made_by(maker, "made_of_any_width", base))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(28))
    for width in (3, 5):
        with pytest.raises(InferenceServerException, match="STATE_IN"):
            talk.start({"INPUT": np.ones((1, width), F32)})
        with pytest.raises(InferenceServerException) as unknown:
            talk.client.step(model.name, talk.sequence_id, {"INPUT": np.ones((1, 4), F32)})
        assert unknown.value.status() == "StatusCode.NOT_FOUND"
    talk.start({"INPUT": np.ones((1, 4), F32)})
    talk.step()
    talk.end()


def test_a_warm_up_runs_on_initial_values_and_takes_nothing(deployment):
    base = models.counter(
        initial={"STATE_IN": twice},
        more="""model_warmup {
  name: "random" batch_size: 2 count: 3
  inputs { key: "INPUT" value: { data_type: TYPE_FP32 dims: [ 4 ] random_data: true } }
}""",
    )
    model = deployment.serve(made_by(doubled(), "made_warmed_up", base))
    deployment.settles("stateful_live_sequences", model, 0)
    deployment.settles("stateful_sequences_started_total", model, 0)
    sequences_come_and_go(deployment.connect(), model, seed=29)


@pytest.mark.host_and_device
def test_many_sequences_that_start_over_and_over_begin_rightly(deployment):
    base = models.counter("int64", initial={"STATE_IN": twice})
    model = deployment.serve(made_by(doubled(type="int64"), "made_busy", base))
    rng = np.random.default_rng(30)
    for _ in range(2):
        scripts = [script(model, rng, new_id(), lives=4) for _ in range(8)]
        windowed(deployment.connect("stream"), model, rng, scripts, window=8)


# ---- which one counts


def test_of_several_the_first_that_names_the_state_counts(deployment):
    """The initial-state model before `initial_state`, and that before `initial_states`."""

    def full(value):
        return np.full((1, 1), value, np.int64)

    names = ["BY_ALL", "BY_TWO", "BY_FILE", "BY_ONE", "BY_MODEL", "BY_NONE"]

    def build():
        return graph(
            [
                *(node("Add", f"{name}_IN INPUT", f"{name}_OUT") for name in names),
                node("Concat", " ".join(f"{name}_OUT" for name in names), "OUTPUT", axis=1),
            ],
            [("INPUT", "int64", [BATCH, 1]), *((f"{name}_IN", "int64", [BATCH, 1]) for name in names)],
            [
                ("OUTPUT", "int64", [BATCH, len(names)]),
                *((f"{name}_OUT", "int64", [BATCH, 1]) for name in names),
            ],
        )

    by_file = {"initial_dims": (1,), "initial_file": "file.bin"}
    base = Model(
        "initial_precedence",
        build,
        inputs=(Tensor("INPUT", "int64", (1,)),),
        outputs=(Tensor("OUTPUT", "int64", (len(names),)),),
        states=tuple((f"{name}_IN", f"{name}_OUT") for name in names),
        implicit=tuple(
            State(f"{name}_IN", f"{name}_OUT", "int64", (1,), **more)
            for name, more in (("BY_ALL", by_file), ("BY_TWO", by_file), ("BY_FILE", by_file), ("BY_NONE", {}))
        ),
        files=folder(file=full(200)),
        initial={
            "BY_ALL_IN": full(3000),
            "BY_MODEL_IN": full(4000),
            "BY_TWO_IN": full(200),
            "BY_FILE_IN": full(200),
            "BY_ONE_IN": full(10),
        },
        parameters={"initial_states": "BY_ALL_IN=1 BY_MODEL_IN=2 BY_TWO_IN=3 BY_ONE_IN=10"},
    )
    maker = constant(BY_ALL_IN=full(3000), BY_MODEL_IN=full(4000))
    model = deployment.serve(made_by(maker, base.name, base))
    sequences_come_and_go(deployment.connect(), model, seed=31)


def test_zero_data_too_comes_before_the_parameter(deployment):
    model = implicit(models.counter(), "initial_zero_first", initial_dims=(4,))
    model = deployment.serve(model.with_parameters(model.name, initial_states="STATE_IN=5"))
    sequences_come_and_go(deployment.connect(), model, seed=32)


# ---- what is refused: `initial_state`


def with_initial_state(name: str, dims=(4,), type: str = "fp32", **changes) -> Model:
    model = implicit(models.echo(type), f"refused_initial_{name}", initial_dims=dims, initial_file="row.bin")
    return model.variant(model.name, **changes)


def files(content: bytes) -> dict[str, bytes]:
    return {"initial_state/row.bin": content}


def strings(*texts: bytes) -> bytes:
    return raw(np.array(texts, np.object_))


FOUR = strings(b"a", b"bc", b"", b"def")

INITIAL_STATE = {
    "missing": (with_initial_state("missing"), ["row.bin"]),
    "empty": (with_initial_state("empty", files=files(b"")), ["row.bin", "0", "4"]),
    "too_small": (with_initial_state("too_small", files=files(bytes(12))), ["row.bin", "12", "4"]),
    "too_large": (with_initial_state("too_large", files=files(bytes(20))), ["row.bin", "20", "4"]),
    "one_byte_too_many": (with_initial_state("one_more", files=files(bytes(17))), ["row.bin", "17", "4"]),
    "dims": (with_initial_state("dims", dims=(5,), files=files(bytes(20))), ["STATE_IN", "5", "4"]),
    "rank": (with_initial_state("rank", dims=(2, 2), files=files(bytes(16))), ["STATE_IN"]),
    "open_dims": (with_initial_state("open", dims=(-1,), files=files(bytes(16))), ["STATE_IN"]),
    "too_few_strings": (
        with_initial_state("few_strings", type="string", files=files(strings(b"a", b"bc", b""))),
        ["row.bin", "4"],
    ),
    "too_many_strings": (
        with_initial_state("many_strings", type="string", files=files(FOUR + strings(b"x"))),
        ["row.bin", "4"],
    ),
    "a_string_that_ends_too_early": (
        with_initial_state("cut_string", type="string", files=files(FOUR[:-1])),
        ["row.bin"],
    ),
    "a_length_that_ends_too_early": (
        with_initial_state("cut_length", type="string", files=files(FOUR[: -len(b"def") - 2])),
        ["row.bin"],
    ),
    "a_huge_string": (
        with_initial_state("huge_string", type="string", files=files(b"\xff\xff\xff\xff" + FOUR)),
        ["row.bin"],
    ),
}


@pytest.mark.parametrize("case", INITIAL_STATE)
def test_an_initial_state_that_does_not_fit_is_refused(deployment, case):
    """Triton's core says some of it in its own words."""
    model, words = INITIAL_STATE[case]
    refused(deployment, model, *words)


@pytest.mark.parametrize("path", ["../config.pbtxt", "more/../../config.pbtxt", "/etc/hostname"])
def test_a_data_file_outside_of_its_folder_is_refused(deployment, path):
    model = implicit(models.echo(), "refused_initial_path", initial_dims=(4,), initial_file=path)

    def prepare(folder):
        (folder / "initial_state" / "more").mkdir(parents=True)

    refused(deployment, model, path, prepare=prepare)


def test_an_initial_state_of_another_type_is_refused(deployment):
    other = 'initial_state { name: "other" data_type: TYPE_INT32 dims: [ 4 ] zero_data: true }'
    refused(deployment, implicit(models.echo(), "refused_initial_type", more=other), "STATE_IN")


# ---- what is refused: `initial_states`


VECTOR = {"row.bin": bytes(16), "long.bin": bytes(20), "short.bin": bytes(3)}

# every error names the state, and says where its value came from
INITIAL_STATES = {
    "unknown_state": (models.echo(), "NOWHERE=1", ["NOWHERE"]),
    "request_input": (models.echo(), "INPUT=1", ["INPUT"]),
    "state_output": (models.echo(), "STATE_OUT=1", ["STATE_OUT"]),
    "no_value": (models.echo(), "STATE_IN", ["STATE_IN"]),
    "empty_value": (models.echo(), "STATE_IN=", ["STATE_IN"]),
    "twice": (models.echo(), "STATE_IN=1 STATE_IN=2", ["STATE_IN"]),
    "no_number": (models.echo(), "STATE_IN=high", ["STATE_IN", "high"]),
    "no_number_in_a_list": (models.echo(), "STATE_IN=[1,2,high,4]", ["STATE_IN", "high"]),
    "fraction_for_an_integer": (models.echo("int32"), "STATE_IN=1.5", ["STATE_IN", "1.5", "INT32"]),
    "out_of_range": (models.echo("int8"), "STATE_IN=300", ["STATE_IN", "300", "INT8"]),
    "too_large_for_fp16": (models.echo("fp16"), "STATE_IN=70000", ["STATE_IN", "70000", "FP16", "65504"]),
    "too_large_for_fp32": (models.echo(), "STATE_IN=[0,1,2,-1e39]", ["STATE_IN", "-1e39", "FP32"]),
    "negative_for_unsigned": (models.echo("uint16"), "STATE_IN=-1", ["STATE_IN", "-1", "UINT16"]),
    "number_for_bool": (models.echo("bool"), "STATE_IN=2", ["STATE_IN", "2", "BOOL"]),
    "too_short": (models.echo(), "STATE_IN=[1,2,3]", ["STATE_IN", "4"]),
    "too_long": (models.echo(), "STATE_IN=[1,2,3,4,5]", ["STATE_IN", "4"]),
    "open_list": (models.echo(), "STATE_IN=[1,2,3,4", ["STATE_IN"]),
    "file_missing": (models.echo(), "STATE_IN=file:nowhere.bin", ["STATE_IN", "nowhere.bin"]),
    "file_without_name": (models.echo(), "STATE_IN=file:", ["STATE_IN"]),
    "file_outside": (models.echo(), "STATE_IN=file:../config.pbtxt", ["STATE_IN", "../config.pbtxt"]),
    "file_absolute": (models.echo(), "STATE_IN=file:/etc/hostname", ["STATE_IN", "/etc/hostname"]),
    "file_too_long": (models.echo(), "STATE_IN=file:long.bin", ["STATE_IN", "long.bin", "20", "4"]),
    "file_too_short": (models.echo(), "STATE_IN=file:short.bin", ["STATE_IN", "short.bin", "3", "4"]),
    "growing_value_that_says_no_length": (models.append(), "CACHE_IN=1.5", ["CACHE_IN", "1.5"]),
    "growing_list_not_of_whole_rows": (models.append(), "CACHE_IN=[1,2,3]", ["CACHE_IN", "3", "2"]),
    "growing_file_not_of_whole_rows": (
        models.append(),
        "CACHE_IN=file:long.bin",
        ["CACHE_IN", "long.bin", "20", "2"],
    ),
}


@pytest.mark.parametrize("case", INITIAL_STATES)
def test_a_bad_initial_value_is_refused_by_state_value_and_rule(deployment, case):
    base, said, words = INITIAL_STATES[case]
    model = base.with_parameters(f"refused_initial_states_{case}", initial_states=said)
    model = model.variant(model.name, files={f"initial_state/{name}": content for name, content in VECTOR.items()})
    if "file" not in case:
        words = ["initial_states", *words]
    refused(deployment, model, *words)


def a_pipe(path):
    os.mkfifo(path)


def a_link_to_a_pipe(path):
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def a_link_to_a_device(path):
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("source", ["data_file", "initial_states"])
@pytest.mark.parametrize("make", [a_pipe, a_link_to_a_pipe, a_link_to_a_device])
def test_an_initial_state_file_that_need_not_end_is_refused(deployment, make, source):
    name = f"refused_{make.__name__}_{source}"
    if source == "data_file":
        model = implicit(models.echo(), name, initial_dims=(4,), initial_file="endless")
    else:
        model = models.echo().with_parameters(name, initial_states="STATE_IN=file:endless")

    def prepare(folder):
        (folder / "initial_state").mkdir()
        make(folder / "initial_state" / "endless")

    refused(deployment, model, "STATE_IN", "endless", "regular file", prepare=prepare)


# ---- what is refused: `initial_state_model`


def taking(type: str = "fp32", name: str = "INPUT", shape=(BATCH, 4), made=(BATCH, 4)):
    """Makes STATE_IN of an input of this name, type and shape."""
    return graph(
        [node("Cast", name, "STATE_IN", to=TYPES["fp32"][1])],
        [(name, type, list(shape))],
        [("STATE_IN", "fp32", list(made))],
    )


def five_columns():
    """Does not say its shape, and has one column too many."""
    return graph(
        [node("Identity", "FIVE", "STATE_IN")],
        [],
        [("STATE_IN", "fp32", [None, None])],
        {"FIVE": np.ones((1, 5), F32)},
    )


MAKERS = {
    "no_state": (constant(EXTRA=np.ones((1, 4), F32)), ["EXTRA"]),
    "no_state_beside_one": (
        constant(STATE_IN=np.ones((1, 4), F32), EXTRA=np.ones((1, 4), F32)),
        ["EXTRA"],
    ),
    "the_states_output": (constant(STATE_OUT=np.ones((1, 4), F32)), ["STATE_OUT"]),
    "type": (constant(STATE_IN=np.ones((1, 4), np.int32)), ["STATE_IN", "INT32", "FP32"]),
    "dims": (constant(STATE_IN=np.ones((1, 5), F32)), ["STATE_IN", "5", "4"]),
    "dims_that_only_a_run_tells": (five_columns(), ["STATE_IN", "5", "4"]),
    "two_rows": (constant(STATE_IN=np.ones((2, 4), F32)), ["STATE_IN", "2, 4"]),
    "rank": (constant(STATE_IN=np.ones((1, 4, 1), F32)), ["STATE_IN", "1, 4, 1"]),
    "input_of_nobody": (taking(name="SPEAKER"), ["SPEAKER"]),
    "the_state_as_input": (
        graph(
            [node("Neg", "STATE_OUT", "STATE_IN")],
            [("STATE_OUT", "fp32", [BATCH, 4])],
            [("STATE_IN", "fp32", [BATCH, 4])],
        ),
        ["STATE_OUT"],
    ),
    "input_type": (taking(type="int32"), ["INPUT", "INT32", "FP32"]),
    "input_dims": (taking(shape=(BATCH, 5), made=(BATCH, None)), ["INPUT", "5", "4"]),
    "a_run_that_fails": (
        graph(
            [node("Gather", "TABLE INDEX", "STATE_IN", axis=1)],
            [],
            [("STATE_IN", "fp32", [1, 4])],
            {"TABLE": np.ones((1, 2), F32), "INDEX": np.array([0, 1, 2, 3], np.int64)},
        ),
        ["start.onnx"],
    ),
}


@pytest.mark.parametrize("case", MAKERS)
def test_an_initial_state_model_that_does_not_fit_is_refused(deployment, case):
    maker, words = MAKERS[case]
    refused(deployment, made_by(maker, f"refused_made_{case}", models.counter()), *words)


@pytest.mark.parametrize("file_name", ["nowhere.onnx", "../1/model.onnx", "/etc/hostname"])
def test_an_initial_state_model_that_is_not_in_the_version_folder_is_refused(deployment, file_name):
    model = models.counter().with_parameters("refused_made_nowhere", initial_state_model=file_name)
    refused(deployment, model, "initial_state_model", file_name)


def test_an_initial_state_model_that_is_no_onnx_model_is_refused(deployment):
    model = models.counter(files={"1/start.onnx": b"\x08\x07 this is no model"})
    model = model.with_parameters("refused_made_of_garbage", initial_state_model="start.onnx")
    refused(deployment, model, "start.onnx")


def test_the_file_of_the_initial_states_is_not_taken_for_the_model(deployment):
    """Neither of the two is called model.onnx."""
    model = models.counter(initial={"STATE_IN": twice}, file_name="steps.onnx")
    model = deployment.serve(made_by(doubled(), "made_beside_another_name", model))
    interleave(deployment.connect(), model, np.random.default_rng(34), sequences=3)


def test_a_model_loads_once_its_initial_values_are_put_right(deployment):
    value = np.array([[1, 2, 3, 4]], F32)
    broken = models.counter().with_parameters("initial_put_right", initial_states="STATE_IN=[1,2,3]")
    refused(deployment, broken, "STATE_IN")
    right = broken.with_parameters(broken.name, initial_states="STATE_IN=[1,2,3,4]")
    right = deployment.serve(right.variant(right.name, initial={"STATE_IN": value}))
    interleave(deployment.connect(), right, np.random.default_rng(35), sequences=2)
