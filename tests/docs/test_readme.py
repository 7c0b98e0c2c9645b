"""The README's configuration and client, run as they stand."""

import re
import shutil
import subprocess
import sys

import pytest

from support import paths
from support.server import TritonServer
from support.speech import inputs_of, read_recording, silero_oracle

README = (paths.ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
[CLIENT] = [text for language, text in BLOCKS if language == "python"]
[CONFIGURATION] = [text for _, text in BLOCKS if text.startswith("backend:")]
[ON_A_GPU_HOST] = re.findall(r"On a host with a GPU, add\s`(instance_group .*?)`", README)


def answers(server: TritonServer, model: str) -> list[str]:
    """What the client prints, for the server's port and this model."""
    code = CLIENT.replace("localhost:8001", server.grpc_url).replace("silero_vad", model)
    run = subprocess.run([sys.executable, "-c", code], cwd=paths.ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_the_client_runs_and_the_configuration_gives_the_answers_of_the_shipped_one(tmp_path):
    shipped = paths.MODELS / "silero_vad"
    shutil.copytree(shipped, tmp_path / "silero_vad")
    shown = {"my_vad": CONFIGURATION, "my_vad_on_a_gpu_host": CONFIGURATION + ON_A_GPU_HOST}
    for model, configuration in shown.items():
        shutil.copytree(shipped / "1", tmp_path / model / "1")
        (tmp_path / model / "config.pbtxt").write_text(configuration)
    with TritonServer(tmp_path, backends=paths.TESTED_BACKENDS) as server:
        lines = answers(server, "silero_vad")
        sequence = silero_oracle().new_sequence()
        chunks = inputs_of(read_recording()[: 160 * 320])
        right = [sequence.step({"input": chunk[None]})["output"].item() for chunk in chunks]
        assert [float(line.split()[-1]) for line in lines] == pytest.approx(right, abs=0.0051)
        assert [float(line.split()[0]) for line in lines] == pytest.approx([0.032 * n for n in range(100)], abs=0.0051)
        for model in shown:
            assert answers(server, model) == lines


def test_the_client_is_saved_where_git_ignores_it():
    """`scripts/release --trial` refuses a checkout with files that git does not know."""
    [place] = re.findall(r"^Save it as `(.*?)`", README, re.MULTILINE)
    assert f"python {place}`" in README
    assert subprocess.run(["git", "check-ignore", "--quiet", place], cwd=paths.ROOT).returncode == 0
