"""Compare a final answer with the expected one, as graders of the field do.

Models answer in sentences, so the answer has to be found first. Where it stands depends on what is
expected: a number, a letter of a multiple-choice question, a formula or a text.

Numbers are compared by the rules of GSM8K (`#### 42`), formulas by the rules of MATH
(`\\boxed{...}`); see the datasets `openai/gsm8k` and `hendrycks/competition_math`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Literal, NamedTuple

from agent.options import Match

TOLERANCE = 1e-6
"""Maximum relative difference of two equal numbers, unless both are whole numbers."""

_READ_CHARS = 20_000
"""Characters that are read at the end of an answer, so that a long one costs little work."""

_GSM8K = "####"
"""The mark before the result in answers of GSM8K."""

_GROUPED = r"\d{1,3}(?:,\d{3})+"
_NUMBER = re.compile(
    rf"(?<![\w.])[-+]?[$€£¥]?\s?(?:{_GROUPED}|\d+)?(?:(?<=\d)\.\d+|(?<!\d)\.\d+)?"
    r"(?:[eE][-+]?\d+)?(?:\s?/\s?\d+(?:\.\d+)?)?(?!\w*\d)"
)
_POWER = re.compile(r"\s*(?:\\times|\\cdot|[×x*·])\s*10\s*\^\s*\{?\s*([-+]?\d+)\s*\}?")
"""`3 \\times 10^{5}`: the exponent."""

_INTRODUCES = re.compile(
    r"(?:\b(?:answer|choice|option|result)\b(?:\s+here)?\s+(?:is|would be|should be|equals)"
    r"|\banswer\b|\\therefore)\s*[:=]?\s*",
    re.IGNORECASE,
)
"""Words that introduce an answer in a sentence."""

_CHOICES = "A-J"
_CHOICE = re.compile(rf"[(\[]?([{_CHOICES}])[)\]]?[.:]?")
_SEVERAL = re.compile(rf"\(?[{_CHOICES}]\)?(?:\s?(?:,|;|&|and|/)?\s?\(?[{_CHOICES}]\)?)+[.)]?")
_SMALL = re.compile(r"[(\[]?([a-j])(?:[)\]]\.?|[.:]?$)")
"""A small letter that is a choice: nothing else follows it, or it is in parentheses."""


def matches(
    answer: str,
    expected: str,
    match: Match = "auto",
    question: str = "",
    *,
    tolerance: float = TOLERANCE,
) -> bool:
    """Whether a final answer is the expected one.

    `expected` is the column of a row: the answer itself, or a whole solution of GSM8K or MATH.
    `question` is the task: a number at the end of an answer that only repeats it does not count.
    """
    wanted = extract_expected(expected)
    rule = choose_rule(expected) if match == "auto" else match
    if rule == "exact":
        return answer.strip().casefold() == expected.strip().casefold()
    if rule == "contains":
        return _contains_words(_normalize_text(answer), _normalize_text(wanted))
    answer = answer.strip()[-_READ_CHARS:]
    if rule == "choice":
        letters = _letters(wanted)
        return bool(letters) and choices_in(answer) == letters
    if rule == "number":
        number, given = parse_number(wanted), number_in(answer, question)
        return number is not None and given is not None and are_equal(given, number, tolerance)
    if rule == "boxed" and (found := _last_box(answer)) is not None:
        return are_same(found, wanted)
    if rule == "last_line":
        return are_same(_remove_introduction(_last_line(answer)), wanted)
    return any(are_same(one, wanted) for one in _candidate_texts(answer))


def why_unusable(expected: str, match: Match) -> str | None:
    """Why no answer can be compared with this expected answer by the rule; None if some can."""
    wanted = expected if match == "exact" else extract_expected(expected)
    if not wanted.strip():
        return "has no answer"
    if match == "number" and parse_number(wanted) is None:
        return "is no number"
    if match == "choice" and not _letters(wanted):
        return "names none of the choices A to J"
    return None


def choose_rule(expected: str) -> Match | Literal["text"]:
    """The rule by which `auto` compares answers with this expected answer."""
    wanted = extract_expected(expected)
    if _CHOICE.fullmatch(wanted) or _SEVERAL.fullmatch(wanted):
        return "choice"
    if parse_number(wanted) is not None:
        return "number"
    if "\\" in wanted or _last_box(expected) is not None:
        return "boxed"
    return "text"


def describe_rule(expected: str, match: Match = "auto") -> str:
    """A sentence that says which answers pass, for a row with this expected answer."""
    wanted = extract_expected(expected)
    shown = wanted if len(wanted) <= 60 else f"{wanted[:57]}..."
    condition = {
        "exact": f"it is {shown!r}, ignoring case and outer space",
        "contains": f"it contains {shown!r} as whole words",
        "choice": f"the letter that it ends with, or says after 'answer is', is {shown}",
        "number": "the number after its last `####`, in its last \\boxed{}, after 'answer is', or "
        f"else its last number equals {shown}",
        "boxed": f"what its last \\boxed{{}} holds equals {shown!r}, as formulas",
        "last_line": f"its last line is {shown!r}",
        "text": "the whole of it, its last line, its last \\boxed{} or what follows 'answer is' is "
        f"{shown!r}",
    }
    return f"an answer passes if {condition[choose_rule(expected) if match == 'auto' else match]}"


def extract_expected(column: str) -> str:
    """The answer in a column, which may hold a whole solution of GSM8K or MATH."""
    if _GSM8K in column:
        return column.rpartition(_GSM8K)[2].strip()
    boxed = _last_box(column)
    answer = column if boxed is None else boxed
    return re.sub(r"^\\text(?:bf)?\{([^{}]*)\}$", r"\1", answer.strip()).strip()


# Numbers.


def parse_number(text: str) -> Fraction | None:
    """Read a text that is one number, with a unit or currency; None for any other text."""
    text = _remove_layout(text).strip().rstrip(".")
    text = re.sub(r"^\$(.*)\$$", r"\1", text)  # a formula between dollars
    text = re.sub(r"^[A-Za-z]\w?\s*=\s*", "", text)
    found = list(_numbers(text))
    if len(found) != 1:
        return None
    number, start, end = found[0]
    before, after = text[:start].strip(), text[end:].strip()
    if before or not re.fullmatch(r"%|°[CF]?|[A-Za-z]{1,12}(?:\^?[23]|/[a-z]+)?|", after):
        return None
    return number


def number_in(answer: str, question: str = "") -> Fraction | None:
    """The number that an answer gives: the one after its last mark, or else its last number.

    If the last number only repeats the question, together with the word before it ("below 1000"),
    the number before it counts. None if the answer gives no number.
    """
    for text in _marked_texts(answer):
        if found := list(_numbers(_remove_layout(text))):
            return found[0].value
    text = _remove_layout(answer)
    found = list(_numbers(text))
    asked = _remove_layout(question).casefold()
    while len(found) > 1 and (phrase := _number_phrase(text, found[-1])):
        if phrase.casefold() not in asked:
            break
        found.pop()
    return found[-1].value if found else None


def are_equal(one: Fraction, other: Fraction, tolerance: float = TOLERANCE) -> bool:
    """Whether two numbers are equal: whole ones exactly, others up to a relative `tolerance`."""
    if one == other:
        return True
    if one.denominator == other.denominator == 1:
        return False
    return abs(one - other) <= Fraction(tolerance) * max(abs(one), abs(other))


class _FoundNumber(NamedTuple):
    """A number in a text, with its start and end."""

    value: Fraction
    start: int
    end: int


def _numbers(text: str) -> Iterator[_FoundNumber]:
    end = 0
    for found in _NUMBER.finditer(text):
        if found.start() < end:
            continue  # a power of ten that belongs to the number before it
        digits = re.sub(r"[$€£¥,\s]", "", found[0])
        if not any(c.isdecimal() for c in digits):
            continue
        top, _, below = digits.partition("/")
        try:
            number = Fraction(Decimal(top))
            if below:
                number /= Fraction(Decimal(below))
        except (InvalidOperation, ZeroDivisionError, ValueError):
            continue
        end = found.end()
        if (power := _POWER.match(text, end)) and abs(int(power[1])) < 400:
            number *= Fraction(10) ** int(power[1])
            end = power.end()
        start = found.start() + len(found[0]) - len(found[0].lstrip())
        yield _FoundNumber(number, start, end)


def _number_phrase(text: str, number: _FoundNumber) -> str:
    """A number with the word before it; "" if there is no word."""
    word = re.search(r"([A-Za-z]+)\s+$", text[: number.start])
    return f"{word[1]} {text[number.start : number.end]}" if word else ""


def _remove_layout(text: str) -> str:
    """A text with numbers in ASCII characters, and fractions of LaTeX as a/b."""
    text = unicodedata.normalize("NFKC", text).replace("−", "-").replace("⁄", "/")
    text = text.replace("{,}", ",").replace("\\$", "$").replace("\\%", "%")
    text = re.sub(r"(?<=\d)(?:\\[,;! ]|[\u2009\u202f\u00a0'’_])(?=\d{3}\b)", "", text)
    text = re.sub(r"(?<=\d) (?=\d{3}(?: \d{3})*\b(?! ?\d))", "", text)
    text = re.sub(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", r" \1", text)
    text = re.sub(r"\^\s*\{?\\circ\}?", "°", text)
    text = re.sub(r"\\[dt]?frac\s*\{\s*([-+]?[\d.]+)\s*\}\s*\{\s*([\d.]+)\s*\}", r"\1/\2", text)
    text = re.sub(r"\\[dt]?frac\s*(\d)\s*(\d)", r"\1/\2", text)
    return _remove_emphasis(text)


# Letters of multiple-choice questions.


def choices_in(answer: str) -> frozenset[str]:
    """The letters that an answer chooses; empty if it chooses none."""
    boxed = _last_box(answer)
    if boxed is not None and (letters := _letters(re.sub(r"\\text(?:bf)?|[{}]", "", boxed))):
        return letters
    plain = re.sub(r"\*\*|__|`|\\text|[{}$]", "", answer)
    for found in reversed(list(_INTRODUCES.finditer(plain))):
        rest = re.sub(r"^(?:option|choice)s?\s*", "", plain[found.end() :], flags=re.IGNORECASE)
        # "A" may be a word here: "the answer is A good one".
        word = re.match(r"\s*\(?(?:([B-HJ])|(A)(?=\s(?:because|since|as|and)\b))\b", rest)
        if letters := _leading_letters(rest) or frozenset((word[1] or word[2]) if word else ""):
            return letters
    if (
        letters := _letters(_last_line(plain))
        or _leading_letters(_last_line(plain))
        or _leading_letters(plain)
    ):
        return letters
    if last := re.search(rf"[.!:]\s*\(?([{_CHOICES}])\)?\.?$", _last_line(plain)):
        return frozenset(last[1])
    inside = re.findall(rf"\(([{_CHOICES}])\)", plain)
    if inside:
        return frozenset(inside[-1])
    # "A" and "I" are words.
    alone = re.findall(r"(?<![\w'])([B-HJ])(?![\w'])", plain)
    return frozenset(alone[-1:])


def _letters(text: str) -> frozenset[str]:
    text = text.strip().rstrip(".")
    if _SMALL.fullmatch(text):
        text = text.upper()
    if _CHOICE.fullmatch(text) or _SEVERAL.fullmatch(text):
        return frozenset(re.findall(rf"[{_CHOICES}](?![a-z])", text))
    return frozenset()


def _leading_letters(text: str) -> frozenset[str]:
    """The letters at the beginning of a text: "(B) because", "B. Paris", "A and C"."""
    several = re.match(
        rf"\s*\(?[{_CHOICES}]\)?(?:\s*(?:,|;|&|and)\s*\(?[{_CHOICES}]\)?(?!\w))+", text
    )
    if several:
        return frozenset(re.findall(rf"[{_CHOICES}](?![a-z])", several[0]))
    one = re.match(rf"\s*(?:\(([{_CHOICES}])\)|([{_CHOICES}])(?:[.):,]|\s*$|\s*[\n.]))", text)
    if one is None:
        small = _SMALL.match(text.strip())
        return frozenset(small[1].upper() if small else "")
    return frozenset(one[1] or one[2])


# Texts and formulas.


def are_same(one: str, other: str) -> bool:
    """Whether two texts or formulas are equal as numbers, as lists, or after normalization."""
    first, second = parse_number(one), parse_number(other)
    if first is not None and second is not None:
        return are_equal(first, second)
    left, right = _normalize_formula(one), _normalize_formula(other)
    if left == right:
        return bool(left) or one.strip() == other.strip()
    parts, others = _split_items(left), _split_items(right)
    if len(parts) != len(others) or len(parts) < 2:
        return False
    if left[:1] not in "([" or right[:1] not in "([":  # a list or a set: in any order
        parts, others = sorted(parts), sorted(others)
    elif left[:1] != right[:1] or left[-1:] != right[-1:]:
        return False
    return all(are_same(a, b) for a, b in zip(parts, others, strict=True))


def _split_items(formula: str) -> list[str]:
    """The items of a tuple, a set or a list."""
    inner = re.sub(r"^(?:\\\{|[({\[])(.*?)(?:\\\}|[)}\]])$", r"\1", formula)
    items, depth = [""], 0
    for c in inner:
        depth += (c in "({[") - (c in ")}]")
        if c == "," and depth == 0:
            items.append("")
        else:
            items[-1] += c
    return items


def _normalize_formula(text: str) -> str:
    """A text in a normal form: without layout, spaces, and upper and lower case."""
    text = " ".join(unicodedata.normalize("NFKC", text).replace("−", "-").split())
    text = re.sub(r"^\\[(\[](.*)\\[)\]]$", r"\1", text, flags=re.DOTALL).strip().strip("$").strip()
    text = _remove_emphasis(text)
    text = text.replace("\\\\", ";")  # rows of a matrix
    text = re.sub(r"\\(?:left|right|displaystyle|quad|qquad|[,;:! ])", "", text)
    text = re.sub(
        r"\\(?:text(?:bf|it)?|math(?:rm|bf)|mbox|operatorname)\s*\{([^{}]*)\}", r"\1", text
    )
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\w)\s*(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"(\1)/(\2)", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"\^\s*\{?\\circ\}?|\\degree|°", "", text)
    text = text.replace("\\%", "").replace("%", "").replace("\\$", "").replace("\\cdot", "*")
    text = re.sub(r"\\(?:ldots|dots)", "...", text)
    text = re.sub(r"\((\\?[\w.]+)\)/\((\\?[\w.]+)\)", r"\1/\2", text)
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2", text)
    text = re.sub(r"^[A-Za-z]\w?\s*(?:=|\\in)\s*", "", text)
    text = text.strip().strip("\"'“”‘’").rstrip(".!").strip()
    text = re.sub(r"\s*([-+*/^=<>,;(){}\[\]|])\s*", r"\1", text)
    return re.sub(r"\s+", "" if "\\" in text or "=" in text else " ", text).casefold()


def _normalize_text(text: str) -> str:
    """A text in lower case, with one space between its words."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _contains_words(text: str, wanted: str) -> bool:
    """Whether a text contains `wanted`, not as a part of a longer word or number."""
    start = text.find(wanted) if wanted else -1
    while start >= 0:
        around = text[max(0, start - 1) : start], text[start + len(wanted) :][:1]
        joins = (around[0] + wanted[:1], wanted[-1:] + around[1])
        if not any(len(pair) == 2 and pair.isalnum() for pair in joins):
            return True
        start = text.find(wanted, start + 1)
    return False


def _candidate_texts(answer: str) -> Iterator[str]:
    """The texts that may be the answer itself: all of it, the text after a mark, its last line."""
    yield answer
    yield from _marked_texts(answer)
    yield _remove_introduction(_last_line(answer))


def _marked_texts(answer: str) -> Iterator[str]:
    """Yield the texts after the marks of an answer: `####`, the last box, "answer is"."""
    if _GSM8K in answer:
        yield answer.rpartition(_GSM8K)[2].strip().partition("\n")[0]
    boxed = _last_box(answer)
    if boxed is not None:
        yield boxed
    plain = _remove_emphasis(answer)
    if found := list(_INTRODUCES.finditer(plain)):
        line = plain[found[-1].end() :].strip().partition("\n")[0].strip()
        if line:
            yield line
            if sentence := re.match(r"(.+?)[.!](?:\s|$)", line):
                yield sentence[1]


def _last_box(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` of a text; None if no box is closed."""
    begins = list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))
    if not begins:
        return None
    start, depth = begins[-1].end(), 1
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[start:at]
    return None


def _remove_emphasis(text: str) -> str:
    """Remove the marks of Markdown for bold text and code."""
    return re.sub(r"\*\*|__|`", "", text)


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "").strip()


def _remove_introduction(line: str) -> str:
    """A line without an introduction such as "The answer is", and without emphasis."""
    line = _remove_emphasis(line).strip()
    return re.sub(
        r"^(?:(?:the\s+)?(?:final\s+)?answer\s*(?:is|:|=)\s*)", "", line, flags=re.I
    ).strip()
