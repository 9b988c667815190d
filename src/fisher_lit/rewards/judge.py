r"""Is an answer correct? A pure function of two strings; it sets no signal and starts no process, but may take long.

Numbers are compared exactly: `0.5` is `\frac{1}{2}`, `0.333` is not `\frac{1}{3}`. Bare lists and sets have no order,
tuples have. A unit may be left out, a wrong one is wrong, a convertible one is converted. A percentage is a hundredth
of its number; where the reference is a percentage or an angle in degrees, the bare number will do.
"""

import re

from fisher_lit.rewards.algebra import Unreadable, roughly_equal, same_equation, same_math
from fisher_lit.rewards.extract import final_answer, find_boxes
from fisher_lit.rewards.normalize import cheap_verdict, normalize, plain_text
from fisher_lit.rewards.quantities import DEGREE, PERCENT, split_unit
from fisher_lit.rewards.sets import compare_sets, is_inequality, same_inequalities
from fisher_lit.rewards.structure import (
    Group,
    expand_signs,
    split_at,
    split_group,
    split_matrix,
    split_relation,
    strip_brackets,
)

_UNWRAP = re.compile(r"\\text\s*\{([^{}]*)\}")
_LETTER = re.compile(r"(?:option|choice)?\s*\(?([A-J])\)?[.:]?", re.IGNORECASE)
_LABEL = re.compile(r"\(?([A-J])[).:]\s*(.+)", re.DOTALL)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LETTERS = r"\([A-Za-z](?:, [A-Za-z])*\)"
_SYMBOL = r"(?:[A-Za-z]|\\text\{[^{}]*\}|\\[A-Za-z]+ ?)(?:_(?:\w|\{[^{}]*\}))?(?:\^\{-1\}|')?" + rf"(?:{_LETTERS})?"
# What an answer may give a name to: `x`, `a_n`, `f(x)`, `\text{Area}`, `AB`, `m+n`, `(x, y)`.
_NAME = re.compile(rf"{_SYMBOL}(?:[+-]?{_SYMBOL})*|{_LETTERS}")
_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?\s*([ap])?\.?m?\.?", re.IGNORECASE)
_CONGRUENCE = re.compile(r"(.+?)\\equiv(-?\d{1,99})\(?\\(?:p|b)?mod\s*\{?(\d{1,99})\}?\)?")


def reference_answer(gold: str) -> str:
    r"""The answer that a reference states: its last box, what follows GSM8K's `####`, or all of it."""
    if find_boxes(gold) or "####" in gold:
        return final_answer(gold) or ""
    return gold


def is_correct(answer: str, gold: str) -> bool:
    r"""Whether an answer matches the reference.

    Args:
        answer: the final answer of a response, without its box.
        gold: the reference: a number, LaTeX (with or without `$` or `\boxed{}`), a choice letter or words.

    Returns:
        The verdict. What cannot be read as mathematics matches only the same words.
    """
    return same_answer(normalize(answer), normalize(reference_answer(gold)))


def same_answer(answer: str, gold: str) -> bool:
    """Compare two normalised answers of any kind: the first rule that applies decides."""
    answer, gold = _collection(strip_brackets(answer)), _collection(strip_brackets(gold))
    rules = (
        cheap_verdict,
        _choice,
        _congruence,
        _clock,
        _ratio,
        _approximation,
        _matrix,
        _group,
        _relation,
        compare_sets,
    )
    for rule in (*rules, _one_group, _text, _quantity):
        verdict = rule(answer, gold)
        if verdict is not None:
            return verdict
    return _math(answer, gold)


def _collection(text: str) -> str:
    r"""What `x \in S` and `S = \{1, 2\}` are about: S, the set or tuple without its name."""
    sides, signs = split_relation(text)
    if len(signs) != 1 or not _NAME.fullmatch(sides[0]):
        return text
    group = split_group(sides[1])
    return sides[1] if signs == [r"\in"] or (signs == ["="] and group and group.opener) else text


def _math(answer: str, gold: str) -> bool:
    try:
        return same_math(answer, gold)
    except Unreadable:
        return False


def _unwrap(text: str) -> str:
    return _UNWRAP.sub(r" \1 ", text).strip()


def _choice(answer: str, gold: str) -> bool | None:
    """Choice letters, alone or in front of the option's value."""
    answer, gold = _unwrap(answer), _unwrap(gold)
    letter, gold_letter = _LETTER.fullmatch(answer), _LETTER.fullmatch(gold)
    label, gold_label = _LABEL.fullmatch(answer), _LABEL.fullmatch(gold)
    given, wanted = letter or label, gold_letter or gold_label
    if given and wanted and (letter or gold_letter):
        return given[1].upper() == wanted[1].upper()
    if gold_letter:
        # A small letter may also be a variable, `e` or `i`.
        return False if gold_letter[1].isupper() else None
    if bool(label) == bool(gold_label):
        return None
    # One of the two names its option: the values may agree.
    return same_answer(label[2] if label else answer, gold_label[2] if gold_label else gold) or None


def _congruence(answer: str, gold: str) -> bool | None:
    left, right = _CONGRUENCE.fullmatch(answer), _CONGRUENCE.fullmatch(gold)
    if left is None or right is None:
        return None
    modulus = int(right[3])
    return left[1] == right[1] and int(left[3]) == modulus > 0 and (int(left[2]) - int(right[2])) % modulus == 0


def _clock(answer: str, gold: str) -> bool | None:
    """Times of day; the half of the day may be left out."""
    left, right = _CLOCK.fullmatch(_unwrap(answer)), _CLOCK.fullmatch(_unwrap(gold))
    if left is None or right is None:
        return None
    halves = {time[4].lower() for time in (left, right) if time[4]}
    return len(halves) < 2 and all(int(left[part] or 0) == int(right[part] or 0) for part in (1, 2, 3))


def _ratio(answer: str, gold: str) -> bool | None:
    """`2:3` equals `4:6` and the fraction 2/3."""
    left, right = split_at(answer, {":"})[0], split_at(gold, {":"})[0]
    if len(left) == len(right) == 1:
        return None
    if len(left) == len(right):
        crossed = [
            (rf"({left[0]})\cdot({b})", rf"({right[0]})\cdot({a})") for a, b in zip(left[1:], right[1:], strict=True)
        ]
        return all(_math(*pair) for pair in crossed)
    fractions = [rf"\frac{{{parts[0]}}}{{{parts[1]}}}" if len(parts) == 2 else parts[0] for parts in (left, right)]
    return {len(left), len(right)} == {1, 2} and _math(*fractions)


def _approximation(answer: str, gold: str) -> bool | None:
    r"""`\sqrt{2} \approx 1.41` states both values, provided that they are close; `x \approx 3` states one."""
    left, right = split_at(answer, {r"\approx"})[0], split_at(gold, {r"\approx"})[0]
    if len(left) == len(right) == 1:
        return None
    sides = [parts[1:] if _NAME.fullmatch(parts[0]) else parts for parts in (left, right)]
    try:
        if not all(roughly_equal(part, parts[0]) for parts in sides for part in parts[1:]):
            return False
    except Unreadable:
        return False
    return any(same_answer(a, g) for a in sides[0] for g in sides[1])


def _matrix(answer: str, gold: str) -> bool | None:
    left, right = split_matrix(answer), split_matrix(gold)
    if left is None and right is None:
        return None
    # A vector may be written as a tuple.
    if left is None or right is None:
        left, right = _column(left or [_entries(answer)]), _column(right or [_entries(gold)])
    return [len(row) for row in left] == [len(row) for row in right] and all(
        same_answer(a, g) for a_row, g_row in zip(left, right, strict=True) for a, g in zip(a_row, g_row, strict=True)
    )


def _column(matrix: list[list[str]]) -> list[list[str]]:
    return [[cell] for row in matrix for cell in row] if 1 in (len(matrix), len(matrix[0])) else matrix


def _entries(text: str) -> list[str]:
    group = split_group(text)
    return list(group.items) if group and group.opener == "(" else [text]


def _as_group(text: str) -> Group | None:
    r"""The items of a list; `a \pm b` is the list of its two values."""
    group = split_group(text) or Group("", "", (text,))
    items = tuple(value for item in group.items for value in expand_signs(item))
    if len(items) == 1 and group.opener != r"\{":
        return None
    return Group(group.opener, group.closer, items, group.disjunction)


def _assigned(group: Group) -> tuple[list[str], list[str]]:
    """Names and values of `x = 1, y = 2`; a name in front of the first item only is dropped; no names otherwise."""
    sides = [split_relation(item) for item in group.items]
    named = [signs == ["="] and _NAME.fullmatch(parts[0]) is not None for parts, signs in sides]
    if all(named):
        pairs = [(parts[0], parts[1]) for parts, _ in sides]
        # Coordinates have an order of their own: `y = 1, x = 2` is the point (2, 1).
        if len({name for name, _ in pairs} & set("xyz")) == len(pairs):
            pairs.sort()
        return [name for name, _ in pairs], [value for _, value in pairs]
    if named[0] and not any(signs for _, signs in sides[1:]):
        return [], [sides[0][0][1], *group.items[1:]]
    return [], list(group.items)


def _group(answer: str, gold: str) -> bool | None:
    left, right = _as_group(answer), _as_group(gold)
    if left is None or right is None:
        return None
    if any(map(is_inequality, left.items + right.items)) and (verdict := compare_sets(answer, gold)) is not None:
        return verdict
    names, values = _assigned(left)
    gold_names, gold_values = _assigned(right)
    if len(values) != len(gold_values) and r"\{" not in (left.opener, right.opener):
        return False
    if len(set(names)) == len(names) > 1 and len(set(gold_names)) == len(gold_names) > 1:
        by_name = dict(zip(names, values, strict=True))
        pairs = zip(gold_names, gold_values, strict=True)
        return all(name in by_name and same_answer(by_name[name], value) for name, value in pairs)
    named = len(set(names)) > 1 or len(set(gold_names)) > 1
    if named or {left.opener, right.opener} & {"(", "["}:
        return _same_brackets(left, right) and all(map(same_answer, values, gold_values))
    return _same_items(values, gold_values, as_set=bool(left.opener or right.opener))


def _same_brackets(left: Group, right: Group) -> bool:
    """A set is no tuple, and the brackets of a pair tell an interval from a point; a bare list may be a tuple."""
    brackets = [(group.opener or "(", group.closer or ")") for group in (left, right)]
    return r"\{" not in (left.opener, right.opener) and (len(left.items) > 2 or brackets[0] == brackets[1])


def _same_items(answers: list[str], golds: list[str], *, as_set: bool) -> bool:
    """The same values in any order, each as often; as a set, however often."""
    if as_set:
        found = all(any(same_answer(a, g) for g in golds) for a in answers)
        return found and all(any(same_answer(a, g) for a in answers) for g in golds)
    left = list(answers)
    for gold in golds:
        match = next((answer for answer in left if same_answer(answer, gold)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _relation(answer: str, gold: str) -> bool | None:
    (left, signs), (right, gold_signs) = split_relation(answer), split_relation(gold)
    # In a list, `x = 1, x = 2`, the relations belong to the items.
    if not (signs or gold_signs) or any(group and not group.opener for group in map(_as_group, (answer, gold))):
        return None
    if is_inequality(answer) or is_inequality(gold):
        return same_inequalities(answer, gold)
    if not gold_signs:
        if _NAME.fullmatch(left[0]):
            return same_answer(left[-1], gold)
        # A computation, "46 + 20 = 66": every side has to be the answer.
        return all(same_answer(side, gold) for side in left)
    if not signs:
        return _NAME.fullmatch(right[0]) is not None and same_answer(answer, right[-1])
    if left[0] == right[0]:
        return same_answer(left[-1], right[-1])
    try:
        return same_equation((left[0], left[-1]), (right[0], right[-1]))
    except Unreadable:
        return False


def _one_group(answer: str, gold: str) -> bool | None:
    """Several values are not one value."""
    return False if (_as_group(answer) is None) != (_as_group(gold) is None) else None


def _text(answer: str, gold: str) -> bool | None:
    if not (_is_text(answer) or _is_text(gold)):
        return None
    return plain_text(answer) == plain_text(gold)


def _is_text(text: str) -> bool:
    words = re.search(r"[A-Za-z]{4,}", _COMMAND.sub(" ", text)) is not None
    return _UNWRAP.fullmatch(text) is not None or (words and split_unit(text)[1] is None)


def _quantity(answer: str, gold: str) -> bool | None:
    (value, unit), (gold_value, gold_unit) = split_unit(answer), split_unit(gold)
    # "5 m" may be a product; it is a length beside another length, or where no letter is expected.
    if unit is None and (gold_unit or not re.search("[A-Za-z]", gold)):
        value, unit = split_unit(answer, single_letters=True)
    if gold_unit is None and unit:
        gold_value, gold_unit = split_unit(gold, single_letters=True)
    if unit is None and gold_unit is None:
        return None
    if unit == gold_unit:
        return same_answer(value, gold_value)
    if unit == PERCENT:
        return gold_unit is None and _math(rf"\frac{{{value}}}{{100}}", gold_value)
    if unit is None or gold_unit is None:
        if same_answer(value, gold_value):
            return True
        if gold_unit == PERCENT:
            return _math(rf"100\cdot({value})", gold_value)
        in_radians = [
            rf"\frac{{\pi}}{{180}}\cdot({v})" if u == DEGREE else v for v, u in ((value, unit), (gold_value, gold_unit))
        ]
        return DEGREE in (unit, gold_unit) and _math(*in_radians)
    scale = unit.scale / gold_unit.scale
    return unit.powers == gold_unit.powers and _math(
        rf"\frac{{{scale.numerator}}}{{{scale.denominator}}}\cdot({value})", gold_value
    )
