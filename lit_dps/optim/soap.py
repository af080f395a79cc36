"""SOAP (Vyas et al. 2024, Algorithm 3): Adam in the eigenbasis of Shampoo's factors.

L <- b2 L + (1 - b2) G G', R <- b2 R + (1 - b2) G' G, with eigenvectors Q_L and Q_R.
m <- b1 m + (1 - b1) G, v <- b2 v + (1 - b2) (Q_L' G Q_R)^2,
W <- (1 - lr wd) W - lr Q_L (mhat' / (sqrt(v) + eps)) Q_R', where m' = Q_L' m Q_R.

After every `refresh_steps` updates, a QR decomposition of L Q_L replaces Q_L (Algorithm 4). As in
the authors' code (nikhilvyas/SOAP a1e5535), the first step only begins the factors: it moves no
matrix. The authors take b1 = b2 = 0.95, and 10 steps between refreshes.

A matrix is a parameter of two or more dimensions. AdamW trains the other parameters, at the same
rate, from the first step on. A side of more than `LARGEST_SIDE` has no factor. A refresh takes a QR
decomposition of each factor, and the first one takes ten, which suits layers of up to some hundred
units.

Departures from the authors' code:

- A filter of a convolution is a row. Theirs has a factor for each dimension.
- The decomposition is of (L / trace(L) + `SHIFT` I) Q_L, and the first basis comes from
  `START_ITERATIONS` of them, from the identity. They take the eigenvectors of the first L. Most
  eigenvalues of a wide layer are zero at first. Rounding then chooses their eigenvectors, and Adam
  takes full steps along them. With the shift, such directions keep the basis that they have. An
  input or output without gradients is a basis vector, so that its weights do not move.
- Weights decay before the step, as in AdamW.

The step of a pruned weight is not zero, because the bases mix the entries of a matrix. The engines
set pruned weights to zero after each update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dps.optim.adam import ADAMW, FIRST, SECOND
from lit_dps.optim.rule import Rule, State

LEFT, RIGHT = "left", "right"
BASES = {LEFT: "left_basis", RIGHT: "right_basis"}
# The second moment in the eigenbasis. It is flat, because it belongs to no single weights.
ROTATED = "rotated_exp_avg_sq"
LARGEST_SIDE = 10_000  # of the authors' code
# Relative to the sum of the eigenvalues. Rounding changes a basis by the machine epsilon over this.
SHIFT = 1e-5
START_ITERATIONS = 10
REFRESH_STEPS = 10  # of the authors, and the default of our modules


def _make_state(parameter: Tensor) -> dict[str, Tensor]:
    state = {FIRST: torch.zeros_like(parameter)}
    if parameter.ndim < 2:
        return {**state, SECOND: torch.zeros_like(parameter)}
    state[ROTATED] = parameter.new_zeros(parameter.numel())
    sizes = {LEFT: len(parameter), RIGHT: parameter[0].numel()}
    for side, size in sizes.items():
        if size <= LARGEST_SIDE:
            state[side] = parameter.new_zeros(size, size)
            state[BASES[side]] = torch.eye(size, dtype=parameter.dtype, device=parameter.device)
    return state


def _rotate(matrices: Tensor, state: State) -> Tensor:
    """Return Q_L' M Q_R, shape (networks, rows, columns)."""
    if LEFT in state:
        matrices = state[BASES[LEFT]].mT @ matrices
    if RIGHT in state:
        matrices = matrices @ state[BASES[RIGHT]]
    return matrices


def _rotate_back(matrices: Tensor, state: State) -> Tensor:
    """Return Q_L M Q_R', shape (networks, rows, columns)."""
    if LEFT in state:
        matrices = state[BASES[LEFT]] @ matrices
    if RIGHT in state:
        matrices = matrices @ state[BASES[RIGHT]].mT
    return matrices


def _next_basis(factors: Tensor, bases: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bases after a power iteration, and the order of the columns before it.

    Columns are first sorted by their eigenvalue, the largest first.

    Args:
        factors: Symmetric matrices, shape (networks, size, size).
        bases: Orthogonal matrices of the same shape.

    Returns:
        Orthogonal matrices of the same shape; the order, shape (networks, size).
    """
    products = factors @ bases
    order = (bases * products).sum(dim=1).argsort(dim=1, descending=True, stable=True)
    columns = order[:, None].expand_as(bases)
    traces = factors.diagonal(dim1=1, dim2=2).sum(dim=1)
    traces = traces.clamp(min=torch.finfo(factors.dtype).tiny)[:, None, None]
    shifted = products / traces + SHIFT * bases
    vectors, upper = torch.linalg.qr(shifted.gather(2, columns))
    # The sign of a column is arbitrary. This one leaves a basis without gradients as it is.
    signs = torch.where(upper.diagonal(dim1=1, dim2=2) < 0, -1.0, 1.0).to(vectors)
    return vectors * signs[:, None], order


def _refresh(state: State, rows: Tensor, second: Tensor, iterations: int) -> None:
    """Refresh the bases of some networks in place.

    Args:
        state: The state of a matrix.
        rows: Which networks.
        second: The second moments of all networks, shape (networks, rows, columns). They follow the
            order of the bases.
        iterations: How many power iterations.
    """
    for side, dim in ((LEFT, 1), (RIGHT, 2)):
        if side not in state:
            continue
        bases = state[BASES[side]]
        for _ in range(iterations):
            bases[rows], order = _next_basis(state[side][rows], bases[rows])
            of_rows = second[rows]
            places = order.unsqueeze(3 - dim).expand_as(of_rows)
            second[rows] = of_rows.gather(dim, places)


def _soap(weights, gradients, state, rate, hyperparameters, step) -> None:
    if SECOND in state:
        ADAMW.update_(weights, gradients, state, rate, hyperparameters, step)
        return
    networks = len(weights)
    beta1, beta2 = hyperparameters["beta1"], hyperparameters["beta2"]
    beta2_of_matrix = beta2.view(networks, 1, 1)
    epsilon = hyperparameters["epsilon"].view(networks, 1, 1)
    is_first = step == 1
    is_first_of_matrix = is_first.view(networks, 1, 1)
    matrices = gradients.flatten(2)
    average = state[FIRST]
    average.copy_(torch.where(is_first, average, average.lerp(gradients, 1 - beta1)))
    squares = _rotate(matrices, state).square()
    second = state[ROTATED].view(matrices.shape)
    second.copy_(torch.where(is_first_of_matrix, second, second.lerp(squares, 1 - beta2_of_matrix)))
    direction = _rotate(average.flatten(2), state) / (second.sqrt() + epsilon)
    direction = _rotate_back(direction, state).view(weights.shape)
    # Corrections are computed in float64, as in Adam. The first step is no update.
    updates = (step.double() - 1).clamp(min=1)
    corrections = (1 - beta2.double() ** updates).sqrt() / (1 - beta1.double() ** updates)
    moved = weights * (1 - rate * hyperparameters["weight_decay"])
    moved = moved - (rate * corrections).to(weights) * direction
    weights.copy_(torch.where(is_first, weights, moved))
    products = {LEFT: matrices @ matrices.mT, RIGHT: matrices.mT @ matrices}
    for side, product in products.items():
        if side in state:
            state[side].lerp_(product, 1 - beta2_of_matrix)
    is_due = (step - 1).remainder(hyperparameters["refresh_steps"]) == 0
    for rows, iterations in ((is_first, START_ITERATIONS), (is_due & ~is_first, 1)):
        rows = rows.view(networks)
        if rows.any():
            _refresh(state, rows, second, iterations)


SOAP = Rule(
    name="soap",
    hyperparameters=("beta1", "beta2", "epsilon", "weight_decay", "refresh_steps"),
    state=(FIRST, SECOND, ROTATED, *BASES, *BASES.values()),
    update_=_soap,
    make_state=_make_state,
)
