"""The seccomp filter, run by a small interpreter of classic BPF: what a solution may ask for."""

from __future__ import annotations

import errno
import itertools
import os
import struct

import pytest

from services.reward.sandbox.inside import seccomp

ALLOW, KILL = "allow", "kill"
PID = 77
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE_THREAD, CLONE_NEWUSER = 0x10000, 0x10000000


def decide(
    machine: str,
    number: int,
    *arguments: int,
    arch: int | None = None,
    read_only: bool = False,
) -> str | int:
    """What the kernel would do with a system call: allow, kill, or the errno."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, arch or ARCH[machine], 0, *padded)
    code, at, value = seccomp.program(machine, PID, read_only=read_only), 0, 0
    while True:
        operation, if_true, if_false, constant = code[at]
        at += 1
        if operation == 0x20:
            (value,) = struct.unpack_from("=I", data, constant)
        elif operation == 0x06:
            break
        else:
            true = {
                0x15: value == constant,
                0x35: value >= constant,
                0x45: bool(value & constant),
            }[operation]
            at += if_true if true else if_false
    if constant == 0x7FFF0000:
        return ALLOW
    return KILL if constant == 0x80000000 else constant & 0xFFFF


def numbers(machine: str, *names: str) -> list[int]:
    index = seccomp.MACHINES.index(machine)
    tables = {**seccomp._ALLOWED, **seccomp._DENIED}
    return [number for name in names if (number := tables[name][index]) is not None]


both = pytest.mark.parametrize("machine", seccomp.MACHINES)


@both
def test_reading_writing_and_memory_are_allowed(machine: str) -> None:
    for number in numbers(machine, "read", "write", "openat", "mmap", "futex", "exit_group"):
        assert decide(machine, number) == ALLOW


@both
def test_what_reaches_outside_is_not_permitted(machine: str) -> None:
    for number in numbers(machine, *seccomp._DENIED):
        assert decide(machine, number) == errno.EPERM
    for name in ("fork", "execve", "unshare", "setns", "mount", "bpf", "keyctl", "io_uring_setup",
                 "userfaultfd", "ptrace", "socket"):  # fmt: skip
        assert name in seccomp._DENIED


@both
def test_clone_makes_threads_only_and_clone3_does_not_exist(machine: str) -> None:
    clone = seccomp._CLONE[seccomp.MACHINES.index(machine)]
    assert decide(machine, clone, CLONE_THREAD) == ALLOW
    assert decide(machine, clone, 17) == errno.EPERM
    assert decide(machine, clone, CLONE_THREAD | CLONE_NEWUSER) == errno.EPERM
    assert decide(machine, 435, CLONE_THREAD) == errno.ENOSYS


@both
def test_signals_reach_only_the_own_process(machine: str) -> None:
    for name in ("kill", "tkill", "tgkill"):
        number = seccomp._SIGNALS[name][seccomp.MACHINES.index(machine)]
        assert decide(machine, number, PID, 9) == ALLOW
        for other in (1, PID - 1, 0xFFFFFFFF):
            assert decide(machine, number, other, 9) == errno.EPERM


@both
def test_descriptors_send_no_signals_and_hold_no_leases(machine: str) -> None:
    fcntl = seccomp._FCNTL[seccomp.MACHINES.index(machine)]
    for harmless in (0, 3, 4, 1030):  # F_DUPFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC
        assert decide(machine, fcntl, 0, harmless) == ALLOW
    for command in (8, 10, 15, 1024, 1026):  # F_SETOWN, F_SETSIG, F_SETOWN_EX, leases, notices
        assert decide(machine, fcntl, 0, command) == errno.EPERM


@both
def test_terminals_stay_out_of_reach(machine: str) -> None:
    ioctl = seccomp._IOCTL[seccomp.MACHINES.index(machine)]
    assert decide(machine, ioctl, 0, 0x5401) == ALLOW  # isatty
    assert decide(machine, ioctl, 0, 0x5412) == errno.ENOTTY  # TIOCSTI types into a terminal


@both
def test_an_unknown_call_does_not_exist(machine: str) -> None:
    assert decide(machine, 999) == errno.ENOSYS


@both
def test_a_read_only_filter_opens_files_for_reading_alone(machine: str) -> None:
    for name, before in (("openat", 2), ("open", 1)):
        for number in numbers(machine, name):
            for flags in (0, os.O_CLOEXEC, os.O_DIRECTORY | os.O_NOFOLLOW):
                arguments = [0] * before + [flags]
                assert decide(machine, number, *arguments, read_only=True) == ALLOW
            for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, 3, os.O_TMPFILE | 2):
                arguments = [0] * before + [flags]
                assert decide(machine, number, *arguments, read_only=True) == errno.EPERM
                assert decide(machine, number, *arguments) == ALLOW


@both
def test_a_read_only_filter_changes_and_locks_nothing_and_has_no_socketpairs(machine: str) -> None:
    index = seccomp.MACHINES.index(machine)
    for number in numbers(machine, *seccomp._WRITING, *seccomp._DENIED):
        assert decide(machine, number, read_only=True) == errno.EPERM
    for lock in (6, 7, 37, 38):
        number = seccomp._FCNTL[index]
        assert decide(machine, number, 0, lock, read_only=True) == errno.EPERM
    assert decide(machine, seccomp._SOCKETPAIR[index], 1, read_only=True) == errno.EPERM
    for number in numbers(machine, "read", "write", "sendto", "mmap", "futex", "exit_group"):
        assert decide(machine, number, read_only=True) == ALLOW


def test_calls_of_another_architecture_kill() -> None:
    assert decide("x86_64", 0, arch=0x40000003) == KILL  # i386
    assert decide("x86_64", 0x40000000) == KILL  # x32


def test_every_jump_stays_inside_and_every_path_returns() -> None:
    for machine, read_only in itertools.product(seccomp.MACHINES, (False, True)):
        code = seccomp.program(machine, PID, read_only=read_only)
        assert len(code) < 4096
        assert code[-1][0] == 0x06
        for at, (_, if_true, if_false, _) in enumerate(code):
            assert at + 1 + max(if_true, if_false) < len(code) or code[at][0] == 0x06


def test_a_machine_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"riscv64.*known: x86_64, aarch64"):
        seccomp.program("riscv64", PID)
