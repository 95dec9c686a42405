"""What every engine refuses in a request, told by the field to change. Pure."""

from __future__ import annotations

import math

from rollpacker.sampling import MAX_SEED
from services.rollout.engine import GenerationRequest, InvalidRequestError, PromptTooLongError


def check_request(
    request: GenerationRequest, *, context: int, kv_budget: int, vocabulary: int
) -> None:
    """Raise PromptTooLongError or InvalidRequestError for what could never be served.

    `context` (tokens) and `vocabulary` are 0 while no weights are loaded; then neither is checked.
    """
    longest = len(request.prompt_token_ids) + request.max_response_tokens
    for limit, name in ((context, "context"), (kv_budget, "KV budget")):
        if context and longest > limit:
            raise PromptTooLongError(
                f"{len(request.prompt_token_ids)} prompt tokens and a cap of"
                f" {request.max_response_tokens} make {longest}; the {name} is {limit}:"
                f" shorten the prompt, lower the cap or raise the {name}"
            )
    for name, token_ids in (
        ("prompt_token_ids", request.prompt_token_ids),
        ("carried_token_ids", request.carried_token_ids),
        ("draft_token_ids", request.draft_token_ids),
    ):
        if context and not all(0 <= token < vocabulary for token in token_ids):
            raise InvalidRequestError(name, f"a token is not in 0..{vocabulary - 1}")
    problems = {
        "prompt_token_ids": not request.prompt_token_ids and "is empty; give a token",
        "seed": not 0 <= request.seed <= MAX_SEED and f"{request.seed} is not 63 bits",
        "temperature": not (math.isfinite(request.temperature) and request.temperature > 0)
        and f"{request.temperature} is not a finite number above 0",
        "max_response_tokens": request.max_response_tokens < 1
        and f"{request.max_response_tokens} is not above 0",
        "carried_token_ids": len(request.carried_token_ids) >= request.max_response_tokens
        and f"{len(request.carried_token_ids)} tokens fill the cap already",
        "carried_logprobs": len(request.carried_logprobs) != len(request.carried_token_ids)
        and "must be as many as carried_token_ids",
    }
    for field, problem in problems.items():
        if problem:
            raise InvalidRequestError(field, problem)
