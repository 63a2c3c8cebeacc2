# SPDX-License-Identifier: Apache-2.0
"""The tests' shared fixtures: devices, forced kernel strategies, poisoned memory."""

import gc
import sys
from pathlib import Path

import pytest
import torch

import fused_layernorm  # noqa: F401  (registers the operators)

sys.path.insert(0, str(Path(__file__).parent))  # for numerics.py, in any import mode


def devices():
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_collection_modifyitems(config, items):
    """Leaves out the tests for which there are too few GPUs."""

    def needed(item):
        return 2 if item.get_closest_marker("multi_gpu") else bool(item.get_closest_marker("gpu"))

    there = devices()
    config.hook.pytest_deselected(items=[item for item in items if needed(item) > there])
    items[:] = [item for item in items if needed(item) <= there]


def pytest_terminal_summary(terminalreporter):
    if devices() < 2:
        missing = "two CUDA devices" if devices() else "a CUDA device"
        terminalreporter.write_line(f"left out: the tests that need {missing}")


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.on_cpu),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _guards_are_not_timed():
    """To time a graph's guards Dynamo empties the processor's caches, 35 ms each time."""
    if guards := sys.modules.get("torch._dynamo.guards"):
        vars(guards)["profile_guard_manager"] = lambda *arguments: 0.0


@pytest.fixture(autouse=True)
def _cpu_operators(request, monkeypatch):
    """In a test with this marker, plain calls on the CPU reach the operators, as they do with
    FUSED_LAYERNORM_CPU_OPERATORS set."""
    if request.node.get_closest_marker("cpu_operators"):
        monkeypatch.setattr("fused_layernorm.stock._cpu_operators", True)


@pytest.fixture(autouse=True, scope="module")
def _free_memory():
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def mesh():
    """A mesh of this process alone. A second process group in one process would confuse DTensor."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    store = torch._C._distributed_c10d.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.fixture
def poison():
    """A function that leaves NaN in the memory that the next tensors like these will get."""

    def leave(*like):
        junk = [torch.full_like(tensor, float("nan")) for tensor in like]
        del junk

    return leave


@pytest.fixture
def needs_memory():
    """A function that skips the test where so many GiB of GPU memory are not free."""

    def check(gibibytes):
        gc.collect()  # what earlier tests had, and what the allocator keeps of it, is free
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] / 2**30
        if free < gibibytes:
            pytest.skip(f"needs {gibibytes} GiB of GPU memory, {free:.0f} GiB are free")

    return check


@pytest.fixture
def one_gibibyte_left():
    """A function that limits further allocations to 1 GiB, called when a test has its tensors."""

    def limit():
        gc.collect()  # tensors of earlier tests must not be freed after the limit is set
        torch.cuda.empty_cache()
        in_use, total = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((in_use + (1 << 30)) / total)

    torch.cuda.empty_cache()  # the rest of a large cached block could be used beyond the limit
    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
