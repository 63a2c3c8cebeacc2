# SPDX-License-Identifier: Apache-2.0
"""`python -m fused_layernorm [--json]`: what is installed, for which devices, and what is used."""

import argparse
import json
import platform
import re
from typing import Any

import torch

from . import __version__, override
from .ops import autograd_library, load


def compiled_archs(build_info: str) -> list[str]:
    """The architectures in the binary, as nvcc numbers them: "90", "90a", "120+PTX"."""
    match = re.search(r"archs (.*)", build_info)
    return match[1].split() if match else []


def in_words(archs: list[str]) -> str:
    """["90", "120+PTX"] -> "9.0 12.0 and PTX of 12.0"."""
    dotted = [re.sub(r"(\d)(?=\D*$)", r".\1", arch.removesuffix("+PTX"), count=1) for arch in archs]
    ptx = [name for name, arch in zip(dotted, archs, strict=True) if arch.endswith("+PTX")]
    return " ".join(dotted) + (f" and PTX of {' '.join(ptx)}" if ptx else "")


def coverage(archs: list[str], capability: tuple[int, int]) -> str | None:
    """Which code of the binary runs on a device of this capability, in words, or None.

    Machine code runs on its own major version from its own minor version up (with an "a", on its
    own version alone). PTX runs on every later version, compiled by the driver at first use.
    """
    parsed = (re.fullmatch(r"(\d+)(\d)([af]?)(\+PTX)?", arch) for arch in archs)
    known = sorted((((int(m[1]), int(m[2])), m[3], m[4]) for m in parsed if m), reverse=True)
    for version, suffix, _ in known:
        is_older = version[0] == capability[0] and version < capability and suffix != "a"
        if version == capability or is_older:
            return f"runs the kernels for {version[0]}.{version[1]}{suffix}"
    for version, suffix, ptx in known:
        if ptx and not suffix and version < capability:
            return f"runs the PTX of {version[0]}.{version[1]}, compiled at first use"
    return None


def facts() -> dict[str, Any]:
    """What `--json` prints. Scripts and bug reports read it, so the keys must not change."""
    build_info = load.operators._build_info()
    archs = compiled_archs(build_info)
    cuda = re.match(r"cuda (\d+\.\d+)", build_info)
    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        name = torch.cuda.get_device_name(index)
        capability = torch.cuda.get_device_capability(index)
        runs = coverage(archs, capability)
        devices.append({"name": name, "capability": ".".join(map(str, capability)), "runs": runs})
    return {
        "fused_layernorm": __version__,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "compiled_with": build_info.split(";")[0] if archs else "no CUDA",
        "compiled_with_cuda": cuda[1] if cuda else None,
        "compiled_for": archs,
        "devices": devices,
        "kernels_used": any(device["runs"] for device in devices),
        "norms": ["LayerNorm", "RMSNorm", "GroupNorm"],
        "driver_problem": load.operators._driver_problem() or None,
        "autograd": {
            "language": "C++" if autograd_library.active else "Python",
            "reason": autograd_library.reason,
        },
        "override_aten": any(override._in_force.values()),
    }


def report(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts as lines to print, (label, text)."""
    archs, cuda, autograd = facts["compiled_for"], facts["torch_cuda"], facts["autograd"]
    devices = [
        (f"device {index}", f"{one['name']}, capability {one['capability']}: "
         f"{one['runs'] or 'no kernels for it'}")
        for index, one in enumerate(facts["devices"])
    ]  # fmt: skip
    if problem := facts["driver_problem"]:
        kernels = f"in, but not used: {problem}"
    elif not archs:
        kernels = "not in this build; CUDA tensors take PyTorch's own operators, slower"
    elif facts["kernels_used"]:
        kernels = "in, and used for CUDA tensors"
    else:
        kernels = "in, but no device here runs them"
    return [
        ("fused_layernorm", facts["fused_layernorm"]),
        ("torch", f"{facts['torch']}, {f'CUDA {cuda}' if cuda else 'CPU only'}"),
        ("Python", facts["python"]),
        ("compiled with", facts["compiled_with"]),
        ("compiled for", in_words(archs) if archs else "CPU only"),
        *(devices or [("devices", "torch sees no CUDA device")]),
        ("CUDA kernels", kernels),
        ("autograd", f"in {autograd['language']}: {autograd['reason']}"),
        ("override_aten", "active" if facts["override_aten"] else "not active"),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fused_layernorm", description="What is installed and what will be used."
    )
    parser.add_argument("--json", action="store_true", help="as a JSON object, for scripts")
    found = facts()
    if parser.parse_args(argv).json:
        print(json.dumps(found, indent=2))
        return
    lines = report(found)
    width = max(len(label) for label, _ in lines)
    print("\n".join(f"{label:<{width}}  {text}" for label, text in lines))


if __name__ == "__main__":
    main()
