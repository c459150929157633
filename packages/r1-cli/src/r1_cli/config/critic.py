"""What a critic has of the actor's where the user says nothing else: its model, and how a step is cut."""

from r1_cli.config.provenance import Provenance
from r1_cli.config.root import RunConfig, lookup

CUT = (
    "global_batch_size",
    "micro_batch_size_per_device_for_update",
    "micro_batch_size_per_device_for_experience",
)
MODEL = ("model_path", "override_config", "trust_remote_code")  # which belong together


def follow_actor(config: RunConfig, provenance: Provenance) -> RunConfig:
    """Return the configuration with the critic's batches and model settled; as it is where there is no critic."""
    if not config.has_critic:
        return config
    worker = config.worker
    cut = {key: getattr(worker.actor, key) for key in CUT if not provenance.is_set(f"worker.critic.{key}")}
    model = worker.critic.model
    if model.model_path is None:
        own = [key for key in MODEL if not lookup(config, f"worker.critic.model.{key}")]
        model = model.model_copy(update={key: getattr(worker.actor.model, key) for key in own})
    critic = worker.critic.model_copy(update={**cut, "model": model})
    return config.model_copy(update={"worker": worker.model_copy(update={"critic": critic})})
