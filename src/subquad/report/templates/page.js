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

  function format(v, unit, digits = 3) {
    if (v === null || v === undefined) return "";
    if (unit === "bytes") {
      const powers = ["B", "kB", "MB", "GB", "TB"];
      let i = 0;
      while (Math.abs(v) >= 1000 && i < powers.length - 1) { v /= 1000; i++; }
      return `${trim(v, digits)} ${powers[i]}`;
    }
    if (unit === "tokens") return v >= 1024 && v % 1024 === 0 ? `${v / 1024}k` : Math.round(v).toLocaleString("en");
    if (unit === "share") return `${trim(100 * v, digits)} %`;
    const a = Math.abs(v);
    const s = a >= 1e5 || (a > 0 && a < 1e-3) ? v.toExponential(digits - 2).replace("e+", "e") : a >= 1000 ? Math.round(v).toLocaleString("en") : trim(v, digits);
    return unit && unit !== "steps" ? `${s} ${unit}` : s;
  }

  function scale(log, low, high, from, to) {
    const f = log ? Math.log10 : (v) => v;
    const a = f(low), b = f(high);
    return (v) => (b === a ? (from + to) / 2 : from + ((f(v) - a) / (b - a)) * (to - from));
  }

  function evenly(low, high, step) {
    const out = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) out.push(i * step);
    return out;
  }

  // At least three marks on every axis (an axis of lengths may have fewer), and no more than fit.
  function ticks(axis, low, high, values, room) {
    const most = Math.max(3, Math.floor(room / 46));
    const thinned = (all) => all.filter((_, i) => (all.length - 1 - i) % Math.ceil(all.length / most) === 0);
    if (axis.unit === "tokens") return thinned([...new Set(values)].sort((a, b) => a - b)); // measured lengths are the natural marks
    if (axis.log && high > 3 * low) {
      const powers = evenly(Math.floor(Math.log10(low)), Math.ceil(Math.log10(high)), 1).map((p) => 10 ** p);
      for (const multiples of [[1], [1, 3], [1, 2, 5], [1, 2, 3, 5, 7]]) {
        const out = powers.flatMap((p) => multiples.map((m) => m * p)).filter((v) => v >= low && v <= high);
        if (out.length > 3) return thinned(out);
      }
    }
    const power = 10 ** Math.floor(Math.log10(high - low || 1));
    let out = [];
    for (const multiple of [5, 2, 1, 0.5, 0.2, 0.1]) {
      const step = axis.unit === "steps" ? Math.max(1, multiple * power) : multiple * power;
      const finer = evenly(low, high, step);
      if (out.length > 2 && finer.length > most) break;
      out = finer;
      if (out.length > 3) break;
    }
    return out;
  }

  // Values as text, with enough digits to tell them apart.
  function named(values, unit) {
    for (let digits = 3; ; digits++) {
      const out = values.map((v) => format(v, unit, digits));
      if (digits > 8 || new Set(out).size === out.length) return out;
    }
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

  const height = (s, i) => s.drawn?.[i] ?? s.points[i][1]; // where a point is drawn; `drawn` corrects for a machine that changes its speed

  function at(s, x) { // the value of a curve between measured lengths, straight on log axes
    for (let i = 1; i < s.points.length; i++) {
      const x0 = s.points[i - 1][0], x1 = s.points[i][0], y0 = height(s, i - 1), y1 = height(s, i);
      if (x >= x0 && x <= x1) {
        const t = Math.log(x / x0) / Math.log(x1 / x0);
        return Math.exp(Math.log(y0) + t * (Math.log(y1) - Math.log(y0)));
      }
    }
    return null;
  }

  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `700 12px ${getComputedStyle(document.body).fontFamily}`;
  const wide = (text) => pen.measureText(text).width; // in pixels, in the bold font of charts

  function shortened(text, room) {
    if (wide(text) <= room) return text;
    while (text && wide(`${text}…`) > room) text = text.slice(0, -1);
    return `${text}…`;
  }

  function meets([x1, y1, x2, y2], [left, top, right, bottom]) { // does a line run through a box?
    let from = 0, to = 1;
    for (const [d, low, high] of [[x2 - x1, left - x1, right - x1], [y2 - y1, top - y1, bottom - y1]]) {
      if (d === 0) { if (low > 0 || high < 0) return false; continue; }
      from = Math.max(from, Math.min(low / d, high / d));
      to = Math.min(to, Math.max(low / d, high / d));
    }
    return from <= to;
  }

  const AROUND = [[1, 1], [-1, -1], [1, 0], [-1, 0], [1, -1], [-1, 1], [0, -1], [0, 1]];
  const gap = ({ x, y }, [left, top, right, bottom]) => Math.hypot(Math.max(left - x, x - right, 0), Math.max(top - y, y - bottom, 0));
  // Find a place near a point for one of several texts, without covering a line, a point or other words; null if none.
  // Distant words get a line to their point; near words must be nearer to it than to any other of frame.points.
  function beside(point, texts, near, frame) {
    const { x, y } = point, [left, top, right, bottom] = frame.inside;
    for (const text of texts) {
      const half = wide(text) / 2 + 2;
      for (const distance of [0, 8, 18, 32, 50, 72].map((d) => near + d))
        for (const [sx, sy] of AROUND) {
          const reach = sx && sy ? 0.75 * distance : distance;
          const cx = x + sx * (reach + half), cy = y + sy * (reach + 5), box = [cx - half, cy - 8, cx + half, cy + 8];
          if (box[0] < left || box[1] < top || box[2] > right || box[3] > bottom) continue;
          if (frame.taken.some((b) => box[0] < b[2] && b[0] < box[2] && box[1] < b[3] && b[1] < box[3])) continue;
          const far = distance > near + 10;
          if (!far && frame.points.some((other) => other !== point && gap(other, box) <= gap(point, box) + 2)) continue;
          if (!frame.strokes.some((line) => meets(line, box))) return { text, box, cx, cy, far };
        }
    }
    return null;
  }

  function write(g, kind, point, texts, near, frame) {
    const found = beside(point, texts, near, frame);
    if (!found) return false;
    const { text, box, cx, cy, far } = found;
    if (far) {
      const x = Math.min(Math.max(point.x, box[0]), box[2]), y = Math.min(Math.max(point.y, box[1]), box[3]), part = 7 / Math.hypot(x - point.x, y - point.y);
      g.append(node("line", { class: "leader", x1: point.x + part * (x - point.x), y1: point.y + part * (y - point.y), x2: x, y2: y }));
    }
    g.append(node("text", { class: kind, x: cx, y: cy + 4, "text-anchor": "middle" }, text));
    frame.taken.push(box);
    return true;
  }

  function chart(box) {
    const spec = JSON.parse(document.getElementById(box.dataset.spec).textContent);
    const names = [...new Map(spec.views.flatMap((v) => v.series.map((s) => [s.name, s.family])))];
    const counts = {}, look = {};
    for (const [name, family] of names) {
      counts[family] = (counts[family] ?? -1) + 1;
      look[name] = { family, shape: SHAPES[counts[family] % 5], dash: DASHES[counts[family] % 5] };
    }
    // if there are many lines, only the chosen few are shown at first; points are all shown
    const many = names.length > 7, lined = spec.views.some((v) => v.series.some((s) => s.points.length > 1));
    const state = { view: 0, on: new Set(spec.chosen ?? names.map((n) => n[0])), only: many && lined, hot: null };
    const head = html("div", { class: "head" });
    const plot = html("div", { class: "plot" });
    const legend = html("div", { class: "legend", role: "group", "aria-label": "series" });
    const won = html("p", { class: "won" });
    box.append(head, plot, won, legend);
    if (spec.views.length > 1) {
      const select = html("select", { "aria-label": "what is shown" });
      spec.views.forEach((v, i) => select.append(html("option", { value: i }, v.label)));
      select.onchange = () => { state.view = Number(select.value); draw(); };
      head.append(select);
    } else head.append(html("b", {}, spec.views[0].label));
    if (many) {
      const label = html("label"), check = html("input", { type: "checkbox" });
      check.checked = !state.only;
      check.onchange = () => { state.only = !check.checked; draw(); };
      label.append(check, ` the others too (${names.length} in all)`);
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
    // [low, high] of a point; if the point is not drawn where it was measured, they move with it
    const spread = (s, i) => { const p = s.points[i]; return p.length > 3 ? [p[2], p[3]].map((v) => (v * height(s, i)) / p[1]) : []; };

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
      const lines = series.some((s) => s.points.length > 1);
      // names are to the right of the lines; on a phone there is only room for chosen ones, and a single line needs no name
      const ending = series.filter((s) => series.length > 1 && lines && (!narrow || state.on.has(s.name)));
      const tall = Math.max(narrow ? 350 : 420, 74 + 15.2 * ending.length);
      const longest = Math.max(0, ...ending.map((s) => wide(s.name)));
      const m = { left: narrow ? 50 : 62, right: longest ? Math.min(20 + longest, 0.38 * width) : narrow ? 14 : 30, top: 30, bottom: 44 };
      plot.replaceChildren();
      places = [];
      const svg = node("svg", { viewBox: `0 0 ${width} ${tall}`, height: tall, role: "img", "aria-label": `${view.label}: ${series.map((s) => s.name).join(", ")}` });
      plot.append(svg, tip);
      tip.hidden = true;
      won.replaceChildren();
      for (const b of $$("button[data-name]", legend)) {
        b.setAttribute("aria-pressed", state.on.has(b.dataset.name));
        b.hidden = !view.series.some((s) => s.name === b.dataset.name && s.points.length);
      }
      if (!series.length) {
        svg.append(node("text", { x: width / 2, y: tall / 2, "text-anchor": "middle" }, "nothing chosen: press a name below"));
        return;
      }
      const xs = series.flatMap((s) => s.points.map((p) => p[0]));
      const ys = series.flatMap((s) => s.points.flatMap((p, i) => (s.points.length > 60 ? [height(s, i)] : [height(s, i), ...spread(s, i)].filter((v) => v > 0 || !view.y.log))));
      const pad = (axis, low, high) => {
        if (axis.range) return axis.range;
        if (axis.log) { const r = (high / low) ** 0.04 || 1; return low === high ? [low / 2, high * 2] : [low / r, high * r]; }
        const r = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
        return [low - r, high + r];
      };
      const [x0, x1] = pad(view.x, Math.min(...xs), Math.max(...xs)), [y0, y1] = pad(view.y, Math.min(...ys), Math.max(...ys));
      const X = scale(view.x.log, x0, x1, m.left, width - m.right), Y = scale(view.y.log, y0, y1, tall - m.bottom, m.top);
      const unitOfMark = (axis) => (["bytes", "share", "tokens"].includes(axis.unit) ? axis.unit : ""); // other units are in the label of the axis
      const across = ticks(view.x, x0, x1, xs, width - m.left - m.right), up = ticks(view.y, y0, y1, ys, tall);
      named(across, unitOfMark(view.x)).forEach((text, i) => {
        const x = X(across[i]);
        svg.append(node("line", { class: "gridline", x1: x, x2: x, y1: m.top, y2: tall - m.bottom }));
        svg.append(node("text", { class: "tick x", x, y: tall - m.bottom + 16, "text-anchor": "middle" }, text));
      });
      named(up, unitOfMark(view.y)).forEach((text, i) => {
        const y = Y(up[i]);
        svg.append(node("line", { class: "gridline", x1: m.left, x2: width - m.right, y1: y, y2: y }));
        svg.append(node("text", { class: "tick y", x: m.left - 7, y: y + 4, "text-anchor": "end" }, text));
      });
      svg.append(node("text", { x: (m.left + width - m.right) / 2, y: tall - 6, "text-anchor": "middle" }, view.x.label));
      svg.append(node("text", { x: 4, y: 11 }, view.y.label));
      svg.append(node("line", { class: "axis", x1: m.left, x2: width - m.right, y1: tall - m.bottom, y2: tall - m.bottom }));

      const labels = [], taken = [], strokes = []; // boxes and lines that words must not cover
      const order = [...series].sort((a, b) => state.on.has(a.name) - state.on.has(b.name));
      for (const s of order) {
        const { family, shape, dash } = look[s.name], on = state.on.has(s.name);
        const g = node("g", { class: `s${on ? " on" : ""}${state.hot === s.name ? " hot" : ""}`, "data-name": s.name, style: `--c:${colour(family)}` });
        const path = s.points.map((p, i) => [X(p[0]), Y(height(s, i))]);
        const line = path.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`);
        for (let i = 1; i < path.length; i++) strokes.push([...path[i - 1], ...path[i]]);
        if (s.points.length > 1) {
          const known = s.points.map((p, i) => [X(p[0]), ...spread(s, i).map(Y)]).filter((p) => p.length > 1);
          if (known.length > 1) {
            const high = known.map(([x, , y]) => `${x.toFixed(1)},${y.toFixed(1)}`), low = known.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).reverse();
            g.append(node("path", { class: "band", d: `M${high.join("L")}L${low.join("L")}z` }));
          }
          g.append(node("path", { class: "line", d: `M${line.join("L")}`, ...(dash && s.points.length < 60 ? { "stroke-dasharray": dash } : {}) }));
        }
        const dots = s.points.length < 60;
        for (const [i, p] of s.points.entries()) {
          const place = { s, name: s.name, x: path[i][0], y: path[i][1], p, view };
          places.push(place);
          if (dots) taken.push([place.x - 5, place.y - 5, place.x + 5, place.y + 5]);
          if (dots) g.append(node("path", { class: "dot", d: shape(s.points.length === 1 ? 5 : on ? 3.6 : 2.6), transform: `translate(${place.x.toFixed(1)},${place.y.toFixed(1)})` }));
        }
        const [x, y] = path[path.length - 1];
        labels.push({ g, on, name: s.name, x, y });
        svg.append(g);
      }
      const frame = { X, Y, floor: tall - m.bottom, narrow, taken, strokes, points: labels, inside: [m.left, m.top - 12, width - 2, tall - m.bottom - 3] };
      const end = Math.max(...labels.map((l) => l.x)), ends = labels.filter((l) => ending.some((s) => s.name === l.name)).sort((a, b) => a.y - b.y);
      if (!lines) {
        for (const l of [...labels].sort((a, b) => b.on - a.on)) write(l.g, "name", l, [l.name], 8, frame);
      } else {
        const row = 15.2;
        ends.forEach((l, i) => { l.to = Math.max(l.y, i ? ends[i - 1].to + row : m.top); });
        for (let i = ends.length - 1, floor = tall - m.bottom + 8; i >= 0; i--) { ends[i].to = Math.min(ends[i].to, floor); floor = ends[i].to - row; }
        for (const l of ends) {
          // only from the last point: from an earlier one it would look like more measurements
          if (l.x > end - 1) l.g.append(node("path", { class: "leader", d: `M${l.x + 5},${l.y}L${width - m.right + 14},${l.to}` }));
          l.g.append(node("text", { class: "name", x: width - m.right + 17, y: l.to + 4 }, shortened(l.name, m.right - 18)));
          taken.push([width - m.right + 15, l.to - 8, width, l.to + 8]);
        }
      }
      svg.append(...crossings(view, series, frame));
      svg.onpointermove = svg.onpointerdown = (event) => {
        const r = svg.getBoundingClientRect();
        const px = ((event.clientX - r.left) / r.width) * width, py = ((event.clientY - r.top) / r.height) * tall;
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

    // Show from which length on a mechanism costs less than softmax of its own form: a ring where the lines cross, a dotted
    // line down to the length, words beside the ring if there is room, and a sentence below the plot, ordered by T.
    function crossings(view, series, frame) {
      const rings = Object.entries(view.marks ?? {}).sort((a, b) => a[1] - b[1]).flatMap(([name, length]) => {
        const own = series.find((s) => s.name === name), y = own && at(own, length);
        return y ? [{ name, length, on: state.on.has(name), x: frame.X(length), y: frame.Y(y) }] : [];
      });
      const chosen = rings.filter((r) => r.on);
      frame.points = chosen;
      for (const r of chosen) {
        frame.strokes.push([r.x, r.y + 8, r.x, frame.floor]);
        frame.taken.push([r.x - 8, r.y - 8, r.x + 8, r.y + 8]);
      }
      const groups = rings.map((r) => {
        const g = node("g", { class: `cross${r.on ? " on" : ""}`, "data-name": r.name, style: `--c:${colour(look[r.name].family)}` });
        g.append(node("circle", { cx: r.x, cy: r.y, r: 6.5 }));
        const short = `T = ${r.length.toLocaleString("en")}`;
        const texts = frame.narrow ? [short] : [`${r.name} wins from ${short}`, short], own = r.on ? frame : { ...frame, taken: [...frame.taken] };
        // a dotted line without words would mean nothing
        if (write(g, "from", r, texts, 11, own)) g.append(node("line", { class: "drop", x1: r.x, x2: r.x, y1: r.y + 7, y2: frame.floor }));
        return g;
      });
      const always = (view.throughout ?? []).filter((n) => state.on.has(n) && series.some((s) => s.name === n));
      const name = (n) => html("b", { style: `color:${colour(look[n].family)}` }, n);
      const parts = chosen.map((r) => [name(r.name), ` from T = ${r.length.toLocaleString("en")}`]);
      if (always.length) parts.unshift([...always.flatMap((n, i) => (i ? [", ", name(n)] : [name(n)])), " at every T measured"]);
      if (parts.length) won.append(`${view.wins}: `, ...parts.flatMap((part, i) => (i ? ["; ", ...part] : part)), ".");
      return groups;
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
    const body = table.tBodies[0], scroll = table.parentNode;
    const below = () => scroll.classList.toggle("tall", scroll.scrollTop + scroll.clientHeight < scroll.scrollHeight - 2); // there are more rows below
    scroll.onscroll = below;
    new ResizeObserver(below).observe(scroll);
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
          if (a === "" || b === "") return (a === "") - (b === ""); // rows without a figure stay at the bottom
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

  // Who attends to whom: the opacity of the pictures holds the weights; one row of weights is drawn over the digit.
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
        image.weights = Array.from({ length: c.width * c.height }, (_, i) => data[4 * i + 3] / 255); // square roots of weights, as in the pictures
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

  // (AB)C = A(BC): the cost of each order, for N, d and d' from the sliders.
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
      const svg = box.querySelector("svg");
      width = Math.max(260, svg.clientWidth);
      const drawn = JSON.stringify([a, b, width]);
      if (box.dataset.drawn !== drawn) { box.dataset.drawn = drawn; curve(svg, a, b); }
      const mark = svg.querySelector(".here");
      mark.setAttribute("x1", position(N)); mark.setAttribute("x2", position(N));
    };
    let width = 680;
    const position = (N) => 16 + ((Math.log2(N) - 3) / 15) * (width - 100);
    const curve = (svg, a, b) => {
      svg.setAttribute("viewBox", `0 0 ${width} 228`);
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
        svg.append(node("text", { x: width - 78, y: Y(values[15]) + 4, style: `fill:${c};font-weight:700` }, name));
      }
      const N = (2 * a * b) / (a + b);
      svg.append(node("circle", { cx: position(N), cy: Y(2 * a * b * N), r: 6, fill: "none", stroke: "var(--f-clustering)", "stroke-width": 2.4 }));
      svg.append(node("text", { x: position(N) + 10, y: Y(2 * a * b * N) + 14, style: "fill:var(--f-clustering);font-weight:600" }, `N = ${trim(N, 4)}`));
      svg.append(node("line", { class: "here", y1: 14, y2: 190, stroke: "var(--accent)", "stroke-dasharray": "4 3" }));
      svg.append(node("text", { x: width / 2 - 34, y: 222, "text-anchor": "middle" }, "sequence length N"), node("text", { x: 4, y: 10 }, "multiplications"));
    };
    for (const input of [n, d, dd]) input.oninput = update;
    new ResizeObserver(update).observe(box);
    update();
  }

  $$("table.sort").forEach(sortable);
  $$(".chart[data-spec]").forEach(chart);
  $$(".who[data-pixels]").forEach(who);
  $$(".live.associativity").forEach(associativity);
})();
