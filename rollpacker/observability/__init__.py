"""What a process tells about itself: logs, figures for Prometheus, traces.

| file | what it holds |
|---|---|
| `logs.py` | log lines, as text or JSON, with what they are about |
| `metric_names.py` | every metric of a step: name, unit, meaning, verl's name for it |
| `metrics.py` | the endpoint `/metrics`: what a service reads off itself when it is asked |
| `rpc_metrics.py` | count, status and time of every call that a server answers |
| `tracing.py`, `opentelemetry_backend.py` | spans over all services, one trace per step |

Nothing here decides anything, and what is switched off costs nothing.
"""

from rollpacker.observability.logs import log_context, set_up_logging

__all__ = ["log_context", "set_up_logging"]
