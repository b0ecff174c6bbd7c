"""Compiling the forward of modules by torch.compile, without changing the module tree.

[Note: compiled units]
``nn.Module.compile`` compiles a module's ``__call__`` with all hooks that are registered on it: FSDP2's leave
themselves out, but those of users and of mmzero would be compiled, too, each as a function of its own. Here ``forward``
on the instance is replaced, as activation checkpointing does it before, so that hooks stay outside, names and class
stay as they were, and a deep copy runs its own weights. Alike modules share what is compiled. Torch keeps that with a
function's code, up to a limit of 8 variants, beyond which it runs the function as it is. So each group of alike
modules has a code of its own.

[Note: compiled and recomputed]
A module that is recomputed is compiled with its checkpoint around it, so that the compiler sees what is recomputed, and
what ``save='matmuls'`` keeps. That takes one graph: nothing is compiled by itself within a checkpoint, as the parts
that a graph break leaves would have to be, and a compiler takes no hooks on saved tensors, which offloading is made of.
There the checkpoint is around what is compiled. Under ``save='matmuls'``, which would not see into that, such a module
runs as it is.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from mmzero._compat import compiler_errors, in_one_graph
from mmzero.config import CompileConfig
from mmzero.errors import CompileError
from mmzero.patches.checkpoint import Region

SHOWN_LINES = 12


class CompiledForward:
    """The forward of one module, compiled together with those of alike ones.

    Args:
        name (str): Path of the module.
        class_name (str): Its class.
        config (CompileConfig): How it is compiled.

    Attributes:
        has_run (bool): Whether it was called.
    """

    def __init__(self, name: str, class_name: str, config: CompileConfig) -> None:
        self.name = name
        self.class_name = class_name
        self.config = config
        self.has_run = False

    def error(self, error: BaseException) -> CompileError:
        """Say which unit cannot be compiled, and what to do.

        Args:
            error (BaseException): Of torch.compile.

        Returns:
            CompileError: The error to raise.
        """
        return compile_error(f'the unit {self.name or "(root)"} ({self.class_name})', self.name, self.config, error)


def compile_error(what: str, name: str, config: CompileConfig, error: BaseException) -> CompileError:
    """Say what cannot be compiled, and what to do.

    Args:
        what (str): What was compiled.
        name (str): Path of the unit, or a pattern.
        config (CompileConfig): How it was compiled.
        error (BaseException): Of torch.compile.

    Returns:
        CompileError: The error to raise.
    """
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    text = '\n'.join(f'    {line}' for line in lines[:SHOWN_LINES])
    without = f"overrides=[dict(units='{name or '(root)'}', compile=False)]"
    more = ', or fullgraph=False, which lets a graph break cut it' if config.fullgraph else ''
    return CompileError(
        f'model_wrapper_cfg.compile: backend {config.backend_name!r} cannot compile {what}; leave it out by '
        f"model_wrapper_cfg.{without}, try another backend ('aot_eager' needs no compiler){more}, or remove compile. "
        f'It says {type(error).__name__}:\n{text}'
    )


def compile_alike(
    modules: Mapping[str, nn.Module], config: CompileConfig, regions: Mapping[str, Region], number: int = 0
) -> list[CompiledForward]:
    """Compile the forward of alike modules; done when they are called first.

    Only ``forward`` on the instances is replaced, by bound methods; after activation checkpointing, and before
    sharding.

    Args:
        modules (Mapping[str, nn.Module]): Modules of one class, by path.
        config (CompileConfig): How.
        regions (Mapping[str, Region]): What is recomputed, by path.
        number (int): Of the group, since modules of one class may be of several. Defaults to 0.

    Returns:
        list[CompiledForward]: One per module.
    """
    class_name = type(next(iter(modules.values()))).__name__
    compiled = _Compiled(f'{class_name}_{number}', config)
    made = []
    for name, module in modules.items():
        note = CompiledForward(name, class_name, config)
        region = regions.get(name)
        if region is None:
            forward = _through(note, compiled.parts, _forward_of(module))
        else:
            forward = _around(note, compiled, region, _forward_of(module))
            if region.config.save != 'matmuls':
                region.compiled = _through(note, compiled.parts, type(module).forward)
        module.forward = types.MethodType(forward, module)
        made.append(note)
    return made


class _Compiled:
    """What alike modules share.

    Args:
        name (str): What torch's logs call it.
        config (CompileConfig): How they are compiled.

    Attributes:
        parts (Callable): A forward as one graph or, where graphs break, as several.
        whole (Callable): A forward as one graph, or an error.
        is_cut (bool): Whether it was one.
    """

    def __init__(self, name: str, config: CompileConfig) -> None:
        self.parts = torch.compile(_entering(name), **config.arguments())
        self.whole = torch.compile(_entering(f'{name}_recomputed'), **config.arguments())
        self.is_cut = False


def _forward_of(module: nn.Module) -> Callable:
    own = module.__dict__.get('forward')
    if own is None:
        return type(module).forward
    # What is no method was made for this instance, and is called without it.
    return getattr(own, '__func__', lambda _, *args, **kwargs: own(*args, **kwargs))


def _entering(name: str) -> Callable:
    def enter(forward: Callable, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        return forward(module, *args, **kwargs)

    return types.FunctionType(enter.__code__.replace(co_name=name), enter.__globals__, name)


def _through(note: CompiledForward, compiled: Callable, forward: Callable) -> Callable:
    errors = compiler_errors()

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # As a part of what holds it.
            return forward(self, *args, **kwargs)
        note.has_run = True
        try:
            return compiled(forward, self, args, kwargs)
        except errors as error:
            raise note.error(error) from error

    return run


def _around(note: CompiledForward, compiled: _Compiled, region: Region, forward: Callable) -> Callable:
    """Like :func:`_through`, for what is recomputed."""
    whole, errors = _through(note, compiled.whole, forward), compiler_errors()

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or note.config.fullgraph and not region.config.offload:
            return whole(self, *args, **kwargs)
        note.has_run = True
        if not compiled.is_cut and not region.config.offload:
            try:
                with in_one_graph():
                    return compiled.whole(forward, self, args, kwargs)
            except errors:
                # Whatever is wrong shows once more where the parts are compiled.
                compiled.is_cut = True
        return forward(self, *args, **kwargs)

    return run
