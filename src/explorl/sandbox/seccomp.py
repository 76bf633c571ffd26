"""The seccomp filter of programs: a list of the system calls that are allowed.

Calls that are not listed fail. The list holds what CPython 3.11 to 3.13, its standard library and numpy were seen to
use, except for calls that reach other processes, the network, or files in other ways than by opening them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant: one ``struct sock_filter``."""
Test = tuple[str, int, tuple[int, ...]]
"""Kind, offset and values of a test of an argument's word: it is one or none of the values (in, out), or it has any or
none of the bits (with, without)."""

EPERM, ENOSYS, ENOTSUP = 1, 38, 95
CLONE_THREAD, CLONE_NEW_ANY = 0x10000, 0x7E020080  # any: all flags of clone that make a namespace
OWN_PROCESS = 0x7FFFFFF1
"""Placeholder in a filter for the pid of the process that installs it."""

# The x86_64 and the aarch64 number of a system call.
_NUMBERS = """
access 21 -, alarm 37 -, brk 12 214, chdir 80 49, chmod 90 -, chown 92 -, clock_getres 229 114,
clock_gettime 228 113, clock_nanosleep 230 115, clone 56 220, close 3 57, close_range 436 436,
copy_file_range 326 285, dup 32 23, dup2 33 -, dup3 292 24, epoll_create 213 -, epoll_create1 291 20,
epoll_ctl 233 21, epoll_pwait 281 22, epoll_pwait2 441 441, epoll_wait 232 -, eventfd 284 -, eventfd2 290 19,
exit 60 93, exit_group 231 94, faccessat 269 48, faccessat2 439 439, fadvise64 221 223, fallocate 285 47,
fchdir 81 50, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, fchown 93 55, fchownat 260 54, fcntl 72 25,
fdatasync 75 83, fgetxattr 193 10, flistxattr 196 13, fork 57 -, fremovexattr 199 16, fsetxattr 190 7,
fstat 5 80, fstatfs 138 44, fsync 74 82, ftruncate 77 46, futex 202 98, futimesat 261 -, getcpu 309 168,
getcwd 79 17, getdents 78 -, getdents64 217 61, getegid 108 177, geteuid 107 175, getgid 104 176,
getgroups 115 158, getitimer 36 102, getpeername 52 205, getpgid 121 155, getpgrp 111 -, getpid 39 172,
getppid 110 173, getpriority 140 141, getrandom 318 278, getresgid 120 150, getresuid 118 148, getrlimit 97 163,
getrusage 98 165, getsid 124 156, getsockname 51 204, gettid 186 178, gettimeofday 96 169, getuid 102 174,
getxattr 191 8, ioctl 16 29, kill 62 129, lchown 94 -, lgetxattr 192 9, link 86 -, linkat 265 37,
listxattr 194 11, llistxattr 195 12, lremovexattr 198 15, lseek 8 62, lsetxattr 189 6, lstat 6 -,
madvise 28 233, membarrier 324 283, mkdir 83 -, mkdirat 258 34, mmap 9 222, mprotect 10 226, mremap 25 216,
msync 26 227, munmap 11 215, nanosleep 35 101, newfstatat 262 79, open 2 -, openat 257 56, pause 34 -,
pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, prctl 157 167, pread64 17 67, preadv 295 69, preadv2 327 286,
prlimit64 302 261, pselect6 270 72, pwrite64 18 68, pwritev 296 70, pwritev2 328 287, read 0 63, readlink 89 -,
readlinkat 267 78, readv 19 65, recvfrom 45 207, removexattr 197 14, rename 82 -, renameat 264 38,
renameat2 316 276, restart_syscall 219 128, rmdir 84 -, rseq 334 293, rt_sigaction 13 134,
rt_sigpending 127 136, rt_sigprocmask 14 135, rt_sigqueueinfo 129 138, rt_sigreturn 15 139,
rt_sigsuspend 130 133, rt_sigtimedwait 128 137, rt_tgsigqueueinfo 297 240, sched_getaffinity 204 123,
sched_yield 24 124, select 23 -, sendfile 40 71, sendto 44 206, set_robust_list 273 99, set_tid_address 218 96,
setitimer 38 103, setpgid 109 154, setrlimit 160 164, setsid 112 157, setxattr 188 5, shutdown 48 210,
sigaltstack 131 132, socketpair 53 199, stat 4 -, statfs 137 43, statx 332 291, symlink 88 -, symlinkat 266 36,
sysinfo 99 179, tgkill 234 131, time 201 -, timerfd_create 283 85, timerfd_gettime 287 87,
timerfd_settime 286 86, times 100 153, tkill 200 130, truncate 76 45, umask 95 166, uname 63 160, unlink 87 -,
unlinkat 263 35, utime 132 -, utimensat 280 88, utimes 235 -, vfork 58 -, wait4 61 260, waitid 247 95,
write 1 64, writev 20 66
"""
_FIRST_NEW = 424
"""From here on numbers are the same on all architectures, and libraries expect that a call may be missing."""

# Offsets in struct seccomp_data.
_NUMBER, _ARCHITECTURE = 0, 4
_ARGUMENTS = [16 + 8 * index for index in range(6)]  # the lower halves; the upper halves follow four bytes later

_UNSUPPORTED = {
    *("getxattr", "lgetxattr", "fgetxattr", "listxattr", "llistxattr", "flistxattr", "setxattr", "lsetxattr"),
    *("fsetxattr", "removexattr", "lremovexattr", "fremovexattr"),
}
"""Fail as on a file system without extended attributes, which functions that copy files ignore."""
_UNSUPPORTED_WITHOUT_NAMESPACES = {"fallocate"}
"""Could take gigabytes of the host's disk between two checks; libraries write zeros instead."""
_ABSENT = {"preadv2", "pwritev2"}
_NAMESPACES_ONLY = {
    *("fork", "vfork", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "setsid", "setpgid"),
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "truncate"),
    *("utime", "utimes", "utimensat", "futimesat"),
}
"""Harmless inside namespaces; elsewhere they would reach the user's other processes and files."""


def _equals_any(argument: int, *values: int) -> Test:
    return "in", _ARGUMENTS[argument], values


def _equals_none(argument: int, *values: int) -> Test:
    return "out", _ARGUMENTS[argument], values


def _has_any_bit(argument: int, bits: int) -> Test:
    return "with", _ARGUMENTS[argument], (bits,)


def _has_no_bit(argument: int, bits: int) -> Test:
    return "without", _ARGUMENTS[argument], (bits,)


_SELF = [[_equals_any(0, 0)]]
_TO_SELF = [[_equals_any(0, OWN_PROCESS)]]
_OWN_CLOCKS = [[_has_no_bit(0, 1 << 31)]]  # a negative number is the processor clock of a process

_CONDITIONS: dict[str, list[list[Test]]] = {
    # Duplicating, flags, and locks that need a file open for writing to block other processes. Refused are the owner
    # of a file, who gets signals, and F_GETLK, which reveals locks on shared libraries. 0x2000: O_ASYNC.
    "fcntl": [[_equals_any(1, 0, 1, 2, 3, 6, 7, 1030)], [_equals_any(1, 4), _has_no_bit(2, 0x2000)]],
    # TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": [[_equals_any(1, 0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)]],
    # AF_UNIX, SOCK_STREAM, SOCK_NONBLOCK, SOCK_CLOEXEC: event loops wake themselves with a pair
    "socketpair": [[_equals_any(0, 1), _equals_any(1, 1, 1 | 0x800, 1 | 0x80000, 1 | 0x80800)]],
    # No address. MSG_DONTWAIT, MSG_NOSIGNAL
    "sendto": [[_has_no_bit(3, ~0x4040 & 0xFFFFFFFF), _equals_any(4, 0), ("in", _ARGUMENTS[4] + 4, (0,))]],
    # MSG_PEEK, MSG_TRUNC, MSG_DONTWAIT, MSG_WAITALL, MSG_NOSIGNAL
    "recvfrom": [[_has_no_bit(3, ~0x4162 & 0xFFFFFFFF)]],
    "prctl": [[_equals_any(0, 15, 16)]],  # PR_SET_NAME, PR_GET_NAME
    "prlimit64": _SELF,
}
_IN_NAMESPACES: dict[str, list[list[Test]]] = {
    "clone": [[_has_no_bit(0, CLONE_NEW_ANY)]],
    # SIGCHLD: if it is ignored, the processor time of children is lost to the supervisor
    "rt_sigaction": [[_equals_none(0, 17)]],
}
_WITHOUT_NAMESPACES: dict[str, list[list[Test]]] = {
    "clone": [[_has_any_bit(0, CLONE_THREAD), _has_no_bit(0, CLONE_NEW_ANY)]],
    # FUTEX_WAIT and FUTEX_WAIT_BITSET, or any with FUTEX_PRIVATE_FLAG: pages of libraries are shared by processes
    "futex": [[_equals_any(1, 0, 9, 9 | 256)], [_has_any_bit(1, 128)]],
    "getpriority": [[_equals_any(0, 0), _equals_any(1, 0)]],
    **dict.fromkeys(("getpgid", "getsid", "sched_getaffinity"), _SELF),
    **dict.fromkeys(("kill", "tgkill", "tkill"), _TO_SELF),
    **dict.fromkeys(("clock_gettime", "clock_getres", "clock_nanosleep"), _OWN_CLOCKS),
}

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _JUMP, _JUMP_EQUAL, _JUMP_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ASK, _KILL, _REFUSE = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000
_MAX_JUMP = 256  # conditional jumps must be shorter


def filter_program(machine: str, *, namespaces: bool, threads: bool = True) -> list[Instruction]:
    """Return the filter for a program inside or outside of namespaces; outside, ``threads=False`` forbids threads.

    Calls that are not allowed fail with EPERM, or with ENOSYS where libraries have a fallback.
    """
    column, audit = ARCHITECTURES[machine]
    leaves: dict[int, list[Instruction]] = {}
    for name, numbers in call_numbers().items():
        if (number := numbers[column]) is not None:
            leaves[number] = _decide(name, namespaces, threads)
    starts: dict[int, list[Instruction]] = {0: _return_error(EPERM), _FIRST_NEW: _return_error(ENOSYS)}
    for number in sorted(leaves):
        starts.setdefault(number + 1, _return_error(ENOSYS if number + 1 >= _FIRST_NEW else EPERM))
        starts[number] = leaves[number]
    merged: list[tuple[int, list[Instruction]]] = []
    for start, block in sorted(starts.items()):
        if not merged or merged[-1][1] != block:
            merged.append((start, block))
    return [*_check_architecture(audit), *_binary_search(merged)]


def thread_approval_filter(machine: str) -> list[Instruction]:
    """Return a filter that sends each ``clone`` to its listener for approval and allows all other calls."""
    column, audit = ARCHITECTURES[machine]
    clone = call_numbers()["clone"][column]
    assert clone is not None
    questions = [(_JUMP_EQUAL, 0, 1, clone), (_RETURN, 0, 0, _ASK), (_RETURN, 0, 0, _ALLOW)]
    return [*_check_architecture(audit), *questions]


def call_numbers() -> dict[str, tuple[int | None, int | None]]:
    entries = (entry.split() for entry in _NUMBERS.split(","))
    return {name: (int(x86_64), None if aarch64 == "-" else int(aarch64)) for name, x86_64, aarch64 in entries}


def _check_architecture(audit: int) -> list[Instruction]:
    """Return instructions that kill 32-bit callers, whose numbers differ, and then load the call's number."""
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]


def _return_error(error: int) -> list[Instruction]:
    return [(_RETURN, 0, 0, _REFUSE | error)]


def _decide(name: str, namespaces: bool, threads: bool) -> list[Instruction]:
    """Return the instructions for a listed call."""
    if name in _UNSUPPORTED or (name in _UNSUPPORTED_WITHOUT_NAMESPACES and not namespaces):
        return _return_error(ENOTSUP)
    if name in _ABSENT:
        return _return_error(ENOSYS)
    if not namespaces and (name in _NAMESPACES_ONLY or (name == "clone" and not threads)):
        return _return_error(EPERM)
    conditions = _CONDITIONS | (_IN_NAMESPACES if namespaces else _WITHOUT_NAMESPACES)
    return _allow_if(conditions[name]) if name in conditions else [(_RETURN, 0, 0, _ALLOW)]


def _allow_if(alternatives: Sequence[Sequence[Test]]) -> list[Instruction]:
    """Return instructions that allow a call if all tests of one of the alternatives pass."""
    block: list[Instruction] = []
    for tests in alternatives:
        length = sum(1 + len(values) for _, _, values in tests)
        part: list[Instruction] = []
        for kind, offset, values in tests:
            part.append((_LOAD, 0, 0, offset))
            for left, value in reversed(list(enumerate(reversed(values)))):
                failed = length - len(part)  # the distance from here to behind the return
                if kind == "in":
                    part.append((_JUMP_EQUAL, left, 0 if left else failed, value))
                elif kind == "out":
                    part.append((_JUMP_EQUAL, failed, 0, value))
                elif kind == "with":
                    part.append((_JUMP_ANY_BIT, 0, failed, value))
                else:
                    part.append((_JUMP_ANY_BIT, failed, 0, value))
        block += [*part, (_RETURN, 0, 0, _ALLOW)]
    return block + _return_error(EPERM)


def _binary_search(leaves: Sequence[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """Return a binary search for the last leaf that starts at or below the call's number."""
    if len(leaves) == 1:
        return leaves[0][1]
    middle = len(leaves) // 2
    low, high = _binary_search(leaves[:middle]), _binary_search(leaves[middle:])
    if len(low) < _MAX_JUMP:
        return [(_JUMP_LEAST, len(low), 0, leaves[middle][0]), *low, *high]
    return [(_JUMP_LEAST, 0, 1, leaves[middle][0]), (_JUMP, 0, 0, len(low)), *low, *high]
