"""An example becomes a `Prompt`: one rendering, used by the length filter, the engine and the learner alike."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from r1_data.media import image_size, load_image
from r1_data.types import DataError, Example, Prompt

if TYPE_CHECKING:
    from torch import Tensor

# What the processor returns a value per token for; a forward that is given position ids needs none of it.
_PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class Renderer:
    """Renders examples for one model: a tokenizer for text models, a processor for vision-language models.

    Pictures go through the processor's own resize, once, into `min_pixels` to `max_pixels`. The same rule, applied to
    the size in a picture's header, gives the prompt's length without decoding it.
    """

    def __init__(
        self,
        processor: Any,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        position_ids: "Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None" = None,
    ) -> None:
        """Raises DataError for a processor of an unknown family, a missing chat template, or a pixel range upside down.

        Args:
            processor: a Hugging Face tokenizer, or a processor with an image processor.
            min_pixels, max_pixels: height × width of a resized picture; None: as the processor is configured.
            chat_template: Jinja text that replaces the model's own chat template.
            chat_template_kwargs: further arguments of the template, e.g. `enable_thinking`.
            position_ids: (token ids [L], everything the processor returned for the row, `mm_token_type_ids` [1, L]
                among it) -> int64 [axes, L]; None: one axis that counts tokens.
        """
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self._processor: Any = processor if hasattr(processor, "image_processor") else None
        self._budget = {} if self._processor is None else _pixel_budget(self._processor, min_pixels, max_pixels)
        self._template = chat_template or getattr(processor, "chat_template", None)
        if not (self._template or self.tokenizer.chat_template):
            raise DataError("the model has no chat template; give one (data.override_chat_template)")
        self._template_kwargs = dict(chat_template_kwargs or {})
        self._position_ids = position_ids or _count_tokens

    def prompt_length(self, example: Example) -> int:
        """The number of tokens of `render(example)`, from picture headers alone. Raises DataError as `render` does."""
        _, token_ids = self._tokenize(example)
        return len(token_ids) + sum(count - 1 for count in self._placeholder_counts(example))

    def render(self, example: Example) -> Prompt:
        """Render, tokenize and decode. Raises DataError that names the row: an unreadable picture, a picture for a
        text model, media tokens written out in the text, or placeholders that do not match the features."""
        import torch

        text, engine_token_ids = self._tokenize(example)
        images, inputs = self._process(example, text)
        token_ids = inputs["input_ids"][0].tolist() if inputs else list(engine_token_ids)
        try:
            position_ids = self._position_ids(torch.tensor(token_ids), inputs)
        except (ValueError, RuntimeError, StopIteration) as error:
            raise DataError(f"{example.id}: no position ids for this prompt ({error})") from error
        return Prompt(
            id=example.id,
            text=text,
            token_ids=token_ids,
            engine_token_ids=engine_token_ids,
            position_ids=position_ids.long(),
            answer=example.answer,
            images=images,
            model_inputs={name: value for name, value in inputs.items() if name not in _PER_TOKEN},
            metadata=example.metadata,
        )

    def _tokenize(self, example: Example) -> tuple[str, list[int]]:
        """The rendered chat, and its tokens with one placeholder a picture."""
        from jinja2 import TemplateError

        if example.media and self._processor is None:
            raise DataError(f"{example.id}: the row has pictures, but the model reads text only")
        try:
            text = self.tokenizer.apply_chat_template(
                example.messages,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
                **self._template_kwargs,
            )
        except (TemplateError, TypeError) as error:
            raise DataError(f"{example.id}: the chat template refuses these messages ({error})") from error
        token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not token_ids:
            raise DataError(f"{example.id}: the prompt is empty")
        if self._processor is not None:
            self._check_placeholders(example, token_ids)
        return text, token_ids

    def _check_placeholders(self, example: Example, token_ids: list[int]) -> None:
        found, wanted = token_ids.count(self._processor.image_token_id), len(example.media)
        if found != wanted:
            raise DataError(
                f"{example.id}: {found} picture placeholders in the prompt for {wanted} pictures; the text must not "
                f"spell {self._processor.image_token}, and the chat template must place each picture once"
            )
        video_token_id = getattr(self._processor, "video_token_id", None)
        if video_token_id is not None and video_token_id in token_ids:
            raise DataError(f"{example.id}: the text spells {self._processor.video_token}, which stands for a video")

    def _placeholder_counts(self, example: Example) -> list[int]:
        """Tokens that each picture will take, by the image processor's own rule."""
        if not example.media:
            return []
        image_processor = self._processor.image_processor
        limits = {"min_pixels": self._budget["shortest_edge"], "max_pixels": self._budget["longest_edge"]}
        try:
            sizes = [image_size(reference) for reference in example.media]
            patches = [image_processor.get_number_of_image_patches(*size, limits) for size in sizes]
        except ValueError as error:  # a DataError, or the processor's own: a picture 200 times as wide as high
            raise DataError(f"{example.id}: {error}") from error
        return [count // image_processor.merge_size**2 for count in patches]

    def _process(self, example: Example, text: str) -> "tuple[tuple[Any, ...], dict[str, Tensor]]":
        """Decoded pictures and the processor's output for one row; both empty for text models."""
        if self._processor is None:
            return (), {}
        try:
            images = tuple(load_image(reference) for reference in example.media)
            output = self._processor(
                text=[text],
                images=list(images) or None,
                images_kwargs={"size": self._budget},
                text_kwargs={"add_special_tokens": False},
                return_tensors="pt",
            )
        except ValueError as error:
            raise DataError(f"{example.id}: {error}") from error
        inputs = dict(output)
        if images:
            placeholders = int((inputs["input_ids"] == self._processor.image_token_id).sum())
            features = int(inputs["image_grid_thw"].prod(-1).sum()) // self._processor.image_processor.merge_size**2
            if placeholders != features:
                raise DataError(f"{example.id}: {placeholders} picture placeholders but {features} picture features")
        return images, inputs


def _pixel_budget(processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, int]:
    """The range as image processors of the Qwen-VL families take it: areas, though they are called edges."""
    image_processor = processor.image_processor
    for owner, name in ((processor, "image_token_id"), (image_processor, "get_number_of_image_patches")):
        if not hasattr(owner, name):
            raise DataError(
                f"{type(processor).__name__} cannot be used: it has no {name}; Qwen2-VL, Qwen2.5-VL and Qwen3-VL have"
            )
    low = image_processor.size["shortest_edge"] if min_pixels is None else min_pixels
    high = image_processor.size["longest_edge"] if max_pixels is None else max_pixels
    if not 0 < low <= high:
        raise DataError(f"min_pixels must be above 0 and at most max_pixels, got {low} and {high}")
    return {"shortest_edge": low, "longest_edge": high}


def _count_tokens(token_ids: "Tensor", model_inputs: "Mapping[str, Tensor]") -> "Tensor":
    import torch

    return torch.arange(len(token_ids))[None]
