"""A run's numbers as Prometheus text, on loopback unless told: the last record, and what each process recorded."""

import hmac
import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from r1_cli.config.trainer import METRICS_TOKEN
from r1_cli.runs.history import JsonObject
from r1_cli.runs.processes import DRIVER, Process, newest_of, read_processes
from r1_cli.runs.reader import RunReader
from r1_cli.runs.track.types import Record

PATH = "/metrics"
REQUEST_SECONDS = 10  # for a client to send its request
GIB = 2**30
Samples = list[tuple[Mapping[str, str], float]]  # labels and values

log = logging.getLogger("r1")


class MetricsServer:
    """A logger that serves the last record. With a token, requests need `Authorization: Bearer TOKEN`."""

    def __init__(self, run: Path, host: str, port: int, token: str | None = None) -> None:
        """Listen until `close`; port 0 is any that is free. Raises OSError if the address cannot be used."""
        self._run, self._expected = run, f"Bearer {token}".encode() if token else None
        self._step, self._record = 0, Record()
        self._server = ThreadingHTTPServer((host, port), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_port}{PATH}"
        threading.Thread(target=self._server.serve_forever, name="r1-metrics", daemon=True).start()

    def log(self, step: int, record: Record) -> None:
        self._step, self._record = step, record

    def log_generations(self, step: int, rows: list[JsonObject]) -> None:
        pass

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_SECONDS

            def do_GET(self) -> None:
                given = self.headers.get("authorization", "").encode()
                if server._expected is not None and not hmac.compare_digest(given, server._expected):
                    self.send_error(401)
                elif self.path != PATH:
                    self.send_error(404)
                else:
                    body = render(server._run, server._step, server._record).encode()
                    self.send_response(200)
                    self.send_header("content-type", "text/plain; version=0.0.4; charset=utf-8")
                    self.send_header("content-length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def open_metrics(run: Path, host: str, port: int | None) -> list[MetricsServer]:
    """Return the server of `trainer.metrics_port`, or none; an address in use costs no run."""
    if port is None:
        return []
    try:
        server = MetricsServer(run, host, port, os.environ.get(METRICS_TOKEN) or None)
    except OSError as error:
        log.warning("trainer.metrics_port=%d cannot be used: %s; there are no metrics for Prometheus", port, error)
        return []
    log.info("metrics for Prometheus: %s", server.url)
    return [server]


def render(run: Path, step: int, record: Record) -> str:
    """Return the text of one reply: https://prometheus.io/docs/instrumenting/exposition_formats/."""
    found = newest_of(read_processes(run))
    starts, numbers = len(RunReader(run).starts()), [({"name": name}, value) for name, value in record.items()]
    families: list[tuple[str, str, str, Samples]] = [
        ("r1_step", "gauge", "The last logged step.", [({}, float(step))]),
        ("r1_starts_total", "counter", "Starts of the run in its manifest.", [({}, float(starts))]),
        ("r1_metric", "gauge", "A number of the last record.", [*numbers]),
    ]
    per_process = (
        ("r1_process_heartbeat_timestamp_seconds", "gauge", "When a process was heard last.", lambda one: one.beat),
        ("r1_process_resident_memory_bytes", "gauge", "Resident memory.", lambda one: one.memory),
        ("r1_process_device_memory_bytes", "gauge", "Memory of the GPU.", lambda one: one.device_memory),
        ("r1_process_tokens_total", "counter", "Tokens that an engine has sampled.", lambda one: one.tokens),
        ("r1_process_restarts_total", "counter", "Processes of this name before it.", lambda one: one.restarts),
    )
    for name, kind, meaning, value in per_process:
        samples: Samples = [(_labels(one), float(value(one))) for one in found if value(one) is not None]
        families.append((name, kind, meaning, samples))
    seconds: Samples = [
        ({**_labels(one), "phase": what}, spent) for one in found for what, spent in one.seconds.items()
    ]
    families.append(("r1_process_phase_seconds_total", "counter", "Seconds in each phase.", seconds))
    return "".join(f"{line}\n" for family in families for line in _lines(*family))


def _labels(process: Process) -> dict[str, str]:
    return {"process": process.name, "host": process.host}


def _lines(name: str, kind: str, meaning: str, samples: Samples) -> Iterator[str]:
    if samples:
        yield f"# HELP {name} {meaning}"
        yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"{name}{{{shown}}} {_number(value)}" if shown else f"{name} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def process_metrics(processes: Sequence[Process], now: float) -> Record:
    """Return the memory and silence of ranks, engines and other processes, but the driver, for a step's record."""
    others = [one for one in processes if one.name != DRIVER]
    record = {f"perf/memory_gb/{one.name}": one.memory / GIB for one in others}
    record |= {f"perf/silent_s/{one.name}": max(now - one.beat, 0.0) for one in others}
    devices = {one.name: one.device_memory for one in others if one.device_memory is not None}
    return record | {f"perf/device_memory_gb/{name}": size / GIB for name, size in devices.items()}


def summarize(processes: Sequence[Process], now: float) -> str:
    """Return a short line for the terminal, such as `5 processes · at most 0.95 GiB (engine-0) · engine-1: stopped`."""
    others = [one for one in processes if one.name != DRIVER]
    if not others:
        return ""
    largest = max(others, key=lambda one: one.device_memory or one.memory)
    size = (largest.device_memory or largest.memory) / GIB
    troubled = [
        f"{one.name}: {state}" for one in others if (state := one.state(now)).startswith(("silent", "stopped", "gone"))
    ]
    return " · ".join([f"{len(others)} processes", f"at most {size:.2f} GiB ({largest.name})", *troubled])
