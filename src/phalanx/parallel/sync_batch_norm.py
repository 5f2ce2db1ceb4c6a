r"""SyncBatchNorm: batch norm over the joined batch of all ranks.

    rank 0   x_0 -> (mu_0, s_0, m_0) -\                   /-> y_0
                                      one message: mu, s
    rank 1   x_1 -> (mu_1, s_1, m_1) -/                   \-> y_1

(Ioffe & Szegedy 2015, "Batch Normalization"; the ranks' statistics are merged as in Chan, Golub &
LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances": a mean
that is large beside the deviation costs no digits; each rank's own are computed as in their
"Algorithms for Computing the Sample Variance", 1983.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from phalanx.collectives import all_gather, all_reduce_
from phalanx.core.backend import Backend
from phalanx.errors import UnsupportedOperationError


class SyncBatchNorm(_BatchNorm):
    """Batch norm with the statistics of all ranks' batches together in training.

    `convert_sync_batchnorm(model, backend)` puts it in the place of a model's batch norms. Outputs,
    running statistics and the gradients of inputs are those of plain batch norm on the joined
    batch; batch sizes may differ between ranks, and be 0 on some. In training every rank has to
    call it, in the same order, and to go back through it if one does.

    num_features   C of inputs (N, C), (N, C, L), (N, C, H, W) or (N, C, D, H, W)
    backend        the ranks whose batches are one; not copied by `deepcopy`
    label          the layer's name in errors, if two ranks are in different ones.
                   `convert_sync_batchnorm` names it after its place in the model
    the others     as torch's `BatchNorm2d` has them

    # Notes
    The gradients of `weight` and `bias` are this rank's part of the sum: DDP averages them like all
    others. The gradient that goes back through it is that of the sum of all ranks' losses, so
    weight a loss before `backward` (as `DDP.weighted` does).

    It costs a message of 2C+1 float64 numbers forward (an all_gather), and one of 2C backward (an
    all_reduce) if the input needs a gradient. In eval mode nothing is sent. With DDP on the same
    backend these messages queue behind gradients; on a subgroup of all ranks they overtake them,
    and only then may some ranks leave out parameters between two such layers.

    float16 and bfloat16 inputs are computed with in float32; statistics are merged in float64. It
    can be differentiated once. Raises `ValueError` on every rank if there is one value per channel
    in all ranks together.
    """

    def __init__(
        self,
        num_features: int,
        backend: Backend,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self.backend = backend
        self.label = "SyncBatchNorm"

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, of its shape and dtype. In training, block for all ranks."""
        self._check_input_dim(input)
        if not self.training:
            own = self.running_mean, self.running_var, self.weight, self.bias
            dtype = _wide_dtype(input)  # torch takes no other beside this input
            mean, var, weight, bias = (t if t is None else t.to(dtype) for t in own)
            estimates = mean is None
            return nn.functional.batch_norm(input, mean, var, weight, bias, estimates, eps=self.eps)
        joined = _join(_statistics(input.detach()), self.backend, self.label)
        if joined.m == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size "
                f"{input.shape} on rank {self.backend.rank}, and 1 value in all ranks together"
            )
        self._track(joined)
        return _Normalize.apply(input, self.weight, self.bias, joined, self)  # type: ignore[no-any-return, no-untyped-call]

    @torch.no_grad()
    def _track(self, joined: _Statistics) -> None:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.running_mean is None or self.running_var is None or joined.m == 0:
            return
        a = self.momentum
        if a is None:  # the mean over all batches so far
            a = 1.0 / float(self.num_batches_tracked) if self.num_batches_tracked is not None else 0
        unbiased = joined.s / (joined.m - 1)
        for running, value in ((self.running_mean, joined.mu), (self.running_var, unbiased)):
            running.copy_((1 - a) * running.to(value) + a * value)

    def _check_input_dim(self, input: Tensor) -> None:
        if not 2 <= input.dim() <= 5:
            raise ValueError(f"expected 2D to 5D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"expected {self.num_features} channels, in dim 1, and got an input of shape "
                f"{list(input.shape)}"
            )
        if not input.dtype.is_floating_point:
            raise UnsupportedOperationError(
                f"batch norm of {input.dtype} has no meaning; convert the input first"
            )


# The mathematics ----------------------------------------------------------------------------


class _Statistics(NamedTuple):
    """Statistics of the values of a batch, by channel; float64.

    mu   [C]  the mean
    s    [C]  the sum of squared deviations from it
    m         the number of values in a channel
    """

    mu: Tensor
    s: Tensor
    m: int


def _statistics(x: Tensor) -> _Statistics:
    """Return this rank's part, by the corrected two-pass algorithm (Chan et al. 1983)."""
    m = x.numel() // max(1, x.shape[1])
    if m == 0:
        nothing = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
        return _Statistics(nothing, nothing, 0)
    dims = _but_channels(x)
    x = _wide(x)
    about = x.mean(dims)  # rounded to x's dtype; the mean of the deviations is its error
    deviations = x - _as(about, x)
    error = deviations.sum(dims).double() / m
    s = deviations.square_().sum(dims).double() - m * error.square()
    return _Statistics(about + error, s, m)


def _join(mine: _Statistics, backend: Backend, label: str) -> _Statistics:
    """Return all ranks' statistics as one (Chan et al. 1979, for many parts at once)."""
    c = len(mine.mu)
    row = torch.cat([mine.mu, mine.s, mine.mu.new_tensor([mine.m])])
    rows = all_gather(row.unsqueeze(0), backend, label=label)
    mu_r, s_r, m_r = torch.split(rows, [c, c, 1], dim=1)
    m = m_r.sum()
    if m == 0:
        return _Statistics(mine.mu, mine.s, 0)
    mu = (m_r * mu_r).sum(0) / m
    s = s_r.sum(0) + (m_r * (mu_r - mu).square()).sum(0)
    return _Statistics(mu, s, int(m))


class _Normalize(torch.autograd.Function):
    """y = gamma * x_hat + beta, x_hat = (x - mu) / sigma, sigma = sqrt(s / m + eps)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        joined: _Statistics,
        layer: SyncBatchNorm,
    ) -> Tensor:
        sigma = (joined.s / max(1, joined.m) + layer.eps).sqrt()
        ctx.save_for_backward(x, gamma, joined.mu, sigma)
        ctx.m, ctx.backend, ctx.label = joined.m, layer.backend, layer.label
        ctx.beta = beta.dtype if beta is not None else None
        y = (_wide(x) - _as(joined.mu, x)) / _as(sigma, x)
        if gamma is not None:
            y *= _as(gamma, x)
        if beta is not None:
            y += _as(beta, x)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients; with l the sum of all ranks' losses, and sums over all ranks' m values:

        dl/dx = gamma / sigma * (dl/dy - sum(dl/dy) / m - x_hat * sum(dl/dy * x_hat) / m)
        """
        x, gamma, mu, sigma = ctx.saved_tensors
        x_hat = (_wide(x) - _as(mu, x)) / _as(sigma, x)
        dy = _wide(dy)
        dims = _but_channels(x)
        sums = torch.stack([dy.sum(dims).double(), (dy * x_hat).sum(dims).double()])
        dx = dgamma = dbeta = None
        if ctx.needs_input_grad[1]:
            dgamma = sums[1].to(gamma)
        if ctx.needs_input_grad[2]:
            dbeta = sums[0].to(ctx.beta)
        if ctx.needs_input_grad[0]:
            total = sums.clone()  # since dgamma and dbeta are this rank's
            all_reduce_(total, ctx.backend, label=ctx.label)
            mean_dy, mean_dy_x_hat = total / max(1, ctx.m)
            dx = dy - _as(mean_dy, x)
            dx -= x_hat.mul_(_as(mean_dy_x_hat, x))
            dx *= _as(gamma / sigma if gamma is not None else 1 / sigma, x)
            dx = dx.to(x.dtype)
        return dx, dgamma, dbeta, None, None


def _but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to compute with: float64, or float32."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _wide(x: Tensor) -> Tensor:
    return x.to(_wide_dtype(x))


def _as(values: Tensor, x: Tensor) -> Tensor:
    """Return one value for each channel, of a shape and dtype to combine with `_wide(x)`."""
    return values.to(_wide_dtype(x)).view(1, -1, *[1] * (x.dim() - 2))


# Conversion of a model ----------------------------------------------------------------------


def convert_sync_batchnorm(module: nn.Module, backend: Backend) -> nn.Module:
    """Replace each `BatchNorm1d`, `2d` and `3d` of a module by a `SyncBatchNorm`.

    Works in place, and returns the module (if it is itself a batch norm, the one that replaces it).
    A replacement has the same parameters, buffers, hooks, mode and settings: the same objects, so
    an optimizer may exist already. Do not use the replaced layer any more. Nothing is sent. Convert
    before the module is wrapped in DDP.

    Raises `UnsupportedOperationError`, before anything is changed, for other kinds of batch norm:
    subclasses, which may do more than batch norm, and lazy ones that have not run.
    """
    new: dict[nn.Module, SyncBatchNorm] = {}  # a layer in two places is one layer afterwards
    for path, layer in module.named_modules():
        if type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, SyncBatchNorm):
            new[layer] = SyncBatchNorm.__new__(SyncBatchNorm)
            label = f"SyncBatchNorm {path}".strip()
            new[layer].__dict__.update(layer.__dict__, backend=backend, label=label)
        elif isinstance(layer, _BatchNorm):
            raise UnsupportedOperationError(_why_not(path or "the module", layer))
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child in new:
                parent._modules[name] = new[child]
    return new.get(module, module)


def _why_not(path: str, layer: nn.Module) -> str:
    kind = type(layer)
    if isinstance(layer, LazyModuleMixin):
        remedy = "does not know its size yet: run one batch through the model, then convert it"
    elif isinstance(layer, nn.SyncBatchNorm):
        remedy = "speaks to torch.distributed: build the model with plain batch norms"
    else:
        remedy = "does what only it knows: replace it by a phalanx.SyncBatchNorm by hand"
    return (
        f"convert_sync_batchnorm: {path} is a {kind.__module__}.{kind.__qualname__}, which {remedy}"
    )
