"""`SyncBatchNorm` as a module: how it is made, converted and copied. Nothing here communicates."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

from mpisgd import InvalidArgument, ShapeMismatch, SyncBatchNorm

convert = SyncBatchNorm.convert_sync_batchnorm


def test_the_constructor_is_that_of_torch():
    theirs = list(inspect.signature(nn.SyncBatchNorm.__init__).parameters)
    ours = list(inspect.signature(SyncBatchNorm.__init__).parameters)
    assert [name for name in ours if name != "bias"] == [name for name in theirs if name != "bias"]


OPTIONS = [
    {},
    {"eps": 1e-3, "momentum": 0.3},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
    {"dtype": torch.float64},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_a_converted_layer_holds_the_same_tensors_and_options(kind, options):
    norm = kind(3, **options).eval()
    if norm.affine:
        norm.weight.requires_grad_(False)
    ours = convert(norm)
    assert type(ours) is SyncBatchNorm
    assert ours.extra_repr() == norm.extra_repr()
    assert not ours.training
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        assert getattr(ours, name) is getattr(norm, name), name
    assert ours.state_dict().keys() == norm.state_dict().keys()


def test_a_layer_without_bias():
    ours = SyncBatchNorm(3, bias=False)
    assert ours.bias is None
    assert convert(ours).bias is None
    assert convert(ours) is not ours


class Net(nn.Module):
    """Batch norms at several depths, one of them used twice, under two names."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(2)
        self.again = self.norm
        self.nothing = None
        self.layers = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Sequential(nn.BatchNorm2d(2), self.norm))
        self.other = nn.ModuleDict({"instance": nn.InstanceNorm2d(2), "layer": nn.LayerNorm(2)})


def test_every_batch_norm_is_converted_and_nothing_else():
    net = Net()
    names = [name for name, _ in net.named_modules(remove_duplicate=False)]
    tensors = list(net.state_dict(keep_vars=True).values())
    assert convert(net) is net
    assert [name for name, _ in net.named_modules(remove_duplicate=False)] == names
    assert all(a is b for a, b in zip(tensors, net.state_dict(keep_vars=True).values(), strict=True))
    kinds = {name: type(module) for name, module in net.named_modules(remove_duplicate=False)}
    assert {name for name, kind in kinds.items() if kind is SyncBatchNorm} == {
        "norm", "again", "layers.1.0", "layers.1.1",
    }  # fmt: skip
    assert net.again is net.norm
    assert net.layers[1][1] is net.norm


def test_a_subclass_converts_to_itself():
    class Mine(SyncBatchNorm):
        pass

    assert type(Mine.convert_sync_batchnorm(nn.BatchNorm1d(2))) is Mine


def test_hooks_are_not_taken_over():
    norm = nn.BatchNorm1d(2)
    norm.register_forward_hook(lambda *_: 1 / 0)
    convert(norm).eval()(torch.randn(3, 2))


def test_evaluation_is_that_of_torch():
    norm = nn.BatchNorm2d(3)
    norm(torch.randn(4, 3, 2, 2) * 3 + 1)
    images = torch.randn(4, 3, 2, 2)
    assert torch.equal(convert(norm.eval())(images), norm(images))
    bare = nn.BatchNorm2d(3, track_running_stats=False).eval()
    assert torch.equal(convert(bare)(images), bare(images))


def test_a_lazy_layer_is_refused_until_it_knows_its_channels():
    net = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(InvalidArgument, match="LazyBatchNorm1d does not know its number of channels"):
        convert(net)
    net(torch.randn(4, 3))
    assert convert(net)[0].num_features == 3


@pytest.mark.parametrize("make", [lambda group: SyncBatchNorm(2, process_group=group),
                                  lambda group: convert(nn.BatchNorm1d(2), group)])  # fmt: skip
def test_a_process_group_must_be_one_of_ours(make):
    with pytest.raises(InvalidArgument, match=r"process_group is a int; expected what mpisgd\.new_group"):
        make(3)


def test_wrong_inputs_are_refused_in_evaluation():
    norm = SyncBatchNorm(3).eval()
    for shape, error, text in [
        ((3,), InvalidArgument, r"expected at least 2D input \(got 1D input\)"),
        ((2, 0), InvalidArgument, "number of input channels should be non-zero"),
        ((2, 4), ShapeMismatch, "the input has 4 channels, the layer num_features=3"),
    ]:
        with pytest.raises(error, match=text):
            norm(torch.zeros(shape))


def test_copies_and_state_dicts():
    norm = convert(nn.BatchNorm1d(3))
    twin = copy.deepcopy(norm)
    twin.load_state_dict(nn.BatchNorm1d(3).state_dict())
    assert twin.process_group is None
