"""Parts are cut into pieces and joined; pieces that are damaged or missing are named."""

import io
import random
import tarfile

import pytest
from rich.console import Console

from support.gpu_check import install, pack
from support.gpu_check.install import Place
from support.gpu_check.parts import MANIFEST, Manifest, PartsError, cut, faults


def part(folder, name: str, size: int):
    file = folder / name
    file.write_bytes(random.Random(size).randbytes(size))
    return file


@pytest.fixture
def packed(tmp_path):
    """A part of one piece and a part of three."""
    whole = {name: part(tmp_path, name, size) for name, size in (("small.tar", 700), ("large.tar", 2500))}
    contents = {name: file.read_bytes() for name, file in whole.items()}
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    cut(whole.values(), pieces, {"commit": "abc", "python": "3.12"}, piece_bytes=1000)
    return pieces, contents


def test_pieces_are_numbered_and_no_larger_than_asked_for(packed):
    pieces, _ = packed
    names = sorted(file.name for file in pieces.iterdir())
    assert names == [
        "001-small.tar",
        "002-large.tar.1of3",
        "002-large.tar.2of3",
        "002-large.tar.3of3",
        MANIFEST,
    ]
    assert max(piece.bytes for piece in Manifest.read(pieces).pieces) == 1000


def test_pieces_are_joined_to_what_was_cut(packed, tmp_path):
    pieces, contents = packed
    for each in Manifest.read(pieces).parts:
        assert faults(each, pieces) == []
        each.join(pieces, tmp_path / "joined")
        assert (tmp_path / "joined").read_bytes() == contents[each.name]


def test_every_missing_and_damaged_piece_is_named(packed, tmp_path):
    pieces, _ = packed
    (pieces / "002-large.tar.1of3").unlink()
    (pieces / "002-large.tar.2of3").write_bytes(b"x" * 1000)
    (pieces / "002-large.tar.3of3").write_bytes(b"short")
    with pytest.raises(PartsError) as refused:
        install.check(Manifest.read(pieces), pieces, Place(tmp_path / "work"))
    assert str(refused.value).splitlines() == [
        "of 4 pieces, 3 cannot be used:",
        "  002-large.tar.1of3: missing",
        "  002-large.tar.2of3: damaged: another sha256",
        "  002-large.tar.3of3: damaged: 5 bytes of 500",
    ]


@pytest.mark.parametrize("text", ["", "{", "{}", '{"about": {}, "parts": [{}]}'])
def test_a_damaged_manifest_is_named(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(PartsError, match=f"{MANIFEST} is damaged"):
        Manifest.read(tmp_path)


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(PartsError, match=f"no .*{MANIFEST}"):
        Manifest.read(tmp_path)


def tar(file, **contents: str):
    with tarfile.open(file, "w") as archive:
        for name, text in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return file


def test_a_part_is_unpacked_once_and_then_its_pieces_may_be_away(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(install, "_environment", lambda *_: None)
    monkeypatch.setattr(install, "lay_out", lambda *_: None)
    pieces, place = tmp_path / "pieces", Place(tmp_path / "work")
    pieces.mkdir()
    archives = [tar(tmp_path / "tree.tar", readme="tree"), tar(tmp_path / "wheels.tar", wheel="wheel")]
    cut(archives, pieces, {"python": "3.12"})
    install.install(pieces, place)
    assert (place.tree / "readme").read_text() == "tree"
    assert (place.work / "parts" / "wheels" / "wheel").read_text() == "wheel"
    assert capsys.readouterr().out.count(" s\n") == 3
    (pieces / "002-wheels.tar").unlink()
    install.install(pieces, place)
    assert capsys.readouterr().out == ""


def test_the_packed_onnxruntime_is_the_pinned_one():
    pinned = next(need for need in pack.pinned("3.12") if need.name == "onnxruntime")
    assert str(pinned.specifier) == f"=={pack.RUNTIMES[13]}"


def test_a_python_for_which_there_is_no_onnxruntime_is_refused(tmp_path):
    with pytest.raises(pack.PackError, match="needs Python 3.11 or newer: --cuda 12"):
        pack.pack(tmp_path, "3.10", 13, Console())
    assert not list(tmp_path.iterdir())


def test_wheels_for_another_python_are_refused_with_the_way_out():
    with pytest.raises(PartsError, match=r"Python 3\.99.*pack --python 3\."):
        install.interpreter("3.99")
