"""PruningCallback: prunes a module at initialization and keeps its pruned weights at zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lit_dps.core.error_origin import error_text, place_in_user_code
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.trial import COPIES, check_sparsity
from lit_dps.pruning import PRUNERS, Mask, Network, mask_flags, prunable, prune, pruner_of
from lit_dps.pruning.attributes import hidden_tensors
from lit_dps.pruning.isometry import STEPS
from lit_dps.pruning.mask import Biases, multiply
from lit_dps.pruning.network_copies import copies_of, why_pruned_weights_return, why_unprunable
from lit_dps.pruning.pruner import Scores
from lit_dps.pruning.start import Init, Redraw, check_init, start
from lit_dps.training.trainer_state import user_callbacks
from lit_dps.training.training_pass import TrainingPass
from lit_dps.training.unmasked import UnmaskedWeights


class PruningCallback(Callback):
    """Prunes before the first step, in one global top-k, and trains the weights that are left from
    where they stand.

    The method sees a copy of the module and passes over the training split (`TrainingPass`). Pruned
    are the parameters that an optimizer trains and that the loss depends on
    (`lit_dps.pruning.prunable` says which of them), and the copies of them that the module or a
    callback holds, such as a momentum teacher's, be they in a list or a dict.

    Gradients are masked as they come out of a backward pass, so that any clipping sees the pruned
    network, and before every optimizer step, since a module may write them itself; weights after
    it, since an optimizer, a hook or a second optimizer may have moved them; once more before a
    check.

    Args:
        sparsity: Share of the parameters to prune, in [0, 1); 0 prunes nothing.
        method: "snip" (the paper's), "magnitude", "random", "snip_it", "iterative_snip", "force",
            "grasp", "synflow", "snap", "snap_it", "random_layerwise", "smart_ratio", "shuffle", or
            the class path of a `lit_dps.pruning.Pruner`.
        biases: "paper" prunes over weights and biases, as the authors' code does; "keep" over the
            weights alone.
        batch_size: Examples a batch of the saliency pass. A last short batch weighs as much as its
            share, so the saliency is the sum over the examples, whatever the batch size.
        seed: Seed of the "random" score.
        exclude: Patterns of names of parameters that stay dense, such as "head.*", "*.cls_token",
            or "teacher.*" for a copy of the pruned network.
        options: Arguments of the method's constructor.
        init: The weights that are trained from under the mask (`lit_dps.pruning.start`): the
            "original" ones that were scored; "reinit", new ones drawn by the network's own
            initialization, in a study; "isometry", the original ones moved towards orthogonal
            layers (Lee et al. 2020). At sparsity 0 they are always the original ones.

    Attributes:
        mask: The mask, once pruned; None before, and at sparsity 0.
        pruner: The method.
        scores: The scores that the mask was made from, where they serve other sparsities; None
            before, and for a mask from a checkpoint.
        key: Of the pass that the scores were taken over (`TrainingPass.key`).
        is_short: Whether to compute the scores from a few batches only, to test that this works.
            Set it before a run.
        redraw: Builds the module, for "reinit"; None where nobody can. Set before a run.
        observed: What a reader of the table should know of the mask, as in `TrialResult.observed`.

    Raises:
        ConfigError: for a value out of its range; when training starts, for a module that cannot be
            pruned so.
    """

    def __init__(
        self,
        sparsity: float = 0.0,
        method: str = "snip",
        biases: Biases = "paper",
        batch_size: int = 100,
        seed: int = 0,
        exclude: Sequence[str] = (),
        options: dict[str, Any] | None = None,
        init: Init = "original",
    ):
        check_sparsity("pruning.sparsity", sparsity)
        self.pruner = pruner_of(method, options)
        if biases not in get_args(Biases):
            raise ConfigError("pruning.biases", biases, f"one of {', '.join(get_args(Biases))}")
        if batch_size < 1:
            raise ConfigError("pruning.batch_size", batch_size, "at least 1 example")
        self.sparsity, self.method, self.biases, self.exclude = (
            sparsity,
            method,
            biases,
            tuple(exclude),
        )
        check_init(init)
        self.batch_size, self.seed, self.init = batch_size, seed, init
        self.redraw: Redraw | None = None
        self.is_short = False
        self._given: tuple[tuple[int, ...], Scores] | None = None
        self._hooks: list[RemovableHandle] = []
        self._begin()

    def _begin(self) -> None:
        self.mask: Mask | None = None
        self.scores: Scores | None = None
        self.observed: dict[str, float] = {}
        self.key: tuple[int, ...] | None = None
        self._copies: dict[str, str] = {}
        # Parameters that the method considered but did not mask, such as those of nodes that stay.
        self._left_dense: set[str] = set()
        self._masked: dict[str, tuple[Tensor, Tensor]] = {}  # name -> tensor, its mask as numbers
        self._hooked: list[Optimizer] = []
        # The user's callbacks, which may keep copies of the network, by the name of their class
        self._callbacks: dict[str, list[Callback]] = {}
        self._is_swapped = (
            False  # whether the last check found other tensors in the place of masked ones
        )
        self._unhook()

    def reuse(self, key: tuple[int, ...], scores: Scores) -> None:
        """Takes these scores in the next run instead of computing them, which costs as much as an
        epoch.

        Args:
            key: Of the pass that they were taken over; if the run's is another one they are
                computed all the same.
            scores: Of a network of the same initial weights.
        """
        self._given = key, scores

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # a checkpoint is loaded after this
            self._begin()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in user_callbacks(trainer):
            self._callbacks.setdefault(f"callbacks.{type(callback).__name__}", []).append(callback)
        if (
            self.sparsity > 0 and self.mask is None
        ):  # a run taken up from a checkpoint brings its mask
            self._prune(trainer, pl_module)
        if self.mask is None:
            return
        self._watch(pl_module)
        self._zero()
        if why := why_pruned_weights_return(pl_module, self.mask):
            raise ConfigError(
                "study.sparsities", self.sparsity, f"0 for {type(pl_module).__name__}: {why}"
            )
        is_masked = partial(self._is_masked, pl_module)
        self._unmasked = UnmaskedWeights(self.biases, self.exclude, is_masked)
        self._unmasked.observed = self.observed  # set already in a run from a checkpoint
        self._hook_optimizers(trainer, pl_module)

    def _hook_optimizers(self, trainer: Trainer, module: LightningModule) -> None:
        """Make the callback act after each optimizer step, also of optimizers that were added
        later."""
        for optimizer in trainer.optimizers:
            known = any(optimizer is other for other in self._hooked)
            if not known and hasattr(optimizer, "register_step_post_hook"):
                optimizer.register_step_post_hook(partial(self._after_step, trainer, module))
                self._hooked.append(optimizer)

    def _is_masked(self, module: LightningModule, name: str, tensor: Tensor) -> bool:
        """Return True if a tensor is masked. A tensor that replaced a masked one gets its mask
        first."""
        if name in self._left_dense:
            return True
        if name in self.mask and self._masked[name][0] is not tensor:
            self._watch(module)
        return any(tensor is masked for masked, _ in self._masked.values())

    def _prune(self, trainer: Trainer, module: LightningModule) -> None:
        name = type(module).__name__
        if why := why_unprunable(module):
            raise ConfigError("study.sparsities", self.sparsity, f"0 for {name}: {why}")
        if not module.automatic_optimization and self.pruner.passes:
            without = " or ".join(method for method, kind in PRUNERS.items() if kind.passes == 0)
            raise ConfigError(
                "pruning.method",
                self.method,
                f"{without} for {name}: with manual optimization its training_step is no loss "
                "alone",
            )
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        held = {
            id(parameter)
            for group in groups
            for parameter in group["params"]
            if parameter.requires_grad
        }
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad and id(p) in held)
        parameters = prunable(module, self.biases, self.exclude, held)
        run = TrainingPass(trainer, module, self.batch_size, is_short=self.is_short)
        (key, known), self._given, self.key = self._given or (None, None), None, run.key
        copy = partial(self._copy, run, module, list(parameters))
        known = known if key == run.key else None
        try:
            self.mask, self.scores = prune(self.pruner, copy, self.sparsity, self.seed, name, known)
        except (
            AttributeError,
            AssertionError,
            IndexError,
            KeyError,
            TypeError,
            ValueError,
        ) as error:
            if isinstance(error, UserError) or not self.pruner.passes:
                raise
            raise self._refusal_of_pass(name, error) from error
        # An exact method masks all parameters that the loss depends on; the others may join later.
        if not self.pruner.exact:
            self._left_dense = parameters.keys() - self.mask.keys()
        self._copies = {
            copy: name
            for copy, name in copies_of(module, self.mask, held, self._callbacks).items()
            if not any(fnmatchcase(copy, pattern) for pattern in self.exclude)
        }
        self.observed = mask_flags(self.mask, self.pruner, trained)
        steps = 1 if self.is_short else STEPS
        self.observed |= start(self.init, module, self.mask, copy, self.redraw, steps)
        self._follow(module)
        if self._copies:
            self.observed[COPIES] = sum(self.mask[name].numel() for name in self._copies.values())

    def _refusal_of_pass(self, name: str, error: Exception) -> ConfigError:
        """Return the error for a training step that fails in the pruning pass."""
        text = " ".join(error_text(error).split())[:200]
        what = f"{type(error).__name__}: {text}{place_in_user_code(error)}"
        return ConfigError(
            "pruning.method",
            self.method,
            f"magnitude or another method without a pruning pass for {name}: its training_step "
            "failed in the pruning "
            f"pass, which runs before training: {what}. Or make what it needs in __init__. "
            "If it needs full batches, use another pruning.batch_size or a loader with drop_last. "
            "If it fails at sparsity 0 too, correct training_step",
        )

    def _follow(self, module: LightningModule) -> None:
        """Copies of pruned parameters follow where these were moved."""
        state = self._tensors(module)
        with torch.no_grad():
            for copy, name in self._copies.items():
                state[copy].copy_(state[name])

    @contextmanager
    def _copy(
        self, run: TrainingPass, module: LightningModule, names: Sequence[str]
    ) -> Iterator[Network]:
        """A copy of the module, for the method to work on."""
        with run.without_side_effects(begin=True) as twin:

            def loss_of(batch: Any, i: int) -> Tensor | None:
                loss = run.loss(twin, batch, i)
                if i == 0 and loss is not None:
                    self._refuse_reentrant(loss, module)
                    self._refuse_shared(loss, module)
                return loss

            named = dict(twin.named_parameters())
            parameters = {name: named[name] for name in names}
            yield Network(twin, parameters, self.batch_size, run.__len__, run.batches, loss_of)

    def _refuse_reentrant(self, loss: Tensor, module: LightningModule) -> None:
        """Raise ConfigError for reentrant checkpointing, whose loss has no gradients that a method
        can ask for."""
        if any(node.name() == "CheckpointFunctionBackward" for node in graph_of(loss)):
            why = (
                "its torch.utils.checkpoint hides weights from the pruning pass: call it with "
                "use_reentrant=False"
            )
            raise ConfigError(
                "pruning.method", self.method, f"magnitude for {type(module).__name__}: {why}"
            )

    def _refuse_shared(self, loss: Tensor, module: LightningModule) -> None:
        """The loss of a copy must not depend on the module that it is a copy of."""
        originals = [parameter for parameter in module.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(loss, originals, allow_unused=True, retain_graph=True)
        if any(gradient is not None for gradient in found):
            why = (
                "a copy of it, which the pruning pass runs on, still uses the parameters of the "
                "original"
            )
            raise ConfigError(
                "pruning.method", self.method, f"magnitude for {type(module).__name__}: {why}"
            )

    def _watch(self, module: LightningModule) -> None:
        """Notes the tensors to be masked, and their masks as numbers: a product costs less than
        with a bool."""
        state, names = self._tensors(module), {name: name for name in self.mask} | self._copies
        present = {id(tensor) for tensor in state.values()}
        for name, (tensor, _) in self._masked.items():
            if name not in state and id(tensor) in present:  # its layer was wrapped later
                state[name] = tensor
        names = {
            name: of for name, of in names.items() if name in state or name in self.mask
        }  # copies may go
        for name, of in names.items():
            if name not in state or state[name].shape != self.mask[of].shape:
                raise ConfigError(
                    "model", type(module).__name__, f"a module that keeps its parameter {name}"
                )
        self._masked = {
            name: (state[name], self.mask[of].to(state[name])) for name, of in names.items()
        }
        self._unhook()
        trained = (self._masked[name] for name in self.mask if state[name].requires_grad)
        self._hooks = [
            parameter.register_hook(partial(torch.mul, keep)) for parameter, keep in trained
        ]

    def _unhook(self, *args: Any, **kwargs: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _tensors(self, module: LightningModule) -> dict[str, Tensor]:
        found = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers()),
        }
        if self._copies.keys() - found.keys():
            return {**hidden_tensors(module, self._callbacks), **found}
        return found

    def _zero(self, *args: Any) -> None:
        """Sets the pruned weights to zero."""
        with torch.no_grad():
            multiply(self._masked.values())

    def _after_step(
        self, trainer: Trainer, module: LightningModule, optimizer: Optimizer, *args: Any
    ) -> None:
        """Sets those to zero that an optimizer moved; others may still be needed as they are by a
        backward pass."""
        self._unmasked.look(trainer, module, optimizer)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        with torch.no_grad():
            multiply(pair for pair in self._masked.values() if id(pair[0]) in held)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        pairs = [self._masked[name] for name in (self.mask or ())]
        multiply((parameter.grad, keep) for parameter, keep in pairs if parameter.grad is not None)
        if self.mask is not None and not hasattr(optimizer, "register_step_post_hook"):
            self._unmasked.look(trainer, pl_module, optimizer)

    def on_train_batch_start(self, trainer, pl_module, *args: Any) -> None:
        if self.mask is not None:
            self._hook_optimizers(trainer, pl_module)
            self._unmasked.begin_batch(trainer)
        if self._is_swapped:  # weights that were in place for a check are gone, mostly
            self._is_swapped = self._watch_replaced(pl_module)
        self._zero()

    def on_train_batch_end(self, trainer, pl_module, *args: Any) -> None:
        self._zero()

    def on_validation_batch_start(
        self, trainer, pl_module, batch, batch_idx, dataloader_idx=0
    ) -> None:
        # after all hooks that may put other weights in place for a check
        if self._masked and batch_idx == dataloader_idx == 0:
            self._is_swapped = self._watch_replaced(pl_module)
            self._zero()

    def _watch_replaced(self, module: LightningModule) -> bool:
        """Masks tensors that stand in the place of masked ones. Returns whether there are any."""
        state = self._tensors(module)
        is_replaced = any(
            state.get(name) is not tensor for name, (tensor, _) in self._masked.items()
        )
        if is_replaced:
            self._watch(module)
        return is_replaced

    teardown = on_exception = _unhook

    def state_dict(self) -> dict[str, Any]:
        mask = dict(self.mask) if self.mask is not None else None
        return {
            "mask": mask,
            "copies": self._copies,
            "left_dense": sorted(self._left_dense),
            "observed": self.observed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mask = Mask(state_dict["mask"]) if state_dict["mask"] is not None else None
        self._copies, self.observed = state_dict.get("copies", {}), state_dict.get("observed", {})
        self._left_dense = set(state_dict.get("left_dense", ()))


def graph_of(loss: Tensor) -> Iterator[Any]:
    """Yield the nodes of the graph that autograd made of a loss."""
    nodes = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(nodes)
    for node in nodes:  # grows on the way
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
