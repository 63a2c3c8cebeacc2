# SPDX-License-Identifier: Apache-2.0
"""Other people's libraries in the tests: `libraries.get("timm")` imports one or skips the test.

torchvision's binary is built for CUDA builds of PyTorch: beside a CPU build it fails to import, as
does whatever imports it where it is installed, and pip would replace PyTorch to suit it. So `make
test` runs this file, which installs timm and torchvision without PyTorch into a folder of their own
under build/, from which only the tests import.
"""

import importlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

_MINOR = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
_TAG = f"{sys.implementation.cache_tag}-torch{_MINOR[0]}.{_MINOR[1]}"
FOLDER = Path(__file__).resolve().parents[1] / "build" / "test_packages" / _TAG
# torchvision 0.25 belongs to PyTorch 2.10, and so on. Beside numpy it needs pillow.
PACKAGES = ("timm", f"torchvision<0.{_MINOR[1] + 16}", "pillow")


def install():
    sys.path.append(str(FOLDER))
    if all(map(importlib.util.find_spec, ("timm", "torchvision"))):
        return
    pip = (sys.executable, "-m", "pip", "install", "--progress-bar", "off", "--quiet")
    subprocess.run([*pip, "--no-deps", "--upgrade", "--target", str(FOLDER), *PACKAGES], check=True)


def get(name):
    """Returns the library, or skips the test if it is not installed; with
    FUSED_LAYERNORM_ALL_LIBRARIES=1, as in .ci/run's stage of tools, its absence is an error."""
    import pytest

    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    if "torchvision" not in sys.modules and importlib.util.find_spec("torchvision"):
        _import_torchvision()
    if os.environ.get("FUSED_LAYERNORM_ALL_LIBRARIES") == "1":
        return importlib.import_module(name)
    return pytest.importorskip(name)


def class_of(module, name):
    """Returns the class of an installed library, or skips the test if this release has none."""
    import pytest

    get(module.split(".")[0])
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        pytest.skip(f"the installed version has no {module}.{name}")


def check_onnx(model, inputs, program=None, tolerance=1e-5, **options):
    """Asserts that a model's ONNX program, by default exported through TorchScript, gives in
    onnxruntime what the model gives here."""
    onnxruntime = get("onnxruntime")
    get("onnx")
    buffer: Any = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter without dynamo is deprecated
        if program is None:
            torch.onnx.export(model, inputs, buffer, dynamo=False, **options)
    exported = program.model_proto.SerializeToString() if program else buffer.getvalue()
    session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    found = session.run(None, {n: x.cpu().numpy() for n, x in zip(names, inputs, strict=True)})
    expected = model(*inputs)
    for y, other in zip(found, [expected] if len(found) == 1 else expected, strict=True):
        within = 2e-3 if other.dtype is torch.float16 else tolerance
        y = torch.from_numpy(y).to(other.device)
        torch.testing.assert_close(y, other, rtol=within, atol=within)


_declared = None  # the declarations last as long as this library


def _import_torchvision():
    """Imports torchvision, also if its binary does not load: each operator of its own that its
    Python half then misses, and that no model of the tests uses, is declared."""
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
