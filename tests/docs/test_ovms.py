"""The configuration and the client of docs/ovms.md, run as they stand."""

import re
import shutil
import subprocess
import sys

from support import paths
from support.server import TritonServer

PAGE = (paths.ROOT / "docs" / "ovms.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
[CLIENT] = [text for language, text in BLOCKS if language == "python"]
[CONFIGURATION] = [text for _, text in BLOCKS if text.startswith("backend:")]


def test_the_configuration_serves_the_client(tmp_path):
    shutil.copytree(paths.MODELS / "silero_vad" / "1", tmp_path / "my_vad" / "1")
    (tmp_path / "my_vad" / "config.pbtxt").write_text(CONFIGURATION)
    with TritonServer(tmp_path, backends=paths.TESTED_BACKENDS) as server:
        code = CLIENT.replace("localhost:8001", server.grpc_url)
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stderr
        assert re.fullmatch(r"1 \[\[0\.\d+\]\]\n", run.stdout)
