"""The dashboard and the alert rules ask for metrics that exist, and docs/metrics.md lists each metric and reason."""

import json
import re

import pytest

from support.paths import ROOT

KINDS = dict(
    re.findall(r"^\| `(stateful_\w+)` \| (gauge|counter|histogram) \|", (ROOT / "docs/metrics.md").read_text(), re.M)
)
TRITONS = {"nv_inference_request_success", "nv_inference_request_failure"}
ASKED = re.compile(r"\b(?:stateful|nv)_\w+")


def shown(name: str) -> bool:
    histogram = re.fullmatch(r"(\w+)_(bucket|sum|count)", name)
    if histogram and KINDS.get(histogram[1]) == "histogram":
        return True
    return KINDS.get(name) in ("gauge", "counter") or name in TRITONS


def expressions() -> list[str]:
    panels = json.loads((ROOT / "deploy/grafana.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    rules = re.findall(r"^\s+expr: (.+)$", (ROOT / "deploy/alerts.yaml").read_text(), re.M)
    assert len(asked) > 20
    assert len(rules) == (ROOT / "deploy/alerts.yaml").read_text().count("- alert:")
    return asked + rules


@pytest.mark.parametrize("expression", expressions())
def test_expressions_ask_for_metrics_that_exist(expression):
    names = ASKED.findall(expression)
    assert names
    assert [name for name in names if not shown(name)] == []
    assert expression.count("(") == expression.count(")")


def test_every_metric_of_the_code_is_documented():
    code = (ROOT / "src/model/metrics.rs").read_text()
    assert set(re.findall(r'"(stateful_\w+)"', code)) == KINDS.keys()


def test_times_are_in_seconds():
    """Prometheus wants base units; Triton's own metrics have microseconds."""
    assert [name for name in KINDS if re.search(r"_(us|ms|ns|micros\w*|millis\w*|nanos\w*)(_|$)", name)] == []
    assert [name for name in KINDS if "duration" in name and not name.endswith("_seconds")] == []


def test_every_metric_is_on_the_dashboard():
    text = " ".join(expressions())
    assert [name for name in KINDS if name not in text] == []


def test_every_reason_of_a_failed_request_is_documented():
    code = (ROOT / "src/error/codes.rs").read_text()
    [labels] = re.findall(r"const LABELS: \[\(Self, &str\); \d+\] = \[(.*?)\];", code, re.S)
    page = (ROOT / "docs/metrics.md").read_text()
    [table] = re.findall(r"^\| `reason` \|.*?\n\n", page, re.M | re.S)
    documented = re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in table.splitlines()[2:] if row))
    assert documented and sorted(re.findall(r'"(\w+)"', labels)) == sorted(documented)
