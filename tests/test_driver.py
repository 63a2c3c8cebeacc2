# SPDX-License-Identifier: Apache-2.0
"""With a driver too old for the binary's CUDA runtime, the package works and warns once."""

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from numerics import Problem, make, ours
from processes import run

from fused_layernorm import override_aten
from fused_layernorm.__main__ import facts, report
from fused_layernorm.ops import formulas

ops = torch.ops.fused_layernorm
BUILD_INFO = ops._build_info()
needs_kernels = pytest.mark.skipif(BUILD_INFO == "cpu only", reason="a build without CUDA kernels")
OPERATORS = ("layer_norm", "layer_norm_forward", "add_layer_norm", "add_layer_norm_forward",
             "layer_norm_backward")  # fmt: skip
RELEASE = tuple(map(int, BUILD_INFO.split()[1].split("."))) if BUILD_INFO != "cpu only" else (0, 0)
OLD = 1000 * RELEASE[0] - 980  # CUDA (n-1).2, too old however the binary is compressed


def kernels_are_in_use():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    (used,) = {has_kernel(f"fused_layernorm::{name}", "CUDA") for name in OPERATORS}
    return used


@pytest.fixture
def driver(monkeypatch):
    """Sets the version that the driver reports, for one test."""
    monkeypatch.setattr(formulas, "_warned", False)
    yield ops._force_driver_version
    ops._force_driver_version(None)


def check_problem(problem, version):
    for part in (
        f"built with CUDA {RELEASE[0]}.{RELEASE[1]}, need a driver for CUDA {RELEASE[0]}.",
        f"this machine's is for CUDA {version // 1000}.{version % 1000 // 10}",
        "Way out: update the driver",
    ):
        assert part in problem


@needs_kernels
def test_an_old_driver_leaves_the_kernels_out(driver):
    for version in (None, 0, 1000 * RELEASE[0] + 10 * RELEASE[1], 1000 * RELEASE[0] + 1000):
        driver(version)
        assert ops._driver_problem() == ""
        assert kernels_are_in_use()
        for old in (OLD, 10020, OLD):
            driver(old)
            assert not kernels_are_in_use()
            check_problem(ops._driver_problem(), old)


@needs_kernels
def test_an_old_driver_is_told_of(driver):
    """A warning; the report; and the override, which changes nothing."""
    assert "not used" not in dict(report(facts()))["CUDA kernels"]
    driver(OLD)
    on_cuda = cast(torch.Tensor, SimpleNamespace(is_cuda=True))
    with pytest.warns(UserWarning, match="Way out") as caught:
        formulas.warn_of_cuda(on_cuda)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=r"override_aten\(\) changes nothing: ") as of_override:
        handle = override_aten()
    assert repr(handle) == "<AtenOverride of CUDA: not in force>"
    handle.undo()
    told = (str(caught[0].message), str(of_override[0].message))
    for problem in (*told, dict(report(facts()))["CUDA kernels"]):
        check_problem(problem, OLD)


# A driver that reports a version of the environment, and prints a line if it is initialised.
STUB = """
#include <stdio.h>
#include <stdlib.h>
int cuDriverGetVersion(int* version) {
  *version = atoi(getenv("DRIVER_VERSION"));
  return atoi(getenv("DRIVER_RESULT"));
}
int cuInit(unsigned flags) { fputs("cuInit was called", stderr); return 100; }
"""


@needs_kernels
def test_the_driver_is_asked_at_import_and_not_initialised(tmp_path):
    """One that is too old, one that is new enough, and one that does not answer. One process
    imports torch for all."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        return pytest.skip("no C compiler to make a driver with")
    source = tmp_path / "cuda.c"
    source.write_text(STUB)
    library = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    program = """
        import os, sys
        import torch
        for version, result in ANSWERS:
            sys.stdout.flush()
            if os.fork() == 0:
                os.environ.update(DRIVER_VERSION=str(version), DRIVER_RESULT=str(result))
                import fused_layernorm
                print("problem:", torch.ops.fused_layernorm._driver_problem(), flush=True)
                os._exit(0)
            assert os.wait()[1] == 0
    """
    libraries = [str(tmp_path), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment = {"LD_LIBRARY_PATH": os.pathsep.join(libraries)}
    answers = ((OLD, 0), (1000 * RELEASE[0] + 10 * RELEASE[1], 0), (OLD, 999))
    printed, said = run(program, environment=environment, ANSWERS=answers)
    problem, *others = (text.strip() for text in printed.split("problem:")[1:])
    check_problem(problem, OLD)
    assert others == ["", ""]
    assert "cuInit" not in said


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_cuda_tensors_under_an_old_driver(driver, dtype):
    """Results and gradients are those of the kernels, within the rounding of the dtype. With the
    driver the kernels come back."""
    atol = {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 6e-2)
    problems = (Problem((33, 515), dtype, activation="gelu", scale=0.5),
                Problem((33, 515), dtype, residual_dtype=dtype))  # fmt: skip

    def run():
        return [y for problem in problems for y in ours(make(problem, "cuda")).values()]

    expected = run()
    driver(OLD)
    assert not kernels_are_in_use()
    with pytest.warns(UserWarning, match="Way out") as caught:
        got = run()
    (message,) = (str(w.message) for w in caught if "Way out" in str(w.message))
    check_problem(message, OLD)
    torch.testing.assert_close(got, expected, atol=atol, rtol=atol)
    driver(None)
    assert kernels_are_in_use()
    torch.testing.assert_close(run(), expected, atol=0, rtol=0)
