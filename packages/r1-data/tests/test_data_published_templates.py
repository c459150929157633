"""Which characters of published chat templates are trained, against what was found by reading each template.

The templates are those that TRL 1.16 has in its package; they are read from there, if it is installed. `PLAIN` and
`THINKING` are the pieces of one conversation, written out; the markers cut ten conversations with calls and reasoning.
"""

from importlib.util import find_spec
from typing import Any

import pytest
from published_markers import CONVERSATIONS, MARKERS, cut, render, templates, tokenizer_of

from r1_data.assistant import AnswerFinder, Found
from r1_data.render import Renderer
from r1_data.types import DataError

pytestmark = [
    pytest.mark.slow,  # the templates are in no environment unless asked for
    pytest.mark.skipif(find_spec("trl") is None, reason="needs the chat templates of TRL"),
]
ANSWERS, THOUGHTS = ("Four.", "Six."), ("I add two.", "I add three.")
_DEEPSEEK, _IM, _EOT, _TURN = "<｜end▁of▁sentence｜>", "<|im_end|>", "<|eot_id|>", "<turn|>"
_SPACED = (" {a}<end_of_utterance>",) * 2

# The trained text of the first and of the last answer ({a}), with its reasoning ({t}) if there is one.
PLAIN = {
    "cohere": ("{a}<|END_OF_TURN_TOKEN|>",) * 2,
    "cohere2": ("{a}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",) * 2,
    **dict.fromkeys(("deepseek_r1_distill", "deepseekv3"), (f"{{a}}{_DEEPSEEK}",) * 2),
    **dict.fromkeys(("gemma", "gemma3"), ("{a}<end_of_turn>",) * 2),
    **dict.fromkeys(
        ("diffusion_gemma", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"), (f"{{a}}{_TURN}",) * 2
    ),
    "glm4moe": ("\n<think></think>\n{a}<|user|>", "\n<think></think>\n{a}"),  # the next role's token ends a turn
    "gptoss": ("<|channel|>final<|message|>{a}<|end|>", "<|channel|>final<|message|>{a}<|return|>"),
    **dict.fromkeys(("idefics3", "smolvlm"), _SPACED),
    **dict.fromkeys(("lfm2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "lfm2_v2"), (f"{{a}}{_IM}",) * 2),
    **dict.fromkeys(("llama3", "llama3_1", "llama3_2"), (f"{{a}}{_EOT}",) * 2),
    "llava_next": (" {a}</s>",) * 2,
    "muse_glimmer": (" to=user<|message|>{a}<|eot|>",) * 2,
    **dict.fromkeys(  # the generation prompt opens <think>
        ("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
        (f"</think>{{a}}{_IM}",) * 2,
    ),
    **dict.fromkeys(("phi3", "phi3_5"), ("{a}<|end|>",) * 2),
    **dict.fromkeys(("qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl"), (f"{{a}}{_IM}",) * 2),
    "qwen3": (f"{{a}}{_IM}", f"<think>\n\n</think>\n\n{{a}}{_IM}"),
    "qwen3_5_nothink": (f"{{a}}{_IM}",) * 2,  # the generation prompt writes an empty thought
    **dict.fromkeys(("qwen3_5_think", "qwen3_6"), (f"{{a}}{_IM}", f"\n</think>\n\n{{a}}{_IM}")),
    "qwen3_8": (f"\n</think>\n\n{{a}}{_IM}",) * 2,
}
_GEMMA_THOUGHT = f"<|channel>thought\n{{t}}\n<channel|>{{a}}{_TURN}"
THINKING = PLAIN | {
    **dict.fromkeys(("diffusion_gemma", "gemma4_v5"), (f"{{a}}{_TURN}", _GEMMA_THOUGHT)),
    "glm4moe": ("\n<think></think>\n{a}<|user|>", "\n<think>{t}</think>\n{a}"),
    **dict.fromkeys(("lfm2_2_5_v2", "lfm2_2_5_vl"), (f"{{a}}{_IM}", f"<think>{{t}}</think>{{a}}{_IM}")),
    "muse_glimmer": (" to=self<|message|>{t}<|eom|><|start|>assistant to=user<|message|>{a}<|eot|>",) * 2,
    **dict.fromkeys(
        ("nemotron_3_5_lightning", "nemotron_3_ultra"), (f"</think>{{a}}{_IM}", f"{{t}}</think>{{a}}{_IM}")
    ),
    **dict.fromkeys(("nemotron_3_nano", "nemotron_3_super"), (f"</think>\n{{a}}{_IM}", f"{{t}}\n</think>\n{{a}}{_IM}")),
    "qwen3": (f"{{a}}{_IM}", f"<think>\n{{t}}\n</think>\n\n{{a}}{_IM}"),
    **dict.fromkeys(("qwen3_5_nothink", "qwen3_5_think", "qwen3_6"), (f"{{a}}{_IM}", f"{{t}}\n</think>\n\n{{a}}{_IM}")),
    "qwen3_8": (f"{{t}}\n</think>\n\n{{a}}{_IM}",) * 2,
}
ENDLESS = {"glm4moe"}  # whose last answer has no token behind it


def found_in(template: str, messages: list[dict[str, Any]]) -> Found:
    return AnswerFinder(Renderer(tokenizer_of(template), chat_template=template)).find(messages)


@pytest.mark.parametrize("thinks", [False, True])
def test_what_is_trained_of_published_templates_is_what_a_reader_finds(thinks):
    texts, expected = templates(), THINKING if thinks else PLAIN
    assert texts.keys() == expected.keys()
    questions = ("What is 2+2?", "And 3+3?")
    for name, template in texts.items():
        messages = []
        for question, answer, thought in zip(questions, ANSWERS, THOUGHTS, strict=True):
            reasoning = {"reasoning_content": thought} if thinks else {}
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **reasoning}]
        found = found_in(template, messages)
        pieces = [found.text[span.start : span.stop] for span in found.spans]
        wanted = [
            text.format(a=answer, t=thought)
            for text, answer, thought in zip(expected[name], ANSWERS, THOUGHTS, strict=True)
        ]
        assert pieces == wanted, name
        assert [span.ended for span in found.spans] == [True, name not in ENDLESS], name
        shown = [thinks and thought in piece for thought, piece in zip(THOUGHTS, pieces, strict=True)]
        assert found.hidden == tuple(place for place, own in zip((1, 3), shown, strict=True) if thinks and not own)


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_what_is_trained_stands_between_the_markers_that_published_templates_write(kind):
    texts, messages = templates(), CONVERSATIONS[kind]
    assert texts.keys() == MARKERS.keys()
    for name, template in texts.items():
        markers = MARKERS[name]
        if kind in markers.refused:
            with pytest.raises(DataError):
                found_in(template, messages)
            continue
        text, found = render(tokenizer_of(template), template, messages, markers), found_in(template, messages)
        assert found.text == text, name
        pieces = [(text[span.start : span.stop], span.ended) for span in found.spans]
        assert pieces == list(cut(text, messages, markers)), name
        thoughts = [message.get("reasoning_content") or message.get("thinking") for message in messages]
        assert found.hidden == tuple(index for index, one in enumerate(thoughts) if one and one not in text), name
