"""Models whose dimensions don't say which is the batch, and tensors that have none: served rightly, or asked about."""

import dataclasses
import re
import subprocess

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness.clients import new_id
from harness.conversations import Conversation, some_at_once, talk
from harness.graphs import graph, node
from harness.logs import log_of_load, warnings_of_load
from harness.model import Model, Tensor, parameter
from harness.models.exports import Bare, Export
from harness.models.numbered import (
    COUNTER,
    DECODER_JOINT,
    DEEP_FILTER,
    GROWING,
    MIXED,
    ML_AGENTS,
    ML_AGENTS_CONSTANTS,
    WENET,
    fastconformer,
    numbered,
    served,
    with_constants,
)
from harness.own import own
from harness.refusals import refused
from support.paths import INSPECT

BACKEND = 'backend: "stateful"'


def line_to_write(text: str) -> str:
    """The dims of states that a message says are to be written. Advice for known models comes first."""
    *_, dims = re.findall(r"parameters \{ key: 'state_dims' value \{ string_value: '([^']*)' \} \}", text)
    return dims


def at_once(deployment, model, rounds: int = 4) -> None:
    """Several sequences that are ready at the same time."""
    talks = [Conversation(deployment.connect(), model, np.random.default_rng(seed)) for seed in range(4)]
    for of in talks:
        of.start()
    some_at_once(talks, np.random.default_rng(9), rounds)
    for of in talks:
        of.end()


# ---- numbers for names

CACHES = "cache_last_channel=[batch, 3, -1, 8] cache_last_time=[batch, 3, 8, -1]"


def test_a_state_with_two_numbered_dimensions_is_asked_for_with_the_line_to_write(deployment):
    text = deployment.load_error(fastconformer("axes_numbered.stateful"))
    assert "'cache_last_channel'" in text and "as -1 if it varies" in text
    assert line_to_write(text) == CACHES
    assert "the signature is that of NeMo's cache-aware FastConformer" in text and "=[batch, 3, 70, 8]" in text
    written = f"{BACKEND}\n{parameter('state_dims', CACHES.replace('-1, 8]', '7, 8]').replace('-1]', '5]'))}"
    model = fastconformer("axes_numbered_written", written=written)
    assert warnings_of_load(deployment, model) == []
    assert deployment.admin.get_model_config(model.name).config.max_batch_size == 64
    talk(deployment, model)
    at_once(deployment, model)


def test_a_start_that_fails_with_states_without_elements_names_them(deployment):
    model = fastconformer("axes_numbered_as_asked", written=f"{BACKEND}\n{parameter('state_dims', CACHES)}")
    deployment.serve(model)
    inputs = model.draw(np.random.default_rng(1))
    with pytest.raises(InferenceServerException, match=re.escape("'cache_last_channel' [1, 3, 0, 8], ")) as caught:
        deployment.connect().step(model.name, new_id(), inputs, start=True)
    assert "'state_dims'" in str(caught.value)


def test_stateful_inspect_asks_for_the_same_line(tmp_path):
    file = tmp_path / "model.onnx"
    file.write_bytes(fastconformer("inspected").build().SerializeToString())
    ran = subprocess.run([INSPECT, file], capture_output=True, text=True)
    assert ran.returncode != 0 and line_to_write(ran.stderr) == CACHES
    ran = subprocess.run([INSPECT, file, "-p", f"state_dims={CACHES}"], capture_output=True, text=True, check=True)
    assert f'key: "state_dims" value {{ string_value: "{CACHES}" }}' in ran.stdout
    assert re.search(r"cache_last_channel_next -> cache_last_channel +TYPE_FP32 +\[1, 3, \?, 8\] +0 ", ran.stderr)


def test_the_only_numbered_dimension_of_a_state_is_the_batch(deployment):
    model = numbered(served(DECODER_JOINT, "axes_numbered_rnnt.stateful"))
    [warning] = [text for text in warnings_of_load(deployment, model) if "which is the batch" in text]
    assert "max_batch_size: 64" in warning and line_to_write(warning) == "input_states_1=[1, -1, 6]"
    talk(deployment, model)
    at_once(deployment, model)
    written = f"{BACKEND}\nmax_batch_size: 64"
    confirmed = numbered(served(DECODER_JOINT, "axes_numbered_rnnt_confirmed", written=written))
    assert [text for text in warnings_of_load(deployment, confirmed) if "which is the batch" in text] == []


def test_without_a_batch_a_numbered_dimension_is_asked_for(deployment):
    dims = {"encoder_outputs": "-1, 8, -1", "targets": "-1, -1", "target_length": "-1"}
    kinds = {"encoder_outputs": "FP32", "targets": "INT32", "target_length": "INT32"}
    written = "\n".join(
        f'input {{ name: "{name}" data_type: TYPE_{kinds[name]} dims: [ {text} ] }}' for name, text in dims.items()
    )
    written = f"{BACKEND}\n{written}"
    model = numbered(served(DECODER_JOINT, "axes_numbered_unbatched", written=written))
    states = "input_states_1=[1, batch, 6] input_states_2=[1, batch, 6]"
    assert line_to_write(deployment.load_error(model)) == states
    inputs = tuple(dataclasses.replace(tensor, dims=(1, *tensor.dims)) for tensor in model.inputs)
    inputs = tuple(
        tensor if tensor.name != "target_length" else Tensor("target_length", "int32", (1,), (0, 9))
        for tensor in inputs
    )
    model = dataclasses.replace(
        model,
        name="axes_numbered_unbatched_written",
        written=f"{written}\n{parameter('state_dims', states)}",
        inputs=inputs,
        max_batch_size=0,
        in_front=(),
    )
    talk(deployment, model)


def test_a_state_that_starts_empty_along_a_numbered_dimension_is_warned_of(deployment):
    def grows(folder: str, **changes):
        model = served(GROWING, folder, **changes)

        def build():
            made = model.build()
            for value in [*made.graph.input, *made.graph.output]:
                for dim in value.type.tensor_type.shape.dim:
                    if dim.dim_param == "past_length":
                        dim.dim_param = f"{value.name}_dynamic_axes_2"
            return made

        return dataclasses.replace(model, build=build, lengths_at_start={"past_dynamic_axes_2": 0})

    [warning] = warnings_of_load(deployment, grows("axes_empty.stateful"))
    assert "'past' [1, 2, 0, 4]" in warning and line_to_write(warning) == "past=[batch, 2, -1, 4]"
    written = f"{BACKEND}\n{parameter('state_dims', 'past=[batch, 2, -1, 4]')}"
    model = grows("axes_empty_written", written=written)
    assert warnings_of_load(deployment, model) == []
    talk(deployment, model)


@pytest.mark.parametrize(
    ("name", "dims", "words"),
    [
        ("rank", "cache_last_channel=[batch, 7, 8]", ["state_dims", "'cache_last_channel'", "[-1, 7, 8]"]),
        ("length", "cache_last_channel=[batch, 4, 7, 8]", ["[-1, 4, 7, 8]", "[-1, 3, -1, 8]"]),
        ("fixed", "cache_last_channel=[7, batch, 7, 8]", ["[7, -1, 7, 8]", "'batch'"]),
        ("name", "cache_last=[batch]", ["state_dims", "'cache_last'", "cache_last_channel_len"]),
        ("word", "cache_last_channel=[B, 3, 7, 8]", ["state_dims", "'batch'"]),
        ("rows", "cache_last_channel=[1, 3, 7, 8]", ["max_rows_per_run", "'cache_last_channel'", "2"]),
    ],
)
def test_dims_that_do_not_fit_are_refused(deployment, name, dims, words):
    more = parameter("max_rows_per_run", "2") if name == "rows" else ""
    written = f"{BACKEND}\nmax_batch_size: 8\n{more}\n{parameter('state_dims', dims)}"
    refused(deployment, fastconformer(f"axes_refused_{name}", written=written), *words)


# ---- names that may be those of a length


def mixing(folder: str, dims: tuple, state: tuple, nodes: list, kept: tuple = (), **changes) -> Bare:
    """A model whose requests have [1, 4] and whose rows change each other's results, if they share a run."""

    def build():
        tensors = (
            [("x", "fp32", dims), ("s_in", "fp32", state)],
            [("y", "fp32", dims), ("s_out", "fp32", kept or state)],
        )
        weights = {"AXIS": np.array(0, np.int64), "HALF": np.array(0.5, np.float32)}
        return graph(nodes, *tensors, weights)

    inputs, outputs = (Tensor("x", "fp32", dims, (-8, 8)),), (Tensor("y", "fp32", dims),)
    states = (("s_in", "s_out"),)
    fields = {"inputs": inputs, "outputs": outputs, "states": states, "max_batch_size": 0, "file_name": "export.onnx"}
    return Bare(folder, build, **{**fields, **changes})


@pytest.mark.parametrize("name", ["T", "s77"])
def test_a_shared_name_that_may_be_a_length_makes_no_batch(deployment, name):
    nodes = [node("CumSum", "x AXIS", "sums"), node("Add", "sums s_in", "y"), node("Identity", "x", "s_out")]
    model = mixing(f"axes_shared_{name}.stateful", (name, 4), (name, 4), nodes)
    model = dataclasses.replace(model, inputs=(Tensor("x", "fp32", (1, 4), (-8, 8)),))
    [warning] = warnings_of_load(deployment, model)
    assert f"'{name}'" in warning and "max_batch_size: 64" in warning and line_to_write(warning) == "s_in=[batch, 4]"
    assert deployment.admin.get_model_config(model.name).config.max_batch_size == 0
    talk(deployment, model)
    at_once(deployment, model)


@pytest.mark.parametrize("written", [BACKEND, f"{BACKEND}\nmax_batch_size: 8"])
def test_two_shared_names_are_asked_about(deployment, written):
    nodes = [node("CumSum", "x AXIS", "sums"), node("Add", "sums s_in", "y"), node("Identity", "x", "s_out")]
    dims = ("seq", "bsz", 4)
    name = f"axes_two_shared_{len(written)}"
    text = deployment.load_error(mixing(name, dims, dims, nodes, written=written))
    assert line_to_write(text) == "s_in=[batch, -1, 4]"


@pytest.mark.parametrize("symbol", ["s_in_dynamic_axes_1", None])
def test_a_state_that_lacks_the_name_of_the_batch_has_runs_of_its_own(deployment, symbol):
    nodes = [
        node("ReduceMean", "s_in", "mean", axes=[1], keepdims=1),
        node("Add", "x mean", "y"),
        node("ReduceMean", "x", "new", axes=[0, 1], keepdims=1),
        node("Mul", "s_in HALF", "half"),
        node("Add", "half new", "s_out"),
    ]
    requests = Tensor("x", "fp32", (-1, 4), (-8, 8))
    model = mixing(
        f"axes_nameless_{symbol is None}.stateful",
        ("batch", "time", 4),
        (1, symbol, 4),
        nodes,
        inputs=(requests,),
        outputs=(Tensor("y", "fp32", (-1, 4)),),
        max_batch_size=1,
        lengths_at_start={str(symbol): 1},
    )
    [warning] = warnings_of_load(deployment, model)
    assert "'s_in=[1, batch, 4]'" in warning and "'s_in=[1, -1, 4]'" in warning
    assert deployment.admin.get_model_config(model.name).config.max_batch_size == 1
    talk(deployment, model)
    at_once(deployment, model)


# ---- outputs without a batch dimension


def ml_agents(folder: str, **changes):
    return with_constants(served(ML_AGENTS, folder, **changes), ML_AGENTS_CONSTANTS)


def test_constant_outputs_do_not_switch_batches_off(deployment):
    model = ml_agents("axes_constants.stateful")
    assert "the same for each row" in log_of_load(deployment, model)
    config = deployment.admin.get_model_config(model.name).config
    assert config.max_batch_size == 64
    assert {output.name: list(output.dims) for output in config.output}["discrete_action_output_shape"] == [1, 2]
    talk(deployment, model)
    at_once(deployment, model)


def test_each_row_of_a_request_has_the_constant_outputs(deployment):
    model = ml_agents("axes_constants_rows.stateful")
    deployment.serve(model)
    ids = np.array([[new_id()], [new_id()], [new_id()]], np.uint64)
    inputs = {
        "obs_0": np.ones((3, 6), np.float32),
        "action_masks": np.ones((3, 3), np.float32),
        "sequence_id": ids,
        "sequence_control_input": np.array([[1], [1], [1]], np.uint32),
    }
    answer = deployment.connect().step(model.name, 0, inputs)
    assert answer["version_number"].tolist() == [[3], [3], [3]]
    assert answer["discrete_action_output_shape"].tolist() == [[[2, 5]]] * 3


def test_an_end_that_does_not_run_has_no_row_of_the_constant_outputs(deployment):
    model = ml_agents("axes_constants_end", written=f"{BACKEND}\n{parameter('infer_end_requests', '0')}")
    deployment.serve(model)
    client, sequence = deployment.connect(), new_id()
    inputs = {"obs_0": np.ones((1, 6), np.float32), "action_masks": np.ones((1, 3), np.float32)}
    assert client.step(model.name, sequence, inputs, start=True)["version_number"].shape == (1, 1)
    assert client.step(model.name, sequence, inputs, end=True)["version_number"].shape == (0, 1)


def test_a_fixed_output_that_depends_on_inputs_switches_batches_off(deployment):
    export = Export({"x": ("batch", 4), "s_in": ("batch", 8)}, {"y": (1, 2), "s_out": ("batch", 8)}, {"s_in": "s_out"})
    model = served(export, "axes_not_constant.stateful")
    deployment.serve(model)
    assert deployment.admin.get_model_config(model.name).config.max_batch_size == 0
    written = f'{BACKEND}\nmax_batch_size: 8\noutput {{ name: "y" data_type: TYPE_FP32 dims: [ 1, 2 ] }}'
    refused(deployment, served(export, "axes_not_constant_written", written=written), "'y'", "[1, 2]")


def test_a_scalar_that_depends_on_inputs_switches_batches_off(deployment):
    export = Export({"x": ("batch", 4), "s_in": ("batch", 8)}, {"y": (), "s_out": ("batch", 8)}, {"s_in": "s_out"})
    model = served(export, "axes_scalar_output.stateful", max_batch_size=0)
    deployment.serve(model)
    assert deployment.admin.get_model_config(model.name).config.max_batch_size == 0


def test_an_output_that_begins_with_another_dimension_of_requests_switches_batches_off(deployment):
    """If the steps were taken for the rows, two sequences of two steps in a run would each get one step of both."""

    def build():
        nodes = [
            node("Add", "x s_in", "sums"),
            node("Transpose", "sums", "steps", perm=[1, 0, 2]),
            node("Flatten", "steps", "y", axis=1),
            node("ReduceMax", "sums", "s_out", axes=[1]),
        ]
        x, state = ("x", "fp32", ["N", "T", 4]), ["N", 1, 4]
        return graph(nodes, [x, ("s_in", "fp32", state)], [("y", "fp32", ["T", None]), ("s_out", "fp32", state)])

    model = Bare(
        "axes_merged.stateful",
        build,
        inputs=(Tensor("x", "fp32", (1, -1, 4), (-8, 8)),),
        outputs=(Tensor("y", "fp32", (-1, 4)),),
        states=(("s_in", "s_out"),),
        max_batch_size=0,
        file_name="export.onnx",
    )
    deployment.serve(model)
    assert deployment.admin.get_model_config(model.name).config.max_batch_size == 0
    talk(deployment, model)
    at_once(deployment, model)


# ---- scalars


@pytest.mark.parametrize(("name", "export"), [("deep_filter", DEEP_FILTER), ("wenet", WENET), ("counter", COUNTER)])
def test_scalars_are_carried_as_one_element_where_there_is_no_batch(deployment, name, export):
    model = served(export, f"axes_scalars_{name}.stateful")
    log = log_of_load(deployment, model)
    assert ("sent as [1]" in log) == (name != "counter")
    assert deployment.admin.get_model_config(model.name).config.max_batch_size == 0
    talk(deployment, model)


def test_scalars_can_be_constants(deployment):
    written = f"{BACKEND}\n{parameter('constant_inputs', 'atten_lim_db=100')}"
    model = served(DEEP_FILTER, "axes_scalars_constant", written=written)
    inputs = tuple(tensor for tensor in model.inputs if tensor.name != "atten_lim_db")
    talk(deployment, dataclasses.replace(model, inputs=inputs, constants={"atten_lim_db": 100}))


def test_core_refuses_a_reshape_to_a_scalar_where_there_is_no_batch(deployment):
    listed = (
        'input [ { name: "input_frame" data_type: TYPE_FP32 dims: [ 480 ] },'
        ' { name: "atten_lim_db" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } } ]'
    )
    model = served(DEEP_FILTER, "axes_scalars_reshaped", written=f"{BACKEND}\n{listed}")
    refused(deployment, model, "'atten_lim_db' cannot have empty reshape", "scalar tensors are not supported")


# ---- states without a batch dimension


@pytest.mark.parametrize("scheduling", ["", "sequence_batching { oldest { } }"])
def test_a_state_without_a_batch_dimension_has_runs_of_its_own(deployment, scheduling):
    name = f"axes_mixed_{'oldest' if scheduling else 'own'}"
    dims = parameter("state_dims", "att_cache=[2, 3, -1, 4]")
    outputs = 'output [ { name: "output" data_type: TYPE_FP32 dims: [ 1, 8 ] },'
    outputs += ' { name: "r_att_cache" data_type: TYPE_FP32 dims: [ 2, 3, -1, 4 ] } ]'
    model = served(MIXED, name, written=f"{BACKEND}\nmax_batch_size: 8\n{dims}\n{scheduling}\n{outputs}")
    model = dataclasses.replace(
        model,
        lengths_at_start={"T_CACHE": 0},
        outputs=(*model.outputs, Tensor("r_att_cache", "fp32", (2, 3, -1, 4))),
        in_front=("r_att_cache",),
    )
    talk(deployment, model)
    at_once(deployment, model)


def test_a_batch_with_another_name_than_that_of_requests_is_refused(deployment):
    """The caches of several clients would be one long cache."""
    model = served(MIXED, "axes_other_name", written=f"{BACKEND}\nmax_batch_size: 8")
    dims = ["att_cache=[2, 3, batch, 4]", "att_cache=[2, 3, -1, 4]"]
    refused(deployment, model, "'att_cache'", "'T_CACHE'", "'chunk'", "'batch'", *dims)
    written = f"{BACKEND}\nmax_batch_size: 8\n{parameter('state_dims', dims[1])}"
    talk(deployment, served(MIXED, "axes_other_name_varies", written=written, lengths_at_start={"T_CACHE": 0}))


def test_the_batch_of_a_model_with_such_a_state_is_one(deployment):
    dims = parameter("state_dims", "att_cache=[2, 3, -1, 4]")
    model = served(MIXED, "axes_mixed_filled", written=f"{BACKEND}\n{dims}", lengths_at_start={"T_CACHE": 0})
    deployment.serve(model)
    assert deployment.admin.get_model_config(model.name).config.max_batch_size == 1
    talk(deployment, model)


def test_an_open_dimension_with_a_name_of_its_own_varies_where_the_batch_is_one(deployment):
    export = Export(
        {"chunk": (1, "T", 80), "att_cache": (2, 4, "T_CACHE", 8)},
        {"output": (1, "T", 80), "r_att_cache": (2, 4, "T_CACHE", 8)},
        {"att_cache": "r_att_cache"},
        batch=None,
    )
    refused(
        deployment,
        served(export, "axes_batch_of_one_filled", written=f"{BACKEND}\nmax_batch_size: 1"),
        *["max_batch_size is 1", "'output'", "[1, -1, 80]", "'max_batch_size: 0'"],
    )
    listed = "\n".join(
        f'{side} {{ name: "{name}" data_type: TYPE_FP32 dims: [ -1, 80 ] }}'
        for side, name in (("input", "chunk"), ("output", "output"))
    )
    written = f"{BACKEND}\nmax_batch_size: 1\n{listed}"
    model = served(export, "axes_batch_of_one", written=written, max_batch_size=1, lengths_at_start={"T_CACHE": 0})
    talk(deployment, dataclasses.replace(model, inputs=(Tensor("chunk", "fp32", (-1, 80), (-8, 8)),)))


# ---- the batch where a node has its steps


def takes_rows_for_steps(inner: str, **changes) -> Model:
    """A recurrence along the first axis of `X`, `[?, ?, 4]`, where `max_batch_size` puts the batch."""
    rng = np.random.default_rng(8)
    shapes = {"W": (1, 15, 4), "R": (1, 15, 5), "M": (4, 4)}
    weights = {key: rng.normal(scale=0.3, size=shape).astype(np.float32) for key, shape in shapes.items()}

    def build():
        directions = 2 if inner == "bidirectional" else 1
        source = {"behind": "moved"}.get(inner, "X")
        more = {"direction": "bidirectional"} if directions == 2 else {}
        both = {key: np.concatenate([weights[key]] * directions) for key in ("W", "R")}
        nodes = [
            node("MatMul", "X M", "moved"),
            node("GRU", f"{source} W R - - H_IN", "Y H_OUT", hidden_size=5, name="r", **more),
        ]
        state = [directions, None, 5]
        return graph(
            nodes,
            [("X", "fp32", [None, None, 4]), ("H_IN", "fp32", state)],
            [("Y", "fp32", [None, directions, None, 5]), ("H_OUT", "fp32", state)],
            both | {"M": weights["M"]},
        )

    return Model(
        name=f"rows_for_steps_{inner}_{new_id()}",
        build=build,
        inputs=(Tensor("X", "fp32", (1, 4)),),
        outputs=(Tensor("Y", "fp32", (1, 1, 5)),),
        states=(("H_IN", "H_OUT"),),
        tolerance=1e-6,
        **changes,
    )


@pytest.mark.parametrize("inner", ["straight", "behind", "bidirectional"])
def test_a_recurrence_along_the_batch_is_refused(deployment, inner):
    """Sequences that share a run would be the steps of one another."""
    words = ("GRU 'r'", "X@0", "batch_first", "max_rows_per_run")
    model = takes_rows_for_steps(inner)
    model = model.variant(model.name, outputs=(Tensor("Y", "fp32", (2, 1, 5)),)) if inner == "bidirectional" else model
    refused(deployment, model, *words)
    refused(deployment, own(model.variant(f"{model.name}_own")), *words)


def test_a_recurrence_along_the_batch_is_right_one_row_at_a_time(deployment):
    model = deployment.serve(takes_rows_for_steps("straight", parameters={"max_rows_per_run": "1"}))
    at_once(deployment, model)


def test_a_model_with_nothing_but_a_recurrence_along_the_batch_is_refused(deployment):
    """The batch is then the first open dimension, because no dimension has a name."""
    bare = takes_rows_for_steps("straight")
    model = bare.variant(bare.name, inputs=(), outputs=(), max_batch_size=0, scheduling="")
    refused(deployment, model, "GRU 'r'", "x@0", "'time' and 'batch'")


# ---- the batch where the dims have a length, and the steps where they have the batch


def smoothed(folder: str, names: tuple, x_dims: str, *, batch_at: int = 0, own: tuple = (), more: str = "") -> Bare:
    """The mean of a request's steps goes into the state, `[rows, 8]`: rows that are taken for steps change each other.

    `names` are those of the first two dimensions of `x`, and `batch_at` says which of them are the rows.
    """
    steps_at = 1 - batch_at
    state = (*own, 8) if own else (names[batch_at], 8)

    def build():
        nodes = [
            node("ReduceMean", "x", "mean", axes=[steps_at], keepdims=0),
            node("Mul", "s_in HALF", "half"),
            node("Add", "half mean", "s_out"),
            node("Unsqueeze", "s_out STEPS", "spread"),
            node("Add", "x spread", "y"),
        ]
        weights = {"HALF": np.array(0.5, np.float32), "STEPS": np.array([steps_at], np.int64)}
        x, s = (*names, 8), ("s_in", "fp32", state)
        return graph(nodes, [("x", "fp32", x), s], [("y", "fp32", x), ("s_out", "fp32", state)], weights)

    listed = f"data_type: TYPE_FP32 dims: {x_dims}"
    tensors = f'input {{ name: "x" {listed} }}\noutput {{ name: "y" {listed} }}'
    dims = tuple(int(dim) for dim in x_dims.strip("[] ").split(","))
    inside = len(dims) == 3
    return Bare(
        folder,
        build,
        inputs=(Tensor("x", "fp32", dims, (-8, 8), batch_inside=inside),),
        outputs=(Tensor("y", "fp32", dims, batch_inside=inside),),
        states=(("s_in", "s_out"),),
        max_batch_size=8,
        written=f"{BACKEND}\nmax_batch_size: 8\n{more}\n{tensors}\n{parameter('state_pairs', '<<<s_in, s_out>>>')}",
    )


ROWS_AND_STEPS = {
    "batch_time": ("batch", "time"),
    "b_t": ("B", "T"),
    "n_frames": ("N", "frames"),
    "numbered": ("s77", "s27"),
    "unnamed": (None, None),
}


@pytest.mark.parametrize("more", ["", "sequence_batching { oldest { } }"])
@pytest.mark.parametrize("kind", ROWS_AND_STEPS)
def test_dims_that_contain_the_batch_are_refused(deployment, kind, more):
    """The steps would be taken for the batch, so the steps of several clients would make the state of each."""
    names = ROWS_AND_STEPS[kind]
    name = f"axes_contained_{kind}_{len(more)}"
    model = smoothed(name, names, "[ 1, -1, 8 ]", more=more)
    words = ["'x'", "dims: [ -1, 8 ]", "max_rows_per_run"]
    refused(deployment, model, *words, *(f"'{named}'" for named in names if named))
    advised = smoothed(f"{name}_advised", names, "[ -1, 8 ]", more=more)
    talk(deployment, advised)
    at_once(deployment, advised)


@pytest.mark.parametrize("kind", ["batch_time", "numbered"])
def test_an_output_whose_dims_contain_the_batch_is_refused(deployment, kind):
    """The rows of its answers would be the steps of all rows."""
    model = smoothed(f"axes_contained_output_{kind}", ROWS_AND_STEPS[kind], "[ -1, 8 ]")
    inputs, outputs = model.written.split("output {")
    model = dataclasses.replace(model, written=f"{inputs}output {{{outputs.replace('[ -1, 8 ]', '[ 1, -1, 8 ]')}")
    refused(deployment, model, "output 'y'", *(f"'{name}'" for name in ROWS_AND_STEPS[kind]), "dims: [ -1, 8 ]")


def test_dims_that_contain_the_batch_are_right_one_row_at_a_time(deployment):
    more = parameter("max_rows_per_run", "1")
    model = smoothed("axes_contained_alone", ("batch", "time"), "[ 1, -1, 8 ]", more=more)
    deployment.serve(model)
    at_once(deployment, model)


@pytest.mark.parametrize("kind", ROWS_AND_STEPS)
@pytest.mark.parametrize("steps", [1, 4])
def test_dims_that_fix_the_steps_and_mark_the_batch_behind_them_are_taken(deployment, kind, steps):
    """`[time, batch, 8]`, as stateful_backend's users write it."""
    rows, steps_name = ROWS_AND_STEPS[kind]
    model = smoothed(f"axes_steps_first_{kind}_{steps}", (steps_name, rows), f"[ {steps}, -1, 8 ]", batch_at=1)
    talk(deployment, model)
    at_once(deployment, model)


@pytest.mark.parametrize("names", [("time", "batch"), ("frames", "N")])
def test_dims_that_leave_out_the_steps_are_refused(deployment, names):
    model = smoothed(f"axes_left_out_{names[0]}", names, "[ -1, 8 ]", batch_at=1)
    refused(deployment, model, "'x'", "'s_in'", *(f"'{name}'" for name in names), "dims: [ -1, -1, 8 ]")


@pytest.mark.parametrize("of_state", ["B", "unk__7", "rows", None])
def test_another_name_for_the_batch_of_a_state_is_no_reason_to_refuse(deployment, of_state):
    more = parameter("state_dims", "s_in=[batch, 8]") if of_state == "rows" else ""
    model = smoothed(f"axes_named_{of_state}", ("batch", "time"), "[ -1, 8 ]", own=(of_state,), more=more)
    talk(deployment, model)
    at_once(deployment, model)
