// The rollout browser: what is shown follows from `view`, and `view` is kept in the address's hash.
(() => {
  "use strict";
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const rollouts = read("rollout-data");
  const measures = read("measure-data");
  const $ = (id) => document.getElementById(id);

  // ------------------------------------------------------------------ arms that are chosen in a legend
  const chosen = new Set();
  const choices = [...document.querySelectorAll("[data-choose]")].map((item) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...item.childNodes);
    item.append(button);
    button.addEventListener("click", () => {
      const arm = item.dataset.choose;
      if (!chosen.delete(arm)) chosen.add(arm);
      bringOut();
    });
    return [item.dataset.choose, button];
  });
  function bringOut() {
    document.body.classList.toggle("chosen-arms", chosen.size > 0);
    choices.forEach(([arm, button]) => button.setAttribute("aria-pressed", chosen.has(arm)));
    document.querySelectorAll("figure [data-arm]").forEach((part) => {
      part.classList.toggle("chosen", chosen.has(part.dataset.arm) || part.dataset.arm === "0");
    });
    // in an SVG what comes last is on top
    layers.forEach(([parent, parts]) => parent.append(
      ...parts.filter((part) => !chosen.has(part.dataset.arm)), ...parts.filter((part) => chosen.has(part.dataset.arm)),
    ));
  }
  const layers = [...new Set([...document.querySelectorAll("figure [data-arm]")].map((part) => part.parentNode))]
    .map((parent) => [parent, [...parent.children]]);
  bringOut();
  if (matchMedia("(min-width: 60rem)").matches) { // where there is room for them beside the figure
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
  const under = (upto) => rollouts.filter((rollout) => LEVELS.slice(0, upto).every((key) => rollout[key] === view[key]));
  const number = (value) => {
    if (value === null || value === undefined) return "not recorded";
    const text = Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(3);
    return /[1-9]/.test(text) ? text.replace("-", "−") : text.replace("-", "");
  };
  const brief = (value) => number(value).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");

  // ------------------------------------------------------------------ what is shown
  function nearest(options, wanted) {
    if (options.includes(wanted)) return wanted;
    if (typeof wanted !== "number") return options[0];
    return options.reduce((best, option) => (Math.abs(option - wanted) < Math.abs(best - wanted) ? option : best));
  }

  /** Takes a wanted view, and shows the nearest that there is. */
  function show(wanted) {
    const options = {};
    view = { ...view, ...wanted };
    LEVELS.forEach((key, depth) => {
      options[key] = unique(under(depth).map((rollout) => rollout[key]));
      if (key !== "arm") options[key].sort((a, b) => a - b);
      view[key] = nearest(options[key], view[key]);
    });
    const here = under(LEVELS.length);
    const same = wanted.prompt === undefined ? here.findIndex((rollout) => rollout.prompt === view.text) : -1;
    view.prompt = same >= 0 ? same : Math.min(Math.max(view.prompt || 0, 0), here.length - 1);
    view.text = here[view.prompt].prompt;
    if (!measures.some((measure) => measure.key === view.by)) view.by = measures.length ? measures[0].key : "";
    LEVELS.forEach((key) => fill($(key), options[key].map((value) => [String(value), String(value)]), String(view[key])));
    fill($("prompt"), titles(here).map((text, index) => [String(index), `${index + 1}. ${text}`]), String(view.prompt));
    draw(here[view.prompt]);
    shade();
    remember();
  }

  /** The prompts on a line each, from the word where they begin to differ. */
  function titles(here) {
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

  function draw(rollout) {
    $("prompt-text").textContent = rollout.prompt;
    const right = [], wrong = [];
    rollout.answers.forEach((answer, index) => (answer.correct ? right : wrong).push(card(answer, index)));
    const unscored = rollout.answers.some((answer) => answer.correct === null);
    column("correct", `Correct (${right.length})`, right);
    column("wrong", `Wrong${unscored ? " or not scored" : ""} (${wrong.length})`, wrong);
    drawTree(rollout.answers);
    $("readout").replaceChildren(make("span", "mark", "Point at a token, or move to it with the arrow keys, to read its numbers."));
  }

  function column(id, heading, cards) {
    $(`${id}-heading`).textContent = heading;
    $(id).replaceChildren(...(cards.length ? cards : [make("p", "quiet", "None.")]));
  }

  function card(answer, index) {
    const box = make("article", "answer");
    box.tabIndex = 0;
    box.answer = answer;
    const verdict = answer.correct === null ? "not scored" : answer.correct ? "correct" : "wrong";
    box.setAttribute("aria-label", `Answer ${index + 1}, ${verdict}`);
    const facts = [`Answer ${index + 1}`, `${answer.correct ? "✓" : answer.correct === null ? "?" : "✗"} ${verdict}`, `reward ${brief(answer.reward)}`];
    facts.push(answer.recorded === false ? "tokens not recorded" : `${answer.tokens.length} token${answer.tokens.length === 1 ? "" : "s"}`);
    if (answer.finish) facts.push({ stop: "ended", length: "cut off" }[answer.finish] || answer.finish);
    if (answer.parent !== undefined) facts.push(offspring(answer));
    box.append(make("header", "", facts.join(" · ")));
    const text = make("div", "tokens");
    let place = 0;
    (answer.blocks || []).forEach(([begin, end, kind, label]) => {
      for (; place < begin; place += 1) text.append(tokenOf(answer, place));
      const block = make("div", `block ${kind}`);
      block.append(make("div", "block-label", label));
      for (; place < end; place += 1) block.append(tokenOf(answer, place));
      text.append(block);
    });
    for (; place < answer.tokens.length; place += 1) text.append(tokenOf(answer, place));
    box.append(text);
    return box;
  }

  function tokenOf(answer, place) {
    const span = make("span", "token");
    span.tabIndex = -1;
    span.place = place;
    span.classList.toggle("has", Boolean(alternative(answer, place)));
    span.classList.toggle("shared", place < (answer.forked_at || 0));
    if (answer.tokens[place] === "") span.append(make("span", "mark", "∅"));
    answer.tokens[place].split(/(\n)/).forEach((part) => {
      if (part === "\n") span.append(make("span", "mark", "↵"), "\n");
      else if (part) span.append(part);
    });
    return span;
  }

  // ------------------------------------------------------------------ answers that branch off others
  function parentOf(answer, answers) {
    return answer.parent === undefined ? undefined : answers.find((other) => other.row === answer.parent);
  }

  function offspring(answer) {
    const { answers } = under(LEVELS.length)[view.prompt], parent = parentOf(answer, answers);
    const whose = parent ? `answer ${answers.indexOf(parent) + 1}` : "an answer that is not shown";
    return `branches off ${whose} after ${answer.forked_at} token${answer.forked_at === 1 ? "" : "s"}`;
  }

  /** Parents before their branches, which stand below them from the last place to the first: no two lines cross. */
  function inOrder(answers) {
    const ordered = [];
    const add = (answer) => {
      if (ordered.includes(answer)) return;
      ordered.push(answer);
      answers.filter((other) => parentOf(other, answers) === answer)
        .sort((a, b) => b.forked_at - a.forked_at).forEach(add);
    };
    answers.filter((answer) => !parentOf(answer, answers)).forEach(add);
    answers.forEach(add); // a file may say that two branch off each other
    return ordered;
  }

  function drawTree(answers) {
    const figure = $("tree");
    figure.hidden = !answers.some((answer) => answer.parent !== undefined);
    if (figure.hidden) return;
    const svg = $("tree-lines"), HEIGHT = 22, LEFT = 92, WIDTH = 640;
    const part = (name, attributes) => {
      const element = document.createElementNS(svg.namespaceURI, name);
      Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
      return element;
    };
    const ordered = inOrder(answers);
    const longest = Math.max(1, ...answers.map((answer) => answer.tokens.length));
    const x = (place) => LEFT + (place / longest) * (WIDTH - LEFT - 12);
    const y = (answer) => ordered.indexOf(answer) * HEIGHT + HEIGHT / 2;
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${ordered.length * HEIGHT}`);
    svg.replaceChildren(...ordered.map((answer) => {
      const index = answers.indexOf(answer), parent = parentOf(answer, answers);
      const verdict = answer.correct === null ? "not scored" : answer.correct ? "correct" : "wrong";
      const start = answer.forked_at || 0;
      const line = part("g", { class: `branch ${answer.correct ? "right" : "wrong"}`, role: "button", tabindex: 0 });
      line.setAttribute("aria-label", `Answer ${index + 1}, ${verdict}${answer.parent === undefined ? "" : `, ${offspring(answer)}`}`);
      line.append(part("rect", { class: "reach", x: 0, y: y(answer) - HEIGHT / 2, width: WIDTH, height: HEIGHT }));
      const label = part("text", { x: 4, y: y(answer) + 4 });
      label.textContent = `${answer.correct === null ? "?" : answer.correct ? "✓" : "✗"} Answer ${index + 1}`;
      const from = parent ? `M${x(start)} ${y(parent)}V${y(answer)}` : `M${x(start)} ${y(answer)}`;
      line.append(label, part("path", { d: `${from}H${Math.max(x(answer.tokens.length), x(start) + 2)}` }));
      if (parent) line.append(part("circle", { cx: x(start), cy: y(parent), r: 3 }));
      (answer.blocks || []).filter(([begin, , kind]) => kind === "output" && begin >= start).forEach(([begin, end]) => {
        line.append(part("rect", { class: "said", x: x(begin), y: y(answer) - 4, width: Math.max(x(end) - x(begin), 2), height: 8 }));
      });
      const go = () => [...browser.querySelectorAll(".answer")].find((box) => box.answer === answer).focus();
      line.addEventListener("click", go);
      line.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        event.stopPropagation();
        go();
      });
      return line;
    }));
    const all = answers.reduce((sum, answer) => sum + answer.tokens.length, 0);
    const shared = answers.reduce((sum, answer) => sum + (answer.forked_at || 0), 0);
    const forks = answers.filter((answer) => answer.parent !== undefined).length;
    $("tree-caption").textContent = `${forks} of ${answers.length} answers branch off another, at the dots; ${shared} of their ${all} tokens were not sampled again and stand in italics. Boxes are outputs of a tool. A click on a line goes to its answer.`;
  }

  // ------------------------------------------------------------------ shading
  function value(answer, measure, place) {
    const record = answer[measure.key];
    const raw = Array.isArray(record) ? record[place] : record;
    if (raw === null || raw === undefined) return null;
    return measure.exponential ? Math.exp(raw) : raw;
  }

  /** How strongly a value shades its token, from −1 to 1. */
  function strength(x, { scale, low, high, centre }) {
    const share = scale === "diverging" ? (x - centre) / (high - centre) : scale === "reversed" ? (high - x) / (high - low) : (x - low) / (high - low);
    return Math.min(1, Math.max(scale === "diverging" ? -1 : 0, share));
  }

  function shade() {
    const measure = measures.find(({ key }) => key === view.by);
    if (!measure) return;
    browser.querySelectorAll("input[name=shade]").forEach((input) => { input.checked = input.value === view.by; });
    browser.querySelectorAll(".answer").forEach((box) => box.querySelectorAll(".token").forEach((span) => {
      const x = value(box.answer, measure, span.place);
      const t = x === null ? 0 : strength(x, measure);
      const tone = measure.scale !== "diverging" ? "--shade" : t < 0 ? "--below" : "--above";
      span.classList.toggle("none", x === null);
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
    $("scale-low").textContent = `${measure.label} ${measure.scale === "diverging" ? "≤ " : ""}${brief(measure.low)}`;
    $("scale-high").textContent = `${measure.exponential ? "" : "≥ "}${brief(measure.high)}${unit}`;
    $("scale-bar").className = measure.scale;
  }

  function tell(span) {
    const answer = span.closest(".answer").answer;
    browser.querySelectorAll(".token.shown").forEach((other) => other.classList.remove("shown"));
    span.classList.add("shown");
    const parts = [make("code", "", JSON.stringify(answer.tokens[span.place])), make("span", "mark", `token ${span.place + 1} of ${answer.tokens.length}`)];
    for (const measure of measures) {
      const x = value(answer, measure, span.place);
      const part = make("span", "", `${measure.label} `);
      const shown = measure.scale === "nominal" && x !== null ? measure.names[x] : number(x);
      part.append(make("b", "", shown), x !== null && measure.unit ? ` ${measure.unit}` : "");
      parts.push(part);
    }
    if (alternative(answer, span.place)) parts.push(make("span", "mark", "Enter or a click: its alternative"));
    $("readout").replaceChildren(...parts);
  }

  // ------------------------------------------------------------------ the best alternative to a token
  /** The most likely other token, and both sets of continuations where the token was replaced; null where not known. */
  function alternative(answer, place) {
    const impact = (answer.impacts || {})[place];
    if (impact) return { token: impact.other.token, probability: impact.other.probability, own: impact.sampled.probability, impact };
    const token = (answer.other || [])[place];
    if (!token) return null;
    const [logp, own] = [(answer.other_logp || [])[place], Array.isArray(answer.logp) ? answer.logp[place] : answer.logp];
    const chance = (x) => (x === null || x === undefined ? null : Math.exp(x));
    return { token, probability: chance(logp), own: chance(own) };
  }

  /** Opens the panel of a token under its answer, or closes it where it is open. */
  function look(span) {
    const box = span.closest(".answer"), was = span.classList.contains("open");
    close();
    if (was) return;
    span.classList.add("open");
    const panel = panelOf(box.answer, span.place);
    box.append(panel);
    panel.scrollIntoView({ block: "nearest" });
  }

  function close() {
    const open = browser.querySelector(".alternative");
    browser.querySelectorAll(".token.open").forEach((span) => span.classList.remove("open"));
    if (open) open.remove();
    return Boolean(open);
  }

  function panelOf(answer, place) {
    const panel = make("section", "alternative");
    panel.setAttribute("aria-label", `Alternative to token ${place + 1}`);
    panel.setAttribute("role", "status");
    const found = alternative(answer, place), line = make("p");
    line.append("Token ", make("code", "", JSON.stringify(answer.tokens[place])));
    panel.append(line);
    if (!found) {
      line.append(": no alternative was recorded.");
      return panel;
    }
    if (found.own !== null) line.append(`, probability ${number(found.own)}`);
    line.append("; best alternative ", make("code", "", JSON.stringify(found.token)), `, probability ${number(found.probability)}${found.impact ? " (by the policy that went on from both)" : ""}.`);
    if (!found.impact) return panel;
    const { mean, low, high, p, sampled, other } = found.impact;
    const text = make("p", "", "Impact ");
    text.append(make("b", "", number(mean)), ` with a 95 % interval from ${number(low)} to ${number(high)}; p ${p !== null && p < 0.001 ? "below 0.001" : number(p)} after correction for the number of tokens.`);
    const sides = make("div", "sides");
    sides.append(sideOf(sampled), sideOf(other));
    panel.append(text, sides);
    return panel;
  }

  function sideOf({ token, correct, count, texts }) {
    const part = make("section"), list = make("ul");
    part.append(make("h4", "", `From ${JSON.stringify(token)}: ${correct} of ${count} correct`));
    texts.forEach(([continuation, right]) => {
      const item = make("li", right ? "right" : "wrong"), sign = make("b", "", right ? "✓" : "✗");
      sign.setAttribute("aria-label", right ? "correct" : "wrong");
      sign.setAttribute("role", "img");
      item.append(sign, continuation ? make("code", "", continuation) : make("span", "mark", "the answer ends here"));
      list.append(item);
    });
    if (texts.length < count) list.append(make("li", "mark", `and ${count - texts.length} more`));
    list.tabIndex = 0;
    part.append(list);
    return part;
  }

  // ------------------------------------------------------------------ the address
  function remember() {
    const { arm, seed, step, prompt, by } = view;
    const hash = "#" + new URLSearchParams({ arm, seed, step, prompt, by });
    $("link").href = hash;
    if (!asked) return; // a page that was merely opened keeps its address
    try {
      history.replaceState(null, "", hash);
    } catch { // some browsers refuse this for a file
      location.hash = hash;
    }
  }

  function recalled() {
    const given = new URLSearchParams(location.hash.slice(1));
    if (!given.has("arm")) return null;
    const wanted = { arm: given.get("arm"), by: given.get("by"), prompt: Number(given.get("prompt")) || 0 };
    for (const key of ["seed", "step"]) if (given.has(key)) wanted[key] = Number(given.get(key));
    return wanted;
  }

  // ------------------------------------------------------------------ what the reader does
  let asked = false;
  function want(wanted) {
    asked = true;
    show(wanted);
  }

  function other(list, now, by) {
    return list[Math.min(Math.max(list.indexOf(now) + by, 0), list.length - 1)];
  }

  function step(by) {
    want({ step: other(unique(under(2).map((rollout) => rollout.step)).sort((a, b) => a - b), view.step, by) });
  }

  function answer(by) {
    const boxes = [...browser.querySelectorAll(".answer")];
    const now = document.activeElement.closest(".answer");
    const next = now ? other(boxes, now, by) : boxes[0];
    if (next) next.focus();
  }

  function token(by) {
    const box = document.activeElement.closest(".answer");
    if (!box) return false;
    const spans = [...box.querySelectorAll(".token")];
    const next = document.activeElement.classList.contains("token") ? other(spans, document.activeElement, by) : spans[0];
    if (next) next.focus();
    return true;
  }

  const KEYS = {
    j: () => answer(1), ArrowDown: () => answer(1), k: () => answer(-1), ArrowUp: () => answer(-1),
    ArrowRight: () => token(1), ArrowLeft: () => token(-1),
    n: () => want({ prompt: view.prompt + 1 }), p: () => want({ prompt: view.prompt - 1 }),
    "]": () => step(1), "[": () => step(-1), "?": () => $("help").showModal(),
    Enter: () => (document.activeElement.classList.contains("token") ? look(document.activeElement) : false), Escape: () => close(),
  };
  measures.slice(0, 9).forEach(({ key }, index) => { KEYS[index + 1] = () => want({ by: key }); });

  /** Keys act where the browser has the focus, or where nothing has it and the browser is in sight. */
  function listening(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return false;
    if (root.contains(document.activeElement)) {
      const takes = document.activeElement.matches("select, input, pre, .alternative ul");
      return !(takes && (event.key.startsWith("Arrow") || document.activeElement.matches("select")));
    }
    const { top, bottom } = browser.getBoundingClientRect();
    return document.activeElement === document.body && !event.key.startsWith("Arrow") && top < innerHeight && bottom > 0;
  }

  document.addEventListener("keydown", (event) => {
    if (!Object.hasOwn(KEYS, event.key) || !listening(event)) return;
    const inside = document.activeElement.closest(".answer");
    if (KEYS[event.key]() === false) return;
    event.preventDefault();
    if (inside && !inside.isConnected) root.focus({ preventScroll: true }); // the answer that had the focus is gone
  });
  for (const key of LEVELS) $(key).addEventListener("change", (event) => want({ [key]: key === "arm" ? event.target.value : Number(event.target.value) }));
  $("prompt").addEventListener("change", (event) => want({ prompt: Number(event.target.value) }));
  browser.addEventListener("change", (event) => { if (event.target.name === "shade") want({ by: event.target.value }); });
  for (const kind of ["mouseover", "focusin"]) {
    browser.addEventListener(kind, (event) => {
      const span = event.target.closest(".token");
      if (span) tell(span);
    });
  }
  browser.addEventListener("click", (event) => {
    const span = event.target.closest(".token");
    if (span && !String(getSelection())) look(span); // text can be marked without opening anything
  });
  $("help-button").addEventListener("click", () => $("help").showModal());
  window.addEventListener("hashchange", () => {
    const wanted = recalled();
    if (wanted) want(wanted);
  });

  browser.hidden = false;
  const wanted = recalled();
  asked = wanted !== null;
  const last = rollouts.reduce((best, rollout) => Math.max(best, rollout.step), 0);
  show(wanted || { step: last });
  const both = under(LEVELS.length).findIndex(({ answers }) => new Set(answers.map((answer) => answer.correct)).size > 1);
  if (!wanted && both > 0) show({ prompt: both }); // first one that has something to compare
  if (wanted) root.scrollIntoView();
})();
