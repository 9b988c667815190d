"""Cost of the Fisher estimators against plain passes over the same trajectories, on one core.

    python tests/benchmarks/fisher_pass.py

Every line is a ratio of medians of variants that take turns in one process.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from fisher_lit.fisher.estimators import FisherEstimator, GradientEstimator
from fisher_lit.fisher.token_fisher import token_fisher
from fisher_lit.logprobs import head_logits, hidden_states, response_logprobs
from fisher_lit.rollout.batch import Rollout, collate

REPEATS = 5


def make_model(*, width: int, layers: int, intermediate: int, vocab_size: int, heads: int) -> Qwen3ForCausalLM:
    """A random Qwen3 with tied embeddings."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=width // heads,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def make_rollouts(count: int, vocab_size: int, *, prompt: int, response: int, spread: int) -> list[Rollout]:
    """Random responses of `response` ± `spread` tokens."""
    g = torch.Generator().manual_seed(0)
    rollouts = []
    for index in range(count):
        length = response + int(torch.randint(-spread, spread + 1, (), generator=g))
        ids = torch.randint(vocab_size, (prompt + length,), generator=g).tolist()
        rollouts.append(
            Rollout(f"p{index}", "", "", 0, tuple(ids[:prompt]), tuple(ids[prompt:]), (0.0,) * length, "length", "")
        )
    return rollouts


def plain_pass(model: Qwen3ForCausalLM, rollouts: list[Rollout]) -> None:
    """Forward and backward of each response, as in training with one response per micro-batch."""
    for rollout in rollouts:
        response_logprobs(model, collate([rollout], pad_id=0)).logprobs.sum().backward()
    model.zero_grad()


def fisher_pass(model: Qwen3ForCausalLM, rollouts: list[Rollout], batched: bool | None) -> None:
    """The Fisher's sums over all responses."""
    FisherEstimator(model, batched=batched).add(rollouts)


def pair_by_pair(model: Qwen3ForCausalLM, rollouts: list[Rollout], num_pairs: int, whole: bool = False) -> None:
    """One forward, over the prefix or the whole response, and one backward per pair, then every square summed."""
    g = torch.Generator().manual_seed(1)
    for rollout in rollouts:
        for _ in range(num_pairs):
            position = int(torch.randint(len(rollout.response_ids), (), generator=g))
            end = len(rollout.response_ids) if whole else position + 1
            prefix = replace(rollout, response_ids=rollout.response_ids[:end], logprobs=rollout.logprobs[:end])
            logits = head_logits(model, hidden_states(model, collate([prefix], pad_id=0))[position : position + 1])[0]
            a, b = torch.randint(len(logits), (2,), generator=g).tolist()
            ((logits[a] - logits[b]) / 2**0.5).backward()
            sum(p.grad.square().sum() for p in model.parameters())
            model.zero_grad()


def compare(title: str, variants: dict[str, Callable[[], object]], repeats: int = REPEATS) -> None:
    """Time the variants in turn and print each one's median over the first one's."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
    for _ in range(repeats):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    base = median(next(iter(times.values())))
    print(title)
    for name, values in times.items():
        print(f"    {name:42s} {median(values):8.3f} s  {median(values) / base:6.3f}", flush=True)


def main() -> None:
    """Print the ratios."""
    torch.set_num_threads(1)
    tiny = make_model(width=64, layers=3, intermediate=160, vocab_size=32, heads=4)
    short = make_rollouts(64, 32, prompt=6, response=4, spread=2)
    medium = make_model(width=256, layers=3, intermediate=768, vocab_size=1024, heads=4)
    long = make_rollouts(2, 1024, prompt=64, response=600, spread=50)
    compare(
        "Fisher, long responses (width 256, about 660 tokens)",
        {
            "forward and backward": lambda: plain_pass(medium, long),
            "FisherEstimator": lambda: fisher_pass(medium, long, None),
        },
    )
    compare(
        "Fisher, short responses (width 64, 64 responses of about 10 tokens)",
        {
            "forward and backward, one at a time": lambda: plain_pass(tiny, short),
            "FisherEstimator(batched=False)": lambda: fisher_pass(tiny, short, False),
            "FisherEstimator(batched=True)": lambda: fisher_pass(tiny, short, True),
        },
    )
    compare(
        "gradient, the same short responses",
        {
            "forward and backward, one at a time": lambda: plain_pass(tiny, short),
            "GradientEstimator": lambda: GradientEstimator(tiny).add(short, [1.0] * len(short)),
        },
    )
    compare(
        "token Fisher, short prefixes (width 64, 2 prompts, 128 pairs each)",
        {
            "one forward and backward per pair": lambda: pair_by_pair(tiny, short[:2], 128),
            "token_fisher(batched=False)": lambda: token_fisher(tiny, short[:2], seed=0, batched=False),
            "token_fisher": lambda: token_fisher(tiny, short[:2], seed=0),
        },
    )
    compare(
        "token Fisher, long prefixes (width 256, 1 prompt, 32 pairs)",
        {
            "one forward and backward per pair": lambda: pair_by_pair(medium, long[:1], 32),
            "the same over the whole response": lambda: pair_by_pair(medium, long[:1], 32, whole=True),
            "token_fisher": lambda: token_fisher(medium, long[:1], seed=0, num_positions=4, num_pairs=4),
        },
        repeats=1,
    )


if __name__ == "__main__":
    main()
