"""Generation with calls of a tool: against generation from scratch on the same tokens, and whatever programs do."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from explorl.rollout import Engine, SamplingParams
from explorl.rollout.rollouts import Rollout, ToolCall
from explorl.rollout.tool_use import ToolSession, ToolUse, generate_with_tools
from explorl.rollout.tools import Delimiters, ToolSpec, calculator_tool, python_tool
from explorl.sandbox.interpreter import CellResult

from .planted import CHARACTERS, Desk, always, echo, planted, standing_in


def use(tool: ToolSpec) -> ToolUse:
    return ToolUse(tool, warm=0)


def check_greedy(model: Any, prompt: Sequence[int], rollout: Rollout) -> None:
    """Each sampled token is what the model itself finds likeliest after all before it, and they alone have records."""
    ids = torch.tensor([[*prompt, *rollout.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    tokens = torch.tensor(rollout.token_ids)
    assert torch.equal(logits.argmax(-1)[rollout.sampled], tokens[rollout.sampled])
    logps = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(rollout.logps[rollout.sampled], logps[rollout.sampled], atol=1e-4, rtol=0)
    for record in (rollout.logps, rollout.sampling_logps, rollout.entropy):
        assert torch.equal(record.isnan(), ~rollout.sampled)
    assert not rollout.branching[~rollout.sampled].any()


PROMPTS = ["12*13=", "a", "7", "(x)"]


@pytest.mark.usefixtures("place")
def test_five_calls_equal_generation_from_scratch_wherever_keys_and_values_are(policy: Any, tokenizer: Any) -> None:
    check_calls(policy, tokenizer, "T", "P", 5, 5)


@pytest.mark.parametrize(
    ("opening", "closing", "limit", "most"), [("3", "4", 2, 2), ("=", "w", 5, 2), ("w", "=", 1, 1)]
)
def test_spliced_generation_equals_generation_from_scratch(
    policy: Any, tokenizer: Any, opening: str, closing: str, limit: int, most: int
) -> None:
    check_calls(policy, tokenizer, opening, closing, limit, most)


def check_calls(policy: Any, tokenizer: Any, opening: str, closing: str, limit: int, most: int) -> None:
    tool = calculator_tool(fence=Delimiters(opening, closing, "[", "]"), max_calls=limit)
    engine = Engine(policy, tokenizer)
    params = SamplingParams(temperature=0, max_tokens=80, stop_token_ids=())
    got = generate_with_tools(engine, PROMPTS, 1, params, use(tool), pool=standing_in(Desk(echo, patience=2)))
    made = [[call for call in rollout.calls if call.status == "ok"] for rollout in got]
    assert max(map(len, made)) == most
    for prompt, rollout in zip(got.prompt_ids, got, strict=True):
        check_greedy(policy, prompt, rollout)
        assert len(rollout) == 80
        forced = [False] * 80
        for call in rollout.calls:
            forced[call.begin : call.end] = [True] * (call.end - call.begin)
            shown = "no calls left" if call.status == "refused" else echo(call.source).text.strip()
            said = tokenizer.decode(rollout.token_ids[: call.end], skip_special_tokens=True)
            if call.end < 80:
                assert said.endswith(f"{call.source}{closing}[{shown}]")
        assert rollout.sampled.tolist() == [not token for token in forced]
        assert rollout.model_tokens == 80 - sum(forced)
    fresh = engine.generate(PROMPTS, 1, params)
    for rollout, plain, calls in zip(got, fresh, made, strict=True):
        length = calls[0].begin if calls else 80
        assert rollout.token_ids[:length] == plain.token_ids[:length]
        assert (rollout.token_ids == plain.token_ids) == (not calls)


def test_when_a_call_is_done_changes_nothing(policy: Any, tokenizer: Any) -> None:
    """Nor does the company: rows that may make no call are sampled as without the tool."""
    tool = use(calculator_tool(fence=Delimiters("=", "w", "[", "]"), max_calls=2))
    params = SamplingParams(max_tokens=40, seed=5, min_p_mass=0.1)
    uses = [2, 0, 1, 2, 2, 0, 0, 2]
    engine = Engine(policy, tokenizer, batch_size=3)
    quick, slow = (
        generate_with_tools(
            engine, PROMPTS, 2, params, tool, uses=uses, pool=standing_in(Desk(echo, patience=patience))
        )
        for patience in (0, 9)
    )
    assert [r.token_ids for r in quick] == [r.token_ids for r in slow]
    assert sum(len(r.calls) for r in quick) >= 2
    plain = engine.generate(PROMPTS, 2, params)
    for rollout, alone, calls in zip(quick, plain, uses, strict=True):
        assert sum(call.status != "refused" for call in rollout.calls) <= calls
        if calls == 0:
            assert rollout.token_ids == alone.token_ids
            assert rollout.stop is None
    assert [r.request for r in quick] == list(range(8))
    assert [(r.prompt_index, r.sample_index) for r in quick] == [(i // 2, i % 2) for i in range(8)]
    assert quick.seed == 5


# A planted model: each token follows from the last


def one(
    model: Any, tokenizer: Any, prompt: str, tool: ToolSpec, desk: Any, *, uses: int | None = None, **params: Any
) -> Rollout:
    given = SamplingParams(**{"temperature": 0, "max_tokens": 60, **params})
    start = [tokenizer.convert_tokens_to_ids(prompt)]
    counts = None if uses is None else [uses]
    return generate_with_tools(
        Engine(model, tokenizer), [start], 1, given, use(tool), uses=counts, pool=standing_in(desk)
    )[0]


def test_a_token_that_says_more_than_the_end_of_a_call_is_taken_back() -> None:
    """What it says of the call is then forced, and nothing that was not sampled counts as sampled."""
    model, tokenizer = planted(always(["go", "<<6*7", "=99", "8>>"]), extra=["=99 "])
    desk = Desk(echo)
    rollout = one(model, tokenizer, "go", calculator_tool(), desk)
    assert desk.opened[0].sources == ["6*7"]
    assert rollout.text == "<<6*7=36*7>>"
    assert rollout.sampled.tolist() == [True] + [False] * 7 + [True]
    (call,) = rollout.calls
    assert (call.begin, call.end, call.empty_output) == (1, 8, "=>>")
    assert rollout.own_text == "<<6*7=>>"
    assert rollout.parent is None
    assert rollout.request == 0


def test_white_space_behind_a_call_stays() -> None:
    model, tokenizer = planted(always(["go", "```python\n6*7\n", "```\n\n"], **{"\n": "Right."}))
    rollout = one(model, tokenizer, "go", python_tool(), Desk(echo))
    assert rollout.text == "```python\n6*7\n```\n\n```output\n46*7\n```\nRight."
    assert rollout.sampled.tolist() == [True] * 2 + [False] * 19 + [True] * 2
    assert rollout.own_text == "```python\n6*7\n```\n\n```output\n```\nRight."


@pytest.mark.parametrize("tail", [["more"], ["`", "more"], ["``", "more"], ["`````\n", "more"]])
def test_longer_fences_are_closed_by_any_tokens(tail: list[str]) -> None:
    """Four backticks may be one token, two, or a part of one with others."""
    model, tokenizer = planted(always(["go", "````python\n'''\n```\n'''\n", "```", *tail, *"abcdefghijkl"]))
    desk = Desk(echo, patience=1)
    rollout = one(model, tokenizer, "go", python_tool(), desk, max_tokens=200)
    if tail == ["more"]:
        assert rollout.calls == ()
        assert rollout.text.endswith("```moreabcdefghijkl")
        return
    assert desk.opened[0].sources == ["'''\n```\n'''\n"]
    (call,) = rollout.calls
    assert rollout.text.startswith("````python\n'''\n```\n'''\n````\n```output\n")
    assert "more" not in rollout.text
    assert rollout.sampled.tolist()[: call.begin] == [True] * call.begin


def test_a_call_comes_before_a_later_stop_string() -> None:
    model, tokenizer = planted(always(["go", "````python\n1\n", "```", "`", " END"], **{"\n": "So END"}))
    desk = Desk(echo)
    rollout = one(model, tokenizer, "go", python_tool(), desk, stop="END")
    assert desk.opened[0].sources == ["1\n"]
    assert rollout.text == "````python\n1\n````\n```output\n21\n\n```\nSo END"
    assert rollout.stop == "END"


def test_calls_are_refused_when_they_are_used_up() -> None:
    model, tokenizer = planted(always(["go", "<<6*7", "="], **{">": "<<6*7"}))
    desk = Desk(echo)
    rollout = one(model, tokenizer, "go", calculator_tool(max_calls=2), desk, max_tokens=70)
    assert [call.status for call in rollout.calls[:4]] == ["ok", "ok", "refused", "refused"]
    assert rollout.text.startswith("<<6*7=36*7>><<6*7=36*7>><<6*7=no calls left>><<6*7=no calls left>>")
    assert len(desk.calls) == 2
    assert rollout.finish_reason == "length"
    assert [call.status for call in one(model, tokenizer, "go", calculator_tool(), desk, uses=1).calls[:2]] == [
        "ok",
        "refused",
    ]


def test_outputs_fill_the_limit_too() -> None:
    model, tokenizer = planted(always(["go", "<<6*7", "="], **{">": "z"}))
    for limit, text, calls in ((2, "<<6*7=", 0), (5, "<<6*7=36*", 1), (8, "<<6*7=36*7>>", 1), (9, "<<6*7=36*7>>z", 1)):
        desk = Desk(echo)
        rollout = one(model, tokenizer, "go", calculator_tool(), desk, max_tokens=limit)
        assert rollout.text == text
        assert len(rollout) == limit
        assert rollout.finish_reason == "length"
        assert rollout.stop is None
        assert len(rollout.calls) == len(desk.calls) == calls  # a call whose output nobody would see is not made


def test_an_output_says_nothing_for_the_model() -> None:
    """Neither stop strings, nor special tokens, nor an answer."""
    model, tokenizer = planted(always(["go", "<<6*7", "="], **{">": "So</a>", "So</a>": "never"}))
    said = "1</a><eos><pad>"
    rollout = one(model, tokenizer, "go", calculator_tool(), Desk(lambda _: CellResult("ok", said)), stop="</a>")
    assert rollout.text == f"<<6*7={said}>>So</a>"
    assert rollout.stop == "</a>"
    assert rollout.finish_reason == "stop"
    assert rollout.own_text == "<<6*7=>>So</a>"
    assert not {tokenizer.eos_token_id, tokenizer.pad_token_id} & set(rollout.token_ids)


def test_no_space_comes_before_an_output() -> None:
    """Some tokenizers put one before a text, and an output is none of its own."""
    from tokenizers import decoders, normalizers

    model, tokenizer = planted(always(["go", "<<6*7", "="], **{">": "z"}))
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    rollout = one(model, tokenizer, "go", calculator_tool(), Desk(echo))
    assert rollout.text == "<<6*7=36*7>>z"
    assert rollout.own_text == "<<6*7=>>z"


def test_an_output_makes_no_call(tokenizer: Any) -> None:
    model, words = planted(always(["go", "```python\n1\n", "```"], **{"\n": "Right."}))
    inner = "```python\nprint(1)\n```\n"
    desk = Desk(lambda _: CellResult("ok", inner))
    rollout = one(model, words, "go", python_tool(), desk, max_tokens=200)
    assert len(desk.calls) == 1
    assert rollout.text == f"```python\n1\n```\n````output\n{inner}````\nRight."
    assert rollout.own_text == "```python\n1\n```\n```output\n```\nRight."


def test_other_rows_go_on_while_a_call_runs() -> None:
    follow = always(["call", "<<6*7", "="], **{">": "z"}) | always(["talk", *"abcdefghijklmnopqrstuvw"])
    model, tokenizer = planted(follow)
    start = [[tokenizer.convert_tokens_to_ids(word)] for word in ("call", "talk")]
    params = SamplingParams(temperature=0, max_tokens=60)
    desk = Desk(echo, patience=10**9)
    with ToolSession(
        Engine(model, tokenizer), start, 1, params, use(calculator_tool()), pool=standing_in(desk)
    ) as session:
        (ended,) = session.step()
        assert ended.request == 1
        assert ended.text == "abcdefghijklmnopqrstuvw"
        assert session.is_waiting(0)
        desk.calls[0].patience = 0
        (ended,) = session.step()
        assert ended.request == 0
        assert ended.text == "<<6*7=36*7>>z"
        assert not session.running
    assert desk.opened[0].closed
    assert [r.text for r in session.rollouts()] == ["<<6*7=36*7>>z", "abcdefghijklmnopqrstuvw"]


@pytest.mark.parametrize(("threads", "expected"), [(1, 1), (2, 1), (3, 2), (8, 6)])
def test_calls_have_processors_of_their_own(monkeypatch: pytest.MonkeyPatch, threads: int, expected: int) -> None:
    """Two calls run; torch has the other processors, at least half of them, and all before and after."""
    from explorl.rollout.session import Session

    monkeypatch.setattr(torch, "get_num_threads", lambda: held[-1])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: held.append(count))
    held, seen, step = [threads], list[tuple[bool, int]](), Session.step

    def watched(session: Session, tokens: int | None = None, **how: bool) -> list[Rollout]:
        seen.append((any(not call.done for call in desk.calls), held[-1]))
        if broken:
            raise KeyboardInterrupt
        return step(session, tokens, **how)

    monkeypatch.setattr(Session, "step", watched)
    model, tokenizer = planted(always(["go", "<<6*7", "="], **{">": "z"}))
    start, params = [[tokenizer.convert_tokens_to_ids("go")]], SamplingParams(temperature=0, max_tokens=40)
    desk, broken, engine = Desk(echo, patience=3), False, Engine(model, tokenizer)
    generate_with_tools(engine, start, 2, params, use(calculator_tool()), pool=standing_in(desk))
    assert {count for waiting, count in seen if waiting} == {expected}
    assert {count for waiting, count in seen if not waiting} == {threads}
    assert held[-1] == threads
    desk = Desk(echo, patience=10**9)
    with ToolSession(engine, start, 2, params, use(calculator_tool()), pool=standing_in(desk)) as session:
        while not desk.calls:
            session.step(tokens=1)
        broken = True
        with pytest.raises(KeyboardInterrupt):
            session.step(tokens=1)
    assert seen[-1][1] == expected
    assert held[-1] == threads


def test_an_output_does_not_wait_for_other_rows_to_end() -> None:
    model, tokenizer = planted(always(["call", "<<6*7", "="], **{">": "z"}) | always(["talk", *CHARACTERS[:70]]))
    start = [[tokenizer.convert_tokens_to_ids(word)] for word in ("call", "talk")]
    params = SamplingParams(temperature=0, max_tokens=60)
    desk = Desk(echo, patience=2)
    tools = use(calculator_tool(fence=Delimiters("<<", "=", "", ">>")))
    with ToolSession(Engine(model, tokenizer), start, 1, params, tools, pool=standing_in(desk)) as session:
        (ended,) = session.step()
        assert ended.request == 0
        assert len(session.rollout(1)) < 60


def test_forks_have_the_calls_so_far() -> None:
    model, tokenizer = planted(always(["go", "<<x=1", "="], **{">": "<<x+1", "<<x+1": "="}))
    tool = calculator_tool(max_calls=4)
    desk = Desk(lambda source: CellResult("exited" if len(desk.calls) == 1 else "ok", "7"))
    start = [[tokenizer.convert_tokens_to_ids("go")]]
    params = SamplingParams(temperature=0, max_tokens=26)
    with ToolSession(Engine(model, tokenizer), start, 1, params, use(tool), pool=standing_in(desk)) as session:
        while len(session.rollout(0).calls) < 3:
            session.step(tokens=1)
        first, second, third = session.rollout(0).calls
        with pytest.raises(ValueError, match=f"inside an output of sequence 0; use {second.begin} or {second.end}"):
            session.fork(0, at=second.begin + 1)
        (fork,) = session.fork(0, at=third.end)
        (early,) = session.fork(0, at=second.begin)
        assert session.rollout(fork).calls == (first, second, third)
        assert session.rollout(early).calls == (first,)
        session.run()
        assert session.rollout(fork).token_ids == session.rollout(0).token_ids
        assert (session.rollout(fork).parent, session.rollout(fork).forked_at) == (0, third.end)
        workers = [worker.sources for worker in desk.opened]
    assert [call.status for call in (first, second, third)] == ["ok", "exited", "ok"]
    assert workers[0][:4] == ["x", "x+1", "x+1", "x+1"]
    assert sorted(workers[1:]) == [["x", "x+1", "x+1", "x+1"], ["x+1", "x+1"]]  # what it exited after is gone


# In the sandbox


def hostile(programs: dict[str, tuple[str, set[str]]]) -> None:
    """Each program is the first call of a row, and an honest one its next; honest rows keep their variables."""
    honest = "```python\nx = globals().get('x', 40) + 1\nprint(x)\n```"
    blocks = {f"```python\n{source}\n```": name for name, (source, _) in programs.items()}
    follow: dict[str, dict[str, float]] = {"\n": {honest: 1.0}, "honest": {honest: 1.0}}
    model, tokenizer = planted(follow | {name: {block: 1.0} for block, name in blocks.items()})
    names = [*programs, "honest", "honest"]
    start = [[tokenizer.convert_tokens_to_ids(name)] for name in names]
    tool = python_tool(max_calls=3, seconds=0.4, output=300, memory=128 << 20)
    params = SamplingParams(temperature=0, max_tokens=600)
    got = generate_with_tools(Engine(model, tokenizer), start, 1, params, ToolUse(tool))
    for name, rollout in zip(names, got, strict=True):
        statuses = [call.status for call in rollout.calls]
        texts = [call.text for call in rollout.calls]
        assert rollout.finish_reason == "length", name
        assert statuses[3:] == ["refused"] * (len(statuses) - 3), name
        if name == "honest":
            assert texts[:3] == ["41\n", "42\n", "43\n"]
            continue
        assert statuses[0] in programs[name][1], (name, texts)
        if statuses[0] in ("timeout", "memory", "exited", "killed") and statuses[1] == "ok":
            assert texts[1] == "41\n", name


def sandboxed(names: Sequence[str]) -> dict[str, tuple[str, set[str]]]:
    from explorl.sandbox.programs import capabilities
    from tests.sandbox.test_interpreter_hostile import PROGRAMS

    if not capabilities().layers:
        pytest.skip("nothing but limits here: not to be tried on somebody's machine")
    return {name: PROGRAMS[name] for name in names or PROGRAMS if len(PROGRAMS[name][0]) < 10_000}


def test_what_a_program_does_ends_its_own_interpreter_at_most() -> None:
    hostile(
        sandboxed(["loop", "exit", "crash", "kill oneself", "kill all", "memory at once", "endless output", "files"])
    )


@pytest.mark.slow
def test_no_hostile_program_ends_more_than_its_own_interpreter() -> None:
    hostile(sandboxed([]))


def test_markdown_and_the_real_interpreter() -> None:
    model, tokenizer = planted(always(["go", "```python\nx = 6\nx * 7\n```"], **{"\n": "It is 42."}))
    start = [[tokenizer.convert_tokens_to_ids("go")]]
    got = generate_with_tools(Engine(model, tokenizer), start, 3, None, ToolUse(python_tool()))
    assert got.texts == ["```python\nx = 6\nx * 7\n```\n```output\n42\n```\nIt is 42."] * 3
    assert all(isinstance(call, ToolCall) and call.seconds > 0 for rollout in got for call in rollout.calls)


# Errors and ends


def test_bad_input_is_one_error_before_anything_is_sampled(policy: Any, tokenizer: Any) -> None:
    from explorl.rollout.tools import get_tool

    engine, tool = Engine(policy, tokenizer), calculator_tool()
    with pytest.raises(ValueError, match="unknown tool 'pyton'; did you mean 'python'"):
        get_tool("pyton")
    with pytest.raises(ValueError, match="max_calls=0 of tool 'python': use 1 or more"):
        python_tool(max_calls=0)
    with pytest.raises(ValueError, match="tool is 'python'; give a tool such as python_tool"):
        ToolUse("python")  # type: ignore[arg-type]
    unknown = calculator_tool(fence=Delimiters("答", "="))
    for error, tools, options in (
        ("'答1=1>>', which the tokenizer of this model cannot write", unknown, {}),
        ("uses has 2 values; give one for each of the 3 rollouts", tool, {"uses": [1, 1]}),
        (
            "uses\\[1\\] is 4; tool 'calculator' allows whole numbers from 0 to its max_calls, 3",
            tool,
            {"uses": [1, 4, 0]},
        ),
        ("uses\\[0\\] is -1; ", tool, {"uses": [-1, 1, 0]}),
        ("uses\\[2\\] is 0.5; ", tool, {"uses": [1, 1, 0.5]}),
    ):
        with pytest.raises(ValueError, match=error):
            generate_with_tools(engine, ["1"], 3, None, use(tools), **options)
    for stop in ("=", "x = 1", "=>"):
        with pytest.raises(ValueError, match="'=' that every call of tool 'calculator' ends with"):
            generate_with_tools(engine, ["1"], 1, SamplingParams(stop=stop), use(tool))
    for stop in ("<", "<<"):
        with pytest.raises(ValueError, match=f"stop is '{stop}', which is part of '<<' that calls"):
            generate_with_tools(engine, ["1"], 1, SamplingParams(stop=stop), use(tool))
    for stop in ("\n", "python"):
        with pytest.raises(ValueError, match="that calls of tool 'python' begin with"):
            generate_with_tools(engine, ["1"], 1, SamplingParams(stop=stop), use(python_tool()))
    for stop in ("```output", "\n```", "`", "x`"):
        with pytest.raises(ValueError, match="'```' that every call of tool 'python' ends with"):
            generate_with_tools(engine, ["1"], 1, SamplingParams(stop=["</answer>", stop]), use(python_tool()))
    with pytest.raises(ValueError, match="the engine has no tokenizer; give it one"):
        generate_with_tools(Engine(policy), [[5]], 1, None, use(tool))
    with pytest.raises(ValueError, match="prompts is empty"):
        generate_with_tools(engine, [], 1, None, use(tool))
    assert engine.plan is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_everything_is_closed_on_an_error(error: type[BaseException]) -> None:
    class Breaks(Desk):
        def turn(self) -> None:
            if len(self.calls) == 2:
                raise error("now")
            super().turn()

    model, tokenizer = planted(always(["go", "<<6*7", "="], **{">": "<<6*7"}))
    desk, engine = Breaks(echo), Engine(model, tokenizer)
    start = [[tokenizer.convert_tokens_to_ids("go")]]
    with pytest.raises(error, match="now"):
        generate_with_tools(
            engine, start, 1, SamplingParams(temperature=0), use(calculator_tool()), pool=standing_in(desk)
        )
    assert [worker.closed for worker in desk.opened] == [True]
    assert engine._latest is None  # no session is open


def test_a_pool_of_its_own_is_closed(monkeypatch: pytest.MonkeyPatch, policy: Any, tokenizer: Any) -> None:
    made: list[Any] = []
    original = ToolUse.pool

    def kept(self: ToolUse) -> Any:
        made.append(original(self))
        return made[-1]

    monkeypatch.setattr(ToolUse, "pool", kept)
    engine, tools = Engine(policy, tokenizer), ToolUse(calculator_tool())
    generate_with_tools(engine, ["1"], 1, SamplingParams(max_tokens=3), tools)
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        generate_with_tools(engine, [[]], 1, None, tools)

    def refuse(rollout: Rollout) -> None:
        raise ValueError(f"no {rollout.request}")

    with pytest.raises(ValueError, match="no 0"):
        generate_with_tools(engine, ["1"], 1, SamplingParams(max_tokens=3), tools, on_finish=refuse)
    assert len(made) == 2
    for pool in made:
        with pytest.raises(ValueError, match="this pool is closed"):
            pool.open()


class Slow(Desk):
    """Answers one call a poll; ``gap``: after which nobody hears of it in time."""

    def __init__(self, gap: int) -> None:
        super().__init__(echo, patience=10**9)
        self.gap, self.polls = gap, 0

    def turn(self) -> None:
        open_calls = [ticket for ticket in self.calls if not ticket.done]
        if open_calls:
            open_calls[0].patience = 0

    def poll(self, seconds: float = 0.0) -> int:
        if threading.current_thread() is not threading.main_thread() or not seconds:
            return 0
        self.polls += 1
        self.turn()
        return int(self.polls != self.gap)


@pytest.mark.parametrize(
    ("device", "gap", "together"), [("cpu", 0, 12), ("cpu", 5, 5), ("gpu", 0, 3), ("gpu", 3, 3), ("gpu", 2, 2)]
)
def test_where_no_row_goes_on_outputs_that_follow_each_other_are_taken_together(
    monkeypatch: pytest.MonkeyPatch, device: str, gap: int, together: int
) -> None:
    """Twelve rows call at the same step: all of them go on at once, or a quarter where a GPU would wait for them, or
    what there is when one is late."""
    from explorl.rollout.session import Session

    went_on, step, extend = [0], Session.step, Session.extend

    def stepped(session: Session, *args: Any, **how: Any) -> list[Rollout]:
        went_on.append(0)
        return step(session, *args, **how)

    def extended(session: Session, *args: Any, **how: Any) -> None:
        went_on[-1] += 1
        extend(session, *args, **how)

    monkeypatch.setattr(Session, "step", stepped)
    monkeypatch.setattr(Session, "extend", extended)
    model, tokenizer = planted(always(["go", "<<6*7", "="], **{">": "z"}))
    start, params = [[tokenizer.convert_tokens_to_ids("go")]], SamplingParams(temperature=0, max_tokens=20)
    desk = standing_in(Slow(gap))
    with ToolSession(Engine(model, tokenizer), start, 12, params, use(calculator_tool()), pool=desk) as session:
        assert session._on_cpu
        session._on_cpu = device == "cpu"
        session.run()
        found = session.rollouts()
    assert {rollout.text for rollout in found} == {found[0].text}
    assert found[0].text.startswith("<<6*7=36*7>>z")
    assert next(filter(None, went_on)) == together


def test_interpreters_are_expected_for_as_many_rows_as_have_called() -> None:
    """Three rows call one after the other: first nothing is known, then as many more as have called are expected."""
    model, tokenizer = planted(always(["go", "x", "y", "<<6*7", "="], **{">": "z", "z": "z"}))
    ids = tokenizer.convert_tokens_to_ids
    starts, params = [[ids(word)] for word in ("y", "x", "go", "z", "z")], SamplingParams(temperature=0, max_tokens=20)
    engine, desk = Engine(model, tokenizer), Desk(echo)
    generate_with_tools(engine, starts, 1, params, use(calculator_tool()), uses=[3, 3, 3, 3, 0], pool=standing_in(desk))
    assert len(desk.opened) == 3
    assert desk.expected == [0, 1, 2, 1, 0]  # of four rows that may; the last one never does

    later = Desk(echo)
    generate_with_tools(engine, starts[:2], 4, params, use(calculator_tool()), pool=standing_in(later))
    assert later.expected[0] == 6  # three of four did


def test_rows_that_never_call_have_no_interpreters_started() -> None:
    model, tokenizer = planted(always(["go", "z"], z="z"))
    start, params = [[tokenizer.convert_tokens_to_ids("go")]], SamplingParams(temperature=0, max_tokens=40)
    engine, desk = Engine(model, tokenizer), Desk(echo)
    for _ in range(2):
        generate_with_tools(engine, start, 50, params, use(calculator_tool()), pool=standing_in(desk))
    assert set(desk.expected) == {0}
    assert desk.opened == []


def test_torch_leaves_processors_to_interpreters_that_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from explorl.rollout.session import Session

    seen: list[tuple[bool, int]] = []
    desk, step = Desk(echo), Session.step
    desk.starting = True

    def stepped(session: Session, *args: Any, **how: Any) -> list[Rollout]:
        seen.append((desk.starting, torch.get_num_threads()))
        desk.starting = len(seen) < 2
        return step(session, *args, **how)

    monkeypatch.setattr(Session, "step", stepped)
    model, tokenizer = planted(always(["go", "z"], z="z"))
    start, params = [[tokenizer.convert_tokens_to_ids("go")]], SamplingParams(temperature=0, max_tokens=40)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        generate_with_tools(Engine(model, tokenizer), start, 2, params, use(calculator_tool()), pool=standing_in(desk))
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(threads)
    assert seen == [(True, 3), (True, 3), (False, 4)]


def opened_by_its_prompt() -> tuple[Any, Any, list[int]]:
    """A model, its tokenizer and a prompt that ends in a block of Python, which the model closes; it opens more."""
    closing, second = "1\n```", "```python\nx\n```"
    model, tokenizer = planted(always(["x=", closing], **{"\n": second}))
    prompt = tokenizer("say\n```text\na\n```\nrun\n```python\n")["input_ids"]
    return model, tokenizer, [*prompt, tokenizer.convert_tokens_to_ids("x=")]


def test_a_call_that_the_prompt_has_opened_is_made() -> None:
    model, tokenizer, prompt = opened_by_its_prompt()
    desk, params = Desk(echo), SamplingParams(temperature=0, max_tokens=80)
    with ToolSession(
        Engine(model, tokenizer), [prompt], 1, params, use(python_tool(max_calls=2)), pool=standing_in(desk)
    ) as session:
        session.step(1)
        (fork,) = session.fork(0, at=0)
        session.run()
        first, other = session.rollouts()
    assert [worker.sources for worker in desk.opened] == [["x=1\n", "x\n"]] * 2
    assert fork == other.request
    assert other.text == first.text
    assert first.text.startswith("1\n```\n```output\n4x=1\n```\n```python\nx\n```\n```output\n2x\n")
    call = first.calls[0]
    assert (call.source, call.begin) == ("x=1\n", 1)
    assert first.sampled.tolist()[: call.end + 1] == [True, *[False] * (call.end - 1), True]


def test_a_block_that_somebody_else_has_left_open_is_no_call() -> None:
    """Before a special token others have spoken; and a row that may make no call makes none."""
    model, tokenizer, prompt = opened_by_its_prompt()
    desk, params = Desk(echo), SamplingParams(temperature=0, max_tokens=20)
    foreign = [*prompt[:-1], tokenizer.eos_token_id, prompt[-1]]
    found = generate_with_tools(
        Engine(model, tokenizer), [foreign, prompt], 1, params, use(python_tool()), uses=[3, 0], pool=standing_in(desk)
    )
    assert desk.opened == []
    assert [rollout.calls for rollout in found] == [(), ()]
    assert {rollout.text for rollout in found} == {"1\n```"}
