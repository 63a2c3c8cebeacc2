# SPDX-License-Identifier: Apache-2.0
"""Check what the wheel promises: one file for every Python and every torch, and not too large.

python ci/check_wheel.py dist/fused_layernorm-*.whl
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# The most that a whole wheel may have. It has 36.89, of which the PTX of 10.0 takes 8.8; more than
# half of the machine code is kernels with activations.
MAX_MB = 37
# The size of the kernels of all default architectures (machine code for 7.5, 8.0, 9.0, 10.0 and
# 12.0, and PTX of 10.0) over the size of those of 9.0 alone. When last measured, the sizes were
# 32.32 and 5.01 MB.
WHOLE_TO_HOPPER = 6.46
# The libraries that a binary may need: torch's two, and those of every Linux with torch.
LIBRARIES = r"libtorch(_cpu)?\.so|(libstdc\+\+|libgcc_s|libc|libm|ld-linux-[\w-]+)\.so\.\d+"
# Symbols of torch's C++ API are bound to one release of torch; the stable ABI is plain C.
UNSTABLE = r"_Z(TV|TI|TS)?NK?(2at|3c10|5torch|6caffe2)"
# Symbols of Python bind a binary to a version or to a build of Python.
PYTHON = r"_?Py"
FORBIDDEN_FILES = r"\.(cu|cuh|cpp|h|o|pyc)$"
# The autograd libraries, each bound to one minor version of torch, may need libc10.so too, but no
# library of CUDA or of Python.
AUTOGRAD_LIBRARIES = LIBRARIES + r"|libc10\.so"

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "build_tools"))
import per_torch  # noqa: E402


def read(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def needed_by(library: str) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.*)\]", "\n".join(read("readelf", "-dW", library)))


def autograd_complaints(archive: zipfile.ZipFile, folder: str) -> list[str]:
    """Complaints about the autograd libraries. Each minor version of torch must have one, which may
    need torch's CPU libraries alone.
    """
    found = []
    path_of, folder_of = per_torch.autograd_library.path_of, Path("fused_layernorm/autograd")
    minors = map(per_torch.minor_of, per_torch.RELEASES)
    expected = {str(path_of(minor, folder_of)) for minor in minors}
    names = {name for name in archive.namelist() if name.startswith("fused_layernorm/autograd/")}
    found += [f"{name} is missing" for name in sorted(expected - names)]
    found += [f"{name} does not belong" for name in sorted(names - expected)]
    for name in sorted(expected & names):
        needed = needed_by(archive.extract(name, folder))
        wrong = [library for library in needed if not re.fullmatch(AUTOGRAD_LIBRARIES, library)]
        found += [f"{name} needs {library}" for library in wrong]
        if not {"libtorch_cpu.so", "libc10.so"} <= {*needed}:
            found.append(f"{name} does not name libtorch_cpu.so and libc10.so, and finds no symbol")
    return found


def complaints(wheel: Path, hopper_only: bool) -> list[str]:
    found = []
    if not re.fullmatch(r"fused_layernorm-[\w.]+-py3-none-[\w.]+\.whl", wheel.name):
        found.append(f"{wheel.name} is not a wheel for every Python (py3-none)")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        found += [f"{name} does not belong" for name in names if re.search(FORBIDDEN_FILES, name)]
        if "fused_layernorm/py.typed" not in names:
            found.append("fused_layernorm/py.typed is missing")
        binary = archive.extract("fused_layernorm/libfused_layernorm.so", folder)
        needed = needed_by(binary)
        found += autograd_complaints(archive, folder)
        sections = "\n".join(read("readelf", "-SW", binary))
        undefined = [line.split()[-1] for line in read("nm", "-D", "--undefined-only", binary)]
        exported = [line.split()[-1] for line in read("nm", "-D", "--defined-only", binary)]
    fatbin = re.search(r" \.nv_fatbin +\w+ +\w+ \w+ (\w+)", sections)
    kernels = int(fatbin[1], 16) if fatbin else 0
    if "libtorch.so" not in needed:
        found.append("libtorch.so is not among the needed libraries: no CUDA stream will be found")
    found += [f"needs {name}" for name in needed if not re.fullmatch(LIBRARIES, name)]
    found += [f"uses {name}" for name in undefined if re.match(f"{UNSTABLE}|{PYTHON}", name)]
    found += [f"exports {name}" for name in exported]

    whole = wheel.stat().st_size / 1e6
    print(f"{wheel.name}: {whole:.2f} MB")
    if hopper_only:
        # The kernels, which are compressed, count for each architecture; the rest counts once.
        whole += kernels / 1e6 * (WHOLE_TO_HOPPER - 1)
        print(f"some {whole:.1f} MB with all architectures")
    if whole > MAX_MB:
        found.append(f"a whole wheel takes some {whole:.1f} MB, more than {MAX_MB}")
    print(f"needs {' '.join(needed)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--hopper-only",
        action="store_true",
        help="compiled for 9.0 alone: estimate the size of a whole wheel",
    )
    arguments = parser.parse_args()
    found = complaints(arguments.wheel, arguments.hopper_only)
    for complaint in found:
        print(f"WRONG: {complaint}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
