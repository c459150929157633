"""Configuration section `worker.*.model`: a model and its adapter."""

import json
from collections.abc import Iterator
from os.path import isdir, isfile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from r1_cli.config.files import PASSWORD, ModelPath, has_password, names_folder, where_or_near
from r1_cli.config.problems import KeyProblem
from r1_cli.config.section import Count, Section, Tree, UserPath


class LoraConfig(Section):
    """A low-rank adapter (arXiv 2106.09685)."""

    rank: Annotated[int, Field(ge=0)] = 0  # 0: train all weights
    alpha: Count = 64  # the factors' product is scaled by alpha / rank
    target_modules: str | list[str] = "all-linear"  # ends of modules' names, or a pattern of whole names
    exclude_modules: str | list[str] | None = ".*visual.*"
    path: UserPath | None = None  # an adapter to start from, with its rank, alpha and modules

    @property
    def used(self) -> bool:
        return bool(self.rank or self.path)


class ModelConfig(Section):
    model_path: ModelPath | None = None  # a Hugging Face folder, a hub name, a checkpoint (global_step_N), or a URL
    tokenizer_path: UserPath | None = None  # null: the model's own
    override_config: Tree = Field(default_factory=dict)  # entries of the model's config.json
    enable_gradient_checkpointing: bool = True  # recompute activations in the backward pass: less memory, more time
    enable_activation_offload: bool = False  # offload the inputs of checkpointed layers to host memory
    trust_remote_code: bool = False
    freeze_vision_tower: bool = False  # train the language model only
    quantization: Literal["nf4"] | None = None  # store the base of an adapter in 4 bits, on one device
    freeze: list[str] = Field(default_factory=list)  # patterns of whole names of parameters that are not trained
    lora: LoraConfig = LoraConfig()

    def file_problems(self, key: str) -> Iterator[KeyProblem]:
        for name, path in (("model_path", self.model_path), ("tokenizer_path", self.tokenizer_path)):
            if path and names_folder(path) and not isdir(path):
                yield f"{key}.{name}", f"no such folder{where_or_near(path)}"
            if path and has_password(path):
                yield f"{key}.{name}", PASSWORD

    def position_problems(
        self, key: str, max_response_length: int, max_length: int | None = None
    ) -> Iterator[KeyProblem]:
        """Check that a local model's `config.json` is readable and has positions for a response.

        Args:
            max_length: of whole conversations, which are read instead.
        """
        folder = Path(self.model_path or "")
        if not self.model_path or not isdir(folder):
            return
        try:
            found = self.read_config()
        except FileNotFoundError:
            shards = any(folder.glob("model_world_size_*"))
            hint = f": run r1 merge {folder.parent} first" if shards else ""
            yield f"{key}.model_path", f"the folder has no config.json{hint}"
            return
        except (OSError, ValueError, TypeError) as error:
            yield f"{key}.model_path", f"its config.json cannot be read ({error})"
            return
        text = found.get("text_config") or {}
        positions = found.get("max_position_embeddings", text.get("max_position_embeddings"))
        scaled = _scales_positions(found) or _scales_positions(text)
        if not isinstance(positions, int) or scaled:
            return
        if max_length is not None:
            if max_length > positions:
                yield "data.max_length", f"is more than the model's {positions} positions: set at most {positions}"
        elif max_response_length >= positions:
            yield "data.max_response_length", f"has no room: the model has {positions} positions, the prompt's included"

    def read_config(self) -> Tree:
        """Return a local model's `config.json` with `override_config`. Raises OSError, ValueError or TypeError."""
        text = (Path(self.model_path or "") / "config.json").read_text("utf-8")
        found: Tree = json.loads(text) | self.override_config
        return found

    def has_vision(self) -> bool:
        """Whether it is a local folder of a model with a vision part."""
        file = Path(self.model_path or "") / "config.json"
        return isfile(file) and "vision_config" in json.loads(file.read_text("utf-8"))


def _scales_positions(part: Tree) -> bool:
    rope = part.get("rope_scaling") or part.get("rope_parameters") or {}
    return rope.get("rope_type", rope.get("type", "default")) not in ("default", "mrope")
