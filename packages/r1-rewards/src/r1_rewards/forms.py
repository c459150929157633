"""The forms in which models are asked to write a final answer; a reward need reward one of them only."""

from collections.abc import Mapping

# The first holds what most verifiers look for.
FORMS: Mapping[str, str] = {
    "<think> <answer> \\boxed{}": "<think>Let me see.</think><answer>\\boxed{{{}}}</answer>",
    "<think> <answer>": "<think>Let me see.</think><answer>{}</answer>",
    "<think> \\boxed{}": "<think>Let me see.</think>\n\\boxed{{{}}}",
    "<think>": "<think>Let me see.</think>\n{}",
    "\\boxed{}": "So it is \\boxed{{{}}}.",
    "nothing around it": "{}",
    "Answer:": "Let me see.\nAnswer: {}",
    "####": "Let me see.\n#### {}",
    "```python": "```python\n{}\n```",
}


def write(form: str, final_answer: str) -> str:
    """Return a response whose final answer is written in a form, one of FORMS.

    Example: `write("####", "18")` is "Let me see.\\n#### 18".
    """
    return FORMS[form].format(final_answer)
