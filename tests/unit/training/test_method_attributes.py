"""Attributes that a method stores are found in its source."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from lit_dps.training.method_attributes import stored_in_use

OF_LIGHTNING = stored_in_use(LightningModule) | stored_in_use(LightningDataModule)


class Net(LightningModule):
    def training_step(self, batch, i):
        self.sizes.data.mul_(2)
        self.means[0].data.copy_(batch)
        self.data.append(i)
        return self.kept


class Data(LightningDataModule):
    def setup(self, stage):
        self.scaler.fit(stage)
        self.encoder.partial_fit(stage)
        self.table = self.pipeline.fit_transform(stage)


def test_methods_that_change_an_attribute_store_it():
    assert stored_in_use(Net) - OF_LIGHTNING == {"sizes", "means", "data"}
    assert stored_in_use(Data) - OF_LIGHTNING == {"scaler", "encoder", "table", "pipeline"}


def test_a_method_that_was_compiled_again_is_read():
    class Again(LightningModule):
        def training_step(self, batch, i):
            self.count = torch.tensor(i)

    step = Again.training_step
    step.__code__ = step.__code__.replace(co_varnames=("this", "batch", "i"))
    assert stored_in_use(Again) - OF_LIGHTNING == {"count"}
