"""The sources of a run: files or sections, what they inherit, and what is refused."""

from pathlib import Path

import pytest

from r1_cli.config import ConfigError, RunConfig, load_config
from r1_cli.config.sources import training_sources, validation_sources
from r1_cli.plan.batches import count, make_plan

BASE = ["worker.actor.model.model_path=owner/model", "worker.reward.reward_function=math"]


def config_of(*words: str) -> RunConfig:
    return load_config([*BASE, *words])[0]


def message_of(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(*words)
    return str(caught.value)


def write(path: Path, rows: int = 10) -> Path:
    path.write_text('{"prompt": "?", "answer": "1"}\n' * rows, encoding="utf-8")
    return path


def test_files_are_sources_that_read_like_all_of_data() -> None:
    words = (
        'data.train_files=["owner/geo@train[:1000]",owner/text]',
        "data.prompt_key=problem",
        "data.val_files=owner/geo",
    )
    first, second = training_sources(config_of(*words).data)
    assert (first.key, first.name, first.files) == ("data.train_files[0]", "geo", ("owner/geo@train[:1000]",))
    assert (second.key, second.name, second.weight) == ("data.train_files[1]", "text", None)
    assert first.columns == ("problem", "answer", "images", "videos")
    assert first.explicit_columns
    assert [source.key for source in validation_sources(config_of(*words).data)] == ["data.val_files"]


def test_sections_say_what_differs_and_inherit_the_rest(tmp_path: Path) -> None:
    template = tmp_path / "math.jinja"
    template.write_text("{{ content }}!")
    file = tmp_path / "run.yaml"
    file.write_text(
        f"""
data:
  format_prompt: {template}
  answer_key: reply
  sources:
    - {{files: owner/geo@train, weight: 3, prompt_key: problem, format_prompt: null}}
    - {{files: [owner/a, owner/b], name: text, weight: 1, row_format: verl, reward_function: gsm8k}}
  val_sources:
    - {{files: owner/AIME_Avg16, n: 4}}
    - {{files: owner/AIME_Avg16@test}}
"""
    )
    data = load_config([str(file), *BASE])[0].data
    geo, text = training_sources(data)
    assert (geo.key, geo.columns[:2], geo.format_prompt) == ("data.sources[0]", ("problem", "reply"), None)
    assert (text.files, text.format_prompt, text.row_format) == (("owner/a", "owner/b"), str(template), "verl")
    assert (geo.reward_function, text.reward_function, text.weight) == (None, "gsm8k", 1)
    first, second = validation_sources(data)
    assert (first.name, first.n, second.name, second.n) == ("AIME_Avg16_0", 4, "AIME_Avg16_1", 16)


def test_lmm_r1s_words_for_a_mixture_work() -> None:
    config, provenance = load_config([*BASE, "data.prompt_data=owner/a,owner/b", "data.prompt_data_probs=0.25,0.75"])
    assert [(s.files, s.weight) for s in training_sources(config.data)] == [(("owner/a",), 0.25), (("owner/b",), 0.75)]
    assert any("data.prompt_data is now data.train_files" in notice for notice in provenance.notices)


def test_each_source_naming_its_reward_needs_no_other() -> None:
    words = ["worker.actor.model.model_path=owner/model", "data.sources=[{files: owner/a, reward_function: gsm8k}]"]
    load_config([*words, "data.val_files=owner/a@test"])  # of the same name, so judged by the same reward
    with pytest.raises(ConfigError, match=r"worker.reward.reward_function: is missing"):
        load_config([*words, "data.val_files=owner/b@test"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("data.sources=[{files: owner/a, weigt: 2}]", "[0].weigt=2 (command line): unknown key; did you mean weight"),
        ("data.sources=[{files: owner/a},{weight: 2}]", "data.sources[1].files={'weight': 2} (command line): is miss"),
        ("data.sources=[{files: owner/a, weight: 0}]", "data.sources[0].weight=0 (command line): input should be"),
        ("data.sources=[{files: owner/a, weight: 1},{files: owner/b}]", "must all have a weight, or none"),
        ("data.sources=[{files: owner/a}] data.train_files=owner/b", "stands in place of data.train_files"),
        ("data.sources=[{files: []}]", "has a source whose files are an empty list"),
        ("data.sources=[{files: owner/a, name: x},{files: owner/b, name: x_1},{files: owner/c, name: x}]", ""),
        ("data.sources=[{files: owner/a, reward_function: mth}]", "[0]: reward 'mth' is neither a built-in"),
        ("data.sources=[{files: owner/a, format_prompt: no.jinja}]", "data.sources: [0]: no such file"),
        ("data.sources=[{files: owner/a, image_dir: nowhere}]", "data.sources: [0]: no such folder"),
        ("data.sources=[{files: ./no.jsonl}]", "data.sources: [0]: './no.jsonl' does not exist"),
        ("data.sources=[{files: owner/a, row_format: veRL}]", "data.sources[0].row_format=veRL"),
        ("data.train_files=[owner/a,owner/b] data.train_probs=[1.0]", "one number for each of the 2 entries"),
        ("data.train_files=[owner/a,owner/b] data.train_probs=[0.5,0.4]", "must add up to 1, not to 0.9"),
        ("data.train_files=[owner/a,owner/b] data.train_probs=half,half", "data.train_probs=half,half"),
        (
            "data.sources=[{files: owner/a, reward_function: math}] "
            "data.val_sources=[{files: owner/a@test, reward_function: gsm8k}]",
            "has a source 'a' with another reward than in training",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_its_entry(words: str, said: str) -> None:
    parts = words.replace(" data.", "\0data.").split("\0")
    if said:
        assert said in message_of(*parts)
    else:
        assert [s.name for s in training_sources(config_of(*parts).data)] == ["x_0", "x_1", "x_2"]


def test_a_weighted_epoch_is_planned_by_its_sources(tmp_path: Path) -> None:
    small, large = write(tmp_path / "small.jsonl", 10), write(tmp_path / "large.jsonl", 100)
    words = [f"data.train_files=[{small},{large}]", "data.rollout_batch_size=10", "worker.actor.global_batch_size=10"]
    words += ["trainer.n_gpus_per_node=1"]
    assert count(config_of(*words)) == ([10, 100], None, 0)
    assert make_plan(config_of(*words), [10, 100]).steps_per_epoch == 11
    words += ["data.train_probs=[0.5,0.5]"]
    assert make_plan(config_of(*words), [10, 100]).steps_per_epoch == 20
    assert make_plan(config_of(*words, "data.stopping_strategy=first_exhausted"), [10, 100]).steps_per_epoch == 2


def test_a_chat_template_is_a_file_or_its_text_and_takes_arguments() -> None:
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    words = [
        "data.train_files=owner/a",
        f"data.chat_template={text}",
        "data.chat_template_kwargs.enable_thinking=false",
    ]
    data = config_of(*words).data
    assert data.override_chat_template == text
    assert data.chat_template_kwargs == {"enable_thinking": False}
    assert "no such file" in message_of("data.train_files=owner/a", "data.chat_template=no.jinja")
