"""One file of the tests on the real server: pytest's output, its junit XML, and what that says, as one JSON object.

Also how many of the models that it configured had instances of which kind: tests that ran on the CPU prove nothing here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections import defaultdict
from pathlib import Path

from support import paths

NO_TESTS = 5
MESSAGE_KEPT = 600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--junit", type=Path, required=True)
    parser.add_argument("--marker", default="", help="as pytest's -m")
    options = parser.parse_args()
    options.junit.parent.mkdir(parents=True, exist_ok=True)
    options.junit.unlink(missing_ok=True)
    marker = ["-m", options.marker] if options.marker else []
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "--tb=short", "-p", "no:cacheprovider", *marker]
    with tempfile.TemporaryDirectory(prefix="stateful-tests-") as folder:
        places = [f"--basetemp={folder}/pytest", f"--junit-xml={options.junit}"]
        # What scripts/build made for users: the machine may not have the other one, which a dry run needs.
        where = os.environ | ({} if paths.TEST_DEVICE == "simulated" else {"STATEFUL_TEST_BUILD": "build"})
        code = subprocess.run([*command, *places, str(options.file)], cwd=paths.ROOT, env=where).returncode
        models = kinds(Path(folder))
    if options.junit.exists():
        print(json.dumps({"file": options.file.name} | summary(options.junit) | {"models": models}))
    return 0 if code == NO_TESTS else code


def kinds(folder: Path) -> dict[str, int]:
    """How many models under it have instances of each kind."""
    configs = [file.read_text() for file in folder.rglob("config.pbtxt")]
    return {kind: sum(kind in config for config in configs) for kind in ("KIND_GPU", "KIND_CPU")}


def summary(junit: Path) -> dict:
    """Counts, and of each test that failed its name and the beginning of the reason. A test that fails, and fails to end
    too, is there twice."""
    by_test = defaultdict(list)
    for case in xml.parse(junit).getroot().iter("testcase"):
        by_test[case.get("classname"), case.get("name")].append(case)
    failures, skipped = [], []
    for (_, name), cases in by_test.items():
        why = [why for case in cases if (why := _failure(case)) is not None]
        if why:
            failures.append({"test": name, "why": why[0]})
        else:
            found = [skip for case in cases if (skip := case.find("skipped")) is not None]
            skipped += [f"{name}: {skip.get('message')}" for skip in found[:1]]
    passed = len(by_test) - len(failures) - len(skipped)
    return {"tests": len(by_test), "passed": passed, "failures": failures, "skipped": skipped}


def _failure(case: xml.Element) -> str | None:
    found = case.find("failure") if _has(case, "failure") else case.find("error")
    return None if found is None else (found.get("message") or found.text or "")[:MESSAGE_KEPT]


def _has(case: xml.Element, tag: str) -> bool:
    return case.find(tag) is not None


if __name__ == "__main__":
    sys.exit(main())
