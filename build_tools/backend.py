# SPDX-License-Identifier: Apache-2.0
"""The build backend: that of setuptools, for the torch and the nvcc that are there already.

pip builds in an environment of its own, but by the Python that it installs for, whose folder of
packages is known. The build takes torch from there, and asks for one only where there is none; for
the nvcc of Python packages it asks where the machine has no CUDA toolkit and kernels are wanted.
(A front end that builds in a virtual environment, as uv does, hides that folder: there the newest
torch is fetched.)
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import nvcc  # of this folder, which is the backend's path
from setuptools.build_meta import *  # noqa: F403

TORCH = "torch>=2.10"
NVCC = "cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]"


def torch_there() -> tuple[Path, str] | None:
    """The folder of packages that holds a torch which can build, and its version.py; or None."""
    for name in ("purelib", "platlib"):
        folder = Path(sysconfig.get_path(name))
        try:
            text = (folder / "torch" / "version.py").read_text()
        except OSError:
            continue
        version = re.search(r"__version__ = ['\"](\d+)\.(\d+)", text)
        headers = folder / "torch" / "include" / "torch" / "headeronly" / "version.h"
        if version and tuple(map(int, version.groups())) >= (2, 10) and headers.is_file():
            return folder, text
    return None


def _wanted(with_kernels: bool) -> list[str]:
    """What a build needs beside [build-system] requires."""
    there = torch_there()
    wanted = [] if there else [TORCH]
    packages = os.environ.get("FUSED_LAYERNORM_CUDA") == "packages" or not nvcc.toolkit_home()
    if with_kernels and packages and sys.platform == "linux":
        # The kernels then need no newer driver than torch's own CUDA libraries do.
        cuda = re.search(r"cuda\b.*= ['\"]13\.(\d+)", there[1]) if there else None
        wanted.append(f"{NVCC}{f'==13.{cuda[1]}.*' if cuda else '>=13'}")
    return wanted


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return _wanted(os.environ.get("FUSED_LAYERNORM_CPU_ONLY") != "1")


get_requires_for_build_editable = get_requires_for_build_wheel


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    return _wanted(False)


class _Installed(MetaPathFinder):
    """Finds torch and what it imports in a folder of packages that is not on sys.path.

    A folder on sys.path would bring plugins of setuptools with it, too.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [self._folder]) if path is None else None


# The functions of setuptools run setup.py, which imports torch, in this process. What the build's
# own environment has comes first.
if _there := torch_there():
    sys.meta_path.append(_Installed(_there[0]))
