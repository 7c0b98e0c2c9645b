"""Graphs that the backend joins when it loads them, from the folder of a version."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.external_data_helper import convert_model_to_external_data
from tritonclient.utils import InferenceServerException

from harness.clients import new_id
from harness.conversations import together
from harness.graphs import graph, node
from harness.logs import log_since, messages
from harness.recognisers import FRAMES, RECOGNISERS, TOKENS, assert_found, encoder, written
from harness.refusals import said
from support.paths import INSPECT

#: Sequences of a test, and chunks of each.
SEQUENCES, CHUNKS = 32, 32


def config(**parameters: str) -> str:
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    return "\n".join(['backend: "stateful"', "instance_group [ { kind: KIND_CPU } ]", *lines])


def of_recogniser(kind: str, tokens: str = "") -> dict[str, str]:
    """The parameters that join the graphs of a recogniser."""
    plain, graphs, wires = RECOGNISERS[kind]
    parameters = {"join": " ".join(f"{name}.onnx" for name in graphs), "search": plain.search + tokens}
    return parameters | ({"wires": wires} if wires else {})


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def load(deployment, name: str, folder: Path, **parameters: str) -> str:
    """Loads the graphs of the folder, and checks that it is as it was. Answers what the backend says of the load."""
    model = Path(deployment.repository) / name
    shutil.copytree(folder, model / "1")
    (model / "config.pbtxt").write_text(config(**parameters))
    before = contents(model)
    deployment.admin.load_model(name)
    assert contents(model) == before
    return "\n".join(messages(log_since(deployment, name)))


def load_error(deployment, folder: Path, **parameters: str) -> str:
    name = f"refused_{new_id()}"
    with pytest.raises(InferenceServerException) as refused:
        load(deployment, name, folder, **parameters)
    shutil.rmtree(Path(deployment.repository) / name)
    return refused.value.message()


@pytest.mark.parametrize("kind", RECOGNISERS)
def test_a_thousand_chunks_of_sequences_that_share_runs_have_the_tokens_of_a_plain_loop(deployment, kind, tmp_path):
    files = written(kind, tmp_path)
    sessions = [onnxruntime.InferenceSession(file) for file in files]
    pieces = [f"▁{number}" for number in range(TOKENS)]
    (tmp_path / "tokens.txt").write_text("".join(f"{piece} {number}\n" for number, piece in enumerate(pieces)))
    name = f"joined_at_load_{kind}"
    log = load(deployment, name, tmp_path, **of_recogniser(kind, " tokens=tokens.txt"))
    assert said("were joined to one", log) and said("the joined model was compared with its graphs", log), log
    assert said("5 chunks of 3 rows", log), log
    assert deployment.admin.get_model_config(name).config.max_batch_size > 1
    clients = [deployment.connect() for _ in range(SEQUENCES)]
    rng = np.random.default_rng(7)
    # They start and end at different times.
    talks = [(new_id(), RECOGNISERS[kind][0](sessions), start) for start in range(SEQUENCES)]
    found = 0
    for step in range(SEQUENCES + CHUNKS - 1):
        tasks, expected = [], []
        for client, (sequence_id, talk, start) in zip(clients, talks, strict=True):
            if start <= step < start + CHUNKS:
                x = rng.normal(size=(1, FRAMES, 4)).astype(np.float32)
                how = {"start": step == start, "end": step == start + CHUNKS - 1}
                tasks.append(partial(client.step, name, sequence_id, {"encoder.x": x}, **how))
                expected.append(talk.tokens(x))
        for answer, tokens in zip(together(tasks), expected, strict=True):
            assert_found(answer, 0, tokens)
            texts = [piece.decode() for piece in answer["pieces"][0]]
            assert texts == [pieces[token] for token, _ in tokens] + [""] * (len(texts) - len(tokens))
            found += len(tokens)
    assert found > 300


def test_the_states_of_a_joined_model_may_start_where_the_configuration_says(deployment, tmp_path):
    sessions = [onnxruntime.InferenceSession(file) for file in written("stateless", tmp_path)]
    parameters = of_recogniser("stateless")
    load(deployment, "joined_initial", tmp_path, initial_states="search.last=[3, 4] encoder.cache=0.5", **parameters)
    talk = RECOGNISERS["stateless"][0](sessions)
    talk.last, talk.cache = [3, 4], np.full_like(talk.cache, 0.5)
    client, sequence_id, rng = deployment.connect(), new_id(), np.random.default_rng(8)
    for step in range(8):
        x = rng.normal(size=(1, FRAMES, 4)).astype(np.float32)
        answer = client.step("joined_initial", sequence_id, {"encoder.x": x}, start=step == 0, end=step == 7)
        assert_found(answer, 0, talk.tokens(x))


def test_outputs_that_are_listed_stay(deployment, tmp_path):
    sessions = [onnxruntime.InferenceSession(file) for file in written("ctc", tmp_path)]
    folder = Path(deployment.repository) / "joined_outputs"
    shutil.copytree(tmp_path, folder / "1")
    listed = (
        'output { name: "tokens" data_type: TYPE_INT64 dims: [ -1 ] }\n'
        f'output {{ name: "encoder.hidden" data_type: TYPE_FP32 dims: [ {FRAMES}, 8 ] }}\n'
    )
    (folder / "config.pbtxt").write_text(config(**of_recogniser("ctc")) + "\n" + listed)
    deployment.admin.load_model("joined_outputs")
    x = np.random.default_rng(9).normal(size=(1, FRAMES, 4)).astype(np.float32)
    answer = deployment.connect().step("joined_outputs", new_id(), {"encoder.x": x}, start=True, end=True)
    [hidden, _] = sessions[0].run(None, {"x": x, "cache": np.zeros((1, 1, 8), np.float32)})
    np.testing.assert_array_equal(answer["encoder.hidden"], hidden)
    assert "tokens" in answer and "frames" not in answer


def windowed() -> onnx.ModelProto:
    """The sum of a window of 4 frames."""
    nodes = [node("ReduceSum", "window axis", "sums", keepdims=0)]
    inputs = [("window", "fp32", ["N", 4, 8])]
    return graph(nodes, inputs, [("sums", "fp32", ["N", 8])], {"axis": np.array([1])})


def test_an_inner_input_keeps_the_end_of_what_it_got(deployment, tmp_path):
    nodes = [node("Tanh", "x", "frame")]
    onnx.save(graph(nodes, [("x", "fp32", ["N", 1, 8])], [("frame", "fp32", ["N", 1, 8])]), tmp_path / "front.onnx")
    onnx.save(windowed(), tmp_path / "window.onnx")
    log = load(
        deployment,
        "joined_context",
        tmp_path,
        join="front.onnx window.onnx",
        wires="<<<front.frame, window.window>>>",
        input_context="window.window=3@1",
        initial_states="window.window.context=1",
    )
    assert said("<<<window.window.context, window.window.context_next>>>", log) or said("window.window.context", log), (
        log
    )
    rng = np.random.default_rng(9)
    rows = [rng.normal(size=(9, 1, 1, 8)).astype(np.float32) for _ in range(4)]
    clients, ids = [deployment.connect() for _ in rows], [new_id() for _ in rows]
    for step in range(9):
        tasks = [
            partial(client.step, "joined_context", sequence, {"front.x": row[step]}, start=step == 0, end=step == 8)
            for client, sequence, row in zip(clients, ids, rows, strict=True)
        ]
        for answer, row in zip(together(tasks), rows, strict=True):
            frames = np.concatenate([np.ones((3, 8), np.float32), np.tanh(row[:, 0, 0])])
            np.testing.assert_allclose(answer["window.sums"][0], frames[step : step + 4].sum(0), rtol=1e-5, atol=1e-6)


def test_weights_in_files_of_their_own_are_joined_in(deployment, tmp_path):
    files = written("ctc", tmp_path)
    sessions = [onnxruntime.InferenceSession(file) for file in files]
    model = onnx.load(files[0])
    convert_model_to_external_data(model, location="encoder.weights", size_threshold=0)
    onnx.save(model, files[0])
    assert (tmp_path / "encoder.weights").is_file()
    load(deployment, "joined_weights", tmp_path, **of_recogniser("ctc"))
    talk, client, sequence_id = RECOGNISERS["ctc"][0](sessions), deployment.connect(), new_id()
    rng = np.random.default_rng(4)
    for step in range(8):
        x = rng.normal(size=(1, FRAMES, 4)).astype(np.float32)
        answer = client.step("joined_weights", sequence_id, {"encoder.x": x}, start=step == 0, end=step == 7)
        assert_found(answer, 0, talk.tokens(x))
    (tmp_path / "encoder.weights").unlink()
    error = load_error(deployment, tmp_path, **of_recogniser("ctc"))
    assert said("it has weights in the file 'encoder.weights', which isn't there", error), error


REFUSED = {
    "a file that isn't there": ({"join": "encoder.onnx none.onnx"}, "parameter 'join' names 'none.onnx'"),
    "a file outside": ({"join": "../encoder.onnx ctc.onnx"}, "parameter 'join' names '../encoder.onnx'"),
    "a file that is no graph": ({"join": "encoder.onnx text=broken.onnx"}, "graph 'text': it is no ONNX model"),
    "an option": ({"join": "fbank:kaldi bins=4 ctc.onnx"}, "fbank:kaldi has no option 'bins'"),
    "a name": ({"join": "encoder.onnx encoder.onnx"}, "two graphs have the name 'encoder'"),
    "a wire": (
        {"wires": "<<<encoder.q, ctc.hidden>>>"},
        "graph 'encoder' has no output 'q' (it has hidden, new_cache)",
    ),
    "wires": ({"wires": "q"}, "parameter 'wires' is 'q', but"),
    "a search": ({"search": "ctc"}, "parameter 'search' is 'ctc', but blank= is missing"),
    "a blank": ({"search": "ctc blank=12"}, "blank is 12, and the logits 'ctc.probs' have 12 tokens, from 0 to 11"),
    "tokens that aren't there": ({"search": "ctc blank=0 tokens=none.txt"}, "parameter 'search' names 'none.txt'"),
    "tokens": ({"search": "ctc blank=0 tokens=wrong.txt"}, "tokens=wrong.txt: line 2, 'b': a piece and its number"),
    "a state": ({"state_pairs": "<<<encoder.q, encoder.new_cache>>>"}, "encoder"),
    "a conversion": ({"open_batch": "true"}, "parameter 'open_batch' is 'true', but graphs are joined as they are"),
    "the new elements of a context": (
        {"input_context": "ctc.hidden=2+6@1"},
        "parameter 'input_context' names 'ctc.hidden'",
    ),
    "a context that repeats": ({"input_context": "ctc.hidden=2@1:repeat"}, "':zeros' or ':whole' is expected"),
    "windows inside": (
        {"input_windows": "ctc.hidden=2@1"},
        "parameter 'input_windows' names 'ctc.hidden', which a wire leads to: windows are cut from inputs of requests",
    ),
    "a generated value inside": (
        {"generated_inputs": "ctc.hidden=steps"},
        "parameter 'generated_inputs' names 'ctc.hidden', which a wire leads to: it takes what the wire brings",
    ),
    "a constant inside": (
        {"constant_inputs": "ctc.hidden=1"},
        "parameter 'constant_inputs' names 'ctc.hidden', which a wire leads to: it takes what the wire brings",
    ),
    "a count of elements inside": (
        {"generated_inputs": "encoder.x=elements(ctc.hidden)"},
        "parameter 'generated_inputs' names 'ctc.hidden', which a wire leads to: only elements that requests carry are",
    ),
    "a state across graphs": (
        {"state_pairs": "<<<encoder.cache, ctc.probs>>>"},
        "the state <<<encoder.cache, ctc.probs>>> has its ends in two graphs: write it as a wire back",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_joined_is_refused_by_name(deployment, case, tmp_path):
    written("ctc", tmp_path)
    (tmp_path / "broken.onnx").write_bytes(b"no graph")
    (tmp_path / "wrong.txt").write_text("a 0\nb\n")
    parameters, expected = REFUSED[case]
    error = load_error(deployment, tmp_path, **{**of_recogniser("ctc"), **parameters})
    assert expected in error, error


@pytest.mark.repetition
def test_a_graph_with_a_loop_that_never_ends_is_refused_by_name(deployment, tmp_path):
    """It takes half a minute, after which the comparison ends the run."""
    counted = onnx.helper.make_graph(
        [node("Identity", "goes_on", "goes_on_still"), node("Add", "count one", "counted")],
        "counting",
        [
            onnx.helper.make_tensor_value_info("turn", onnx.TensorProto.INT64, []),
            onnx.helper.make_tensor_value_info("goes_on", onnx.TensorProto.BOOL, []),
            onnx.helper.make_tensor_value_info("count", onnx.TensorProto.FLOAT, []),
        ],
        [
            onnx.helper.make_tensor_value_info("goes_on_still", onnx.TensorProto.BOOL, []),
            onnx.helper.make_tensor_value_info("counted", onnx.TensorProto.FLOAT, []),
        ],
    )
    nodes = [node("Loop", "- on zero", "end", body=counted), node("Add", "hidden end", "probs")]
    shape = ["N", FRAMES, 8]
    weights = {"on": np.array(True), "zero": np.float32(0), "one": np.float32(1)}
    written("ctc", tmp_path)
    onnx.save(graph(nodes, [("hidden", "fp32", shape)], [("probs", "fp32", shape)], weights), tmp_path / "ctc.onnx")
    error = load_error(deployment, tmp_path, **of_recogniser("ctc"))
    assert said("graph 'ctc' takes longer than 30 s for a run on random data", error), error


def test_a_graph_may_be_a_link(deployment, tmp_path):
    """As model.onnx of other models may be."""
    (tmp_path / "files").mkdir()
    (tmp_path / "version").mkdir()
    for file in written("ctc", tmp_path / "files"):
        (tmp_path / "version" / file.name).symlink_to(file)
    model = Path(deployment.repository) / "joined_links"
    shutil.copytree(tmp_path / "version", model / "1", symlinks=True)
    (model / "config.pbtxt").write_text(config(**of_recogniser("ctc")))
    deployment.admin.load_model("joined_links")


def test_a_model_in_the_folder_is_no_obstacle_and_without_join_the_graphs_are_listed(deployment, tmp_path):
    written("ctc", tmp_path)
    shutil.copy(tmp_path / "ctc.onnx", tmp_path / "model.onnx")
    load(deployment, "joined_beside", tmp_path, **of_recogniser("ctc"))
    (tmp_path / "model.onnx").unlink()
    assert said("it has ctc.onnx, encoder.onnx", load_error(deployment, tmp_path))


def inspect(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([INSPECT, *map(str, arguments)], capture_output=True, text=True)


def test_stateful_inspect_shows_a_joined_model(tmp_path):
    written("ctc", tmp_path)
    done = inspect(tmp_path, *(f"--parameter={key}={value}" for key, value in of_recogniser("ctc").items()))
    assert done.returncode == 0, done.stderr
    for word in ("encoder.x", "search.last", "tokens_length", "were joined to one", "apart in runs of random data"):
        assert word in done.stderr, done.stderr
    assert 'key: "join"' in done.stdout and "state_pairs" not in done.stdout, done.stdout
    done = inspect(tmp_path / "ctc.onnx", "--parameter=join=ctc.onnx")
    assert "is no folder, and parameter 'join' lists graphs of a folder" in done.stderr


def test_stateful_inspect_knows_the_family_of_a_folder(deployment, tmp_path):
    written("lstm", tmp_path)
    # NeMo's names of the encoder's inputs.
    model = encoder("outputs", swapped=True)
    model.graph.input[0].name = model.graph.node[0].input[0] = "audio_signal"
    model.graph.input.append(onnx.helper.make_tensor_value_info("length", onnx.TensorProto.INT64, ["N"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("encoded_lengths", onnx.TensorProto.INT64, ["N"]))
    model.graph.node.append(node("Identity", "length", "encoded_lengths"))
    onnx.save(model, tmp_path / "encoder.onnx")
    done = inspect(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the graphs are NeMo's streaming transducer" in done.stderr
    assert f"--search 'transducer blank={TOKENS - 1} max_tokens=10'" in done.stderr
    # Its lines are served as they are.
    folder = Path(deployment.repository) / "joined_family"
    shutil.copytree(tmp_path, folder / "1")
    (folder / "config.pbtxt").write_text(done.stdout)
    deployment.admin.load_model("joined_family")
    (tmp_path / "decoder_joint.onnx").unlink()
    done = inspect(tmp_path)
    assert done.returncode == 1 and "none of the known families (it has encoder.onnx)" in done.stderr, done.stderr
