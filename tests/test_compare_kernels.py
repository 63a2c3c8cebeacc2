# SPDX-License-Identifier: Apache-2.0
"""ci/compare_kernels.py: how it reads machine code, and which kernels it considers equal."""

import struct
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("numpy")
CI = Path(__file__).resolve().parent.parent / "ci"
if not CI.is_dir():
    pytest.skip("no ci beside these tests", allow_module_level=True)
sys.path.insert(0, str(CI))

import compare_kernels  # noqa: E402
from compare_kernels import Kernel  # noqa: E402

LOAD_ARGUMENT = 0xB82  # LDC, which reads constant memory
ADD = 0x221


def instruction(operation, offset=0, bank=0):
    return struct.pack("<QQ", operation | offset << 38 | bank << 54, 7)


def kernel(name, code, **how):
    made = Kernel("sm_90", name, name, **how)
    compare_kernels.read_code(made, code, b"")
    return made


def test_reads_spills_and_size():
    made = kernel("k", instruction(ADD) + instruction(0x387) + instruction(0x983) * 2)
    assert (made.size, made.spills) == (64, 3)
    assert made.mix == Counter({ADD: 1, 0x387: 1, 0x983: 2})


@pytest.mark.parametrize(
    ("operation", "offset", "bank", "loose"),
    [
        (LOAD_ARGUMENT, 0x210, 0, True), (LOAD_ARGUMENT, 0x210, 3, False),
        (LOAD_ARGUMENT, 0x20, 0, False), (0x810, 0x210, 0, False),
    ],
    ids=["an argument", "a constant", "what the driver keeps", "an immediate number"],
)  # fmt: skip
def test_an_argument_may_lie_elsewhere(operation, offset, bank, loose):
    one, other = (kernel("k", instruction(operation, o, bank)) for o in (offset, offset + 8))
    assert one.exact != other.exact
    assert (one.loose == other.loose) == loose
