"""What scripts/release packs: layout, checksums, the same bytes again. The library and the programs are stand-ins."""

import hashlib
import os
import re
import shutil
import subprocess
import tarfile
from dataclasses import replace

import pytest

from support import release
from support.paths import CONVERT, DRAIN, INSPECT, OVMS, ROOT

EPOCH = 1_700_000_000
LIBRARY = "backends/stateful/libtriton_stateful.so"
RUNTIME = "backends/stateful/libonnxruntime.so"
NAME = "triton-stateful-1.2.3-x86_64-linux"
PAGES = {"LICENSE", "CHANGELOG.md", "README.md", "THIRD-PARTY-LICENSES.txt", "BUILD", "sbom/triton-stateful.cdx.json"}
PROGRAMS = {LIBRARY, "bin/stateful-inspect", "bin/stateful-convert", "bin/stateful-ovms", "bin/stateful-drain"}
OF_RUNTIME = {RUNTIME, "onnxruntime/LICENSE", "onnxruntime/ThirdPartyNotices.txt", "sbom/onnxruntime.cdx.json"}

pytestmark = pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="dpkg-deb is not installed")


def built(folder, umask=0o022, stamp=EPOCH):
    """A release of stand-ins, written with this umask and these times."""
    before = os.umask(umask)
    try:
        contents = {
            f"built/{LIBRARY}": b"library GLIBC_2.9\0GLIBC_2.34\0GLIBC_2.2.5\0",
            f"built/{RUNTIME}": b"onnxruntime",
            "built/bin/stateful-inspect": b"inspect GLIBC_2.31\0",
            "built/bin/stateful-convert": b"convert",
            "built/bin/stateful-ovms": b"ovms",
            "built/bin/stateful-drain": b"drain",
            "notices/THIRD-PARTY-LICENSES.txt": b"texts",
            "notices/BUILD": b"commit",
            "notices/sbom/triton-stateful.cdx.json": b"{}",
            "onnxruntime/LICENSE": b"MIT",
            "onnxruntime/ThirdPartyNotices.txt": b"notices",
        }
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
            os.utime(folder / name, (stamp, stamp))
    finally:
        os.umask(before)
    return release.Release(
        version="1.2.3",
        maintainer="A Person <a.person@example.org>",
        target="x86_64-unknown-linux-gnu",
        epoch=EPOCH,
        built=folder / "built",
        notices=folder / "notices",
        onnxruntime=folder / "onnxruntime",
        onnxruntime_version="1.31.1",
    )


@pytest.fixture
def packed(tmp_path):
    release.pack(built(tmp_path / "in"), tmp_path / "out")
    return tmp_path / "out"


def entries(archive):
    with tarfile.open(archive) as tar:
        return {entry.name: entry for entry in tar.getmembers()}


def dpkg(*arguments):
    return subprocess.run(["dpkg-deb", *arguments], check=True, capture_output=True, text=True).stdout


def test_the_archives_differ_in_onnx_runtime_and_its_notices(packed):
    with_runtime = f"{NAME}-onnxruntime-1.31.1"
    plain, whole = (
        {entry.removeprefix(f"{name}/") for entry in entries(packed / f"{name}.tar.gz")}
        for name in (NAME, with_runtime)
    )
    assert plain >= PROGRAMS | PAGES
    assert whole - plain == OF_RUNTIME
    assert plain < whole


def broken_links(folder):
    """The links between the Markdown files in a folder that lead to no file in it."""
    pages = sorted(folder.rglob("*.md"))
    assert len(pages) > 20
    code = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", code.sub("", page.read_text()))
    ]
    return [f"{page.relative_to(folder)}: {link}" for page, link in links if not (page.parent / link).is_file()]


def test_the_links_of_the_pages_lead_to_files_of_the_archive_and_of_the_package(packed, tmp_path):
    (tmp_path / "archive").mkdir()
    subprocess.run(["tar", "xzf", packed / f"{NAME}.tar.gz", "-C", tmp_path / "archive"], check=True)
    assert broken_links(tmp_path / "archive") == []
    for page in (ROOT / "docs").rglob("*.md"):
        assert (tmp_path / "archive" / NAME / page.relative_to(ROOT)).read_text() == page.read_text()
    dpkg("-x", packed / "triton-stateful_1.2.3_amd64.deb", tmp_path / "root")
    assert broken_links(tmp_path / "root") == []


def test_entries_belong_to_root_have_the_commit_s_time_and_can_be_run_where_they_should(packed):
    for name, entry in entries(packed / f"{NAME}.tar.gz").items():
        assert (entry.uid, entry.gid, entry.uname, entry.mtime) == (0, 0, "root", EPOCH), name
        assert entry.mode == (0o755 if "/bin/" in name or name.endswith(".so") else 0o644), name


def test_the_package_installs_beside_tritonserver(packed, tmp_path):
    package = packed / "triton-stateful_1.2.3_amd64.deb"
    dpkg("-x", package, tmp_path / "root")
    installed = {str(file.relative_to(tmp_path / "root")) for file in (tmp_path / "root").rglob("*") if file.is_file()}
    programs = {f"opt/tritonserver/{name}" for name in PROGRAMS}
    pages = {f"usr/share/doc/triton-stateful/{name}" for name in PAGES | {"copyright"}}
    assert installed >= programs | pages
    assert all(name in programs or name.startswith("usr/share/doc/triton-stateful/") for name in installed)
    assert (tmp_path / "root/opt/tritonserver" / LIBRARY).read_bytes().startswith(b"library")
    owners = {line.split()[1] for line in dpkg("-c", package).splitlines()}
    assert owners == {"root/root"}


def test_the_package_names_its_maintainer_and_the_newest_glibc_that_any_file_asks_for(packed):
    fields = ("Package", "Version", "Architecture", "Maintainer", "Depends")
    values = [dpkg("-f", packed / "triton-stateful_1.2.3_amd64.deb", field).strip() for field in fields]
    maintainer = "A Person <a.person@example.org>"
    assert values == ["triton-stateful", "1.2.3", "amd64", maintainer, "libc6 (>= 2.34), libgcc-s1"]


def test_a_package_of_a_trial_is_older_than_the_release(tmp_path):
    trial = replace(built(tmp_path / "in"), version="1.2.3-0a1b2c", target="aarch64-unknown-linux-gnu")
    package = release.debian_package(trial, tmp_path)
    assert package.name == "triton-stateful_1.2.3~0a1b2c_arm64.deb"
    subprocess.run(["dpkg", "--compare-versions", "1.2.3~0a1b2c", "lt", "1.2.3"], check=True)


def test_the_same_files_give_the_same_bytes(tmp_path):
    for folder, umask, stamp in (("a", 0o022, EPOCH), ("another/folder", 0o077, EPOCH + 12345)):
        release.pack(built(tmp_path / folder / "in", umask, stamp), tmp_path / folder / "out")
    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / folder / "out").iterdir()}
        for folder in ("a", "another/folder")
    )
    assert len(first) == 4
    assert first == second


def test_another_byte_in_the_library_changes_everything_but_its_name(tmp_path):
    made = built(tmp_path / "in")
    release.pack(made, tmp_path / "a")
    (made.built / LIBRARY).write_bytes(b"LIBRARY GLIBC_2.34\0")
    release.pack(made, tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() != (tmp_path / "b" / file.name).read_bytes(), file.name


def test_the_checksums_are_of_all_files_and_those_of_other_targets_too(packed, tmp_path):
    release.pack(replace(built(tmp_path / "in"), target="aarch64-unknown-linux-gnu"), packed)
    lines = dict(reversed(line.split("  ")) for line in (packed / release.CHECKSUMS).read_text().splitlines())
    files = {file for file in packed.iterdir() if file.name != release.CHECKSUMS}
    assert lines == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    assert len(lines) == 6
    subprocess.run(["sha256sum", "--check", "--strict", release.CHECKSUMS], cwd=packed, check=True)


def test_a_missing_file_fails(tmp_path):
    made = built(tmp_path / "in")
    (made.built / "bin/stateful-convert").unlink()
    with pytest.raises(FileNotFoundError, match="stateful-convert"):
        release.pack(made, tmp_path / "out")


def test_a_release_may_have_the_licences_that_the_policy_allows():
    lists = [
        re.search(r"^(?:allow|accepted) = \[(.*?)\]", (ROOT / name).read_text(), re.MULTILINE)
        for name in ("deny.toml", "about.toml")
    ]
    allowed, accepted = (set(re.findall(r'"(.*?)"', found[1])) for found in lists)
    assert allowed == accepted


def test_all_parts_have_one_version():
    programs = ["crates/convert", "crates/ovms", "tools/drain", "tools/inspect"]
    manifests = ["Cargo.toml", *(f"{folder}/Cargo.toml" for folder in programs), "clients/python/pyproject.toml"]
    found = {name: re.findall(r'^version = "(.*)"$', (ROOT / name).read_text(), re.MULTILINE) for name in manifests}
    assert len({tuple(versions) for versions in found.values()}) == 1, found


@pytest.mark.parametrize("program", [INSPECT, CONVERT, OVMS, DRAIN], ids=lambda program: program.name)
def test_the_programs_say_their_version(program):
    [version] = re.findall(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    said = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout
    assert re.fullmatch(rf"{program.name} {re.escape(version)}( \([0-9a-f]+\))?\n", said)


# ---- scripts/release, before it builds


@pytest.fixture
def checkout(tmp_path):
    """A repository with this scripts/release, Cargo.toml and CHANGELOG.md."""
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "release", folder / "scripts")
    (folder / "Cargo.toml").write_text('version = "1.2.3"\n')
    (folder / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [1.2.3] - 2026-01-01\n")
    git(folder, "init", "--quiet")
    commit(folder)
    return folder


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder):
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "A commit")


def refusal(folder, *arguments, maintainer=None):
    environment = {name: value for name, value in os.environ.items() if name != "DEB_MAINTAINER"}
    if maintainer is not None:
        environment["DEB_MAINTAINER"] = maintainer
    ran = subprocess.run([folder / "scripts" / "release", *arguments], env=environment, capture_output=True, text=True)
    assert ran.returncode, ran.stdout
    return ran.stderr


def test_a_commit_without_the_tag_of_its_version_is_refused(checkout):
    assert "does not have the tag v1.2.3" in refusal(checkout)
    git(checkout, "tag", "v1.2.2")
    assert "does not have the tag v1.2.3" in refusal(checkout)


def test_a_version_without_a_section_in_the_changelog_is_refused(checkout):
    (checkout / "CHANGELOG.md").write_text("## [Unreleased]\n")
    commit(checkout)
    git(checkout, "tag", "v1.2.3")
    assert "no section '## [1.2.3] - <date>'" in refusal(checkout)


@pytest.mark.parametrize(
    "maintainer",
    [None, "", "A Person", "a@example.org", " <a@example.org>", "A Person <a>", "A <a@b>\nX: y <a@b>", "A<a@b>"],
)
def test_a_release_without_a_maintainer_of_its_package_is_refused(checkout, maintainer):
    git(checkout, "tag", "v1.2.3")
    said = refusal(checkout, maintainer=maintainer)
    assert f"DEB_MAINTAINER is '{maintainer or ''}' and must be the maintainer" in said
    assert "'Name <name@example.org>'" in said


@pytest.mark.parametrize("arguments", [[], ["--trial"]])
def test_changes_that_are_not_committed_are_refused(checkout, arguments):
    (checkout / "new").touch()
    assert "not committed: ?? new" in refusal(checkout, *arguments)


def test_an_unknown_argument_is_refused(checkout):
    assert "unknown argument '--trail'" in refusal(checkout, "--trail")


# ---- scripts/release, with stand-ins for the build and for Cargo's tools


STANDINS = {
    "scripts/build": """
        for name in backends/stateful/libtriton_stateful.so backends/stateful/libonnxruntime.so bin/stateful-inspect \\
            bin/stateful-convert bin/stateful-ovms bin/stateful-drain; do
            mkdir -p "$(dirname "build/$2/$name")"
            echo "$name GLIBC_2.34 $STATEFUL_VERSION" >"build/$2/$name"
        done""",
    ".tools/cargo-about-0.9.3/bin/cargo-about": 'echo texts >"${@: -1}"',
    ".tools/cargo-cyclonedx-0.5.9/bin/cargo-cyclonedx": """
        for crate in . crates/convert crates/ovms tools/drain tools/inspect tools/bench; do
            echo "{\\"path\\": \\"file://$PWD/$crate\\"}" >"$crate/crate-$(basename "$(realpath "$crate")").cdx.json"
        done""",
}


def test_a_trial_leaves_the_checkout_as_it_was_and_no_path_of_it_in_the_files(checkout):
    for crate in ("crates/convert", "crates/ovms", "tools/drain", "tools/inspect", "tools/bench"):
        (checkout / crate).mkdir(parents=True)
        (checkout / crate / "Cargo.toml").touch()
    for name, script in STANDINS.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(f"#!/bin/bash\n{script}\n")
        (checkout / name).chmod(0o755)
    shutil.copytree(
        ROOT / "scripts/support", checkout / "scripts/support", ignore=shutil.ignore_patterns("__pycache__")
    )
    for page in ("LICENSE", "README.md"):
        (checkout / page).touch()
    (checkout / ".venv").symlink_to(ROOT / ".venv")
    (checkout / ".gitignore").write_text("/build/\n/.venv\n/.tools/\n*.cdx.json\n__pycache__/\n")
    commit(checkout)
    (checkout / "build").mkdir()
    (checkout / "build" / "mine").touch()

    maintainer = "A Person <a.person@example.org>"
    subprocess.run(
        [checkout / "scripts/release", "--trial"], check=True, env=os.environ | {"DEB_MAINTAINER": maintainer}
    )

    assert (checkout / "build" / "mine").exists() and (checkout / ".venv").exists() and (checkout / ".tools").exists()
    assert not [file for file in checkout.rglob("*.cdx.json") if ".venv" not in file.parts]
    [package] = (checkout / "build/release").glob("*.deb")
    assert dpkg("-f", package, "Maintainer").strip() == maintainer
    [plain] = (checkout / "build/release").glob("*-linux.tar.gz")
    with tarfile.open(plain) as tar:
        contents = {entry.name.split("/", 1)[1]: tar.extractfile(entry).read() for entry in tar.getmembers()}
    assert {name for name in contents if name.startswith("sbom/")} == {
        "sbom/crate-checkout.cdx.json",
        "sbom/crate-convert.cdx.json",
        "sbom/crate-drain.cdx.json",
        "sbom/crate-inspect.cdx.json",
        "sbom/crate-ovms.cdx.json",
    }
    assert not [name for name, content in contents.items() if str(checkout).encode() in content]
    assert re.search(rb"GLIBC_2.34 1\.2\.3 \([0-9a-f]{12}\)", contents[LIBRARY])
