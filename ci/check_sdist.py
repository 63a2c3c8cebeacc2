# SPDX-License-Identifier: Apache-2.0
"""Build the sdist and, from it alone, a package that runs (without CUDA kernels, to be quick).

python ci/check_sdist.py
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# Files of each kind that the sdist must have: for building, for testing, for reading.
EXPECTED = [
    "setup.py",
    "csrc/pep517/backend.py",
    "csrc/call/schemas.h",
    "csrc/bindings/cuda/forward.cpp",
    "csrc/bindings/exports.map",
    "csrc/layernorm_kernel.cu",
    "fused_layernorm/py.typed",
    "fused_layernorm/ops/load.py",
    "tests/conftest.py",
    "LICENSE",
    "README.md",
    "CHANGELOG.md",
    "Makefile",
]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="fused_layernorm-") as folder:

        def run(*arguments: str, cwd: str | Path = folder, quiet=False, **variables: str) -> str:
            command = [sys.executable, *arguments]
            result = subprocess.run(
                command,
                cwd=cwd,
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if result.returncode or not quiet:
                print(result.stdout, end="", flush=True)
            if result.returncode:
                sys.exit(f"failed: {' '.join(command)}")
            return result.stdout

        # The build below has no CUDA kernels, so the required nvcc may be missing.
        sdist = ["--sdist", "--no-isolation", "--skip-dependency-check", "-o", folder]
        run("-m", "build", *sdist, cwd=REPOSITORY, quiet=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            names = {name.partition("/")[2] for name in tar.getnames()}
        if missing := [name for name in EXPECTED if name not in names]:
            sys.exit(f"{archive.name} lacks {', '.join(missing)}")
        if binaries := [name for name in names if name.endswith((".so", ".o", ".pyc"))]:
            sys.exit(f"{archive.name} holds {', '.join(binaries)}")
        print(f"{archive.name}: {len(names)} files, {archive.stat().st_size / 1024:.0f} KiB")

        # As a user would: pip's isolated build takes the torch that is there, and fetches none.
        start = time.monotonic()
        install = ["-m", "pip", "install", "-q", "--no-deps", "--target", "installed"]
        run(*install, str(archive), FUSED_LAYERNORM_CPU_ONLY="1", quiet=True)
        print(f"built in isolation and installed in {time.monotonic() - start:.0f} s")
        said = run("-m", "fused_layernorm", cwd=Path(folder) / "installed")
        if "autograd         in C++" not in said:
            sys.exit("the isolated build did not compile autograd for the torch that is there")


if __name__ == "__main__":
    main()
