"""Models of Hugging Face's transformers in MMEngine's form, and adapters of PEFT."""

from .adapter_files import adapted_modules, save_adapters
from .adapter_hook import AdapterCheckpointHook
from .adapters import adapter_config, with_adapters
from .causal_lm import HuggingFaceCausalLM

__all__ = [
    'AdapterCheckpointHook',
    'HuggingFaceCausalLM',
    'adapted_modules',
    'adapter_config',
    'save_adapters',
    'with_adapters',
]
