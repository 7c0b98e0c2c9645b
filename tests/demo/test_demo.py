"""What the demo makes of its answers, and how its clients begin. No server."""

import concurrent.futures
import multiprocessing
import time

import pytest

from support import demo, real_time_senders
from support.demo import Comparison


@pytest.mark.parametrize(
    ("steps", "worst", "passed"), [(10, 0.0, True), (10, 1e-6, True), (10, 1e-3, False), (0, 0.0, False)]
)
def test_answers_are_right_if_there_are_some_and_none_is_far_off(steps, worst, passed):
    assert Comparison(steps, bit_equal=0, worst=worst).passed is passed


def test_streams_without_all_their_answers_are_not_compared(monkeypatch):
    pace = real_time_senders.Pace("silero_vad", streams=2, steps=3, seed=1, first_id=1)
    outcome = real_time_senders.Outcome(None, [[0.5, 0.5], []], client_cpu_s=0, gave_up=True)
    monkeypatch.setattr(demo, "compare", lambda streams, answers, on_stream: (streams, answers))
    assert demo.check_at_pace(demo.Try(pace, outcome, cost=None)) == ([], [])


def test_senders_start_at_one_time_which_is_still_to_come_when_the_last_is_ready():
    context = multiprocessing.get_context("spawn")
    start = real_time_senders._Start(context.Barrier(2), context.Value("d"))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(start.wait)
        ready_at = time.monotonic()
        started_at = start.wait()
        assert first.result() == started_at
    assert started_at >= ready_at + real_time_senders.START_IN_S
