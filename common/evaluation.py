"""One JSON line for each sample of an evaluation, and what the lines say: avg@k, pass@k, maj@k, errors, a paired comparison.

The line is the same wherever it is written, by a recipe or by eval/:
{"id", "sample" (0 to k - 1), "seed", "prompt_sha256", "answer" (gold), "in_think" (the prompt opened the thinking block), "text",
 "n_tokens" (with the one that ended it), "finish_reason" ("stop", or "length": cut at the cap),
 "extracted", "is_correct", "reason" (strict grader, rewards.grade), "dapo_extracted", "dapo_is_correct" (rewards.grade_dapo)}

Notation: n problems with k samples each, problem i right in c_i of them, p_i = c_i / k. Standard library only.
"""
import dataclasses
import hashlib
import json
import math
from collections import Counter
from fractions import Fraction
from statistics import NormalDist, mean, stdev, variance

from common import rewards
from common.flags import Stop

FIELDS = ("id", "sample", "seed", "prompt_sha256", "answer", "in_think", "text", "n_tokens", "finish_reason", "extracted",
          "is_correct", "reason", "dapo_extracted", "dapo_is_correct")
POWER = 0.8                       # with which compare's `smallest` difference is told


def seed_of(seed, problem, sample):
    """The seed of one sample, from the evaluation's seed, the problem's id and the sample's number: its text then depends
    neither on the order of the samples nor on the engine that draws it."""
    return int.from_bytes(hashlib.sha256(repr((f"{seed} eval", problem, sample)).encode()).digest()[:4])


def line(row, in_think, sample, seed, text, n_tokens, finish_reason, grade=None):
    """The line of one sample. row: the data's id, prompt_sha256 and answer; grade: rewards.grade's, where the caller has it."""
    if finish_reason not in ("stop", "length"):
        raise ValueError(f"sample {sample} of {row['id']!r} ended by {finish_reason!r}, not by stop or length")
    grade, dapo = grade or rewards.grade(text, row["answer"], in_think), rewards.grade_dapo(text, row["answer"])
    return {"id": row["id"], "sample": sample, "seed": seed,
            "prompt_sha256": row["prompt_sha256"], "answer": row["answer"], "in_think": in_think, "text": text,
            "n_tokens": n_tokens, "finish_reason": finish_reason,
            "extracted": grade.extracted, "is_correct": grade.correct, "reason": grade.reason,
            "dapo_extracted": dapo.extracted, "dapo_is_correct": dapo.correct}


def read(path):
    """The lines of a file, one after the other. Stop names the line that is no JSON, lacks a field or ended by something else."""
    try:
        file = open(path, encoding="utf-8")
    except OSError as error:
        raise Stop(f"{path} cannot be read: {error.strerror}") from None
    with file:
        for number, text in enumerate(file, 1):
            try:
                found = json.loads(text)
                missing = [key for key in FIELDS if key not in found]
            except (ValueError, TypeError):
                raise Stop(f"{path}: line {number} is not a JSON object") from None
            if missing:
                raise Stop(f"{path}: line {number} lacks {', '.join(missing)}")
            if found["finish_reason"] not in ("stop", "length"):
                raise Stop(f"{path}: line {number} has finish_reason {found['finish_reason']!r}, not stop or length")
            yield found


# -- summary -----------------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Problem:
    answer: str
    prompt_sha256: str
    in_think: bool
    samples: set
    right: int = 0
    votes: dict = dataclasses.field(default_factory=dict)         # extracted answer -> [votes, right ones]

    @property
    def p(self):
        return Fraction(self.right, len(self.samples))            # exact: equal differences have no spread

    @property
    def noise(self):
        """Unbiased estimate of p's variance over repeated sampling, P (1 - P) / k, as E[p (1 - p)] = P (1 - P) (k - 1) / k."""
        return self.p * (1 - self.p) / (len(self.samples) - 1)

    @property
    def cautious_noise(self):
        """The same of Laplace's estimate (right + 1) / (k + 2) of P, which is never 0."""
        k = len(self.samples)
        p = Fraction(self.right + 1, k + 2)
        return p * (1 - p) / k


def tally(lines):
    """({id: Problem}, k, Counter of all lines). Stop where lines contradict each other: a problem with two gold answers or
    prompts, a sample that comes twice, problems with different numbers of samples."""
    problems, total = {}, Counter()
    for one in lines:
        name = one["id"]
        problem = problems.setdefault(name, Problem(one["answer"], one["prompt_sha256"], one["in_think"], set()))
        for field in ("answer", "prompt_sha256", "in_think"):
            if one[field] != getattr(problem, field):
                raise Stop(f"problem {name!r} has two values of {field}: {getattr(problem, field)!r} and {one[field]!r}")
        if one["sample"] in problem.samples:
            raise Stop(f"sample {one['sample']} of problem {name!r} comes twice")
        problem.samples.add(one["sample"])
        problem.right += one["is_correct"]
        if one["extracted"] is not None:
            vote = problem.votes.setdefault(one["extracted"], [0, 0])
            vote[0] += 1
            vote[1] += one["is_correct"]
        cut = one["finish_reason"] == "length"
        total += Counter(samples=1, right=one["is_correct"], cut=cut, right_finished=one["is_correct"] and not cut,
                         dapo=one["dapo_is_correct"], tokens=one["n_tokens"])
        total["cap"] = max(total["cap"], cut * one["n_tokens"])
        total["longest"] = max(total["longest"], one["n_tokens"])
    if not problems:
        raise Stop("there are no samples")
    (name, first), *_ = problems.items()
    for other, problem in problems.items():
        if len(problem.samples) != len(first.samples):
            raise Stop(f"problem {other!r} has {len(problem.samples)} samples and {name!r} has {len(first.samples)}: all must "
                       "have the same number")
    return problems, len(first.samples), total


def pass_at(j, k, c):
    """Unbiased estimate, from k samples of which c are right, of the chance that one of j at least is (arXiv 2107.03374)."""
    return 1 - Fraction(math.comb(k - c, j), math.comb(k, j))


def majority(votes):
    """Whether the answer with most votes is right; where several have as many, the exact expected value of choosing one of them
    at random. A sample without an answer does not vote; a problem without votes is wrong."""
    most = max((n for n, _ in votes.values()), default=0)
    return mean(Fraction(right, n) for n, right in votes.values() if n == most) if votes else Fraction(0)


def summary(lines):
    """What an evaluation says, shares as parts of 1:

    accuracy           avg@k: the mean of p_i
    stderr_fixed       its standard error if the same n problems were sampled again: sqrt(sum_i p_i (1 - p_i) / (k - 1)) / n,
                       whose square is unbiased; None for k = 1, where the samples do not show it
    stderr_across      its standard error as an estimate for all problems of the kind: stdev(p_i) / sqrt(n) (Miller, arXiv
                       2411.00640); None for n = 1
    pass, maj          {"1": pass@1, "2", "4", ... and k}; maj@k
    capped, tokens     share of samples cut at the cap; mean length
    accuracy_finished  of the samples that were not cut; None if all were
    accuracy_dapo      avg@k by DAPO's rule"""
    problems, k, total = tally(lines)
    each, n, finished = problems.values(), len(problems), total["samples"] - total["cut"]
    return {
        "problems": n, "samples": k, "accuracy": float(mean(x.p for x in each)),
        "stderr_fixed": math.sqrt(sum(x.noise for x in each)) / n if k > 1 else None,
        "stderr_across": float(stdev(x.p for x in each)) / math.sqrt(n) if n > 1 else None,
        "pass": {str(j): float(mean(pass_at(j, k, x.right) for x in each))
                 for j in sorted({*(2 ** e for e in range(k.bit_length())), k})},
        "maj": float(mean(majority(x.votes) for x in each)),
        "capped": total["cut"] / total["samples"], "tokens": total["tokens"] / total["samples"],
        "accuracy_finished": total["right_finished"] / finished if finished else None,
        "accuracy_dapo": total["dapo"] / total["samples"]}


def shown(found):
    """A summary as rows (name, text) of a table."""
    def percent(x):
        return "-" if x is None else f"{100 * x:.1f} %"
    k = found["samples"]
    return [("problems x samples", f"{found['problems']} x {k}"),
            (f"avg@{k}", percent(found["accuracy"])),
            ("  standard error, these problems", percent(found["stderr_fixed"])),
            ("  standard error, problems like these", percent(found["stderr_across"])),
            *((f"pass@{j}", percent(x)) for j, x in found["pass"].items() if j != "1"),
            (f"maj@{k}", percent(found["maj"])),
            ("cut at the cap", percent(found["capped"])),
            ("right among finished", percent(found["accuracy_finished"])),
            ("mean tokens", f"{found['tokens']:,.0f}"),
            ("right by DAPO's rule", percent(found["accuracy_dapo"]))]


# -- comparison --------------------------------------------------------------------------------------------------------

def t_quantile(p, df):
    """Quantile p >= 1/2 of Student's t with `df` (whole) degrees of freedom: bisection of its closed form (Abramowitz and
    Stegun, 26.7.3 and 26.7.4)."""
    def inside(theta):                                            # P(|T| < sqrt(df) tan(theta))
        square, e, total = math.cos(theta) ** 2, df % 2, 0.0
        term = math.cos(theta) if e else 1.0
        while e <= df - 2:
            total, term, e = total + term, term * (e + 1) / (e + 2) * square, e + 2
        return (theta + math.sin(theta) * total) * 2 / math.pi if df % 2 else math.sin(theta) * total
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < 2 * p - 1 else (low, middle)
    return math.sqrt(df) * math.tan(low)


def compare(lines_a, lines_b, other_prompts=False):
    """B against A on the same problems: {"difference": B - A of avg@k, "fixed", "across", "sentence"}. `fixed` and `across` are
    {"low", "high": 95 % interval of the difference, "smallest": the true difference that is told with 80 % power}:

    fixed   would it come again on these problems? Normal interval, variance sum_i (noise_A_i + noise_B_i) / n^2. It takes A's and
            B's samples as independent; seeds that they share make it too wide, if anything. Where no sample varied each p_i is
            taken as (c_i + 1) / (k + 2). None where k = 1.
    across  is it so for other problems of the kind? Paired t-interval over the n differences of p_i (Miller, arXiv 2411.00640).
            None where n = 1 or all differences are equal.

    A and B may differ in k, as avg@k estimates the same for every k. Stop names the first difference that forbids comparing:
    the set of problems, a gold answer, a prompt (unless `other_prompts`), or the cap."""
    (a, k_a, total_a), (b, k_b, total_b) = tally(lines_a), tally(lines_b)
    _refuse(a, total_a, b, total_b, other_prompts)
    n, differences = len(a), [b[name].p - a[name].p for name in a]
    noise = sum(x[name].noise for x in (a, b) for name in a) if min(k_a, k_b) > 1 else 0
    if not noise and min(k_a, k_b) > 1:                           # no sample varied; in k more one might
        noise = sum(x[name].cautious_noise for x in (a, b) for name in a)
    spread = variance(differences) if n > 1 else 0
    found = {"difference": float(mean(differences))}
    for kind, error, quantile in (("fixed", math.sqrt(noise) / n, NormalDist().inv_cdf),
                                  ("across", math.sqrt(spread / n), lambda p: t_quantile(p, n - 1))):
        half = quantile(0.975) * error if error else 0.0
        found[kind] = {"low": found["difference"] - half, "high": found["difference"] + half,
                       "smallest": half + quantile(POWER) * error} if error else None
    return {**found, "sentence": _sentence(found, n, k_a, k_b)}


def _refuse(a, total_a, b, total_b, other_prompts):
    if alone := sorted(a.keys() ^ b.keys(), key=str):
        raise Stop(f"problem {alone[0]!r} is in {'A' if alone[0] in a else 'B'} alone ({len(a)} problems in A, {len(b)} in B)")
    for name in a:
        gold = [rewards.integer(str(x[name].answer)) or x[name].answer for x in (a, b)]
        if gold[0] != gold[1]:
            raise Stop(f"the gold answer of problem {name!r} is {gold[0]!r} in A and {gold[1]!r} in B")
        if a[name].prompt_sha256 != b[name].prompt_sha256 and not other_prompts:
            raise Stop(f"the prompt of problem {name!r} is another in A (sha256 {a[name].prompt_sha256[:12]}) than in B "
                       f"({b[name].prompt_sha256[:12]}); --other-prompts compares all the same")
    for one, other, x, y in ((total_a, total_b, "A", "B"), (total_b, total_a, "B", "A")):
        if 0 < one["cap"] < other["longest"]:
            raise Stop(f"the cap was {one['cap']:,} tokens in {x}, but a sample of {y} has {other['longest']:,}")


def _sentence(found, n, k_a, k_b):
    """What follows from the intervals: A and B differ, on these problems alone or on their like too, or n x k cannot tell."""
    told = {kind: f"95 % interval {100 * x['low']:+.1f} to {100 * x['high']:+.1f}" if (x := found[kind]) else "no interval"
            for kind in ("fixed", "across")}
    fixed, across = (bool(x := found[kind]) and not x["low"] <= 0 <= x["high"] for kind in ("fixed", "across"))
    way = "higher" if found["difference"] > 0 else "lower"
    points = f"B is {abs(100 * found['difference']):.1f} points {way}" if found["difference"] else "both have the same avg@k"
    if fixed and across:
        return (f"A and B differ: {points} on these {n} problems ({told['fixed']}) and on problems like them "
                f"({told['across']}).")
    if fixed:
        return (f"A and B differ on these {n} problems: {points} ({told['fixed']}). n = {n} cannot tell whether they do on "
                f"problems like them ({told['across']}).")
    if across and not found["fixed"]:
        return (f"A and B differ on problems like these {n}: {points} ({told['across']}). k = {min(k_a, k_b)} does not show how "
                "much of it is sampling noise on these.")
    kind = "fixed" if found["fixed"] else "across"
    needed = f"; with {POWER:.0%} power it tells {100 * found[kind]['smallest']:.1f} points or more" if found[kind] else ""
    size = f"{n} x {k_a}" + (f" against {n} x {k_b}" if k_a != k_b else "")
    return f"n = {size} cannot tell A from B: {points} ({told[kind]}{needed})."
