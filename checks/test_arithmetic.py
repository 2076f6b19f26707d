"""The data file, the order of prompts, and the rehearsal problem: what it asks, how it is taught, that its parts fit together."""
import collections
import json
import random

import pytest

from common import rewards
from common.cli import Stop
from data import arithmetic, dataset
from data.dataset import Cursor


def row(i, **changes):
    return {"id": f"q{i}", "prompt": [{"role": "user", "content": f"{i}+1"}], "answer": str(i + 1), "source": "test", **changes}


def test_write_then_load(tmp_path):
    dataset.write(tmp_path / "d" / "a.parquet", [row(i) for i in range(3)])
    read = dataset.load(tmp_path / "d" / "a.parquet")
    assert [{k: r[k] for k in row(0)} for r in read] == [row(i) for i in range(3)]
    assert read[0]["prompt_sha256"] == dataset.prompt_sha256(row(0)["prompt"]) and len(read[0]["prompt_sha256"]) == 64
    few = dataset.load(tmp_path / "d" / "a.parquet", ("id", "answer"))
    assert few == [{"id": f"q{i}", "answer": str(i + 1)} for i in range(3)]
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["a.parquet"]


@pytest.mark.parametrize("rows, columns, sentence", [
    ([row(0), row(1), row(0)], dataset.COLUMNS, r"has the id 'q0' twice \(second time in row 2\)"),
    ([], dataset.COLUMNS, "has no rows"),
    ([row(0), row(1, answer="")], dataset.COLUMNS, r"row 1 \(id 'q1'\) has no answer"),
    ([row(0, prompt=[])], dataset.COLUMNS, r"row 0 \(id 'q0'\) has no prompt"),
    ([row(0, prompt_sha256="0" * 64)], dataset.COLUMNS, r"prompt of row 0 \(id 'q0'\) does not have the hash"),
    ([row(0)], ("id", "level", "score"), "lacks the columns level, score; it has id, prompt, answer, source, prompt_sha256"),
])
def test_bad_data_is_one_sentence(tmp_path, rows, columns, sentence):
    path = tmp_path / "a.parquet"
    dataset.write(path, rows)
    with pytest.raises(Stop, match=sentence) as error:
        dataset.load(path, columns)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_file_of_ones_own_needs_three_columns(tmp_path):
    import pyarrow.parquet
    dataset.write(tmp_path / "full.parquet", [row(0)])
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(tmp_path / "full.parquet", columns=["id", "prompt", "answer"]),
                                tmp_path / "own.parquet")
    full, own = dataset.load(tmp_path / "full.parquet")[0], dataset.load(tmp_path / "own.parquet")[0]
    assert own == {**full, "source": "own.parquet"}


def test_missing_or_foreign_file(tmp_path):
    with pytest.raises(Stop, match="no data file"):
        dataset.load(tmp_path / "none.parquet")
    (tmp_path / "a.parquet").write_text("id,prompt\n")
    with pytest.raises(Stop, match="cannot be read as parquet"):
        dataset.load(tmp_path / "a.parquet")


def test_cursor_is_a_function_of_seed_and_step():
    cursor = Cursor(103, 10, seed=5)
    order = [cursor.indices(step) for step in range(30)]
    # no state: a resumed run sees the same
    assert [Cursor(103, 10, seed=5).indices(step) for step in reversed(range(30))] == order[::-1]
    for epoch in range(3):
        seen = [i for step in order[10 * epoch:10 * epoch + 10] for i in step]
        assert len(set(seen)) == 100 and set(seen) <= set(range(103))      # ten whole steps, nothing twice
    assert order[:10] != order[10:20] and Cursor(103, 10, seed=6).indices(0) != order[0]
    assert len(set(i for step in order for i in step)) == 103
    assert Cursor(8, 3, seed=0).indices(0) == [0, 2, 1]       # pinned: the same on every machine
    with pytest.raises(Stop, match="a step of 11 prompts cannot be drawn from 10 rows"):
        Cursor(10, 11, 0)


# ---------------------------------------------------------------- the rehearsal problem

@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arithmetic")
    arithmetic.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def tok(prepared):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(prepared / "start")


def test_held_out_problems_are_not_trained_on(prepared):
    train, test = (dataset.load(prepared / f"{name}.parquet") for name in ("train", "test"))
    assert len(test) == arithmetic.HELD_OUT and len(train) + len(test) == 900
    assert not {r["prompt_sha256"] for r in train} & {r["prompt_sha256"] for r in test}
    assert all(eval(r["prompt"][0]["content"]) == int(r["answer"]) for r in train + test)


def test_tokenizer(tok):
    prompt = [{"role": "user", "content": "27+8"}]
    assert tok.convert_ids_to_tokens(dataset.encode(tok, prompt)) == [
        "[gMASK]", "<sop>", "<|user|>", "2", "7", "+", "8", "<|assistant|>", "<think>"]
    assert tok.eos_token == "<|endoftext|>" and tok.eos_token_id == arithmetic.config().eos_token_id == 0
    assert len(tok) <= arithmetic.config().vocab_size <= 400
    for marker in arithmetic.MARKERS:
        assert len(tok.encode(marker, add_special_tokens=False)) == 1
    for text in ("déjà vu \u2212 7\n\t{}", arithmetic.long_winded((27, 8), random.Random(0))):
        assert tok.decode(tok.encode(text, add_special_tokens=False)) == text
    assert tok.convert_ids_to_tokens(tok.encode("12 345", add_special_tokens=False)) == ["1", "2", "Ġ", "3", "4", "5"]


def test_both_ways_of_answering_are_right_and_only_one_is_long(tok):
    rng = random.Random(0)
    lengths = collections.defaultdict(list)
    for problem in arithmetic.problems()[0]:
        for way in (arithmetic.short, arithmetic.long_winded):
            text = way(problem, rng)
            assert rewards.grade(text, str(sum(problem)), in_think=True).correct
            assert rewards.grade_dapo(text, str(sum(problem))).correct
            lengths[way].append(len(tok.encode(text, add_special_tokens=False)))
    assert max(lengths[arithmetic.short]) <= 21
    over = [n > arithmetic.CAP for n in lengths[arithmetic.long_winded]]
    assert 0.75 < sum(over) / len(over) < 0.95                    # usually cut off, sometimes just not
    assert max(lengths[arithmetic.long_winded]) + 9 <= arithmetic.config().max_position_embeddings
    assert arithmetic.CAP + 9 > arithmetic.config().index_topk    # so that the token selection is at work in long answers


def test_batches_are_deterministic_and_hold_training_problems_only(tok):
    train, test = arithmetic.problems()
    first, again = ([b for b in arithmetic.sft_batches(tok, train, steps=20, tokens=1024)] for _ in range(2))
    assert len(first) == 20
    for (tokens, n_prompt), (tokens2, n_prompt2) in zip(first, again):
        assert n_prompt == n_prompt2 and all((a == b).all() for a, b in zip(tokens, tokens2))
        assert 1024 <= sum(map(len, tokens)) < 1024 + 130
        think = tok.convert_tokens_to_ids("<think>")
        assert all(t[-1] == tok.eos_token_id and t[n - 1] == think for t, n in zip(tokens, n_prompt))
    questions = {tok.decode(t[3:n - 2]) for tokens, n_prompt in first for t, n in zip(tokens, n_prompt)}
    assert questions <= {arithmetic.question(p) for p in train} and len(questions) > 100
    other, = arithmetic.sft_batches(tok, train, seed=1, steps=1)
    assert not all(len(a) == len(b) and (a == b).all() for a, b in zip(other[0], first[0][0]))


def test_checkpoint_has_the_parts_of_glm5p3(prepared):
    from safetensors import safe_open
    config = json.loads((prepared / "start" / "config.json").read_text())
    assert config["model_type"] == "glm_moe_dsa" and config["indexer_types"] == ["full", "full", "full", "shared"]
    assert config["scoring_func"] == "sigmoid" and config["topk_method"] == "noaux_tc"
    assert config["indexer_rope_interleave"] is True
    with safe_open(prepared / "start" / "model.safetensors", "np") as f:
        names = set(f.keys())
        bias = f.get_tensor("model.layers.1.mlp.gate.e_score_correction_bias")
        assert f.get_tensor("model.embed_tokens.weight").shape == (config["vocab_size"], config["hidden_size"])
        assert sum(f.get_tensor(n).size for n in names) < 3e6
    assert bias.shape == (8,) and (bias != 0).all()
    assert "model.layers.0.mlp.gate_proj.weight" in names and "model.layers.3.mlp.experts.7.up_proj.weight" in names
    assert "model.layers.2.self_attn.indexer.wq_b.weight" in names and "model.layers.3.self_attn.indexer.wq_b.weight" not in names
