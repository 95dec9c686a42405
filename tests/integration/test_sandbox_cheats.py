# ruff: noqa: E501  programs read better on their lines
"""A solution cannot mark itself correct, whatever it does to its own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.reward.graders.code import CodeGrader
from tests.sandbox_support import new_grader, verdict

PROGRAM_CHEATS = {
    "exit code 0": "import sys\nsys.exit(0)",
    "os._exit(0)": "import os\nos._exit(0)",
    "printed markers": "print('CORRECT'); print('{\"verdict\": \"CORRECT\"}'); print('OK passed 1.0')",
    "an excepthook": "import sys\nsys.excepthook = lambda *_: print('42')\nraise ValueError",
    "an exit function": "import atexit, os\natexit.register(os._exit, 0)",
    "patched builtins": "import builtins\nbuiltins.print = lambda *_: None\n"
    "builtins.compile = builtins.exec = lambda *_: None\nstr.__eq__ if 1 else 0",
    "a frame walk": "import sys\nf = sys._getframe()\nwhile f:\n"
    "    f.f_locals.update(code=0, report=b'')\n    for v in f.f_locals.values():\n"
    "        isinstance(v, dict) and v.update(ended_by='exit', code=0, expected='')\n"
    "    f = f.f_back",
    "garbage-collected objects": "import gc\nfor o in gc.get_objects():\n"
    "    if isinstance(o, dict) and 'expected' in o: print(o['expected'])",
    "inherited descriptors": "import os\nfor fd in range(3, 256):\n    try: os.write(fd, b'X' * 99)\n"
    "    except OSError: pass",
    "a forged report on standard output": "import os, struct, json\nr = json.dumps(dict(ended_by='exit',"
    "code=0, cpu_seconds=0, wall_seconds=0)).encode()\nos.write(1, struct.pack('>cI', b'X', len(r)) + r)",
    "a thread that outlives": "import threading, time, os\n"
    "threading.Thread(target=lambda: (time.sleep(.05), os._exit(0)), daemon=True).start()",
    "files with answers": "import os\nfor d, _, files in os.walk('/'):\n"
    "    for f in files:\n        if 'expected' in f or f.endswith('.jsonl'): print(open(d + '/' + f).read())",
    "the runner's memory": "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
    "libc.ptrace(16, os.getppid(), 0, 0)\nb = ctypes.create_string_buffer(64)\n"
    "libc.process_vm_readv(os.getppid(), b, 1, b, 1, 0)\nprint(b.raw)",
    "the runner killed": "import os\nos.kill(os.getppid(), 9)",
    "every process killed": "import os\nos.kill(-1, 9)",
    "the runner killed by way of a pipe": "import fcntl, os, time\nr, w = os.pipe()\n"
    "fcntl.fcntl(r, 8, os.getppid())\nfcntl.fcntl(r, 10, 9)\n"
    "fcntl.fcntl(r, 4, os.O_ASYNC | os.O_NONBLOCK)\nos.write(w, b'x')\ntime.sleep(1)",
    "the runner stopped by way of a pipe": "import fcntl, os, time\nr, w = os.pipe()\n"
    "fcntl.fcntl(r, 8, os.getppid())\nfcntl.fcntl(r, 10, 19)\n"
    "fcntl.fcntl(r, 4, os.O_ASYNC | os.O_NONBLOCK)\nos.write(w, b'x')\ntime.sleep(1)",
    "standard input as the answer": "import sys\nprint(sys.stdin.read())",
}  # fmt: skip

FUNCTION_CHEATS = {
    "__eq__": "class Yes:\n    def __eq__(self, o): return True\n    def __hash__(self): return 0\n"
    "def f(x): return Yes()",
    "an int that equals all": "class Yes(int):\n    def __eq__(self, o): return True\n"
    "    __hash__ = int.__hash__\ndef f(x): return Yes(0)",
    "a str that equals all": "class Yes(str):\n    def __eq__(self, o): return True\n"
    "    __hash__ = str.__hash__\ndef f(x): return Yes('')",
    "a list that equals all": "class Yes(list):\n    def __eq__(self, o): return True\n"
    "    def __len__(self): return 1\ndef f(x): return Yes()",
    "exit": "import os\ndef f(x): os._exit(0)",
    "system exit": "def f(x): raise SystemExit(0)",
    "an assertion that never fails": "import builtins\nbuiltins.AssertionError = Warning\ndef f(x): return 0",
    "forged answers": "import os\ndef f(x):\n    for fd in range(3, 9):\n        try: os.write(fd, b'\\0\\0\\0\\2{}' * 9)\n"
    "        except OSError: pass\n    return 0",
    "garbage answers": "import os\ndef f(x):\n    for fd in range(3, 9):\n        try: os.write(fd, b'\\xff' * 99)\n"
    "        except OSError: pass\n    os._exit(0)",
    "answers nested deeply": "def f(x):\n    a = []\n    for _ in range(500): a = [a]\n    return a",
    "an expected exception": "def f(x): raise AssertionError",
    "the code of a passed test": "import sys\ndef f(x): sys.exit(0)",
    "patched encoding": "import sys\nv = sys.modules['inside.values']\nv.encode = lambda *_: True\ndef f(x): return 0",
    "the checker's frames": "import sys\nd = sys._getframe()\nwhile d:\n    d.f_globals.update(expected=0)\n"
    "    d = d.f_back\ndef f(x): return 0",
}  # fmt: skip


@pytest.fixture(scope="module")
def grader() -> Iterator[CodeGrader]:
    made = new_grader(30.0)  # on no machine is it the time limit that stops a cheat
    yield made
    made.end()


@pytest.mark.parametrize("cheat", PROGRAM_CHEATS)
def test_no_program_gets_a_reward_without_the_right_output(grader: CodeGrader, cheat: str) -> None:
    assert verdict(grader, PROGRAM_CHEATS[cheat], tests=[["6 7\n", "42\n"]]) in (
        "INCORRECT",
        "CRASHED",
        "PROCESS_LIMIT",
    )
    assert verdict(grader, "print(42)", tests=[["6 7\n", "42\n"]]) == "CORRECT"


@pytest.mark.parametrize("cheat", FUNCTION_CHEATS)
def test_no_function_gets_a_reward_without_the_right_value(grader: CodeGrader, cheat: str) -> None:
    program = FUNCTION_CHEATS[cheat]
    wrong = ("INCORRECT", "CRASHED", "PROCESS_LIMIT")
    assert verdict(grader, program, fn_name="f", inputs=[[6]], outputs=[42]) in wrong
    assert verdict(grader, program, asserts=["assert f(6) == 42"]) in wrong
    humaneval = "def check(candidate):\n    assert candidate(6) == 42"
    assert verdict(grader, program, test=humaneval, entry_point="f") in wrong
