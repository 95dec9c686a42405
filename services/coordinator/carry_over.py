"""What is known of each response's tokens, so that no token is decoded twice if it can be helped.

    a draft of other weights (from the queue) --> sent with the launch, checked by the engine
    progress of a stream that breaks ---------> with logprobs (SGLang): a prefix for resume_from;
                                                else a draft of the same weights
    an INTERRUPTED response ------------------> resume_from: tokens and logprobs stand
    finished, or broken off by a lost race ---> the drafts that the draw keeps in the queue

A prefix that was handed back is better than a draft of the same length, because nothing has to be
checked. Everything here may be wrong or missing without harm: a draft changes how long a response
takes, never the response.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollpacker.types import (
    ASSISTANT,
    Draft,
    Draw,
    DrawId,
    FinishReason,
    Response,
    Segment,
    response_id,
)


@dataclass(slots=True)
class _Trail:
    """One response: the newest thing known of it counts."""

    draft: Draft | None = None  # from the queue, or from a stream of this round that broke
    prefix: Response | None = None  # of a replica of this round: handed back, or told
    tokens: list[int] = field(default_factory=list)  # of the launch under way, from the first on
    logprobs: array[float] = field(default_factory=lambda: array("f"))  # of these; or not told
    checked: Draft | None = None  # the draft of other weights that the last launch was given


@dataclass(frozen=True, slots=True)
class CheckedDraft:
    """How a draft of other weights fared."""

    updates_between: int  # weight versions from the draft to the response
    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class LaunchParts:
    """What a launch can start from."""

    resume_from: tuple[Response, ...]
    drafts: tuple[Draft, ...]


class CarryOver:
    """The trails of one round's responses, at one weight version."""

    def __init__(
        self,
        weight_version: int,
        drafts: Mapping[DrawId, Sequence[Draft]],
        max_tokens: int,
        run_id: str,
        draws: Mapping[DrawId, Draw],
    ) -> None:
        """`drafts` as they stand in the queue; of each response up to `max_tokens` are kept there,
        0 keeps none. `draws`: of the round."""
        self._run_id = run_id
        self._draws = draws
        self._weight_version = weight_version
        self._max_tokens = max_tokens
        self._trails = {
            (draw, draft.index): _Trail(draft)
            for draw, its_drafts in drafts.items()
            for draft in its_drafts
        }
        self.checked: list[CheckedDraft] = []

    def launch(self, draw: DrawId, indices: Iterable[int]) -> LaunchParts:
        """These responses start (again): what they can start from."""
        resume_from, drafts = [], []
        for index in indices:
            trail = self._trail(draw, index)
            self._stream_is_over(trail, draw, index)
            prefix, draft = trail.prefix, trail.draft
            trail.checked = None
            if prefix is not None and (draft is None or not self._is_longer(draft, prefix)):
                resume_from.append(prefix)
            elif draft is not None:
                drafts.append(draft)
                trail.checked = draft if draft.weight_version != self._weight_version else None
        return LaunchParts(tuple(resume_from), tuple(drafts))

    def progressed(
        self, draw: DrawId, index: int, token_ids: Sequence[int], logprobs: Sequence[float] = ()
    ) -> None:
        """A running response has these tokens more; their logprobs, where the engine tells them."""
        trail = self._trail(draw, index)
        trail.tokens += token_ids
        trail.logprobs.extend(logprobs)

    def interrupted(self, draw: DrawId, response: Response) -> None:
        """A replica has handed a response back."""
        trail = self._trail(draw, response.index)
        trail.tokens, trail.logprobs = [], array("f")
        if response.token_ids:
            trail.prefix = response

    def finished(self, draw: DrawId, response: Response) -> None:
        """A response has ended by itself."""
        trail = self._trail(draw, response.index)
        trail.tokens, trail.logprobs = list(response.token_ids), array("f")
        if trail.checked is not None:
            self.checked.append(
                CheckedDraft(
                    updates_between=self._weight_version - trail.checked.weight_version,
                    draft_tokens=len(trail.checked.token_ids),
                    accepted_tokens=response.accepted_draft_token_count,
                )
            )

    def left(self, draw: DrawId, indices: Iterable[int]) -> tuple[Draft, ...]:
        """The drafts that a draw keeps when it has lost the race."""
        found = (self._left(draw, index) for index in indices)
        return tuple(draft for draft in found if draft is not None)

    def _left(self, draw: DrawId, index: int) -> Draft | None:
        trail = self._trails.get((draw, index))
        if trail is None or self._max_tokens == 0:
            return None
        here = [tuple(trail.tokens), trail.prefix.token_ids if trail.prefix else ()]
        if trail.draft is not None and trail.draft.weight_version == self._weight_version:
            here.append(trail.draft.token_ids)
        longest = max(here, key=len)
        if longest:
            return Draft(index, longest[: self._max_tokens], self._weight_version)
        draft = trail.draft
        return draft and dataclasses.replace(draft, token_ids=draft.token_ids[: self._max_tokens])

    def _stream_is_over(self, trail: _Trail, draw: DrawId, index: int) -> None:
        """What it told stands, with logprobs; without them it has to be checked."""
        tokens, logprobs = tuple(trail.tokens), tuple(trail.logprobs)
        trail.tokens, trail.logprobs = [], array("f")
        if tokens and len(logprobs) == len(tokens):
            trail.prefix = Response(
                response_id=response_id(self._run_id, draw, index),
                index=index,
                token_ids=tokens,
                logprobs=logprobs,
                finish_reason=FinishReason.INTERRUPTED,
                weight_version=self._weight_version,
                seed=self._draws[draw].seeds[index],
                segments=(Segment(ASSISTANT, len(tokens), trainable=True),),
            )
        elif tokens:
            trail.draft = Draft(index, tokens, self._weight_version)

    def _is_longer(self, draft: Draft, prefix: Response) -> bool:
        """A draft of these weights that has more than the prefix that stands."""
        is_current = draft.weight_version == self._weight_version
        return is_current and len(draft.token_ids) > len(prefix.token_ids)

    def _trail(self, draw: DrawId, index: int) -> _Trail:
        return self._trails.setdefault((draw, index), _Trail())
