"""Where the final answer of a response stands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.graders.answers import readings
from services.reward.graders.extraction import final_answer, is_bare_answer, only_answer_after


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("\\boxed{5} no, \\boxed{7}", "7"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{8}. It stands in \\boxed as asked", "8"),
        ("#### 11\n#### 12\nthe end", "12"),
        ("#### 11\n\\boxed{3}", "3"),
        ("answer: 5\n#### 12", "12"),
        ("ANSWER: 41\nso the Answer: 42.", "42."),
        ("**Answer:** 42\nThanks", "42"),
        ("**Final answer**: 42", "42"),
        ("Answer:\n\n$$42$$\nbye", "42"),
        ("Answer: \\[\n42\n\\]", "42"),
        ("The answer is: $8$. I hope it is correct.", "$8$"),
        ("The answer is 2 2/3", "2 2/3"),
        ("3x + 4y = 0", "3x + 4y = 0"),
        ("blue.", "blue."),
        ("<think>answer: 1</think>2", "2"),
        ("<think>a</think><think>b</think>\\boxed{3}", "3"),
        ("thinking without a start </think> 4", "4"),
    ],
)
def test_the_final_answer_stands_where_the_rules_say(response: str, answer: str) -> None:
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    "response",
    [
        "",
        " \n ",
        "\\boxed{}",
        "\\boxed{7} hmm \\boxed{",
        "\\boxed{7} and answer: 7 then \\boxed{8",
        "<think>\\boxed{3}",
        "<think>a</think>\\boxed{3}<think>wait",
        "I do not know, so 3",
        "Answer:",
        "####",
    ],
)
def test_an_unusable_mark_is_no_answer(response: str) -> None:
    assert final_answer(response) is None


def test_a_delimiter_must_occur_exactly_once() -> None:
    assert only_answer_after("a=12", "=") == "12"
    assert only_answer_after("a12", "=") is None
    assert only_answer_after("a=1=2", "=") is None
    assert only_answer_after("<think>=</think>=3", "=") == "3"


@pytest.mark.parametrize(
    "text", ["-1 + exp(16)", "pi/2", "11 5/6", "\\dfrac97", "2xy", "(A)", "x<3"]
)
def test_mathematics_and_one_word_are_bare_answers(text: str) -> None:
    assert is_bare_answer(text)


@pytest.mark.parametrize("text", ["The answer is 2", "it is 4", "4\n5", "", "x" * 401])
def test_prose_is_no_bare_answer(text: str) -> None:
    assert not is_bare_answer(text)


_PIECES = st.sampled_from(
    ["\\boxed{", "}", "{", "answer:", "####", "</think>", "<think>", "\\frac", "\\", "1", ",", "(",
     "]", "\\{", "\\}", "^", "$", " ", "\n", "x", "<", "=", "\\cup", "\\pm", "or", "%", "\\text{"]
)  # fmt: skip


@given(st.lists(_PIECES, max_size=60).map("".join))
def test_no_text_breaks_the_reading(text: str) -> None:
    answer = final_answer(text)
    assert answer is None or answer.strip()
    for reading in readings(answer or text):
        hash(reading)  # a value of frozen parts, whatever the text
