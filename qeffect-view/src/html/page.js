"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const tip = document.getElementById("tip");
  const kinds = Object.fromEntries(data.kinds.map((kind) => [kind.letter, kind]));
  const scenes = data.scenes;
  const longest = Math.max(1, ...scenes.map((scene) => scene.makespan));
  // One view for all pictures: times are compared by eye.
  const view = { from: 0, to: longest, critical: false, memory: true, beside: false };
  let hover = null; // { scene, bar }
  let pinned = null;
  const LEFT = 62, RIGHT = 14, AXIS = 30, LANE = 28, MEMORY = 16, GAP = 9;

  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const dark = () => root.dataset.theme === "dark";
  const key = (scene, bar) => `${scene.stage[bar]}${scene.kind[bar]}${scene.microbatch[bar]}`;
  const rankOf = (scene, bar) => {
    let low = 0, high = scene.ranks;
    while (low + 1 < high) {
      const middle = (low + high) >> 1;
      if (scene.starts[middle] <= bar) low = middle; else high = middle;
    }
    return low;
  };
  const paint = (scene, bar) => kinds[scene.kind[bar]][dark() ? "dark" : "light"][scene.virtual - 1][scene.number[bar]];

  for (const scene of scenes) {
    scene.users = scene.kind.split("").map(() => []);
    scene.needs.forEach((needs, bar) => needs.forEach((need) => scene.users[need].push(bar)));
    scene.onPath = new Set(scene.critical);
    scene.peak = Math.max(1, ...scene.peaks.map((peak) => peak[0]));
  }

  // ---- page
  const pictures = scenes.map((scene, index) => {
    const section = document.createElement("section");
    section.setAttribute("aria-label", scene.title);
    if (scenes.length > 1) {
      const h2 = document.createElement("h2");
      h2.textContent = scene.title;
      section.append(h2);
    }
    section.append(facts(scene, index));
    const canvas = document.createElement("canvas");
    canvas.className = "plot";
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Timeline of ${scene.title}: makespan ${scene.makespan}, bubble ${scene.bubble}`);
    section.append(canvas);
    document.getElementById("scenes").append(section);
    return { scene, index, canvas, width: 0, height: 0 };
  });

  function facts(scene, index) {
    const box = document.createElement("div");
    box.className = "facts";
    const first = scenes[0];
    const fact = (name, value, read, unit = "") => {
      const div = document.createElement("div");
      const b = document.createElement("b");
      b.textContent = `${value}${unit}`;
      div.append(`${name} `, b);
      if (index > 0 && read(scene) !== read(first)) {
        const by = Math.round((read(scene) - read(first)) * 10) / 10;
        const change = document.createElement("span");
        change.className = by < 0 ? "better" : "worse";
        change.textContent = ` ${by > 0 ? "+" : "−"}${Math.abs(by)}`;
        div.append(change);
      }
      box.append(div);
    };
    fact("makespan", scene.makespan, (s) => s.makespan);
    fact("bubble", scene.bubble, (s) => s.bubble, ` (${scene.bubblePercent} %)`);
    fact("idle inside a rank", scene.idle, (s) => s.idle);
    const peak = (n) => (s) => Math.max(...s.peaks.map((p) => p[n]));
    fact("peak slots", peak(0)(scene), peak(0));
    fact("tapes", peak(1)(scene), peak(1));
    fact("works", peak(2)(scene), peak(2));
    return box;
  }

  function legend() {
    const box = document.getElementById("legend");
    box.replaceChildren();
    const most = Math.max(...scenes.map((scene) => scene.virtual));
    const swatch = (draw) => {
      const canvas = document.createElement("canvas");
      canvas.width = 36; canvas.height = 24;
      const g = canvas.getContext("2d");
      g.scale(2, 2);
      draw(g);
      return canvas;
    };
    for (const kind of data.kinds) {
      const entry = document.createElement("span");
      for (let number = 0; number < most; number++) {
        const [fill, ink] = kind[dark() ? "dark" : "light"][most - 1][number];
        entry.append(swatch((g) => box_(g, kind.letter, fill, ink, 0, 0, 18, 12, number, most)));
      }
      entry.append(` ${kind.letter} ${kind.name}`);
      box.append(entry);
    }
    const idle = document.createElement("span");
    idle.append(swatch((g) => { g.fillStyle = pattern(g, css("--lane"), css("--hatch"), 7); g.fillRect(0, 0, 18, 12); }), " idle");
    box.append(idle);
    if (most > 1) {
      const entry = document.createElement("span");
      entry.textContent = "the stripe below a box grows with the virtual stage";
      box.append(entry);
    }
  }

  // ---- drawing
  const patterns = new Map();
  function pattern(g, back, line, size) {
    const name = `${back} ${line} ${size} ${devicePixelRatio}`;
    if (!patterns.has(name)) {
      const scale = Math.max(1, Math.round(devicePixelRatio));
      const tile = document.createElement("canvas");
      tile.width = tile.height = size * scale;
      const t = tile.getContext("2d");
      t.scale(scale, scale);
      t.fillStyle = back;
      t.fillRect(0, 0, size, size);
      t.strokeStyle = line;
      t.lineWidth = 1.1;
      t.beginPath();
      for (const shift of [-size, 0, size]) { t.moveTo(shift, size); t.lineTo(shift + size, 0); }
      t.stroke();
      const made = g.createPattern(tile, "repeat");
      made.setTransform(new DOMMatrix().scale(1 / scale));
      patterns.set(name, made);
    }
    return patterns.get(name);
  }

  function shade(hex, by) {
    const part = (at) => Math.round(parseInt(hex.slice(at, at + 2), 16) * by).toString(16).padStart(2, "0");
    return `#${part(1)}${part(3)}${part(5)}`;
  }

  function box_(g, letter, fill, ink, x, y, w, h, number, most) {
    g.fillStyle = letter === "W" ? pattern(g, fill, shade(fill, 0.84), 5) : fill;
    if (w > 6) { g.beginPath(); g.roundRect(x, y, w, h, 2); g.fill(); } else g.fillRect(x, y, Math.max(w, 0.5), h);
    if (number > 0 && w > 2) {
      g.globalAlpha *= 0.55;
      g.fillStyle = ink;
      g.fillRect(x, y + h - 2.5, (w * number) / (most - 1), 2.5);
      g.globalAlpha /= 0.55;
    }
  }

  const pitch = () => LANE + (view.memory ? MEMORY + 3 : 0) + GAP;
  const laneAt = (rank) => AXIS + 6 + rank * pitch();
  const xOf = (picture, time) => LEFT + ((time - view.from) / (view.to - view.from)) * (picture.width - LEFT - RIGHT);
  const timeOf = (picture, x) => view.from + ((x - LEFT) / (picture.width - LEFT - RIGHT)) * (view.to - view.from);

  function rectangle(picture, bar) {
    const { scene } = picture;
    const x = xOf(picture, scene.start[bar]);
    const width = xOf(picture, scene.end[bar]) - x;
    let y = laneAt(rankOf(scene, bar)), height = LANE;
    if (scene.branch[bar]) {
      const [number, of] = scene.branch[bar];
      height = LANE / of - (number + 1 < of ? 1 : 0);
      y += (LANE / of) * number;
    }
    return { x, y, width: width - (width > 4 ? 1 : 0), height };
  }

  function step(least) {
    for (let power = 1; ; power *= 10) for (const m of [1, 2, 5]) if (m * power >= least) return m * power;
  }

  function draw(picture) {
    const { scene, canvas } = picture;
    const ratio = devicePixelRatio || 1;
    picture.width = canvas.clientWidth;
    picture.height = laneAt(scene.ranks) + 4;
    canvas.style.height = `${picture.height}px`;
    canvas.width = Math.round(picture.width * ratio);
    canvas.height = Math.round(picture.height * ratio);
    const g = canvas.getContext("2d");
    g.scale(ratio, ratio);
    g.clearRect(0, 0, picture.width, picture.height);
    const font = getComputedStyle(document.body).fontFamily;
    const soft = css("--soft"), ink = css("--ink"), line = css("--line");
    const idle = pattern(g, css("--lane"), css("--hatch"), 7);

    g.save();
    g.beginPath();
    g.rect(LEFT, 0, picture.width - LEFT - RIGHT, picture.height);
    g.clip();
    const from = Math.max(0, view.from), to = Math.min(scene.makespan, view.to);
    const ticks = step(((view.to - view.from) * 62) / (picture.width - LEFT - RIGHT));
    g.font = `11px ${font}`;
    g.textBaseline = "middle";
    for (let time = Math.ceil(view.from / ticks) * ticks; time <= view.to; time += ticks) {
      const x = xOf(picture, time);
      g.fillStyle = line;
      g.fillRect(x, AXIS - 6, 1, picture.height);
      g.fillStyle = soft;
      g.fillText(String(time), x + 3, 12);
    }
    const focus = pinned || hover;
    const related = focus && focus.scene === scene ? new Set([focus.bar, ...scene.needs[focus.bar], ...scene.users[focus.bar]]) : null;
    for (let rank = 0; rank < scene.ranks; rank++) {
      const y = laneAt(rank);
      g.fillStyle = idle;
      g.fillRect(xOf(picture, from), y, xOf(picture, to) - xOf(picture, from), LANE);
      for (let bar = firstVisible(scene, rank); bar < scene.starts[rank + 1] && scene.start[bar] < view.to; bar++) {
        const r = rectangle(picture, bar);
        const [fill, text] = paint(scene, bar);
        g.globalAlpha = (view.critical && !scene.onPath.has(bar)) || (related && !related.has(bar)) ? 0.38 : 1;
        box_(g, scene.kind[bar], fill, text, r.x, r.y, r.width, r.height, scene.number[bar], scene.virtual);
        label(g, scene, bar, r, text, font);
      }
      g.globalAlpha = 1;
      if (view.memory) memory(g, picture, rank, y + LANE + 2, soft);
    }
    if (focus && focus.scene === scene) {
      for (const need of scene.needs[focus.bar]) arrow(g, picture, need, focus.bar, ink);
      for (const user of scene.users[focus.bar]) arrow(g, picture, focus.bar, user, ink);
      const r = rectangle(picture, focus.bar);
      g.strokeStyle = ink;
      g.lineWidth = 2;
      g.beginPath();
      g.roundRect(r.x - 1, r.y - 1, Math.max(r.width, 2) + 2, r.height + 2, 3);
      g.stroke();
    }
    g.restore();
    g.fillStyle = ink;
    g.font = `12px ${font}`;
    g.textBaseline = "middle";
    for (let rank = 0; rank < scene.ranks; rank++) g.fillText(`rank ${rank}`, 10, laneAt(rank) + LANE / 2);
    if (view.memory) {
      g.fillStyle = soft;
      g.font = `10px ${font}`;
      for (let rank = 0; rank < scene.ranks; rank++) g.fillText(`${scene.peaks[rank][0]} live`, 10, laneAt(rank) + LANE + 2 + MEMORY / 2);
    }
  }

  function firstVisible(scene, rank) {
    let low = scene.starts[rank], high = scene.starts[rank + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (scene.end[middle] < view.from) low = middle + 1; else high = middle;
    }
    return Math.max(scene.starts[rank], low - 4);
  }

  function label(g, scene, bar, r, color, font) {
    if (r.width < 7) return;
    const plain = String(scene.microbatch[bar]);
    const texts = [scene.kind[bar] + plain, plain];
    if (scene.virtual > 1) texts.unshift(key(scene, bar));
    const sizes = r.height < 20 ? [9, 8] : [11, 10, 9, 8];
    for (const text of texts) {
      for (const size of sizes) {
        g.font = `500 ${size}px ${font}`;
        const width = g.measureText(text).width;
        if (width + 2 <= r.width) {
          g.fillStyle = color;
          g.fillText(text, r.x + (r.width - width) / 2, r.y + r.height / 2 + (scene.number[bar] > 0 ? -0.5 : 0.5));
          return;
        }
      }
    }
  }

  /// Live microbatches as steps: solid tapes, lighter what is held for weight gradients only.
  function memory(g, picture, rank, y, color) {
    const { scene } = picture;
    const unit = MEMORY / scene.peak;
    const area = (n, alpha) => {
      g.globalAlpha = alpha;
      g.fillStyle = color;
      g.beginPath();
      let x = LEFT;
      for (let bar = firstVisible(scene, rank); bar < scene.starts[rank + 1] && scene.start[bar] < view.to; bar++) {
        x = xOf(picture, scene.start[bar]);
        const next = bar + 1 < scene.starts[rank + 1] ? scene.start[bar + 1] : scene.end[bar];
        const height = scene.live[bar][n] * unit;
        g.rect(x, y + MEMORY - height, Math.max(xOf(picture, next) - x, 0), height);
      }
      g.fill();
      g.globalAlpha = 1;
    };
    area(0, 0.28);
    area(1, 0.42);
  }

  function arrow(g, picture, from, to, color) {
    const a = rectangle(picture, from), b = rectangle(picture, to);
    g.strokeStyle = color;
    g.fillStyle = color;
    g.lineWidth = 1.6;
    g.beginPath();
    if (rankOf(picture.scene, from) === rankOf(picture.scene, to)) {
      // On one rank: over the boxes between them.
      const [x0, x1] = [a.x + a.width / 2, b.x + Math.min(b.width / 2, 9)];
      const top = Math.min(a.y, b.y), rise = Math.min(13, 4 + (x1 - x0) / 14);
      g.moveTo(x0, a.y);
      g.bezierCurveTo(x0 + 6, top - rise * 1.4, x1 - 6, top - rise * 1.4, x1, b.y - 5);
      g.stroke();
      g.beginPath();
      g.moveTo(x1, b.y);
      g.lineTo(x1 - 4, b.y - 7);
      g.lineTo(x1 + 4, b.y - 7);
      g.fill();
      return;
    }
    const [x0, y0, x1, y1] = [a.x + a.width, a.y + a.height / 2, b.x, b.y + b.height / 2];
    const bend = Math.max(14, Math.abs(x1 - x0) / 2.2);
    g.moveTo(x0, y0);
    g.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1 - 5, y1);
    g.stroke();
    g.beginPath();
    g.moveTo(x1, y1);
    g.lineTo(x1 - 7, y1 - 4);
    g.lineTo(x1 - 7, y1 + 4);
    g.fill();
  }

  // ---- details
  function details(scene, bar) {
    const rank = rankOf(scene, bar);
    const rows = [
      ["stage, microbatch", `${scene.stage[bar]}, ${scene.microbatch[bar]}`],
      ["rank, step", `${rank}, ${scene.step[bar]}`],
      ["time", `${scene.start[bar]} to ${scene.end[bar]}`],
    ];
    if (scene.slot[bar] !== null) rows.push(["slot", String(scene.slot[bar])]);
    const [slots, tapes, works] = scene.live[bar];
    rows.push(["live on the rank", `slots ${slots}, tapes ${tapes}, works ${works}`]);
    const names = (bars) => bars.map((other) => `${key(scene, other)} (rank ${rankOf(scene, other)}, ends ${scene.end[other]})`).join(", ");
    if (scene.needs[bar].length) rows.push(["needs", names(scene.needs[bar])]);
    if (scene.users[bar].length) rows.push(["needed by", scene.users[bar].map((other) => `${key(scene, other)} (rank ${rankOf(scene, other)})`).join(", ")]);
    if (scene.onPath.has(bar)) rows.push(["critical path", "yes"]);
    return rows;
  }

  function showTip(x, y) {
    const focus = hover || pinned;
    if (!focus) { tip.hidden = true; return; }
    const { scene, bar } = focus;
    const head = document.createElement("strong");
    head.textContent = key(scene, bar);
    const list = document.createElement("dl");
    for (const [name, value] of details(scene, bar)) {
      const dt = document.createElement("dt"), dd = document.createElement("dd");
      dt.textContent = name;
      dd.textContent = value;
      list.append(dt, dd);
    }
    tip.replaceChildren(head, ` ${kinds[scene.kind[bar]].name}`, list);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth - 8 ? x - box.width - 40 : x + 16;
    tip.style.left = `${Math.max(6, left)}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(6, y - box.height - 14) : y + 18}px`;
  }

  function tipAtBar(focus) {
    const picture = pictures.find((p) => p.scene === focus.scene);
    const r = rectangle(picture, focus.bar), at = picture.canvas.getBoundingClientRect();
    showTip(at.left + r.x + r.width, at.top + r.y + r.height - 8);
  }

  function hit(picture, x, y) {
    const { scene } = picture;
    if (x < LEFT || x > picture.width - RIGHT) return null;
    for (let rank = 0; rank < scene.ranks; rank++) {
      if (y < laneAt(rank) || y >= laneAt(rank) + LANE) continue;
      for (let bar = firstVisible(scene, rank); bar < scene.starts[rank + 1] && scene.start[bar] <= view.to; bar++) {
        const r = rectangle(picture, bar);
        if (x >= r.x && x <= r.x + Math.max(r.width, 1.5) && y >= r.y && y <= r.y + r.height) return { scene, bar };
      }
    }
    return null;
  }

  // ---- view
  let asked = false;
  function redraw() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; pictures.forEach(draw); remember(); });
  }
  function move(from, to) {
    const least = Math.min(longest, 2), span = Math.min(Math.max(to - from, least), longest);
    const slack = span * 0.05;
    view.from = Math.max(-slack, Math.min(from, longest + slack - span));
    view.to = view.from + span;
    if (span >= longest) { view.from = 0; view.to = longest; }
    redraw();
  }
  function zoom(by, around) {
    move(around - (around - view.from) * by, around + (view.to - around) * by);
  }
  const middle = () => (view.from + view.to) / 2;
  const fit = () => move(0, longest);
  function press(id, on) { document.getElementById(`do-${id}`).setAttribute("aria-pressed", String(on)); }
  function toggle(name) { view[name] = !view[name]; press(name, view[name]); redraw(); }
  function beside(on) {
    view.beside = on && scenes.length > 1;
    document.getElementById("scenes").classList.toggle("beside", view.beside);
    document.getElementById("do-layout").textContent = view.beside ? "stacked" : "side by side";
    redraw();
  }
  function theme(name) {
    root.dataset.theme = name;
    legend();
    redraw();
  }

  let remembered = location.hash;
  function remember() {
    const parts = [];
    if (pinned) parts.push(`pin=${scenes.indexOf(pinned.scene)}.${pinned.bar}`);
    if (view.to - view.from < longest) parts.push(`time=${+view.from.toFixed(2)}..${+view.to.toFixed(2)}`);
    if (view.critical) parts.push("critical");
    if (view.beside) parts.push("beside");
    const hash = parts.length ? `#${parts.join("&")}` : "";
    if (hash === remembered) return;
    remembered = hash;
    try { history.replaceState(null, "", hash || location.pathname + location.search); } catch { /* some viewers forbid it */ }
  }
  function recall() {
    let wanted = null;
    for (const part of location.hash.slice(1).split("&")) {
      const [name, value = ""] = part.split("=");
      if (name === "pin") {
        const [scene, bar] = value.split(".").map(Number);
        if (scenes[scene] && bar >= 0 && bar < scenes[scene].kind.length) wanted = { scene: scenes[scene], bar };
      } else if (name === "time") {
        const [from, to] = value.split("..").map(Number);
        if (to > from) move(from, to);
      } else if (name === "critical") { view.critical = true; press("critical", true);
      } else if (name === "beside") beside(true);
      else if (name === "dark" || name === "light") root.dataset.theme = name;
    }
    if (wanted) pin(wanted);
  }

  function pin(focus) {
    pinned = focus;
    hover = null;
    if (focus) {
      const { scene, bar } = focus;
      const span = view.to - view.from;
      if (scene.start[bar] < view.from) move(scene.start[bar] - span * 0.1, scene.start[bar] + span * 0.9);
      else if (scene.end[bar] > view.to) move(scene.end[bar] - span * 0.9, scene.end[bar] + span * 0.1);
      tipAtBar(focus);
    } else tip.hidden = true;
    redraw();
  }

  for (const picture of pictures) {
    const { canvas } = picture;
    let grip = null, moved = false;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const by = (event.deltaX / picture.width) * (view.to - view.from);
        move(view.from + by, view.to + by);
      } else zoom(Math.exp(Math.sign(event.deltaY) * Math.min(Math.abs(event.deltaY), 120) * 0.0016), timeOf(picture, place(event)[0]));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      grip = { x: event.clientX, from: view.from, to: view.to };
      moved = false;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (grip) {
        const by = ((grip.x - event.clientX) / (picture.width - LEFT - RIGHT)) * (grip.to - grip.from);
        if (Math.abs(grip.x - event.clientX) > 3) { moved = true; canvas.classList.add("moving"); }
        if (moved) { tip.hidden = true; move(grip.from + by, grip.to + by); }
        return;
      }
      const found = hit(picture, ...place(event));
      if ((found && found.bar) !== (hover && hover.bar) || (found && found.scene) !== (hover && hover.scene)) { hover = found; redraw(); }
      if (hover) showTip(event.clientX, event.clientY); else if (!pinned) tip.hidden = true; else tipAtBar(pinned);
    });
    const release = (event) => {
      canvas.classList.remove("moving");
      if (grip && !moved && event.type === "pointerup") pin(hit(picture, ...place(event)));
      grip = null;
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => { if (hover) { hover = null; redraw(); } if (pinned) tipAtBar(pinned); else tip.hidden = true; });
  }

  const actions = {
    in: () => zoom(0.7, middle()),
    out: () => zoom(1 / 0.7, middle()),
    fit,
    critical: () => toggle("critical"),
    memory: () => toggle("memory"),
    layout: () => beside(!view.beside),
    theme: () => theme(dark() ? "light" : "dark"),
  };
  for (const [id, action] of Object.entries(actions)) document.getElementById(`do-${id}`).addEventListener("click", action);
  document.getElementById("do-layout").hidden = scenes.length < 2;
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const sideways = event.key === "ArrowLeft" ? -1 : event.key === "ArrowRight" ? 1 : 0;
    if (sideways && pinned) {
      const { scene, bar } = pinned, rank = rankOf(scene, bar), next = bar + sideways;
      if (next >= scene.starts[rank] && next < scene.starts[rank + 1]) pin({ scene, bar: next });
    } else if (sideways) {
      const by = (view.to - view.from) * 0.12 * sideways;
      move(view.from + by, view.to + by);
    } else if (event.key === "+" || event.key === "=") actions.in();
    else if (event.key === "-") actions.out();
    else if (event.key === "0") fit();
    else if (event.key === "c") actions.critical();
    else if (event.key === "m") actions.memory();
    else if (event.key === "s" && scenes.length > 1) actions.layout();
    else if (event.key === "t") actions.theme();
    else if (event.key === "Escape") pin(null);
    else return;
    event.preventDefault();
  });
  addEventListener("resize", () => { redraw(); if (pinned) requestAnimationFrame(() => tipAtBar(pinned)); });
  addEventListener("hashchange", () => { recall(); redraw(); if (pinned) tipAtBar(pinned); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => theme(event.matches ? "dark" : "light"));

  root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  recall();
  legend();
  pictures.forEach(draw);
  if (pinned) tipAtBar(pinned);
  root.dataset.ready = String(scenes.reduce((sum, scene) => sum + scene.kind.length, 0));
})();
