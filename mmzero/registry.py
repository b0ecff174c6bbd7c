"""mmzero's registries.

ZeroRunner, the wrapper pair and the hooks register in MMEngine's root registries, so that configs of every
OpenMMLab project find them; wrap policies and checkpointing patches are mmzero's own.
"""

from mmengine.registry import Registry

WRAP_POLICIES = Registry('wrap policy', scope='mmzero', locations=['mmzero.policies'])
"""Classes called with a model that return a :class:`mmzero.policies.WrapPlan`."""

CHECKPOINT_PATCHES = Registry(
    'checkpoint patch', scope='mmzero', locations=['mmzero.patches'], build_func=lambda *a, **k: None
)
"""Classes of :class:`mmzero.patches.CheckpointPatch`, found by the name of a module's class or the nearest
of its bases, with or without that of its package."""
