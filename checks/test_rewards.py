"""The graders on a table of answers with their right grades, on hostile text, and the length penalty against its formula."""
import pytest

from common import rewards
from common.rewards import grade, grade_dapo, integer, soft_length_penalty

# gold 204 throughout: (text, strict grader, DAPO's rule); the DAPO column was measured on its published code
TABLE = [
    ("Answer: 204", True, True),
    ("answer:204", True, True),
    ("ANSWER : 204", True, True),
    (r"\boxed{204}", True, False),
    ("Answer: 204.", True, False),
    ("**Answer:** 204", True, False),
    ("**Answer: 204**", True, False),
    ("Answer: **204**", True, False),
    ("Answer: $204$", True, True),
    ("Answer: $204$.", True, True),
    (r"Answer: \(204\)", True, False),
    ("Answer: 0204", True, False),
    ("Answer: 204<|user|>", True, True),
    ("Answer: 204<|endoftext|>", True, True),
    ("Answer: 204\n<|observation|>", True, True),
    ("Answer:\n204", True, True),
    ("Answer: 204\nI hope that helps.", True, True),
    (r"Answer: \boxed{204}", True, True),
    (r"Answer: $\boxed{204}$", True, True),
    (r"\boxed{\text{204}}", True, False),
    (r"\boxed{ 204 }", True, False),
    (r"\boxed{205} wait \boxed{204}", True, False),
    (r"\boxed{204} wait \boxed{205}", False, False),
    ("Answer: 205\nWait.\nAnswer: 204", True, True),
    ("Answer: 204\nWait.\nAnswer: 205", False, False),
    ("Answer: 205\n\\boxed{204}", True, False),
    ("\\boxed{205}\nAnswer: 204", True, True),
    ("I think 203 or 204", False, False),
    ("204", False, False),
    (r"\boxed{204", False, False),
    (r"\boxed{204} so \boxed{", False, False),
    ("Answer: 204 or 205", False, False),
    ("Answer: 20 4", False, True),
    ("Answer: 2,04", False, True),
    ("Answer: 204.5", False, False),
    ("Answer: -204", False, False),
    ("Answer: x = 204", False, True),
    ("Answer: 204 degrees", False, True),
    ("Answer:", False, False),
    ("", False, False),
    ("<think>\\boxed{204}</think> I give up.", False, False),
    ("<think>so Answer: 204</think>Answer: 205", False, False),
    ("so it is 204</think>Answer: 204<|endoftext|>", True, True),
    ("<think>\\boxed{204} hmm", False, False),
    ("<think>a</think>Answer: 204<think>b", False, True),
    ("Answer: " + "204".zfill(250), False, False),
]


@pytest.mark.parametrize("text, strict, dapo", TABLE)
def test_table(text, strict, dapo):
    assert grade(text, "204").correct is strict
    assert grade_dapo(text, "204").correct is dapo


@pytest.mark.parametrize("text, digits", [
    ("25", "25"), ("025", "25"), ("000", "0"), ("-0", "0"), ("+5", "5"), ("-7", "-7"), ("\u22127", "-7"), ("- 7", "-7"),
    ("1,204", "1204"), ("1{,}204", "1204"), (r"12\,345", "12345"), ("1,2", None), ("12,34", None), ("7.0", "7"), ("7.5", None),
    (".5", None), ("2**10", None), ("1e3", None), ("\u0663", None), ("\\$12", "12"), ("`12`", "12"),
    ("9" * 150, "9" * 150), ("", None), ("\\frac{1}{2}", None)])
def test_integer(text, digits):
    assert integer(text) == digits


def test_extracted_and_reason():
    assert grade("Answer: 025", 25) == (True, "25", "right")
    assert grade("Answer: 26", "25") == (False, "26", "wrong")
    assert grade("Answer: many", "25") == (False, None, "not an integer")
    assert grade(r"\boxed{25", "25").reason == "box not closed"
    assert grade("25", "25").reason == "no answer"
    assert grade_dapo("x", "25") == (False, None, "no answer")
    with pytest.raises(ValueError, match="1/2"):
        grade("Answer: 5", "1/2")


def test_prompt_that_opens_the_thinking_block():
    """Under GLM's chat form the response starts inside <think>: an answer in thoughts that were cut off does not count."""
    assert grade("27+48: Answer: 75", "75").correct
    assert grade("27+48: Answer: 75", "75", in_think=True).reason == "thinking not closed"
    assert grade("7+8=15</think>Answer: 75", "75", in_think=True).correct


def test_dapo_reads_300_characters():
    assert grade_dapo("Answer: 204" + "\n" * 289, "204").correct
    assert not grade_dapo("Answer: 204" + "\n" * 290, "204").correct


MB = 1 << 20


@pytest.mark.timeout(60)          # 0.1 s at most on a free core; a quadratic scan of a megabyte takes hours
@pytest.mark.parametrize("text", [
    "{" * MB, r"\boxed{" * (MB // 7), r"\boxed{" + "{" * MB, r"\boxed{" + "{}" * MB + "}", "Answer:" * (MB // 7),
    "answer " * (MB // 7), "Answer" + " " * MB, "Answer:" + " " * MB, "Answer: " + "9" * MB,
    "<|" * MB, "</think>" * (MB // 8), "<think>" * (MB // 7),
    "$" * MB, "Answer: " + "$" * MB, "Answer: " + "<|a|>" * MB, "\\text{" * (MB // 6),
    "Answer: " + "frac" * 70, "\n" * MB, "\0" * MB,
    "\ud800" * MB])
def test_hostile_text(text):
    assert not grade(text, "204").correct
    assert not grade_dapo(text, "204").correct


def test_soft_length_penalty():
    """Published setting: cap 8,192, buffer 4,096, factor 1."""
    assert [soft_length_penalty(n, 8192, 4096, 1.0) for n in (0, 4096, 5120, 6144, 8192)] == [0.0, 0.0, 0.25, 0.5, 1.0]
    assert soft_length_penalty(4097, 8192, 4096) == pytest.approx(1 / 4096)
    assert soft_length_penalty(60, 60, 20, 0.5) == 0.5
    assert soft_length_penalty(60, 60, 0) == 0.0
    assert rewards.WRONG - soft_length_penalty(8192, 8192, 4096) == -2.0
    with pytest.raises(ValueError, match="8193 tokens under a cap of 8192"):
        soft_length_penalty(8193, 8192, 4096)
