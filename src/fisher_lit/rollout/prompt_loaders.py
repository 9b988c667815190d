"""Which prompts come when: the order of training prompts over updates and epochs, and evaluation batches."""

import random
from collections.abc import Callable, Iterator, Sequence

from fisher_lit.prompts import Prompt
from fisher_lit.rollout.sampling import derive_seed
from fisher_lit.sharding import share_of


class PromptBatch:
    """This process's prompts whose responses are still to be drawn. `update` is the optimizer update, or None."""

    def __init__(self, prompts: Sequence[Prompt], update: int | None) -> None:
        self.prompts = prompts
        self.update = update


class PromptLoader:
    """The prompts of each optimizer update: a fresh permutation per epoch, without replacement.

    The batch of an update is a function of the seed and the update's number alone, so a run resumes anywhere. Prompts
    left over at the end of an epoch (fewer than an update needs) wait for the next permutation. Each process gets its
    share of a batch.

    Args:
        prompts: the training prompts.
        prompts_per_update: prompts of one batch.
        seed: seed of the order.
        next_update: tells how many updates are done.
    """

    def __init__(
        self, prompts: Sequence[Prompt], prompts_per_update: int, seed: int, next_update: Callable[[], int]
    ) -> None:
        self.prompts = prompts
        self.prompts_per_update = prompts_per_update
        self.seed = seed
        self.next_update = next_update

    def __len__(self) -> int:
        return len(self.prompts) // self.prompts_per_update

    def __iter__(self) -> Iterator[PromptBatch]:
        epoch, first = divmod(self.next_update(), len(self))
        order = list(range(len(self.prompts)))
        random.Random(derive_seed("order", self.seed, epoch)).shuffle(order)
        for i in range(first, len(self)):
            chosen = order[i * self.prompts_per_update : (i + 1) * self.prompts_per_update]
            yield PromptBatch([self.prompts[j] for j in share_of(chosen)], epoch * len(self) + i)

    # Lightning asks loaders that can resume in mid-epoch for these. The position is the number of updates that the
    # trainer restores, so there is nothing to store.
    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state_dict: dict) -> None:
        pass


class EvalLoader:
    """Evaluation prompts in their given order, `prompts_per_batch` at a time over all processes."""

    def __init__(self, prompts: Sequence[Prompt], prompts_per_batch: int) -> None:
        self.prompts = prompts
        self.prompts_per_batch = prompts_per_batch

    def __len__(self) -> int:
        return -(-len(self.prompts) // self.prompts_per_batch)

    def __iter__(self) -> Iterator[PromptBatch]:
        for start in range(0, len(self.prompts), self.prompts_per_batch):
            yield PromptBatch(share_of(self.prompts[start : start + self.prompts_per_batch]), None)
