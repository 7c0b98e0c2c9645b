"""The page docs/ovms.md: its commands, its configurations and its client run as they stand, and it has every option."""

import contextlib
import json
import re
import shutil
import subprocess
import sys

import onnx.parser
import pytest
import requests

from harness.gateway import MANAGED, Gateway, run
from support import paths
from support.server import TritonServer

PAGE = (paths.ROOT / "docs" / "ovms.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
[CLIENT] = [text for language, text in BLOCKS if language == "python"]
[CONFIGURATION] = [text for _, text in BLOCKS if text.startswith("backend:")]
[CONFIG_JSON] = [text for language, text in BLOCKS if language == "json"]
[ADDED] = [text for language, text in BLOCKS if text.startswith("parameters")]
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]

#: The sum of a sequence's inputs.
SUM = """<ir_version: 8, opset_import: ["" : 17]>
sums (float[batch,2] input, float[batch,2] sum_in) => (float[batch,2] output, float[batch,2] sum_out) {
    sum_out = Add(input, sum_in)
    output = Identity(sum_out)
}"""


def test_the_configuration_serves_the_client(tmp_path):
    shutil.copytree(paths.MODELS / "silero_vad" / "1", tmp_path / "my_vad" / "1")
    (tmp_path / "my_vad" / "config.pbtxt").write_text(CONFIGURATION)
    with TritonServer(tmp_path, backends=paths.TESTED_BACKENDS) as server:
        code = CLIENT.replace("localhost:8001", server.grpc_url)
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stderr
        assert re.fullmatch(r"1 \[\[0\.\d+\]\]\n", run.stdout)


@pytest.fixture
def start(tmp_path):
    """Runs a command of the page, whose /models is tmp_path, on other ports; gives the address of REST."""
    with contextlib.ExitStack() as started:

        def made(command: str) -> str:
            program, *ports = command.split()[:5]
            assert (program, ports) == ("stateful-ovms", ["--port", "9000", "--rest_port", "8000"])
            arguments = command.replace("/models", str(tmp_path)).split()[5:]
            return started.enter_context(Gateway(*arguments, *MANAGED)).rest_url

        yield made


def write_model(folder) -> None:
    (folder / "1").mkdir(parents=True)
    onnx.save(onnx.parser.parse_model(SUM), folder / "1" / "model.onnx")


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_the_commands_of_the_page(tmp_path, start):
    [command] = [line for line in COMMANDS if "--model_path" in line]
    write_model(tmp_path / "my_lstm")
    address = start(command)
    answers = []
    for line in (line for line in COMMANDS if line.startswith("curl")):
        asked = line.replace("localhost:8000", address)
        answers.append(json.loads(subprocess.run(asked, shell=True, check=True, capture_output=True, text=True).stdout))
    sums = [answer["outputs"]["output"] for answer in answers if "outputs" in answer]
    assert sums == [[[0.5, 1.0]], [[1.0, 2.0]], [[1.5, 3.0]]]
    assert not [answer for answer in answers if "error" in answer]


def test_the_config_json_of_the_page(tmp_path, start):
    [command] = [line for line in COMMANDS if "--config_path" in line]
    (tmp_path / "config.json").write_text(CONFIG_JSON.replace("/models", str(tmp_path)))
    for name in ("my_lstm", "my_tagger"):
        write_model(tmp_path / name)
    status = requests.get(f"http://{start(command)}/v1/config", timeout=60).json()
    assert {name: model["model_version_status"][0]["state"] for name, model in status.items()} == {
        "my_lstm": "AVAILABLE",
        "my_tagger": "AVAILABLE",
    }


def test_the_config_pbtxt_of_the_page_is_added(tmp_path):
    shutil.copytree(paths.MODELS / "silero_vad" / "1", tmp_path / "vad" / "1")
    (tmp_path / "vad" / "config.pbtxt").write_text(ADDED)
    arguments = ["--print-config", "--stateful", "--model_name=vad", f"--model_path={tmp_path}/vad"]
    printed = run(*arguments).stdout
    assert "sr=16000" in printed and "input=64" in printed and '"stateful"' in printed


def options() -> set[str]:
    """The gateway's options and those that it refuses, from its source; the many of generative models aside."""
    source = paths.ROOT / "crates/ovms/src"
    options = (source / "options.rs").read_text()
    [table] = re.findall(r"^const REFUSED.*?^\];$", options, re.MULTILINE | re.DOTALL)
    refused = re.findall(r'^ {4,8}\(?"([\w-]+)",', table, re.MULTILINE)
    [model] = re.findall(r"^pub struct ModelOptions .*?^}$", (source / "managed/config.rs").read_text(), re.M | re.S)
    named = re.findall(r"^    (\w+): Option<|^    (\w+_bind_address): String", options, re.MULTILINE)
    named += re.findall(r"^    pub (\w+)(): Option<", model, re.MULTILINE)
    names = {name for pair in named for name in pair if name} - {"grpc", "rest"}
    return names | set(refused) | {"tritonserver", "backend_directory", "print-config"}


@pytest.mark.parametrize("option", sorted(options()))
def test_an_option_is_on_the_page(option):
    assert re.search(rf"`(--)?{option}`", PAGE), option
