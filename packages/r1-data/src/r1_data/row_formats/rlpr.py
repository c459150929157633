"""RLPR's rows: veRL's, with the score of the untrained model in `scoreA`, which identifies them."""

PROMPTS = ("prompt",)
GROUND_TRUTHS = ("reward_model.ground_truth",)
NEEDS = ("reward_model", "scoreA")
BEFORE = ("verl", "trl")
