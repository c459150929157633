"""Play an episode by hand: a person types the policy's turns."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from r1_rewards.environments.pool import EnvironmentPool
from r1_rewards.environments.types import EnvironmentSetup, JsonObject, PolicyTurn, StepResult, ToolCall
from r1_rewards.types import Failure, Score

KEY = "by hand"


def play_by_hand(
    setup: EnvironmentSetup,
    row: Mapping[str, object],
    pictures: Sequence[object],
    *,
    read: Callable[[], str | None],
    write: Callable[[str], None],
) -> None:
    """Play one episode. `read` returns the next turn, None to end; `write` shows a line.

    A turn is text; with tools it is `NAME {"PARAMETER": VALUE}`. Raises EnvironmentSpecError.
    """
    with EnvironmentPool(setup) as pool:
        for tool in pool.tools:
            write(_signature(tool["function"]))
        pool.start(KEY, row, pictures)
        begun = False
        while True:
            answer = _answer(pool)
            if not begun and isinstance(answer, StepResult) and answer.messages:
                write("(reset() adds this to the row's prompt)")
            begun = True
            _show(answer, write)
            if not isinstance(answer, StepResult):
                return
            turn = None if answer.done else _read_turn(pool.tools, read, write)
            if turn is None:
                break
            pool.step(KEY, turn)
        if pool.scores:
            pool.finish(KEY)
            _show(_answer(pool), write)


def _answer(pool: EnvironmentPool) -> StepResult | Score | Failure:
    ((_, answer),) = pool.poll()
    return answer


def _read_turn(
    tools: Sequence[JsonObject], read: Callable[[], str | None], write: Callable[[str], None]
) -> PolicyTurn | None:
    while (line := read()) is not None:
        if not tools:
            return PolicyTurn(line)
        name, _, rest = line.strip().partition(" ")
        if not name:
            continue
        try:
            return PolicyTurn(line, (ToolCall(name, json.loads(rest or "{}"), "1"),))
        except json.JSONDecodeError as error:
            write(f'write NAME {{"PARAMETER": VALUE}}; this is no JSON: {error}')
    return None


def _show(answer: StepResult | Score | Failure, write: Callable[[str], None]) -> None:
    if isinstance(answer, Failure):
        write(f"failed ({answer.cause}): {answer.message}")
        return
    if isinstance(answer, Score):
        others = {name: value for name, value in answer.parts.items() if name != "overall"}
        write(f"score {answer.value:g}" + (f" {others}" if others else ""))
        return
    for message in answer.messages:
        content = message["content"]
        parts: list[JsonObject] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            write(part["text"] if part["type"] == "text" else f"[picture: {_save(part['image'])}]")
    notes = [f"reward {answer.reward:g}"] if answer.reward else []
    notes += [f"state {answer.state}"] if answer.state is not None else []
    notes += [f"{call.seconds:.2f} s" for call in answer.calls if call.seconds >= 0.1]
    notes += ["the episode is over"] if answer.done else []
    if notes:
        write(f"({', '.join(notes)})")


def _save(picture: bytes) -> Path:
    with tempfile.NamedTemporaryFile(prefix="r1-env-", suffix=".png", delete=False) as file:
        file.write(picture)
    return Path(file.name)


def _signature(function: JsonObject) -> str:
    parameters = function["parameters"]
    shown = [
        f'"{name}": {one.get("type", "any")}' + ("" if name in parameters.get("required", ()) else " (optional)")
        for name, one in parameters["properties"].items()
    ]
    description = function["description"].partition("\n")[0]
    return f"{function['name']} {{{', '.join(shown)}}}" + (f"  {description}" if description else "")
