"""The judge, against a server that speaks the protocol and fails in the ways that servers do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorl.evaluation import protocol
from explorl.evaluation.harness import run_evaluation
from explorl.evaluation.judge import Judge, JudgeError, Opinion, judge_evaluation, parse_opinion


class Server(HTTPServer):
    """Answers with the replies it is given, one after the other; the last one for ever."""

    replies: list[tuple[int, str]]
    headers: dict[str, str]
    seen: list[tuple[str, dict[str, str], Any]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, dict(self.headers), body))
        status, text = self.server.replies.pop(0) if len(self.server.replies) > 1 else self.server.replies[0]
        if status == 0:  # hangs up
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    server.replies, server.headers, server.seen = [], {}, []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def said(content: Any) -> tuple[int, str]:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]})


YES = said('{"irrelevant": true, "reason": "a recipe"}')
NO = said('{"irrelevant": false, "reason": ""}')


def judge(server: Server, waits: list[float] | None = None, **options: Any) -> Judge:
    return Judge(server.url, "judge-7b", sleep=(waits if waits is not None else []).append, **options)


def test_what_is_asked_and_what_comes_back(server: Server) -> None:
    server.replies = [YES]
    opinion = judge(server, api_key="a-key")("What is 2 + 2?", "Take two eggs.")
    assert opinion == Opinion(True, "a recipe")
    path, headers, body = server.seen[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer a-key"
    assert body["model"] == "judge-7b"
    assert body["temperature"] == 0
    assert "What is 2 + 2?" in body["messages"][1]["content"]
    assert "Take two eggs." in body["messages"][1]["content"]
    server.replies = [NO]
    assert not judge(server)("q", "r").irrelevant
    assert "Authorization" not in server.seen[1][1]


def test_a_long_response_is_shortened_in_its_middle(server: Server) -> None:
    server.replies = [NO]
    judge(server)("q", "a" * 30_000 + "end")
    sent = server.seen[0][2]["messages"][1]["content"]
    assert len(sent) < 21_000
    assert "end\nRESPONSE>>>" in sent
    assert "[… 10003 characters …]" in sent


def test_busy_and_broken_servers_are_asked_again(server: Server) -> None:
    waits: list[float] = []
    server.replies = [(429, "slow down"), (503, "starting"), (0, ""), (200, "<html>"), said(None), said("Sure!"), YES]
    assert judge(server, waits, retries=6)("q", "r").irrelevant
    assert len(server.seen) == 7
    assert waits == [1, 2, 4, 8, 16, 32]


def test_the_server_may_say_how_long_to_wait(server: Server) -> None:
    waits: list[float] = []
    server.headers = {"Retry-After": "7"}
    server.replies = [(429, ""), YES]
    judge(server, waits)("q", "r")
    server.headers = {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}
    server.replies = [(429, ""), YES]
    judge(server, waits)("q", "r")
    server.headers = {"Retry-After": "100000"}
    server.replies = [(500, ""), YES]
    judge(server, waits)("q", "r")
    assert waits == [7, 1, 120]


def test_a_refusal_is_final_and_the_key_stays_secret(server: Server) -> None:
    server.replies = [(401, '{"error": "bad key"}')]
    asked = judge(server, api_key="very-secret")
    with pytest.raises(JudgeError, match=r"refused: status 401.*bad key") as caught:
        asked("q", "r")
    assert len(server.seen) == 1
    assert "very-secret" not in str(caught.value)
    assert "very-secret" not in repr(asked)


def test_it_gives_up_and_says_why(server: Server) -> None:
    server.replies = [(500, "out of memory")]
    with pytest.raises(JudgeError, match=r"no verdict in 3 attempts: status 500: out of memory"):
        judge(server, retries=2)("q", "r")
    server.replies = [said("I cannot say.")]
    with pytest.raises(JudgeError, match=r"no verdict in 1 attempts: its reply is no verdict"):
        judge(server, retries=0)("q", "r")


def test_nobody_there() -> None:
    with HTTPServer(("127.0.0.1", 0), Handler) as closed:
        port = closed.server_port
    waits: list[float] = []
    with pytest.raises(JudgeError, match=r"127.0.0.1.*2 attempts"):
        Judge(f"http://127.0.0.1:{port}/v1", "m", retries=1, sleep=waits.append)("q", "r")
    assert waits == [1]
    with pytest.raises(ValueError, match="base_url is 'localhost:8000'"):
        Judge("localhost:8000", "m")
    with pytest.raises(ValueError, match="retries is -1"):
        Judge("http://x", "m", retries=-1)


@pytest.mark.parametrize(
    ("content", "opinion"),
    [
        ('{"irrelevant": true}', Opinion(True)),
        ('```json\n{"irrelevant": false, "reason": "fine"}\n```', Opinion(False, "fine")),
        ('<think>{"irrelevant": true}?</think> {"irrelevant": "No"}', Opinion(False)),
        ('First {"irrelevant": true}, but on reflection {"irrelevant": false, "reason": "ok"}.', Opinion(False, "ok")),
        ('{"irrelevant": "maybe"}', None),
        ('{"relevant": true}', None),
        ("[true]", None),
        ('{"irrelevant": true', None),
        ('{{"irrelevant": 1}}', Opinion(True)),
        ("", None),
    ],
)
def test_replies_are_read(content: str, opinion: Opinion | None) -> None:
    assert parse_opinion(content) == opinion


@given(before=st.text(st.characters(exclude_characters="{}<")), after=st.text(), flag=st.booleans())
def test_a_verdict_is_found_in_any_talk(before: str, after: str, flag: bool) -> None:
    reply = before + json.dumps({"irrelevant": flag}) + after.replace("{", "(")
    assert parse_opinion(reply) == Opinion(flag)


@given(st.text())
def test_no_reply_makes_it_stumble(text: str) -> None:
    parse_opinion(text)


def test_an_evaluation_is_judged_and_resumed(server: Server, tmp_path: Path) -> None:
    how = protocol("plain", samples=2, max_tokens=48)
    folder = run_evaluation(["tiny"], ["countdown-mini"], how, tmp_path, limit=4)[0].folder
    server.replies = [YES, NO, (400, "stop here")]
    with pytest.raises(JudgeError, match="stop here"):
        judge_evaluation(folder, judge(server))
    server.replies = [NO]
    ticks: list[int] = []
    share = judge_evaluation(folder, judge(server), on_progress=ticks.append)
    assert share.mean == 0.25
    assert sum(ticks) == 4
    assert len(server.seen) == 5  # two opinions stayed, one was refused, two were missing
    assert judge_evaluation(folder, judge(server), per_problem=2).mean == 0.125
    assert len(server.seen) == 9
    with pytest.raises(ValueError, match="per_problem is 3"):
        judge_evaluation(folder, judge(server), per_problem=3)
    server.replies = [YES]
    other = Judge(server.url, "another", sleep=[].append)
    assert judge_evaluation(folder, other).mean == 1.0  # another model's opinions do not count
