"use strict";
// Charts, sortable tables and small live figures, without any library. Data comes from <script type="application/json">.
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const $$ = (query, root = document) => Array.from(root.querySelectorAll(query));
  const node = (tag, attributes = {}, text) => {
    const e = document.createElementNS(NS, tag);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    if (text !== undefined) e.textContent = text;
    return e;
  };
  const html = (tag, attributes = {}, text) => {
    const e = document.createElement(tag);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    if (text !== undefined) e.textContent = text;
    return e;
  };
  const colour = (family) => `var(--f-${family.replace(/[^a-z]+/gi, "-")}, var(--f-other))`;
  const trim = (v, digits = 3) => (v === 0 ? "0" : String(Number(v.toPrecision(digits))));

  function format(v, unit) {
    if (v === null || v === undefined) return "";
    if (unit === "bytes") {
      const powers = ["B", "kB", "MB", "GB", "TB"];
      let i = 0;
      while (Math.abs(v) >= 1000 && i < powers.length - 1) { v /= 1000; i++; }
      return `${trim(v)} ${powers[i]}`;
    }
    if (unit === "tokens") return v >= 1024 && v % 1024 === 0 ? `${v / 1024}k` : Math.round(v).toLocaleString("en");
    if (unit === "share") return `${trim(100 * v)} %`;
    const a = Math.abs(v);
    const s = a >= 1e5 || (a > 0 && a < 1e-3) ? v.toExponential(1).replace("e+", "e") : a >= 1000 ? Math.round(v).toLocaleString("en") : trim(v);
    return unit && unit !== "steps" ? `${s} ${unit}` : s;
  }

  function scale(log, low, high, from, to) {
    const f = log ? Math.log10 : (v) => v;
    const a = f(low), b = f(high);
    return (v) => (b === a ? (from + to) / 2 : from + ((f(v) - a) / (b - a)) * (to - from));
  }

  function ticks(axis, low, high, values, room) {
    if (axis.unit === "tokens") { // measured lengths are the natural marks
      const all = [...new Set(values)].sort((a, b) => a - b);
      const every = Math.ceil(all.length / Math.max(2, Math.floor(room / 46)));
      return all.filter((_, i) => (all.length - 1 - i) % every === 0);
    }
    if (!axis.log) {
      const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw || 1));
      const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) || raw || 1;
      const out = [];
      for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) out.push(Math.abs(v) < step * 1e-9 ? 0 : v);
      return out;
    }
    const decades = Math.log10(high / low);
    const multiples = decades > 3 ? [1] : decades > 1.3 ? [1, 3] : [1, 2, 3, 5, 7];
    const out = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
      for (const m of multiples) { const v = m * 10 ** p; if (v >= low && v <= high) out.push(v); }
    return out;
  }

  // Shape tells members of a family apart, colour tells families apart.
  const SHAPES = [
    (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
    (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
    (r) => `M0,${-1.25 * r}L${1.2 * r},${r}H${-1.2 * r}z`,
    (r) => `M0,${-1.4 * r}L${1.4 * r},0L0,${1.4 * r}L${-1.4 * r},0z`,
    (r) => `M0,${1.25 * r}L${1.2 * r},${-r}H${-1.2 * r}z`,
  ];
  const DASHES = ["", "6 3", "2 3", "8 3 2 3", "12 3"];

  function at(points, x) { // a curve between its measured lengths, straight on log axes
    for (let i = 1; i < points.length; i++) {
      const [x0, y0] = points[i - 1], [x1, y1] = points[i];
      if (x >= x0 && x <= x1) {
        const t = Math.log(x / x0) / Math.log(x1 / x0);
        return Math.exp(Math.log(y0) + t * (Math.log(y1) - Math.log(y0)));
      }
    }
    return null;
  }

  function chart(box) {
    const spec = JSON.parse(document.getElementById(box.dataset.spec).textContent);
    const names = [...new Map(spec.views.flatMap((v) => v.series.map((s) => [s.name, s.family])))];
    const counts = {}, look = {};
    for (const [name, family] of names) {
      counts[family] = (counts[family] ?? -1) + 1;
      look[name] = { family, shape: SHAPES[counts[family] % 5], dash: DASHES[counts[family] % 5] };
    }
    const state = { view: 0, on: new Set(spec.chosen ?? names.map((n) => n[0])), only: false, hot: null };
    const head = html("div", { class: "head" });
    const plot = html("div", { class: "plot" });
    const legend = html("div", { class: "legend", role: "group", "aria-label": "series" });
    box.append(head, plot, legend);
    if (spec.views.length > 1) {
      const select = html("select", { "aria-label": "what is shown" });
      spec.views.forEach((v, i) => select.append(html("option", { value: i }, v.label)));
      select.onchange = () => { state.view = Number(select.value); draw(); };
      head.append(select);
    } else head.append(html("b", {}, spec.views[0].label));
    if (names.length > 7) {
      const label = html("label"), check = html("input", { type: "checkbox" });
      check.onchange = () => { state.only = check.checked; draw(); };
      label.append(check, " only the chosen");
      const all = html("button", { type: "button", class: "theme" }, "choose all");
      all.onclick = () => {
        const every = names.every((n) => state.on.has(n[0]));
        state.on = new Set(every ? spec.chosen : names.map((n) => n[0]));
        all.textContent = every ? "choose all" : "choose few";
        draw();
      };
      head.append(label, all);
    }
    const families = [...new Set(names.map((n) => n[1]))];
    for (const family of families) {
      const group = html("span", { class: "group" });
      legend.append(group);
      if (families.length > 1) group.append(html("span", { class: "fam" }, family));
      for (const [name] of names.filter((n) => n[1] === family)) {
        const button = html("button", { type: "button", "data-name": name, style: `--c:${colour(family)}` });
        const icon = node("svg", { viewBox: "-8 -6 16 12", "aria-hidden": "true" });
        icon.append(node("path", { class: "dot", d: look[name].shape(3.6) }));
        button.append(icon, name);
        button.onclick = () => { state.on.has(name) ? state.on.delete(name) : state.on.add(name); draw(); };
        button.onpointerenter = button.onfocus = () => heat(name);
        button.onpointerleave = button.onblur = () => heat(null);
        group.append(button);
      }
    }
    const tip = html("div", { class: "tip", role: "status", hidden: "" });
    let places = [];

    function heat(name) {
      state.hot = name;
      for (const g of $$("g[data-name]", plot)) g.classList.toggle("hot", g.dataset.name === name);
      plot.firstChild?.classList.toggle("dim", name !== null);
      const g = name && $$("g.s", plot).find((e) => e.dataset.name === name);
      if (g) g.parentNode.append(g);
    }

    function draw() {
      const view = spec.views[state.view];
      const width = Math.max(260, plot.clientWidth), narrow = width < 620;
      const series = view.series.filter((s) => s.points.length && (!state.only || state.on.has(s.name)));
      const height = narrow ? 350 : Math.max(420, 60 + 14.5 * series.length);
      const lines = series.some((s) => s.points.length > 1), longest = Math.max(0, ...series.map((s) => s.name.length));
      const m = { left: 62, right: narrow ? 14 : lines ? 28 + 7.2 * longest : 30, top: 30, bottom: 44 };
      plot.replaceChildren();
      places = [];
      const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${view.label}: ${series.map((s) => s.name).join(", ")}` });
      plot.append(svg, tip);
      tip.hidden = true;
      for (const b of $$("button[data-name]", legend)) {
        b.setAttribute("aria-pressed", state.on.has(b.dataset.name));
        b.hidden = !view.series.some((s) => s.name === b.dataset.name && s.points.length);
      }
      if (!series.length) {
        svg.append(node("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing chosen: press a name below"));
        return;
      }
      const xs = series.flatMap((s) => s.points.map((p) => p[0]));
      const ys = series.flatMap((s) => s.points.flatMap((p) => (s.points.length > 60 ? [p[1]] : p.slice(1).filter((v) => v > 0 || !view.y.log))));
      const pad = (axis, low, high) => {
        if (axis.range) return axis.range;
        if (axis.log) { const r = (high / low) ** 0.04 || 1; return low === high ? [low / 2, high * 2] : [low / r, high * r]; }
        const r = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
        return [low - r, high + r];
      };
      const [x0, x1] = pad(view.x, Math.min(...xs), Math.max(...xs)), [y0, y1] = pad(view.y, Math.min(...ys), Math.max(...ys));
      const X = scale(view.x.log, x0, x1, m.left, width - m.right), Y = scale(view.y.log, y0, y1, height - m.bottom, m.top);
      for (const v of ticks(view.x, x0, x1, xs, width - m.left - m.right)) {
        svg.append(node("line", { class: "gridline", x1: X(v), x2: X(v), y1: m.top, y2: height - m.bottom }));
        svg.append(node("text", { x: X(v), y: height - m.bottom + 16, "text-anchor": "middle" }, format(v, view.x.unit === "ms" ? "" : view.x.unit)));
      }
      for (const v of ticks(view.y, y0, y1, ys, height)) {
        svg.append(node("line", { class: "gridline", x1: m.left, x2: width - m.right, y1: Y(v), y2: Y(v) }));
        svg.append(node("text", { x: m.left - 7, y: Y(v) + 4, "text-anchor": "end" }, format(v, ["bytes", "share"].includes(view.y.unit) ? view.y.unit : "")));
      }
      svg.append(node("text", { x: (m.left + width - m.right) / 2, y: height - 6, "text-anchor": "middle" }, view.x.label));
      svg.append(node("text", { x: 4, y: 11 }, view.y.label));
      svg.append(node("line", { class: "axis", x1: m.left, x2: width - m.right, y1: height - m.bottom, y2: height - m.bottom }));

      const labels = [];
      const order = [...series].sort((a, b) => state.on.has(a.name) - state.on.has(b.name));
      for (const s of order) {
        const { family, shape, dash } = look[s.name], on = state.on.has(s.name);
        const g = node("g", { class: `s${on ? " on" : ""}${state.hot === s.name ? " hot" : ""}`, "data-name": s.name, style: `--c:${colour(family)}` });
        const line = s.points.map((p) => `${X(p[0]).toFixed(1)},${Y(p[1]).toFixed(1)}`);
        if (s.points.length > 1) {
          const spread = s.points.filter((p) => p.length > 3);
          if (spread.length > 1) {
            const up = spread.map((p) => `${X(p[0]).toFixed(1)},${Y(p[3]).toFixed(1)}`), down = spread.map((p) => `${X(p[0]).toFixed(1)},${Y(p[2]).toFixed(1)}`).reverse();
            g.append(node("path", { class: "band", d: `M${up.join("L")}L${down.join("L")}z` }));
          }
          g.append(node("path", { class: "line", d: `M${line.join("L")}`, ...(dash && s.points.length < 60 ? { "stroke-dasharray": dash } : {}) }));
        }
        const dots = s.points.length < 60;
        for (const p of s.points) {
          const place = { s, name: s.name, x: X(p[0]), y: Y(p[1]), p, view };
          places.push(place);
          if (dots) g.append(node("path", { class: "dot", d: shape(s.points.length === 1 ? 5 : on ? 3.6 : 2.6), transform: `translate(${place.x.toFixed(1)},${place.y.toFixed(1)})` }));
        }
        const last = s.points[s.points.length - 1];
        labels.push({ g, on, name: s.name, x: X(last[0]), y: Y(last[1]), single: s.points.length === 1 });
        svg.append(g);
      }
      // names stand at the ends of the lines, pushed apart; on a phone only those chosen have room
      const shown = labels.filter((l) => !narrow || l.on || !lines).sort((a, b) => a.y - b.y);
      const gap = 13.5, end = Math.max(...labels.map((l) => l.x));
      if (!lines) scatterNames(shown, m, width, height);
      else {
        shown.forEach((l, i) => { l.to = Math.max(l.y, i ? shown[i - 1].to + gap : m.top); });
        for (let i = shown.length - 1, floor = height - m.bottom + 8; i >= 0; i--) { shown[i].to = Math.min(shown[i].to, floor); floor = shown[i].to - gap; }
        for (const l of shown) {
          if (narrow) {
            l.g.append(node("text", { class: "name", x: l.x - 8, y: l.to - 9, "text-anchor": "end" }, l.name));
          } else {
            // only from the last of all points: from an earlier one it would look like measurements that went on
            if (l.x > end - 1) l.g.append(node("path", { class: "leader", d: `M${l.x + 5},${l.y}L${width - m.right + 14},${l.to}` }));
            l.g.append(node("text", { class: "name", x: width - m.right + 17, y: l.to + 4 }, l.name));
          }
        }
      }
      // from where on a mechanism costs less than softmax of its own form: a ring on its curve
      if (view.marks) {
        let row = 0;
        const crowded = narrow && Object.keys(view.marks).filter((n) => state.on.has(n)).length > 2; // then only the ring
        for (const [name, x] of Object.entries(view.marks)) {
          const own = series.find((s) => s.name === name);
          const y = own && at(own.points, x);
          if (!y) continue;
          const on = state.on.has(name);
          const g = node("g", { class: `cross${on ? " on" : ""}`, "data-name": name, style: `--c:${colour(look[name].family)}` });
          const cy = Y(y), ty = m.top + 10 + (on ? 15 * row++ : 0), left = X(x) > (width - m.right + m.left) * 0.5;
          g.append(node("line", { x1: X(x), x2: X(x), y1: ty + 4, y2: height - m.bottom }), node("circle", { cx: X(x), cy, r: 6.5 }));
          if (!crowded) g.append(node("text", { x: X(x) + (left ? -5 : 5), y: ty, "text-anchor": left ? "end" : "start" }, `${name} wins from T = ${format(x, "tokens")}`));
          svg.append(g);
        }
      }
      svg.onpointermove = svg.onpointerdown = (event) => {
        const r = svg.getBoundingClientRect();
        const px = ((event.clientX - r.left) / r.width) * width, py = ((event.clientY - r.top) / r.height) * height;
        let best = null, distance = 42 ** 2;
        for (const q of places) {
          const d = (q.x - px) ** 2 + (q.y - py) ** 2 - (state.on.has(q.name) ? 40 : 0);
          if (d < distance) [best, distance] = [q, d];
        }
        if (!best) { tip.hidden = true; if (state.hot) heat(null); return; }
        if (state.hot !== best.name) heat(best.name);
        show(best, width);
      };
      svg.onpointerleave = () => { tip.hidden = true; heat(null); };
    }

    function scatterNames(shown, m, width, height) {
      const used = shown.map((l) => [l.x - 6, l.y - 6, l.x + 6, l.y + 6]); // the points themselves
      for (const l of [...shown].sort((a, b) => b.on - a.on)) {
        const w = 7.4 * l.name.length, tries = [[9, 4, "start"], [-9, 4, "end"], [0, -10, "middle"], [0, 18, "middle"], [9, -9, "start"], [-9, 17, "end"], [9, 17, "start"], [-9, -9, "end"]];
        for (const [dx, dy, anchor] of tries) {
          const left = l.x + dx - (anchor === "end" ? w : anchor === "middle" ? w / 2 : 0), top = l.y + dy - 10;
          const box = [left, top, left + w, top + 13];
          const inside = left > m.left - 4 && box[2] < width - 4 && top > 12 && box[3] < height - m.bottom + 2;
          if (inside && !used.some((u) => box[0] < u[2] && u[0] < box[2] && box[1] < u[3] && u[1] < box[3])) {
            used.push(box);
            l.g.append(node("text", { class: "name", x: l.x + dx, y: l.y + dy, "text-anchor": anchor }, l.name));
            break;
          }
        }
      }
    }

    function show(place, width) {
      const { p, view, s } = place;
      const lines = [s.form ? `${s.name}, ${s.form}` : s.name, `${view.x.short ?? view.x.label} ${format(p[0], view.x.unit)}`, `${view.y.short ?? view.y.label} ${format(p[1], view.y.unit)}`];
      if (p.length > 3) lines[2] += ` (${format(p[2], "")} to ${format(p[3], view.y.unit === "bytes" ? "bytes" : "")})`;
      const ratio = s.ratios?.[p[0]];
      if (ratio && s.name !== "softmax") lines.push(ratio <= 1 ? `${trim(1 / ratio)} x less than softmax` : `${trim(ratio)} x more than softmax`);
      tip.textContent = lines.join("\n");
      tip.hidden = false;
      const k = plot.clientWidth / width;
      const x = Math.min(Math.max(4, place.x * k + 14), plot.clientWidth - tip.offsetWidth - 4);
      const y = place.y * k - tip.offsetHeight - 12;
      tip.style.left = `${x}px`;
      tip.style.top = `${y < 0 ? place.y * k + 16 : y}px`;
    }
    let known = 0;
    new ResizeObserver(() => { if (plot.clientWidth !== known) { known = plot.clientWidth; draw(); } }).observe(plot);
    draw();
  }

  function sortable(table) {
    const body = table.tBodies[0];
    $$("thead th", table).forEach((th, column) => {
      const button = th.querySelector("button");
      if (!button) return;
      button.onclick = () => {
        const down = th.getAttribute("aria-sort") === "ascending";
        $$("thead th", table).forEach((other) => other.removeAttribute("aria-sort"));
        th.setAttribute("aria-sort", down ? "descending" : "ascending");
        const key = (row) => {
          const cell = row.cells[column];
          const v = cell.dataset.v ?? cell.textContent.trim();
          const n = v === "" ? NaN : Number(v);
          return Number.isNaN(n) ? v : n;
        };
        const rows = Array.from(body.rows).map((row) => [key(row), row]);
        rows.sort(([a], [b]) => {
          if (a === "" || b === "") return (a === "") - (b === ""); // what was not measured stays below
          const c = typeof a === typeof b ? (typeof a === "number" ? a - b : a.localeCompare(b)) : typeof a === "number" ? -1 : 1;
          return down ? -c : c;
        });
        body.append(...rows.map((r) => r[1]));
      };
    });
    const filter = document.querySelector(`input[data-filter="${table.id}"]`);
    if (filter) filter.oninput = () => {
      const words = filter.value.toLowerCase().split(/\s+/);
      for (const row of body.rows) row.hidden = !words.every((w) => row.textContent.toLowerCase().includes(w));
    };
  }

  // Who attends to whom: weights ride in the opacity of the pictures, and a row of them is laid over the digit.
  function who(figure) {
    const pixels = JSON.parse(figure.dataset.pixels), side = Math.round(Math.sqrt(pixels.length));
    const canvas = figure.querySelector("canvas"), say = figure.querySelector(".say"), context = canvas.getContext("2d");
    const images = $$(".maps img", figure);
    let now = { image: images[0], row: Number(figure.dataset.row) };
    const read = (image) => {
      if (!image.weights) {
        const c = html("canvas", { width: image.naturalWidth, height: image.naturalHeight }), g = c.getContext("2d", { willReadFrequently: true });
        g.drawImage(image, 0, 0);
        const data = g.getImageData(0, 0, c.width, c.height).data;
        image.weights = Array.from({ length: c.width * c.height }, (_, i) => data[4 * i + 3] / 255); // roots of weights, as the pictures show them
      }
      return image.weights;
    };
    function paint() {
      if (!now.image.complete || !now.image.naturalWidth) { now.image.onload = paint; return; }
      const T = pixels.length, weights = read(now.image), k = 24;
      canvas.width = canvas.height = side * k;
      for (let j = 0; j < T; j++) {
        const x = (j % side) * k, y = Math.floor(j / side) * k, ink = 255 - Math.round((pixels[j] / 16) * 200);
        context.fillStyle = `rgb(${ink},${ink},${ink})`;
        context.fillRect(x, y, k, k);
        context.fillStyle = `rgba(217,72,15,${0.85 * weights[now.row * T + j]})`;
        context.fillRect(x, y, k, k);
      }
      context.strokeStyle = "#0b66b8";
      context.lineWidth = 3;
      context.strokeRect((now.row % side) * k + 1.5, Math.floor(now.row / side) * k + 1.5, k - 3, k - 3);
      const seen = weights.slice(now.row * T, now.row * T + T).filter((w) => w > 0).length;
      say.textContent = `${now.image.alt}: pixel ${now.row} (framed) reads ${seen} of ${T} pixels, the redder the more.`;
    }
    for (const image of images) image.onpointermove = image.onpointerdown = (e) => {
      const r = image.getBoundingClientRect();
      now = { image, row: Math.min(pixels.length - 1, Math.max(0, Math.floor(((e.clientY - r.top) / r.height) * pixels.length))) };
      paint();
    };
    canvas.onpointermove = canvas.onpointerdown = (e) => {
      const r = canvas.getBoundingClientRect(), cell = (v, size) => Math.min(side - 1, Math.max(0, Math.floor((v / size) * side)));
      now.row = cell(e.clientY - r.top, r.height) * side + cell(e.clientX - r.left, r.width);
      paint();
    };
    paint();
  }

  // (AB)C = A(BC): what each order costs, for the N, d and d' of the sliders.
  function associativity(box) {
    const [n, d, dd] = $$("input", box), big = (v) => v.toLocaleString("en");
    const update = () => {
      const N = 2 ** Number(n.value), a = 2 ** Number(d.value), b = 2 ** Number(dd.value);
      const quadratic = (a + b) * N * N, linear = 2 * a * b * N, crossing = (2 * a * b) / (a + b);
      $$("output", box).forEach((o, i) => { o.textContent = big([N, a, b][i]); });
      const most = Math.max(quadratic, linear);
      box.querySelector(".quadratic").textContent = big(quadratic);
      box.querySelector(".linear").textContent = big(linear);
      box.querySelector(".bar-quadratic").style.width = `${(100 * quadratic) / most}%`;
      box.querySelector(".bar-linear").style.width = `${(100 * linear) / most}%`;
      const ratio = quadratic / linear;
      box.querySelector(".verdict").textContent = ratio === 1 ? `Both orders cost the same: N = ${big(N)} is the crossover.`
        : ratio > 1 ? `(V Kᵀ) Q takes ${trim(ratio)} times fewer multiplications; the orders cost the same at N = 2dd'/(d + d') = ${trim(crossing, 4)}.`
        : `V (Kᵀ Q) takes ${trim(1 / ratio)} times fewer multiplications: N is below the crossover N = 2dd'/(d + d') = ${trim(crossing, 4)}.`;
      const T = JSON.stringify([a, b]);
      if (box.dataset.drawn !== T) { box.dataset.drawn = T; curve(box.querySelector("svg"), a, b); }
      const mark = box.querySelector("svg .here");
      mark.setAttribute("x1", position(N)); mark.setAttribute("x2", position(N));
    };
    const position = (N) => 46 + ((Math.log2(N) - 3) / 15) * 540;
    const curve = (svg, a, b) => {
      svg.replaceChildren();
      const lengths = Array.from({ length: 16 }, (_, i) => 2 ** (i + 3));
      const q = lengths.map((N) => (a + b) * N * N), l = lengths.map((N) => 2 * a * b * N);
      const Y = scale(true, Math.min(q[0], l[0]), Math.max(q[15], l[15]), 190, 14);
      for (const N of lengths.filter((_, i) => i % 3 === 0)) {
        svg.append(node("line", { class: "gridline", x1: position(N), x2: position(N), y1: 14, y2: 190 }));
        svg.append(node("text", { x: position(N), y: 206, "text-anchor": "middle" }, format(N, "tokens")));
      }
      for (const [name, values, c] of [["(d + d')N²", q, "var(--f-exact)"], ["2dd'N", l, "var(--f-kernels)"]]) {
        svg.append(node("path", { d: "M" + lengths.map((N, i) => `${position(N)},${Y(values[i])}`).join("L"), fill: "none", stroke: c, "stroke-width": 2.6 }));
        svg.append(node("text", { x: 592, y: Y(values[15]) + 4, style: `fill:${c};font-weight:700` }, name));
      }
      const N = (2 * a * b) / (a + b);
      svg.append(node("circle", { cx: position(N), cy: Y(2 * a * b * N), r: 6, fill: "none", stroke: "var(--f-clustering)", "stroke-width": 2.4 }));
      svg.append(node("text", { x: position(N) + 10, y: Y(2 * a * b * N) + 14, style: "fill:var(--f-clustering);font-weight:600" }, `N = ${trim(N, 4)}`));
      svg.append(node("line", { class: "here", y1: 14, y2: 190, stroke: "var(--accent)", "stroke-dasharray": "4 3" }));
      svg.append(node("text", { x: 300, y: 222, "text-anchor": "middle" }, "sequence length N"), node("text", { x: 4, y: 10 }, "multiplications"));
    };
    for (const input of [n, d, dd]) input.oninput = update;
    update();
  }

  function theme() {
    const button = document.querySelector("button[data-theme-switch]");
    if (!button) return;
    const root = document.documentElement, kinds = ["auto", "light", "dark"];
    let kind = "auto";
    try { kind = localStorage.getItem("subquad-theme") ?? "auto"; } catch { /* a page from disk may have no storage */ }
    const apply = () => { kind === "auto" ? root.removeAttribute("data-theme") : root.setAttribute("data-theme", kind); button.textContent = kind; };
    button.onclick = () => {
      kind = kinds[(kinds.indexOf(kind) + 1) % 3];
      try { localStorage.setItem("subquad-theme", kind); } catch { /* as above */ }
      apply();
    };
    if (!root.hasAttribute("data-theme")) apply();
  }

  theme();
  $$("table.sort").forEach(sortable);
  $$(".chart[data-spec]").forEach(chart);
  $$(".who[data-pixels]").forEach(who);
  $$(".live.associativity").forEach(associativity);
})();
