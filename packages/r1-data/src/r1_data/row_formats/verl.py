"""veRL's rows: messages in `prompt`, the ground truth in the mapping `reward_model`."""

PROMPTS = ("prompt",)
GROUND_TRUTHS = ("reward_model.ground_truth",)
NEEDS = ("reward_model",)
BEFORE = ("trl",)
