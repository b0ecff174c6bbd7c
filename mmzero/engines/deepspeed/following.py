"""Taking part in forwards of val and test that only other ranks have, at stage 3.

[Note: following DeepSpeed]
At stage 3 each module's forward gathers its parameters, together with all ranks. A rank that has no more batches goes
through the same modules in the same order ([Note: following]), and calls for each what DeepSpeed's hooks call before
and after, without computing.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch import nn
from typing_extensions import override

from mmzero.engines.fsdp2.following import Following
from mmzero.engines.loops import Loop


@contextmanager
def without_preprocessor(model: nn.Module) -> Iterator[None]:
    """Hide a model's data preprocessor, which runs before its forward, unless it has parameters.

    Args:
        model (nn.Module): The model; it is as before afterwards.

    Yields:
        None: Inside, the model has none.
    """
    children = dict(model._modules)
    preprocessor = children.get('data_preprocessor')
    if preprocessor is None or any(True for _ in preprocessor.parameters()):
        yield
        return
    del model._modules['data_preprocessor']
    try:
        yield
    finally:
        # In the order from before.
        model._modules.clear()
        model._modules.update(children)


class FollowingModules(Following):
    """Notes the order in which forwards run modules, and goes through it where another rank has a forward.

    Args:
        model (nn.Module): The model.
        offload: DeepSpeed's keeper of parameters.
        loop (Loop): The loop over val or test data.
        present (Sequence[bool]): Which ranks have a batch.
    """

    def __init__(self, model: nn.Module, offload: Any, loop: Loop, present: Sequence[bool]) -> None:
        is_forward_alone: Any = SimpleNamespace(methods=())
        hooked = [module for module in model.modules() if hasattr(module, 'ds_id')]
        super().__init__([(module, is_forward_alone) for module in hooked], loop, present)
        self.model = model
        self.offload = offload

    @override
    def _go_through(self, module: Any, by_method: bool, words: Iterator[str]) -> None:
        if module is self.model:
            self.offload.get_param_coordinator().reset_step()
        self.offload.pre_sub_module_forward_function(module)
        self._take_part(words, is_top=False)
        # As DeepSpeed's own hook does: its stack of modules is a global of its module.
        sys.modules[type(self.offload).__module__].FWD_MODULE_STACK.pop()
        self.offload.post_sub_module_forward_function(module)
