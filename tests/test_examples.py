# SPDX-License-Identifier: Apache-2.0
"""The examples run and confirm their claims, on a GPU if there is one."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

import fused_layernorm

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
if not EXAMPLES.is_dir():
    pytest.skip("no examples beside these tests", allow_module_level=True)
sys.path.insert(0, str(EXAMPLES))


def refuses(run):
    with pytest.raises(SystemExit, match="differs"):
        run()


def test_kernelbench(capsys, monkeypatch):
    import kernelbench

    kernelbench.main()
    assert capsys.readouterr().out.count("allclose(atol=1e-05) True") == 3
    cls = kernelbench.FusedConvTransposeModel
    right = cls.tail
    monkeypatch.setattr(cls, "tail", lambda self, x: right(self, x) * 1.001)
    refuses(kernelbench.main)


def test_the_demo_runs_every_example():
    import demo

    others = {path.stem for path in EXAMPLES.glob("*.py")} - {"_common", "demo"}
    assert {*demo.EXAMPLES} == others
    assert all(callable(importlib.import_module(name).main) for name in others)
    with pytest.raises(SystemExit, match="no example 'none'"):
        demo.main(["none"])


def test_attention_notices_a_wrong_output(monkeypatch):
    import attention

    right = fused_layernorm.qk_norm_rope
    monkeypatch.setattr(attention, "qk_norm_rope", lambda q, k, *a, **o: right(k, q, *a, **o))
    refuses(attention.main)
