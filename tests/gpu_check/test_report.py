"""The report and the table of sample results."""

import pytest
from rich.console import Console
from samples import MACHINE, MOVED, RIGHT, STEP, TESTED, WRONG

from support.gpu_check import behaviour, report
from support.gpu_check.chunks import FAILED, PASSED, Record, Results


@pytest.fixture
def results(tmp_path):
    made = Results(tmp_path / "results.json")
    of = lambda status, *rows, **more: Record(status, "abc1234", "2026-01-01", 12.0, list(rows), **more)  # noqa: E731
    made.records = {
        "setup/install": of(PASSED),
        "machine/machine": of(PASSED, MACHINE),
        "values/lstm_16": of(PASSED, RIGHT),
        "values/lstm_64": of(FAILED, WRONG),
        "behaviour/test_pool": of(FAILED, TESTED, output="12 tests\n1 failed"),
        "movement/movement": of(PASSED, MOVED),
        "step/lstm_16": of(PASSED, STEP),
        "graphs/lstm_16": of(PASSED, STEP | {"raw_error": "cannot\ncapture"}),
    }
    made.write()
    return Results(tmp_path / "results.json")


def test_the_report_has_the_machine_and_what_it_lacks(results):
    text = report.markdown(results)
    assert text.startswith("## Results\n")
    assert "NVIDIA H200 (143771 MiB, driver 580.1)" in text and "commit abc1234" in text
    assert "does not have: `libcudnn.so.9`" in text


def test_the_report_has_each_stages_measurements(results):
    text = report.markdown(results)
    assert "| lstm | 16 | same | 80.00 | 95.00 | 100 | 1.25 | 1.05 | 85.00 | 0 |" in text
    assert "| 64 KiB | 64 | 65,536 | 1,500 | 1,400 | 2,000 | 1.33 | 1.43 | 6.10 |" in text
    assert "ONNX Runtime alone, lstm, batch 16: cannot capture" in text


def test_the_report_has_each_check_with_what_was_found_and_allowed(results):
    text = report.markdown(results)
    assert "| Values | lstm, 16 rows: largest difference | 2e-06 | at most 0.0001 | right |" in text
    assert "| Values | lstm, 16 rows: largest difference | 0.5 | at most 0.0001 | wrong |" in text
    wrong = next(row for record in results.records.values() for row in record.rows if row.get("found") == "0.5")
    wrong["found"] = "an error\nof two lines | with a bar"
    assert r"| an error of two lines \| with a bar |" in report.markdown(results)


def test_the_report_of_a_dry_run_says_so(results):
    assert "dry run" not in report.markdown(results)
    results.about = {"stand_in": True}
    assert "**A dry run**" in report.markdown(results)


def test_the_report_names_what_failed_and_what_was_not_run(results):
    text = report.markdown(results)
    assert "10 tests passed, 1 failed, 1 skipped. Models that were configured: 3 of `KIND_GPU`, 1 of `KIND_CPU`" in text
    assert "- `test_pool.py::test_a_full_pool_refuses`: assert 3 == 4" in text
    assert "**behaviour/test_pool**: failed" in text and "12 tests\n1 failed" in text
    assert "Not run: The kernel, A model loads, Memory from step to step," in text


def test_the_report_says_of_how_many_chunks_a_stage_has_results(results):
    results.planned = {"behaviour": 49, "step": 1}
    text = report.markdown(results)
    assert "| The tests on the real server | 1 failed of 49 | 12.00 |" in text
    assert "| The step | 1 passed | 12.00 |" in text


def test_the_report_says_of_a_stage_that_found_nothing_to_check_that_it_was_left_out(results):
    results.records["tensorrt/tensorrt"] = Record(
        PASSED, rows=[RIGHT | {"found": "no TensorRT", "verdict": "left out"}]
    )
    assert "| TensorRT | 1 left out |" in report.markdown(results)


def test_the_report_names_files_without_a_model_on_a_gpu(results):
    assert "Without a model on a GPU" not in report.markdown(results)
    results.records["behaviour/test_pool"].rows[0]["models"] = {"KIND_GPU": 0, "KIND_CPU": 1}
    assert "Without a model on a GPU: `test_pool.py`." in report.markdown(results)


def test_a_report_of_nothing_says_so(tmp_path):
    text = report.markdown(Results(tmp_path / "none.json"))
    assert "was not asked" in text and "Not run: Setting up" in text


def test_a_document_keeps_what_stands_before_the_mark(results, tmp_path):
    document = tmp_path / "gpu.md"
    document.write_text(f"# GPUs\n\nWords.\n\n{report.MARK}\n\nNone yet.\n")
    for _ in range(2):
        report.put(document, results)
        assert document.read_text() == f"# GPUs\n\nWords.\n\n{report.MARK}\n\n{report.markdown(results)}"


def test_a_document_without_the_mark_is_the_report(results, tmp_path):
    report.put(tmp_path / "new.md", results)
    assert (tmp_path / "new.md").read_text() == report.markdown(results)


def test_the_table_has_a_line_for_each_stage(results):
    console = Console(width=140, record=True, file=open("/dev/null", "w"))
    console.print(report.table(results))
    text = console.export_text()
    assert (
        "NVIDIA H200" in text
        and "lstm 1.25 at 16" in text
        and "1 failed, 1 skipped" in text
        and "1 right, 1 wrong" in text
    )
    assert all(stage in text for stage in report.TITLES)


def test_junit_becomes_counts_names_and_reasons(tmp_path):
    junit = tmp_path / "junit.xml"
    junit.write_text(
        """<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure message="assert 1 == 2">x</failure>
        </testcase><testcase name="c"><skipped message="no GPU"/></testcase><testcase name="d"><failure message="died"/></testcase><testcase name="d"><error>also at its end</error></testcase>
        </testsuite></testsuites>"""
    )
    assert behaviour.summary(junit) == {
        "tests": 4,
        "passed": 1,
        "failures": [{"test": "b", "why": "assert 1 == 2"}, {"test": "d", "why": "died"}],
        "skipped": ["c: no GPU"],
    }


def test_the_kinds_of_the_models_that_a_test_configured_are_counted(tmp_path):
    for name, kind in (("a", "KIND_GPU"), ("b", "KIND_GPU"), ("c", "KIND_CPU")):
        (tmp_path / "server" / name).mkdir(parents=True)
        (tmp_path / "server" / name / "config.pbtxt").write_text(f"instance_group {{ kind: {kind} count: 1 }}")
    assert behaviour.kinds(tmp_path) == {"KIND_GPU": 2, "KIND_CPU": 1}
