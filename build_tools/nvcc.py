# SPDX-License-Identifier: Apache-2.0
"""The nvcc that a build takes, of a toolkit or of packages: the top of setup.py says which."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path
from typing import NamedTuple


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout + result.stderr


class Nvcc(NamedTuple):
    """A CUDA compiler, and where it comes from."""

    home: Path
    version: tuple[int, int]
    in_packages: bool  # of Python packages, not of a toolkit

    @property
    def path(self) -> str:
        return str(self.home / "bin" / "nvcc")

    @property
    def version_string(self) -> str:
        return ".".join(map(str, self.version))

    @property
    def origin(self) -> str:
        return "Python packages" if self.in_packages else "a toolkit"


def toolkit_home() -> Path | None:
    """The root of the first CUDA toolkit that has an nvcc, or None."""
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):
        # The nvcc on PATH may be a link or a script: nvcc itself knows where its toolkit lies.
        top = re.search(r"^#\$ TOP=(.+)$", run(nvcc, "-v", "--dryrun", "none.cu"), re.MULTILINE)
        candidates.append(top[1].strip() if top else str(Path(nvcc).resolve().parents[1]))
    candidates += ["/usr/local/cuda", *sorted(glob("/usr/local/cuda-*"), reverse=True), "/opt/cuda",
                   "/usr/lib/cuda"]  # fmt: skip
    homes = [Path(home) for home in candidates if home]
    return next((home.resolve() for home in homes if (home / "bin" / "nvcc").is_file()), None)


def packages_home() -> Path | None:
    """The folder nvidia/cu13, or that of a newer CUDA, if NVIDIA's packages, which come apart, have
    put nvcc, its headers and the runtime there."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec else []
    homes = [home for folder in folders for home in Path(folder).glob("cu[0-9]*")]
    for home in sorted(homes, key=lambda home: int(home.name[2:]), reverse=True):
        parts = ["bin/nvcc", "nvvm/bin/cicc", "include/cuda_runtime.h", "include/crt",
                 "lib/libcudart_static.a"]  # fmt: skip
        if all((home / part).exists() for part in parts):
            return home
    return None


def find_nvcc() -> Nvcc | None:
    """A toolkit's nvcc, else that of Python packages, else None."""
    wanted = os.environ.get("FUSED_LAYERNORM_CUDA", "")
    if wanted not in ("", "packages"):
        sys.exit(f"fused_layernorm: FUSED_LAYERNORM_CUDA is {wanted!r}; expected 'packages'")
    toolkit = None if wanted else toolkit_home()
    home = toolkit or packages_home()
    if home is None:
        if wanted:
            sys.exit(f"fused_layernorm: no nvcc among the packages of {sys.executable}")
        return None
    return Nvcc(home, cuda_version(str(home / "bin" / "nvcc")), toolkit is None)


def cuda_version(nvcc: str) -> tuple[int, int]:
    release = re.search(r"release (\d+)\.(\d+)", run(nvcc, "--version"))
    if release is None:
        sys.exit(f"fused_layernorm: {nvcc} --version names no release")
    return int(release[1]), int(release[2])
