"""The AppArmor profile of reward: is it whole, does it hold what the sandbox needs, is it used?

Its syntax is the parser's business: `apparmor_parser -QKT deploy/apparmor/rollpacker-reward` (4.1.0
of Debian 13 compiles it). No kernel has loaded it yet.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
PROFILE = DEPLOY / "apparmor" / "rollpacker-reward"
RULES = [
    line.strip()
    for line in PROFILE.read_text().splitlines()
    if line.strip() and not line.strip().startswith("#")
]


def test_every_rule_ends_and_there_is_one_profile() -> None:
    (opening,) = [rule for rule in RULES if rule.startswith("profile ")]
    assert opening.split()[1] == PROFILE.name
    inside = RULES[RULES.index(opening) + 1 : RULES.index("}")]
    assert RULES[-1] == "}"
    assert [r for r in inside if not r.endswith(",") and not r.startswith("include <")] == []


def test_it_allows_the_sandbox_and_nothing_to_be_written_beside_its_own_places() -> None:
    assert {"userns,", "mount,", "pivot_root,", "capability sys_admin,"} <= set(RULES)
    assert {"deny network raw,", "deny network packet,"} <= set(RULES)
    written = [rule.split()[0] for rule in RULES if re.match(r"/\S* [rmixlk]*w", rule)]
    assert all(re.match(r"/(tmp|dev|newroot)\b", path) for path in written), written


def test_the_override_of_compose_names_it() -> None:
    override = yaml.safe_load((DEPLOY / "compose.apparmor.yaml").read_text())
    assert override["services"]["reward"]["security_opt"] == [f"apparmor={PROFILE.name}"]
