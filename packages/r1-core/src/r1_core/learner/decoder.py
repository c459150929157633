"""A model's decoder, for which the ranks that share a row cut it: each embeds and transforms its part alone."""

from typing import Any

from torch import nn

# What a decoder takes of a whole row, and along which dimension tokens lie there.
TOKENS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1}


def cut_shared_rows(model: Any) -> None:
    """Let the decoder of a Hugging Face model compute this rank's part only of rows that are shared.

    Such a row comes with a `Pack` that says with whom (`pack.sequence`); its attention has to exchange tokens for
    heads then. Every other row goes through as it is. A vision tower, which comes before the decoder, sees all pictures
    on all ranks.
    """
    model.get_decoder().register_forward_pre_hook(_cut, with_kwargs=True)


def _cut(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any] | None:
    pack = kwargs.get("pack")
    if pack is None or pack.sequence is None:
        return None
    sequence, own = pack.sequence, dict(kwargs)
    for name, dim in TOKENS.items():
        if own.get(name) is not None:
            own[name] = sequence.part(own[name], dim).contiguous()
    visual = own.get("visual_pos_masks")  # Qwen3-VL adds features of pictures in later layers, too
    if visual is not None:
        own["visual_pos_masks"] = sequence.part(visual, 1)
        counts = [int(part.sum()) for part in visual.chunk(sequence.size, 1)]
        features = own.get("deepstack_visual_embeds") or ()
        own["deepstack_visual_embeds"] = [layer.split(counts)[sequence.rank] for layer in features]
    return args, own
