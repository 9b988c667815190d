"""Time and extra memory of the exact selection, beside `torch.topk` on one concatenated vector; one core.

    python tests/benchmarks/selection.py --p 100000000

Values are log-normal, as Fisher values roughly are; the worst case has four different values, so that every set splits
ties. Times are medians of three, processor time. Memory is the rise of the process's peak resident size (VmHWM in
Linux, reset once the values are in place), measured in a process of its own.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from fisher_lit.fisher.coordinates import Coordinates
from fisher_lit.fisher.random_sets import random_masks
from fisher_lit.fisher.selection import Masks, budget, top_masks

PERCENTAGES = (0.1, 1, 5)
REPEATS = 3
# Coordinates filled at a time, so that making the values does not set the peak.
FILL = 2**20


def make_values(num: int, kind: str) -> tuple[dict[str, Tensor], Coordinates]:
    """`num` values in tensors of about 16 million and one small one, `kind` "lognormal" or "tied"."""
    sizes = [2**24] * (num // 2**24) + [num % 2**24]
    names = tuple(f"layers.{i}.weight" for i in range(len(sizes)))
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.empty(size) for name, size in zip(names, sizes, strict=True)}
    for tensor in values.values():
        for chunk in tensor.split(FILL):
            if kind == "tied":
                chunk.random_(4, generator=generator)
            else:
                chunk.normal_(std=2, generator=generator).exp_().mul_(1e-6)
    return values, Coordinates(names, tuple((size,) for size in sizes))


def seconds(run: Callable[[], object]) -> float:
    """Median processor time: other jobs on the machine matter less than for wall time."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return median(times)


def resident(field: str) -> int:
    """Bytes in `field` (VmRSS or VmHWM) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def print_memory(num: int, kind: str) -> None:
    """Print the peak memory of selecting one and three sets beyond the values, and as a share of them."""
    small, order = make_values(2**21, kind)
    # The first call loads libraries.
    top_masks(small, [budget(q, order.num_coordinates) for q in PERCENTAGES], order)
    values, order = make_values(num, kind)
    before = resident("VmRSS")
    for chosen in ((1,), PERCENTAGES):
        Path("/proc/self/clear_refs").write_text("5")
        top_masks(values, [budget(q, num) for q in chosen], order)
        extra = resident("VmHWM") - before
        share = 100 * extra / (4 * num)
        print(f"{kind}, q={chosen}: peak of {extra / 2**20:.1f} MiB beyond the values, {share:.1f}% of them")


def print_times(num: int, kind: str) -> None:
    """Print the times of the selection, of `torch.topk`, and their ratio."""
    values, order = make_values(num, kind)
    whole = torch.cat(list(values.values()))
    print(f"\n{kind}, P={num}\n{'q, %':>12} {'select, s':>10} {'topk, s':>10} {'ratio':>8}")
    for q in PERCENTAGES:
        size = budget(q, num)
        ours = seconds(lambda: top_masks(values, [size], order))  # noqa: B023
        topk = seconds(lambda: torch.topk(whole, size))  # noqa: B023
        threshold = torch.topk(whole, size).values[-1].view(torch.int32)
        assert top_masks(values, [size], order)[0].top.threshold == threshold
        print(f"{q:>12} {ours:>10.3f} {topk:>10.3f} {ours / topk:>8.3f}")
    sizes = [budget(q, num) for q in PERCENTAGES]
    print(f"{'all three':>12} {seconds(lambda: top_masks(values, sizes, order)):>10.3f}")
    (masks,) = top_masks(values, sizes[1:2], order)
    print(f"{'masks, 1%':>12} {seconds(lambda: read(masks)):>10.3f}")
    print(f"{'random, 1%':>12} {seconds(lambda: random_masks(order, sizes[1:2], 0)):>10.3f}")


def read(masks: Masks) -> None:
    """Compute every mask once."""
    for name in masks:
        masks[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--p", type=int, default=10**8, help="number of coordinates")
    parser.add_argument("--memory", choices=("lognormal", "tied"), help="measure only the memory, in this process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        print_memory(arguments.p, arguments.memory)
        return
    for kind in ("lognormal", "tied"):
        subprocess.run([sys.executable, __file__, "--p", str(arguments.p), "--memory", kind], check=True)
        print_times(arguments.p, kind)


if __name__ == "__main__":
    main()
