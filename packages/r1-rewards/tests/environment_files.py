"""Environments and tools for the tests, in files that workers import."""

from r1_rewards.environments.pool import EnvironmentPool
from r1_rewards.environments.types import EnvironmentSetup, PolicyTurn, ToolCall

GUESS = """
class Guess:
    def reset(self, row):
        self.goal = int(row["answer"])
    def step(self, text):
        self.right = text.strip() == str(self.goal)
        return None if self.right else "higher" if int(text) < self.goal else "lower"
    def score(self):
        return float(self.right)
"""
TOOLS = '''
import os, time, asyncio, signal, subprocess, sys

def look(x0: float, y0: float, x1: float, y1: float, *, image) -> "Image":
    """Show a part of the picture, enlarged.

    Args:
        x0, y0, x1, y1: its corners, from 0 to 1.
    """
    w, h = image.size
    return image.crop((x0 * w, y0 * h, x1 * w, y1 * h)).resize((8, 8))

async def add(a: int, b: int = 2) -> str:
    "Add two numbers."
    await asyncio.sleep(0)
    return str(a + b)

def nap(seconds: float):
    time.sleep(seconds)
    return "slept"

def nothing(): return None
def mapping(): return {"é": [1, 2.5, None]}
def raises(text: str = "x"): return [][text]
def missing(): return open("/home/somebody/secret/file.txt")
def leaves(): sys.exit(3)
def dies(): os._exit(3)
def segfault(): os.kill(os.getpid(), signal.SIGSEGV)
def interrupted(): raise KeyboardInterrupt
def hangs(): time.sleep(600)
def spins():
    while True: pass
def stubborn(file: str):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open(file, "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(600)
def forks():
    os.fork()
    return "forked"
def long(size: int): return "ab" * (size // 2)
def endless():
    def generator():
        while True: yield "x"
    return generator()
def deep():
    value = []
    for _ in range(100_000): value = [value]
    return value
def surrogates(): return "a\\ud800b\\0c"
def own_object(): return object()
def hoard(): return len(bytearray(8 << 30))
'''


def write(folder, source, name="environment.py"):
    path = folder / name
    path.write_text(source)
    return str(path)


def answer(pool, key="e"):
    """Return the answer of the one episode that was asked."""
    ((found, answered),) = pool.poll(60.0)
    assert found == key
    return answered


def call(pool, name, key="e", **arguments):
    """Execute one tool call, and return its record and the content of its message."""
    pool.step(key, PolicyTurn("", (ToolCall(name, arguments, "1"),)))
    result = answer(pool, key)
    (message,), (record,) = result.messages, result.calls
    assert (message["role"], message["name"], message["tool_call_id"]) == ("tool", name, "1")
    return record, message["content"]


def say(pool, text, key="e"):
    """Play a turn of a gym environment."""
    pool.step(key, PolicyTurn(text))
    return answer(pool, key)


def opened(pool, row=None, images=(), key="e"):
    pool.start(key, row or {}, images)
    return answer(pool, key)


def open_pool(*tools, environment="", workers=1, **limits):
    return EnvironmentPool(EnvironmentSetup(tools=tools, environment=environment, **limits), workers=workers)
