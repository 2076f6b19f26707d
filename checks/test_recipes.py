"""Recipes are read side by side: the same names in the same order, and the blocks that repeat on purpose word for word."""
import ast
import difflib
import importlib.util
import sys
from pathlib import Path

import pytest

from common import cli, gpus

RECIPES = sorted((Path(__file__).resolve().parent.parent / "recipes").glob("*.py"))
FIRST = next(p for p in RECIPES if p.stem == "dapo_glm5p3_lora")
OTHERS = [p for p in RECIPES if p != FIRST]
SAME = ("group_advantage", "mismatch", "seed_of", "answer_all", "evaluate", "publish", "read")
MOST = 0.4                                       # share of lines that a recipe may have for itself


def parts(path):
    """{name: source} of the top level's functions and classes, in order."""
    source = path.read_text()
    return {node.name: ast.get_source_segment(source, node) for node in ast.parse(source).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


@pytest.mark.parametrize("path", OTHERS, ids=lambda p: p.stem)
def test_names_order_and_shared_blocks(path):
    ours, first = parts(path), parts(FIRST)
    assert [n for n in ours if n in first] == [n for n in first if n in ours], "the order differs"
    assert set(first) <= set(ours), f"missing: {set(first) - set(ours)}"
    for name in SAME:
        assert ours[name] == first[name], "\n".join(difflib.unified_diff(first[name].splitlines(), ours[name].splitlines()))


@pytest.mark.parametrize("path", OTHERS, ids=lambda p: p.stem)
def test_a_recipe_differs_little_from_the_first(path):
    ours, first = path.read_text().splitlines(), FIRST.read_text().splitlines()
    new = [line for line in difflib.ndiff(first, ours) if line.startswith("+ ")]
    assert len(new) < MOST * len(ours), f"{len(new)} of {len(ours)} lines are not the first recipe's"


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_length_and_docstring(path):
    text = path.read_text()
    assert 300 <= len(text.splitlines()) <= 550
    doc = ast.get_docstring(ast.parse(text))
    assert all(f"python recipes/{path.name}{how}" in doc for how in (" --plan", " --rehearse")) and "What differs from" in doc


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_flags_win_over_what_a_rehearsal_sets_on_a_gpu(path, monkeypatch):
    monkeypatch.setattr(gpus, "count", lambda: 2)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    recipe = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, recipe)                    # dataclasses look it up
    spec.loader.exec_module(recipe)
    cfg = cli.parse(recipe.Config, recipe.PRESETS, "", ["--rehearse"])
    assert (cfg.gpus_per_node, cfg.dtype, cfg.tp, cfg.ep, cfg.gpu_memory_utilization) == (1, "bfloat16", 1, 1, 0.3)
    cfg = cli.parse(recipe.Config, recipe.PRESETS, "", "--gpus-per-node 2 --gpu-memory-utilization 0.5 --lr 1 --rehearse".split())
    assert (cfg.gpus_per_node, cfg.dtype, cfg.gpu_memory_utilization, cfg.lr) == (2, "bfloat16", 0.5, 1)
