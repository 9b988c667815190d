"""From the rows of a table to problems: fields, filter, exclusion, duplicates."""

import logging
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from typing_extensions import override

from fisher_lit.errors import UserError
from fisher_lit.problems.fields import FieldError, as_text, field_text
from fisher_lit.problems.source import Problem, ProblemSource, question_key, question_keys

log = logging.getLogger(__name__)

# Why rows were left out, at most so many reasons in a message: a filter can have a reason per value.
MAX_REASONS = 5


class TableProblems(ProblemSource):
    """Problems in the rows of a table.

    A field is a column or a path into one: `reward_model.ground_truth`, `prompt.0.content`. Numbers become exact text:
    18 and 18.0 are both `18`. Rows are taken in their order: the filter comes first, then problems of `exclude` and
    later duplicates drop out, then `limit` cuts. Questions are compared after Unicode NFC, with every run of whitespace
    as one space.

    Args:
        question_field: field with the question.
        answer_field: field with the gold answer.
        id_field: field with a unique id; null numbers the rows.
        question_pattern: regular expression whose first group, searched in the field, is the question; `.` also
            matches line breaks.
        answer_pattern: the same for the answer.
        filter: for each of some fields, the values to keep, compared as text; a row must pass all of them.
        exclude: sources whose problems are left out.
        deduplicate: keep only the first problem of each question.
        skip_incomplete: leave out rows without a question or an answer, with one warning that counts them, instead of
            stopping.
        limit: at most this many problems; null takes all.
    """

    def __init__(
        self,
        question_field: str = "problem",
        answer_field: str = "answer",
        id_field: str | None = None,
        question_pattern: str | None = None,
        answer_pattern: str | None = None,
        filter: dict[str, list[int | float | bool | str]] | None = None,
        exclude: list[ProblemSource] | None = None,
        deduplicate: bool = True,
        skip_incomplete: bool = False,
        limit: int | None = None,
    ) -> None:
        self.question_field = question_field
        self.answer_field = answer_field
        self.id_field = id_field
        self.question_pattern = question_pattern
        self.answer_pattern = answer_pattern
        self.filter = {field: frozenset(map(as_text, values)) for field, values in (filter or {}).items()}
        self.exclude = exclude or []
        self.deduplicate = deduplicate
        self.skip_incomplete = skip_incomplete
        self.limit = limit
        self._incomplete = f"without '{question_field}' or '{answer_field}'"

    @property
    @abstractmethod
    def label(self) -> str:
        """What messages call the table."""

    @property
    @abstractmethod
    def id_prefix(self) -> str:
        """What the ids of numbered problems start with."""

    @abstractmethod
    def rows(self, columns: frozenset[str]) -> Iterator[tuple[int, dict]]:
        """The rows with their numbers, counted from 1; other columns than those named may be absent."""

    @override
    def load(self) -> list[Problem]:
        self._check()
        excluded = question_keys(self.exclude)
        removed: Counter[str] = Counter()
        kept: dict[str, Problem] = {}
        problems: list[Problem] = []
        num_rows = conflicts = 0
        for number, row in self.rows(self._columns()):
            num_rows += 1
            problem = self._problem(number, row, removed)
            if problem is None:
                continue
            key = question_key(problem.question)
            if key in excluded:
                removed["in `exclude`"] += 1
            elif self.deduplicate and key in kept:
                removed["duplicates"] += 1
                conflicts += kept[key].answer != problem.answer
            else:
                kept[key] = problem
                problems.append(problem)
                if len(problems) == self.limit:
                    break
        self._report(num_rows, removed, conflicts, problems)
        return problems

    def _check(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UserError(f"problems: `limit` must be at least 1, got {self.limit}; null takes all")
        for field, values in self.filter.items():
            if not values:
                raise UserError(f"problems: `filter` keeps no value of '{field}'; list some or leave it out")

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
        return (
            _compiled("question_pattern", self.question_pattern),
            _compiled("answer_pattern", self.answer_pattern),
        )

    def _columns(self) -> frozenset[str]:
        fields = {self.question_field, self.answer_field, *self.filter}
        if self.id_field is not None:
            fields.add(self.id_field)
        return frozenset(field.split(".")[0] for field in fields)

    def _problem(self, number: int, row: dict, removed: Counter[str]) -> Problem | None:
        """The problem of a row, or None with the reason counted in `removed`."""
        try:
            for field, values in self.filter.items():
                text = field_text(row, field)
                if text not in values:
                    removed[f"with {field} {text!r}"] += 1
                    return None
            identity = f"{self.id_prefix}:{number}" if self.id_field is None else field_text(row, self.id_field)
        except FieldError as error:
            raise UserError(f"{self.label}, row {number}: {error}") from error
        question_pattern, answer_pattern = self._patterns
        try:
            question = field_text(row, self.question_field, question_pattern)
            answer = field_text(row, self.answer_field, answer_pattern)
        except FieldError as error:
            if not self.skip_incomplete:
                raise UserError(
                    f"{self.label}, row {number}: {error}; `skip_incomplete: true` leaves such rows out"
                ) from error
            removed[self._incomplete] += 1
            return None
        return Problem(identity, question, answer)

    def _report(self, num_rows: int, removed: Counter[str], conflicts: int, problems: Sequence[Problem]) -> None:
        reasons = ", ".join(f"{count} {reason}" for reason, count in removed.most_common(MAX_REASONS))
        if not problems:
            raise UserError(f"{self.label}: no problem is left of {num_rows} rows ({reasons or 'the table is empty'})")
        repeated, times = Counter(problem.id for problem in problems).most_common(1)[0]
        if times > 1:
            raise UserError(
                f"{self.label}: {times} problems have the id '{repeated}' in `id_field` '{self.id_field}'; "
                f"name a field with unique values or leave it out"
            )
        log.info("%s: %d problems of %d rows (%s)", self.label, len(problems), num_rows, reasons or "all")
        if skipped := removed[self._incomplete]:
            log.warning("%s: %d rows %s are left out", self.label, skipped, self._incomplete)
        if conflicts:
            log.warning("%s: %d duplicates have another answer than the first, which is kept", self.label, conflicts)


def check_columns(label: str, wanted: Iterable[str], present: Iterable[str]) -> None:
    """Raise a UserError if a table lacks a column."""
    present = list(present)
    for column in sorted(set(wanted) - set(present)):
        raise UserError(f"{label}: there is no column '{column}'; the columns are {', '.join(present)}")


def _compiled(name: str, pattern: str | None) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"problems: `{name}` {pattern!r} is not a regular expression ({error})") from error
    if not compiled.groups:
        raise UserError(f"problems: `{name}` {pattern!r} has no group; put parentheses around what to take")
    return compiled
