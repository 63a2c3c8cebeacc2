# SPDX-License-Identifier: Apache-2.0
"""The classes of swapped modules: a subclass of the module's own class, with the fused forward.

Also what else decides which forward a call of a module runs: hooks, a forward of the instance, and
the classes that PyTorch derives from a module's own.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from abc import ABCMeta
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.overrides import has_torch_function_variadic

from .. import stock
from ..gated_modules import FusedAdaLayerNorm
from ..groups import FusedGroupNorm
from ..modules import FusedLayerNorm, FusedRMSNorm
from ..ops.family import assume_constant_result
from .source import Part

Forward = Callable[..., Any]

# One thread at a time gives a module its class: what it has looked at before must still hold.
lock = threading.RLock()


class Known(NamedTuple):
    """What is known of a class: its kind of norm, and the forward that replaces the class's."""

    kind: str  # "layer", "rms", "group", "rotation", "activation", or REGISTERED
    forward: Forward
    norms: tuple[str, ...] = ()  # the names of norms that this forward computes without their call
    # Gives what the forward needs, as attributes of the swapped class, from the class.
    derive: Callable[[type[nn.Module]], dict[str, Any]] | None = None


REGISTERED = "registered"  # the kind of a class of which only register_swap was told
_SHOWN = {"layer": "LayerNorm", "rms": "RMSNorm", "group": "GroupNorm"}
_SHOWN |= {"rotation": "Rotation", "activation": "Activation"}

# ---- Making classes.

_classes: weakref.WeakValueDictionary[Any, type[nn.Module]] = weakref.WeakValueDictionary()
# Called with each class that is made, and what it is made from.
told_of_classes: list[Callable[[type[nn.Module], type[nn.Module]], None]] = []


def made_classes() -> list[tuple[type[nn.Module], type[nn.Module]]]:
    """What told_of_classes would be called with, for the classes that there are."""
    return [(key[0], made) for key, made in [*_classes.items()]]


def made_class(
    cls: type[nn.Module],
    known: Known,
    parts: tuple[Part, ...],
    again: tuple[Any, ...],
    own: Forward | None = None,
    forward: Forward | None = None,
    **members: Any,
) -> type[nn.Module]:
    """The subclass of cls with the forward that is known; modules that are alike share it.

    Args:
        parts: what was read of cls, its forward first.
        again: a function and its arguments behind cls, which give the class where a module is
            unpickled, for pickle cannot find it by its name.
        own: the forward that the instance had in its place, which the swap has taken over.
        forward: one that was made of the class's own source, and looks at each call by itself.
        members: further attributes of the class.
    """
    key, meta = (cls, known.forward, own), type(cls)
    with lock:
        made: Any = _classes.get(key)
        if made is None or made._parts != parts:
            # Neither the class nor its metaclass is told. Libraries look classes up by their names.
            make: Any = meta if meta is ABCMeta else functools.partial(type.__new__, meta)
            members |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
            members["__doc__"] = cls.__doc__
            members |= {"_known": known, "_parts": parts, "_swapped_from": cls, "_again": again}
            members["_own"] = None if own is None else staticmethod(own)
            members |= {} if known.derive is None else known.derive(cls)
            made = make(cls.__name__, (_Swapped, cls), members)
            made.forward = _or_stock(made) if forward is None else _while_as_read(made, forward)
            made._made_forward = made.forward
            _classes[key] = made
            for tell in told_of_classes:
                tell(cls, made)
        return made


class _Swapped:
    """What every class that is made begins with."""

    def __init_subclass__(cls, **options: Any) -> None:
        if not is_made(cls):  # the classes behind this one are not told that one was made
            super().__init_subclass__(**options)

    def __repr__(self: Any) -> str:
        cls, text, name = self._swapped_from, self._swapped_from.__repr__(self), self._get_name()
        of_pytorch = "RMSNorm" if issubclass(cls, stock.RMSNorm) else "LayerNorm"
        shown = f"Fused{_SHOWN.get(self._known.kind, of_pytorch)}[{cls.__name__}]"
        return shown + (text.removeprefix(name) if text.startswith(name) else f"({text})")

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        cls, reduced = type(self), object.__reduce_ex__(self, max(2, protocol))
        if not is_made(cls):
            return reduced
        return (_unpickled, (cls._swapped_from, *cls._again), *reduced[2:])


def _unpickled(cls: Any, again: Callable[..., Any], *args: Any) -> nn.Module:
    """An empty module of the class; one of cls where that is another release's."""
    found = again(cls, *args)
    return cls.__new__(found if isinstance(found, type) else cls)


# ---- Their forwards.


_is_of_swap = assume_constant_result(lambda cls: hasattr(cls, "_swapped_from"))


def _while_as_read(made: Any, fused: Forward) -> Forward:
    """The forward; the stock one for a module that was unswapped while somebody kept it, and where
    that is not the one that was read."""
    cls, read = made._swapped_from, made._parts[0].function

    @functools.wraps(read)  # torch.jit.script compiles what is wrapped
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_fused = cls.forward is read and _is_of_swap(type(self))
        return (fused if is_fused else cls.forward)(self, *args, **kwargs)

    return forward


_PARAMETERS = {nn.Parameter, type(None)}


def _or_stock(swapped: Any) -> Forward:
    """The forward of a swapped class: what the stock forward accepts, it accepts.

    The stock forward serves what the operators do not know (stock.are_supported), what the fused
    one returns None for, a module that was unswapped while somebody kept its forward, and all calls
    while a part of what was read is not what it was.
    """
    cls, fused, parts = swapped._swapped_from, swapped._known.forward, swapped._parts
    own, is_norm = swapped._own, swapped._known.kind in ("layer", "rms", "group")
    # Of the parts, which are looked at in each call, most classes have a forward alone.
    read, has_others = (parts[0].function if parts else None), len(parts) > 1
    wrapped: Any = cls.forward if own is None else own
    # The parameters and their names are the stock forward's: the first after self.
    parameters = [*inspect.signature(wrapped).parameters.values()][1:2]
    first = next((p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD), "")

    def is_known(self: Any) -> bool:
        is_read = read is None or cls.forward is read
        return is_read and (not has_others or is_as_read(swapped)) and isinstance(self, swapped)

    def is_plain(self: Any, x: Any, others: Any = ()) -> bool:
        """Whether is_known and are_supported hold, told of the most common calls in a third of the
        time."""
        return (
            type(x) is Tensor
            and not has_torch_function_variadic(x, *others, *self._parameters.values())
            and not x.is_nested
            and F.layer_norm is stock.layer_norm
            and F.rms_norm is stock.rms_norm
            and is_known(self)
        )

    def of_any_call(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unfused = cls.forward if own is None else own
        # Other modules that a forward calls may make tensors, on the device that a mode says.
        if (
            is_norm
            and len(args) == 1
            and not (kwargs or self._modules or is_compiling())
            and stock.has_device_mode_alone()
            and _PARAMETERS.issuperset(map(type, self._parameters.values()))
        ):
            with stock.without_function_modes():
                known = is_plain(self, *args)
                found = fused(self, *args) if known else None
            if known:
                return unfused(self, *args) if found is None else found
        if not args and kwargs.get(first) is not None:
            args = (kwargs.pop(first),)
        others = (*kwargs.values(), *self._parameters.values())
        known = len(args) > 0 and is_known(self) and stock.are_supported(*args, *others)
        found = fused(self, *args, **kwargs) if known else None
        return unfused(self, *args, **kwargs) if found is None else found

    modes, is_compiling = torch._C._len_torch_function_stack, torch.compiler.is_dynamo_compiling
    has_foreign_mode = stock.has_foreign_mode

    # torch.jit.script compiles the source of the function that this one wraps, with the globals of
    # this one. So they are made the stock forward's, and this one reads none.
    def forward(self: Any, x: Any = None, /, *rest: Any, **kwargs: Any) -> Any:
        # Asked first: under such a mode each access to a tensor costs the host microseconds.
        is_foreign = not is_compiling() and (count := modes()) and has_foreign_mode(count)
        others = (*rest, *kwargs.values()) if rest or kwargs else ()
        is_tried = not is_foreign and is_plain(self, x, others)
        if is_tried:
            found = fused(self, x, *rest, **kwargs) if others else fused(self, x)
            if found is not None:
                return found
        args = () if x is None and not rest else (x, *rest)
        if is_foreign or is_tried:  # the fused forward has given it back
            return (cls.forward if own is None else own)(self, *args, **kwargs)
        return of_any_call(self, args, kwargs)

    names = getattr(wrapped, "__globals__", globals())
    forward = types.FunctionType(
        forward.__code__, names, argdefs=forward.__defaults__, closure=forward.__closure__
    )
    return functools.wraps(wrapped, updated=())(forward)


# ---- What a call of a module runs.


@assume_constant_result
def is_as_read(cls: Any) -> bool:
    """Whether what was read for a class of a swap is what it was."""
    return all(part.is_as_read() for part in cls._parts)


_modules: Any = torch.nn.modules.module
_CALL: Any = nn.Module.__call__
if getattr(_CALL, "__globals__", None) is not vars(_modules):  # somebody has replaced it already
    _CALL = None


@assume_constant_result
def has_own_call(cls: type[nn.Module]) -> bool:
    """Whether another __call__ than nn.Module's runs; that of torch.fx takes a kernel as it is."""
    call: Any = cls.__call__
    if call is _CALL:
        return False
    return not getattr(call, "__globals__", {}).get("__name__", "").startswith("torch.fx.")


def must_be_called(module: Any) -> bool:
    """Whether a call of the module runs more than the forward of its class."""
    return has_own_call(type(module)) or runs_hooks(module)


def runs_hooks(module: Any) -> bool:
    """Whether a call of the module runs a hook, or a forward of its own, as offloading leaves."""
    _ = module.forward  # Dynamo guards that the instance has none; to ask its __dict__ is no guard
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or _modules._global_forward_hooks
        or _modules._global_forward_pre_hooks
        or _modules._global_backward_hooks
        or _modules._global_backward_pre_hooks
    )


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The module's class, or the one from which PyTorch has derived it."""
    cls = type(module)
    while _is_derived(cls):
        cls = cls.__bases__[-1]
    return cls


def _is_derived(cls: type) -> bool:
    """Whether the class was derived from a module's class and given to the module.

    parametrize does so, with properties that compute the parameters, and fully_shard and replicate,
    with a first base for their methods, which is no nn.Module.
    """
    if cls.__module__ == parametrize.__name__:
        return cls.__name__.startswith("Parametrized")
    is_made = cls.__module__.startswith("torch.distributed.") and len(cls.__bases__) == 2
    return is_made and not issubclass(cls.__bases__[0], nn.Module)


def _derived_as(derived: type, cls: type[nn.Module]) -> type[nn.Module]:
    """cls, or derived from it what `derived` is of its plain class."""
    if not _is_derived(derived):
        return cls
    *others, base = derived.__bases__
    prefix = derived.__name__.removesuffix(base.__name__)
    cls = _derived_as(base, cls)
    own = {k: v for k, v in vars(derived).items() if k not in ("__dict__", "__weakref__")}
    return type(prefix + cls.__name__, (*others, cls), own)


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Gives the module this class in the place of its plain one, and takes away what marks a module
    of PyTorch's class that was swapped."""
    # Not by setattr, which a class may have of its own.
    object.__setattr__(module, "__class__", _derived_as(type(module), cls))
    if module.__dict__.pop("_is_swapped", False):
        module.__dict__.pop("__module__", None)


def give_back(module: nn.Module, cls: type[nn.Module]) -> None:
    """Gives a swapped module the class that it had, and what the swap has taken over."""
    set_class(module, cls)
    own = module.__dict__
    for name, value in own.pop("_taken_over", {}).items():
        own.setdefault(name, value)


# ---- What is swapped, and what is fused.


def is_made(cls: type) -> bool:
    """Whether a swap has made the class."""
    return "_swapped_from" in vars(cls)


def mark_of(module: nn.Module) -> str:
    """The attribute with which a swapped module's class names the one that the module had."""
    return "_stock" if "_is_swapped" in module.__dict__ else "_swapped_from"


def swapped_from(module: nn.Module) -> type[nn.Module] | None:
    """The class that the module had before a swap; None if it was not swapped."""
    return vars(plain_class(module)).get(mark_of(module))


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module has without a swap."""
    return swapped_from(module) or plain_class(module)


OURS = (FusedLayerNorm, FusedRMSNorm, FusedGroupNorm, FusedAdaLayerNorm)
# What a swap makes of PyTorch's classes: each sees by itself whether PyTorch's forward is its own.
PLAIN: dict[type[nn.Module], type[nn.Module]] = {
    stock.LayerNorm: FusedLayerNorm, stock.RMSNorm: FusedRMSNorm, stock.GroupNorm: FusedGroupNorm
}  # fmt: skip
# The kinds of norms of PyTorch's classes.
KINDS: dict[type[nn.Module], str] = {stock.LayerNorm: "layer", stock.RMSNorm: "rms"}
KINDS |= dict.fromkeys((stock.GroupNorm, *stock.InstanceNorms), "group")


def is_fused(module: nn.Module) -> bool:
    """Whether a call of the module runs the fused forward: neither it nor its class got another."""
    own = module.__dict__
    return "forward" not in own and runs_fused(type(module), "_is_swapped" in own)


@assume_constant_result
def runs_fused(cls: Any, is_stock_swapped: bool) -> bool:
    """`is_fused`, as far as the class says it. is_stock_swapped: whether the module was one of
    PyTorch's class before a swap."""
    if hasattr(cls, "_swapped_from"):
        return cls.forward is cls._made_forward and is_as_read(cls)
    if not issubclass(cls, OURS):  # that of the module may have changed, in another thread
        return False
    if not is_stock_swapped:
        return True
    base = cls._stock
    return cls.forward is PLAIN[base].forward and base.forward is stock.FORWARDS[base]


def forward_of(cls: Any) -> Forward | None:
    """The forward that is known of a class that a swap has made; None for another class."""
    return getattr(getattr(cls, "_known", None), "forward", None)


def kind_of(cls: Any) -> str:
    """The kind of norm of a swapped class, of PyTorch's classes and of their subclasses, or ""."""
    known: Known | None = getattr(cls, "_known", None)
    if known is not None:
        return known.kind
    return next((kind for base, kind in KINDS.items() if issubclass(cls, base)), "")
