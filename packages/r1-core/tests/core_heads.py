"""Models with all kinds of heads, for the tests of token statistics, and a learner of small micro-batches."""

from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer

SCALES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "num_key_value_heads": 1, "vocab_size": 64, "pad_token_id": None, "bos_token_id": None,
          "eos_token_id": None}  # fmt: skip
CHANGING = {
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SCALES, head_dim=8, final_logit_softcapping=0.5)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SCALES, logits_scaling=0.25)),
}


class Headless(nn.Module):
    """A model that does not tell where its head is, so that all its logits are computed."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        return self.model(**inputs)


class LoRAHead(nn.Module):
    """A frozen head with trained low-rank factors, as adapters put it in a linear layer's place."""

    def __init__(self, base, rank=3):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, hidden):
        return self.base_layer(hidden) + 0.5 * self.lora_B(self.lora_A(hidden))


TWO = MicroLimit(2)


def learner_for(model, *, padding_free=True, reference=None, limit=TWO, **more):
    optimizer = build_optimizer(model.named_parameters(), lr=1e-3)
    batching = Batching(padding_free, limit, limit)
    return Learner(model, optimizer, lambda step: 1.0, batching=batching, reference=reference, **more)
