"""A small Qwen3-shaped model without weights: configuration and a character tokenizer.

`python -m fisher_lit.tiny DIRECTORY` writes it; `configs/sft_tiny_base.yaml` trains the weights that the package ships
as `tiny-base`.
"""

from pathlib import Path

from jsonargparse import auto_cli
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

CHARACTERS = "0123456789+-*=() "
EOS, PAD, UNKNOWN = "<|endoftext|>", "<|pad|>", "<|unknown|>"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of arithmetic, and three special tokens."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(vocab_size: int, *, layers: int = 3, width: int = 64, positions: int = 512) -> Qwen3Config:
    """A Qwen3 configuration with tied embeddings, four heads and two key-value heads."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        # vLLM's CPU attention starts at heads of 32 dimensions.
        head_dim=max(32, width // 4),
        max_position_embeddings=positions,
        # The usual 0.02 is for widths of a thousand and more; at this one training would start far too slowly.
        initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def write_skeleton(directory: Path, layers: int = 3, width: int = 64) -> None:
    """Write configuration and tokenizer of a tiny model; `random_init: true` gives it weights.

    Args:
        directory: where to write.
        layers: decoder layers.
        width: hidden width.
    """
    tokenizer = character_tokenizer()
    tiny_config(len(tokenizer), layers=layers, width=width).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    auto_cli(write_skeleton)
