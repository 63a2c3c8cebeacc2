# SPDX-License-Identifier: Apache-2.0
"""The patterns, as expressions, and how they are matched.

In an expression a name stands for any tensor, and for the same tensor wherever it occurs; `eps` and
`factor` stand for numbers. The operands of + and * may stand in either order. A cast between two
steps changes rounding only, so it may stand anywhere (but see `rounded` in sites.py).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.fx import Node

from ..ops import arguments
from .reading import Call, before_casts, is_number, is_tensor, origin, read

# How the variance is written, and the mean square of RMSNorm.
VARIANCES = (
    "var(x)",
    "mean((x - mean(x)) ** 2)",
    "mean((x - mean(x)) * (x - mean(x)))",
    "(mean(x ** 2) - mean(x) ** 2)",
)
MEAN_SQUARES = ("mean(x ** 2)", "mean(x * x)")
# x normalized, by statistic. A layer norm is an RMSNorm of x - mean(x), so it is tried first.
NORMALIZED = {
    statistic: [
        f"{centered} {step}({moment} + eps)" for moment in moments for step in ("* rsqrt", "/ sqrt")
    ]
    for statistic, centered, moments in (
        ("layer", "(x - mean(x))", VARIANCES),
        ("rms", "x", MEAN_SQUARES),
    )
}

# The sums that may give a norm's input.
SUMS = ("residual + gate * input", "residual + input")

# What may follow a norm, in this order. weight and bias have the normalized shape.
AFFINES = ("norm * weight + bias", "norm * weight", "norm + bias")
MODULATIONS = (
    "norm * (1 + scale) + shift",
    "norm + norm * scale + shift",
    "norm + (norm * scale + shift)",
    "norm * (1 + scale)",
    "norm + norm * scale",
)
ACTIVATIONS = {
    **{f"{name}(norm)": name for name in arguments.ACTIVATIONS},
    "norm * sigmoid(norm)": "silu",
}
GROUP_ACTIVATIONS = {**{f"{name}(norm)": name for name in arguments.OF_GROUPS}, **ACTIVATIONS}
FACTORS = ("norm * factor",)

_NUMBERS = ("eps", "factor")
_COMMUTATIVE = ("add", "mul")
_OPERATIONS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow"}


class Match(NamedTuple):
    """What the names of a pattern stand for, and the nodes that compute its result from them."""

    values: dict[str, Any]
    nodes: frozenset[Node] = frozenset()
    over: Any = None  # the dimensions of the pattern's reductions

    def passing(self, *nodes: Any) -> Match:
        return self._replace(nodes=self.nodes | {n for n in nodes if isinstance(n, Node)})


@functools.cache
def parse(expression: Any) -> Any:
    """The pattern of an expression, given as text or tree: a name, a number, or a Call of these."""
    is_text = isinstance(expression, str)
    match ast.parse(expression, mode="eval").body if is_text else expression:
        case ast.Name(id=name):
            return name
        case ast.Constant(value=number):
            return number
        case ast.BinOp(left=left, op=op, right=right):
            return Call(_OPERATIONS[type(op)], (parse(left), parse(right)))
        case ast.Call(func=ast.Name(id=name), args=args):
            return Call(name, tuple(map(parse, args)))
    raise ValueError(f"no pattern: {expression}")


def matches(pattern: Any, value: Any, match: Match) -> Iterator[Match]:
    """The ways in which a value, usually a node, matches a pattern."""
    if isinstance(pattern, str):
        yield from _name(pattern, value, match)
    elif not isinstance(pattern, Call):
        if isinstance(value, (int, float)) and value == pattern:
            yield match
    else:
        yield from _call(pattern, value, match)


def _name(name: str, value: Any, match: Match) -> Iterator[Match]:
    if name in match.values:
        path = before_casts(value, only_widening=name != "norm")
        known = match.values[name] if name == "norm" else origin(match.values[name])
        if known in path:
            yield match.passing(*path[: path.index(known)])
    elif is_number(value) if name in _NUMBERS else is_tensor(value):
        yield match._replace(values={**match.values, name: value})


def _call(pattern: Call, value: Any, match: Match) -> Iterator[Match]:
    *casts, value = before_casts(value, only_widening=False)
    call, match = read(value), match.passing(*casts)
    if call is None:
        return
    if call.name == "view" and pattern == _ONE_PLUS_SCALE:
        for found in _call(pattern, call.operands[0], match.passing(value)):
            views = (*found.values.get("scale_views", ()), value)
            yield found._replace(values={**found.values, "scale_views": views})
        return
    if call.name != pattern.name or len(call.operands) != len(pattern.operands):
        return
    if call.over is not None:
        if match.over not in (None, call.over):
            return
        match = match._replace(over=call.over)
    match = match.passing(value)
    orders = [call.operands]
    if call.name in _COMMUTATIVE:
        orders.append(call.operands[::-1])
    for operands in orders:
        yield from _operands(pattern.operands, operands, match)


def _operands(patterns: tuple[Any, ...], values: tuple[Any, ...], match: Match) -> Iterator[Match]:
    if not patterns:
        yield match
        return
    for found in matches(patterns[0], values[0], match):
        yield from _operands(patterns[1:], values[1:], found)


_ONE_PLUS_SCALE = parse("1 + scale")
