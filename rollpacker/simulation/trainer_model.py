"""The trainer on the virtual clock: groups stream in, released GPUs work on them, then the update.

Until the round ends only GPUs that the policy has released train (a share of all, 0 at first); from
then on all do. The update itself (optimizer, all-reduce, hand-over) follows, of a fixed length.
Nothing is lost: the work of a group is done once, at 1 / (GPUs in training) of its GPU-seconds.
"""

from __future__ import annotations

from rollpacker.simulation.parameters import ModelFacts, Parameters

_FLOPS_PER_TOKEN = 8.0  # times the parameters: forward 2, backward 4, old logprobs 2


class TrainerModel:
    """One step."""

    def __init__(
        self,
        parameters: Parameters,
        model: ModelFacts,
        gpus: int,
        *,
        fetches_once: bool = False,
    ) -> None:
        """`fetches_once`: released GPUs train what is there at the release, and no more."""
        rate = parameters["peak_flops"] * parameters["train_efficiency"]
        self.seconds_per_token = _FLOPS_PER_TOKEN * model.parameters / (rate * gpus)
        self.update_seconds = parameters[f"update_seconds.{model.name}"]
        self._backlog = 0.0  # seconds of the whole cluster
        self._fetches_once = fetches_once
        self._late = 0.0  # seconds of the whole cluster, for the end of the round
        self._share = 0.0  # of the GPUs, released to training
        self._clock = 0.0
        self.work_seconds = 0.0  # done so far, of the whole cluster

    def receive(self, at: float, tokens: int) -> None:
        """A group has arrived."""
        self._work_until(at)
        seconds = tokens * self.seconds_per_token
        if self._fetches_once and self._share > 0:
            self._late += seconds
        else:
            self._backlog += seconds

    def release(self, at: float, share: float) -> None:
        """From now on this share of the GPUs trains."""
        self._work_until(at)
        self._share = share

    def finish(self, at: float) -> float:
        """When the update is done, if the rollout is over at `at` and all GPUs train from then."""
        self._work_until(at)
        self._backlog += self._late
        self._late = 0.0
        self.work_seconds += self._backlog
        done = at + self._backlog + self.update_seconds
        self._backlog = 0.0
        return done

    def _work_until(self, at: float) -> None:
        done = min(self._backlog, max(0.0, at - self._clock) * self._share)
        self._backlog -= done
        self.work_seconds += done
        self._clock = max(self._clock, at)
