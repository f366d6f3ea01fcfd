"""Rewards of answers, and answers made to cost time or memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("math_verify", reason="needs the extra math")

from p2pcast.tasks.math_answers import MAX_ANSWER, comparable, last_box, parts_of, reward_of, same_value

THOUGHT = "<think>17 times 23</think>"

HUGE = [
    "9^{9^{9}}",
    "9^{9}^{9}",
    "9**9**9",
    "9^999999999",
    "9^ {999999999}",
    "((10^{99})^{99})^{99}",
    "(1+i)^{999}",
    "{1+i} ^ 999",
    "(a+b+c+d+e+f+g+h)^{99}",
    "\\sin(\\exp(999999999))",
    "\\left(x+y\\right)^{17}",
    "99999!",
    "\\sum_{n=1}^{9} n",
    "\\prod_{n} n",
    "\\binom{9}{3}",
    "1" * 65,
    "{" * 40,
    "\\sqrt{" * 40 + "2" + "}" * 40,
    "(" * 9 + "1" + ")" * 9,
    "x" * (MAX_ANSWER + 1),
]
"""Answers that are not compared."""


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (THOUGHT + "\\boxed{391}", 1.0),
        (THOUGHT + "It is $\\boxed{391}$.\n", 1.0),
        (THOUGHT + "\\[\\boxed{391}\\]", 1.0),
        (THOUGHT + "\\boxed{390} or \\boxed{391}", 1.0),
        (THOUGHT + "\\boxed{392}", 0.3),
        (THOUGHT + "\\boxed{391} is the answer", 0.95),
        ("17 times 23</think>\\boxed{391}", 1.0),
        ("\\boxed{391}", 0.9),
        ("<think>  </think>\\boxed{391}", 0.9),
        ("<think>\\boxed{391}</think>", 0.0),
        ("<think>\\boxed{391}", 0.9),
        ("391", 0.0),
        ("\\boxed{391", 0.0),
        ("\\boxed{ }", 0.0),
        ("", 0.0),
    ],
)
def test_each_part_of_the_reward_has_its_weight(text: str, reward: float) -> None:
    assert reward_of(text, "391", ended=True) == reward


def test_an_answer_that_was_cut_off_gets_nothing_for_its_end() -> None:
    assert reward_of(THOUGHT + "\\boxed{391}", "391", ended=False) == 0.95


@pytest.mark.parametrize(
    ("right", "given"),
    [
        ("\\frac{3}{8}", "3/8"),
        ("\\frac{3}{8}", "0.375"),
        ("5\\sqrt{2}", "\\sqrt{50}"),
        ("12", "x = 12"),
        ("\\text{no}", "\\text{no}"),
        ("x^{1/2}", "x^{\\frac{1}{2}}"),
        ("9^{9}", "387420489"),
    ],
)
def test_equal_values_in_other_forms_are_right(right: str, given: str) -> None:
    assert same_value(right, given)


@pytest.mark.parametrize("given", HUGE)
def test_an_answer_of_unbounded_work_is_not_compared(given: str) -> None:
    assert not comparable(given)


def test_hostile_answers_reach_no_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pcast.tasks.math_answers._math_verify", lambda: pytest.fail("compared"))
    for answer in HUGE:
        assert not same_value("3", answer)


@pytest.mark.parametrize(
    "given", ["x_{" * 8 + "}" * 8, "\\frac{1}{0}", "\\infty^{\\infty}", "\\frac{}{}", "1+" * 200 + "1"]
)
def test_an_odd_answer_is_wrong_and_raises_nothing(given: str) -> None:
    assert not same_value("3", given)


def test_an_answer_equal_in_its_text_is_right_at_any_size() -> None:
    assert same_value("9^{9^{9}}", "9^{9^{ 9 }}")


@pytest.mark.parametrize("right", ["3", "\\frac{1}{2}", "x+1", "(1,2)", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"])
@pytest.mark.parametrize(
    "given", ["\\infty^{\\infty}", "(\\infty^{\\infty}, 2)", "0^{-1}", "\\log(0)^{\\log(0)}", "0/0"]
)
def test_an_undefined_value_equals_no_number(monkeypatch: pytest.MonkeyPatch, right: str, given: str) -> None:
    from math_verify import parse

    # math-verify itself takes some of these values for equal in some processes, and not in others.
    monkeypatch.setattr("p2pcast.tasks.math_answers._math_verify", lambda: (parse, lambda *_, **__: True))
    assert not same_value(right, given)


def test_an_endless_interval_is_right_where_the_right_answer_is_endless() -> None:
    assert same_value("[0, \\infty)", "[0,\\infty)")
    assert same_value("x \\geq 2", "[2, \\infty)")


def test_megabytes_of_boxes_are_read_once() -> None:
    assert parts_of("\\boxed{" * 300_000).answer is None
    assert parts_of("\\boxed{1}" * 300_000).answer == "1"
    assert parts_of("</think>" * 300_000 + "\\boxed{1}").answer == "1"


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="\\boxed{}</think> 1.$^", max_size=80))
def test_rewards_lie_between_nothing_and_one(text: str) -> None:
    assert 0.0 <= reward_of(text, "no answer", ended=True) <= 0.3 or "no answer" in text


@given(st.text(alphabet="ab{}\\ ", max_size=30), st.text(max_size=20))
def test_the_content_of_a_box_is_found_with_its_brackets(before: str, content: str) -> None:
    content = content.replace("\\", "").replace("{", "").replace("}", "")
    found = last_box(before.replace("{", "").replace("\\", "") + "\\boxed{a{" + content + "}}")
    assert found is not None
    assert found[0] == "a{" + content + "}"
