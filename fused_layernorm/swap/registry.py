# SPDX-License-Identifier: Apache-2.0
"""What a module is: the one place that says so, for the swaps of norms and for is_fused.

A class is known by itself (nn.LayerNorm, and what register_swap was told of), by its name and the
source of its forward, or by that source alone, wherever the class stands (known.txt, which says how
its rows are written). A class is looked up by the names of its module and of itself, so no library
is imported; one whose forward has a source that is not listed for it is not swapped. A new kind of
norm adds its rows there, and its class of PyTorch to `_OF_PYTORCH`.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from .. import stock
from . import classes, forwards, groups, heads, modulated, rms, source
from .classes import REGISTERED, Forward, Known, kind_of, own_class
from .classes import is_fused as is_fused  # the package takes it from here
from .source import Part, Source

# ---- The rows of known.txt.

# From the digest of a forward's source (source.digest) to what is known of it.
_Sources = dict[str, Known]
CLASSES: dict[str, _Sources] = {}  # by the name of the class, that of its module before it
SOURCES: _Sources = {}  # for classes of any module


def _known(kind: str, of: Any, name: str) -> Any:
    if of is modulated:
        return Known(kind, of.derived, (*name.split("+"),), of.members)
    found = eval(name.removesuffix("+act"), vars(of))
    if of is heads:
        return found
    return Known(kind, groups.then_act(found) if name.endswith("+act") else found)


def _enter(text: str) -> None:
    kind, of = "", None
    for row in re.split(r"\n+(?! )", re.sub(" *#.*", "", text).strip()):
        if row.startswith("["):
            kind, module = row.strip("[]").split()
            of = globals()[module]
            continue
        name, digests, *classes = row.split()
        sources = dict.fromkeys(digests.split(","), _known(kind, of, name))
        if not classes:
            (heads.SOURCES if of is heads else SOURCES).update(sources)
        for cls in classes:
            CLASSES.setdefault(cls, {}).update(sources)


_enter(Path(__file__).with_name("known.txt").read_text())

# ---- What a module is.

# The classes of PyTorch, whose forwards are stock.FORWARDS.
_OF_PYTORCH: dict[type[nn.Module], Known] = {
    **{cls: Known(classes.KINDS[cls], fused.forward) for cls, fused in classes.PLAIN.items()},
    **dict.fromkeys(stock.InstanceNorms, Known("group", groups.instance_norm)),
}
# What computes what PyTorch's class does, for a subclass of it that a predicate accepts.
_AS_PYTORCH: dict[type[nn.Module], Known] = {
    stock.LayerNorm: Known("layer", forwards.of_layer_norm),
    stock.RMSNorm: Known("rms", rms.of_rms_norm),
    stock.GroupNorm: Known("group", groups.of_group_norm),
}

Make = Callable[[Any], "Forward | None"]
registered: dict[type[nn.Module], tuple[Make, Any]] = {}  # with the class's forward as it was
Read = Callable[[type], "Source | None"]


class Found(NamedTuple):
    """What a module is, if it may be swapped or belongs in the log."""

    kind: str
    known: Known | None = None
    reason: str = ""  # why it is left, where nothing is known
    parts: tuple[Part, ...] = ()  # what was read of the class
    make: Make | None = None  # of a registered class
    own: Forward | None = None  # the forward of the instance that is known


def find(module: nn.Module, read: Read = source.read) -> Found | None:
    """What a module is that is not fused; None if it is no norm.

    A class that is not known is a norm if its name says so and it has no children.
    """
    cls = own_class(module)
    own = module.__dict__.get("forward")
    if own is not None:
        return _of_instance(module, own, cls, read)
    if cls in registered:
        make, forward = registered[cls]
        kind = kind_of(cls) or REGISTERED
        if cls.forward is not forward:
            return Found(kind, reason="its forward was replaced since it was registered")
        return Found(kind, make=make, parts=(Part(cls, "forward", forward),))
    if cls in _OF_PYTORCH:
        kind = _OF_PYTORCH[cls].kind
        if issubclass(cls, stock.InstanceNorms) and groups.has_running_statistics(module):
            return Found(kind, reason="it has running statistics")
        if cls.forward is not stock.FORWARDS[cls]:
            return Found(kind, reason="its forward was replaced")
    by_class = name_of(cls) in CLASSES
    if not by_class and not isinstance(module, tuple(_OF_PYTORCH)):  # its source alone counts
        children = {name for name, _ in module.named_children()} - {"parametrizations"}
        if cls.__module__.startswith("torch.") or children:
            return None
    known, parts = _read(cls, read)
    if known is not None:
        return Found(known.kind, known, parts=parts)
    unknown = "the source of its forward is not one that fused_layernorm knows"
    kind = _kind_by_name(cls)
    return Found(kind, reason=unknown if by_class else "its class is not known") if kind else None


def name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _read(cls: type[nn.Module], read: Read) -> tuple[Known | None, tuple[Part, ...]]:
    """What the source of a class's forward says that it is, and what was read."""
    if cls in _OF_PYTORCH:
        return _OF_PYTORCH[cls], (Part(cls, "forward", stock.FORWARDS[cls]),)
    found = read(cls)
    if found is None:
        return None, ()
    return CLASSES.get(name_of(cls), SOURCES).get(found.digest), found.parts


def _kind_by_name(cls: type) -> str:
    if by_class := CLASSES.get(name_of(cls)):
        return next(iter(by_class.values())).kind
    name = cls.__name__.lower().replace("_", "")
    if kind := kind_of(cls):
        return kind
    if "groupnorm" in name or "instancenorm" in name:
        return "group"
    return "layer" if "LayerNorm" in cls.__name__ else "rms" if "rmsnorm" in name else ""


def _of_instance(module: nn.Module, own: Any, cls: type[nn.Module], read: Read) -> Found | None:
    """What a module is whose instance has a forward: Liger binds that of a class of its own."""
    if isinstance(own, types.MethodType) and own.__self__ is module:
        known = _of_liger(own.__func__, read)
        if known is not None:
            return Found(known.kind, known, own=own.__func__)
    kind = _kind_by_name(cls) or (REGISTERED if cls in registered else "")
    return Found(kind, reason="the module has a forward of its own") if kind else None


def accepted(module: nn.Module, found: Found) -> Found:
    """What a module is that nobody knows and a predicate accepts: a subclass of PyTorch's is taken
    to compute what PyTorch's class computes."""
    cls = own_class(module)
    if "forward" in module.__dict__ or cls in _OF_PYTORCH or name_of(cls) in CLASSES:
        return found
    for of_pytorch, known in _AS_PYTORCH.items():
        if isinstance(module, of_pytorch):
            return Found(known.kind, known, parts=(Part(cls, "forward", cls.forward),))
    return found


def _of_liger(function: Any, read: Read) -> Known | None:
    """What is known of a function that is the forward of a class of Liger."""
    name = getattr(function, "__qualname__", "").removesuffix(".forward")
    of = getattr(sys.modules.get(getattr(function, "__module__", "")), name, None)
    if not isinstance(of, type) or vars(of).get("forward") is not function:
        return None
    found = read(of) if name_of(of) in CLASSES and of.__module__.startswith("liger_") else None
    return None if found is None else CLASSES[name_of(of)].get(found.digest)


# ---- Classes of swapped norms.


def class_of(
    cls: type[nn.Module], known: Known, parts: tuple[Part, ...], own: Forward | None = None
) -> type[nn.Module]:
    """The class that a swap gives to a norm."""
    is_row = known.forward.__module__.startswith(f"{__package__}.")
    is_row = is_row and known not in _AS_PYTORCH.values()
    forward = None if is_row else known.forward
    return classes.made_class(cls, known, parts, (_again, known.kind, forward, own), own)


def _again(
    cls: type[nn.Module], kind: str, forward: Forward | None, own: Forward | None
) -> type[nn.Module] | None:
    """The class of a module that is unpickled; None where that is another release's.

    `forward` is that of register_swap, or of what a predicate accepted.
    """
    parts: tuple[Part, ...] = ()
    if own is not None:
        known = _of_liger(own, source.read)
    elif forward is not None:
        known, parts = Known(kind, forward), (Part(cls, "forward", cls.forward),)
    else:
        known, parts = _read(cls, source.read)
    return None if known is None else class_of(cls, known, parts, own)
