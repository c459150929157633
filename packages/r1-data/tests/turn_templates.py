"""Small chat templates, one for each way in which published ones treat turns, tools and pictures.

Written for these tests after the behaviour of the families that they are named after.
"""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# Tools in the system message, calls as JSON in tags, results together in one user turn.
_CHATML_TOOLS = """\
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}{{ 'Tools:' }}
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}"""

_JSON_CALLS = """\
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}"""

_RESULTS = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"""

_PARTS = """\
{%- macro parts(content) %}
{%- if content is string %}{{ content }}{% else %}{% for part in content %}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"""

QWEN2_5 = (
    _CHATML_TOOLS
    + """\
{%- for message in messages %}{% set content = message.content %}
{%- if message.role == 'tool' %}"""
    + _RESULTS
    + """{% elif message.role != 'system' %}{{ '<|im_start|>' + message.role + '\n' + content }}"""
    + _JSON_CALLS
    + """{{ '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
)

# Drops the thoughts of turns before the last user message.
QWEN3 = (
    _CHATML_TOOLS
    + """\
{%- set last = namespace(user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}{% set content = message.content %}
{%- if message.role == 'tool' %}"""
    + _RESULTS
    + """{% elif message.role != 'system' %}
{%- if loop.index0 < last.user and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>' + message.role + '\n' + content }}"""
    + _JSON_CALLS
    + """{{ '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
)

# Begins every turn with <think>; calls as tags; reformats the thoughts that it keeps, drops those before the last user.
QWEN3_5 = (
    _CHATML_TOOLS
    + """\
{%- set last = namespace(user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}{% set content = message.content | trim %}
{%- if message.role == 'tool' %}"""
    + _RESULTS
    + """{% elif message.role == 'assistant' %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] | trim if '</think>' in content else '' %}
{%- set content = content.split('</think>')[-1] | trim %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > last.user %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\n' + value | string + '\n</parameter>\n' }}{% endfor %}
{{- '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif message.role == 'user' %}{{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""
)

# Ignores tools; a tool's message is a turn of its own; pictures in any role.
QWEN2_5_VL = (
    _PARTS
    + """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + parts(message.content) + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
)

QWEN3_VL = (
    _PARTS
    + _CHATML_TOOLS
    + """\
{%- for message in messages %}{% set content = parts(message.content) %}
{%- if message.role == 'tool' %}"""
    + _RESULTS
    + """{% elif message.role != 'system' %}{{ '<|im_start|>' + message.role + '\n' + content }}"""
    + _JSON_CALLS
    + """{{ '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
)

# Writes pictures of users, none of tools.
BLIND_TOOLS = QWEN3_VL.replace(
    "{% set content = parts(message.content) %}",
    "{% set lost = message.role == 'tool' and message.content is not string %}"
    "{% set content = 'a picture' if lost else parts(message.content) %}",
)

# Trims contents, writes a result as JSON, takes one call a turn, tools in the first user message.
LLAMA3_1 = """\
{{- '<|begin_of_text|>' }}{% set shown = namespace(tools=tools) %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content | tojson + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call only') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson + '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
{%- if message.role == 'user' and shown.tools %}{{ shown.tools | tojson + '\n' }}{% set shown.tools = none %}{% endif %}
{{- message.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# No system messages, no tools; refuses roles that do not alternate.
GEMMA = """\
{{- '<bos>' }}{% for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
{{- message.content | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# Begins every turn with <think>, drops all thoughts; a later result is written in another way than the first.
DEEPSEEK = """\
{{- '<|bos|>' }}{% set seen = namespace(result=false) %}{% for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'user' %}{{ '<|User|>' + message.content }}
{%- elif message.role == 'assistant' %}{{ '<|Assistant|>' + message.content.split('</think>')[-1] + '<|end|>' }}
{%- elif message.role == 'tool' %}
{%- if not seen.result %}{{ '<|outputs|>' }}{% set seen.result = true %}{% endif %}
{{- '<|output|>' + message.content + '<|output_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"""

# Calls as a Python list between special tokens.
LFM2 = """\
{%- if tools %}{{ '<|im_start|>system\nTools: ' + tools | tojson + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}
{%- if message.tool_calls %}{{ '<|tool_call_start|>[' }}{% for call in message.tool_calls %}
{{- call.function.name + '(' }}{% for name, value in call.function.arguments.items() %}
{{- name + '=' + ("'" + value + "'" if value is string else value | string) }}
{%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ')' }}{% endfor %}{{ ']<|tool_call_end|>' }}{% endif %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# A result belongs to a call before it; a call and an answer end with different tokens.
GPT_OSS = """\
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('a result without a call') }}{% endif %}
{{- '<|start|>' + messages[loop.index0 - 1].tool_calls[0].function.name + '<|message|>' + message.content + '<|end|>' }}
{%- elif message.tool_calls %}
{{- '<|start|>assistant to=' + message.tool_calls[0].function.name + '<|message|>' }}
{{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

# The next role's token ends a turn.
GLM = """\
{%- for message in messages %}
{{- '<|' + ('observation' if message.role == 'tool' else message.role) + '|>\n' + message.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

# Reads contents that are lists of parts only.
IDEFICS3 = """\
{%- for message in messages %}{{ message.role.capitalize() + ':' }}
{%- for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{{- '<end_of_utterance>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

TEXT_TEMPLATES = {
    "qwen2_5": QWEN2_5, "qwen3": QWEN3, "qwen3_5": QWEN3_5, "llama3_1": LLAMA3_1, "gemma": GEMMA, "deepseek": DEEPSEEK,
    "lfm2": LFM2, "gpt_oss": GPT_OSS, "glm": GLM, "idefics3": IDEFICS3,
}  # fmt: skip
VISION_TEMPLATES = {"qwen2_vl": QWEN2_5_VL, "qwen2_5_vl": QWEN2_5_VL, "qwen3_vl": QWEN3_VL}

_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|eom_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<|bos|>", "<|User|>", "<|Assistant|>",
    "<|end|>", "<|outputs|>", "<|output|>", "<|output_end|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|start|>",
    "<|message|>", "<|call|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<end_of_utterance>",
)  # fmt: skip
# Added tokens that are not special, as Qwen3's tokenizer has them.
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def merging_tokenizer(tags: Sequence[str] = TAGS) -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer whose merges span words and lines, with the control tokens of all templates."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    lines = [
        "user\nAnd now?\n",
        "assistant\n",
        "There are 12.",
        "\n\nA row.\n\n",
        "How many rows?",
        "</tool_response>",
        "|im_end|>\n",
    ]
    bpe.train_from_iterator(lines * 3, trainer)
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in tags])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def special_tokenizer(tokens: "set[str]") -> PreTrainedTokenizerFast:
    """Make a tokenizer of one token a byte, with these special tokens, which ends texts with </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in sorted(tokens)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="</s>")
