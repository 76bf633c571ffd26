"""Where outputs stand in a text, by the blocks that rollouts would have been given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorl.rollout.tools import (
    Delimiters,
    ToolSpec,
    calculator_tool,
    find_call,
    open_call,
    output_block,
    output_mask,
    output_spans,
    python_tool,
)
from explorl.sandbox.interpreter import CellResult

PYTHON, CALCULATOR = python_tool(), calculator_tool()
LINES = st.text(alphabet="ab1 `\n>=<~", max_size=30)
WORDS = st.text(alphabet="ab1 \n", max_size=12)


def outputs(text: str, tool: ToolSpec) -> list[str]:
    return [text[begin:end] for begin, end in output_spans(text, tool)]


@pytest.mark.parametrize("tool", [PYTHON, CALCULATOR], ids=["python", "calculator"])
@given(parts=st.lists(st.tuples(WORDS, LINES), max_size=4), end=WORDS)
def test_what_rollouts_append_is_found(tool: ToolSpec, parts: list[tuple[str, str]], end: str) -> None:
    """Texts are written as a rollout writes them: a call, the block for its result, and what comes behind."""
    text, blocks = "", []
    for said, result in parts:
        call = f"{said}\n```python\nprint(1)\n```" if tool is PYTHON else f"{said}<<1+1="
        text += call
        block = output_block(CellResult("ok", result), tool, text)
        text += block
        blocks.append(block)
    text += end
    assert outputs(text, tool) == blocks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("347*286=99242", []),
        ("<<1+1=2>>", ["2>>"]),
        ("<<1+1=", []),  # nothing has been said
        ("<<1+1=2", ["2"]),  # cut off
        ("<<1+1=2\n3>>", []),  # outputs have one line
        ("<<1+1=2>><<2+2=4>>!", ["2>>", "4>>"]),
    ],
)
def test_a_calculators_outputs(text: str, expected: list[str]) -> None:
    assert outputs(text, CALCULATOR) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\n1\n```\n```output\n1\n```\nSo", ["\n```output\n1\n```\n"]),
        ("```python\n1\n```\r\n```output\r\n1\r\n```\r\nSo", ["\r\n```output\r\n1\r\n```\r\n"]),
        ("```python\n1\n```\n```output\n```\nSo", ["\n```output\n```\n"]),
        ("```python\n1\n```\n```output\n1", ["\n```output\n1"]),  # cut off
        ("```python\n1\n```\n\n```output\n1\n```\n", []),  # no rollout has an empty line there
        ("```python\n1\n```\nIt is\n```output\n1\n```\n", []),
        ("```output\n1\n```\n", []),  # nobody has called
        ("```python\n1\n```\n````output\n```python\n2\n```\n````\nSo", ["\n````output\n```python\n2\n```\n````\n"]),
    ],
)
def test_outputs_of_python(text: str, expected: list[str]) -> None:
    assert outputs(text, PYTHON) == expected


def test_outputs_that_nobody_can_find_are_refused() -> None:
    class Fence(Delimiters):
        pass

    class Other:
        stop, examples = "x", ("x",)

        def find(self, text: str, start: int) -> Any:
            return CALCULATOR.fence.find(text, start)

    endless = calculator_tool(fence=Fence("<<", "=", "", ""))
    with pytest.raises(ValueError, match=r"after_output='' .* such as '>>'"):
        output_spans("<<1=2", endless)
    with pytest.raises(ValueError, match="have a Other, which cannot be found"):
        output_spans("<<1=2", ToolSpec("own", Other()))  # type: ignore[arg-type]


def test_tokens_of_outputs() -> None:
    """The token that completes a call may say white space beyond it, but nothing else."""
    text = "a<<1= 2>>b"
    spans = output_spans(text, CALCULATOR)
    assert spans == [(5, 9)]

    def masked(*pieces: str) -> list[str]:
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
        mask = output_mask(text, list(zip([0, *ends[:-1]], ends, strict=True)), spans)
        return [piece for piece, one in zip(pieces, mask, strict=True) if one]

    assert "".join(("a", "<<1=", " 2", ">>", "b")) == text
    assert masked("a", "<<1=", " 2", ">>", "b") == [" 2", ">>"]
    assert masked("a<<1", "= ", "2>", ">", "b") == ["2>", ">"]
    assert masked("a<<1", "= 2", ">>", "b") == ["= 2", ">>"]
    assert masked("a<<1=", " 2", ">>b") == [" 2", ">>b"]  # never a token of an output
    assert output_mask("", [], []).tolist() == []


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Solve it.\n```python\n", "```python\n"),
        ("Solve it.\n```python", "```python"),
        ("```py\nimport math\n", "```py\nimport math\n"),
        ("```python\nx = ", "```python\nx = "),
        ("1.\n  ````python\n  ", "  ````python\n  "),
        ("For example\n```python\n1\n```\n```output\n1\n```\nNow you.\n```python\n", "```python\n"),
        ("For example\n```python\n1\n```\n```output\n1\n```\nNow you.\n", ""),
        ("You can write ```python blocks", ""),
        ("```text\n", ""),
        ("", ""),
    ],
)
def test_a_call_that_a_prompt_opens(prompt: str, expected: str) -> None:
    assert open_call(prompt, PYTHON) == expected
    if expected:
        assert find_call(expected + "\n````", PYTHON) is not None


@pytest.mark.parametrize(
    ("prompt", "expected"), [("3*4 is <<", "<<"), ("<<1+1=2>> <<", "<<"), ("<<1+1=2>>", ""), ("What is x << 2", "")]
)
def test_a_calculation_that_a_prompt_opens(prompt: str, expected: str) -> None:
    assert open_call(prompt, CALCULATOR) == expected
