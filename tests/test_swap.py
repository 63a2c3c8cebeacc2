"""swap_layer_norm: which modules it takes, and that nothing else about a model changes."""

import copy

import torch
from torch import nn
from torch.nn.utils import parametrize

from fused_layernorm import FusedLayerNorm, swap_layer_norm


class OwnForward(nn.LayerNorm):
    """A subclass that computes something else."""

    def forward(self, x):
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


class OwnName(nn.LayerNorm):
    """A subclass that only has a name."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.alias = self.norm
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-3, bias=False))
                for _ in range(2)
            ]
        )
        self.plain = nn.LayerNorm((4, 8), elementwise_affine=False)
        self.own = OwnForward(4)
        self.listed = [self.norm]  # a reference that is no submodule

    def forward(self, x):
        for block in self.blocks:
            x = x + block(self.norm(x))
        return self.own(self.plain(self.listed[0](x)))


def gradients(model, x):
    model.zero_grad()
    model(x).pow(2).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_results_stay(device):
    torch.manual_seed(0)
    model = Model().to(device, torch.float64)
    x = torch.randn(3, 4, 8, device=device, dtype=torch.float64)
    before, grads = model(x), gradients(model, x)
    assert swap_layer_norm(model) is model
    torch.testing.assert_close(model(x), before)
    for one, other in zip(gradients(model, x), grads, strict=True):
        torch.testing.assert_close(one, other)


def test_every_exact_layer_norm_is_swapped():
    model = swap_layer_norm(Model())
    fused = [name for name, m in model.named_modules() if isinstance(m, FusedLayerNorm)]
    assert fused == ["norm", "blocks.0.1", "blocks.1.1", "plain"]
    assert type(model.own) is OwnForward
    assert [type(m) for m in model.modules() if isinstance(m, nn.LayerNorm)].count(
        nn.LayerNorm
    ) == 0


def test_everything_else_stays():
    model = Model().double()
    model.norm.eval()
    model.norm.weight.requires_grad_(False)
    model.norm.note = "kept"
    parameters = dict(model.named_parameters())
    names = [name for name, _ in model.named_modules()]
    state = copy.deepcopy(model.state_dict())
    swap_layer_norm(model)
    assert [name for name, _ in model.named_modules()] == names
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
    assert model.alias is model.norm
    assert model.listed[0] is model.norm
    assert not model.norm.training
    assert model.plain.training
    assert not model.norm.weight.requires_grad
    assert model.norm.note == "kept"
    assert model.blocks[0][1].eps == 1e-3
    assert model.blocks[0][1].bias is None
    assert model.norm.weight.dtype == torch.float64
    assert list(model.state_dict()) == list(state)


def test_swapping_twice_changes_nothing():
    model = swap_layer_norm(Model())
    modules = dict(model.named_modules())
    text = repr(model)
    assert swap_layer_norm(model) is model
    assert dict(model.named_modules()) == modules
    assert repr(model) == text


def test_options_survive_a_swap():
    model = nn.Sequential(FusedLayerNorm(8, activation="gelu", scale=2.0), nn.LayerNorm(8))
    swap_layer_norm(model)
    assert model[0].activation == "gelu"
    assert model[0].scale == 2.0
    assert model[1].activation is None
    assert model[1].scale == 1.0


def test_a_model_that_is_a_layer_norm(device):
    norm = nn.LayerNorm(8).to(device)
    weight = norm.weight
    x = torch.randn(3, 8, device=device)
    before = norm(x)
    new = swap_layer_norm(norm)
    assert isinstance(new, FusedLayerNorm)
    assert new.weight is weight
    torch.testing.assert_close(new(x), before)


def test_a_model_without_layer_norm():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    text = repr(model)
    assert repr(swap_layer_norm(model)) == text


def test_shared_module_stays_one():
    shared = nn.LayerNorm(8)
    model = nn.Sequential(shared, nn.Linear(8, 8), shared)
    swap_layer_norm(model)
    assert model[0] is model[2]
    assert isinstance(model[0], FusedLayerNorm)


def test_shared_parameters_stay_shared():
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
    model[1].weight = model[0].weight
    swap_layer_norm(model)
    assert model[1].weight is model[0].weight


def test_hooks_stay(device):
    norm = nn.LayerNorm(8).to(device)
    model = nn.Sequential(norm)
    calls = []
    handles = [
        norm.register_forward_pre_hook(lambda m, a: calls.append("forward pre")),
        norm.register_forward_hook(lambda m, a, out: calls.append("forward")),
        norm.register_full_backward_pre_hook(lambda m, g: calls.append("backward pre")),
        norm.register_full_backward_hook(lambda m, gi, go: calls.append("backward")),
        norm.register_state_dict_post_hook(lambda m, s, p, meta: calls.append("state dict")),
        norm.register_state_dict_pre_hook(lambda m, p, keep: calls.append("state dict pre")),
        norm.register_load_state_dict_pre_hook(lambda *a: calls.append("load pre")),
        norm.register_load_state_dict_post_hook(lambda m, keys: calls.append("load")),
    ]
    swap_layer_norm(model)
    x = torch.randn(3, 8, device=device, requires_grad=True)
    model(x).sum().backward()
    model.load_state_dict(model.state_dict())
    assert calls == [
        "forward pre",
        "forward",
        "backward pre",
        "backward",
        "state dict pre",
        "state dict",
        "load pre",
        "load",
    ]
    for handle in handles:
        handle.remove()
    calls.clear()
    model(x).sum().backward()
    model.load_state_dict(model.state_dict())
    assert not calls


def test_a_hook_that_changes_the_output_stays(device):
    model = nn.Sequential(nn.LayerNorm(8)).to(device)
    model[0].register_forward_hook(lambda m, a, out: out * 2)
    x = torch.randn(3, 8, device=device)
    before = model(x)
    torch.testing.assert_close(swap_layer_norm(model)(x), before)


def test_state_dicts_load_in_both_directions():
    torch.manual_seed(0)
    stock, fused = Model(), swap_layer_norm(Model())
    for model in (stock, fused):
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    x = torch.randn(3, 4, 8)
    other = swap_layer_norm(Model())
    other.load_state_dict(stock.state_dict())
    torch.testing.assert_close(other(x), stock(x), rtol=1e-4, atol=1e-4)
    other = Model()
    other.load_state_dict(fused.state_dict())
    torch.testing.assert_close(other(x), fused(x), rtol=1e-4, atol=1e-4)


def test_an_optimizer_made_before_goes_on():
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    swap_layer_norm(model)
    weight = model[1].weight.clone()
    model(torch.randn(3, 4)).pow(2).sum().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, weight)


def test_predicate_chooses():
    model = Model()
    asked = []

    def predicate(name, module):
        asked.append((name, type(module)))
        return name.startswith("blocks")

    swap_layer_norm(model, predicate=predicate)
    assert asked == [
        ("norm", nn.LayerNorm),
        ("blocks.0.1", nn.LayerNorm),
        ("blocks.1.1", nn.LayerNorm),
        ("plain", nn.LayerNorm),
        ("own", OwnForward),
    ]
    fused = [name for name, m in model.named_modules() if isinstance(m, FusedLayerNorm)]
    assert fused == ["blocks.0.1", "blocks.1.1"]


def test_subclasses_are_left_alone_unless_the_predicate_takes_them():
    model = nn.Sequential(OwnName(8), OwnForward(8), nn.LayerNorm(8))
    swap_layer_norm(model)
    assert [type(m) for m in model] == [OwnName, OwnForward, FusedLayerNorm]
    swap_layer_norm(model, predicate=lambda name, module: isinstance(module, OwnName))
    assert [type(m) for m in model] == [FusedLayerNorm, OwnForward, FusedLayerNorm]
    x = torch.randn(3, 8)
    torch.testing.assert_close(model[0](x), nn.functional.layer_norm(x, (8,)))


def test_a_forward_of_the_instances_own_is_left_alone():
    """As libraries that offload or patch modules put there."""
    norm = nn.LayerNorm(8)
    stock_forward = norm.forward
    norm.forward = lambda x: stock_forward(x) + 1
    model = swap_layer_norm(nn.Sequential(norm))
    assert type(model[0]) is nn.LayerNorm
    x = torch.randn(3, 8)
    torch.testing.assert_close(model(x), nn.functional.layer_norm(x, (8,)) + 1)


class Positive(nn.Module):
    def forward(self, weight):
        return weight.exp()


def test_parametrized_modules(device):
    model = nn.Sequential(nn.LayerNorm(8)).to(device)
    parametrize.register_parametrization(model[0], "weight", Positive())
    x = torch.randn(3, 8, device=device)
    before, names = model(x), [name for name, _ in model.named_parameters()]
    swap_layer_norm(model)
    assert not isinstance(model[0], FusedLayerNorm)  # its class is not nn.LayerNorm
    swap_layer_norm(model, predicate=lambda name, module: True)
    assert isinstance(model[0], FusedLayerNorm)
    assert parametrize.is_parametrized(model[0], "weight")
    assert [name for name, _ in model.named_parameters()] == names
    torch.testing.assert_close(model(x), before)
    model(x).sum().backward()
    assert model[0].parametrizations.weight.original.grad is not None
    parametrize.remove_parametrizations(model[0], "weight")
    torch.testing.assert_close(model(x), before)


def test_parametrized_after_the_swap(device):
    model = swap_layer_norm(nn.Sequential(nn.LayerNorm(8)).to(device))
    x = torch.randn(3, 8, device=device)
    parametrize.register_parametrization(model[0], "weight", Positive())
    torch.testing.assert_close(
        model(x), nn.functional.layer_norm(x, (8,), model[0].weight, model[0].bias)
    )


def test_spectral_and_weight_norm_hooks(device):
    """The older hooks put a plain tensor in the parameter's place before each call."""
    model = nn.Sequential(nn.LayerNorm((4, 8))).to(device)
    nn.utils.spectral_norm(model[0])
    model.eval()
    x = torch.randn(3, 4, 8, device=device)
    before = model(x)
    torch.testing.assert_close(swap_layer_norm(model)(x), before)


def test_deepcopy_of_a_swapped_model(device):
    model = swap_layer_norm(Model().to(device))
    other = copy.deepcopy(model)
    x = torch.randn(3, 4, 8, device=device)
    assert torch.equal(other(x), model(x))
    assert other.alias is other.norm
    assert type(other.norm) is FusedLayerNorm


def test_transformer_encoder(device):
    """nn.TransformerEncoderLayer reads its norms' weights itself on its fast path."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).to(device)
    x = torch.randn(2, 5, 16, device=device)
    for training in (True, False):
        layer.train(training)
        with torch.set_grad_enabled(training):
            before = layer(x)
            after = swap_layer_norm(copy.deepcopy(layer))(x)
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
