"""What the pages show as printed is what is printed, line for line."""

import re
import subprocess

from harness.logs import log_of_shipped, messages, warnings_of_load
from harness.models.exports import HALF
from support.paths import INSPECT, ROOT, SILERO_VAD

VERSION = re.compile(r"\d+\.\d+\.\d+")


def sample(page: str, words: str) -> list[str]:
    """The lines of the page's only block with these words in its first line."""
    text = (ROOT / "docs" / page).read_text()
    blocks = [block.splitlines() for block in re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]
    [found] = [lines for lines in blocks if words in lines[0]]
    return found


def is_shown(shown: str, printed: str) -> bool:
    """Whether a line is printed as it is shown: with anything for each `…`, and any version of ONNX Runtime."""
    pieces = map(re.escape, VERSION.sub("0", shown).split("…"))
    return re.fullmatch(".*".join(pieces), VERSION.sub("0", printed)) is not None


def test_the_log_at_load_is_the_one_that_the_page_shows(deploy):
    # On a server of its own: other tests have a model of this name.
    own = deploy()
    first, *lines = sample("metrics.md", "stateful backend")
    at_load = messages(log_of_shipped(own, "accumulate"))
    printed = [line for line in at_load if line.startswith("model accumulate")]
    different = [(a, b) for a, b in zip(lines, printed, strict=True) if not is_shown(a, b)]
    assert not different
    assert any(is_shown(first, line) for line in messages(own.server.log_text()))


def test_stateful_inspect_prints_the_tables_that_the_page_shows():
    [command] = [line for line in sample("models.md", "stateful-inspect model.onnx") if "silero" in line]
    arguments = [SILERO_VAD if word == "silero_vad.onnx" else word for word in command.split()[1:]]
    printed = subprocess.run([INSPECT, *arguments], capture_output=True, text=True, check=True)
    assert printed.stderr.rstrip().splitlines() == sample("models.md", "batch axis  taken for")


def test_the_warning_of_half_found_states_is_the_one_that_the_page_shows(deployment):
    model = HALF.served("model", "half_as_shown", file_name="model.onnx", written='backend: "stateful"')
    [shown] = sample("models.md", "these may be states")
    assert warnings_of_load(deployment, model) == [f"model {model.name} version 1: {shown}"]
