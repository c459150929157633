"""Convert rows of fine-tuning to conversations: SFT, preference pairs, and labelled answers (KTO)."""

from r1_data.conversations.reader import ConversationReader, OtherColumns, Wanted, require_format
from r1_data.conversations.turns import Tags

__all__ = ["ConversationReader", "OtherColumns", "Tags", "Wanted", "require_format"]
