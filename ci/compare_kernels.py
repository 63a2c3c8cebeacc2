# SPDX-License-Identifier: Apache-2.0
"""What a change did to the machine code: the kernels of two builds, compared one by one.

    python ci/compare_kernels.py [--require-identical] OLD.so NEW.so

Each kernel of OLD is looked for in NEW by its machine code, so a kernel that was only renamed or
moved is found. "identical" means the same instructions to the bit; "identical but for parameters"
means that only the places of the kernel's arguments in constant memory differ, as after a change of
a Params struct. The other kernels are paired by name and template arguments, and those still left
with the kernel that is nearest by name and by mix of instructions. For these pairs the report shows
registers, stack, instructions that access local memory (spills), shared memory and code size.
Nothing runs, and no GPU is needed.

The exit status is 1 if a changed kernel keeps more in local memory than the one it is compared
with; with --require-identical, for a change that only moves code, if any kernel is not identical,
gone or new. The script needs cuobjdump, from CUDA or from the Python package nvidia-cuda-cuobjdump.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from check_spills import demangle

INSTRUCTION = 16  # bytes, on every architecture from sm_70 on
# The low 12 bits of an instruction name its operation. Those that reach local memory:
STORE_LOCAL, LOAD_LOCAL = 0x387, 0x983
# Arguments lie in constant bank 0, behind what the driver keeps there.
FIRST_ARGUMENT = 0x160


@dataclass(eq=False)
class Kernel:
    """One kernel of one architecture."""

    arch: str
    mangled: str
    name: str = ""  # demangled, with template arguments and without the function's parameters
    registers: int = 0
    stack: int = 0
    shared: int = 0
    size: int = 0  # bytes of machine code
    spills: int = 0  # instructions that load or store local memory
    exact: str = ""  # a hash of the instructions and of the compiler's constants
    loose: str = ""  # the same without the places of arguments
    mix: Counter[int] = field(default_factory=Counter)  # instructions by operation

    @property
    def family(self) -> str:
        return self.name.split("<")[0]


def cuobjdump(*arguments: str, folder: Path | None = None) -> str:
    places = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    path = shutil.which("cuobjdump") or next(
        (found for place in places if place and (found := shutil.which(f"{place}/bin/cuobjdump"))),
        None,
    )
    if path is None:
        raise SystemExit(
            "cuobjdump is neither on PATH nor in $CUDA_HOME/bin: it comes with CUDA, or with "
            "`pip install nvidia-cuda-cuobjdump`"
        )
    result = subprocess.run([path, *arguments], cwd=folder, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"cuobjdump {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout


def sections(elf: bytes) -> dict[str, bytes]:
    """A 64-bit ELF file's sections by name."""
    table, entry, count, names = (
        *struct.unpack_from("<Q", elf, 0x28),
        *struct.unpack_from("<HHH", elf, 0x3A),
    )
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry) for i in range(count)]
    start = headers[names][4]
    found = {}
    for name, kind, _, _, offset, size in headers:
        text = elf[start + name : elf.index(b"\0", start + name)].decode()
        found[text] = b"" if kind == 8 else elf[offset : offset + size]  # 8: no bytes in the file
    return found


def read_code(kernel: Kernel, code: bytes, constants: bytes) -> None:
    """Fills in the fields that are read from a kernel's machine code."""
    words = np.frombuffer(code[: len(code) // INSTRUCTION * INSTRUCTION], "<u8").reshape(-1, 2)
    low = words[:, 0]
    operations = low & 0xFFF
    kernel.size = len(code)
    kernel.mix = Counter(operations.tolist())
    kernel.spills = kernel.mix[STORE_LOCAL] + kernel.mix[LOAD_LOCAL]
    kernel.exact = hashlib.sha256(code + constants).hexdigest()
    # An operand from constant memory: the form in bits 9 to 11, the offset in 38 to 53, the bank
    # in 54 to 58.
    form, offset, bank = low & 0xE00, low >> 38 & 0xFFFF, low >> 54 & 0x1F
    argument = ((form == 0x600) | (form == 0xA00)) & (bank == 0) & (offset >= FIRST_ARGUMENT)
    masked = words.copy()
    masked[argument, 0] &= np.uint64(~(0xFFFF << 38) & (1 << 64) - 1)
    kernel.loose = hashlib.sha256(masked.tobytes() + constants).hexdigest()


def read_binary(path: Path) -> list[Kernel]:
    """Every kernel of a binary, whatever the architectures it was compiled for."""
    if not path.is_file():
        raise SystemExit(f"no file {path}")
    kernels: dict[tuple[str, str], Kernel] = {}
    arch = ""
    usage = cuobjdump("-res-usage", str(path))
    pattern = re.compile(
        r"^arch = (?P<arch>\w+)|^ Function (?P<name>\w+):\s+REG:(?P<registers>\d+) "
        r"STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+)",
        re.MULTILINE,
    )
    for match in pattern.finditer(usage):
        if match["arch"]:
            arch = match["arch"]
            continue
        kernels[arch, match["name"]] = Kernel(
            arch, match["name"], registers=int(match["registers"]), stack=int(match["stack"]),
            shared=int(match["shared"]),
        )  # fmt: skip
    if not kernels:
        raise SystemExit(f"{path} has no kernels")

    with tempfile.TemporaryDirectory() as folder:
        cuobjdump("-xelf", "all", str(path.resolve()), folder=Path(folder))
        for cubin in Path(folder).iterdir():
            arch = cubin.suffixes[-2].removeprefix(".")
            parts = sections(cubin.read_bytes())
            for name, code in parts.items():
                kernel = kernels.get((arch, name.removeprefix(".text.")))
                if name.startswith(".text.") and kernel is not None:
                    read_code(kernel, code, parts.get(f".nv.constant2.{kernel.mangled}", b""))
    unread = [kernel.mangled for kernel in kernels.values() if not kernel.size]
    if unread:
        raise SystemExit(
            f"{path}: no machine code was found for {len(unread)} kernels: {unread[0]}"
        )
    found = list(kernels.values())
    for kernel, name in zip(found, demangle([kernel.mangled for kernel in found]), strict=True):
        kernel.name = without_parameters(name).removeprefix("void ")
    return found


def without_parameters(name: str) -> str:
    """A demangled function's name and template arguments: up to the bracket at its end."""
    depth = 0
    for place in range(len(name) - 1, 0, -1):
        depth += (name[place] == ")") - (name[place] == "(")
        if name[place] == "(" and depth == 0:
            return name[:place]
    return name


def pairs(old: list[Kernel], new: list[Kernel], *keys: str) -> list[tuple[Kernel, Kernel]]:
    """Removes from both lists the pairs of kernels that are alike in these keys; returns them."""
    there: dict[tuple[str, ...], list[Kernel]] = defaultdict(list)
    for kernel in new:
        there[tuple(getattr(kernel, key) for key in keys)].append(kernel)
    found, left = [], []
    for kernel in old:
        alike = there[tuple(getattr(kernel, key) for key in keys)]
        if alike:
            found.append((kernel, alike.pop()))
        else:
            left.append(kernel)
    old[:], new[:] = left, [kernel for kernels in there.values() for kernel in kernels]
    return found


def changed(old: Kernel, new: Kernel) -> str:
    """What is different between two kernels, in words."""
    parts = []
    for label, key in (("registers", "registers"), ("stack", "stack"), ("spills", "spills"),
                       ("shared", "shared"), ("code", "size")):  # fmt: skip
        before, after = getattr(old, key), getattr(new, key)
        if before != after:
            percent = f" ({100 * (after / before - 1):+.1f}%)" if key == "size" else ""
            parts.append(f"{label} {before} -> {after}{percent}")
    if old.mix != new.mix:
        apart = (old.mix - new.mix).total() + (new.mix - old.mix).total()
        parts.append(f"{apart} of {old.mix.total()} instructions are of another kind")
    return ", ".join(parts) or "the same operations in another order or with other operands"


def families(old: list[Kernel], new: list[Kernel]) -> str:
    """Kernels and machine code by family, and in all."""
    lines = [f"{'family':<46}{'kernels':>16}{'code, KB':>18}{'stack > 0':>14}{'spills':>16}"]

    def line(label: str, before: list[Kernel], after: list[Kernel]) -> str:
        def both(count: list[int]) -> str:
            return f"{count[0]} -> {count[1]}"

        sides = (before, after)
        return (
            f"{label:<46}{both([len(side) for side in sides]):>16}"
            f"{both([sum(k.size for k in side) // 1024 for side in sides]):>18}"
            f"{both([sum(k.stack > 0 for k in side) for side in sides]):>14}"
            f"{both([sum(k.spills for k in side) for side in sides]):>16}"
        )

    for family in sorted({kernel.family for kernel in (*old, *new)}):
        sides = [[k for k in side if k.family == family] for side in (old, new)]
        lines.append(line(family, *sides))
    return "\n".join([*lines, line("all", old, new)])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--lines", type=int, default=40, help="changed kernels shown; 0 for all")
    parser.add_argument("--require-identical", action="store_true")
    arguments = parser.parse_args()
    old, new = read_binary(arguments.old), read_binary(arguments.new)
    print(families(old, new))

    gone, added = list(old), list(new)
    # Of several kernels with the same code, those with the same name are paired first.
    identical, moved = (
        len(pairs(gone, added, "arch", "name", key)) + len(pairs(gone, added, "arch", key))
        for key in ("exact", "loose")
    )
    both = pairs(gone, added, "arch", "name")
    print(
        f"\nof {len(old)} kernels: {identical} identical, {moved} identical but for parameters, "
        f"{len(both)} changed, {len(gone)} gone; of {len(new)} kernels "
        f"now, {len(added)} are new"
    )

    # The worst come first: by more stack, then more spills, more registers, larger code.
    both.sort(key=lambda pair: (
        pair[0].stack - pair[1].stack, pair[0].spills - pair[1].spills,
        pair[0].registers - pair[1].registers, -pair[1].size / pair[0].size,
    ))  # fmt: skip
    shown = len(both) if arguments.lines == 0 else arguments.lines
    for kernel, other in both[:shown]:
        print(f"  {kernel.arch} {kernel.name}\n      {changed(kernel, other)}")
    for label, kernels in (("gone", gone), ("new", added)):
        for kernel in kernels[:shown]:
            print(
                f"  {label}: {kernel.arch} {kernel.name}: {kernel.registers} registers, "
                f"stack {kernel.stack}, code {kernel.size}"
            )
    for label, count in (("changed", len(both)), ("gone", len(gone)), ("new", len(added))):
        if count > shown:
            print(f"  and {count - shown} more {label}: --lines 0 shows all")

    worse = [k for k, other in both if other.stack > k.stack or other.spills > k.spills]
    if worse:
        print(f"{len(worse)} changed kernels keep more in local memory than before")
    if arguments.require_identical:
        return 0 if old and identical == len(old) == len(new) else 1
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
