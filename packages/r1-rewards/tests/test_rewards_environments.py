"""Tools and environments in worker processes: shapes, results, limits, several at once."""

import io
import subprocess
import sys
import time

import PIL.Image
import pytest
from environment_files import GUESS, TOOLS, answer, call, open_pool, opened, say, write

from r1_rewards.environments.pool import EnvironmentPool
from r1_rewards.environments.types import EnvironmentSetup, EnvironmentSpecError, PolicyTurn, StepResult, ToolCall
from r1_rewards.types import Failure, Score


def test_rewards_load_nothing_of_environments_and_environments_nothing_heavy():
    for statement, heavy in (
        ("import r1_rewards", ("r1_rewards.environments", "PIL", "asyncio")),
        ("import r1_rewards.environments.pool", ("PIL", "torch", "httpx", "asyncio")),
    ):
        code = f"import sys; {statement}; found = {heavy} & sys.modules.keys(); assert not found, found"
        code = code.replace(str(heavy), f"set({heavy!r})")
        subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    path = write(tmp_path_factory.mktemp("tools"), TOOLS)
    with open_pool(path, workers=2, max_response_length=100, max_images=2) as pool:
        yield pool


@pytest.fixture
def episode(tools):
    assert opened(tools, {"answer": "3"}, [PIL.Image.new("RGB", (20, 20), (255, 0, 0))]) == StepResult()
    yield tools
    tools.cancel("e")


def test_functions_are_tools_by_their_hints_and_docstrings(tools):
    schemas = {tool["function"]["name"]: tool["function"] for tool in tools.tools}
    assert schemas["look"]["description"] == "Show a part of the picture, enlarged."
    assert schemas["look"]["parameters"]["required"] == ["x0", "y0", "x1", "y1"]  # and no image
    assert schemas["look"]["parameters"]["properties"]["y0"] == {
        "type": "number",
        "description": "its corners, from 0 to 1.",
    }
    assert schemas["add"]["parameters"]["required"] == ["a"]
    assert not tools.scores


def test_a_picture_comes_back_as_a_png_file(episode):
    _, content = call(episode, "look", x0=0, y0=0, x1=1, y1=0.5)
    (part,) = content
    picture = PIL.Image.open(io.BytesIO(part["image"]))
    assert (part["type"], picture.format, picture.size, picture.getpixel((0, 0))) == (
        "image",
        "PNG",
        (8, 8),
        (255, 0, 0),
    )


def test_pictures_of_an_episode_are_limited(episode):
    corners = {"x0": 0, "y0": 0, "x1": 1, "y1": 1}
    turn = PolicyTurn("", tuple(ToolCall("look", corners, str(number)) for number in range(3)))
    episode.step("e", turn)
    contents = [message["content"] for message in answer(episode).messages]
    assert [content if isinstance(content, str) else "picture" for content in contents] == [
        "picture", "picture", "[no more pictures]",
    ]  # fmt: skip
    assert call(episode, "look", **corners)[1] == "[no more pictures]"


@pytest.mark.parametrize(
    ("name", "arguments", "content"),
    [
        ("add", {"a": 3}, "5"),
        ("add", {"a": 3.0, "b": 4}, "7"),
        ("nothing", {}, ""),
        ("mapping", {}, '{"é": [1, 2.5, null]}'),
        ("surrogates", {}, "a?b?c"),
        ("long", {"size": 1100}, "ab" * 25 + "…[1,000 characters left out]…" + "ab" * 25),
        ("add", {"a": "3"}, "error: add: 'a' must be an integer, not '3'"),
        ("add", {"a": True}, "error: add: 'a' must be an integer, not True"),
        ("add", {}, "error: add: the parameter 'a' is missing"),
        ("add", {"a": 1, "c": 2}, "error: add: there is no parameter 'c' (there are: a, b)"),
        ("look", {"x0": float("nan"), "y0": 0, "x1": 1, "y1": 1}, "error: look: 'x0' must be a number, not nan"),
        ("endless", {}, "error: the result is generator; return text, a picture, parts or a mapping"),
        ("own_object", {}, "error: the result is object; return text, a picture, parts or a mapping"),
        ("deep", {}, "error: the result is nested too deeply"),
        ("raises", {}, "error: TypeError: list indices must be integers or slices, not str"),
        ("missing", {}, "error: FileNotFoundError: [Errno 2] No such file or directory: 'file.txt'"),
        ("leaves", {}, "error: SystemExit: 3"),
        ("interrupted", {}, "error: KeyboardInterrupt"),
    ],
)
def test_what_the_policy_reads_of_a_call(episode, name, arguments, content):
    record, found = call(episode, name, **arguments)
    assert found == content
    assert record.error == (content if content.startswith("error: ") else "")
    assert record.truncated == (1000 if name == "long" else 0)
    assert record.replaced == (2 if name == "surrogates" else 0)


def test_calls_that_cannot_be_executed_get_an_error_text_and_the_others_run(tools):
    setup = {"max_parallel_calls": 2}
    with open_pool(f"{tools.setup.tools[0]}:add", **setup) as pool:
        opened(pool)
        calls = (
            ToolCall("ad", {"a": 1}, "1"), ToolCall("add", {"a": 1}, "2"), ToolCall("add", {"a": 2}, "2"),
            ToolCall("add", {}, "3", error="half of an object"), ToolCall("add", {"a": 3}, "4"),
            ToolCall("add", {"a": 4}, "5"), ToolCall("add", [1], "6"),
        )  # fmt: skip
        pool.step("e", PolicyTurn("", calls))
        result = answer(pool)
        assert [message["content"] for message in result.messages] == [
            "error: there is no tool 'ad'; did you mean 'add'? (there are: add)",
            "3",
            "error: the id '2' was used by another call of this turn",
            "error: half of an object",
            "5",
            "error: only 2 calls are executed in a turn",
            "error: add: the arguments must be an object, not [1]",
        ]
        assert [record.cause for record in result.calls] == [
            "malformed", "", "malformed", "malformed", "", "limit", "malformed",
        ]  # fmt: skip
        pool.step("e", PolicyTurn("", (ToolCall("add", {"a": 1}),), cut=True))
        assert "nothing was executed" in answer(pool).messages[0]["content"]
        pool.step("e", PolicyTurn("no call"))
        assert answer(pool) == StepResult(done=True)


def test_calls_of_a_turn_run_side_by_side_and_sleeping_ones_take_no_place(tools):
    for key in range(40):
        tools.start(str(key), {"answer": ""}, [PIL.Image.new("RGB", (2, 2))])
    collect(tools, 40)
    begin = time.monotonic()
    for key in range(40):
        tools.step(str(key), PolicyTurn("", (ToolCall("nap", {"seconds": 0.5}, "1"),) * 1))
    found = collect(tools, 40)
    assert {result.messages[0]["content"] for result in found.values()} == {"slept"}
    assert time.monotonic() - begin < 40 * 0.5 / 2 / 2  # two at a time would take 10 s
    for key in range(40):
        tools.cancel(str(key))


COUNTS = """
import time
SEEN = []
def count():
    SEEN.append(0)
    time.sleep(0.05)
    return str(len(SEEN))
"""


@pytest.mark.parametrize(("overlap", "one_process"), [(False, True), (True, False)])
def test_without_overlap_sleeping_calls_of_one_worker_share_a_process(tmp_path, overlap, one_process):
    setup = EnvironmentSetup(tools=[write(tmp_path, COUNTS)], tool_timeout=20.0)
    with EnvironmentPool(setup, workers=1, overlap=overlap) as pool:
        opened(pool, {})
        pool.step("e", PolicyTurn("", tuple(ToolCall("count", {}, str(number)) for number in range(4))))
        found = [message["content"] for message in answer(pool).messages]
    assert (found == ["1", "2", "3", "4"]) is one_process, found


def collect(pool, number):
    found = {}
    while len(found) < number:
        found.update(pool.poll(60.0))
    return found


FILLED = """
def show(*, level, row, hint="none", images=(), image=None):
    return f"{level} {sorted(row)} {hint} {len(images)} {image and image.size}"
"""


def test_keyword_only_parameters_are_filled_from_the_row_and_the_prompt(tmp_path):
    with open_pool(write(tmp_path, FILLED), tool_kwargs={"show": {"level": 3}}) as pool:
        opened(pool, {"level": 5, "hint": "x"}, [PIL.Image.new("L", (2, 3))])
        assert call(pool, "show")[1] == "3 ['hint', 'level'] none 1 (2, 3)"
    with open_pool(write(tmp_path, FILLED)) as pool:
        opened(pool, {"level": 5})
        assert call(pool, "show")[1] == "5 ['level'] none 0 None"
        pool.cancel("e")
        message = "the tool 'show' asks for the column 'level', which the row lacks; did you mean 'levels'?"
        assert opened(pool, {"levels": 5}).message.startswith(message)


def test_a_gym_environment_reads_turns_and_scores_itself(tmp_path):
    spec = f"{write(tmp_path, GUESS)}:Guess"
    with open_pool(environment=spec, workers=2) as pool:
        assert pool.tools == []
        assert pool.scores
        for key in range(10):
            pool.start(str(key), {"answer": str(key)})
        collect(pool, 10)
        replies = {key: say(pool, "5", key) for key in map(str, range(10))}
        assert {key: result.messages and result.messages[0] for key, result in replies.items() if key != "5"} == {
            str(key): {"role": "user", "content": "higher" if key > 5 else "lower"} for key in range(10) if key != 5
        }
        assert (replies["5"].messages, replies["5"].done) == ((), True)
        for key in range(10):
            pool.finish(str(key))
        scores = collect(pool, 10)
        assert {key: score.value for key, score in scores.items()} == {str(key): float(key == 5) for key in range(10)}
        assert isinstance(scores["1"], Score)
        opened(pool, {"answer": "3"})
        failure = say(pool, "three")
        assert isinstance(failure, Failure)
        assert failure.cause == "exception"
        assert "invalid literal for int()" in failure.message
        assert "line 7 of environment.py" in failure.message
        failure = opened(pool, {})
        assert failure == Failure("exception", "reset() failed: KeyError: 'answer' (line 4 of environment.py)")


SHOP = '''
from r1_rewards.environments.types import Observation

class Shop:
    def __init__(self, money=10):
        self.money = money
    def reset(self, item, **row):
        self.item, self.bought = item, []
        return f"Buy {item}."
    def buy(self, item: str, number: int = 1) -> str:
        """Buy an item.

        Args:
            item: What to buy.
            number: How many.
        """
        if number > self.money:
            raise ValueError("too expensive")
        self.money -= number
        self.bought.append(item)
        return Observation(f"{self.money} left", reward=0.5, done=item == self.item, state=str(self.money))
    async def look(self) -> dict:
        "List what was bought."
        return {"bought": self.bought}
    def _hidden(self): ...
    def get_reward(self):
        return {"overall": float(self.item in self.bought), "money": self.money}
'''


def test_public_methods_are_tools_and_calls_of_a_turn_run_in_order(tmp_path):
    spec = f"{write(tmp_path, SHOP)}:Shop"
    with open_pool(environment=spec, environment_kwargs={"money": 4}) as pool:
        assert [tool["function"]["name"] for tool in pool.tools] == ["buy", "look"]
        first = opened(pool, {"item": "tea", "answer": "x"})
        assert first.messages == ({"role": "user", "content": "Buy tea."},)
        calls = [ToolCall("buy", {"item": "milk"}), ToolCall("buy", {"item": "x", "number": 9}), ToolCall("look", {})]
        pool.step("e", PolicyTurn("", tuple(calls)))
        result = answer(pool)
        assert [message["content"] for message in result.messages] == [
            "3 left", "error: ValueError: too expensive", '{"bought": ["milk"]}',
        ]  # fmt: skip
        assert (result.reward, result.done, result.state) == (0.5, False, "3")
        pool.step("e", PolicyTurn("", (ToolCall("buy", {"item": "tea"}), ToolCall("look", {}))))
        result = answer(pool)
        assert result.done
        assert result.messages[1]["content"] == "error: the episode was over before this call"
        pool.finish("e")
        assert answer(pool).parts == {"overall": 1.0, "money": 2.0}


RESULTS = """
import numpy as np
from PIL import Image
class Env:
    def reset(self, row):
        self.row = row
        return "begin", {"info": 1}
    def step(self, text):
        red = Image.new("RGB", (4, 4), (255, 0, 0))
        return {
            "tuple": ("seen", 0.25, True, {}), "five": ("seen", 1, False, True, {}), "pair": [red, "a red square"],
            "parts": [{"type": "text", "text": "a"}, {"type": "image", "image": red}], "bytes": b"x",
            "narrow": Image.new("RGB", (20000, 2)),
            "modes": Image.new("I;16", (3, 3)), "nan": ("x", float("nan"), True),
            "numpy": ("x", np.float32(0.5), False), "list": [1, "x"], "broken": [{"type": "image", "image": b"xx"}],
        }[text]
"""


def test_results_of_every_form(tmp_path):
    with open_pool(environment=f"{write(tmp_path, RESULTS)}:Env") as pool:
        assert not pool.scores
        assert opened(pool).messages == ({"role": "user", "content": "begin"},)
        assert (say(pool, "five").reward, say(pool, "five").done) == (1.0, True)
        found = say(pool, "tuple")
        assert (found.messages[0]["content"], found.reward, found.done) == ("seen", 0.25, True)
        assert [part["type"] for part in say(pool, "pair").messages[0]["content"]] == ["image", "text"]
        assert [part["type"] for part in say(pool, "parts").messages[0]["content"]] == ["text", "image"]
        assert say(pool, "list").messages[0]["content"] == '[1, "x"]'
        assert say(pool, "numpy").reward == 0.5
        assert say(pool, "modes").messages[0]["content"][0]["type"] == "image"
        for text, cause, message in (
            ("bytes", "wrong_shape", "the result is bytes"),
            ("narrow", "wrong_shape", "20000x2 pixels is too narrow"),
            ("broken", "wrong_shape", "bytes cannot be read"),
            ("nan", "non_finite", "no finite number"),
        ):
            failure = say(pool, text)
            assert (failure.cause, message in failure.message) == (cause, True), failure
            opened(pool)
        pool.finish("e")
        assert pool.poll() == []


def test_a_late_answer_of_a_cancelled_episode_ends_no_wait(tools):
    opened(tools, {"answer": ""}, [PIL.Image.new("RGB", (2, 2))])
    session = tools._sessions["e"]
    tools.cancel("e")
    tools.start("e", {})
    tools._deliver(session, StepResult())
    assert answer(tools) == Failure("exception", "the tool 'look' asks for a picture, and the row has none")


def test_misuse_of_the_pool_is_named(tools, tmp_path):
    opened(tools, {"answer": ""}, [PIL.Image.new("RGB", (2, 2))])
    with pytest.raises(ValueError, match="'e' is open"):
        tools.start("e", {})
    with pytest.raises(TypeError, match="row of the episode 'f': 'x' is bytes"):
        tools.start("f", {"x": b""})
    tools.step("e", PolicyTurn("", (ToolCall("nothing", {}),)))
    with pytest.raises(ValueError, match=r"not answered yet|not polled"):
        tools.step("e", PolicyTurn(""))
    tools.cancel("e")
    assert tools.poll() == []
    with pytest.raises(KeyError):
        tools.step("e", PolicyTurn(""))
    tools.start("e", {})
    assert answer(tools) == Failure("exception", "the tool 'look' asks for a picture, and the row has none")
    for tools_, environment, message in [
        (["pyton"], "", "'pyton' is not FILE.py:NAME nor one of calculator"),
        ([str(tmp_path / "x.py:f")], "", "there is no file"),
        (["python"], "x.py:X", "name either tools, an environment or an agent"),
    ]:
        with pytest.raises(EnvironmentSpecError, match=message):
            open_pool(*tools_, environment=environment).close()
    with pytest.raises(EnvironmentSpecError, match="left, right or middle"):
        EnvironmentSetup(tools=["python"], truncate_side="top")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class A:\n    x = 1\n", "neither step.* nor public methods"),
        ("class A:\n    def step(self, text): ...\n", "has step and no reset"),
        ("class B: ...\n", "has no class 'A' .there are: B"),
        ("1 / 0\n", "cannot be imported: ZeroDivisionError.*line 1"),
        ("class A:\n    def __init__(self, x): ...\n    def f(self): ...\n", "missing a required argument: 'x'"),
        ("class A:\n    def f(self, x: object, y: complex): ...\n", "parameter 'y' has the type <class 'complex'>"),
        ("class A:\n    def f(self, *x): ...\n", "has a parameter \\*x"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused(tmp_path, source, message):
    with pytest.raises(EnvironmentSpecError, match=rf"(?s){message}"):
        open_pool(environment=f"{write(tmp_path, source)}:A").close()


def test_one_pool_answers_episodes_of_several_kinds(tmp_path):
    tools, game = write(tmp_path, TOOLS, "several_tools.py"), write(tmp_path, GUESS, "several_guess.py")
    others = {"games": EnvironmentSetup(environment=f"{game}:Guess", tool_timeout=20.0)}
    with EnvironmentPool(EnvironmentSetup(tools=[str(tools)], tool_timeout=20.0), workers=1, others=others) as pool:
        assert [bool(kind.tools) for kind in pool.kinds.values()] == [True, False]
        assert (pool.scores, pool.kinds["games"].scores) == (False, True)
        pool.start("a", {"answer": "3"}, [PIL.Image.new("RGB", (20, 20))])
        pool.start("b", {"answer": "3"}, kind="games")
        found = {}
        while len(found) < 2:
            found |= dict(pool.poll(None))
        assert found == {"a": StepResult(), "b": StepResult()}
        pool.step("a", PolicyTurn("", (ToolCall("add", {"a": 2}, "1"),)))
        pool.step("b", PolicyTurn("3"))
        found = {}
        while len(found) < 2:
            found |= dict(pool.poll(None))
        assert [message["role"] for message in found["a"].messages] == ["tool"]
        assert found["b"].done
        pool.finish("a")
        pool.finish("b")
        assert pool.poll(None)[0][0] == "b"
        with pytest.raises(KeyError):
            pool.start("c", {}, kind="none")
    broken = {"broken": EnvironmentSetup(environment=f"{game}:Gues")}
    with pytest.raises(EnvironmentSpecError, match="has no class 'Gues'"):
        EnvironmentPool(EnvironmentSetup(tools=["calculator"]), others=broken)
