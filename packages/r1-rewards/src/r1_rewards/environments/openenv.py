"""Environments on a server of OpenEnv, over its WebSocket. Needs `r1-rewards[openenv]`.

A message is {"type": "reset" | "step" | "close", "data": …}; the answer {"type": "observation", "data": {"observation",
"reward", "done"}} or {"type": "error", "data": {"message", "code"}}. A connection is an episode.
"""

import base64
import binascii
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from r1_rewards.environments.types import EnvironmentSpecError, Observation

PREFIXES = ("openenv+ws://", "openenv+wss://")
MAX_MESSAGE_BYTES = 100 << 20
_HIDDEN = ("done", "reward", "metadata")  # of an observation: the policy reads the rest
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class OpenEnv:
    """An environment of an OpenEnv server, in the gym shape.

    The action of a turn is {`action`: text}, or, without `action`, the JSON object that the turn is. The policy reads
    the observation's field `observation`, or without it the whole observation as JSON. `reset_columns` of the row are
    sent with reset. The score is the sum of rewards, or with `turn_rewards` each reward is its turn's and the score 0.
    Fields called `image` hold base64 of a picture.
    """

    def __init__(
        self,
        url: str,
        *,
        action: str = "message",
        observation: str = "",
        reset_columns: Sequence[str] = ("seed", "episode_id"),
        turn_rewards: bool = False,
        connect_timeout: float = 10.0,
    ) -> None:
        self._url = f"{url.removeprefix('openenv+').rstrip('/')}/ws"
        self._action, self._observation, self._reset_columns = action, observation, reset_columns
        self._turn_rewards, self._connect_timeout = turn_rewards, connect_timeout
        self._connection: Any = None
        self._total = 0.0

    def reset(self, row: Mapping[str, Any]) -> Observation:
        try:
            from websockets.sync.client import connect
        except ImportError as error:
            raise RuntimeError('environments of OpenEnv need: pip install "r1-rewards[openenv]"') from error
        own = urlsplit(self._url).hostname in _LOOPBACK
        self._connection = connect(
            self._url, max_size=MAX_MESSAGE_BYTES, open_timeout=self._connect_timeout, proxy=None if own else True
        )
        self._total = 0.0
        data = {name: row[name] for name in self._reset_columns if name in row}
        return self._read(self._exchange("reset", data))

    def step(self, text: str) -> Observation:
        found = self._read(self._exchange("step", self._write_action(text)))
        if self._turn_rewards:
            return found
        self._total += found.reward
        return Observation(found.content, done=found.done)

    def score(self) -> float:
        return self._total

    def close(self) -> None:
        if self._connection is not None:
            self._connection.send(json.dumps({"type": "close"}))
            self._connection.close()

    def _write_action(self, text: str) -> dict[str, Any]:
        if self._action:
            return {self._action: text.encode("utf-8", "replace").decode()}
        action = json.loads(text)
        if not isinstance(action, dict):
            raise ValueError("a turn must be a JSON object")
        return action

    def _exchange(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        self._connection.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(self._connection.recv())
        found = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(found, dict):
            raise RuntimeError("the OpenEnv server's answer is no message of OpenEnv")
        if reply.get("type") == "error":
            raise RuntimeError(f"OpenEnv ({found.get('code', 'no code')}): {found.get('message', '')}")
        return found

    def _read(self, data: Mapping[str, Any]) -> Observation:
        observation, reward = data.get("observation", {}), data.get("reward")
        shown: Any = observation
        if isinstance(observation, Mapping):
            if self._observation and self._observation not in observation:
                known = ", ".join(sorted(observation))
                raise RuntimeError(f"the observation has no field {self._observation!r}; it has {known}")
            shown = observation.get(self._observation) if self._observation else _readable(observation)
        return Observation(shown, 0.0 if reward is None else float(reward), bool(data.get("done", False)))


def check_url(url: str) -> None:
    """Raise EnvironmentSpecError if this is no address of an OpenEnv server."""
    parts = urlsplit(url.removeprefix("openenv+"))
    if not parts.hostname or parts.username:
        raise EnvironmentSpecError(f"environment {url!r}: write openenv+ws://HOST:PORT")


def _readable(observation: Mapping[str, Any]) -> Any:
    shown = {name: value for name, value in observation.items() if name not in _HIDDEN}
    picture = shown.pop("image", None)
    if not isinstance(picture, str):
        return shown if picture is None else {**shown, "image": picture}
    try:
        data = base64.b64decode(picture.rpartition(",")[2], validate=True)
    except binascii.Error as error:
        raise RuntimeError("the observation's image is not base64") from error
    import PIL.Image

    return [PIL.Image.open(io.BytesIO(data)), *([json.dumps(shown, ensure_ascii=False)] if shown else [])]
