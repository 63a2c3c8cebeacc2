# SPDX-License-Identifier: Apache-2.0
"""`python -m fused_layernorm`: its output, and the devices that it says the binary serves."""

import json
import re
import subprocess
import sys

import pytest
import torch

import fused_layernorm
from fused_layernorm import override
from fused_layernorm.__main__ import compiled_archs, coverage, facts, in_words, main, report
from fused_layernorm.ops import autograd_library

FULL = ["75", "80", "90", "100+PTX"]


def test_prints_what_is_installed():
    command = [sys.executable, "-m", "fused_layernorm"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = dict(re.split(r" {2,}", line, maxsplit=1) for line in printed.splitlines())
    assert lines == dict(report(facts()))
    assert lines["fused_layernorm"] == fused_layernorm.__version__
    assert lines["torch"].startswith(torch.__version__)
    assert lines["override_aten"] == "not active"
    language = "C++" if autograd_library.active else "Python"
    assert lines["autograd"] == f"in {language}: {autograd_library.reason}"
    assert len((found := facts())["devices"]) == torch.cuda.device_count()
    build_info = torch.ops.fused_layernorm._build_info()
    if build_info == "cpu only":
        assert (found["compiled_with_cuda"], found["compiled_for"]) == (None, [])
        assert lines["compiled with"] == "no CUDA"
    else:
        assert build_info.startswith(f"cuda {found['compiled_with_cuda']}")
        assert build_info.endswith(f"; archs {' '.join(found['compiled_for'])}")
        assert lines["compiled with"] == build_info.split(";")[0]


def test_json_sees_the_override(monkeypatch, capsys):
    main(["--json"])
    assert json.loads(capsys.readouterr().out) == facts()
    monkeypatch.setitem(override._in_force, "CUDA", 1)
    main(["--json"])
    assert json.loads(capsys.readouterr().out)["override_aten"] is True


IN, FOR_90 = "in, and used for CUDA tensors", "runs the kernels for 9.0"


@pytest.mark.parametrize(
    ("archs", "runs", "expected"),
    [(["90"], [FOR_90], IN), (["90"], [FOR_90, None], IN),
     *((["90"], runs, "in, but no device here runs them") for runs in ([None], [])),
     ([], [None], "not in this build; CUDA tensors take PyTorch's own operators, slower")],
)  # fmt: skip
def test_report_says_whether_kernels_are_used(archs, runs, expected):
    devices = [{"name": "GPU", "capability": "9.0", "runs": what} for what in runs]
    found = {"compiled_for": archs, "devices": devices, "kernels_used": any(runs)}
    lines = dict(report(facts() | found))
    assert lines["CUDA kernels"] == expected
    for index, what in enumerate(runs):
        assert lines[f"device {index}"] == (f"GPU, capability 9.0: {what or 'no kernels for it'}")


def test_build_info_is_read():
    assert compiled_archs("cuda 13.0; archs 75 90a 120+PTX") == ["75", "90a", "120+PTX"]
    assert compiled_archs("cpu only") == []
    assert in_words(["75", "90a", "120+PTX"]) == "7.5 9.0a 12.0 and PTX of 12.0"


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (FULL, (7, 0), None), (FULL, (7, 5), "7.5"),
        # A later minor version of the same major; the latest up to the device's.
        (FULL, (8, 9), "8.0"), (["80", "86", "90"], (8, 7), "8.6"), (["86", "90"], (8, 0), None),
        ([], (9, 0), None), (FULL, (12, 0), "PTX"),
        (["100", "120+PTX"], (11, 0), None),  # between 10.0's machine code and 12.0's PTX
        (["90a"], (9, 0), "9.0a"),
        (["90a+PTX"], (10, 0), None),  # an "a" architecture serves only its own version
    ],
)  # fmt: skip
def test_coverage(archs, capability, runs):
    ptx = "runs the PTX of 10.0, compiled at first use"
    expected = ptx if runs == "PTX" else runs and f"runs the kernels for {runs}"
    assert coverage(archs, capability) == expected
