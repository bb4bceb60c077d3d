# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without what it does again and again: V2's steps in a third of the
time.

Nine tenths of a V2 step on a CPU is the interpreter's own work. Taken out of it are:

- Patching `triton.language` at each call of a kernel or a device function, which is a
  quarter of the time: it stays as it is in a kernel.
- Making the table of NumPy's types at each lookup, and all that a tensor, a type or a
  function says of itself each time.
- Promoting and broadcasting two tensors that are alike.
- Looking for overflows of integers, with 64-bit arithmetic at each operation, which a
  GPU does for debugging only and no tiny model has. Another quarter.

The interpreter is imported after Triton's backends, so this is done when it is.
"""

import functools
import inspect
import math
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

INTERPRETER = "triton.runtime.interpreter"


def install() -> None:
    """Has the interpreter changed as soon as it is imported."""
    if INTERPRETER not in sys.modules:
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname != INTERPRETER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            _change(module)

        spec.loader.exec_module = execute_and_change
        return spec


def _change(interpreter: ModuleType) -> None:
    _patch_language_once(interpreter)
    _call_builtins_directly(interpreter)
    _keep_numpy_types(interpreter)
    _keep_signatures(interpreter)
    _keep_shapes(interpreter.tl.core)
    _unwrap_at_once(interpreter.tl.core)
    _pass_equal_types(interpreter)
    options = type(interpreter.interpreter_builder.options)
    interpreter.interpreter_builder.options = options(sanitize_overflow=False)


def _patch_language_once(interpreter: ModuleType) -> None:
    """Patch what a function's module sees of the language, if no other has had it
    patched, and leave it so: what is no kernel has no use for it."""
    patch, language = interpreter._patch_lang, interpreter.tl
    patched: set[int] = set()

    @functools.cache
    def modules_of(fn) -> frozenset[int]:
        there = {id(value) for value in fn.__globals__.values()}
        return frozenset(there & {id(language), id(language.core)})

    def patch_language(fn):
        modules = modules_of(fn)
        if not modules or not modules <= patched:
            patch(fn)
            patched.update(modules)
        return interpreter._LangPatchScope()  # which restores nothing

    interpreter._patch_lang = patch_language


def _call_builtins_directly(interpreter: ModuleType) -> None:
    """Without the wrapper that looks whether it got what it is given here."""
    semantic = interpreter.interpreter_semantic

    def patch_attribute(obj, name, member, builder, scope) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attribute


def _keep_numpy_types(interpreter: ModuleType) -> None:
    language = interpreter.tl
    look_up = functools.cache(interpreter._get_np_dtype)

    def numpy_type(dtype):
        if isinstance(dtype, language.block_type):
            dtype = dtype.element_ty
        if isinstance(dtype, language.pointer_type):
            dtype = language.uint64
        return look_up(dtype)

    interpreter._get_np_dtype = numpy_type


def _keep_signatures(interpreter: ModuleType) -> None:
    signature = functools.cache(inspect.signature)

    def call_arguments(fn, *args, **kwargs) -> dict:
        bound = signature(fn).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    kept = {"getfullargspec": functools.cache(inspect.getfullargspec)}
    kept |= {"getcallargs": call_arguments}
    interpreter.inspect = SimpleNamespace(**vars(inspect) | kept)


def _unwrap_at_once(core: ModuleType) -> None:
    """What is in no container, as nearly all is."""
    unwrap = core._unwrap_if_constexpr

    def unwrap_at_once(value):
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind is int or kind is core.tensor else unwrap(value)

    core._unwrap_if_constexpr = unwrap_at_once


def _keep_shapes(core: ModuleType) -> None:
    """What tensors and types of blocks say of the same shape is the same object."""

    @functools.cache
    def of_tensor(shape: tuple[int, ...]):
        return core.constexpr(math.prod(shape)), core.tuple(map(core.constexpr, shape))

    def make_tensor(self, handle, type) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        shape = (*type.shape.values,) if type.is_block() else ()
        self.numel, self.shape = of_tensor(shape)

    core.tensor.__init__ = make_tensor
    make, made = core.block_type.__init__, {}

    def make_block_type(self, element_ty, shape) -> None:
        sizes = (*shape,)
        known = type(element_ty) is core.dtype  # and no pointer, of which each is another
        if not known or not all(type(size) is int for size in sizes):
            make(self, element_ty, shape)
            return
        if (key := (element_ty.name, sizes)) not in made:
            make(self, element_ty, shape)
            made[key] = self.__dict__
        self.__dict__.update(made[key])

    core.block_type.__init__ = make_block_type


def _pass_equal_types(interpreter: ModuleType) -> None:
    """Two tensors of one type that no operation promotes, a pointer and an integer, and
    what has one shape stay as they are; that is not found out step by step."""
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    names = ("int1", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
    integers = {id(getattr(core, name)) for name in names}
    kept = integers | {id(core.float32), id(core.float64)}

    def check_types(lhs, rhs, allow_lhs_ptr=False, *args, **kwargs):
        if type(lhs) is core.tensor and type(rhs) is core.tensor:
            ours, theirs = lhs.dtype, rhs.dtype
            if ours is theirs and id(ours) in kept:
                return broadcast_values(lhs, rhs)
            if allow_lhs_ptr and ours.is_ptr() and id(theirs) in integers:
                return broadcast_values(lhs, rhs)
        return check(lhs, rhs, allow_lhs_ptr, *args, **kwargs)

    def broadcast_values(lhs, rhs):
        ours, theirs = lhs.type, rhs.type
        if ours.is_block():
            same = theirs.is_block() and ours.shape.values == theirs.shape.values
        else:
            same = not theirs.is_block()
        return (lhs, rhs) if same else broadcast(lhs, rhs)

    semantic.binary_op_type_checking_impl = check_types
    semantic.broadcast_impl_value = broadcast_values
