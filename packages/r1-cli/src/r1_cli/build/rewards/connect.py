"""Connect log-prob rewards (RLPR) to their model and base scores, after models are loaded."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from r1_cli.build.canary import find_max_positions
from r1_cli.build.learner import build_batching
from r1_cli.build.rewards.base_scores import TERMS_COLUMN, BaseScoreFile, ScoreTerms, fill_bases, key_of, terms_of
from r1_cli.build.rewards.dispatch import DispatchingVerifier
from r1_cli.build.rewards.frozen_model import open_frozen
from r1_cli.build.rewards.own_models import LearnerReading, ReplayReading
from r1_cli.build.rewards.reference_verifier import ModelQuery, ReferenceVerifier, column_score
from r1_cli.build.rewards.served_model import ServedReading
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.hardware import Hardware
from r1_cli.models.files import ModelFiles
from r1_cli.train.types import Dataset, Policy, Progress
from r1_core.learner.batching import Batching
from r1_data.types import DataError, Prompt
from r1_rewards.reference.options import POLICY, REFERENCE, Options
from r1_rewards.reference.reference_probability import BASE_COLUMN
from r1_rewards.types import FailureRule, RewardSpecError
from r1_rollout.types import Generator, Reading, Replaying

FUNCTION = "worker.reward.reward_function"
KWARGS = "worker.reward.reward_function_kwargs"
MODEL = f"{KWARGS}.model"
FOLDER = "score_a"  # in the run folder, for base scores
SEEN = 64  # prompts rendered at once

log = logging.getLogger("r1")

Find = Callable[[Options], Reading]
Rows = tuple[str, Dataset]  # name and prompts of a source


# --- the model that a reward reads ------------------------------------------------------------------------------------


def connect_models(config: RunConfig, model: ModelFiles, verifiers: Sequence[ReferenceVerifier], find: Find) -> None:
    for verifier in verifiers:
        verifier.query = build_query(config, model, find(verifier.options))


def build_query(config: RunConfig, model: ModelFiles, reading: Reading) -> ModelQuery:
    reward = config.worker.reward
    return ModelQuery(
        reading=reading,
        tokenizer=model.tokenizer,
        eos=model.tokenizer.eos_token or "",
        temperature=config.worker.rollout.temperature,
        longest=longest_sequence(config, model),
        longest_response=config.data.max_response_length,
        rule=FailureRule(reward.failure_policy, reward.failure_score),
    )


def longest_sequence(config: RunConfig, model: ModelFiles) -> int:
    return find_max_positions(model) or config.data.max_prompt_length + 2 * config.data.max_response_length


def in_training(
    config: RunConfig, hardware: Hardware, model: ModelFiles, learner: Policy, engine: Generator | None
) -> Find:
    """Return how training finds a reward's model.

    The policy is read in the learner, or in an active engine that shares its GPU and has the same weights. `engine`
    None: none is active.
    """
    temperature = config.worker.rollout.temperature

    def find(options: Options) -> Reading:
        if config.trainer.max_staleness and options.model in (POLICY, REFERENCE):
            message = (
                "must be 0 if a reward reads the learner, which trains while groups are scored; or name a folder in "
            )
            raise ConfigError(
                [Problem("trainer.max_staleness", f"{message}{MODEL}", str(config.trainer.max_staleness))]
            )
        if options.model == POLICY and config.colocated and hardware.on_gpu and isinstance(engine, Replaying):
            return ReplayReading(engine)
        if options.model == POLICY:
            return LearnerReading(learner, "policy", temperature)
        if options.model != REFERENCE:
            return open_reward_model(config, hardware, model, options)
        if config.algorithm.disable_kl:
            message = "is the KL term's model, and algorithm.disable_kl is true: name a folder instead"
            raise ConfigError([Problem(MODEL, message, options.model)])
        return LearnerReading(learner, "reference", temperature)

    return find


def in_evaluation(config: RunConfig, hardware: Hardware, model: ModelFiles, engine: Generator) -> Find:
    def find(options: Options) -> Reading:
        if options.model not in (POLICY, REFERENCE):
            return open_reward_model(config, hardware, model, options)
        if isinstance(engine, Replaying):
            return ReplayReading(engine)
        message = f"{type(engine).__name__} cannot compute log-probs of given responses"
        raise ConfigError([Problem(FUNCTION, message, options.model)])

    return find


def open_reward_model(config: RunConfig, hardware: Hardware, model: ModelFiles, options: Options) -> Reading:
    """Open the reward's own model, behind HTTP or in this process.

    Raises:
        ConfigError: a server has an invalid address, or a temperature other than 1 is requested.
        ModelError: the model cannot be loaded.
    """
    if not options.served:
        trusted = config.worker.actor.model.trust_remote_code
        batching = padded_batching(config)
        return open_frozen(options.model, MODEL, config, hardware, model, batching, trust_remote_code=trusted)
    temperature = config.worker.rollout.temperature
    if temperature != 1.0:
        message = f"a server gives log-probs at temperature 1, and worker.rollout.temperature is {temperature}"
        raise ConfigError([Problem(MODEL, message, options.model)])
    try:
        return ServedReading(options.model, served_name=options.served_name or None, token_env=options.token_env)
    except RewardSpecError as error:
        raise ConfigError([Problem(MODEL, str(error), options.model)]) from error


def connect_references(
    config: RunConfig,
    verifier: DispatchingVerifier,
    model: ModelFiles,
    rows: Sequence[Rows],
    folders: Sequence[Path],
    find: Callable[[Generator | None], Find],
    engine: Generator,
    progress: Progress,
    *,
    resumed: bool,
) -> None:
    connect_models(config, model, verifier.asking, find(engine))
    connect_base_scores(config, verifier, rows, folders, find(None), progress, resumed=resumed)


def padded_batching(config: RunConfig) -> Batching:
    return replace(build_batching(config, config.worker.actor), padding_free=False, share_prompts=False)


# --- base scores ------------------------------------------------------------------------------------------------------


def connect_base_scores(
    config: RunConfig,
    verifier: DispatchingVerifier,
    rows: Sequence[Rows],
    folders: Sequence[Path],
    find: Find,
    progress: Progress,
    *,
    resumed: bool,
) -> None:
    """Connect each debiasing verifier to its base scores, in a column of its rows or in a file of the run.

    Scores without a column are computed now and stored in the first of `folders`. A resumed run finds them in one of
    `folders`.

    Raises:
        ConfigError: a column has other terms than the reward or is missing, or a resumed run has lost its file.
    """
    for own in verifier.asking:
        if not own.options.use_debiasing:
            continue
        mine = [one for one in rows if own in verifier.reference_verifiers_of(one[0])]
        terms = terms_of(own.options, base_model_name(config, own.options), config.worker.rollout.temperature)
        online = [dataset for name, dataset in mine if not has_column(name, dataset, own.options, terms)]
        file = open_base_scores(folders, terms, resumed=resumed) if online else None
        own.base_of = partial(base_of, file)
        if file is not None and own.query is not None:
            if resumed:
                require_complete(file, online)
            query = own.query
            if own.options.model == POLICY:  # its engine is not active
                query = replace(query, reading=find(own.options))
            query = replace(query, temperature=terms.temperature)
            fill_bases(file, iterate_prompts(online, progress), query, own.options)


def base_model_name(config: RunConfig, options: Options) -> str:
    """Return the model of base scores: the initial policy, or the reward's own model."""
    started = config.worker.actor.model.model_path or ""
    return started if options.model in (POLICY, REFERENCE) else options.served_name or options.model


def base_of(file: BaseScoreFile | None, prompt: Prompt) -> float | None:
    key = key_of(prompt)
    return file.get(key) if file is not None and key in file else column_score(prompt)


def has_column(name: str, dataset: Dataset, options: Options, terms: ScoreTerms) -> bool:
    """Whether base scores come from a column. Raises ConfigError if it is required and missing, or has other terms."""
    if options.score_a == "online":
        return False
    columns = dataset[0].metadata
    if BASE_COLUMN not in columns:
        if options.score_a == "column":
            message = f"the rows of {name} have no column {BASE_COLUMN}: `r1 score-a` writes it, or set online"
            raise ConfigError([Problem(f"{KWARGS}.score_a", message, options.score_a)])
        return options.strict is not None  # RLPR computes none in a run: a missing score is 0
    written = columns.get(TERMS_COLUMN)
    if written is None:
        log.warning("%s: the terms of column %s are unknown; its scores are used as they are", name, BASE_COLUMN)
    elif different := terms.problem(str(written)):
        message = (
            f"the column {BASE_COLUMN} of {name} was computed with {different}; write it again with `r1 score-a`, "
        )
        raise ConfigError([Problem(f"{KWARGS}.score_a", message + "or set online", options.score_a)])
    return True


def open_base_scores(folders: Sequence[Path], terms: ScoreTerms, *, resumed: bool) -> BaseScoreFile:
    """Open the file of these terms in the first folder that has it. Raises ConfigError if a resumed run has none."""
    name = f"{hashlib.blake2b(terms.to_json().encode(), digest_size=6).hexdigest()}.jsonl"
    paths = [folder / FOLDER / name for folder in folders]
    found = next((path for path in paths if path.is_file()), None)
    if found is None and resumed:
        message = (
            f"{paths[0]} is gone, or was of other settings; base scores are those of the model before its first step: "
            "put it back, give the rows a column by `r1 score-a`, or set use_debiasing=false"
        )
        raise ConfigError([Problem(f"{KWARGS}.score_a", message)])
    return BaseScoreFile(found or paths[0], terms)


def require_complete(file: BaseScoreFile, datasets: Sequence[Dataset]) -> None:
    """Raise ConfigError if the rows have changed since the run started."""
    for dataset in datasets:
        for index in (0, len(dataset) - 1):
            if key_of(dataset[index]) not in file:
                message = (
                    f"{file.path} knows nothing of {dataset[index].id}: the rows are others than when it was begun"
                )
                raise ConfigError([Problem(f"{KWARGS}.score_a", message)])


def iterate_prompts(datasets: Sequence[Dataset], progress: Progress) -> Iterator[Prompt]:
    for dataset in datasets:
        for index in progress(range(len(dataset)), "base scores", len(dataset)):
            if index % SEEN == 0:
                dataset.prefetch(range(index, min(index + SEEN, len(dataset))))
            try:
                yield dataset[index]
            except DataError as error:
                log.warning("without a base score: %s", error)
