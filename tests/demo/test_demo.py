"""What the demo makes of its answers and of the CPU time of others, and how its clients begin. No server."""

import concurrent.futures
import multiprocessing
import os
import shlex
import subprocess
import sys
import time

import matplotlib.figure
import numpy as np
import pytest

from support import cpu_use, demo, real_time, real_time_senders, senders
from support.cpu_use import CpuMeter, CpuUse, waited_s
from support.demo import Comparison
from support.real_time import Cost
from support.session_per_stream import SessionPerStream


@pytest.mark.parametrize(
    ("steps", "worst", "passed"), [(10, 0.0, True), (10, 1e-6, True), (10, 1e-3, False), (0, 0.0, False)]
)
def test_answers_are_right_if_there_are_some_and_none_is_far_off(steps, worst, passed):
    assert Comparison(steps, bit_equal=0, worst=worst).passed is passed


def test_streams_without_all_their_answers_are_not_compared(monkeypatch):
    pace = real_time_senders.Pace("silero_vad", streams=2, packets=5, seed=1, first_id=1)
    outcome = real_time_senders.Outcome(None, [[0.5, 0.5], []], client_cpu_s=0, gave_up=True)
    monkeypatch.setattr(demo, "compare", lambda streams, answers, on_stream: (streams, answers))
    assert demo.check_at_pace(demo.Try(pace, outcome, cost=None, cpu=None)) == ([], [])


def test_senders_start_at_one_time_which_is_still_to_come_when_the_last_is_ready():
    context = multiprocessing.get_context("spawn")
    start = senders.Start(context.Barrier(2), context.Value("d"))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(start.wait)
        ready_at = time.monotonic()
        started_at = start.wait()
        assert first.result() == started_at
    assert started_at >= ready_at + senders.START_IN_S


def a_try(
    infer_us: float = 100, others: float = 0, waited: float | None = None, client_s: float = 1, late: float = 0
) -> demo.Try:
    """50 streams for 5 s, which are 7800 steps.

    infer_us: in ONNX Runtime, for each. others: CPU cores that other processes used. waited: of the server, for a CPU.
    """
    pace = real_time_senders.Pace("silero_vad", streams=50, packets=250, seed=1, first_id=1)
    latencies = np.where(np.arange(7800) < late * 7800, 0.2, 0.004)
    outcome = real_time_senders.Outcome(latencies, [], client_cpu_s=client_s)
    cost = Cost(cpu_s=2, runs=3900, steps=7800, infer_s=infer_us * 7800 / 1e6, waited_s=waited)
    return demo.Try(pace, outcome, cost, CpuUse(seconds=5, ours_s=3, others_s=5 * others))


PER_STREAM = SessionPerStream(cpu_s_per_step=220e-6, bytes_per_stream=7e6)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    for module in (cpu_use, demo, real_time):
        monkeypatch.setattr(module, "CORES", 2)


@pytest.mark.parametrize(
    ("done", "compared"),
    [
        # No other process used the CPU: either side may be cheaper.
        ([a_try(90, others=0, waited=1)], True),
        ([a_try(250, others=0, waited=1)], True),
        # Others used much, and with all of it the server is cheaper.
        ([a_try(90, others=1.8, waited=5)], True),
        # 250 µs are 1.95 s in all. 1.5 s of them may have been others', so it may be 58 µs.
        ([a_try(250, others=0.3, waited=2)], False),
        ([a_try(250, others=1.8, waited=9)], False),
        # The kernel does not say how long the server waited.
        ([a_try(250, others=0.3, waited=None)], False),
        # The server hardly waited for a CPU, whatever others used.
        ([a_try(250, others=10, waited=0.01)], True),
        # The server waited for its own clients only.
        ([a_try(250, others=0.002, waited=5)], True),
        # The server and its clients needed 1.4 of 2 cores, and others had 1.
        ([a_try(client_s=5, others=1, late=0.1), a_try()], False),
        # They needed 1.4 cores, and others had 0.5.
        ([a_try(client_s=5, others=0.5, late=0.1), a_try()], True),
        # They needed 2.4 cores.
        ([a_try(client_s=10, others=1, late=0.1), a_try()], True),
        # They got what they needed.
        ([a_try(client_s=5, others=1, late=0.001)], True),
    ],
)
def test_costs_are_compared_if_others_cannot_have_decided_which_is_cheaper(done, compared):
    held = done[-1]
    cost = demo.costs(held, PER_STREAM)
    why_not = demo.why_not_comparable(done, cost)
    assert (why_not is None) is compared
    axis = matplotlib.figure.Figure().add_subplot()
    demo._draw_costs(axis, cost, why_not)
    assert len(axis.patches) == (2 if compared else 0)
    assert [text.get_text()[:13] for text in axis.texts] == ([] if compared else ["No comparison"])
    table = demo.real_time_table(held, 500, PER_STREAM, Comparison(10, 10, 0.0), compared=compared)
    assert len(table.columns) == (4 if compared else 2)


def test_the_table_says_how_much_others_used():
    table = demo.real_time_table(a_try(others=0.8), 500, PER_STREAM, Comparison(10, 10, 0.0), compared=True)
    assert "other processes used 0.8 of 2 CPU cores" in table.caption


BURN = "import time\nwhile time.process_time() < 0.5: pass\n"


def test_the_cpu_time_of_a_child_of_a_child_is_ours():
    meter = CpuMeter()
    burn = [sys.executable, "-c", BURN]
    subprocess.run([sys.executable, "-c", f"import subprocess; subprocess.run({burn!r})"], check=True)
    assert meter.used().ours_s >= 0.4


def test_the_cpu_time_of_a_process_that_is_not_ours_is_others(tmp_path):
    done = tmp_path / "done"
    burn = shlex.join([sys.executable, "-c", f"{BURN}open({str(done)!r}, 'w').close()"])
    meter = CpuMeter()
    # The shell ends at once, and then the process is no descendant of this one.
    subprocess.run(["sh", "-c", f"{burn} &"], check=True)
    while not done.exists():
        time.sleep(0.01)
    used = meter.used()
    assert used.others_s >= 0.3
    assert used.ours_s + used.others_s <= os.cpu_count() * used.seconds + 0.5


def test_a_process_that_waits_for_a_cpu_is_seen():
    cpu = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, [{cpu}])\nprint('here', flush=True)\nwhile True: pass"
    # Each waits while the other one runs.
    burners = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for burner in burners:
            assert burner.stdout.readline() == b"here\n"
        before = waited_s(burners[0].pid)
        if before is None:
            pytest.skip("this kernel does not count it")
        deadline = time.monotonic() + 60
        while waited_s(burners[0].pid) < before + 0.1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        for burner in burners:
            burner.kill()
            burner.communicate()
