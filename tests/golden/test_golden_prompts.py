"""A row rendered by r1-data is what transformers itself makes of it, token by token and position by position."""

import json
from pathlib import Path
from typing import Any

import families
import pytest
from family_prompts import make_example, make_renderer
from golden import prompt_cases
from golden.make_prompts import make_case, unfold

from r1_cli.train.groups.group import extend_positions
from r1_data.render import Renderer
from r1_data.types import Prompt

FOLDER = Path(__file__).parent / "prompts"
MEDIA_TOKENS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
# Each has a rule of its own somewhere: several media, a film's frames, a time that outruns the text.
MADE_AGAIN = ("pictures around a video", "videos of several rates", "video whose time outruns the text")


def load_cases(family: str) -> dict[str, dict[str, Any]]:
    return {case["id"]: case for case in json.loads((FOLDER / f"{family}.json").read_text(encoding="utf-8"))}


@pytest.fixture(scope="module", params=families.VISION_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def renderer(family: str) -> Renderer:
    return make_renderer(family)


def placeholders(prompt: Prompt, kinds: list[str]) -> list[int]:
    """The features of each medium, in the order of the text."""
    grids = {kind: iter(prompt.model_inputs.get(f"{kind}_grid_thw", ())) for kind in MEDIA_TOKENS}
    return [int(next(grids[kind]).prod()) // 4 for kind in kinds]


@pytest.mark.parametrize("name", prompt_cases.CASES)
def test_a_rendered_row_is_what_transformers_makes_of_it(family: str, renderer: Renderer, name: str) -> None:
    expected, example = load_cases(family)[name], make_example(name)
    prompt = renderer.render(example)
    length = len(prompt.token_ids)
    assert prompt.token_ids == unfold(expected["tokens"])
    assert prompt.position_ids.tolist() == [list(range(length)), *expected["rotary"]]
    assert renderer.prompt_length(example) == length

    kinds = [prompt_cases.MEDIA[medium[1:]]["kind"] for medium in prompt_cases.CASES[name]["media"]]
    kinds = ["image" if kind == "image" else "video" for kind in kinds]
    assert placeholders(prompt, kinds) == expected["placeholders"]
    for kind, token in MEDIA_TOKENS.items():
        counts = [count for count, own in zip(expected["placeholders"], kinds, strict=True) if own == kind]
        assert prompt.token_ids.count(renderer.tokenizer.convert_tokens_to_ids(token)) == sum(counts)

    answer = extend_positions(prompt.position_ids, 2)[:, length:]
    ahead = length + expected["delta"]
    assert answer.tolist() == [[length, length + 1], *[[ahead, ahead + 1]] * 3]


@pytest.mark.parametrize("name", MADE_AGAIN)
def test_the_script_still_writes_what_the_files_hold(family: str, name: str) -> None:
    cases = load_cases(family)
    assert list(cases) == list(prompt_cases.CASES), "run golden.make_prompts"
    assert json.loads(json.dumps(make_case(family, name))) == cases[name]
