"""Arithmetic problems made from a seed."""

import random
from collections.abc import Iterator

from typing_extensions import override

from fisher_lit.errors import UserError
from fisher_lit.problems.source import Problem, ProblemSource, question_key, question_keys


class ArithmeticProblems(ProblemSource):
    """Distinct integer expressions such as `12+34`, with their exact values.

    Expressions are drawn uniformly, without replacement, from all that the settings allow. More terms, larger operands
    and more operations make them harder. Multiplication binds tighter, as usual. Ids are `arithmetic:<expression>`.

    Args:
        num_problems: how many.
        seed: seed of the draw; equal seeds and settings give equal problems on every platform.
        operations: the operations, each drawn uniformly from the characters of this text, such as `+-*`.
        num_terms: operands of an expression.
        min_operand: smallest operand, not negative.
        max_operand: largest operand.
        exclude: sources whose problems are left out.
    """

    def __init__(
        self,
        num_problems: int,
        seed: int = 0,
        operations: str = "+",
        num_terms: int = 2,
        min_operand: int = 0,
        max_operand: int = 99,
        exclude: list[ProblemSource] | None = None,
    ) -> None:
        self.num_problems = num_problems
        self.seed = seed
        self.operations = operations
        self.num_terms = num_terms
        self.min_operand = min_operand
        self.max_operand = max_operand
        self.exclude = exclude or []

    def _check(self) -> None:
        if self.num_problems < 1:
            raise UserError(f"problems: `num_problems` must be at least 1, got {self.num_problems}")
        different = set(self.operations)
        if not different or different - set("+-*") or len(different) < len(self.operations):
            raise UserError(f"problems: `operations` must be different characters of '+-*', got '{self.operations}'")
        if self.num_terms < 2:
            raise UserError(f"problems: `num_terms` must be at least 2, got {self.num_terms}")
        if not 0 <= self.min_operand <= self.max_operand:
            raise UserError(
                f"problems: operands go from {self.min_operand} to {self.max_operand}; `min_operand` must be at least "
                f"0 and at most `max_operand`"
            )

    @property
    def num_possible(self) -> int:
        """How many different expressions the settings allow."""
        operands = self.max_operand - self.min_operand + 1
        return operands**self.num_terms * len(self.operations) ** (self.num_terms - 1)

    @override
    def load(self) -> list[Problem]:
        self._check()
        excluded = question_keys(self.exclude)
        problems: list[Problem] = []
        num_excluded = 0
        for index in _permutation(self.num_possible, random.Random(self.seed)):
            problem = self._problem(index)
            if question_key(problem.question) in excluded:
                num_excluded += 1
                continue
            problems.append(problem)
            if len(problems) == self.num_problems:
                return problems
        raise UserError(
            f"problems: `num_problems` is {self.num_problems}, but operands from {self.min_operand} to "
            f"{self.max_operand}, {self.num_terms} terms and operations '{self.operations}' give only "
            f"{self.num_possible} problems, {num_excluded} of them in `exclude`; ask for fewer or raise `max_operand`"
        )

    def _problem(self, index: int) -> Problem:
        """The expression with a number from 0 to `num_possible` - 1, and its value."""
        operands = self.max_operand - self.min_operand + 1
        index, term = divmod(index, operands)
        text = str(self.min_operand + term)
        # The value is total + product, where the product may still be multiplied by what follows.
        total, product = 0, self.min_operand + term
        for _ in range(self.num_terms - 1):
            index, which = divmod(index, len(self.operations))
            index, term = divmod(index, operands)
            operation, term = self.operations[which], self.min_operand + term
            text += f"{operation}{term}"
            if operation == "*":
                product *= term
            else:
                total, product = total + product, term if operation == "+" else -term
        return Problem(f"arithmetic:{text}", text, str(total + product))


def _permutation(size: int, chance: random.Random) -> Iterator[int]:
    """The numbers from 0 to `size` - 1 in random order: Fisher–Yates, in memory for the numbers taken so far only."""
    moved: dict[int, int] = {}
    for i in range(size):
        j = chance.randrange(i, size)
        yield moved.get(j, j)
        moved[j] = moved.pop(i, i)
