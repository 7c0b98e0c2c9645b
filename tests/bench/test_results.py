"""What the benchmark makes of its measurements. No server."""

import json
import os
import socket

import pytest

from support.bench import ovms, report, service
from support.bench.__main__ import LEVELS, STORE_PARTS
from support.bench.models import MODELS
from support.bench.service import Served
from support.bench.soak import Sums, grown, open_files
from support.bench.stored_sequences import Answers

CSV = """Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,p50 latency,p90 latency,p99 latency
64,7033.25,12,3456,8719,11000,17878
"""


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_has_a_table(level):
    assert level in report.TITLES and level in report.COLUMNS


@pytest.mark.parametrize("part", STORE_PARTS[1:])
def test_each_part_of_the_stores_has_a_table(part):
    assert f"stores_{part}" in report.TITLES and f"stores_{part}" in report.COLUMNS


def test_answers_are_counted_from_the_first_request_to_the_last_answer():
    answers = Answers([(10.0, 10.5), (10.5, 11.0), (10.25, 14.0)])
    assert answers.seconds == 4.0
    assert answers.row() == {"requests_per_s": 0.75, "p50_us": 500_000, "p99_us": pytest.approx(3_685_000)}


def test_perf_analyzers_report_is_read_by_its_headings():
    assert service.parse_report(CSV) == {"requests_per_s": 7033.25, "p50_us": 8719.0, "p99_us": 17878.0}


def test_a_report_of_no_or_of_several_measurements_is_refused():
    for text in (CSV.splitlines()[0], CSV + "128,1,1,1,1,1,1\n"):
        with pytest.raises(ValueError, match="one line"):
            service.parse_report(text)


def test_the_firsts_rate_stands_over_each_of_the_others():
    rows = service.over_others([{"requests_per_s": rate} for rate in (300.0, 100.0, 600.0)])
    assert [row["ours_over_this"] for row in rows] == [1.0, 3.0, 0.5]


def test_a_ratio_is_the_median_of_the_blocks_ratios_not_the_ratio_of_medians():
    blocks = [(100.0, 50.0), (10.0, 10.0), (300.0, 100.0)]
    rows = []
    for ours, other in blocks:
        rows += service.over_others([{"of": "ours", "requests_per_s": ours}, {"of": "other", "requests_per_s": other}])
    _, other = report.medians(rows, ("of",))
    assert other["ours_over_this"] == 2.0


def test_medians_keep_words_and_whole_numbers_whole():
    rows = [
        {"model": "lstm", "sequences": 64, "batch": 1.0, "rss": 10, "preferred": None},
        {"model": "lstm", "sequences": 64, "batch": 4.0, "rss": 30, "preferred": None},
        {"model": "lstm", "sequences": 16, "batch": 7.0, "rss": 20, "preferred": None},
    ]
    assert report.medians(rows, ("model", "sequences")) == [
        {"model": "lstm", "sequences": 64, "batch": 2.5, "rss": 10, "preferred": None},
        {"model": "lstm", "sequences": 16, "batch": 7.0, "rss": 20, "preferred": None},
    ]


def test_the_gateway_is_compared_with_triton_block_by_block():
    def row(way: str, block: int, rate: float, p50_us: float) -> dict:
        times = {"p50_us": p50_us, "p99_us": 2 * p50_us}
        return {"way": way, "streams": 16, "block": block, "requests_per_s": rate, **times}

    rows = [row("direct", 0, 100.0, 50.0), row("gateway", 0, 50.0, 80.0)]
    rows += [row("direct", 1, 10.0, 500.0), row("gateway", 1, 9.0, 510.0), {"way": "open sequences", "streams": 1}]
    assert ovms.over_direct(rows) == [
        {"streams": 16, "requests_per_s_over_direct": 0.5, "p50_more_us": 30.0, "p99_more_us": 60.0},
        {"streams": 16, "requests_per_s_over_direct": 0.9, "p50_more_us": 10.0, "p99_more_us": 20.0},
    ]


def test_each_level_says_of_which_commit_its_rows_are(tmp_path):
    report.write(tmp_path, {"commit": "older"}, {"load": [{"load_ms": 1.0}], "live": [{"live": 10}]})
    report.write(tmp_path, {"commit": "newer"}, {"load": [{"load_ms": 2.0}]})
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["results"] == {"load": [{"load_ms": 2.0}], "live": [{"live": 10}]}
    assert written["about"] == {"load": {"commit": "newer"}, "live": {"commit": "older"}}


def test_of_rows_of_an_old_file_nothing_is_claimed(tmp_path):
    old = {"about": {"commit": "unknown to which level"}, "results": {"live": [{"live": 10}]}}
    (tmp_path / "results.json").write_text(json.dumps(old))
    report.write(tmp_path, {"commit": "newer"}, {"load": [{"load_ms": 2.0}]})
    assert json.loads((tmp_path / "results.json").read_text())["about"] == {"live": {}, "load": {"commit": "newer"}}


def test_the_same_results_make_the_same_picture(tmp_path):
    row = {"model": "lstm", "backend": "stateful", "protocol": "grpc", "sequences": 1, "requests_per_s": 100.0}
    pictures = []
    for name in ("a", "b"):
        report.write(tmp_path / name, {}, {"service": [row, row | {"sequences": 64, "requests_per_s": 900.0}]})
        pictures.append((tmp_path / name / "service.svg").read_text())
    assert pictures[0] == pictures[1]


def test_models_that_differ_in_what_core_waits_for_have_names_of_their_own():
    lstm = MODELS["lstm"]
    served = [
        Served("stateful", lstm, 16),
        Served("stateful", lstm, 16, preferred=16),
        Served("stateful", lstm, 16, preferred=16, delay_us=2000),
        Served("stateful", lstm, 16, priority="MIN"),
    ]
    assert len({each.name for each in served}) == len(served)


def test_the_soaks_sums_start_again_after_an_end():
    sums = Sums()
    assert sums.start(1)
    assert sums.expect(1, 2.0, end=False) == 2.0
    assert not sums.start(1)
    assert sums.expect(1, 3.0, end=True) == 5.0
    assert sums.start(1)
    assert sums.expect(1, 4.0, end=False) == 4.0


def test_the_soak_notices_memory_and_files_that_grow():
    assert grown([]) == grown([(100, 10, 5)]) == []
    flat = [(50, 5, 5), (100, 10, 5), (90, 12, 5), (95, 9, 5)] * 4
    assert grown(flat) == []
    assert grown([(2 * bytes, files, 5) for bytes, files, _ in flat[:2]] + flat) == []
    [memory] = grown([(100 + 10 * number, 10, 5) for number in range(16)])
    assert "memory grew from 170 to 220" in memory
    [files] = grown([(100, 10 + 10 * number, 5) for number in range(16)])
    assert "files grew from 80 to 130" in files
    mib = 2**20
    assert grown([(100 * mib + 5 * number * mib, 10, 5 + 5 * number) for number in range(16)]) == []
    # Sockets that come and go are not kept.
    [memory] = grown([(80 * mib + 4 * number * mib, 10, 5 + 30 * (number % 2)) for number in range(16)])
    assert "with 0 more sockets" in memory
    [memory] = grown([(100 * mib + 50 * number * mib, 10, 5 + 5 * number) for number in range(16)])
    assert "with 25 more sockets" in memory


def test_the_soak_counts_sockets_apart_from_files(tmp_path):
    files, sockets = open_files(os.getpid())
    one, other = socket.socketpair()
    with one, other, (tmp_path / "file").open("w"):
        assert open_files(os.getpid()) == (files + 1, sockets + 2)
