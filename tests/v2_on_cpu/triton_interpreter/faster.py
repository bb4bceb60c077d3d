# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without what it does again and again: V2's steps in half the time.

Nine tenths of a V2 step on a CPU is the interpreter's own work. Taken out of it are:

- Patching `triton.language` at each call of a device function: the kernel that calls it
  has done so, and it is a quarter of the time.
- Making the table of NumPy's types at each lookup.
- Looking for overflows of integers, with 64-bit arithmetic at each operation, which a
  GPU does for debugging only and no tiny model has. Another quarter.

The interpreter is imported after Triton's backends, so this is done when it is.
"""

import functools
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from types import ModuleType

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
    _keep_numpy_types(interpreter)
    options = type(interpreter.interpreter_builder.options)
    interpreter.interpreter_builder.options = options(sanitize_overflow=False)


def _patch_language_once(interpreter: ModuleType) -> None:
    """Patch for a kernel, and in it only what another module's function adds."""
    patch, language = interpreter._patch_lang, interpreter.tl
    patched: set[int] = set()

    @functools.cache
    def modules_of(fn) -> frozenset[int]:
        there = {id(value) for value in fn.__globals__.values()}
        return frozenset(there & {id(language), id(language.core)})

    def patch_language(fn):
        modules = modules_of(fn)
        if modules and modules <= patched:
            return interpreter._LangPatchScope()
        is_kernel = not patched
        scope = patch(fn)
        patched.update(modules)
        if is_kernel:
            restore = scope.restore

            def restore_all() -> None:
                restore()
                patched.clear()

            scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_language


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
