"""Built-in graphs that stateful-convert wrote, served: chunks of any length give what the whole recording gives."""

from __future__ import annotations

import subprocess
import wave
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness.clients import Client, new_id
from harness.conversations import together
from harness.deployment import Deployment
from support.paths import CONVERT, RECORDING, ROOT

#: Frames of the recording, by options; make.py beside it has made them with kaldi-native-fbank and numpy.
REFERENCES = np.load(ROOT / "crates" / "convert" / "tests" / "features" / "reference.npz")
#: Each committed frame is this many later.
EVERY = 50
SEQUENCES = 4
#: Samples of a sequence.
LENGTH = 160 * EVERY * 20
#: Where the sequences begin in the recording: at a committed frame.
BEGINNINGS = [160 * EVERY * number * 30 for number in range(SEQUENCES)]


def served(deployment: Deployment, name: str, graph: str, *options: str) -> str:
    """Writes the graph into the repository and loads it, as the command wrote it."""
    if name not in deployment.loaded:
        file = Path(deployment.repository) / name / "1" / "model.onnx"
        subprocess.run([CONVERT, "graph", graph, *options, "-o", file], check=True, capture_output=True)
        deployment.admin.load_model(name)
        deployment.loaded[name] = graph
    return name


def recording() -> np.ndarray:
    with wave.open(str(RECORDING)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / np.float32(32768)


def rows() -> list[np.ndarray]:
    """The recording from several places on, `[1, samples]` each."""
    samples = recording()
    return [samples[None, beginning : beginning + LENGTH] for beginning in BEGINNINGS]


def in_chunks(
    client: Client, model: str, inputs: dict[str, tuple[np.ndarray, int]], length: Callable[[], int]
) -> dict[str, list[np.ndarray]]:
    """The answers of a sequence. Each input has its axis of time."""
    sequence_id, start = new_id(), 0
    answers: dict[str, list[np.ndarray]] = {}
    [total] = {array.shape[axis] for array, axis in inputs.values()}
    while start < total:
        end = min(start + length(), total)
        fed = {
            name: np.ascontiguousarray(np.take(array, range(start, end), axis=axis))
            for name, (array, axis) in inputs.items()
        }
        said = client.step(model, sequence_id, fed, start=start == 0, end=end == total)
        for name, answer in said.items():
            answers.setdefault(name, []).append(answer)
        start = end
    return answers


def all_at_once(deployment, model: str, each: list[dict[str, tuple[np.ndarray, int]]], lengths) -> list[dict]:
    """The answers of several sequences at the same time. `lengths` makes the lengths of the chunks of each."""
    tasks = [
        partial(in_chunks, deployment.connect(), model, inputs, lengths(number)) for number, inputs in enumerate(each)
    ]
    return together(tasks)


def random_lengths(below: int, multiple: int = 1) -> Callable[[int], Callable[[], int]]:
    def of(seed: int) -> Callable[[], int]:
        rng = np.random.default_rng(seed)
        return lambda: int(rng.integers(1, below)) * multiple

    return of


@pytest.mark.parametrize(
    "reference", ["kaldi", "kaldi snip_edges=false high_freq=-400", "nemo", "nemo num_mel_bins=128"]
)
def test_features_in_chunks_of_any_length_are_those_of_the_recording(deployment, reference):
    kind, *options = reference.split()
    graph = {"kaldi": "fbank:kaldi", "nemo": "mel:nemo"}[kind]
    model = served(deployment, f"features_{kind}_{len(options)}", graph, *options)
    # rows that change each other would have made it 1
    assert deployment.admin.get_model_config(model).config.max_batch_size == 64
    each = [{"audio": (row, 1)} for row in rows()]
    for number, answer in enumerate(all_at_once(deployment, model, each, random_lengths(6000))):
        features = np.concatenate(answer["features"], axis=2 if kind == "nemo" else 1)[0]
        frames = (features.T if kind == "nemo" else features)[::EVERY]
        # the beginning of a sequence isn't that of the recording, where frames begin in front of the first sample
        first = int("false" in reference or kind == "nemo") if number else 0
        wanted = REFERENCES[reference][number * 30 :][: len(frames)]
        assert len(frames) in (19, 20)
        np.testing.assert_allclose(frames[first:], wanted[first:], rtol=0, atol=3e-4)


def test_sequences_with_chunks_of_one_length_share_runs(deployment):
    model = served(deployment, "features_shared", "fbank:kaldi")
    each = [{"audio": (row, 1)} for row in rows()]
    answers = all_at_once(deployment, model, each, lambda _: lambda: 1600)
    found = deployment.admin.get_inference_statistics(model).model_stats[0]
    assert found.execution_count < found.inference_count == SEQUENCES * 100
    for number, answer in enumerate(answers):
        frames = np.concatenate(answer["features"], axis=1)[0, ::EVERY]
        np.testing.assert_allclose(frames, REFERENCES["kaldi"][number * 30 :][: len(frames)], rtol=0, atol=3e-4)


@pytest.mark.parametrize(
    ("name", "options", "frame", "hop"),
    [
        ("complex", (), 512, 256),
        ("polar", ("layout=polar", "hop=128", "window=rectangular"), 512, 128),
    ],
)
def test_spectra_are_those_of_numpy_and_give_the_samples_back(deployment, name, options, frame, hop):
    forth = served(deployment, f"stft_{name}", "stft", *options)
    back = served(deployment, f"istft_{name}", "istft", *options)
    for model in (forth, back):
        assert deployment.admin.get_model_config(model).config.max_batch_size == 64
    window = np.ones(frame) if "window=rectangular" in options else np.sqrt(np.hanning(frame + 1)[:frame])
    spectra: list[dict[str, tuple[np.ndarray, int]]] = []
    each = [{"audio": (row, 1)} for row in rows()]
    for row, answer in zip(rows(), all_at_once(deployment, forth, each, random_lengths(9, hop)), strict=True):
        padded = np.concatenate([np.zeros(frame - hop), row[0]])
        frames = np.lib.stride_tricks.sliding_window_view(padded, frame)[::hop]
        wanted = np.fft.rfft(frames * window)
        if name == "complex":
            spectrum = np.concatenate(answer["spectrum"], axis=2)
            made = spectrum[0, :, :, 0].T + 1j * spectrum[0, :, :, 1].T
            spectra.append({"spectrum": (spectrum, 2)})
        else:
            parts = {part: np.concatenate(answer[part], axis=1) for part in ("magnitude", "phase")}
            made = parts["magnitude"][0] * np.exp(1j * parts["phase"][0])
            spectra.append({part: (array, 1) for part, array in parts.items()})
        np.testing.assert_allclose(made, wanted, rtol=0, atol=1e-4)
    delay = frame - hop
    for row, answer in zip(rows(), all_at_once(deployment, back, spectra, random_lengths(9)), strict=True):
        audio = np.concatenate(answer["audio"], axis=1)
        np.testing.assert_allclose(audio[:, delay:], row[:, :-delay], rtol=0, atol=1e-5)


def test_a_request_with_a_part_of_a_hop_is_refused(deployment):
    model = served(deployment, "stft_refusing", "stft")
    client, sequence_id = deployment.connect(), new_id()
    audio = recording()[None, :768]
    first = client.step(model, sequence_id, {"audio": audio[:, :512]}, start=True)
    with pytest.raises(InferenceServerException, match="'audio' has 255 steps .* a multiple of 256 is"):
        client.step(model, sequence_id, {"audio": audio[:, 512:767]})
    last = client.step(model, sequence_id, {"audio": audio[:, 512:]}, end=True)
    whole = client.step(model, new_id(), {"audio": audio}, start=True, end=True)
    np.testing.assert_array_equal(np.concatenate([first["spectrum"], last["spectrum"]], axis=2), whole["spectrum"])
