import pytest
import torch

from fisher_lit.optional_packages import hide_broken_packages

# Before anything imports transformers.
hide_broken_packages()

from transformers import Qwen3ForCausalLM  # noqa: E402

from fisher_lit.tiny import character_tokenizer, tiny_config  # noqa: E402

# Two cores are shared by everything that runs here.
torch.set_num_threads(1)


@pytest.fixture
def tokenizer():
    return character_tokenizer()


@pytest.fixture
def tiny_model(tokenizer):
    """A random Qwen3 of two layers whose next-token distributions are far from uniform."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(tiny_config(len(tokenizer), layers=2, width=32))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(4 if "embed" in name else 12)
    return model
