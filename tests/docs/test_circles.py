"""No two files of a crate import each other, directly or around."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

CRATES = ["crates/convert"]

# To the end of the file, because tests come last.
TESTS = re.compile(
    r"^#\[cfg\((?:test|any\(test, feature = \"fuzzing\"\))\)\]\n(?:pub(?:\(crate\))? )?mod .*", re.M | re.S
)
NO_CODE = re.compile(r"//.*|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])'")
INLINE = re.compile(r"\bmod \w+ \{")
MODULE = re.compile(r"^(?:#\[path = \"(?P<path>.*?)\"\]\n)?(?:pub(?:\(\w+\))? )?mod (?P<name>\w+);", re.M)
USE = re.compile(r"\buse ([^;]+);")
PATH = re.compile(r"(?<!:)\b(?:crate|self|super)(?:::\w+)+")

Module = tuple[str, ...]


def code_of(file: Path) -> str:
    """The code without tests, comments and texts. What a module inside the file calls `super` is the file."""
    code = NO_CODE.sub("", TESTS.sub("", file.read_text()))
    inline = list(INLINE.finditer(code))
    for start in (found.end() for found in reversed(inline)):
        end, depth = start, 1
        while depth:
            depth += {"{": 1, "}": -1}.get(code[end], 0)
            end += 1
        code = code[:start] + re.sub(r"(?<!:)\bsuper::", "", code[start:end]) + code[end:]
    return code


def modules(root: Path) -> dict[Module, Path]:
    """The file of each module of a library or a program, by its path from the root."""
    found: dict[Module, Path] = {(): root}
    waiting: list[Module] = [()]
    while waiting:
        module = waiting.pop()
        file = found[module]
        folder = file.parent if file.stem in ("lib", "main", "mod") else file.parent / file.stem
        for declared in MODULE.finditer(TESTS.sub("", file.read_text())):
            inner = (*module, declared["name"])
            candidates = [folder / f"{inner[-1]}.rs", folder / inner[-1] / "mod.rs"]
            if declared["path"]:
                candidates = [folder / declared["path"]]
            found[inner] = next(candidate for candidate in candidates if candidate.exists())
            waiting.append(inner)
    return found


def spread(tree: str) -> Iterator[list[str]]:
    """The paths of a `use`: `a::{b, c::{d, e}}` has three."""
    start, brace, rest = tree.strip().partition("{")
    front = [part.split(" as ")[0].strip() for part in start.split("::") if part.strip()]
    if not brace:
        yield front
        return
    depth, part = 0, ""
    for letter in rest[: rest.rindex("}")]:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            yield from ([*front, *inner] for inner in spread(part)) if part.strip() else ()
            part = ""
        else:
            part += letter
    if part.strip():
        yield from ([*front, *inner] for inner in spread(part))


def resolved(path: list[str], module: Module, known: dict[Module, Path]) -> Module | None:
    """The module that a path leads to; none for other crates."""
    at = module
    if path[0] == "crate":
        at = ()
    elif path[0] == "super":
        at = module[:-1]
    elif path[0] != "self" and (*module, path[0]) not in known:
        return None
    for name in path if path[0] not in ("crate", "self", "super") else path[1:]:
        if name == "super":
            at = at[:-1]
        elif (*at, name) in known:
            at = (*at, name)
        else:
            break
    return at


def imports(root: Path) -> dict[Path, set[Path]]:
    """The files that each file imports."""
    known = modules(root)
    found: dict[Path, set[Path]] = {file: set() for file in known.values()}
    for module, file in known.items():
        code = code_of(file)
        paths = [path for tree in USE.findall(code) for path in spread(tree)]
        paths += [path.split("::") for path in PATH.findall(USE.sub("", code))]
        # A module that this file declares is named without a prefix.
        children = [inner[-1] for inner in known if inner and inner[:-1] == module]
        paths += [[name] for name in children if re.search(rf"(?<![\w:]){name}::", USE.sub("", code))]
        reached = {resolved(path, module, known) for path in paths if path}
        found[file] |= {known[other] for other in reached if other is not None and known[other] != file}
    return found


def circles(graph: dict[Path, set[Path]]) -> list[set[Path]]:
    """Files that reach each other."""

    def reached_from(file: Path) -> set[Path]:
        reached: set[Path] = set()
        waiting = [file]
        while waiting:
            new = graph[waiting.pop()] - reached
            reached |= new
            waiting += new
        return reached

    reached = {file: reached_from(file) for file in graph}
    found: list[set[Path]] = []
    for file in graph:
        circle = {other for other in reached[file] if file in reached[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def roots(crate: str) -> list[Path]:
    return [file for name in ("lib.rs", "main.rs") if (file := ROOT / crate / "src" / name).exists()]


@pytest.mark.parametrize("crate", CRATES)
def test_no_files_import_each_other(crate: str):
    found = [circle for root in roots(crate) for circle in circles(imports(root))]
    assert not found, [sorted(str(file.relative_to(ROOT / crate / "src")) for file in circle) for circle in found]


@pytest.mark.parametrize("crate", CRATES)
def test_the_check_sees_every_file(crate: str):
    seen = {file for root in roots(crate) for file in modules(root).values()}
    assert {file for file in (ROOT / crate / "src").rglob("*.rs") if "tests" not in file.stem} == seen
    assert sum(len(imported) for root in roots(crate) for imported in imports(root).values()) > len(seen)


def test_a_circle_is_found(tmp_path: Path):
    (tmp_path / "lib.rs").write_text("mod a;\nmod b;\npub use a::one;\n")
    (tmp_path / "a.rs").write_text("use std::{fmt, io};\nuse crate::b::{self, two};\npub fn one() {}\n")
    (tmp_path / "b.rs").write_text("pub fn two() { super::a::one() }\n#[cfg(test)]\nmod tests { use crate::one; }\n")
    assert circles(imports(tmp_path / "lib.rs")) == [{tmp_path / "a.rs", tmp_path / "b.rs"}]
    (tmp_path / "b.rs").write_text("pub fn two() {}\n")
    assert circles(imports(tmp_path / "lib.rs")) == []
