"""PyTorch modules and tensors: out to arrays and back in place, bit by bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.adapters.base import adapter, adapter_for, convert, fingerprint, read_into
from paceline.adapters.pytorch import ADAPTER
from paceline.core.bfloat16 import bfloat16
from paceline.core.errors import SchemaError
from paceline.core.tree import Array, Tree, flatten, unflatten
from paceline.testing.adapters import check_adapter

# torch's compiler uses, when it is imported, what torch itself calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")


class Tied(nn.Module):
    """A language model's way: one matrix to embed and to score."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5)
        self.out.weight = self.emb.weight


class Nested(nn.Module):
    """A user's own part called `module` is part of the names."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner


class Mixed(nn.Module):
    """One leaf of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.brain = nn.Parameter(torch.randn(3, 2).bfloat16())
        self.turned = nn.Parameter(torch.randn(4, 3).t())
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("wave", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("small", torch.randn(3).half())
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("absent", None)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def compiled(net: nn.Module) -> nn.Module:
    """`net` in the wrapper of a compiler that is not run."""
    wrapper = torch.compile(net)
    assert isinstance(wrapper, nn.Module)
    return wrapper


def published(value: Any) -> Tree:
    """What a variable holds of `value`: a copy in read-only memory."""
    flat = flatten(value, convert)
    block = np.zeros(flat.nbytes, np.uint8)
    flat.write(block.data)
    block.flags.writeable = False
    return unflatten(flat.layout, flat.values, block)


def contents(module: nn.Module) -> dict[str, list[int]]:
    """The bytes of a module, read in torch's own way."""
    return {
        name: tensor.reshape(-1).view(torch.uint8).tolist()
        for name, tensor in module.state_dict().items()
    }


MAKERS: list[Callable[[], Any]] = [
    mlp,
    Mixed,
    Tied,
    nn.Identity,
    lambda: Nested(mlp()),
    lambda: compiled(mlp()),
    lambda: nn.DataParallel(mlp()),
    lambda: nn.LSTM(2, 3),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
    lambda: torch.randn(3, 4),
    lambda: torch.randn(3, 4).bfloat16(),
    lambda: torch.randn(4, 3)[::2].t(),
    lambda: torch.tensor(3),
    lambda: torch.randn(3, dtype=torch.complex64).conj(),
    lambda: nn.Parameter(torch.randn(1000)),
]


@pytest.mark.parametrize("make", MAKERS)
def test_the_torch_adapter_keeps_the_contract(make: Callable[[], Any]) -> None:
    check_adapter(ADAPTER, make)


@pytest.mark.parametrize(
    "make", [mlp, Tied, lambda: nn.LSTM(2, 3), lambda: Nested(Mixed()), nn.Identity]
)
def test_names_come_in_the_order_of_the_state_dict(make: Callable[[], nn.Module]) -> None:
    module = make()
    names = [name for name in module.state_dict() if name != "out.weight"]
    assert list(ADAPTER.to_tree(module, "$")) == names


def test_an_array_shares_the_memory_of_its_tensor() -> None:
    net = mlp()
    tree = ADAPTER.to_tree(net, "$")
    for name, tensor in net.state_dict().items():
        assert tree[name].ctypes.data == tensor.data_ptr()


def test_tied_weights_travel_once_and_stay_tied() -> None:
    source, target = Tied(), Tied()
    tree = published(source)
    assert list(tree) == ["emb.weight", "out.bias"]
    read_into(target, tree)
    assert target.out.weight is target.emb.weight
    assert contents(target) == contents(source)


@pytest.mark.parametrize(
    "wrap",
    [
        compiled,
        nn.DataParallel,
        lambda net: nn.DataParallel(compiled(net)),
        lambda net: compiled(nn.DataParallel(net)),
    ],
)
def test_wrappers_do_not_show_in_names(wrap: Callable[[nn.Module], nn.Module]) -> None:
    net = mlp()
    inside = nn.ModuleDict({"body": wrap(net)})
    tree = published(wrap(net))
    assert list(tree) == list(net.state_dict())
    assert list(published(inside)) == [f"body.{name}" for name in net.state_dict()]
    target = mlp()
    read_into(target, tree)
    assert contents(target) == contents(net)
    read_into(wrap(target), published(mlp()))
    assert contents(target) != contents(net)


def test_a_part_of_the_users_called_module_keeps_its_name() -> None:
    net = Nested(nn.Linear(2, 2))
    assert list(published(net)) == ["module.weight", "module.bias"]
    assert list(published(nn.DataParallel(net))) == ["module.weight", "module.bias"]
    averaged = torch.optim.swa_utils.AveragedModel(net)
    assert list(published(averaged))[:2] == ["n_averaged", "module.module.weight"]


def test_a_compiled_container_without_parts_keeps_its_own_parameters() -> None:
    empty = nn.Sequential()
    empty.scale = nn.Parameter(torch.ones(2))
    assert list(published(compiled(empty))) == ["scale"]


def test_buffers_travel_when_they_are_persistent() -> None:
    tree = published(Mixed())
    assert list(tree) == ["brain", "turned", "mask", "wave", "small", "steps", "none"]
    norm = published(nn.BatchNorm1d(2))
    assert norm["num_batches_tracked"].dtype == np.int64
    assert norm["num_batches_tracked"].shape == ()


def test_bfloat16_keeps_its_bits() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    source = bits.view(torch.bfloat16)
    tree = published({"x": source})
    assert tree["x"].dtype == bfloat16()
    assert np.array_equal(tree["x"].view(np.int16), bits.numpy())
    target = torch.zeros(1 << 16, dtype=torch.bfloat16)
    read_into({"x": target}, tree)
    assert torch.equal(target.view(torch.int16), bits)


def test_read_into_keeps_identity_gradients_and_layout() -> None:
    net = Mixed()
    net.brain.requires_grad_(False)
    net.turned.grad = torch.ones(3, 4)
    before = {name: (id(t), t.data_ptr(), t.stride()) for name, t in net.named_parameters()}
    read_into(net, published(Mixed()))
    after = {name: (id(t), t.data_ptr(), t.stride()) for name, t in net.named_parameters()}
    assert after == before
    assert not net.turned.is_contiguous()
    assert net.turned.requires_grad
    assert not net.brain.requires_grad
    assert torch.equal(net.turned.grad, torch.ones(3, 4))


def test_a_module_can_stand_inside_a_tree_and_beside_arrays() -> None:
    source = {"net": mlp(), "scale": np.full(2, 3.0), "extra": [torch.ones(2)]}
    target = {"net": mlp(), "scale": np.zeros(2), "extra": [torch.zeros(2)]}
    tree = published(source)
    assert next(iter(tree["net"])) == "0.weight"
    read_into(target, tree)
    assert published(target)["net"]["0.weight"].tobytes() == tree["net"]["0.weight"].tobytes()
    assert target["scale"].tolist() == [3, 3]  # type: ignore[attr-defined]
    assert target["extra"][0].tolist() == [1, 1]  # type: ignore[index]


def test_a_state_dict_is_a_tree_like_its_module() -> None:
    source, target = mlp(), mlp()
    read_into(target.state_dict(), published(source))
    assert contents(target) == contents(source)


def test_a_backward_through_values_that_were_replaced_is_an_error() -> None:
    net = nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    y = net(net(x)).sum()
    read_into(net, published(nn.Linear(2, 2)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def array(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


ODD = [
    ({"weight": array(2, 3)}, r"leaf \$\.net\.bias of the target is not declared at all"),
    ({"weight": array(2, 3), "bias": array(2), "0.x": array(4)},
     r"leaf \$\.net\['0\.x'\] is missing, declared float32\[4\]"),
    ({"weight": array(2, 3), "bias": array(3)},
     r"leaf \$\.net\.bias is float32\[2\], declared float32\[3\]"),
    ({"weight": array(2, 3), "bias": array(2, dtype=np.float64)},
     r"leaf \$\.net\.bias is float32\[2\], declared float64\[2\]"),
    ({"weight": array(2, 3), "bias": array(2, dtype=bfloat16())},
     r"leaf \$\.net\.bias is float32\[2\], declared bfloat16\[2\]"),
    ({"weight": array(2, 3), "bias": None}, r"leaf \$\.net\.bias is float32\[2\], declared None"),
    (array(3), r"\$\.net has 2 named parts, declared float32\[3\]"),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "message"), ODD)
def test_an_odd_leaf_is_named_before_anything_changes(tree: Tree, message: str) -> None:
    net = nn.Linear(3, 2)
    before, mark = contents(net), fingerprint(net)
    with pytest.raises(SchemaError, match=rf"^read_into: {message}"):
        read_into({"first": torch.zeros(1), "net": net}, {"first": array(1), "net": tree})
    assert contents(net) == before
    assert fingerprint(net) == mark


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.zeros(2).to_sparse(), "sparse_coo float32 tensor on cpu"),
        (torch.zeros(2, device="meta"), "strided float32 tensor on meta"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "strided float8_e4m3fn tensor on cpu"),
        (nn.LazyLinear(3).weight, "lazy strided float32 tensor on cpu"),
    ],
)
def test_a_tensor_without_plain_contents_is_refused(tensor: Tensor, kind: str) -> None:
    holder = nn.Module()
    holder.register_buffer("x", tensor)
    wanted = rf"^leaf \$\.x is a {kind}; allowed are dense tensors with contents, of a dtype"
    with pytest.raises(SchemaError, match=wanted):
        flatten({"x": tensor}, convert)
    with pytest.raises(SchemaError, match=wanted):
        ADAPTER.plan(tensor, array(2), "$.x")
    with pytest.raises(SchemaError, match=wanted):
        ADAPTER.plan(holder, {"x": array(2)}, "$")


def test_an_expanded_tensor_is_sent_but_not_read_into() -> None:
    expanded = torch.ones(1).expand(4)
    assert published({"x": expanded})["x"].tolist() == [1, 1, 1, 1]
    with pytest.raises(SchemaError, match=r"^read_into: leaf \$\.x is an expanded tensor, whose"):
        read_into({"x": expanded}, {"x": array(4)})


def test_what_is_no_module_is_refused() -> None:
    optimizer = torch.optim.SGD(mlp().parameters())
    assert adapter_for(optimizer) is None
    with pytest.raises(SchemaError, match=r"^leaf \$\.opt is a torch\.optim\.sgd\.SGD; allowed"):
        flatten({"opt": optimizer}, convert)


def test_the_adapter_is_found_by_name_and_by_object() -> None:
    assert adapter("torch") is ADAPTER
    for value in (mlp(), Tied(), torch.zeros(1), nn.Parameter(torch.zeros(1))):
        assert adapter_for(value) is ADAPTER


def fused_step(net: nn.Module) -> None:
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def perturb(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data.add_(0.5)


def replace(net: nn.Module) -> None:
    net.get_submodule("0").bias = nn.Parameter(torch.zeros(4))


def swap_memory(net: nn.Module) -> None:
    bias = net.get_parameter("0.bias")
    bias.data = bias.detach().clone()


def add_in_place(net: nn.Module) -> None:
    with torch.no_grad():
        next(net.parameters()).flatten()[0].add_(1)


def touch_a_buffer(net: nn.Module) -> None:
    net.train()
    net(torch.ones(2, 3))


@pytest.mark.parametrize(
    "change", [fused_step, perturb, replace, swap_memory, add_in_place, touch_a_buffer]
)
def test_the_fingerprint_sees_a_change(change: Callable[[nn.Module], None]) -> None:
    net = mlp()
    mark = fingerprint({"net": net})
    assert mark is not None
    net.eval()
    net(torch.ones(2, 3))
    assert fingerprint({"net": net}) == mark
    change(net)
    assert fingerprint({"net": net}) != mark


def test_the_fingerprint_sees_uncounted_writes_anywhere_in_64_elements() -> None:
    tensor = torch.zeros(4, 16)
    for element in tensor.data.view(-1):
        mark = fingerprint(tensor)
        element.data.add_(1)
        assert fingerprint(tensor) != mark


def test_there_is_no_telling_for_what_autograd_does_not_count() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2)
    assert fingerprint(tensor) is None
    assert fingerprint(torch.zeros(2, device="meta")) is None
    assert fingerprint({"x": torch.zeros(2), "y": np.zeros(2)}) is None


def test_an_inference_tensor_can_be_read_into() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2)
    read_into(tensor, np.ones(2, np.float32))
    assert tensor.tolist() == [1, 1]


def test_to_device_shares_writable_memory_only() -> None:
    leaf = np.zeros(3, np.float32)
    ADAPTER.to_device(leaf).add_(1)
    assert leaf.tolist() == [1, 1, 1]
    leaf.flags.writeable = False
    ADAPTER.to_device(leaf).add_(1)
    assert leaf.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "leaf", [np.arange(6.0)[::-2], np.arange(3, dtype=">i4"), np.array(3), np.zeros((0, 2))]
)
def test_to_device_takes_any_layout(leaf: Array) -> None:
    assert ADAPTER.to_device(leaf, "cpu").tolist() == leaf.tolist()


def test_to_device_names_a_dtype_that_torch_lacks() -> None:
    with pytest.raises(SchemaError, match=r"^leaf \$\.name is <U3, which torch has no dtype for"):
        ADAPTER.to_device(np.array(["abc"]), path="$.name")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_module_on_an_accelerator_makes_the_round_trip() -> None:
    check_adapter(ADAPTER, lambda: mlp().cuda())
    source, target = mlp().cuda(), mlp()
    read_into(target, published(source))
    assert contents(target) == contents(source.cpu())
