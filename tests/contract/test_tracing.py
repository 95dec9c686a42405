"""One step is one trace, over the coordinator and the three kinds of worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rollpacker.observability import tracing
from rollpacker.observability.opentelemetry_backend import Backend
from rollpacker.rpc.errors import NotFoundError
from tests.contract.test_coordinator_service import (
    Cluster,
    cluster,  # noqa: F401  a fixture
    coordinator,
)
from tests.tiny_run import run_settings


@pytest.fixture(autouse=True)
def exporter() -> Iterator[InMemorySpanExporter]:
    """Tracing is on before any server or channel is made."""
    memory = InMemorySpanExporter()
    tracing.use_backend(Backend("test", "", SimpleSpanProcessor(memory)))
    yield memory
    tracing.stop_tracing()


def parents(spans: list[ReadableSpan]) -> dict[str, set[str]]:
    """For each name of a span, the names above it."""
    by_id = {span.context.span_id: span.name for span in spans}
    above: dict[str, set[str]] = defaultdict(set)
    for span in spans:
        above[span.name].add(by_id[span.parent.span_id] if span.parent else "")
    return above


async def test_a_step_is_one_trace_over_all_services(
    exporter: InMemorySpanExporter,
    cluster: Cluster,  # noqa: F811
) -> None:
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory, prompts=24))
        await c.until_ended()
    spans = list(exporter.get_finished_spans())
    steps = [span for span in spans if span.name == "step" and span.attributes["step"] == 0]
    assert len(steps) == 1
    trace = [span for span in spans if span.context.trace_id == steps[0].context.trace_id]
    above = parents(trace)
    service = "rollpacker.v1"
    assert above["step"] == {""}
    assert above["round"] == {"step"}
    assert above["group"] == {"round"}
    assert above[f"{service}.RolloutService/GenerateGroup"] == {"group"}
    assert above[f"{service}.RewardService/ScoreResponse"] == {"score"}
    assert above[f"{service}.TrainerService/FinishStep"] == {"FinishStep"}
    assert above["FinishStep"] == {"step"}
    groups = [span for span in trace if span.name == "group"]
    assert {span.attributes["replica"] for span in groups} == {"rollout-0", "rollout-1"}


async def test_the_span_of_a_call_that_fails_has_its_status(
    exporter: InMemorySpanExporter,
    cluster: Cluster,  # noqa: F811
) -> None:
    async with coordinator(cluster) as c:
        with pytest.raises(NotFoundError):
            await c.get("nobody")
    failed = [s for s in exporter.get_finished_spans() if s.name.endswith("/GetRun")]
    assert [span.attributes["rpc.grpc.status"] for span in failed] == ["NOT_FOUND"]


def test_without_a_backend_nothing_is_added() -> None:
    tracing.use_backend(None)
    assert tracing.server_interceptors() == []
    assert tracing.client_interceptors() == []
    with tracing.span("step", step=1):
        pass


class Collector(TraceServiceServicer):
    """An OTLP collector that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[ExportTraceServiceRequest] = []

    def Export(
        self, request: ExportTraceServiceRequest, context: Any
    ) -> ExportTraceServiceResponse:
        self.got.append(request)
        return ExportTraceServiceResponse()


def test_spans_arrive_at_the_endpoint_with_the_names_of_their_process() -> None:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    tracing.set_up_tracing("rollout", f"http://127.0.0.1:{port}", "rollout-3")
    with tracing.span("step", is_root=True, step=7):
        pass
    tracing.stop_tracing()  # sends what is left
    server.stop(None).wait()
    (sent,) = collector.got[0].resource_spans
    names = {item.key: item.value.string_value for item in sent.resource.attributes}
    assert names["service.name"] == "rollpacker-rollout"
    assert names["service.instance.id"] == "rollout-3"
    (span,) = sent.scope_spans[0].spans
    assert (span.name, span.attributes[0].value.int_value) == ("step", 7)
