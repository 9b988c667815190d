"""Loading and saving Hugging Face causal LMs."""

import os
import shutil
from importlib.resources import files
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fisher_lit.errors import UserError
from fisher_lit.logprobs import check_head
from fisher_lit.sharding import is_sharded, rank, whole

# Models that the package ships, by the name that stands for a path.
SHIPPED = {"tiny-base": "tiny_base", "tiny-teacher": "tiny_teacher"}


def resolve_model(model: str) -> str:
    """Path or hub name of a model; `tiny-base` and `tiny-teacher` are shipped with the package.

    Raises:
        UserError: if `model` looks like a path and there is no model in it.
    """
    if model in SHIPPED:
        return str(files("fisher_lit") / SHIPPED[model])
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"model: the directory {model!r} has no config.json; it is not a Hugging Face model")
        return str(path)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise UserError(f"model: there is no directory {model!r}; give a model directory or a hub name")
    return model


def load_config(model: str) -> PretrainedConfig:
    """The model's configuration. Raises UserError if there is none."""
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise UserError(f"model: {model!r} cannot be loaded as a Hugging Face model: {_first_line(error)}") from error


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises UserError if there is none."""
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise UserError(f"model: {model!r} has no usable tokenizer: {_first_line(error)}") from error


def load_model(
    model: str,
    config: PretrainedConfig,
    *,
    random_init: bool = False,
    dtype: torch.dtype = torch.float32,
    device_map: str | None = None,
) -> PreTrainedModel:
    """A causal LM without dropout.

    Dropout is off because the policy that is trained must be the one that responses are drawn from.

    Args:
        model: path or hub name.
        config: its configuration.
        random_init: draw the weights from torch's random numbers in place of loading them.
        dtype: of the parameters.
        device_map: how transformers spreads the model over devices; None loads it to the CPU.

    Raises:
        UserError: if the weights cannot be loaded, or the architecture's head is not understood.
    """
    if random_init:
        loaded = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        try:
            loaded = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=dtype, device_map=device_map)
        except (OSError, ValueError, ImportError) as error:
            raise UserError(f"model: the weights of {model!r} cannot be loaded: {_first_line(error)}") from error
    disable_dropout(loaded)
    check_head(loaded)
    return loaded.train()


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0, those that attention layers keep as plain numbers included."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "resid_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def save_hf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write weights (safetensors), config and tokenizer as a Hugging Face directory, or nothing.

    Everything goes to a temporary directory beside `directory`, which is then renamed. Of a sharded model one parameter
    at a time is gathered, and process 0 writes; all processes call this together.
    """
    weights = dict(model.state_dict())
    if is_sharded(model):
        # Tied weights must stay one tensor, or they would be written twice.
        first = {id(p): name for name, p in model.named_parameters()}
        names = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        for name, tensor in weights.items():
            if (source := names.get(name, name)) != name:
                weights[name] = weights[source]
                continue
            full = whole(tensor)
            weights[name] = full.cpu() if rank() == 0 else tensor
    if rank() == 0:
        _write_hf(model, weights, tokenizer, directory)


def _write_hf(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase, directory: Path
) -> None:
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        if directory.exists():
            shutil.rmtree(directory)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
