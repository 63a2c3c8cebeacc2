# SPDX-License-Identifier: Apache-2.0
"""DDP, FSDP2, DTensor and SequenceParallel: on CPUs over gloo, on two GPUs over NCCL.

Each group of processes is started once and runs every case in turn. A test reads the reports of one
case from all processes. The processes run this file as a script.
"""

# The annotations say Tensor, but a DTensor has more attributes, and is passed by *.
# mypy: disable-error-code="attr-defined, arg-type, call-arg"

import contextlib
import functools
import json
import os
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
from captured import operators_of
from torch import nn

if not dist.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as tp
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import fused_layernorm as fl
from fused_layernorm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fused_layernorm.compile import rules

STEPS = 20
BATCH, SEQUENCE, DIM = 4, 8, 32
CASES: dict[str, Any] = {}


def case(f):
    CASES[f.__name__] = f
    return f


# ---- What the cases share.


class Model(nn.Module):
    """A norm of either kind, with a feed-forward layer between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm_in = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        self.norm_out = nn.RMSNorm(DIM, eps=1e-5)

    def forward(self, x):
        return self.norm_out(self.down(F.gelu(self.up(self.norm_in(x)))))


def models(device):
    """The model with torch.nn's norms, and the same with ours."""
    fused = fl.swap_norms(Model().to(device))
    assert not {nn.LayerNorm, nn.RMSNorm} & set(map(type, fused.modules()))
    return Model().to(device), fused


def batches(device, rank=0):
    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(STEPS):
        x = torch.randn(BATCH, SEQUENCE, DIM, generator=generator)
        yield x.to(device), x.cumsum(1).tanh().to(device)


def made(device, *shapes):
    return [torch.randn(shape, device=device).requires_grad_() for shape in shapes]


def spread(tensors, mesh, placements):
    """The tensors as DTensors of a mesh of one dimension, leaves of autograd."""
    return [distribute_tensor(t.detach(), mesh, [p]).requires_grad_()
            for t, p in zip(tensors, placements, strict=True)]  # fmt: skip


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


def same(found, expected, placements=None, within=1e-4):
    """Asserts that DTensors have the values of plain tensors, and these placements."""
    if placements is not None:
        assert [f.placements for f in found] == [(p,) for p in placements]
    for f, e in zip(found, expected, strict=True):
        assert f.dtype == e.dtype
        torch.testing.assert_close(f.full_tensor(), e, rtol=within, atol=within)


@contextlib.contextmanager
def no_collective():
    with CommDebugMode() as communication:
        yield
    assert communication.get_total_counts() == 0, communication.get_comm_counts()


def results(function, leaves, loss=None):
    """The outputs, then, unless loss is False, the gradients of all arguments."""
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if loss is False:
        return outputs
    return (*outputs, *torch.autograd.grad((loss or of_own_rows)(outputs), leaves))


def of_all_rows(outputs):
    return sum(y.sin().sum() for y in outputs)


def of_own_rows(outputs):
    """A loss that covers only a process's own rows, so that only the norm could communicate."""
    rows = [y.to_local() if hasattr(y, "to_local") else y for y in outputs]
    return sum(y.float().sin().sum() for y in rows)


# ---- The cases, each a function of a mesh of one dimension. Each begins at the same seed.


def sharded(model, parts, mesh, policy=None):
    for part in (*parts, model):
        fully_shard(part, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return model


HALF_PARAMETERS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def by_sequence(model, mesh):
    plan = {
        "norm_in": tp.SequenceParallel(),
        "up": tp.ColwiseParallel(input_layouts=Shard(1)),
        "down": tp.RowwiseParallel(output_layouts=Shard(1)),
        "norm_out": tp.SequenceParallel(),
    }
    parallel = tp.parallelize_module(model, mesh, plan)
    assert model.norm_in.weight.placements == (Replicate(),)
    return parallel


# How a model is distributed; the dimension that its batches are sharded over; the tolerance, which
# in bfloat16 is about one rounding.
CURVES: dict[str, Any] = {
    "ddp": (lambda model, mesh: DistributedDataParallel(model), None, 1e-5),
    "fsdp2": (lambda model, mesh: sharded(model, model.children(), mesh), None, 1e-5),
    "fsdp2_mixed_precision": (
        lambda model, mesh: sharded(model, model.children(), mesh, HALF_PARAMETERS), None, 1e-2
    ),
    "dtensor": (dist.tensor.distribute_module, 0, 1e-5),
    "sequence_parallel": (by_sequence, 1, 1e-5),
}  # fmt: skip


def same_curves(name, mesh):
    """Asserts that both models learn alike, each as it is distributed."""
    distribute, dim, rtol = CURVES[name]

    def data():
        if dim is None:
            yield from batches(mesh.device_type, mesh.get_rank())
            return
        for batch in batches(mesh.device_type):  # the same in all processes
            yield tuple(distribute_tensor(t, mesh, [Shard(dim)]) for t in batch)

    stock, fused = (loss_curve(distribute(m, mesh), data()) for m in models(mesh.device_type))
    torch.testing.assert_close(fused, stock, rtol=rtol, atol=0)


CASES |= {name: functools.partial(same_curves, name) for name in CURVES}


@case
def fsdp2_compiled(mesh):
    """The graph pass under FSDP2: with one graph, and with a graph that breaks at sharded parts."""
    curves: list[torch.Tensor] = []
    found: list[str] = []

    def backend(graph_module, example_inputs):
        found.extend(operators_of(fl.fuse(graph_module, then="eager")))
        return graph_module.forward

    rules.DEVICES.add("cpu")
    try:
        for parts, compiles in (((), False), ((), True), (("up", "down"), True)):
            model = Model().to(mesh.device_type)
            sharded(model, map(model.get_submodule, parts), mesh)
            if compiles:
                torch._dynamo.reset()
                found.clear()
                model.compile(backend=backend)
            curves.append(loss_curve(model, batches(mesh.device_type, mesh.get_rank())))
            assert found == ["layer_norm", "layer_norm"] * compiles
    finally:
        rules.DEVICES.discard("cpu")
        torch._dynamo.reset()
    for curve in curves[1:]:
        torch.testing.assert_close(curve, curves[0], rtol=1e-5, atol=0)


def stays_sharded(function, plain, mesh, placements, of_plain=None, within=1e-4):
    """Asserts that neither direction needs a collective, and that results lie as the first argument
    does. Gradients lie as their tensors do, or are partial sums."""
    leaves = spread(plain, mesh, placements)
    with no_collective():
        found = results(function, leaves)
        with torch.no_grad():
            without = results(function, leaves, loss=False)
    gradients = [p if isinstance(p, Shard) else Partial() for p in placements]
    outputs = len(found) - len(gradients)
    expected = results(of_plain or function, plain)
    same(found, expected, [placements[0]] * outputs + gradients, within)
    same(without, expected[:outputs], [placements[0]] * outputs, within)


def along(dim, shapes, rows):
    """Shards of the tensors that have this dimension of the rows' shape, counted from the end."""
    own = [dim - len(rows) + len(shape) for shape in shapes]
    whole = [i >= 0 and shape[i] == rows[dim] for i, shape in zip(own, shapes, strict=True)]
    return [Shard(i) if w else Replicate() for i, w in zip(own, whole, strict=True)]


def stay_sharded(function, shapes, mesh, placements, **how):
    stays_sharded(function, made(mesh.device_type, *shapes), mesh, placements, **how)


def modulated(x, residual, gate, shift, scale, weight, bias):
    """The outputs of both functions, by either norm."""
    y = fl.ada_layer_norm(x, shift, scale, weight, bias, statistic="rms")
    return (y, *fl.add_ada_layer_norm(x, residual, gate, shift, scale, weight, bias))


@case
def rows_stay_sharded(mesh):
    for ndim, options in (
        (1, {}), (2, {}), (1, {"activation": "gelu", "scale": 0.5}),
        (1, {"out_dtype": torch.bfloat16}),
    ):  # fmt: skip
        shape = (mesh.size(), 2 * mesh.size(), 6, 5)
        cols = shape[-ndim:]
        for shard in map(Shard, range(len(shape) - ndim)):
            for norm, rows, parameters in (
                (layer_norm, 1, 2), (add_layer_norm, 2, 2), (layer_norm, 1, 0), (rms_norm, 1, 1),
                (add_rms_norm, 2, 1),
            ):  # fmt: skip
                of_shape = functools.partial(norm, normalized_shape=cols, **options)
                where = [*[shard] * rows, *[Replicate()] * parameters]
                stay_sharded(of_shape, [shape] * rows + [cols] * parameters, mesh, where)


@case
def modulated_rows_stay_sharded(mesh):
    """Rows and modulations sharded over samples or over the sequence need no collective."""
    rows = samples, tokens, cols = 2 * mesh.size(), mesh.size(), 6
    for dim, *modulations in (
        (0, (cols,), (samples, 1, cols), (samples, tokens, cols)),
        (0, (samples, 1, cols), (samples, 1, 1), (1, tokens, cols)),
        (0, (samples, tokens, cols), (), (tokens, cols)),
        (1, (samples, 1, cols), (1, tokens, cols), (samples, tokens, cols)),
        (1, (tokens, cols), (cols,), (tokens, 1)),
    ):
        shapes = [rows, rows, *modulations, (cols,), (cols,)]
        stay_sharded(modulated, shapes, mesh, along(dim, shapes, rows))


@case
def other_norms_stay_sharded(mesh):
    """Heads over samples, positions or heads; gated norms over rows; groups over samples; channels
    over samples or positions."""
    world, device, whole = mesh.size(), mesh.device_type, Replicate()
    shape = (world, 2 * world, 2 * world, 8)
    angle = torch.randn(*shape[:2], 4, device=device)
    angles = angle.cos(), angle.sin()
    rotations: Any = (
        (fl.qk_norm_rope, [shape, (*shape[:2], world, 8), 8, 8], range(3)),
        (fl.qkv_norm_rope, [(*shape[:2], 3, *shape[2:]), 8, 8], range(2)),
    )
    for function, shapes, shards in rotations:
        for shard in map(Shard, shards):
            spread_angles = spread(angles, mesh, 2 * [whole if shard.dim == 2 else shard])
            rotated, of_plain = (
                (lambda *t, f=function, of=of: f(*t, *of)) for of in (spread_angles, angles)
            )
            where = [*[shard] * (len(shapes) - 2), whole, whole]
            stays_sharded(rotated, made(device, *shapes), mesh, where, of_plain)
    groups, of_groups = (2 * world, 8, 3, 5), (2 * world, 8)
    others: Any = (
        (functools.partial(fl.rms_norm_gated, eps=1e-5), [shape[1:]] * 2 + [8], 2, (0, 1)),
        (functools.partial(fl.rms_norm_gated, eps=1e-5, gate_first=True, group_size=4),
         [shape[1:]] * 2 + [8], 2, (0, 1)),
        (lambda x, *t: fl.ada_group_norm(x, 4, *t), [groups, of_groups, of_groups, 8, 8], 3, (0,)),
        (lambda x, *t: fl.group_norm(x, 4, *t, activation="silu"), [groups, 8, 8], 1, (0,)),
        (functools.partial(layer_norm, dim=1), [(4, 6, 8, 5), 6], 1, (0, 2)),
    )  # fmt: skip
    for norm, shapes, count, shards in others:
        for shard in map(Shard, shards):
            where = [*[shard] * count, *[whole] * (len(shapes) - count)]
            stay_sharded(norm, shapes, mesh, where)


@case
def what_does_not_suit_is_redistributed(mesh):
    """Rows sharded over the normalized dimension, sharded parameters, a partial sum, modulations
    that do not lie as the rows do."""
    world = mesh.size()
    row, cols, whole = Shard(0), 4 * world, Replicate()
    rows, sample = ((2 * world, tokens, cols) for tokens in (3, 1))
    plain = [rows, cols, cols]
    past_a_gate = [rows, rows, sample, sample, sample, cols, cols]
    for function, shapes, *placements in (
        (layer_norm, [(2 * world - 1, 6), 6, 6], [row, whole, whole]),  # unequal shards
        (functools.partial(layer_norm, dim=1), [(4, 6, 8, 5), 6], [Shard(1), whole]),
        (layer_norm, plain, [Shard(2), whole, whole], [row] * 3, [Shard(2), row, whole]),
        (fl.add_ada_layer_norm, past_a_gate, [row, row, *[whole] * 5],
         [row, row, *[Shard(2)] * 3, row, row], [*[Shard(2)] * 3, row, whole, whole, row],
         [whole, row, row, *[whole] * 4]),
    ):  # fmt: skip
        tensors = made(mesh.device_type, *shapes)
        expected = results(function, tensors, of_all_rows)
        for where in placements:
            found = results(function, spread(tensors, mesh, where), of_all_rows)
            same(found[:1], expected[:1], within=1e-5)
            same(found[1:], expected[1:])
    x, *parameters = made(mesh.device_type, *plain)
    part = DTensor.from_local(x.detach() / world, mesh, [Partial()], run_check=False)
    found = layer_norm(part, *spread(parameters, mesh, [whole, whole]))
    same([found], [layer_norm(x, *parameters)])


# ---- The processes, and the tests that read their reports.


def work(rank, world, device, folder):
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend, store = "nccl" if device == "cuda" else "gloo", f"file://{folder}/store"
    dist.init_process_group(backend, store, rank=rank, world_size=world)
    mesh = init_device_mesh(device, (world,))
    report = {}
    for name in CASES:
        torch.manual_seed(0)
        try:
            CASES[name](mesh)
            report[name] = ""
        except Exception:
            report[name] = traceback.format_exc()
        # If a case failed in one process only, the processes would no longer be in step.
        failed = torch.tensor([bool(report[name])], device=device, dtype=torch.int32)
        dist.all_reduce(failed)
        (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


TWO_GPUS = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
GROUPS = [("gloo-2", "cpu", 2, []), ("nccl-2", "cuda", 2, TWO_GPUS)]


@functools.cache
def reports_of(device, world):
    """{case: the reports of all processes}."""
    root = str(Path(fl.__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:
        files = [Path(folder, f"{rank}.json") for rank in range(world)]
        processes = []
        for rank in range(world):
            command = [sys.executable, __file__, str(rank), str(world), device, folder]
            out = started.enter_context(Path(folder, f"{rank}.log").open("w"))
            processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
            started.callback(processes[-1].kill)
        try:
            for process in processes:
                process.wait(timeout=240)
        except subprocess.TimeoutExpired:
            pass  # some process waits for another
        reports = [json.loads(f.read_text()) if f.exists() else {} for f in files]
        log = "\n".join(f.with_suffix(".log").read_text() for f in files)
    return {name: [report.get(name, log or "not run") for report in reports] for name in CASES}


@pytest.mark.parametrize(
    ("device", "world", "name"),
    [
        pytest.param(device, world, name, id=f"{group}-{name}", marks=marks)
        for group, device, world, marks in GROUPS
        for name in CASES
    ],
)
def test_case(device, world, name):
    failures = [text for text in reports_of(device, world)[name] if text]
    assert not failures, failures[0]


def test_two_dimensional_mesh():
    """The first of four processes, without the others: nothing is communicated."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh, shards = init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)]
        x, residual = torch.randn(2, 4, 6, 8)
        module = fl.FusedAddLayerNorm(8)
        local = [t[:2, :3].contiguous() for t in (x, residual)]
        given = [DTensor.from_local(t, mesh, shards, run_check=False) for t in local]
        given += [DTensor.from_local(p.detach(), mesh, [Replicate()] * 2, run_check=False)
                  for p in module.parameters()]  # fmt: skip
        with no_collective():
            found = add_layer_norm(*given)
        assert {f.placements for f in found} == {tuple(shards)}
        assert {f.shape for f in found} == {x.shape}
        torch.testing.assert_close(tuple(f.to_local() for f in found), module(*local))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
