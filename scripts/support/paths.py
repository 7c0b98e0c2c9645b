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
BACKENDS = BUILD / ("backends-simulated" if TEST_DEVICE == "simulated" else "backends")
INSPECT = BUILD / "bin" / "stateful-inspect"
BACKEND_LIBRARY = BACKENDS / "stateful" / "libtriton_stateful.so"

SITE_PACKAGES = Path(sysconfig.get_path("platlib"))
TRITONSERVER = SITE_PACKAGES / "pytriton" / "tritonserver" / "bin" / "tritonserver"
#: The libraries of that server; the program finds them by itself.
TRITON_LIBRARIES = SITE_PACKAGES / "nvidia_pytriton.libs"
SILERO_VAD = SITE_PACKAGES / "silero_vad" / "data" / "silero_vad.onnx"
