"""Score responses with a reward model: a Hugging Face sequence classifier with one output.

The only module of this package that imports torch, and only when a model is opened. Needs `r1-rewards[reward-model]`.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from r1_rewards.services.protocols import printable
from r1_rewards.types import (
    Failure,
    FailurePolicy,
    FailureRule,
    OpenVerifier,
    Outcome,
    RewardInput,
    RewardSpecError,
    Score,
    check_inputs,
    read_score,
)


class RewardModelVerifier(OpenVerifier):
    """A verifier whose value is the model's logit, in this process and on its device.

    The conversation (`RewardInput.messages`, or the prompt as one user message) and the response are rendered with the
    model's chat template. Over `max_length` tokens it fails as `wrong_shape`: truncation would judge its beginning
    only.
    """

    def __init__(
        self,
        path: str,
        *,
        device: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        batch_size: int = 8,
        max_length: int = 4096,
        failure_score: float = 0.0,
        failure_policy: FailurePolicy = "score",
    ) -> None:
        """Load the model `path`, a folder or hub name (ModelScope's if USE_MODELSCOPE_HUB=1), to a GPU or else the CPU.

        Raises RewardSpecError for a model without exactly one output or without a chat template, and if torch or
        transformers is missing. Remote code is not run; weights must be safetensors.
        """
        try:
            import torch
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        except ImportError as error:
            raise RewardSpecError('a reward model needs: pip install "r1-rewards[reward-model]"') from error
        if batch_size < 1 or max_length < 1:
            raise RewardSpecError(f"batch_size and max_length must be at least 1, got {batch_size} and {max_length}")
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        try:
            folder = find_files(path)
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            model = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=getattr(torch, dtype), use_safetensors=True
            )
        except (OSError, ValueError) as error:
            raise RewardSpecError(f"the reward model {path} cannot be loaded: {error}") from error
        if model.config.num_labels != 1:
            raise RewardSpecError(f"{path} has {model.config.num_labels} outputs; a reward model has one")
        if not self._tokenizer.chat_template:
            raise RewardSpecError(f"the tokenizer of {path} has no chat template, so no response can be put to it")
        added = self._tokenizer.added_tokens_decoder.values()
        self._special_tokens = [token.content for token in added if token.special and len(token.content) > 1]
        if model.config.pad_token_id is None:  # the classifier reads the last token that is not padding
            model.config.pad_token_id = self._tokenizer.pad_token_id
        self._padding = model.config.pad_token_id
        self._model = model.to(self._device).eval()
        self._batch_size, self._max_length = 1 if self._padding is None else batch_size, max_length
        self._rule = FailureRule(failure_policy, failure_score)
        self._lock = threading.Lock()  # neither tokenizer nor model is for several threads

    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]:
        check_inputs(inputs)
        with self._lock:
            outcomes = self._outcomes([self._tokenize(item) for item in inputs])
        return [self._rule.apply("reward_model", i, outcome) for i, outcome in enumerate(outcomes)]

    def _outcomes(self, rows: list[list[int]]) -> list[Outcome]:
        outcomes: list[Outcome] = [
            Failure("wrong_shape", f"{len(row)} tokens, max_length is {self._max_length}") for row in rows
        ]
        fitting = sorted((i for i, row in enumerate(rows) if len(row) <= self._max_length), key=lambda i: len(rows[i]))
        for batch in _batches(fitting, self._batch_size):
            for index, logit in zip(batch, self._logits([rows[i] for i in batch]), strict=True):
                outcomes[index] = read_score(logit)
        return outcomes

    def _tokenize(self, item: RewardInput) -> list[int]:
        asked = [dict(message) for message in item.messages] or [{"role": "user", "content": item.prompt}]
        text = self._tokenizer.apply_chat_template(
            [*asked, {"role": "assistant", "content": self._as_plain_text(item.response)}], tokenize=False
        )
        token_ids: list[int] = self._tokenizer(printable(text), add_special_tokens=False)["input_ids"]
        return token_ids

    def _as_plain_text(self, response: str) -> str:
        """Insert a blank into text that would tokenize as a special token, so that a response cannot begin a turn."""
        for token in self._special_tokens:
            response = response.replace(token, f"{token[0]} {token[1:]}")
        return response

    def _logits(self, rows: list[list[int]]) -> list[float]:
        import torch

        longest = max(map(len, rows))
        token_ids = torch.tensor([row + [self._padding] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        with torch.inference_mode():
            output = self._model(input_ids=token_ids.to(self._device), attention_mask=mask.to(self._device))
        logits: list[float] = output.logits[:, 0].float().tolist()
        return logits


def score(response: str, ground_truth: str = "", *, path: str, prompt: str = "") -> Score:
    """Return the reward model's logit for one response; the ground truth is not read.

    Loads the model on every call; use a `RewardModelVerifier` for more than one.
    """
    with RewardModelVerifier(path) as verifier:
        return verifier([RewardInput(response, "", prompt=prompt)])[0]


def _batches(indices: list[int], size: int) -> Iterator[list[int]]:
    yield from (indices[first : first + size] for first in range(0, len(indices), size))


def find_files(path: str) -> str:
    if os.environ.get("USE_MODELSCOPE_HUB", "").lower() not in ("1", "true", "y", "yes") or Path(path).is_dir():
        return path
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise OSError("USE_MODELSCOPE_HUB is set, but modelscope is not installed: pip install modelscope") from error
    try:
        return str(snapshot_download(path))
    except Exception as error:  # its own and the network's
        raise OSError(f"ModelScope does not give {path}: {error}") from error
