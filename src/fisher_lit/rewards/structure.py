r"""Split an answer at its top level: list items, brackets, matrix cells, relations. Strings only, normalised LaTeX."""

import re
from dataclasses import dataclass

_TOKEN = re.compile(r"\\begin\{\w+\}|\\end\{\w+\}|\\text\{[^{}]*\}|\\\\|\\[A-Za-z]+|\\.|[A-Za-z]+|.", re.DOTALL)
_OPENERS = {"(", "[", "{", r"\{", r"\lfloor", r"\lceil"}
_CLOSERS = {")", "]", "}", r"\}", r"\rfloor", r"\rceil"}
_CONNECTIVE = re.compile(r"and|or|\\text\{\s*(?:,\s*)?(?:and|or)\s*\}", re.IGNORECASE)
_RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\approx"}
_SIGN = re.compile(r"\\(p|m)m(?![A-Za-z])")
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", re.DOTALL)


@dataclass(frozen=True)
class Group:
    """Items of a list, tuple, interval or set.

    Attributes:
        opener: "(", "[", r"\\{", or "" for a bare list.
        closer: its counterpart; half-open intervals mix the two kinds.
        items: the texts between the separators.
        disjunction: whether an "or" separates items.
    """

    opener: str
    closer: str
    items: tuple[str, ...]
    disjunction: bool = False


def _tokens(text: str) -> list[tuple[str, int]]:
    """(token, depth) pairs; a bracket has the depth of what it encloses."""
    depth, tokens = 0, []
    for match in _TOKEN.finditer(text):
        token = match.group()
        opens = token in _OPENERS or token.startswith(r"\begin")
        closes = token in _CLOSERS or token.startswith(r"\end")
        depth += opens
        tokens.append((token, depth))
        depth -= closes
    return tokens


def split_at(text: str, separators: set[str]) -> tuple[list[str], list[str]]:
    """The pieces of `text` between top-level separators, and the separators."""
    pieces, found = [""], []
    for token, depth in _tokens(text):
        if depth == 0 and token in separators:
            found.append(token)
            pieces.append("")
        else:
            pieces[-1] += token
    return [piece.strip() for piece in pieces], found


def split_relation(text: str) -> tuple[list[str], list[str]]:
    r"""Sides and relation signs of an equation, an inequality, a chain of them, or a membership."""
    return split_at(text, _RELATIONS)


def enclosed(text: str) -> tuple[str, str, str] | None:
    """(opener, inside, closer) where one pair of round, square or curly brackets encloses the whole text."""
    tokens = _tokens(text)
    if len(tokens) < 2 or tokens[0][0] not in ("(", "[", r"\{") or tokens[-1][0] not in (")", "]", r"\}"):
        return None
    if any(depth == 0 or (depth == 1 and token in _CLOSERS) for token, depth in tokens[:-1]):
        return None
    opener, closer = tokens[0][0], tokens[-1][0]
    return opener, text[len(opener) : -len(closer)].strip(), closer


def strip_brackets(text: str) -> str:
    """`text` without brackets that enclose one value: (5), [5], {5}."""
    while True:
        if text.startswith("{") and text.endswith("}") and all(depth for _, depth in _tokens(text)[:-1]):
            inside = text[1:-1].strip()
        elif group := enclosed(text):
            inside = group[1]
        else:
            return text
        if len(_items(inside)[0]) > 1 or not inside:
            return text
        text = inside


def _items(text: str) -> tuple[list[str], bool]:
    items, disjunction = [""], False
    for token, depth in _tokens(text):
        connective = depth == 0 and _CONNECTIVE.fullmatch(token) is not None
        disjunction |= connective and "or" in token.lower()
        if connective or (depth == 0 and token in (",", ";")):
            items.append("")
        else:
            items[-1] += token
    return [item.strip() for item in items if item.strip()], disjunction


def split_group(text: str) -> Group | None:
    """The items of a list, tuple, interval or set; None for a single value."""
    opener, inside, closer = enclosed(text) or ("", text, "")
    items, disjunction = _items(inside)
    if len(items) < 2 and opener != r"\{":
        return None
    return Group(opener, closer, tuple(items), disjunction)


def split_matrix(text: str) -> list[list[str]] | None:
    r"""Rows of cells of a `pmatrix`, `bmatrix`, `array`, ...; None for anything else."""
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    rows, _ = split_at(match[2], {r"\\"})
    return [split_at(row, {"&"})[0] for row in rows if row] or None


def expand_signs(text: str) -> list[str]:
    r"""`a \pm b` as its two values, `a + b` and `a - b`; other texts as they are."""
    if not _SIGN.search(text):
        return [text]
    upper = _SIGN.sub(lambda m: "+" if m[1] == "p" else "-", text)
    lower = _SIGN.sub(lambda m: "-" if m[1] == "p" else "+", text)
    return [value.removeprefix("+") for value in (upper, lower)]
