# SPDX-License-Identifier: Apache-2.0
"""Build with only a C++ compiler: `pip install .` brings nvcc, headers and torch itself.

The sdist is built in isolation, as usual, with the CUDA toolkits of this machine hidden. The
kernels are compiled for one architecture and assembled without optimization: this checks that they
compile, not how they run. (Without cicc's optimization too, ptxas of CUDA 13.0 crashes on the
setmaxnreg of the ring's kernels.) pip runs in a new environment that has no torch, so the build
fetches one, too. The package is installed and must report that its nvcc came from Python packages.

python ci/check_isolated_build.py
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
QUICKLY = {
    "TORCH_CUDA_ARCH_LIST": "9.0",
    "FUSED_LAYERNORM_COMPRESS": "speed",
    "NVCC_APPEND_FLAGS": "-Xptxas -O0",  # nvcc reads this variable
}
WRONG = re.compile(r"error|fatal|Segmentation fault|^FAILED", re.IGNORECASE)
TOOLKIT_VARIABLES = ("CUDA_HOME", "CUDA_PATH")


def without_toolkit() -> dict[str, str]:
    """This environment, as it would be on a machine without a CUDA toolkit."""
    folders = os.environ["PATH"].split(os.pathsep)
    path = [folder for folder in folders if not (Path(folder) / "nvcc").exists()]
    kept = {name: text for name, text in os.environ.items() if name not in TOOLKIT_VARIABLES}
    return {**kept, "PATH": os.pathsep.join(path), "FUSED_LAYERNORM_CUDA": "packages"}


def run(
    *arguments: str, cwd: str | Path, env: dict[str, str], python: str | Path = sys.executable
) -> str:
    """What `python arguments` prints."""
    result = subprocess.run(
        [python, *arguments],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode:
        wrong = [line for line in result.stdout.splitlines() if WRONG.search(line)]
        print("\n".join(["what went wrong:", *wrong[:40], "the end:"]))
        sys.exit(f"{result.stdout[-6000:]}\nfailed: {' '.join(arguments)}")
    return result.stdout


def main() -> None:
    env = without_toolkit()
    with tempfile.TemporaryDirectory(prefix="fused_layernorm-") as folder:
        # An sdist needs no nvcc: only the isolated build installs the build requirements.
        sdist = ["-m", "build", "--sdist", "--no-isolation", "--skip-dependency-check"]
        run(*sdist, "-o", folder, cwd=REPOSITORY, env={**env, "FUSED_LAYERNORM_CPU_ONLY": "1"})
        (archive,) = Path(folder).glob("*.tar.gz")
        start = time.monotonic()
        target = str(Path(folder) / "installed")
        install = ["-m", "pip", "install", "-v", "--no-deps", "--target", target, str(archive)]
        run("-m", "venv", "bare", cwd=folder, env=env)
        bare = Path(folder) / "bare" / "bin" / "python"
        log = run(*install, cwd=folder, env={**env, **QUICKLY}, python=bare)
        built = [line.strip() for line in log.splitlines() if "fused_layernorm: " in line]
        print("\n".join(dict.fromkeys(built)))
        print(f"built and installed in {time.monotonic() - start:.0f} s")
        said = run("-m", "fused_layernorm", cwd=target, env=env)
        print(said, end="")
        if "of Python packages" not in said:
            sys.exit("the kernels were not built with the nvcc of Python packages")


if __name__ == "__main__":
    main()
