"""The one place that knows OpenTelemetry; imported only where tracing is switched on.

How many traces are kept is the SDK's own setting (OTEL_TRACES_SAMPLER and its argument).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Attributes = Mapping[str, str | int]
_W3C = TraceContextTextMapPropagator()


class Backend:
    """Spans of this process, handed to one processor."""

    def __init__(self, service: str, replica: str, processor: SpanProcessor) -> None:
        names = {"service.name": f"rollpacker-{service}"}
        if replica:
            names["service.instance.id"] = replica
        self._provider = TracerProvider(resource=Resource.create(names))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("rollpacker")

    @contextmanager
    def span(self, name: str, attributes: Attributes, *, is_root: bool) -> Iterator[None]:
        """A span below the current one, or of a trace of its own; current while it is open."""
        parent = Context() if is_root else None
        with self._tracer.start_as_current_span(name, parent, attributes=dict(attributes)):
            yield

    @contextmanager
    def server_span(
        self, name: str, metadata: Mapping[str, str]
    ) -> Iterator[Callable[[str, str], None]]:
        """The span of one call, below its caller's; yields how to give it an attribute.

        It stays current when it has ended: a call is a task of its own, and a stream may be closed
        from elsewhere, where the former context cannot be put back.
        """
        parent = _W3C.extract(metadata)
        span = self._tracer.start_span(name, parent, SpanKind.SERVER)
        context.attach(trace.set_span_in_context(span, parent))
        try:
            yield span.set_attribute
        finally:
            span.end()

    def context(self) -> dict[str, str]:
        """What tells a server which span a call belongs to."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier)
        return carrier

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def otlp_backend(service: str, endpoint: str, replica: str) -> Backend:
    """Spans in batches to an OTLP endpoint; plain for http://, TLS for https://."""
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
    return Backend(service, replica, BatchSpanProcessor(exporter))
