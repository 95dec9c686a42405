"""Dashboards and rules ask for metrics that some service shows, by their exact names."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import REGISTRY

from rollpacker.observability import rpc_metrics
from rollpacker.observability.metric_names import METRICS, prometheus_name

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
NAME = re.compile(r"\b(?:rollpacker|process)_[a-z0-9_]+")
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def shown() -> set[str]:
    """Names of all series: of steps, of calls and of the process, and of each service."""
    names = {prometheus_name(metric.name) for metric in METRICS}
    assert rpc_metrics
    for family in REGISTRY.collect():
        names |= {family.name + suffix for suffix in SUFFIXES.get(family.type, ("",))}
    for path in ROOT.glob("services/*/readings.py"):
        names |= of_source(path.read_text())
    return names


def of_source(text: str) -> set[str]:
    """What `Reading(...)` calls show; names that stand in a table beside the call are counters."""
    tree = ast.parse(text)
    plain: dict[str, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Reading":
            counts = any(keyword.arg == "is_counter" for keyword in node.keywords)
            if isinstance(node.args[0], ast.Constant):
                plain[str(node.args[0].value)] = counts
    strings = {str(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    tabled = {name for name in strings if NAME.fullmatch(name)} - plain.keys()
    return {name + "_total" * counts for name, counts in plain.items()} | {
        f"{name}_total" for name in tabled
    }


def queries(path: Path) -> list[str]:
    if path.suffix == ".json":
        panels = json.loads(path.read_text())["panels"]
        return [target["expr"] for panel in panels for target in panel["targets"]]
    groups = yaml.safe_load(path.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


@pytest.mark.parametrize(
    "path", [*DASHBOARDS, DEPLOY / "prometheus" / "rules.yaml"], ids=lambda path: path.name
)
def test_every_metric_that_is_asked_for_is_shown(path: Path) -> None:
    asked = {name for query in queries(path) for name in NAME.findall(query)}
    assert asked
    assert asked - shown() == set()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_panels_have_titles_of_their_own_and_do_not_overlap(path: Path) -> None:
    panels = json.loads(path.read_text())["panels"]
    assert len({panel["title"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(x < 24 for x, _ in cells)


def test_prometheus_asks_every_service_at_the_port_that_they_answer_at() -> None:
    settings = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    (job,) = settings["scrape_configs"]
    (names,) = job["dns_sd_configs"]
    compose = (DEPLOY / "compose.yaml").read_text()
    for service in names["names"]:
        wanted = f"_METRICS_ADDRESS: ${{ROLLPACKER_METRICS_ADDRESS-0.0.0.0:{names['port']}}}"
        assert f"ROLLPACKER_{service.upper()}{wanted}" in compose
    assert (DEPLOY / "prometheus" / Path(settings["rule_files"][0]).name).exists()
