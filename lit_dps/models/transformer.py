"""A small transformer over characters (Vaswani et al. 2017), as decoder: each position sees itself
and those before."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lit_dps.core.errors import ConfigError

STD = 0.02  # of initial weights, as Radford et al. (2019) have it


class Attention(nn.Module):
    """Causal self-attention of several heads, written out: it has second derivatives, unlike the
    fused kernels."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.inputs(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / math.sqrt(width // self.heads)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ value
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """Attention, then a network of one hidden layer at each position, each on a normalized input
    and added to it."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.hidden, self.output = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.output(nn.functional.gelu(self.hidden(self.norm2(x))))


class Transformer(nn.Module):
    """Predicts the next character at every position: pre-norm, learned positions, no dropout,
    untied output.

    Input (batch, length) of character numbers, output (batch, vocabulary, length) of logits.
    Weights are normal with deviation 0.02, those that add to the residual stream smaller by sqrt(2
    depth) (Radford et al. 2019); biases are zero. Shallue et al. (2019) vary width and depth of
    such networks.

    Args:
        vocabulary: Different characters: `lit_dps.data.Text` says how many a text has.
        context: Longest input, in characters.
        width: Of the residual stream, a multiple of `heads`.
        depth: Layers.
        heads: Of each attention.

    Raises:
        ConfigError: for a number below 1, and a width that the heads do not divide.
    """

    def __init__(
        self,
        vocabulary: int = 92,
        context: int = 32,
        width: int = 32,
        depth: int = 2,
        heads: int = 2,
    ):
        super().__init__()
        given = {
            "vocabulary": vocabulary,
            "context": context,
            "width": width,
            "depth": depth,
            "heads": heads,
        }
        for key, number in given.items():
            if number < 1:
                raise ConfigError(f"model.network.{key}", number, "at least 1")
        if width % heads:
            raise ConfigError(
                "model.network.width", width, f"a multiple of model.network.heads = {heads}"
            )
        self.vocabulary, self.context = vocabulary, context
        self.characters, self.positions = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(context, width),
        )
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(
                    module.weight,
                    std=STD / (math.sqrt(2 * depth) if name.endswith(".output") else 1),
                )
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.context:
            raise ConfigError(
                "data.context", x.shape[1], f"at most model.network.context = {self.context}"
            )
        x = self.characters(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.layers(x))).transpose(1, 2)
