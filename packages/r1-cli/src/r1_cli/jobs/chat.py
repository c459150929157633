"""`r1 chat`: a conversation with a model, whose prompts are rendered as in training."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from transformers.utils.logging import disable_progress_bar

from r1_cli.build.rendering import build_renderer
from r1_cli.build.sampler import build_sampling
from r1_cli.config import RunConfig
from r1_cli.config.rollout import ServersConfig
from r1_cli.config.sources import training_sources
from r1_cli.hardware import find_hardware
from r1_cli.jobs.inference import open_engine, with_all_weights
from r1_cli.jobs.model_card import PROMPTS
from r1_cli.models.adapters import CONFIG_FILE as ADAPTER
from r1_cli.models.adapters import AdapterError, read_config
from r1_cli.models.families import find_value
from r1_cli.models.files import ModelFiles, open_model
from r1_cli.models.load import ModelError
from r1_data.formats import Columns
from r1_data.messages import RowReader
from r1_data.references import Downloads
from r1_data.render import Renderer
from r1_data.turns.conversation import needs_parts
from r1_data.types import DataError, Example, MediaReference, Message, Prompt
from r1_rollout.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from r1_rollout.embedded.engine import EmbeddedEngine, StreamingSession

THINK, THOUGHT = "<think>", "</think>"
PREFILL = re.compile(rf"{THINK}\s*\Z")  # a generation prompt that begins the thoughts
UNFINISHED = "\ufffd"  # what a tokenizer makes of the first bytes of a character


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What the model was given, and what it answered."""

    prompt: Prompt
    tokens: list[int]  # as sampled, with the end token
    text: str  # with thoughts, without special tokens
    ended: str  # stop: by the model; length: by the limit of tokens; user


class Chat:
    """A conversation: each question is a row of the run, each prompt the whole conversation by the chat template.

    A chat template may show earlier answers without their thoughts.
    """

    def __init__(
        self, session: "StreamingSession", model: ModelFiles, renderer: Renderer, reader: RowReader, limit: int
    ) -> None:
        """`limit`: tokens of an answer at most."""
        self.session, self.model, self.renderer, self.reader, self.limit = session, model, renderer, reader, limit
        self._content_parts = needs_parts(renderer)
        self._reach: int | None = find_value(model.config.get_text_config(), "max_position_embeddings")
        self.answers: list[ChatAnswer] = []
        self.clear()

    def clear(self) -> None:
        """Begin another conversation."""
        self._messages: list[Message] = []
        self._media: tuple[MediaReference, ...] = ()

    def ask(
        self, question: str, pictures: Sequence[str] = (), stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[str]:
        """Yield the answer's text piece by piece, beginning with what the generation prompt begins of it.

        Args:
            pictures: paths or addresses; they stand first, or where the question says <image>.
            stopped: asked after every token; true ends the answer, which remains in the conversation.

        Raises:
            DataError: a picture that cannot be used, or a conversation that the template or the model cannot take.
        """
        messages, media = self._asked(question, pictures)
        key = f"answer {len(self.answers) + 1}"
        prompt = self.renderer.render(Example(key, self._written(messages), media, ""))
        prefill = found[0] if (found := PREFILL.search(prompt.text)) else ""
        stream, ended, tokens = TextStream(self.renderer.tokenizer), "user", list[int]()
        self.session.submit(key, prompt, max_tokens=self._room(prompt))
        text = prefill
        try:
            if prefill:
                yield prefill
            while not stopped():
                if finished := self.session.poll(0):
                    ((_, (completion,)),) = finished
                    tokens, ended = completion.token_ids.tolist(), completion.finish_reason
                else:
                    tokens = self.session.decoded(key)
                if piece := stream.feed(tokens, last=bool(finished)):
                    text += piece
                    yield piece
                if finished:
                    break
        finally:
            self.session.cancel(key)
        if ended == "user" and (piece := stream.feed(tokens, last=True)):
            text += piece
        self.answers.append(ChatAnswer(prompt, tokens, text, ended))
        if tokens:
            self._messages, self._media = [*messages, {"role": "assistant", "content": text}], media

    def _asked(self, question: str, pictures: Sequence[str]) -> tuple[list[Message], tuple[MediaReference, ...]]:
        columns = self.reader.columns
        row: dict[str, object] = {columns.prompt: question, columns.ground_truth: "-"}
        if pictures:
            row[columns.images] = list(pictures)
        reader = replace(self.reader, system_prompt=None) if self._messages else self.reader
        example = reader("question", row)
        return [*self._messages, *example.messages], (*self._media, *example.media)

    def _written(self, messages: Sequence[Message]) -> list[Message]:
        if not self._content_parts:
            return list(messages)
        return [
            {**one, "content": [{"type": "text", "text": one["content"]}]} if isinstance(one["content"], str) else one
            for one in messages
        ]

    def _room(self, prompt: Prompt) -> int:
        """Return how many tokens the answer may have. Raises DataError if the model reaches no further."""
        if self._reach is None:
            return self.limit
        left = self._reach - int(prompt.position_ids.max()) - 1
        if left < 1:
            told = f"the conversation has {len(prompt.token_ids)} tokens, and the model knows {self._reach} positions"
            raise DataError(f"{told}: begin another one")
        return min(self.limit, left)


class TextStream:
    """Decodes an answer as it grows: a piece ends where a character does, and all pieces are the decoded answer.

    Special tokens are left out, but those of thoughts.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        thoughts = set(tokenizer.convert_tokens_to_ids([THINK, THOUGHT])) - {tokenizer.unk_token_id}
        self._hidden = {*tokenizer.all_special_ids} - thoughts
        self._first = self._read = 0  # tokens before the last piece, and with it

    def feed(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Return what `tokens`, all of the answer so far, add to the text. The last call returns unfinished bytes."""
        shown = [token for token in tokens if token not in self._hidden]
        # Decoded together with the tokens of the last piece, without which a leading space may be lost.
        before, now = self._decode(shown[self._first : self._read]), self._decode(shown[self._first :])
        if len(shown) == self._read or (now.endswith(UNFINISHED) and not last):
            return ""
        self._first, self._read = self._read, len(shown)
        return now[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class ThoughtSplitter:
    """Splits streamed text into thoughts and answer at <think> and </think>."""

    def __init__(self) -> None:
        self.thinking = False
        self._held = ""  # the end of the text, which may begin a tag

    def feed(self, piece: str, *, last: bool = False) -> list[tuple[bool, str]]:
        """Return the parts of a piece: whether each is of thoughts, and its text, without tags."""
        found, text = list[tuple[bool, str]](), self._held + piece
        while True:
            before, tag, behind = text.partition(THOUGHT if self.thinking else THINK)
            if not tag:
                break
            found.append((self.thinking, before))
            self.thinking, text = not self.thinking, behind
        tag = THOUGHT if self.thinking else THINK
        held = next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0) if not last else 0
        self._held = text[len(text) - held :]
        return [(thinking, part) for thinking, part in [*found, (self.thinking, text[: len(text) - held])] if part]


@dataclass(frozen=True, slots=True)
class ChatSampling:
    """What the user sets of the sampling; None: as the run validates."""

    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


@contextmanager
def open_chat(config: RunConfig, sampling: ChatSampling, *, plain: bool = False) -> Iterator[tuple[Chat, list[str]]]:
    """Load the configuration's model into the embedded engine; yield a chat, and lines that say what it uses.

    Args:
        plain: leave out the system and format prompt.

    Raises:
        ModelError: the model cannot be read, or the embedded engine cannot sample from it.
        DataError: the model has no chat template, or the format prompt is broken.
    """
    disable_progress_bar()
    config, adapter = on_base(with_all_weights(config))
    rollout = config.worker.rollout.model_copy(update={"name": "embedded", "servers": ServersConfig()})
    config = config.model_copy(update={"worker": config.worker.model_copy(update={"rollout": rollout})})
    with ExitStack() as stack:
        model, hardware = open_model(config), find_hardware()
        renderer, (reader, lines) = build_renderer(config, model), build_reader(config, plain=plain)
        chosen = {name: value for name, value in asdict(sampling).items() if value is not None}
        params: SamplingParams = replace(build_sampling(config)[1], n=1, ignore_eos=False, **chosen)
        generator, weights = open_engine(config, hardware, model, stack, adapter)
        engine = cast("EmbeddedEngine", generator)
        dtype = str(hardware.engine_dtype(rollout.dtype)).removeprefix("torch.")
        lines.insert(0, f"model: {model.config.model_type}, {dtype} on {hardware.kind}")
        greedy = "greedy" if params.temperature == 0 else f"temperature {params.temperature:g}, seed {params.seed}"
        lines.append(f"sampling: {greedy}, at most {params.max_tokens} tokens an answer")
        with engine.active(weights):
            yield Chat(engine.open_session(params), model, renderer, reader, params.max_tokens), lines


def on_base(config: RunConfig) -> tuple[RunConfig, Path | None]:
    """Return the configuration on the base of an adapter that peft wrote, and the adapter's folder; None without one.

    The checkpoints of r1 have the model's configuration beside an adapter, and are read as models. Raises ModelError.
    """
    folder = Path(config.worker.actor.model.model_path or "")
    if not (folder / ADAPTER).is_file() or (folder / "config.json").is_file():
        return config, None
    try:
        base = read_config(folder).get("base_model_name_or_path")
    except AdapterError as error:
        raise ModelError(str(error)) from error
    if not base:
        raise ModelError(f"{folder / ADAPTER} does not name the base model (base_model_name_or_path)")
    model = config.worker.actor.model.model_copy(update={"model_path": base})
    actor = config.worker.actor.model_copy(update={"model": model})
    return config.model_copy(update={"worker": config.worker.model_copy(update={"actor": actor})}), folder


def build_reader(config: RunConfig, *, plain: bool = False) -> tuple[RowReader, list[str]]:
    """Return what makes a question a row of the run's first training source, and lines about its prompts.

    If the configuration has no prompts, those that `r1 merge` wrote beside the model are used.
    """
    data, sources = config.data, training_sources(config.data)
    format_prompt, system_prompt = data.format_prompt, data.system_prompt
    columns = data.prompt_key, data.answer_key, data.image_key, data.video_key
    if sources:
        format_prompt, system_prompt, columns = sources[0].format_prompt, sources[0].system_prompt, sources[0].columns
    if plain:
        format_prompt = system_prompt = None
    try:
        text = Path(format_prompt).read_text(encoding="utf-8") if format_prompt else None
    except OSError as error:
        raise DataError(f"the run's format prompt {format_prompt} cannot be read ({error.strerror})") from error
    beside = Path(config.worker.actor.model.model_path or "") / PROMPTS
    if not (plain or sources or format_prompt or system_prompt) and beside.is_file():
        found = json.loads(beside.read_text(encoding="utf-8"))
        format_prompt, text, system_prompt = str(beside), found.get("format_prompt"), found.get("system_prompt")
    reader = RowReader(
        Columns(*columns),
        explicit_columns=True,
        format_prompt=text,
        format_prompt_name=format_prompt or "",
        system_prompt=system_prompt,
        downloads=Downloads(),
    )
    lines = [f"prompts: format prompt {format_prompt if text else 'none'}, system prompt {system_prompt or 'none'}"]
    if len({(one.format_prompt, one.system_prompt) for one in sources}) > 1:
        lines.append(f"note: the run has several sources; the prompts are those of {sources[0].name}")
    if config.worker.rollout.multi_turn.enable:
        lines.append("note: the run's tools and environments are not used here")
    return reader, lines
