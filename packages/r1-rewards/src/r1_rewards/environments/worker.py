"""The worker side: `python -m r1_rewards.environments.worker SOCKET` loads tools or an environment and answers calls.

A request is {"op": "reset" | "step" | "call" | "score" | "close" | "run", …}; each gets one reply: {"result": …} as in
`results.WireResult`, {"score": …} as in `frames.pack`, or {"error": text, "cause": …, "where": line of the file}.
"""

import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from r1_rewards.environments import agents, results, shapes
from r1_rewards.environments.types import EnvironmentSpecError, JsonObject, Observation
from r1_rewards.types import read_score
from r1_rewards.workers import frames
from r1_rewards.workers.forks import limit_processor_time, receive_setup, serve


def main(descriptor: int) -> None:
    pool, setup = receive_setup(descriptor)
    try:
        loaded = agents.load_agent(setup["agent"]) if setup["agent"] else shapes.load(setup)
    except EnvironmentSpecError as error:
        frames.send(pool, {"error": str(error)})
        return
    if pictures := sys.modules.get("PIL.Image"):
        pictures.init()  # here, once: else each fork imports the formats at its first picture, in 0.1 s
    serve(pool, loaded.describe(), setup["memory_mib"], lambda connection: answer_requests(connection, loaded, setup))


def answer_requests(connection: socket.socket, loaded: shapes.Loaded, setup: Mapping[str, Any]) -> None:
    worker, handler = os.getpid(), RequestHandler(loaded, setup)
    while True:
        try:
            request = frames.receive(connection)
            limit_processor_time(setup["cpu_seconds"])
            reply = handler.answer(request)
            if os.getpid() != worker:  # user code forked, and came back twice
                os._exit(0)
            frames.send(connection, reply)
        except (EOFError, OSError):  # the pool is gone, or user code has closed the connection
            return


class RequestHandler:
    """Answers requests with one episode's environment, or with tools that have no state."""

    def __init__(self, loaded: shapes.Loaded, setup: Mapping[str, Any]) -> None:
        self._loaded = loaded
        self._setup = setup
        self._environment: Any = None
        self._given = shapes.Given({})

    def answer(self, request: Mapping[str, Any]) -> JsonObject:
        try:
            if request["op"] == "score":
                score = shapes.wait(getattr(self._environment, self._loaded.score)())
                return {"score": frames.pack(read_score(score))}
            value = self._run(request)
            if request["op"] == "run" and value is not None:
                return {"score": frames.pack(read_score(value))}
            limits = results.ResultLimits(
                self._setup["max_response_length"], self._setup["truncate_side"], request["max_images"]
            )
            return {"result": results.encode_result(value, limits)}
        except results.ResultError as error:
            return {"error": str(error), "cause": "wrong_shape", "where": ""}
        except BaseException as error:  # SystemExit too: it ends the call only
            cause = "out_of_memory" if isinstance(error, MemoryError) else "exception"
            lines = [results.error_line(error, file) for file in self._loaded.files]
            return {"error": results.describe_error(error), "cause": cause, "where": "".join(lines)}

    def _run(self, request: Mapping[str, Any]) -> Any:
        loaded, operation = self._loaded, request["op"]
        if "row" in request:
            pictures = [frames.decode_picture(picture) for picture in request["images"]]
            self._given = shapes.Given(request["row"], pictures)
        if operation == "run":
            assert loaded.run is not None
            return loaded.run(self._given, request["address"])
        if operation == "reset":
            assert loaded.make is not None
            self._environment = loaded.make()
            reset = getattr(self._environment, "reset", None)
            value = None if reset is None else shapes.call_reset(reset, self._given)
            if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
                return value[0]  # Gymnasium's (observation, info)
            return value
        if operation == "step":
            value = shapes.wait(self._environment.step(request["text"]))
            return Observation(done=True) if value is None else value
        if operation == "close":
            return shapes.wait(self._environment.close()) and None
        tool = loaded.tools[request["tool"]]
        function = getattr(self._environment, tool.name) if loaded.shape == "methods" else tool.function
        return shapes.call_tool(tool, function, request["arguments"], self._given)


if __name__ == "__main__":
    main(int(sys.argv[1]))
