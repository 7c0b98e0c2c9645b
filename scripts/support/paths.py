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

#: A library that can simulate devices, and that panics where a request asks for it; scripts/test builds it.
TEST_BACKENDS = BUILD / "backends-tests"
#: What `--backend-directory` gets; scripts/build fills it.
BACKENDS = TEST_BACKENDS if TEST_DEVICE == "simulated" else BUILD / "backends"
BACKEND_LIBRARY = BACKENDS / "stateful" / "libtriton_stateful.so"
INSPECT = BUILD / "bin" / "stateful-inspect"
CONVERT = BUILD / "bin" / "stateful-convert"

SITE_PACKAGES = Path(sysconfig.get_path("platlib"))
TRITONSERVER = SITE_PACKAGES / "pytriton" / "tritonserver" / "bin" / "tritonserver"
#: The libraries of that server; the program finds them by itself.
TRITON_LIBRARIES = SITE_PACKAGES / "nvidia_pytriton.libs"
SILERO_VAD = SITE_PACKAGES / "silero_vad" / "data" / "silero_vad.onnx"
