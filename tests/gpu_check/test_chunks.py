"""Chunks are recorded as they end; a second run goes on where the first one stopped."""

import json
import time

import pytest
from samples import chunk

from support.gpu_check import stages
from support.gpu_check.chunks import BEGUN, FAILED, INTERRUPTED, PASSED, Record, Results, Runner
from support.gpu_check.install import Place


@pytest.fixture
def file(tmp_path):
    return tmp_path / "results.json"


def runner(file, seconds: float = 60, commit: str = "abc", **options) -> Runner:
    return Runner(Results(file), seconds, commit, say=lambda _: None, **options)


def counting(folder, name: str, ending: str = ""):
    """Counts its runs in a file."""
    count = folder / f"{name}.count"
    code = f"file = open({str(count)!r}, 'a'); file.write('.'); file.close(); {ending}"
    return chunk("stage", name, code), lambda: len(count.read_text()) if count.exists() else 0


def test_rows_are_the_lines_that_are_json_objects_and_the_rest_is_output(file):
    code = """import sys; print('{"model": "lstm", "us": 1.5}'); print('{no json'); print('[1]'); print('x', file=sys.stderr)"""
    runner(file).run(chunk("step", "lstm", code))
    record = Results(file).records["step/lstm"]
    assert record.status == PASSED and record.rows == [{"model": "lstm", "us": 1.5}]
    assert record.output.splitlines() == ["{no json", "[1]", "x"]


def test_a_chunk_that_fails_is_recorded_with_its_output(file):
    runner(file).run(chunk("step", "lstm", "import sys; print('a word'); sys.exit('the reason')"))
    record = Results(file).records["step/lstm"]
    assert record.status == FAILED
    assert all(text in record.output for text in ("a word", "the reason", "ended with 1"))


def test_of_long_output_the_beginning_and_the_end_are_kept(file):
    runner(file).run(chunk("step", "lstm", "print('first', 'x' * 100_000, 'last')"))
    output = Results(file).records["step/lstm"].output
    assert output.startswith("first") and output.endswith("last") and len(output) < 9000


def test_a_program_that_is_not_there_is_a_failure(file):
    of = chunk("movement", "movement", "")
    of.command[:] = ["/nowhere/program"]
    runner(file).run(of)
    record = Results(file).records["movement/movement"]
    assert record.status == FAILED and "/nowhere/program" in record.output


def test_a_second_run_does_only_what_the_first_did_not(file, tmp_path):
    first, first_runs = counting(tmp_path, "first")
    second, second_runs = counting(tmp_path, "second")
    runner(file).run(first)
    again = runner(file)
    for each in (first, second):
        again.run(each)
    assert (first_runs(), second_runs()) == (1, 1)
    assert {key: of.status for key, of in Results(file).records.items()} == {
        "stage/first": PASSED,
        "stage/second": PASSED,
    }


def test_what_failed_is_run_again_if_asked_for_or_with_other_parts(file, tmp_path):
    failing, runs = counting(tmp_path, "failing", "raise SystemExit(1)")
    for options, wanted in (({}, 1), ({}, 1), ({"again": True}, 2), ({"commit": "def"}, 3)):
        runner(file, **options).run(failing)
        assert runs() == wanted


def test_what_passed_is_no_proof_of_another_commit(file, tmp_path):
    passing, runs = counting(tmp_path, "passing")
    for options, wanted in (({}, 1), ({"again": True}, 1), ({"commit": "def"}, 2), ({"commit": "def"}, 2)):
        runner(file, **options).run(passing)
        assert runs() == wanted
    assert Results(file).records["stage/passing"].commit == "def"


def test_a_chunk_that_would_not_fit_is_not_begun_and_said(file):
    said = []
    limited = Runner(Results(file), 5, "abc", say=said.append)
    limited.run(chunk("step", "lstm", "", needs_s=25))
    assert limited.not_begun == ["step/lstm"] and not file.exists()
    assert "25 s" in said[0] and "not begun" in said[0]


def test_a_chunk_that_the_time_ran_out_for_is_interrupted_and_wants_more_the_next_time(file):
    slow = chunk("step", "lstm", "import time; time.sleep(30)")
    began = time.monotonic()
    runner(file, seconds=0.5).run(slow)
    assert time.monotonic() - began < 5
    record = Results(file).records["step/lstm"]
    assert record.status == INTERRUPTED
    assert runner(file).needs_s(slow) == pytest.approx(1.5 * record.seconds)


def test_a_chunk_that_is_over_its_limit_has_failed(file):
    runner(file).run(chunk("step", "lstm", "import time; time.sleep(30)", limit_s=0.3))
    assert Results(file).records["step/lstm"].status == FAILED


def test_a_chunk_that_was_ended_from_outside_is_run_again(file, tmp_path):
    of, runs = counting(tmp_path, "lstm")
    Results(file).put(of, Record(BEGUN, "abc"))
    runner(file).run(of)
    assert runs() == 1 and Results(file).records[of.key].status == PASSED


def test_the_file_is_whole_while_a_chunk_runs(file):
    code = f"import json; status = json.load(open({str(file)!r}))['chunks']['step/lstm']['status']; print(status)"
    runner(file).run(chunk("step", "lstm", code))
    assert Results(file).records["step/lstm"].output == BEGUN


# ---- stages


def staged(tmp_path, **codes: str):
    """A chunk a stage, and how often each ran."""
    made, runs = {}, {}
    for stage, ending in codes.items():
        of, runs[stage] = counting(tmp_path, stage, ending)
        of = chunk(stage, "only", of.command[-1])
        made[stage] = lambda _, of=of: [of]
    return made, lambda: [stage for stage in codes for _ in range(runs[stage]())]


def test_nothing_is_begun_behind_a_gate_that_failed(file, tmp_path):
    make, ran = staged(tmp_path, setup="", machine="raise SystemExit(1)", load="", step="")
    limited = runner(file)
    stages.run(limited, None, [], make)
    assert ran() == ["setup", "machine"] and limited.not_begun == ["load/*", "step/*"]


def test_all_stages_but_the_tests_of_behaviour_fit_into_half_an_hour(tmp_path, monkeypatch):
    monkeypatch.setattr(stages.Setting, "environment", lambda *_, **__: {})
    setting = stages.Setting(tmp_path, Place(tmp_path))
    made = [chunk for name, stage in stages.STAGES.items() if name != "behaviour" for chunk in stage(setting)]
    assert sum(chunk.limit_s for chunk in made) <= stages.MOST_S
    assert list(stages.STAGES)[-1] == "behaviour"


def test_a_stage_that_is_asked_for_by_name_is_begun_all_the_same(file, tmp_path):
    make, ran = staged(tmp_path, setup="", machine="raise SystemExit(1)", step="")
    stages.run(runner(file), None, ["machine", "step"], make)
    assert ran() == ["setup", "machine", "step"]


def test_nothing_is_begun_without_setup_which_is_always_done(file, tmp_path):
    make, ran = staged(tmp_path, setup="raise SystemExit(1)", step="")
    for _ in range(2):
        stages.run(runner(file), None, ["step"], make)
    assert ran() == ["setup", "setup"]
    assert json.loads(file.read_text())["chunks"]["setup/only"]["status"] == FAILED
