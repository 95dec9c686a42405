"""Which running group an idle replica takes over from a busy one.

Lengths are not known before a round, so some replicas get more long responses than others and are
still busy, or out of KV cache, when others have nothing left to do. As long as no group waits and
a replica runs none, the replica with the most running responses gives it one of its groups: the one
with the most unfinished responses. That group is interrupted there and goes on where it is placed,
from the tokens that it has.

Each move leaves one idle replica less and no replica idle that was not, so moves come to an end.
Who wins a race in tokens does not depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollpacker.policy.round_state import Group, Replica
from rollpacker.types import DrawId


def group_to_move(
    replicas: Mapping[str, Replica], groups: Mapping[DrawId, Group]
) -> tuple[DrawId, str] | None:
    """The group that should leave its replica for an idle one, and that replica; None: no such."""
    donors = [
        n for n, replica in replicas.items() if len(replica.running) > 1 and not replica.draining
    ]
    if not donors:
        return None
    donor = max(donors, key=lambda name: (replicas[name].used, name))
    order = {draw: place for place, draw in enumerate(groups)}
    running = replicas[donor].running
    return max(running, key=lambda draw: (len(groups[draw].missing()), -order[draw])), donor
