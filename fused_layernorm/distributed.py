# SPDX-License-Identifier: Apache-2.0
"""DTensor: how the operators may be sharded.

Rows are independent. An input may stay sharded over any dimension that is not normalized over:
weight and bias are replicated, nothing is communicated, and the gradients of weight and bias are
partial sums. A shift, scale or gate that has the sharded dimension is sharded over it, too, and so
is its gradient; one that is broadcast along that dimension is treated as weight and bias are. An
input sharded over a normalized dimension is redistributed first.

The gate of rms_norm_gated is sharded as its input is.

q and k of qk_norm_rope may be sharded over samples, heads or positions; cos and sin are sharded
with the samples and positions, weights and biases are replicated.

torch.distributed.tensor takes the better part of a second to import and may be missing from a build
of PyTorch, so the rules are registered when other code has imported it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .integrations.after_import import after_import
from .ops import gated, head_formulas, heads, load
from .ops.operators import (
    ADA_LAYER_NORM_BACKWARD,
    BACKWARD,
    FORWARD,
    BackwardOperator,
    GatedBackwardArguments,
    Operator,
)

_ROWS = ("input", "residual", "dy", "x", "mean", "rstd", "dresidual")
_MODULATIONS = ("gate", "shift", "scale")
_PARAMETERS = ("weight", "bias")


def register_sharding_rules() -> None:
    """Registers the sharding rules of every operator with DTensor."""
    from torch.distributed.tensor import Partial, Placement, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def acceptable(dims: int) -> list[Placement]:
        return [Replicate(), *map(Shard, range(dims))]

    def beside(placement: Placement, modulation: Any, x: Any) -> Placement:
        """The placement of a modulation where x has this placement."""
        if not isinstance(placement, Shard):
            return placement
        dim = placement.dim - (x.ndim - modulation.ndim)
        has_it = dim >= 0 and modulation.shape[dim] == x.shape[placement.dim]
        return Shard(dim) if has_it else Replicate()

    def placed(call: Any, x: Any, placement: Placement) -> Any:
        """A call with the placements in place of its tensors, where x has this placement."""
        placements: dict[str, Placement] = {}
        for name in call._fields:
            tensor = getattr(call, name)
            if tensor is None:
                continue
            if name == "mean" and call.statistic == "rms":
                placements[name] = Replicate()  # It is empty.
            elif name in _ROWS:
                placements[name] = placement
            elif name in _MODULATIONS:
                placements[name] = beside(placement, tensor, x)
            elif name in _PARAMETERS:
                placements[name] = Replicate()
        return call._replace(**placements)

    def of_sum(placement: Placement, argument: Placement | None) -> Placement:
        """The placement of an argument's gradient, where x has `placement`."""
        is_whole = isinstance(argument, Shard) or not isinstance(placement, Shard)
        return (argument or Replicate()) if is_whole else Partial()

    def only_placements(values: Sequence[Any]) -> list[Any]:
        return [value if isinstance(value, Placement) else None for value in values]

    def forward_rules(operator: Operator) -> Callable[..., list[Any]]:
        def rules(*args: Any, **kwargs: Any) -> list[Any]:
            a = operator.arguments(*args)
            of_rows = len(operator.overload._schema.returns) - 2 * operator.gives_statistics

            def outputs(placement: Placement) -> list[Placement]:
                if not operator.gives_statistics:
                    return [placement] * of_rows
                mean = Replicate() if a.is_rms else placement
                return [*[placement] * of_rows, mean, placement]

            def inputs(placement: Placement) -> list[Any]:
                return only_placements(operator.lay_out(placed(a, a.input, placement)))

            found = acceptable(a.input.ndim - a.normalized_ndim)
            return [(outputs(placement), inputs(placement)) for placement in found]

        return rules

    def backward_rules(operator: BackwardOperator) -> Callable[..., list[Any]]:
        def rules(*args: Any, **kwargs: Any) -> list[Any]:
            b: Any = operator.arguments(*args)
            found = []
            for placement in acceptable(b.x.ndim - b.normalized_ndim):
                inputs = placed(b, b.x, placement)
                outputs: list[Placement] = []
                for name in operator.gradients:
                    if not getattr(b.needs, name):
                        outputs.append(Replicate())
                    elif name == "dx":
                        outputs.append(placement)
                    else:
                        outputs.append(of_sum(placement, getattr(inputs, name[1:])))
                found.append((outputs, only_placements(operator.lay_out(inputs))))
            return found

        return rules

    for operator in FORWARD:
        register_sharding([operator.overload])(forward_rules(operator))
    for backward in BACKWARD:
        register_sharding([backward.overload])(backward_rules(backward))

    def gate_backward_rules(
        dresidual_out: Any, input: Any, gate: Any, needs_dinput: bool, needs_dgate: bool
    ) -> list[Any]:
        found = []
        for placement in acceptable(input.ndim):
            of_gate = beside(placement, gate, input)
            outputs = [
                placement if needs_dinput else Replicate(),
                of_sum(placement, of_gate) if needs_dgate else Replicate(),
            ]
            found.append((outputs, [placement, placement, of_gate, None, None]))
        return found

    def gated_backward_rules(*args: Any) -> list[Any]:
        """The rules of the two operators that do its work, joined where both place x alike."""
        g = GatedBackwardArguments(*args)
        of_norm = backward_rules(ADA_LAYER_NORM_BACKWARD)(*g.of_norm)
        of_gate = gate_backward_rules(g.x, g.input, g.gate, g.needs_dinput, g.needs_dgate)
        found = []
        # zip drops gate_backward's last rules, which shard the normalized dimensions.
        for (norm_outputs, norm), (gate_outputs, gate) in zip(of_norm, of_gate, strict=False):
            dx = norm_outputs[0] if g.needs_dx else Replicate()
            inputs = [*norm[:2], *gate[1:3], *norm[2:10], *[None] * 9]
            found.append(([dx, *gate_outputs, *norm_outputs[1:]], inputs))
        return found

    def heads_rules(is_backward: bool) -> Callable[..., list[Any]]:
        Call = head_formulas.BackwardArguments if is_backward else head_formulas.HeadArguments

        def rules(*args: Any) -> list[Any]:
            a: Any = Call(*args)

            def of_angles(placement: Placement, angles: Any) -> Placement:
                if placement == Shard(a.seq_dim):
                    return Shard(angles.ndim - 2)
                of_samples = angles.ndim == 3 and angles.shape[0] == a.q.shape[0] > 1
                return Shard(0) if placement == Shard(0) and of_samples else Replicate()

            found = []
            for placement in acceptable(a.q.ndim - 1):
                inputs: list[Any] = []
                for name, value in zip(a._fields, a, strict=True):
                    if value is None or not hasattr(value, "ndim"):
                        inputs.append(None)
                    elif name in ("cos", "sin"):
                        inputs.append(of_angles(placement, value))
                    else:
                        is_row = name in ("q", "k", "dq_out", "dk_out")
                        inputs.append(placement if is_row else Replicate())
                outputs = [placement, Replicate() if a.k is None else placement]
                if is_backward:
                    total = of_sum(placement, None)
                    for parameters, needed in ((a[4:6], a.needs_dweight), (a[6:8], a.needs_dbias)):
                        given = [needed and parameter is not None for parameter in parameters]
                        outputs += [total if one else Replicate() for one in given]
                found.append((outputs, inputs))
            return found

        return rules

    def gated_rules(Call: Any, results: Callable[[Any, Placement], list[Placement]]) -> Any:
        def rules(*args: Any) -> list[Any]:
            call = Call(*args)
            x = call.x if hasattr(call, "x") else call.input
            return [
                (results(call, placement), only_placements(placed(call, x, placement)))
                for placement in acceptable(x.ndim - 1)
            ]

        return rules

    def gradients(b: Any, placement: Placement) -> list[Placement]:
        total = of_sum(placement, None)
        found = zip(b.needs, (placement, placement, total, total), strict=True)
        return [of if needed else Replicate() for needed, of in found]

    Call, of_gated = gated.GatedArguments, gated.FAMILY
    register_sharding([of_gated.plain])(gated_rules(Call, lambda _, placement: [placement]))
    register_sharding([of_gated.forward])(
        gated_rules(Call, lambda _, placement: [placement, Replicate(), placement])
    )
    register_sharding([of_gated.backward])(gated_rules(gated.BackwardArguments, gradients))
    register_sharding([heads.qk_norm_rope])(heads_rules(False))
    register_sharding([heads.qk_norm_rope_backward])(heads_rules(True))
    register_sharding([load.gate_backward])(gate_backward_rules)
    register_sharding([load.add_ada_layer_norm_backward])(gated_backward_rules)


# register_sharding is experimental and may move.
after_import(
    "torch.distributed.tensor",
    register_sharding_rules,
    f"fused_layernorm has no DTensor rules under torch {torch.__version__}",
)
