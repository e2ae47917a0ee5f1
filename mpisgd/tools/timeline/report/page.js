"use strict";

// The record as page.py has made it; times in microseconds, memory in KiB.
const record = JSON.parse(document.getElementById("record").textContent);
const COLOURS = 8; // of ranks; further ones are dashed
const shown = new Set(); // the ranks that the charts draw
const redraws = []; // called when the size, the theme or the shown ranks change

// -- words -----------------------------------------------------------------------------------------------

function scaled(value, units) {
  let [factor, unit] = units[0];
  for (const each of units) if (Math.abs(value) >= each[0]) [factor, unit] = each;
  return `${Number((value / factor).toPrecision(3))} ${unit}`;
}
const timeText = (us) => scaled(us, [[1, "us"], [1e3, "ms"], [1e6, "s"], [6e7, "min"]]);
const bytesText = (n) => scaled(n, [[1, "B"], [2 ** 10, "KiB"], [2 ** 20, "MiB"], [2 ** 30, "GiB"], [2 ** 40, "TiB"]]);
const shareText = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "-");
const sum = (values) => values.reduce((total, value) => total + value, 0);

function quantile(values, share) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : 0;
}

// -- elements --------------------------------------------------------------------------------------------

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const within = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const place = (rank) => record.ranks.indexOf(Number(rank));
const colourOf = (rank) => colour(`rank${place(rank) % COLOURS}`);
const dashOf = (rank) => [[], [6, 3], [2, 3], [8, 3, 2, 3]][Math.floor(place(rank) / COLOURS) % 4];

function legend(names, labels = names) {
  const entries = names.map((name, i) => {
    const swatch = make("span", { className: "swatch" });
    swatch.style.background = `var(--${name})`;
    return make("span", {}, swatch, labels[i]);
  });
  return make("div", { className: "legend" }, ...entries);
}

// columns: [heading, function of a row, class]; numbers are right-aligned, "text" is left-aligned.
function table(section, columns, rows) {
  if (!rows.length) {
    section.append(make("p", {}, "Nothing of this is in the record."));
    return;
  }
  const head = make("tr", {}, ...columns.map(([name, , kind = ""]) => make("th", { className: kind, scope: "col" }, name)));
  const body = rows.map((row) =>
    make("tr", {}, ...columns.map(([, value, kind = ""]) => make("td", { className: kind }, String(value(row))))));
  section.append(make("div", { className: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body))));
}

// A canvas as wide as its section; `draw(context, width, height)` is called whenever it must be drawn anew.
function drawing(section, label, heightOf, draw) {
  const canvas = make("canvas", { tabIndex: 0 });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", label);
  section.append(make("div", { className: "drawing" }, canvas));
  const redraw = () => {
    const [width, height, scale] = [canvas.clientWidth, heightOf(), window.devicePixelRatio || 1];
    [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = "12px system-ui, sans-serif";
    draw(context, width, height);
  };
  redraws.push(redraw);
  return [canvas, redraw];
}

function niceStep(range, count) {
  const rough = range / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
}

// -- charts of one line per rank -------------------------------------------------------------------------

const LEFT = 64, RIGHT = 12, TOP = 8, BOTTOM = 24;

// chart: {label, xs, xText, ys: {rank: values}, yText}, and `xsOf` where ranks have xs of their own.
class LineChart {
  constructor(section, chart) {
    this.chart = chart;
    this.ranks = Object.keys(chart.ys);
    const all = this.ranks.flatMap((rank) => chart.ys[rank]);
    if (!all.length) {
      section.append(make("p", {}, "Nothing of this is in the record."));
      return;
    }
    this.largest = all.reduce((most, y) => Math.max(most, y ?? 0), 1);
    this.usual = quantile(all, 0.98) * 1.5;
    this.cut = this.usual > 0 && this.largest > 2 * this.usual; // a few outliers would flatten all else
    this.at = null; // the point that is read out
    [this.from, this.to] = [chart.xs[0], Math.max(chart.xs[chart.xs.length - 1], chart.xs[0] + 1)];
    if (this.cut) this.addButton(section);
    [this.canvas, this.redraw] = drawing(section, chart.label, () => 220, (...place) => this.draw(...place));
    this.readout = make("div", { className: "readout" });
    section.append(this.readout);
    this.listen();
  }

  get shownRanks() { return this.ranks.filter((rank) => shown.has(Number(rank))); }

  addButton(section) {
    const button = make("button", { type: "button" }, "whole range");
    button.setAttribute("aria-pressed", "false");
    button.onclick = () => {
      this.cut = !this.cut;
      button.setAttribute("aria-pressed", String(!this.cut));
      this.redraw();
    };
    section.append(make("div", { className: "controls" }, button));
  }

  draw(context, width, height) {
    const { chart, from, to } = this, top = this.cut ? this.usual : this.largest * 1.05;
    const x = (value) => LEFT + ((value - from) / (to - from)) * (width - LEFT - RIGHT);
    const y = (value) => height - BOTTOM - (Math.min(value, top) / top) * (height - TOP - BOTTOM);
    drawAxes(context, width, height, chart, from, to, top, x, y);
    if (this.ranks.length > COLOURS) drawBand(context, chart, this.ranks, x, y);
    for (const rank of this.shownRanks) drawLine(context, chart, rank, x, y);
    if (this.at === null) return;
    context.strokeStyle = colour("faint");
    context.beginPath();
    context.moveTo(x(chart.xs[this.at]), TOP);
    context.lineTo(x(chart.xs[this.at]), height - BOTTOM);
    context.stroke();
  }

  listen() {
    const { canvas, chart } = this;
    canvas.addEventListener("pointermove", (event) => {
      const share = (event.offsetX - LEFT) / (canvas.clientWidth - LEFT - RIGHT);
      this.read(nearest(chart.xs, this.from + share * (this.to - this.from)));
    });
    canvas.addEventListener("pointerleave", () => { this.at = null; this.redraw(); });
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move) { event.preventDefault(); this.read((this.at ?? 0) + move); }
    });
  }

  read(index) {
    const { chart } = this;
    const at = this.at = Math.max(0, Math.min(chart.xs.length - 1, index));
    const values = this.shownRanks.filter((rank) => typeof chart.ys[rank][at] === "number")
      .map((rank) => `rank ${rank}: ${chart.yText(chart.ys[rank][at])}`);
    this.readout.textContent = `${chart.xText(chart.xs[at])}: ${values.join(", ")}`;
    this.redraw();
  }
}

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle; else high = middle;
  }
  return Math.abs(sorted[high] - value) < Math.abs(sorted[low] - value) ? high : low;
}

function drawAxes(context, width, height, chart, from, to, top, x, y) {
  context.strokeStyle = colour("rule");
  context.fillStyle = colour("faint");
  context.lineWidth = 1;
  context.setLineDash([]);
  context.textAlign = "right";
  context.textBaseline = "middle";
  const step = niceStep(top, 4);
  for (let value = 0; value <= top; value += step) {
    context.beginPath();
    context.moveTo(LEFT, y(value));
    context.lineTo(width - RIGHT, y(value));
    context.stroke();
    context.fillText(chart.yText(value), LEFT - 6, y(value));
  }
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  const stride = niceStep(to - from, Math.max(2, Math.floor(width / 130)));
  for (let value = Math.ceil(from / stride) * stride; value <= to; value += stride)
    context.fillText(chart.xText(value), Math.min(Math.max(x(value), LEFT + 20), width - 40), height - 6);
}

function drawLine(context, chart, rank, x, y) {
  context.strokeStyle = colourOf(rank);
  context.lineWidth = 1.4;
  context.setLineDash(dashOf(rank));
  context.beginPath();
  let inside = false;
  chart.ys[rank].forEach((value, i) => {
    if (value === null) { inside = false; return; }
    const px = x((chart.xsOf?.[rank] ?? chart.xs)[i]);
    if (inside) context.lineTo(px, y(value)); else context.moveTo(px, y(value));
    inside = true;
  });
  context.stroke();
  context.setLineDash([]);
}

function drawBand(context, chart, ranks, x, y) {
  const ends = chart.xs.map((_, i) => {
    const values = ranks.map((rank) => chart.ys[rank][i]).filter((value) => value !== null && value !== undefined);
    return values.length ? [Math.min(...values), Math.max(...values)] : [0, 0];
  });
  context.fillStyle = colour("raised");
  context.beginPath();
  ends.forEach(([low], i) => context.lineTo(x(chart.xs[i]), y(low)));
  [...ends.keys()].reverse().forEach((i) => context.lineTo(x(chart.xs[i]), y(ends[i][1])));
  context.fill();
}

// -- the sections ----------------------------------------------------------------------------------------

function showHead() {
  document.title = within("title").textContent = record.title;
  const hosts = [...new Set(record.hosts)];
  const steps = record.steps.numbers.length * record.steps.together;
  within("about").textContent = `${record.ranks.length} ranks on ${hosts.length === 1 ? hosts[0] : `${hosts.length} hosts`}, ${timeText(record.duration)}`;
  const divisions = Object.values(record.division);
  const total = (name) => sum(divisions.map((each) => each[name]));
  const whole = total("computation") + total("communication") + total("wait") + total("other");
  const moving = total("communication") + total("hidden");
  const times = Object.values(record.steps.time).flat();
  const slow = record.late[0];
  const own = Object.values(record.memory).map((each) => Math.max(...each.own));
  const tiles = [
    ["steps in the record", steps ? steps.toLocaleString("en") : "-"],
    ["median step", times.length ? timeText(quantile(times, 0.5)) : "-"],
    ["computation", shareText(total("computation"), whole)],
    ["exposed communication", shareText(total("communication"), whole)],
    ["waiting for other ranks", shareText(total("wait"), whole)],
    ["communication that is hidden", shareText(total("hidden"), moving)],
    [slow ? `most often last (${shareText(slow.times, record.common)})` : "most often last", slow ? `rank ${slow.rank}` : "-"],
    ["most memory of a rank", own.length ? bytesText(1024 * Math.max(...own)) : "-"],
  ];
  within("tiles").append(...tiles.map(([name, value]) =>
    make("div", { className: "tile" }, make("b", {}, String(value)), make("span", {}, name))));
  within("notes").append(...record.notes.map((note) => make("div", { className: "note" }, note)));
}

function showRanks() {
  const busiest = [...record.ranks].sort((a, b) => (record.division[b]?.computation ?? 0) - (record.division[a]?.computation ?? 0));
  busiest.slice(0, COLOURS).forEach((rank) => shown.add(rank));
  for (const [i, rank] of record.ranks.entries()) {
    const swatch = make("span", { className: "swatch" });
    swatch.style.background = `var(--rank${i % COLOURS})`;
    const button = make("button", { type: "button", title: record.hosts[i] }, swatch, `rank ${rank}`);
    const press = () => button.setAttribute("aria-pressed", String(shown.has(rank)));
    button.onclick = () => {
      if (!shown.delete(rank)) shown.add(rank);
      press();
      redraws.forEach((redraw) => redraw());
    };
    press();
    within("ranks").append(button);
  }
}

function showSteps(id, name, label) {
  const { numbers, together } = record.steps;
  const text = (step) => (together > 1 ? `steps ${step} to ${step + together - 1} (median)` : `step ${step}`);
  new LineChart(within(id), { label, xs: numbers, xText: text, ys: record.steps[name] ?? {}, yText: timeText });
}

function showDivision() {
  const section = within("division");
  const parts = ["computation", "communication", "wait", "other"];
  const longest = Math.max(...Object.values(record.division).map((each) => sum(parts.map((name) => each[name]))), 1);
  section.append(legend(parts, ["computation", "exposed communication", "waiting for other ranks", "waiting for something else"]));
  for (const [rank, each] of Object.entries(record.division)) {
    const bars = parts.map((name) => {
      const part = make("div", { className: "part", title: `${name}: ${timeText(each[name])}` });
      part.style.cssText = `width: ${(100 * each[name]) / longest}%; background: var(--${name})`;
      return part;
    });
    const whole = make("div", { className: "whole" }, ...bars);
    section.append(make("div", { className: "bar" }, make("span", {}, `rank ${rank}`), whole,
      make("span", { className: "end" }, `${timeText(each.hidden)} hidden`)));
  }
  const details = make("details", {}, make("summary", {}, "as numbers"));
  section.append(details);
  table(details, [["rank", ([rank]) => rank], ...[...parts, "hidden"].map((name) => [name, ([, each]) => timeText(each[name])])],
    Object.entries(record.division));
}

function showTables() {
  table(within("late"), [
    ["rank", (row) => row.rank], ["came last", (row) => row.times], ["share", (row) => shareText(row.times, record.common)],
    ["total", (row) => timeText(row.total_us)], ["median", (row) => timeText(row.median_us)],
    ["worst", (row) => timeText(row.worst_us)], ["worst at", (row) => row.worst, "text long"],
  ], record.late);
  table(within("operations"), [
    ["operation", (row) => row.kind, "text"], ["where", (row) => row.where, "text"], ["algorithm", (row) => row.algorithm, "text"],
    ["count", (row) => row.num], ["total", (row) => timeText(row.total_us)], ["median", (row) => timeText(row.median_us)],
    ["waiting", (row) => timeText(row.wait_us)], ["bytes", (row) => bytesText(row.nbytes)],
    ["per second", (row) => (row.total_us ? bytesText((row.nbytes / row.total_us) * 1e6) : "-")],
  ], record.operations);
  table(within("slowest"), [
    ["rank", (row) => row.rank], ["at", (row) => timeText(row.at_us)], ["time", (row) => timeText(row.moving_us)],
    ["waiting", (row) => timeText(row.wait_us)], ["bytes", (row) => bytesText(row.nbytes)],
    ["algorithm", (row) => row.algorithm, "text"], ["operation", (row) => row.what, "text long"],
  ], record.slowest);
  table(within("links"), [
    ["from", (row) => row.source, "text"], ["to", (row) => row.destination, "text"], ["medium", (row) => row.medium, "text"],
    ["bytes", (row) => bytesText(row.nbytes)], ["per second", (row) => bytesText(row.nbytes / (record.duration / 1e6 || 1))],
  ], record.links);
}

function showMemory() {
  const section = within("memory");
  const each = Object.entries(record.memory);
  const longest = each.reduce((most, [, memory]) => (memory.at.length > most.length ? memory.at : most), []);
  new LineChart(section, {
    label: "memory of each rank over time", xs: longest, xText: timeText, yText: (kib) => bytesText(1024 * kib),
    ys: Object.fromEntries(each.map(([rank, memory]) => [rank, memory.own.map((own, i) => own + (memory.device[i] ?? 0))])),
    xsOf: Object.fromEntries(each.map(([rank, memory]) => [rank, memory.at])),
  });
  const most = (values) => (values.length ? bytesText(1024 * Math.max(...values)) : "-");
  table(section, [
    ["rank", ([rank]) => rank], ["own, at most", ([, memory]) => most(memory.own)],
    ["shared, at most", ([, memory]) => most(memory.shared)], ["on the GPU, at most", ([, memory]) => most(memory.device)],
  ], each);
}

// -- the timeline ----------------------------------------------------------------------------------------

const ROW = 17, RULER = 22;
const KIND_LABELS = { step: "step", operation: "operation", move: "data moves", wait: "waits for other ranks",
  blocked: "the program waits", queue: "in the queue", message: "message", other: "other" };

class Timeline {
  constructor(section) {
    this.excerpt = record.excerpts[0];
    this.controls = make("div", { className: "controls" });
    section.append(this.controls, legend(record.kinds, record.kinds.map((kind) => KIND_LABELS[kind])));
    [this.canvas, this.redraw] = drawing(section, "timeline of some steps", () => RULER + ROW * this.excerpt.rows.length + 4,
      (context, width, height) => this.draw(context, width, height));
    this.readout = make("div", { className: "readout" });
    section.append(this.readout);
    this.pointers = new Map();
    this.listen();
    this.show(this.excerpt);
    this.addButtons();
  }

  get left() { return Math.min(150, this.canvas.clientWidth * 0.3); }
  get width() { return this.canvas.clientWidth - this.left; }

  addButtons() {
    const button = (text, label, action) => {
      const made = make("button", { type: "button", title: label }, text);
      made.setAttribute("aria-label", label);
      made.onclick = action;
      this.controls.append(made);
      return made;
    };
    const choices = record.excerpts.map((excerpt) => button(excerpt.title, `show ${excerpt.title}`, () => {
      this.show(excerpt);
      choices.forEach((choice, i) => choice.setAttribute("aria-pressed", String(record.excerpts[i] === excerpt)));
    }));
    choices.forEach((choice, i) => choice.setAttribute("aria-pressed", String(i === 0)));
    button("+", "zoom in", () => this.zoom(0.5));
    button("\u2212", "zoom out", () => this.zoom(2));
    button("\u2190", "earlier", () => this.pan(-0.3));
    button("\u2192", "later", () => this.pan(0.3));
    button("all", "show all of it", () => this.look(0, this.excerpt.length));
  }

  show(excerpt) {
    this.excerpt = excerpt;
    this.byRow = excerpt.rows.map(() => []);
    excerpt.row.forEach((row, i) => this.byRow[row].push(i));
    this.readout.textContent = excerpt.leftOut ? `${excerpt.leftOut} of the shortest events are left out` : "";
    this.look(0, excerpt.length);
  }

  look(from, to) {
    const length = Math.max(1, this.excerpt.length);
    const span = Math.min(Math.max(to - from, 2), length * 1.02);
    this.from = Math.min(Math.max(from, -0.01 * length), 1.01 * length - span);
    this.to = this.from + span;
    this.redraw();
  }

  zoom(factor, share = 0.5) {
    const pivot = this.from + share * (this.to - this.from);
    this.look(pivot - factor * share * (this.to - this.from), pivot + factor * (1 - share) * (this.to - this.from));
  }

  pan(share) {
    const by = share * (this.to - this.from);
    this.look(this.from + by, this.to + by);
  }

  timeAt(x) { return this.from + ((x - this.left) / this.width) * (this.to - this.from); }

  listen() {
    const { canvas, pointers } = this;
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY / 300), (event.offsetX - this.left) / this.width);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, event.offsetX);
      canvas.setPointerCapture(event.pointerId);
    });
    for (const name of ["pointerup", "pointercancel"])
      canvas.addEventListener(name, (event) => pointers.delete(event.pointerId));
    canvas.addEventListener("pointermove", (event) => this.moved(event));
    canvas.addEventListener("dblclick", (event) => this.zoom(0.33, (event.offsetX - this.left) / this.width));
    canvas.addEventListener("keydown", (event) => {
      const action = { "+": () => this.zoom(0.5), "-": () => this.zoom(2), ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2) }[event.key];
      if (action) { event.preventDefault(); action(); }
    });
  }

  moved(event) {
    const before = this.pointers.get(event.pointerId);
    if (before === undefined) { this.tell(event.offsetX, event.offsetY); return; }
    this.pointers.set(event.pointerId, event.offsetX);
    const [other] = [...this.pointers.entries()].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
    if (other === undefined) this.pan((before - event.offsetX) / this.width);
    else this.zoom(Math.max(1, Math.abs(before - other)) / Math.max(1, Math.abs(event.offsetX - other)), (other - this.left) / this.width);
  }

  tell(x, y) {
    const excerpt = this.excerpt, time = this.timeAt(x), slack = (2 / this.width) * (this.to - this.from);
    const row = Math.floor((y - RULER) / ROW);
    const hit = (this.byRow[row] ?? []).filter((i) => excerpt.begin[i] - slack <= time && time <= excerpt.begin[i] + excerpt.duration[i] + slack)
      .sort((a, b) => excerpt.duration[a] - excerpt.duration[b])[0];
    if (hit === undefined) return;
    const parts = [`rank ${excerpt.rows[row][0]}, ${excerpt.rows[row][1]}: ${excerpt.texts[excerpt.name[hit]]}, ${timeText(excerpt.duration[hit])}`,
      `from ${timeText(excerpt.begin[hit])}`];
    if (excerpt.bytes[hit]) parts.push(bytesText(excerpt.bytes[hit]));
    if (excerpt.texts[excerpt.detail[hit]]) parts.push(excerpt.texts[excerpt.detail[hit]]);
    this.readout.textContent = parts.join(", ");
  }

  draw(context, width, height) {
    const { excerpt, left } = this;
    const x = (time) => left + ((time - this.from) / (this.to - this.from)) * this.width;
    this.drawRuler(context, height, x);
    const colours = record.kinds.map((kind) => colour(kind));
    const inks = record.kinds.map((kind) => ({ move: colour("ground"), blocked: colour("ground"), message: colour("ground"), wait: "#1c2128" })[kind] ?? colour("ink"));
    excerpt.rows.forEach((_, row) => {
      let last = [-1, -1, -1]; // of the pixel and the colour drawn before: thousands of events may fall on one
      for (const i of this.byRow[row]) {
        const begin = excerpt.begin[i], end = begin + excerpt.duration[i];
        if (end < this.from || begin > this.to) continue;
        const x0 = Math.max(left, x(begin)), wide = Math.max(1, Math.min(width, x(end)) - x0);
        const pixel = [Math.round(x0), Math.round(wide), excerpt.kind[i]];
        if (wide <= 1 && pixel.every((value, k) => value === last[k])) continue;
        last = pixel;
        const y = RULER + row * ROW;
        context.fillStyle = colours[excerpt.kind[i]];
        context.fillRect(x0, y + 2, wide > 3 ? wide - 0.5 : wide, ROW - 4);
        if (wide > 40) this.drawName(context, excerpt.texts[excerpt.name[i]], x0, y, wide, inks[excerpt.kind[i]]);
      }
    });
    this.drawLabels(context, width);
  }

  drawName(context, name, x, y, wide, ink) {
    context.save();
    context.beginPath();
    context.rect(x, y, wide - 3, ROW);
    context.clip();
    context.fillStyle = ink;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText(name, x + 4, y + ROW / 2);
    context.restore();
  }

  drawRuler(context, height, x) {
    context.strokeStyle = colour("rule");
    context.fillStyle = colour("faint");
    context.textAlign = "left";
    context.textBaseline = "middle";
    const step = niceStep(this.to - this.from, Math.max(2, this.width / 120));
    for (let time = Math.ceil(this.from / step) * step; time <= this.to; time += step) {
      context.beginPath();
      context.moveTo(x(time), RULER - 6);
      context.lineTo(x(time), height);
      context.stroke();
      context.fillText(timeText(time), x(time) + 3, RULER / 2 - 1);
    }
  }

  drawLabels(context, width) {
    let before = null;
    context.textAlign = "left";
    context.textBaseline = "middle";
    this.excerpt.rows.forEach(([rank, name], row) => {
      const y = RULER + row * ROW;
      context.fillStyle = colour("ground");
      context.fillRect(0, y, this.left, ROW);
      if (rank !== before) {
        context.strokeStyle = colour("faint");
        context.beginPath();
        context.moveTo(0, y);
        context.lineTo(width, y);
        context.stroke();
      }
      const same = row > 0 && this.excerpt.rows[row - 1][0] === rank && this.excerpt.rows[row - 1][1] === name;
      this.drawName(context, `${rank}  ${same ? "" : name}`, 0, y, this.left, colour("ink"));
      before = rank;
    });
  }
}

// -- all of it -------------------------------------------------------------------------------------------

function show() {
  showHead();
  showRanks();
  showSteps("step-time", "time", "time of each step, by rank");
  showDivision();
  showSteps("exposed", "communication", "exposed communication of each step, by rank");
  showSteps("waits", "wait", "waiting of each step, by rank");
  const timeline = new Timeline(within("timeline"));
  showTables();
  showMemory();
  redraws.forEach((redraw) => redraw());
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) redraws.forEach((redraw) => redraw());
    width = window.innerWidth;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((redraw) => redraw()));
  document.body.dataset.drawnMs = String(Math.round(performance.now()));
  window.mpisgdTimeline = timeline; // for tests, and for who wants to look from the console
}

window.addEventListener("error", (event) => { document.body.dataset.error = event.message; });
show();
