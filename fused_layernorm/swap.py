"""swap_layer_norm: FusedLayerNorm in the place of nn.LayerNorm, in a model that exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn
from torch.nn.utils import parametrize

from .modules import FusedLayerNorm

Model = TypeVar("Model", bound=nn.Module)


def swap_layer_norm(
    model: Model, *, predicate: Callable[[str, nn.LayerNorm], bool] | None = None
) -> Model:
    """Makes every ``nn.LayerNorm`` of a model a :class:`FusedLayerNorm`, in place.

    The module objects stay, and with them their parameters, names, hooks, training flags and every
    reference that something else holds to them: optimizers, shared modules and checkpoints do not
    notice. Swapping again changes nothing.

    Args:
        model: any module; it may itself be an nn.LayerNorm.
        predicate: ``predicate(name, module)``, asked of every nn.LayerNorm and subclass of it that
            is not yet fused, says whether to swap it. By default those of exactly that class, and
            with no forward of their own, are swapped; a subclass may compute something else.

    Returns:
        The model.
    """
    wanted = _is_stock if predicate is None else predicate
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.LayerNorm)
            and not isinstance(module, FusedLayerNorm)
            and wanted(name, module)
        ):
            module.__class__ = _fused_class(module)
    return model


def _is_stock(name: str, module: nn.LayerNorm) -> bool:
    return type(module) is nn.LayerNorm and "forward" not in module.__dict__


def _fused_class(module: nn.LayerNorm) -> type[FusedLayerNorm]:
    if not parametrize.is_parametrized(module):
        return FusedLayerNorm
    # parametrize gives each module a class of its own, whose properties compute the parameters.
    own = {key: value for key, value in vars(type(module)).items() if key != "__dict__"}
    own.pop("__weakref__", None)
    return type(f"Parametrized{FusedLayerNorm.__name__}", (FusedLayerNorm,), own)
