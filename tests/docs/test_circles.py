"""No two files of a crate, or of a module of the backend, import each other, directly or through others.

A `mod.rs`, `lib.rs` or `main.rs` that only declares and re-exports its children does not count as a file. An import
through it counts as an import of the child.
"""

import re
from pathlib import Path

import pytest

from support.paths import ROOT

#: Those of more than one file.
MODULES = sorted(
    f"src/{path.name}"
    for path in (ROOT / "src").iterdir()
    if sum("tests" not in file.stem for file in path.rglob("*.rs")) > 1
)
CRATES = ("convert", "gpu-rows", "model-config", "ovms", "rows", "sequences", "state-store")
FOLDERS = (*MODULES, *(f"crates/{crate}/src" for crate in CRATES))
COMMENT = re.compile(r"//.*")
TESTS = re.compile(
    r"^#\[cfg\((?:test|any\(test, .*?\))\)\]\n(?:#\[path.*\n)?(?:pub(?:\(\w+\))? )?mod \w*tests\b", re.MULTILINE
)
USE = re.compile(r"^\s*(?:pub(?:\([a-z:: ]+\))? )?use ([^;]+);", re.MULTILINE)
PATH = re.compile(r"\b\w+(?:::\w+)+")
DECLARATION = re.compile(
    r"#!?\[[^\]]*\]|(?:pub(?:\([a-z:: ]+\))? )?mod \w+;|(?:pub(?:\([a-z:: ]+\))? )?use [^;]+;", re.MULTILINE
)

#: The files that stand for their folder.
ROOTS = ("mod", "lib", "main")

#: A module inside a file.
INLINE = re.compile(r"\bmod \w+ \{")

Module = tuple[str, ...]


def code_of(file: Path) -> str:
    """The code without comments and tests. What a module inside the file calls `super` is the file."""
    code = TESTS.split(COMMENT.sub("", file.read_text()))[0]
    for start in (found.end() for found in reversed(list(INLINE.finditer(code)))):
        end, depth = start, 1
        while depth:
            depth += {"{": 1, "}": -1}.get(code[end], 0)
            end += 1
        code = code[:start] + re.sub(r"(?<!:)\bsuper::", "", code[start:end]) + code[end:]
    return code


def paths_of(tree: str) -> list[list[str]]:
    """The paths of a `use`: `a::{b, c::{d as e, f}}` has `a::b`, `a::c::d` and `a::c::f`."""
    head, _, group = tree.partition("{")
    prefix = [part for part in head.strip().split("::") if part]
    if not group:
        return [[part.split(" as ")[0].strip() for part in prefix]]
    items, depth = [""], 0
    for letter in group.rstrip().removesuffix("}"):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            items.append("")
        else:
            items[-1] += letter
    return [prefix + path for item in items if item.strip() for path in paths_of(item)]


def files_of(folder: Path) -> dict[Module, str]:
    """The code of each file without comments and tests, by the path of its module from the crate's root."""
    sources = {}
    for file in sorted(folder.rglob("*.rs")):
        # A program beside a library only uses that, as any other crate does.
        is_program = file.name == "main.rs" and (file.parent / "lib.rs").exists()
        if "tests" not in file.stem and not is_program:
            module = file.relative_to(root_of(folder)).with_suffix("").parts
            sources[module[:-1] if module[-1] in ROOTS else module] = code_of(file)
    return sources


def root_of(folder: Path) -> Path:
    """The folder of the crate's root."""
    return folder if any((folder / f"{name}.rs").exists() for name in ("lib", "main")) else folder.parent


def named_in(module: Module, code: str) -> list[Module]:
    """The paths that a module's code names, from the crate's root."""
    uses = [path for tree in USE.findall(code) for path in paths_of(tree)]
    found = []
    for path in uses + [match.split("::") for match in PATH.findall(USE.sub("", code))]:
        match path[0]:
            case "crate":
                found.append(tuple(path[1:]))
            case "super":
                up = next(count for count, part in enumerate([*path, ""]) if part != "super")
                found.append((*module[: len(module) - up], *path[up:]))
            case "self":
                found.append((*module, *path[1:]))
            case _:
                found.append((*module, *path))
    return found


def imports(folder: Path) -> dict[Module, set[Module]]:
    """Which files each file of a folder imports."""
    sources = files_of(folder)
    named = {module: named_in(module, code) for module, code in sources.items()}
    # A `mod.rs` without code of its own.
    doors = {
        module
        for module, code in sources.items()
        if any((root_of(folder).joinpath(*module) / f"{name}.rs").exists() for name in ROOTS)
        and not DECLARATION.sub("", code).strip()
    }

    def file_of(path: Module) -> Module | None:
        """The file that has what a path names; behind a door, the child that is re-exported."""
        module = next((path[:end] for end in range(len(path), -1, -1) if path[:end] in sources), None)
        if module not in doors:
            return module
        return next((file_of(target) for target in named[module] if target[-1:] == path[len(module) :][:1]), None)

    return {
        module: {file for file in map(file_of, paths) if file is not None and file != module}
        for module, paths in named.items()
        if module not in doors
    }


def circles(folder: Path) -> list[list[str]]:
    """The sets of files in which each one imports every other, directly or through others; the largest first."""
    reached = imports(folder)
    for via in reached:
        for module in reached:
            if via in reached[module]:
                reached[module] = reached[module] | reached[via]
    sets = {frozenset(other for other in reached[module] if module in reached[other]) for module in reached}
    names = [sorted("/".join(module) or "lib" for module in found) for found in sets if found]
    return sorted(names, key=len, reverse=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_files_import_each_other(folder):
    found = imports(ROOT / folder)
    assert len(found) > 1 and sum(map(len, found.values())) >= len(found) / 2, f"{folder}: the imports aren't read"
    assert circles(ROOT / folder) == []


def test_circles_are_found_directly_around_and_behind_a_door(tmp_path):
    files = {
        "mod": "mod a;\nmod b;\nmod c;\nmod d;\npub use c::C;\n",
        "a": "use super::{b::{B, other}, d};\n",
        "b": "// use super::a;\nfn f() -> super::C {}\n",
        "c": "use crate::door::a::A;\n",
        "d": "use std::fmt;\n#[cfg(test)]\nmod tests {\n    use super::super::a::A;\n}\n",
    }
    folder = tmp_path / "door"
    folder.mkdir()
    for name, code in files.items():
        (folder / f"{name}.rs").write_text(code)
    assert circles(folder) == [["door/a", "door/b", "door/c"]]
    (folder / "c.rs").write_text("use super::d::D;\n")
    assert circles(folder) == []
    (folder / "mod.rs").write_text(files["mod"] + "fn code() { a::run() }\n")
    (folder / "d.rs").write_text("fn f() { super::code() }\n")
    assert circles(folder) == [["door", "door/a", "door/b", "door/c", "door/d"]]


def test_circles_are_found_beside_a_program_and_behind_a_module_of_some_builds(tmp_path):
    files = {
        "lib": '#[cfg(any(test, feature = "f"))]\nmod b;\nmod a;\npub use a::A;\n',
        "main": "use a::A;\nfn main() {}\n",
        "a": "use crate::b::B;\n",
        "b": "use crate::A;\n",
    }
    for name, code in files.items():
        (tmp_path / f"{name}.rs").write_text(code)
    assert circles(tmp_path) == [["a", "b"]]
