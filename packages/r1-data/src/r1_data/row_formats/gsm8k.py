"""GSM8K's rows, and those of the many sets that name their columns so."""

PROMPTS = ("question",)
GROUND_TRUTHS = ("answer",)
BEFORE = ("messages", "lmm_r1")
