"""Gradients of pruned weights are zero wherever a module looks at them, and the module is left as
it was."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F

from tests.support.errors import raises_about
from tests.support.tiny import Plain, weights
from tests.unit.training.test_pruning_callback import pruned


class Clipped(Plain):
    """Notes the norm that a clipping of its own finds."""

    def __init__(self):
        super().__init__()
        self.norms, self.kept = [], []

    def clip(self):
        grads = [p.grad.clone() for p in self.parameters()]
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)))
        kept = [(g * (p != 0)).flatten() for p, g in zip(self.parameters(), grads, strict=True)]
        self.kept.append(float(torch.cat(kept).norm()))


class AfterBackward(Clipped):
    def on_after_backward(self):
        self.clip()


class Manual(Clipped):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.network(batch[0]), batch[1]))
        self.clip()
        optimizer.step()


@pytest.mark.parametrize("kind", [AfterBackward, Manual])
def test_a_clipping_of_the_module_s_own_sees_the_kept_ones_alone(kind):
    module, _ = pruned(0.7, module=kind(), steps=4)
    assert module.norms == pytest.approx(module.kept, rel=1e-5) and min(module.norms) > 0


def test_those_of_accumulated_batches_too():
    module, _ = pruned(0.7, module=AfterBackward(), steps=2, accumulate_grad_batches=2)
    assert len(module.norms) == 4 and module.norms == pytest.approx(module.kept, rel=1e-5)


class Raises(Plain):
    def on_train_batch_end(self, *args):
        raise RuntimeError("a guard")


def test_no_hook_is_left_on_a_parameter():
    module, _ = pruned(0.7)
    failed = Raises()
    with raises_about(RuntimeError, "a guard"):
        pruned(0.7, module=failed)
    assert not any(p._backward_hooks for m in (module, failed) for p in m.parameters())


class Written(Plain):
    """Writes its gradients itself."""

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad = torch.ones_like(p)


class Pickled(Plain):
    def on_train_batch_end(self, *args):
        self.copied = [pickle.loads(pickle.dumps(self.network))]


def test_a_module_is_pickled_meanwhile_and_may_write_gradients():
    module, callback = pruned(0.7, module=Pickled(), steps=1)
    copied = weights(module.copied[0])
    assert all(
        torch.equal(w, copied[name.removeprefix("network.")]) for name, w in weights(module).items()
    )
    module, callback = pruned(0.7, module=Written(), optimizer="momentum")
    assert not any(w[~callback.mask[name]].any() for name, w in weights(module).items())
