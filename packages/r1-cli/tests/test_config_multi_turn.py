"""Settings of episodes: what does not fit together is refused by name, with a way out."""

from pathlib import Path
from typing import get_args

import pytest

from r1_cli.build.environments import environment_setups
from r1_cli.config import ConfigError, load_config, unavailable, without_effect
from r1_cli.config.multi_turn import BUILTIN_TOOLS, MultiTurnSettings
from r1_cli.config.root import MASK, printable
from r1_data.turns.calls import FORMATS
from r1_rewards.environments.shapes import BUILT_IN

BASE = [
    "data.train_files=owner/rows@train",
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
    "trainer.n_gpus_per_node=1",
]
KEY = "worker.rollout.multi_turn"
TOOLS = "def look(x: float): ...\n\nclass Game:\n    def reset(self): ...\n"
VERL_YAML = """
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
    tool_schema:
      type: function
      function: {name: calc_gsm8k_reward, parameters: {type: object, properties: {answer: {type: string}}}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "verl.yaml").write_text(VERL_YAML)
    (tmp_path / "search.yaml").write_text("tools: [{class_name: verl.tools.search_tool.SearchTool, config: {}}]")
    (tmp_path / "own.yaml").write_text("tools: [{function: './tools.py:look'}]")
    (tmp_path / "empty.yaml").write_text("look: 1")
    (tmp_path / "nothing.yaml").write_text("tools: [{name: look}]")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(*words: str) -> list[str]:
    return [*BASE, *(f"{KEY}.{word}" for word in words)]


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        ([], "enable", "needs tools, an environment or an agent"),
        (["tools=python", "environment=./tools.py:Game"], "environment", "cannot be used with tools"),
        (["tools=python", "agent=./tools.py:look"], "agent", "cannot be used with tools: set one of"),
        (["environment=./tools.py:Game", "agent=python a.py"], "agent", "cannot be used with environment"),
        (
            ["tools=phyton"],
            "tools",
            "'phyton' is neither file.py:function, nor file.py, nor built in; did you mean 'pyt",
        ),
        (["tools=./tool.py:look"], "tools", "no such file; did you mean tools.py?"),
        (["tools=./tool.py"], "tools", "no such file; did you mean tools.py?"),
        (["tools=./tools.py:lok"], "tools", "./tools.py defines no lok; did you mean 'look'?"),
        (["tools=[python,python]"], "tools", "names 'python' twice"),
        (["tools=./tools.py:look", "tool_config_path=own.yaml"], "tools", "names 'look' twice"),
        (["function_tool_path=./tool.py"], "function_tool_path", "no such file"),
        (["environment=./tools.py:Gam"], "environment", "./tools.py defines no Gam; did you mean 'Game'?"),
        (["environment=./tools.py"], "environment", "must be file.py:Class"),
        (["agent=./tools.py:solve"], "agent", "./tools.py defines no solve"),
        (["agent=./tools.py --fast"], "agent", "or a command such as `python agent.py`"),
        (['agent="python \'a.py"'], "agent", "must be file.py:function"),
        (["agent=no-such-command a.py"], "agent", "there is no command 'no-such-command'"),
        (["agent=./tools.py:look", "scheduling=rounds"], "scheduling", "must be arrival with an agent"),
        (["environment=./tools.py:Game", "tool_kwargs.look.x=1"], "tool_kwargs", "needs tools"),
        (["tools=python", "environment_kwargs.size=1"], "environment_kwargs", "needs environment"),
        (["tools=python", "max_turn_tokens=4096"], "max_turn_tokens", "at most data.max_response_length (2048)"),
        (["tools=python", "tool_timeout=900"], "tool_timeout", "at most episode_timeout (600 s)"),
        (["tools=python", "max_parallel_calls=0"], "max_parallel_calls", "must be at least 1"),
        (["tools=python", "format=xml"], "format", "hermes"),
        (["tool_config_path=none.yaml"], "tool_config_path", "none.yaml cannot be read"),
        (["tool_config_path=empty.yaml"], "tool_config_path", "must have a list `tools`"),
        (["tool_config_path=nothing.yaml"], "tool_config_path", "tool 1: needs `function: file.py:name`, found name"),
        (["tool_config_path=search.yaml"], "tool_config_path", f"write search into {KEY}.tools"),
        (
            ["tool_config_path=verl.yaml"],
            "tool_config_path",
            "verl.tools.gsm8k_tool.Gsm8kTool is a class: write a function calc_gsm8k_reward(answer) into a file",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(folder: Path, words: list[str], key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(settings("enable=true", *words))
    [problem] = caught.value.problems
    assert problem.key == f"{KEY}.{key}"
    assert message in problem.message


@pytest.mark.parametrize("words", [["tools=[python,./tools.py:look]"], ["tool_config_path=own.yaml"]])
def test_what_fits_together_is_accepted(folder: Path, words: list[str]) -> None:
    config, _ = load_config(settings("enable=true", *words))
    assert config.worker.rollout.multi_turn.tool_specs()[-1] == "./tools.py:look"


def test_all_tools_are_listed_from_the_three_keys(folder: Path) -> None:
    found = MultiTurnSettings(tools=["python"], function_tool_path="tools.py", tool_config_path="own.yaml")
    assert found.tool_specs() == ["python", "tools.py", "./tools.py:look"]


def test_the_choices_are_those_of_the_packages_which_a_run_without_episodes_does_not_import() -> None:
    assert set(BUILTIN_TOOLS) == set(BUILT_IN)
    assert set(get_args(MultiTurnSettings.model_fields["format"].annotation)) == {"auto", *FORMATS}


def test_rlpr_and_turns_without_end_are_refused_with_episodes() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([*settings("enable=true", "tools=python"), "worker.rollout.ignore_eos=true"])
    assert [problem.key for problem in caught.value.problems] == ["worker.rollout.ignore_eos"]
    with pytest.raises(ConfigError) as caught:
        load_config([*settings("enable=true", "tools=python"), "worker.reward.reward_function=reference_probability"])
    [problem] = caught.value.problems
    assert "cannot be used with the reward reference_probability" in problem.message


def test_settings_without_enable_have_no_effect_and_are_not_checked() -> None:
    found = without_effect(*load_config(settings("tools=[nonsense]", "max_images=2")))
    assert [(limit.key, limit.reason) for limit in found] == [
        (f"{KEY}.tools", "set its enable to true"),
        (f"{KEY}.max_images", "set its enable to true"),
    ]


def test_a_run_refuses_by_name_what_it_cannot_do() -> None:
    config, provenance = load_config(settings("enable=true", "tools=[python]", "history=template"))
    assert not [remark.key for remark in unavailable(config, provenance)]


def test_an_environment_may_stand_in_the_place_of_a_reward_function(folder: Path) -> None:
    without = [word for word in settings("enable=true") if "reward_function" not in word]
    load_config([*without, f"{KEY}.environment=./tools.py:Game"])
    load_config([*without, f"{KEY}.agent=python agent.py"])
    with pytest.raises(ConfigError, match="reward_function: is missing"):
        load_config([*without, f"{KEY}.tools=[python]"])


def test_secrets_among_the_keywords_of_tools_are_masked() -> None:
    config, _ = load_config(settings("enable=true", "tools=search", "tool_kwargs.search.api_key=abc"))
    shown = printable(config)["worker"]["rollout"]["multi_turn"]
    assert shown["tool_kwargs"] == {"search": {"api_key": MASK}}


def with_sources(*sources: str, run: str = "") -> list[str]:
    words = [word for word in settings("enable=true", *filter(None, [run])) if "train_files" not in word]
    listed = ", ".join(f"{{files: owner/rows{number}@train, {source}}}" for number, source in enumerate(sources))
    return [*words, f"data.sources=[{listed}]"]


@pytest.mark.parametrize(
    ("sources", "run", "key", "message"),
    [
        (["tools: [python]", "name: b"], "", f"{KEY}.enable", "needs tools, an environment or an agent"),
        (["tools: [phyton]"], "tools=[python]", "data.sources", "[0].tools: …did you mean 'python'"),
        (["tools: [python, python]"], "tools=[python]", "data.sources", "[0].tools: …names 'python' twice"),
        (["tools: [python], environment: ./tools.py:Game"], "", "data.sources", "[0].environment: …set one of them"),
        (["environment: ./tools.py:Gam"], "", "data.sources", "[0].environment: …Game"),
        (
            ["environment_kwargs: {a: 1}"],
            "tools=[python]",
            "data.sources",
            "[0].environment_kwargs: …needs environment",
        ),
        (["tools: [python]"], "agent=python a.py", "data.sources", "[0].tools: …cannot be used with"),
        (["tools: [python]"], "enable=false", "data.sources", "[0].tools: …multi_turn.enable=true"),
    ],
)
def test_tools_of_single_sources_that_do_not_fit_are_refused(
    folder: Path, sources: list[str], run: str, key: str, message: str
) -> None:
    with pytest.raises(ConfigError) as failed:
        load_config(with_sources(*sources, run=run))
    where, _, told = message.rpartition("…")
    assert any(one.key == key and where in one.message and told in one.message for one in failed.value.problems)


def test_sources_that_are_answered_alike_share_a_kind(folder: Path) -> None:
    tools = "tools: [python, crop]"
    sources = [f"name: a, {tools}", "name: b, environment: ./tools.py:Game", "name: c", f"name: d, {tools}"]
    words = with_sources(*sources, run="tools=[calculator]")
    config = load_config([*words, f"{KEY}.tool_kwargs={{python: {{seconds: 1}}, calculator: {{}}}}"])[0]
    setups, kinds = environment_setups(config)
    assert kinds == {"a": "a, d", "d": "a, d", "b": "b"}
    assert [list(setup.tools) for setup in setups.values()] == [["calculator"], ["python", "crop"], []]
    assert [set(setup.tool_kwargs) for setup in setups.values()] == [{"calculator"}, {"python"}, set()]
    assert setups["b"].environment.endswith("tools.py:Game")


def test_a_run_whose_sources_all_have_their_own_needs_none(folder: Path) -> None:
    words = with_sources("name: a, tools: [python]", "name: b, environment: ./tools.py:Game")
    config = load_config(words)[0]
    setups, kinds = environment_setups(config)
    assert kinds == {"a": "", "b": "b"}
    assert list(setups) == ["", "b"]
    judged = [word for word in with_sources("environment: ./tools.py:Game") if "reward_function" not in word]
    load_config(judged)
    with pytest.raises(ConfigError, match="reward_function: is missing"):
        load_config([word for word in words if "reward_function" not in word])
