"""A classifier as anybody would write it: Muon for matrices, AdamW for the other parameters.
Nothing of lit_dps."""

import torch
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TeacherData(LightningDataModule):
    """Random inputs with the classes of a fixed random network: 16,000 to train on, 1,000 to
    validate."""

    def __init__(self, batch_size: int = 32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(17000, 32, generator=generator)
        hidden = torch.relu(x @ torch.randn(32, 16, generator=generator))
        label = (hidden @ torch.randn(16, 4, generator=generator)).argmax(1)
        self.train = TensorDataset(x[:16000], label[:16000])
        self.val = TensorDataset(x[16000:], label[16000:])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 1000)


class MuonNet(LightningModule):
    """`lr` is the rate of Muon. The rate of AdamW is `adam_ratio` times as large."""

    def __init__(self, width: int = 64, lr: float = 0.01, adam_ratio: float = 0.2):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.embedding = nn.Linear(32, width)
        self.middle = nn.Sequential(
            nn.ReLU(), nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, width)
        )
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        return self.head(torch.relu(self.middle(self.embedding(x))))

    def training_step(self, batch, batch_idx):
        x, label = batch
        muon, adam = self.optimizers()
        loss = nn.functional.cross_entropy(self(x), label)
        muon.zero_grad()
        adam.zero_grad()
        self.manual_backward(loss)
        muon.step()
        adam.step()
        return loss

    def validation_step(self, batch, batch_idx):
        x, label = batch
        self.log("val_error", (self(x).argmax(1) != label).float().mean())

    def configure_optimizers(self):
        matrices = [each for each in self.middle.parameters() if each.ndim == 2]
        of_muon = {id(each) for each in matrices}
        others = [each for each in self.parameters() if id(each) not in of_muon]
        muon = torch.optim.Muon(matrices, lr=self.hparams.lr, weight_decay=0.01)
        adam = torch.optim.AdamW(others, lr=self.hparams.adam_ratio * self.hparams.lr)
        return [muon, adam]
