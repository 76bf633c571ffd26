"""Calls in text: which code is found, where it ends, and what is appended."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from explorl.models import tiny_tokenizer
from explorl.rollout.tools import (
    Delimiters,
    MarkdownFence,
    ParsedCall,
    ToolSpec,
    calculator_tool,
    check_vocabulary,
    find_call,
    get_tool,
    output_block,
    python_tool,
)
from explorl.sandbox.interpreter import CellResult
from tests.hostile import HOSTILE

PYTHON, CALCULATOR = python_tool(), calculator_tool()


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("Let us see.\n\n```python\nprint(1)\nprint(2)\n```\n", "print(1)\nprint(2)\n"),
        ("```python\n```", ""),
        ("```python\n\n\n```", "\n\n"),
        ("```py\n1\n```", "1\n"),
        ("```Python3\n1\n```", "1\n"),
        ("``` python\n1\n```", "1\n"),
        ("```{python}\n1\n```", "1\n"),
        ('```python title="a"\n1\n```', "1\n"),
        ("```python\r\nx = 1\r\ny\r\n```\r\n", "x = 1\ny\n"),
        ("1. So:\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ("\t```python\n\tx\n\t```", "x\n"),
        ("```python\n    x\n    if y:\n        z\n```", "x\nif y:\n    z\n"),
        ("  ```python\nx\n  ```", "x\n"),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("```text\n1\n```\n```python\n2\n```", "2\n"),
        ("```text\n```python\n2\n```", "2\n"),
        ("```\nplain\n```\n```python\n2\n```", "2\n"),
        ("````markdown\n```python\n1\n```\n````\n```python\n2\n```", "2\n"),
        ("```python\nprint('答案 ß\u2028')\n```", "print('答案 ß\u2028')\n"),
        ("```python\nx\n```python\ny\n```", "x\n"),
        ("```python\nx\n```output\n1\n```", "x\n"),
        ("```python\nx\n`````", "x\n"),
        ("```python\nx\n```y", "x\n"),
        ("a ``` b\n```python\nx\n```", "x\n"),
    ],
)
def test_finds_the_code(text: str, source: str) -> None:
    found = find_call(text, PYTHON)
    assert found is not None
    assert found.source == source
    assert text[: found.end].endswith("```")
    assert text[found.begin :].startswith("```")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no code",
        "```python\nx = 1\n",
        "```python\nx = 1\n``",
        "```python",
        "```python```",
        "```python x = 1```\n",
        "```text\n1\n```",
        "```\n1\n```",
        "```pythonic\n1\n```",
        "say ```python\nx\n```",
        "````python\nx\n```\n",
        "~~~python\nx\n~~~",
        "\N{NO-BREAK SPACE}```python\nx\n```",
        "````text\n```python\nx\n```\n",
        "```text\n```python x```\ny\n```\n",
    ],
)
def test_finds_nothing(text: str) -> None:
    assert find_call(text, PYTHON) is None


def test_begins_where_it_is_told() -> None:
    text = "```python\n1\n```\n```output\n```python\nbad\n```\n```\n"
    first = find_call(text, PYTHON)
    assert first == ParsedCall("1\n", 0, 15)
    more = f"{text}```python\n2\n```"
    second = find_call(more, PYTHON, len(text))
    assert second is not None
    assert (second.source, second.end) == ("2\n", len(more))
    assert find_call("x```python\n1\n```", PYTHON, 1) is None  # not at the beginning of a line
    assert find_call("x", PYTHON, 5) is None


pieces = st.lists(
    st.sampled_from(
        ["```", "`", "````", "python", "\n", "\r\n", " ", "  ", "x", "text", "<<", "=", ">>", "output", "ß"]
    ),
    max_size=25,
).map("".join)


@given(pieces)
@example("```python\nx\n```python\ny\n```")
@example("<<1+<<2==")
def test_it_does_not_matter_when_one_looks(text: str) -> None:
    """A call is found at the character that completes it, and is the same however much has been sampled beyond it."""
    for tool in (PYTHON, CALCULATOR):
        first = next(filter(None, (find_call(text[:end], tool) for end in range(len(text) + 1))), None)
        assert find_call(text, tool) == first
        if first is not None:
            assert find_call(text[: first.end], tool) == first
            assert find_call(text[: first.end - 1], tool) is None


@given(st.text(), st.integers(0, 20))
def test_nothing_raises(text: str, start: int) -> None:
    for tool in (PYTHON, CALCULATOR):
        find_call(text, tool, start)
        output_block(CellResult("ok", text), tool, text[:start])


# Outputs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "before", "block"),
    [
        ("42\n", "```", "\n```output\n42\n```\n"),
        ("42", "```\n", "```output\n42\n```\n"),
        ("", "```", "\n```output\n```\n"),
        ("a\n```\nb\n", "```", "\n````output\na\n```\nb\n````\n"),
        ("`````", "```", "\n``````output\n`````\n``````\n"),
        ("``", "", "```output\n``\n```\n"),
    ],
)
def test_output_blocks(text: str, before: str, block: str) -> None:
    assert output_block(CellResult("ok", text), PYTHON, before) == block


@given(pieces)
@example("```python\nx\n```\n")
@example("```\n```python\nx\n```")
@example("1\n<<2=")
def test_no_output_makes_calls(text: str) -> None:
    """Not even if somebody searches the whole text of a rollout for them."""
    call = "```python\n1\n```"
    whole = call + output_block(CellResult("ok", text), PYTHON, call)
    found = find_call(whole, PYTHON)
    assert found is not None
    assert find_call(whole, PYTHON, found.end) is None
    call = "<<1="
    whole = call + output_block(CellResult("ok", text), CALCULATOR, call)
    assert find_call(whole, CALCULATOR, len(call)) is None
    assert whole.endswith(">>")
    assert whole.count(">>") == 1
    assert "\n" not in whole


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_text_in_calls_and_outputs(name: str) -> None:
    text = HOSTILE[name]
    found = find_call(f"{text}\n```python\nx = {text!r}\n```{text}", PYTHON)
    assert found is not None
    assert found.source == f"x = {text!r}\n"
    assert text in output_block(CellResult("ok", text), PYTHON)


# The calculator -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "source", "end"),
    [
        ("<<12*34=", "12*34", 8),
        ("so <<1+1=2>> and", "1+1", 9),
        ("<<1+<<2=", "2", 8),
        ("1 << 3, <<4=", "4", 12),
        ("<<1\n2 <<3=", "3", 10),
        ("<<" + "x" * 300 + "= <<5=", "5", 308),
        ("<<1==", "1", 4),
    ],
)
def test_calculator_calls(text: str, source: str, end: int) -> None:
    found = find_call(text, CALCULATOR)
    assert found is not None
    assert (found.source, found.end) == (source, end)


@pytest.mark.parametrize("text", ["", "<<", "<<1", "1=2", "=<<", "<<1\n=", "< <1="])
def test_no_calculator_call(text: str) -> None:
    assert find_call(text, CALCULATOR) is None


@pytest.mark.parametrize(
    ("result", "block"),
    [
        (CellResult("ok", "408\n"), "408>>"),
        (CellResult("ok", ""), ">>"),
        (CellResult("ok", "1\n2\n\n"), "2>>"),
        (CellResult("error", "Traceback (most recent call last):\nZeroDivisionError: division by zero\n"),
         "ZeroDivisionError: division by zero>>"),
        (CellResult("ok", "a>>b<<c\n"), "a b c>>"),
        (CellResult("refused", "no calls are left: 3 were allowed\n"), "no calls left>>"),
    ],
)  # fmt: skip
def test_calculator_outputs(result: CellResult, block: str) -> None:
    assert output_block(result, CALCULATOR, "<<12*34=") == block


def test_calculator_runs() -> None:
    text = "so <<12*34="
    with CALCULATOR.pool(warm=0) as pool:
        python = pool.open()
        found = find_call(text, CALCULATOR)
        assert found is not None
        text += output_block(python.run(found.source), CALCULATOR, text)
        assert text == "so <<12*34=408>>"
        assert find_call(text, CALCULATOR, len(text)) is None
        assert output_block(python.run("1/0"), CALCULATOR) == "ZeroDivisionError: division by zero>>"


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pyton", {}, "unknown tool 'pyton'; did you mean 'python'?"),
        ("search", {}, "unknown tool 'search'; known: calculator, python"),
        ("python", {"max_calls": 0}, "max_calls=0 of tool 'python': use 1 or more, such as 3"),
        ("python", {"max_calls": 2.5}, "max_calls=2.5 of tool 'python': use 1 or more, such as 3"),
        ("python", {"max_calls": True}, "max_calls=True of tool 'python': use 1 or more"),
        ("python", {"seconds": 0}, "tool 'python': seconds=0: give a positive number, like 5.0"),
        ("calculator", {"output": -3}, "tool 'calculator': output=-3: give a positive number, like 4000"),
        ("python", {"second": 3}, "unknown option of tool 'python' 'second'; did you mean 'seconds'?"),
        ("python", {"name": "x"}, "unknown option of tool 'python' 'name'"),
    ],
)
def test_errors_name_a_good_value(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        get_tool(name, **options)
    assert message in str(error.value)


def test_fences_are_checked() -> None:
    with pytest.raises(ValueError, match="opening='': use one or more characters without a newline, such as '<<'"):
        Delimiters("")
    with pytest.raises(ValueError, match="opening and closing are both '=': use different texts"):
        Delimiters("=", "=")
    with pytest.raises(ValueError, match=r"languages=\(\), output='output': use words"):
        MarkdownFence(())
    tool = ToolSpec("own", Delimiters("[", "]", "(", ")"), max_calls=1)
    assert find_call("a [1+1]", tool) == ParsedCall("1+1", 2, 7)
    assert output_block(CellResult("ok", "2\n"), tool) == "(2)"
    assert get_tool("calculator", fence=tool.fence).fence == tool.fence


def test_limits_reach_the_interpreter() -> None:
    tool = get_tool("python", max_calls=2, seconds=3, output=50, memory=1 << 28)
    limits = tool.limits()
    assert (limits.calls, limits.seconds, limits.output, limits.memory) == (2, 3, 50, 1 << 28)


class _Digits:
    """A tokenizer that knows digits alone."""

    unk_token_id = 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(c) + 1 if c.isdigit() else 0 for c in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(str(token - 1) if token else "?" for token in tokens)


def test_vocabulary_must_have_the_fence() -> None:
    for tool in (PYTHON, CALCULATOR):
        check_vocabulary(tool, tiny_tokenizer())
        with pytest.raises(ValueError, match=r"which the tokenizer of m cannot write; give it a fence=Delimiters"):
            check_vocabulary(tool, _Digits(), "m")
    check_vocabulary(ToolSpec("own", Delimiters("88", "99", "", "77")), _Digits())
