"""Networks in which weights join the training after the first step."""

from __future__ import annotations

import torch

from tests.zoo.animals.models import Net


class Backbone(Net):
    """For a finetuning callback: its body is `backbone`, and the optimizer gets what is not
    frozen."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.backbone = self.body
        del self.body

    def forward(self, x):
        return self.head(self.backbone(x))

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.Adam(trained, self.hparams.lr)
