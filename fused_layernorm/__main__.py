"""`python -m fused_layernorm`: what is installed, what it was compiled for, what will be used."""

import platform
import re

import torch

from fused_layernorm import __version__, override
from fused_layernorm.ops import autograd_library


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
    """What of the binary runs on a device of this capability, or None if nothing does.

    Machine code runs on its own major version from its own minor version up (with an "a", on its
    own version alone); PTX on every later version, compiled by the driver at first use.
    """
    parsed = [re.fullmatch(r"(\d+)(\d)([af]?)(\+PTX)?", arch) for arch in archs]
    known = [((int(m[1]), int(m[2])), m[3], bool(m[4])) for m in parsed if m]
    for (major, minor), suffix, _ in sorted(known, reverse=True):
        same = (major, minor) == capability
        if same or (major == capability[0] and minor < capability[1] and suffix != "a"):
            return f"runs the kernels for {major}.{minor}{suffix}"
    for (major, minor), suffix, has_ptx in sorted(known, reverse=True):
        if has_ptx and not suffix and (major, minor) < capability:
            return f"runs the PTX of {major}.{minor}, compiled at first use"
    return None


def report() -> list[tuple[str, str]]:
    """The lines to print, as (label, text)."""
    build_info = torch.ops.fused_layernorm._build_info()
    archs = compiled_archs(build_info)
    cuda = torch.version.cuda
    lines = [
        ("fused_layernorm", __version__),
        ("torch", f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'CPU only'}"),
        ("Python", platform.python_version()),
        ("compiled with", build_info.split(";")[0] if archs else "no CUDA"),
        ("compiled for", in_words(archs) if archs else "CPU only"),
    ]
    covered = False
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        capability = torch.cuda.get_device_capability(index)
        runs = coverage(archs, capability)
        covered |= runs is not None
        name = f"{torch.cuda.get_device_name(index)}, capability {capability[0]}.{capability[1]}"
        lines.append((f"device {index}", f"{name}: {runs or 'no kernels for it'}"))
    if not count:
        lines.append(("devices", "torch sees no CUDA device"))

    if not archs:
        kernels = "not in this build; CUDA tensors take PyTorch's own operators, slower"
    elif covered:
        kernels = "in, and used for CUDA tensors"
    else:
        kernels = "in, but no device here runs them"
    lines.append(("CUDA kernels", kernels))
    lines.append(("CPU tensors", "take PyTorch's own operators"))
    language = "C++" if autograd_library.active else "Python"
    lines.append(("autograd", f"in {language}: {autograd_library.reason}"))
    lines.append(("override_aten", "active" if any(override._in_force.values()) else "not active"))
    return lines


def main() -> None:
    lines = report()
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        print(f"{label:<{width}}  {text}")


if __name__ == "__main__":
    main()
