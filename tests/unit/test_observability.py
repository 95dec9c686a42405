"""Logs, metric names, and the endpoint /metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from rollpacker.local_stack.ports import free_port
from rollpacker.metrics_reference import metrics_reference
from rollpacker.observability import log_context
from rollpacker.observability.logs import JsonFormatter
from rollpacker.observability.metric_names import METRICS, find_metric, with_aliases
from rollpacker.observability.metrics import Reading, serve_metrics
from rollpacker.rpc.errors import InvalidArgumentError
from rollpacker.tasks import end_tasks
from services.trainer.metrics import step_metrics
from tests.unit.outputs_example_run import ExampleRun

ROOT = Path(__file__).parents[2]


def test_the_reference_of_the_metrics_is_written_from_the_code() -> None:
    assert (ROOT / "docs/metrics.md").read_text() == metrics_reference()


def test_the_reference_names_every_figure_of_a_service() -> None:
    sources = [
        *ROOT.glob("services/*/readings.py"),
        ROOT / "rollpacker/observability/rpc_metrics.py",
    ]
    named = {
        name for path in sources for name in re.findall(r'"(rollpacker_[a-z_]+)"', path.read_text())
    }
    assert len(named) > 20
    assert {name for name in named if f"`{name}`" not in metrics_reference()} == set()


def test_a_metric_has_one_name_and_no_alias_is_a_name() -> None:
    names = [metric.name for metric in METRICS]
    aliases = [alias for metric in METRICS for alias in metric.aliases]
    assert len({*names, *aliases}) == len(names) + len(aliases)


def test_a_metric_is_found_by_its_name_and_a_number_stands_for_n() -> None:
    found = find_metric("carry/acceptance_after_3_to_4")
    assert found is not None
    assert found.name == "carry/acceptance_after_N_to_N"
    assert find_metric("carry/acceptance_after_N") is None
    assert find_metric("reward/means") is None


def test_files_get_verls_names_beside_the_own() -> None:
    named = with_aliases({"timing_s/rollout": 2.0, "tail/level": 1.0})
    assert named == {"timing_s/rollout": 2.0, "timing_s/gen": 2.0, "tail/level": 1.0}


def test_what_the_trainer_reports_has_a_name_here() -> None:
    source = Path(step_metrics.__code__.co_filename).read_text()
    reported = re.findall(r'^ +"(\w+)":', source, re.MULTILINE)
    assert len(reported) > 10
    assert [name for name in reported if find_metric(f"trainer/{name}") is None] == []


def line_of(message: str, **about: str | int) -> dict[str, object]:
    log_context(**about)
    record = logging.LogRecord("a.b", logging.WARNING, "f", 1, message, None, None)
    return dict(json.loads(JsonFormatter("rollout", "rollout-0").format(record)))


async def test_a_json_line_says_what_it_is_about() -> None:
    async def task(step: int) -> dict[str, object]:
        return line_of('two\nlines and a "quote"', step=step)

    log_context(run="r")
    lines = await asyncio.gather(*(asyncio.create_task(task(step)) for step in (1, 2)))
    for step, line in enumerate(lines, start=1):
        assert line.pop("time")
        assert line == {
            "level": "WARNING",
            "service": "rollout",
            "replica": "rollout-0",
            "logger": "a.b",
            "message": 'two\nlines and a "quote"',
            "run": "r",
            "step": step,
        }


async def scrape(address: str) -> dict[str, float]:
    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    families = text_string_to_metric_families(await asyncio.to_thread(get))
    return {
        sample.name + str(sample.labels or ""): sample.value
        for family in families
        for sample in family.samples
    }


async def test_a_scrape_reads_the_service_at_that_moment() -> None:
    count = 0

    async def read() -> list[Reading]:
        nonlocal count
        count += 1
        return [
            Reading("rollpacker_a", "one", 1.0, {"run": 'x"\n'}),
            Reading("rollpacker_a", "one", 2.0, {"run": "y"}),
            Reading("rollpacker_b", "two", count, is_counter=True),
        ]

    address = f"127.0.0.1:{free_port()}"
    serving = asyncio.create_task(serve_metrics(address, read, CollectorRegistry()))
    try:
        await asyncio.sleep(0)
        for times in (1.0, 2.0):
            assert await scrape(address) == {
                "rollpacker_a{'run': 'x\"\\n'}": 1.0,
                "rollpacker_a{'run': 'y'}": 2.0,
                "rollpacker_b_total": times,
            }
    finally:
        await end_tasks(serving)


@pytest.mark.parametrize(
    ("address", "fix"),
    [
        ("9464", "127.0.0.1:9464"),
        ("0.0.0.0:9464", "ROLLPACKER_SECURITY_CERTIFICATE_FILE"),
    ],
)
async def test_an_address_that_will_not_do_is_refused_with_the_fix(address: str, fix: str) -> None:
    with pytest.raises(InvalidArgumentError, match="metrics_address") as refusal:
        await serve_metrics(address, list, CollectorRegistry())
    assert fix in str(refusal.value)


async def test_a_port_that_is_taken_is_refused() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(InvalidArgumentError, match="cannot be taken"):
        await serve_metrics(f"127.0.0.1:{port}", list, CollectorRegistry())
    server.close()


def test_the_metrics_of_the_example_run_are_known() -> None:
    record, _ = next(ExampleRun().steps(1))
    unknown = {name for name in record.metrics if find_metric(name) is None}
    assert unknown == {"timing_s/commit"}
