"""What a held-out measurement says: mean@k, pass@k, and the greedy answer. Pure.

With n graded responses to a prompt of which c are correct, pass@k is the chance that k of them,
taken without putting back, hold a correct one: 1 - C(n - c, k) / C(n, k). That is an unbiased
estimate of the chance with k fresh responses, which 1 - (1 - c/n)^k is not (Chen et al. 2021,
arXiv 2107.03374). A prompt with fewer than k graded responses says nothing about pass@k and is left
out of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from rollpacker.types import PromptGroup, ScoredResponse, Verdict


def pass_at_k(graded: int, correct: int, k: int) -> float:
    """The unbiased estimate from one prompt. Needs 1 <= k <= graded."""
    if not (1 <= k <= graded and 0 <= correct <= graded):
        raise ValueError(f"k: {k} of {graded} graded responses, {correct} of them correct")
    return 1.0 - math.comb(graded - correct, k) / math.comb(graded, k)


def held_out_scores(
    sampled: Sequence[PromptGroup], greedy: Sequence[PromptGroup], responses_per_prompt: int
) -> dict[str, float]:
    """One line of validation.jsonl. greedy: groups of one response, or none."""
    scores = _means(sampled, "")
    if responses_per_prompt > 1 and "accuracy" in scores:
        scores[f"mean@{responses_per_prompt}"] = _mean_of_prompts(sampled)
    for k in _ks(responses_per_prompt):
        estimates = [
            pass_at_k(graded, correct, k) for graded, correct in _counts(sampled) if graded >= k
        ]
        if estimates:
            scores[f"pass@{k}"] = statistics.fmean(estimates)
    return scores | (_means(greedy, "greedy_") if greedy else {})


def _ks(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    return sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})


def _means(groups: Sequence[PromptGroup], prefix: str) -> dict[str, float]:
    responses = [scored for group in groups for scored in group.responses]
    rewards = [scored.reward for scored in responses if scored.reward is not None]
    lengths = [len(scored.response.token_ids) for scored in responses]
    scores = {f"{prefix}count": float(len(rewards))}
    if lengths:
        scores[f"{prefix}response_tokens"] = statistics.fmean(lengths)
    if rewards:
        scores[f"{prefix}accuracy"] = statistics.fmean(rewards)
    return scores


def _mean_of_prompts(groups: Sequence[PromptGroup]) -> float:
    """Every prompt weighs the same, however many of its responses were graded."""
    rewards = ([s.reward for s in group.responses if s.reward is not None] for group in groups)
    return statistics.fmean(statistics.fmean(own) for own in rewards if own)


def _counts(groups: Sequence[PromptGroup]) -> list[tuple[int, int]]:
    """Per prompt: (graded responses, correct ones)."""
    return [
        (sum(s.reward is not None for s in group.responses), sum(map(_is_correct, group.responses)))
        for group in groups
    ]


def _is_correct(scored: ScoredResponse) -> bool:
    return scored.reward is not None and scored.verdict is Verdict.CORRECT
