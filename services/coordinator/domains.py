"""Accounts by domain: which source the trained groups and the queued draws come from.

At every commit trained and queued groups of a domain (and those that dynamic sampling dropped) are
together what the data has given of it, whether they were trained in short or in long rounds.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from rollpacker.store.records import RunState, Totals
from rollpacker.types import PromptGroup

_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9._-]")
DomainOf = Callable[[str], str]  # of a prompt id


def add_domains(totals: Totals, groups: Sequence[PromptGroup], domain_of: DomainOf) -> Totals:
    """The totals with the groups of a step counted by domain."""
    counts = Counter(totals.trained_by_domain)
    counts.update(domain_of(group.draw.prompt_id) for group in groups)
    return replace(totals, trained_by_domain=dict(counts))


def domain_metrics(
    groups: Sequence[PromptGroup], after: RunState, domain_of: DomainOf
) -> dict[str, float]:
    """Per domain: groups and reward of the step, groups trained and draws queued after it.

    Empty where no prompt has a domain.
    """
    queued = Counter(domain_of(item.draw.prompt_id) for item in after.deferred)
    trained = after.totals.trained_by_domain
    metrics: dict[str, float] = {}
    for domain in sorted({*trained, *queued} - {""}):
        own = [group for group in groups if domain_of(group.draw.prompt_id) == domain]
        rewards = [s.reward for group in own for s in group.responses if s.reward is not None]
        prefix = f"domain/{_NOT_IN_NAME.sub('_', domain)}"
        metrics |= {
            f"{prefix}/groups": float(len(own)),
            f"{prefix}/trained_total": float(trained.get(domain, 0)),
            f"{prefix}/queued": float(queued[domain]),
        }
        if rewards:
            metrics[f"{prefix}/reward"] = statistics.fmean(rewards)
    return metrics
