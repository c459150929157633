"""The quickstart's model with players of the tests' environments, and an engine that says given texts."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import torch
from episode_toys import png
from transformers import AutoModelForImageTextToText, AutoProcessor

from r1_cli.train.episodes.episode import EpisodeLimits
from r1_cli.train.episodes.player import EpisodePlayer
from r1_cli.train.groups.trajectory import Trajectory
from r1_data.positions import position_ids_of
from r1_data.render import Renderer
from r1_data.turns.probe import probe_template
from r1_data.turns.turn_renderer import TurnRenderer
from r1_data.types import Example, Prompt
from r1_rewards.environments.pool import EnvironmentPool
from r1_rewards.environments.types import EnvironmentSetup
from r1_rollout.embedded.engine import EmbeddedEngine
from r1_rollout.types import Completion, SamplingParams

MODEL = Path(__file__).parents[3] / "examples/quickstart/model"
TOYS = Path(__file__).with_name("episode_toys.py")
PARAMS = SamplingParams(max_tokens=90, n=3, seed=5)
LIMITS = EpisodeLimits(max_tokens=90, max_turns=4, max_turn_tokens=9)


# Drops the thoughts of turns before the last user message, as Qwen3's template does.
FORGETFUL = """\
{%- set last = namespace(user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{%- if loop.index0 < last.user and '</think>' in message.content %}
{{- message.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ message.content }}{% endif %}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


class Toy:
    """The quickstart's model with its renderer, and players of the toys' environments."""

    def __init__(self, template: str | None = None, history: Literal["sampled", "template"] = "sampled") -> None:
        self.history = history
        processor = AutoProcessor.from_pretrained(MODEL)
        self.tokenizer = processor.tokenizer
        self.model = AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32)
        rule = position_ids_of(self.model.config)
        self.renderer = Renderer(
            processor, min_pixels=3136, max_pixels=50176, position_ids=rule, chat_template=template
        )
        self.end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        copy = AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32)
        media = [self.model.config.image_token_id, self.model.config.video_token_id]
        self.engine = EmbeddedEngine(
            copy, end_token_ids={self.end}, banned_token_ids=media, version=7, tokenizer=self.tokenizer, max_sequences=8
        )

    def prompts(self, *answers: str) -> list[Prompt]:
        content = [{"type": "image"}, {"type": "text", "text": "How many shapes are there?"}]
        examples = [
            Example(f"row:{n}", [{"role": "user", "content": content}], (png((n, 40, 40)),), answer)
            for n, answer in enumerate(answers)
        ]
        return [self.renderer.render(example) for example in examples]

    def player(
        self, stack: ExitStack, name: str = "Album", *, rounds: bool = True, **settings: object
    ) -> EpisodePlayer:
        setup = EnvironmentSetup(environment=f"{TOYS}:{name}", environment_kwargs=settings, tool_timeout=20.0)
        pool = stack.enter_context(EnvironmentPool(setup, workers=2))
        turns = TurnRenderer(
            self.renderer, probe_template(self.renderer, end_token_ids=[self.end]), history=self.history
        )
        return EpisodePlayer(pool, turns, self.tokenizer, frozenset({self.end}), LIMITS, rounds=rounds)

    def play(
        self, player: EpisodePlayer, prompts: list[Prompt], params: SamplingParams = PARAMS
    ) -> list[list[Trajectory]]:
        with self.engine.active():
            found = dict(player.generate(self.engine, prompts, params))
        return [[one for one in found[index] if isinstance(one, Trajectory)] for index in range(len(prompts))]


class ScriptedEngine:
    """An engine whose episodes say given texts, turn by turn."""

    def __init__(self, toy: Toy, *episodes: list[str]) -> None:
        self.toy, self.episodes = toy, episodes
        self.asked: list[tuple[str, list[int]]] = []
        self.stops: dict[str, tuple[str, ...]] = {}  # by key of a request
        self.finished: list[tuple[str, list[Completion]]] = []

    def open_session(self, params: SamplingParams) -> "ScriptedEngine":
        return self

    def submit(
        self,
        key: str,
        prompt: Prompt,
        *,
        max_tokens: int,
        n: int = 1,
        stop: tuple[str, ...] = (),
        split: bool = False,
    ) -> None:
        self.asked.append((key, list(prompt.token_ids)))
        self.stops[key] = stop
        turns = [(number, 0) for number in range(n)] if "/" not in key else [tuple(map(int, key.split("/")[1:]))]
        said = [self.say(self.episodes[number][turn], max_tokens) for number, turn in turns]
        self.finished += [(f"{key}/{number}", [one]) for number, one in enumerate(said)] if split else [(key, said)]

    def say(self, text: str, max_tokens: int) -> Completion:
        tokens = [*self.toy.tokenizer(text, add_special_tokens=False)["input_ids"], self.toy.end][:max_tokens]
        return Completion(tokens, [-0.5] * len(tokens), "stop" if tokens[-1] == self.toy.end else "length", 7)

    def poll(self, timeout: float | None = None) -> list[tuple[str, list[Completion]]]:
        found, self.finished = self.finished, []
        return found

    prefilled = None
    steps = None

    def cancel(self, key: str) -> None: ...

    def close(self) -> None: ...


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
