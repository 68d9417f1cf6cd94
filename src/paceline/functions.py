"""Functions on their way to a worker: pickled by value where need be, handles by name."""

import contextlib
import dis
import functools
import io
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import cloudpickle

from paceline.core.errors import FunctionError

PROTOCOL = 5

# Most values of a large captured structure are of these types: they need no closer look.
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def dump(value: object) -> bytes:
    """Turn a function, with all that it captured, into bytes for `load` in another process.

    Functions and classes of the main script or a notebook, lambdas and closures go by value; what
    can be imported goes by name. An object whose type has a method `__paceline_handle__` goes as
    the tuple of strings that it returns. Standard output and error become those of the worker.

    Raises:
        FunctionError: something captured cannot travel; the message names the innermost such value.
            Open files, and torch tensors and JAX arrays outside the CPU's memory, are refused too.
    """
    try:
        return _pickle(value)
    except Exception as error:
        root = _Place("", name_of(value), "")
        culprit = None
        with contextlib.suppress(RecursionError):  # nested too deeply to be searched
            culprit = _find(root, value, {})
        message = _explain(value, culprit or _Culprit(root, value, error))
        raise FunctionError(message) from error


def load(data: bytes, resolve: Callable[[tuple[str, ...]], object], remedy: str = "") -> object:
    """Rebuild what `dump` was given; `resolve` turns the name of each handle into the handle.

    Runs code from `data`: only for bytes that a process's own launcher sent it.

    Raises:
        FunctionError: a module is missing here, and there is a `remedy`, which the message ends in.
    """
    try:
        return _Unpickler(io.BytesIO(data), resolve).load()
    except ModuleNotFoundError as e:
        if not remedy:
            raise
        raise FunctionError(f"{e} {remedy}") from e


def _reduce_code(code: types.CodeType) -> tuple[Callable[..., object], tuple[object, ...]]:
    """Keep the name of the file, which cloudpickle drops: tracebacks show the user's own lines."""
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _code_in_file, (code.co_filename, make, *arguments)


def _code_in_file(
    file: str, make: Callable[..., types.CodeType], *arguments: object
) -> types.CodeType:
    return make(*arguments).replace(co_filename=file)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    # The name that pickle looks for: how values of each type are reduced.
    dispatch_table: ClassVar[ChainMap[Any, Any]] = ChainMap(
        {types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )

    def persistent_id(self, value: object) -> tuple[str, ...] | str | None:
        if type(value) in _PLAIN:
            return None
        # A notebook has objects of its own in their place; the worker has others again.
        if value is sys.stdout or value is sys.stderr:
            return "stdout" if value is sys.stdout else "stderr"
        if hasattr(type(value), "__paceline_handle__"):
            name: tuple[str, ...] = value.__paceline_handle__()  # type: ignore[attr-defined]
            return name
        if refusal := _refusal(value):
            raise pickle.PicklingError(refusal.what)
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, resolve: Callable[[tuple[str, ...]], object]) -> None:
        super().__init__(file)
        self._resolve = resolve

    def persistent_load(self, name: tuple[str, ...] | str) -> object:
        return getattr(sys, name) if isinstance(name, str) else self._resolve(name)


def _pickle(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=PROTOCOL).dump(value)
    return file.getvalue()


@dataclass(frozen=True)
class _Refusal:
    """Why a value stays here although it might pickle, and what to do instead."""

    what: str
    instead: str


def _refusal(value: object) -> _Refusal | None:
    if isinstance(value, io.IOBase):
        with contextlib.suppress(OSError, ValueError):  # in memory, or closed
            value.fileno()
            name = getattr(value, "name", None)
            what = "an open file" if name is None else f"an open file ({name!r})"
            return _Refusal(what, "open it inside the function")
    # A value can be of torch only when torch was imported.
    if torch := sys.modules.get("torch"):
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return _Refusal(f"a torch tensor on {value.device}", "send a copy of it on the CPU")
        if isinstance(value, torch.nn.Module):
            for tensor in (*value.parameters(), *value.buffers()):
                if tensor.device.type != "cpu":
                    return _Refusal(
                        f"a torch module on {tensor.device}", "create it inside the function"
                    )
    if (jax := sys.modules.get("jax")) and isinstance(value, jax.Array):
        if isinstance(value, jax.core.Tracer):
            return _Refusal("a traced JAX array", "send the function from outside jax.jit")
        away = sorted(str(each) for each in value.devices() if each.platform != "cpu")
        if away:
            return _Refusal(f"a JAX array on {', '.join(away)}", "send a copy of it on the CPU")
    return None


@dataclass(frozen=True)
class _Place:
    """Where a value was found: `label` 'captured variable', `path` 'config.log', `owner` 'f'."""

    label: str
    path: str
    owner: str

    def below(self, step: str) -> "_Place":
        return _Place(self.label, self.path + step, self.owner)


@dataclass(frozen=True)
class _Culprit:
    place: _Place
    value: object
    error: Exception


def _find(place: _Place, value: object, seen: dict[int, object]) -> _Culprit | None:
    """Search `value` and all that it refers to for the innermost value that cannot be pickled.

    `seen` keeps what was looked at alive, since the identity of a dead object is used again.
    """
    if type(value) in _PLAIN or id(value) in seen:
        return None
    seen[id(value)] = value
    try:
        _pickle(value)
    except Exception as error:
        if _refusal(value) is None:
            for inner_place, inner in _parts(place, value):
                if found := _find(inner_place, inner, seen):
                    return found
        return _Culprit(place, value, error)
    return None


def _parts(place: _Place, value: object) -> Iterator[tuple[_Place, object]]:
    """Yield what goes along when `value` is pickled, each with its place."""
    match value:
        case types.FunctionType():
            yield from _function_parts(value)
        case types.MethodType():
            yield _Place("attribute", "self", value.__func__.__name__), value.__self__
            yield place, value.__func__
        case functools.partial():
            yield place.below(".func"), value.func
            for index, argument in enumerate(value.args):
                yield _Place("argument", str(index), name_of(value)), argument
            for name, argument in value.keywords.items():
                yield _Place("argument", name, name_of(value)), argument
        case property():
            yield from ((place, part) for part in (value.fget, value.fset, value.fdel))
        case staticmethod() | classmethod():
            yield place, value.__func__
        case type():
            for base in value.__bases__:
                yield _Place("base class", base.__name__, value.__name__), base
            for name, attribute in tuple(vars(value).items()):
                yield _Place("attribute", f"{value.__name__}.{name}", ""), attribute
        case dict():
            for key, member in tuple(value.items()):
                yield place.below(f"[{key!r}]"), key
                yield place.below(f"[{key!r}]"), member
        case list() | tuple():
            for index, member in enumerate(value):
                yield place.below(f"[{index}]"), member
        case set() | frozenset():
            yield from ((place.below("{}"), member) for member in tuple(value))
    if not isinstance(value, type | types.FunctionType | types.MethodType | functools.partial):
        yield from _instance_parts(place, value)


def _function_parts(function: types.FunctionType) -> Iterator[tuple[_Place, object]]:
    name, code = function.__name__, function.__code__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield _Place("captured variable", variable, name), cell.cell_contents
    for variable in sorted(_globals_used(code) & function.__globals__.keys()):
        yield _Place("global", variable, name), function.__globals__[variable]
    count = len(function.__defaults__ or ())
    positional = code.co_varnames[: code.co_argcount]
    for parameter, default in zip(
        positional[len(positional) - count :], function.__defaults__ or (), strict=True
    ):
        yield _Place("default of parameter", parameter, name), default
    for parameter, default in (function.__kwdefaults__ or {}).items():
        yield _Place("default of parameter", parameter, name), default
    for attribute, held in tuple(vars(function).items()):
        yield _Place("attribute", f"{name}.{attribute}", ""), held


def _globals_used(code: types.CodeType) -> set[str]:
    """The globals that a function reads, those of the functions written inside it included."""
    used = {
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            used |= _globals_used(constant)
    return used


def _instance_parts(place: _Place, value: object) -> Iterator[tuple[_Place, object]]:
    """Yield the class of an object and the attributes that it hands to pickle."""
    yield place, type(value)
    try:
        reduced: Any = value.__reduce_ex__(PROTOCOL)
    except Exception:  # the object itself is what cannot be pickled
        return
    state = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None
    # With slots, the state is a pair: the attributes of the dictionary and those of the slots.
    for attributes in state if isinstance(state, tuple) else (state,):
        if isinstance(attributes, dict):
            for name, attribute in attributes.items():
                yield place.below(f".{name}"), attribute


def _explain(value: object, culprit: _Culprit) -> str:
    refusal = _refusal(culprit.value)
    what = refusal.what if refusal else f"{_type_name(culprit.value)} ({_reason(culprit.error)})"
    instead = refusal.instead if refusal else "create it inside the function"
    place, name = culprit.place, name_of(value)
    where = "it" if culprit.value is value else f"{place.label} {place.path!r}".strip()
    owner = f" of {place.owner}" if place.owner not in ("", name) else ""
    return f"{name} cannot be sent to a worker: {where}{owner} is {what}; {instead}"


def _reason(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    plain = isinstance(error, TypeError | pickle.PicklingError) and text
    return text if plain else f"{type(error).__name__}: {text}"


def name_of(value: object) -> str:
    """The name by which the user knows a callable, else its type's."""
    if isinstance(value, functools.partial):
        return name_of(value.func)
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else type(value).__name__


def _type_name(value: object) -> str:
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    name = prefix + kind.__qualname__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
