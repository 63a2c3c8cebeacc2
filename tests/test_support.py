# SPDX-License-Identifier: Apache-2.0
"""Every call that docs/support.md says raises an error raises that error."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fused_layernorm

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
ROW = re.compile(r"\| `(?P<call>.+?)` \| `(?P<exception>\w+)` \| (?P<sentence>.+) \|")
ROWS = [match.groupdict() for match in map(ROW.fullmatch, PAGE.read_text().splitlines()) if match]
assert len(ROWS) > 20


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["call"])
def test_raises_what_the_page_says(row, device):
    if device == "cuda" and any(word in row["call"] for word in ("numpy", "onnx")):
        pytest.skip("not a question of the device")
    if "onnx" in row["call"]:
        pytest.importorskip("onnxscript")
    names: dict[str, Any] = {
        **vars(fused_layernorm),
        "torch": torch, "x": torch.randn(2, 3, 8, device=device),
        "weight": torch.ones(8, device=device), "bias": torch.zeros(8, device=device),
    }  # fmt: skip
    sentence = row["sentence"].replace("\\|", "|").replace("cpu", str(names["x"].device))
    whole = not sentence.endswith(" ...")
    pattern = "^" + re.escape(sentence.removesuffix(" ...")) + ("$" if whole else "")
    with pytest.raises(Exception, match=pattern) as raised:
        eval(row["call"], names)
    assert type(raised.value).__name__ == row["exception"]
