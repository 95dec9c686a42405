"""The settings of a run (the YAML file), and the base of each service's own settings.

`RunSettings` is the one source of names, units, defaults and limits: run files, StartRun and the
documentation all read it. Unknown keys fail and name the nearest valid one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings import SettingsError as SettingsSourceError

from rollpacker.data_settings import DataSettings, DataSource, GraderName, check_names
from rollpacker.ladders import DEFAULT_FACTORS
from rollpacker.observability.logs import LogFormat
from rollpacker.section import Section
from rollpacker.strict_yaml import load_yaml
from rollpacker.tracking_settings import TrackingSettings
from rollpacker.trainer_settings import TrainerSettings

Mode = Literal["synchronous", "overlap", "paper", "exact", "auto"]
Placement = Literal["separate", "colocated"]
_BY_SEED = ("exact", "auto")  # replay deferred draws by seed
_PATHS = ("path", "validation_path", "tokenizer")
MAX_SEED = 2**53 - 1  # survives a JSON number


class TailBatchingSettings(Section):
    """How rounds are scheduled; see docs/architecture.md."""

    mode: Mode = Field(
        "exact",
        description="auto: as exact, with levels and speculation factors planned from what the run"
        " measures",
    )
    prompts_per_step: int = Field(32, ge=1, description="P0: prompt groups per optimizer update")
    responses_per_prompt: int = Field(8, ge=1, description="R0: responses per prompt group")
    deferral_levels: int | None = Field(
        None,
        ge=0,
        le=8,
        description="L; default by mode: exact 2, paper 1, auto 1 to begin with, else 0",
    )
    speculation_factors: tuple[float, ...] | None = Field(
        None,
        description="eta of levels 0 to L-1, each in 1..2; default exact 1.75, 2.0; paper 1.25;"
        " auto begins with 1.5",
    )
    response_speculation_factor: float | None = Field(
        None, ge=1, le=4, description="eta_R; above 1 in mode paper only, default 1.25 there"
    )
    dynamic_sampling: bool = Field(
        False,
        description="DAPO: a group whose responses have no advantage (equal rewards) is dropped and"
        " gives its place to the next one of the race, or to the next prompt of the data",
    )
    max_deferral_age: int = Field(
        32, ge=1, description="steps after which a deferred draw's round comes next"
    )
    carry_over_max_tokens: int = Field(
        32768,
        ge=0,
        description="tokens per response of a deferred draw that are kept as a draft of its next"
        " round, where the engine takes over what the new weights confirm; 0: none",
    )
    tensor_parallel_size: int = Field(
        1, ge=1, description="devices that one engine needs; see max_tensor_parallel_size"
    )
    max_tensor_parallel_size: int = Field(
        0,
        ge=0,
        description="let the run choose the tensor-parallel size, up to so many devices (of one"
        " host): by level in mode auto, from what engines of each size have shown, elsewhere by"
        " preemptions; a launched SGLang only; 0: engines keep their own",
    )
    tensor_parallel_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        description="devices of an engine in the rounds of each level, 0 first, the last one for"
        " all above; mode auto begins with them; a launched SGLang only; default: one size",
    )
    selection_weights: bool | None = Field(
        None,
        description="let a group that was deferred count by how likely such a one is to stay long"
        " when it is launched again, and 0 if it has turned short, so that deferral does not select"
        " by length; modes exact and auto; default: where it pays in mode auto, else off",
    )
    rebalance: bool | None = Field(
        None,
        description="let a replica without work take over a group of one that has several, and its"
        " tokens at the cost of a prefill; default: on in mode auto, else off",
    )
    scale_down: bool = Field(
        False,
        description="release rollout replicas before the end of a round; they give their memory to"
        " training until the next round",
    )
    scale_down_rule: Literal["half", "idle"] = Field(
        "half",
        description="half: once per round half of the replicas, when the others can hold what still"
        " runs (the paper's rule); idle: each one that has nothing left to run",
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        largest = self.max_tensor_parallel_size
        if largest and largest < self.tensor_parallel_size:
            raise ValueError(
                f"max_tensor_parallel_size: {largest} is below tensor_parallel_size"
                f" {self.tensor_parallel_size}; raise it, or leave it out"
            )
        sizes = self.tensor_parallel_sizes
        if len(sizes) > self.resolved_levels + 1:
            raise ValueError(
                f"tensor_parallel_sizes: {len(sizes)} values for levels 0 to"
                f" {self.resolved_levels}; give at most one per level"
            )
        if sizes and self.mode != "auto" and largest:
            raise ValueError(
                f"tensor_parallel_sizes: {list(sizes)} beside max_tensor_parallel_size {largest},"
                " by which preemptions decide; leave one of them out"
            )
        if sizes and self.mode == "auto" and max(sizes) > largest:
            raise ValueError(
                f"tensor_parallel_sizes: {max(sizes)} is above max_tensor_parallel_size {largest};"
                " mode auto chooses sizes up to that; raise it"
            )
        if self.scale_down_rule != "half" and not self.scale_down:
            raise ValueError(
                f"scale_down_rule: {self.scale_down_rule} without scale_down, which is off; set"
                " scale_down: true, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _fits_mode(self) -> Self:
        levels = self.resolved_levels
        if self.mode in ("synchronous", "overlap") and levels != 0:
            raise ValueError(
                f"deferral_levels: mode {self.mode} has none, got {levels}; leave it out"
            )
        if self.mode == "paper" and levels != 1:
            raise ValueError(f"deferral_levels: mode paper has 1, got {levels}; leave it out")
        factors = self.resolved_speculation_factors
        if len(factors) != levels:
            raise ValueError(
                f"speculation_factors: {len(factors)} values for {levels} deferral levels;"
                " give one per level below the last"
            )
        for factor in factors:
            if not 1.0 < factor <= 2.0:
                raise ValueError(
                    f"speculation_factors: {factor} is not in (1, 2]; above 2 a round would defer"
                    " more prompts than it trains, and the queue could outgrow every long round"
                )
        if self.resolved_response_speculation_factor > 1.0 and self.mode != "paper":
            raise ValueError(
                "response_speculation_factor: above 1 it drops long responses, which only mode"
                f" paper does; mode is {self.mode}"
            )
        if self.selection_weights and self.mode not in ("exact", "auto"):
            raise ValueError(
                f"selection_weights: true with mode {self.mode}, where no deferral goes by length;"
                " use mode exact or auto, or leave it out"
            )
        return self

    @property
    def resolved_levels(self) -> int:
        """deferral_levels, or its default in this mode."""
        if self.deferral_levels is not None:
            return self.deferral_levels
        if self.speculation_factors is not None:
            return len(self.speculation_factors)
        return len(DEFAULT_FACTORS.get(self.mode, ()))

    @property
    def resolved_rebalance(self) -> bool:
        """Whether idle replicas take groups over."""
        return self.mode == "auto" if self.rebalance is None else self.rebalance

    @property
    def resolved_selection_weights(self) -> bool:
        """Whether groups count by what deferral selects; mode auto begins without."""
        return bool(self.selection_weights)

    @property
    def resolved_speculation_factors(self) -> tuple[float, ...]:
        """eta per level below the last, or the defaults of this mode."""
        if self.speculation_factors is not None:
            return self.speculation_factors
        usual, levels = DEFAULT_FACTORS.get(self.mode, ()), self.resolved_levels
        return (*usual[:levels], *(2.0,) * (levels - len(usual)))

    @property
    def resolved_tensor_parallel_sizes(self) -> tuple[int, ...]:
        """Of the engines in the rounds of each level; empty where no level says so."""
        sizes = self.tensor_parallel_sizes
        if not sizes and self.mode == "auto" and self.max_tensor_parallel_size:
            sizes = (self.tensor_parallel_size,)
        return (*sizes, *sizes[-1:] * (self.resolved_levels + 1 - len(sizes)))

    @property
    def resolved_response_speculation_factor(self) -> float:
        """eta_R, or its default in this mode."""
        if self.response_speculation_factor is not None:
            return self.response_speculation_factor
        return 1.25 if self.mode == "paper" else 1.0


class SamplingSettings(Section):
    """How tokens are drawn in training rounds."""

    temperature: float = Field(1.0, gt=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_response_tokens: int = Field(1024, ge=1)
    stop_token_ids: tuple[int, ...] = Field((), description="default: the model's eos")


class RewardSettings(Section):
    """How responses are scored."""

    grader: GraderName = "math"
    function: str = Field(
        "",
        description="for grader custom, where rows hold no reference of their own: file.py:name, or"
        " a URL; it is called in the style of the row's format",
    )
    attempts: int = Field(3, ge=1, description="failures before a response goes without a reward")
    timeout_seconds: float = Field(60, gt=0, description="deadline of one try")
    unavailable_seconds: float = Field(
        300, gt=0, description="how long to wait for a reward service that is away or busy"
    )
    max_concurrent_responses: int = Field(
        0,
        ge=0,
        description="responses of a grader with the reward services at once; others wait, those"
        " of complete groups first. 0: twice the slots that the services tell (math: at least 64);"
        " all, where one tells none",
    )


class ValidationSettings(Section):
    """Held-out evaluation through the same rollout and reward services."""

    sets: tuple[DataSource, ...] = Field((), description="held-out sets, each named")
    prompts: int = Field(0, ge=0, description="how many rows of each set; 0 means all")
    responses_per_prompt: int = Field(1, ge=1, description="k of mean@k, and the most of pass@k")
    temperature: float = Field(1.0, gt=0)
    greedy: bool = Field(False, description="measure one greedy response per prompt too")
    interval: int = Field(0, ge=0, description="steps between evaluations; 0: first and last only")


class RunSettings(Section):
    """One run."""

    seed: int = Field(0, ge=0, le=MAX_SEED, description="of data order and response noise")
    model: str = Field(description="initial model: a directory that transformers loads")
    max_steps: int = Field(0, ge=0, description="stop after so many steps; 0: the data decides")
    placement: Placement = Field(
        "separate",
        description="separate: engines and trainer have GPUs of their own, and work at the same"
        " time; colocated: they take turns on the same ones, and the trainer offloads in between",
    )
    data: DataSettings
    tail_batching: TailBatchingSettings = TailBatchingSettings()
    sampling: SamplingSettings = SamplingSettings()
    reward: RewardSettings = RewardSettings()
    trainer: TrainerSettings = TrainerSettings()
    validation: ValidationSettings = ValidationSettings()
    tracking: TrackingSettings = TrackingSettings()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        mode = self.tail_batching.mode
        if mode in _BY_SEED:
            if self.sampling.top_p != 1.0 or self.sampling.top_k != 0:
                raise ValueError(
                    f"sampling: top_p {self.sampling.top_p}, top_k {self.sampling.top_k} with mode"
                    f" {mode}; it replays responses by seed, which needs top_p 1 and top_k 0"
                    " (with truncation the noise is indexed by rank, not by token)"
                )
            if self.trainer.resolved_normaliser == "step_tokens":
                raise ValueError(
                    f"trainer.normaliser: step_tokens with mode {mode}; a loss divided by the"
                    " step's own tokens weighs long responses less; use response_cap or constant"
                )
        if self.placement == "colocated" and self.tail_batching.scale_down:
            raise ValueError(
                "tail_batching.scale_down: true with placement colocated, whose trainer needs all"
                " GPUs at once and cannot use some of them earlier; leave one of the two out"
            )
        self._check_trainer()
        check_names("validation.sets", [source.name for source in self.held_out_sets])
        return self

    @property
    def held_out_sets(self) -> tuple[DataSource, ...]:
        """The set of data.validation_path, named held_out, and those of validation.sets."""
        own = self.data.held_out
        return (*([own] if own else []), *self.validation.sets)

    def _check_trainer(self) -> None:
        trainer, sampling = self.trainer, self.sampling
        truncated = sampling.top_p != 1.0 or sampling.top_k != 0
        if truncated and (
            trainer.rollout_correction != "none" or trainer.old_logprobs == "rollout"
        ):
            raise ValueError(
                f"sampling: top_p {sampling.top_p}, top_k {sampling.top_k} with trainer."
                f"rollout_correction {trainer.rollout_correction}, old_logprobs"
                f" {trainer.old_logprobs}; logprobs of a truncated law are no importance weights;"
                " use top_p 1 and top_k 0, or leave the two settings out"
            )
        if trainer.overlong_buffer_tokens > sampling.max_response_tokens:
            raise ValueError(
                f"trainer.overlong_buffer_tokens: {trainer.overlong_buffer_tokens} is above"
                f" sampling.max_response_tokens {sampling.max_response_tokens}; make it smaller"
            )


class SettingsError(ValueError):
    """Settings are wrong; `problems` is a list of (field, what is wrong and how to mend it)."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{name}: {what}" for name, what in problems))


def parse_run_settings(values: Mapping[str, Any]) -> RunSettings:
    """Check values against RunSettings. Raises SettingsError with every problem found."""
    try:
        return RunSettings.model_validate(values)
    except ValidationError as error:
        raise SettingsError([_problem(item) for item in error.errors()]) from error


def load_run_settings(path: Path, overrides: Iterable[str] = ()) -> RunSettings:
    """Read a YAML run file and apply dotted overrides such as `trainer.learning_rate=1e-5`.

    Paths in the file are relative to its directory (paths in overrides: to the current one).
    Raises SettingsError.
    """
    values = _read_yaml(path)
    _make_paths_absolute(values, path.parent)
    given: dict[str, Any] = {}
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise SettingsError([(override, "not an override; write section.key=value")])
        try:
            value = load_yaml(text)
        except ValueError as error:
            raise SettingsError([(override, f"is not YAML: {error}")]) from error
        _set_dotted(given, key, value)
    _make_paths_absolute(given, Path.cwd())
    return parse_run_settings(merge_settings(values, given))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError([(str(path), f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise SettingsError([(str(path), "is not UTF-8 text; give a YAML file")]) from error
    except ValueError as error:
        raise SettingsError([(str(path), f"is not YAML: {error}")]) from error
    if not isinstance(values, dict):
        raise SettingsError([(str(path), "must be a mapping of settings")])
    return values


def _make_paths_absolute(values: dict[str, Any], base: Path) -> None:
    places = [(values, "model")]
    for section, key in (("data", "sources"), ("validation", "sets")):
        if isinstance(settings := values.get(section), dict):
            sources = settings.get(key)
            of_each = sources if isinstance(sources, list) else []
            for source in (settings, *(s for s in of_each if isinstance(s, dict))):
                names = ("tokenizer",) if source.get("format") == "reasoning_gym" else _PATHS
                places += [(source, name) for name in names]
    for section_, key in places:
        if isinstance(text := section_.get(key), str) and text:
            section_[key] = str((base / text).resolve())


def _set_dotted(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise SettingsError([(key, f"`{parent}` is not a section")])
    values[last] = value


def merge_settings(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, section by section."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[key] = merge_settings(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _problem(error: Any) -> tuple[str, str]:
    """One pydantic error as (field, message that names value and fix)."""
    location = [str(part) for part in error["loc"]]
    name = ".".join(location) or "settings"
    if error["type"] == "extra_forbidden":
        return name, f"unknown setting{_nearest(location)}"
    if error["type"] == "missing":
        return name, "is required"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return name, message
    return name, f"{message}, got {error['input']!r}"


def _nearest(location: list[str]) -> str:
    model: Any = RunSettings
    for part in location[:-1]:
        if not part.isdigit():  # a place in a list of sections
            model = model.model_fields[part].annotation
            model = next((a for a in get_args(model) if isinstance(a, type)), model)
    names = list(model.model_fields)
    close = difflib.get_close_matches(location[-1], names, n=1, cutoff=0.5)
    return f"; did you mean `{close[0]}`?" if close else f"; valid: {', '.join(names)}"


class ServiceSettings(BaseSettings):
    """What every service needs to know; subclasses set their own env_prefix."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True)

    address: str = Field("127.0.0.1:0", description="where to listen; port 0 takes a free one")
    address_file: Path | None = Field(None, description="the bound address is written here")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_format: LogFormat = Field("text", description="text, or one JSON object per line")
    metrics_address: str = Field(
        "", description="host:port of /metrics for Prometheus; default: there is none"
    )
    trace_endpoint: str = Field(
        "", description="OTLP endpoint for traces, http://host:4317; default: there are none"
    )


Service = TypeVar("Service", bound=ServiceSettings)


def read_service_settings(kind: type[Service]) -> Service:
    """The settings of this process, from its environment.

    Raises SystemExit, which says every problem by the name of its variable.
    """
    try:
        return kind()
    except ValidationError as error:
        prefix = str(kind.model_config.get("env_prefix", ""))
        problems = [(prefix + name.upper(), what) for name, what in map(_problem, error.errors())]
        raise SystemExit("\n".join(f"{name}: {what}" for name, what in problems)) from error
    except SettingsSourceError as error:  # a list or a mapping that is no JSON
        raise SystemExit(f"{error}; write it as JSON") from error


Address = Annotated[str, Field(description='"host:port" or "unix:///path"')]


class WorkerSettings(ServiceSettings):
    """A service that registers with the coordinator by heartbeat."""

    worker_id: str = Field(description="unique and stable over restarts, for example rollout-0")
    coordinator_address: Address
    advertise_address: str = Field("", description="what the coordinator dials; default: address")
