# SPDX-License-Identifier: Apache-2.0
"""The tests' shared fixtures: devices, forced kernel strategies, poisoned memory."""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fused_layernorm  # noqa: F401  (registers the operators)

sys.path.insert(0, str(Path(__file__).parent))  # for numerics.py, in any import mode

NO_CUDA = "no CUDA device" if not torch.cuda.is_available() else None


def pytest_collection_modifyitems(items):
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("gpu") and devices < 1:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("multi_gpu") and devices < 2:
            item.add_marker(pytest.mark.skip(reason=f"two CUDA devices needed, {devices} found"))


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
def _cpu_operators(request, monkeypatch):
    """In a test with this marker, plain calls on the CPU reach the operators, as they do with
    FUSED_LAYERNORM_CPU_OPERATORS set."""
    if request.node.get_closest_marker("cpu_operators"):
        monkeypatch.setattr("fused_layernorm.functional._cpu_operators", True)


@pytest.fixture(autouse=True, scope="module")
def _free_memory():
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Plans:
    """Returns the plan of a problem, and forces parts of plans."""

    def force(self, options):
        torch.ops.fused_layernorm._force(options)

    def of(self, rows, cols, dtype, *, device="cuda", **problem):
        """The plan of a problem on the CUDA device, or None if the forced plan cannot run it.

        `problem` has the other arguments of the operator `_plan`. By default all types are dtype,
        nothing is fused, and all gradients are asked for.
        """
        properties: Any = torch.cuda.get_device_properties(device)
        try:
            plan = torch.ops.fused_layernorm._plan(
                rows,
                cols,
                dtype,
                **problem,
                capability=10 * properties.major + properties.minor,
                sms=properties.multi_processor_count,
                shared_memory=properties.shared_memory_per_block_optin,
            )
        except (RuntimeError, ValueError) as error:
            if "cannot run" not in str(error):
                raise
            return None
        return json.loads(plan)


@pytest.fixture
def plans():
    yield Plans()
    torch.ops.fused_layernorm._force(None)


def poison(*like):
    """Leaves NaN in the memory that the next tensors of these shapes and dtypes will get."""
    junk = [torch.full_like(tensor, float("nan")) for tensor in like]
    del junk


@pytest.fixture(name="poison")
def _poison():
    return poison
