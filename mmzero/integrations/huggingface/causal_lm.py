"""A causal language model that a config describes."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from torch import Tensor

from mmzero.checkpoint import clean_names
from mmzero.errors import near_names
from mmzero.integrations.huggingface.adapters import adapter_config, adapters_kept, check_names, import_peft

HINT = "such as dict(model_type='llama', hidden_size=4096)"


@MODELS.register_module()
class HuggingFaceCausalLM(BaseModel):
    """A causal language model of transformers, made from its sizes with fresh weights, or from a folder of files.

    Nothing is downloaded. The model itself is ``llm``, as in XTuner: its parameters are named as transformers names
    them, behind ``llm.``; with ``peft``, as PEFT names them.

    Args:
        config (dict, optional): Fields of the model's configuration class in transformers, and ``model_type``, by which
            transformers knows it. With ``pretrained``, what differs from the folder's, such as ``dtype``. Defaults to
            None.
        data_preprocessor (dict, optional): As MMEngine's; its default moves batches to the device. Defaults to None.
        init_cfg (dict, optional): As MMEngine's. Defaults to None.
        pretrained (str, optional): Folder of ``save_pretrained``. Its weights are read by ``init_weights``, under
            ZeroRunner on rank 0 alone. Defaults to None.
        peft (dict, optional): An adapter, the rest is frozen: fields of a configuration class of PEFT and its name,
            ``dict(type='LoraConfig', r=8, target_modules=[...])``. Defaults to None.

    Raises:
        ImportError: If transformers, or peft, is not installed.
        ValueError: If transformers or PEFT knows no such model, class or field.
    """

    def __init__(
        self,
        config: dict | None = None,
        data_preprocessor: dict | None = None,
        init_cfg: dict | None = None,
        pretrained: str | None = None,
        peft: dict | None = None,
    ) -> None:
        super().__init__(data_preprocessor=data_preprocessor, init_cfg=init_cfg)
        transformers = _import_transformers()
        made = _configuration(config, transformers) if pretrained is None else _of_folder(pretrained, config)
        self.pretrained = pretrained
        self.llm = transformers.AutoModelForCausalLM.from_config(made)
        self.has_adapters = peft is not None
        if self.has_adapters:
            adapter = _causal(adapter_config(peft))
            check_names(self.llm, adapter)
            self.llm = import_peft().get_peft_model(self.llm, adapter)

    def init_weights(self) -> None:
        """Initialise, and read what is pretrained; adapters stay as PEFT made them."""
        with adapters_kept(self.llm) if self.has_adapters else nullcontext():
            super().init_weights()
            if self.pretrained is not None:
                self._read_pretrained()

    @torch.no_grad()
    def _read_pretrained(self) -> None:
        load = _import_transformers().AutoModelForCausalLM.from_pretrained
        dtype = self.llm.config.dtype
        read = load(self.pretrained, local_files_only=True, **({} if dtype is None else dict(dtype=dtype)))
        own = self.llm.state_dict()
        for name, value in clean_names(read.state_dict(), own).items():
            own[name].copy_(value)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        mode: str = 'tensor',
        **inputs: Any,
    ) -> Any:
        """Run the model.

        Args:
            input_ids (Tensor): Tokens, of shape (N, L).
            attention_mask (Tensor, optional): 0 where tokens are padding, (N, L). Defaults to None: nowhere.
            labels (Tensor, optional): The tokens themselves, -100 where none is to be predicted, (N, L); they are
                shifted here. Needed for 'loss'. Defaults to None.
            mode (str): 'loss', 'predict' or 'tensor'. Defaults to 'tensor'.
            **inputs: What else the model takes, such as ``position_ids``.

        Returns:
            dict or list or Tensor: 'loss': ``dict(loss=...)``; 'predict': a ``dict(logits=...)`` per sample, (L, V);
            'tensor': the logits, (N, L, V).

        Raises:
            ValueError: If labels are missing for 'loss', or the mode is none of these.
        """
        if mode not in ('loss', 'predict', 'tensor'):
            raise ValueError(f"mode: got {mode!r}; allowed: 'loss', 'predict', 'tensor'")
        if mode == 'loss' and labels is None:
            raise ValueError("labels: are missing, and mode='loss' needs them; give the tokens, -100 for padding")
        # Outside of generation the cache of keys and values would only be kept.
        labels = labels if mode == 'loss' else None
        found = self.llm(input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=False, **inputs)
        if mode == 'loss':
            return dict(loss=found.loss)
        return [dict(logits=logits) for logits in found.logits] if mode == 'predict' else found.logits


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "HuggingFaceCausalLM needs transformers, which mmzero's extra brings along: pip install 'mmzero[hf]'"
        ) from error
    return transformers


def _of_folder(pretrained: str, changes: Any) -> Any:
    changes = {} if changes is None else changes
    if not isinstance(changes, Mapping):
        raise ValueError(f"config: got {changes!r}; expected a dict of what differs, such as dict(dtype='bfloat16')")
    load = _import_transformers().AutoConfig.from_pretrained
    fields = {key: value for key, value in changes.items() if key != 'model_type'}
    try:
        made, unknown = load(pretrained, local_files_only=True, return_unused_kwargs=True, **fields)
    except (OSError, ValueError) as error:
        raise ValueError(
            f'pretrained: {pretrained!r} is no folder that save_pretrained of transformers has written ({error}); '
            'nothing is downloaded'
        ) from error
    if changes.get('model_type', made.model_type) != made.model_type:
        raise ValueError(f'config.model_type: got {changes["model_type"]!r}; {pretrained} is of {made.model_type!r}')
    for name in unknown:
        raise ValueError(f'config.{name}: {type(made).__name__} has no such field{near_names(name, made.to_dict())}')
    return made


def _causal(config: Any) -> Any:
    """A configuration of PEFT for the kind of model that this is."""
    config.task_type = config.task_type or 'CAUSAL_LM'
    return config


def _configuration(config: Any, transformers: Any) -> Any:
    if not isinstance(config, Mapping) or 'model_type' not in config:
        raise ValueError(f'config: got {config!r}; expected a dict with model_type, {HINT}')
    fields = {key: value for key, value in config.items() if key != 'model_type'}
    cls = _configuration_class(config['model_type'], transformers)
    made = cls(**fields)
    # transformers keeps any name as an attribute, which nothing reads; older names it turns into the newer ones.
    known = {*cls().to_dict(), *getattr(cls, 'attribute_map', {})}
    for name in fields.keys() & made.to_dict().keys() - known:
        raise ValueError(f'config.{name}: {cls.__name__} has no such field{near_names(name, known)}')
    return made


def _configuration_class(model_type: Any, transformers: Any) -> Any:
    models = transformers.CONFIG_MAPPING
    if model_type not in models:
        near = near_names(str(model_type), models.keys())
        raise ValueError(f'config.model_type: no {model_type!r} in transformers {transformers.__version__}{near}')
    cls = models[model_type]
    if cls not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f'config.model_type: {model_type!r} has no causal language model in transformers')
    return cls
