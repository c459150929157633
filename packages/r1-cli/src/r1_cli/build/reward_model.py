"""Build the learner of a reward model, and the files that make its weights a sequence classifier."""

import copy
from dataclasses import replace
from typing import cast

from transformers import AutoModelForSequenceClassification

from r1_cli.build.learner import (
    build_batching,
    build_fillers,
    build_learner,
    build_learning_rate,
    build_offload,
    build_shard,
)
from r1_cli.build.parameters import build_policy_optimizer, freeze, log_trained_parameters
from r1_cli.config import RunConfig
from r1_cli.hardware import Hardware, dtype
from r1_cli.models import load as models
from r1_cli.models.files import ModelFiles
from r1_cli.train.types import Schedule
from r1_core.learner import Learner
from r1_core.learner.parallel import Parallel
from r1_core.learner.reward_learner import RewardLearner


def build_trained(
    config: RunConfig, hardware: Hardware, model: ModelFiles, schedule: Schedule, parallel: Parallel
) -> Learner:
    """Build the policy's learner, or a reward model's if the run trains one. Raises ModelError."""
    if config.worker.actor.loss_type != "reward":
        return build_learner(config, hardware, model, schedule, parallel)
    # Fine-tuning calls only what both have.
    return cast(Learner, build_reward_learner(config, hardware, model, schedule, parallel))


def build_reward_learner(
    config: RunConfig, hardware: Hardware, files: ModelFiles, schedule: Schedule, parallel: Parallel
) -> RewardLearner:
    actor = config.worker.actor
    model = models.load_model(
        files.path,
        config=files.config,
        dtype=dtype(actor.kept_dtype),
        device=hardware.device,
        trust_remote_code=actor.model.trust_remote_code,
        parallel=parallel,
        shard=build_shard(actor, hardware),
        head="score",
    )
    freeze(actor.model, model)
    if actor.model.enable_gradient_checkpointing:
        models.enable_gradient_checkpointing(model, on_host=actor.model.enable_activation_offload)
    optimizer = build_policy_optimizer(config, model)
    if parallel.rank == 0:
        log_trained_parameters(model, optimizer)
    return RewardLearner(
        model,
        optimizer,
        build_learning_rate(actor.optim, schedule.total_steps, schedule.updates_per_step),
        batching=build_batching(config, actor),
        max_grad_norm=actor.max_grad_norm,
        parallel=parallel,
        fillers=build_fillers(config, files) if parallel.data_world > 1 else (),
        device=hardware.device,
        offload=build_offload(config, hardware),
    )


def as_classifier(files: ModelFiles) -> ModelFiles:
    """Return the files with the configuration of a sequence classifier of one output, as a reward model is served.

    It reads the last token that is not `pad_token_id`, so that must be a token with which no conversation ends.

    Raises:
        ModelError: the model reads pictures, or transformers has no sequence classifier of its family.
    """
    if files.vision_language:
        raise models.ModelError(
            f"worker.actor.model.model_path={files.path}: sft.loss=reward trains text models, because reward models "
            "that read pictures have no class in transformers; name a text model"
        )
    config, tokenizer = copy.deepcopy(files.config), files.tokenizer
    family = AutoModelForSequenceClassification._model_mapping.get(type(config), None)
    if family is None:
        raise models.ModelError(
            f"worker.actor.model.model_path={files.path}: transformers has no sequence classifier for "
            f"{config.model_type}, as which a reward model is served; name a model of another family"
        )
    eos = {tokenizer.eos_token_id} | set(_as_list(config.eos_token_id))
    choices = [config.pad_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, 0]
    config.pad_token_id = next(one for one in choices if one is not None and one not in eos)
    config.num_labels, config.architectures = 1, [family.__name__]
    return replace(files, config=config)


def _as_list(value: int | list[int] | None) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]
