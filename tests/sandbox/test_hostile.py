"""Ways out of the sandbox that were open once, tried in every set of mechanisms that is said to isolate."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from explorl.sandbox import fork_client, programs
from explorl.sandbox.programs import Guarantees, ProgramLimits, SandboxError, probe, run_many, run_python, run_tests
from explorl.sandbox.python_paths import exclude_folders, package_folders, python_paths
from tests.sandbox.support import ISOLATED, PERMITTED, STUB, alive, eventually, script

ATTEMPTS = """
import ctypes, fcntl, json, os, resource, signal, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
done = []
def attempt(name, action, *args):
    try:
        if action(*args) not in (-1, False):
            done.append(name)
    except (OSError, RuntimeError):
        pass
"""
"""Begins a program that tries things and prints the names of those that were not refused."""


def attempts(body: str) -> list[str]:
    outcome = run_python(f"{ATTEMPTS}\n{body}\nprint(json.dumps(done))")
    assert outcome.status == "ok", outcome
    names: list[str] = json.loads(outcome.stdout)
    return names


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


# Other processes ------------------------------------------------------------------------------------------------------


def test_files_signal_nobody(isolated: Guarantees, bystander: subprocess.Popen[bytes]) -> None:
    names = attempts(f"""
F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY, FIOASYNC, FIOSETOWN = 10, 15, 1024, 1026, 0x5452, 0x8901
for pid in ({bystander.pid}, {os.getpid()}, os.getppid()):
    for way in (os.pipe, lambda: [end.detach() for end in socket.socketpair()]):
        reading, writing = way()
        attempt("F_SETSIG", fcntl.fcntl, reading, F_SETSIG, signal.SIGKILL)
        attempt("F_SETOWN", fcntl.fcntl, reading, fcntl.F_SETOWN, pid)
        attempt("F_SETOWN_EX", fcntl.fcntl, reading, F_SETOWN_EX, bytes([1, 0, 0, 0]) + pid.to_bytes(4, "little"))
        attempt("O_ASYNC", fcntl.fcntl, reading, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        attempt("FIOASYNC", fcntl.ioctl, reading, FIOASYNC, (1).to_bytes(4, "little"))
        attempt("FIOSETOWN", fcntl.ioctl, reading, FIOSETOWN, pid.to_bytes(4, "little"))
        os.write(writing, b"x")
library = os.open(os.__file__, os.O_RDONLY)
attempt("F_SETLEASE", fcntl.fcntl, library, F_SETLEASE, fcntl.F_RDLCK)
attempt("F_NOTIFY", fcntl.fcntl, os.open(".", os.O_RDONLY), F_NOTIFY, 4)
""")
    assert bystander.poll() is None
    assert names == []


def test_others_are_neither_slowed_nor_looked_at(isolated: Guarantees, bystander: subprocess.Popen[bytes]) -> None:
    before = os.sched_getaffinity(bystander.pid), os.getpriority(os.PRIO_PROCESS, bystander.pid)
    names = attempts(f"""
ioprio_set, ioprio_get = {{"x86_64": (251, 252), "aarch64": (30, 31)}}[os.uname().machine]
for pid in ({bystander.pid}, {os.getpid()}):
    attempt("setpriority", os.setpriority, os.PRIO_PROCESS, pid, 19)
    attempt("sched_setaffinity", os.sched_setaffinity, pid, {{0}})
    attempt("sched_setscheduler", os.sched_setscheduler, pid, os.SCHED_IDLE, os.sched_param(0))
    attempt("ioprio_set", libc.syscall, ioprio_set, 1, pid, 3 << 13)
    attempt("prlimit", resource.prlimit, pid, resource.RLIMIT_NOFILE, (1, 1))
    attempt("getsid", os.getsid, pid)
    attempt("sched_getaffinity", os.sched_getaffinity, pid)
    attempt("processor time", time.clock_gettime, (~pid << 3) | 2)
    attempt("tgkill", libc.syscall, {{"x86_64": 234, "aarch64": 131}}[os.uname().machine], pid, pid, 0)
attempt("setpriority of all", os.setpriority, os.PRIO_USER, os.getuid(), 19)
attempt("ioprio of all", libc.syscall, ioprio_set, 3, os.getuid(), 3 << 13)
""")
    assert names == []
    assert (os.sched_getaffinity(bystander.pid), os.getpriority(os.PRIO_PROCESS, bystander.pid)) == before


def test_no_memory_is_shared(isolated: Guarantees) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    segment = libc.shmget(0, 4096, 0o1666)
    queue = libc.msgget(0, 0o1666)
    semaphore = libc.semget(0, 1, 0o1666)
    try:
        names = attempts(f"""
attempt("shmget", libc.shmget, 0, 4096, 0o1600)
attempt("shmat", libc.shmat, {segment}, None, 0)
attempt("shmctl", libc.shmctl, {segment}, 2, ctypes.create_string_buffer(200))
attempt("remove", libc.shmctl, {segment}, 0, None)
attempt("msgsnd", libc.msgsnd, {queue}, ctypes.create_string_buffer(b"\\1" + bytes(20)), 4, 0o4000)
attempt("semctl", libc.semctl, {semaphore}, 0, 16, 1)
attempt("mq_open", libc.mq_open, b"/explorl", 0o102, 0o600, None)
attempt("memfd_create", os.memfd_create, "x")
attempt("userfaultfd", libc.syscall, {{"x86_64": 323, "aarch64": 282}}[os.uname().machine], 0)
""")
        assert names == []
        assert libc.shmctl(segment, 2, ctypes.create_string_buffer(200)) == 0, "the segment is gone"
    finally:
        for remove in (lambda: libc.shmctl(segment, 0, None), lambda: libc.msgctl(queue, 0, None)):
            remove()
        libc.semctl(semaphore, 0, 0)


@pytest.mark.parametrize("where", ["main thread", "all threads"])
def test_threads_are_counted(isolated: Guarantees, where: str) -> None:
    """400 threads with small stacks, also with every thread making more."""
    body = """
threading.stack_size(64 << 10)
go_on = threading.Event()
def work():
    if MORE: make(50)
    go_on.wait()
def make(count):
    for _ in range(count):
        try: threading.Thread(target=work).start()
        except RuntimeError: time.sleep(0.001)
make(400)
print(threading.active_count())
go_on.set()
"""
    outcome = run_python(f"{ATTEMPTS}MORE = {where == 'all threads'}\n{body}", limits=ProgramLimits(processes=8))
    assert outcome.status == "ok", outcome
    assert 2 <= int(outcome.stdout) <= 8
    assert isolated.processes_limited


def test_where_nobody_can_be_asked_there_are_no_threads(bootstrap: Callable[[str], None]) -> None:
    refuse = "def refuse(): raise OSError(22, 'no listeners')\nlinux.request_thread_approval = refuse\n"
    bootstrap(f"{STUB}\nfrom explorl.sandbox import fork_server, linux\n{refuse}fork_server.main()")
    source = (
        "import threading\ntry: threading.Thread(target=int).start(); print('some')\nexcept RuntimeError: print('none')"
    )
    for here in PERMITTED:
        if here.layers == ("landlock", "seccomp"):
            answer = programs._run(programs._request(source, limits=ProgramLimits()), None, here.layers)
            counted = here.separate_user and os.getuid() == 0  # by a limit of the kernel's
            assert answer["stdout"] == ("some\n" if counted else "none\n")


def test_without_namespaces_there_are_no_processes() -> None:
    for here in PERMITTED:
        if "seccomp" in here.layers and "namespaces" not in here.layers:
            request = programs._request(
                "import os\ntry: os.fork()\nexcept OSError: print('no')", limits=ProgramLimits()
            )
            assert programs._run(request, None, here.layers)["stdout"] == "no\n"


# The network ----------------------------------------------------------------------------------------------------------


def test_no_socket_of_the_host_is_reached(isolated: Guarantees, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    abstract = f"\0explorl-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one, socket.socket(socket.AF_UNIX, 2) as other:
        one.bind(str(tmp_path / "s"))
        (tmp_path / "s").chmod(0o777)
        other.bind(abstract)
        names = attempts(f"""
for address in ({str(tmp_path / "s")!r}, {abstract!r}):
    for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        try: ends = socket.socketpair(socket.AF_UNIX, kind)
        except OSError: continue
        for end in ends:
            attempt("sendto", end.sendto, b"x", address)
            attempt("sendmsg", end.sendmsg, [b"x"], [], 0, address)
            attempt("connect", lambda: end.connect(address) is None)
            attempt("bind", lambda: end.bind("mine") is None)
            attempt("listen", lambda: end.listen() is None)
    attempt("socket", socket.socket, socket.AF_UNIX, socket.SOCK_DGRAM)
""")
        for end in (one, other):
            end.setblocking(False)
            with pytest.raises(BlockingIOError):
                end.recv(1)
    assert names == []


def test_landlock_alone_stops_what_it_can(bystander: subprocess.Popen[bytes]) -> None:
    """Signals, abstract sockets and TCP, as far as the kernel's version of it knows them."""
    if not any(here.layers == ("landlock",) for here in PERMITTED):
        pytest.skip("no Landlock here")
    version = ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1)
    abstract = f"\0explorl-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(abstract)
        unix.listen()
        source = f"""{ATTEMPTS}
attempt("signal", lambda: os.kill({bystander.pid}, 0) is None)
attempt("unix", lambda: socket.socket(socket.AF_UNIX).connect({abstract!r}) is None)
attempt("tcp", lambda: socket.create_connection({tcp.getsockname()!r}) and True)
print(json.dumps(done))
"""
        answer = programs._run(programs._request(source, limits=ProgramLimits()), None, ("landlock",))
    reached = json.loads(answer["stdout"])
    assert version < 6 or not {"signal", "unix"} & set(reached)
    assert version < 4 or "tcp" not in reached


# Files ----------------------------------------------------------------------------------------------------------------


def test_attributes_stay(isolated: Guarantees, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    victim = tmp_path / "victim"
    victim.write_text("x")
    victim.chmod(0o666)
    before = victim.stat()
    names = attempts(f"""
file, setxattrat, removexattrat, file_setattr, fchmodat2 = {str(victim)!r}, 463, 466, 469, 452
name = ctypes.create_string_buffer(b"user.explorl")
attempt("setxattr", os.setxattr, file, "user.explorl", b"x")
attempt("setxattrat", libc.syscall, setxattrat, -100, file.encode(), 0, name, ctypes.create_string_buffer(16), 16)
attempt("removexattrat", libc.syscall, removexattrat, -100, file.encode(), 0, name)
attempt("file_setattr", libc.syscall, file_setattr, -100, file.encode(), ctypes.create_string_buffer(24), 24, 0)
attempt("chmod", lambda: os.chmod(file, 0) is None)
attempt("fchmodat2", libc.syscall, fchmodat2, -100, file.encode(), 0, 0)
attempt("chown", lambda: os.chown(file, os.getuid(), -1) is None)
attempt("utime", lambda: os.utime(file, (0, 0)) is None)
attempt("truncate", lambda: os.truncate(file, 0) is None)
attempt("inotify", libc.inotify_add_watch, libc.inotify_init1(0), file.encode(), 2)
attempt("name_to_handle_at", libc.name_to_handle_at, -100, file.encode(), ctypes.create_string_buffer(200),
        ctypes.byref(ctypes.c_int()), 0)
""")
    after = victim.stat()
    assert names == []
    assert (after.st_mode, after.st_uid, after.st_mtime, after.st_size, after.st_ctime) == (
        before.st_mode, before.st_uid, before.st_mtime, before.st_size, before.st_ctime,
    )  # fmt: skip
    assert os.listxattr(victim) == []


def test_locks_tell_nothing(isolated: Guarantees) -> None:
    """Sandboxes share the files of Python's library, and used to share its locks."""
    library = os.path.realpath(os.__file__)
    with open(library) as shared:
        fcntl.flock(shared, fcntl.LOCK_SH)
        fcntl.lockf(shared, fcntl.LOCK_SH)
        names = attempts(f"""
import struct
F_OFD_GETLK, F_OFD_SETLK = 36, 37
write_lock = struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0)
with open({library!r}) as shared:
    attempt("flock", lambda: fcntl.flock(shared, fcntl.LOCK_EX | fcntl.LOCK_NB) is None)
    attempt("shared flock", lambda: fcntl.flock(shared, fcntl.LOCK_SH | fcntl.LOCK_NB) is None)
    attempt("F_GETLK", fcntl.fcntl, shared, fcntl.F_GETLK, write_lock)
    attempt("F_OFD_GETLK", fcntl.fcntl, shared, F_OFD_GETLK, write_lock)
    attempt("F_OFD_SETLK", fcntl.fcntl, shared, F_OFD_SETLK, write_lock)
    attempt("lockf", lambda: fcntl.lockf(shared, fcntl.LOCK_EX | fcntl.LOCK_NB) is None)
""")
    assert names == []
    with open("/dev/null", "r+b", 0) as null:  # which can be opened for writing
        fcntl.lockf(null, fcntl.LOCK_EX | fcntl.LOCK_NB)
        source = "import fcntl\ntry: f = open('/dev/null', 'r+b', 0)\nexcept OSError: print('none')\n"
        source += "else: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB); print('own')"
        outcome = run_python(source)
    assert outcome.stdout in ("none\n", "own\n"), outcome


def test_installed_packages_are_out_of_sight(isolated: Guarantees) -> None:
    folders = package_folders({os.path.realpath(path) for path in python_paths() if "site-packages" not in path})
    assert folders, "there is nothing to hide here"
    inside = [str(next(Path(folder).rglob("*.py"), Path(folder, "none"))) for folder in folders]
    names = attempts(f"""
for folder in {folders}:
    sys.path.append(folder)
    attempt(folder, lambda: {"namespaces" in isolated.layers} and len(os.listdir(folder)) > 0)
for file in {inside}:
    attempt(file, open, file)
try:
    import pip
    done.append("pip")
except (ImportError, PermissionError):
    pass
import sqlite3
""")
    assert names == []


def test_folders_less_some(tmp_path: Path) -> None:
    for name in ("lib/python3/site-packages/x", "lib/python3/json", "lib/python3/dist-packages", "lib/other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "lib/python3/os.py").touch()
    (tmp_path / "lib/link").symlink_to(tmp_path / "lib/python3")
    lib = str(tmp_path / "lib")
    hidden = package_folders([lib])
    assert hidden == [f"{lib}/python3/dist-packages", f"{lib}/python3/site-packages"]
    assert sorted(exclude_folders([lib], hidden)) == [f"{lib}/other", f"{lib}/python3/json", f"{lib}/python3/os.py"]
    assert package_folders([lib], [f"{lib}/python3/site-packages"]) == hidden[:1]
    assert exclude_folders([lib], []) == [lib]
    assert exclude_folders([hidden[0], lib], hidden) == exclude_folders([lib], hidden)
    assert package_folders([f"{lib}/absent"]) == []


SUBMOUNT = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
place = os.path.join(os.path.dirname(os.path.realpath(os.__file__)), "xmlrpc")
assert libc.unshare(0x20000) == 0
assert libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None) == 0
assert libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, b"mode=1777") == 0
open(place + "/victim", "w").close()
os.chmod(place + "/victim", 0o666)
source = f'''
import os
for path in ({place + "/new"!r}, {place + "/victim"!r}):
    try: open(path, "w").write("x"); print("written", path)
    except OSError as error: print(error.errno)
'''
answer = programs._run(programs._request(source, limits=ProgramLimits()), None, ("namespaces", "seccomp"))
print(answer["stdout"].split(), os.listdir(place), os.path.getsize(place + "/victim"))
"""


@pytest.mark.parametrize("number", [442, 999], ids=["mount_setattr", "without"])
def test_mounts_below_the_library_are_read_only(number: int) -> None:
    """A folder of the library has something of its own mounted on it, in a mount namespace of this test alone."""
    if os.getuid() != 0 or not any("namespaces" in here.layers for here in ISOLATED):
        pytest.skip("only root can mount, and only namespaces are mounted into")
    change = f"from explorl.sandbox import linux\nlinux.MOUNT_SETATTR = {number}\n"
    bootstrap = fork_client.BOOTSTRAP.replace(
        "from explorl.sandbox.fork_server", f"{change}from explorl.sandbox.fork_server"
    )
    change = f"from explorl.sandbox import fork_client\nfork_client.BOOTSTRAP = {bootstrap!r}\n"
    with script(change + SUBMOUNT) as process:
        out, err = process.communicate(timeout=60)
    assert out == "['30', '30'] ['victim'] 0\n", err  # EROFS


# Whose programs run where --------------------------------------------------------------------------------------------


def test_no_isolation_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPLORL_UNISOLATED", raising=False)
    open_here = [here for here in PERMITTED if here.missing]
    for here in open_here:
        monkeypatch.setattr(programs, "capabilities", lambda here=here: here)
        message = f"not be isolated from this machine's {' and '.join(here.missing)} .*user namespaces.*unisolated=True"
        for run in (run_python, lambda source, **more: run_tests(source, "def check(c): 0", entry_point="f", **more)):
            with pytest.raises(SandboxError, match=message):
                run("def f(): 0")
            assert run("def f(): 0", unisolated=True).status == "ok"
        with pytest.raises(SandboxError, match="EXPLORL_UNISOLATED=1 for the whole process"):
            run_many(["1"])
        assert run_many(["1"], unisolated=True)[0].status == "ok"
        monkeypatch.setenv("EXPLORL_UNISOLATED", "yes")
        with pytest.raises(SandboxError, match="EXPLORL_UNISOLATED=1"):
            run_python("1")
        monkeypatch.setenv("EXPLORL_UNISOLATED", "1")
        assert run_python("1").status == "ok"
        monkeypatch.delenv("EXPLORL_UNISOLATED")
    assert open_here


def test_best_layers_are_those_that_isolate(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        ("namespaces", "seccomp"): Guarantees(True, False, True, True, ("namespaces", "seccomp")),
        ("landlock", "seccomp"): Guarantees(True, True, True, True, ("landlock", "seccomp")),
    }
    monkeypatch.setattr(programs, "probe", found.__getitem__)
    programs.capabilities.cache_clear()
    assert programs.capabilities().layers == ("landlock", "seccomp")

    def fail(layers: programs.Layers) -> Guarantees:
        if layers == ("landlock",):
            return Guarantees(False, True, False, True, layers)
        if layers == ():
            return Guarantees(False, False, False, True, layers)
        raise SandboxError("no")

    monkeypatch.setattr(programs, "probe", fail)
    programs.capabilities.cache_clear()
    assert programs.capabilities().missing == ("network", "processes")
    programs.capabilities.cache_clear()


def test_first_process_of_a_container_is_isolated_from_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number is that of a program's own parent, in a namespace of processes."""
    for here in ISOLATED:
        if "namespaces" in here.layers:
            monkeypatch.setattr(os, "getpid", lambda: 1)
            assert probe(here.layers).missing == ()


def ordinary_python() -> str:
    """An interpreter that any user may run, and that runs this code."""
    for python in dict.fromkeys((sys.executable, shutil.which("python3", path="/usr/bin:/bin") or sys.executable)):
        check = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if subprocess.run(check, user=12345, group=12345, extra_groups=[], cwd="/", check=False).returncode == 0:
                return python
        except OSError:
            continue
    pytest.skip("no Python here that every user may run")


def test_an_ordinary_user_is_isolated_too() -> None:
    if os.getuid() != 0:
        pytest.skip("that is what all other tests try")
    folder = Path(fork_client._FOLDERS[1])
    if not all(parent.stat().st_mode & 0o5 == 0o5 for parent in (folder, *folder.parents)):
        pytest.skip("this code lies where only its user can read it")
    threads = "import threading, time\nthreading.stack_size(65536)\ntry:\n"
    threads += "    for _ in range(400): threading.Thread(target=time.sleep, args=(0.2,)).start()\n"
    threads += "except RuntimeError: pass\nprint(threading.active_count())"
    source = f"""
import dataclasses, json
for layers in (("namespaces", "seccomp"), ("landlock", "seccomp")):
    try: print(json.dumps(dataclasses.asdict(programs.probe(layers))))
    except SandboxError as error: print("null", error); continue
    print(programs._run(programs._request({threads!r}, limits=ProgramLimits()), None, layers)["stdout"], end="")
"""
    with script(source, python=ordinary_python(), user=12345, environment={"HOME": "/", "TMPDIR": "/tmp"}) as process:
        out, err = process.communicate(timeout=120)
    lines = out.splitlines()
    permitted = [json.loads(line) for line in lines if line.startswith("{")]
    assert permitted, (out, err)
    for guarantees in permitted:
        assert all(guarantees.values()), guarantees
    assert [line for line in lines if line.isdigit()] == ["8"] * len(permitted)


MOVED = """
import os
library = os.path.dirname(os.path.realpath(os.__file__))
parts = library.split("/")
for place in ["/".join(parts[:depth]) for depth in range(2, len(parts) + 1)] + ["/dev", "/tmp", "/dev/shm"]:
    try: os.rename(place, place + "-moved"); print("moved", place)
    except OSError: pass
    try: os.mkdir(place + "-new"); print("made", place)
    except OSError: pass
try: os.makedirs(library)
except OSError: pass
try: open(library + "/colorsys.py", "w").write("from explorl.sandbox import child\\nchild._Candidate.__call__ = int")
except OSError: pass
def f(x): return 1
"""
ZERO = "def check(candidate):\n    import colorsys\n    assert candidate() == 0"
"""Where `colorsys` was exchanged, the right answer, which the function does not know."""


def test_an_ordinary_user_cannot_move_the_library() -> None:
    """Who is no root owns the root of its sandbox; and what tests import comes from below it."""
    source = f"""
layers = ("namespaces", "seccomp")
try: programs.probe(layers)
except SandboxError as error: print("refused"); sys.exit()
print(programs._run(programs._request({MOVED!r}, limits=ProgramLimits()), None, layers)["stdout"].split())
print(programs._run(programs._request({MOVED!r}, limits=ProgramLimits(), entry_point="f"), {ZERO!r}, layers)["status"])
"""
    if os.getuid() == 0:
        run = script(f"import sys\n{source}", python=ordinary_python(), user=12345, environment={"HOME": "/"})
    else:
        run = script(f"import sys\n{source}")
    with run as process:
        out, err = process.communicate(timeout=120)
    if out == "refused\n":
        pytest.skip("no user namespaces here")
    assert out == "[]\nfailed\n", (out, err)


# What programs may do, all the same -----------------------------------------------------------------------------------

HONEST = {
    "files": "os.makedirs('a/b'); open('a/x', 'w').write('1'); os.rename('a/x', 'a/b/x'); os.symlink('a', 'l')\n"
    "shutil.copyfile('a/b/x', 'y'); shutil.move('y', 'z'); shutil.rmtree('a'); os.link('z', 'zz'); os.unlink('zz')\n"
    "with open('f', 'w+b') as f:\n    f.write(b'x' * 100); f.truncate(9); f.flush(); os.fsync(f.fileno()); f.seek(0)\n"
    "    m = mmap.mmap(f.fileno(), 9); m[0] = 1; m.flush(); m.close(); os.pread(f.fileno(), 1, 0)\n"
    "shutil.make_archive('arch', 'zip', '.', 'z'); shutil.unpack_archive('arch.zip', 'un'); glob.glob('**')\n"
    "pathlib.Path('new').touch(); os.statvfs('.'); os.scandir('.').close(); shutil.disk_usage('.')",
    "temporary": "with tempfile.TemporaryDirectory(dir='.') as d: open(d + '/x', 'w').close()\n"
    "with tempfile.NamedTemporaryFile(dir='.') as f: f.write(b'1')\n"
    "with tempfile.TemporaryFile(dir='.') as f: f.write(b'1')",
    "threads": "with futures.ThreadPoolExecutor(3) as e: assert list(e.map(str, range(9)))[8] == '8'\n"
    "t = threading.Thread(target=time.sleep, args=(0.01,)); t.start(); t.join()\n"
    "c = threading.Condition()\nwith c: c.wait(0.01)\nthreading.Timer(0.01, int).start(); queue.Queue().put(1)",
    "asyncio": "async def main():\n    await asyncio.sleep(0.01); await asyncio.gather(asyncio.sleep(0))\n"
    "    return await asyncio.to_thread(int, '3')\nassert asyncio.run(main()) == 3",
    "sqlite": "d = sqlite3.connect('x.db'); d.execute('create table t (a)'); d.execute('insert into t values (1)')\n"
    "d.commit(); d.close(); assert sqlite3.connect('x.db').execute('select a from t').fetchall() == [(1,)]\n"
    "sqlite3.connect(':memory:').execute('select 1')",
    "locks": "with open('own', 'w') as f: fcntl.lockf(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_UN)",
    "signals": "signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.01)\n"
    "signal.pause(); signal.raise_signal(signal.SIGALRM); os.kill(os.getpid(), signal.SIGALRM)\n"
    "signal.sigtimedwait([signal.SIGUSR1], 0.01); signal.pthread_kill(threading.get_ident(), signal.SIGALRM)",
    "pipes": "r, w = os.pipe(); os.set_blocking(r, False); os.write(w, b'1'); select.select([r], [], [], 0)\n"
    "e = select.epoll(); e.register(r); e.poll(0); selectors.DefaultSelector().close(); os.read(r, 1)\n"
    "a, b = socket.socketpair(); a.sendall(b'1'); a.settimeout(1); assert b.recv(1) == b'1'; a.shutdown(1)\n"
    "os.dup2(r, 20); os.set_inheritable(20, True); fcntl.fcntl(r, fcntl.F_GETFL); os.eventfd(0)",
    "machine": "platform.platform(); os.cpu_count(); os.sysconf('SC_PHYS_PAGES'); os.times(); os.sched_getaffinity(0)\n"
    "resource.getrusage(0); resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30)); os.getpgid(0); os.getppid()\n"
    "uuid.uuid4(); secrets.token_hex(); os.urandom(3); time.process_time(); time.thread_time(); os.getpriority(0, 0)\n"
    "locale.setlocale(locale.LC_ALL, 'C'); 'x'.encode('cp932'); random.SystemRandom().random()",
    "callbacks": "f = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda x: x); assert f(3) == 3",
    "modules": "import bz2, configparser, csv, curses, dataclasses, decimal, difflib, email, fractions, gzip, hashlib\n"
    "import html, http.client, inspect, lzma, pickle, ssl, statistics, tarfile, unittest, xml.etree.ElementTree, zlib",
    "numbers": "assert random.Random(0).random() > 0 and sum(decimal.Decimal(1) / 3 for _ in range(9)) < 4",
}
"""Honest programs, of what the standard library has."""
IMPORTS = (
    "import asyncio, concurrent.futures as futures, ctypes, decimal, fcntl, glob, locale, mmap, multiprocessing, os\n"
    "import pathlib, platform, queue, random, resource, secrets, select, selectors, shelve, shutil, signal, socket\n"
    "import sqlite3, sys, tempfile, threading, time, uuid\n"
)


@pytest.mark.parametrize("name", list(HONEST))
def test_standard_library_works(isolated: Guarantees, name: str) -> None:
    outcome = run_python(f"{IMPORTS}{HONEST[name]}\nprint('done')")
    assert (outcome.status, outcome.stdout) == ("ok", "done\n"), outcome


def test_in_namespaces_there_is_more() -> None:
    if not any("namespaces" in here.layers for here in ISOLATED):
        pytest.skip("there are none here")
    source = """
context = multiprocessing.get_context("fork")
with context.Pool(2) as pool: assert pool.map(abs, [-1, 2]) == [1, 2]
queue = context.Queue(); process = context.Process(target=queue.put, args=(3,)); process.start()
assert queue.get() == 3
shutil.copy2(__import__("os").__file__, "copy"); os.chmod("copy", 0o600); os.utime("copy"); os.truncate("copy", 1)
with open(os.devnull, "w") as null: print("nothing", file=null)
assert open(os.devnull).read() in ("", "nothing\\n")
print("done")
"""
    outcome = run_python(IMPORTS + source)
    assert (outcome.status, outcome.stdout) == ("ok", "done\n"), outcome


def test_what_fails_fails_sanely(isolated: Guarantees) -> None:
    source = """
for action in (
    lambda: sqlite3.connect("x.db").execute("pragma journal_mode=wal").execute("create table t (a)"),
    lambda: __import__("subprocess").run(["true"]),
    lambda: socket.socket(),
    lambda: fcntl.flock(open("own", "w"), fcntl.LOCK_EX),
    lambda: os.nice(1),
):
    try: action(); print("worked")
    except (OSError, sqlite3.OperationalError) as error: print(type(error).__name__)
"""
    outcome = run_python(IMPORTS + source)
    assert outcome.stdout.split() == ["OperationalError", *["PermissionError"] * 4], outcome


def test_text_comes_out_clean(isolated: Guarantees) -> None:
    source = "import os, sys\nos.write(1, b'\\x1b[2J\\xed\\xa0\\x80\\0a\\tb\\r\\n'); print('\\u202e', file=sys.stderr)"
    outcome = run_python(source)
    assert outcome.stdout == "␛[2J\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}␀a\tb␍\n"
    assert outcome.stderr == "\N{REPLACEMENT CHARACTER}\n"
    tested = run_tests("def f(): raise ValueError('\\ud800\\x07')", "def check(c): c()", entry_point="f")
    assert tested.error == "ValueError: \N{REPLACEMENT CHARACTER}␇"
    tested = run_tests("raise ValueError('\\ud800\\x07')", "def check(c): c()", entry_point="f")
    assert tested.error == "ValueError: \N{REPLACEMENT CHARACTER}␇"


# Working folders ------------------------------------------------------------------------------------------------------


def test_killed_process_leaves_no_folder(tmp_path: Path) -> None:
    outside = [here for here in PERMITTED if "namespaces" not in here.layers]
    if not outside:
        pytest.skip("always in namespaces here")
    tmp_path.chmod(0o755)
    others = tmp_path / "explorl-sandbox-other"
    others.mkdir()
    if os.getuid() == 0:
        os.chown(others, 12345, 12345)
    (tmp_path / "explorl-sandbox-link").symlink_to(others)
    (tmp_path / "explorl-sandbox-file").touch()
    source = f"""
request = programs._request("import time; print(1, flush=True); time.sleep(100)", limits=ProgramLimits(seconds=99))
programs._run(request, None, {outside[0].layers})
"""
    unrelated = sorted(path.name for path in tmp_path.iterdir())

    def folders() -> list[str]:
        return sorted(set(os.listdir(tmp_path)) - set(unrelated))

    use_folder = f"import tempfile\ntempfile.tempdir = {str(tmp_path)!r}\n"
    first = script(use_folder + source)
    eventually(lambda: len(folders()) == 1)
    second = script(use_folder + source)
    eventually(lambda: len(folders()) == 2)
    first.kill()
    first.communicate()
    (kept,) = set(folders()) - {locked_by_nobody(tmp_path)}
    with script(use_folder + "print(run_python('print(1)').stdout)") as third:
        out, err = third.communicate(timeout=60)
    assert out == "1\n\n", err
    assert folders() == [kept]
    assert alive(second.pid)
    second.kill()
    second.communicate()
    left = sorted(path.name for path in tmp_path.iterdir() if path.name != kept)
    assert left == (unrelated if os.getuid() == 0 else [name for name in unrelated if name != others.name])


def locked_by_nobody(folder: Path) -> str:
    """The one of the folders that can be locked."""
    for path in folder.glob("explorl-sandbox-*"):
        if path.is_dir() and not path.is_symlink() and path.name != "explorl-sandbox-other":
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return path.name
            except OSError:
                continue
            finally:
                os.close(descriptor)
    raise AssertionError("all are locked")


def test_probe_finds_what_is_open() -> None:
    """The same probe, without any mechanism, finds every way out."""
    bare = [here for here in PERMITTED if here.layers == ()]
    if not bare:
        pytest.skip("nothing can be started without mechanisms")
    assert bare[0].missing == ("network", "files", "processes")
    assert probe(()).missing == bare[0].missing
