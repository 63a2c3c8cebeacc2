# SPDX-License-Identifier: Apache-2.0
"""What the tests of swapped modules share: a swapped copy, results with gradients, copies."""

import copy
import inspect
import io
import pickle
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import fused_layernorm
from fused_layernorm import is_fused, layer_norm, swap_norms, unswap_norms
from fused_layernorm.swap import source

D = 16


def small_model():
    return nn.Sequential(nn.Linear(8, D), nn.LayerNorm(D), nn.ReLU(), nn.Linear(D, 3))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "gelu": {"activation": "gelu", "scale": 0.5}, "silu": {"activation": "silu"},
    "out_dtype": {"out_dtype": torch.float64},
}  # fmt: skip


class EveryNorm(nn.Module):
    """A norm of every kind, those with options with each that is named."""

    def __init__(self, *names):
        super().__init__()
        fl, options = fused_layernorm, [OPTIONS[name] for name in names]
        self.norms = nn.ModuleList(fl.FusedLayerNorm(16, **o) for o in options)
        self.add_norms = nn.ModuleList(fl.FusedAddLayerNorm((4, 16), **o) for o in options)
        self.linear, self.modulation = nn.Linear(16, 16), nn.Linear(16, 48)
        self.rms = fl.FusedRMSNorm(16, weight_offset=1.0)
        self.ada = fl.FusedAdaLayerNorm(16)
        self.add_ada = fl.FusedAddAdaLayerNorm(16, elementwise_affine=True)
        for name, parameter in self.named_parameters():
            if "modulation" not in name:
                nn.init.normal_(parameter, 0.2, 0.5)

    def forward(self, x):
        outputs: list[torch.Tensor] = []
        for norm, add_norm in zip(self.norms, self.add_norms, strict=True):
            outputs += add_norm(self.linear(norm(x).to(x.dtype)), x)
        gate, shift, scale = self.modulation(x).chunk(3, -1)
        outputs += self.add_ada(self.ada(self.rms(x), shift, scale), x, gate, shift, scale)
        return tuple(outputs)


class Accepted(nn.LayerNorm):
    """A subclass that a predicate accepts."""


class Registered(nn.Module):
    """A class that register_swap knows, with arguments by keyword."""

    def __init__(self, size):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(size))

    def forward(self, x, *, shift=0.0):
        return F.layer_norm(x, self.gamma.shape, self.gamma) + shift


def registered_forward(self, x, *, shift=0.0):
    return layer_norm(x, self.gamma) + shift


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def swapped(module, swap=swap_norms):
    """A copy, swapped inside a container, so that nothing but the module itself is looked at."""
    model = swap(nn.Sequential(copy.deepcopy(module)))
    assert is_fused(model[0])
    return model[0]


def beside(module):
    """A copy, swapped with the neighbours of its norms."""
    return swap_norms(copy.deepcopy(module), neighbours=True)


def give_own_class(module, see=lambda: None):
    """A subclass whose forward doubles the result; as a tool gives it, also to a swapped module."""
    cls: Any = type(module)

    class Own(cls):
        def forward(self, *args, **kwargs):
            see()
            return 2 * super().forward(*args, **kwargs)

    module.__class__ = Own


def digest(cls):
    """That of the source of a class's forward, None if it cannot be read."""
    found = source.read(cls)
    return None if found is None else found.digest


def operators_of(call):
    """The names of the package's operators and kernels that run."""
    with torch.profiler.profile() as profile:
        call()
    return {event.name for event in profile.events() if "fused_layernorm::" in event.name}


def fused(model):
    return [name for name, module in model.named_modules() if is_fused(module)]


def saved_and_loaded(module, **how):
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    return torch.load(stream, **how)


def copies(module):
    """The module copied, pickled and saved, each of the class that it has."""
    made = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    made.append(saved_and_loaded(module, weights_only=False))
    assert [type(one) for one in made] == 3 * [type(module)]
    return made


def results(module, *inputs):
    """(the output, the gradients) for the same random dy in every call."""
    inputs = tuple(one.detach().requires_grad_() for one in inputs)
    y = module(*inputs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()  # in any dtype
    dy = torch.empty_like(y).copy_(dy)  # in y's order of memory, as the next layer would give it
    return y, torch.autograd.grad(y, [*inputs, *module.parameters()], dy)


def is_floating(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def outcome(model, inputs, run=None):
    """By name, for random dy: outputs, and the gradients of parameters and of inputs that have one.
    Inputs are all arguments, by name or in their order."""
    is_named = isinstance(inputs, dict)
    given: dict[Any, Any] = dict(inputs.items() if is_named else enumerate(inputs))
    given |= {key: x.detach().requires_grad_() for key, x in given.items() if is_floating(x)}
    if run is not None:
        outputs = run(model, given)
    else:
        outputs = model(**given) if is_named else model(*given.values())
    outputs = getattr(outputs, "sample", outputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    dys = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
    wanted = {key: x for key, x in given.items() if is_floating(x)} | dict(model.named_parameters())
    grads = torch.autograd.grad(outputs, [*wanted.values()], dys, allow_unused=True)
    found = {f"gradient of {key}": grad for key, grad in zip(wanted, grads, strict=True)}
    found = {f"output {n}": y.detach() for n, y in enumerate(outputs)} | found
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def same(found, expected, tolerance, strides=False, least=0.1):
    """Asserts equal dtypes and shapes, of outputs also strides if asked for, and errors within
    tolerance in the 2-norm, relative to the tensor's norm, or to `least` if that is greater: some
    gradients are zero but for roundings."""
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        assert found[name].dtype == want.dtype, name
        assert found[name].shape == want.shape, name
        assert found[name].stride() == want.stride() or "output" not in name or not strides
        error = (found[name] - want).double().norm() / want.double().norm().clamp(min=least)
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


def check_swap_and_unswap(module, kind, swap=swap_norms, unswap=unswap_norms, copied=True):
    """A swapped copy looks like the module, but for how it prints itself, copies of it are of its
    class, and one that is unswapped is as the module."""
    cls, text, attributes = type(module), repr(module), {*vars(module)}
    new = swapped(module, swap)
    assert isinstance(new, cls)
    if cls in (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm):
        assert type(new) is getattr(fused_layernorm, f"Fused{cls.__name__}")
        assert repr(new).startswith(f"{kind}(")
    else:
        assert repr(new).startswith(f"{kind}[{cls.__name__}](")
        for name in ("__name__", "__qualname__", "__module__"):
            assert getattr(type(new), name) == getattr(cls, name)
        assert new._get_name() == module._get_name()
    assert list(new.state_dict()) == list(module.state_dict())
    own, stock = (inspect.signature(one.forward).parameters for one in (new, module))
    assert [*own] == [*stock]
    assert swap(new) is new
    for one in (*(copies(new) if copied else ()), new):
        assert type(unswap(one)) is cls
        assert repr(one) == text
        assert {*vars(one)} == attributes


def ulps(one, other):
    """By how many numbers of their dtype, of half precision, the elements are apart."""
    places = []
    for tensor in (one, other):
        bits = tensor.contiguous().view(torch.int16).int()
        places.append(torch.where(bits < 0, -(bits & 0x7FFF), bits))
    return (places[0] - places[1]).abs()


def assert_same_roundings(y, expected, x_dtype=torch.float32):
    """At most one number apart in half precision, and equal in 99.9% of the elements.

    Where xhat lies between two numbers of half precision, the last bit of rstd decides to which one
    it is rounded. What is multiplied with it may double the distance.
    """
    assert y.dtype == expected.dtype
    assert y.shape == expected.shape
    if y.dtype in (torch.bfloat16, torch.float16):
        apart = ulps(y, expected)
        assert apart.max() <= 2
        assert (apart <= 1).float().mean() >= 0.9998
        assert (apart == 0).float().mean() >= 0.999
    elif x_dtype == torch.float32:
        torch.testing.assert_close(y, expected, rtol=3e-6, atol=3e-6)
    else:
        alike = torch.isclose(y, expected, rtol=3e-6, atol=3e-6)
        assert alike.float().mean() >= 0.999
        torch.testing.assert_close(y, expected, rtol=2**-7, atol=3e-6)


def assert_same_gradients(grads, expected, coarsest):
    """The class rounds between the steps of its backward, too, and the fused one only once."""
    # A float32 sum over rows or columns depends on its order, too.
    tolerance = (16 if coarsest == torch.float32 else 4) * torch.finfo(coarsest).eps
    for found, grad in zip(grads, expected, strict=True):
        assert found.dtype == grad.dtype
        scale = float(grad.abs().sum() and grad.abs().max()) + 1
        torch.testing.assert_close(found / scale, grad / scale, rtol=tolerance, atol=tolerance)
