"""`python -m fused_layernorm`: what it says, and which devices it finds the binary good for."""

import re
import subprocess
import sys

import pytest
import torch

import fused_layernorm
from fused_layernorm.__main__ import compiled_archs, coverage, in_words

FULL = ["75", "80", "90", "100+PTX"]


def test_prints_what_is_installed():
    command = [sys.executable, "-m", "fused_layernorm"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = dict(re.split(r" {2,}", line, maxsplit=1) for line in printed.splitlines())
    assert lines["fused_layernorm"] == fused_layernorm.__version__
    assert lines["torch"].startswith(torch.__version__)
    assert lines["override_aten"] == "not active"
    build_info = torch.ops.fused_layernorm._build_info()
    assert lines["compiled with"] == (
        "no CUDA" if build_info == "cpu only" else build_info.split(";")[0]
    )


def test_build_info_is_read():
    assert compiled_archs("cuda 13.0; archs 75 90a 120+PTX") == ["75", "90a", "120+PTX"]
    assert compiled_archs("cpu only") == []
    assert in_words(["75", "90a", "120+PTX"]) == "7.5 9.0a 12.0 and PTX of 12.0"


@pytest.mark.parametrize(
    ("archs", "capability", "expected"),
    [
        (FULL, (7, 0), None),
        (FULL, (7, 5), "runs the kernels for 7.5"),
        (FULL, (8, 0), "runs the kernels for 8.0"),
        (FULL, (8, 6), "runs the kernels for 8.0"),  # a later minor version of the same major
        (FULL, (8, 9), "runs the kernels for 8.0"),
        (["80", "86", "90"], (8, 7), "runs the kernels for 8.6"),  # the latest that is not later
        (["86", "90"], (8, 0), None),
        (FULL, (10, 3), "runs the kernels for 10.0"),
        (FULL, (12, 0), "runs the PTX of 10.0, compiled at first use"),
        (["100", "120+PTX"], (11, 0), None),  # between 10.0's machine code and 12.0's PTX
        (["90"], (8, 0), None),
        (["90a"], (9, 0), "runs the kernels for 9.0a"),
        (["90a+PTX"], (10, 0), None),  # "a": that version and no other
        ([], (9, 0), None),
    ],
)
def test_coverage(archs, capability, expected):
    assert coverage(archs, capability) == expected
