"""Hostile code for `test_corpus`: what a program, or the tests of a data set, should not be able to do.

Each text runs after `PREAMBLE`, with VICTIM, a folder of the host; PID, a process of the same user that must survive;
HOST, the process that uses the sandbox; SOURCE, a file of the sandbox itself; PORT and ABSTRACT, sockets of the host;
ROLE, "program" or "tests". It calls ``attempt(name, action)`` for what must be refused, or appends to ``done`` itself.
"""

from __future__ import annotations

PREAMBLE = """
import ctypes, errno, fcntl, json, os, resource, shutil, signal, socket, stat, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
done = []
machine = os.uname().machine
secret, shared = VICTIM + "/secret", VICTIM + "/shared"
def attempt(name, action, *args):
    try:
        result = action(*args)
        if result is not False and result != -1:
            done.append(name)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError):
        pass
def read(path):
    with open(path, "rb") as file:
        return len(file.read(100)) > 0
def write(path, mode="ab"):
    with open(path, mode) as file:
        file.write(b"x")
def make_file(path):
    os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    os.unlink(path)
def make_folder(path):
    os.mkdir(path)
    os.rmdir(path)
"""

ATTACKS = {
    "read a private file": "attempt('open', read, secret)\nattempt('shared', read, shared)",
    "read a file by way of its folder": """
def below():
    folder = os.open(VICTIM, os.O_PATH)
    return os.read(os.open("secret", os.O_RDONLY, dir_fd=folder), 9)
attempt("openat", below)
attempt("chdir", lambda: os.chdir(VICTIM) or read("secret"))
""",
    "read a file by way of a link": """
try: os.symlink(secret, "symbolic")
except OSError: pass
attempt("symbolic", read, "symbolic")
attempt("hard", lambda: os.link(secret, "hard") or read("hard"))
attempt("renamed", lambda: os.rename(secret, "renamed") or read("renamed"))
""",
    "read what every machine has": """
for path in ("/etc/passwd", "/etc/hostname", "/etc/machine-id", "/root/.bashrc", "/sys/kernel/notes", "/dev/mem"):
    attempt(path, read, path)
for path in ("/etc", "/proc", "/sys", "/run"):
    attempt("list " + path, lambda: len(os.listdir(path)) > 0)
""",
    "list a folder": "attempt('list', os.listdir, VICTIM)\nattempt('scan', lambda: next(os.scandir(VICTIM)))",
    "overwrite a file": """
for mode in ("wb", "ab", "r+b"):
    attempt(mode, write, shared, mode)
attempt("truncate", os.truncate, shared, 0)
attempt("copy", shutil.copyfile, os.__file__, shared)
""",
    "make something in a folder": """
attempt("file", write, VICTIM + "/new")
attempt("folder", os.mkdir, VICTIM + "/folder2")
attempt("symbolic", os.symlink, "x", VICTIM + "/link")
attempt("hard", lambda: write("mine") or os.link("mine", VICTIM + "/mine"))
attempt("moved", lambda: write("mine2") or os.rename("mine2", VICTIM + "/mine2"))
attempt("replaced", lambda: write("mine3") or os.replace("mine3", shared))
attempt("unnamed", lambda: os.open(VICTIM, os.O_TMPFILE | os.O_RDWR))
""",
    "remove what is in a folder": """
attempt("unlink", os.unlink, shared)
attempt("rmdir", os.rmdir, VICTIM + "/folder")
attempt("rmtree", shutil.rmtree, VICTIM)
attempt("rename", os.rename, VICTIM, VICTIM + "2")
""",
    "change what a file may be used for": """
attempt("chmod", os.chmod, secret, 0o666)
attempt("chmod of a folder", os.chmod, VICTIM, 0o777)
attempt("chown", os.chown, shared, os.getuid(), -1)
attempt("utime", os.utime, shared, (0, 0))
attempt("setxattr", os.setxattr, shared, "user.explorl", b"x")
attempt("fchmodat2", lambda: libc.syscall(452, -100, secret.encode(), 0o666, 0))
attempt("file_setattr", lambda: libc.syscall(469, -100, shared.encode(), ctypes.create_string_buffer(24), 24, 0))
""",
    "change the sandbox": """
for file in (SOURCE, os.__file__):
    attempt("open", lambda: os.close(os.open(file, os.O_RDWR)))
    attempt("beside", make_file, file + ".new")
    attempt("compiled", make_file, os.path.dirname(file) + "/__pycache__/new.pyc")
""",
    "leave the working folder": """
own = ("/tmp", "/dev/shm") if os.getcwd() == "/tmp" else ()
for path in ("..", "../..", "/", "/tmp", "/var/tmp", "/dev/shm", "/run", "/home", "/usr/lib"):
    attempt("folder in " + path, lambda: path not in own and make_folder(f"{path}/explorl-{os.getpid()}"))
    attempt("file in " + path, lambda: path not in own and make_file(f"{path}/explorl-{os.getpid()}"))
for path in ("../program", "../tests", "../work"):
    attempt("list " + path, lambda: os.path.realpath(path) != os.getcwd() and os.listdir(path))
    attempt("file in " + path, lambda: os.path.realpath(path) != os.getcwd() and make_file(path + "/new"))
""",
    "look at processes": """
for pid in (PID, HOST, "self", os.getppid()):
    for name in ("environ", "cmdline", "maps", "mem", "status", "stat", "root", "cwd/x", "fd/0", "exe"):
        attempt(f"{name} of {pid}", read, f"/proc/{pid}/{name}")
attempt("process_vm_readv", lambda: libc.syscall({"x86_64": 310, "aarch64": 270}[machine], PID, None, 0, None, 0, 0))
attempt("getsid", os.getsid, PID)
attempt("getpgid", os.getpgid, PID)
attempt("processor time", time.clock_gettime, (~PID << 3) | 2)
attempt("affinity", os.sched_getaffinity, PID)
""",
    "end a process": """
for number in (0, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
    attempt(f"kill {number}", os.kill, PID, number)
    attempt(f"kill {number} the host", os.kill, HOST, number)
    attempt(f"killpg {number}", os.killpg, PID, number)
    attempt(f"tkill {number}", lambda: libc.syscall({"x86_64": 200, "aarch64": 130}[machine], PID, number))
    attempt(f"tgkill {number}", lambda: libc.syscall({"x86_64": 234, "aarch64": 131}[machine], PID, PID, number))
attempt("sigqueue", lambda: libc.sigqueue(PID, 9, None))
attempt("pidfd", lambda: signal.pidfd_send_signal(os.pidfd_open(PID), 9))
attempt("pidfd_getfd", lambda: libc.syscall(438, os.pidfd_open(PID), 0, 0))
attempt("ptrace", lambda: libc.ptrace(16, PID, 0, 0))
""",
    "end a process by way of a file": """
for pid in (PID, -PID, HOST):
    reading, writing = os.pipe()
    attempt("F_SETSIG", fcntl.fcntl, reading, 10, signal.SIGKILL)
    attempt("F_SETOWN", fcntl.fcntl, reading, fcntl.F_SETOWN, pid)
    attempt("F_SETOWN_EX", fcntl.fcntl, reading, 15, struct.pack("ii", 1, abs(pid)))
    attempt("FIOSETOWN", fcntl.ioctl, reading, 0x8901, struct.pack("i", pid))
    attempt("O_ASYNC", fcntl.fcntl, reading, fcntl.F_SETFL, os.O_ASYNC)
    os.write(writing, b"x")
""",
    "slow a process down": """
attempt("priority", os.setpriority, os.PRIO_PROCESS, PID, 19)
attempt("priority of all", os.setpriority, os.PRIO_USER, os.getuid(), 19)
attempt("processors", os.sched_setaffinity, PID, {0})
attempt("scheduler", os.sched_setscheduler, PID, os.SCHED_IDLE, os.sched_param(0))
attempt("limit", resource.prlimit, PID, resource.RLIMIT_NOFILE, (1, 1))
attempt("disk", lambda: libc.syscall({"x86_64": 251, "aarch64": 30}[machine], 1, PID, 3 << 13))
attempt("raise own limit", resource.setrlimit, resource.RLIMIT_AS, (-1, -1))
""",
    "run another program": """
attempt("exec", os.execv, "/bin/true", ["true"])
attempt("subprocess", lambda: subprocess.run(["/bin/true"]).returncode == 0)
attempt("shell", lambda: os.system("true") == 0)
attempt("spawn", lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)[1] == 0)
attempt("popen", lambda: len(os.popen("echo x").read()) > 0)
""",
    "reach the network": """
def connect(family, kind, address):
    with socket.socket(family, kind) as ours:
        ours.connect(address)
for address in (("127.0.0.1", PORT), ("192.0.2.1", 9)):
    attempt("tcp", connect, socket.AF_INET, socket.SOCK_STREAM, address)
    attempt("udp", connect, socket.AF_INET, socket.SOCK_DGRAM, address)
attempt("abstract", connect, socket.AF_UNIX, socket.SOCK_STREAM, ABSTRACT)
attempt("file", connect, socket.AF_UNIX, socket.SOCK_STREAM, VICTIM + "/socket")
attempt("netlink", socket.socket, socket.AF_NETLINK, socket.SOCK_RAW)
attempt("listen", lambda: socket.create_server(("127.0.0.1", 0)))
attempt("name", socket.getaddrinfo, "localhost.invalid", 80)
""",
    "share memory": """
attempt("shmget", lambda: libc.shmget(0x6578, 4096, 0o1600))
attempt("msgget", lambda: libc.msgget(0x6578, 0o1600))
attempt("semget", lambda: libc.semget(0x6578, 1, 0o1600))
attempt("mq_open", lambda: libc.mq_open(b"/explorl", 0o102, 0o600, None))
attempt("memfd", os.memfd_create, "x")
attempt("userfaultfd", lambda: libc.syscall({"x86_64": 323, "aarch64": 282}[machine], 0))
attempt("library for writing", lambda: os.open(os.__file__, os.O_RDWR))
""",
    "become more": """
attempt("unshare", lambda: libc.unshare(0x10000000))
attempt("mount", lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))
attempt("umount", lambda: libc.umount2(b"/tmp", 2))
attempt("chroot", os.chroot, ".")
attempt("setns", lambda: libc.setns(0, 0))
attempt("setuid", lambda: libc.setuid(os.getuid() ^ 1))
attempt("setgroups", os.setgroups, [0])
attempt("dumpable", lambda: libc.prctl(4, 1, 0, 0, 0))
attempt("seccomp", lambda: libc.prctl(22, 0, 0, 0, 0))
attempt("bpf", lambda: libc.syscall({"x86_64": 321, "aarch64": 280}[machine], 0, 0, 0))
attempt("keyctl", lambda: libc.syscall({"x86_64": 250, "aarch64": 219}[machine], 0, -3, 0))
""",
    "find something in the environment": """
done += list(os.environ)
if sys.argv != ["program.py"]: done.append(sys.argv)
if os.listdir(): done.append(os.listdir())
""",
    "find a descriptor": """
known = {0, 1, 2, 3, 4} | ({7} if ROLE == "tests" else set())
for number in range(1024):
    try: status = os.fstat(number)
    except OSError: continue
    if number not in known: done.append(number)
    if not stat.S_ISFIFO(status.st_mode) and (number > 2 or status.st_nlink): done.append((number, oct(status.st_mode)))
    attempt(f"{number} as a folder", lambda: os.open("secret", os.O_RDONLY, dir_fd=number))
""",
    "lock a shared file": """
library = open(os.__file__)
attempt("flock", lambda: fcntl.flock(library, fcntl.LOCK_SH | fcntl.LOCK_NB) is None)
attempt("F_GETLK", fcntl.fcntl, library, fcntl.F_GETLK, bytes(32))
attempt("lease", fcntl.fcntl, library, 1024, fcntl.F_RDLCK)
attempt("notify", fcntl.fcntl, os.open(".", os.O_RDONLY), 1026, 4)
""",
    "start more threads than allowed": """
go_on, started = threading.Event(), 0
threading.stack_size(64 << 10)
for _ in range(100):
    try: threading.Thread(target=go_on.wait, daemon=True).start()
    except RuntimeError: continue
    started += 1
go_on.set()
if not 1 <= started <= 7: done.append(started)
""",
}
"""What must be refused to a program and to tests, in every set of layers that isolates."""

TESTS_ATTACKS = {
    "start a process": "attempt('fork', lambda: os.fork() or os._exit(0))\nattempt('vfork', lambda: libc.vfork())",
    "end the supervisor": """
for pid in (os.getppid(), -1, 0, -os.getpgrp()):
    attempt(f"kill {pid}", os.kill, pid, 0)
""",
    "leave a daemon": "attempt('daemon', lambda: os.fork() or (os.setsid(), os.fork(), time.sleep(100)))",
}
"""What must be refused to tests, which start no processes in any set of layers."""

HOGS = {
    "nested folders": "while True: os.mkdir('d'); os.chdir('d')",
    "nested folders that cannot be listed": "os.umask(0o477)\nwhile True: os.mkdir('d'); os.chdir('d')",
    "folders side by side": "for i in range(1 << 40): os.mkdir(str(i))",
    "folders in folders": "for i in range(1 << 40): os.makedirs(f'{i % 7}/{i % 11}/{i}')",
    "empty files": "for i in range(1 << 40): open(str(i), 'w').close()",
    "files with long names": "for i in range(1 << 40): open(str(i) + 'x' * 200, 'w').close()",
    "files in hidden folders": "os.mkdir('d', 0o300)\nfor i in range(1 << 40): open(f'd/{i}', 'w').close()",
    "links": "for i in range(1 << 40): os.symlink('x' * 2000, str(i))",
    "hard links": "open('f', 'w').close()\nfor i in range(1 << 40): os.link('f', str(i))",
    "large files": "for i in range(1 << 40): open(str(i), 'wb').write(bytes(1 << 24))",
    "large files, mapped": """
import mmap
for i in range(1 << 40):
    with open(str(i), "w+b") as file:
        file.truncate(1 << 24)
        with mmap.mmap(file.fileno(), 1 << 24) as memory: memory[:] = bytes(1 << 24)
""",
    "large files, allocated": """
for i in range(1 << 40):
    with open(str(i), "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 24)
""",
    "large files in deep folders": """
for i in range(1 << 40):
    os.mkdir("d"); os.chdir("d"); open("f", "wb").write(bytes(1 << 22))
""",
    "files that change their names": """
for i in range(1 << 40):
    open(f"a{i}", "wb").write(bytes(1 << 16)); os.rename(f"a{i}", f"b{i}")
""",
}
"""What must be ended by a limit on the disk or on its inodes, well before the limit on time."""

UNUSUAL_FILES = {
    "folders without rights": """
os.mkdir("a", 0)
os.umask(0o777)
os.makedirs("b")
open("f", "w").close()
""",
    "folders that cannot be moved": "os.makedirs('a/b/c')\nos.mkdir('a/b/d', 0o500)\nos.mkdir('a/e', 0o100)",
    "deep folders": "for _ in range(900): os.mkdir('d'); os.chdir('d')\nopen('f', 'w').close()",
    "deep folders that cannot be listed": "os.umask(0o477)\nfor _ in range(300): os.mkdir('d'); os.chdir('d')",
    "odd names": """
for name in (b"\\xff\\xfe", b"a\\nb", b"-rf", b"*", b" ", b"x" * 255):
    os.mkdir(name)
    open(name + b"/" + name, "w").close()
""",
    "links to a folder of the host": """
os.symlink(VICTIM, "l")
os.mkdir("d")
os.symlink(VICTIM, "d/l")
os.symlink("..", "d/up")
""",
    "a link in place of a folder": "os.makedirs('d/folder')\nos.rename('d', 'e')\nos.symlink(VICTIM, 'd')",
    "links in a circle": """
os.symlink("b", "a")
os.symlink("a", "b")
os.symlink(".", "c")
os.symlink("x" * 4000, "d")
""",
    "names that removal may use": "for i in range(50): os.makedirs(f'{i}/program/tests')\nopen('0-1', 'w').close()",
}
"""What is left in a working folder: it must be gone afterwards, and the host's folder untouched."""

CROSSINGS = {
    "the program looks for what the tests have written": (
        """
def f():
    names = []
    for folder in (".", "..", "../tests", "/", "/tmp", "/dev/shm", "/var/tmp"):
        try: names += os.listdir(folder)
        except OSError: pass
    return [name for name in names if name == "answer"]
""",
        """
def check(candidate):
    for folder in (".", "/tmp", "/dev/shm"):
        try: open(folder + "/answer", "w").close()
        except OSError: pass
    assert candidate() == []
""",
    ),
    "the program changes what the tests have written": (
        """
def f():
    for folder in (".", "..", "../tests", "/tmp", "/dev/shm"):
        try: open(folder + "/answer", "w").write("wrong")
        except OSError: pass
""",
        """
def check(candidate):
    open("answer", "w").write("right")
    candidate()
    assert open("answer").read() == "right"
""",
    ),
    "the program writes verdicts": (
        """
for number in range(5, 1 << 10):
    for frame in (b'{"status": "ok"}', b'{"status": "setup", "error": "x"}'):
        try: os.write(number, len(frame).to_bytes(8, "big") + frame)
        except OSError: pass
def f(): return 1
""",
        "def check(candidate): assert candidate() == 1",
    ),
    "the program looks for processes to signal": (
        """
def f():
    reached = []
    for pid in range(-3, 1 << 16):
        try: os.kill(pid, 0)
        except OSError: continue
        reached.append(pid)
    return [pid for pid in reached if abs(pid) not in (0, 1, os.getpid())]
""",
        "def check(candidate): assert candidate() == [], candidate()",
    ),
}
"""Programs that want at their tests, which must pass all the same."""

HONEST = {
    "the program starts threads": (
        """
def f():
    threads = [threading.Thread(target=done.append, args=(i,)) for i in range(5)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return sorted(done)
""",
        "def check(candidate): assert candidate() == [0, 1, 2, 3, 4]",
    ),
    "the program starts a thread before its function is called": (
        "threading.Thread(target=done.append, args=(1,)).start()\ndef f(): return done",
        "def check(candidate): assert candidate() == [1]",
    ),
    "the tests start threads": (
        "def f(): return 1",
        """
def check(candidate):
    for _ in range(20):
        thread = threading.Thread(target=lambda: done.append(candidate()))
        thread.start()
        thread.join()
    assert done == [1] * 20
""",
    ),
    "the tests time out themselves": (
        "def f(): return 1",
        """
def check(candidate):
    def late(*_): raise TimeoutError
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try: time.sleep(5); raise AssertionError
    except TimeoutError: pass
    assert candidate() == 1
""",
    ),
}
"""Programs and tests that must pass, and soon."""

FORGERIES = {
    "no setup": '{"status": "setup", "error": "x"}',
    "no status": '{"status": "perfect"}',
    "a list as status": '{"status": ["ok"]}',
    "a list": "[1]",
    "a number as error": '{"error": 3, "normal": [1]}',
    "nested": "[" * 100_000,
    "no JSON": "\x00",
    "empty": "",
}
"""Messages in place of a verdict, after which the tests' process ends."""
