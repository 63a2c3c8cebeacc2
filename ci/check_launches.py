# SPDX-License-Identifier: Apache-2.0
"""Whether the launch of every plan finds its kernels, without a GPU.

    python ci/check_launches.py             what fails, of three million problems on five chips
    python ci/check_launches.py --trace     prints what each problem launches

The objects of the last `make build` or `make wheel` are linked with a CUDA runtime that launches
nothing (ci/launches/). The plans and the code that launches them are the product's own. Where that
code changes and the kernels do not, the traces of two builds must be the same.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "ci" / "launches"
# What plans and launches are made of; the rest of csrc/bindings handles tensors.
PARTS = r"((base|forward|backward|channels|gated|groups|heads)/)?\w+"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", action="store_true")
    arguments = parser.parse_args()
    builds = [
        path
        for path in (ROOT / "build").glob("objects-*/build.ninja")
        if "-DFUSED_LAYERNORM_CUDA=1" in path.read_text()
    ]
    if not builds:
        sys.exit("there are no objects with kernels in build/: run make build first")
    ninja = max(builds, key=lambda path: path.stat().st_mtime)
    text = ninja.read_text()
    sources = re.findall(r"/csrc/([\w/]+)\.(?:cu|cpp)$", text, re.MULTILINE)
    objects = [ninja.parent / "csrc" / f"{name}.o" for name in sources if re.fullmatch(PARTS, name)]
    cuda = [f"-I{path}" for path in set(re.findall(r"-I(\S+cuda\S*)", text))]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "launches"
        command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-DFUSED_LAYERNORM_CUDA=1"]
        command += [f"-I{ROOT / 'csrc'}", *cuda, *map(str, SOURCES.glob("*.cpp"))]
        command += [*map(str, objects), "-o", str(program)]
        subprocess.run(command, check=True)
        return subprocess.run([program, *([] if arguments.trace else ["--quiet"])]).returncode


if __name__ == "__main__":
    sys.exit(main())
