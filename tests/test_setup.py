# SPDX-License-Identifier: Apache-2.0
"""setup.py: the nvcc that it takes, the architectures, the oldest driver, the name."""

import importlib
import importlib.metadata
import itertools
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numerics
import pytest
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
    monkeypatch.setattr(functions.compilers, "toolkit_home", lambda: None)
    monkeypatch.delenv("FUSED_LAYERNORM_CUDA", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    return tmp_path


def make_nvcc(home, release, archs=(), parts=()):
    for part in parts:
        (home / part).parent.mkdir(parents=True, exist_ok=True)
        (home / part).touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    listed = "\n".join(f"compute_{arch}" for arch in archs)
    said = f"echo 'Cuda compilation tools, release {release}, V'\necho '{listed}'\n"
    nvcc.write_text(f"#!/bin/sh\n{said}")
    nvcc.chmod(0o755)
    return home


def test_newest_nvcc_of_packages_is_found_without_a_toolkit(functions, no_toolkit, monkeypatch):
    find = functions.compilers.find_nvcc
    assert find() is None
    monkeypatch.setenv("FUSED_LAYERNORM_CUDA", "packages")
    with pytest.raises(SystemExit, match="no nvcc among the packages"):
        find()
    for release in ("13.2", "9.0", "14.0"):
        home = no_toolkit / "nvidia" / f"cu{release.partition('.')[0]}"
        make_nvcc(home, release, parts=PARTS)
    toolkit = make_nvcc(no_toolkit / "toolkit", "12.9")
    for setting, there in (("", None), ("packages", toolkit)):
        monkeypatch.setenv("FUSED_LAYERNORM_CUDA", setting)
        monkeypatch.setattr(functions.compilers, "toolkit_home", lambda there=there: there)
        found = find()
        assert (found.home, found.origin) == (home, "Python packages")
        assert (found.version, found.version_string) == ((14, 0), "14.0")
    monkeypatch.delenv("FUSED_LAYERNORM_CUDA")
    assert (find().home, find().origin) == (toolkit, "a toolkit")


@pytest.mark.parametrize("lacking", PARTS)
def test_packages_with_a_part_missing_are_not_taken(functions, no_toolkit, lacking):
    make_nvcc(no_toolkit / "nvidia" / "cu13", "13.2", parts={*PARTS} - {lacking})
    assert functions.compilers.find_nvcc() is None


def test_cuda_home_is_the_first_toolkit(functions, monkeypatch, tmp_path):
    toolkit = make_nvcc(tmp_path / "toolkit", "12.9")
    for home, path in ((toolkit, ""), (tmp_path / "none", toolkit)):
        monkeypatch.setenv("CUDA_HOME", str(home))
        monkeypatch.setenv("CUDA_PATH", str(path))
        assert functions.compilers.toolkit_home() == toolkit


def test_a_wrong_setting_is_named(functions, monkeypatch):
    for variable, call in (
        ("FUSED_LAYERNORM_CUDA", functions.compilers.find_nvcc),
        ("FUSED_LAYERNORM_COMPRESS", lambda: functions.compress_mode((13, 0))),
    ):
        monkeypatch.setenv(variable, "wheel")
        with pytest.raises(SystemExit, match=f"{variable} is 'wheel'; expected"):
            call()


@pytest.mark.parametrize(
    ("version", "compress", "mode", "least"),
    [((12, 4), "", None, 12000), ((12, 8), "", "size", 12040),
     ((12, 9), "balance", "balance", 12040), ((12, 9), "speed", "speed", 12000),
     ((12, 9), "none", "none", 12000), ((13, 0), "", "size", 13000),
     ((13, 2), "speed", "speed", 13000)],
)  # fmt: skip
def test_least_driver(functions, monkeypatch, version, compress, mode, least):
    monkeypatch.setenv("FUSED_LAYERNORM_COMPRESS", compress)
    assert functions.compress_mode(version) == mode
    assert functions.least_driver(version) == least
    flags = [f for f in functions.nvcc_flags(version, ["90"], 1) if "compress" in f]
    assert flags == [f"--compress-mode={mode}"] * bool(mode)


@pytest.mark.parametrize(
    ("known", "asked", "expected"),
    [([75, 80, 86, 90, 100, 120], "", ["75", "80", "90", "100+PTX", "120"]),
     ([60, 75, 80, 90], "", ["75", "80", "90+PTX"]), ([80, 90], "9.0", ["90"]),
     ([80, 90], "8.0;9.0+PTX 9.0", ["80", "90+PTX"]),
     ([80, 86, 90], " 8.0, 8.6;;9.0;", ["80", "86", "90"]), ([80, 90], "9.0;12.0", None)],
)  # fmt: skip
def test_archs(functions, monkeypatch, tmp_path, known, asked, expected):
    nvcc = str(make_nvcc(tmp_path / "toolkit", "13.0", known) / "bin" / "nvcc")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    if expected is None:
        with pytest.raises(SystemExit, match=r"TORCH_CUDA_ARCH_LIST has '12.0'; .* knows 8.0 9.0"):
            functions.arch_list(nvcc)
    else:
        assert functions.arch_list(nvcc) == expected


@pytest.fixture
def backend(monkeypatch, tmp_path):
    """The build backend, as pip runs it for a Python whose folder of packages is tmp_path, on a
    machine without a toolkit."""
    monkeypatch.syspath_prepend(str(SETUP.parent / "build_tools"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for variable in ("FUSED_LAYERNORM_CUDA", "FUSED_LAYERNORM_CPU_ONLY"):
        monkeypatch.delenv(variable, raising=False)
    nvcc = importlib.import_module("nvcc")
    monkeypatch.setattr(nvcc, "toolkit_home", lambda: None)
    yield lambda: importlib.import_module("backend")
    for name in ("backend", "nvcc"):
        sys.modules.pop(name, None)


def put_torch(folder, version, cuda=None, headers=True):
    header = folder / "torch" / "include" / "torch" / "headeronly" / "version.h"
    header.parent.mkdir(parents=True)
    text = f"__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\nhip = None\n"
    (folder / "torch" / "version.py").write_text(text)
    (folder / "torch" / "__init__.py").write_text("from .version import __version__\n")
    if headers:
        header.touch()


NVCC = "cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]"


@pytest.mark.parametrize(
    ("there", "wanted"),
    [(None, ["torch>=2.10", f"{NVCC}>=13"]), (("2.9.1+cpu",), ["torch>=2.10", f"{NVCC}>=13"]),
     (("2.13.0+cpu", None, False), ["torch>=2.10", f"{NVCC}>=13"]),
     (("2.13.0+cpu",), [f"{NVCC}>=13"]), (("2.10.0a0+git1", "12.9"), [f"{NVCC}>=13"]),
     (("2.15.0", "13.2"), [f"{NVCC}==13.2.*"])],
)  # fmt: skip
def test_a_build_asks_for_what_is_not_there(backend, monkeypatch, tmp_path, there, wanted):
    if there:
        put_torch(tmp_path, *there)
    found = backend()
    on_linux = wanted if sys.platform == "linux" else wanted[:-1]
    assert found.get_requires_for_build_sdist() == wanted[:-1]
    assert found.get_requires_for_build_editable({}) == on_linux
    for variable, value, toolkit, expected in (
        ("FUSED_LAYERNORM_CUDA", "", None, on_linux),
        ("FUSED_LAYERNORM_CPU_ONLY", "1", None, wanted[:-1]),
        ("FUSED_LAYERNORM_CUDA", "", tmp_path, wanted[:-1]),
        ("FUSED_LAYERNORM_CUDA", "packages", tmp_path, on_linux),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            patch.setattr(found.nvcc, "toolkit_home", lambda toolkit=toolkit: toolkit)
            assert found.get_requires_for_build_wheel() == expected


def test_the_torch_that_is_there_is_imported_and_no_plugin(backend, tmp_path):
    """Setuptools would run what a package beside torch registers with it."""
    put_torch(tmp_path, "2.13.0+cpu")
    plugin = tmp_path / "plugin_of_setuptools-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin_of_setuptools\n")
    backend()
    finder: Any = sys.meta_path[-1]
    assert finder.find_spec("torch", None).origin == str(tmp_path / "torch" / "__init__.py")
    assert finder.find_spec("torch.version", [str(tmp_path / "torch")]) is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("plugin_of_setuptools")


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_a_covering_meets_every_combination(strength):
    dimensions = ["abcdefg", [torch.float32, torch.float64], range(5), [None]]
    found = numerics.covering(*dimensions, strength=strength)
    for chosen in itertools.combinations(range(4), strength):
        met = {tuple(one[i] for i in chosen) for one in found}
        assert met == {*itertools.product(*(dimensions[i] for i in chosen))}
    assert len(found) == {1: 7, 2: 35, 3: 70}[strength]
