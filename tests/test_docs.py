"""The documentation: reference pages say what the code says, examples work, and the site builds and shows well."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from tools.docs import reference

from explorl.core.config import Config, Section, load_config, presets, read_yaml
from explorl.core.merge import flatten
from explorl.evaluation import PROTOCOLS
from explorl.study.spec import StudyFile, load_study, study_names

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
KEYS = {key.name for key in reference.keys(Config)}


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a language in a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text(page), re.MULTILINE | re.DOTALL)


# --- generated pages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", reference.PAGES)
def test_a_generated_page_is_what_the_code_says(page: str) -> None:
    assert text(page) == reference.PAGES[page](), "run python -m tools.docs.reference"


def test_every_key_of_the_configuration_has_its_default() -> None:
    page = reference.configuration_page()
    assert "### `task.<option>`\n\n*any value*\n\nOther keys are options of the task" in page
    keys = flatten(Config().dump())
    assert len(keys) > 50
    for key, value in keys.items():
        facts = page.split(f"\n### `{key}`\n\n")[1].split("\n\n")[0]
        assert facts.endswith(f"default `{reference.shown(value)}`"), key


def test_every_key_of_a_study_file_is_there() -> None:
    page = reference.study_page()
    names = {*StudyFile.model_fields, "profiles", "arms.<name>.set", "evaluation.every", "budget.tokens"}
    assert [name for name in names if f"\n### `{name}`\n" not in page] == []
    assert "`name`\n\n*text* · required" in page


class Nameless(Section):
    described: int = 0
    """It is."""
    left_out: float = 1.0


def test_a_key_without_a_description_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Nameless\.left_out has no description"):
        list(reference.keys(Nameless))


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (False, "false"), (5e-6, "5e-6"), (1.0, "1"), (0.001, "0.001"), ("", '""'), ("dapo", "dapo"),
     ((0, 2), "[0, 2]"), ({}, "{}"), (11_000, "11000")],
)  # fmt: skip
def test_values_are_shown_as_yaml_has_them(value: Any, text: str) -> None:
    assert reference.shown(value) == text
    assert read_yaml(text, "here") == (list(value) if isinstance(value, tuple) else value)


def test_a_protocol_has_what_its_paper_states() -> None:
    assert set(reference.STATED) == set(PROTOCOLS) - {"plain"}
    for name, stated in reference.STATED.items():
        ours = reference.settings(PROTOCOLS[name])
        assert {setting: ours[setting] for setting in stated} == {k: v.value for k, v in stated.items()}, name


@pytest.mark.parametrize("row", reference.TRAINING, ids=lambda row: row.what)
def test_training_is_as_the_paper_states_or_says_why_not(row: reference.TrainingSetting) -> None:
    assert row.ours() == row.paper.value or row.paper.note


def test_names_stay_as_they_are_and_numbers_have_a_minus() -> None:
    page = reference.protocols_page()
    assert page.count("Qwen/Qwen2-0.5B-Instruct") == 2
    assert "| `position_shaping`: shift | 0.5 | −0.5 |" in page
    assert "*number ≥ 1e-6, ≤ 100*" in reference.configuration_page()


def test_the_command_writes_and_checks(tmp_path: Path) -> None:
    reference.write(tmp_path)
    reference.write(tmp_path, check=True)
    page = tmp_path / "protocols.md"
    page.write_text(page.read_text(encoding="utf-8").replace("0.95", "0.96"), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(f"{page} is out of date")):
        reference.write(tmp_path, check=True)
    page.unlink()
    with pytest.raises(ValueError, match=r"protocols\.md is out of date"):
        reference.write(tmp_path, check=True)


# --- examples -----------------------------------------------------------------------------------------------------


def commands(code: str) -> Iterator[str]:
    """What follows `explorl` in lines of code."""
    for line in code.replace("\\\n", " ").splitlines():
        yield from re.findall(r"(?:^|[A-Z]=\S+ |-m )explorl ([a-z].*)", line)


def whole_commands(page: str) -> Iterator[str]:
    """Those that stand in a block, to be typed as they are; what is beside them says what they do."""
    fenced = re.findall(r"^```\w*\n(.*?)^```$", text(page), re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^ {4}(.*\n)", text(page), re.MULTILINE)
    for command in commands("\n".join(fenced) + "\n" + "".join(indented)):
        yield re.split(r"\s{2,}(?=[^\s-])|\s+#", command)[0]


def quoted_commands(page: str) -> Iterator[str]:
    """Those that stand in a sentence, which may leave something out."""
    yield from commands("\n".join(re.findall(r"`([^`\n]+)`", text(page))))


def looked_up(command: str) -> tuple[Any, list[str]]:
    """The command of a line, and its arguments."""
    from explorl.cli.app import app

    subcommand: Any = typer.main.get_command(app)
    words = shlex.split(command)
    while words and words[0] in getattr(subcommand, "commands", ()):
        subcommand = subcommand.commands[words.pop(0)]
    assert subcommand.params, command
    assert not hasattr(subcommand, "commands"), f"unknown: explorl {command}"
    return subcommand, words


@pytest.mark.parametrize("page", [page for page in PAGES if any(quoted_commands(page))])
def test_commands_in_sentences_exist(page: str) -> None:
    for command in quoted_commands(page):
        subcommand, words = looked_up(command)
        options = {option for parameter in subcommand.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= {*options, "--help"}, command


@pytest.mark.parametrize("page", [page for page in PAGES if any(whole_commands(page))])
def test_commands_in_blocks_are_whole(page: str) -> None:
    """They have what they need, their numbers are numbers, and what they name is there."""
    for command in whole_commands(page):
        subcommand, words = looked_up(command)
        params = subcommand.make_context(subcommand.name, words).params
        assert params.get("preset") in {None, *presets()}, command
        assert params.get("protocol") in {None, *PROTOCOLS}, command
        for change in params.get("overrides") or ():
            key = change.partition("=")[0]
            assert key in KEYS or key.startswith(("task.", "warm_start")), command
        if subcommand.name == "study" and params["words"][0] in study_names():
            load_study(params["words"][0], profile=params["profile"])
        elif subcommand.name in ("train", "sft", "rft"):
            load_config(
                preset=params["preset"],
                overrides=[override for override in params["overrides"] if not override.startswith("task.")],
            )
        assert params.get("launch") is None or (ROOT / params["launch"]).is_file(), command


@pytest.mark.parametrize("page", PAGES)
def test_scripts_and_their_options_exist(page: str) -> None:
    for script, words in re.findall(
        r"python ((?:benchmarks|scripts)/\w+\.py)([^`|]*?)(?=`|\||\n\n|python )", text(page)
    ):
        source = (ROOT / script).read_text(encoding="utf-8")
        for option in re.findall(r"--[a-z][a-z-]*", words):
            assert f'"{option}"' in source or f"'{option}'" in source, f"{script} {option}"


@pytest.mark.parametrize("page", PAGES)
def test_names_that_pages_have_exist(page: str) -> None:
    """Modules of verl's and vLLM's, which are not installed here, count as far as their files say the name."""
    imports = re.findall(r"^ *from (explorl[\w.]*) import ([\w, ]+)$", text(page), re.MULTILINE)
    names = {f"{module}.{part.split()[0]}" for module, parts in imports for part in parts.split(",")}
    names |= set(re.findall(r"(?<![\w/.-])explorl(?:\.[A-Za-z_]\w*)+(?!\.?/)", text(page)))
    for name in names - {"explorl.md"}:
        file, parts = ROOT / "src", name.split(".")
        while parts and ((file / parts[0]).is_dir() or (file / f"{parts[0]}.py").is_file()):
            file /= parts.pop(0)
        if "integrations.verl" in name and parts:
            assert re.search(rf"\b(class|def) {parts[0]}\b", file.with_suffix(".py").read_text(encoding="utf-8")), name
        elif parts:
            owner = importlib.import_module(".".join(file.relative_to(ROOT / "src").parts))
            assert functools.reduce(getattr, parts, owner) is not None, name


def test_configurations_on_the_pages_are_valid() -> None:
    for page in ("configuration.md", "one-gpu.md"):
        loaded = load_config(values=read_yaml(blocks(page, "yaml")[0], page))
        assert loaded != Config(), page


@pytest.mark.parametrize(("page", "profile"), [("study-file.md", "gpu"), ("tour.md", None)])
def test_studies_on_the_pages_are_valid(page: str, profile: str | None, tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(blocks(page, "yaml")[0], encoding="utf-8")
    assert len(load_study(file, profile=profile).arms) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_script_with_rewards_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, _ = blocks("own-reward.md", "python")
    assert "max_steps=20" in script
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(script.replace("max_steps=20", "max_steps=2, logging_steps=1"), scope)
    logged = [entry for entry in scope["trainer"].state.log_history if "loss" in entry]
    assert len(logged) == 2
    assert all(0 < entry["rewards/brevity/mean"] <= 1 for entry in logged)
    assert all(0 < entry["rewards/reaches_target/mean"] < 1 for entry in logged), "some answers are right"
    assert all(entry["grad_norm"] > 0 for entry in logged), "something is learnt"
    assert scope["trainer"].correct.name == "reaches_target"
    answers = ["<answer>2*3+1</answer>", "<answer>7</answer>", "<answer>1+2*3", "<answer>3+2+1</answer>", "7"]
    assert scope["reaches_target"](answers, 5 * [[1, 2, 3]], 5 * [7]) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_task_with_a_reward_part_of_its_own() -> None:
    scope: dict[str, Any] = {}
    exec(blocks("own-reward.md", "python")[1], scope)
    task = scope["BriefCountdown"]()
    (problem,) = task.problems("holdout", limit=1)
    short, long = [task.rewards(answer, problem) for answer in ("", 30 * "no")]
    assert short["brevity"] == 1.0
    assert long["brevity"] == 0.0
    assert [function.__name__ for function in task.reward_functions()] == ["correctness", "format", "brevity"]


@pytest.mark.parametrize("page", PAGES)
def test_no_text_is_lost_as_a_tag(page: str) -> None:
    """What stands in angle brackets outside of code is markup for a browser, which shows nothing of it."""
    prose = re.sub(r"^(`{3,}).*?^\1$|^ {4}.*$", "", text(page), flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"(`+)[^`].*?\1", "", prose, flags=re.DOTALL)
    assert re.findall(r"</?[A-Za-z][^>]*>", prose) == []


def test_the_engine_is_used_as_its_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    at_once, by_step = blocks("sampling.md", "python")
    scope: dict[str, Any] = {}
    exec(at_once, scope)
    assert [rollout.prompt_index for rollout in scope["rollouts"]] == 4 * [0] + 4 * [1]
    assert {rollout.stop for rollout in scope["rollouts"]} == {"</answer>"}
    capsys.readouterr()
    exec(by_step, scope)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in printed] == [
        ["0", "None", "None"], ["1", "None", "None"], ["2", "0", "8"], ["3", "0", "8"],
    ]  # fmt: skip
    assert printed[1].endswith("</answer>")
    assert "</think><answer>" in printed[1]
    named = load_config(values=read_yaml(re.findall(r"`(rollout: .*?)`", text("sampling.md"))[0], "sampling.md"))
    assert named.rollout.stop == ["</answer>"]


# --- navigation, links, API ---------------------------------------------------------------------------------------


class AnyTag(yaml.SafeLoader):
    """YAML in which a Python object is nothing."""


AnyTag.add_multi_constructor("", lambda loader, suffix, node: None)


def leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from leaves(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=AnyTag)["nav"]
    assert sorted(leaves(nav)) == PAGES


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text(page)):
        if link.startswith("https://"):
            continue
        file = (DOCS / page).parent / link if link else DOCS / page
        assert file.is_file(), link
        if anchor and page != "index.md" and not anchor.startswith("explorl."):  # made from the README and docstrings
            assert anchor in anchors(file), f"{link}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_pages_say_per_where_they_mean_per(page: str) -> None:
    units = "once|twice|bytes|MiB|GiB|ms|µs|s|numbers|operations|pass|passes|calls|completions|responses|runs|one"
    whole = "arm|problem|token|row|batch|run|step|parameter|answer|strategy|GPU|core|seed|task|position|iteration"
    assert re.findall(rf"\b(?:{units})\s+an?\s+(?:{whole})\b", text(page)) == []


@pytest.mark.parametrize(
    "module",
    ["explorl", *(f"explorl.{name.parent.name}" for name in sorted((ROOT / "src" / "explorl").glob("*/__init__.py")))],
)
def test_public_names_are_in_the_api_reference(module: str) -> None:
    public = getattr(importlib.import_module(module), "__all__", None)
    page = f"api/{module.removeprefix('explorl.')}.md"
    if public is None:
        assert page not in PAGES, f"{page} describes a module without __all__"
        return
    documented = set(re.findall(rf"^::: {re.escape(module)}\.(\w+)$", text(page), re.MULTILINE))
    whole = re.search(rf"^::: {re.escape(module)}$(?!\n    options: {{members: false}})", text(page), re.MULTILINE)
    assert whole or documented == set(public)
    assert documented <= set(public)


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sections_of_the_readme_are_there(hooks: Any) -> None:
    page = hooks.on_page_markdown(text("index.md"), page=None)
    assert "<!-- README" not in page
    assert "## Drop-in for TRL\n" in page
    assert "](docs/" not in page
    assert "](trl.md)" in page
    with pytest.raises(ValueError, match="has no section 'Nothing'"):
        hooks.section("Nothing")


def test_bars_in_code_in_tables(hooks: Any) -> None:
    table = "| `p` | `float \\| Schedule` | a \\| b |\n`x \\| y`"
    assert hooks.on_page_markdown(table, page=None) == "| `p` | `float | Schedule` | a \\| b |\n`x \\| y`"


# --- the site -----------------------------------------------------------------------------------------------------

WIDTHS = (400, 1280)
CUT = """[...document.querySelectorAll("pre > code")].filter(code => code.scrollWidth > code.clientWidth)
  .map(code => code.textContent.slice(0, 60))"""
"""Code of which a reader sees only the beginning of a line."""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SWITCHES = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
needs_mkdocs = pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="no mkdocs: pip install .[docs]")


def build(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(project / "mkdocs.yml")]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run([*command, "--site-dir", str(site)], capture_output=True, text=True, check=False, env=quiet)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)
        yield opened
        opened.close()


@pytest.mark.slow
@needs_mkdocs
@pytest.mark.parametrize(
    ("defect", "complaint"),
    [
        ("[gone](gone.md)", "target is not found"),
        ("[gone](studies.md#gone)", "does not contain an anchor '#gone'"),
        ("[gone](#gone)", "there is no such anchor"),
        ("<!-- README: Gone -->", "has no section 'Gone'"),
        ("::: explorl.gone", "explorl.gone could not be found"),
        (None, "not included in the"),
    ],
)
def test_a_defect_fails_the_build(defect: str | None, complaint: str, tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    for name in ("mkdocs.yml", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "src").symlink_to(ROOT / "src")
    if defect is None:
        (tmp_path / "docs" / "lonely.md").write_text("# Lonely\n", encoding="utf-8")
    else:
        with (tmp_path / "docs" / "tour.md").open("a", encoding="utf-8") as page:
            page.write(f"\n{defect}\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    assert complaint in built.stderr + built.stdout


@pytest.mark.slow
@needs_mkdocs
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_and_do_not_complain(site: Path, browser: Any, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
    page.on("request", lambda request: complaints.append(request.url) if not request.url.startswith("file:") else None)
    paths = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    assert len(paths) == len(PAGES)
    for path in paths:
        complaints.clear()
        page.goto(path.as_uri())
        page.wait_for_selector("article h1")
        wide, window = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide <= window, f"{path.relative_to(site)} is {wide - window} pixels too wide at {width}"
        assert page.evaluate(CUT) == [], f"{path.relative_to(site)} cuts code at {width}"
        background = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (max(background[:3]) < 100) == (scheme == "dark"), path
        assert complaints == [], path.relative_to(site)
    page.close()


@pytest.mark.slow
@needs_mkdocs
def test_search_finds_a_key_from_the_disk(site: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((site / "index.html").as_uri())
    page.get_by_role("textbox", name="Search").click()
    page.keyboard.type("training.gradient_checkpointing")
    page.locator('.md-search-result__link[href*="configuration.html"]').first.wait_for(timeout=30_000)
    page.close()
