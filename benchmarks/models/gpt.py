"""A small GPT of the shape of GPT-2 (Radford et al., 2019): 12 layers of 768, 1024 tokens.

The text is synthetic: each token follows from the one before by a fixed table, most of the time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.task import Task

__all__ = ["GPT", "Block", "task"]


class Block(nn.Module):  # type: ignore[misc]
    """Causal self-attention and a network of one hidden layer, each added to what came in.

    Args:
        width: of a token.
        heads: of the attention; they divide the width.

    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Any) -> Any:
        """The tokens after this layer; (batch, tokens, width) as before."""
        batch, tokens, width = x.shape
        parts = self.queries_keys_values(self.before_attention(x))
        parts = parts.view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(found.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):  # type: ignore[misc]
    """A decoder whose output weights are those of the embedding.

    Args:
        vocabulary: tokens that there are.
        context: tokens of a sample.
        width: of a token.
        layers: how many.
        heads: of each.

    """

    def __init__(
        self,
        vocabulary: int = 50304,
        context: int = 1024,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the stream of tokens is smaller the more layers add to it.
                adds = name.endswith(("joined.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if adds else 1))

    def forward(self, tokens: Any) -> Any:
        """Scores of every token's successor; (batch, tokens, vocabulary)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.positions(places))
        return functional.linear(self.last(x), self.tokens.weight)


def task(*, tiny: bool = False, repeatable: bool = False) -> Task:
    """The model and its data.

    Args:
        tiny: 2 layers of 32 and 16 tokens, for tests.
        repeatable: without operations whose gradients differ from run to run; torch chooses those.

    """
    vocabulary, context = (64, 16) if tiny else (50304, 1024)
    module = GPT(vocabulary, context, 32, 2, 2) if tiny else GPT(vocabulary, context)
    follows = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(1))

    def sample(batch: int, generator: Any) -> tuple[Any, Any]:
        text = torch.randint(vocabulary, (batch, context + 1), generator=generator)
        kept = torch.rand(batch, context + 1, generator=generator) < 0.8
        for place in range(1, context + 1):
            follow = follows[text[:, place - 1]]
            text[:, place] = torch.where(kept[:, place], follow, text[:, place])
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def loss(scores: Any, targets: Any) -> Any:
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def optimizer(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)

    return Task("gpt", "ringcoll's benchmark", "tokens", context, module, sample, loss, optimizer)
