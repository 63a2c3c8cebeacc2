# SPDX-License-Identifier: Apache-2.0
"""Show that one wheel serves every Python and every torch.

For each line of MATRIX a fresh environment of that Python gets that torch and the wheel, as a user
would install them. Its tests then run against the installed package, from a folder that holds the
tests and no sources: all of them under one pair, which is not that of `make test`, and elsewhere
those of the binary interface. A Python that this machine lacks fails the check, unless it is named
in --without.

    python ci/wheel_matrix.py dist/fused_layernorm-*.whl
    python ci/wheel_matrix.py --fetch FOLDER      downloads what it installs, ahead of time; a run
                                                  with --wheels FOLDER then takes it from there
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
# What depends on torch's binary interface: the operators, autograd in C++ and in Python, dispatch,
# compilation, errors.
BINARY = tuple(
    f"tests/test_{name}.py"
    for name in ("autocast", "autograd", "autograd_library", "compile", "direct_calls", "errors",
                 "main", "opcheck", "override")
)  # fmt: skip
ALL: tuple[str, ...] = ("tests",)
# (Python, torch, tests). The newest of each with all tests, the oldest, and the minor versions
# between them, each of which has an autograd library of its own in the wheel. Where there are no
# tests, only a small model is trained.
MATRIX: list[tuple[str, str, tuple[str, ...]]] = [
    ("3.13", "2.15.0", ALL),
    ("3.10", "2.10.0", BINARY),
    ("3.11", "2.11.0", ()),
    ("3.11", "2.12.0", ()),
    ("3.11", "2.13.0", ()),
    ("3.11", "2.14.0", ()),
]
# What the tests need. Tests of integrations whose package is missing here are skipped by name.
PACKAGES = ["numpy", "pytest", "pytest-xdist"]
JOBS = min(4, os.cpu_count() or 1)  # processes that run the tests
# A CUDA build of torch is a download of 3 GB, which may fail for reasons outside this check.
INSTALL_TRIES = 3
PAUSE_SECONDS = 30
COPIED = ["tests", "examples", "docs", "pyproject.toml"]
QUIETLY = ("-q", "--disable-pip-version-check", "--progress-bar", "off")

WHERE = """
import sys, torch, fused_layernorm
from pathlib import Path
assert Path(fused_layernorm.__file__).is_relative_to(sys.prefix), fused_layernorm.__file__
assert torch.__version__.split("+")[0] == sys.argv[1], torch.__version__
"""

STEP = """
import os, sys, torch
from torch import nn
os.environ["FUSED_LAYERNORM_CPU_OPERATORS"] = "1"  # autograd in C++, not PyTorch's
from fused_layernorm import FusedAddLayerNorm, FusedLayerNorm
from fused_layernorm.ops import autograd_library

minor = ".".join(sys.argv[1].split(".")[:2])
assert autograd_library.active, autograd_library.reason
assert autograd_library.reason == f"compiled for torch {minor}", autograd_library.reason

class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = FusedLayerNorm(16, activation="gelu")
        self.linear = nn.Linear(16, 16)
        self.second = FusedAddLayerNorm(16)

    def forward(self, x):
        y, total = self.second(self.linear(self.first(x)), x)
        return y + total

class Stock(Fused):
    def forward(self, x):
        norm = nn.functional.layer_norm
        first, second = self.first, self.second
        total = self.linear(nn.functional.gelu(norm(x, (16,), first.weight, first.bias))) + x
        return norm(total, (16,), second.weight, second.bias) + total

def trained(kind):
    torch.manual_seed(0)
    model = kind().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        (dx,) = torch.autograd.grad(model(x).pow(2).mean(), x, create_graph=True)
        optimizer.zero_grad()
        (model(x).pow(2).mean() + dx.pow(2).sum()).backward()
        optimizer.step()
    return [x.grad, *model.parameters()]

y, total = Fused().second(*torch.randn(2, 4, 16))
assert y.grad_fn.name() == "FusedAddLayerNormBackward", y.grad_fn
torch.testing.assert_close(trained(Fused), trained(Stock))
"""


class Result(NamedTuple):
    python: str
    torch: str
    outcome: str
    passed: bool


def find_python(version: str) -> str | None:
    """An interpreter of this minor version: on PATH, else one that pyenv keeps."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    kept = sorted(pyenv.glob(f"versions/{version}.*/bin/python"), reverse=True)
    for candidate in filter(None, [shutil.which(f"python{version}"), *map(str, kept)]):
        # PATH may have a pyenv shim of a version that is not active, so ask for the version.
        asked = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        probe = subprocess.run(asked, capture_output=True, text=True, check=False)
        if probe.stdout.strip() == version:
            return candidate
    return None


def fetch(folder: Path) -> None:
    """Downloads what the environments get. What fails is left to their installation."""
    for version, torch, _ in MATRIX:
        if interpreter := find_python(version):
            wanted = ["-m", "pip", "download", *QUIETLY, "-d", str(folder), "--only-binary=:all:"]
            done = subprocess.run([interpreter, *wanted, f"torch=={torch}", *PACKAGES], check=False)
            print(f"Python {version}, torch {torch}: exit status {done.returncode}", flush=True)


def copy_tests(work: Path) -> None:
    work.mkdir()
    for source in (REPOSITORY / name for name in COPIED if (REPOSITORY / name).exists()):
        if source.is_dir():
            left_out = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(source, work / source.name, ignore=left_out)
        else:
            shutil.copy(source, work)


def run_pair(
    version: str, torch: str, wheel: Path, tests: tuple[str, ...], wheels: Path | None,
    more: list[str],
) -> Result:  # fmt: skip
    """Trains a small model, and runs the tests, if any, with more arguments of pytest."""
    interpreter = find_python(version)
    if interpreter is None:
        return Result(version, torch, f"FAILED: no Python {version} here", False)
    with tempfile.TemporaryDirectory(prefix="fused_layernorm-") as folder:
        # No plug-in or path of the calling environment reaches into this one.
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        env["OMP_NUM_THREADS"] = "1"
        work, python = Path(folder) / "work", Path(folder) / "venv" / "bin" / "python"
        copy_tests(work)

        def run(*command: str | Path) -> None:
            subprocess.run([*map(str, command)], cwd=work, env=env, check=True)

        def install(*wanted: str | Path) -> None:
            pip: list[str | Path] = [python, "-m", "pip", "install", *QUIETLY, "--no-compile"]
            tries: list[list[str | Path]] = [[]] * INSTALL_TRIES
            tries = [["--no-index", "--find-links", wheels], *tries] if wheels else tries
            for number, how in enumerate(tries, 1):
                try:
                    return run(*pip, *how, *wanted)
                except subprocess.CalledProcessError:
                    free = shutil.disk_usage(work).free / 1e9
                    print(f"not installed, {free:.1f} GB free, {len(tries) - number} tries left")
                    if number == len(tries):
                        raise
                    time.sleep(0 if how else PAUSE_SECONDS)

        step = "make the environment"
        try:
            run(interpreter, "-m", "venv", Path(folder) / "venv")
            step = "install"
            install(f"torch=={torch}", *PACKAGES)
            install("--no-deps", wheel)
            step = "import"
            run(python, "-c", WHERE, torch)
            run(python, "-m", "fused_layernorm")
            step = "train"
            run(python, "-c", STEP, torch)
            if not tests:
                return Result(version, torch, "trained", True)
            step = "tests"
            run(python, "-m", "pytest", "-p", "no:cacheprovider", "-n", str(JOBS),
                "--dist", "worksteal", *tests, *more)  # fmt: skip
        except subprocess.CalledProcessError as error:
            return Result(version, torch, f"FAILED: {step} (exit status {error.returncode})", False)
    return Result(version, torch, "passed", True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, nargs="?")
    parser.add_argument("--fetch", type=Path, metavar="FOLDER", help="only download")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="what was downloaded")
    parser.add_argument("--only", metavar="PYTHON", help="only the lines of this Python")
    lacking = "leave out the lines of this Python, which the machine lacks"
    parser.add_argument("--without", metavar="PYTHON", action="append", default=[], help=lacking)
    parser.add_argument("pytest_arguments", nargs="*", help="after --: passed on to pytest")
    arguments = parser.parse_args()
    if arguments.fetch:
        fetch(arguments.fetch)
        return 0
    if arguments.wheel is None:
        parser.error("expected a wheel")
    wheel, wheels = arguments.wheel.resolve(), arguments.wheels and arguments.wheels.resolve()
    results = []
    for version, torch, tests in MATRIX:
        if arguments.only in (None, version) and version not in arguments.without:
            print(f"-- Python {version}, torch {torch}", flush=True)
            start = time.monotonic()
            result = run_pair(version, torch, wheel, tests, wheels, arguments.pytest_arguments)
            seconds = time.monotonic() - start
            results.append(result._replace(outcome=f"{result.outcome} ({seconds:.0f} s)"))
    print(f"{wheel.name}:")
    for result in results:
        print(f"  Python {result.python:<5} torch {result.torch:<7} {result.outcome}")
    return 0 if results and all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
