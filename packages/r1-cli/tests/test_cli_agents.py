"""Agents as programs that sample from the policy over HTTP: their paths, limits, rewards and ends."""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_players import ScriptedEngine, Toy

from r1_cli.gateway.messages import ChatReply, ChatRequest
from r1_cli.gateway.server import GatewayServer, SessionAddress
from r1_cli.train.episodes.agent_episode import AgentEpisode, Renderers
from r1_cli.train.episodes.agent_events import (
    SKIPPED,
    Ended,
    LiveAgents,
    RequestQueue,
    Rewarded,
    Sampled,
    live_agents,
)
from r1_cli.train.episodes.agents import AgentPlayer
from r1_cli.train.episodes.answers import AnswerRecord, RecordedAnswer, compare_answers
from r1_cli.train.episodes.engine_use import EngineUse
from r1_cli.train.episodes.episode import EpisodeLimits
from r1_cli.train.episodes.recorded_agents import RecordedAgents, digest_turn, record_agents, replay_agents
from r1_cli.train.episodes.recorded_environments import RecordedEnvironments
from r1_cli.train.groups.trajectory import Trajectory
from r1_cli.train.metrics.step import episode_metrics
from r1_cli.train.recorder import Recorder
from r1_data.turns.probe import probe_template
from r1_data.turns.turn_renderer import TurnRenderer
from r1_data.types import DataError, Prompt
from r1_rewards.environments.pool import EnvironmentPool
from r1_rewards.environments.types import EnvironmentSetup
from r1_rewards.types import Failure, Score
from r1_rollout.types import Completion, SamplingParams

LIMITS = EpisodeLimits(max_tokens=300, max_turns=6, max_turn_tokens=9)
AGENTS = Path(__file__).with_name("agent_toys.py")


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[EnvironmentPool, GatewayServer, RequestQueue]]:
    with ExitStack() as stack:
        setup = EnvironmentSetup(agent=f"{AGENTS}:solve", episode_timeout=60.0)
        pool = stack.enter_context(EnvironmentPool(setup, workers=2))
        queue = RequestQueue()
        server = GatewayServer(queue.answer, reward=queue.reward)
        stack.callback(server.close)
        yield pool, server, queue


@pytest.fixture(scope="module")
def player(toy: Toy, served: tuple[EnvironmentPool, GatewayServer, RequestQueue]) -> AgentPlayer:
    turns = TurnRenderer(toy.renderer, probe_template(toy.renderer, end_token_ids=[toy.end]))
    ends = frozenset({toy.end})
    return AgentPlayer(served[0], live_agents(*served), turns, toy.tokenizer, ends, LIMITS, max_prompt_tokens=100)


@pytest.fixture
def wide(player: AgentPlayer) -> Iterator[AgentPlayer]:
    """The player with limits that schemas of tools fit into, in the tokens of the toy."""
    limits, prompt = player.limits, player.max_prompt_tokens
    player.limits, player.max_prompt_tokens = replace(limits, max_turn_tokens=None), 2000
    yield player
    player.limits, player.max_prompt_tokens = limits, prompt


def play(toy: Toy, player: AgentPlayer, *answers: str, n: int = 1, engine: Any = None) -> list[Trajectory]:
    params = SamplingParams(max_tokens=300, n=n, seed=5)
    with toy.engine.active():
        found = dict(player.generate(engine or toy.engine, toy.prompts(*answers), params))
    return [one for index in range(len(answers)) for one in found[index] if isinstance(one, Trajectory)]


def check_logprobs(toy: Toy, episode: Trajectory) -> None:
    """Compare what the engine recorded with a forward of the model over every path."""
    prompt = toy.prompts("x")[0]
    for sample in episode.to_samples(prompt, 0, 1.0):
        inputs = {
            name: torch.cat([value, sample.later_inputs[name]]) if name in sample.later_inputs else value
            for name, value in sample.model_inputs.items()
        }
        ids = sample.token_ids[None]
        kinds = (ids == toy.model.config.image_token_id).int()
        positions = sample.position_ids[:, None]
        with torch.inference_mode():
            out = toy.model(input_ids=ids, position_ids=positions, mm_token_type_ids=kinds, **inputs)
        expected = out.logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        mask = sample.loss_mask[1:]
        assert mask.any()
        assert sample.rollout_logprobs is not None
        assert (expected - sample.rollout_logprobs[1:])[mask].abs().max() < 1e-5


def test_a_conversation_over_http_is_one_path_of_exact_tokens(toy: Toy, player: AgentPlayer) -> None:
    episodes = play(toy, player, "talk", n=2)
    assert episodes[0] != episodes[1]
    for episode in episodes:
        assert [turn.role for turn in episode.turns] == ["assistant", "environment"] * 2 + ["assistant"]
        assert (episode.forks, episode.prompt, episode.score) == ((), None, Score(1.0, {"overall": 1.0}))
        assert episode.stop_reason in ("done", "turn_tokens")
        for turn in episode.turns[1::2]:
            tokens = episode.token_ids[turn.begin : turn.end].tolist()
            cut = episode.turns[episode.turns.index(turn) - 1].finish_reason == "length"
            assert tokens.count(toy.end) == 1 + cut  # what the user spells is plain text
        assert episode.messages[1]["content"] == "<|im_end|>0<|im_start|>assistant"
        check_logprobs(toy, episode)


def test_each_sampled_turn_is_trained_in_one_path(toy: Toy, player: AgentPlayer) -> None:
    (episode,) = play(toy, player, "edit")
    assert [len(path.assistant_turns) for path in episode.paths] == [1, 1, 1, 2]
    sub_agent = next(path for path in episode.forks if path.prompt and path.prompt.messages[0]["role"] == "system")
    assert [message["content"] for message in sub_agent.prompt.messages] == ["You search.", "Find it."]
    assert [message["content"] for message in episode.messages][1:2] == ["Really?"]
    sure = episode.forks[0]
    assert sure.prompt is None
    assert [bool(sure.sampled[turn.begin : turn.end].any()) for turn in sure.turns] == [False, False, True]
    first = sure.turns[0]
    assert (sure.token_ids[: first.end] == episode.token_ids[: first.end]).all()
    assert not sure.logprobs[: first.end].any()
    assert len({sample.episode_id for sample in episode.to_samples(toy.prompts("x")[0], 0, 1.0, episode_id=4)}) == 1
    assert episode_metrics([episode])["episode/forks"] == 3
    check_logprobs(toy, episode)


def test_a_retry_gets_the_same_reply_in_flight_or_done(toy: Toy, player: AgentPlayer) -> None:
    (episode,) = play(toy, player, "retry")
    assert episode.score is not None, episode.failure
    assert sum(len(path.assistant_turns) for path in episode.paths) == 3
    assert len(episode.forks) == 1


def test_calls_go_to_the_agent_parsed_and_their_results_come_back(toy: Toy, wide: AgentPlayer) -> None:
    text = 'So:\n<tool_call>\n{"name": "look", "arguments": {"x": 3}}\n</tool_call>'
    (episode,) = play(toy, wide, "call", engine=ScriptedEngine(toy, [text, "It is 7."]))
    assert episode.score is not None, episode.failure
    assert not episode.forks
    assert episode.prompt is not None
    assert "<tools>" in episode.prompt.text
    assert [(call.tool, call.arguments) for call in episode.calls] == [("look", {"x": 3})]
    assert [message["content"] for message in episode.messages] == [text, "7", "It is 7."]


def test_a_turn_that_is_sent_back_with_its_stop_string_is_gone_on_from(toy: Toy, wide: AgentPlayer) -> None:
    (episode,) = play(toy, wide, "stop", engine=ScriptedEngine(toy, ["print(5)</code>", "5"]))
    assert episode.score is not None, episode.failure
    assert not episode.forks
    assert episode.messages[0]["content"] == "print(5)</code>"


def test_limits_refuse_a_request_and_the_episode_is_judged_by_what_it_has(toy: Toy, player: AgentPlayer) -> None:
    greedy, recovers = play(toy, player, "greedy", "recovers")
    for episode in (greedy, recovers):
        assert (episode.stop_reason, len(episode.assistant_turns), episode.failure) == ("max_turns", 6, None)
    assert greedy.score is None
    assert recovers.score == Score(0.5, {"overall": 0.5})
    assert all(len(turn.messages) == 1 and turn.end - turn.begin <= 9 for turn in greedy.assistant_turns)


def test_an_agent_that_dies_or_never_asks_fails_and_one_may_send_its_reward(toy: Toy, player: AgentPlayer) -> None:
    dies, silent, posts = play(toy, player, "dies", "silent", "posts")
    assert dies.failure is not None
    assert "KeyError: 'lost'" in dies.failure.message
    assert (dies.stop_reason, len(dies.assistant_turns)) == ("failed", 1)
    assert silent.failure == Failure("exception", "the agent ended without a request to the policy")
    assert len(silent.token_ids) == 1
    assert posts.score == Score(0.25, {"overall": 0.25})
    player.needs_score = frozenset({""})
    try:
        (unjudged,) = play(toy, player, "greedy")
    finally:
        player.needs_score = frozenset()
    assert unjudged.failure is not None
    assert "gave no reward" in unjudged.failure.message


def test_many_forks_are_told_once(toy: Toy, player: AgentPlayer, caplog: pytest.LogCaptureFixture) -> None:
    player.counts.clear()
    player.warned = False
    with caplog.at_level(logging.WARNING, "r1"):
        play(toy, player, "edit", n=2)
        play(toy, player, "edit")
    (told,) = [record.message for record in caplog.records if "do not go on" in record.message]
    assert told.startswith("6 of 8 requests")


def test_an_engine_that_fails_ends_the_agents(toy: Toy, player: AgentPlayer) -> None:
    engine = ScriptedEngine(toy, ["5"])

    def fail(timeout: float | None = None) -> list[tuple[str, list[Completion]]]:
        raise RuntimeError("the engine has died")

    engine.poll = fail
    with pytest.raises(RuntimeError, match="has died"):
        play(toy, player, "talk", engine=engine)
    (episode,) = play(toy, player, "posts")  # the player goes on with another engine
    assert np.isfinite(episode.logprobs).all()


# --- one episode, without a server ------------------------------------------------------------------------------------

USER = {"role": "user", "content": "How many?"}


class Session:
    """Requests of one agent, which are answered at once with given texts."""

    def __init__(self, toy: Toy, player: AgentPlayer) -> None:
        renderers = Renderers(player.renderer, toy.tokenizer, player.end_token_ids)
        self.toy, self.engine = toy, ScriptedEngine(toy)
        self.episode = AgentEpisode(toy.prompts("1")[0], 0, 0, replace(LIMITS, max_turns=9), 2000, renderers)

    def ask(self, text: str, *messages: dict[str, Any], cut: bool = False, **options: Any) -> ChatReply:
        future: Future[ChatReply] = Future()
        turn = self.episode.ask(ChatRequest(messages, **options), future)
        assert turn is not None
        tokens = len(self.toy.tokenizer(text, add_special_tokens=False)["input_ids"])
        self.episode.take(turn, self.engine.say(text, tokens if cut else 1000))
        return future.result(0)

    @property
    def trained(self) -> list[list[str]]:
        """Texts of the turns that each path trains, the main path last."""
        paths = self.episode.trajectory("done", None, None).paths
        return [[str(turn.messages[0]["content"]) for turn in path.assistant_turns] for path in paths]


@pytest.fixture
def session(toy: Toy, player: AgentPlayer) -> Session:
    return Session(toy, player)


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_words_that_an_agent_puts_into_the_policys_mouth_begin_a_path(session: Session) -> None:
    session.ask("5", USER)
    session.ask("6", USER, said("5"), said("No, 7."), USER)
    session.ask("7", USER, said("5"), {"role": "system", "content": "Be brief."}, USER)
    assert session.trained == [["5"], ["6"], ["7"]]


def test_a_sub_agent_that_is_last_is_not_the_main_path(session: Session) -> None:
    system, other = ({"role": "system", "content": text} for text in ("Answer.", "Judge."))
    session.ask("5", system, USER)
    session.ask("6", system, USER, said("5"), USER)
    session.ask("so far 6", system, {"role": "user", "content": "5, then 6."})
    session.ask("good", other, USER)
    assert session.trained == [["5", "6"], ["good"], ["so far 6"]]


def test_a_turn_that_several_forks_share_is_trained_in_the_first_of_them(session: Session) -> None:
    session.ask("1", USER)
    session.ask("2", USER, said("1"), USER)
    for text in ("3", "4"):
        session.ask(text, USER, said("1"), USER, said("2"), {"role": "user", "content": text})
    session.ask("5", USER, said("1"), {"role": "user", "content": "?"})
    assert session.trained == [["2", "3"], ["4"], ["1", "5"]]


def test_what_was_sampled_behind_a_stop_string_stays_in_the_path(session: Session) -> None:
    reply = session.ask("5</code>.", USER, stop=("</code>",))
    assert (reply.text, reply.finish_reason) == ("5", "stop")
    session.ask("6", USER, said("5</code>"), USER)
    assert session.trained == [["5</code>.", "6"]]


def test_half_a_turn_has_no_call(session: Session) -> None:
    text = '<tool_call>{"name": "look", "arguments": {"x": 3}}</tool_call><tool_call>'
    reply = session.ask(text, USER, tools=({"type": "function", "function": {"name": "look"}},), cut=True)
    assert (reply.text, reply.calls, reply.finish_reason) == (text, (), "length")


def test_a_reward_that_arrives_with_the_end_of_its_agent_counts(
    toy: Toy, player: AgentPlayer, served: tuple[EnvironmentPool, GatewayServer, RequestQueue]
) -> None:
    pool, server, queue = served

    class LateServer:
        def open(self, session_id: str) -> Any:
            self.id = session_id
            return server.open(session_id)

        close_session = server.close_session

    class LatePool:
        start, finish, cancel = pool.start, pool.finish, pool.cancel

        def poll(self, timeout: float | None = None) -> Any:
            if ended := pool.poll(timeout):
                queue.reward(late.id, 0.75)
            return ended

    late, slow = LateServer(), LatePool()
    agents: Any = live_agents(slow, late, queue)  # type: ignore[arg-type]
    (episode,) = play(toy, replace(player, agents=agents), "posts")
    assert episode.score == Score(0.75, {"overall": 0.75})


def test_agents_of_a_group_that_begin_alike_share_a_rendered_prompt(toy: Toy, player: AgentPlayer) -> None:
    renderers = Renderers(player.renderer, toy.tokenizer, player.end_token_ids)
    tool = {"role": "tool", "content": "7", "tool_call_id": "a"}

    def render(name: str, *said: dict[str, Any]) -> Any:
        return renderers.render(player.renderer, ("", "equal keys"), "row", ({**tool, "name": name}, *said))

    first = render("look")
    assert render("look") is first
    assert render("find") is not first  # names are not in keys, but a template may write them
    again = {"role": "assistant", "content": "5"}
    assert render("look", again) is not render("look", again)


# --- replay -----------------------------------------------------------------------------------------------------------


def test_the_record_repeats_agents_to_the_bit_and_runs_none(toy: Toy, player: AgentPlayer, tmp_path: Path) -> None:
    recorder, what = Recorder(tmp_path, 10**9), ("edit", "leaves", "retry", "dies", "silent", "posts", "recovers")
    kinds = player.environments.kinds
    live = replace(player, agents=record_agents(player.agents, kinds, recorder), max_concurrent=4)
    then = play(toy, live, *what)
    recorder.close()
    record = AnswerRecord(tmp_path)
    assert record.has_steps()
    setups = {"": kinds[""].setup}
    again = replace(live, environments=RecordedEnvironments(record.kinds(setups)), agents=replay_agents(record))
    for one, other in zip(then, play(toy, again, *what), strict=True):
        assert len(one.paths) == len(other.paths)
        for path, repeated in zip(one.paths, other.paths, strict=True):
            assert path == repeated  # tokens and log-probs
            assert (path.sampled == repeated.sampled).all()
            assert [turn.messages for turn in path.turns] == [turn.messages for turn in repeated.turns]
        assert (one.score, one.failure, one.stop_reason) == (other.score, other.failure, other.stop_reason)
    assert {one.stop_reason for one in then} >= {"failed", "max_turns"}
    assert compare_answers(tmp_path, tmp_path) == []

    talkative = replace(again, limits=replace(again.limits, max_turn_tokens=12))
    with pytest.raises(DataError, match=r"turn \d is not the recorded one; `r1 replay --tools again` runs the agents"):
        play(toy, talkative, *what)


class SlowSession:
    """An engine's session in which a turn takes `max_tokens` steps, and has the number of the last one as its token."""

    def __init__(self, *, tells_steps: bool) -> None:
        self.taken, self.tells_steps, self.left = 0, tells_steps, dict[str, int]()

    @property
    def steps(self) -> int | None:
        return self.taken if self.tells_steps else None

    def submit(self, key: str, prompt: Prompt, *, max_tokens: int, stop: tuple[str, ...]) -> None:
        self.left[key] = max_tokens

    def cancel(self, key: str) -> None:
        self.left.pop(key, None)

    def poll(self, timeout: float | None) -> list[tuple[str, list[Completion]]]:
        self.taken += 1
        self.left = {key: left - 1 for key, left in self.left.items()}
        done = [key for key, left in self.left.items() if not left]
        self.left = {key: left for key, left in self.left.items() if left}
        return [(key, [sampled(self.taken)]) for key in done]


def sampled(token: int) -> Completion:
    return Completion([token], [-0.5], "stop", 7)


def test_a_recorded_event_comes_at_its_step_and_not_before_its_episode_begins(toy: Toy) -> None:
    session: Any = SlowSession(tells_steps=True)
    rows = ("a/0", 2, 0.5), ("a/0", 3, None), ("b/0", 3, 1.5)
    answers = [RecordedAnswer(key, 0, digest_turn(sampled(3)), steps, answer) for key, steps, answer in rows]
    agents = RecordedAgents(answers, session, EngineUse())
    agents.start("a/0", {}, ())
    agents.submit(replace(toy.prompts("x")[0], id="a/0/0"), max_tokens=3, stop=())
    assert [(session.taken, type(event)) for _ in range(4) for event in agents.poll()] == [(2, Rewarded), (3, Sampled)]
    with pytest.raises(DataError, match="episode a/0: the record has no further request of its agent"):
        list(agents.poll())
    agents.start("b/0", {}, ())
    assert [*agents.poll()] == [Rewarded("b/0", 1.5)]


def test_a_turn_that_was_abandoned_in_the_run_is_not_taken_for_a_later_one(toy: Toy) -> None:
    session: Any = SlowSession(tells_steps=False)
    end = Failure("exception", "it left")
    rows = ("b/0", digest_turn(sampled(3)), None), ("a/0", "", end), ("a/0", digest_turn(sampled(5)), None)
    answers = [RecordedAnswer(key, 0, digest, None, answer) for key, digest, answer in rows]
    agents = RecordedAgents(answers, session, EngineUse())
    prompt, found = toy.prompts("x")[0], list[object]()
    for key, tokens in (("a/0", 1), ("b/0", 3)):
        agents.start(key, {}, ())
        agents.submit(replace(prompt, id=f"{key}/0"), max_tokens=tokens, stop=())
    for _ in range(6):
        for event in agents.poll() if len(found) < 3 else ():
            found.append(event.answer if isinstance(event, Ended) else event.request)  # type: ignore[union-attr]
            if isinstance(event, Ended):
                agents.cancel("a/0/0")
                agents.submit(replace(prompt, id="a/0/0"), max_tokens=2, stop=())
    assert found == ["b/0/0", end, "a/0/0"]


# --- requests that enter the engine together --------------------------------------------------------------------------


def waiting_agents(toy: Toy, *keys: str) -> tuple[LiveAgents, RequestQueue, list[str]]:
    """Return agents that have begun and not asked, their queue, and the ids of their sessions."""
    queue, ids, session = RequestQueue(), list[str](), SlowSession(tells_steps=True)

    class Server:
        def open(self, id_: str) -> SessionAddress:
            ids.append(id_)
            return SessionAddress(f"http://{id_}", "key")

    pool: Any = type("Pool", (), {"start": lambda *args: None, "poll": lambda *args: []})()
    parts: Any = (pool, Server(), queue, session)
    agents = LiveAgents(*parts, EngineUse())
    for key in keys:
        agents.start(key, {}, ())
    return agents, queue, ids


def submit_requests(toy: Toy, agents: LiveAgents, events: Iterator[Any]) -> list[str]:
    found = []
    for event in events:
        if not isinstance(event, Sampled):
            found.append(event.key)
            agents.submit(replace(toy.prompts("x")[0], id=f"{event.key}/0"), max_tokens=9, stop=())
    return found


def test_requests_that_follow_within_a_step_enter_with_the_first(toy: Toy) -> None:
    agents, queue, ids = waiting_agents(toy, "a", "b", "c")
    agents._step_seconds = 60.0
    request = ChatRequest(({"role": "user", "content": "Hello."},))
    queue.answer(ids[0], request)
    later = [threading.Timer(0.05 * place, queue.answer, (ids[place], request)) for place in (1, 2)]
    for timer in later:
        timer.start()
    assert submit_requests(toy, agents, agents.poll()) == ["a", "b", "c"]  # then there is nobody to wait for
    assert agents.session.steps == 1


def test_after_a_wait_in_vain_the_next_requests_enter_at_once(toy: Toy) -> None:
    agents, queue, ids = waiting_agents(toy, *map(str, range(SKIPPED + 2)))
    agents._step_seconds = 1e-4
    for place in range(SKIPPED + 1):
        queue.answer(ids[place], ChatRequest(({"role": "user", "content": "Hello."},)))
        assert submit_requests(toy, agents, agents.poll()) == [str(place)]
        agents._step_seconds = 1e9  # the next wait would last for ever
    assert agents._skips == 0
