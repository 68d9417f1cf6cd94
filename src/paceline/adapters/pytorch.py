"""PyTorch: modules by the names of their state dict, tensors as arrays."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy

from paceline.adapters.base import Adapter, Plan, pair, same
from paceline.core.bfloat16 import bfloat16, is_bfloat16
from paceline.core.errors import SchemaError
from paceline.core.tree import Array, Tree, child

_ALLOWED = "dense tensors with contents, of a dtype that NumPy has or bfloat16"
_SAMPLE = 64


class TorchAdapter(Adapter):
    """Modules are flat dicts of parameters and persistent buffers, in the state dict's order.

    Tied weights come once, under their first name. What `torch.compile`, `DataParallel` and
    `DistributedDataParallel` wrap around a module, at any depth, does not show in the names.
    """

    def owns(self, value: object) -> bool:
        return isinstance(value, (nn.Module, Tensor))

    def to_tree(self, value: Any, path: str) -> Tree:
        if isinstance(value, Tensor):
            return _array(value, path)
        return {name: _array(t, child(path, name)) for name, t in _tensors(value).items()}

    def tied(self, value: Any) -> dict[str, str]:
        if isinstance(value, Tensor):
            return {}
        first = {id(tensor): name for name, tensor in _tensors(value).items()}
        names = {name: first[id(tensor)] for name, tensor in _walk(value, "")}
        return {name: known for name, known in names.items() if name != known}

    def plan(self, target: Any, tree: Tree, path: str) -> Plan:
        if isinstance(target, Tensor):
            return [_copy(target, tree, path)]
        return [_copy(*part) for part in pair(_tensors(target), tree, path)]

    def to_device(self, leaf: Array, device: Any = None, *, path: str = "$") -> Tensor:
        bits = leaf.view(np.int16) if is_bfloat16(leaf.dtype) else leaf
        # An in-place operation on a tensor over read-only memory kills the process: copy that.
        dense = np.require(bits, bits.dtype.newbyteorder("="), ["C", "A", "W"])
        try:
            tensor = torch.from_numpy(dense)
        except TypeError as e:
            raise SchemaError(f"leaf {path} is {leaf.dtype}, which torch has no dtype for") from e
        if is_bfloat16(leaf.dtype):
            tensor = tensor.view(torch.bfloat16)
        return tensor if device is None else tensor.to(device)

    def fingerprint(self, target: Any) -> object | None:
        """A mark of a module or tensor in the processor's memory; `None` on other devices.

        It changes with every operation in place that autograd counts, and when a tensor is
        replaced. Writes of fused optimisers, and through `.data` or NumPy, are not counted: it sees
        those in tensors of up to 64 elements, and in an even sample of larger ones.
        """
        marks = []
        for t in (target,) if isinstance(target, Tensor) else _tensors(target).values():
            if t.device.type != "cpu" or t.is_inference() or _is_odd(t):
                return None
            marks.append((id(t), t.data_ptr(), t._version, _sample(t)))
        return tuple(marks)


ADAPTER = TorchAdapter()


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, each tensor once."""
    seen: set[int] = set()
    found = {}
    for name, tensor in _walk(module, ""):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    module = _unwrapped(module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, buffer
    for name, part in module._modules.items():
        if part is not None:
            yield from _walk(part, f"{prefix}{name}.")


def _unwrapped(module: nn.Module) -> nn.Module:
    # Importing the class of compiled modules costs a second, so its one part gives it away.
    if "_orig_mod" in module._modules:
        return _unwrapped(module.get_submodule("_orig_mod"))
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return _unwrapped(module.module)
    return module


def _array(tensor: Tensor, path: str) -> Array:
    """`tensor` as an array, which shares its memory where it can."""
    _dtype(tensor, path)
    return _view(tensor.detach().cpu().resolve_conj().resolve_neg())


def _view(tensor: Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(bfloat16())
    array: Array = tensor.numpy()
    return array


def _copy(target: Tensor, declared: Tree, path: str) -> functools.partial[None]:
    """The checked copy of an array into `target`."""
    source = same(path, _dtype(target, path), tuple(target.shape), declared)
    if any(stride == 0 and n > 1 for stride, n in zip(target.stride(), target.shape, strict=True)):
        raise SchemaError(f"leaf {path} is an expanded tensor, whose elements share memory")
    return functools.partial(_fill, target, source)


def _fill(target: Tensor, source: Array) -> None:
    place = target.detach()
    if place.device.type != "cpu" or place.is_conj() or place.is_neg():
        place.copy_(ADAPTER.to_device(source))
    else:
        np.copyto(_view(place), source)
        # Autograd must learn of the change: a backward through the old values is an error.
        increment_version(target)


def _dtype(tensor: Tensor, path: str) -> np.dtype[Any]:
    """The NumPy dtype of a tensor that can travel."""
    dtype = None if _is_odd(tensor) else _numpy_dtype(tensor.dtype)
    if dtype is None:
        kind = f"{tensor.layout} {tensor.dtype} tensor on {tensor.device}".replace("torch.", "")
        state = "lazy " if is_lazy(tensor) else "nested " if tensor.is_nested else ""
        raise SchemaError(f"leaf {path} is a {state}{kind}; allowed are {_ALLOWED}")
    return dtype


def _is_odd(tensor: Tensor) -> bool:
    return (
        tensor.layout is not torch.strided
        or tensor.is_meta
        or tensor.is_quantized
        or tensor.is_nested
        or is_lazy(tensor)
    )


@functools.lru_cache(maxsize=64)
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    try:
        return _view(torch.empty(0, dtype=dtype)).dtype
    except TypeError:
        return None


def _sample(tensor: Tensor) -> bytes:
    view = _view(tensor.detach().resolve_conj().resolve_neg())
    if view.size <= _SAMPLE:
        return view.tobytes()
    sample: Array = view.flat[:: -(-view.size // _SAMPLE)]
    return sample.tobytes()
