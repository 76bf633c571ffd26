"""Isolate a process with what Linux offers, through ctypes: namespaces, Landlock, seccomp, capabilities and limits.

Imported by `child`, so it uses only the standard library, and little of it.
Every function raises OSError if the kernel refuses.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import struct
import sys
from functools import cache

from explorl.sandbox import seccomp
from explorl.sandbox.disk import ENTRIES
from explorl.sandbox.python_paths import exclude_folders, is_below, package_folders, python_paths

TYPE_CHECKING = False  # importing typing would take longer than the rest of a run
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# From <sched.h>, <sys/mount.h>, <linux/mount.h>, <sys/prctl.h>, <linux/seccomp.h>.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_SETATTR = 442
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
ENOSYS = 38

FIRST_UID = 0x70000000
"""The first uid of those that root runs programs as: each run has its own uid, so that its processes can be limited."""

libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
libc.syscall.restype = ctypes.c_long


def _check_result(result: int, what: str) -> int:  # pragma: no cover
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 0, pointer: int = 0) -> None:  # pragma: no cover
    # prctl is variadic: without the casts the upper halves of its arguments are not defined.
    arguments = [ctypes.c_ulong(value), ctypes.c_ulong(pointer), ctypes.c_ulong(0), ctypes.c_ulong(0)]
    _check_result(libc.prctl(option, *arguments), f"prctl({option})")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:  # pragma: no cover
    arguments = (source.encode(), target.encode(), kind.encode(), flags, data.encode())
    _check_result(libc.mount(*arguments), f"mount on {target}")


# Namespaces -----------------------------------------------------------------------------------------------------------


def enter_namespaces(
    disk: int, owner: int | None, extra: Sequence[str] = (), *, processes: bool = True
) -> None:  # pragma: no cover
    """Leave the host's network, mounts, IPC and host name; with ``processes`` children get a process namespace too.

    Without ``processes`` children stay in this process's own namespace, and this process may have threads.

    The new root is a memory file system of ``disk`` bytes with an empty /tmp for ``owner``, and read-only views of what
    Python needs, without installed packages, and of the folders ``extra``. Ordinary users need a user namespace for
    that; root does not, and drops its privileges later.

    The root is read-only except for /tmp and /dev/shm, and completely if there is no owner. A program of an ordinary
    user owns the root: if it were writable, it could move a folder that the library is mounted below, and put modules
    in its place for the tests to import.
    """
    flags = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | (CLONE_NEWPID if processes else 0)
    uid, gid = os.geteuid(), os.getegid()
    _check_result(libc.unshare(flags if uid == 0 else flags | CLONE_NEWUSER), "unshare")
    if uid != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    os.umask(0o022)
    mounts = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
    root = "/proc"  # exists on every Linux, and nothing below it is needed any more
    _mount("tmpfs", root, "tmpfs", MS_NOSUID, f"size={disk},nr_inodes={ENTRIES},mode=755")
    _mount_python(root, extra, mounts)
    _make_devices(f"{root}/dev")
    for folder in (f"{root}/tmp", f"{root}/dev/shm"):
        os.makedirs(folder, exist_ok=True)  # it exists if something below it is mounted
        if owner is not None and os.access(folder, os.W_OK):  # not writable if /tmp itself is mounted
            if uid == 0:
                os.chown(folder, owner, owner)
            _keep_writable(folder, mounts)
    if owner is not None:
        _mount(f"{root}/dev/null", f"{root}/dev/null", "", MS_BIND)  # may be a plain file
    _mount("none", root, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID)
    os.close(mounts)
    os.chdir(root)
    _check_result(libc.pivot_root(b".", b"."), "pivot_root")
    _check_result(libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def _make_devices(folder: str) -> None:  # pragma: no cover
    """Make private devices, so that sandboxes share no locks; for ordinary users null is a plain file."""
    os.makedirs(folder, exist_ok=True)
    for name, minor in (("null", 3), ("urandom", 9)):
        path = f"{folder}/{name}"
        try:
            os.mknod(path, 0o020666, os.makedev(1, minor))
        except OSError:
            if name != "null":
                continue
            os.close(os.open(path, os.O_CREAT))
        os.chmod(path, 0o666)


def _mount_python(root: str, extra: Sequence[str], mounts: int) -> None:  # pragma: no cover
    """Mount what Python needs and the folders ``extra`` read-only, at the same paths below the new root."""
    real_paths = _real_paths() | {path: os.path.realpath(path) for path in extra}
    mounted: list[str] = []
    for real in sorted(set(real_paths.values())):
        if not any(is_below(real, folder) for folder in mounted):
            mounted.append(real)
            os.makedirs(root + real, exist_ok=True)
            _mount(real, root + real, "", MS_BIND | MS_REC)
    empty = f"{root}/empty"
    os.mkdir(empty)
    for folder in _hidden_folders(tuple(extra)):
        if os.path.isdir(root + folder):
            _mount(empty, root + folder, "", MS_BIND)
    os.rmdir(empty)  # so that nothing can be written to it
    for real in mounted:
        _make_readonly(root + real, mounts)
    for path, real in real_paths.items():  # on many systems /lib is a link to /usr/lib
        if not os.path.lexists(root + path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.symlink(real, root + path)


def _keep_writable(folder: str, mounts: int) -> None:  # pragma: no cover
    """Keep the folder writable when its root becomes read-only, but not what is mounted below it."""
    _mount(folder, folder, "", MS_BIND | MS_REC)
    for entry in os.scandir(folder):
        if not entry.is_symlink():
            _mount(entry.path, entry.path, "", MS_BIND | MS_REC)  # a mount point cannot be moved
            _make_readonly(entry.path, mounts)


def _make_readonly(folder: str, mounts: int) -> None:  # pragma: no cover
    """Make the mount at the folder and all mounts below it read-only, without devices and set-user-ID programs."""
    recursive, current_folder = 0x8000, -100
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0))
    size = ctypes.c_size_t(32)
    if libc.syscall(MOUNT_SETATTR, current_folder, folder.encode(), recursive, attributes, size) == 0:
        return
    os.lseek(mounts, 0, os.SEEK_SET)  # Linux before 5.12, or an old container runtime
    lines = b"".join(iter(lambda: os.read(mounts, 1 << 16), b"")).splitlines()
    for mount_point in (os.fsdecode(line.split()[4].decode("unicode_escape").encode("latin-1")) for line in lines):
        if is_below(mount_point, folder):
            # In a user namespace a remount must keep the host's flags: nosuid, nodev, noexec, noatime, nodiratime.
            flags = os.statvfs(mount_point).f_flag & 0xC0E
            _mount("none", mount_point, "", MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


@cache
def _real_paths() -> dict[str, str]:  # pragma: no cover
    """Return `python_paths`, each with the path that it links to."""
    return {path: os.path.realpath(path) for path in python_paths()}


@cache
def _hidden_folders(extra: tuple[str, ...]) -> list[str]:  # pragma: no cover
    """Return the folders of installed packages, except those that hold ``extra`` or are on ``sys.path``."""
    return package_folders(set(_real_paths().values()), [*extra, *sys.path])


# Landlock -------------------------------------------------------------------------------------------------------------

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same on every architecture
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
_FILE_RIGHTS = ((1, 0x1FFF), (2, 1 << 13), (3, 1 << 14), (5, 1 << 15))
"""Rights that each version added: the first thirteen, linking across folders, truncating, ioctl on devices."""
_NETWORK_RIGHTS, _SCOPES = 0b11, 0b11
"""TCP (version 4); abstract Unix sockets and signals (version 6)."""
SUPERVISOR_FILES = ("/proc",)
"""Files that supervisors read beside Python's own."""


def restrict_files(folder: str | None, extra: Sequence[str] = ()) -> None:  # pragma: no cover
    """Restrict this process for good to reading Python's own files and ``extra``, and to using ``folder``.

    As far as the kernel supports it, also forbid TCP, abstract Unix sockets, and signals to other processes than its
    children.
    """
    _restrict(folder, _landlock_rules(tuple(extra)))


def restrict_files_further(folder: str) -> None:  # pragma: no cover
    """Restrict this process to Python's own files and to ``folder``, which lies in that of `restrict_files`.

    Takes a tenth of the time: Python's folders need a few rules, but hundreds without the installed packages.
    """
    read = _READ_FILE | _READ_FOLDER
    _restrict(folder, [*((path, read) for path in dict.fromkeys(_real_paths().values())), *_devices()])


def _restrict(folder: str | None, rules: Sequence[tuple[str, int]]) -> None:  # pragma: no cover
    version = _check_result(libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1), "landlock_create_ruleset")
    rights = sum(right for since, right in _FILE_RIGHTS if version >= since)
    sections = [rights, *([_NETWORK_RIGHTS] if version >= 4 else []), *([_SCOPES] if version >= 6 else [])]
    handled = ctypes.create_string_buffer(struct.pack(f"={len(sections)}Q", *sections), 8 * len(sections))
    size = ctypes.c_size_t(8 * len(sections))
    ruleset = _check_result(libc.syscall(_LANDLOCK_CREATE, handled, size, 0), "landlock_create_ruleset")
    for path, allowed in [*rules, *([] if folder is None else [(folder, rights)])]:
        try:
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:  # the host's libraries may change
            continue
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, parent))
        _check_result(libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock_add_rule for {path}")
        os.close(parent)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _check_result(libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


@cache
def _landlock_rules(extra: tuple[str, ...]) -> list[tuple[str, int]]:  # pragma: no cover
    """Return readable paths with their rights. To import from a folder it must be listed, with all folders in it."""
    paths = {*_real_paths().values(), *map(os.path.realpath, extra)}
    rules = []
    for path in dict.fromkeys(exclude_folders(sorted(paths), _hidden_folders(extra))):
        is_folder = os.path.isdir(path)
        if is_folder or os.path.isfile(path):
            rules.append((path, _READ_FILE | _READ_FOLDER if is_folder else _READ_FILE))
    listed = [path for path in map(os.path.realpath, [*extra, *sys.path]) if os.path.isdir(path)]
    return [*rules, *((path, _READ_FOLDER) for path in listed), *_devices()]


def _devices() -> list[tuple[str, int]]:  # pragma: no cover
    return [(path, _READ_FILE) for path in ("/dev/urandom",) if os.path.exists(path)]


# Identity and limits --------------------------------------------------------------------------------------------------


def drop_privileges(uid: int) -> None:  # pragma: no cover
    """Become user ``uid`` if root may and Python stays readable; drop all capabilities, and die with the parent."""
    parent = os.getppid()
    if os.geteuid() == 0 and can_become(uid):
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    _check_result(libc.capset(header, ctypes.create_string_buffer(24)), "capset")
    die_with(parent)  # after the change of user, which would clear it
    prctl(PR_SET_DUMPABLE, 0)


def die_with(parent: int) -> None:  # pragma: no cover
    """Be killed when the parent dies, or now if it has. A change of user, even of the effective one, clears this."""
    prctl(PR_SET_PDEATHSIG, 9)
    if os.getppid() != parent:
        os._exit(1)


def spare_user() -> int:  # pragma: no cover
    """Return an unused uid that root can take for this process alone, or that of "nobody" where uids are few."""
    uid = FIRST_UID + os.getpid()
    if os.geteuid() == 0:
        try:
            os.seteuid(uid)
            os.seteuid(0)
        except OSError:  # a container with 65536 users, or with one
            return 65534
    return uid


def can_become(uid: int) -> bool:  # pragma: no cover
    """Return True if root can become that user and it can import modules, which a private home folder prevents."""
    try:
        os.seteuid(uid)
    except OSError:
        return False
    readable = os.access(os.__file__, os.R_OK, effective_ids=True)
    os.seteuid(0)
    return readable


def limit_resources(limits: Mapping[str, float], *, other_processes: int | None = 2) -> None:  # pragma: no cover
    """Set the limits of each process, and that of the number of processes.

    The latter counts all processes of this user: those of the program and ``other_processes``. If that is None, their
    number is unknown and there is no limit.
    """
    memory, size, files = (int(limits[name]) for name in ("memory", "file_bytes", "open_files"))
    cpu = math.ceil(min(limits["cpu_seconds"], 1e9))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))  # first SIGXCPU, which names the reason, then SIGKILL
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if other_processes is not None:
        processes = int(limits["processes"]) + other_processes
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        resource.setrlimit(kind, (0, 0))


def allow_open_files(most: int = 1 << 16) -> None:  # pragma: no cover
    """Raise this process's limit of open files as far as permitted: it needs one for each supervisor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


# seccomp --------------------------------------------------------------------------------------------------------------

_SECCOMP = {"x86_64": 317, "aarch64": 277}
_NEW_LISTENER = 8
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_…
_CONTINUE = 1
EAGAIN = 11


def install_seccomp_filter(*, namespaces: bool, threads: bool = False) -> None:  # pragma: no cover
    """Restrict this process to the system calls of `seccomp.filter_program`, for good."""
    code, offsets = _pack_filter(_machine(), namespaces, threads or namespaces)
    instructions = bytearray(code)
    for mount_point in offsets:
        struct.pack_into("=I", instructions, mount_point, os.getpid())
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header, _ = _filter_struct(bytes(instructions))
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(header))


def request_thread_approval() -> int:  # pragma: no cover
    """Make each new thread of this process wait for approval; return the descriptor on which it is given."""
    machine = _machine()
    header, _ = _filter_struct(
        b"".join(struct.pack("=HBBI", *line) for line in seccomp.thread_approval_filter(machine))
    )
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    return _check_result(libc.syscall(_SECCOMP[machine], 1, _NEW_LISTENER, header), "seccomp")


def next_thread_request(listener: int) -> int | None:  # pragma: no cover
    """Return the number of the next request; None if the requesting thread has ended."""
    request = ctypes.create_string_buffer(80)
    if libc.ioctl(listener, ctypes.c_ulong(_RECEIVE), request) < 0:
        return None
    return int.from_bytes(request.raw[:8], sys.byteorder)


def answer_thread_request(listener: int, number: int, allow: bool) -> None:  # pragma: no cover
    reply = struct.pack("=QqiI", number, 0, 0 if allow else -EAGAIN, _CONTINUE if allow else 0)
    if libc.ioctl(listener, ctypes.c_ulong(_SEND), ctypes.create_string_buffer(reply, len(reply))) < 0 and allow:
        answer_thread_request(listener, number, False)  # Linux before 5.5 can only refuse


def _machine() -> str:  # pragma: no cover
    machine = os.uname().machine
    if machine not in seccomp.ARCHITECTURES or sys.maxsize < 1 << 32:
        raise OSError(ENOSYS, f"no seccomp filter for {machine}")
    return machine


def _filter_struct(
    code: bytes,
) -> tuple[ctypes.Array[ctypes.c_char], object]:  # pragma: no cover
    """Return a ``struct sock_fprog`` and the instructions that it points to, which must stay alive."""
    instructions = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("=H6xQ", len(code) // 8, ctypes.addressof(instructions))
    return ctypes.create_string_buffer(header, len(header)), instructions


@cache
def _pack_filter(machine: str, namespaces: bool, threads: bool) -> tuple[bytes, list[int]]:  # pragma: no cover
    """Return the filter's bytes, and the offsets in them at which the pid must be written."""
    program = seccomp.filter_program(machine, namespaces=namespaces, threads=threads)
    offsets = [8 * index + 4 for index, line in enumerate(program) if line[3] == seccomp.OWN_PROCESS]
    return b"".join(struct.pack("=HBBI", *line) for line in program), offsets


def prepare() -> None:  # pragma: no cover
    """Compute what is the same for all programs, once before they are forked."""
    _hidden_folders(())
    _landlock_rules(SUPERVISOR_FILES)
    if (machine := os.uname().machine) in seccomp.ARCHITECTURES:
        for namespaces, threads in ((True, True), (False, True), (False, False)):
            _pack_filter(machine, namespaces, threads)
