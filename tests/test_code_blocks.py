"""Every code block of the pages runs: here or in a named test; otherwise a reason is given."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest
from code_blocks import Block, blocks_of, run_blocks
from endtoend import QUICKSTART, ROOT
from one_new_file import copy_repository

PAGES = [
    *sorted(ROOT.glob("docs/**/*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(ROOT.glob("examples/**/README.md")),
]
RUN = "run"  # by `code_blocks`; what blocks in docs/ are unless something else is said here
INSTALLS = "not run: installs packages"
TUNING = "tests/test_fine_tuning.py"
SAMPLED = "test_validation_samples_answers_with_an_engine_that_is_opened_on_first_use"
SERVER = "not run: starts a server"
MINUTES = "not run: takes minutes; tests/test_episodes.py trains with an environment"
DOCS, CLI, R1 = "tests/test_docs.py", "packages/r1-cli/tests/test_cli_", "tests/recipes/test_recipes.py"
TOOLS = "tests/recipes/test_tool_recipes.py"
ROLLOUT = "packages/r1-rollout/tests/test_rollout_readme.py"
DATA = "packages/r1-data/tests/test_data_dataset.py::test_the_use_in_the_readme_runs"
TRAINER = f"{ROLLOUT}::test_the_example_of_a_trainer_samples_a_group_and_finds_its_weights_fresh"
PUBLIC = "packages/r1-rewards/tests/test_rewards_public.py::test_a_file_is_scored_line_by_line_with_reasons"
QUICK = "tests/test_quickstart.py::test_"
NODES = "tests/test_clusters.py::test_two_started_nodes_give_one_process_numbers_until_sigterm_and_one_rank_goes_on"
VLLM = "tests/test_vllm_run.py::test_the_commands_of_the_page_have_options_that_vllm_knows"
SERVED = "test_the_page_asks_a_real_server_about_text_and_a_picture"
SHIM = "tests/test_easyr1_shim.py::test_a_command_of_easyr1_starts_r1_with_the_same_words"
POOL = "packages/r1-rollout/tests/test_rollout_vllm_servers.py"
HOUR = "tests/test_first_hour.py::test_a_stranger_reaches_a_model_of_their_own"
ALIKE = "test_a_runs_folder_its_best_checkpoint_an_adapter_and_the_merged_folder_answer_alike"
ADAPTER = (
    "tests/test_adapters.py::test_a_run_of_an_adapter_is_proven_goes_on_to_the_bit_and_is_read_by_the_other_commands"
)
FORMATS = "tests/test_row_formats_page.py::test_every_example_is_in_a_table_and_every_format_has_an_example"
CHAT, PUSH = "tests/test_chat.py", "tests/test_merge_push.py"
PIPED = "test_piped_input_is_one_question_whose_answer_alone_is_printed"
PRIVATE = "test_a_folder_is_uploaded_as_private_with_its_card_and_the_token_is_written_nowhere"
# Who runs the blocks of a page and language, in their order.
BY: Mapping[str, Mapping[str, list[str]]] = {
    "docs/check.md": {
        "console": [
            f"{DOCS}::test_the_checks_of_the_page_are_made",
            f"{CLI}preflight.py::test_a_model_alone_is_asked_four_questions",
        ]
    },
    "docs/episodes.md": {
        "console": [MINUTES, INSTALLS],
        "python": [RUN, RUN, RUN, INSTALLS],
        "yaml": [
            RUN,
            "tests/test_episodes.py::test_a_run_trains_an_agent_that_knows_nothing_but_an_address_and_a_replay_repeats_it",
            "tests/test_episodes.py::test_each_source_of_a_run_has_tools_or_an_environment_of_its_own",
        ],
    },
    "docs/index.md": {
        "console": [f"{QUICK}the_model_learns_to_look"],
        "indented": ["not run: the text of a card"] * 9,
    },
    "docs/estimate.md": {"console": [f"{DOCS}::test_the_estimates_of_the_page_are_made"]},
    "docs/diagnose.md": {"indented": ["packages/r1-cli/tests/test_cli_diagnose.py"]},
    "docs/report.md": {"indented": [f"{CLI}report.py::test_the_command_writes_beside_the_run_or_where_it_is_told"]},
    "docs/replay.md": {"indented": ["tests/test_replay.py", "tests/test_replay.py", "tests/test_episodes.py"]},
    "docs/compare.md": {"indented": [f"{CLI}after_diff.py::test_each_kind_of_change_is_told_with_both_values"]},
    "docs/after-training.md": {
        "console": [f"{CHAT}::{ALIKE}", HOUR],
        "bash": [f"{CHAT}::{PIPED}", f"{PUSH}::{PRIVATE}", *[VLLM] * 2, "not run: llama.cpp is on no package index"],
    },
    "docs/adapters.md": {"console": [ADAPTER, RUN], "yaml": [RUN]},
    "docs/row-formats.md": {"title": [FORMATS] * 22},
    "docs/first-run.md": {"sh": [INSTALLS, HOUR]},
    "docs/many-devices.md": {"sh": [NODES]},
    "docs/one-step.md": {"text": [f"{DOCS}::test_the_numbers_of_one_step_are_those_of_the_page"]},
    "docs/own-loss-or-estimator.md": {
        "indented": [f"{DOCS}::test_the_own_loss_and_estimator_of_the_page_are_accepted"],
        "python": [f"{DOCS}::test_the_own_loss_and_estimator_of_the_page_are_accepted"],
    },
    "docs/run-folder.md": {"python": [f"{QUICK}the_record_is_read_in_a_line_as_the_page_says"] * 3},
    "docs/fine-tuning.md": {
        "yaml": [f"{TUNING}::{SAMPLED}"],
        "bash": ["tests/test_reward_training.py::test_rl_and_selection_are_scored_by_the_model_that_was_trained"],
    },
    "docs/view.md": {"bash": [SERVER]},
    "docs/distillation.md": {
        "bash": ["tests/test_distillation.py::test_two_ranks_distil_as_one_does"],
        "yaml": [RUN] * 4,
    },
    "docs/stages.md": {
        kind: [f"{CLI}stages.py::test_stages_run_their_commands_and_stand_afterwards"] for kind in ("yaml", "indented")
    },
    "README.md": {
        "indented": [
            f"{QUICK}the_model_learns_to_look",
            SERVER,
            f"{QUICK}eval_reports_accuracy_and_what_k_answers_give",
            "not run: asks questions; docs/first-run.md has the same with flags",
            "not run: the tests themselves",
        ]
    },
    "CONTRIBUTING.md": {
        "indented": ["not run: the tests themselves", "not run: the tests themselves", "not run: .ci/run does"]
    },
    "packages/r1-cli/README.md": {
        "indented": ["not run: one line of each command, which their own pages run"],
        "python": [f"{CLI}options.py::test_the_readmes_own_estimator_and_loss_are_what_they_must_be"],
        "yaml": [RUN],
    },
    "packages/r1-core/README.md": {"indented": [INSTALLS], "python": [RUN]},
    "packages/r1-data/README.md": {"indented": [INSTALLS], "python": [DATA] * 4},
    "packages/r1-easyr1/README.md": {
        "indented": ["tests/test_easyr1_shim.py::test_a_command_of_easyr1_starts_r1_with_the_same_words"]
    },
    "packages/r1-rewards/README.md": {
        "indented": [INSTALLS, SERVER, PUBLIC],
        "python": [RUN, "not run: a model's log-probs", RUN, RUN, RUN, "not run: a model and servers"],
        "yaml": [RUN],
    },
    "packages/r1-rollout/README.md": {
        "indented": [INSTALLS, INSTALLS, INSTALLS, "packages/r1-rollout/tests/test_vllm_engine.py", POOL, SERVER],
        "python": [f"{ROLLOUT}::test_the_example_of_loading_prints_a_group_of_texts", TRAINER, TRAINER, TRAINER],
    },
    "examples/README.md": {
        "indented": [f"{R1}::test_the_page_of_easyr1_runs", "tests/recipes/test_served.py::" + SERVED],
    },
    "examples/deepeyes/README.md": {
        "indented": [SERVER, f"{TOOLS}::test_the_page_of_deepeyes_runs", f"{TOOLS}::test_the_page_of_deepeyes_runs"]
    },
    "examples/deepseek_r1_distill/README.md": {
        "indented": [f"{R1}::test_a_template_that_opens_the_thought_leaves_its_end_to_the_model"] * 2
    },
    "examples/easyr1/README.md": {"indented": [f"{R1}::test_the_page_of_easyr1_runs"] * 2},
    "examples/geometry3k/README.md": {"indented": [f"{R1}::test_the_page_of_geometry3k_runs"] * 3},
    "examples/gsm8k/README.md": {"indented": ["tests/test_gsm8k.py::test_three_steps_run_from_published_rows"] * 3},
    "examples/llama3/README.md": {
        "indented": [f"{R1}::test_llama_3_ends_at_each_of_its_ends_and_stays_without_padding"] * 3
    },
    "examples/lmm_r1/README.md": {"indented": [f"{R1}::test_the_page_of_lmm_r1_runs"] * 9},
    "examples/look/README.md": {"indented": [MINUTES]},
    "examples/quickstart/README.md": {
        "indented": [f"{QUICK}the_model_learns_to_look", "not run: eight minutes; makes the committed files again"]
    },
    "examples/r1_stages/README.md": {"indented": ["tests/test_stages.py::test_the_example_runs_every_stage_once"]},
    "examples/r1_zero/README.md": {
        "indented": [f"{R1}::test_a_base_model_goes_on_with_plain_text_and_is_merged_as_it_was"] * 2
    },
    "examples/r1v/README.md": {"indented": [f"{R1}::test_the_page_of_r1v_runs"] * 3},
    "examples/rlpr/README.md": {"indented": [f"{R1}::test_both_pages_of_rlpr_run"] * 3},
    "examples/reasoning_gym/README.md": {
        "indented": ["not run: takes minutes, and reasoning-gym is in no environment unless asked for"] * 2
    },
    "docs/evaluation.md": {
        "text": [
            *["tests/test_evaluation.py"] * 2,
            "not run: what two measured folders print",
            "tests/test_evaluation.py",
            "not run: what a measured run printed",
        ]
    },
    "examples/search_r1/README.md": {"indented": [SERVER, *[f"{TOOLS}::test_the_page_of_search_r1_runs"] * 2]},
    "examples/small_card/README.md": {"indented": ["tests/test_small_card.py::test_a_dry_run_accepts_it"]},
    "examples/sums/README.md": {"indented": [MINUTES]},
}
SLOW = {  # train, or start processes that judge and decode
    "docs/adapters.md",
    "docs/fine-tuning.md",
    "docs/first-run.md",
    "docs/one-step.md",
    "docs/python.md",
    "docs/sampling.md",
    "docs/write-your-own.md",
    "docs/engines.md",
    "packages/r1-rewards/README.md",
}


def by_page() -> dict[Path, list[tuple[Block, str]]]:
    """The pages with their blocks, and who runs each."""
    found: dict[Path, list[tuple[Block, str]]] = defaultdict(list)
    for page in PAGES:
        seen: dict[str, int] = defaultdict(int)
        for block in blocks_of(page):
            kind = "title" if block.title else block.language
            said = BY.get(block.page, {}).get(kind, [])
            default = RUN if block.page.startswith("docs/") and kind in ("title", "python", "console") else ""
            found[page].append((block, said[seen[kind]] if seen[kind] < len(said) else "" if said else default))
            seen[kind] += 1
        for kind, said in BY.get(page.relative_to(ROOT).as_posix(), {}).items():
            assert len(said) <= seen[kind], f"{page} has {seen[kind]} blocks of {kind}, and {len(said)} are listed here"
    return found


def test_every_block_is_run_or_says_why_not() -> None:
    blocks = [pair for pairs in by_page().values() for pair in pairs]
    assert len(blocks) > 90
    assert not [str(block) for block, who in blocks if not who], "say in BY who runs these"
    named = {who for _, who in blocks if who != RUN and not who.startswith("not run: ")}
    for name in sorted(named):
        path, _, function = name.partition("::")
        assert (ROOT / path).is_file(), name
        assert not function or f"def {function}(" in (ROOT / path).read_text(), name


RUN_HERE = [page for page, blocks in by_page().items() if any(who == RUN for _, who in blocks)]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for page, name in ((page, page.relative_to(ROOT).as_posix()) for page in RUN_HERE)
    ],
)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks([block for block, who in by_page()[page] if who == RUN], tmp_path)


@pytest.mark.slow
def test_the_engine_of_the_page_trains_under_its_name(tmp_path: Path) -> None:
    copy = copy_repository(tmp_path)
    (engine,) = [block for block in blocks_of(ROOT / "docs/write-your-own.md") if "engines/" in (block.title or "")]
    copy.add(str(engine.title), engine.text)
    run = tmp_path / "run"
    words = [
        "trainer.max_steps=1", "data.train_files=examples/quickstart/train.parquet[:16]", "data.val_files=null",
        "data.rollout_batch_size=2", "worker.actor.global_batch_size=2", "worker.rollout.n=2",
        "data.filter_overlong_prompts_workers=1",
    ]  # fmt: skip
    name = Path(str(engine.title)).stem
    copy.r1("train", QUICKSTART, f"worker.rollout.name={name}", *words, f"trainer.save_checkpoint_path={run}")
    assert (run / "global_step_1").is_dir()
