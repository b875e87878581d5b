"""Batch normalisation over the samples of all ranks, on any device.

Note [What travels]
    Forward: every rank's mean, biased variance and number of values per channel, one all-gather. The global moments are
    combined from them in float64 (Chan, Golub, LeVeque), so that ranks with few or no samples weigh what they should and
    every rank computes the same bits. Backward: the sums of the output gradient and of its product with the normalised
    input, one all-reduce. Gradients of weight and bias stay this rank's own, for the wrapper to average.

Note [Order]
    These collectives run in a group of their own (``collectives/twin.py``), not in that of the buckets, which may leave
    at another moment on another rank. The layers themselves must run in the same order on all ranks, and each must have
    a part in every rank's loss.

Sources:
    https://arxiv.org/abs/1502.03167,
    https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html,
    Chan, Golub, LeVeque: Algorithms for Computing the Sample Variance, The American Statistician 37(3), 1983.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from rankstep.collectives.failures import naming_failure
from rankstep.collectives.twin import twin_of
from rankstep.errors import DataError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rankstep.collectives import Communicator, Pending

# A float32 is exact up to 2**24, a volume may have more values per channel: the count travels in two parts.
_PART = 1 << 24


class SyncBatchNorm(nn.SyncBatchNorm):
    """Normalises each channel by the mean and variance over all ranks' samples, as one process would over all of them.

    Takes torch's arguments and is torch's ``nn.SyncBatchNorm`` by class; unlike it, it works on CPU ranks too. Ranks may
    have different numbers of samples, or none. Under ``rankstep.DistributedDataParallel`` output, gradients and running
    statistics equal those of one process with the whole batch, second derivatives included. In ``eval()``, without a
    process group, and in a world of one it is plain batch normalisation and starts no collective.

    Every rank must run the same layers in the same order in forward, and use their outputs in its loss.

    Args:
        num_features: Channels C.
        eps: Added to the variance.
        momentum: Weight of the newest statistics; None takes the mean of all so far.
        affine: Whether there are a weight and a bias.
        track_running_stats: False: no running statistics; ``eval()`` normalises with those of its own batch, unsynced.
        process_group: The ranks; None takes the default group.
        device: Of parameters and buffers.
        dtype: Of parameters and buffers.

    Shape:
        - Input: (N, C) or (N, C, ...), N may be 0; half types keep their statistics in float32.
        - Output: as the input.

    Raises:
        DataError: In training all ranks together have one value per channel, which has no variance; on every rank.
        CommunicationError: A rank has ended.
        RankSkewError: A rank waits elsewhere, without having run this layer.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
    """

    silent = False
    """Whether this rank's samples do not count, because they only stand in for missing ones (``together``)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Normalise, and in training take in the new statistics."""
        comm = self._communicator(input.device)
        if comm is None:
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        with torch.no_grad():
            mean, var, total = _global_moments(input, comm, silent=self.silent)
            if self.track_running_stats:
                self._take_in(mean, var, total)
        normalised: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, var, total, comm, self.eps, self.silent
        )
        return normalised

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Replace every batch normalisation in a module by this class.

        Parameters, buffers, hooks, mode and everything else move over as they are, so optimizers made before stay valid.
        Do it on every rank, best before wrapping.

        Args:
            module: Anything; ``BatchNorm1d`` to ``3d`` and torch's ``SyncBatchNorm`` in it are replaced, in place.
            process_group: The ranks; None keeps a layer's own, else takes the default group.

        Returns:
            The module, or its replacement if it is a batch normalisation itself.

        Raises:
            ModelError: A layer is lazy and has not seen an input, or has a forward of its own, which would be lost.
        """
        return _converted(cls, module, process_group, "", {})

    def _communicator(self, device: torch.device) -> Communicator | None:
        """Who else takes part; None: nobody."""
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return None
        group = self.process_group or dist.distributed_c10d._get_default_group()
        if group.size() == 1:
            return None
        return twin_of(group, "sync_batchnorm", device)

    def _take_in(self, mean: torch.Tensor, var: torch.Tensor, total: torch.Tensor) -> None:
        """Move the running statistics towards these; without any sample they stay."""
        if (
            self.num_batches_tracked is None
            or self.running_mean is None
            or self.running_var is None
        ):
            return
        some = (total > 0).to(self.num_batches_tracked)
        self.num_batches_tracked.add_(some)
        weight: Any = self.momentum
        if weight is None:
            weight = self.num_batches_tracked.clamp(min=1).to(mean.dtype).reciprocal()
        weight = weight * some.to(mean.dtype)
        unbiased = var * (total / (total - 1).clamp(min=1)).to(var.dtype)
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(running.to(new.dtype) * (1 - weight) + new * weight)


def _global_moments(
    x: torch.Tensor, comm: Communicator, *, silent: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and biased variance per channel over all ranks, and over how many values, as a float64 scalar."""
    channels = x.size(1)
    count = 0 if silent else x.numel() // channels
    dtype = _statistics_dtype(x)
    row = torch.zeros(2 * channels + 2, dtype=dtype, device=x.device)
    if count:
        # Only a float32 buffer makes the kernel keep float32 statistics of a half input; momentum 0 leaves it alone.
        spare = row.new_ones(channels) if dtype != x.dtype else None
        mean, var = torch.batch_norm_update_stats(x, spare, spare, 0.0)
        row[:channels], row[channels:-2] = mean, var
        row[-2], row[-1] = count // _PART, count % _PART
    rows = [torch.empty_like(row) for _ in range(comm.world_size)]
    _finish(comm, lambda: comm.all_gather(rows, row), "forward")
    told = torch.stack(rows).double()
    counts = told[:, -2:-1] * _PART + told[:, -1:]
    total = counts.sum()
    if count < 2:
        # With two values here there are two in all; otherwise all ranks that know of fewer look, and see the same.
        _check_total(int(total), comm, x)
    weights = counts / total.clamp(min=1)
    means, variances = told[:, :channels], told[:, channels:-2]
    mean = (weights * means).sum(0)
    var = (weights * (variances + (means - mean).square())).sum(0)
    return mean.to(dtype), var.to(dtype), total


def _check_total(total: int, comm: Communicator, x: torch.Tensor) -> None:
    if total == 1:
        raise DataError(
            f"rank {comm.rank}: Expected more than 1 value per channel when training, but all {comm.world_size} ranks "
            f"together have one (this rank's input has shape {tuple(x.shape)}). Give the ranks at least two samples."
        )


def _statistics_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


# How many collectives each group has had, which tells one from the next where ranks wait in different ones.
_numbers: weakref.WeakKeyDictionary[Communicator, Iterator[int]] = weakref.WeakKeyDictionary()


def _finish(comm: Communicator, start: Callable[[], Pending], where: str) -> None:
    number = next(_numbers.setdefault(comm, itertools.count()))
    what = (
        f"collective {number} of SyncBatchNorm, in {where} (every rank must run the layer, with an empty batch, too, and "
        "use its output in its loss),"
    )
    with naming_failure(comm, f"sync_batchnorm/{number}", what):
        start().wait()


def _sum_over_ranks(tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """The sum over all ranks, in place."""
    _finish(comm, lambda: comm.all_reduce(tensor), "backward")
    return tensor.mul_(comm.world_size) if comm.averages else tensor


class _Normalise(torch.autograd.Function):
    """``(x - mean) / sqrt(var + eps) * weight + bias``, whose gradient knows that mean and var came from all ranks' x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        var: torch.Tensor,
        total: torch.Tensor,
        comm: Communicator,
        eps: float,
        silent: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, var, total)
        ctx.comm, ctx.eps, ctx.silent = comm, eps, silent
        return F.batch_norm(
            x, mean, var, _as(mean.dtype, weight), _as(mean.dtype, bias), training=False, eps=eps
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (dy,) = grads
        x, weight, mean, var, total = ctx.saved_tensors
        comm, eps = ctx.comm, ctx.eps
        if torch.is_grad_enabled():
            dx, dw, db = _differentiable_gradients(dy, x, weight, total, comm, eps)
        else:
            w = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
            if x.numel():
                wanted = [ctx.needs_input_grad[0], True, True]
                dx, dw, db = torch.ops.aten.native_batch_norm_backward(
                    dy, x, w, mean, var, None, None, False, eps, wanted
                )
            else:
                dx, dw, db = torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
            if ctx.needs_input_grad[0]:
                sums = torch.stack([db, dw])
                sums = _sum_over_ranks(sums.zero_() if ctx.silent else sums, comm)
                sums *= w * (var + eps).rsqrt() / total.clamp(min=1).to(mean.dtype)
                # What mean and var owe to x is linear in the normalised input, so the same fused kernel writes it.
                dx -= F.batch_norm(x, mean, var, sums[1], sums[0], training=False, eps=eps)
        needs = ctx.needs_input_grad
        return (
            dx if needs[0] else None,
            dw if needs[1] else None,
            db if needs[2] else None,
            *[None] * 6,
        )


def _as(dtype: torch.dtype, tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _differentiable_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    total: torch.Tensor,
    comm: Communicator,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same gradients by operations that can be differentiated again; sums over ranks included."""
    dtype = _statistics_dtype(x)
    dims = [0, *range(2, x.dim())]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    values, slopes, n = x.to(dtype), dy.to(dtype), total.clamp(min=1).to(dtype)

    def mean_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = _RankSum.apply(tensor, comm)  # type: ignore[no-untyped-call]
        return summed / n

    centred = values - mean_over_ranks(values.sum(dims)).view(shape)
    invstd = (mean_over_ranks(centred.square().sum(dims)) + eps).rsqrt().view(shape)
    normalised = centred * invstd
    db, dw = slopes.sum(dims), (slopes * normalised).sum(dims)
    mean_db, mean_dw = mean_over_ranks(torch.stack([db, dw]))
    dx = invstd * (slopes - mean_db.view(shape) - normalised * mean_dw.view(shape))
    if weight is not None:
        dx = dx * weight.to(dtype).view(shape)
    return dx.to(x.dtype), dw, db


class _RankSum(torch.autograd.Function):
    """The sum over all ranks; so is its gradient, since every rank's loss depends on it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return _sum_over_ranks(tensor.clone(memory_format=torch.contiguous_format), comm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _RankSum.apply(grads[0], ctx.comm), None  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- conversion

_KNOWN_FORWARDS: Sequence[Any] = (
    _BatchNorm.forward,
    nn.SyncBatchNorm.forward,
    SyncBatchNorm.forward,
)


def _converted(
    cls: type[SyncBatchNorm],
    module: nn.Module,
    process_group: Any,
    name: str,
    done: dict[nn.Module, nn.Module],
) -> nn.Module:
    if module in done:
        return done[module]
    done[module] = module
    if isinstance(module, _BatchNorm):
        done[module] = _replacement(cls, module, process_group, name)
    # Not named_children(), which leaves out a child's second name.
    for child_name, child in list(module._modules.items()):
        if child is None:
            continue
        new = _converted(cls, child, process_group, f"{name}.{child_name}".lstrip("."), done)
        if new is not child:
            done[module].add_module(child_name, new)
    return done[module]


def _replacement(
    cls: type[SyncBatchNorm], layer: _BatchNorm, process_group: Any, name: str
) -> SyncBatchNorm:
    what = f"{name or 'the module'} ({type(layer).__name__})"
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():
        raise ModelError(
            f"{what} is lazy and has not seen an input, so its number of channels is unknown. Run one batch through the "
            "module, then convert it"
        )
    if type(layer).forward not in _KNOWN_FORWARDS:
        raise ModelError(
            f"{what} has a forward of its own, which converting it to SyncBatchNorm would drop. Use the conversion of the "
            "library that it comes from, or replace it by hand"
        )
    new = cls.__new__(cls)
    new.__dict__.update(layer.__dict__)
    own = getattr(layer, "process_group", None)
    new.process_group = own if process_group is None else process_group
    return new
