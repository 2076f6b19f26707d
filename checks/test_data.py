"""The preparers of GSM8K, AIME and DAPO-Math: on the real files where they are, on synthetic ones with planted faults, on a cache
of the Hub; every refusal is one sentence and leaves no file behind."""
import errno
import json
import os
import random
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from checks.conftest import ROOT
from common.cli import Stop
from data import dataset, prepare_aime, prepare_dapo_math, prepare_gsm8k, source
from data.prepare_dapo_math import letters

SHARED = ROOT.parent / "shared" / "data"
real_files = pytest.mark.skipif(not SHARED.is_dir(), reason="the published files are not here (../shared/data)")
BEFORE, AFTER = source.STYLES["answer-line"]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a preparer with these flags, in tmp_path; returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def call(script, *flags):
        monkeypatch.setattr(sys, "argv", [script.__file__, *map(str, flags)])
        capsys.readouterr()
        assert not script.main()
        return capsys.readouterr().out
    return call


@pytest.fixture
def refused(run, tmp_path):
    """The sentence with which a preparer refuses these flags, having written nothing."""
    def call(script, *flags):
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        with pytest.raises(Stop) as error:
            run(script, *flags, *(() if "--out" in flags else ("--out", tmp_path / "out.parquet")))
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
        assert "\n" not in str(error.value)
        return str(error.value)
    return call


def write_parquet(path, rows, schema=None):
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


def write_json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---------------------------------------------------------------- GSM8K

def gsm8k_rows(n=3):
    return [{"question": f"What is {i} + 1?", "answer": f"{i} + 1 = <<{i}+1={i + 1}>>\n#### {i + 1}"} for i in range(n)]


THREE = "b3a83fc8add220f5"               # the fingerprint of three of them


@real_files
@pytest.mark.parametrize("split, n, content", [("train", 7473, "590c8cee7aa54929"), ("test", 1319, "679f50aa36753f39")])
def test_gsm8k(run, tmp_path, split, n, content):
    told = run(prepare_gsm8k, "--split", split, "--from", SHARED / f"gsm8k_{split}.jsonl", "--out", tmp_path / "a.parquet")
    rows = dataset.load(tmp_path / "a.parquet")
    assert len(rows) == n and content in told and f"openai/gsm8k {split}" in told
    assert [row["id"] for row in rows[:2]] == [f"gsm8k-{split}-0", f"gsm8k-{split}-1"]
    assert rows[0]["answer"] == {"train": "72", "test": "18"}[split]
    assert all(row["answer"].lstrip("-").isdigit() for row in rows)
    assert {"train": "109200000", "test": "1450000"}[split] in {row["answer"] for row in rows}       # 109,200,000 and 1,450,000
    sha256 = {"train": "17f347dc", "test": "3730d312"}[split]
    assert rows[0]["source"].startswith(f"gsm8k_{split}.jsonl sha256:{sha256}") and rows[0]["source"].endswith(" answer-line")
    # the same rows as parquet, in another order: the same fingerprint
    raw = [json.loads(line) for line in open(SHARED / f"gsm8k_{split}.jsonl")]
    path = write_parquet(tmp_path / "raw.parquet", raw[::-1])
    assert content in run(prepare_gsm8k, "--split", split, "--from", path, "--style", "plain", "--out", tmp_path / "b.parquet")
    assert dataset.load(tmp_path / "b.parquet")[-1]["prompt"] == [{"role": "user", "content": raw[0]["question"]}]


def test_gsm8k_styles(run, tmp_path):
    path = write_json_lines(tmp_path / "raw.jsonl", gsm8k_rows())
    for style, prompt in {
            "answer-line": f"{BEFORE}What is 1 + 1?{AFTER}", "plain": "What is 1 + 1?",
            "boxed": "What is 1 + 1?\nPlease reason step by step, and put your final answer within \\boxed{}."}.items():
        told = run(prepare_gsm8k, "--from", path, "--style", style, "--accept", THREE, "--out", tmp_path / f"{style}.parquet")
        row = dataset.load(tmp_path / f"{style}.parquet")[1]
        assert row["prompt"] == [{"role": "user", "content": prompt}] and source.problem_of(prompt) == "What is 1 + 1?"
        assert row["answer"] == "2" and row["id"] == "gsm8k-train-1" and row["source"].endswith(" " + style)
        assert f"content {THREE}" in told and "accepted by --accept" in told


@pytest.mark.parametrize("rows, sentence", [
    (gsm8k_rows(), "has 3 rows; the train split of GSM8K has 7,473"),
    ([{"Question": "a", "answer": "b"}], "lacks columns: needed are question, answer, it has Question, answer"),
    ([{"question": "a", "answer": "72"}] * 7473, "the answer of row 0 does not end in \"#### \" and an integer but in '72'"),
    ([{"question": "a", "answer": "#### 7.5"}] * 7473, "answer of row 0 does not end in \"#### \" and an integer but in '7.5'"),
    ([{"question": " ", "answer": "x #### 7"}] * 7473, "row 0 has no question"),
    ([{"question": None, "answer": "x #### 7"}] * 7473, "row 0 has no question"),
    (gsm8k_rows(7473), "have the fingerprint 9e7cc24cbe42be61, none of those known (590c8cee7aa54929 openai/gsm8k train); "
                       "if these texts are meant, say --accept 9e7cc24cbe42be61"),
])
def test_gsm8k_refuses(refused, tmp_path, rows, sentence):
    assert sentence in refused(prepare_gsm8k, "--from", write_json_lines(tmp_path / "raw.jsonl", rows))


# ---------------------------------------------------------------- reading and writing, the same for all three

@pytest.mark.parametrize("content, sentence", [
    (b"question,answer\n1,2\n", "is neither parquet nor JSON lines: line 1 is no JSON object"),
    (b'{"question": "a"}\n\n["b"]\n', "is neither parquet nor JSON lines: line 3 is no JSON object"),
    (b"\xff\xfe\x00", "is neither parquet nor JSON lines"),
    (b"", "has no rows"),
    (b'{"question": 1}\n{"question": "a"}\n', "the values of a column differ in kind"),
    (b"PAR1 and then nothing", "cannot be read"),
])
def test_unreadable_files(refused, tmp_path, content, sentence):
    (tmp_path / "raw").write_bytes(content)
    assert sentence in refused(prepare_gsm8k, "--from", tmp_path / "raw")


def test_file_cut_short(refused, tmp_path):
    path = write_parquet(tmp_path / "raw.parquet", gsm8k_rows(500))
    path.write_bytes(path.read_bytes()[:3000])
    assert f"{path} cannot be read" in refused(prepare_gsm8k, "--from", path)


def test_missing_file_and_folder(refused, tmp_path):
    assert refused(prepare_gsm8k, "--from", "no.jsonl") == "no.jsonl cannot be read: No such file or directory"
    assert refused(prepare_gsm8k, "--from", tmp_path) == f"{tmp_path} cannot be read: Is a directory"


def test_existing_file(run, refused, tmp_path):
    path, out = write_json_lines(tmp_path / "raw.jsonl", gsm8k_rows()), tmp_path / "out.parquet"
    flags = ("--from", path, "--accept", THREE, "--out", out)
    run(prepare_gsm8k, *flags)
    inode = out.stat().st_ino
    run(prepare_gsm8k, *flags)
    assert out.stat().st_ino == inode                              # the same rows: left as it is
    sentence = f"{out} exists and holds something else: remove it, or use another --out"
    assert refused(prepare_gsm8k, *flags, "--style", "boxed") == sentence
    out.write_text("x")
    assert refused(prepare_gsm8k, *flags) == sentence


def test_full_disk(refused, tmp_path, monkeypatch):
    def full(table, path):
        path.write_bytes(b"PAR1")
        raise OSError(errno.ENOSPC, "Error writing bytes to file")
    path = write_json_lines(tmp_path / "raw.jsonl", gsm8k_rows())
    monkeypatch.setattr(pq, "write_table", full)
    told = refused(prepare_gsm8k, "--from", path, "--accept", THREE)
    assert told == f"{tmp_path}/out.parquet cannot be written: No space left on device"


def test_prepared_files_are_asked_for(tmp_path):
    """What `load` says to the published files themselves."""
    reward = {"prompt": "a", "reward_model": {"ground_truth": "1"}}
    for rows, script in ((gsm8k_rows(), "gsm8k"), ([{"Problem": "a", "Answer": 1}], "aime"), ([reward], "dapo_math"),
                         ([{**reward, "extra_info": {"raw_problem": "a"}}], "aime")):
        path = write_parquet(tmp_path / "raw.parquet", rows)
        with pytest.raises(Stop, match=f"lacks the column.*prepare it with python data/prepare_{script}.py --from {path}$"):
            dataset.load(path)
    with pytest.raises(Stop, match="cannot be read as parquet: .*; JSON lines go through data/prepare_gsm8k.py or"):
        dataset.load(write_json_lines(tmp_path / "raw.jsonl", gsm8k_rows()))
    with pytest.raises(Stop, match="it has a$"):
        dataset.load(write_parquet(tmp_path / "raw.parquet", [{"a": 1}]))


# ---------------------------------------------------------------- the Hub

COMMIT = "740312add88f781978c0658806c59bc2815b9866"


def test_hub_is_asked_for_the_pinned_commit(run, refused, tmp_path, monkeypatch):
    import datasets
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        rows = gsm8k_rows() if "gsm8k" in args[0] else [{"problem": str(i), "answer": i} for i in range(3)]
        return datasets.Dataset.from_list(rows)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    run(prepare_gsm8k, "--accept", THREE)                          # the default --out
    assert asked == [(("openai/gsm8k", "main"), {"split": "train", "revision": COMMIT})]
    row = dataset.load("data/gsm8k_train.parquet")[2]
    assert (row["answer"], row["source"]) == ("3", f"openai/gsm8k@{COMMIT} answer-line")
    for year in (2024, 2025):
        assert "has 3 distinct rows" in refused(prepare_aime, "--year", year)
    assert asked[1:] == [
        (("BytedTsinghua-SIA/AIME-2024", "default"), {"split": "train", "revision": "aa49075e24ad594b79fdf0bdcefa735c2181be67"}),
        (("MathArena/aime_2025", "default"), {"split": "train", "revision": "c94da77eb22bbd6439e62a323bec18493a421302"})]
    assert "--revision main: not a commit of 40 hex digits" in refused(prepare_gsm8k, "--revision", "main")
    assert "give one of the two" in refused(prepare_gsm8k, "--revision", COMMIT, "--from", "a.jsonl")
    run(prepare_gsm8k, "--revision", "f" * 40, "--accept", THREE, "--out", "b.parquet")
    assert asked[-1][1]["revision"] == "f" * 40


def offline(tmp_path, *flags):
    """The real `datasets` in a process of its own, without a network and with the cache in tmp_path/hf."""
    env = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-W", "ignore", ROOT / "data" / "prepare_gsm8k.py", *flags], cwd=tmp_path, env=env,
                          capture_output=True, text=True)


def test_offline_without_a_cache(tmp_path):
    done = offline(tmp_path)
    assert done.returncode == 1 and done.stdout == "" and not (tmp_path / "data").exists()
    assert done.stderr == (
        f"openai/gsm8k@{COMMIT} cannot be loaded (Couldn't reach 'openai/gsm8k' on the Hub (OfflineModeIsEnabled)): download "
        f"https://huggingface.co/datasets/openai/gsm8k/resolve/{COMMIT}/main/train-00000-of-00001.parquet where there is a "
        "network and use --from FILE\n")


@pytest.mark.parametrize("cached", [COMMIT, "f" * 40])
def test_offline_with_a_cache(tmp_path, cached):
    """`datasets` takes another commit from its cache without more than a warning: that is refused."""
    import datasets
    from datasets.arrow_writer import ArrowWriter
    rows, folder = gsm8k_rows(), tmp_path / "hf" / "datasets" / "openai___gsm8k" / "main" / "0.0.0" / cached
    folder.mkdir(parents=True)
    features = datasets.Dataset.from_list(rows).features
    with ArrowWriter(path=str(folder / "gsm8k-train.arrow"), features=features) as writer:
        for row in rows:
            writer.write(row)
        n, size = writer.finalize()
    splits = datasets.SplitDict({"train": datasets.SplitInfo("train", size, n, dataset_name="gsm8k")}, dataset_name="gsm8k")
    datasets.DatasetInfo(features=features, builder_name="parquet", dataset_name="gsm8k", config_name="main",
                         version=datasets.Version("0.0.0"), splits=splits).write_to_directory(str(folder))
    done = offline(tmp_path, "--accept", THREE)
    if cached == COMMIT:
        assert done.returncode == 0
        assert [row["answer"] for row in dataset.load(tmp_path / "data" / "gsm8k_train.parquet")] == ["1", "2", "3"]
    else:
        assert done.returncode == 1 and not (tmp_path / "data").exists()
        assert f"openai/gsm8k@{COMMIT} is not in the cache, and in its place `datasets` took {folder}/" in done.stderr


# ---------------------------------------------------------------- AIME

def invented(year):
    """30 (problem, answer), with the marks in which copies differ."""
    rng = random.Random(year)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(300)]
    texts = (" ".join(rng.choices(words, k=25)).capitalize() for _ in range(30))
    return [(f"{text} of $\\left(\\frac{{{i + 3}}}{{7}}\\right)x^2 - 1 = 0$ for {year}. Then $m + n$ is {rng.choice(words)}.",
             str(33 * i)) for i, text in enumerate(texts)]


@pytest.fixture
def years(monkeypatch):
    """{year: [(problem, answer)]}, known to prepare_aime in place of the real ones."""
    problems = {year: invented(year) for year in (2024, 2025)}
    problems[2025] = [(p, str(int(a) + 1)) for p, a in problems[2025]]
    for year, pairs in problems.items():
        monkeypatch.setitem(prepare_aime.ANSWERS, year, source.fingerprint(int(a) for _, a in pairs))
        monkeypatch.setitem(prepare_aime.CONTENT, year, {source.fingerprint([p, a] for p, a in pairs): "invented"})
    return problems


def dapo_row(problem, answer, **extra_info):
    return {"data_source": "math_dapo", "prompt": [{"content": BEFORE + problem + AFTER, "role": "user"}], "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"}, "extra_info": extra_info}


def layouts(pairs):
    """(name, rows, ids of the first and last) of the same 30 problems in every known set of columns."""
    url = "https://artofproblemsolving.com/wiki/index.php/2024_AIME_{}_Problems/Problem_{}"
    where = [("I", i + 1) if i < 15 else ("II", i - 14) for i in range(30)]
    boxed = BEFORE.replace("$Answer (without quotes)", r"\boxed{$Answer}")
    numbered = list(enumerate(pairs))
    roman = ("I-1", "II-15")
    yield "DAPO", [{**dapo_row(p, a, index=i, raw_problem=p), "__index_level_0__": k}
                   for k in range(32) for i, (p, a) in numbered], ("0", "29")
    yield "H4", [{"id": 60 + i, "problem": p, "answer": a.zfill(3), "url": url.format(*where[i])}
                 for i, (p, a) in numbered], roman
    yield "Maxwell-Jia", [{"ID": "2024-{}-{}".format(*where[i]), "Problem": p, "Answer": int(a)} for i, (p, a) in numbered], roman
    yield "MathArena", [{"problem_idx": i + 1, "problem": p, "answer": int(a)} for i, (p, a) in numbered], ("1", "30")
    yield "opencompass", [{"question": p, "answer": a + r"^\circ" * (i == 19)} for i, (p, a) in numbered], ("0", "29")
    yield "slime", [{"prompt": [{"role": "user", "content": boxed + p + AFTER}], "label": a} for p, a in pairs], ("0", "29")


def test_aime_from_every_known_layout(run, tmp_path, years):
    pairs = years[2024]
    for name, rows, (first, last) in layouts(pairs):
        path = write_parquet(tmp_path / f"{name}.parquet", rows)
        told = run(prepare_aime, "--from", path, "--out", tmp_path / name / "a.parquet")
        assert f"30 problems x {32 if name == 'DAPO' else 1}, invented" in told
        made = dataset.load(tmp_path / name / "a.parquet")
        assert [(row["prompt"][0]["content"], row["answer"]) for row in made] == [(BEFORE + p + AFTER, a) for p, a in pairs]
        assert (made[0]["id"], made[-1]["id"]) == (f"aime-2024-{first}", f"aime-2024-{last}")


@real_files
def test_real_aime(run, tmp_path):
    path = SHARED / "aime-2024.parquet"
    told = run(prepare_aime, "--year", "2024", "--from", path, "--out", tmp_path / "a.parquet")
    assert "30 problems x 32, BytedTsinghua-SIA/AIME-2024" in told
    assert "content 58a8a67793461063, answers 6809c5cf89d17fa1" in told
    rows = {row["id"]: row for row in dataset.load(tmp_path / "a.parquet")}
    assert sorted(rows) == sorted(f"aime-2024-{i}" for i in range(30))
    for raw in pq.read_table(path).to_pylist():                    # answer-line is the published prompt, letter by letter
        row = rows[f"aime-2024-{raw['extra_info']['index']}"]
        assert row["prompt"] == raw["prompt"] == source.ask(raw["extra_info"]["raw_problem"], "answer-line")
        assert row["answer"] == raw["reward_model"]["ground_truth"]


def changed(n, **changes):
    """The rows of the MathArena layout, row `n` with `changes`."""
    return lambda rows: [{**row, **changes} if i == n else row for i, row in enumerate(rows)]


@pytest.mark.parametrize("change, sentence", [
    (changed(3, answer="1/2"), "the answer '1/2' of problem 4 is no integer from 0 to 999"),
    (changed(3, answer="1000"), "the answer '1000' of problem 4 is no integer from 0 to 999"),
    (changed(3, answer="-7"), "the answer '-7' of problem 4 is no integer from 0 to 999"),
    (changed(3, answer=None), "the answer 'None' of problem 4 is no integer from 0 to 999"),
    (changed(3, problem=" "), "problem 4 has no text"),
    (changed(3, problem=None), "problem 4 has no text"),
    (changed(3, problem_idx=1), "has the id 'aime-2024-1' twice (second time in row 3)"),
    (lambda rows: rows[:29], "has 29 distinct rows; AIME 2024 has 30 problems"),
    (lambda rows: rows + rows[:1], "its 31 rows are not copies of each other: 30 distinct ones come 1 to 2 times"),
    (lambda rows: rows + changed(3, answer="5")(rows), "its 60 rows are not copies of each other: 31 distinct ones come 1 to 2"),
    (lambda rows: [{"id": row["problem_idx"], "text": row["problem"]} for row in rows],
     "needed are extra_info, reward_model or problem, answer or Problem, Answer or question, answer or prompt, label, it has"),
    (lambda rows: [dapo_row(row["problem"], row["answer"], index=1) for row in rows], "extra_info has no raw_problem"),
    (changed(3, answer="5"), "the answers' fingerprint is 46cf937030d9f77a, that of AIME 2024 b55062a531bef6dc"),
])
def test_aime_refuses(refused, tmp_path, years, change, sentence):
    rows = [{"problem_idx": i + 1, "problem": p, "answer": a} for i, (p, a) in enumerate(years[2024])]
    assert sentence in refused(prepare_aime, "--from", write_parquet(tmp_path / "raw.parquet", change(rows)))


def test_another_year_or_copy_of_aime(run, refused, tmp_path, years):
    rows = [{"problem": p, "answer": a} for p, a in years[2024]]
    path = write_json_lines(tmp_path / "raw.jsonl", rows)
    assert "that of AIME 2025" in refused(prepare_aime, "--year", "2025", "--from", path)
    rows[7]["problem"] += " Reworded."
    write_json_lines(path, rows)
    found = source.fingerprint([row["problem"], row["answer"]] for row in rows)
    told = refused(prepare_aime, "--from", path)
    assert f"the fingerprint {found}, none of those known" in told and told.endswith(f"say --accept {found}")
    assert "none of those known" in refused(prepare_aime, "--from", path, "--accept", "0" * 16)
    assert "accepted by --accept" in run(prepare_aime, "--from", path, "--accept", found, "--out", tmp_path / "a.parquet")


# ---------------------------------------------------------------- DAPO-Math

DAPO_SCHEMA = pa.schema([
    ("data_source", pa.string()), ("prompt", pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))),
    ("ability", pa.string()), ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
    ("extra_info", pa.struct([("index", pa.string())]))])


def variants(problem):
    """Writings of `problem` that must be recognised."""
    yield problem
    yield problem.replace(" ", "\n  ").replace("=", "\u2009=\u00a0")
    yield problem.replace("$", "").upper().replace("\\LEFT", "").replace("\\RIGHT", "").replace("\\FRAC", r"\dfrac")
    yield problem.replace("$", r"\(", 1).replace("$", r"\)", 1).replace("x^2", "x\u00b2").replace("- 1", "\u2212\\,1")
    yield "".join(chr(ord(c) + 0xfee0) if c.isalnum() else c for c in problem)              # full-width letters and digits
    yield problem + " The original answer is in the form m/n. Please give the value of m + n."
    yield problem + "\n[asy] draw((0,0)--(1,1)); label(\"A\", (0,0)); [/asy]\n![](https://example.org/a.png)"
    yield " ".join(w for i, w in enumerate(problem.split(" ")) if i not in (3, 17))          # two words left out


def not_recognised(problem):
    """A third of `problem` is not `problem`."""
    return problem[:len(problem) // 3] + " and what comes then is quite another thing: how many are there of it in the end?"


@pytest.fixture
def aime(run, tmp_path, years):
    """The flag --aime with both years' invented problems, in two prompt styles."""
    paths = [tmp_path / f"aime_{year}.parquet" for year in years]
    for (year, pairs), path, style in zip(years.items(), paths, ("answer-line", "boxed")):
        raw = write_json_lines(tmp_path / "raw.jsonl", [{"problem": p, "answer": a} for p, a in pairs])
        run(prepare_aime, "--year", year, "--from", raw, "--style", style, "--out", path)
    return "--aime", ",".join(map(str, paths))


def dapo_rows(years):
    """60 rows: 40 problems of which 2 are a third of an AIME problem, 5 again under another index, 3 more with two answers each,
    and 9 writings of AIME problems; the answers of the 40 are 0 to 39."""
    rng = random.Random(1)
    texts = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=150)).strip() + f" {i}?" for i in range(41)]
    clean = [*texts[:38], not_recognised(years[2024][0][0]), not_recognised(years[2025][9][0])]
    leaked = [*variants(years[2024][4][0]), years[2025][29][0]]
    pairs = [(text, f"0{i}") for i, text in enumerate(clean)] + [(text, f"0{i}") for i, text in enumerate(clean[:5])]
    pairs += [(text, answer) for text in texts[38:] for answer in ("6", "-6")] + [(text, "1") for text in leaked]
    return [dapo_row(text, answer, index=f"uuid-{i}") for i, (text, answer) in enumerate(pairs)], clean


def test_dapo_math(run, tmp_path, years, aime, monkeypatch):
    rows, clean = dapo_rows(years)
    path = write_parquet(tmp_path / "raw.parquet", rows * 4, DAPO_SCHEMA)
    monkeypatch.setattr(source, "BATCH", 37)                       # batches that end in the middle of a copy
    told = run(prepare_dapo_math, "--from", path, *aime, "--expect", "240,60,55,52,3", "--out", tmp_path / "a.parquet")
    made = dataset.load(tmp_path / "a.parquet")
    assert {(row["prompt"][0]["content"], row["answer"]) for row in made} == {
        (BEFORE + text + AFTER, str(i)) for i, text in enumerate(clean)} and len(made) == 40
    assert all(row["id"] == f"dapo-{row['prompt_sha256'][:12]}" for row in made)
    assert [row["id"] for row in made] == sorted(row["id"] for row in made)
    lines = told.splitlines()
    assert lines[0] == f"raw.parquet sha256:{made[0]['source'].split(':')[1].split()[0]}"
    assert [line.split()[0] for line in lines[1:6]] == ["240", "60", "55", "52", "3"]
    dropped = [line for line in lines if line.startswith("dropped dapo-")]
    assert len(dropped) == 9 and sum(f"aime-2024-4 of {tmp_path}/aime_2024.parquet" in line for line in dropped) == 8
    assert "dropped 3 prompts with conflicting answers and 9 with a problem of AIME, 8 of them whole" in lines
    # another order of the rows, or the Hub in place of the file: the same prompts and fingerprints
    import datasets
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: datasets.Dataset(pa.Table.from_pylist(
        rows[::-1] * 4, schema=DAPO_SCHEMA)))
    again = run(prepare_dapo_math, *aime, "--expect", "240,60,55,52,3", "--out", tmp_path / "b.parquet")
    assert again.splitlines()[0] == "BytedTsinghua-SIA/DAPO-Math-17k@65877096c24ffa7abc4e4fa5edb95cf3413a5674"
    assert again.splitlines()[-1].partition(" ")[2] == lines[-1].partition(" ")[2]
    assert [row["prompt"] for row in dataset.load(tmp_path / "b.parquet")] == [row["prompt"] for row in made]


def test_what_counts_as_the_same_problem(years):
    problem = years[2024][0][0]
    for text in list(variants(problem))[:5]:
        assert letters(text) == letters(problem) == letters(BEFORE + text + AFTER)
    for text in (r"Let $\alpha \le \tfrac{1}{2}$, \begin{array}{c}x\end{array}", "let \u03b1 \u2264 1/2 {C} X"):
        assert letters(text) == "let12cx"
    drawn = "[asy]\nlabel(\"$A$\", (0,0));\n[/asy] ![a figure](https://example.org/a.png) https://example.org/b.png\n"
    assert letters(f"Let {drawn} A be 1.") == letters("Let $A$ be 1.") == "letabe1"
    assert letters("\u5df2\u77e5 $z=\\cos \\frac{2}{7} \\pi$") == "\u5df2\u77e5z27"
    problems = {"a": prepare_dapo_math.pieces(problem)}
    shares = [share for _, share in prepare_dapo_math.overlaps(problems, [problem, not_recognised(problem), "short", ""])]
    assert shares[0] == 1 and 0.2 < shares[1] < 0.5 and shares[2:] == [0, 0]


@pytest.mark.parametrize("change, sentence", [
    (lambda rows: rows, "expected 1,791,700 rows, 17,917 distinct rows, 17,405 distinct rows without their index, 17,398 "
                        "distinct prompts, 7 prompts with conflicting answers; if it is the file you want, say --expect 60,60,"),
    (lambda rows: [{k: v for k, v in row.items() if k != "ability"} for row in rows],
     "lacks columns: needed are data_source, prompt, ability, reward_model, extra_info, it has data_source, prompt, reward"),
    (lambda rows: [{**row, "prompt": row["prompt"][0]["content"]} for row in rows], "not every prompt is a list of one message"),
    (lambda rows: [{**row, "prompt": row["prompt"] * 2} for row in rows], "not every prompt is a list of one message"),
    (lambda rows: [*rows, {**rows[0], "prompt": None}], "1 rows have no role"),
    (lambda rows: [*rows, {**rows[0], "reward_model": None}], "1 rows have no style"),
    (lambda rows: [{**row, "extra_info": {"split": "train"}} for row in rows], "the column extra_info has no index"),
    (lambda rows: [{**row, "reward_model": "34"} for row in rows], "the column reward_model has no style"),
    (lambda rows: [*rows, dapo_row("What is 1/2?", "1/2", index="a")], "the answer '1/2' of dapo-f7d76497b6d7 is no integer"),
    (lambda rows: [*rows, dapo_row("", "1", index="a")], "the prompt of dapo-66cc8cd982de holds no problem"),
    (lambda rows: [], "does not have the expected"),
])
def test_dapo_math_refuses(refused, tmp_path, years, aime, change, sentence):
    rows = change(dapo_rows(years)[0])
    path = write_parquet(tmp_path / "odd.parquet", rows, None if rows else DAPO_SCHEMA)
    expect = ("--expect", "61,61,56,53,3") if len(rows) == 61 else ()
    assert sentence in refused(prepare_dapo_math, "--from", path, *aime, *expect)


def test_aime_is_always_kept_out(refused, tmp_path, years, aime):
    """No way round the decontamination: both years, from files of the preparer."""
    path = write_parquet(tmp_path / "dapo.parquet", dapo_rows(years)[0])
    flags, files = ("--from", path, "--expect", "60,60,55,52,3"), aime[1].split(",")
    assert refused(prepare_dapo_math, *flags, "--aime", f"{files[0]},no/aime_2025.parquet") == (
        "no file no/aime_2025.parquet, whose problems must be kept out of training: make it with "
        "python data/prepare_aime.py --year 2025 --out no/aime_2025.parquet")
    assert refused(prepare_dapo_math, *flags).startswith("no file data/aime_2024.parquet, whose problems")
    assert refused(prepare_dapo_math, *flags, "--aime", files[0]) == "--aime lacks AIME 2025, to be kept out of training"
    assert refused(prepare_dapo_math, *flags, "--aime=") == "--aime lacks AIME 2024 and 2025, to be kept out of training"
    rows = dataset.load(files[0])
    dataset.write(tmp_path / "short.parquet", rows[1:])
    dataset.write(tmp_path / "own.parquet", [{**row, "source": "mine"} for row in rows])
    for name in ("short", "own"):
        told = refused(prepare_dapo_math, *flags, "--aime", f"{tmp_path}/{name}.parquet,{files[1]}")
        assert told == f"{tmp_path}/{name}.parquet is not what data/prepare_aime.py writes for 2024 or 2025"
    raw = write_parquet(tmp_path / "h4.parquet", [{"problem": "a", "answer": 1}])
    assert f"prepare_aime.py --from {raw}" in refused(prepare_dapo_math, *flags, "--aime", raw)
