"""Configuration sections `data.columns` and `data.tags`: how fine-tuning rows are written."""

from r1_cli.config.section import Section


class ColumnsConfig(Section):
    """Names of columns of fine-tuning rows. A row may lack any of them. Prompts for `r1 train` have none."""

    rejected: str = "rejected"  # the worse answer of a pair; data.answer_key names the better one
    label: str = "label"  # whether the answer is desired (kto); `kto_tag` replaces a missing one
    system: str = "system"  # the system prompt
    query: str | None = None  # text that follows the prompt; null: `input` behind `instruction`
    history: str = "history"  # pairs of question and answer before the prompt
    thinking: str = "thinking"  # reasoning before the `solution` of R1-V
    enable_thinking: str = "enable_thinking"  # true or false, for the chat template


class TagsConfig(Section):
    """Keys and roles of messages, by LLaMA-Factory's names. Messages of `role` and `content` are always read."""

    role_tag: str = "from"  # key of the role
    content_tag: str = "value"  # key of the text
    user_tag: str = "human"  # role of the user
    assistant_tag: str = "gpt"  # role of the assistant
    observation_tag: str = "observation"  # role of a tool's result
    function_tag: str = "function_call"  # role of the assistant's calls, written as JSON
    system_tag: str = "system"  # role of the system prompt
