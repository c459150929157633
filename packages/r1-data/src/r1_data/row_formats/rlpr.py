"""RLPR's rows: veRL's, with the score of the model before training, which tells them apart."""

PROMPTS = ("prompt",)
GROUND_TRUTHS = ("reward_model.ground_truth",)
NEEDS = ("reward_model", "scoreA")
BEFORE = ("verl", "trl")
