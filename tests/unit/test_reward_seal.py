"""A closed seal refuses to evaluate text; run in a child, for an audit hook cannot be removed."""

from __future__ import annotations

import subprocess
import sys

import pytest

_CHILD = """
import ast, os, re, socket, subprocess
from services.reward.graders.seal import EvaluationRefusedError, Seal
import sympy
seal = Seal()
eval("1")  # open: allowed
try:
    with seal.closed():
        try:
            {action}
        except Exception:
            pass  # as libraries do
except EvaluationRefusedError as error:
    print("refused", error)
else:
    print("allowed")
"""


def outcome(action: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD.format(action=action)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.split()[0]


@pytest.mark.parametrize(
    "action",
    [
        "eval('1+1')",
        "exec('x = 1')",
        "sympy.sympify('x+1')",
        "sympy.parse_expr('x+1')",
        "os.system('true')",
        "subprocess.run(['true'])",
        "socket.create_connection(('127.0.0.1', 9))",
        "open('/tmp/seal-test', 'w')",
        "os.fork()",
    ],
)
def test_a_closed_seal_refuses_even_when_a_library_swallows_the_error(action: str) -> None:
    assert outcome(action) == "refused"


@pytest.mark.parametrize(
    "action",
    [
        "import sympy.physics.units",
        "sympy.simplify(sympy.Symbol('x') * 2 / 4)",
        "re.compile('a+')",
        "ast.literal_eval('[1]')",
        "open('/etc/hostname').read()",
    ],
)
def test_a_closed_seal_allows_what_evaluates_nothing(action: str) -> None:
    assert outcome(action) == "allowed"
