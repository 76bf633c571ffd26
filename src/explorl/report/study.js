// The rollout browser: `view` determines what is shown, and is stored in the address's hash.
(() => {
  "use strict";
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const rollouts = read("rollout-data");
  const measures = read("measure-data");
  const $ = (id) => document.getElementById(id);

  // ------------------------------------------------------------------ arms chosen in a legend
  const chosen = new Set();
  const legendButtons = [...document.querySelectorAll("[data-choose]")].map((item) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...item.childNodes);
    item.append(button);
    button.addEventListener("click", () => {
      const arm = item.dataset.choose;
      if (!chosen.delete(arm)) chosen.add(arm);
      highlightArms();
    });
    return [item.dataset.choose, button];
  });
  function highlightArms() {
    document.body.classList.toggle("chosen-arms", chosen.size > 0);
    legendButtons.forEach(([arm, button]) => button.setAttribute("aria-pressed", chosen.has(arm)));
    document.querySelectorAll("figure [data-arm]").forEach((part) => {
      part.classList.toggle("chosen", chosen.has(part.dataset.arm) || part.dataset.arm === "0");
    });
    // later elements of an SVG are drawn on top
    layers.forEach(([parent, parts]) => parent.append(
      ...parts.filter((part) => !chosen.has(part.dataset.arm)), ...parts.filter((part) => chosen.has(part.dataset.arm)),
    ));
  }
  const layers = [...new Set([...document.querySelectorAll("figure [data-arm]")].map((part) => part.parentNode))]
    .map((parent) => [parent, [...parent.children]]);
  highlightArms();
  if (matchMedia("(min-width: 60rem)").matches) { // there is room beside the figure
    document.querySelectorAll(".single .numbers").forEach((numbers) => { numbers.open = true; });
  }

  const browser = $("browser");
  if (!browser || !rollouts.length) return;
  const root = $("rollouts");
  const LEVELS = ["arm", "seed", "step"];
  let view = {};

  const make = (name, className, text) => {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const unique = (values) => [...new Set(values)];
  const matching = (depth) => rollouts.filter((rollout) => LEVELS.slice(0, depth).every((key) => rollout[key] === view[key]));
  const formatNumber = (value) => {
    if (value === null || value === undefined) return "not recorded";
    const text = Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(3);
    return /[1-9]/.test(text) ? text.replace("-", "−") : text.replace("-", "");
  };
  const formatShort = (value) => formatNumber(value).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");

  // ------------------------------------------------------------------ the view
  function nearest(options, wanted) {
    if (options.includes(wanted)) return wanted;
    if (typeof wanted !== "number") return options[0];
    return options.reduce((best, option) => (Math.abs(option - wanted) < Math.abs(best - wanted) ? option : best));
  }

  /** Shows the view that is nearest to `wanted`. */
  function show(wanted) {
    const options = {};
    view = { ...view, ...wanted };
    LEVELS.forEach((key, depth) => {
      options[key] = unique(matching(depth).map((rollout) => rollout[key]));
      if (key !== "arm") options[key].sort((a, b) => a - b);
      view[key] = nearest(options[key], view[key]);
    });
    const here = matching(LEVELS.length);
    const same = wanted.prompt === undefined ? here.findIndex((rollout) => rollout.prompt === view.text) : -1;
    view.prompt = same >= 0 ? same : Math.min(Math.max(view.prompt || 0, 0), here.length - 1);
    view.text = here[view.prompt].prompt;
    if (!measures.some((measure) => measure.key === view.by)) view.by = measures.length ? measures[0].key : "";
    LEVELS.forEach((key) => fill($(key), options[key].map((value) => [String(value), String(value)]), String(view[key])));
    fill($("prompt"), promptTitles(here).map((text, index) => [String(index), `${index + 1}. ${text}`]), String(view.prompt));
    drawRollout(here[view.prompt]);
    shade();
    saveView();
  }

  /** Returns one line per prompt, from the first word in which the prompts differ. */
  function promptTitles(here) {
    const texts = here.map((rollout) => rollout.prompt.replace(/\s+/g, " ").trim());
    let same = 0;
    while (same < texts[0].length && texts.every((text) => text[same] === texts[0][same])) same += 1;
    const start = same < texts[0].length ? texts[0].lastIndexOf(" ", same) + 1 : 0;
    return texts.map((text) => {
      const rest = (start ? "… " : "") + text.slice(start);
      return rest.length > 90 ? rest.slice(0, 89) + "…" : rest;
    });
  }

  function fill(select, pairs, chosen) {
    select.replaceChildren(...pairs.map(([value, text]) => {
      const option = make("option", "", text);
      option.value = value;
      return option;
    }));
    select.value = chosen;
  }

  function drawRollout(rollout) {
    $("prompt-text").textContent = rollout.prompt;
    const correct = [], wrong = [];
    rollout.answers.forEach((completion, index) => (completion.correct ? correct : wrong).push(card(completion, index)));
    const unscored = rollout.answers.some((completion) => completion.correct === null);
    column("correct", `Correct (${correct.length})`, correct);
    column("wrong", `Wrong${unscored ? " or not scored" : ""} (${wrong.length})`, wrong);
    drawTree(rollout.answers);
    $("readout").replaceChildren(make("span", "mark", "Point at a token, or select it with the arrow keys, to see its numbers."));
  }

  function column(id, heading, cards) {
    $(`${id}-heading`).textContent = heading;
    $(id).replaceChildren(...(cards.length ? cards : [make("p", "quiet", "None.")]));
  }

  function card(completion, index) {
    const box = make("article", "completion");
    box.tabIndex = 0;
    box.completion = completion;
    const verdict = completion.correct === null ? "not scored" : completion.correct ? "correct" : "wrong";
    box.setAttribute("aria-label", `Completion ${index + 1}, ${verdict}`);
    const facts = [`Completion ${index + 1}`, `${completion.correct ? "✓" : completion.correct === null ? "?" : "✗"} ${verdict}`, `reward ${formatShort(completion.reward)}`];
    facts.push(completion.recorded === false ? "tokens not recorded" : `${completion.tokens.length} token${completion.tokens.length === 1 ? "" : "s"}`);
    if (completion.finish) facts.push({ stop: "ended", length: "cut off" }[completion.finish] || completion.finish);
    if (completion.parent !== undefined) facts.push(branchText(completion));
    box.append(make("header", "", facts.join(" · ")));
    const text = make("div", "tokens");
    let position = 0;
    (completion.blocks || []).forEach(([begin, end, kind, label]) => {
      for (; position < begin; position += 1) text.append(tokenSpan(completion, position));
      const block = make("div", `block ${kind}`);
      block.append(make("div", "block-label", label));
      for (; position < end; position += 1) block.append(tokenSpan(completion, position));
      text.append(block);
    });
    for (; position < completion.tokens.length; position += 1) text.append(tokenSpan(completion, position));
    box.append(text);
    return box;
  }

  function tokenSpan(completion, position) {
    const span = make("span", "token");
    span.tabIndex = -1;
    span.position = position;
    span.classList.toggle("has-alternative", Boolean(alternative(completion, position)));
    span.classList.toggle("shared", position < (completion.forked_at || 0));
    if (completion.tokens[position] === "") span.append(make("span", "mark", "∅"));
    completion.tokens[position].split(/(\n)/).forEach((part) => {
      if (part === "\n") span.append(make("span", "mark", "↵"), "\n");
      else if (part) span.append(part);
    });
    return span;
  }

  // ------------------------------------------------------------------ tree of branched completions
  function parentOf(completion, completions) {
    return completion.parent === undefined ? undefined : completions.find((other) => other.row === completion.parent);
  }

  function branchText(completion) {
    const { answers: completions } = matching(LEVELS.length)[view.prompt], parent = parentOf(completion, completions);
    const whose = parent ? `completion ${completions.indexOf(parent) + 1}` : "a completion that is not shown";
    return `branches off ${whose} after ${completion.forked_at} token${completion.forked_at === 1 ? "" : "s"}`;
  }

  /** Orders parents before their branches, and branches from the last fork to the first, so that no lines cross. */
  function treeOrder(completions) {
    const ordered = [];
    const add = (completion) => {
      if (ordered.includes(completion)) return;
      ordered.push(completion);
      completions.filter((other) => parentOf(other, completions) === completion)
        .sort((a, b) => b.forked_at - a.forked_at).forEach(add);
    };
    completions.filter((completion) => !parentOf(completion, completions)).forEach(add);
    completions.forEach(add); // a damaged file may contain cycles
    return ordered;
  }

  function drawTree(completions) {
    const figure = $("tree");
    figure.hidden = !completions.some((completion) => completion.parent !== undefined);
    if (figure.hidden) return;
    const svg = $("tree-lines"), HEIGHT = 22, LEFT = 118, WIDTH = 640;
    const part = (name, attributes) => {
      const element = document.createElementNS(svg.namespaceURI, name);
      Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
      return element;
    };
    const ordered = treeOrder(completions);
    const longest = Math.max(1, ...completions.map((completion) => completion.tokens.length));
    const x = (position) => LEFT + (position / longest) * (WIDTH - LEFT - 12);
    const y = (completion) => ordered.indexOf(completion) * HEIGHT + HEIGHT / 2;
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${ordered.length * HEIGHT}`);
    svg.replaceChildren(...ordered.map((completion) => {
      const index = completions.indexOf(completion), parent = parentOf(completion, completions);
      const verdict = completion.correct === null ? "not scored" : completion.correct ? "correct" : "wrong";
      const start = completion.forked_at || 0;
      const line = part("g", { class: `branch ${completion.correct ? "right" : "wrong"}`, role: "button", tabindex: 0 });
      line.setAttribute("aria-label", `Completion ${index + 1}, ${verdict}${completion.parent === undefined ? "" : `, ${branchText(completion)}`}`);
      line.append(part("rect", { class: "hit-area", x: 0, y: y(completion) - HEIGHT / 2, width: WIDTH, height: HEIGHT }));
      const label = part("text", { x: 4, y: y(completion) + 4 });
      label.textContent = `${completion.correct === null ? "?" : completion.correct ? "✓" : "✗"} Completion ${index + 1}`;
      const from = parent ? `M${x(start)} ${y(parent)}V${y(completion)}` : `M${x(start)} ${y(completion)}`;
      line.append(label, part("path", { d: `${from}H${Math.max(x(completion.tokens.length), x(start) + 2)}` }));
      if (parent) line.append(part("circle", { cx: x(start), cy: y(parent), r: 3 }));
      (completion.blocks || []).filter(([begin, , kind]) => kind === "output" && begin >= start).forEach(([begin, end]) => {
        line.append(part("rect", { class: "tool-output", x: x(begin), y: y(completion) - 4, width: Math.max(x(end) - x(begin), 2), height: 8 }));
      });
      const go = () => [...browser.querySelectorAll(".completion")].find((box) => box.completion === completion).focus();
      line.addEventListener("click", go);
      line.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        event.stopPropagation();
        go();
      });
      return line;
    }));
    const all = completions.reduce((sum, completion) => sum + completion.tokens.length, 0);
    const shared = completions.reduce((sum, completion) => sum + (completion.forked_at || 0), 0);
    const forks = completions.filter((completion) => completion.parent !== undefined).length;
    $("tree-caption").textContent = `${forks} of ${completions.length} completions branch off another one, at the dots; ${shared} of their ${all} tokens were not sampled again and appear in italics. Boxes are tool outputs. Click a line to go to its completion.`;
  }

  // ------------------------------------------------------------------ shading
  function value(completion, measure, position) {
    const record = completion[measure.key];
    const raw = Array.isArray(record) ? record[position] : record;
    if (raw === null || raw === undefined) return null;
    return measure.exponential ? Math.exp(raw) : raw;
  }

  /** Returns how strongly a value shades its token, from −1 to 1. */
  function strength(x, { scale, low, high, centre }) {
    const share = scale === "diverging" ? (x - centre) / (high - centre) : scale === "reversed" ? (high - x) / (high - low) : (x - low) / (high - low);
    return Math.min(1, Math.max(scale === "diverging" ? -1 : 0, share));
  }

  function shade() {
    const measure = measures.find(({ key }) => key === view.by);
    if (!measure) return;
    browser.querySelectorAll("input[name=shade]").forEach((input) => { input.checked = input.value === view.by; });
    browser.querySelectorAll(".completion").forEach((box) => box.querySelectorAll(".token").forEach((span) => {
      const x = value(box.completion, measure, span.position);
      const t = x === null ? 0 : strength(x, measure);
      const tone = measure.scale !== "diverging" ? "--shade" : t < 0 ? "--below" : "--above";
      span.classList.toggle("no-value", x === null);
      if (measure.scale === "nominal" && x !== null) {
        span.dataset.kind = x;
        span.style.removeProperty("--tone");
        span.style.setProperty("--share", 1);
        return;
      }
      delete span.dataset.kind;
      span.style.setProperty("--tone", `var(${tone})`);
      span.style.setProperty("--share", (Math.abs(t) ** 0.7).toFixed(3));
    }));
    const nominal = measure.scale === "nominal";
    $("scale").hidden = nominal;
    $("scale-names").hidden = !nominal;
    if (nominal) {
      $("scale-names").replaceChildren(...measure.names.map((name, kind) => {
        const item = make("li"), sample = make("span", "", name);
        sample.dataset.kind = kind;
        item.append(sample);
        return item;
      }));
      return;
    }
    const unit = measure.unit ? ` ${measure.unit}` : "";
    $("scale-low").textContent = `${measure.label} ${measure.scale === "diverging" ? "≤ " : ""}${formatShort(measure.low)}`;
    $("scale-high").textContent = `${measure.exponential ? "" : "≥ "}${formatShort(measure.high)}${unit}`;
    $("scale-bar").className = measure.scale;
  }

  function showReadout(span) {
    const completion = span.closest(".completion").completion;
    browser.querySelectorAll(".token.shown").forEach((other) => other.classList.remove("shown"));
    span.classList.add("shown");
    const parts = [make("code", "", JSON.stringify(completion.tokens[span.position])), make("span", "mark", `token ${span.position + 1} of ${completion.tokens.length}`)];
    for (const measure of measures) {
      const x = value(completion, measure, span.position);
      const part = make("span", "", `${measure.label} `);
      const shown = measure.scale === "nominal" && x !== null ? measure.names[x] : formatNumber(x);
      part.append(make("b", "", shown), x !== null && measure.unit ? ` ${measure.unit}` : "");
      parts.push(part);
    }
    if (alternative(completion, span.position)) parts.push(make("span", "mark", "Enter or a click: its alternative"));
    $("readout").replaceChildren(...parts);
  }

  // ------------------------------------------------------------------ the best alternative to a token
  /** Returns the most likely other token, and both sets of continuations if the token was replaced; null if unknown. */
  function alternative(completion, position) {
    const impact = (completion.impacts || {})[position];
    if (impact) return { token: impact.other.token, probability: impact.other.probability, sampledProbability: impact.sampled.probability, impact };
    const token = (completion.other || [])[position];
    if (!token) return null;
    const otherLogp = (completion.other_logp || [])[position];
    const sampledLogp = Array.isArray(completion.logp) ? completion.logp[position] : completion.logp;
    const probability = (x) => (x === null || x === undefined ? null : Math.exp(x));
    return { token, probability: probability(otherLogp), sampledProbability: probability(sampledLogp) };
  }

  /** Opens the panel of a token below its completion, or closes it if it is open. */
  function toggleAlternative(span) {
    const box = span.closest(".completion"), wasOpen = span.classList.contains("open");
    close();
    if (wasOpen) return;
    span.classList.add("open");
    const panel = alternativePanel(box.completion, span.position);
    box.append(panel);
    panel.scrollIntoView({ block: "nearest" });
  }

  function close() {
    const open = browser.querySelector(".alternative");
    browser.querySelectorAll(".token.open").forEach((span) => span.classList.remove("open"));
    if (open) open.remove();
    return Boolean(open);
  }

  function alternativePanel(completion, position) {
    const panel = make("section", "alternative");
    panel.setAttribute("aria-label", `Alternative to token ${position + 1}`);
    panel.setAttribute("role", "status");
    const best = alternative(completion, position), line = make("p");
    line.append("Token ", make("code", "", JSON.stringify(completion.tokens[position])));
    panel.append(line);
    if (!best) {
      line.append(": no alternative was recorded.");
      return panel;
    }
    if (best.sampledProbability !== null) line.append(`, probability ${formatNumber(best.sampledProbability)}`);
    line.append("; best alternative ", make("code", "", JSON.stringify(best.token)), `, probability ${formatNumber(best.probability)}${best.impact ? " (according to the policy that continued from both)" : ""}.`);
    if (!best.impact) return panel;
    const { mean, low, high, p, sampled, other } = best.impact;
    const text = make("p", "", "Impact ");
    text.append(make("b", "", formatNumber(mean)), ` with a 95 % interval from ${formatNumber(low)} to ${formatNumber(high)}; p ${p !== null && p < 0.001 ? "below 0.001" : formatNumber(p)} after correction for the number of tokens.`);
    const sides = make("div", "sides");
    sides.append(continuationsFrom(sampled), continuationsFrom(other));
    panel.append(text, sides);
    return panel;
  }

  function continuationsFrom({ token, correct, count, texts }) {
    const part = make("section"), list = make("ul");
    part.append(make("h4", "", `From ${JSON.stringify(token)}: ${correct} of ${count} correct`));
    texts.forEach(([continuation, right]) => {
      const item = make("li", right ? "right" : "wrong"), sign = make("b", "", right ? "✓" : "✗");
      sign.setAttribute("aria-label", right ? "correct" : "wrong");
      sign.setAttribute("role", "img");
      item.append(sign, continuation ? make("code", "", continuation) : make("span", "mark", "the completion ends here"));
      list.append(item);
    });
    if (texts.length < count) list.append(make("li", "mark", `and ${count - texts.length} more`));
    list.tabIndex = 0;
    part.append(list);
    return part;
  }

  // ------------------------------------------------------------------ the address
  function saveView() {
    const { arm, seed, step, prompt, by } = view;
    const hash = "#" + new URLSearchParams({ arm, seed, step, prompt, by });
    $("link").href = hash;
    if (!navigated) return; // a page that was only opened keeps its address
    try {
      history.replaceState(null, "", hash);
    } catch { // some browsers refuse this for a file
      location.hash = hash;
    }
  }

  function viewFromHash() {
    const params = new URLSearchParams(location.hash.slice(1));
    if (!params.has("arm")) return null;
    const wanted = { arm: params.get("arm"), by: params.get("by"), prompt: Number(params.get("prompt")) || 0 };
    for (const key of ["seed", "step"]) if (params.has(key)) wanted[key] = Number(params.get(key));
    return wanted;
  }

  // ------------------------------------------------------------------ keys, clicks and links
  let navigated = false;
  function navigate(wanted) {
    navigated = true;
    show(wanted);
  }

  function neighbour(list, now, by) {
    return list[Math.min(Math.max(list.indexOf(now) + by, 0), list.length - 1)];
  }

  function moveStep(by) {
    navigate({ step: neighbour(unique(matching(2).map((rollout) => rollout.step)).sort((a, b) => a - b), view.step, by) });
  }

  function moveCompletion(by) {
    const boxes = [...browser.querySelectorAll(".completion")];
    const now = document.activeElement.closest(".completion");
    const next = now ? neighbour(boxes, now, by) : boxes[0];
    if (next) next.focus();
  }

  function moveToken(by) {
    const box = document.activeElement.closest(".completion");
    if (!box) return false;
    const spans = [...box.querySelectorAll(".token")];
    const next = document.activeElement.classList.contains("token") ? neighbour(spans, document.activeElement, by) : spans[0];
    if (next) next.focus();
    return true;
  }

  const KEYS = {
    j: () => moveCompletion(1), ArrowDown: () => moveCompletion(1), k: () => moveCompletion(-1), ArrowUp: () => moveCompletion(-1),
    ArrowRight: () => moveToken(1), ArrowLeft: () => moveToken(-1),
    n: () => navigate({ prompt: view.prompt + 1 }), p: () => navigate({ prompt: view.prompt - 1 }),
    "]": () => moveStep(1), "[": () => moveStep(-1), "?": () => $("help").showModal(),
    Enter: () => (document.activeElement.classList.contains("token") ? toggleAlternative(document.activeElement) : false), Escape: () => close(),
  };
  measures.slice(0, 9).forEach(({ key }, index) => { KEYS[index + 1] = () => navigate({ by: key }); });

  /** Tells whether a key is for the rollout browser: it has the focus, or nothing has it and the browser is visible. */
  function acceptsKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return false;
    if (root.contains(document.activeElement)) {
      const usesArrows = document.activeElement.matches("select, input, pre, .alternative ul");
      return !(usesArrows && (event.key.startsWith("Arrow") || document.activeElement.matches("select")));
    }
    const { top, bottom } = browser.getBoundingClientRect();
    return document.activeElement === document.body && !event.key.startsWith("Arrow") && top < innerHeight && bottom > 0;
  }

  document.addEventListener("keydown", (event) => {
    if (!Object.hasOwn(KEYS, event.key) || !acceptsKey(event)) return;
    const inside = document.activeElement.closest(".completion");
    if (KEYS[event.key]() === false) return;
    event.preventDefault();
    if (inside && !inside.isConnected) root.focus({ preventScroll: true }); // the focused completion is gone
  });
  for (const key of LEVELS) $(key).addEventListener("change", (event) => navigate({ [key]: key === "arm" ? event.target.value : Number(event.target.value) }));
  $("prompt").addEventListener("change", (event) => navigate({ prompt: Number(event.target.value) }));
  browser.addEventListener("change", (event) => { if (event.target.name === "shade") navigate({ by: event.target.value }); });
  for (const kind of ["mouseover", "focusin"]) {
    browser.addEventListener(kind, (event) => {
      const span = event.target.closest(".token");
      if (span) showReadout(span);
    });
  }
  browser.addEventListener("click", (event) => {
    const span = event.target.closest(".token");
    if (span && !String(getSelection())) toggleAlternative(span); // selecting text opens nothing
  });
  $("help-button").addEventListener("click", () => $("help").showModal());
  window.addEventListener("hashchange", () => {
    const wanted = viewFromHash();
    if (wanted) navigate(wanted);
  });

  browser.hidden = false;
  const wanted = viewFromHash();
  navigated = wanted !== null;
  const last = rollouts.reduce((best, rollout) => Math.max(best, rollout.step), 0);
  show(wanted || { step: last });
  const mixed = matching(LEVELS.length).findIndex(({ answers }) => new Set(answers.map((completion) => completion.correct)).size > 1);
  if (!wanted && mixed > 0) show({ prompt: mixed }); // the first prompt with both correct and wrong completions
  if (wanted) root.scrollIntoView();
})();
