"""The fork in which a solution runs: confined first, then it runs, then it ends like any program.

How it ended is told by its exit code, for statistics: a solution may forge it, and gains nothing,
as every code but 0 is a reward of 0 and 0 only means that its output is worth comparing.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import errno
import gc
import importlib
import io
import os
import resource
import signal
import sys
import threading
import types
from typing import Any, NoReturn

from . import calls, checks, seccomp

COMPILE_ERROR, CRASHED, MEMORY_LIMIT, FILE_LIMIT, PROCESS_LIMIT = 101, 102, 103, 104, 105
_STACK_BYTES = 64 << 20
_CPU_SLACK_SECONDS = 2  # the kernel's limit behind the runner's own
_OTHER_PROCESSES = 2  # bubblewrap's and the runner: the kernel counts them, but for root
_PR_SET_DUMPABLE, _PR_SET_PDEATHSIG, _PR_CAP_AMBIENT, _CLEAR_ALL = 4, 1, 47, 4
_CAPABILITIES_3 = 0x20080522
_FILE_ERRORS = (errno.EFBIG, errno.ENOSPC, errno.EDQUOT, errno.EMFILE)
_PROCESS_EVENTS = ("os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system")
_WARM = (
    "typing", "collections", "math", "heapq", "bisect", "itertools", "functools", "string", "re",
    "operator", "copy", "threading", "io",
)  # fmt: skip
_asked_for_processes: list[str] = []


def warm_up() -> None:
    """Import what most solutions import, once for all of them."""
    for name in _WARM:
        importlib.import_module(name)
    gc.freeze()  # collections of the forks leave these pages alone
    os.environ.clear()
    ctypes.CDLL(None).setenv(b"OPENBLAS_NUM_THREADS", b"1", 1)  # for C only: environ stays empty


def confine(job: dict[str, Any]) -> None:
    """Give up everything but what a solution may have. Raises OSError; then nothing may run."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write over the limit is an OSError
    cpu = int(job["cpu_seconds"]) + _CPU_SLACK_SECONDS
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_FSIZE, job["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, job["threads"] + _OTHER_PROCESSES),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_AS, job["memory_bytes"]),
    ):
        resource.setrlimit(limit, (value, value))
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(hard, _STACK_BYTES)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))
    _drop_capabilities()
    seccomp.install()


def _drop_capabilities() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    for done in (
        libc.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0),
        libc.syscall(_CAPSET[os.uname().machine], header, nothing),
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0),
    ):
        if done != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"capabilities cannot be dropped: {os.strerror(number)}")


_CAPSET = {"x86_64": 126, "aarch64": 91}


def run(job: dict[str, Any]) -> NoReturn:
    """Run the solution of a confined process, and end the process."""
    sys.addaudithook(_note_processes)
    try:
        if job["mode"] == "program":
            _open_streams()
            exec(_compiled(job["source"]), _main_module().__dict__)  # noqa: S102  the purpose
        elif job["mode"] == "calls":
            replies = calls.take_streams()
            calls.serve(_compiled(job["source"]), _main_module().__dict__, replies)
        else:
            checks.run(job["source"], job["setup"], _main_module().__dict__)
        code = 0
    except SystemExit as end:
        code = _exit_code(end.code)
    except BaseException as error:  # noqa: BLE001  whatever it raises is its exit code
        if job["mode"] == "program" and job["setup"]:
            _tell(error)
        os._exit(_code_of(error))
    _finish(code)


def _tell(error: BaseException) -> None:
    """Its output so far, and its traceback: whoever runs a program by hand wants both."""
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        shown = error.__cause__ or error
        traceback = shown.__traceback__
        frames = traceback.tb_next if traceback else None  # without the frame of the runner
        importlib.import_module("traceback").print_exception(type(shown), shown, frames)


class CompileError(Exception):
    """The solution is no Python."""


def _compiled(source: str) -> types.CodeType:
    try:
        return compile(source, "solution.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise CompileError from error


def _main_module() -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.path[:] = [path for path in sys.path if path != "/runner"]
    sys.argv = ["solution.py"]
    return module


def _open_streams() -> None:
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(  # type: ignore[misc]
        io.BufferedReader(io.FileIO(0, "r", closefd=False)), "utf-8", "surrogateescape"
    )
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(  # type: ignore[misc]
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8", "surrogateescape"
    )


def _note_processes(event: str, _: tuple[Any, ...]) -> None:
    if event in _PROCESS_EVENTS or event.startswith("subprocess."):
        _asked_for_processes.append(event)


def _exit_code(code: object) -> int:
    """What `sys.exit(code)` asks for, without the codes that mean something here."""
    if code is None or code == 0:
        return 0
    return code if isinstance(code, int) and code in _CODES else CRASHED


def _finish(code: int) -> NoReturn:
    """Wait for its threads, run its exit functions, flush: an orderly end but for destructors."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001  as above
        code = code or CRASHED
    os._exit(code)


_CODES = (checks.ASSERTION_FAILED, checks.SOLUTION_RAISED, checks.TEST_FAILED)


def _code_of(error: BaseException) -> int:
    if isinstance(error, CompileError):
        return COMPILE_ERROR
    if isinstance(error, MemoryError):
        return MEMORY_LIMIT
    if isinstance(error, OSError) and error.errno in _FILE_ERRORS:
        return FILE_LIMIT
    if _asked_for_processes and isinstance(error, OSError):
        return PROCESS_LIMIT
    if isinstance(error, RuntimeError) and "new thread" in str(error):
        return PROCESS_LIMIT
    return CRASHED
