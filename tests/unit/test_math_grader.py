"""The mathematics grader: every case of the case file, and the rules behind them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.types import GraderKind, Verdict
from services.reward.graders.algebra import SYMPY_ERRORS
from services.reward.graders.expressions import UnreadableError, read_expression
from services.reward.graders.grader import BadReferenceError, GradingTask, Score
from services.reward.graders.math import MathGrader

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent.parent / "data" / "math_cases.jsonl").open(encoding="utf-8")
]
NOT_YET_SUPPORTED: set[str] = set()
GRADER = MathGrader()


def task(response: str, **reference: object) -> GradingTask:
    return GradingTask(GraderKind.MATH, response, json.dumps(reference))


def grade(response: str, answer: str, **reference: object) -> Score:
    return GRADER.grade(task(response, answer=answer, **reference))


def boxed(text: str) -> str:
    return f"So the answer follows: \\boxed{{{text}}}."


def test_the_case_file_is_whole() -> None:
    assert [case["id"] for case in CASES] == [f"m{number:02d}" for number in range(1, 38)]


def test_all_cases_get_their_reward_but_those_listed_as_not_yet_supported() -> None:
    wrong = {
        case["id"]
        for case in CASES
        if grade(case["response"], case["ground_truth"]).reward != case["reward"]
    }
    assert wrong == NOT_YET_SUPPORTED


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_quick_path_agrees_with_the_whole_grader_or_abstains(case: dict[str, str]) -> None:
    quick = GRADER.grade_now(task(case["response"], answer=case["ground_truth"]))
    assert quick in (None, grade(case["response"], case["ground_truth"]))


@pytest.mark.parametrize("case_id", ["m01", "m04", "m05", "m14", "m22", "m24", "m28", "m30", "m33"])
def test_plain_answers_need_no_worker(case_id: str) -> None:
    case = CASES[int(case_id[1:]) - 1]
    assert GRADER.grade_now(task(case["response"], answer=case["ground_truth"])) is not None


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("5", "x=5"),
        ("x=5", "5"),
        ("10", "5+5=10"),
        ("x<3", "(-\\infty,3)"),
        ("[1,3)", "3 > x \\ge 1"),
        ("(-\\infty,1)\\cup(2,\\infty)", "(2,\\infty) \\cup (-\\infty, 1)"),
        ("1,2", "x=1 \\text{ or } x=2"),
        ("\\pm 3", "3, -3"),
        ("1\\pm\\sqrt{2}", "1-\\sqrt2, 1+\\sqrt2"),
        ("\\frac{\\sqrt{3}}{2}", "sqrt(3)/2"),
        ("2\\sqrt{2}", "\\sqrt{8}"),
        ("0.5", "\\frac12"),
        ("x^2+2x+1", "(x+1)^2"),
        (
            "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
            "\\begin{bmatrix}1 & 2\\\\ 3 & 4\\end{bmatrix}",
        ),
        ("5\\text{ cm}", "5"),
        ("90^\\circ", "90"),
        ("A", "\\text{(A)}"),
        ("blue", "\\text{Blue}"),
        ("3\\times10^{8}", "300000000"),
        ("\\infty", "∞"),
        ("\\sin^2 x", "1-\\cos^2 x"),
        ("\\binom{5}{2}x", "10x"),
        ("\\sqrt[3]{2}", "2**(1/3)"),
        ("\\log_2 3", "\\frac{\\ln 3}{\\ln 2}"),
        ("3+2i", "2i+3"),
        ("2xy", "2yx"),
        ("10!", "3628800"),
        ("9^{9^{9^{9}}}", "9^{9^{9^{9}}}"),
        ("x^2+y^2=4", "y^2 = 4-x^2"),
        ("x+y<3", "-x-y>-3"),
        ("(3,\\frac{\\pi}{2})", "(3, \\pi/2)"),
        ("28", "28\\%"),
        ("0.28", "28\\%"),
        ("\\$5.00", "5"),
        ("\\emptyset", "\\varnothing"),
        ("(-\\infty,-3)\\cup(3,\\infty)", "x<-3 \\text{ or } x>3"),
        ("12\\pi", "12\\pi\\text{ cm}^2"),
        ("12\\pi\\text{ cm}^2", "12\\pi \\mathrm{cm} ^ { 2 }"),
        ("12\\text{ cm}^2", "12 square cm"),
        ("\\frac{1}{6}", "0.1\\overline{6}"),
        ("\\emptyset", "\\{ \\}"),
        ("12", "\u200f12\u200b"),
        ("1000", "1\\,000"),
        ("1000000", "1 000 000"),
        ("101_2", "101_{2}"),
        ("3\\text{ cm}^2", "3"),
        ("5", "\u20ac5"),
        ("x", "\\frac{x^2}{x}"),
        ("(-\\infty,\\infty)", "\\mathbb{R}"),
        ("x\\in\\mathbb R", "\\text{all real numbers}"),
        ("(0,1)", "]0,1["),
        ("\\left]0;1\\right]", "(0,1]"),
        ("[0,1)", "x \\in \\left[0;1\\right["),
        ("(-\\infty,\\frac{1}{2})\\cup[2,3]", "]-\\infty,\\frac12[ \\cup [2,3]"),
        ("(2,\\infty)", "\\{x \\mid x > 2\\}"),
        ("\\{x \\in \\mathbb{R} : 1 \\le x < 3\\}", "[1,3)"),
        ("(2,\\infty)", "\\{x | 2 < x\\}"),
        ("(-\\infty,1)\\cup(2,\\infty)", "\\{x \\mid x < 1 \\text{ or } x > 2\\}"),
        ("x<1 \\text{ or } x>2", "\\{x : x < 1\\} \\cup \\{x : x > 2\\}"),
        (
            "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}",
            "\\left[\\begin{array}{cc}1&2\\\\3&4\\end{array}\\right]",
        ),
    ],
)
def test_the_same_mathematics_in_another_spelling_is_correct(answer: str, response: str) -> None:
    assert grade(boxed(response), answer).verdict is Verdict.CORRECT


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("2x+4y-3=0", "0"),
        ("0", "x^2-4=0"),
        ("0.333", "\\frac13"),
        ("x^2+2x+1", "(x+1)^3"),
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\4&3\\end{pmatrix}"),
        ("5\\text{ cm}", "5 m"),
        ("12", "12,5"),
        ("7", "5 or 7"),
        ("\\pi", "3.14159265358979323846264338327950288419716939937510"),
        ("\\sqrt{2}", "1.41421356237309504880168872420969807856967187537694"),
        ("1/3", "0.33333333333333333333333333333333333333"),
        ("1", "0.9999999999999999999999"),
        ("-\\infty", "\\infty"),
        ("x+y<3", "x+y>3"),
        ("(3,\\frac{\\pi}{2})", "(\\pi/2,3)"),
        ("28\\%", "0.29"),
        ("1011", "1011_2"),
        ("10:30", "10:31"),
        ("1,2,3", "1,2,4"),
        ("listen", "silent"),
        ("12\\pi\\text{ cm}", "12\\pi\\text{ m}"),
        ("12\\text{ cm}^2", "12\\text{ cubic cm}"),
        ("\\frac{1}{6}", "0.\\overline{16}"),
        ("x<-3 \\text{ or } x>3", "(-\\infty,-3]\\cup(3,\\infty)"),
        ("12", "\u202e21"),
        ("1,000", "(1,0)"),
        ("x_{1}2", "x_{12}"),
        ("\\mathbb{R}", "(0,\\infty)"),
        ("(0,1)", "[0,1["),
        ("[0,1]", "]0,1["),
        ("(2,\\infty)", "\\{x \\mid x \\ge 2\\}"),
        ("(2,\\infty)", "\\{y \\mid x > 2\\}"),
        ("(2,\\infty)", "\\{x \\in \\mathbb{Z} \\mid x > 2\\}"),
        ("x<3 \\text{ or } x>1", "\\{x \\mid x < 3, x > 1\\}"),
        ("\\sqrt{2}", "\\sqrt{2+10^{-300}}"),
        ("2x", "2x+10^{-10000}x^2"),
        ("x^2y", "x^{2.0000000000000000000000000000001}y"),
    ],
)
def test_what_only_looks_alike_is_incorrect(answer: str, response: str) -> None:
    assert grade(boxed(response), answer).verdict is Verdict.INCORRECT


TRACE = "84,36:48,36;12,36;12,24;12,12;=12"


@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        (TRACE, Verdict.CORRECT),
        ("=12", Verdict.CORRECT),
        ("84,36:=11", Verdict.INCORRECT),
        ("84,36:=12;", Verdict.CORRECT),
        ("84,36:=12,12", Verdict.INCORRECT),
        ("84,36:48,36;12", Verdict.NO_ANSWER),
        ("=12=12", Verdict.NO_ANSWER),
        ("84,36:=", Verdict.NO_ANSWER),
        ("", Verdict.NO_ANSWER),
    ],
)
def test_answer_after_reads_what_follows_the_only_delimiter(
    response: str, verdict: Verdict
) -> None:
    score = GRADER.grade_now(task(response, answer="12", answer_after="="))
    assert score is not None
    assert score.verdict is verdict
    assert score.reward == (verdict is Verdict.CORRECT)


@pytest.mark.parametrize(
    ("response", "verdict"),
    [("3.14", Verdict.CORRECT), ("3.15", Verdict.CORRECT), ("3.16", Verdict.INCORRECT)],
)
def test_a_declared_tolerance_is_absolute_and_includes_its_end(
    response: str, verdict: Verdict
) -> None:
    assert grade(boxed(response), "3.14", tolerance=0.01).verdict is verdict


@pytest.mark.parametrize(
    ("reference", "field"),
    [
        ("", "JSON"),
        ("[1]", "object"),
        ("{}", "answer"),
        ('{"answer": ""}', "answer"),
        ('{"answer": ["4"]}', "answer"),
        ('{"answer": "4", "anwser_after": "="}', "anwser_after"),
        ('{"answer": "4", "answer_after": true}', "answer_after"),
        ('{"answer": "4", "tolerance": "1e999999999"}', "tolerance"),
        ('{"answer": "4", "tolerance": -1}', "tolerance"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_an_unusable_reference_is_an_error_that_names_the_key(reference: str, field: str) -> None:
    with pytest.raises(BadReferenceError, match=field):
        GRADER.check_reference(reference)


def test_a_number_as_reference_is_read_without_rounding() -> None:
    reference = '{"answer": 12345678901234567890.10}'
    score = GRADER.grade(GradingTask(GraderKind.MATH, "12345678901234567890.1", reference))
    assert score.verdict is Verdict.CORRECT


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^{9}}}",
        "2^{200000}",
        "100000!",
        "(4999!)!",
        "(-2)!",
        "\\binom{10^{9}}{5}",
        "x" * 401,
        "(" * 100 + "1" + ")" * 100,
        "1/0",
        "1011_2",
        "12'",
        "2 3",
        "2 +",
        "(2",
        "2)",
        "\\foo",
        "\\frac{1}",
        "",
        "__import__('os').system('touch x')",
        "lambda: 1 @ 2",
        "f(x).__class__",
    ],
)
def test_what_the_grammar_does_not_know_or_cannot_bound_is_unreadable(text: str) -> None:
    with pytest.raises(UnreadableError):
        read_expression(text)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("-x^2", "-x**2"),
        ("2x^{10}y", "2*x**10*y"),
        ("1/2x", "x/2"),
        ("\\frac12x", "x/2"),
        ("\\frac1{x}", "1/x"),
        ("\\frac\\pi2", "pi/2"),
        ("\\sin^2 x\\cos 2x", "sin(x)**2*cos(2*x)"),
        ("\\sin^{-1} x", "asin(x)"),
        ("e^{-x}", "exp(-x)"),
        ("x_{12}+x_1", "x_1 + x_12"),
        ("|x-1|", "Abs(x - 1)"),
        ("\\lfloor 2.5\\rfloor", "2"),
        ("0.1\\pi", "pi/10"),
        ("5%", "1/20"),
        ("2\\cdot3!", "12"),
        ("-\\infty", "-oo"),
    ],
)
def test_the_grammar_reads_latex_and_plain_notation(text: str, meaning: str) -> None:
    assert str(read_expression(text)) == meaning


@given(
    st.lists(
        st.sampled_from(
            ["1", "23", "x", "e", "i", "pi", "^", "{", "}", "(", ")", "[", "]", "|", "!", "_", "/",
             "+", "-", "*", "%", ",", ".", " ", "\\frac", "\\sqrt", "\\sin", "\\log", "\\binom",
             "\\infty", "\\lfloor", "\\cdot", "\\foo"]
        ),
        max_size=30,
    ).map("".join)
)  # fmt: skip
def test_any_text_is_an_expression_or_unreadable(text: str) -> None:
    try:
        read_expression(text)
    except (UnreadableError, *SYMPY_ERRORS):
        return


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -0.1, 1.1])
def test_a_reward_is_finite_and_between_0_and_1(reward: float) -> None:
    with pytest.raises(ValueError, match="reward"):
        Score(reward, Verdict.CORRECT)
