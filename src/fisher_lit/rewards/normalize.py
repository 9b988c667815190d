r"""One spelling for each answer: Unicode and plain text to LaTeX, LaTeX synonyms to one command. Strings only."""

import re
import unicodedata
from fractions import Fraction

from fisher_lit.rewards.extract import brace_pairs

# CPython refuses to convert longer decimal strings to integers (above 4300 digits).
_MAX_DIGITS = 4000
# Stands for `\\`, which would otherwise read as the start of a command.
_ROW = "\ue000"

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−–‐‑﹣－", "-"),
        **dict.fromkeys("·⋅•∙", r"\cdot "),
        **dict.fromkeys("，、", ","),
        **{"×": r"\times ", "÷": r"\div ", "±": r"\pm ", "∓": r"\mp ", "∞": r"\infty ", "°": r"^{\circ}", "⁄": "/"},
        **{"≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "≡": r"\equiv "},
        **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "∖": r"\setminus "},
        **{"√": r"\sqrt ", "π": r"\pi ", "θ": r"\theta ", "…": r"\ldots ", "。": ".", "⟨": "(", "⟩": ")", "’": "'"},
    }
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")

# Applied in order.
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|boldsymbol|bm)(?![A-Za-z])|\\!\s*", ""),
        # Digit groups "10\,000" and "10{,}000".
        (r"(?<=\d)\\,(?=\d{3}(?!\d))|\{\s*,\s*\}(?=\d{3})", ","),
        (r"\\[,;: ]|~|\\q?quad(?![A-Za-z])|\\hspace\s*\{[^{}]*\}|\\[()\[\]]|(?<!\\)\$", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (
            r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf)|[mh]box|operatorname)(?![A-Za-z])\*?\s*(?=\{)",
            r"\\text",
        ),
        (r"\\(?:text(?:bf|it|rm)|math(?:rm|bf|it|sf))\s+([A-Za-z])", r"\\text{\1}"),
        (r"\\leq(?:slant|q)?(?![A-Za-z])|<=", r"\\le "),
        (r"\\geq(?:slant|q)?(?![A-Za-z])|>=", r"\\ge "),
        (r"\\neq(?![A-Za-z])|(?<=\s)!=(?=\s)", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\varnothing(?![A-Za-z])|^\\\{\s*\\\}$", r"\\emptyset "),
        (r"\\[lr]?vert(?![A-Za-z])", "|"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\backslash(?![A-Za-z])", r"\\setminus "),
        (r"\\mathbb\s*R(?![A-Za-z])|\\(?:R|reals)(?![A-Za-z])", r"\\mathbb{R}"),
        (r"\\c?dots(?![A-Za-z])|\.\.\.", r"\\ldots "),
        (r"\^\s*\\circ(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}|\\degree(?![A-Za-z])", r"^{\\circ}"),
        (r"\\%|%", r"\\%"),
        (r"\*\*", "^"),
        (r"\*", r"\\cdot "),
        # Scientific notation: 1.5e-3.
        (r"(?<=\d)[eE]([+-]?\d+)(?![\w.])", r"\\cdot 10^{\1}"),
        # Plain names of functions and constants.
        (r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|arcsin|arccos|arctan)(?![A-Za-z])", r"\\\1"),
        (r"(?<![\\A-Za-z])(pi|theta|infty)(?![A-Za-z])", r"\\\1 "),
        (r"(?<![\\A-Za-z])infinity(?![A-Za-z])", r"\\infty "),
        # Upright letters are letters, unless they may be a unit behind a number.
        (r"\\text\s*\{\s*([eid])\s*\}", r"\1"),
        (r"(?<![\d})\s])\s*\\text\s*\{\s*([A-Za-z])\s*\}", r" \1"),
        (r"\\text\s*\{\s*\}", ""),
    ]
]
_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?![\d/]|[, ]\d)")
_ARGUMENT = re.compile(r"\s*(?:(\{)|(\\[A-Za-z]+|[^\s{}\\]))")
_RADICAND = re.compile(r"\\sqrt\s*(\d+)(?=\D|$)")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)")
_FRACTION = re.compile(r"([+-]?)(?:(\d+)/(\d+)|\\frac\{([+-]?\d+)\}\{(\d+)\})")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")

_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_WORDS = {word: number for number, word in enumerate(_ONES)}
_WORDS |= {word: 10 * number for number, word in enumerate(_TENS, 2)}
_WORDS |= {f"{tens}-{ones}": _WORDS[tens] + _WORDS[ones] for tens in _TENS for ones in _ONES[1:10]}
_PHRASES = {
    **dict.fromkeys(
        ["no solution", "no solutions", "no real solution", "no real solutions", "empty set"], r"\emptyset"
    ),
    **dict.fromkeys(["all real numbers", "all reals", "real numbers"], r"\mathbb{R}"),
}


def plain_text(text: str) -> str:
    r"""The words of a text answer in lower case: no `\text{}`, article, quotes, brackets or final stop."""
    words = " ".join(_TEXT.sub(r" \1 ", text).replace("\\ ", " ").lower().split())
    words = words.strip(" .,;:!?\"'`")
    return re.sub(r"^(?:an?|the) (?=[a-z]{2})", "", words)


def _brace_arguments(text: str, command: str, count: int) -> str:
    r"""Put braces around the arguments of every `command`: `\frac12` and `\sqrt2` become `\frac{1}{2}`, `\sqrt{2}`."""
    pieces = re.split(rf"\\{command}(?![A-Za-z])", text)
    done = pieces[0]
    for piece in pieces[1:]:
        position = len(re.match(r"\s*(?:\[[^\]]*\])?", piece).group())  # type: ignore[union-attr]
        arguments, pairs = piece[:position].strip(), brace_pairs(piece)
        for _ in range(count):
            match = _ARGUMENT.match(piece, position)
            if match is None:
                break
            end = pairs.get(match.start(1), -1) if match.group(1) else match.end() - 1
            if end < 0:
                break
            content = piece[match.start(1) + 1 : end] if match.group(1) else match.group(2)
            arguments, position = f"{arguments}{{{content}}}", end + 1
        done += f"\\{command}{arguments}{piece[position:]}"
    return done


def _round_to_braces(text: str) -> str:
    r"""`\sqrt(x+1)` to `\sqrt{x+1}`."""
    while match := re.search(r"\\sqrt\s*\(", text):
        depth, end = 0, -1
        for position in range(match.end() - 1, len(text)):
            depth += (text[position] == "(") - (text[position] == ")")
            if depth == 0:
                end = position
                break
        if end < 0:
            return text
        text = f"{text[: match.start()]}\\sqrt{{{text[match.end() : end]}}}{text[end + 1 :]}"
    return text


def _unicode_to_latex(text: str) -> str:
    # The root sign spans all digits that follow; the LaTeX command takes one.
    text = re.sub(r"√\s*(\d+)", r"\\sqrt{\1}", text)
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda m: f"^{{{m.group().translate(_SUPERSCRIPTS)}}}", text)
    text = re.sub(r"[¼-¾⅐-⅞]", lambda m: " " + unicodedata.normalize("NFKC", m.group()), text)
    return unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)


def _join_digit_groups(match: re.Match[str]) -> str:
    # Inside brackets a comma separates: (100,200) is a pair.
    before = match.string[: match.start()]
    if sum(before.count(c) for c in ("(", "[", "\\{")) > sum(before.count(c) for c in (")", "]", "\\}")):
        return match.group()
    return re.sub(r"[, ]", "", match.group())


def normalize(text: str) -> str:
    r"""Canonical spelling of an answer; applying it twice changes nothing.

    Args:
        text: LaTeX, plain text, or both, without the box.

    Returns:
        LaTeX with one space after list commas, braced arguments, one command per notion and no layout commands.
        Numbers lose their digit-group separators, number words become digits.
    """
    text = _unicode_to_latex(text.strip().strip("*_` ")).replace("\\\\", _ROW)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _GROUPED.sub(_join_digit_groups, text)
    text = _round_to_braces(text)
    text = _brace_arguments(_brace_arguments(text, "sqrt", 1), "frac", 2)
    # Spaces matter between two words or numbers and nowhere else.
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", text)
    text = re.sub(r"(\\[A-Za-z]+) (?=\d)", r"\1", text)
    text = text.replace(_ROW, "\\\\").replace(",", ", ").lstrip(" ,;:").rstrip(" .,;:")
    if (match := _TEXT.fullmatch(text)) and re.search(r"\d|,| and ", match[1]):
        text = match[1]
    words = plain_text(text)
    if words in _WORDS:
        return str(_WORDS[words])
    return _PHRASES.get(words, text)


def plain_number(text: str) -> Fraction | None:
    r"""Exact value of a normalised integer, decimal, `a/b` or `\frac{a}{b}`; None for anything else."""
    if len(text) > _MAX_DIGITS:
        return None
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    if match := _FRACTION.fullmatch(text):
        sign, *groups = match.groups()
        numerator, denominator = (int(group) for group in groups if group is not None)
        if denominator:
            return Fraction(-numerator if sign == "-" else numerator, denominator)
    return None


def cheap_verdict(answer: str, gold: str) -> bool | None:
    """Decide the easy cases without symbolic algebra.

    Args:
        answer: normalised answer.
        gold: normalised reference.

    Returns:
        True for equal strings, the exact comparison where both are plain numbers, False where either is empty,
        None where neither applies.
    """
    if not answer or not gold:
        return False
    if answer == gold:
        return True
    left, right = plain_number(answer), plain_number(gold)
    return None if left is None or right is None else left == right
