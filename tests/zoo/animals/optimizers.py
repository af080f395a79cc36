"""Nets whose weights are moved by more than plain gradient steps."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.zoo.animals.models import Net


class Lookahead(torch.optim.Optimizer):
    """Every k steps of another optimizer it goes back, halfway to slow weights that it has kept
    from the beginning."""

    def __init__(self, inner: torch.optim.Optimizer, k: int = 5, alpha: float = 0.5):
        super().__init__(inner.param_groups, {})
        self.inner, self.k, self.alpha, self.taken = inner, k, alpha, 0
        self.param_groups = inner.param_groups
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.taken += 1
        if self.taken % self.k == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            for p, slow in zip(fast, self.slow, strict=True):
                p.copy_(slow.lerp_(p, self.alpha))
        return loss


class WithLookahead(Net):
    """Trained by `Lookahead` around Adam."""

    def configure_optimizers(self):
        return Lookahead(super().configure_optimizers())


class WithMuon(Net):
    """Matrices alone, trained by Muon, which makes every update orthogonal."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.head = nn.Linear(width, 4, bias=False)

    def make_body(self, width: int) -> nn.Module:
        linear = nn.Linear(8, width, bias=False), nn.Linear(width, width, bias=False)
        return nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh())

    def configure_optimizers(self):
        return torch.optim.Muon(self.parameters(), self.hparams.lr)


class WithDecay(Net):
    """AdamW with strong weight decay."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.hparams.lr, weight_decay=0.5)


class Groups(Net):
    """Decays its matrices alone, and trains its head at another rate.

    Args:
        kind: "adamw", "sgd" or "nesterov".
        schedule: "" for none, "cosine" for each step, "lambda" for a function of each group.
        head_momentum: Momentum of the head, if the kind has one.
        swapped: Whether the biases are decayed in place of the matrices.
    """

    def __init__(
        self,
        width: int = 16,
        lr: float = 1e-2,
        kind: str = "adamw",
        schedule: str = "",
        head_momentum: float = 0.5,
        swapped: bool = False,
    ):
        super().__init__(width, lr)
        self.save_hyperparameters()

    def configure_optimizers(self):
        arguments = self.hparams
        matrices, biases = [], []
        for parameter in self.body.parameters():
            (matrices if parameter.ndim > 1 else biases).append(parameter)
        groups = [
            {"params": biases, "weight_decay": 0.0},
            {"params": matrices, "weight_decay": 0.3},
            {"params": list(self.head.parameters()), "lr": 3 * arguments.lr},
        ]
        if arguments.swapped:
            groups[0]["params"], groups[1]["params"] = matrices, biases
        if arguments.kind == "adamw":
            groups[2]["betas"] = (0.8, 0.95)
            optimizer = torch.optim.AdamW(groups, arguments.lr, weight_decay=0.1)
        else:
            groups[2]["momentum"] = arguments.head_momentum
            nesterov = arguments.kind == "nesterov"
            optimizer = torch.optim.SGD(groups, arguments.lr, 0.9, nesterov=nesterov)
        if arguments.schedule == "cosine":
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        elif arguments.schedule == "lambda":
            halving, falling = lambda step: 0.5 ** (step // 8), lambda step: 1 - step / 40
            factors = [halving, halving, falling]
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        else:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Decayed(Net):
    """SGD with momentum and weight decay, in one group."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.lr, 0.9, weight_decay=0.05)


class WithLBFGS(Net):
    """An optimizer that asks for the loss several times a step."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), self.hparams.lr, max_iter=3)


class WeightNoise(Net):
    """Shakes its weights after every batch."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for p in self.parameters():
            p.add_(0.02 * torch.randn_like(p))


class GradientNoise(Net):
    """Clips and shakes its gradients, as private learning does."""

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        for p in self.parameters():
            p.grad.add_(0.01 * torch.randn_like(p))


class ClippedWeights(Net):
    """Clips its weights after every step, as a Wasserstein critic does."""

    @torch.no_grad()
    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        for p in self.parameters():
            p.clamp_(-0.8, 0.8)


class MaxNorm(Net):
    """Bounds the norm of every row of weights after each batch."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for p in self.parameters():
            if p.ndim == 2:
                p.copy_(p.renorm(2, 0, 1.0))


class Teacher(Net):
    """Validates a teacher that follows the student after each batch."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.student = nn.Sequential(self.body, self.head)
        del self.body, self.head
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x):
        return self.student(x) if self.training else self.teacher(x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.student.parameters(), self.hparams.lr)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            t.lerp_(s, 0.3)


class Manual(Net):
    """Takes its optimizer steps itself."""

    def __init__(self, width: int = 16, lr: float = 1e-2, tells: bool = False):
        super().__init__(width, lr)
        self.automatic_optimization = False
        self.tells = tells

    def training_step(self, batch, batch_idx):
        optimizer, loss = self.optimizers(), self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss if self.tells else None


class Adversarial(Manual):
    """A classifier and a critic of its features, each with an optimizer of its own.

    Args:
        critic_every: The critic learns at each batch whose index is a multiple of this.
        classifier_every: The same of the classifier.
    """

    def __init__(
        self, width: int = 16, lr: float = 1e-2, critic_every: int = 1, classifier_every: int = 1
    ):
        super().__init__(width, lr)
        self.every = classifier_every, critic_every
        self.critic = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        noise = torch.rand(len(x), self.hparams.width, device=x.device) * 2 - 1
        real, made = self.critic(noise), self.critic(self.body(x).detach())
        losses = self.loss(batch), real.mean() - made.mean() + 0.1 * (real**2 + made**2).mean()
        for optimizer, loss, every in zip(self.optimizers(), losses, self.every, strict=True):
            if batch_idx % every == 0:
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

    def configure_optimizers(self):
        classifier = [*self.body.parameters(), *self.head.parameters()]
        return [
            torch.optim.Adam(part, self.hparams.lr)
            for part in (classifier, self.critic.parameters())
        ]
