"""Which GPUs do what: the memory of a model in numbers, and the placement that follows.

`shape` reads what a model is, `memory` counts the bytes of each side, `planner` proposes or
refuses. Pure arithmetic: no device is asked, torch is not needed.
"""

from rollpacker.placement.planner import (
    EngineSide,
    Job,
    Machine,
    Placement,
    PlacementError,
    Proposal,
    TrainerSide,
    propose,
)
from rollpacker.placement.shape import ModelShape, read_shape

__all__ = [
    "EngineSide",
    "Job",
    "Machine",
    "ModelShape",
    "Placement",
    "PlacementError",
    "Proposal",
    "TrainerSide",
    "propose",
    "read_shape",
]
