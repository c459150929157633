"""The terminal of `r1 chat`: questions and commands in, answers with folded thoughts out."""

import re
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from r1_cli.config.files import where_or_near
from r1_cli.jobs.chat import Chat, ThoughtSplitter
from r1_cli.runs.track.view import visible
from r1_data.types import DataError, MediaError
from r1_rollout.errors import PromptError

HELP = """/image PATH…   show pictures with the next question, at <image> or before it
/thoughts      show the thoughts of the last answer
/prompt        show what the model was given for the last answer
/clear         begin another conversation
/help          show this
/exit          end the chat, as Ctrl-D does; Ctrl-C ends an answer
A line that ends in \\ goes on in the next one."""
COMMAND = re.compile(r"/[a-z]+\Z")
ADDRESS = ("http://", "https://")


class Terminal:
    """Reads questions and writes answers. `write` writes text, `note` a line about it."""

    def __init__(
        self,
        chat: Chat,
        *,
        write: Callable[[str], None],
        note: Callable[[str], None],
        show_thoughts: bool = False,
        live: bool = False,
    ) -> None:
        """`live`: show while thoughts grow how many words they have."""
        self.chat, self._write, self._note, self._live = chat, write, note, live
        self._show_thoughts = show_thoughts
        self._thoughts, self._told = "", False  # of the last answer, and whether they were said to be folded
        self._pictures: list[str] = []  # for the next question

    def talk(self, read: Callable[[str], str]) -> None:
        """Answer until `read`, which gets a prompt and returns a line, raises EOFError."""
        while True:
            try:
                line = _read_lines(read)
            except KeyboardInterrupt:
                self._note("\nCtrl-D or /exit ends the chat")
                continue
            except EOFError:
                return
            word, _, rest = line.rstrip().partition(" ")
            if word == "/exit":
                return
            try:
                if COMMAND.fullmatch(word):
                    self._command(word, rest)
                elif line.strip():
                    self.answer(line)
            except (DataError, PromptError) as error:
                self._note(shown(str(error)))

    def show(self, paths: Sequence[str]) -> None:
        """Show pictures with the next question. Raises DataError if one cannot be used."""
        for path in paths:
            if not path.startswith(ADDRESS) and not Path(path).expanduser().is_file():
                raise MediaError(f"{path}: no such picture{where_or_near(path)}")
        self.chat.renderer.check_media([Path(path) for path in paths])
        self._pictures += [path if path.startswith(ADDRESS) else str(Path(path).expanduser()) for path in paths]

    def answer(self, question: str) -> None:
        """Ask, and write the answer while it is sampled. Ctrl-C ends it."""
        pictures, self._pictures, self._thoughts, self._told = self._pictures, [], "", False
        splitter, begun = ThoughtSplitter(), False
        with interruptions() as stop:
            for piece in self.chat.ask(question, pictures, stop.is_set):
                begun = self._show_parts(splitter.feed(piece), begun)
        begun = self._show_parts(splitter.feed("", last=True), begun)
        self._fold(ended=not splitter.thinking)
        self._write("\n" if begun else "")
        answer = self.chat.answers[-1]
        if answer.ended == "length":
            limit = "the answer was cut at the limit of tokens" + (", inside its thoughts" if splitter.thinking else "")
            self._note(f"({limit}: {len(answer.tokens)}; --max-tokens sets it)")
        elif answer.ended == "user":
            self._note(f"(ended by you after {len(answer.tokens)} tokens)")

    def _show_parts(self, parts: Sequence[tuple[bool, str]], begun: bool) -> bool:
        for thought, text in parts:
            if thought:
                self._thoughts += text
                if self._show_thoughts:
                    self._write(shown(text))
                elif self._live:
                    self._write(f"\rthinking: {len(self._thoughts.split())} words")
                continue
            text = text if begun else text.lstrip()
            if text and not begun:
                self._fold(ended=True)
                begun = True
            self._write(shown(text))
        return begun

    def _fold(self, *, ended: bool) -> None:
        """Say, once an answer, that its thoughts are folded."""
        if self._told or not self._thoughts.strip():
            return
        self._told = True
        words = len(self._thoughts.split())
        if self._show_thoughts:
            self._write("\n\n")
        else:
            self._write("\r" if self._live else "")
            kind = "thoughts" if ended else "unfinished thoughts"
            self._note(f"({words} {'word' if words == 1 else 'words'} of {kind}; /thoughts shows them)")

    def _command(self, word: str, rest: str) -> None:
        answers = self.chat.answers
        if word == "/image":
            try:
                paths = shlex.split(rest)
            except ValueError as error:
                raise DataError(f"/image {rest}: {error}; quote a path that has a quote in it") from error
            if not paths:
                raise DataError("/image takes the path of a picture")
            self.show(paths)
            self._note(f"with the next question: {', '.join(self._pictures)}")
        elif word == "/thoughts":
            self._write(shown(self._thoughts.strip() or "the last answer has no thoughts") + "\n")
        elif word == "/prompt":
            self._write(shown(answers[-1].prompt.text if answers else "nothing was asked yet") + "\n")
        elif word == "/clear":
            self.chat.clear()
            self._pictures = []
            self._note("a new conversation")
        elif word == "/help":
            self._note(HELP)
        else:
            raise DataError(f"{word} is no command; /help lists them, and a space before the / sends it as a question")


def _read_lines(read: Callable[[str], str]) -> str:
    line = read("> ")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + read("… ")
    return line


@contextmanager
def interruptions() -> Iterator[threading.Event]:
    """Set the event at the first Ctrl-C in the block; the second raises KeyboardInterrupt."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def shown(text: str) -> str:
    """Return text as a terminal may have it: lines are kept, other control characters are escaped."""
    return "\n".join(visible(line.expandtabs(4)) for line in text.split("\n"))


def read_terminal(prompt: str) -> str:
    """Read a line with the keys and the history of readline, if Python has it."""
    with suppress(ImportError):
        import readline  # noqa: F401
    return input(prompt)


def note(line: str) -> None:
    click.secho(line, err=True, dim=True)
