"""The system calls that a solution may make: a list of those allowed, as a classic BPF program.

`install` is called in the child of the sandbox's runner, just before the solution starts. From then
on, and for ever: no fork, no exec, no sockets but socketpairs, no signals to other processes, no
namespaces, mounts, tracing, keys, BPF, io_uring or userfaultfd. What is not listed here is answered
with ENOSYS, as an old kernel would; a call of another architecture kills the process.

A sealed grading worker has no namespaces around it: it sees the host's files. Its filter is
`read_only`: besides, files are opened for reading only and stay as they are, nothing is locked, and
there are no socketpairs (an unconnected one could send to any socket in the file system).

Numbers: x86_64 first, aarch64 second (None: that architecture has no such call).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

# fmt: off
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None),
    "fstat": (5, 80), "lstat": (6, None), "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67),
    "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "access": (21, None),
    "pipe": (22, None), "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216),
    "msync": (26, 227), "mincore": (27, 232), "madvise": (28, 233), "dup": (32, 23),
    "dup2": (33, None), "pause": (34, None), "nanosleep": (35, 101), "getitimer": (36, 102),
    "alarm": (37, None), "setitimer": (38, 103), "getpid": (39, 172), "sendfile": (40, 71),
    "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212),
    "shutdown": (48, 210), "getsockname": (51, 204), "getpeername": (52, 205),
    "setsockopt": (54, 208), "getsockopt": (55, 209), "exit": (60, 93), "wait4": (61, 260),
    "uname": (63, 160), "flock": (73, 32), "fsync": (74, 82),
    "fdatasync": (75, 83), "truncate": (76, 45), "ftruncate": (77, 46), "getdents": (78, None),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, None),
    "mkdir": (83, None), "rmdir": (84, None), "creat": (85, None), "link": (86, None),
    "unlink": (87, None), "symlink": (88, None), "readlink": (89, None), "chmod": (90, None),
    "fchmod": (91, 52), "umask": (95, 166), "gettimeofday": (96, 169), "getrlimit": (97, 163),
    "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174),
    "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173),
    "getpgrp": (111, None), "getgroups": (115, 158), "getresuid": (118, 148),
    "getresgid": (120, 150), "getpgid": (121, 155), "getsid": (124, 156),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132), "statfs": (137, 43), "fstatfs": (138, 44),
    "getpriority": (140, 141), "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126),
    "arch_prctl": (158, None), "gettid": (186, 178), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "epoll_create": (213, None), "getdents64": (217, 61),
    "set_tid_address": (218, 96), "restart_syscall": (219, 128), "fadvise64": (221, 223),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115),
    "exit_group": (231, 94), "epoll_wait": (232, None), "epoll_ctl": (233, 21),
    "waitid": (247, 95), "openat": (257, 56), "mkdirat": (258, 34), "newfstatat": (262, 79),
    "unlinkat": (263, 35), "renameat": (264, 38), "linkat": (265, 37), "symlinkat": (266, 36),
    "readlinkat": (267, 78), "fchmodat": (268, 53), "faccessat": (269, 48), "pselect6": (270, 72),
    "ppoll": (271, 73), "set_robust_list": (273, 99), "get_robust_list": (274, 100),
    "utimensat": (280, 88), "epoll_pwait": (281, 22), "fallocate": (285, 47),
    "eventfd2": (290, 19), "epoll_create1": (291, 20), "dup3": (292, 24), "pipe2": (293, 59),
    "preadv": (295, 69), "pwritev": (296, 70), "getcpu": (309, 168), "renameat2": (316, 276),
    "getrandom": (318, 278), "membarrier": (324, 283), "statx": (332, 291), "rseq": (334, 293),
    "close_range": (436, 436), "faccessat2": (439, 439), "epoll_pwait2": (441, 441),
    "futex_waitv": (449, 449),
}
_DENIED: dict[str, tuple[int | None, int | None]] = {  # EPERM: the reason is worth telling
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "bpf": (321, 280), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "userfaultfd": (323, 282),
    "perf_event_open": (298, 241), "memfd_create": (319, 279), "setuid": (105, 146),
    "setgid": (106, 144), "capset": (126, 91), "setrlimit": (160, 164), "personality": (135, 92),
    "seccomp": (317, 277), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mknod": (133, None), "mknodat": (259, 33), "setxattr": (188, 5),
    "sched_setaffinity": (203, 122),
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_WRITING = (  # those of _ALLOWED that change or lock files
    "truncate", "ftruncate", "fallocate", "rename", "renameat", "renameat2", "mkdir", "mkdirat",
    "rmdir", "creat", "link", "linkat", "unlink", "unlinkat", "symlink", "symlinkat", "chmod",
    "fchmod", "fchmodat", "utimensat", "flock",
)
_FLAGS_ARGUMENTS = {"open": 1, "openat": 2}  # where the flags stand
_SIGNALS = {"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131)}
_IOCTL, _PRCTL = (16, 29), (157, 167)
_FCNTL, _PRLIMIT64, _SOCKETPAIR = (72, 25), (302, 261), (53, 199)
# fmt: on

MACHINES = ("x86_64", "aarch64")
_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
_X32_BIT = 0x40000000
_CLONE_THREAD, _CLONE_NAMESPACES = 0x00010000, 0x7E020000
_HARMLESS_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, FIONREAD, FIOCLEX...
_HARMLESS_PRCTLS = (15, 16, 0x53564D41)  # set and get a thread's name, name a mapping
# DUPFD, GETFD, SETFD, GETFL, SETFL, locks, DUPFD_CLOEXEC, sizes of pipes. Not SETOWN and SETSIG:
# with them a pipe sends any signal to any process of the user. No leases, which stop others.
_HARMLESS_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032)
_LOCKS = (5, 6, 7, 36, 37, 38)  # of these
_WRITE_FLAGS = 0o3 | 0o100 | 0o1000  # O_ACCMODE, O_CREAT, O_TRUNC; O_TMPFILE needs write access
_AF_UNIX = 1

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def program(machine: str, pid: int, *, read_only: bool = False) -> list[Instruction]:
    """The filter for a process with this pid. Raises ValueError for another machine."""
    if machine not in MACHINES:
        raise ValueError(f"no system call table for {machine}; known: {', '.join(MACHINES)}")
    index = MACHINES.index(machine)
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, _AUDIT_ARCH[index]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _KILL_PROCESS),
    ]
    for name, numbers in _ALLOWED.items():
        code += _case(numbers[index], _file_rule(name) if read_only else _allow())
    code += _case(_CLONE[index], _only_threads())
    code += _case(_CLONE3[index], [_error(errno.ENOSYS)])
    for numbers in _SIGNALS.values():
        code += _case(numbers[index], _argument_in(0, (pid,), errno.EPERM))
    code += _case(_IOCTL[index], _argument_in(1, _HARMLESS_IOCTLS, errno.ENOTTY))
    commands = tuple(n for n in _HARMLESS_FCNTLS if not (read_only and n in _LOCKS))
    code += _case(_FCNTL[index], _argument_in(1, commands, errno.EPERM))
    code += _case(_PRCTL[index], _argument_in(0, _HARMLESS_PRCTLS, errno.EPERM))
    code += _case(_PRLIMIT64[index], _argument_in(0, (0, pid), errno.EPERM))
    families = () if read_only else (_AF_UNIX,)
    code += _case(_SOCKETPAIR[index], _argument_in(0, families, errno.EPERM))
    for numbers in _DENIED.values():
        code += _case(numbers[index], [_error(errno.EPERM)])
    return [*code, _error(errno.ENOSYS)]


def install(*, read_only: bool = False) -> None:
    """Put this process under the filter. Raises OSError, ValueError."""
    code = b"".join(
        struct.pack("=HBBI", *instruction)
        for instruction in program(os.uname().machine, os.getpid(), read_only=read_only)
    )
    libc = ctypes.CDLL(None, use_errno=True)
    filter_program = _FilterProgram(len(code) // 8, code)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_program), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"prctl({arguments[0]}): {os.strerror(number)}")


def _case(number: int | None, body: list[Instruction]) -> list[Instruction]:
    """What to do for one system call; `body` ends with a return. Expects the number loaded."""
    return [] if number is None else [(_EQUAL, 0, len(body), number), *body]


def _allow() -> list[Instruction]:
    return [(_RETURN, 0, 0, _ALLOW)]


def _file_rule(name: str) -> list[Instruction]:
    """What a read-only filter does with a call of _ALLOWED."""
    if name in _WRITING:
        return [_error(errno.EPERM)]
    if name not in _FLAGS_ARGUMENTS:
        return _allow()
    return [
        (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * _FLAGS_ARGUMENTS[name]),
        (_ANY_BIT, 0, 1, _WRITE_FLAGS),
        _error(errno.EPERM),
        *_allow(),
    ]


def _only_threads() -> list[Instruction]:
    return [
        (_LOAD, 0, 0, _ARGUMENTS_AT),
        (_ANY_BIT, 2, 0, _CLONE_NAMESPACES),
        (_ANY_BIT, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        _error(errno.EPERM),
    ]


def _argument_in(position: int, values: tuple[int, ...], otherwise: int) -> list[Instruction]:
    """Allow the call if the low half of an argument is one of the values."""
    body: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * position)]
    for left, value in zip(range(len(values) - 1, -1, -1), values, strict=True):
        body.append((_EQUAL, left + 1, 0, value))
    return [*body, _error(otherwise), (_RETURN, 0, 0, _ALLOW)]


def _error(number: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)
