# SPDX-License-Identifier: Apache-2.0
"""The sdist holds what builds, tests and shows the package, and from it alone a package is built:

- beside the torch that is there, in pip's isolated build, without CUDA kernels, to be quick;
- in a new environment without torch, with the CUDA toolkits of this machine hidden: with only a C++
  compiler, the build fetches nvcc, headers and torch itself. A third of the kernels is compiled,
  for one architecture and without the assembler's optimization: this checks the build, not them.
  (Without cicc's optimization too, ptxas of CUDA 13.0 crashes on setmaxnreg.)

python ci/check_sdist.py
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# Files of each kind that the sdist must have: for building, for testing, for reading.
EXPECTED = ["setup.py", "build_tools/backend.py", "csrc/call/schemas.h", "tests/conftest.py",
            "csrc/bindings/cuda/run.cpp", "csrc/layernorm_kernel.cu",
            "csrc/bindings/exports.map", "fused_layernorm/py.typed", "fused_layernorm/ops/load.py",
            "LICENSE", "README.md", "CHANGELOG.md", "Makefile"]  # fmt: skip
QUICKLY = {
    "TORCH_CUDA_ARCH_LIST": "9.0",
    "FUSED_LAYERNORM_TRIMMED": "1",
    "FUSED_LAYERNORM_COMPRESS": "speed",
    "NVCC_APPEND_FLAGS": "-Xptxas -O0",  # nvcc reads this variable
}
WRONG = re.compile(r"error|fatal|Segmentation fault|^FAILED", re.IGNORECASE)


def run(*arguments: str, cwd: Path, env: dict[str, str], python: str = sys.executable) -> str:
    """What `python arguments` prints."""
    result = subprocess.run([python, *arguments], cwd=cwd, env=env, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, check=False)  # fmt: skip
    if result.returncode:
        wrong = [line for line in result.stdout.splitlines() if WRONG.search(line)]
        print("\n".join(["what went wrong:", *wrong[:40], "the end:"]))
        sys.exit(f"{result.stdout[-6000:]}\nfailed: {' '.join(arguments)}")
    return result.stdout


def make_sdist(folder: Path) -> Path:
    # An sdist needs no nvcc, so the required one may be missing.
    sdist = ["-m", "build", "--sdist", "--no-isolation", "--skip-dependency-check"]
    env = {**os.environ, "FUSED_LAYERNORM_CPU_ONLY": "1"}
    run(*sdist, "-o", str(folder), cwd=REPOSITORY, env=env)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    if missing := [name for name in EXPECTED if name not in names]:
        sys.exit(f"{archive.name} lacks {', '.join(missing)}")
    if binaries := [name for name in names if name.endswith((".so", ".o", ".pyc"))]:
        sys.exit(f"{archive.name} holds {', '.join(binaries)}")
    print(f"{archive.name}: {len(names)} files, {archive.stat().st_size / 1024:.0f} KiB")
    return archive


def install(
    archive: Path, target: Path, env: dict[str, str], said: str, python: str = sys.executable
) -> None:
    """Installs the sdist with this environment; `python -m fused_layernorm` must then say so."""
    start = time.monotonic()
    pip = ["-m", "pip", "install", "-v", "--no-deps", "--target", str(target), str(archive)]
    log = run(*pip, cwd=archive.parent, env=env, python=python)
    built = [line.strip() for line in log.splitlines() if "fused_layernorm: " in line]
    print("\n".join(dict.fromkeys(line for line in built if "compiled" not in line)))
    print(f"built in isolation and installed in {time.monotonic() - start:.0f} s")
    found = run("-m", "fused_layernorm", cwd=target, env=env)
    print(found, end="", flush=True)
    if said not in found:
        sys.exit(f"the build is not the one that was asked for: expected {said!r}")


def without_toolkit() -> dict[str, str]:
    """This environment, as it would be on a machine without a CUDA toolkit."""
    folders = os.environ["PATH"].split(os.pathsep)
    path = [folder for folder in folders if not (Path(folder) / "nvcc").exists()]
    kept = {
        name: text for name, text in os.environ.items() if name not in ("CUDA_HOME", "CUDA_PATH")
    }
    return {**kept, "PATH": os.pathsep.join(path), "FUSED_LAYERNORM_CUDA": "packages", **QUICKLY}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="fused_layernorm-") as temporary:
        folder = Path(temporary)
        archive = make_sdist(folder)
        beside = {**os.environ, "FUSED_LAYERNORM_CPU_ONLY": "1"}
        install(archive, folder / "beside", beside, "autograd         in C++")
        env = without_toolkit()
        run("-m", "venv", "bare", cwd=folder, env=env)
        python = str(folder / "bare" / "bin" / "python")
        install(archive, folder / "alone", env, "of Python packages", python)


if __name__ == "__main__":
    main()
