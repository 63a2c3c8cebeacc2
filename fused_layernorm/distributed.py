# SPDX-License-Identifier: Apache-2.0
"""DTensor: how the operators may be sharded.

Rows are independent, and in group_norm samples. An input may stay sharded over any dimension that
is not normalized over (q and k over samples, heads or positions): a shift, scale, gate, cos or sin
that has the sharded dimension is sharded over it, too, and so is its gradient; weight, bias, and
what is broadcast along that dimension, are replicated, nothing is communicated, and their gradients
are partial sums. An input sharded over a normalized dimension is redistributed first.

torch.distributed.tensor takes the better part of a second to import and may be missing from a build
of PyTorch, so the rules are registered when other code has imported it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from .integrations.after_import import after_import
from .ops import formulas, heads, load, packed
from .ops.family import FAMILIES, GRADIENTS

# Arguments that have a row, or a number, for each row; the last four are of heads.
_ROWS = ("input", "residual", "dy", "x", "mean", "rstd", "dresidual", "dresidual_out",
         "q", "k", "dq_out", "dk_out")  # fmt: skip
_MODULATIONS = ("gate", "shift", "scale")


def register_sharding_rules() -> None:
    """Registers the sharding rules of every operator with DTensor."""
    from torch.distributed.tensor import Partial, Placement, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def of_angles(placement: Placement, angles: Any, q: Any, seq_dim: int) -> Placement:
        if placement == Shard(seq_dim):
            return Shard(angles.ndim - 2)
        of_samples = angles.ndim == 3 and angles.shape[0] == q.shape[0] > 1
        return Shard(0) if placement == Shard(0) and of_samples else Replicate()

    def of_argument(call: Any, name: str, x: Any, placement: Placement) -> Placement | None:
        """The placement of an argument, where x has this placement; None for what is no tensor."""
        value = getattr(call, name)
        if not hasattr(value, "ndim"):
            return None
        if name == "mean" and call.is_rms:
            return Replicate()  # it is empty
        if name in _ROWS:
            return placement
        if name in ("cos", "sin"):
            return of_angles(placement, value, x, call.seq_dim)
        if name not in _MODULATIONS or not isinstance(placement, Shard):
            return Replicate()
        if hasattr(call, "num_groups"):  # of samples
            return placement if value.ndim > 1 else Replicate()
        dim = placement.dim - (x.ndim - value.ndim)
        has_it = dim >= 0 and value.shape[dim] == x.shape[placement.dim]
        return Shard(dim) if has_it else Replicate()

    def of_gradient(placement: Placement, argument: Placement | None) -> Placement:
        """The placement of an argument's gradient, where x has `placement`."""
        is_whole = isinstance(argument, Shard) or not isinstance(placement, Shard)
        return (argument or Replicate()) if is_whole else Partial()

    def rules_of(operator: OpOverload) -> Callable[..., list[Any]]:
        Call, count = formulas.call_of(operator), len(operator._schema.returns)
        differentiated = Call.differentiated

        def outputs(call: Any, inputs: dict[str, Any], placement: Placement) -> list[Placement]:
            if differentiated:
                return [
                    of_gradient(placement, inputs[name]) if name in call.wanted else Replicate()
                    for name in differentiated
                ]
            if operator is heads.qk_norm_rope:
                return [placement, Replicate() if call.k is None else placement]
            if not operator._opname.endswith("_forward"):
                return [placement] * count
            # The mean of an RMSNorm, as that of gated norms always is, is empty.
            has_mean = not (call.is_rms or hasattr(call, "gate_first"))
            return [*[placement] * (count - 2), placement if has_mean else Replicate(), placement]

        def rules(*args: Any, **kwargs: Any) -> list[Any]:
            call = Call(*args)
            x = next(getattr(call, name) for name in ("x", "input", "q") if name in call._fields)
            columns = 0 if operator is load.gate_backward else 1
            dims = x.ndim - getattr(call, "normalized_ndim", columns)
            if hasattr(call, "num_groups"):
                dims = 1  # of samples
            found = []
            for placement in (Replicate(), *map(Shard, range(dims))):
                inputs = {name: of_argument(call, name, x, placement) for name in call._fields}
                found.append((outputs(call, inputs, placement), [*inputs.values()]))
            return found

        return rules

    for operator in (*(one for of in FAMILIES for one in of.each(of.formula)), *GRADIENTS):
        if operator not in (packed.FAMILY.plain, packed.FAMILY.backward):
            register_sharding([operator])(rules_of(operator))


# register_sharding is experimental and may move.
_FAILURE = f"fused_layernorm has no DTensor rules under torch {torch.__version__}"
after_import("torch.distributed.tensor", register_sharding_rules, _FAILURE)
