# SPDX-License-Identifier: Apache-2.0
"""The side effects of a graph: writes into tensors, and changes of PyTorch's modes.

A captured graph is not functional. A fused operator reads its operands later than the nodes that it
replaces. In between nothing may write into the operands, and no mode (autocast, gradients, a
torch.func transform) may begin or end.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Graph, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .reading import read, value_of

_WRITING_FUNCTIONS = {
    *(operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv),
    *(operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul),
    *(operator.iand, operator.ior, operator.ixor),
}
# Position of `inplace` among the arguments of those functions that take it by position.
_INPLACE = {"dropout": 3, "silu": 1, "relu": 1, "gelu": None}
# Modules whose functions write into arguments only where the functions' names say so.
_KNOWN_MODULES = ("torch", "_operator", "operator", "math", "builtins", "einops")
_MODES = ("_set_grad_enabled", "_enter_", "_exit_", "crement_nesting", "_set_deterministic")


def name_of_target(target: Any) -> str:
    """The name of a function or method, without its module."""
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def changes_mode(node: Node) -> bool:
    """Whether this node changes one of PyTorch's modes."""
    return node.op == "call_function" and any(
        part in name_of_target(node.target) for part in _MODES
    )


def written(node: Node) -> Iterable[Any]:
    """The arguments that a node writes into; all of them if its target is not known."""
    if node.op in ("placeholder", "get_attr", "output") or read(node) is not None:
        return ()
    target, name = node.target, name_of_target(node.target)
    if isinstance(target, OpOverload):
        schema = target._schema
        if not schema.is_mutable:
            return ()
        named = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
        named.update(node.kwargs)
        return [
            named[a.name]
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write and a.name in named
        ]
    if isinstance(target, OpOverloadPacket):
        schemas = [getattr(target, overload)._schema for overload in target.overloads()]
        return node.all_input_nodes if any(schema.is_mutable for schema in schemas) else ()
    if isinstance(target, HigherOrderOperator):
        # Dynamo makes the bodies of checkpoints and the like functional, or breaks the graph.
        return node.all_input_nodes if "mutation" in name or "auto_functional" in name else ()
    found = [node.kwargs["out"]] if node.kwargs.get("out") is not None else []
    position = _INPLACE.get(name.rstrip("_"))
    inplace = node.kwargs.get("inplace", False)
    if position is not None and len(node.args) > position:
        inplace = node.args[position]
    is_written = (
        inplace is not False
        or target in _WRITING_FUNCTIONS
        or name == "__setitem__"
        or (name.startswith("__i") and name.endswith("__") and name != "__invert__")
        or (name.endswith("_") and not name.endswith("__"))
    )
    if is_written:
        return [*found, *node.args[:1]]
    if node.op == "call_module" or (node.op == "call_function" and not _is_known(target)):
        return node.all_input_nodes
    return found


def _is_known(target: Any) -> bool:
    module = getattr(target, "__module__", None) or type(target).__module__
    return module.split(".")[0] in _KNOWN_MODULES


def storages_of(value: Any) -> Iterator[int]:
    """The storages of the tensors in a value, each as its address."""
    if isinstance(value, (tuple, list)):
        for element in value:
            yield from storages_of(element)
    elif isinstance(value, Tensor):
        if is_traceable_wrapper_subclass(value):
            for name in value.__tensor_flatten__()[0]:
                yield from storages_of(getattr(value, name))
        elif value.layout is torch.strided:
            yield value.untyped_storage()._cdata


class Effects:
    """The writes and the changes of modes in one graph."""

    def __init__(self, graph: Graph) -> None:
        self._writes: dict[int, list[Node]] = {}  # by storage
        self._unknown: list[Node] = []  # writes into something without an example
        self._regions: dict[Node, int] = {}  # a change of a mode begins a new region
        self._in_transform: set[int] = set()  # regions inside a torch.func transform
        region = transforms = 0
        for node in graph.nodes:
            if changes_mode(node):
                region += 1
                name = name_of_target(node.target)
                transforms += ("_increment_nesting" in name) - ("_decrement_nesting" in name)
                if transforms:
                    self._in_transform.add(region)
            self._regions[node] = region
            for argument in written(node):
                self._note(node, argument)

    def _note(self, node: Node, argument: Any) -> None:
        if isinstance(argument, (tuple, list)):
            for element in argument:
                self._note(node, element)
        elif isinstance(argument, Node):
            storages = list(storages_of(value_of(argument)))
            for storage in storages:
                self._writes.setdefault(storage, []).append(node)
            if not storages and value_of(argument) is None:
                self._unknown.append(node)

    def write_between(
        self, nodes: Iterable[Node], start: Node, end: Node | None = None
    ) -> Node | None:
        """A node after start (and before end, if given) that writes into one of nodes, or None."""
        found = list(self._unknown)
        for node in nodes:
            for storage in storages_of(value_of(node)):
                found += self._writes.get(storage, ())
        return next((n for n in found if start < n and (end is None or n < end)), None)

    def writers(self, node: Node) -> set[Node]:
        """The nodes of the graph that may write into the node's tensors."""
        found = (self._writes.get(storage, ()) for storage in storages_of(value_of(node)))
        return {*self._unknown, *itertools.chain(*found)}

    def is_written(self, node: Node) -> bool:
        """Whether any node of the graph may write into the node's tensors."""
        return bool(self.writers(node))

    def in_one_region(self, nodes: Iterable[Node]) -> bool:
        return len({self._regions[node] for node in nodes}) <= 1

    def in_transform(self, node: Node) -> bool:
        """Whether torch.func transforms what the node computes."""
        return self._regions[node] in self._in_transform

    def place(self, node: Node, beside: Node) -> None:
        """Gives a new node the modes of the node beside it."""
        self._regions[node] = self._regions[beside]
