"""DAPO-Math-17k as a data file to train on: the published file repeats about 17,000 problems a hundred times.

python data/prepare_dapo_math.py                                       # from the Hub: data/dapo_math.parquet
python data/prepare_dapo_math.py --from dapo-math-17k.parquet          # from the published file (299 MB)

It needs the files that prepare_aime.py writes for 2024 and 2025. Steps, as in SkyRL's preparation except for the last:
 1. equal rows become one
 2. one row a prompt; a prompt with two different reward_model is dropped, because one of its answers is wrong
 3. a prompt is dropped when at least half of what a problem of AIME 2024 or 2025 is made of stands in it (see `pieces`)
The counts must be those of the published file, as others counted them (data/README.md); --expect is for another file.
"""
import collections
import dataclasses
import re
import sys
import unicodedata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli  # noqa: E402
from common.rewards import integer  # noqa: E402
from data import dataset, source  # noqa: E402
from data.prepare_aime import ANSWERS  # noqa: E402

HUB = source.Hub("BytedTsinghua-SIA/DAPO-Math-17k", "default", "train", "65877096c24ffa7abc4e4fa5edb95cf3413a5674",
                 "data/dapo-math-17k.parquet")
FILE_SHA256 = "534375d6bb8630d22ab46a56e11f2ffec1d288d8f7d04099bc82d68948705941"
# (column, field of its struct): what SkyRL's preparation compares, and the problem's id last
FIELDS = (("data_source", None), ("prompt", "role"), ("prompt", "content"), ("ability", None), ("reward_model", "style"),
          ("reward_model", "ground_truth"), ("extra_info", "index"))
COUNTS = ("rows", "distinct rows", "distinct rows without their index", "distinct prompts", "prompts with conflicting answers")
# pictures, links, and LaTeX's commands with what begins and ends an environment
MARKUP = re.compile(r"\[asy\].*?\[/asy\]|!\[[^\]]*\]\([^)]*\)|https?://\S+|\\(?:begin|end)\{[^}]*\}|\\[A-Za-z]+", re.DOTALL)
PIECE = 16                    # letters; see `pieces`


@dataclasses.dataclass
class Config:
    aime: tuple[str, ...] = ("data/aime_2024.parquet", "data/aime_2025.parquet")   # whose problems are kept out; any number of
                                          # copies, both years
    out: str = "data/dapo_math.parquet"
    from_: str | None = None              # a file in place of the Hub
    revision: str | None = None           # another commit of the Hub
    expect: tuple[int, int, int, int, int] = (1_791_700, 17_917, 17_405, 17_398, 7)   # rows, distinct rows, those without
                                          # their extra_info.index, distinct prompts, prompts with conflicting answers


def letters(text):
    """What any two writings of a problem have in common: its letters and digits, without instruction, MARKUP, Greek letters
    (commands in LaTeX), punctuation, spaces and case; NFKC first, so that x\u00b2 is x2 and full-width letters are letters."""
    text = MARKUP.sub(" ", unicodedata.normalize("NFKC", source.problem_of(text))).casefold()
    return "".join(c for c in text if c.isalnum() and not "\u0370" <= c <= "\u03ff")


def pieces(text):
    """The runs of PIECE of the text's `letters`. Of the problem that BytedTsinghua-SIA/AIME-2024 and HuggingFaceH4/aime_2024 word
    differently they have 0.52 in common; none of 1,377 other contest problems has more than 0.39 of an AIME problem's."""
    text = letters(text)
    return {text[i:i + PIECE] for i in range(max(1, len(text) - PIECE + 1))}


def read_aime(paths):
    """{id: pieces} of the problems in prepared AIME files, which must be those of both years."""
    found, years = {}, {answers: year for year, answers in ANSWERS.items()}
    missing = dict(years)
    for path in paths:
        if not Path(path).is_file():
            year = (re.findall("2024|2025", Path(path).name) or ["2024 or 2025"])[-1]
            raise cli.Stop(f"no file {path}, whose problems must be kept out of training: make it with "
                           f"python data/prepare_aime.py --year {year} --out {path}")
        rows = dataset.load(path)
        answers = source.fingerprint(int(integer(row["answer"]) or -1) for row in rows)
        if answers not in years or not all(row["source"].endswith(tuple(source.STYLES)) for row in rows):
            raise cli.Stop(f"{path} is not what data/prepare_aime.py writes for {' or '.join(map(str, ANSWERS))}")
        missing.pop(answers, None)
        found |= {f"{row['id']} of {path}": pieces(row["prompt"][-1]["content"]) for row in rows}
    if missing:
        raise cli.Stop(f"--aime lacks AIME {' and '.join(map(str, missing.values()))}, to be kept out of training")
    return found


def overlaps(problems, texts):
    """For every text (problem, share): the one of `problems` {id: pieces} with the largest share of its pieces in the text."""
    holders = collections.defaultdict(list)
    for problem, of_problem in problems.items():
        for piece in of_problem:
            holders[piece].append(problem)
    for text in texts:
        shared = collections.Counter(problem for piece in pieces(text) for problem in holders.get(piece, ()))
        yield max(((problem, n / len(problems[problem])) for problem, n in shared.items()), key=lambda found: found[1],
                  default=(None, 0.0))


def flat(name, batch):
    """A table with one text column for each of FIELDS; `batch` has their columns."""
    import pyarrow as pa
    import pyarrow.compute as pc
    texts = []
    for column, field in FIELDS:
        values = batch[column].combine_chunks()
        if column == "prompt":
            if not pa.types.is_list(values.type) or pc.any(pc.not_equal(pc.list_value_length(values), 1)).as_py():
                raise cli.Stop(f"{name}: not every prompt is a list of one message, as in {HUB.id}; cleaned copies are not read")
            values = pc.list_flatten(values)
        if field is not None:
            if not pa.types.is_struct(values.type) or values.type.get_field_index(field) < 0:
                raise cli.Stop(f"{name}: the column {column} has no {field}, which it has in {HUB.id}")
            values = pc.struct_field(values, field)
        if values.null_count or len(values) < len(batch):
            raise cli.Stop(f"{name}: {values.null_count or len(batch) - len(values):,} rows have no {field or column}")
        texts.append(values.cast(pa.string()))
    return pa.table(texts, names=[field or column for column, field in FIELDS])


def count(given):
    """(the numbers of COUNTS, {(role, prompt): {(style, ground_truth)}}). In memory are a batch and the distinct rows."""
    import pyarrow as pa

    def distinct(table, columns):
        return table.group_by(columns, use_threads=False).aggregate([])

    names = [field or column for column, field in FIELDS]
    rows, seen = 0, pa.table({name: pa.array([], pa.string()) for name in names})
    for batch in given.batches(source.columns(given, tuple(dict(FIELDS)))):
        rows += len(batch)
        seen = distinct(pa.concat_tables([seen, distinct(flat(given.name, batch), names)]), names)
    golds = collections.defaultdict(set)
    for row in seen.to_pylist():
        golds[row["role"], row["content"]].add((row["style"], row["ground_truth"]))
    conflicting = sum(len(gold) > 1 for gold in golds.values())
    return (rows, len(seen), len(distinct(seen, names[:-1])), len(golds), conflicting), golds


def main():
    cfg = cli.parse(Config, doc=__doc__)
    aime = read_aime(cfg.aime)
    given = source.read(cfg.from_, cfg.revision, HUB)
    counts, golds = count(given)
    print(given.name + " (the published file)" * given.name.endswith(FILE_SHA256))
    print("\n".join(f"{n:11,} {what}" for n, what in zip(counts, COUNTS)))
    if counts != cfg.expect:
        told = ", ".join(f"{n:,} {what}" for n, what in zip(cfg.expect, COUNTS))
        raise cli.Stop(f"{given.name} does not have the expected {told}; if it is the file you want, say "
                       f"--expect {','.join(map(str, counts))}")
    rows = []
    for (role, content), gold in golds.items():
        (_, answer), *others = gold
        prompt = [{"role": role, "content": content}]
        row_id = f"dapo-{dataset.prompt_sha256(prompt)[:12]}"
        if not letters(content):
            raise cli.Stop(f"{given.name}: the prompt of {row_id} holds no problem")
        if not others and integer(answer) is None:
            raise cli.Stop(f"{given.name}: the answer {answer[:40]!r} of {row_id} is no integer")
        if not others:
            rows.append({"id": row_id, "prompt": prompt, "answer": integer(answer), "source": f"{given.name} own prompt"})
    kept, whole = [], 0
    for row, (problem, share) in zip(rows, overlaps(aime, (row["prompt"][0]["content"] for row in rows))):
        whole += share == 1
        if share < 0.5:
            kept.append(row)
        else:
            print(f"dropped {row['id']}: {share:.2f} of {problem}")
    leaked = len(rows) - len(kept)
    print(f"dropped {counts[-1]} prompts with conflicting answers and {leaked} with a problem of AIME, {whole} of them whole")
    source.save(cfg.out, sorted(kept, key=lambda row: row["id"]))


if __name__ == "__main__":
    cli.run_main(main)
