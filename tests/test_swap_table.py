# SPDX-License-Identifier: Apache-2.0
"""The table of other libraries' classes of LayerNorm: it knows the installed versions, and another
source is left alone. What swapped classes compute is in test_swapped_classes.py.
"""

import ast
import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import libraries
import pytest
import torch
import torch.nn.functional as F
from libraries import class_of
from swaps import digest
from swaps import swapped as swapped_by
from torch import nn

from fused_layernorm import is_fused, swap_layer_norm
from fused_layernorm.swap import source as swap_source
from fused_layernorm.swap import table as swap_table


def swapped(norm):
    return swapped_by(norm, swap_layer_norm)


@pytest.mark.parametrize("package", ["timm", "torchvision", "diffusers", "transformers"])
def test_the_installed_version_is_known(package):
    """The table knows the source of every class that it names. The test imports none of them."""
    folder = Path(libraries.get(package).__file__).parent.parent
    checked = 0
    for (module, name), sources in swap_table.CLASSES.items():
        path = folder / (module.replace(".", "/") + ".py")
        if not module.startswith(package + ".") or not path.exists():
            continue
        body = ast.parse(path.read_text()).body
        functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        if name not in classes:
            continue
        forwards = [
            n for n in classes[name].body if isinstance(n, ast.FunctionDef) and n.name == "forward"
        ]
        for forward in forwards:
            called = [functions[n] for n in swap_source.called_names(forward) if n in functions]
            found = swap_source.digest_of_trees(forward, called)
            assert found in sources, (
                f"{module}.{name}.forward has a source that the table does not know: see what it "
                f"computes and enter {found} into swap/table.py"
            )
            checked += 1
    assert checked > 0


def test_nothing_is_imported():
    cls = class_of("timm.layers.norm", "LayerNorm2d")
    before = set(sys.modules)
    swap_layer_norm(nn.Sequential(nn.LayerNorm(8), cls(8)))
    assert set(sys.modules) == before


# ---- timm's switch.


@pytest.mark.parametrize("name", ["LayerNorm", "LayerNorm2d"])
def test_fast_norm_is_timms_own(name, device):
    cls = class_of("timm.layers.norm", name)
    x = torch.randn(2, 8, 8, 8, device=device)
    try:
        importlib.import_module("timm.layers.fast_norm").set_fast_norm(True)
        norm = cls(8).to(device)
    finally:
        importlib.import_module("timm.layers.fast_norm").set_fast_norm(False)
    fast = swapped(norm)
    with torch.autocast(device, torch.bfloat16):
        assert fast(x).dtype == norm(x).dtype == torch.bfloat16
        assert torch.equal(fast(x), norm(x))
        # Each module has its own switch, which may be turned back.
        norm._fast_norm = fast._fast_norm = False
        assert fast(x).dtype == norm(x).dtype
        torch.testing.assert_close(fast(x), norm(x))


# ---- Sources.


def other_version(cls, forward):
    """The class as another version of its library would have it."""
    members = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), members)


class TheSame:
    def forward(self: Any, x) -> "torch.Tensor":
        """With a docstring."""
        # And a comment.
        x = x.permute(
            0,
            2, 3, 1,
        )  # fmt: skip
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

        x = x.permute(0, 3, 1, 2)
        return x


class Another:
    def forward(self: Any, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 2 * self.eps)
        x = x.permute(0, 3, 1, 2)
        return x


def test_another_source_is_left_alone_and_named(caplog):
    cls = class_of("torchvision.models.convnext", "LayerNorm2d")
    x = torch.randn(2, 8, 3, 5)
    known = nn.Sequential(other_version(cls, TheSame.forward)(8))
    unknown = nn.Sequential(other_version(cls, Another.forward)(8), nn.LayerNorm(5))
    expected = unknown(x)
    with caplog.at_level("INFO", logger="fused_layernorm.swap"):
        assert is_fused(swap_layer_norm(known)[0])
        assert not caplog.records
        swap_layer_norm(unknown)
        swap_layer_norm(unknown, predicate=lambda name, module: True)
    assert not is_fused(unknown[0])
    torch.testing.assert_close(unknown(x), expected)
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert "1 torchvision.models.convnext.LayerNorm2d" in record.getMessage()
        assert "source of its forward" in record.getMessage()


@pytest.mark.parametrize("how", ["no source", "wrapped"])
def test_a_forward_without_a_source_of_its_own_is_left_alone(how):
    """Libraries may patch a class with functools.wraps. inspect then finds the wrapped source."""
    cls = class_of("torchvision.models.convnext", "LayerNorm2d")
    names: dict[str, Any] = {}
    exec("def forward(self, x):\n    return x", names)

    @functools.wraps(cls.forward)
    def patched(self, x):
        return 2 * cls.forward(self, x)

    forward = patched if how == "wrapped" else names["forward"]
    model = nn.Sequential(other_version(cls, forward)(8), nn.LayerNorm(8))
    swap_layer_norm(model)
    assert [is_fused(module) for module in model] == [False, True]


def test_a_function_that_is_called_counts(monkeypatch):
    cls = class_of("timm.layers.norm", "LayerNormExp2d")
    module = sys.modules[cls.__module__]

    def _layer_norm_cf(x, weight, bias, eps):
        return x

    _layer_norm_cf.__module__ = module.__name__
    before = digest(cls)
    monkeypatch.setattr(module, "_layer_norm_cf", _layer_norm_cf)
    assert digest(cls) != before


class Scaled(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


def test_super_is_nn_layer_norm():
    """A forward that calls super's is known to the table only if super is nn.LayerNorm."""
    cls = class_of("diffusers.models.unets.unet_stable_cascade", "SDCascadeLayerNorm")
    assert digest(cls) in swap_table.CLASSES[cls.__module__, cls.__name__]
    over_another = type(cls.__name__, (cls, Scaled), {"__module__": cls.__module__})
    assert digest(over_another) is None
