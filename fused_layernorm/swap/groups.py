# SPDX-License-Identifier: Apache-2.0
"""The forwards that replace those of the group and instance norms of PyTorch and of other
libraries; and the activations that the kernels apply.

The result has the strides of the stock one: PyTorch's group_norm reads and writes contiguous and
channels_last tensors, its instance_norm contiguous ones.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import calls, stock
from ..compile import choice
from ..groups import FusedGroupNorm, ada_group_norm, as_pytorch_reads, group_norm, has_one_value
from ..modules import is_bare
from ..ops import autograd
from ..ops.family import assume_constant_result
from ..ops.formulas import activate
from .classes import Forward, must_be_called
from .forwards import parameters

# torch.fx.symbolic_trace records each of these as one call.
torch.fx.wrap("group_norm")
torch.fx.wrap("as_pytorch_reads")

# ---- Activations, as functions and as modules of PyTorch's classes.

# By class: its forward, and the name and the function that this calls. What a tool has replaced
# before this import is None, and no function or forward is that.
_ACTIVATIONS: dict[type[nn.Module], tuple[Any, str, Any]] = {
    cls: (stock.own_forward(cls), name, stock.unless_replaced(getattr(F, name)))
    for name, cls in (
        ("silu", nn.SiLU), ("relu", nn.ReLU), ("gelu", nn.GELU), ("leaky_relu", nn.LeakyReLU)
    )
}  # fmt: skip
_FUNCTIONS = {function: name for _, name, function in _ACTIVATIONS.values() if function}
_FUNCTIONS[torch.relu] = "relu"


def activation_of(act: Any) -> str | None:
    """The name of the activation that a module or a function computes; None if it is no such.

    A module that has hooks, or whose forward or function somebody has replaced, must be called.
    """
    if not isinstance(act, nn.Module):
        return _FUNCTIONS.get(act) if callable(act) else None
    name = _activation_of_class(type(act))
    if not name or must_be_called(act) or getattr(F, name) is not _ACTIVATIONS[type(act)][2]:
        return None
    if name == "gelu":
        approximate: Any = act.approximate
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)
    return name if name != "leaky_relu" or act.negative_slope == 0.01 else None


@assume_constant_result
def _activation_of_class(cls: Any) -> str:
    forward, name, _ = _ACTIVATIONS.get(cls, (None, "", None))
    return name if forward is not None and cls.forward is forward else ""


def takes_activation(forward: Any) -> bool:
    """Whether a forward applies an activation too; one that register_swap was told of does not."""
    code = forward.__code__
    is_ours = forward.__module__.startswith(f"{__package__}.")
    return is_ours and "activation" in code.co_varnames[: code.co_argcount]


# ---- Forwards.


_is_group_norm = assume_constant_result(lambda cls: cls.forward is FusedGroupNorm.forward)


def is_plain_group_norm(norm: Any, cls: Any = None) -> bool:
    """Whether a norm, of the class that it has or will have, computes F.group_norm."""
    cls = cls or type(norm)
    return _is_group_norm(cls) and (cls is not type(norm) or is_bare(norm))


def _is_supported(eps: Any, x: Any, weight: Any, bias: Any) -> bool:
    if F.group_norm is not stock.group_norm or F.instance_norm is not stock.instance_norm:
        return False
    if isinstance(x, torch.fx.Proxy):
        return True
    return x.dim() > 1 and stock.norm_is_supported(x, weight, bias, eps)


def of_group_norm(
    self: Any, input: Any, activation: str | None = None, read: Any = as_pytorch_reads
) -> Tensor | None:
    """What calls F.group_norm, as subclasses of nn.GroupNorm that a predicate accepted.

    `read` gives the input in the order of memory of the result.
    """
    weight, bias = parameters(self)
    if not _is_supported(self.eps, input, weight, bias) or has_one_value(input, self.num_groups):
        return None
    if choice.leaves_groups(input, self.num_groups, weight, bias, fuses=activation is not None):
        return None
    return group_norm(read(input), self.num_groups, weight, bias, self.eps, activation=activation)


def instance_norm(self: Any, input: Tensor, activation: str | None = None) -> Tensor | None:
    """Without running statistics; what the class refuses, or warns of, is its own, and so is an eps
    of zero: PyTorch's batch norm, which it calls, has 0 for the rstd of a constant channel then."""
    weight, bias = parameters(self)
    if not stock.has_kernels(input) or input.dim() != self._get_no_batch_dim() + 1 or self.eps == 0:
        return None
    if not _is_supported(self.eps, input, weight, bias) or has_running_statistics(self):
        return None
    samples, channels, *positions = input.shape
    if samples == 0 or channels != self.num_features or math.prod(positions) < 2:
        return None
    if choice.leaves_groups(input, channels, weight, bias, fuses=activation is not None):
        return None
    norm, x = (weight, bias, self.eps), input.contiguous()
    if not torch.is_autocast_enabled(input.device.type):
        return group_norm(x, channels, *norm, activation=activation)
    # Autocast makes group_norm float32, and lets instance_norm be.
    if calls.is_compiling():
        return group_norm(x, channels, *norm, activation=activation, out_dtype=input.dtype)
    with torch._C._ExcludeDispatchKeyGuard(autograd.AUTOCAST_KEYS):
        return group_norm(x, channels, *norm, activation=activation)


def has_running_statistics(module: Any) -> bool:
    return bool(module.track_running_stats or module.running_mean is not None)


def timm(self: Any, x: Tensor, activation: str | None = None) -> Tensor | None:
    return None if self._fast_norm else of_group_norm(self, x, activation)


def then_act(norm: Forward, act: str = "act") -> Forward:
    """The forward of a norm that the class's dropout, if it has one, and activation follow."""
    fuses = takes_activation(norm)

    def forward(self: Any, x: Tensor) -> Any:
        drop, behind = self._modules.get("drop"), getattr(self, act)
        drops = drop is not None and (type(drop) is not nn.Identity or must_be_called(drop))
        activation = activation_of(behind) if fuses and not drops and stock.has_kernels(x) else None
        if activation is not None:
            return norm(self, x, activation)
        y = norm(self, x)
        return None if y is None else behind(y if drop is None else drop(y))

    return forward


def emu3(self: Any, input: Tensor, quant_states: Any = None) -> Tensor | None:
    return of_group_norm(self, input)


def pe_audio(self: Any, x: Tensor, padding_mask: Any = None) -> Tensor | None:
    return None if padding_mask is not None else of_group_norm(self, x)


def modulated(
    x: Tensor, norm: tuple[Any, ...], scale: Tensor, shift: Tensor, activation: str | None
) -> Tensor | None:
    """activation(group_norm(x, *norm) * (1 + scale) + shift), if the kernels compute it, and the
    library would give the result in the norm's dtype."""
    num_groups, weight, bias, eps = norm
    if not _is_supported(eps, x, weight, bias) or not stock.are_supported(x, scale, shift):
        return None
    if has_one_value(x, num_groups) or any(
        one.dtype is not x.dtype
        or one.dim() != x.dim()
        or one.shape[:2] != x.shape[:2]
        or one.shape[2:].numel() != 1
        for one in (scale, shift)
    ):
        return None
    if choice.leaves_groups(x, num_groups, scale, shift, weight, bias, fuses=True):
        return None
    return ada_group_norm(x, num_groups, shift, scale, weight, bias, eps, activation=activation)


def _modulated(
    x: Tensor, num_groups: int, eps: float, numbers: Tensor, activation: str | None
) -> Tensor:
    """Modulated by scale and shift, one behind the other in these numbers of channels."""
    scale, shift = numbers.chunk(2, dim=1)
    norm = (num_groups, None, None, eps)
    y = modulated(as_pytorch_reads(x), norm, scale, shift, activation)
    if y is None:
        y = activate(F.group_norm(x, *norm) * (1 + scale) + shift, activation)
    return y


def ada(self: Any, x: Tensor, emb: Tensor, activation: str | None = None) -> Tensor | None:
    """diffusers' AdaGroupNorm."""
    if not stock.has_kernels(x):
        return None
    numbers = self.linear(self.act(emb) if self.act else emb)[:, :, None, None]
    return _modulated(x, self.num_groups, self.eps, numbers, activation)


def kandinsky3(self: Any, x: Tensor, context: Tensor, activation: str | None = None) -> Any:
    """diffusers' Kandinsky3ConditionalGroupNorm, whose norm has no weight."""
    norm = self.norm
    is_known = stock.has_kernels(x) and is_plain_group_norm(norm) and norm.weight is None
    if not is_known or must_be_called(norm):
        return None
    numbers = self.context_mlp(context)
    numbers = numbers.reshape(*numbers.shape, *[1] * (x.dim() - 2))
    return _modulated(x, norm.num_groups, norm.eps, numbers, activation)


def cosmos(self: Any, hidden_states: Tensor, activation: str | None = None) -> Any:
    """diffusers' CosmosCausalGroupNorm, of each frame: without an activation its norm is called."""
    norm, x = self.norm, hidden_states
    if activation is None or not is_plain_group_norm(norm) or must_be_called(norm) or x.dim() != 5:
        return None
    if self.num_groups != 1:
        return of_group_norm(norm, x, activation)
    y = of_group_norm(norm, x.permute(0, 2, 1, 3, 4).flatten(0, 1), activation)
    return None if y is None else y.unflatten(0, (x.shape[0], -1)).permute(0, 2, 1, 3, 4)
