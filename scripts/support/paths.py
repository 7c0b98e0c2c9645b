"""Where things lie: in the checkout, and in the wheels of its .venv."""

import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
MODELS = ROOT / "models"
RECORDING = ROOT / "assets" / "speech.wav"

#: What `--backend-directory` gets; scripts/build fills it.
BACKENDS = BUILD / "backends"
BACKEND_LIBRARY = BACKENDS / "stateful" / "libtriton_stateful.so"

SITE_PACKAGES = Path(sysconfig.get_path("platlib"))
TRITONSERVER = SITE_PACKAGES / "pytriton" / "tritonserver" / "bin" / "tritonserver"
#: The libraries of that server; the program finds them by itself.
TRITON_LIBRARIES = SITE_PACKAGES / "nvidia_pytriton.libs"
#: The Python backend that comes with that server, and its stubs for other Python versions.
TRITON_BACKENDS = TRITONSERVER.parents[1] / "backends"
SILERO_VAD = SITE_PACKAGES / "silero_vad" / "data" / "silero_vad.onnx"


def tritonserver_library() -> Path:
    """libtritonserver itself, which bears a hash in its name here. FileNotFoundError where it isn't."""
    return _only(TRITON_LIBRARIES, "libtritonserver*.so*")


def onnxruntime_library() -> Path:
    """libonnxruntime of the venv's onnxruntime package. FileNotFoundError where it isn't."""
    return _only(SITE_PACKAGES / "onnxruntime" / "capi", "libonnxruntime.so.*")


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise FileNotFoundError(f"one {pattern} was expected in {folder}, {len(found)} are there")
    return found[0]
