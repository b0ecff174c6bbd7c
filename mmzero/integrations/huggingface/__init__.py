"""Models of Hugging Face's transformers in MMEngine's form."""

from .causal_lm import HuggingFaceCausalLM

__all__ = ['HuggingFaceCausalLM']
