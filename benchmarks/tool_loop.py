"""Episodes with tools: r1's player compared with the tool loop of TRL's GRPOTrainer, and how busy the engine is.

uv run --isolated --group trl python benchmarks/tool_loop.py [--rounds 3]
uv run python benchmarks/tool_loop.py --busy

The model is a random Qwen2 of 3 layers whose embeddings and head make every turn the same: `--thought` words, then a
call of the tool `wait`. So both sides parse real calls, and sample equally many turns and tokens without patches:
`--prompts` × `--samples` episodes of three turns and two calls. Timed is the rollout phase alone, from messages to
token ids: TRL's `_generate` with transformers' `generate`, and r1's rendering, loading of weights and
`EpisodePlayer.generate` (scheduling: arrival) with the embedded engine. Both are float32 on a processor, in this
process, in turns. Ratios are of medians: of seconds, of this process's processor seconds, which other work on the
machine changes less, and of `quiet` seconds: processor seconds and those of waiting for tools alone, of which a quiet
machine's seconds are made. r1 waits while its engine has no request, TRL for one call after the other.

`--busy` plays 1, 2 and 4 times as many episodes as the engine has slots, and prints the share of the time that passes
within the engine. The last line is one JSON object.
"""

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tokenizers import AddedToken, ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from r1_cli.train.episodes.episode import EpisodeLimits
from r1_cli.train.episodes.player import EpisodePlayer
from r1_cli.train.groups.trajectory import Trajectory
from r1_data import Renderer
from r1_data.turns import TurnRenderer, probe_template
from r1_data.types import Example
from r1_rewards.environments.pool import EnvironmentPool
from r1_rewards.environments.types import EnvironmentSetup
from r1_rollout.embedded.engine import EmbeddedEngine
from r1_rollout.types import GenerationSession, SamplingParams
from r1_rollout.weights import LocalWeights

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL = ("<tool_call>", '\n{"name": "wait", "arguments": {}}\n', "</tool_call>")
QUESTION = "How long does it take? This is question %d, and you may wait as often as you like."
TURNS, LONGEST = 3, 1024  # turns of an episode, and tokens behind its prompt
TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TOOL = '''\
import time


def wait() -> str:
    """Wait."""
    time.sleep(SECONDS)
    return "You have waited."
'''


class Task:
    """A model that calls the tool in every turn, its tokenizer, and the questions."""

    def __init__(
        self, thought: int, prompts: int, samples: int, template: str = TEMPLATE, *, hidden: int = 128, layers: int = 3
    ) -> None:
        self.tokenizer = make_tokenizer(thought, template)
        self.model = make_model(self.tokenizer, thought, hidden, layers)
        self.samples = samples
        self.questions = [[{"role": "user", "content": QUESTION % number}] for number in range(prompts)]

    @property
    def end(self) -> int:
        return int(self.tokenizer.eos_token_id)


def make_tokenizer(thought: int, template: str) -> PreTrainedTokenizerFast:
    bpe = ByteLevelBPETokenizer()
    texts = [QUESTION % 0, "You have waited.", template]
    bpe.train_from_iterator(texts, vocab_size=500, special_tokens=[PAD, START, END], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token=END, pad_token=PAD, padding_side="left", chat_template=template
    )
    words = [*CALL, *(f" thought{number}." for number in range(thought))]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, thought: int, hidden: int, layers: int) -> Qwen2ForCausalLM:
    """Return a model in which each token of a turn makes the next one certain; a turn follows a newline."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    (newline,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    words = [*(f" thought{number}." for number in range(thought)), *CALL, END]
    turn = [newline, *map(tokenizer.convert_tokens_to_ids, words)]
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.zero_()
        for token, following in pairwise(turn):
            model.lm_head.weight[following] = 0.3 * model.model.embed_tokens.weight[token]
    return model


def write_tool(folder: str, seconds: float) -> Path:
    path = Path(folder, f"wait_{seconds}.py")
    path.write_text(TOOL.replace("SECONDS", str(seconds)))
    return path


# --- r1 ---------------------------------------------------------------------------------------------------------------


class TimedEngine(EmbeddedEngine):
    """Counts the seconds that pass within its session's `poll`."""

    seconds = 0.0

    def open_session(self, params: SamplingParams) -> Any:
        return TimedSession(self, super().open_session(params))


class TimedSession:
    def __init__(self, engine: TimedEngine, session: GenerationSession) -> None:
        self.submit, self.cancel, self.close = session.submit, session.cancel, session.close
        self._engine, self._poll, self._session = engine, session.poll, session

    @property
    def prefilled(self) -> int | None:
        return self._session.prefilled

    def poll(self, timeout: float | None = None) -> Any:
        begin = time.perf_counter()
        try:
            return self._poll(timeout)
        finally:
            self._engine.seconds += time.perf_counter() - begin


class Side:
    """r1's side: an engine, and a player of episodes with the tool."""

    def __init__(self, task: Task, tool: Path, stack: ExitStack, max_sequences: int) -> None:
        renderer = Renderer(task.tokenizer)
        setup = EnvironmentSetup(tools=[f"{tool}:wait"])
        pool = stack.enter_context(EnvironmentPool(setup, workers=8))
        info = probe_template(renderer, end_token_ids=[task.end])
        turns = TurnRenderer(renderer, info, tools=pool.tools, max_parallel_calls=8)
        limits = EpisodeLimits(max_tokens=LONGEST, max_turns=TURNS)
        self.player = EpisodePlayer(pool, turns, task.tokenizer, frozenset({task.end}), limits)
        self.task, self.renderer, self.turns = task, renderer, turns
        model = copy.deepcopy(task.model)
        self.engine = TimedEngine(
            model, end_token_ids={task.end}, max_sequences=max_sequences, tokenizer=task.tokenizer
        )
        self.version = 0

    def roll_out(self) -> tuple[int, int, float]:
        """Play all episodes; return turns and tokens of the policy, and seconds without a request to the engine."""
        self.version += 1
        weights = LocalWeights(self.task.model.state_dict().items(), version=self.version)
        examples = [Example(f"row:{n}", question, (), "") for n, question in enumerate(self.task.questions)]
        prompts = [self.renderer.render(self.turns.tool_prompt(example)) for example in examples]
        params = SamplingParams(max_tokens=LONGEST, n=self.task.samples, seed=self.version)
        with self.engine.active(weights):
            groups = [group for _, group in self.player.generate(self.engine, prompts, params)]
        episodes = [one for group in groups for one in group if isinstance(one, Trajectory)]
        turns = sum(len(one.assistant_turns) for one in episodes)
        waited = self.player.use.metrics()["timing_s/tools"]
        return turns, sum(one.sampled_length for one in episodes), waited


# --- TRL --------------------------------------------------------------------------------------------------------------


def make_trl(task: Task, tool: Path, folder: str, seconds: float) -> Callable[[], tuple[int, int, float]]:
    """Return what runs the rollout phase of TRL's trainer; it returns what `Side.roll_out` returns."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found,unused-ignore]

    spec = spec_from_file_location("wait_tool", tool)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    prompts = [question for question in task.questions for _ in range(task.samples)]
    settings = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False, beta=0.0,
        per_device_train_batch_size=len(prompts), num_generations=task.samples, max_completion_length=LONGEST,
        max_tool_calling_iterations=TURNS - 1, temperature=1.0, top_k=0, top_p=1.0, logging_strategy="no",
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip

    def reward(completions: Any, **others: Any) -> list[float]:
        return [0.0] * len(completions)

    rows = Dataset.from_list([{"prompt": question} for question in task.questions])
    model = copy.deepcopy(task.model)
    trainer = GRPOTrainer(model, reward, settings, rows, processing_class=task.tokenizer, tools=[module.wait])
    trainer._sync_tool_dicts = [{"wait": module.wait}] * len(prompts)
    trainer._async_tool_dicts = [{}] * len(prompts)
    trainer.model.train()

    def roll_out() -> tuple[int, int, float]:
        _, _, masks, completions, *_ = trainer._generate(prompts)
        turns = sum(message["role"] == "assistant" for messages in completions for message in messages)
        return turns, sum(map(sum, masks)), seconds * (turns - len(prompts))

    return roll_out


# --- comparisons ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    seconds: float
    processor_seconds: float  # of this process, without those that run tools
    quiet_seconds: float  # processor seconds, and those of waiting for tools alone
    work: tuple[int, int]  # turns and tokens of the policy


def timed(roll_out: Callable[[], tuple[int, int, float]]) -> Timing:
    begin, begin_processor = time.perf_counter(), time.process_time()
    *work, waited = roll_out()
    seconds, processor = time.perf_counter() - begin, time.process_time() - begin_processor
    return Timing(seconds, processor, processor + waited, (int(work[0]), int(work[1])))


def compare(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    import trl  # type: ignore[import-not-found,unused-ignore]

    template = Path(trl.__file__).with_name("chat_templates") / "qwen2_5.jinja"
    task = Task(options.thought, options.prompts, options.samples, template.read_text())
    found: dict[str, Any] = {"trl": trl.__version__}
    for seconds in options.seconds:
        tool = write_tool(folder, seconds)
        with ExitStack() as stack:
            ours = Side(task, tool, stack, options.prompts * options.samples).roll_out
            found[f"{seconds} s"] = compare_in_turns(ours, make_trl(task, tool, folder, seconds), options.rounds)
        print(f"tool of {seconds} s: {found[f'{seconds} s']}", flush=True)
    return found


def compare_in_turns(
    ours: Callable[[], tuple[int, int, float]], theirs: Callable[[], tuple[int, int, float]], rounds: int
) -> dict[str, object]:
    """Time both sides in turns; the first round warms up. Exits if they did not do the same work."""
    pairs = [(timed(ours), timed(theirs)) for _ in range(rounds + 1)]
    for mine, peer in pairs:
        if mine.work != peer.work:
            raise SystemExit(f"r1 sampled {mine.work} turns and tokens, TRL {peer.work}")
    found: dict[str, object] = dict(zip(("turns", "tokens"), pairs[0][0].work, strict=True))
    for name in ("seconds", "processor_seconds", "quiet_seconds"):
        mine, peer = ([round(getattr(pair[side], name), 3) for pair in pairs[1:]] for side in (0, 1))
        ratio = statistics.median(peer) / statistics.median(mine)
        found[name] = {"r1": mine, "trl": peer, "ratio": round(ratio, 2)}
    return found


def measure_busy(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return the engine's share of the time, by seconds of a call and by episodes per engine slot."""
    found: dict[str, Any] = {}
    for seconds in options.seconds:
        tool = write_tool(folder, seconds)
        for times in (1, 2, 4):
            task = Task(options.thought, times * options.slots // options.samples, options.samples)
            with ExitStack() as stack:
                side = Side(task, tool, stack, options.slots)
                shares, walls = [], []
                for number in range(options.rounds + 1):  # the first warms up
                    side.engine.seconds = 0.0
                    timing = timed(side.roll_out)
                    if number:
                        shares.append(side.engine.seconds / timing.seconds)
                        walls.append(timing.seconds)
            share, wall = statistics.median(shares), statistics.median(walls)
            print(
                f"tool of {seconds} s, {times} x {options.slots} episodes: busy {share:.2f} of {wall:.2f} s", flush=True
            )
            found[f"{seconds} s, {times} x"] = {"busy": share, "seconds": wall}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--busy", action="store_true", help="measure the engine's share instead of comparing with TRL")
    parser.add_argument("--rounds", type=int, default=3, help="that count, behind one to warm up")
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.0, 0.1], help="of a call of the tool")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="episodes to each prompt")
    parser.add_argument("--slots", type=int, default=16, help="sequences that the engine decodes at a time, for --busy")
    parser.add_argument("--thought", type=int, default=40, help="words in a turn before its call")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure_busy(options, folder) if options.busy else compare(options, folder)))


if __name__ == "__main__":
    main()
