"""R1-V's rows."""

PROMPTS = ("problem",)
GROUND_TRUTHS = ("solution",)
BEFORE = ("gsm8k", "messages", "lmm_r1")
