"""Other backends in the benchmark: how they are named, configured and compared. No server."""

import argparse
from pathlib import Path

import pytest

from support.bench import __main__ as command
from support.bench import peers, report
from support.bench.models import MODELS
from support.bench.peers import Comparison, Peer


def folder_of(path: Path, *names: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        (path / name).touch()
    return path


@pytest.fixture
def onnxruntime(tmp_path) -> Peer:
    folder = folder_of(tmp_path / "ort", "libtriton_onnxruntime.so", "libonnxruntime.so.1")
    return Peer.parse(f"onnxruntime={folder}")


@pytest.fixture
def nvidia(tmp_path) -> Peer:
    return Peer.parse(f"nvidia={folder_of(tmp_path / 'nvidia', 'libtriton_stateful.so')}")


@pytest.mark.parametrize("name", ["stateful", "trivial"])
def test_a_peer_cannot_have_the_name_of_a_backend_of_the_benchmark(tmp_path, name):
    folder = folder_of(tmp_path / "theirs", "libtriton_stateful.so")
    with pytest.raises(argparse.ArgumentTypeError, match=f"name '{name}' is taken.*'nvidia'"):
        command._peer(f"{name}={folder}")


@pytest.mark.parametrize("text", ["=folder", "onnxruntime", "onnxruntime=", "Ort 2=folder"])
def test_a_peer_without_a_name_and_a_folder_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=FOLDER is wanted"):
        command._peer(text)


def test_a_folder_without_a_backend_is_refused(tmp_path):
    with pytest.raises(argparse.ArgumentTypeError, match=f"in {tmp_path}; there is none"):
        command._peer(f"other={tmp_path}")


def test_of_several_libraries_the_peers_name_must_choose_one(tmp_path):
    folder = folder_of(tmp_path, "libtriton_a.so", "libtriton_b.so")
    assert Peer.parse(f"b={folder}").library == folder / "libtriton_b.so"
    with pytest.raises(argparse.ArgumentTypeError, match="there is libtriton_a.so, libtriton_b.so"):
        command._peer(f"c={folder}")


def test_a_missing_folder_of_configurations_is_refused(tmp_path):
    folder = folder_of(tmp_path / "ort", "libtriton_onnxruntime.so")
    with pytest.raises(argparse.ArgumentTypeError, match=f"no folder {tmp_path}/absent"):
        command._peer(f"onnxruntime={folder},{tmp_path}/absent")


def test_a_peer_lies_beside_ours_under_its_own_name_whatever_its_library_is_called(tmp_path, monkeypatch, nvidia):
    ours = folder_of(tmp_path / "built" / "stateful", "libtriton_stateful.so")
    monkeypatch.setattr(peers, "BACKENDS", ours.parent)
    backends = peers.backends_of(folder_of(tmp_path / "run"), [nvidia])
    assert (backends / "stateful" / "libtriton_stateful.so").resolve() == ours / "libtriton_stateful.so"
    assert (backends / "nvidia" / "libtriton_nvidia.so").resolve() == nvidia.library


def test_libraries_beside_the_peers_come_with_it(tmp_path, monkeypatch, onnxruntime):
    monkeypatch.setattr(peers, "BACKENDS", folder_of(tmp_path / "built"))
    backends = peers.backends_of(folder_of(tmp_path / "run"), [onnxruntime])
    assert {file.name for file in (backends / "onnxruntime").iterdir()} == {
        "libtriton_onnxruntime.so",
        "libonnxruntime.so.1",
    }


@pytest.fixture
def comparison(tmp_path, monkeypatch, onnxruntime, nvidia):
    monkeypatch.setattr(peers, "BACKENDS", folder_of(tmp_path / "built"))
    with Comparison(folder_of(tmp_path / "run"), [onnxruntime, nvidia], seconds=1) as made:
        yield made


def test_ours_serves_each_peers_model_with_the_peers_configuration(comparison):
    servings = comparison.servings(MODELS["lstm"], 16)
    assert [(of.backend, of.way.name, of.variant.name) for of in servings] == [
        ("stateful", "implicit", "lstm_rows"),
        ("stateful", "reset", "lstm_resetting"),
        ("stateful", "own", "lstm"),
        ("onnxruntime", "implicit", "lstm_rows"),
        ("nvidia", "reset", "lstm_resetting"),
    ]
    assert "sequence_batching" not in servings[2].config
    assert servings[0].config == servings[3].config.replace('"onnxruntime"', '"stateful"')


def test_without_peers_both_schedulers_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "BACKENDS", folder_of(tmp_path / "built"))
    with Comparison(folder_of(tmp_path / "run"), [], seconds=1) as comparison:
        by_core, own = comparison.servings(MODELS["lstm"], 16)
    assert (by_core.backend, by_core.variant.name, own.backend, own.variant.name) == ("stateful", "lstm") * 2
    assert "sequence_batching" in by_core.config
    assert "sequence_batching" not in own.config


def test_only_the_peer_that_pads_is_told_how_far(comparison):
    _, ours, _, _, theirs = comparison.servings(MODELS["cache"], 16)
    assert "always_pad_to_max_batch" in theirs.config
    assert "always_pad_to_max_batch" not in ours.config


def test_a_given_configuration_is_the_peers_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "BACKENDS", folder_of(tmp_path / "built"))
    configs = folder_of(tmp_path / "configs")
    (configs / "lstm.pbtxt").write_text('name: "theirs"\nbackend: "theirs"\nmax_batch_size: 8\n')
    peer = Peer.parse(f"other={folder_of(tmp_path / 'other', 'libtriton_other.so')},{configs}")
    with Comparison(folder_of(tmp_path / "run"), [peer], seconds=1) as comparison:
        ours, _, theirs = comparison.servings(MODELS["lstm"], 1)
        _, _, without_one = comparison.servings(MODELS["cache"], 1)
    assert theirs.config.split() == ["backend:", '"other"', "max_batch_size:", "8"]
    assert "max_batch_size: 64" in ours.config
    assert "max_batch_size: 64" in without_one.config


@pytest.mark.parametrize("name", ["accumulate", "lstm", "cache"])
def test_the_resetting_variant_starts_from_zero_in_the_rows_that_are_reset(name):
    """NVIDIA's peer and ours are fed the same file, so it must compute what the model computes."""
    import numpy as np
    import onnxruntime

    model = MODELS[name]
    variant = peers.resetting(model)
    plain, resetting = (onnxruntime.InferenceSession(of.build().SerializeToString()) for of in (model, variant))
    random = np.random.default_rng(1)
    inputs = {tensor.name: random.random((2, *tensor.dims), np.float32) for tensor in model.inputs}
    dims = lambda state: tuple(2 if dim == -1 else dim for dim in state.dims)  # noqa: E731
    states = {state.input: random.random(dims(state), np.float32) for state in model.states}
    reset = np.array([[False], [True]])
    answers = resetting.run(None, inputs | states | {peers.RESET: reset})
    for state in model.states:
        cleared = np.moveaxis(states[state.input], state.dims.index(-1), 0)
        cleared[1] = 0
    names = [tensor.name for tensor in resetting.get_outputs()]
    for answer, wanted in zip(answers, plain.run(names, inputs | states), strict=True):
        np.testing.assert_allclose(answer, wanted, rtol=1e-6)


class Measured(Comparison):
    """Rates that are given, not measured."""

    rates: dict[tuple[str, str], float]

    def measure(self, serving, transport, rate=None):
        row = {"transport": transport, "model": serving.model.name, "sequences": serving.sequences, "rate": rate}
        row |= {"backend": serving.backend, "configuration": serving.way.name}
        reached = self.rates[serving.backend, serving.way.name]
        return row | {"requests_per_s": rate or reached, "p50_us": 1.0, "p99_us": 2.0, "batch": 1.0}


@pytest.fixture
def measured(tmp_path, monkeypatch, onnxruntime, nvidia):
    monkeypatch.setattr(peers, "BACKENDS", folder_of(tmp_path / "built"))
    return Measured(folder_of(tmp_path / "run"), [onnxruntime, nvidia], seconds=1)


def test_a_fixed_rate_is_a_part_of_what_the_better_peer_answers(measured):
    ours = {("stateful", "implicit"): 1000.0, ("stateful", "reset"): 80.0, ("stateful", "own"): 10.0}
    measured.rates = ours | {("onnxruntime", "implicit"): 100.0, ("nvidia", "reset"): 60.0}
    rows = list(measured.open(["lstm"], [16], ["process"], blocks=1))
    assert [(row["load"], row["backend"], row["configuration"], row["rate"]) for row in rows] == [
        (0.5, "stateful", "implicit", 50.0),
        (0.5, "stateful", "reset", 50.0),
        (0.5, "onnxruntime", "implicit", 50.0),
        (0.5, "nvidia", "reset", 50.0),
        (0.7, "stateful", "implicit", 70.0),
        (0.7, "stateful", "reset", 70.0),
        (0.7, "onnxruntime", "implicit", 70.0),
        (0.9, "stateful", "implicit", 90.0),
        (0.9, "onnxruntime", "implicit", 90.0),
    ]


def test_backends_are_measured_in_turn_in_each_block(measured):
    ours = [("stateful", "implicit"), ("stateful", "reset"), ("stateful", "own")]
    measured.rates = dict.fromkeys([*ours, ("onnxruntime", "implicit"), ("nvidia", "reset")], 1.0)
    rows = list(measured.closed(["lstm", "cache"], [1], ["process"], blocks=2))
    in_turn = ["stateful", "stateful", "stateful", "onnxruntime", "nvidia"]
    assert [row["backend"] for row in rows] == in_turn * 2 + in_turn[::-1] * 2
    assert [row["block"] for row in rows] == [0] * 10 + [1] * 10


def row(backend: str, block: int, rate: float, **more: object) -> dict:
    of = {"transport": "process", "model": "lstm", "sequences": 16, "load": None, "backend": backend}
    of |= {"configuration": "implicit", "block": block, "requests_per_s": rate, "p50_us": 1.0, "p99_us": 1000 / rate}
    return of | {"batch": 8.0} | more


def test_the_best_of_ours_stands_over_the_better_peer_in_each_block():
    rows = []
    for block, (ours, other, best, worse) in enumerate(
        [(10.0, 40.0, 20.0, 1.0), (10.0, 90.0, 30.0, 99.0), (10.0, 16.0, 8.0, 1.0)]
    ):
        rows += [row("stateful", block, ours), row("stateful", block, other, configuration="reset")]
        rows += [row("a", block, best), row("b", block, worse)]
    (found,) = peers.ratios(rows)
    assert (found["configuration"], found["peer"]) == ("reset", "a")
    assert found["requests_per_s_over_peer"] == 2.0
    assert found["blocks"] == 3


def test_one_configuration_stands_over_another_of_the_same_block():
    rows = []
    for block, (own, core) in enumerate([(10.0, 5.0), (40.0, 10.0), (9.0, 9.0)]):
        rows += [row("stateful", block, own, configuration="own"), row("stateful", block, core, configuration="ours")]
    (found,) = peers.between(rows, "own", "ours")
    assert (found["configuration"], found["peer"], found["blocks"]) == ("own", "ours", 3)
    assert found["requests_per_s_over_peer"] == 2.0
    assert peers.between(rows, "own", "absent") == []


def test_at_a_fixed_rate_the_better_peer_is_the_one_with_the_lower_p99():
    rows = [row(name, 0, 50.0, load=0.5, p99_us=p99) for name, p99 in [("stateful", 6.0), ("a", 4.0), ("b", 3.0)]]
    (found,) = peers.ratios(rows)
    assert (found["peer"], found["p99_us_over_peer"]) == ("b", 2.0)


def test_a_peer_that_fails_now_and_then_counts_in_the_blocks_in_which_it_did_not():
    rows = [row("stateful", 0, 10.0), row("a", 0, 5.0), row("stateful", 1, 10.0)]
    rows.append({key: row("a", 1, 1.0)[key] for key in peers.KEYS} | {"block": 1, "failed": "reason"})
    ours, peer = peers.table(rows)
    assert (ours["failures"], peer["failures"]) == (0, 1)
    assert peer["requests_per_s"] == 5.0
    assert peers.ratios(rows)[0]["blocks"] == 1


def test_a_peer_that_always_fails_stands_in_the_table_with_its_whole_reason():
    reason = "line\n" * 1000
    rows = [row("stateful", 0, 10.0)]
    rows.append({key: row("a", 0, 1.0)[key] for key in peers.KEYS} | {"block": 0, "failed": reason})
    ours, peer = peers.table(rows)
    assert peer["failed"] == reason
    assert peers.ratios(rows) == []


def test_an_error_becomes_a_row_with_the_whole_reason(comparison, monkeypatch):
    reason = "line\n" * 1000

    def fails(*_args: object, **_more: object) -> dict:
        raise RuntimeError(reason)

    monkeypatch.setattr(peers, "drive", fails)
    for serving in comparison.servings(MODELS["accumulate"], 1):
        assert comparison.measure(serving, "process")["failed"].endswith(reason)


def test_the_command_fails_if_ours_has_failed_each_time(tmp_path, monkeypatch):
    def fails(*_args: object, **_more: object) -> dict:
        raise RuntimeError("reason")

    monkeypatch.setattr(peers, "drive", fails)
    monkeypatch.setattr(command, "about", dict)
    monkeypatch.setattr(command, "BUILD", tmp_path)
    monkeypatch.setattr(peers, "BACKENDS", folder_of(tmp_path / "built"))
    monkeypatch.setattr("sys.argv", ["bench", "closed", "--quick", "--transports", "process"])
    assert command.main() == 1


def test_ratios_become_a_table_for_a_page():
    of = {"transport": "process", "load": None, "batch": 4.4, "peer_batch": 12.0}
    rows = [
        of | {"model": "lstm", "sequences": 16, "requests_per_s_over_peer": 1.184},
        of | {"model": "lstm", "sequences": 1, "requests_per_s_over_peer": 1.0},
        of | {"model": "cache", "sequences": 16, "requests_per_s_over_peer": 1.5},
    ]
    assert report.markdown(rows, "requests_per_s").splitlines() == [
        "",
        "| requests/s, process | 1 | 16 |",
        "|---|---|---|",
        "| `lstm` | 1.00 (4.4 : 12) | 1.18 (4.4 : 12) |",
        "| `cache` | – | 1.50 (4.4 : 12) |",
    ]
