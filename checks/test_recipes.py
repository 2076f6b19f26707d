"""Recipes are read side by side: the same names in the same order, and the blocks that repeat on purpose word for word."""
import ast
import difflib
from pathlib import Path

import pytest

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
