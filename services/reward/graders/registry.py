"""Which graders this installation offers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType

from rollpacker.types import GraderKind
from services.reward.graders.code import CodeGrader
from services.reward.graders.custom import CustomGrader
from services.reward.graders.grader import Grader
from services.reward.graders.judge import JudgeGrader
from services.reward.graders.math import MathGrader
from services.reward.graders.reasoning_gym import ReasoningGymGrader


@cache
def code_grader() -> CodeGrader:
    """The one of `graders`, which can also run a program without grading it."""
    return CodeGrader()


@cache
def graders() -> Mapping[GraderKind, Grader]:
    """The graders by kind; reasoning_gym only where its package is installed.

    Whether code can be run on this host shows when a worker loads that grader."""
    offered: dict[GraderKind, Grader] = {
        GraderKind.MATH: MathGrader(),
        GraderKind.CODE: code_grader(),
        GraderKind.CUSTOM: CustomGrader(),
        GraderKind.JUDGE: JudgeGrader(),
    }
    if find_spec("reasoning_gym"):
        offered[GraderKind.REASONING_GYM] = ReasoningGymGrader()
    return MappingProxyType(offered)
