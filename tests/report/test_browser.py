"""The page in a real browser: nothing fetched, nothing run that should not be, and every control does its work."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from explorl.report.study_page import write_report

from .studies import ARMS, make_results

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
SWITCHES = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
HOSTILE = '</script><script>window.hit=1</script><img src=x onerror="window.hit=1"><svg onload="window.hit=1">'

CONTRAST = """(selector) => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const pixel = (...layers) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const layer of layers) { canvas.fillStyle = layer; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return [...document.querySelectorAll(selector)].map((element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.unshift(getComputedStyle(e).backgroundColor);
    const ink = getComputedStyle(element);
    const text = element.closest("svg") ? ink.fill : ink.color;
    const [a, b] = [light(pixel(...layers)), light(pixel(...layers, text))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
}"""


class Opened:
    """A page with what it asked for and what it complained about."""

    def __init__(self, page: Any, path: Path, hash: str = "") -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on(
            "console",
            lambda message: self.complaints.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.goto(path.as_uri() + hash)

    def selected(self, name: str) -> str:
        return self.page.locator(f"#{name} option:checked").inner_text()

    def prompt(self) -> str:
        return self.page.locator("#prompt-text").inner_text()

    def shares(self) -> list[str]:
        return self.page.eval_on_selector_all(".token", "all => all.map(t => t.style.getPropertyValue('--share'))")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Any, report: Path) -> Iterator[Callable[..., Opened]]:
    """Opens a page, the made-up study's unless another is given, and sees to it that it fetched and said nothing."""
    contexts = []
    pages: list[Opened] = []

    def open_page(path: Path = report, hash: str = "", width: int = 1200, height: int = 900, **context: Any) -> Opened:
        contexts.append(chromium.new_context(viewport={"width": width, "height": height}, **context))
        pages.append(Opened(contexts[-1].new_page(), path, hash))
        return pages[-1]

    yield open_page
    for page in pages:
        assert page.complaints == []
        assert page.requests == [page.requests[0]]
        assert page.requests[0].startswith("file:")
    for context in contexts:
        context.close()


def test_loads_by_itself_and_shows_every_figure(opened):
    page = opened().page
    figures = page.locator("figure > svg")
    assert figures.count() == 15
    for index in range(figures.count()):
        box = figures.nth(index).bounding_box()
        assert box["width"] > 280
        assert box["height"] > 100
        assert figures.nth(index).locator("text").count() > 3
    strokes = page.eval_on_selector_all("figure svg path", "all => all.map(p => getComputedStyle(p).stroke)")
    assert {"rgb(0, 114, 178)", "rgb(213, 94, 0)"} <= set(strokes)  # the arms' colours, from the page's variables


def test_a_chosen_arm_stands_out(opened):
    page = opened().page
    opacity = "(all, arm) => all.filter(p => p.dataset.arm === arm).map(p => Number(getComputedStyle(p).opacity))"
    parts = "figure .line"
    assert set(page.eval_on_selector_all(parts, opacity, "2")) == {1}
    buttons = page.locator("#curves .legend button")
    buttons.nth(1).focus()
    page.keyboard.press("Enter")
    assert buttons.nth(1).get_attribute("aria-pressed") == "true"
    assert page.locator("#plane .legend button").nth(2).get_attribute("aria-pressed") == "true"  # all legends follow
    on_top = "svg => [...svg.querySelectorAll('.line')].pop().dataset.arm"
    assert page.locator("#curves figure > svg").first.evaluate(on_top) == "1"
    assert set(page.eval_on_selector_all(parts, opacity, "1")) == {1}
    assert set(page.eval_on_selector_all(parts, opacity, "0")) == {1}  # the baseline stays
    assert max(page.eval_on_selector_all(parts, opacity, "2")) < 0.2
    buttons.nth(1).click()
    assert set(page.eval_on_selector_all(parts, opacity, "2")) == {1}
    assert page.locator("#curves figure > svg").first.evaluate(on_top) != "1"  # as it was


def test_of_many_arms_only_the_chosen_show_their_bands(opened, tmp_path):
    results = make_results()
    arms = [{**copy.deepcopy(results["arms"][1]), "name": f"arm {index}"} for index in range(8)]
    write_report(tmp_path / "many.html", {**results, "arms": [results["arms"][0], *arms], "overlaps": None})
    page = opened(tmp_path / "many.html").page
    shown = "all => all.filter(p => getComputedStyle(p).display !== 'none').length"
    assert page.locator("#pass-at-k .band").count() == 2  # two figures
    assert page.locator("#pass-at-k .extra").count() == 8 + 8 + 1  # the start has no gain
    assert page.eval_on_selector_all("#pass-at-k .extra", shown) == 0
    page.locator("#pass-at-k .legend button").nth(3).click()
    assert page.eval_on_selector_all("#pass-at-k .extra", shown) == 2
    assert "Choose an arm in the legend" in page.locator("#pass-at-k figcaption").first.inner_text()


def test_what_was_not_recorded_is_said(opened, tmp_path):
    results = make_results(prompts=1, answers=1)
    rollout = results["rollouts"][0]
    rollout["answers"] = [{"tokens": ["1+2"], "recorded": False, "entropy": [None], "correct": True, "reward": 1.0}]
    write_report(
        tmp_path / "bare.html", {"arms": [{"name": rollout["arm"]}], "rollouts": [rollout, results["rollouts"][1]]}
    )
    view = opened(tmp_path / "bare.html", hash="#arm=plain+GRPO&seed=0&step=10&prompt=0")
    assert "tokens not recorded" in view.page.locator(".completion header").inner_text()
    view.page.locator(".completion .token").first.hover()
    assert "entropy not recorded" in view.page.locator("#readout").inner_text()


def test_room_beside_a_single_figure_is_used(opened):
    wide, narrow = opened(width=1280).page, opened(width=400).page
    assert wide.locator("#plane details.numbers").evaluate("d => d.open")
    assert not narrow.locator("#plane details.numbers").evaluate("d => d.open")
    figure, table = (wide.locator(f"#plane {part}").bounding_box() for part in ("figure > svg", "details table"))
    assert table["x"] > figure["x"] + figure["width"]


def test_a_single_kind_of_error_has_room_for_its_words(opened, tmp_path):
    results = make_results()
    for arm in results["arms"]:
        arm["errors"] = dict(list((arm.get("errors") or {}).items())[:1])
    write_report(tmp_path / "one.html", results)
    caption = opened(tmp_path / "one.html", width=1280).page.locator("#errors figcaption")
    assert caption.count() == 1
    assert caption.bounding_box()["width"] > 200


def test_switches_arm_seed_step_prompt_and_shading(opened):
    view = opened()
    page = view.page
    assert page.locator("#arm option").all_inner_texts() == list(ARMS)
    assert (view.selected("arm"), view.selected("seed"), view.selected("step")) == ("plain GRPO", "0", "90")
    seen = {page.locator(".columns").inner_text()}
    for name, value in (("arm", "bottom-p + clip-higher"), ("seed", "1"), ("step", "10"), ("prompt", "2")):
        page.select_option(f"#{name}", value)
        seen.add(page.locator(".columns").inner_text())
    assert len(seen) == 5
    assert view.prompt().strip() == "4 11 15=8"
    page.select_option("#step", "50")
    assert view.prompt().strip() == "4 11 15=8"  # the prompt stays when the step changes
    right, wrong = page.locator("#correct .completion").count(), page.locator("#wrong .completion").count()
    assert right + wrong == 6
    assert page.locator("#correct-heading").inner_text() == f"Correct ({right})"
    assert page.locator("#wrong-heading").inner_text() == f"Wrong ({wrong})"
    shadings = set()
    for key, scale in (
        ("entropy", "sequential"),
        ("logp", "reversed"),
        ("advantage", "diverging"),
        ("weight", "diverging"),
    ):
        page.check(f"input[value={key}]")
        assert page.locator("#scale-bar").get_attribute("class") == scale
        shadings.add(tuple(view.shares()))
    assert len(shadings) == 4


def test_shading_follows_the_numbers(opened, results):
    view = opened()
    (rollout,) = [
        r
        for r in results["rollouts"]
        if (r["arm"], r["seed"], r["step"]) == ("plain GRPO", 0, 90) and r["prompt"] == "3 7 12=33\n"
    ]
    first = next(answer for answer in rollout["answers"] if answer["correct"])
    shares = [float(share) for share in view.shares()[: len(first["tokens"])]]
    order = sorted(range(len(shares)), key=lambda index: first["entropy"][index])
    assert [shares[index] for index in order] == sorted(shares)
    assert max(shares) > 2 * min(shares)
    most = order[-1]
    view.page.locator(".completion .token").nth(most).hover()
    readout = view.page.locator("#readout").inner_text()
    assert f"entropy {first['entropy'][most]:.3f} nats" in readout
    assert f"token {most + 1} of {len(first['tokens'])}" in readout
    assert "strategy weight" in readout


def test_columns_stand_side_by_side_and_stack_on_a_phone(opened):
    for width, beside in ((1200, True), (400, False)):
        page = opened(width=width).page
        right, wrong = (page.locator(f"#{name}").bounding_box() for name in ("correct", "wrong"))
        assert (wrong["x"] > right["x"] + right["width"]) == beside
        assert (wrong["y"] > right["y"] + right["height"]) == (not beside)


def test_keyboard(opened):
    view = opened()
    page = view.page
    focused = "document.activeElement.getAttribute('aria-label')"
    page.locator("#rollouts").focus()
    page.keyboard.press("[")
    assert view.selected("step") == "50"
    page.keyboard.press("]")
    page.keyboard.press("]")  # there is no further one
    assert view.selected("step") == "90"
    page.keyboard.press("n")
    assert view.selected("prompt").startswith("2.")
    page.keyboard.press("p")
    for number, key in enumerate(("entropy", "logp", "advantage", "weight"), 1):
        page.keyboard.press(str(number))
        assert page.locator(f"input[value={key}]").is_checked()
    labels = page.eval_on_selector_all(".completion", "all => all.map(a => a.getAttribute('aria-label'))")
    page.keyboard.press("j")
    assert page.evaluate(focused) == labels[0]
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) == labels[1]
    page.keyboard.press("k")
    assert page.evaluate(focused) == labels[0]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "token 2 of" in page.locator("#readout").inner_text()
    page.keyboard.press("]")
    page.keyboard.press("[")
    assert view.selected("step") == "50"  # goes on when the answer that had the focus is gone
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("1")  # the help is in front
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()
    assert page.locator("input[value=weight]").is_checked()


def test_keys_leave_the_rest_of_the_page_alone(opened):
    view = opened()
    view.page.locator("nav a").first.focus()
    view.page.keyboard.press("[")
    view.page.keyboard.press("3")
    assert view.selected("step") == "90"
    assert view.page.locator("input[value=entropy]").is_checked()


def test_everything_is_reached_by_tab_with_a_visible_focus(opened):
    page = opened().page
    seen = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        found = page.evaluate(
            "[document.activeElement.id || document.activeElement.tagName,"
            " getComputedStyle(document.activeElement).outlineStyle]"
        )
        seen.add(found[0])
        assert found[0] == "BODY" or found[1] != "none"
    assert {"arm", "seed", "step", "prompt", "link", "help-button", "SUMMARY", "ARTICLE"} <= seen


def test_a_link_reopens_the_view(opened):
    first = opened()
    first.page.select_option("#arm", "entropy-guided weighting")
    first.page.select_option("#seed", "1")
    first.page.select_option("#step", "50")
    first.page.select_option("#prompt", "3")
    first.page.check("input[value=advantage]")
    hash = first.page.evaluate("location.hash")
    assert hash == first.page.locator("#link").get_attribute("href")
    second = opened(hash=hash)
    for name in ("arm", "seed", "step", "prompt"):
        assert second.selected(name) == first.selected(name)
    assert second.page.locator("input[value=advantage]").is_checked()
    assert second.page.locator("#rollouts").evaluate("e => e.getBoundingClientRect().top < innerHeight")
    second.page.evaluate("location.hash = 'arm=plain+GRPO&seed=0&step=10&prompt=1&by=weight'")
    second.page.wait_for_function("document.getElementById('step').value === '10'")
    assert second.selected("arm") == "plain GRPO"


@pytest.mark.parametrize(
    "hash", ["#arm=gone&seed=7&step=51&prompt=99&by=gone", "#summary", "#arm", "#%", "#arm=%E0%A4%A"]
)
def test_a_strange_link_shows_the_nearest_view(opened, hash):
    view = opened(hash=hash)
    assert view.selected("arm") == "plain GRPO"
    assert view.page.locator(".completion").count() == 6
    if "gone" in hash:
        assert (view.selected("seed"), view.selected("step")) == ("1", "50")
        assert view.selected("prompt").startswith("4.")


@pytest.mark.parametrize("width", [400, 700, 1000, 1200])
def test_no_sideways_scrolling(opened, width):
    page = opened(width=width).page
    page.eval_on_selector_all("details", "all => all.forEach(d => { d.open = true; })")
    assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    if width < 1100:  # the summary is cards, which need no scrolling of their own
        assert page.locator("#summary > .scroll").evaluate("box => box.scrollWidth <= box.clientWidth")
        assert page.locator(".summary .label").first.is_visible()


def test_letters_in_figures_stay_readable_on_a_phone(opened):
    page = opened(width=400).page
    heights = page.eval_on_selector_all("figure svg text", "all => all.map(t => t.getBoundingClientRect().height)")
    assert min(heights) > 8


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(opened, scheme):
    page = opened(color_scheme=scheme).page
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 23, 26)"}[scheme]
    texts = (
        "h1, h2, h3, p, dt, dd, th, td, small, strong, a, summary, figcaption, figure svg text, label, button, kbd, "
        "pre, .legend span, .completion header, .mark"
    )
    for tone in ("--shade", "--above", "--below"):
        page.eval_on_selector_all(
            ".token",
            "(all, tone) => all.forEach(t => {"
            " t.style.setProperty('--share', 1); t.style.setProperty('--tone', `var(${tone})`); })",
            tone,
        )
        assert min(page.evaluate(CONTRAST, ".token")) >= 4.5
    ratios = page.evaluate(CONTRAST, texts)
    assert len(ratios) > 300
    assert min(ratios) >= 4.5
    for variable in ("--good", "--bad", *(f"--arm-{index}" for index in range(7))):
        page.evaluate(
            "variable => {"
            " const probe = document.getElementById('probe') || document.body.appendChild(document.createElement('i'));"
            " probe.id = 'probe'; probe.style.color = `var(${variable})`; }",
            variable,
        )
        assert page.evaluate(CONTRAST, "#probe")[0] >= 3, variable  # lines and markers


def test_prints_light_with_figures_and_without_controls(opened):
    page = opened(color_scheme="dark", width=718).page
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    figures = page.locator("figure > svg")
    assert all(figures.nth(index).bounding_box()["height"] > 80 for index in range(figures.count()))
    for name in (".controls", "nav", "#readout"):
        assert not page.locator(name).is_visible()
    assert page.locator(".completion").first.is_visible()
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 718
    assert len(page.pdf(format="A4")) > 50_000


def test_hostile_text_is_shown_and_does_nothing(opened, tmp_path):
    results = make_results(prompts=2, answers=3)
    results |= {"title": HOSTILE, "arms": copy.deepcopy(results["arms"][:2])}
    results["arms"][1] |= {"name": HOSTILE, "verdict": HOSTILE, "errors": {"by kind": {HOSTILE: 3}}}
    for rollout in results["rollouts"]:
        rollout |= {"arm": HOSTILE, "prompt": HOSTILE}
        for answer in rollout["answers"]:
            answer["tokens"][0] = HOSTILE
            answer["finish"] = HOSTILE
    path = tmp_path / "hostile.html"
    write_report(path, results)
    # without the policy that forbids foreign scripts, so that the escaping alone is tried
    text = path.read_text(encoding="utf-8")
    start = text.index("<meta http-equiv")
    path.write_text(text[:start] + text[text.index(">", start) + 1 :], encoding="utf-8")
    view = opened(path)
    page = view.page
    page.locator(".token").first.hover()
    page.keyboard.press("n")
    assert page.evaluate("window.hit") is None
    assert page.locator("img").count() == 0
    assert HOSTILE in page.locator("h1").inner_text()
    assert HOSTILE in view.prompt()
    assert HOSTILE in page.locator(".completion").first.inner_text()


def test_foreign_scripts_are_forbidden(chromium, report, tmp_path):
    path = tmp_path / "changed.html"
    path.write_text(report.read_text(encoding="utf-8").replace("</main>", "</main><script>window.hit = 1</script>"))
    page = chromium.new_page()
    page.goto(path.as_uri())
    assert page.evaluate("window.hit") is None
    assert page.locator(".completion").count() == 6  # its own runs
    page.close()


@pytest.mark.parametrize("lack", ["rollouts", "records", "answers"])
def test_browser_stands_what_is_lacking(opened, tmp_path, lack):
    results = make_results(prompts=1, answers=2) | {"arms": []}
    if lack == "rollouts":
        results["rollouts"] = []
    for rollout in results["rollouts"]:
        if lack == "answers":
            rollout["answers"] = []
        for answer in rollout["answers"]:
            for key in ("entropy", "logp", "weight", "advantage"):
                del answer[key]
            answer |= {"correct": None, "reward": None, "finish": None}
    path = tmp_path / "lacking.html"
    write_report(path, results)
    page = opened(path).page
    assert page.locator("#browser").count() == (0 if lack == "rollouts" else 1)
    if lack == "records":
        assert page.locator("#wrong-heading").inner_text() == "Wrong or not scored (2)"
        page.locator(".token").first.hover()
        assert "token 1 of" in page.locator("#readout").inner_text()
    if lack == "answers":
        assert page.locator(".completion").count() == 0
