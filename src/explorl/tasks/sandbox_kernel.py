"""What Linux offers to shut a process in: namespaces, Landlock, seccomp, capabilities and limits, through ctypes.

Imported by `sandbox_child`, so it needs nothing but the standard library, and little of that.
Every function raises OSError where the kernel refuses.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
from functools import cache

TYPE_CHECKING = False  # importing typing would take longer than the rest of a run
if TYPE_CHECKING:
    from collections.abc import Mapping

# From <sched.h>, <sys/mount.h>, <sys/prctl.h>.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_THREAD = 0x20000000, 0x40000000, 0x10000
CLONE_NEW_ANY = 0x7E020080
"""All flags of clone that make a namespace."""
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
EPERM, ENOSYS = 1, 38

FIRST_UID = 0x70000000
"""Root runs programs as users from here on, one a run: each has its own count of processes."""

libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
libc.syscall.restype = ctypes.c_long


def _checked(result: int, what: str) -> int:  # pragma: no cover (runs in the sandbox's process)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 0, pointer: int = 0) -> None:  # pragma: no cover (runs in the sandbox's process)
    # prctl is variadic: without the casts the upper halves of its arguments are not defined.
    arguments = [ctypes.c_ulong(value), ctypes.c_ulong(pointer), ctypes.c_ulong(0), ctypes.c_ulong(0)]
    _checked(libc.prctl(option, *arguments), f"prctl({option})")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:  # pragma: no cover
    arguments = (source.encode(), target.encode(), kind.encode(), flags, data.encode())
    _checked(libc.mount(*arguments), f"mount on {target}")


# Namespaces -----------------------------------------------------------------------------------------------------------


def enter_namespaces(disk: int, owner: int) -> None:  # pragma: no cover (runs in the sandbox's process)
    """Leave the host's network, mounts, IPC and host name; children are born into a process namespace of their own.

    The new root is a memory file system of ``disk`` bytes with an empty /tmp for ``owner``, and read-only views of what
    Python needs. Ordinary users need a user namespace for that; root does without and leaves its identity later.
    """
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    uid, gid = os.geteuid(), os.getegid()
    _checked(libc.unshare(flags if uid == 0 else flags | CLONE_NEWUSER), "unshare")
    if uid != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    root = "/proc"  # there is one on every Linux, and nothing below it is needed any more
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk},nr_inodes=4096,mode=755")
    _show_python(root)
    os.mkdir(f"{root}/dev")
    for device in ("null", "urandom"):
        os.close(os.open(f"{root}/dev/{device}", os.O_CREAT))
        _mount(f"/dev/{device}", f"{root}/dev/{device}", "", MS_BIND)
    for folder in (f"{root}/tmp", f"{root}/dev/shm"):
        os.mkdir(folder)
        if uid == 0:
            os.chown(folder, owner, owner)
    os.chdir(root)
    _checked(libc.pivot_root(b".", b"."), "pivot_root")
    _checked(libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def _show_python(root: str) -> None:  # pragma: no cover (runs in the sandbox's process)
    """What Python needs, read-only, at its own place in the new root."""
    real_paths = _real_paths()
    shown = "//"
    for real in sorted(set(real_paths.values())):
        if real.startswith(f"{shown}/"):
            continue
        shown = real
        os.makedirs(root + real)
        _mount(real, root + real, "", MS_BIND | MS_REC)
        # In a user namespace a remount must keep the host's flags: nosuid, nodev, noexec, noatime, nodiratime.
        kept = os.statvfs(root + real).f_flag & 0xC0E
        _mount("none", root + real, "", MS_REMOUNT | MS_BIND | MS_RDONLY | kept)
    for path, real in real_paths.items():  # on many systems /lib is a link to /usr/lib
        if not os.path.lexists(root + path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.symlink(real, root + path)


@cache
def _real_paths() -> dict[str, str]:  # pragma: no cover (runs in the sandbox's process)
    """`python_paths`, and what they are links to."""
    return {path: os.path.realpath(path) for path in python_paths()}


def python_paths() -> list[str]:
    """Folders that the standard library and the shared libraries below it are read from."""
    libraries = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", os.path.join(sys.base_prefix, "lib")]
    return [path for path in dict.fromkeys(libraries + sys.path) if os.path.isdir(path)]


# Landlock -------------------------------------------------------------------------------------------------------------

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same on every architecture
_READ = 0b1100  # read files, list folders
_ALL = (1 << 13) - 1  # all rights of the first version
_TRUNCATE = 1 << 14  # since the third


def restrict_files(folder: str) -> None:  # pragma: no cover (runs in the sandbox's process)
    """Let this process open nothing but Python's own files, for reading, and ``folder``. There is no way back."""
    version = _checked(libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1), "landlock_create_ruleset")
    rights = _ALL | (_TRUNCATE if version >= 3 else 0)
    handled = ctypes.create_string_buffer(struct.pack("=Q", rights))
    ruleset = _checked(libc.syscall(_LANDLOCK_CREATE, handled, ctypes.c_size_t(8), 0), "landlock_create_ruleset")
    for path, allowed in [*((path, _READ) for path in python_paths()), ("/dev/urandom", 0b100), (folder, rights)]:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, parent))
        _checked(libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), "landlock_add_rule")
        os.close(parent)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _checked(libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


# Identity and limits --------------------------------------------------------------------------------------------------


def drop_privileges(uid: int) -> None:  # pragma: no cover (runs in the sandbox's process)
    """Root becomes user ``uid`` if Python stays readable to it; nobody keeps a capability, and death is inherited."""
    parent = os.getppid()
    if os.geteuid() == 0 and can_become(uid):
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    _checked(libc.capset(header, ctypes.create_string_buffer(24)), "capset")
    die_with(parent)  # after the change of user, which clears it
    prctl(PR_SET_DUMPABLE, 0)


def die_with(parent: int) -> None:  # pragma: no cover (runs in the sandbox's process)
    """Be killed when the parent dies, also if that has been. A change of user, even of the effective one, ends this."""
    prctl(PR_SET_PDEATHSIG, 9)
    if os.getppid() != parent:
        os._exit(1)


def spare_user() -> int:  # pragma: no cover (runs in the sandbox's process)
    """A user that root can make itself: nobody's, and this process's alone; or "nobody", where users are few."""
    uid = FIRST_UID + os.getpid()
    if os.geteuid() == 0:
        try:
            os.seteuid(uid)
            os.seteuid(0)
        except OSError:  # a container that knows 65536 users, or one
            return 65534
    return uid


def can_become(uid: int) -> bool:  # pragma: no cover (runs in the sandbox's process)
    """Whether root could be that user and still import modules: not if Python lies in a private home folder."""
    try:
        os.seteuid(uid)
    except OSError:
        return False
    readable = os.access(os.__file__, os.R_OK, effective_ids=True)
    os.seteuid(0)
    return readable


def limit_resources(limits: Mapping[str, int]) -> None:  # pragma: no cover (runs in the sandbox's process)
    """Limits that hold for each process by itself, except that of processes."""
    cpu, size = limits["cpu_seconds"], limits["file_bytes"]
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))  # first a signal that names the reason, then SIGKILL
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory"], limits["memory"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits["open_files"], limits["open_files"]))
    # Two more than asked for: the program's parents are of the same user.
    resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"] + 2, limits["processes"] + 2))
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        resource.setrlimit(kind, (0, 0))


# seccomp --------------------------------------------------------------------------------------------------------------

# The x86_64 and the aarch64 number of a system call; None: it is not there.
_NUMBERS: Mapping[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chmod": (90, None),
    "chown": (92, None),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "delete_module": (176, 106),
    "execve": (59, 221),
    "execveat": (322, 281),
    "fanotify_init": (300, 262),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "finit_module": (313, 273),
    "fork": (57, None),
    "fremovexattr": (199, 16),
    "fsconfig": (431, 431),
    "fsetxattr": (190, 7),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "futimesat": (261, None),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "kill": (62, 129),
    "lchown": (94, None),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "removexattr": (197, 14),
    "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "semget": (64, 190),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "setxattr": (188, 5),
    "shmat": (30, 196),
    "shmget": (29, 194),
    "socket": (41, 198),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "truncate": (76, 45),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
    "vfork": (58, None),
}
_OUTSIDE_ONLY = {
    *("fork", "vfork", "kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"),
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "truncate"),
    *("utime", "utimes", "utimensat", "futimesat", "setxattr", "lsetxattr", "fsetxattr"),
    *("removexattr", "lremovexattr", "fremovexattr"),
}
"""Harmless in namespaces of one's own; outside them they would reach the user's other processes and files."""
_CONDITIONAL = ("clone", "clone3", "prctl", "prlimit64")

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _JUMP_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT_0 = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant: one ``struct sock_filter``."""


def filter_program(machine: str, *, namespaces: bool) -> list[Instruction]:
    """The seccomp filter: system calls by which a program could reach out fail with EPERM, all others pass.

    Sockets, other programs, tracing, namespaces, mounts, kernel modules, clocks and shared memory are refused always.
    Without namespaces also new processes, signals and changes of a file's owner, mode and times.
    """
    column, audit = _ARCHITECTURES[machine]
    refuse: Instruction = (_RETURN, 0, 0, _REFUSE | EPERM)
    allow: Instruction = (_RETURN, 0, 0, _ALLOW)

    def number(name: str) -> int:
        value = _NUMBERS[name][column]
        assert value is not None, name
        return value

    def where_argument(name: str, jump: Instruction) -> list[Instruction]:
        """Refuse the call if the jump on its first argument is not taken."""
        return [(_JUMP_EQUAL, 0, 4, number(name)), (_LOAD, 0, 0, _ARGUMENT_0), jump, refuse, allow]

    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),  # 32-bit calls have other numbers
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        program += [(_JUMP_LEAST, 0, 1, 0x40000000), refuse]  # and so have those of x32
    # glibc falls back to clone, whose flags a filter can see.
    program += [(_JUMP_EQUAL, 0, 1, number("clone3")), (_RETURN, 0, 0, _REFUSE | ENOSYS)]
    if namespaces:
        program += where_argument("clone", (_JUMP_ANY_BIT, 0, 1, CLONE_NEW_ANY))
    else:
        program += where_argument("clone", (_JUMP_ANY_BIT, 1, 0, CLONE_THREAD))
    program += where_argument("prlimit64", (_JUMP_EQUAL, 1, 0, 0))  # one's own limits only
    # A program must not outlive its parent, nor open itself to a debugger.
    program += [(_JUMP_EQUAL, 0, 5, number("prctl")), (_LOAD, 0, 0, _ARGUMENT_0)]
    program += [(_JUMP_EQUAL, 1, 0, PR_SET_PDEATHSIG), (_JUMP_EQUAL, 0, 1, PR_SET_DUMPABLE), refuse, allow]
    for name, numbers in _NUMBERS.items():
        refused = name not in _CONDITIONAL and not (namespaces and name in _OUTSIDE_ONLY)
        if refused and numbers[column] is not None:
            program += [(_JUMP_EQUAL, 0, 1, number(name)), refuse]
    return [*program, allow]


def refuse_calls(*, namespaces: bool) -> None:  # pragma: no cover (runs in the sandbox's process)
    """Put this process under `filter_program`. There is no way back."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES or sys.maxsize < 1 << 32:
        raise OSError(ENOSYS, f"no seccomp filter for {machine}")
    code = _packed(machine, namespaces)
    instructions = ctypes.create_string_buffer(code)
    pointer = ctypes.addressof(instructions)
    header = ctypes.create_string_buffer(struct.pack("=H6xQ", len(code) // 8, pointer))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(header))


@cache
def _packed(machine: str, namespaces: bool) -> bytes:  # pragma: no cover (runs in the sandbox's process)
    return b"".join(struct.pack("=HBBI", *line) for line in filter_program(machine, namespaces=namespaces))


def prepare() -> None:  # pragma: no cover (runs in the sandbox's process)
    """Find out what is the same for all programs, once and before they are forked."""
    _real_paths()
    for namespaces in (True, False):
        if (machine := os.uname().machine) in _ARCHITECTURES:
            _packed(machine, namespaces)
