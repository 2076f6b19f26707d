"""The graders on a table of answers with their right grades, on hostile text, and the length penalty against its formula."""
import random
import resource
import threading
import time

import pytest

from common import rewards, verify
from common.rewards import grade, grade_all, grade_dapo, integer, soft_length_penalty

# gold 204 throughout: (text, strict grader, DAPO's rule); the DAPO column is what skyrl-gym 0.4.0's
# environment `aime` answers
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
    ("Answer\uff1a204", True, False),
    ("Answer: 204<end_of_turn>", True, True),
    ("Answer: 204<\uff5cend\u2581of\u2581sentence\uff5c>", True, True),
    ("Answer: 204<eos>", True, True),
    ("Answer: 204 [EOS]", True, False),
    ("The final answer: 204", True, True),
    ("The answer is 204", False, False),
    (r"Answer: \text{204}", True, True),
    (r"Answer: $\mathrm{204}$", True, False),
    (r"Answer: \boxed{\frac{408}{2}}", False, False),
    ("Answer: 204.0", True, False),
    ("Answer: 204,", True, True),
    ("Answer: `204`", True, False),
    ("Answer: +204", True, False),
    ("Answer: 2.04e2", False, False),
    ("Answer: \u0662\u0660\u0664", False, False),
    ("Answer: \uff12\uff10\uff14", False, False),
    ("Answer: 204 = 204", False, True),
    ("Answer: $2$ or $204$", False, False),
    (r"$$\boxed{204}$$</s>", True, False),
    (r"\boxed{\boxed{204}}", True, False),
    ("Answer: 204" + " " * 400, False, False),
    ("Answer: 204\n" + "So it is. " * 40, True, False),
    ("</think>Answer: 204</think>", False, True),
    ("<think>a</think>Answer: 205<think>b</think>Answer: 204", True, True),
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


PIECES = ("\\boxed{", "{", "}", "\\", "Answer:", "answer", "</think>", "<think>", "$", "\\frac{", "\\text{", "204", "9**9**9",
          "9^{9^9}", "!", "\n", " ", ",", ".", "-", "\u0662\u0660\u0664", "\uff12", "\u2212", "\x00", "\ud800", "\U0001f600",
          "<|user|>", "[gMASK]", "(", ")", "10^{10^{10}}", "\\sqrt{", "e", "x", "=", "\u202e204", "%", "#", "\\,", "{,}", "**",
          "`")


def hostile(n, seed):
    """n texts of 1 to 40 pieces; every hundredth has one piece 20,000 times."""
    rng = random.Random(seed)
    for i in range(n):
        parts = [rng.choice(PIECES) for _ in range(rng.randint(1, 40))]
        if i % 100 == 0:
            parts[rng.randrange(len(parts))] *= 20_000
        yield "".join(parts)


def contained(texts, gold, seconds=1):
    """Grade all texts; none may raise, take longer than that or leave memory behind. How many were right."""
    before, right = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for text in texts:
        start = time.monotonic()
        found = grade(text, gold, in_think=len(text) % 2 == 0)
        grade_dapo(text, gold)
        assert time.monotonic() - start < seconds, text[:200]
        assert found.extracted is None or len(found.extracted) <= rewards.LONGEST
        right += found.correct
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024, "KiB"
    return right


def test_10000_hostile_texts():
    assert contained(hostile(10_000, 0), "204") < 1_000               # the piece 204 alone in a box or on a line is right


def test_hostile_texts_for_math_verify():
    contained((rf"\boxed{{{text[:150]}}}" for text in hostile(200, 1)), r"\frac{1}{2}", seconds=3)


@pytest.mark.slow
def test_10000_hostile_texts_for_math_verify():
    contained((rf"\boxed{{{text[:150]}}}" for text in hostile(10_000, 2)), r"\frac{1}{2}", seconds=1)


# (answer in the box, gold, right)
EXPRESSIONS = [
    (r"\frac12", "1/2", True), ("0.5", r"\frac{1}{2}", True), (r"\dfrac{1}{2}", "1/2", True), ("-1/2", "1/2", False),
    (r"\frac{2}{4}", "0.5", True), ("0.33", "1/3", False), (r"2\sqrt{3}", r"\sqrt{12}", True), ("3.14", r"\pi", False),
    ("x^2+2x+1", "(x+1)^2", True), ("x^2+2x", "(x+1)^2", False), ("(1,2)", "(1,2)", True), ("(2,1)", "(1,2)", False),
    (r"\{2,1\}", r"\{1,2\}", True), ("1/2 or 1/3", "1/2", False), (r"1\frac{1}{2}", "3/2", True),
    (r"(-\infty, 3]", r"(-\infty,3]", True), (r"(-\infty, 3)", r"(-\infty,3]", False),
    (r"\text{Paris}", r"\text{London}", False), ("", "1/2", False), ("$1/2$.", "1/2", True),
    ("9" * 150, "1/2", False), ("1e1000000000", "1/2", False)]


@pytest.mark.parametrize("text, gold, right", EXPRESSIONS)
def test_expressions(text, gold, right):
    assert grade(rf"\boxed{{{text}}}", gold).correct is right


@pytest.mark.parametrize("bomb", [r"9^{9^{9^9}}", r"(10^9)!", r"9!!!!!!", "2^{1000000000}", r"\binom{10^9}{5\cdot 10^8}",
                                  r"\sum_{n=1}^{10^{12}} n^{n}"])
def test_bombs_are_stopped(bomb):
    start = time.monotonic()
    assert grade(rf"\boxed{{{bomb}}}", "1/2") == (False, bomb, "took too long")
    assert time.monotonic() - start < 3          # killed after 0.8 s; the rest is for a busy machine
    assert grade(r"\boxed{0.5}", "1/2").correct  # and the next answer finds a worker


def test_a_worker_that_dies_or_runs_out_of_memory_fails_one_answer(monkeypatch):
    for cause in (_exit, _allocate):
        monkeypatch.setattr(verify, "_same", cause)
        assert verify.same("1", "2") == (False, "failed")
    monkeypatch.undo()
    assert verify.same("1/2", "0.5") == (True, "right")


def _exit(found, gold):
    import os
    os._exit(1)


def _allocate(found, gold):
    return bool(bytearray(2 * verify.MEMORY))


def test_grade_all_in_a_thread():
    """In order, integers and expressions mixed, and outside the main thread, where math-verify's own time limit raises."""
    answers = ["7", "1/2", r"\sqrt{2}", "8"]
    texts = [r"\boxed{7}", r"\boxed{0.5}", r"\boxed{1.5}", "Answer: 9"]
    found = []
    thread = threading.Thread(target=lambda: found.extend(grade_all(texts, answers, [False] * 4)))
    thread.start()
    thread.join()
    assert [g.correct for g in found] == [True, True, False, False]
    assert grade_all(texts[:1], answers[:1], [True])[0].reason == "thinking not closed"


@pytest.mark.parametrize("gold, ok", [("1/2", True), (r"\sqrt{2}", True), ("(1,2)", True), ("", False), ("$$", False)])
def test_gold_that_math_verify_reads(gold, ok):
    assert verify.readable(gold) is ok


def test_soft_length_penalty():
    """Published setting: cap 8,192, buffer 4,096, factor 1."""
    assert [soft_length_penalty(n, 8192, 4096, 1.0) for n in (0, 4096, 5120, 6144, 8192)] == [0.0, 0.0, 0.25, 0.5, 1.0]
    assert soft_length_penalty(4097, 8192, 4096) == pytest.approx(1 / 4096)
    assert soft_length_penalty(60, 60, 20, 0.5) == 0.5
    assert soft_length_penalty(60, 60, 0) == 0.0
    assert rewards.WRONG - soft_length_penalty(8192, 8192, 4096) == -2.0
    with pytest.raises(ValueError, match="8193 tokens under a cap of 8192"):
        soft_length_penalty(8193, 8192, 4096)
