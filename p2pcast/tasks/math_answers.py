"""Reward of an answer to a question of mathematics [PULSE, appendix C.3], and the comparison by math-verify.

Promises: ``parts_of`` takes time in proportion to the text. ``same_value`` compares only texts that are short, shallow
and without large powers; whatever the comparison raises counts as unlike. A comparison may still hang, so callers run
it in a process that can be killed.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any, Final

from p2pcast.ground.errors import LocalError

CORRECT, FORMAT, THINKING, NO_TRAILING = 0.7, 0.15, 0.1, 0.05
"""Weights of the parts of the reward."""
MAX_ANSWER: Final = 512
"""Most characters of an answer that is compared."""
MAX_DEPTH: Final = 8
"""Most brackets of an answer that are open at once: parsers recurse."""
MAX_NUMBER: Final = 64
"""Most digits of one number of an answer."""
MAX_EXPONENT: Final = 999
MAX_GROUP_EXPONENT: Final = 16
"""Of a bracket, which may hold a sum: its power is multiplied out."""
MAX_POWERS: Final = 100_000
"""Largest product of an answer's exponents: powers may be raised to powers."""
_BOX: Final = re.compile(r"\\boxed\s{0,8}\{")
_THOUGHT_ENDS: Final = "</think>"
_TRAILING: Final = re.compile(r"[\s.$]|\\[)\]]")
"""Text that may follow the box: the end of its formula and of its sentence."""
_UNBOUNDED: Final = re.compile(r"!|factorial|binom|gamma|zeta|\\(?:sum|prod|int|lim|tbinom|dbinom)", re.IGNORECASE)
"""Short texts that may stand for endless work. No final answer needs them."""
_POWER: Final = re.compile(r"\^|\*\*|exp\b")
_DIGITS: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Parts:
    """Of a policy's text. ``answer``: the content of its last box; None without one. ``thought``: text before
    ``</think>``, and the answer behind it. ``ends``: nothing follows the box.
    """

    answer: str | None
    thought: bool
    ends: bool


def parts_of(text: str) -> Parts:
    thought, closed, rest = text.rpartition(_THOUGHT_ENDS)
    found = last_box(rest)
    if found is None:
        return Parts(None, False, False)
    answer, end = found
    considered = bool(closed) and bool(thought.replace("<think>", "").strip())
    return Parts(answer.strip() or None, considered, not _TRAILING.sub("", rest[end:]))


def last_box(text: str) -> tuple[str, int] | None:
    r"""The content of the last whole ``\boxed{…}`` that lies in no other box, and where the text goes on."""
    found, at = None, 0
    while (box := _BOX.search(text, at)) is not None:
        end = _closing(text, box.end())
        if end is None:
            break
        found, at = (text[box.end() : end], end + 1), end + 1
    return found


def _closing(text: str, at: int) -> int | None:
    """Where the bracket closes that is open before ``at``."""
    depth = 1
    while at < len(text):
        if text[at] == "\\":
            at += 1  # the next character is text
        elif text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return at
        at += 1
    return None


def reward_of(text: str, answer: str, *, ended: bool) -> float:
    """``answer``: the right one. ``ended``: the policy ended its turn; otherwise more text might have followed."""
    parts = parts_of(text)
    if parts.answer is None:
        return 0.0
    found = FORMAT + THINKING * parts.thought + NO_TRAILING * (parts.ends and ended)
    return round(found + CORRECT * same_value(answer, parts.answer), 6)


def comparable(answer: str) -> bool:
    """Whether little work compares the answer: no huge numbers or powers, no deep nesting, no megabytes."""
    if len(answer) > MAX_ANSWER or _UNBOUNDED.search(answer):
        return False
    if any(len(number) > MAX_NUMBER for number in _DIGITS.findall(answer)):
        return False
    depth = 0
    for character in answer:
        depth += (character in "{([") - (character in "})]")
        if depth > MAX_DEPTH:
            return False
    return _small_powers(answer)


def _small_powers(answer: str) -> bool:
    product = 1
    for power in _POWER.finditer(answer):
        exponent, rest = _first_group(answer[power.end() :].lstrip())
        if _POWER.search(exponent) or _POWER.match(rest.lstrip()):
            return False  # a power as an exponent
        largest = max(map(int, _DIGITS.findall(exponent)), default=1)
        product *= max(largest, 1)
        group = answer[: power.start()].rstrip().endswith((")", "]", "}"))
        if largest > (MAX_GROUP_EXPONENT if group else MAX_EXPONENT) or product > MAX_POWERS:
            return False
    return True


def _first_group(text: str) -> tuple[str, str]:
    """The bracketed group or the number that ``text`` begins with, and the rest."""
    if number := re.match(r"[-+]?\d+", text):
        return number[0], text[number.end() :]
    depth = 0
    for place, character in enumerate(text, 1):
        depth += (character in "{([") - (character in "})]")
        if depth <= 0:
            return text[:place], text[place:]
    return text, ""


def same_value(right: str, given: str) -> bool:
    if _plain(right) == _plain(given):
        return True
    if not comparable(given):
        return False
    parse, verify = _math_verify()
    try:
        # Without its own time limits: they need SIGALRM, which works in a process's main thread alone.
        expected, found = (parse(f"${text}$", parsing_timeout=None) for text in (right, given))
        if _undefined(found) and not _undefined(expected):
            return False  # math-verify takes infinity to the power of infinity for any number, by chance
        _same_chances()
        return bool(verify(expected, found, timeout_seconds=None))
    except (Exception, RecursionError, MemoryError):  # noqa: BLE001 - parsers of foreign text raise anything
        return False


def _plain(text: str) -> str:
    return "".join(text.split())


def _undefined(parsed: list[Any]) -> bool:
    """Any reading of an answer is not finite. Intervals may end at infinity."""
    import sympy

    def endless(one: Any) -> bool:
        if isinstance(one, sympy.Interval | sympy.Union):
            return any(endless(part) for part in one.args if part.doit() not in (sympy.oo, -sympy.oo))
        return any(value.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan) for value in (one, one.doit()))

    return any(endless(one) for one in parsed if isinstance(one, sympy.Basic))


def _same_chances() -> None:
    """Equal answers get equal rewards: sympy compares at random points."""
    from sympy.core import random

    random.seed(0)


def _math_verify() -> tuple[Any, Any]:
    try:
        import math_verify
    except ImportError:
        raise LocalError("task math needs math-verify: pip install 'p2pcast[math]'") from None
    # The package warns about missing time limits; the process has them.
    logging.getLogger(math_verify.__name__).setLevel(logging.CRITICAL)
    return math_verify.parse, math_verify.verify
