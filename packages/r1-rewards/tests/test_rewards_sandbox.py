"""The sandbox: what hostile programs try, and that a system without the protections is refused."""

import json
import os
import socket
import subprocess
import sys
import threading

import pytest
from patience import ended, eventually

from r1_rewards.sandbox.execution import PROTECTIONS, Sandbox, SandboxError, SandboxLimits, describe
from r1_rewards.sandbox.jail import confinement, kernel

pytestmark = pytest.mark.skipif(not kernel.SUPPORTED, reason="judged code is confined on Linux, x86_64 or aarch64")

LIMITS = SandboxLimits(memory_mib=256, cpu_seconds=120, files_mib=4, output_mib=1)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(LIMITS) as sandbox:
        yield sandbox


def printed(execution):
    assert execution.ending == "ended", execution
    return execution.stdout.decode()


def attempt(*statements):
    """A program that tries each statement and prints what became of it."""
    lines = ["import os, sys, socket, subprocess, signal, ctypes, threading, resource, mmap"]
    for statement in statements:
        lines += [
            "try:",
            *(f"    {line}" for line in statement.splitlines()),
            "    print('DONE')",
            "except BaseException as error:",
            "    print(type(error).__name__)",
        ]
    return "\n".join(lines)


def test_a_program_reads_its_input_prints_and_exits(sandbox):
    execution = sandbox.run("import sys\nprint(int(input()) + 1)\nsys.exit(3)", b"4\n", 60)
    assert (execution.ending, execution.code, execution.stdout) == ("ended", 3, b"5\n")


def test_threads_exit_functions_and_a_big_input_work_as_in_a_script(sandbox):
    source = (
        "import atexit, sys, threading\natexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: print(len(sys.stdin.read()))).start()\nexit()\n"
    )
    assert printed(sandbox.run(source, b"x" * 3_000_000, 60)) == "3000000\nlast\n"


def test_describe_names_every_protection():
    assert set(describe()) == set(PROTECTIONS)


def test_an_uncaught_exception_is_told_on_stderr(sandbox):
    execution = sandbox.run("raise ValueError('ugh')", b"", 60)
    assert execution.code == 1
    assert execution.stderr.rstrip().endswith(b"ValueError: ugh")


@pytest.mark.parametrize(
    "attack",
    [
        "socket.socket()",
        "socket.create_connection(('127.0.0.1', {port}), 1)",
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "os.fork()",
        "os.execv(sys.executable, [sys.executable])",
        "subprocess.run(['/bin/sh', '-c', 'true'])",
        "os.posix_spawn('/bin/true', ['true'], {{}})",
        "assert os.system('true') == 0",
        "os.kill(os.getppid(), 9)",
        "os.kill(-1, 9)",
        "os.kill({pid}, 9)",
        "os.killpg(0, 9)",
        "os.setsid()",
        "os.setuid(0)",
        "os.chroot('/')",
        "os.nice(-5)",
        "os.sched_setaffinity(0, {{0}})",
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "resource.prlimit({pid}, resource.RLIMIT_CPU, (1, 1))",
        "assert ctypes.CDLL(None).ptrace(16, {pid}, 0, 0) == 0",
        "assert ctypes.CDLL(None).unshare(0x10000000) == 0",
        "assert ctypes.CDLL(None).mount(b'none', b'/work', b'tmpfs', 0, None) == 0",
        "assert ctypes.CDLL(None).prctl(1, 0) == 0",
        "assert ctypes.CDLL(None).syscall(425, 8, 0) >= 0",  # io_uring_setup
        "os.memfd_create('x')",
        "open('/proc/{pid}/mem', 'rb')",
        "open('/proc/self/environ')",
        "os.listdir('/')",
        "os.listdir('{folder}')",
        "open('{folder}/tests.json')",
        "os.remove('{folder}/tests.json')",
        "open('{folder}/new', 'w')",
        "os.symlink('{folder}/tests.json', 'link'); open('link')",
        "os.link('{folder}/tests.json', 'hard')",
        "open('/etc/passwd')",
        "open('/tmp/x', 'w')",
        "open(os.__file__, 'a')",
        "open('/dev/vda', 'rb')",
        "os.mknod('device', 0o60600, os.makedev(254, 0)); open('device', 'rb')",
    ],
)
def test_what_a_program_may_not_do_is_refused(sandbox, tmp_path, attack):
    (tmp_path / "tests.json").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        values = {"port": server.getsockname()[1], "pid": os.getpid(), "folder": tmp_path}
        outcome = printed(sandbox.run(attempt(attack.format(**values)), b"", 60))
    assert outcome.strip() not in ("DONE", "")
    assert (tmp_path / "tests.json").read_text() == "secret"
    assert os.listdir(tmp_path) == ["tests.json"]


def test_the_working_directory_takes_a_few_small_files_and_is_new_each_time(sandbox):
    assert printed(sandbox.run("open('a', 'w').write('x')\nprint(open('a').read())", b"", 60)) == "x\n"
    assert printed(sandbox.run("import os\nprint(os.listdir('.'), os.getcwd())", b"", 60)) == "[] /work\n"


def test_a_disk_cannot_be_filled(sandbox):
    many = "for i in range(100):\n    with open(str(i), 'wb') as f: f.write(bytes(1 << 20))"
    assert printed(sandbox.run(attempt(many), b"", 60)) == "OSError\n"
    assert printed(sandbox.run(attempt("for i in range(5000): open(str(i), 'w')"), b"", 60)) == "OSError\n"


def test_memory_is_bounded(sandbox):
    assert printed(sandbox.run(attempt("bytearray(1 << 30)", "mmap.mmap(-1, 1 << 30)"), b"", 60)) in (
        "MemoryError\nOSError\n",
        "MemoryError\nMemoryError\n",
    )
    assert sandbox.run("x = []\nwhile True: x.append(bytearray(1 << 20))", b"", 60).code == 1


def test_threads_are_bounded(sandbox):
    source = (
        "import time\ndef more():\n    while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
    )
    assert printed(sandbox.run(attempt(source + "\nmore()"), b"", 60)) == "RuntimeError\n"


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(60)",
        "while True: pass",
        "7 ** 999_999_999",
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "while True: pass",
        "import os\nos.close(0); os.close(1); os.close(2)\nwhile True: pass",
        "import sys\nsys.stdin.read()\nimport threading\nthreading.Event().wait()",
    ],
)
def test_what_does_not_end_is_killed_at_the_deadline(sandbox, source):
    execution = sandbox.run(source, b"", 0.4)
    assert (execution.ending, execution.code) == ("timeout", None)
    assert printed(sandbox.run("print(1)", b"", 60)) == "1\n"


@pytest.mark.parametrize("stream", [1, 2])
def test_output_is_bounded_and_only_the_end_of_stderr_is_kept(sandbox, stream):
    execution = sandbox.run(f"import os\nfor _ in range(100): os.write({stream}, b'x' * (1 << 20))", b"", 60)
    assert execution.ending == ("output" if stream == 1 else "ended")
    assert len(execution.stdout) < 2 << 20
    assert len(execution.stderr) <= 4096


def test_processor_time_is_bounded_by_the_kernel_too():
    with Sandbox(SandboxLimits(cpu_seconds=0)) as sandbox:
        execution = sandbox.run("while True: pass", b"", 60)
    assert (execution.ending, execution.code) == ("ended", -9)


OPEN_DESCRIPTORS = """
import os, sys
def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
open_ones = [descriptor for descriptor in range(1024) if is_open(descriptor)]
"""


def test_a_program_sees_no_environment_no_caller_and_no_neighbours(sandbox, monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    source = "print(dict(os.environ), open_ones, os.getpid() if os.getppid() == 0 else 1, sys.argv)"
    assert printed(sandbox.run(OPEN_DESCRIPTORS + source, b"", 60)) == "{} [0, 1, 2] 1 ['solution.py']\n"


@pytest.mark.parametrize("first_free", [60, 97, 98, 99, 100, 101, 105, 200])
def test_a_program_holds_no_descriptor_of_a_caller_that_has_many(first_free):
    held = [os.open(os.devnull, os.O_RDONLY)]
    while held[-1] < first_free - 1:
        held.append(os.open(os.devnull, os.O_RDONLY))
    try:
        with Sandbox() as sandbox:
            assert printed(sandbox.run(OPEN_DESCRIPTORS + "print(open_ones)", b"", 60)) == "[0, 1, 2]\n"
    finally:
        for descriptor in held:
            os.close(descriptor)


def test_folders_with_modules_can_be_opened_to_programs(tmp_path):
    (tmp_path / "extra.py").write_text("VALUE = 7")
    if os.getuid() == 0:
        tmp_path.chmod(0o700)
        with Sandbox(LIMITS, module_paths=[str(tmp_path)]) as sandbox, pytest.raises(SandboxError, match="chmod o"):
            sandbox.run("", b"", 60)
    tmp_path.chmod(0o755)
    with Sandbox(LIMITS, module_paths=[str(tmp_path)]) as sandbox:
        assert printed(sandbox.run("import extra; print(extra.VALUE)", b"", 60)) == "7\n"


def supervisors():
    """The processes of this process's sandboxes."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                words = file.read().split("\0")
        except OSError:
            continue
        if "jail.supervisor" in " ".join(words) and words[-2] == str(os.getpid()) and not ended(pid):
            found.append(pid)
    return found


def test_nothing_is_left_after_closing_even_in_the_middle_of_a_run():
    before, descriptors = set(supervisors()), open_descriptors()
    sandbox = Sandbox(LIMITS)
    conversation = sandbox.start("answer", "while True: pass")
    assert eventually(lambda: len(set(supervisors()) - before) == 3)  # supervisor, launcher, program
    conversation.close()
    sandbox.close()
    assert eventually(lambda: not set(supervisors()) - before)
    assert eventually(lambda: open_descriptors() <= descriptors)  # what earlier tests left may be closed meanwhile


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_sandbox_dies_with_its_owner():
    code = (
        "from r1_rewards.sandbox.execution import Sandbox\nbox = Sandbox()\nbox.start('answer', 'while True: pass')\n"
        "import os\nos.system('cat /proc/%d/task/*/children' % os.getpid())\nos.kill(os.getpid(), 9)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert eventually(lambda: ended(int(out.split()[0])))


def test_threads_have_sandboxes_of_their_own():
    results = {}

    def work(number):
        with Sandbox(LIMITS) as sandbox:
            results[number] = [printed(sandbox.run(f"print({number})", b"", 60)) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [f"{number}\n"] * 3 for number in range(4)}


# Numbers of system calls on x86_64 and aarch64, with the first argument for which they are denied.
UNSHARE, LANDLOCK, SECCOMP = [(272, 97), None], [(444, 444), None], [(157, 167), 22]

ON_ANOTHER_SYSTEM = """
import ctypes, json, struct, sys
from r1_rewards.sandbox.jail import kernel
from r1_rewards.sandbox.execution import SandboxLimits, Sandbox, SandboxError, describe
denied, source = json.loads(sys.argv[1])
steps = []
for numbers, argument in denied:
    if argument is None:
        steps += [(0x20, 0, 0, 0), (0x15, 0, 1, numbers[kernel.MACHINE]), (6, 0, 0, 0x50001)]
    else:
        steps += [(0x20, 0, 0, 0), (0x15, 0, 3, numbers[kernel.MACHINE]), (0x20, 0, 0, 16), (0x15, 0, 1, argument),
                  (6, 0, 0, 0x50001)]
steps.append((6, 0, 0, 0x7FFF0000))
code = b"".join(struct.pack("=HBBI", *step) for step in steps)
buffer = ctypes.create_string_buffer(code, len(code))
kernel.prctl(38, 1)
kernel.prctl(22, 2, ctypes.c_char_p(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(buffer))))
try:
    with Sandbox() as sandbox:
        print(sandbox.run(source, b"", 60).stdout.decode(), end="")
        print(*sandbox.active)
except SandboxError as error:
    print("refused:", error)
"""


def on_a_system_without(*denied, source="print('ran')"):
    command = [sys.executable, "-c", ON_ANOTHER_SYSTEM, json.dumps([denied, source])]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_container_without_namespaces_is_protected_by_filter_and_landlock(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    source = attempt(
        f"open({str(secret)!r})", "open('/proc/self/maps')", "open('file', 'w')", "os.fork()", "socket.socket()",
        "os.kill(os.getppid(), 9)", "import decimal",
    )  # fmt: skip
    *outcomes, active = on_a_system_without(UNSHARE, source=source).splitlines()
    assert set(active.split()) == set(PROTECTIONS)
    assert [text for text in outcomes if text] == [
        "PermissionError", "PermissionError", "PermissionError", "PermissionError", "PermissionError",
        "PermissionError", "DONE",
    ]  # fmt: skip


def test_without_namespaces_and_landlock_nothing_runs():
    refusal = on_a_system_without(UNSHARE, LANDLOCK)
    assert refusal.startswith("refused: this system does not offer 'files'")
    assert "nothing was run" in refusal


def test_without_a_system_call_filter_nothing_runs():
    refusal = on_a_system_without(SECCOMP)
    assert refusal.startswith("refused: this system does not offer 'network'")
    assert "nothing was run" in refusal


@pytest.mark.parametrize("command", ["F_SETOWN", "F_SETSIG", "F_SETLEASE", "F_NOTIFY", "F_SETOWN_EX"])
def test_no_descriptor_sends_signals_for_a_program(sandbox, command):
    """The process asks for itself, which every namespace and every Landlock would allow: the filter must refuse."""
    number = {"F_SETSIG": 10, "F_SETOWN_EX": 15}.get(command, f"fcntl.{command}")
    attack = f"fcntl.fcntl(socket.socketpair()[0], {number}, os.getpid() if '{command}' == 'F_SETOWN' else bytes(8))"
    assert printed(sandbox.run(attempt("import fcntl; " + attack), b"", 60)).strip() == "PermissionError"


def test_an_ordinary_user_gets_every_protection(tmp_path):
    code = (
        "import os, sys\nfrom r1_rewards.sandbox.jail import kernel\nuid = os.getuid()\n"
        "kernel.unshare(kernel.CLONE_NEWUSER)\nopen('/proc/self/uid_map', 'w').write(f'1000 {uid} 1')\n"
        "os.execv(sys.executable, [sys.executable, '-c', "
        "'import os; from r1_rewards.sandbox.execution import Sandbox\\n"
        'with Sandbox() as s: print(os.getuid(), s.run("print(7)", b"", 60).stdout, *s.active)\'])\n'
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if "unshare" in ran.stderr:
        pytest.skip("this system has no user namespaces to become an ordinary user in")
    assert ran.stdout.split() == ["1000", r"b'7\n'", *sorted(PROTECTIONS)], ran.stderr


THREAD = "import threading\nt = threading.Thread(target=print, args=(7,))\nt.start()\nt.join()"
AS_ORDINARY_USER = """
import os, sys
from r1_rewards.sandbox.jail import kernel
uid = os.getuid()
kernel.unshare(kernel.CLONE_NEWUSER)
open("/proc/self/uid_map", "w").write(f"1000 {uid} 1")
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""


def test_an_ordinary_user_has_threads_where_there_are_no_namespaces():
    script = [ON_ANOTHER_SYSTEM, json.dumps([[UNSHARE], THREAD])]
    ran = subprocess.run([sys.executable, "-c", AS_ORDINARY_USER, *script], capture_output=True, text=True)
    if "unshare" in ran.stderr:
        pytest.skip("this system has no user namespaces to become an ordinary user in")
    assert ran.stdout.split() == ["7", *sorted(PROTECTIONS)], ran.stderr


def test_the_threads_of_a_user_are_counted():
    gate = threading.Event()
    more = [threading.Thread(target=gate.wait) for _ in range(3)]
    for thread in more:
        thread.start()
    try:
        assert confinement._threads_of(os.getuid()) >= 4
    finally:
        gate.set()
        for thread in more:
            thread.join()
    assert confinement._threads_of(0x7FFF_FFF0) == 0


def test_another_system_than_linux_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="on Linux only, this is darwin"):
        Sandbox()
