"""scripts/gpu-check run as a whole, with parts that cannot be set up, and its exit codes."""

import json
import subprocess
from types import SimpleNamespace

import pytest
from samples import WRONG, chunk

from support import paths
from support.gpu_check import __main__ as command
from support.gpu_check import libraries
from support.gpu_check.chunks import Results, Runner
from support.gpu_check.install import Place
from support.gpu_check.parts import Manifest, Part, PartsError, Piece

SCRIPT = paths.ROOT / "scripts" / "gpu-check"


def test_a_missing_piece_is_named_recorded_and_ends_with_1(tmp_path):
    piece = Piece("001-tree.tar", 10, "0" * 64)
    about = {"commit": "abc", "python": "3.12", "cuda": 13}
    Manifest(about, (Part("tree.tar", "0" * 64, (piece,)),)).write(tmp_path)
    (tmp_path / "libcuda.so.1").touch()
    command = [SCRIPT, "run", str(tmp_path), "--stand-in", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True)
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


@pytest.mark.parametrize("packed, driver, refused", [(13, (12, 8), True), (13, (13, 0), False), (12, (13, 0), False)])
def test_a_driver_that_is_older_than_the_packed_cuda_is_refused(monkeypatch, packed, driver, refused):
    monkeypatch.setattr(command, "Driver", lambda: SimpleNamespace(version=lambda: driver))
    if refused:
        with pytest.raises(PartsError, match=r"knows CUDA 12\.8, .* for CUDA 13: scripts/gpu-check pack --cuda 12"):
            command._check_driver(packed)
    else:
        command._check_driver(packed)


def test_a_machine_without_a_driver_is_refused_with_the_way_to_a_dry_run(monkeypatch):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(command, "Driver", missing)
    with pytest.raises(PartsError, match="libcuda.so.1.*--stand-in"):
        command._check_driver(13)


def test_what_was_wrong_is_told_at_the_end(tmp_path, capsys):
    runner = Runner(Results(tmp_path / "results.json"), 50, "abc", say=lambda _: None)
    runner.run(chunk("values", "lstm", f"print({json.dumps(WRONG)!r}); raise SystemExit(1)"))
    command._end(runner, Place(tmp_path), [])
    assert "lstm, 16 rows: largest difference: 0.5; allowed: at most 0.0001" in capsys.readouterr().out


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
