"""An evaluation: a sample's line, statistics against brute force over all that can happen, regrade and compare as programs."""
import itertools
import json
import math
import random
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from common import evaluation, rewards
from common.cli import Stop
from common.evaluation import compare, majority, pass_at, summary, t_quantile

ROOT = Path(__file__).resolve().parent.parent


def samples(name, right, k, answer="7", wrong=("8",), **changes):
    """The lines of one problem with `right` of k samples right; wrong ones take the answers of `wrong` in turn (None: none)."""
    row = {"id": name, "answer": answer, "prompt_sha256": f"{name}-sha"}
    found = []
    for i in range(k):
        said = answer if i < right else wrong[i % len(wrong)]
        text = "I do not know." if said is None else f"Answer: {said}"
        found.append({**evaluation.line(row, False, i, i, text, 10, "stop"), **changes})
    return found


def problems(rights, k, **changes):
    return [one for i, right in enumerate(rights) for one in samples(f"p{i}", right, k, **changes)]


# ---------------------------------------------------------------- the line

def test_line_has_both_graders_and_the_same_fields_everywhere():
    row = {"id": "aime-1", "answer": "204", "prompt_sha256": "ab", "prompt": [], "source": "x"}
    line = evaluation.line(row, True, 3, 99, "so 3</think>**Answer:** 204", 12, "stop")
    assert line == {"id": "aime-1", "sample": 3, "seed": 99, "prompt_sha256": "ab", "answer": "204", "in_think": True,
                    "text": "so 3</think>**Answer:** 204", "n_tokens": 12, "finish_reason": "stop", "extracted": "204",
                    "is_correct": True, "reason": "right", "dapo_extracted": "**204", "dapo_is_correct": False}
    assert tuple(line) == evaluation.FIELDS
    assert evaluation.line(row, True, 0, 0, "Answer: 204", 12, "length")["reason"] == "thinking not closed"
    given = rewards.Grade(False, "5", "took too long")
    assert evaluation.line(row, True, 0, 0, "Answer: 204", 12, "stop", given)["reason"] == "took too long"
    with pytest.raises(ValueError, match="'aime-1' ended by 'abort'"):
        evaluation.line(row, True, 0, 0, "", 0, "abort")


def test_seed_depends_on_all_three_and_on_nothing_else():
    assert evaluation.seed_of(0, "aime-1", 2) == evaluation.seed_of(0, "aime-1", 2) == 1902629991
    assert len({evaluation.seed_of(*x) for x in itertools.product((0, 1), ("a", "b"), range(32))}) == 128
    assert 0 <= evaluation.seed_of(5, "x", 0) < 2 ** 32


@pytest.mark.parametrize("text, sentence", [
    ("{}\n", "line 1 lacks id, sample, seed"), ("{]\n", "line 1 is not a JSON object"), ("3\n", "line 1 is not a JSON object"),
    ("\n", "line 1 is not a JSON object")])
def test_read_names_the_bad_line(tmp_path, text, sentence):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(Stop, match=sentence):
        list(evaluation.read(tmp_path / "a.jsonl"))
    with pytest.raises(Stop, match="b.jsonl cannot be read: No such file"):
        list(evaluation.read(tmp_path / "b.jsonl"))


# ---------------------------------------------------------------- summary

def test_summary_of_an_evaluation_counted_by_hand():
    """Two problems with 4 samples: 3 of 4 right; 1 of 4 right, its wrong answers 8, 8 and none, the last one cut at the cap."""
    lines = samples("a", 3, 4) + samples("b", 1, 4, wrong=("9", "8", "8", None))
    lines[-1] |= {"finish_reason": "length", "n_tokens": 50}
    found = summary(lines)
    assert found == {
        "problems": 2, "samples": 4, "accuracy": 0.5, "stderr_fixed": pytest.approx(math.sqrt(2 * (3 / 16) / 3) / 2),
        "stderr_across": pytest.approx(0.25), "pass": {"1": 0.5, "2": pytest.approx((1 + 0.5) / 2), "4": 1.0},
        "maj": 0.5, "capped": 1 / 8, "tokens": 15.0, "accuracy_finished": 4 / 7, "accuracy_dapo": 0.5}
    assert ("avg@4", "50.0 %") in evaluation.shown(found) and ("pass@2", "75.0 %") in evaluation.shown(found)


def test_summary_says_none_where_nothing_is_known():
    one = summary(samples("a", 1, 1, finish_reason="length"))
    assert one["stderr_fixed"] is None and one["stderr_across"] is None and one["accuracy_finished"] is None
    assert one["accuracy"] == one["maj"] == one["pass"]["1"] == 1.0
    assert list(summary(samples("a", 1, 12))["pass"]) == ["1", "2", "4", "8", "12"]
    assert all(text == "-" for name, text in evaluation.shown(one) if "error" in name or "finished" in name)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_fixed_error_is_unbiased(k):
    """Over all outcomes of 3 problems with chances 1/5, 1/2 and 9/10: the mean of the squared error is avg@k's true variance."""
    chances = (Fraction(1, 5), Fraction(1, 2), Fraction(9, 10))
    expected_square, first, second = 0.0, 0, 0
    for outcome in itertools.product(range(k + 1), repeat=3):
        weight = math.prod(math.comb(k, c) * p ** c * (1 - p) ** (k - c) for c, p in zip(outcome, chances))
        expected_square += float(weight) * summary(problems(outcome, k))["stderr_fixed"] ** 2
        average = Fraction(sum(outcome), 3 * k)
        first, second = first + weight * average, second + weight * average ** 2
    assert expected_square == pytest.approx(float(second - first ** 2), rel=1e-12)


@pytest.mark.parametrize("k, c", [(1, 0), (1, 1), (4, 0), (4, 1), (4, 3), (6, 2), (6, 6)])
def test_pass_at_against_all_subsets(k, c):
    right = [True] * c + [False] * (k - c)
    for j in range(1, k + 1):
        subsets = list(itertools.combinations(right, j))
        assert pass_at(j, k, c) == Fraction(sum(map(any, subsets)), len(subsets))


@pytest.mark.parametrize("answers, value", [
    ("777", 1), ("778", 1), ("788", 0), ("78", Fraction(1, 2)), ("7788", Fraction(1, 2)), ("778899", Fraction(1, 3)),
    ("7-----", 1), ("7---88", 0), ("----", 0), ("7896", Fraction(1, 4)), ("88-7", 0)])
def test_majority_against_enumeration(answers, value):
    """- does not vote. Ties: the mean over every answer that has as many votes as any."""
    votes = {}
    for answer in answers.replace("-", ""):
        n, right = votes.get(answer, (0, 0))
        votes[answer] = [n + 1, right + (answer == "7")]
    said = [a for a in answers if a != "-"]
    tied = [a for a in set(said) if said.count(a) == max(map(said.count, said))]
    assert majority(votes) == value == (Fraction(tied.count("7"), len(tied)) if said else 0)


def test_majority_reads_the_extracted_answers():
    lines = samples("a", 2, 6, wrong=("8", "9", None)) + samples("b", 1, 6, wrong=("8", None, None))    # 2 8s, 1 or 2 9s; 1 of 3
    assert summary(lines)["maj"] == float(mean_of(lines))


def mean_of(lines):
    """maj@k by choosing among the tied answers of each problem, one after the other."""
    total = Fraction(0)
    for name in ("a", "b"):
        said = [x["extracted"] for x in lines if x["id"] == name and x["extracted"]]
        most = max(map(said.count, said))
        tied = sorted({x for x in said if said.count(x) == most})
        total += Fraction(tied.count("7"), len(tied))
    return total / 2


@pytest.mark.parametrize("change, sentence", [
    (lambda x: x.pop(), "problem 'p1' has 3 samples and 'p0' has 4: all must have the same number"),
    (lambda x: x.append(dict(x[0])), "sample 0 of problem 'p0' comes twice"),
    (lambda x: x[1].update(answer="9"), "problem 'p0' has two values of answer: '7' and '9'"),
    (lambda x: x[1].update(prompt_sha256="z"), "problem 'p0' has two values of prompt_sha256"),
    (lambda x: x.clear(), "there are no samples")])
def test_lines_that_contradict_each_other_are_refused(change, sentence):
    lines = problems((1, 2), 4)
    change(lines)
    with pytest.raises(Stop, match=sentence):
        summary(lines)


# ---------------------------------------------------------------- compare

def test_t_quantiles_are_the_tabulated_ones():
    """Percentage points of Student's t, two-sided 95 %, as printed in every table; for many degrees of freedom the normal's."""
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 10: 2.2281, 29: 2.0452, 30: 2.0423, 120: 1.9799}
    assert {df: round(t_quantile(0.975, df), 4) for df in table} == table
    assert t_quantile(0.8, 1) == pytest.approx(math.tan(0.3 * math.pi)) and t_quantile(0.5, 7) == pytest.approx(0, abs=1e-9)
    z, df = 1.959963985, 1318                                 # the first terms of the expansion about the normal (26.7.5)
    expansion = z + (z ** 3 + z) / (4 * df) + (5 * z ** 5 + 16 * z ** 3 + 3 * z) / (96 * df ** 2)
    assert t_quantile(0.975, df) == pytest.approx(expansion, rel=1e-8)


def test_difference_and_intervals_by_hand():
    """A: 1, 2, 3 of 4; B: 3, 3, 4 of 4. Differences 1/2, 1/4, 1/4: mean 1/3, standard deviation 0.1443."""
    found = compare(problems((1, 2, 3), 4), problems((3, 3, 4), 4))
    assert found["difference"] == pytest.approx(1 / 3)
    fixed = math.sqrt(sum(p * (1 - p) / 3 for p in (0.25, 0.5, 0.75, 0.75, 0.75, 1.0))) / 3
    across = math.sqrt(1 / 48 / 3)
    for kind, error, t, power in (("fixed", fixed, 1.959964, 0.841621), ("across", across, 4.302653, 1.060660)):
        assert found[kind]["low"] == pytest.approx(1 / 3 - t * error, abs=1e-6)
        assert found[kind]["high"] == pytest.approx(1 / 3 + t * error, abs=1e-6)
        assert found[kind]["smallest"] == pytest.approx((t + power) * error, abs=1e-5)


def test_difference_takes_problems_by_name_and_k_may_differ():
    a, b = problems((4, 0, 2), 4), problems((8, 0, 0), 8)
    random.Random(0).shuffle(a)
    assert compare(a, b)["difference"] == pytest.approx(-1 / 6)
    assert "n = 3 x 4 against 3 x 8 cannot tell A from B: B is 16.7 points lower" in compare(a, b)["sentence"]


def test_intervals_hold_the_truth_as_often_as_they_say():
    """1,000 evaluations of 30 problems x 16 with known chances. Fixed: the same problems each time. Across: drawn anew."""
    rng = random.Random(1)
    chances = [(rng.random(), rng.random()) for _ in range(30)]
    truth, held = {"fixed": sum(b - a for a, b in chances) / 30, "across": 0.1}, {"fixed": 0, "across": 0}
    for kind in held:
        for _ in range(1000):
            if kind == "across":                              # B's chance is A's plus 0.1 on average, uniformly between 0 and 0.2
                chances = [(p, p + 0.2 * rng.random()) for p in (0.8 * rng.random() for _ in range(30))]
            a, b = ({f"p{i}": fake(sum(rng.random() < p[side] for _ in range(16)), 16) for i, p in enumerate(chances)}
                    for side in (0, 1))
            found = compare_counts(a, b)[kind]
            held[kind] += found["low"] <= truth[kind] <= found["high"]
    assert 930 <= held["fixed"] <= 970 and 930 <= held["across"] <= 970, held


def fake(right, k):
    return evaluation.Problem("7", "", False, set(range(k)), right)


def compare_counts(a, b):
    """compare, from counts instead of lines."""
    patch = pytest.MonkeyPatch()
    patch.setattr(evaluation, "tally", lambda x: (x, 16, dict(cap=0, longest=0)))
    try:
        return compare(a, b)
    finally:
        patch.undo()


@pytest.mark.parametrize("a, b, k, sentence", [
    ((1, 2, 1, 2, 1, 2), (7, 8, 7, 8, 7, 7), 8, "A and B differ: B is 72.9 points higher on these 6 problems (95 % interval +5"),
    ((0, 9, 0, 9, 4, 4), (9, 0, 0, 9, 9, 9), 9, "A and B differ on these 6 problems: B is 18.5 points higher (95 % interval "
                                                "+10.4 to +26.6). n = 6 cannot tell whether they do on problems like them"),
    ((1, 2, 1, 2), (2, 1, 2, 2), 4, "n = 4 x 4 cannot tell A from B: B is 6.2 points higher (95 % interval -"),
    ((1, 2, 1, 2), (1, 2, 1, 2), 4, "n = 4 x 4 cannot tell A from B: both have the same avg@k (95 % interval -"),
    ((0, 0, 0, 0, 0, 1), (1, 1, 1, 1, 1, 0), 1, "n = 6 x 1 cannot tell A from B: B is 66.7 points higher (95 % interval -"),
    ((0,) * 8, (1,) * 7 + (0,), 1, "A and B differ on problems like these 8: B is 87.5 points higher (95 % interval +57.9 to "
                                   "+117.1). k = 1 does not show"),
    ((0, 4), (0, 4), 4, "n = 2 x 4 cannot tell A from B: both have the same avg@k (95 % interval -36.5 to +36.5"),
    ((0,) * 30, (32,) * 30, 32, "A and B differ on these 30 problems: B is 100.0 points higher (95 % interval +98.5 to +101.5)"),
    ((0,), (1,), 1, "n = 1 x 1 cannot tell A from B: B is 100.0 points higher (no interval)."),
    ((3,), (1,), 4, "n = 1 x 4 cannot tell A from B: B is 50.0 points lower (95 % interval -")])
def test_sentence(a, b, k, sentence):
    assert compare(problems(a, k), problems(b, k))["sentence"].startswith(sentence)


@pytest.mark.parametrize("change, sentence", [
    (lambda b: b.__delitem__(slice(4, 8)), r"problem 'p1' is in A alone \(2 problems in A, 1 in B\)"),
    (lambda b: [x.update(answer="9") for x in b[:4]], "the gold answer of problem 'p0' is '7' in A and '9' in B"),
    (lambda b: [x.update(prompt_sha256="z") for x in b[:4]], r"the prompt of problem 'p0' is another in A .*--other-prompts"),
    (lambda b: b[0].update(finish_reason="length", n_tokens=9), "the cap was 9 tokens in B, but a sample of A has 10"),
    (lambda b: b[0].update(n_tokens=99), "the cap was 10 tokens in A, but a sample of B has 99")])
def test_evaluations_that_are_not_comparable(change, sentence):
    a, b = problems((1, 2), 4), problems((1, 2), 4)
    a[0]["finish_reason"] = "length"
    change(b)
    with pytest.raises(Stop, match=sentence):
        compare(a, b)


def test_what_may_differ():
    a, b = problems((1, 2), 4), problems((1, 2), 4, prompt_sha256="z")
    assert compare(a, b, other_prompts=True)["difference"] == 0
    assert compare(a, [{**x, "answer": "07"} for x in problems((1, 2), 4)])["difference"] == 0


# ---------------------------------------------------------------- programs

def program(name, *args):
    """(exit code, stdout, stderr) of eval/NAME.py."""
    done = subprocess.run([sys.executable, ROOT / "eval" / f"{name}.py", *map(str, args)], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answered(text, **changes):
    return {**evaluation.line({"id": "a", "answer": "204", "prompt_sha256": "x"}, False, 0, 0, text, 9, "stop"), **changes}


def test_regrade_tells_where_graders_and_record_differ(tmp_path):
    lines = [answered("Answer: 204"), answered("so it is **Answer:** 204", sample=1), answered("Answer: 5", sample=2),
             answered("Answer: 204", sample=3, is_correct=False, extracted="7")]
    path = write(tmp_path / "a.jsonl", lines)
    code, out, err = program("regrade", path)
    assert code == 0 and not err
    counts = dict(line.rsplit(maxsplit=1) for line in out.splitlines()[1:6])
    assert counts == {"samples": "4", "strict": "3", "dapo": "2", "strict, on record": "2", "dapo, on record": "2"}
    assert "the graders disagree: 1 of 4" in out and "a        1  204     **204  'so it is **Answer:** 204'" in out
    assert "not the verdict on record: 1 of 4" in out and "is_correct False -> True, extracted 7 -> 204" in out
    assert path.read_text() == "".join(json.dumps(line) + "\n" for line in lines), "written although not told to"


def test_regrade_wants_files_before_options(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    assert "files come before options: " in program("regrade", "--show", "5", tmp_path / "a.jsonl")[2]


def test_regrade_writes_verdicts_and_the_summary_beside_them(tmp_path):
    path = write(tmp_path / "run" / "samples.jsonl", [answered("Answer: 204", is_correct=False, extracted=None, more=1)])
    (tmp_path / "run" / "summary.json").write_text("{}")
    assert program("regrade", tmp_path / "run", "--write")[0] == 0
    assert list(evaluation.read(path)) == [answered("Answer: 204", more=1)]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["accuracy"] == 1.0
    assert sorted(p.name for p in path.parent.iterdir()) == ["lock", "samples.jsonl", "summary.json"]


def test_regrade_refuses_what_it_cannot_read_and_leaves_it(tmp_path):
    path = write(tmp_path / "a.jsonl", [answered("Answer: 204", is_correct=False), {"id": "a", "text": "x"}])
    before = path.read_text()
    code, _, err = program("regrade", path, "--write")
    assert code == 1 and err == (f"{path}: line 2 lacks sample, seed, prompt_sha256, answer, in_think, n_tokens, finish_reason, "
                                 "extracted, is_correct, reason, dapo_extracted, dapo_is_correct\n")
    assert path.read_text() == before and [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
    assert program("regrade")[0] == 1
    assert program("regrade", tmp_path / "none.jsonl")[2] == f"{tmp_path}/none.jsonl cannot be read: No such file or directory\n"
    assert "unknown option --writ: the nearest one is --write" in program("regrade", path, "--writ")[2]


PROTOCOL = dict(max_tokens=8192, temperature=1.0, top_p=0.7, top_k=-1, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0,
                repetition_penalty=1.0)


def test_neither_needs_torch():
    code = "import sys, eval.regrade, eval.compare; print(sorted(set(sys.modules) & {'torch', 'vllm', 'ray', 'transformers'}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "[]\n"


def test_compare_puts_two_evaluations_side_by_side(tmp_path):
    for name, rights in (("a", (1, 2, 1, 2, 1, 2)), ("b", (7, 8, 7, 8, 7, 7))):
        write(tmp_path / name / "samples.jsonl", problems(rights, 8))
        (tmp_path / name / "protocol.json").write_text(json.dumps({"protocol": PROTOCOL}))
    code, out, err = program("compare", tmp_path / "a", tmp_path / "b")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and not err and ["avg@8", "18.8", "%", "91.7", "%"] in lines and ["mean", "tokens", "10", "10"] in lines
    assert "B - A  +72.9 points of avg@k" in out and "+58.7 to +87.1  on these problems, 95 % interval" in out
    assert out.splitlines()[-1].startswith("A and B differ: B is 72.9 points higher on these 6 problems") and "note" not in out


def test_compare_refuses_other_settings_and_reads_a_recipes_run(tmp_path):
    a = write(tmp_path / "a" / "samples.jsonl", problems((1, 2), 4))
    (tmp_path / "a" / "protocol.json").write_text(json.dumps({"protocol": PROTOCOL}))
    b = write(tmp_path / "runs" / "x" / "eval" / "step-20.jsonl", problems((2, 2), 4))
    assert f"note: nothing beside {b} says how it was sampled" in program("compare", a, b)[1]
    config = tmp_path / "runs" / "x" / "config.json"
    for top_p, code, said in ((0.7, 0, "n = 2 x 4 cannot tell A from B"), (1.0, 1, "A was drawn with top_p 0.7 and B with 1.0")):
        config.write_text(json.dumps({"max_response_tokens": 8192, "eval_top_p": top_p}))
        found = program("compare", a, b)
        assert found[0] == code and said in found[1] + found[2] and "note" not in found[1]
    write(b, problems((2, 2), 4, prompt_sha256="other"))
    config.write_text(json.dumps({"max_response_tokens": 8192, "eval_top_p": 0.7}))
    assert program("compare", a, b)[0] == 1 and program("compare", a, b, "--other-prompts")[0] == 0
    assert program("compare", a)[2] == "two evaluations are compared, and 1 are named: python eval/compare.py A B\n"


def test_regrade_does_not_write_beside_a_running_evaluation(tmp_path):
    """It replaces the file, and the evaluation would go on writing to the one that is gone."""
    from eval import folder
    (tmp_path / folder.PROTOCOL).write_text("{}")
    (tmp_path / folder.SAMPLES).write_text("")
    with folder.lock(tmp_path):
        code, _, err = program("regrade", tmp_path, "--write")
    assert code == 1 and "belongs to another process, which is still at work" in err
