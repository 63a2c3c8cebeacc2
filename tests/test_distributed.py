# SPDX-License-Identifier: Apache-2.0
"""DDP, FSDP2, DTensor and SequenceParallel: on CPUs over gloo, on two GPUs over NCCL.

Each group of processes is started once and runs every case in turn. A test reads the reports of one
case from all processes. The processes run this file as a script.
"""

# The annotations say Tensor, but a DTensor has more attributes, and is passed by *.
# mypy: disable-error-code="attr-defined, arg-type, call-arg"

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fused_layernorm
from fused_layernorm import (
    FusedAddLayerNorm,
    FusedLayerNorm,
    ada_layer_norm,
    add_ada_layer_norm,
    add_layer_norm,
    layer_norm,
)

STEPS = 50
BATCH, SEQUENCE, DIM = 4, 8, 32
CASES: dict[str, Any] = {}


def case(f):
    CASES[f.__name__] = f
    return f


OF_FOUR = ("two_dimensional_mesh", "rows_stay_sharded")  # the cases that four processes run


# ---- What the cases share.


class Model(nn.Module):
    """Two norms with a feed-forward layer between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm_in = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        self.norm_out = nn.LayerNorm(DIM)

    def forward(self, x):
        return self.norm_out(self.down(F.gelu(self.up(self.norm_in(x)))))


def models(device):
    """The model with nn.LayerNorm, and the same with FusedLayerNorm."""
    fused = fused_layernorm.swap_layer_norm(Model().to(device))
    assert type(fused.norm_in) is FusedLayerNorm
    return Model().to(device), fused


def batches(device, rank=0, sequence=SEQUENCE):
    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(STEPS):
        x = torch.randn(BATCH, sequence, DIM, generator=generator)
        yield x.to(device), x.cumsum(1).tanh().to(device)


def loss_curve(model, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for x, target in data:
        # Written out, because DTensor of torch 2.10 does not support F.mse_loss.
        loss = (model(x).float() - target.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    curve = torch.stack([x.full_tensor() if hasattr(x, "full_tensor") else x for x in losses])
    assert curve[-1] < 0.8 * curve[0]  # the model learns something
    return curve.cpu()


def same_curves(fused, stock, rtol=1e-5):
    torch.testing.assert_close(fused, stock, rtol=rtol, atol=0)


def mesh_of(device, world, *shape):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, shape or (world,))


# ---- The cases.


@case
def ddp(rank, world, device):
    from torch.nn.parallel import DistributedDataParallel

    stock, fused = (
        loss_curve(DistributedDataParallel(model), batches(device, rank))
        for model in models(device)
    )
    same_curves(fused, stock)


def fsdp_curves(rank, world, device, policy):
    from torch.distributed.fsdp import fully_shard

    curves = []
    for model in models(device):
        mesh = mesh_of(device, world)
        for part in (*model.children(), model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        curves.append(loss_curve(model, batches(device, rank)))
    return curves


@case
def fsdp2(rank, world, device):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    stock, fused = fsdp_curves(rank, world, device, MixedPrecisionPolicy())
    same_curves(fused, stock)


@case
def fsdp2_mixed_precision(rank, world, device):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    stock, fused = fsdp_curves(rank, world, device, policy)
    same_curves(fused, stock, rtol=1e-2)  # about one rounding to bfloat16


@case
def fsdp2_compiled(rank, world, device):
    """The graph pass under FSDP2: with one graph, and with a graph that breaks at sharded parts."""
    from torch.distributed.fsdp import fully_shard

    from fused_layernorm.compile import rules

    curves: list[torch.Tensor] = []
    found: list[str] = []

    def backend(graph_module, example_inputs):
        fused_layernorm.fuse(graph_module, then="eager")
        found.extend(
            node.target._opname
            for node in graph_module.graph.nodes
            if isinstance(node.target, torch._ops.OpOverload)
        )
        return graph_module.forward

    rules.DEVICES.add("cpu")
    try:
        for parts, compiles in (((), False), ((), True), (("up", "down"), True)):
            model = Model().to(device)
            for part in (*map(model.get_submodule, parts), model):
                fully_shard(part, mesh=mesh_of(device, world))
            if compiles:
                torch._dynamo.reset()
                found.clear()
                model.compile(backend=backend)
            curves.append(loss_curve(model, batches(device, rank)))
            assert found == ["layer_norm", "layer_norm"] * compiles
    finally:
        rules.DEVICES.discard("cpu")
        torch._dynamo.reset()
    for curve in curves[1:]:
        same_curves(curve, curves[0])


@case
def dtensor(rank, world, device):
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    mesh = mesh_of(device, world)
    stock, fused = (
        loss_curve(
            distribute_module(model, mesh),
            (
                tuple(distribute_tensor(t, mesh, [Shard(0)]) for t in batch)
                for batch in batches(device)
            ),
        )
        for model in models(device)
    )
    same_curves(fused, stock)


@case
def sequence_parallel(rank, world, device):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = mesh_of(device, world)
    plan = {
        "norm_in": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "norm_out": SequenceParallel(),
    }
    curves = []
    for model in models(device):
        parallel = parallelize_module(model, mesh, plan)
        data = (
            (distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(y, mesh, [Shard(1)]))
            for x, y in batches(device)
        )
        curves.append(loss_curve(parallel, data))
        assert model.norm_in.weight.placements == (Replicate(),)
    same_curves(curves[1], curves[0])


@case
def compiled(rank, world, device):
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = mesh_of(device, world)
    torch.manual_seed(0)
    plain = [torch.randn(2 * world, 3, 8, device=device), *torch.randn(2, 8, device=device)]
    plain = [t.requires_grad_() for t in plain]
    leaves = [
        distribute_tensor(t.detach(), mesh, [placement]).requires_grad_()
        for t, placement in zip(plain, (Shard(0), Replicate(), Replicate()), strict=True)
    ]
    f = torch.compile(layer_norm, fullgraph=True, backend="aot_eager")
    y, stock = f(*leaves), layer_norm(*plain)
    assert y.placements == (Shard(0),)
    torch.testing.assert_close(y.full_tensor(), stock)
    found = torch.autograd.grad(y.to_local().sin().sum(), leaves)
    expected = torch.autograd.grad(stock.sin().sum(), plain)
    assert [dx.placements for dx in found] == [(Shard(0),), (Partial(),), (Partial(),)]
    for dx, e in zip(found, expected, strict=True):
        torch.testing.assert_close(dx.full_tensor(), e, rtol=1e-4, atol=1e-4)


@case
def heads_stay_sharded(rank, world, device):
    """q and k over samples, positions or heads, without a collective in either direction."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = mesh_of(device, world)
    torch.manual_seed(0)
    shape = (world, 2 * world, 2 * world, 8)
    plain = [torch.randn(shape, device=device), torch.randn(*shape[:2], world, 8, device=device),
             *torch.randn(2, 8, device=device)]  # fmt: skip
    angle = torch.randn(*shape[:2], 4, device=device)
    angles = angle.cos(), angle.sin()
    plain = [t.requires_grad_() for t in plain]
    expected = fused_layernorm.qk_norm_rope(*plain, *angles)
    grads = [torch.randn_like(y) for y in expected]
    of_plain = torch.autograd.grad(expected, plain, grads)
    for dim in (0, 1, 2):
        shard, copy = [Shard(dim)], [Replicate()]
        leaves = [
            distribute_tensor(t.detach(), mesh, placement).requires_grad_()
            for t, placement in zip(plain, (shard, shard, copy, copy), strict=True)
        ]
        cos, sin = (distribute_tensor(t, mesh, copy if dim == 2 else shard) for t in angles)
        given = [distribute_tensor(g, mesh, shard) for g in grads]
        with CommDebugMode() as comm:
            y = fused_layernorm.qk_norm_rope(*leaves, cos, sin)
            found = torch.autograd.grad(y, leaves, given)
        assert comm.get_total_counts() == 0
        placements = [g.placements for g in (*y, *found)]
        assert placements == [(Shard(dim),)] * 4 + [(Partial(),)] * 2
        for a, b in zip((*y, *found), (*expected, *of_plain), strict=True):
            torch.testing.assert_close(a.full_tensor(), b, rtol=1e-4, atol=1e-4)


@case
def rows_stay_sharded(rank, world, device):
    """Neither direction needs a collective. The parameters' gradients are partial sums."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = mesh_of(device, world)
    torch.manual_seed(0)
    for normalized_ndim, options in (
        (1, {}),
        (2, {}),
        (1, {"activation": "gelu", "scale": 0.5}),
        (1, {"out_dtype": torch.bfloat16}),
    ):
        x, residual = torch.randn(2, world, 2 * world, 6, 5, device=device)
        weight, bias = torch.randn(2, *x.shape[-normalized_ndim:], device=device)
        plain = [t.clone().requires_grad_() for t in (x, residual, weight, bias)]

        for dim in range(x.dim() - normalized_ndim):
            shard, copy = [Shard(dim)], [Replicate()]
            leaves = [
                distribute_tensor(t, mesh, placements).requires_grad_()
                for t, placements in zip(plain, (shard, shard, copy, copy), strict=True)
            ]
            for add in (False, True):
                used = [0, 1, 2, 3] if add else [0, 2, 3]
                with CommDebugMode() as communication:
                    found = run(*leaves, add, options)
                assert communication.get_total_counts() == 0, communication.get_comm_counts()
                expected = run(*plain, add, options)
                outputs = len(expected) - len(used)
                rows = outputs + (2 if add else 1)
                for i, (f, e) in enumerate(zip(found, expected, strict=True)):
                    assert f.placements == (Shard(dim) if i < rows else Partial(),), (i, f)
                    assert f.dtype == e.dtype
                    torch.testing.assert_close(f.full_tensor(), e, rtol=1e-4, atol=1e-4)


def run(x, residual, weight, bias, add, options):
    """The outputs, then the gradients of all arguments used."""
    outputs: tuple[torch.Tensor, ...]
    if add:
        outputs = add_layer_norm(x, residual, weight, bias, **options)
        leaves = [x, residual, weight, bias]
    else:
        outputs = (layer_norm(x, weight, bias, **options),)
        leaves = [x, weight, bias]
    # The loss of a process covers only its own rows, so that only the norm could communicate.
    rows = [output.to_local() if hasattr(output, "to_local") else output for output in outputs]
    loss = sum(x.float().sin().sum() for x in rows)
    return (*outputs, *torch.autograd.grad(loss, leaves))


@case
def without_grad(rank, world, device):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = mesh_of(device, world)
    torch.manual_seed(0)
    x, residual = torch.randn(2, world, 3, 6, device=device)
    weight = torch.randn(6, device=device)
    shard = [distribute_tensor(t, mesh, [Shard(0)]) for t in (x, residual)]
    copy = distribute_tensor(weight, mesh, [Replicate()])
    with torch.no_grad(), CommDebugMode() as communication:
        y = layer_norm(shard[0], copy)
        z = layer_norm(shard[0], normalized_shape=(6,))
        a, r = add_layer_norm(*shard, normalized_shape=(6,))
    assert communication.get_total_counts() == 0
    assert {t.placements for t in (y, z, a, r)} == {(Shard(0),)}
    torch.testing.assert_close(y.full_tensor(), F.layer_norm(x, (6,), weight))
    torch.testing.assert_close(z.full_tensor(), F.layer_norm(x, (6,)))
    torch.testing.assert_close(a.full_tensor(), F.layer_norm(x + residual, (6,)))
    torch.testing.assert_close(r.full_tensor(), x + residual)


@case
def unequal_shards(rank, world, device):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(device, world)
    torch.manual_seed(0)
    plain = [torch.randn(2 * world - 1, 6, device=device), *torch.randn(2, 6, device=device)]
    plain = [t.requires_grad_() for t in plain]
    leaves = [
        distribute_tensor(t.detach(), mesh, [placement]).requires_grad_()
        for t, placement in zip(plain, (Shard(0), Replicate(), Replicate()), strict=True)
    ]
    found = torch.autograd.grad(layer_norm(*leaves).sin().sum(), leaves)
    expected = torch.autograd.grad(layer_norm(*plain).sin().sum(), plain)
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f.full_tensor(), e, rtol=1e-4, atol=1e-4)


@case
def sharded_over_the_normalized_dimension(rank, world, device):
    """An input sharded like this is redistributed, as are a sharded weight and a partial sum."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = mesh_of(device, world)
    torch.manual_seed(0)
    shape = (2 * world, 3, 4 * world)
    plain = [torch.randn(shape, device=device), *torch.randn(2, 4 * world, device=device)]
    plain = [t.requires_grad_() for t in plain]
    expected_y = layer_norm(*plain)
    expected = torch.autograd.grad(expected_y.sin().sum(), plain)
    for placements in (
        (Shard(2), Replicate(), Replicate()),
        (Shard(0), Shard(0), Shard(0)),
        (Shard(2), Shard(0), Replicate()),
    ):
        leaves = [
            distribute_tensor(t.detach(), mesh, [placement]).requires_grad_()
            for t, placement in zip(plain, placements, strict=True)
        ]
        y = layer_norm(*leaves)
        torch.testing.assert_close(y.full_tensor(), expected_y, rtol=1e-5, atol=1e-5)
        for f, e in zip(torch.autograd.grad(y.sin().sum(), leaves), expected, strict=True):
            torch.testing.assert_close(f.full_tensor(), e, rtol=1e-4, atol=1e-4)
    partial = DTensor.from_local(plain[0].detach() / world, mesh, [Partial()], run_check=False)
    y = layer_norm(partial, *(distribute_tensor(t.detach(), mesh) for t in plain[1:]))
    torch.testing.assert_close(y.full_tensor(), expected_y, rtol=1e-4, atol=1e-4)


@case
def over_channels(rank, world, device):
    """dim=1 of images: batch and rows stay sharded, channels are redistributed first."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of(device, world)
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8, 5, device=device)
    weight, dy = torch.randn(6, device=device), torch.randn(4, 6, 8, 5, device=device)
    whole = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    layer_norm(*whole, dim=1).backward(dy)
    found = []
    for dim in range(3):
        sharded = [distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_()]
        sharded.append(distribute_tensor(weight, mesh).requires_grad_())
        y = layer_norm(*sharded, dim=1)
        found.append(y.placements == (Shard(dim),))
        torch.testing.assert_close(y.full_tensor(), layer_norm(*whole, dim=1))
        gradients = torch.autograd.grad(y, sharded, distribute_tensor(dy, mesh, [Shard(dim)]))
        for one, other in zip(gradients, whole, strict=True):
            torch.testing.assert_close(one.full_tensor(), other.grad)
    assert found == [True, False, True], found


@case
def two_dimensional_mesh(rank, world, device):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = mesh_of(device, world, 2, world // 2)
    torch.manual_seed(0)
    x, residual = torch.randn(2, 4, 6, 8, device=device)
    module = FusedAddLayerNorm(8, device=device)
    expected = module(x, residual)
    weight, bias = (
        distribute_tensor(p.detach(), mesh, [Replicate()] * 2) for p in module.parameters()
    )
    x, residual = (distribute_tensor(t, mesh, [Shard(0), Shard(1)]) for t in (x, residual))
    with CommDebugMode() as communication:
        found = add_layer_norm(x, residual, weight, bias)
    assert communication.get_total_counts() == 0
    for f, e in zip(found, expected, strict=True):
        assert f.placements == (Shard(0), Shard(1))
        torch.testing.assert_close(f.full_tensor(), e)


def modulated(x, residual, gate, shift, scale, weight, bias):
    """The outputs of both functions, then the gradients of all arguments."""
    leaves = [x, residual, gate, shift, scale, weight, bias]
    outputs = (
        ada_layer_norm(x, shift, scale, weight, bias),
        *add_ada_layer_norm(x, residual, gate, shift, scale, weight, bias),
    )
    rows = [output.to_local() if hasattr(output, "to_local") else output for output in outputs]
    return (*outputs, *torch.autograd.grad(sum(r.sin().sum() for r in rows), leaves))


@case
def modulated_rows_stay_sharded(rank, world, device):
    """Rows and modulations sharded over samples or over the sequence need no collective."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = mesh_of(device, world)
    torch.manual_seed(0)
    samples, tokens, cols = 2 * world, world, 6
    x, residual = torch.randn(2, samples, tokens, cols, device=device)
    weight, bias = torch.randn(2, cols, device=device)
    for dim, of_gate, of_shift, of_scale in (
        (0, (cols,), (samples, 1, cols), (samples, tokens, cols)),
        (0, (samples, 1, cols), (samples, 1, 1), (1, tokens, cols)),
        (0, (samples, tokens, cols), (), (tokens, cols)),
        (1, (samples, 1, cols), (1, tokens, cols), (samples, tokens, cols)),
        (1, (tokens, cols), (cols,), (tokens, 1)),
    ):
        modulations = [torch.randn(shape, device=device) for shape in (of_gate, of_shift, of_scale)]
        plain = [t.clone().requires_grad_() for t in (x, residual, *modulations, weight, bias)]

        def placement(t, dim=dim):
            own = dim - (3 - t.dim())
            whole = own >= 0 and t.shape[own] == x.shape[dim]
            return Shard(own) if whole else Replicate()

        placements = [placement(t) for t in plain]
        leaves = [
            distribute_tensor(t.detach(), mesh, [p]).requires_grad_()
            for t, p in zip(plain, placements, strict=True)
        ]
        with CommDebugMode() as communication:
            found = modulated(*leaves)
        assert communication.get_total_counts() == 0, communication.get_comm_counts()
        expected = modulated(*plain)
        gradients = [p if isinstance(p, Shard) else Partial() for p in placements]
        for i, (f, e, p) in enumerate(
            zip(found, expected, [Shard(dim)] * 3 + gradients, strict=True)
        ):
            assert f.placements == (p,), (i, f.placements, p)
            torch.testing.assert_close(f.full_tensor(), e, rtol=1e-4, atol=1e-4)


@case
def one_gradient_past_a_gate(rank, world, device):
    """With all other arguments frozen, the placements of the other gradients do not matter."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = mesh_of(device, world)
    torch.manual_seed(0)
    batch, cols = 2 * world, 6
    rows, sample = (batch, 3, cols), (batch, 1, cols)
    sizes = [rows, rows, sample, sample, (3, cols), (cols,), (cols,)]
    plain = [torch.randn(size, device=device).requires_grad_() for size in sizes]
    stock, _ = add_ada_layer_norm(*plain)
    expected = torch.autograd.grad(stock.sin().sum(), plain)
    placements = [Shard(0) if len(size) == 3 else Replicate() for size in sizes]
    for i, (e, placement) in enumerate(zip(expected, placements, strict=True)):
        leaves = [
            distribute_tensor(t.detach(), mesh, [p]).requires_grad_(i == j)
            for j, (t, p) in enumerate(zip(plain, placements, strict=True))
        ]
        y, _ = add_ada_layer_norm(*leaves)
        (found,) = torch.autograd.grad(y.to_local().sin().sum(), leaves[i])
        assert found.placements == (placement if placement == Shard(0) else Partial(),)
        torch.testing.assert_close(found.full_tensor(), e, rtol=1e-4, atol=1e-4)


@case
def modulations_are_redistributed(rank, world, device):
    """Modulations are redistributed if their placement does not suit that of the rows, or if the
    rows are sharded over the normalized dimension."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(device, world)
    torch.manual_seed(0)
    samples, cols = 2 * world, 2 * world
    x, residual = torch.randn(2, samples, 3, cols, device=device)
    gate, shift, scale = torch.randn(3, samples, 1, cols, device=device)
    weight, bias = torch.randn(2, cols, device=device)
    plain = [t.clone().requires_grad_() for t in (x, residual, gate, shift, scale, weight, bias)]

    def losses(tensors):
        y, total = add_ada_layer_norm(*tensors)
        return y, torch.autograd.grad(y.sin().sum() + total.sin().sum(), tensors)

    expected_y, expected = losses(plain)
    for placements in (
        [Shard(0), Shard(0), *[Replicate()] * 5],
        [Shard(0), Shard(0), *[Shard(2)] * 3, Shard(0), Shard(0)],
        [Shard(2), Shard(2), Shard(2), Shard(0), Replicate(), Replicate(), Shard(0)],
        [Replicate(), Shard(0), Shard(0), *[Replicate()] * 4],
    ):
        leaves = [
            distribute_tensor(t.detach(), mesh, [p]).requires_grad_()
            for t, p in zip(plain, placements, strict=True)
        ]
        y, found = losses(leaves)
        torch.testing.assert_close(y.full_tensor(), expected_y, rtol=1e-4, atol=1e-4)
        for f, e in zip(found, expected, strict=True):
            torch.testing.assert_close(f.full_tensor(), e, rtol=1e-4, atol=1e-4)


# ---- The processes, and the tests that read their reports.


def work(rank, world, device, folder):
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    report = {}
    for name in names_of(world):
        f = CASES[name]
        try:
            f(rank, world, device)
            report[name] = ""
        except Exception:
            report[name] = traceback.format_exc()
        # If a case failed in one process only, the processes would no longer be in step.
        failed = torch.tensor([bool(report[name])], device=device, dtype=torch.int32)
        dist.all_reduce(failed)
        (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def names_of(world):
    return OF_FOUR if world == 4 else [name for name in CASES if name != OF_FOUR[0]]


TWO_GPUS = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
GROUPS = [("gloo-2", "cpu", 2, []), ("gloo-4", "cpu", 4, []), ("nccl-2", "cuda", 2, TWO_GPUS)]


@functools.cache
def reports_of(device, world):
    """{case: the reports of all processes}."""
    folder = Path(tempfile.mkdtemp())
    root = Path(fused_layernorm.__file__).parents[1]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(world), device, str(folder)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    logs = []
    try:
        for process in processes:
            logs.append(process.communicate(timeout=240)[0])
    except subprocess.TimeoutExpired:
        logs.append("timed out: some process waits for another")
    finally:
        for process in processes:
            process.kill()
    files = [folder / f"{rank}.json" for rank in range(world)]
    reports = [json.loads(f.read_text()) if f.exists() else {} for f in files]
    shutil.rmtree(folder)
    log = "\n".join(logs)
    return {name: [report.get(name, log or "not run") for report in reports] for name in CASES}


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
@pytest.mark.parametrize(
    ("device", "world", "name"),
    [
        pytest.param(device, world, name, id=f"{group}-{name}", marks=marks)
        for group, device, world, marks in GROUPS
        for name in names_of(world)
    ],
)
def test_case(device, world, name):
    failures = [text for text in reports_of(device, world)[name] if text]
    assert not failures, failures[0]


def test_importing_the_package_does_not_import_dtensor():
    code = (
        "import sys, fused_layernorm\n"
        "assert 'torch.distributed.tensor' not in sys.modules\n"
        "import torch.distributed.tensor as dtensor\n"
        "assert 'fused' not in type(dtensor.__loader__).__module__\n"
    )
    root = Path(fused_layernorm.__file__).parents[1]
    subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
