"""`explorl doctor`: what was tried, and what follows, on machines that can do much and on those that can do little."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from explorl.cli import doctor
from explorl.cli.app import app
from explorl.core.config import Config
from explorl.sandbox import programs
from explorl.sandbox.programs import Guarantees, SandboxError

OPEN = Guarantees(
    network_isolated=True, filesystem_isolated=False, processes_isolated=True, separate_user=False, layers=("seccomp",)
)


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without judges and models, which have a test of their own here."""
    monkeypatch.setattr(doctor, "_judges", lambda diagnosis: diagnosis.findings.extend(
        doctor.DoctorFinding("judges", name, True, "works") for name in ("math", "gym", "code")
    ))  # fmt: skip
    monkeypatch.setattr(doctor, "_device", lambda diagnosis: None)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_everything_is_tried_here() -> None:
    diagnosis = doctor.examine()
    findings = {(finding.area, finding.what): finding for finding in diagnosis.findings}
    assert all(findings["judges", name].works for name in ("math", "gym")), findings
    assert findings["device", "engine"].works, findings
    assert findings["device", "training pass"].works, findings
    assert "unrolled" in findings["device", "training pass"].found
    assert findings["libraries", "torch"].works
    assert diagnosis.consequences.keys() == {"train", "eval", "code", "math", "gym:…"}
    assert diagnosis.consequences["train"].split("; ")[1].split(",")[0] == Config().model.dtype
    assert diagnosis.is_safe == (not programs.capabilities().missing)
    if diagnosis.is_safe:
        assert findings["judges", "code"].works
        assert diagnosis.consequences["code"].startswith("runs programs isolated by ")
    json.dumps(diagnosis.as_json())


@pytest.mark.usefixtures("cheap")
def test_a_machine_without_isolation_fails(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    def probe(layers: programs.Layers) -> Guarantees:
        if layers == ("seccomp",):
            return OPEN
        raise SandboxError("unshare: Operation not permitted")

    monkeypatch.setattr(programs, "probe", probe)
    programs.capabilities.cache_clear()
    request.addfinalizer(programs.capabilities.cache_clear)
    result = invoke()
    assert result.exit_code == 1
    assert "namespaces + seccomp: SandboxError: unshare: Operation not permitted" in result.stdout
    assert "✗ in use: seccomp" in result.stdout
    assert "EXPLORL_UNISOLATED=1" in result.stdout
    assert "code: refuses to run programs" in result.stdout
    monkeypatch.setenv("EXPLORL_UNISOLATED", "1")
    result = invoke("--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["is_safe"] is False
    assert "because EXPLORL_UNISOLATED is 1" in report["consequences"]["code"]
    assert "without isolation" in report["consequences"]["math"]


@pytest.mark.usefixtures("cheap")
def test_another_system_than_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "platform", "darwin")
    result = invoke()
    assert result.exit_code == 1
    assert "this is darwin" in result.stdout


@pytest.mark.usefixtures("cheap")
def test_what_a_machine_says_is_not_markup(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    def probe(layers: programs.Layers) -> Guarantees:
        raise SandboxError("[/b] [red]no\x1b[2J\ud800")

    monkeypatch.setattr(programs, "probe", probe)
    programs.capabilities.cache_clear()
    request.addfinalizer(programs.capabilities.cache_clear)
    result = invoke()
    assert result.exit_code == 1
    assert "[/b] [red]no␛[2J\ufffd" in result.stdout


def test_what_fails_is_a_finding_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis = doctor.Diagnosis()

    def fails() -> str:
        raise RuntimeError("no such kernel")

    assert not doctor._try(diagnosis, "device", "engine", fails, "do this")
    assert diagnosis.findings == [
        doctor.DoctorFinding("device", "engine", False, "RuntimeError: no such kernel", "do this")
    ]
