"""Readings as users write them: a sharpness, a memory, and others that a study must refuse."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lit_dps.pruning import Mask, Random
from lit_dps.readings import Moment, Reading

EXAMPLES = 48


class TinyNetwork(nn.Sequential):
    """49 -> 5 -> 10: 310 parameters, whose Hessian fits in memory."""

    def __init__(self):
        layers = nn.Linear(49, 5), nn.Tanh(), nn.Linear(5, 10)
        super().__init__(nn.AvgPool2d(4), nn.Flatten(), *layers)


def loss_of(moment: Moment) -> Tensor:
    """The mean training loss of the first examples."""
    total = 0.0
    for loss, size in moment.losses(batch_size=16, examples=EXAMPLES):
        total = total + loss * size / EXAMPLES
    return total


class Sharpness(Reading):
    """The Hessian's eigenvalue of largest absolute value, by power iteration."""

    name = "sharpness"

    def __init__(self, iterations: int = 10):
        self.iterations = iterations

    def read(self, moment):
        weights = [w for w in moment.module.parameters() if w.requires_grad]
        gradients = torch.autograd.grad(loss_of(moment), weights, create_graph=True)
        vector = [torch.randn_like(weight) for weight in weights]
        value = 0.0
        for _ in range(self.iterations):
            norm = torch.cat([part.flatten() for part in vector]).norm()
            vector = [part / norm for part in vector]
            product = torch.autograd.grad(gradients, weights, vector, retain_graph=True)
            value = sum((a * b).sum() for a, b in zip(vector, product, strict=True))
            vector = product
        return {"sharpness": value}


class FullHessian(Reading):
    """The same eigenvalue, from the full Hessian."""

    name = "full_hessian"

    def read(self, moment):
        weights = [w for w in moment.module.parameters() if w.requires_grad]
        gradients = torch.autograd.grad(loss_of(moment), weights, create_graph=True)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        rows = []
        for entry in flat:
            row = torch.autograd.grad(entry, weights, retain_graph=True)
            rows.append(torch.cat([part.flatten() for part in row]))
        hessian = torch.stack(rows).double()
        values = torch.linalg.eigvalsh((hessian + hessian.T) / 2)
        return {"top": values[values.abs().argmax()], "parameters": len(flat)}


class FinalNorm(Reading):
    """The norm of the weights at the end."""

    name = "final"
    when = "end"

    def read(self, moment):
        return {"final_norm": norm_of(moment)}


class Flagged(Reading):
    """Counts steps in a flag, and sets another one at the end."""

    name = "flagged"
    when = "end"

    def count(self, rate):
        self.flags["counted"] = self.flags.get("counted", 0) + 1

    def read(self, moment):
        self.flags["end"] = moment.step
        return {"flagged": 1.0}


class Norm(Reading):
    """The norm of the weights every few steps, its largest value so far, and a random number."""

    name = "norm"
    when = "step"

    def __init__(self, interval: int = 3):
        self.interval = interval
        self.largest = 0.0

    def read(self, moment):
        norm = norm_of(moment)
        self.largest = max(self.largest, norm)
        return {"norm": norm, "largest_norm": self.largest, "random": float(torch.rand(()))}

    def state_dict(self):
        return {"largest": self.largest}

    def load_state_dict(self, state):
        self.largest = state["largest"]


def norm_of(moment: Moment) -> float:
    return float(torch.cat([p.detach().flatten() for p in moment.module.parameters()]).norm())


class Wrong(Reading):
    """The share of the validation split that the network predicts wrongly."""

    name = "wrong"

    def read(self, moment):
        wrong = []
        moment.module.eval()
        for x, y in moment.validation_batches():
            wrong += (moment.module(x).argmax(1) != y).tolist()
        return {"wrong": sum(wrong) / len(wrong)}


class Disturbing(Reading):
    """Changes all that it can reach through the copy, and draws from every generator."""

    name = "disturbing"
    when = "step"

    def read(self, moment):
        next(iter(moment.data.train_dataloader()))
        with torch.no_grad():
            for parameter in moment.module.parameters():
                parameter.zero_()
        for mask in moment.masks.values():
            mask.zero_()
        moment.module.eval()
        for loss, _ in moment.losses(examples=8):
            loss.backward()
        return {"zero": norm_of(moment)}


class Drift(Reading):
    """The distance that the weights moved since the last reading, without a state_dict."""

    name = "drift"
    when = "step"
    interval = 3

    def __init__(self):
        self.before = torch.zeros(310)
        self.moved = []

    def read(self, moment):
        weights = torch.cat([p.detach().flatten() for p in moment.module.parameters()]).cpu()
        self.moved.append(float((weights - self.before).norm()))
        self.before = weights
        return {"moved": self.moved[-1], "total": sum(self.moved)}


class Same(Norm):
    """Another reading with the name of `Norm`."""


class Colliding(Reading):
    """Has a column of every table."""

    name = "colliding"

    def read(self, moment):
        return {"k_star": 1.0}


class Reserved(Colliding):
    """Has the name of a column."""

    name = "learning_rate"


class Empty(Reading):
    name = "empty"
    when = "end"

    def read(self, moment):
        return {}


class Text(Reading):
    name = "text"
    when = "step"
    interval = 1000

    def read(self, moment):
        return {"text": "much"}


class Changing(Reading):
    """Changes the weights of the trained module itself."""

    name = "changing"

    def read(self, moment):
        trained = moment.module.trainer.lightning_module
        with torch.no_grad():
            next(trained.parameters()).add_(1)
        return {"changed": 1.0}


class Failing(Reading):
    """Fails at the end of a stacked trial."""

    name = "failing"
    when = "end"

    def read(self, moment):
        raise ArithmeticError("no value")


class Named(Norm):
    """`Norm` under another name."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name


class Redraws(Random):
    """A pruning method that draws another mask of the same count after every 3 steps."""

    every = 3

    def next_mask(self, update):
        tensors = {}
        for name, mask in update.mask.items():
            order = torch.randperm(mask.numel(), generator=update.generator)
            tensors[name] = mask.flatten()[order].view(mask.shape)
        return Mask(tensors)


class MaskReading(Reading):
    """A fingerprint of the mask, and how many weights are not zero where it prunes."""

    name = "mask"
    when = "step"
    interval = 2

    def read(self, moment):
        fingerprint = 0
        outside = 0
        for name, parameter in moment.module.named_parameters():
            if name in moment.masks:
                mask = moment.masks[name].bool().flatten()
                positions = torch.arange(mask.numel(), device=mask.device)
                fingerprint += int(positions[mask].sum())
                outside += int((parameter.detach().flatten()[~mask] != 0).sum())
        return {"fingerprint": fingerprint, "outside": outside}
