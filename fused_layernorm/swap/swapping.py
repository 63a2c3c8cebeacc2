# SPDX-License-Identifier: Apache-2.0
"""swap_norms and its halves, which make a model's own norms run on the fused kernels."""

from __future__ import annotations

import functools
import inspect
import logging
import types
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.nn.utils import parametrize

from .. import stock
from ..modules import FusedRMSNorm
from . import classes, heads, registry, source
from . import neighbours as beside
from .classes import REGISTERED, Forward, Known, is_fused, kind_of, lock, own_class, plain_class
from .neighbours import Planned
from .registry import Found, name_of

Model = TypeVar("Model", bound=nn.Module)
_log = logging.getLogger(__package__)

Predicate = Callable[[str, Any], bool]


def swap_norms(
    model: Model, *, predicate: Predicate | None = None, neighbours: bool = False
) -> Model:
    """Makes a model's norms, of all kinds, run on the fused kernels; returns the model.

    The module objects stay, and with them their parameters, names, hooks and every reference to
    them. Swapping again changes nothing, and :func:`unswap_norms` undoes it. Which classes are
    known, what is left, and what a swapped module computes: docs/swap.md has the rules.

    Args:
        model: any module; it may itself be a norm.
        predicate: ``predicate(name, module)`` returns whether to swap a norm. It may rely on the
            name that ``model.named_modules()`` gives the module, and on the module's being an
            nn.Module; an RMSNorm class of transformers, for example, is no nn.RMSNorm.
        neighbours: also swap what stands beside the norms: attention that rotates q and k, whose
            rotation and norms become :func:`qk_norm_rope`, and what calls norm, then activation.

    Raises:
        TypeError: a ``make`` of :func:`register_swap` returned neither None nor a function that
            takes the arguments of the class's forward.

    Warns where nothing in the model is fused afterwards.
    """
    return _swap_all(model, predicate, ("layer", "rms", "group"), "swap_norms", "norm", neighbours)


def swap_layer_norm(
    model: Model, *, predicate: Callable[[str, nn.LayerNorm], bool] | None = None
) -> Model:
    """Makes the LayerNorm modules of a model run on the fused kernels; returns the model.

    As :func:`swap_norms`, for LayerNorms and the classes that :func:`register_swap` was told of;
    :func:`unswap_layer_norm` undoes it.
    """
    return _swap_all(model, predicate, ("layer",), "swap_layer_norm", "LayerNorm")


def swap_rms_norm(model: Model, *, predicate: Predicate | None = None) -> Model:
    """Makes the RMSNorm modules of a model run on the fused kernels; returns the model.

    As :func:`swap_norms`, for RMSNorms and the classes that :func:`register_swap` was told of;
    :func:`unswap_rms_norm` undoes it.
    """
    return _swap_all(model, predicate, ("rms",), "swap_rms_norm", "RMSNorm")


def _swap_all(
    model: Model,
    predicate: Predicate | None,
    kinds: tuple[str, ...],
    caller: str,
    what: str,
    neighbours: bool = False,
) -> Model:
    """Swaps the norms of these kinds and the registered modules; `what` names them in messages.

    Nothing is done before all is planned, so that an error leaves a model as it was.
    """
    plan: Planned = {}
    left: Counter[str] = Counter()  # the norm-like modules that stay, with the reason

    def note(module: nn.Module, made: type[nn.Module] | str | None) -> None:
        if isinstance(made, str):
            left[f"{name_of(plain_class(module))} ({made})"] += 1
        elif made is not None:
            plan[module] = made

    read = functools.cache(source.read)  # for this swap: a later one may find other forwards
    # The norms come first: a module that modulates a norm's output is swapped only if the norm is.
    modules = sorted(model.named_modules(), key=lambda item: not isinstance(item[1], nn.LayerNorm))
    for name, module in modules:
        with lock:  # while it is looked at, no other thread swaps it
            found = None if is_fused(module) else registry.find(module, read)
            if found is not None and found.kind in (*kinds, REGISTERED):
                note(module, _norm(name, module, found, predicate, plan))
            elif found and found.kind == "rms" and "LayerNorm" in plain_class(module).__name__:
                note(module, "it computes RMSNorm")
    if neighbours:
        _plan_neighbours(model, plan, note)
    for module, cls in plan.items():
        with lock:
            if not is_fused(module):  # another thread may have been quicker
                _give(module, cls)
    text = _say(left, model, f"{left.total()} {what}-like modules were left: ")
    wanted = {*kinds, REGISTERED, *(_BESIDE if neighbours else [])}
    if not any(is_fused(module) and kind_of(type(module)) in wanted for module in model.modules()):
        why = f"left were {text}" if left else f"it has no {what}"
        warnings.warn(f"{caller}: nothing in {name_of(type(model))} is fused: {why}", stacklevel=3)
    return model


def _say(left: Counter[str], model: nn.Module, what: str) -> str:
    """Names in the log what was left, with the reasons."""
    text = ", ".join(f"{count} {one}" for one, count in left.items())
    if left:
        _log.info("%s: %s%s", name_of(type(model)), what, text)
    return text


def _plan_neighbours(model: nn.Module, plan: Planned, note: Callable[..., None]) -> None:
    of_heads, of_activations = map(functools.cache, (heads.class_of, beside.class_of))
    for module in model.modules():
        if module in plan or is_fused(module) or "forward" in module.__dict__:
            continue
        cls: Any = own_class(module)
        known = heads.known_of(cls)
        made: Any = of_heads(cls) if known and _has_norms(module, known, plan) else None
        if made is None and (made := of_activations(cls)) is not None:
            made = made if beside.has_pair(module, made, plan) else None
        note(module, made)


def _norm(
    name: str, module: nn.Module, found: Found, predicate: Predicate | None, plan: Planned
) -> type[nn.Module] | str:
    """What a swap gives to a norm, or why it is left."""
    of_pytorch = isinstance(module, (stock.LayerNorm, stock.RMSNorm, stock.GroupNorm))
    is_asked = of_pytorch or (found.known is not None and found.kind in ("rms", "group"))
    is_accepted = predicate is not None and is_asked
    if predicate is not None and is_accepted and not predicate(name, module):
        return "the predicate refused"
    if found.known is None and found.make is None:
        found = registry.accepted(module, found) if is_accepted else found
        if found.known is None:
            return found.reason
    if parametrize.is_parametrized(module) and not is_accepted:
        return "it is parametrized, and no predicate accepted it"
    known = found.known
    if known is None:
        forward = found.make(module)  # type: ignore[misc]
        if forward is None:
            return "the function registered for its class left it"
        _check_forward(plain_class(module), forward)
        known = Known(found.kind, forward)
    elif not _has_norms(module, known, plan, but=("rms", "group")):
        return "it has a norm that is not fused"
    elif known.forward is FusedRMSNorm.forward and hasattr(module, "bias"):
        return "it has a bias, of which nn.RMSNorm does not know"
    cls = own_class(module)
    if (plain := classes.PLAIN.get(cls)) is not None and known.forward is plain.forward:
        return plain
    try:
        return registry.class_of(cls, known, found.parts, found.own)
    except source.Unreadable as error:
        return str(error)


def _has_norms(module: Any, known: Known, plan: Any, but: tuple[str, ...] = ()) -> bool:
    """Whether the norms that a forward computes are or will be fused, and not of these kinds."""
    # The dictionary of a scripted module has no `get`.
    parts = dict(module._modules.items())
    norms = [parts.get(name) for name in known.norms]
    return all(
        one is not None and (one in plan or (is_fused(one) and kind_of(type(one)) not in but))
        for one in norms
    )


_BESIDE = ("rotation", "heads", "activation")


def _give(module: nn.Module, cls: Any) -> None:
    """Gives a module the class in which the forward that is known serves its calls."""
    own = module.__dict__
    if getattr(cls, "_own", None) is not None:
        bound = ("forward", "extra_repr", "_get_name")  # beside parameters of Liger's kernels
        own["_taken_over"] = {name: own.pop(name) for name in bound if name in own}
    classes.set_class(module, cls)
    if cls in classes.OURS:
        # torch.fx records a module of torch.nn as one call, and reads this name on the module
        # itself, where it hides the class's name from nothing else: pickle asks the class.
        own.update(_is_swapped=True, __module__=stock.LayerNorm.__module__)


def unswap_norms(model: Model) -> Model:
    """Gives every module that one of the swaps has swapped its class back; returns the model.

    A FusedLayerNorm, FusedRMSNorm or FusedGroupNorm that was constructed as one stays.
    """
    return _unswap_all(model, ("layer", "rms", "group", *_BESIDE))


def unswap_layer_norm(model: Model) -> Model:
    """As :func:`unswap_norms`, for LayerNorms and the modules of registered classes."""
    return _unswap_all(model, ("layer",))


def unswap_rms_norm(model: Model) -> Model:
    """As :func:`unswap_norms`, for RMSNorms and the modules of registered classes."""
    return _unswap_all(model, ("rms",))


def _unswap_all(model: Model, kinds: tuple[str, ...]) -> Model:
    left: Counter[str] = Counter()
    for module in model.modules():
        with lock:
            cls = classes.swapped_from(module)
            if cls is not None and kind_of(type(module)) in (*kinds, REGISTERED):
                classes.give_back(module, cls)
            elif cls is None and hasattr(type(module), classes.mark_of(module)):
                # Somebody has given it a class derived from its swapped one.
                left[name_of(type(module))] += 1
    _say(left, model, "left, for their class is not the one that a swap gave, were ")
    return model


def register_swap(cls: type[nn.Module], make: Callable[[Any], Forward | None]) -> None:
    """Tells :func:`swap_norms`, and the swaps of one kind, how to swap a class of your own.

    Args:
        cls: the class whose instances (not those of its subclasses) are swapped. It need not be a
            subclass of nn.LayerNorm or nn.RMSNorm. The last registration of a class counts, and
            takes precedence over the table's entry.
        make: ``make(module)`` is called for each instance, and returns the forward that replaces
            the class's: a function that takes ``self`` first, as it would be written in the class.
            The forward must read the parameters from ``self``, since it serves copies of the
            module too. Where it returns None, the class's own forward serves the call. To leave
            this module as it is, ``make`` returns None. A swapped module can be pickled only if
            pickle finds the function by name.

    Example::

        def forward(self, x):
            return fused_layernorm.layer_norm(x, self.gamma, self.beta, self.variance_epsilon)

        fused_layernorm.register_swap(MyLayerNorm, lambda module: forward)

    Raises:
        TypeError: cls is no subclass of nn.Module, or make cannot be called.
        ValueError: cls is fused already.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"expected cls to be a subclass of torch.nn.Module, got {cls!r}")
    if not callable(make):
        raise TypeError(f"expected make to be callable, got {type(make).__name__}")
    if issubclass(cls, classes.OURS) or classes.is_made(cls):
        raise ValueError(f"expected a class that is not fused, got {cls.__name__}")
    registry.registered[cls] = make, cls.forward


def _check_forward(cls: type[nn.Module], forward: object) -> None:
    if not isinstance(forward, types.FunctionType):
        raise TypeError(
            f"expected the make registered for {cls.__name__} to return a function or None, "
            f"got {type(forward).__name__}"
        )
    parameters = inspect.signature(cls.forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in named if p.default is p.empty]
    try:
        inspect.signature(forward).bind(*required)
    except TypeError:
        raise TypeError(
            f"expected the make registered for {cls.__name__} to return a forward that takes "
            f"({', '.join(required)}), self first, got one that takes {inspect.signature(forward)}"
        ) from None
