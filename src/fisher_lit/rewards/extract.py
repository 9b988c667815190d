"""Find the final answer in a model's response. Strings in, strings out."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_BOX_CONTENT = re.compile(r"-?\d+(?:\.\d+)?|[A-Za-z]\b")
# What may stand between two boxes that are one answer: "\boxed{2} and \boxed{3}".
_JOINED = re.compile(
    r"(?:[\s$]|\\[()])*(?:[,;]|,?\s*(?:and|or)\b|,?\s*\\text\s*\{\s*(?:and|or)\s*\})(?:[\s$]|\\[()])*", re.IGNORECASE
)
# A box that only repeats the instruction: empty, "...", "answer", "your answer".
_PLACEHOLDER = re.compile(
    r"(?:[\s.…~]|\\[lc]?dots\b|\\[ ,;!]|\\text\s*\{\s*\})*"
    r"|(?:\\text\s*\{)?\s*(?:your |the )?(?:final )?answer(?: here)?\s*\}?",
    re.IGNORECASE,
)

_EMPHASIS = r"[*_`\s]*"
_STATEMENT = re.compile(
    # GSM8K's tail: "#### 18".
    r"^[ \t]*####"
    # "The (final) answer (to the question) is (:) 5".
    r"|\banswers?\b[^.:：\n=]{0,60}?\b(?:is|are)\b"
    r"(?!\s+(?:not|within|in the form|correct|right|wrong|helpful)\b)\s*[:：]?"
    # "Answer: 5", "**Final Answer:** 5" and the Chinese form.
    r"|(?:\banswers?\b|答案)" + _EMPHASIS + r"[:：=是为]"
    # A heading of its own; the answer follows on the next line.
    r"|^[*_`#> \t]*(?:the\s+)?final answer" + _EMPHASIS + r"$",
    re.IGNORECASE | re.MULTILINE,
)
_LEAD = re.compile(r"(?:therefore|thus|then|hence|simply|just|[:：,*_`\s])*", re.IGNORECASE)
# The sentence goes on after the answer: a full stop and a space, or a subordinate clause.
_SENTENCE_END = re.compile(r"[.。!](?=[\s*_]|$)|,?\s(?:because|since|as|which|where|so)\b|\n", re.IGNORECASE)
_MATH_SPAN = re.compile(r"\$\$(.+?)\$\$|\$((?:\\\$|[^$])+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_BARE_NUMBER = re.compile(r"[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|[-+−]?\.\d+")


def brace_pairs(text: str) -> dict[int, int]:
    r"""Position of every `{` that closes, mapped to that of its `}`; `\{` and `\}` are literal and do not count."""
    pairs: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            pairs[opened.pop()] = match.start()
    return pairs


def find_boxes(text: str) -> list[tuple[int, int, str]]:
    r"""All complete boxes as (start, end, content), ordered by start.

    `\boxed{...}`, `\fbox{...}` and the brace-less `\boxed2` count; a box whose braces never close does not.
    """
    boxes: list[tuple[int, int, str]] = []
    pairs = brace_pairs(text)
    for match in _BOX.finditer(text):
        position = match.end()
        if position in pairs:
            end = pairs[position]
            boxes.append((match.start(), end + 1, text[position + 1 : end].strip()))
        elif bare := _BARE_BOX_CONTENT.match(text, position):
            boxes.append((match.start(), bare.end(), bare.group()))
    return boxes


def _boxed(text: str) -> str | None:
    boxes = [box for box in find_boxes(text) if not _PLACEHOLDER.fullmatch(box[2])]
    if not boxes:
        return None
    start, _, content = boxes.pop()
    parts = [content]
    while boxes and _JOINED.fullmatch(text, boxes[-1][1], start):
        start, _, content = boxes.pop()
        parts.insert(0, content)
    return " , ".join(parts)


def _visible(response: str) -> str:
    """The response without its thinking: what follows the last `</think>`, up to a `<think>` that never closes."""
    return response.rpartition("</think>")[2].partition("<think>")[0]


def _stated(text: str) -> str | None:
    heads = list(_STATEMENT.finditer(text))
    if not heads:
        return None
    position = _LEAD.match(text, heads[-1].end()).end()  # type: ignore[union-attr]
    tail_start, inside = position, ""
    if span := _MATH_SPAN.match(text, position):
        inside = next(group for group in span.groups() if group is not None)
        tail_start = span.end()
    end = _SENTENCE_END.search(text, tail_start)
    tail = text[tail_start : end.start() if end else len(text)]
    answer = re.sub(r"\*\*|__|`", "", f"{inside} {tail}").strip(" \t\n*")
    return answer if answer and "\\boxed" not in answer else None


def final_answer(response: str) -> str | None:
    r"""The answer a response commits to.

    In this order: the last complete box; the last marked statement ("The answer is ...", "Final answer: ...",
    "#### ..."); the whole response where it is nothing but a number. Boxes joined by "and", "or" or a comma are one
    answer, given as a list. Empty boxes and boxes that repeat the instruction are passed over. Text before
    `</think>`, and text after a `<think>` that never closes, does not count.

    Args:
        response: the generated text.

    Returns:
        The answer as written, without the box and outer spaces, or None where the response commits to none.
    """
    text = _visible(response)
    answer = _boxed(text) or _stated(text)
    if answer is None and _BARE_NUMBER.fullmatch(text.strip()):
        answer = text.strip()
    return answer
