"""A patch that makes Triton's interpreter twice as fast: it caches what the interpreter recomputes for every operation.

An operation of a kernel is one call of NumPy under some twenty of Triton's own: a type is built, its shape checked and
wrapped, every function of the language looked up and replaced. None of that depends on data. The patches do not change
any number: each returns what Triton's code returned for the same types, or calls Triton's code.
"""

from __future__ import annotations

from functools import cache
from inspect import getmembers, ismodule
from typing import Any


def make_quick() -> None:
    """Patch the interpreter of this process, once."""
    from triton.runtime import interpreter

    # Every sum is computed two times, for an assertion that is switched off.
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    _keep_the_language(interpreter)
    _keep_types(interpreter)
    _keep_operands(interpreter)


def _keep_the_language(interpreter: Any) -> None:
    """Cache the search for builtins, which Triton repeats over its whole language at every call in a kernel."""
    from triton import language
    from triton.language import core

    patch_language = interpreter._patch_lang
    semantic = interpreter.interpreter_semantic

    @cache
    def builtins_of(namespace: Any) -> list[str]:
        return [name for name, member in getmembers(namespace) if core.is_builtin(member)]

    @cache
    def called_with_semantic(member: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return member(*arguments, **named)

        return call

    def patch_builtins(namespace: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(namespace):
            member = getattr(namespace, name)
            if core.is_builtin(member):
                scope.set_attr(namespace, name, called_with_semantic(member))

    @cache
    def languages_of(function: Any) -> list[Any]:
        found = [value for value in function.__globals__.values() if ismodule(value)]
        return [module for module in (language, core) if module in found]

    def patch_what_is_not(function: Any) -> Any:
        if any(core.is_builtin(module.load) for module in languages_of(function)):
            return patch_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_what_is_not
    interpreter._patch_builtin = patch_builtins


def _keep_types(interpreter: Any) -> None:
    """Make block types with equal element types and shapes one object."""
    from triton.language import core

    numpy_type_of = interpreter._get_np_dtype
    scalar_type = cache(numpy_type_of)

    def numpy_type(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        return numpy_type_of(dtype) if isinstance(scalar, core.pointer_type) else scalar_type(scalar)

    with_element_type, to_ir = core.block_type.with_element_ty, core.block_type.to_ir

    def kept_with_element_type(block: Any, scalar: Any) -> Any:
        """Keep the type with the requested scalar type, so that its id stays unique."""
        known = block.__dict__.setdefault("_kept", {})
        found = known.get(id(scalar))
        if found is None:
            found = known[id(scalar)] = (scalar, with_element_type(block, scalar))
        return found[1]

    def kept_to_ir(block: Any, builder: Any) -> Any:
        found = block.__dict__.get("_kept_ir")
        if found is None:
            found = block._kept_ir = to_ir(block, builder)
        return found

    make_block_type = core.block_type.__init__
    shapes: dict[tuple[int, ...], tuple[Any, int]] = {}

    def init_block_type(block: Any, element_type: Any, shape: Any) -> None:
        sizes = tuple(shape.values if type(shape) is core.tuple else shape)
        known = shapes.get(sizes) if all(type(size) is int for size in sizes) else None
        if known is None:
            make_block_type(block, element_type, shape)
            shapes[tuple(block.shape.values)] = block.shape, block.numel
            return
        block.element_ty = element_type
        block.shape, block.numel = known
        block.name = f"<{block.shape}, {element_type}>"

    scalar_shape, one = core.tuple([]), core.constexpr(1)

    def init_tensor(tensor: Any, handle: Any, type: Any) -> None:
        tensor.handle, tensor.type = handle, type
        if not type.is_block():
            tensor.shape, tensor.numel, tensor.dtype = scalar_shape, one, type.scalar
            return
        known = type.__dict__.get("_kept_tensor")
        if known is None:
            shape = core.tuple([core.constexpr(size) for size in type.shape])
            known = type._kept_tensor = shape, core.constexpr(type.numel)
        tensor.shape, tensor.numel = known
        tensor.dtype = type.element_ty

    interpreter._get_np_dtype = numpy_type
    core.block_type.__init__ = init_block_type
    core.block_type.with_element_ty = kept_with_element_type
    core.block_type.to_ir = kept_to_ir
    core.tensor.__init__ = init_tensor


def _keep_operands(interpreter: Any) -> None:
    """Skip casts and broadcasts of operands that have the same type."""
    semantic = type(interpreter.interpreter_semantic)
    cast, broadcast, computation_type = semantic.cast, semantic.broadcast_impl_value, semantic.computation_type_impl

    def quick_cast(self: Any, operand: Any, dtype: Any, rounding: Any = None) -> Any:
        return operand if operand.dtype is dtype.scalar else cast(self, operand, dtype, rounding)

    def quick_broadcast(self: Any, left: Any, right: Any) -> Any:
        ours, theirs = left.type, right.type
        blocks = ours.is_block(), theirs.is_block()
        if not any(blocks) or (all(blocks) and ours.shape.values == theirs.shape.values):
            return left, right
        return broadcast(self, left, right)

    known: dict[tuple[int, bool, int, bool, bool], tuple[Any, Any, Any]] = {}

    def quick_computation_type(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, division: bool) -> Any:
        key = id(a), a_is_scalar, id(b), b_is_scalar, division
        found = known.get(key)
        if found is None:
            found = known[key] = a, b, computation_type(self, a, a_is_scalar, b, b_is_scalar, division)
        return found[2]

    semantic.cast = quick_cast
    semantic.broadcast_impl_value = quick_broadcast
    semantic.computation_type_impl = quick_computation_type
