"""Settings of short quickstart trainings with a critic."""

from pathlib import Path

from endtoend import QUICKSTART, SMALL

KL_INSIDE = ["algorithm.disable_kl=false", "algorithm.use_kl_loss=false", "algorithm.kl_penalty=kl"]
PPO = [
    "algorithm.adv_estimator=gae", "worker.critic.optim.lr=1e-3", "worker.critic.global_batch_size=4",
    "worker.critic.ppo_epochs=2", *KL_INSIDE,
]  # fmt: skip


def words_of(folder: Path, *more: str, steps: int = 2) -> list[str]:
    """A few small steps."""
    return [
        "train", QUICKSTART, *SMALL, "data.val_files=null", "trainer.val_freq=-1", f"trainer.max_steps={steps}",
        "trainer.save_freq=-1", f"trainer.save_checkpoint_path={folder}", "worker.actor.optim.lr_warmup_steps=0", *more,
    ]  # fmt: skip
