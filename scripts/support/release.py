"""Packs what scripts/release has built: archives with and without ONNX Runtime, a Debian package, checksums.

The same files give the same bytes, whoever packs them, where and when: names are sorted, owners are root, and all times
are those of the commit.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from support.paths import ROOT

CHECKSUMS = "SHA256SUMS"
PROGRAMS = ("stateful-inspect", "stateful-convert", "stateful-ovms", "stateful-drain")
#: What each archive and package has, from the top of the checkout, with all files that these pages lead to.
_PAGES = ("LICENSE", "CHANGELOG.md", "README.md")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
_DEBIAN_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
#: Where NVIDIA's images have tritonserver. stateful-inspect looks for ONNX Runtime in ../backends.
_DEBIAN_PREFIX = "opt/tritonserver"
_DEBIAN_PAGES = "usr/share/doc/triton-stateful"

#: Paths in an archive, and the files that go there.
Files = Mapping[str, Path]


@dataclass(frozen=True)
class Release:
    """What is released.

    version: Cargo.toml's, with `-` and a commit behind it for a trial. maintainer: who answers for the Debian package,
    as `Name <address>`. target: Rust's name of the platform. epoch: the
    time of all files, in seconds. built: the folder with `backends/` and `bin/`. notices: the folder with the licences of
    the crates and with the SBOMs. onnxruntime: the folder with the licences of ONNX Runtime. onnxruntime_version: its
    version.
    """

    version: str
    maintainer: str
    target: str
    epoch: int
    built: Path
    notices: Path
    onnxruntime: Path
    onnxruntime_version: str

    @property
    def architecture(self) -> str:
        return self.target.split("-")[0]

    @property
    def name(self) -> str:
        return f"triton-stateful-{self.version}-{self.architecture}-linux"

    def programs_and_library(self) -> Files:
        names = ["backends/stateful/libtriton_stateful.so", *(f"bin/{program}" for program in PROGRAMS)]
        return {name: self.built / name for name in names}

    def pages(self) -> Files:
        notices = [file for file in self.notices.rglob("*") if file.is_file()]
        return with_linked_files(_PAGES) | {str(file.relative_to(self.notices)): file for file in notices}

    def runtime(self) -> Files:
        library = "backends/stateful/libonnxruntime.so"
        licences = {f"onnxruntime/{name}": self.onnxruntime / name for name in ("LICENSE", "ThirdPartyNotices.txt")}
        return {library: self.built / library} | licences


def with_linked_files(pages: Iterable[str]) -> dict[str, Path]:
    """These files of the checkout, those that their links lead to, and so on. So no link in an archive is broken."""
    found: dict[str, Path] = {}
    waiting = list(pages)
    while waiting:
        inside = waiting.pop()
        if inside in found:
            continue
        found[inside] = ROOT / inside
        if inside.endswith(".md"):
            links = _LINK.findall(_FENCE.sub("", found[inside].read_text()))
            waiting += [os.path.normpath(Path(inside).parent / link) for link in links]
    return found


def pack(release: Release, out: Path) -> list[Path]:
    """Writes the files of a release, and returns them. Those of other targets in `out` stay, and are in SHA256SUMS."""
    out.mkdir(parents=True, exist_ok=True)
    plain = dict(release.programs_and_library()) | dict(release.pages())
    with tempfile.TemporaryDirectory(prefix="release-") as temporary:
        bom = Path(temporary) / "onnxruntime.cdx.json"
        bom.write_text(onnxruntime_bom(release))
        with_runtime = plain | dict(release.runtime()) | {"sbom/onnxruntime.cdx.json": bom}
        made = [
            archive(plain, release.name, release.epoch, out),
            archive(with_runtime, f"{release.name}-onnxruntime-{release.onnxruntime_version}", release.epoch, out),
        ]
    made.append(debian_package(release, out))
    write_checksums(out)
    return made


def archive(files: Files, name: str, epoch: int, out: Path) -> Path:
    """Writes `name`.tar.gz, with all files in a folder of that name."""
    path = out / f"{name}.tar.gz"
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", mtime=epoch, fileobj=raw) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for inside, file in sorted(files.items()):
            content = file.read_bytes()
            entry = tarfile.TarInfo(f"{name}/{inside}")
            entry.size, entry.mtime, entry.mode = len(content), epoch, mode_of(inside)
            entry.uname = entry.gname = "root"
            tar.addfile(entry, io.BytesIO(content))
    return path


def mode_of(inside: str) -> int:
    """Programs and libraries can be executed, whatever the umask of the build was."""
    return 0o755 if inside.endswith(".so") or inside.split("/")[-1] in PROGRAMS else 0o644


def debian_package(release: Release, out: Path) -> Path:
    """Writes the .deb. ONNX Runtime is not in it, because an image of Triton has one that fits the image."""
    version = release.version.replace("-", "~")
    architecture = _DEBIAN_ARCHITECTURES[release.architecture]
    path = out / f"triton-stateful_{version}_{architecture}.deb"
    files = {f"{_DEBIAN_PREFIX}/{inside}": file for inside, file in release.programs_and_library().items()}
    pages = dict(release.pages())
    # Debian's name for it.
    pages["copyright"] = pages["LICENSE"]
    files |= {f"{_DEBIAN_PAGES}/{inside}": file for inside, file in pages.items()}
    with tempfile.TemporaryDirectory(prefix="release-") as temporary:
        tree = Path(temporary) / "tree"
        for inside, file in files.items():
            (tree / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, tree / inside)
            (tree / inside).chmod(mode_of(inside))
        size = sum(file.stat().st_size for file in files.values()) // 1024 + 1
        (tree / "DEBIAN").mkdir()
        (tree / "DEBIAN" / "control").write_text(
            f"Package: triton-stateful\n"
            f"Version: {version}\n"
            f"Architecture: {architecture}\n"
            f"Maintainer: {release.maintainer}\n"
            f"Installed-Size: {size}\n"
            f"Depends: libc6 (>= {required_glibc(release.programs_and_library().values())}), libgcc-s1\n"
            f"Section: science\n"
            f"Priority: optional\n"
            f"Description: backend of Triton Inference Server for stateful ONNX models\n"
            f" It keeps the states of sequences in the server and runs sequences as one batch.\n"
            f" ONNX Runtime 1.17 or newer has to be there, such as that of Triton's onnxruntime backend.\n"
        )
        (tree / "DEBIAN" / "control").chmod(0o644)
        for folder in [tree, *(path for path in tree.rglob("*") if path.is_dir())]:
            folder.chmod(0o755)
        for entry in [tree, *tree.rglob("*")]:
            os.utime(entry, (release.epoch, release.epoch))
        # gzip, because xz's bytes depend on dpkg's threads.
        subprocess.run(
            ["dpkg-deb", "--root-owner-group", "-Zgzip", "--build", tree, path],
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"SOURCE_DATE_EPOCH": str(release.epoch)},
        )
    return path


def required_glibc(binaries: Iterable[Path]) -> str:
    """The oldest version of glibc that these files run with."""
    asked = {match for binary in binaries for match in re.findall(rb"\bGLIBC_(\d+)\.(\d+)", binary.read_bytes())}
    return "{}.{}".format(*max((int(major), int(minor)) for major, minor in asked))


def onnxruntime_bom(release: Release) -> str:
    """The SBOM of the library that the second archive adds."""
    library = release.runtime()["backends/stateful/libonnxruntime.so"]
    component = {
        "type": "library",
        "name": "onnxruntime",
        "version": release.onnxruntime_version,
        "licenses": [{"license": {"id": "MIT"}}],
        "purl": f"pkg:pypi/onnxruntime@{release.onnxruntime_version}",
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(library.read_bytes()).hexdigest()}],
    }
    bom = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": [component]}
    return json.dumps(bom, indent=2) + "\n"


def write_checksums(out: Path) -> None:
    """Writes SHA256SUMS, which `sha256sum --check` reads."""
    files = sorted(file for file in out.iterdir() if file.name.endswith((".tar.gz", ".deb")))
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (out / CHECKSUMS).write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description="packs a release; scripts/release calls this")
    parser.add_argument("--version", required=True)
    parser.add_argument("--maintainer", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    for folder in ("built", "notices", "onnxruntime", "out"):
        parser.add_argument(f"--{folder}", type=Path, required=True)
    parser.add_argument("--onnxruntime-version", required=True)
    options = vars(parser.parse_args())
    out = options.pop("out")
    release = Release(**options)
    for file in pack(release, out):
        print(file)


if __name__ == "__main__":
    main()
