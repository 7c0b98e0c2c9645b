"""Where things lie: in the checkout, and in the wheels of its .venv."""

import os
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
MODELS = ROOT / "models"
RECORDING = ROOT / "assets" / "speech.wav"

#: Where the tests' models run: "cpu", "simulated" (devices simulated in host memory) or "gpu".
TEST_DEVICE = os.environ.get("STATEFUL_TEST_DEVICE", "cpu")

#: What `--backend-directory` gets; scripts/build fills it.
BACKENDS = BUILD / "backends"
#: Of scripts/build --tests. This library can simulate devices, and panics where a request asks for it.
TEST_BACKENDS = BUILD / "tests" / "backends"
#: What is tested: that build, or another one, such as STATEFUL_TEST_BUILD=build, which scripts/build makes for users.
TESTED = ROOT / os.environ.get("STATEFUL_TEST_BUILD", "build/tests")
TESTED_BACKENDS = TESTED / "backends"
INSPECT = TESTED / "bin" / "stateful-inspect"
CONVERT = TESTED / "bin" / "stateful-convert"
OVMS = TESTED / "bin" / "stateful-ovms"
DRAIN = TESTED / "bin" / "stateful-drain"

SITE_PACKAGES = Path(sysconfig.get_path("platlib"))
#: Where nvidia-pytriton, which has the server, is unpacked; scripts/test --servers names older ones.
_SERVER = Path(os.environ.get("STATEFUL_TEST_SERVER", SITE_PACKAGES))
TRITONSERVER = _SERVER / "pytriton" / "tritonserver" / "bin" / "tritonserver"
#: The libraries of that server; the program finds them by itself.
TRITON_LIBRARIES = _SERVER / "nvidia_pytriton.libs"
#: The ONNX Runtime of the tests' servers, if it is not the one beside the backend.
TEST_ONNXRUNTIME = os.environ.get("STATEFUL_TEST_ONNXRUNTIME")
SILERO_VAD = SITE_PACKAGES / "silero_vad" / "data" / "silero_vad.onnx"
