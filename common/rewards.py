"""Grading and length penalty: functions of text and numbers, in time linear in the text, whatever a model writes. A gold answer
that is no integer is compared by math-verify, within common/verify.py's limits.

Reward convention, everywhere: RIGHT = +1 for a right answer, WRONG = -1 for anything else, so accuracy = (mean reward + 1) / 2.
"""
import re
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

RIGHT, WRONG = 1.0, -1.0

# of GLM, and what ends an answer of Qwen, Llama, DeepSeek, Gemma and Mistral
SPECIAL = re.compile(r"<\|[^<>|\s]{1,40}\|>|<\uff5c[^<>\s]{1,40}\uff5c>|</?s>|<(?:eos|bos|pad|end_of_turn|start_of_turn)>"
                     r"|\[(?:gMASK|EOS|BOS|PAD)\]|<sop>|</?think>")
ANSWER_LINE = re.compile(r"answer[*_ \t]*[:\uff1a][*_\s]*", re.IGNORECASE)
WRAPPER = re.compile(r"\\(?:text|textbf|mathbf|mathrm)\{([^{}]*)\}|\\\((.*)\\\)|\\\[(.*)\\\]")
INTEGER = re.compile(r"([+-]?) ?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.0*)?")
LONGEST = 200                     # characters of an extracted answer; a longer one is no answer that anybody asked for


class Grade(NamedTuple):
    correct: bool
    extracted: str | None         # the integer read from the text, in plain digits; for another gold, the text that was compared
    reason: str                   # right, wrong, thinking not closed, no answer, box not closed, not an integer, too long,
    #                               and from math-verify: took too long, failed


def plain(text):
    r"""`text` without special tokens, $, \( \), \text{}, bold and code marks around it, spaces and a final dot."""
    text = SPECIAL.sub("", text[:LONGEST])
    for mark, meant in (("\u2212", "-"), ("{,}", ","), (r"\,", ""), (r"\!", ""), (r"\$", "")):
        text = text.replace(mark, meant)
    for _ in range(4):                                            # marks may enclose each other: **$\text{204}$.**
        text = text.strip("$*_` \t\r\n").rstrip(".,;")
        peeled = WRAPPER.fullmatch(text)
        text = next(filter(None, peeled.groups()), "") if peeled else text
    return text


def integer(text):
    """`text` as the canonical digits of an integer ("-7", "1204"), or None. Takes off what `plain` does, thousands commas in
    their places and leading zeros. Digits stay text: int() refuses 4,301 of them."""
    match = INTEGER.fullmatch(plain(text))
    if not match:
        return None
    digits = match[2].replace(",", "").lstrip("0") or "0"
    return "-" + digits if match[1] == "-" and digits != "0" else digits


def extract(text, in_think=False):
    r"""(answer, "") from the last `\boxed{...}` or the last `Answer: ...` line, whichever comes last, outside the thinking block:
    all up to the last `</think>` is dropped, and thinking that never closes holds no answer. `in_think` says that the prompt
    already opened the block (GLM's chat form does). (None, reason) when there is none."""
    _, closed, visible = text.rpartition("</think>")
    if "<think>" in visible or (in_think and not closed):
        return None, "thinking not closed"
    box, line = visible.rfind(r"\boxed{"), max((m.end() for m in ANSWER_LINE.finditer(visible)), default=-1)
    if box < 0 and line < 0:
        return None, "no answer"
    if box > line or (box == line and box >= 0):
        found = _braces(visible, box + len(r"\boxed"))
        if found is None:
            return None, "box not closed"
    else:
        found = visible[line:line + LONGEST + 1].partition("\n")[0]
    return (found, "") if len(found) <= LONGEST else (None, "too long")


def gradable(answer):
    """Whether `answer` can be a gold answer: an integer, or an expression that math-verify reads."""
    if integer(answer) is not None:
        return True
    from common import verify
    return verify.readable(answer)


def grade(text, answer, in_think=False):
    """Strict grader: what `extract` finds must be the gold `answer`, as an integer. For a gold that is no integer math-verify
    decides. A pure function for integers; otherwise "took too long" depends on the machine."""
    gold = integer(str(answer))
    found, reason = extract(text, in_think)
    if found is None:
        return Grade(False, None, reason)
    if gold is None:
        from common import verify
        found = plain(found)
        correct, reason = verify.same(found, str(answer))
        return Grade(correct, found, reason)
    value = integer(found)
    if value is None:
        return Grade(False, None, "not an integer")
    return Grade(value == gold, value, "right" if value == gold else "wrong")


def grade_all(texts, answers, in_think):
    """`grade` of every (text, answer, in_think), side by side where math-verify is at work."""
    if all(integer(str(answer)) is not None for answer in answers):
        return list(map(grade, texts, answers, in_think))
    from common import verify
    with ThreadPoolExecutor(verify.WORKERS) as threads:       # they only wait for the worker processes
        return list(threads.map(grade, texts, answers, in_think))


def _braces(text, start):
    """What the brace at `start` encloses, or None when it is never closed."""
    depth = 0
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[start + 1:start + match.start()]
    return None


# Normalisation of Minerva (Lewkowycz et al. 2022, arXiv 2206.14858, appendix D.1) as DAPO's published rule applies it.
DAPO_REPLACED = (("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
                 (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"))
DAPO_REMOVED = ("square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees "
                "cm gm pounds meters meals edges students childrentickets multiples \\text{s} \\text{.} \\text{\ns} "
                "\\text{}^2 \\text{}^3 \\text{\n} \\text{} \\mathrm{th} ^\\circ ^{\\circ} \\; ,\\! {,} \" \\dots").split(" ")
DAPO_PATTERNS = ((r"(.*?)\$(.*?)\$(.*)", r"$\2$"), (r"\\text\{(.*?)\}", r"\1"), (r"\\textbf\{(.*?)\}", r"\1"),
                 (r"\\overline\{(.*?)\}", r"\1"), (r"\\boxed\{(.*)\}", r"\1"), (r"frac([^{])(.)", r"frac{\1}{\2}"),
                 (r"sqrt([^{])", r"sqrt{\1}"))


def _minerva(text):
    text = text.rpartition("=")[2]
    for old, new in (*DAPO_REPLACED, *((word, "") for word in DAPO_REMOVED)):
        text = text.replace(old, new)
    for pattern, new in DAPO_PATTERNS:
        text = re.sub(pattern, new, text)
    text = text.replace("$", "")
    return (text.replace(",", "") if text.replace(",", "").isdigit() else text).strip()


def grade_dapo(text, answer):
    """DAPO's published rule, as SkyRL's environment `aime` applies it: in the last 300 characters, the last `Answer: ...` up to
    a newline or `<`, normalised as in Minerva, equal to the gold as text. So neither `204.` nor `**Answer:** 204` is right."""
    found = re.findall(r"(?i)Answer\s*:\s*([^\n<]+)", text[-300:])
    if not found:
        return Grade(False, None, "no answer")
    value = _minerva(found[-1])
    return Grade(value == _minerva(str(answer)), value, "right" if value == _minerva(str(answer)) else "wrong")


def soft_length_penalty(length, max, buffer, factor=1.0):
    """What to subtract from the reward of a response of `length` tokens: 0 up to max - buffer, then rising linearly to `factor`
    at `max`: (length - (max - buffer)) / buffer * factor (DAPO, arXiv 2503.14476, section 3.4; buffer 4,096 and factor 1 in the
    published GLM-5.3 run). A truncated wrong answer so ends at -2. ValueError past `max`, where generation is capped."""
    if not 0 <= length <= max:
        raise ValueError(f"a response of {length} tokens under a cap of {max}")
    over = length - (max - buffer)
    return over / buffer * factor if over > 0 else 0.0
