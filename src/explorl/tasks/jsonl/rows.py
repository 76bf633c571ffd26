r"""Read rows of the task ``jsonl`` as problems; errors name the row's location.

A row has ``prompt`` (or ``question``, or ``problem``): text, or messages. It has ``answer``: text, a number, or a list
of accepted ones. If a text has ``####`` in it, as in GSM8K, only the part after it counts; without an ``answer``, the
content of the last ``\boxed`` of ``solution`` is used. The verifier ``choice`` takes a letter, or with a column
``choices`` one of them or its index, from 0; ``code`` takes ``test`` (HumanEval's ``check``, or a list of assertions)
and ``entry_point`` instead. ``completion``, or ``solution``, is text to fine-tune a model on. Other columns are copied
into the problem's data.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any

from explorl.core.plugins import unknown
from explorl.tasks.answer_span import last_boxed, last_hash
from explorl.tasks.base import Message, Problem, Prompt, completion_text
from explorl.tasks.choice.letters import LETTERS
from explorl.tasks.code.extract import defines
from explorl.tasks.json_lines import short_repr
from explorl.tasks.jsonl.numbers import is_number, parse_number
from explorl.tasks.jsonl.verifiers import VERIFIERS
from explorl.tasks.math.answer_text import MAX_LENGTH

EXAMPLE = '{"prompt": "What is 6 times 7?", "answer": 42}'
_CODE = '{"prompt": "Write a function f.", "entry_point": "f", "test": ["assert f(1) == 1"]}'
_PROMPTS = ("prompt", "question", "problem")
_TESTS = ("test", "tests", "test_list")
_MESSAGES = '[{"role": "user", "content": "What is 6 times 7?"}]'


def read_row(record: Mapping[str, Any], location: str, verifier: str, *, is_example: bool = False) -> Problem:
    """Return a row as a problem. ``verifier`` is "auto", or the verifier of rows that name none.

    ``is_example``: the row is for fine-tuning only, and needs a completion but no answer.
    """
    prompt = _prompt(record, location)
    data = {key: value for key, value in record.items() if key not in _PROMPTS and key not in ("completion", "split")}
    data["prompt"] = prompt
    if (completion := _completion(record, location)) is not None:
        data["completion"] = completion
    elif is_example:
        raise ValueError(f"{location}: no field 'completion', which rows of the split 'sft' need; give text")
    if is_example and all(record.get(key) is None for key in ("answer", *_TESTS)):
        return Problem(_key(prompt, None), {**data, "verifier": "exact", "answer": []})
    verifier = _verifier(record, location, verifier)
    if verifier == "code":
        data |= _tests(record, location)
    elif verifier == "choice":
        data |= _choice(record, location)
    else:
        data["answer"] = _answers(record, location)
    if verifier == "auto":
        verifier = "number" if all(map(is_number, data["answer"])) else "exact"
    elif verifier in ("number", "math", "regex"):
        _check_answers(data["answer"], verifier, location)
    data["verifier"] = verifier
    return Problem(_key(prompt, data.get("choices")), data)


def differing_column(first: Problem, second: Problem) -> str | None:
    """Return the column in which two rows with the same prompt ask for different answers; None if they agree."""
    columns = ("answer", "test", "entry_point", "verifier")
    return next((column for column in columns if first.data.get(column) != second.data.get(column)), None)


def as_messages(prompt: Prompt) -> list[Message]:
    """Return a prompt as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _key(prompt: Prompt, choices: list[str] | None) -> str:
    """Return a row's id, which does not depend on its line in the file, on its answer, or on white space."""
    texts = [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt]
    roles = [] if isinstance(prompt, str) else [turn["role"] for turn in prompt]
    parts = [*(roles if roles != ["user"] else ()), *(" ".join(text.split()) for text in (*texts, *(choices or ())))]
    return f"jsonl:{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def _prompt(record: Mapping[str, Any], location: str) -> Prompt:
    column = next((name for name in _PROMPTS if name in record), None)
    if column is None:
        raise ValueError(f"{location}: no field 'prompt'; give a line like {EXAMPLE}")
    prompt = record[column]
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{location}: {column} is {short_repr(prompt)}; give text, or messages like {_MESSAGES}")
    turns = [_message(turn, location) for turn in prompt]
    if turns[-1]["role"] == "assistant":
        raise ValueError(
            f"{location}: {column} ends with a message of the assistant; put its text into a column 'completion'"
        )
    return turns


def _message(turn: object, location: str) -> Message:
    role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(role, str) or not isinstance(content, str) or not content.strip():
        raise ValueError(f"{location}: a message is {short_repr(turn)}; give messages of text, like {_MESSAGES}")
    return {"role": role, "content": content}


def _verifier(record: Mapping[str, Any], location: str, default: str) -> str:
    """Return a row's verifier; "auto" if its answer decides."""
    name = record.get("verifier", default)
    if name in VERIFIERS:
        return str(name)
    if name != "auto":
        raise ValueError(f"{location}: {unknown('verifier', name, VERIFIERS)}")
    if any(record.get(name) is not None for name in _TESTS):
        return "code"
    if record.get("choices") is not None:
        return "choice"
    return "auto"


def _answers(record: Mapping[str, Any], location: str) -> list[str]:
    answer, solution = record.get("answer"), record.get("solution")
    if "answer" not in record and isinstance(solution, str):
        answer = last_boxed(solution)[0]
        if not answer:
            raise ValueError(f"{location}: no answer, and no \\boxed in solution; give a line like {EXAMPLE}")
    elif "answer" not in record:
        raise ValueError(f"{location}: no field 'answer'; give a line like {EXAMPLE}")
    answers = [_text(item) for item in (answer if isinstance(answer, list) else [answer])]
    if not answers or not all(answers):
        raise ValueError(
            f"{location}: answer is {short_repr(answer)}; give text like '42', a number, or a list of them"
        )
    return [str(text) for text in answers]


def _text(answer: object) -> str | None:
    """Return an answer as text; None if it is neither text nor a number."""
    if isinstance(answer, str):
        return (last_hash(answer)[0] or answer).strip()
    if isinstance(answer, bool):
        return str(answer).lower()
    if isinstance(answer, int | float) and math.isfinite(answer):
        return str(answer)
    return None


def _check_answers(answers: list[str], verifier: str, location: str) -> None:
    for answer in answers:
        if verifier == "number" and parse_number(answer) is None:
            raise ValueError(f"{location}: answer is {short_repr(answer)}, which is not one number; give one like 42")
        if verifier == "math" and len(answer) > MAX_LENGTH:
            raise ValueError(f"{location}: answer has {len(answer):,} characters; give at most {MAX_LENGTH:,}")
        if verifier == "regex":
            try:
                matches_all = re.compile(answer).search("") is not None
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(
                    rf"{location}: answer is {short_repr(answer)}, an invalid pattern: {error}; give one like '\b42\b'"
                ) from None
            if matches_all:
                raise ValueError(
                    rf"{location}: the pattern {short_repr(answer)} matches any text; give one like '\b42\b'"
                )


def _choice(record: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Return the options, if the row has them, and the index of the right one."""
    options, answer = record.get("choices"), record.get("answer")
    if options is None:
        letter = answer.strip().strip("().").upper() if isinstance(answer, str) else ""
        if len(letter) != 1 or letter not in LETTERS:
            raise ValueError(f"{location}: answer is {short_repr(answer)}; give a letter like 'C', or a list 'choices'")
        return {"answer": LETTERS.index(letter)}
    choices = [choice.strip() for choice in options if isinstance(choice, str)] if isinstance(options, list) else []
    if not isinstance(options, list) or len(choices) != len(options) or not all(choices):
        raise ValueError(f"{location}: choices is {short_repr(options)}; give a list of texts like ['iron', 'neon']")
    if not 2 <= len(choices) <= len(LETTERS) or len(set(choices)) < len(choices):
        raise ValueError(f"{location}: choices is {short_repr(options)}; give 2 to {len(LETTERS)} that differ")
    letters = LETTERS[: len(choices)]
    if isinstance(answer, str) and answer.strip() in choices:
        answer = choices.index(answer.strip())
    elif isinstance(answer, str) and len(letter := answer.strip().strip("().").upper()) == 1 and letter in letters:
        answer = letters.index(letter)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise ValueError(
            f"{location}: answer is {short_repr(answer)}; give one of the choices, its letter, or a number from 0 to "
            f"{len(choices) - 1}"
        )
    return {"choices": choices, "answer": answer}


def _tests(record: Mapping[str, Any], location: str) -> dict[str, str]:
    """Return the arguments of `run_tests`; a list of assertions becomes the body of ``check``."""
    name = record.get("entry_point")
    tests = next((record[key] for key in _TESTS if record.get(key) is not None), None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{location}: entry_point is {short_repr(name)}; give a line like {_CODE}")
    if isinstance(tests, str) and defines(tests, "check"):
        return {"entry_point": name, "test": tests}
    lines = tests.strip().split("\n") if isinstance(tests, str) else tests
    if not isinstance(lines, list) or not lines or not all(isinstance(line, str) and line.strip() for line in lines):
        raise ValueError(f"{location}: test is {short_repr(tests)}; give a line like {_CODE}")
    if not any(name in line for line in lines):
        raise ValueError(f"{location}: no test calls {name!r}; give a line like {_CODE}")
    body = "\n".join(f"    {line}" for part in lines for line in part.split("\n"))
    test = f"def check(candidate):\n    {name} = candidate\n{body}\n"
    try:
        compile(test, "test", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{location}: test is not valid Python: {error}; give a line like {_CODE}") from None
    return {"entry_point": name, "test": test}


def _completion(record: Mapping[str, Any], location: str) -> str | None:
    """Return the row's completion: ``completion``, ``solution``, or an ``answer`` that shows its steps."""
    completion = record.get("completion")
    if completion is None:
        completion = record.get("solution")
        answer = record.get("answer")
        if completion is None and isinstance(answer, str) and last_hash(answer)[0]:
            completion = answer
        return completion.strip() or None if isinstance(completion, str) else None
    if isinstance(completion, list) and all(isinstance(turn, dict) for turn in completion):
        completion = completion_text(completion)
    if not isinstance(completion, str) or not completion.strip():
        raise ValueError(f"{location}: completion is {short_repr(record['completion'])}; give text, or leave it out")
    return completion
