"""What the tests of demonstrations share: conversations, two templates, and what is trained of them."""

from turn_templates import QWEN2_5

from r1_data.demonstrations import ConversationRenderer
from r1_data.render import Renderer
from r1_data.types import Conversation

TALK = [
    {"role": "user", "content": "How many rows?"},
    {"role": "assistant", "content": "There are 12."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Now 13."},
]
THOUGHT = "<think>\nI see.\n</think>\n\n"
THINKING = [{**one, "content": THOUGHT + one["content"]} if one["role"] == "assistant" else one for one in TALK]
CALL = {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": {"x": 3}}}
CALLING = [
    TALK[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "look", "tool_call_id": "call00000", "content": "A row."},
    TALK[3],
]
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}
TAGGED = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + '<|im_end|>\n' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
NO_END = """\
{%- for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


def conversation(messages, **fields):
    return Conversation("t:1", list(messages), **fields)


def renderer_of(tokenizer, template=QWEN2_5, **options):
    return ConversationRenderer(Renderer(tokenizer, chat_template=template), **options)


def trained(tokenizer, shown):
    """The texts of the runs of trained tokens."""
    runs, before = [], False
    for token, own in zip(shown.token_ids, shown.loss_mask, strict=True):
        if own:
            runs = [*runs[:-1], [*runs[-1], token]] if before else [*runs, [token]]
        before = own
    return [tokenizer.decode(run) for run in runs]
