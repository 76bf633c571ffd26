"""The list of system calls that programs may make, decided call by call."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest

from explorl.sandbox.seccomp import (
    _NAMESPACES_ONLY,
    ARCHITECTURES,
    CLONE_THREAD,
    OWN_PROCESS,
    Instruction,
    call_numbers,
    filter_program,
    thread_approval_filter,
)

ALLOW, ASK, KILL = 0x7FFF0000, 0x7FC00000, 0x80000000
EPERM, ENOSYS, ENOTSUP = 0x00050001, 0x00050026, 0x0005005F
Decide = Callable[..., int]
DANGEROUS = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "sendmsg": (46, 211), "recvmsg": (47, 212),
    "execve": (59, 221), "mount": (165, 40), "ptrace": (101, 117), "setpriority": (141, 140), "flock": (73, 32),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semctl": (66, 191), "msgsnd": (69, 189),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "ioprio_set": (251, 30), "bpf": (321, 280),
    "memfd_create": (319, 279), "process_vm_readv": (310, 270), "perf_event_open": (298, 241), "unshare": (272, 97),
    "mknodat": (259, 33), "inotify_add_watch": (254, 27), "mincore": (27, 232), "splice": (275, 76), "sync": (162, 81),
    "setuid": (105, 146), "keyctl": (250, 219), "chroot": (161, 51), "vmsplice": (278, 75), "mlock": (149, 228),
}  # fmt: skip


def run(program: list[Instruction], audit: int) -> Decide:
    """A small interpreter of the filter's language."""

    def decide(number: int, *arguments: int, architecture: int = audit) -> int:
        data = {0: number, 4: architecture}
        for index in range(6):
            argument = arguments[index] if index < len(arguments) else 0
            data[16 + 8 * index], data[20 + 8 * index] = argument & 0xFFFFFFFF, argument >> 32
        value, at, steps = 0, 0, 0
        while True:
            code, yes, no, constant = program[at]
            at, steps = at + 1, steps + 1
            assert steps < 100
            if code == 0x06:
                return constant
            if code == 0x20:
                value = data[constant]
            elif code == 0x05:
                at += constant
            else:
                taken = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
                at += yes if taken else no

    return decide


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("namespaces", [True, False])
@pytest.mark.parametrize("machine", list(ARCHITECTURES))
def test_filter_decides_as_written(machine: str, namespaces: bool, threads: bool) -> None:
    column, audit = ARCHITECTURES[machine]
    program = filter_program(machine, namespaces=namespaces, threads=threads)
    assert len(program) < 4096
    assert all(yes < 256 and no < 256 for _, yes, no, _ in program)
    decide = run(program, audit)
    known = {name: numbers[column] for name, numbers in call_numbers().items()}

    def call(name: str, *arguments: int) -> int:
        number = known[name]
        assert number is not None
        return decide(number, *arguments)

    assert decide(known["read"], architecture=0x40000003) == KILL
    assert {name for name, numbers in DANGEROUS.items() if decide(numbers[column]) != EPERM} == set()
    assert call("read") == call("openat") == call("mmap") == call("rseq") == ALLOW
    assert call("setxattr") == call("listxattr") == ENOTSUP
    assert call("preadv2") == ENOSYS
    assert call("fallocate") == (ALLOW if namespaces else ENOTSUP)
    # New calls are not there: clone3, openat2, pidfd_open, mount_setattr, setxattrat, file_setattr, and what will come.
    for number in (424, 425, 434, 435, 437, 440, 442, 444, 463, 469, 500, 512, 1 << 30, (1 << 32) - 1):
        assert decide(number) == ENOSYS
    assert call("close_range") == call("faccessat2") == ALLOW
    for name in _NAMESPACES_ONLY:
        if known[name] is not None:
            assert call(name) == (ALLOW if namespaces else EPERM)

    assert [call("fcntl", 3, command) for command in (0, 1, 2, 3, 4, 6, 7, 1030)] == [ALLOW] * 8
    # F_GETLK, F_SETOWN, F_GETOWN, F_SETSIG, F_SETOWN_EX, F_OFD_…, F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ, F_ADD_SEALS
    for command in (5, 8, 9, 10, 15, 36, 37, 38, 1024, 1026, 1031, 1033):
        assert call("fcntl", 3, command) == EPERM
    assert [call("fcntl", 3, 4, flags) for flags in (0x800, 0x2000, 0x2800)] == [ALLOW, EPERM, EPERM]
    assert [call("ioctl", 1, request) for request in (0x5401, 0x5413, 0x541B, 0x5421)] == [ALLOW] * 4
    assert [call("ioctl", 1, request) for request in (0x5412, 0x5452, 0x8901, 0x40049409)] == [EPERM] * 4
    assert [call("socketpair", 1, kind) for kind in (1, 1 | 0x80800)] == [ALLOW] * 2
    assert [call("socketpair", *kind) for kind in ((1, 2), (1, 5), (1, 3), (2, 1), (1, 1 | 64))] == [EPERM] * 5
    assert call("sendto", 3, 0, 1, 0x4000, 0, 0) == ALLOW
    for flags, address in ((0, 1), (0, 1 << 32), (1, 0), (0x20000000, 0)):
        assert call("sendto", 3, 0, 1, flags, address, 16) == EPERM
    assert [call("recvfrom", 3, 0, 1, flags) for flags in (0, 2, 1)] == [ALLOW, ALLOW, EPERM]
    assert [call("prctl", option) for option in (15, 16, 1, 4, 22, 36)] == [ALLOW, ALLOW] + [EPERM] * 4
    assert [call("prlimit64", pid) for pid in (0, 1)] == [ALLOW, EPERM]

    may_have_threads = namespaces or threads
    assert call("clone", 0x3D0F00) == (ALLOW if may_have_threads else EPERM)
    assert call("clone", 17) == (ALLOW if namespaces else EPERM)
    assert call("rt_sigaction", 14) == ALLOW
    assert call("rt_sigaction", 17) == (EPERM if namespaces else ALLOW)  # SIGCHLD
    assert call("clone", 0x10000000 | 17) == call("clone", 0x10000000 | CLONE_THREAD) == EPERM
    outside = ALLOW if namespaces else EPERM
    assert (call("kill", 1), call("tgkill", 1), call("tkill", 1), call("getsid", 5)) == (outside,) * 4
    assert call("kill", OWN_PROCESS) == call("tgkill", OWN_PROCESS) == call("getsid", 0) == ALLOW
    assert call("kill", 0) == call("kill", (1 << 32) - 1) == outside
    assert call("clock_gettime", 1) == ALLOW
    assert call("clock_gettime", (1 << 32) - 6) == outside
    wait, wake, requeue = 0, 1, 3
    assert call("futex", 0, wait) == call("futex", 0, wake | 128) == call("futex", 0, 9 | 256) == ALLOW
    assert call("futex", 0, wake) == call("futex", 0, requeue) == outside


@pytest.mark.parametrize("machine", list(ARCHITECTURES))
def test_threads_are_asked_for(machine: str) -> None:
    column, audit = ARCHITECTURES[machine]
    decide = run(thread_approval_filter(machine), audit)
    clone, read = call_numbers()["clone"][column], call_numbers()["read"][column]
    assert (decide(clone), decide(read), decide(read, architecture=1)) == (ASK, ALLOW, KILL)


def test_numbers_are_those_of_the_kernel() -> None:
    """Where there is a compiler and the kernel's headers, they say the same."""
    wanted = ("RENAMEAT", "NEW_STAT", "SET_GET_RLIMIT", "TIME32_SYSCALLS", "SYS_CLONE3", "MEMFD_SECRET")
    generic = "".join(f"#define __ARCH_WANT_{name}\n" for name in wanted) + "#include <asm-generic/unistd.h>\n"
    for column, source in ((0, "#include <asm/unistd_64.h>\n"), (1, generic)):
        try:
            command = ["cc", "-E", "-dM", "-x", "c", "-"]
            output = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no compiler or no headers")
        defined = dict(re.findall(r"#define (__NR\w+) (\w+)", output))
        for name, numbers in {**call_numbers(), **DANGEROUS}.items():
            value = defined.get(f"__NR_{name}")
            while value in defined:
                value = defined[value]
            if value is None and numbers[column] is not None:
                assert numbers[column] >= 450, f"{name} is not known to the headers"  # older ones
            else:
                assert numbers[column] == (None if value is None else int(value)), name
