"""GSM8K's rows, and those of the many datasets with the same column names."""

PROMPTS = ("question",)
GROUND_TRUTHS = ("answer",)
BEFORE = ("messages", "lmm_r1")
