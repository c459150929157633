"""One vLLM server as a child of this process: started with a token, watched, stopped with all its helpers."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from r1_rollout.errors import ServerError
from r1_rollout.private_folder import PrivateFolder
from r1_rollout.types import Json
from r1_rollout.vllm.client import Endpoint, RequestRefused, ServerFault, ServerRejected, ask
from r1_rollout.vllm.guard import TOKEN_VARIABLE
from r1_rollout.vllm.servers import watchdog

GUARD = "r1_rollout.vllm.guard.TokenGuard"
# What a server must be started with, by r1 or by whoever gives r1 its address.
REQUIRED = (
    "--enable-scale-out",
    f"--middleware={GUARD}",
    "--worker-extension-cls=r1_rollout.vllm.receiver.WeightReceiver",
    "--generation-config=vllm",
    "--logprobs-mode=processed_logits",
    "--logits-processors=r1_rollout.vllm.plain_logprobs:PlainLogprobs",
)
REPORTS_CACHED = "--enable-prompt-tokens-details"  # without it, `GenerationSession.prefilled` is None
# The first opens the endpoints for weights, the second those for adapters; the guard locks both.
REQUIRED_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
_TAIL = 2000  # characters of the log in an error


@contextmanager
def require_settings(name: str, *, adapters: bool = False) -> Iterator[None]:
    """If the server `name` refuses a request in the block, add the required start options to the error."""
    try:
        yield
    except RequestRefused as error:
        settings = " ".join(f"{variable}={value}" for variable, value in REQUIRED_ENVIRONMENT.items())
        lora = " --enable-lora and --max-lora-rank" if adapters else ""
        raise ServerRejected(
            f"{name} takes no weights: {error}\nA server must be started with {settings} and {' '.join(REQUIRED)}{lora}"
        ) from error


class ServerFailed(ServerError, RuntimeError):
    """A server could not be started; the message has the end of its log."""


def vllm_command(model: str, options: Mapping[str, Json]) -> Callable[[str], list[str]]:
    """Return a function from the path of a server's socket to its command line.

    Args:
        model: the folder of a Hugging Face model.
        options: further options of `vllm serve`, e.g. `{"dtype": "float32", "enforce_eager": True}`; True gives a bare
            flag, False and None leave it out, a mapping becomes JSON.
    """
    words = [sys.executable, "-P", "-m", "vllm.entrypoints.launchers.api_server.entry", f"--model={model}", *REQUIRED]
    words.append(REPORTS_CACHED)
    for name, value in options.items():
        if value is not None and value is not False:
            flag = f"--{name.replace('_', '-')}"
            text = json.dumps(value) if isinstance(value, Mapping) else value
            words.append(flag if value is True else f"{flag}={text}")
    return lambda path: [*words, f"--uds={path}", "--disable-uvicorn-access-log"]


class LocalServer:
    """A server that this process starts, on a Unix socket in a private folder.

    Requests need a token, which is new at each start and passed in the environment. The server ends with this process
    (see `watchdog`).
    """

    def __init__(
        self,
        command: Callable[[str], Sequence[str]],
        *,
        name: str = "server 0",
        environment: Mapping[str, str] | None = None,
        start_timeout: float = 600.0,
        stop_timeout: float = 15.0,
    ) -> None:
        """Prepare a server; `start` starts it.

        Args:
            command: the command line for a socket's path, see `vllm_command`.
            environment: variables added to this process's own.
            start_timeout, stop_timeout: seconds until it must be healthy, or have ended before it is killed.
        """
        self.name = name
        self._command = command
        self._environment = dict(environment or {})
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._folder: PrivateFolder | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._endpoint: Endpoint | None = None

    @property
    def endpoint(self) -> Endpoint:
        if self._endpoint is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._endpoint

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Start the server, ending the one before, and wait until it is healthy.

        Raises:
            ServerFailed: it ended, was not healthy within `start_timeout`, or `cancelled` returned True.
        """
        self.stop()
        self._folder = PrivateFolder("r1-vllm-")
        path, token = str(self._folder.path / "socket"), secrets.token_urlsafe(32)
        self._endpoint = Endpoint(f"unix:{path}", token)
        environment = os.environ | REQUIRED_ENVIRONMENT | self._environment | {TOKEN_VARIABLE: token}
        with open(self._folder.path / "log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", watchdog.__file__, *self._command(path)],
                stdin=subprocess.PIPE,  # the lifeline: it closes with this process
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._wait(cancelled)

    def _wait(self, cancelled: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._start_timeout
        while True:
            try:
                ask(self.endpoint, "GET", "/health", timeout=10.0)
                return
            except (ServerFault, ValueError) as error:
                cause = str(error)
            if not self.alive:
                cause = "the process ended"
            elif cancelled():
                cause = "called off"
            elif time.monotonic() > deadline:
                cause = f"not healthy after {self._start_timeout:g} s: {cause}"
            else:
                time.sleep(0.2)
                continue
            tail = self.log_tail()
            self.stop()
            raise ServerFailed(f"{self.name} did not start ({cause}); the end of its log:\n{tail}")

    def log_tail(self) -> str:
        if self._folder is None:
            return ""
        return (self._folder.path / "log").read_text(errors="replace")[-_TAIL:]

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.stdin:
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(self._stop_timeout)
            kill_group(process.pid)
            process.wait()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None


def kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
