"""How fast a replica is: one decode step, a prefill, what fits its memory.

A decode step with n running responses and K tokens of KV takes base + (n - free) * per_sequence
+ K * per_kv_token seconds, where the first rows are free: a tile of the matrix units has 16 rows.
`base` is the reading of the weights, the all-reduces of tensor
parallelism and the launch of the kernels; only its sum at the paper's placement is fitted, the
split follows from data sheets, so that other tensor-parallel sizes are predictions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollpacker.simulation.parameters import ModelFacts, Parameters


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Of one replica."""

    base_seconds: float  # per decode step
    per_sequence_seconds: float  # per running response and step
    per_kv_token_seconds: float  # per token in the KV cache and step
    prefill_seconds: float  # per prompt token
    kv_capacity: int  # tokens
    free_sequences: int = 0  # running responses that cost nothing beyond the base
    max_running: int = 256  # responses at a time
    tensor_parallel_size: int = 1

    def step_seconds(self, running: int, kv_tokens: float) -> float:
        """One decode step."""
        return (
            self.base_seconds
            + self.per_sequence_seconds * max(0, running - self.free_sequences)
            + self.per_kv_token_seconds * kv_tokens
        )


def engine_speed(
    parameters: Parameters, model: ModelFacts, tensor_parallel_size: int = 0
) -> EngineSpeed:
    """A replica of `model`; size 0 is the paper's. Raises ValueError if the weights do not fit."""
    size = tensor_parallel_size or model.tensor_parallel_size
    bandwidth = parameters["memory_bandwidth"] * parameters["bandwidth_efficiency"]
    memory = size * parameters["gpu_memory"] * parameters["memory_share"]
    capacity = int((memory - model.weight_bytes) / model.kv_bytes_per_token)
    if capacity < model.max_response_tokens:
        raise ValueError(
            f"tensor_parallel_size: {size} leaves {model.name} room for {capacity} tokens of KV;"
            f" one response needs {model.max_response_tokens}; take a larger size"
        )
    return EngineSpeed(
        base_seconds=_base_seconds(parameters, model, size),
        per_sequence_seconds=parameters["step_seconds_per_sequence"],
        per_kv_token_seconds=model.kv_bytes_per_token / (size * bandwidth),
        prefill_seconds=2
        * model.parameters
        / (size * parameters["peak_flops"] * parameters["prefill_efficiency"]),
        kv_capacity=capacity,
        free_sequences=int(parameters["free_sequences"]),
        max_running=int(parameters["max_running_responses"]),
        tensor_parallel_size=size,
    )


def sizes_that_fit(parameters: Parameters, model: ModelFacts) -> tuple[int, ...]:
    """Tensor-parallel sizes of one host at which the model and one whole response fit."""
    return tuple(size for size in (1, 2, 4, 8) if _fits(parameters, model, size))


def _fits(parameters: Parameters, model: ModelFacts, size: int) -> bool:
    try:
        engine_speed(parameters, model, size)
    except ValueError:
        return False
    return True


def _base_seconds(parameters: Parameters, model: ModelFacts, size: int) -> float:
    """The fitted step at the paper's size, its parts scaled to another size."""
    bandwidth = parameters["memory_bandwidth"] * parameters["bandwidth_efficiency"]
    fitted = parameters[f"step_base_seconds.{model.name}"]
    usual = model.tensor_parallel_size
    overhead = max(0.0, fitted - model.weight_bytes / (usual * bandwidth))
    doublings = math.log2(size / usual)
    communication = 1.0 + parameters["communication_share"] * doublings
    return model.weight_bytes / (size * bandwidth) + overhead * communication
