# SPDX-License-Identifier: Apache-2.0
"""The side effects of a graph: writes into tensors, and changes of PyTorch's modes.

A captured graph is not functional. A fused operator reads its operands later than the nodes that it
replaces. In between nothing may write into the operands, and no mode (autocast, gradients, a
torch.func transform) may begin or end.

What a node writes into follows from the schema of its operator, from the signature of its Python
function, or from the name of its method. A node that is none of these writes into all it reads.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from .reading import name_of_target, read, value_of

# Modules whose builtin functions write into nothing.
_KNOWN_BUILTINS = ("math", "builtins", "torch._C._functorch")
# Modules whose Python functions write only into what their signatures say, and those named "..._".
_KNOWN_MODULES = {
    *("torch", "torch.functional", "torch.nn.functional", "torch._jit_internal"),
    *("torch._functorch.predispatch", "torch.amp.autocast_mode", "einops"),
    "torch.distributed.tensor._api",
}
_METHODS_OF_DTENSORS = ("redistribute", "to_local", "full_tensor")
# Arguments that a function without a mutable schema writes into, if they are given.
_STATISTICS = ("running_mean", "running_var")
_MODES = ("set_grad", "_enter_", "_exit_", "crement_nesting", "set_deterministic", "set_autocast")


def written(node: Node) -> Iterable[Any]:
    """The arguments that a node writes into; all of them if its target is not understood."""
    if node.op in ("placeholder", "get_attr", "output") or read(node) is not None:
        return ()
    found = _written(node)
    return node.all_input_nodes if found is None else found


def _written(node: Node) -> list[Any] | None:
    """The arguments that a node writes into, or None if that is not known."""
    target, name = node.target, name_of_target(node.target)
    if isinstance(target, HigherOrderOperator):
        return _written_by_bodies(node)
    module = getattr(target, "__module__", None)
    is_method = node.op == "call_method" or hasattr(target, "__objclass__")
    if is_method or module == "_operator":
        bare = name.strip("_")
        is_in_place = bare == "setitem" or (bare[:1] == "i" and hasattr(operator, bare[1:]))
        if is_in_place or (is_method and name.endswith("_") and not name.endswith("__")):
            return [*node.args[:1]]
        is_known = not is_method or hasattr(Tensor, name) or name in _METHODS_OF_DTENSORS
        return [] if is_known else None
    if node.op != "call_function":
        return None
    if not isinstance(target, (OpOverload, OpOverloadPacket)) and not inspect.isbuiltin(target):
        return _written_by_signature(node)
    if module in _KNOWN_BUILTINS:
        return []
    packet = getattr(torch.ops.aten, name, None) if inspect.isbuiltin(target) else target
    return None if packet is None else _written_by_schemas(node, packet)


def _written_by_schemas(node: Node, target: Any) -> list[Any]:
    overloads = [target]
    if isinstance(target, OpOverloadPacket):
        overloads = [getattr(target, overload) for overload in target.overloads()]
    found = []
    for schema in (overload._schema for overload in overloads):
        given = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
        given.update(node.kwargs)
        given.setdefault("self", given.get("input"))  # as PyTorch's functions name it
        writes = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        found += [given.get(name) for name in (*writes, *_STATISTICS, "out")]
    return found


def _written_by_signature(node: Node) -> list[Any] | None:
    target: Any = node.target
    module = getattr(target, "__module__", None) or ""
    is_known = module in _KNOWN_MODULES or module.split(".")[0] in _KNOWN_MODULES - {"torch"}
    if not is_known or name_of_target(target).endswith("_"):
        return None
    try:
        bound = inspect.signature(target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return None
    given = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    found = [given.get(name) for name in (*_STATISTICS, "out")]
    if given.get("inplace", False) is not False:
        found += bound.args[:1]
    if given.get("max_norm") is not None:
        found.append(given.get("weight"))  # embeddings are scaled in the table
    return found


def _written_by_bodies(node: Node) -> list[Any] | None:
    """Nothing, if no body of a higher-order operator (a checkpoint, say) writes into its inputs."""
    names = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    found = [getattr(node.graph.owning_module, name, None) for name in names]
    bodies = [module for module in found if isinstance(module, GraphModule)]
    return None if not bodies or any(map(_writes_into_inputs, bodies)) else []


def _writes_into_inputs(body: GraphModule) -> bool:
    effects = Effects(body.graph)
    inputs = [node for node in body.graph.nodes if node.op in ("placeholder", "get_attr")]
    is_unknown = any(node.op == "placeholder" and value_of(node) is None for node in inputs)
    return any(map(effects.writers, inputs)) or (is_unknown and bool(effects._writes))


def storages_of(value: Any) -> Iterator[int]:
    """The storages of the tensors in a value, each as its address."""
    for leaf in tree_leaves(value):
        if is_traceable_wrapper_subclass(leaf):
            for name in leaf.__tensor_flatten__()[0]:
                yield from storages_of(getattr(leaf, name))
        elif isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()._cdata


class Effects:
    """The writes and the changes of modes in one graph."""

    def __init__(self, graph: Graph) -> None:
        self._writes: dict[int, list[Node]] = {}  # by storage
        self._unknown: list[Node] = []  # writes into something without an example
        # By node: a change of a mode begins a new region; one may be inside a torch.func transform.
        self.regions: dict[Node, tuple[int, bool]] = {}
        region = transforms = 0
        for node in graph.nodes:
            name = name_of_target(node.target)
            if node.op == "call_function" and any(mode in name for mode in _MODES):
                region += 1
                transforms += ("_increment_nesting" in name) - ("_decrement_nesting" in name)
            self.regions[node] = region, transforms > 0
            found: list[Node] = []
            map_arg(tuple(written(node)), found.append)
            for value in map(value_of, found):
                self._unknown += [node] * (value is None)
                for storage in storages_of(value):
                    self._writes.setdefault(storage, []).append(node)

    def writers(self, node: Node) -> list[Node]:
        """The nodes of the graph that may write into the node's tensors."""
        found = (self._writes.get(storage, ()) for storage in storages_of(value_of(node)))
        return [*self._unknown, *itertools.chain(*found)]

    def write_between(
        self, nodes: Iterable[Node], start: Node, end: Node | None = None
    ) -> Node | None:
        """A node after start (and before end, if given) that writes into one of nodes, or None."""
        found = itertools.chain(*map(self.writers, nodes))
        return next((n for n in found if start < n and (end is None or n < end)), None)
