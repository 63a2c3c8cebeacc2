# SPDX-License-Identifier: Apache-2.0
"""swap_norms and its halves, which make a model's own norms run on the fused kernels.

A module is swapped by giving it a subclass of its own class, whose forward is the fused one.
table.py holds, as data, what is known about the LayerNorms of other libraries, and rms.py about the
RMSNorms.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.overrides import has_torch_function_variadic

from .. import stock
from ..modules import FusedLayerNorm, FusedRMSNorm
from . import channels, forwards, modulated, rms, source, table
from . import rotations as rotary
from .forwards import Forward

Model = TypeVar("Model", bound=nn.Module)
_log = logging.getLogger(__package__)
_registered: dict[type[nn.Module], Callable[[Any], Forward | None]] = {}


Predicate = Callable[[str, Any], bool]


def swap_norms(
    model: Model, *, predicate: Predicate | None = None, rotations: bool = False
) -> Model:
    """Makes a model's norms, LayerNorms and RMSNorms, run on the fused kernels; returns the model.

    It is :func:`swap_layer_norm` and :func:`swap_rms_norm` in one, and :func:`unswap_norms` undoes
    it.

    Args:
        model: any module; it may itself be a norm.
        predicate: ``predicate(name, module)`` is called for every norm for which swap_layer_norm or
            swap_rms_norm would call it. It may rely on the name that ``model.named_modules()``
            gives the module, and on the module's being an nn.Module; an RMSNorm class of
            transformers, for example, is no nn.RMSNorm.
        rotations: also swap the attention modules of transformers that rotate q and k by an
            ``apply_rotary_pos_emb`` whose source ``fused_layernorm/swap/rotations.py`` knows, as
            those of Llama, Qwen3, Gemma 3, OLMo 2 and some 150 other models do. The rotation, and
            the norms of q and k by heads in front of it, become one kernel,
            :func:`qk_norm_rope`, which rounds once where the library rounds after each operation.
            The predicate is not called for them.
    """
    return _swap_all(model, predicate, ("layer", "rms"), "swap_norms", "norm", rotations)


def _swap_rotations(model: nn.Module, left: Counter[str]) -> None:
    for module in model.modules():
        if is_fused(module) or "forward" in module.__dict__:
            continue
        cls = rotary.class_of(_plain_class(module))
        if isinstance(cls, str):
            left[f"{_name(_plain_class(module))} ({cls})"] += 1
        elif cls is not None:
            _set_class(module, cls)


def swap_layer_norm(
    model: Model, *, predicate: Callable[[str, nn.LayerNorm], bool] | None = None
) -> Model:
    """Makes the LayerNorm modules of a model run on the fused kernels; returns the model.

    Swapped are: nn.LayerNorm, which becomes :class:`FusedLayerNorm`; the classes of timm,
    torchvision, transformers and diffusers that ``fused_layernorm/swap/table.py`` lists, as long as
    the installed library's source of their forward is one that the table knows; and the classes
    that :func:`register_swap` was told about. Only instances of exactly these classes are swapped:
    a subclass may compute something else. The table has diffusers' modules that modulate a norm's
    output, too: norm and modulation become one kernel, as long as the norm is fused and has no
    hooks.

    The module objects stay, and with them their parameters, names, hooks, training flags and every
    reference to them, so optimizers, shared modules and checkpoints are not affected. Each module
    stays an instance of its former class. Swapping again changes nothing, and
    :func:`unswap_layer_norm` undoes it.

    The logger ``fused_layernorm.swap`` says in one line, at INFO, which LayerNorm-like modules
    were left, and why. If no LayerNorm of the model is fused afterwards, a warning says so.

    Args:
        model: any module; it may itself be a LayerNorm.
        predicate: ``predicate(name, module)`` is called for every instance of nn.LayerNorm or a
            subclass that is not yet fused, and returns whether to swap it. A subclass that it
            accepts, and that neither the table nor register_swap knows, is assumed to compute what
            nn.LayerNorm computes. The predicate is not called for other modules: those that the
            table or register_swap knows are swapped, but a module that modulates a norm's output
            only if the norm is fused.

    Raises:
        TypeError: a ``make`` of :func:`register_swap` returned neither None nor a function that
            takes the arguments of the class's forward.
    """
    return _swap_all(model, predicate, ("layer",), "swap_layer_norm", "LayerNorm")


def swap_rms_norm(model: Model, *, predicate: Predicate | None = None) -> Model:
    """Makes the RMSNorm modules of a model run on the fused kernels; returns the model.

    Swapped are: nn.RMSNorm, which becomes :class:`FusedRMSNorm`; every class of any module whose
    forward has a source that ``fused_layernorm/swap/rms.py`` knows, as the RMSNorms of
    transformers and diffusers have; timm's; and the classes that :func:`register_swap` was told
    about. A swapped module rounds where its class rounds, and its result has the dtype that its
    class gives, also under autocast. What the kernels do not take, such as a float64 input, a
    weight narrower than the input or a tensor subclass, goes to the class's own forward, and so
    does every call of a class other than nn.RMSNorm on a device that is not CUDA.

    What :func:`swap_layer_norm` says of module objects, swapping again, the log and errors holds
    here too; :func:`unswap_rms_norm` undoes it.

    Args:
        model: any module; it may itself be an RMSNorm.
        predicate: ``predicate(name, module)`` is called for every module not yet fused that is an
            nn.RMSNorm, of a subclass of it, or of a class whose source is known, and returns
            whether to swap it. Such a class need not be a subclass of nn.RMSNorm: of the module
            only that it is an nn.Module may be relied on, and on the name that
            ``model.named_modules()`` gives it. A subclass of nn.RMSNorm that it accepts, and whose
            source is not known, is assumed to compute what nn.RMSNorm computes.
    """
    return _swap_all(model, predicate, ("rms",), "swap_rms_norm", "RMSNorm")


def _swap_all(
    model: Model,
    predicate: Predicate | None,
    kinds: tuple[str, ...],
    caller: str,
    what: str,
    rotations: bool = False,
) -> Model:
    """Swaps the norms of these kinds and the registered modules; `what` names them in messages."""
    left: Counter[str] = Counter()
    # The norms come first: a module that modulates a norm's output is swapped only if the norm was.
    modules = sorted(model.named_modules(), key=lambda item: not isinstance(item[1], nn.LayerNorm))
    for name, module in modules:
        if is_fused(module):
            continue
        kind = _kind(module)
        if kind in kinds or kind == REGISTERED:
            reason = _swap(name, module, predicate)
        elif kind == "rms" and "LayerNorm" in _plain_class(module).__name__:
            reason = "it computes RMSNorm"
        else:
            continue
        if reason:
            left[f"{_name(_plain_class(module))} ({reason})"] += 1
    if rotations:
        _swap_rotations(model, left)
    text = ", ".join(f"{count} {one}" for one, count in left.items())
    if left:
        _log.info(
            "%s: %d %s-like modules were left: %s", _name(type(model)), left.total(), what, text
        )
    wanted = {*kinds, REGISTERED, *([rotary.KIND] if rotations else [])}
    if not any(is_fused(module) and _fused_kind(module) in wanted for module in model.modules()):
        warnings.warn(
            f"{caller}: nothing in {_name(type(model))} is fused: "
            + (f"left were {text}" if left else f"it has no {what}"),
            stacklevel=3,
        )
    return model


def unswap_norms(model: Model) -> Model:
    """Gives every module that one of the swaps has swapped its class back; returns the model.

    A FusedLayerNorm or FusedRMSNorm that was constructed as one stays.
    """
    return _unswap_all(model, ("layer", "rms", rotary.KIND))


def unswap_layer_norm(model: Model) -> Model:
    """As :func:`unswap_norms`, for LayerNorms and the modules of registered classes."""
    return _unswap_all(model, ("layer",))


def unswap_rms_norm(model: Model) -> Model:
    """As :func:`unswap_norms`, for RMSNorms and the modules of registered classes."""
    return _unswap_all(model, ("rms",))


def _unswap_all(model: Model, kinds: tuple[str, ...]) -> Model:
    for module in model.modules():
        swapped_from = _swapped_from(module)
        if swapped_from is not None and _fused_kind(module) in (*kinds, REGISTERED):
            _set_class(module, swapped_from)  # first, for another thread may be in its forward
            own = module.__dict__
            if own.pop("_was_layer_norm", False):
                own.pop("__module__", None)
            if own.pop("_was_rms_norm", False):
                own.pop("__module__", None)
                module._parameters.pop("bias", None)
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
    if issubclass(cls, (FusedLayerNorm, FusedRMSNorm)) or "_swapped_from" in vars(cls):
        raise ValueError(f"expected a class that is not fused, got {cls.__name__}")
    _registered[cls] = make


def is_fused(module: nn.Module) -> bool:
    """Whether a module's forward is the fused one, by construction or by a swap."""
    return isinstance(module, (FusedLayerNorm, FusedRMSNorm)) or hasattr(
        type(module), "_swapped_from"
    )


# ---- Which modules are swapped, and why others are not.

REGISTERED = "registered"  # the kind of a class that register_swap was told about


def _kind(module: nn.Module) -> str | None:
    """Which kind of norm a module is: layer, rms or registered; None if it is no norm.

    A module is of a kind if it may be swapped, or if its class's name says so and it belongs in the
    log. The name, and a source that is known of any module's classes, count only for a module
    without children.
    """
    cls = _plain_class(module)
    if cls in _registered:
        return REGISTERED
    if isinstance(module, nn.LayerNorm) or _sources(cls) is not None:
        return "layer"
    if isinstance(module, nn.RMSNorm) or _is_listed_rms(cls):
        return "rms"
    children = {name for name, _ in module.named_children()} - {"parametrizations"}
    if cls.__module__.startswith("torch.") or children:
        return None
    if _rms_forward_of(cls) is not None:
        return "rms"
    if "LayerNorm" in cls.__name__:
        return "layer"
    return "rms" if "rmsnorm" in cls.__name__.lower().replace("_", "") else None


def _fused_kind(module: nn.Module) -> str:
    """The kind of a fused module."""
    if isinstance(module, FusedLayerNorm):
        return "layer"
    if isinstance(module, FusedRMSNorm):
        return "rms"
    kind: str = getattr(type(module), "_fused_kind", REGISTERED)
    return kind


def _swap(name: str, module: nn.Module, predicate: Predicate | None) -> str | None:
    """Swaps a module and returns None, or returns the reason not to."""
    cls = _plain_class(module)
    rms_forward = None
    if cls not in _registered and not isinstance(module, nn.LayerNorm) and _sources(cls) is None:
        rms_forward = _rms_forward_of(cls)
    accepted = False
    if predicate is not None and (
        isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or rms_forward is not None
    ):
        if not predicate(name, module):
            return "the predicate refused"
        accepted = True
    if "forward" in module.__dict__:
        return "the module has a forward of its own"
    if parametrize.is_parametrized(module) and not accepted:
        return "it is parametrized, and no predicate accepted it"
    sources = _sources(cls)
    forward: Forward | None
    if cls in _registered:
        forward = _registered[cls](module)
        if forward is None:
            return "the function registered for its class left it"
        _check_forward(cls, forward)
    elif cls is nn.LayerNorm:
        module.__dict__.update(_was_layer_norm=True, **_LEAF)
        _set_class(module, FusedLayerNorm)
        return None
    elif cls is nn.RMSNorm:
        if hasattr(module, "bias"):
            return "it has a bias, of which nn.RMSNorm does not know"
        module.__dict__.update(_was_rms_norm=True, **_LEAF)
        module.register_parameter("bias", None)  # FusedRMSNorm has one
        _set_class(module, FusedRMSNorm)
        return None
    elif sources is not None:
        forward = sources.get(source.digest(cls) or "")
        if forward is None:
            return "the source of its forward is not one that fused_layernorm knows"
        norms = modulated.NORMS.get(forward, ())
        found = [module.get_submodule(norm) for norm in norms]
        if not all(is_fused(norm) and _fused_kind(norm) != "rms" for norm in found):
            return "it has a norm that is not fused"
    elif rms_forward is not None:
        forward = rms_forward
    elif _is_listed_rms(cls):
        return "the source of its forward is not one that fused_layernorm knows"
    elif accepted:
        is_rms = isinstance(module, nn.RMSNorm)
        forward = rms.of_rms_norm if is_rms else FusedLayerNorm.forward
    else:
        return "its class is not known"
    _set_class(module, _swapped_class(cls, forward))
    return None


def _sources(cls: type) -> table.Sources | None:
    return table.CLASSES.get((cls.__module__, cls.__qualname__))


def _rms_forward_of(cls: type) -> Forward | None:
    return source.forward_of(cls, rms) or source.forward_of(cls, channels)


def _is_listed_rms(cls: type) -> bool:
    name = (cls.__module__, cls.__qualname__)
    return name in rms.CLASSES or name in channels.CLASSES


def _check_forward(cls: type[nn.Module], forward: object) -> None:
    if not isinstance(forward, types.FunctionType):
        raise TypeError(
            f"expected the make registered for {cls.__name__} to return a function or None, "
            f"got {type(forward).__name__}"
        )
    required = [
        name
        for name, parameter in inspect.signature(cls.forward).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    try:
        inspect.signature(forward).bind(*required)
    except TypeError:
        raise TypeError(
            f"expected the make registered for {cls.__name__} to return a forward that takes "
            f"({', '.join(required)}), self first, got one that takes {inspect.signature(forward)}"
        ) from None


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# ---- The classes of swapped modules.

# torch.fx records a module of torch.nn as one call, and reads this name on the module itself, where
# it hides the class's name from nothing else: pickle asks the class.
_LEAF = {"__module__": nn.LayerNorm.__module__}

_classes: weakref.WeakValueDictionary[tuple[type, Forward], type[nn.Module]] = (
    weakref.WeakValueDictionary()
)


def _swapped_class(cls: type[nn.Module], forward: Forward) -> type[nn.Module]:
    """The subclass of cls with this forward; modules of one class and forward share it."""
    made = _classes.get((cls, forward))
    if made is None:
        bases: tuple[type, ...] = (cls,)
        if forward is FusedLayerNorm.forward:  # it reads FusedLayerNorm's class attributes
            bases = (cls, FusedLayerNorm)
        members = {
            "__module__": cls.__module__,
            "__doc__": f"{_name(cls)}, swapped by fused_layernorm.swap_norms.",
            "__reduce_ex__": _reduce_ex,
            "_fused_kind": _kind_of(cls, forward),
            "_get_name": _get_name,
            "_swapped_from": cls,
            "_fused_forward": staticmethod(forward),
        }
        if forward is FusedLayerNorm.forward:  # which asks by itself what it may serve
            members.update(_was_layer_norm=True, forward=forward)
        made = type(f"Fused{cls.__name__}", bases, members)
        if "forward" not in members:
            made.forward = _or_stock(forward, cls, made)
        _classes[cls, forward] = made
    return made


def _or_stock(fused: Forward, cls: type[nn.Module], swapped: type[nn.Module]) -> Forward:
    """The forward of a swapped class: what the stock forward takes, it takes.

    The stock forward of cls serves what the operators do not know (stock.are_supported), what the
    fused one returns None for, and a module that was unswapped while somebody kept its forward.
    """
    # The parameters and their names are the stock forward's.
    parameters = [*inspect.signature(cls.forward).parameters.values()][1:2]  # the first after self
    first = next((p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD), "")

    def is_plain(self: Any, x: Any) -> bool:
        """What follows from are_supported for the most common call, in a third of its time."""
        return (
            type(x) is Tensor
            and not (has_torch_function_variadic(x, *self._parameters.values()) or x.is_nested)
            and F.layer_norm is stock.layer_norm
            and F.rms_norm is stock.rms_norm
            and isinstance(self, swapped)
        )

    def of_any_call(self: Any, x: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if x is None and kwargs.get(first) is not None:
            x = kwargs.pop(first)
        args = () if x is None and not rest else (x, *rest)
        parameters = self._parameters.values()
        if isinstance(self, swapped) and stock.are_supported(*args, *kwargs.values(), *parameters):
            found = fused(self, *args, **kwargs)
            if found is not None:
                return found
        return cls.forward(self, *args, **kwargs)

    # torch.jit.script compiles the source of the function that this one wraps, with the globals of
    # this one. So they are made the stock forward's, and this one reads none.
    def forward(self: Any, x: Any = None, /, *rest: Any, **kwargs: Any) -> Any:
        if rest or kwargs or not is_plain(self, x):
            return of_any_call(self, x, rest, kwargs)
        found = fused(self, x)
        return cls.forward(self, x) if found is None else found

    names = getattr(cls.forward, "__globals__", globals())
    forward = types.FunctionType(
        forward.__code__, names, argdefs=forward.__defaults__, closure=forward.__closure__
    )
    return functools.wraps(cls.forward, updated=())(forward)


def _kind_of(cls: type[nn.Module], forward: Forward) -> str:
    """The kind of a swapped class: layer, rms or registered."""
    if forward.__module__ in (rms.__name__, channels.__name__):
        return "rms"
    if forward is FusedLayerNorm.forward or forward.__module__ in _OF_LAYER_NORMS:
        return "layer"
    return REGISTERED


_OF_LAYER_NORMS = (forwards.__name__, modulated.__name__)


def _get_name(self: Any) -> str:
    is_rms = self._fused_kind == "rms" or issubclass(self._swapped_from, nn.RMSNorm)
    return f"Fused{'RMSNorm' if is_rms else 'LayerNorm'}[{self._swapped_from.__name__}]"


def _reduce_ex(self: Any, protocol: Any) -> Any:
    """As object.__reduce_ex__, but unpickling makes the class, which pickle cannot find by name."""
    state: Any = object.__reduce_ex__(self, max(2, protocol))[2:]
    return _unpickled, (self._swapped_from, type(self)._fused_forward), *state


def _unpickled(cls: type[nn.Module], forward: Forward) -> nn.Module:
    swapped = _swapped_class(cls, forward)
    return swapped.__new__(swapped)


def _swapped_from(module: nn.Module) -> type[nn.Module] | None:
    cls = _plain_class(module)
    if cls is FusedLayerNorm and "_was_layer_norm" in module.__dict__:
        return nn.LayerNorm
    if cls is FusedRMSNorm and "_was_rms_norm" in module.__dict__:
        return nn.RMSNorm
    return vars(cls).get("_swapped_from")


def _plain_class(module: nn.Module) -> type[nn.Module]:
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


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Gives the module this class in the place of its plain one."""
    module.__class__ = _derived_as(type(module), cls)


def _derived_as(derived: type, cls: type[nn.Module]) -> type[nn.Module]:
    """cls, or derived from it what `derived` is of its plain class."""
    if not _is_derived(derived):
        return cls
    *others, base = derived.__bases__
    prefix = derived.__name__.removesuffix(base.__name__)
    cls = _derived_as(base, cls)
    own = {k: v for k, v in vars(derived).items() if k not in ("__dict__", "__weakref__")}
    return type(prefix + cls.__name__, (*others, cls), own)
