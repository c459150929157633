"""Write the prompt cases: what transformers itself makes of a row, for each vision-language family.

    cd tests && python -m golden.make_prompts

writes `golden/prompts/FAMILY.json`, one case for each row of `prompt_cases.py`: `tokens` with every placeholder in its
place, where [a, n] stands for n times a; `placeholders` of each medium, in the order of the text; `rotary`, the
position ids [3, T]; and `delta`, by which the first answer token's position is ahead of its place in the text. The chat
template, the processor and `get_rope_index` of the family say all of it; nothing of r1 is asked.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import families
import torch
from golden import prompt_cases
from transformers import AutoModelForImageTextToText

FOLDER = Path(__file__).parent / "prompts"


def make_case(family: str, name: str) -> dict[str, Any]:
    """Let transformers render one case for one family."""
    case, processor = prompt_cases.CASES[name], families.make_processor(family)
    read = [prompt_cases.as_transformers_reads(medium, processor.video_processor) for medium in case["media"]]
    inputs = call(processor, processor.apply_chat_template(case["messages"], add_generation_prompt=True), read)
    grids = {key: value for key, value in inputs.items() if key in ("image_grid_thw", "video_grid_thw")}
    sizes = {
        key: iter((grid.prod(-1) // processor.image_processor.merge_size**2).tolist()) for key, grid in grids.items()
    }
    keys = ["image_grid_thw" if metadata is None else "video_grid_thw" for _, metadata in read]
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(families.make_config(family)).model
    seconds = {key: inputs[key] for key in ("second_per_grid_ts",) if key in inputs}
    rotary, delta = model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], **grids, **seconds)
    return {
        "id": name,
        "placeholders": [next(sizes[key]) for key in keys],
        "tokens": fold(inputs["input_ids"][0].tolist()),
        "rotary": rotary[:, 0].tolist(),
        "delta": int(delta),
    }


def call(processor: Any, text: str, read: Sequence[tuple[Any, Any]]) -> Any:
    """What the family's processor returns for a text with these media."""
    media: dict[str, Any] = {}
    if pictures := [picture for picture, metadata in read if metadata is None]:
        media["images"] = pictures
    if videos := [(frames, metadata) for frames, metadata in read if metadata is not None]:
        media["videos"], metadata = map(list, zip(*videos, strict=True))
        media["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": metadata, "return_metadata": True}
    return processor(text=[text], return_tensors="pt", **media)


def fold(tokens: Sequence[int]) -> list[int | list[int]]:
    """Write runs of three and more as [token, length]."""
    runs = [[token, len(list(run))] for token, run in itertools.groupby(tokens)]
    return [item for run in runs for item in ([run] if run[1] > 2 else [run[0]] * run[1])]


def unfold(tokens: Sequence[int | list[int]]) -> list[int]:
    return [t for item in tokens for t in ([item[0]] * item[1] if isinstance(item, list) else [item])]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for family in families.VISION_FAMILIES:
        cases = [json.dumps(make_case(family, name), separators=(",", ":")) for name in prompt_cases.CASES]
        (FOLDER / f"{family}.json").write_text("[\n" + ",\n".join(cases) + "\n]\n")


if __name__ == "__main__":
    main()
