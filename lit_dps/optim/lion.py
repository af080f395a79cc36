"""Lion (Chen et al. 2023, Algorithm 2): a step of equal size for all weights, by a sign.

w <- w - lr (sign(b1 m + (1 - b1) g) + wd w), m <- b2 m + (1 - b2) g. The authors take b1 = 0.9 and
b2 = 0.99, a rate 3 to 10 times smaller than AdamW's, and a weight decay that is larger by as much.
A pruned weight stays zero, because its gradient and m are zero, and so is their sign.
"""

from __future__ import annotations

from lit_dps.optim.rule import Rule

AVERAGE = "exp_avg"


def _lion(weights, gradients, state, rate, hyperparameters, step) -> None:
    average = state[AVERAGE]
    direction = average.lerp(gradients, 1 - hyperparameters["beta1"]).sign_()
    average.lerp_(gradients, 1 - hyperparameters["beta2"])
    weights.mul_(1 - rate * hyperparameters["weight_decay"])
    weights.addcmul_(direction, rate, value=-1)


LION = Rule(
    name="lion",
    hyperparameters=("beta1", "beta2", "weight_decay"),
    state=(AVERAGE,),
    update_=_lion,
    elementwise=True,
)
