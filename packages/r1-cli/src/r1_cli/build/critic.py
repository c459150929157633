"""Build the critic of a run: model, optimizer, learning rate, micro-batches."""

from datetime import timedelta

from r1_cli.build.learner import build_batching, build_fillers, build_learning_rate, build_shard
from r1_cli.build.parameters import freeze
from r1_cli.config import RunConfig
from r1_cli.hardware import Hardware, dtype
from r1_cli.models import load as models
from r1_cli.models.files import ModelFiles, open_critic_config, resolve_model_path
from r1_cli.train.types import Schedule
from r1_core.learner.critic import Critic
from r1_core.learner.offload import Offload
from r1_core.learner.optim import build_optimizer
from r1_core.learner.parallel import Parallel
from r1_core.losses import ValueLoss


def build_critic(
    config: RunConfig, hardware: Hardware, actor: ModelFiles, schedule: Schedule, parallel: Parallel
) -> Critic:
    critic = config.worker.critic
    parallel = parallel.with_sequence_size(
        config.sequence_ranks("critic"), timedelta(seconds=config.trainer.collective_timeout)
    )
    model = models.load_model(
        resolve_model_path(critic.model.model_path or "", "worker.critic.model.model_path"),
        config=open_critic_config(config, actor),
        dtype=dtype(critic.kept_dtype),
        device=hardware.device,
        trust_remote_code=critic.model.trust_remote_code,
        parallel=parallel,
        shard=build_shard(critic, hardware),
        head="value",
    )
    freeze(critic.model, model, "critic")
    if critic.model.enable_gradient_checkpointing:
        models.enable_gradient_checkpointing(model, on_host=critic.model.enable_activation_offload)
    optimizer = build_optimizer(
        model.named_parameters(),
        lr=critic.optim.lr,
        betas=critic.optim.betas,
        weight_decay=critic.optim.weight_decay,
        strategy=critic.optim.strategy,
    )
    return Critic(
        model,
        optimizer,
        build_learning_rate(critic.optim, schedule.total_steps, schedule.critic_updates_per_step),
        loss=ValueLoss(critic.cliprange_value),
        aggregation=critic.loss_avg_mode or "token",
        length=config.data.max_response_length,
        batching=build_batching(config, critic),
        max_grad_norm=critic.max_grad_norm,
        parallel=parallel,
        fillers=build_fillers(config, actor) if parallel.data_world > 1 else (),
        device=hardware.device,
        offload=build_critic_offload(config, hardware),
    )


def build_critic_offload(config: RunConfig, hardware: Hardware) -> Offload:
    critic = config.worker.critic
    leaves = hardware.on_gpu and not critic.fsdp.enable_cpu_offload
    return Offload(
        weights=leaves and critic.offload.offload_params, optimizer=leaves and critic.offload.offload_optimizer
    )
