"""What a rollout replica shows to Prometheus."""

from __future__ import annotations

from rollpacker.observability.metrics import Reading
from rollpacker.types import EngineStats


def engine_readings(stats: EngineStats, weight_version: int) -> list[Reading]:
    """The load of the engine, and its counters since it started."""
    return [
        Reading(
            "rollpacker_engine_weight_version", "weights that are served; -1: none", weight_version
        ),
        Reading(
            "rollpacker_engine_running_responses",
            "responses that are being decoded",
            stats.running_response_count,
        ),
        Reading(
            "rollpacker_engine_waiting_responses",
            "responses that wait for a slot",
            stats.waiting_response_count,
        ),
        Reading("rollpacker_engine_slots", "responses decoded at once", stats.slot_count),
        Reading("rollpacker_engine_kv_usage_ratio", "share of the KV budget", stats.kv_cache_usage),
        Reading(
            "rollpacker_engine_generated_tokens",
            "tokens decoded",
            stats.generated_token_count,
            is_counter=True,
        ),
        Reading(
            "rollpacker_engine_preemptions",
            "responses that lost their slot",
            stats.preemption_count,
            is_counter=True,
        ),
    ]
