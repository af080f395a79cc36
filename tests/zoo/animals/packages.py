"""Networks of public packages in nets as their users write them, each package imported where it is
used."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.animals.models import Net


def pictures(n: int, seed: int) -> TensorDataset:
    """n pictures of 3 x 16 x 16 in four classes that differ by their patterns."""
    patterns = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    y = torch.arange(n) % 4
    return TensorDataset(
        patterns[y] + torch.randn(n, 3, 16, 16, generator=torch.Generator().manual_seed(seed)), y
    )


def sentences(n: int, seed: int) -> TensorDataset:
    """n sentences of eight words out of 16, in which each word tells the next one, but for one word
    in ten."""
    generator = torch.Generator().manual_seed(seed)
    words = [torch.randint(16, (n,), generator=generator)]
    for _ in range(7):
        slips = torch.rand(n, generator=generator) < 0.1
        words.append(
            torch.where(
                slips, torch.randint(16, (n,), generator=generator), (5 * words[-1] + 3) % 16
            )
        )
    return TensorDataset(torch.stack(words, 1))


class Pictures(LightningDataModule):
    """Pictures."""

    make = staticmethod(pictures)

    def __init__(self, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(self.make(96, 1), self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.make(40, 2), 20)


class Sentences(Pictures):
    """Sentences."""

    make = staticmethod(sentences)


class SmallResNet(Net):
    """A residual network of timm with batch normalization, whose branches begin as nothing."""

    def __init__(self, lr: float = 1e-2, zero_init_last: bool = True):
        from timm.models.resnet import BasicBlock, ResNet

        super().__init__(4, lr)
        self.body, self.head = nn.Identity(), nn.Identity()
        channels = (8, 16, 16, 16)
        self.net = ResNet(
            BasicBlock,
            (1, 1, 1, 1),
            4,
            channels=channels,
            stem_width=8,
            zero_init_last=zero_init_last,
        )

    def forward(self, x):
        return self.net(x)


class LanguageModel(Net):
    """Learns the next word by a network of transformers.

    Args:
        kind: "gpt2", with an embedding that is the output layer too, or "llama", with norms of its
            own.
    """

    def __init__(self, lr: float = 1e-2, kind: str = "gpt2"):
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

        super().__init__(4, lr)
        self.body, self.head = nn.Identity(), nn.Identity()
        if kind == "gpt2":
            config = GPT2Config(
                vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0
            )
            self.net = GPT2LMHeadModel(config)
        else:
            sizes = {
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            }
            self.net = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))

    def training_step(self, batch, batch_idx):
        (words,) = batch
        return self.net(input_ids=words, labels=words).loss

    def validation_step(self, batch, batch_idx):
        (words,) = batch
        logits = self.net(input_ids=words).logits[:, :-1]
        self.log("val_error", (logits.argmax(2) != words[:, 1:]).float().mean())
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten()))
