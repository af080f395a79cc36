"""A small transformer decoder over characters (Vaswani et al. 2017)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lit_dps.core.errors import ConfigError

STD = 0.02  # of initial weights (Radford et al. 2019)


class Attention(nn.Module):
    """Causal self-attention of several heads.

    It is written out, because fused kernels have no second derivatives.
    """

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
    """Attention, then a network with one hidden layer at each position, with residual connections.

    The input of both is normalized.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.output(nn.functional.gelu(self.hidden(self.norm2(x))))


class Transformer(nn.Module):
    """Predicts the next character at every position, from this character and those before it.

    Pre-norm layers, learned positions, no dropout, untied output. Input (batch, length) of
    character numbers, output (batch, vocabulary, length) of logits. Weights are normal with
    deviation 0.02. Those that add to the residual stream are smaller by sqrt(2 depth) (Radford et
    al. 2019). Biases are zero. Shallue et al. (2019) vary width and depth of such networks.

    Args:
        vocabulary: Number of different characters (`lit_dps.data.Text.vocabulary`).
        context: Characters of the longest input.
        width: Width of the residual stream, a multiple of `heads`.
        depth: Number of layers.
        heads: Heads of each attention.

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
        numbers = dict(
            vocabulary=vocabulary, context=context, width=width, depth=depth, heads=heads
        )
        for key, number in numbers.items():
            if number < 1:
                raise ConfigError(f"model.network.{key}", number, "at least 1")
        if width % heads:
            raise ConfigError(
                "model.network.width", width, f"a multiple of model.network.heads = {heads}"
            )
        self.vocabulary = vocabulary
        self.context = context
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                std = STD
                if name.endswith(".output"):  # adds to the residual stream
                    std = STD / math.sqrt(2 * depth)
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear):
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.context:
            raise ConfigError(
                "data.context", x.shape[1], f"at most model.network.context = {self.context}"
            )
        x = self.characters(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.layers(x))).transpose(1, 2)
