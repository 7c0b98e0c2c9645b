"""The logging parameters: which lines appear in the server's log, and when."""

import re
import time

import numpy as np
import pytest

from harness import models
from harness.conversations import Conversation, together
from harness.deployment import Deployment

BATCH_LINE = re.compile(r"(?P<name>\w+): batch of (?P<rows>\d+): (?P<starts>\d+) start and (?P<ends>\d+) end")
REPORT = re.compile(
    r"(?P<name>\w+), last [\d.]+ s: (?P<requests>\d+) requests in (?P<batches>\d+) batches, "
    r"average batch size (?P<average>[\d.]+), largest (?P<largest>\d+); "
    r"(?P<used>\d+) slots used of (?P<slots>\d+) in (?P<slabs>\d+) slabs, at most (?P<capacity>\d+)"
)
DETAILS = re.compile(r"(?P<name>\w+), last [\d.]+ s: [\d.]+ ms gather, [\d.]+ ms run, [\d.]+ ms respond")


def said_during(deployment: Deployment, task, model, live: int) -> str:
    """What the server logs while the task runs and leaves so many sequences alive: a request is
    answered first, then its batch is logged, then its sequence is settled."""
    before = len(deployment.server.log_text())
    task()
    deployment.settles("stateful_live_sequences", model, live)
    return deployment.server.log_text()[before:]


# (logging_level, batch_info_logging_level) -> whether each batch has its line without and with --log-verbose
BATCHES = {
    (None, None): (False, True),
    ("INFO", "VERBOSE"): (False, True),
    ("VERBOSE", "VERBOSE"): (True, True),
    ("VERBOSE", None): (True, True),
    ("INFO", "INFO"): (True, True),
    (None, "INFO"): (True, True),
    ("VERBOSE", "INFO"): (True, True),
    ("NONE", "INFO"): (False, False),
    ("NONE", "VERBOSE"): (False, False),
    ("VERBOSE", "NONE"): (False, False),
}


@pytest.mark.parametrize("verbose", [0, 1])
def test_batches_are_logged_at_the_level_that_the_parameters_give(deploy, verbose):
    own = deploy(log_verbose=verbose)
    client = own.connect()
    for (level, batch_level), appears in BATCHES.items():
        model = models.counter(
            name=f"counter_logs_{level or 'unset'}_{batch_level or 'unset'}".lower(),
            parameters={"logging_level": level, "batch_info_logging_level": batch_level},
        )
        model = own.serve(model)
        talk = Conversation(client, model, np.random.default_rng(1))
        text = said_during(own, lambda talk=talk: talk.whole(5), model, live=0)
        mine = [found[0] for found in BATCH_LINE.finditer(text) if found["name"] == model.name]
        assert len(mine) == (5 if appears[verbose] else 0), f"{level}, {batch_level}: {mine}"


def test_the_line_of_a_batch_counts_its_rows_and_flags(deployment):
    model = models.counter(
        name="counter_logs_its_batches",
        max_batch_size=3,
        oldest="preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 500000",
    )
    model = deployment.serve(model.with_parameters(model.name, batch_info_logging_level="INFO"))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(seed)) for seed in range(3)]
    together(talk.start for talk in talks)
    text = said_during(deployment, lambda: together([talks[0].start, talks[1].step, talks[2].end]), model, live=2)
    assert f"{model.name}: batch of 3: 1 start and 1 end" in text, text


def steps_for(talk: Conversation, seconds: float) -> None:
    until = time.monotonic() + seconds
    talk.start()
    while time.monotonic() < until:
        talk.step()
        time.sleep(0.05)
    talk.end()


# name -> (parameters, whether the report appears, whether its details do)
REPORTS = {
    "none": ({}, False, False),
    "zero": ({"metric_logging_frequency_seconds": 0}, False, False),
    "every_second": ({"metric_logging_frequency_seconds": 1}, True, False),
    "in_detail": (
        {"metric_logging_frequency_seconds": 1, "detailed_metrics_logging_level": "INFO"},
        True,
        True,
    ),
    "verbose": ({"metric_logging_frequency_seconds": 1, "logging_level": "VERBOSE"}, True, True),
    "silenced": (
        {
            "metric_logging_frequency_seconds": 1,
            "logging_level": "NONE",
            "detailed_metrics_logging_level": "INFO",
        },
        False,
        False,
    ),
    "rarely": ({"metric_logging_frequency_seconds": 3600}, False, False),
}


def test_the_periodic_report_appears_where_it_is_asked_for(deployment):
    client = deployment.connect()
    served = {
        name: deployment.serve(
            models.counter(name=f"counter_reports_{name}").with_parameters(f"counter_reports_{name}", **parameters)
        )
        for name, (parameters, _, _) in REPORTS.items()
    }
    before = len(deployment.server.log_text())
    talks = [Conversation(client, model, np.random.default_rng(2)) for model in served.values()]
    began = time.monotonic()
    together(lambda talk=talk: steps_for(talk, 2.4) for talk in talks)
    seconds = time.monotonic() - began
    for name, model in served.items():
        deployment.settles("stateful_live_sequences", model, 0)
        text = deployment.server.log_text()[before:]
        _, report, details = REPORTS[name]
        for pattern, wanted in ((REPORT, report), (DETAILS, details)):
            mine = [found for found in pattern.finditer(text) if found["name"] == model.name]
            # The first second of the report began before these requests.
            assert (1 <= len(mine) <= seconds + 1) if wanted else not mine, f"{name}: {mine}"


def test_the_report_has_the_numbers_of_its_time(deployment):
    model = models.counter(
        name="counter_reports_numbers",
        max_batch_size=4,
        max_candidates=40,
        oldest="preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 200000",
    )
    lazy = {
        "initial_buffer_size": 4,
        "subsequent_buffer_size": 4,
        "buffer_alloc_threshold": 4,
        "buffer_dealloc_threshold": 30,
    }
    model = deployment.serve(model.with_parameters(model.name, metric_logging_frequency_seconds=1, **lazy))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(seed)) for seed in range(6)]

    def go_on():
        together(talk.start for talk in talks)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            together(talk.step for talk in talks)

    text = said_during(deployment, go_on, model, live=6)
    reports = [found for found in REPORT.finditer(text) if found["name"] == model.name]
    assert reports, text
    found = reports[0]
    assert 0 < int(found["batches"]) <= int(found["requests"]) <= deployment.statistics(model).inference_count
    assert float(found["average"]) == pytest.approx(int(found["requests"]) / int(found["batches"]), abs=0.01)
    assert 1 <= int(found["largest"]) <= 4
    assert int(found["used"]) == 6
    assert int(found["capacity"]) == 36
    assert int(found["slots"]) == 4 * int(found["slabs"]) >= 8


@pytest.mark.parametrize(("level", "tells"), [(0, True), (1, True), (2, False), (4, False)])
def test_the_level_of_onnx_runtime_s_log_is_what_the_command_line_says(deploy, level, tells):
    """At 0 and 1 it tells of what it does to graphs; 2 is the default."""
    own = deploy(backend_config={"ort-logging-level": str(level)}, log_verbose=1)
    model = own.serve(models.lstm())
    Conversation(own.connect(), model, np.random.default_rng(3)).whole(3)
    lines = [line for line in own.server.log_text().splitlines() if '] "onnxruntime ' in line]
    assert any("GraphTransformer" in line for line in lines) == tells, lines[:9]


@pytest.mark.parametrize("value", ["5", "-1", "x"])
def test_another_level_is_refused_and_the_server_lives(deploy, value):
    own = deploy(backend_config={"ort-logging-level": value}, control_model=False)
    text = own.load_error(models.counter(name="without_a_level"))
    assert f"ort-logging-level={value}" in text
    assert "from 0 to 4" in text
    assert own.server.is_alive()
