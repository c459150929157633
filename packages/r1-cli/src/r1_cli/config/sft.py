"""Configuration section `sft`: what `r1 sft` trains on a row, and by which loss."""

from typing import Literal

from r1_cli.config.section import Count, NonNegative, Positive, Section

Loss = Literal["nll", "dft", "dpo", "cdpo", "ipo", "simpo", "kto", "reward"]
PREFERENCE = ("dpo", "cdpo", "ipo", "simpo", "kto", "reward")  # compare endings
LEARNED = ("nll", "dft", "preference", "reward")  # how the learner names the losses, as `worker.actor.loss_type`
WITH_REFERENCE = ("dpo", "cdpo", "ipo", "kto")


class SftConfig(Section):
    """Only `r1 sft` reads it. A step is one optimizer step on worker.actor.global_batch_size rows."""

    # nll: cross entropy; dft: weighted by the token's own probability; dpo, cdpo, ipo, simpo: chosen against rejected;
    # kto: desired against undesired; reward: a reward model of chosen and rejected answers
    loss: Loss = "nll"
    epochs: Count = 3  # passes over the training rows; trainer.max_steps wins
    turns: Literal["all", "each", "last"] = "all"  # trained answers; each: one sample per answer, as sampling sees it
    train_on_prompt: bool = False  # also train on what is before an answer
    aggregation: Literal["token", "sequence"] = "token"  # mean over tokens, or over sequences of their means; nll, dft
    beta: Positive | None = None  # of a preference loss; null: 2 for simpo, else 0.1
    label_smoothing: NonNegative = 0.1  # of cdpo: the share of pairs whose label is wrong
    margin: NonNegative = 0.5  # of simpo: by how much the chosen answer's reward should be higher
    center: NonNegative = 0.0  # of reward: weight of the squared sum of a pair's rewards, keeps them around 0
    val_generations: bool = False  # validation also samples answers and scores them, as in r1 train

    @property
    def compares(self) -> bool:
        return self.loss in PREFERENCE

    @property
    def learned(self) -> str:
        """The learner's name of the loss, one of `LEARNED`."""
        return self.loss if self.loss in LEARNED else "preference"

    @property
    def has_pairs(self) -> bool:
        """Whether a row has two endings."""
        return self.compares and self.loss != "kto"

    @property
    def wanted(self) -> Literal["pairs", "labels", "answers"]:
        """What the loss reads of a row."""
        return "pairs" if self.has_pairs else "labels" if self.compares else "answers"

    @property
    def needs_reference(self) -> bool:
        return self.loss in WITH_REFERENCE
