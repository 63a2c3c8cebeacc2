"""Other people's libraries in the tests: `libraries.get("timm")`, or the test is skipped by name.

timm and torchvision are not among the packages of the environment. torchvision's binary is built
for CUDA builds of PyTorch, and beside a CPU build it fails to import, and with it every other
library that imports it when it is there, transformers for one. And pip would replace PyTorch to
suit it. So `make test`, by running this file, installs the two into a folder of their own under
build/, without PyTorch; only the tests look there.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import torch

_MINOR = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
FOLDER = (
    Path(__file__).resolve().parents[1]
    / "build"
    / "test_packages"
    / f"{sys.implementation.cache_tag}-torch{_MINOR[0]}.{_MINOR[1]}"
)
# torchvision 0.25 is PyTorch 2.10's, and so on; pillow is what it needs beside numpy.
PACKAGES = ("timm", f"torchvision<0.{_MINOR[1] + 16}", "pillow")


def install():
    sys.path.append(str(FOLDER))
    if all(map(importlib.util.find_spec, ("timm", "torchvision"))):
        return
    pip = (sys.executable, "-m", "pip", "install", "--progress-bar", "off", "--quiet")
    subprocess.run([*pip, "--no-deps", "--upgrade", "--target", str(FOLDER), *PACKAGES], check=True)


def get(name):
    """The library, or a skipped test."""
    import pytest

    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    if "torchvision" not in sys.modules and importlib.util.find_spec("torchvision"):
        _import_torchvision()
    return pytest.importorskip(name)


_declared = None  # kept, for its declarations last as long


def _import_torchvision():
    """Import it, also where its binary does not load.

    Its Python half then stumbles over its own operators, nms and qnms, of which these models use
    none. Each that it misses is declared, until it imports.
    """
    global _declared
    while True:
        try:
            import torchvision  # noqa: F401

            return
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None:
                raise
            _declared = _declared or torch.library.Library("torchvision", "FRAGMENT")
            _declared.define(f"{missing[1]}(Tensor x) -> Tensor")
            for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
                del sys.modules[name]


if __name__ == "__main__":
    install()
