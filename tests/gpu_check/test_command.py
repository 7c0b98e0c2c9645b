"""scripts/gpu-check run as a whole, with parts that cannot be set up, and its exit codes."""

import subprocess

import pytest
from samples import chunk

from support import paths
from support.gpu_check import __main__ as command
from support.gpu_check import libraries
from support.gpu_check.chunks import Results, Runner
from support.gpu_check.install import Place
from support.gpu_check.parts import Manifest, Part, Piece

SCRIPT = paths.ROOT / "scripts" / "gpu-check"


def test_a_missing_piece_is_named_recorded_and_ends_with_1(tmp_path):
    piece = Piece("001-tree.tar", 10, "0" * 64)
    Manifest({"commit": "abc", "python": "3.12"}, (Part("tree.tar", "0" * 64, (piece,)),)).write(tmp_path)
    ran = subprocess.run([SCRIPT, "run", str(tmp_path)], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "001-tree.tar: missing" in ran.stdout and "step/*: not begun: setup has not passed" in ran.stdout
    record = Results(tmp_path / "results.json").records["setup/install"]
    assert record.status == "failed" and "001-tree.tar: missing" in record.output


def test_a_folder_that_is_not_there_is_called_wrongly(tmp_path):
    ran = subprocess.run([SCRIPT, "run", str(tmp_path / "none")], capture_output=True, text=True)
    assert ran.returncode == command.MISCALLED and str(tmp_path / "none") in ran.stderr and "pack" in ran.stderr


def test_a_folder_without_parts_is_refused(tmp_path):
    ran = subprocess.run([SCRIPT, "run", str(tmp_path)], capture_output=True, text=True)
    assert ran.returncode == 1 and "manifest.json" in ran.stderr


@pytest.mark.parametrize(
    "code, needs_s, wanted",
    [("", 0, command.DONE), ("raise SystemExit('why')", 0, command.WRONG), ("", 99, command.MORE)],
)
def test_exit_codes_tell_done_from_wrong_from_more_to_do(tmp_path, capsys, code, needs_s, wanted):
    runner = Runner(Results(tmp_path / "results.json"), 50, "abc", say=lambda _: None)
    runner.run(chunk("step", "lstm", code, needs_s=needs_s))
    assert command._end(runner, Place(tmp_path), []) == wanted
    said = capsys.readouterr().out
    assert ("step/lstm has failed" in said and "why" in said) == (wanted == command.WRONG)
    assert ("not begun: 1 of step (lstm" in said) == (wanted == command.MORE)


def test_libraries_are_found_where_they_are_and_named_where_they_are_not(tmp_path):
    provider = tmp_path / "provider.so"
    provider.write_bytes(b"\x7fELF\0libcublas.so.13\0libcublasLt.so.13\0libcudart.so.12\0")
    wanted = libraries.wanted(provider)
    assert wanted.linked == ("libcublas.so.13", "libcublasLt.so.13", "libcudart.so.13")
    assert wanted.late == ("libcudnn.so.9", "libcufft.so.12", "libnvrtc.so.13")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "b" / "libcublas.so.13").touch()
    found = libraries.find(wanted.linked, [tmp_path / "a", tmp_path / "b"])
    assert found["libcublas.so.13"] == str(tmp_path / "b")
    assert libraries.search_path({"x": "/a", "y": "the system", "z": None, "w": "/a"}) == "/a"
