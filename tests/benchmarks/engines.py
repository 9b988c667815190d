"""Tokens per second of the two engines on the same work, at several batch sizes.

    python tests/benchmarks/engines.py [--repeats 5] [--tokens 64] [--threads 1]

A random Qwen3 draws a fixed number of tokens per response (no stop tokens) from prompts of 32 tokens; several
responses share a prompt, as in a group of rollouts. Medians over repeats with other seeds, after a warm-up of the
same shape.
"""

from fisher_lit.optional_packages import hide_broken_packages

hide_broken_packages()

import statistics  # noqa: E402
import time  # noqa: E402

import torch  # noqa: E402
from jsonargparse import auto_cli  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from fisher_lit.rollout import Sampling, TransformersEngine, VLLMEngine  # noqa: E402
from fisher_lit.rollout.engine import Engine, SampleRequest  # noqa: E402

PROMPT_TOKENS, GROUP = 32, 8
MODELS = {"tiny (0.2M)": (64, 3, 64), "small (21M)": (512, 6, 4096)}


def make_model(width: int, layers: int, vocabulary: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    heads = max(width // 64, 2)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=max(width // heads, 32),
        max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def seconds(engine: Engine, model: Qwen3ForCausalLM, batch: int, tokens: int, repeats: int) -> list[float]:
    """Wall-clock seconds of each of `repeats` generations, the weight sync before them not counted."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine.sync_weights(model.to(device))
    generator = torch.Generator().manual_seed(0)
    found = []
    for repeat in range(repeats + 1):
        prompts = torch.randint(model.config.vocab_size, (-(-batch // GROUP), PROMPT_TOKENS), generator=generator)
        requests = [SampleRequest(tuple(prompts[i // GROUP].tolist()), repeat * batch + i) for i in range(batch)]
        started = time.perf_counter()
        samples = engine.generate(requests, sampling=Sampling(), max_new_tokens=tokens, stop_ids=frozenset())
        found.append(time.perf_counter() - started)
        assert all(len(sample.token_ids) == tokens for sample in samples)
    return found[1:]


def main(repeats: int = 5, tokens: int = 64, threads: int = 1, batches: list[int] = [1, 8, 32, 128]) -> None:  # noqa: B006
    """Print the table.

    Args:
        repeats: timed generations of each cell.
        tokens: tokens per response.
        threads: CPU threads.
        batches: responses per generation.
    """
    torch.set_num_threads(threads)
    print(f"| model | responses | transformers, tokens/s | vLLM, tokens/s | vLLM / transformers |\n|{' --- |' * 5}")
    for name, shape in MODELS.items():
        model = make_model(*shape)
        vllm = VLLMEngine(max_num_seqs=max(batches))
        for batch in batches:
            times = [seconds(e, model, batch, tokens, repeats) for e in (TransformersEngine(max(batches)), vllm)]
            plain, fast = (batch * tokens / statistics.median(t) for t in times)
            spread = [f"{min(t) / statistics.median(t):.2f} to {max(t) / statistics.median(t):.2f}" for t in times]
            print(
                f"| {name} | {batch} | {plain:.0f} (times {spread[0]} of the median) | {fast:.0f} ({spread[1]}) | "
                f"{fast / plain:.2f} |",
                flush=True,
            )
        vllm.close()


if __name__ == "__main__":
    auto_cli(main)
