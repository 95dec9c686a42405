"""Whether a server honours seeds: asked, not believed.

SGLang ignores `sampling_seed` silently unless it runs in deterministic mode. The probe samples a
few short responses with known seeds, in one batch, and looks at the best tokens of each position:
the one that was sampled must have the largest sum of logprob and noise, with the noise of
`rollpacker.sampling`. Another sampler passes by chance less than once in 10^20. One response is
then resumed from its middle, and must go on the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollpacker.sampling import NEAR_TIE, gumbel, noise_bits, seed_state
from services.rollout.sglang_engine.client import SglangClient

_SEEDS = (1, 2**62 + 12345, 987_654_321)
_TOKENS = 16
_TEMPERATURE = 4.0  # flat: the most likely token must not win every time
_CANDIDATES = 64


async def honours_seeds(client: SglangClient, vocabulary: int, name: str) -> bool:
    """Whether seeds decide what the server samples. `name` starts the names of its requests."""
    prompt = [token % vocabulary for token in range(1, 6)]
    outputs = await _sample(client, prompt, _SEEDS, f"{name}-a", vocabulary)
    if not all(
        _follows_noise(output, seed, len(prompt))
        for output, seed in zip(outputs, _SEEDS, strict=True)
    ):
        return False
    whole = outputs[0]["output_ids"]
    prefix = whole[: _TOKENS // 2]
    (resumed,) = await _sample(client, [*prompt, *prefix], _SEEDS[:1], f"{name}-b", vocabulary)
    return _follows_noise(resumed, _SEEDS[0], len(prompt) + len(prefix))


async def _sample(
    client: SglangClient, prompt: Sequence[int], seeds: Sequence[int], name: str, vocabulary: int
) -> list[dict[str, Any]]:
    parameters = [
        {"temperature": _TEMPERATURE, "max_new_tokens": _TOKENS, "sampling_seed": seed}
        for seed in seeds
    ]
    return await client.generate(
        {
            "rid": [f"{name}{index}" for index in range(len(seeds))],
            "input_ids": [list(prompt)] * len(seeds),
            "sampling_params": parameters,
            "return_logprob": True,
            "top_logprobs_num": min(_CANDIDATES, vocabulary),
        }
    )


def _follows_noise(output: dict[str, Any], seed: int, prompt_length: int) -> bool:
    """Whether each sampled token is the best of its candidates, up to near-ties."""
    candidates = output["meta_info"]["output_top_logprobs"]
    sampled = output["meta_info"]["output_token_logprobs"]
    state = seed_state(seed)
    for place, (chosen, others) in enumerate(zip(sampled, candidates, strict=True)):
        position = prompt_length + place - 1

        def score(entry: Sequence[Any], position: int = position) -> float:
            return float(entry[0]) + float(gumbel(noise_bits(state, position, entry[1])))

        if score(chosen) < max(map(score, others)) - NEAR_TIE:
            return False
    return True
