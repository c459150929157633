"""Suites: their files, the sources that they become, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.json
import pyarrow.parquet as pq
import pytest
import yaml

from r1_cli.build.prompts import sampling_of
from r1_cli.build.rows import OpenSource, open_sources
from r1_cli.build.sampler import build_sampling
from r1_cli.build.suites import apply_suites
from r1_cli.config import ConfigError, RunConfig
from r1_cli.config.data import DataConfig
from r1_cli.config.section import with_value
from r1_cli.config.sources import source_problems, validation_sources
from r1_cli.config.suites import FOLDER, load_suite, suite_names
from r1_data import sources
from r1_data.types import DataError, Example
from r1_rewards.verifiers import find_verifier

ROWS = Path(__file__).parent / "suite_rows"  # invented, with the columns of the published rows
WHOLE = Path(__file__).parents[4] / "shared/data/gsm8k/test.jsonl"
NEXT = "```python\nprint(int(input()) + {})\n```"
TAGS = "<think>Hm.</think> <answer>{}</answer>"
RIGHT_AND_WRONG = {  # responses to the first row
    "aime24": (r"\boxed{204}", r"\boxed{205}"),
    "aime25": (r"\boxed{21}", r"\boxed{25}"),
    "aime26": ("ANSWER: 21", "ANSWER: 22"),
    "amc23": (r"\boxed{27}", r"\boxed{12}"),
    "chartqa": ("ANSWER: 14.5", "ANSWER: 15"),
    "geometry3k": (r"<think>Halve it.</think> \boxed{3}", r"<think>3</think> \boxed{6}"),
    "gpqa_diamond": ("Answer: the neutron", "Answer: the proton"),
    "gsm8k": (r"4 * 6 - 5 is \boxed{19}", r"\boxed{20}"),
    "ifeval": ("Blue and no other.", "Blue, and no other."),
    "livecodebench": (NEXT.format(1), NEXT.format(2)),
    "math500": (r"so \boxed{0.5}", r"so \boxed{\frac{1}{8}}"),
    "mathverse": ("ANSWER: B", "ANSWER: A"),
    "mathvision": ("ANSWER: D", "ANSWER: E"),
    "mathvista": ("The answer is B", "The answer is A"),
    "minerva": (r"\boxed{10}", r"\boxed{100}"),
    "mmlu_pro": ("The answer is (C).", "The answer is (D)."),
    "mmmu": ("ANSWER: B", "ANSWER: A"),
    "mmmu_pro": ("Answer: J", "Answer: I"),
    "mmmu_pro_vision": ("Answer: C", "Answer: D"),
    "olympiadbench": (r"So the final answer is \boxed{-3, 3}.", r"So the final answer is \boxed{3}."),
    "rlpr_aime24": (TAGS.format("104"), TAGS.format("103")),
    "rlpr_gpqa_diamond": (TAGS.format("A"), TAGS.format("B")),
    "rlpr_math500": (TAGS.format("0.5"), TAGS.format("2")),
    "rlpr_minerva": (TAGS.format("10"), TAGS.format("100")),
    "rlpr_mmlu_pro": (TAGS.format("B"), TAGS.format("A")),
    "rlpr_theoremqa": (TAGS.format("9.2"), TAGS.format("9.9")),
    "rlpr_webinstruct": (TAGS.format("Paris"), TAGS.format("Rome")),
}
Config = Callable[..., RunConfig]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return with_value(RunConfig(), "data.cache_dir", str(tmp_path / "cache"))


def own_copy(name: str, folder: Path, **changes: Any) -> Path:
    """Write a suite's file without the number and digest of its published rows, and with changes of `rows`."""
    tree = yaml.safe_load((FOLDER / f"{name}.yaml").read_text("utf-8"))
    tree["rows"] |= {"count": None, "digest": None, **changes.pop("rows", {})}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**tree, **changes}, allow_unicode=True, sort_keys=False), encoding="utf-8")
    return path


def opened(config: RunConfig, word: str, prompt: str | None = None, root: Path = ROWS) -> OpenSource:
    return open_sources(validation_sources(apply_suites(config, [word], prompt, root).data))[0]


def read(source: OpenSource, index: int = 0) -> Example:
    return source.reader(*source.rows[index])


def text_of(example: Example) -> str:
    content = example.messages[-1]["content"]
    return content if isinstance(content, str) else "".join(item.get("text", "<image>") for item in content)


def grade(name: str, example: Example, response: str) -> float:
    suite, verifier = load_suite(name), find_verifier(load_suite(name).grader)
    columns = {key: example.metadata[key] for key in getattr(verifier, "TAKES", ()) if key in example.metadata}
    return float(verifier.score(response, example.ground_truth, **columns, **suite.grader_options).value)


def test_every_suite_has_rows_to_try_and_answers_to_grade() -> None:
    assert suite_names() == sorted(RIGHT_AND_WRONG) == sorted(path.stem for path in ROWS.glob("*.jsonl"))


@pytest.mark.parametrize("name", RIGHT_AND_WRONG)
def test_a_suite_opens_renders_every_prompt_and_grades_a_right_and_a_wrong_answer(
    name: str, config: RunConfig, tmp_path: Path
) -> None:
    path = own_copy(name, tmp_path)
    for prompt in load_suite(name).prompts:
        source = opened(config, str(path), prompt)
        assert source.source.name == f"{name}/{prompt}"
        for index in range(len(source.rows)):
            assert len(text_of(read(source, index))) > 10
    right, wrong = RIGHT_AND_WRONG[name]
    example = read(source)
    assert (grade(name, example, right), grade(name, example, wrong)) == (1.0, 0.0)


def test_the_prompt_that_is_named_is_rendered(config: RunConfig, tmp_path: Path) -> None:
    path = own_copy("gsm8k", tmp_path, prompts={
        "first": {"text": "One. {{ content }}", "source": "here"},
        "second": {"text": "{{ content }} Two.", "source": "here", "system": "Be short."},
    })  # fmt: skip
    assert text_of(read(opened(config, str(path)))).startswith("One. A shelf")
    for source in (opened(config, str(path), "second"), opened(config, f"{path}/second")):
        example = read(source)
        assert text_of(example).endswith("How many are left? Two.")
        assert example.messages[0] == {"role": "system", "content": "Be short."}


def test_a_suite_sets_how_it_samples_unless_the_configuration_does(config: RunConfig, tmp_path: Path) -> None:
    path = str(own_copy("math500", tmp_path, sample={"n": 3, "temperature": 0.5, "max_tokens": 99}))
    applied = apply_suites(config, [path], None, ROWS)
    assert sampled(applied) == [(3, 0.5, 99)]
    assert applied.data.max_response_length == 99
    assert (applied.data.filter_overlong_prompts, applied.data.bad_rows) == (False, "refuse")
    own = RunConfig.model_validate({
        "data": {"max_response_length": 7, "cache_dir": config.data.cache_dir},
        "worker": {"rollout": {"val_override_config": {"n": 2, "temperature": 0.0}}},
    })  # fmt: skip
    applied = apply_suites(own, [path], None, ROWS)
    assert sampled(applied) == [(2, 0.0, 7)]
    assert applied.data.max_response_length == 7


def sampled(config: RunConfig) -> list[tuple[int, float, int]]:
    """Return how each source is sampled."""
    found = [sampling_of(source, build_sampling(config)[1]) for source in validation_sources(config.data)]
    return [(one.n, one.temperature, one.max_tokens) for one in found]


def test_suites_of_one_command_are_sampled_each_in_its_own_way(config: RunConfig, tmp_path: Path) -> None:
    greedy = own_copy("gsm8k", tmp_path, sample={"temperature": 0.0, "max_tokens": 50})
    applied = apply_suites(config, [str(own_copy("math500", tmp_path)), str(greedy)], None, ROWS)
    assert sampled(applied) == [(4, 0.6, 32768), (1, 0.0, 50)]
    own = with_value(config, "worker.rollout.val_override_config.temperature", 0.3)
    assert [one[1] for one in sampled(apply_suites(own, [str(greedy)], None, ROWS))] == [0.3]


def test_what_is_of_validation_is_refused_in_training_and_lengths_beyond_the_limit(config: RunConfig) -> None:
    def problems(**sources: Any) -> list[tuple[str, str]]:
        return [*source_problems(DataConfig.model_validate({"max_response_length": 9, **sources}))]

    one = {"files": "a.jsonl"}
    assert problems(sources=[{**one, "top_p": 0.5}]) == [
        ("data.sources", "a sets top_p, which is of validation: set it in data.val_sources")
    ]
    assert problems(sources=[{**one, "groups": ["level"]}])[0][1].startswith("a sets groups")
    assert problems(val_sources=[{**one, "max_tokens": 9, "top_p": 0.5, "groups": ["level"]}]) == []
    assert (
        "must be at most data.max_response_length, which is 9"
        in problems(val_sources=[{**one, "max_tokens": 10}])[0][1]
    )


def test_other_rows_missing_rows_and_changed_columns_are_one_sentence(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gsm8k.jsonl holds 1 rows, the suite has 1319: get the published rows"):
        apply_suites(config, ["gsm8k"], None, ROWS)
    with pytest.raises(ConfigError, match=r"math500.jsonl \(or .*\): put its rows there"):
        apply_suites(config, ["math500"], None, tmp_path)
    right = own_copy("gsm8k", tmp_path, rows={"digest": "blake2b:00"})
    with pytest.raises(ConfigError, match=r"other ones: their digest is blake2b:\w{32}, the suite's have blake2b:00;"):
        apply_suites(config, [str(right)], None, ROWS)
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "1+1?", "solution": "#### 2"}\n')
    with pytest.raises(ConfigError, match=r"no column 'answer'; .*; the suite reads the columns question, answer"):
        apply_suites(config, ["gsm8k"], None, tmp_path)


@pytest.mark.parametrize(
    ("name", "copied"),
    [
        ("gsm8k", "main/test.jsonl"),
        ("gsm8k", "test.jsonl"),
        ("gpqa_diamond", "gpqa_diamond.jsonl"),
        ("mmmu_pro_vision", "data/vision/test.jsonl"),
        ("rlpr_math500", "Math-500_Avg2.parquet"),
    ],
)
def test_of_a_folder_of_the_hub_a_suite_reads_its_own_part_only(
    name: str, copied: str, config: RunConfig, tmp_path: Path
) -> None:
    suite, rows = own_copy(name, tmp_path), pyarrow.json.read_json(ROWS / f"{name}.jsonl")
    others = ["socratic/test.jsonl", "gpqa_main.jsonl", "AIME2024_Avg32.parquet"]
    for path in [copied, *(others if copied != "test.jsonl" else [])]:
        file = tmp_path / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".parquet":
            pq.write_table(rows, file)
        else:
            shutil.copyfile(ROWS / f"{name}.jsonl", file)
    assert len(opened(config, str(suite), root=tmp_path).rows) == rows.num_rows


def test_a_part_that_a_folder_lacks_is_named(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "gsm8k/socratic").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no .*gsm8k/main: the suite reads this part of openai/gsm8k only"):
        apply_suites(config, ["gsm8k"], None, tmp_path)


def test_a_digest_is_of_the_columns_that_the_suite_reads(config: RunConfig, tmp_path: Path) -> None:
    """Order of keys, spaces and further columns do not count; the order of rows and each value do."""
    rows = [{"question": "1+1?", "answer": "#### 2"}, {"question": "2+2?", "answer": "#### 4"}]
    digests = {}
    for what, written in {
        "plain": rows,
        "further": [dict(reversed([*row.items(), ("id", 7)])) for row in rows],
        "swapped": rows[::-1],
        "edited": [rows[0], {**rows[1], "answer": "#### 5"}],
    }.items():
        (tmp_path / "gsm8k.jsonl").write_text("\n".join(json.dumps(row) for row in written))
        path = own_copy("gsm8k", tmp_path, rows={"digest": "none"})
        with pytest.raises(ConfigError) as error:
            apply_suites(config, [str(path)], None, tmp_path)
        digests[what] = str(error.value).partition("digest is ")[2].partition(",")[0]
    assert digests["plain"] == digests["further"]
    assert len(set(digests.values())) == 3


@pytest.mark.parametrize(("error", "gated", "remedy"), [
    ("it is a gated dataset", True, "openai/gsm8k is gated: accept its terms on the hub and set HF_TOKEN"),
    ("no connection", False, r"run `hf download openai/gsm8k --repo-type dataset .*`, and then use --data-root DIR"),
])  # fmt: skip
def test_a_hub_that_gives_no_rows_is_one_sentence_with_the_way_out(
    error: str, gated: bool, remedy: str, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def open_hub(*words: str) -> None:
        asked.append(words)
        raise DataError(error)

    monkeypatch.setattr(sources, "open_hub", open_hub)
    path = own_copy("gsm8k", tmp_path, rows={"gated": gated})
    with pytest.raises(ConfigError, match=f"{error}; .*{remedy}"):
        apply_suites(config, [str(path)], None, None)
    assert asked == [("openai/gsm8k", "main", "test", "cc7b047b6e5bb11b4f1af84efc572db110a51b3c")]


@pytest.mark.parametrize(("change", "message"), [
    ({"promts": {}}, "promts: there is no such key; did you mean 'prompts'"),
    ({"sample": {"temprature": 1}}, "sample.temprature: there is no such key; did you mean 'temperature'"),
    ({"prompts": {"a": {"txt": "x", "source": "y"}}}, "prompts.a.txt: there is no such key; did you mean 'text'"),
    ({"grader": "maths"}, "grader: .*did you mean 'math'"),
    ({"grader_options": {"tolerance": 1}}, "grader_options: .*takes no 'tolerance'"),
    ({"published": [{"model": "m", "value": 0.5, "prompt": "q", "source": "s"}]}, "m names the prompt 'q'"),
    ({"published": [{"model": "m", "value": 50.0, "prompt": "boxed", "source": "s"}]}, "published.0.value: .*less"),
])  # fmt: skip
def test_a_wrong_suite_file_is_refused_with_the_nearest_name(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_suite(str(own_copy("gsm8k", tmp_path, **change)))


@pytest.mark.parametrize(("words", "message"), [
    (["gsm8"], "no such suite; did you mean 'gsm8k'"),
    (["./mine.yaml"], "no such file"),
    (["gsm8k/boxd"], "has no prompt 'boxd'; did you mean 'boxed'"),
    (["gsm8k:hard"], "has no subset 'hard'"),
])  # fmt: skip
def test_a_wrong_name_is_refused_with_the_nearest_one(words: list[str], message: str, config: RunConfig) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_suites(config, words, None, ROWS)


def test_the_same_rows_and_prompt_are_refused_a_second_time_and_others_are_not(
    config: RunConfig, tmp_path: Path
) -> None:
    path = str(own_copy("mathverse", tmp_path))
    words = [f"{path}:vision_only/cot", f"{path}:text_lite/cot", f"{path}/direct", path]
    found = validation_sources(apply_suites(config, words, None, ROWS).data)
    names = ["mathverse:vision_only/cot", "mathverse:text_lite/cot", "mathverse/direct", "mathverse/cot"]
    assert [one.name for one in found] == names
    with pytest.raises(ConfigError, match="names mathverse/cot a second time"):
        apply_suites(config, [path, f"{path}/cot"], None, ROWS)


def test_shuffled_choices_depend_on_the_row_alone_and_take_the_right_letter_along(
    config: RunConfig, tmp_path: Path
) -> None:
    row = json.loads((ROWS / "gpqa_diamond.jsonl").read_text())
    rows = [{**row, "Question": f"{number}. {row['Question']}"} for number in range(24)]
    orders = []
    for written in (rows, rows[::-1]):
        (tmp_path / "gpqa_diamond.jsonl").write_text("\n".join(map(json.dumps, written)))
        source = opened(config, str(own_copy("gpqa_diamond", tmp_path)), root=tmp_path)
        examples = [read(source, index) for index in range(24)]
        orders.append({text_of(one).partition("\n\n")[2]: one.ground_truth for one in examples})
        for one in examples:
            assert f"\n{one.ground_truth}) the neutron" in text_of(one)
            assert one.metadata["choices"]["ABCD".index(one.ground_truth)] == "the neutron"
    assert orders[0] == orders[1]
    assert set(orders[0].values()) == set("ABCD")


@pytest.mark.parametrize(
    "version", ["text_dominant", "text_lite", "vision_intensive", "vision_dominant", "vision_only"]
)
def test_mathverse_has_five_versions(version: str, config: RunConfig, tmp_path: Path) -> None:
    source = opened(config, f"{own_copy('mathverse', tmp_path)}:{version}/cot")
    assert source.source.name == f"mathverse:{version}/cot"
    found = [read(source, index).metadata["problem_version"] for index in range(len(source.rows))]
    assert [name.lower().replace(" ", "_") for name in found] == [version]


def test_pictures_stand_where_the_row_places_them(config: RunConfig, tmp_path: Path) -> None:
    """The first of MMMU's rows shows its second picture first, and both again as choices."""
    source = opened(config, str(own_copy("mmmu", tmp_path)))
    example = read(source)
    assert [Path(str(path)).name for path in example.media] == ["b.png", "a.png", "b.png", "a.png"]
    assert "Compare <image> with <image>. Which is older?\n\nA) <image>\nB) <image>" in text_of(example)
    without = read(opened(config, str(own_copy("mathvista", tmp_path))))
    assert text_of(without).startswith("<image>Hint:")


def test_pictures_in_the_rows_are_stored_by_their_content(config: RunConfig, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    row = json.loads((ROWS / "chartqa.jsonl").read_text())
    rows = [{**row, "image": {"bytes": content, "path": None}} for content in (b"one", b"two", b"one")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chartqa.parquet")
    source = opened(config, str(own_copy("chartqa", tmp_path)), root=tmp_path)
    paths = [Path(str(read(source, index).media[0])) for index in range(3)]
    assert [path.read_bytes() for path in paths] == [b"one", b"two", b"one"]
    assert paths[0] == paths[2]


def test_packed_tests_of_programs_are_read_without_unpickling(config: RunConfig, tmp_path: Path) -> None:
    source = opened(config, str(own_copy("livecodebench", tmp_path)))
    assert [test["input"] for test in json.loads(read(source).ground_truth)] == ["1\n", "5\n"]
    called = read(source, 1)
    assert "You will use the following starter code" in text_of(called)
    tests = json.loads(called.ground_truth)
    assert (tests["fn_name"], len(tests["tests"])) == ("next", 2)
    solution = "```python\nclass Solution:\n    def next(self, n):\n        return n + {}\n```"
    assert [grade("livecodebench", called, solution.format(step)) for step in (1, 2)] == [1.0, 0.0]


def test_the_versions_of_mathverse_are_its_subsets() -> None:
    words = ("text_dominant", "text_lite", "vision_intensive", "vision_dominant", "vision_only")
    assert tuple(load_suite("mathverse").subsets) == words


def test_published_figures_name_their_page_and_digests_stand_with_a_number() -> None:
    for name in suite_names():
        suite = load_suite(name)
        assert all(figure.source.startswith("https://") for figure in suite.published)
        assert suite.rows.digest is None or suite.rows.count


@pytest.mark.skipif(not WHOLE.exists(), reason="needs the published test rows of GSM8K")
def test_the_published_rows_of_gsm8k_have_the_digest_of_the_suite(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").symlink_to(WHOLE)
    assert len(opened(config, "gsm8k", root=tmp_path).rows) == 1319


def test_the_suite_of_the_documentation_works(config: RunConfig, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/evaluation.md").read_text("utf-8")
    (tmp_path / "mine.yaml").write_text(page.partition('title="mine.yaml"\n')[2].partition("```")[0])
    rows = [{"question": f"{level}?", "options": ["no", "yes"], "answer": 1, "level": level} for level in (1, 4)]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = opened(config, f"{tmp_path / 'mine.yaml'}:hard", root=tmp_path)
    assert len(source.rows) == 1
    example = read(source)
    assert f"{example.ground_truth}) yes" in text_of(example)
