# SPDX-License-Identifier: Apache-2.0
"""setup.py: the nvcc that it takes, the architectures, the oldest driver, the name; conftest.py."""

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import conftest
import numerics
import pytest
import setuptools
import torch

SETUP = Path(__file__).resolve().parents[1] / "setup.py"
pytestmark = [
    pytest.mark.skipif(not SETUP.exists(), reason="no sources here"),
    pytest.mark.skipif(os.name != "posix", reason="the nvcc of these tests is a shell script"),
]
PARTS = ["nvvm/bin/cicc", "include/cuda_runtime.h", "include/crt/a", "lib/libcudart_static.a"]


@pytest.fixture(scope="module")
def functions():
    """setup.py's functions, without a build."""
    patch = pytest.MonkeyPatch()
    patch.setattr("setuptools.setup", lambda **_: None)
    patch.setenv("FUSED_LAYERNORM_CPU_ONLY", "1")
    patch.chdir(SETUP.parent)
    yield SimpleNamespace(**runpy.run_path(str(SETUP)))
    patch.undo()


@pytest.fixture
def no_toolkit(functions, monkeypatch, tmp_path):
    """Simulates a machine without a toolkit. Returns the only folder on sys.path, for packages."""
    monkeypatch.setitem(functions.find_nvcc.__globals__, "toolkit_home", lambda: None)
    monkeypatch.delenv("FUSED_LAYERNORM_CUDA", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    return tmp_path


def make_nvcc(home, release, archs=(), parts=()):
    for part in parts:
        (home / part).parent.mkdir(parents=True, exist_ok=True)
        (home / part).touch()
    (home / "bin").mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"
    listed = "\n".join(f"compute_{arch}" for arch in archs)
    nvcc.write_text(
        f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V'\necho '{listed}'\n"
    )
    nvcc.chmod(0o755)
    return home


def test_newest_nvcc_of_packages_is_found_without_a_toolkit(functions, no_toolkit):
    assert functions.find_nvcc() is None
    for release in ("13.2", "9.0", "14.0"):
        home = no_toolkit / "nvidia" / f"cu{release.partition('.')[0]}"
        make_nvcc(home, release, parts=PARTS)
    found = functions.find_nvcc()
    assert found.home == home
    assert (found.version, found.version_string) == ((14, 0), "14.0")
    assert found.origin == "Python packages"


@pytest.mark.parametrize("lacking", PARTS)
def test_packages_with_a_part_missing_are_not_taken(functions, no_toolkit, lacking):
    parts = [part for part in PARTS if part != lacking]
    make_nvcc(no_toolkit / "nvidia" / "cu13", "13.2", parts=parts)
    assert functions.find_nvcc() is None


def test_a_toolkit_comes_before_packages(functions, no_toolkit, monkeypatch):
    toolkit = make_nvcc(no_toolkit / "toolkit", "12.9")
    make_nvcc(no_toolkit / "nvidia" / "cu13", "13.2", parts=PARTS)
    monkeypatch.setitem(functions.find_nvcc.__globals__, "toolkit_home", lambda: toolkit)
    found = functions.find_nvcc()
    assert (found.home, found.origin) == (toolkit, "a toolkit")
    monkeypatch.setenv("FUSED_LAYERNORM_CUDA", "packages")
    assert functions.find_nvcc().origin == "Python packages"


def test_cuda_home_is_the_first_toolkit(functions, monkeypatch, tmp_path):
    toolkit = make_nvcc(tmp_path / "toolkit", "12.9")
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    assert functions.toolkit_home() == toolkit
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("CUDA_PATH", str(toolkit))
    assert functions.toolkit_home() == toolkit


def test_packages_that_are_asked_for_and_missing_are_an_error(functions, no_toolkit, monkeypatch):
    monkeypatch.setenv("FUSED_LAYERNORM_CUDA", "packages")
    with pytest.raises(SystemExit, match="no nvcc among the packages"):
        functions.find_nvcc()


@pytest.mark.parametrize(
    ("variable", "function", "arguments"),
    [
        ("FUSED_LAYERNORM_CUDA", "find_nvcc", ()),
        ("FUSED_LAYERNORM_COMPRESS", "compress_mode", ((13, 0),)),
    ],
)
def test_a_wrong_setting_is_named(functions, monkeypatch, variable, function, arguments):
    monkeypatch.setenv(variable, "wheel")
    with pytest.raises(SystemExit, match=f"{variable} is 'wheel'; expected"):
        getattr(functions, function)(*arguments)


@pytest.mark.parametrize(
    ("version", "compress", "mode", "least"),
    [
        ((12, 4), "", None, 12000),
        ((12, 8), "", "size", 12040),
        ((12, 9), "balance", "balance", 12040),
        ((12, 9), "speed", "speed", 12000),
        ((12, 9), "none", "none", 12000),
        ((13, 0), "", "size", 13000),
        ((13, 2), "speed", "speed", 13000),
    ],
)
def test_least_driver(functions, monkeypatch, version, compress, mode, least):
    monkeypatch.setenv("FUSED_LAYERNORM_COMPRESS", compress)
    assert functions.compress_mode(version) == mode
    assert functions.least_driver(version) == least
    flags = functions.nvcc_flags(version, ["90"], 1)
    assert [flag for flag in flags if "compress" in flag] == (
        [f"--compress-mode={mode}"] if mode else []
    )


@pytest.mark.parametrize(
    ("known", "asked", "expected"),
    [
        ([75, 80, 86, 90, 100, 120], "", ["75", "80", "90", "100+PTX", "120"]),
        ([60, 75, 80, 90], "", ["75", "80", "90+PTX"]),
        ([80, 90], "9.0", ["90"]),
        ([80, 90], "8.0;9.0+PTX 9.0", ["80", "90+PTX"]),
        ([80, 86, 90], "Ampere,Hopper", ["80", "86", "90"]),
    ],
)
def test_archs(functions, monkeypatch, tmp_path, known, asked, expected):
    nvcc = make_nvcc(tmp_path / "toolkit", "13.0", known) / "bin" / "nvcc"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    assert functions.arch_list(str(nvcc)) == expected


def test_an_unknown_arch_is_named(functions, monkeypatch, tmp_path):
    nvcc = make_nvcc(tmp_path / "toolkit", "12.4", [80, 90]) / "bin" / "nvcc"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0;12.0")
    with pytest.raises(SystemExit, match=r"TORCH_CUDA_ARCH_LIST has '12.0'; .* knows 8.0 9.0"):
        functions.arch_list(str(nvcc))


def test_wheel_is_of_no_python(functions):
    distribution = setuptools.Distribution({"ext_modules": [functions.extension]})
    wheel = functions.BdistWheel(distribution)
    wheel.finalize_options()
    python, abi, platform = wheel.get_tag()
    assert (python, abi) == ("py3", "none")
    assert platform != "any"


def test_library_is_of_no_python(functions):
    build = functions.BuildExtension(setuptools.Distribution())
    path = build.get_ext_filename(functions.extension.name)
    assert Path(path) == Path("fused_layernorm/libfused_layernorm.so")
    assert "torch_python" not in functions.extension.libraries


def _by_name():
    numerics.check(numerics.Problem((1,)), "cuda")


def _by_method():
    torch.ones(1).cuda()


def test_a_test_that_uses_cuda_is_seen():
    for function, uses in ((_by_name, True), (_by_method, True), (numerics.make, False)):
        assert conftest.uses_cuda(SimpleNamespace(function=function)) == uses
