"use strict";
// ------------------------------------------------------------------------------------------------ texts and colours
const formatSeconds = (value) => {
  if (Math.abs(value) < 1e-12) return "0 us";
  const [unit, scale] = Math.abs(value) >= 0.9995 ? ["s", 1] : Math.abs(value) >= 0.9995e-3 ? ["ms", 1e3] : ["us", 1e6];
  return `${Number((value * scale).toPrecision(3))} ${unit}`;
};
const formatBytes = (value) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (Math.abs(value) >= 1000 && step < 4) [value, step] = [value / 1024, step + 1];
  return `${Number(value.toPrecision(3))} ${units[step]}`;
};
// A text whose long names may break behind a dot or a slash.
const breakable = (says) => {
  const fragment = new DocumentFragment();
  for (const part of says.split(/(?<=[./])(?=[a-z_])/i)) fragment.append(part, document.createElement("wbr"));
  return fragment;
};
const formats = { seconds: formatSeconds, bytes: formatBytes, ratio: (value) => `${value.toFixed(2)} ×` };
const colours = new Map(); // until light turns to dark
const css = (name) => {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
};
const STRONG = "abcdef";

// Kinds have patterns, so that they differ without colours.
const LINES = {
  plain: [], rise: [[0, 8, 8, 0]], fall: [[0, 0, 8, 8]], flat: [[0, 4, 8, 4]], upright: [[4, 0, 4, 8]],
  grid: [[0, 4, 8, 4], [4, 0, 4, 8]], cross: [[0, 8, 8, 0], [0, 0, 8, 8]],
};
function pattern(kind, back, line) {
  if (kind === "plain") return back;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.fillStyle = back;
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = line;
  for (const [x1, y1, x2, y2] of LINES[kind]) {
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.lineTo(x2, y2);
    pen.stroke();
  }
  return { image: tile, repeat: "repeat" };
}
const PARTS = {
  forward: ["a", "plain"], once: ["a", "grid"], backward: ["b", "rise"], input: ["b", "rise"], weight: ["d", "grid"],
  update: ["c", "upright"], waits: ["line", "fall"],
};
const KINDS = {
  parameters: ["s0", "a", "plain"], gradients: ["s1", "b", "rise"], "optimizer states": ["s2", "c", "upright"],
  inputs: ["s4", "e", "flat"], saved: ["s3", "d", "fall"], temporaries: ["s5", "f", "grid"],
  communication: ["s6", "ink", "cross"],
};
const fillOfPart = (part) => {
  const [colour, lines] = PARTS[part.split(" ")[0]] || PARTS.forward;
  return part === "waits" ? pattern(lines, css("soft"), css("line")) : pattern(lines, css(colour), css("paper"));
};
const fillOfKind = (kind) => pattern(KINDS[kind][2], css(KINDS[kind][0]), css(KINDS[kind][1]));

// ---------------------------------------------------------------------------------------------------------- figures
// A figure is boxes on two axes, drawn by ECharts. A box {x0, x1, y0, y1, fill, label, says, row, pick} says what it
// is to the mouse and to the keyboard: arrow keys walk through the boxes of a row and to the next row, Enter picks.
const FONT = "12px system-ui, sans-serif";
function drawLine({ from, to, bend, colour, thick }, at) {
  const [x1, y1] = at(...from), [x2, y2] = at(...to);
  const shape = { x1, y1, x2, y2, cpx1: x1 - bend, cpy1: y1, cpx2: x2 - bend, cpy2: y2 };
  return { type: "bezierCurve", shape, style: { stroke: colour, lineWidth: thick, fill: null } };
}
function drawBox(box, at, room) {
  const [left, top] = at(box.x0, box.y0), [right, bottom] = at(box.x1, box.y1);
  const whole = { x: left, y: top, width: Math.max(right - left, 0.5), height: bottom - top };
  const shape = echarts.graphic.clipRectByRect(whole, room);
  if (!shape) return null;
  const border = { stroke: box.stroke, lineWidth: box.stroke ? box.thick || 1 : 0 }, style = { fill: box.fill, ...border };
  const drawn = { type: "rect", shape, style, silent: !box.says, cursor: box.pick ? "pointer" : "default" };
  if (!box.bands && (!box.label || shape.width < 26)) return drawn;
  const bands = (box.bands || []).map((fill, i, { length }) => ({
    type: "rect", silent: true, style: { fill },
    shape: { ...shape, x: shape.x + (i * shape.width) / length, width: shape.width / length },
  }));
  const frame = { type: "rect", silent: true, shape, style: { fill: null, ...border } };
  const label = text(box.label || "", shape.x + 4, shape.y + shape.height / 2, shape.width - 6, box.ink || css("ink"));
  return { type: "group", children: [drawn, ...bands, frame, label] };
}
function drawTitle({ text: words, x, y, colour, bold, width }, at, room) {
  const left = x === undefined ? room.x : at(x, 0)[0];
  return text(words, left, at(0, y)[1], width || room.width, colour || css("ink"), bold);
}
function text(words, x, y, width, fill, bold) {
  const style = { text: words, x, y, width, fill, font: bold ? `bold ${FONT}` : FONT };
  return { type: "text", silent: true, style: { ...style, overflow: "truncate", verticalAlign: "middle" } };
}

const figures = {}; // by the id of their element
class Figure {
  constructor(id, make) {
    this.element = document.getElementById(id);
    this.output = document.getElementById(`${id}-says`);
    this.make = make;
    figures[id] = this;
    this.element.addEventListener("keydown", (event) => this.walk(event));
    new IntersectionObserver((entries, self) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      self.disconnect();
      new ResizeObserver(() => this.element.clientWidth !== this.width && this.draw()).observe(this.element);
    }, { rootMargin: "400px" }).observe(this.element);
  }

  draw() {
    if (!this.element.clientWidth) return; // not visible yet
    this.width = this.element.clientWidth;
    const made = this.make(this.width), at = this.boxes?.indexOf(this.now);
    Object.assign(this, { boxes: made.boxes, now: made.boxes[at], vertical: made.vertical });
    const height = made.height + (made.axis ? 22 : 0) + (made.zoom ? 34 : 0);
    this.element.style.height = `${height}px`;
    if (!this.chart) this.start();
    this.chart.resize({ width: this.width, height });
    this.rows = Object.values(Object.groupBy(this.boxes.filter((box) => box.says), (box) => box.row ?? 0));
    this.chart.setOption(this.option(made), true);
    if (this.now) this.mark(this.now);
    else this.frame.style.display = "none";
  }

  start() {
    this.chart = echarts.init(this.element, null, { renderer: "canvas" });
    this.frame = document.createElement("div");
    this.frame.className = "now";
    this.element.append(this.frame);
    this.chart.on("datazoom", () => this.now && this.mark(this.now));
    this.chart.on("mouseover", ({ dataIndex, seriesId }) => seriesId === "boxes" && this.show(this.boxes[dataIndex]));
    this.chart.on("click", ({ dataIndex, seriesId }) => seriesId === "boxes" && this.boxes[dataIndex].pick?.());
  }

  option({ boxes, lines = [], titles = [], axis, zoom, x, height }) {
    const layer = (id, items, draw) => ({
      type: "custom", id, silent: true, clip: true, progressive: 0, tooltip: { show: false }, data: items.map(() => [0, 0]),
      renderItem: ({ dataIndex, coordSys }, api) => draw(items[dataIndex], (x, y) => api.coord([x, y]), coordSys),
    });
    const slide = { type: "slider", filterMode: "none", height: 16, bottom: 2, left: 30, right: 30, labelFormatter: axis };
    return {
      animation: false,
      grid: { left: 0, right: 0, top: 0, height },
      xAxis: {
        min: 0, ...x, type: "value", show: Boolean(axis), position: "bottom", splitNumber: Math.max(2, this.width / 130),
        axisLine: { onZero: false, lineStyle: { color: css("line") } }, splitLine: { lineStyle: { color: css("soft") } },
        axisLabel: { formatter: axis, color: css("ink"), hideOverlap: true, alignMinLabel: "left", alignMaxLabel: "right" },
      },
      yAxis: { type: "value", min: 0, max: height, inverse: true, show: false },
      dataZoom: zoom ? [{ type: "inside", filterMode: "none", zoomOnMouseWheel: "ctrl" }, slide] : [],
      tooltip: { confine: true, formatter: ({ dataIndex }) => this.tip(boxes[dataIndex].says) },
      series: [
        layer("lines", lines, drawLine),
        { ...layer("boxes", boxes, drawBox), silent: false, tooltip: { show: true } },
        layer("titles", titles, drawTitle),
      ],
    };
  }

  tip(says) {
    if (!says) return "";
    const element = document.createElement("div"); // a text, whatever its name contains
    element.className = "tip";
    element.append(breakable(says));
    return element;
  }

  show(box) {
    if (!box?.says) return;
    this.now = box;
    this.output.replaceChildren(breakable(box.says));
    this.mark(box);
  }

  mark(box) { // beside the canvas: nothing is drawn again
    const corner = (x, y) => this.chart.convertToPixel({ xAxisIndex: 0, yAxisIndex: 0 }, [x, y]);
    const [left, top] = corner(box.x0, box.y0), [right, bottom] = corner(box.x1, box.y1);
    const from = Math.max(left, 0), to = Math.min(right, this.width), seen = to > from;
    Object.assign(this.frame.style, {
      left: `${from}px`, top: `${top}px`, width: `${Math.max(to - from, 3)}px`, height: `${bottom - top}px`, display: seen ? "block" : "none",
    });
  }

  walk(event) {
    const zoom = { "+": 0.5, "-": 2 }[event.key];
    if (zoom && this.chart) return this.zoom(zoom);
    const [forth, back, next, last] = this.vertical ? ["Down", "Up", "Right", "Left"] : ["Right", "Left", "Down", "Up"];
    const along = { [`Arrow${forth}`]: 1, [`Arrow${back}`]: -1, Home: -Infinity, End: Infinity }[event.key];
    const across = { [`Arrow${next}`]: 1, [`Arrow${last}`]: -1 }[event.key];
    if (event.key === "Enter") this.now?.pick?.();
    if ((!along && !across) || !this.rows?.length) return;
    event.preventDefault();
    const row = Math.max(this.rows.findIndex((own) => own.includes(this.now)), 0);
    const boxes = this.rows[Math.min(Math.max(row + (across || 0), 0), this.rows.length - 1)];
    const column = this.rows[row].indexOf(this.now);
    this.show(boxes[Math.min(Math.max(column + (along || 0), 0), boxes.length - 1)]);
    this.frame.scrollIntoView({ block: "nearest" });
  }

  zoom(factor) {
    const { start = 0, end = 100 } = this.chart.getOption().dataZoom?.[0] || {};
    const middle = (start + end) / 2, half = Math.min(((end - start) * factor) / 2, 50);
    const from = Math.min(Math.max(middle - half, 0), 100 - 2 * half);
    this.chart.dispatchAction({ type: "dataZoom", start: from, end: from + 2 * half });
  }
}

// --------------------------------------------------------------------------------------- time, memory, differences
const ROW = 38, BAR = 20;
function timeline(chart, most = chart.seconds, pick) {
  return () => {
    const fills = chart.parts.map(fillOfPart), unit = chart.seconds / 1e6;
    const boxes = chart.boxes.map(([row, start, seconds, part, name, bytes]) => ({
      row, x0: start * unit, x1: start * unit + seconds, y0: row * ROW + 18, y1: row * ROW + 18 + BAR, fill: fills[part],
      label: typeof fills[part] === "string" ? chart.names[name].replace(/^.*micro-batch /, "") : "", ink: css("paper"),
      pick: pick && (() => pick(chart.names[name])),
      says: `${chart.parts[part] === "waits" ? "" : `${chart.parts[part]} of `}${chart.names[name]}: `
        + formatSeconds(seconds) + (bytes ? `, ${formatBytes(bytes)}` : ""),
    }));
    const titles = chart.rows.map(([name, busy], row) => ({ text: `${name}: ${busy}`, y: row * ROW + 9 }));
    const ground = chart.rows.map((_, row) => ({
      x0: 0, x1: most, y0: row * ROW + 18, y1: row * ROW + 18 + BAR, fill: css("soft"),
    }));
    const height = chart.rows.length * ROW + 6;
    return { boxes: [...ground, ...boxes], titles, height, axis: formatSeconds, zoom: true, x: { max: most } };
  };
}

const sum = (sizes) => sizes.reduce((total, size) => total + size, 0);
function memory(chart, most) {
  return (width) => {
    const height = 220, scale = height / (most * 1.12), fills = chart.kinds.map(fillOfKind), boxes = [];
    chart.points.forEach(([where, sizes], x) => {
      let base = 0;
      sizes.forEach((size, kind) => {
        if (!size) return;
        boxes.push({ x0: x, x1: x + 1.02, y0: height - (base + size) * scale, y1: height - base * scale, fill: fills[kind] });
        base += size;
      });
    });
    chart.points.forEach(([where, sizes], x) => {
      const parts = chart.kinds.map((kind, i) => [kind, sizes[i]]).filter(([, size]) => size);
      const says = `${where}: ${formatBytes(sum(sizes))} (${parts.map(([kind, size]) => `${kind} ${formatBytes(size)}`).join(", ")})`;
      boxes.push({ x0: x, x1: x + 1, y0: 0, y1: height, fill: "transparent", says });
    });
    const bound = { y0: 0, y1: height, fill: css("ink") }, wide = (1.5 * chart.points.length) / width;
    boxes.push({ ...bound, x0: chart.at + 0.5, x1: chart.at + 0.5 + wide });
    if (chart.backward < chart.points.length) boxes.push({ ...bound, x0: chart.backward, x1: chart.backward + wide / 2 });
    const titles = [
      { text: `peak ${formatBytes(sum(chart.peak))} in ${chart.where}`, y: 8, bold: true },
      { text: "backward →", x: chart.backward, y: height - 8, width: 90 },
    ];
    return { boxes, titles, height, x: { max: chart.points.length } };
  };
}

// Bars from zero to the right, or to both sides. Each is {name, value, text, fill, says}.
function bars(entries) {
  return () => {
    const least = Math.min(0, ...entries.map(({ value }) => value)), most = Math.max(0, ...entries.map(({ value }) => value));
    const boxes = entries.map(({ value, fill, says }, row) => ({
      x0: Math.min(0, value), x1: Math.max(0, value), y0: row * ROW + 18, y1: row * ROW + 34, fill, says, row, stroke: css("line"),
    }));
    boxes.push({ x0: 0, x1: (most - least) / 400, y0: 0, y1: entries.length * ROW, fill: css("ink") });
    const titles = entries.map(({ name, text }, row) => ({ text: `${name}: ${text}`, y: row * ROW + 9 }));
    return { boxes, titles, height: Math.max(entries.length, 1) * ROW, x: { min: least, max: most || -least / 20 || 1 }, vertical: true };
  };
}
const peakBars = (chart) => {
  const whole = sum(chart.peak) || 1;
  return chart.kinds.map((kind, i) => ({
    name: kind, value: chart.peak[i], text: `${formatBytes(chart.peak[i])}, ${((100 * chart.peak[i]) / whole).toFixed(1)} %`,
    fill: fillOfKind(kind), says: `${kind}: ${formatBytes(chart.peak[i])} of the peak of ${formatBytes(whole)}`,
  })).filter(({ value }) => value);
};

// ----------------------------------------------------------------------------------------------- the model as a map
// Operators top to bottom in columns, in frames of equal layers. A box has a band for every mesh axis that splits it;
// beside it stands what the conversions of its operands send. Operators that send nothing and take less than 1 % of the
// time are small squares.
const LINE = 24, SMALL = 16;
function linesOf(stages, heads) {
  const lines = [];
  stages.forEach((stage, number) => {
    if (stage.like !== number) return;
    if (heads) lines.push({ head: stageTitle(stages, number), stage: number });
    const frames = new Map(), total = sum(stage.operators.map(({ seconds }) => seconds || 0));
    let outside = 0, before = "";
    stage.operators.forEach((operator, i) => {
      const [, block = "", rest = operator.name] = /^((?:.*?\.)?\d[\d,-]*)[./](.+)$/.exec(operator.name) || [];
      if (block !== before && !block) outside += 1;
      before = block;
      const key = block || outside;
      if (!frames.has(key)) frames.set(key, { title: block, operators: [] });
      frames.get(key).operators.push({ stage: number, row: i, operator, label: rest.replace(/^\//, "") });
    });
    for (const { title, operators } of frames.values()) {
      if (title) lines.push({ frame: title, count: Math.max(...operators.map(({ operator }) => operator.count)) });
      for (const one of operators) {
        const small = one.operator.seconds !== null && one.operator.seconds <= 0.01 * total && !one.operator.messages.length;
        const last = lines[lines.length - 1];
        if (small && last?.small && last.inside === title && last.small.length < 8) last.small.push(one);
        else lines.push(small ? { small: [one], inside: title } : { one, inside: title });
      }
    }
  });
  return lines;
}
const alike = (stages, number) => stages.flatMap((stage, i) => (stage.like === stages[number].like ? [i] : []));
const stageTitle = (stages, number) => {
  const own = alike(stages, number), text = own.length > 1 ? `stages ${own[0]} to ${own[own.length - 1]}` : `stage ${number}`;
  return own.length > 1 && own[own.length - 1] - own[0] >= own.length ? `stages ${own.join(", ")}` : text;
};

function map(view) {
  const { stages } = view.data;
  return (width) => {
    const columns = Math.max(1, Math.min(5, Math.floor(width / 290))), gap = 16, columnWidth = (width - gap * (columns - 1)) / columns;
    const lines = linesOf(stages, stages.length > 1), tall = ({ head, frame, small }) => (head || frame ? 22 : small ? SMALL + 4 : LINE);
    const limit = sum(lines.map(tall)) / columns + 12;
    const boxes = [], titles = [], edges = [], frames = [], at = new Map(), boxWidth = Math.min(columnWidth * 0.54, 230);
    const colourOf = (axis) => css(STRONG[view.axes.indexOf(axis) % 6] || "ink");
    const isPicked = (stage, row) => stage === stages[view.stage].like && row === view.row;
    let x = 0, y = 0, height = 0, frame = null;
    const placed = (one, rectangle) => {
      const { stage, row, operator, label } = one, { differs } = operator, splits = operator.axes.map((axis) => css(`s${view.axes.indexOf(axis) % 6}`));
      at.set(`${stage} ${row}`, rectangle);
      boxes.push({
        ...rectangle, row: one.column, fill: css("soft"), bands: splits.length ? splits : undefined,
        label: `${differs ? "≠ " : ""}${label}`, stroke: css(isPicked(stage, row) ? "ink" : differs ? "b" : "line"),
        thick: isPicked(stage, row) ? 3 : differs ? 2 : 1,
        says: describe(operator) + (differs ? `\n≠ in the ${view.id === "own" ? "other" : "first"} plan: ${differs}` : ""),
        pick: () => view.pick(stage, row),
      });
    };
    lines.forEach((line, number) => {
      const together = line.head ? 3 : line.frame ? 2 : 1; // a title is not parted from what it is of
      const need = sum(lines.slice(number, number + together).map(tall));
      if (y + need > limit && y > 0 && x + columnWidth + gap < width) [x, y, frame] = [x + columnWidth + gap, 0, null];
      if (line.head) titles.push({ text: line.head, x, y: y + 12, bold: true, width: columnWidth });
      if (line.frame) titles.push({ text: `${line.frame}${line.count > 1 ? ` (× ${line.count})` : ""}`, x: x + 6, y: y + 11, width: columnWidth - 8 });
      const title = line.head ? "" : line.frame || line.inside;
      if (frame && frame.title === title && !line.frame) frame.y1 = y + tall(line);
      else frames.push((frame = { title, x0: x, x1: x + columnWidth, y0: y, y1: y + tall(line) }));
      const left = x + 14, top = y + 2, column = Math.round(x / (columnWidth + gap));
      if (line.one) {
        placed({ ...line.one, column }, { x0: left, x1: left + boxWidth, y0: top, y1: top + LINE - 5 });
        const sums = new Map();
        for (const [, , , bytes, axes] of line.one.operator.messages) {
          const key = view.axes.filter((axis) => axes.includes(axis)).join("+");
          sums.set(key, (sums.get(key) || 0) + bytes);
        }
        const text = [...sums].map(([axes, bytes]) => `${axes} ${formatBytes(bytes)}`).join(", ");
        if (text) {
          const colour = colourOf([...sums.keys()][0].split("+")[0]);
          edges.push({ from: [left + boxWidth, top + 9], to: [left + boxWidth + 12, top + 9], bend: 0, colour, thick: 3 });
          titles.push({ text: `⇄ ${text}`, x: left + boxWidth + 14, y: top + 9, colour, width: columnWidth - boxWidth - 34 });
        }
      }
      (line.small || []).forEach((one, i) =>
        placed({ ...one, column, label: "" }, { x0: left + i * (SMALL + 3), x1: left + i * (SMALL + 3) + SMALL, y0: top, y1: top + SMALL - 3 }));
      y += tall(line);
      height = Math.max(height, y);
    });
    edges.push(...linesBetween(stages, at, colourOf, isPicked));
    const grounds = frames.filter(({ title }) => title).map((own) => ({ ...own, fill: "transparent", stroke: css("line") }));
    return { boxes: [...grounds, ...boxes], lines: edges, titles, height: height + 4, x: { max: width }, vertical: true };
  };
}
// What operators read. Between columns lines would cross what lies there: only those of the picked operator are drawn.
function linesBetween(stages, at, colourOf, isPicked) {
  const edges = [];
  stages.forEach((stage, number) => stage.operators?.forEach((operator, row) => {
    const to = at.get(`${number} ${row}`);
    const sent = new Map(operator.messages.filter(([from]) => from >= 0).map(([from, , , , axes]) => [from, axes]));
    for (const source of new Set([...operator.reads, ...sent.keys()])) {
      const from = at.get(`${number} ${source}`), axes = sent.get(source), below = from.x0 === to.x0;
      if (!below && !isPicked(number, row) && !isPicked(number, source)) continue;
      const near = below && to.y0 - from.y0 < LINE + 2, side = below ? -2 : 0;
      const ends = near ? [[from.x0 + 8, from.y1], [to.x0 + 8, to.y0]] : [[from.x0 + side, from.y1 - 4], [to.x0, to.y0 + 6]];
      edges.push({ from: ends[0], to: ends[1], bend: near ? 0 : 14, colour: axes ? colourOf(axes[0]) : css("line"), thick: axes ? 3 : 1 });
    }
  }));
  return edges;
}
function describe(operator) {
  const { name, count, strategy, types, seconds, messages } = operator;
  const lines = [`${name}${count > 1 ? ` (× ${count})` : ""}: ${strategy}${types.length ? ` → ${types.join(", ")}` : ""}`];
  if (seconds) lines[0] += `, ${formatSeconds(seconds)}`;
  return [...lines, ...messages.map(([, value, text]) => `⇄ ${value}: ${text}`)].join("\n");
}

// ---------------------------------------------------------------------------------------------- the grid of devices
// The part of a layout that a device holds: for every atom of every dim its indices, as ``pictures.pieces_of`` says.
function partOf(pieces, position) {
  const dims = pieces.map((atoms) => atoms.map(([size, axes, windows]) => {
    let index = 0, count = 1;
    for (const [stride, along] of axes) {
      index = index * along + (Math.floor(position / stride) % along);
      count *= along;
    }
    if (windows.length) return windows[index];
    return count === 1 ? ":" : `${Math.floor((index * size) / count)}:${Math.floor(((index + 1) * size) / count)}`;
  }).join(" x "));
  return `[${dims.join(", ")}]`;
}
function held(view) {
  const { stages, devices } = view.data, { stage, tensor } = view, { layouts } = stages[stages[stage].like];
  const holds = new Array(devices), numbers = new Map();
  const pieces = tensor ? layouts[tensor.layout][1] : null;
  for (const number of alike(stages, stage)) {
    let position = 0;
    for (const [first, last = first] of stages[number].ranks) {
      for (let rank = Number(first); rank <= Number(last); rank += 1, position += 1) {
        const text = pieces ? partOf(pieces, position) : "";
        if (!numbers.has(text)) numbers.set(text, numbers.size);
        holds[rank] = [numbers.get(text), text];
      }
    }
  }
  return { holds, parts: [...numbers.keys()] };
}
const MOST_DEVICES = 2 ** 16; // drawn
function devices(view) {
  return (width) => {
    const { machine } = view.data, { holds, parts } = held(view), count = Math.min(view.data.devices, MOST_DEVICES);
    view.summary(holds, parts);
    // As many columns as make the grid half as tall as wide; a row has whole machines, or a machine has whole rows.
    const fits = [];
    for (let columns = 1; columns <= count; columns += 1) {
      if (count % columns === 0 && (columns % machine === 0 || machine % columns === 0)) fits.push(columns);
    }
    const off = (columns) => Math.abs(Math.log(columns ** 2 / count / (count < 64 ? 2 : 1.2)));
    const columns = fits.reduce((best, own) => (off(own) < off(best) ? own : best)), rows = count / columns;
    const across = Math.max(1, Math.floor(columns / machine)), along = Math.max(1, Math.floor(machine / columns));
    const space = count > machine ? 0.25 : 0, unit = width / (columns + space * (across - 1));
    const size = Math.min(unit, 90), tall = Math.min(size, 44);
    const fill = (number) => (parts.length <= 8 ? css(`s${number}`)
      : `hsl(${Math.round((number * 360) / parts.length)} 55% ${css("light") === "1" ? 86 - 16 * (number % 2) : 26 + 16 * (number % 2)}%)`);
    const boxes = [];
    for (let rank = 0; rank < count; rank += 1) {
      const column = rank % columns, row = Math.floor(rank / columns);
      const x0 = size * (column + space * Math.floor(column / machine));
      const y0 = tall * (row + (along > 1 ? space * Math.floor(row / along) : 0));
      const own = holds[rank], line = Math.min(2, size * 0.12);
      boxes.push({
        x0, x1: x0 + size - line, y0, y1: y0 + tall - line, row, fill: own ? fill(own[0]) : css("soft"), stroke: size > 12 ? css("line") : undefined,
        label: size < 30 ? "" : `${rank}${size > 52 && own && view.tensor ? `: part ${own[0]}` : ""}`,
        says: `rank ${rank}: ${own ? (view.tensor ? `part ${own[0]} of ${parts.length}, ${own[1]}` : "in the stage") : "holds nothing of it"}`,
      });
    }
    return { boxes, height: boxes[boxes.length - 1].y1 + 2, x: { max: width } };
  };
}

// ------------------------------------------------------------------------------------------------- a plan's pictures
// As Jinja's filter of this name, which makes the ids of operators.
const urlencode = (text) => encodeURIComponent(text).replace(/[!'()*]/g, (own) => `%${own.charCodeAt(0).toString(16).toUpperCase()}`).replaceAll("%2F", "/");
class View {
  constructor(section, all) {
    this.id = section.id;
    this.axes = all.axes;
    this.data = all.plans[this.id];
    this.stage = 0;
    this.element = (name) => document.getElementById(`${this.id}-${name}`);
    this.select = this.element("tensor");
    this.select.addEventListener("change", () => this.take(this.choices[this.select.selectedIndex]));
    this.element("stage")?.addEventListener("change", (event) => this.to(Number(event.target.value)));
    this.choose(this.longest());
    this.draws("map", map(this));
    this.draws("devices", devices(this));
    // The plans of a page share their scales.
    const most = (get) => Math.max(...Object.values(all.plans).map(get)), stages = (get) => most((plan) => Math.max(...plan.stages.map(get)));
    const whole = most(({ schedule }) => schedule?.seconds || 0), pass = stages(({ time }) => time?.seconds || 0);
    const peak = stages(({ memory: own }) => (own ? sum(own.peak) : 0)) || 1;
    if (this.data.schedule) {
      const stageIn = (name) => Number(/\d+/.exec(name)[0]);
      this.draws("schedule", timeline(this.data.schedule, whole, (name) => this.to(stageIn(name))));
    }
    if (this.data.stages[0].time) {
      const own = () => this.data.stages[this.stage];
      this.draws("timeline", (width) => timeline(own().time, pass)(width));
      this.draws("over", (width) => memory(own().memory, peak)(width));
      this.draws("peak", (width) => bars(peakBars(own().memory))(width));
    }
  }

  draws(name, make) {
    new Figure(`${this.id}-${name}`, make);
  }

  get home() {
    return this.data.stages[this.data.stages[this.stage].like];
  }

  longest() {
    const { operators } = this.home;
    return operators.reduce((best, own, i) => ((own.seconds || 0) > (operators[best].seconds || 0) ? i : best), 0);
  }

  pick(stage, row) {
    const moved = this.data.stages[this.stage].like !== stage;
    if (moved) this.to(stage);
    this.choose(row);
    figures[`${this.id}-map`].draw();
  }

  to(stage) {
    this.stage = stage;
    const select = this.element("stage");
    if (select) select.value = stage;
    this.choose(this.longest());
    for (const name of ["map", "timeline", "over", "peak"]) figures[`${this.id}-${name}`]?.draw();
  }

  // The result of an operator and all tensors of its stage can be looked at.
  choose(row) {
    this.row = row;
    const { operators, tensors } = this.home, operator = operators[row], path = operator?.name.split("/")[0];
    const result = operator?.layout >= 0 ? [{ title: `result of ${operator.name}`, layout: operator.layout }] : [];
    const near = (name) => Number(!path || !name.startsWith(`${path}.`)); // its module's first
    const listed = tensors.map(([name, kind, layout]) => ({ title: `${kind} ${name}`, layout, near: near(name) }));
    this.choices = [...result, ...listed.sort((a, b) => a.near - b.near)];
    this.select.replaceChildren(...this.choices.map(({ title }) => new Option(title)));
    this.take(this.choices[0]);
    if (!operator) return; // a model that does nothing
    const link = document.createElement("a");
    link.href = `#${this.id}-${this.data.stages[this.stage].like}-${urlencode(operator.name)}`;
    link.textContent = "its rule and alternatives";
    const reads = operator.reads.map((source) => operators[source].name).join(", ");
    const lines = [describe(operator), ...(reads ? [`reads ${reads}`] : []), operator.source ? `${operator.source}, ` : ""];
    this.element("picked").replaceChildren(breakable(lines.join("\n")), link);
  }

  take(choice) {
    this.tensor = choice;
    figures[`${this.id}-devices`]?.draw();
  }

  summary(holds, parts) {
    const ranks = parts.map(() => []);
    holds.forEach((own, rank) => own && ranks[own[0]].push(rank));
    const short = (list) => list.slice(0, 4).join(", ") + (list.length > 4 ? ` and ${list.length - 4} more` : "");
    const what = parts.slice(0, 4).map((text, i) => `part ${i} ${text} on rank${ranks[i].length > 1 ? "s" : ""} ${short(ranks[i])}`);
    const { layouts } = this.home, on = ranks.flat().length, { tensor } = this;
    const count = `${parts.length.toLocaleString("en")} part${parts.length > 1 ? "s" : ""} on ${on.toLocaleString("en")} devices`
      + (holds.length > MOST_DEVICES ? `, of which ${MOST_DEVICES.toLocaleString("en")} are drawn` : "");
    const more = parts.length > 4 ? `; and ${(parts.length - 4).toLocaleString("en")} more parts` : "";
    const says = tensor ? `${tensor.title} ${layouts[tensor.layout][0]}: ${count}: ${what.join("; ")}${more}` : "";
    this.element("devices-says").replaceChildren(breakable(says));
  }
}

const pictures = JSON.parse(document.getElementById("pictures").textContent);
// A picture that fails is said in the console; the others and the tables work.
const guarded = (make) => {
  try {
    make();
  } catch (error) {
    console.error(error);
  }
};
for (const section of document.querySelectorAll(".pictures")) guarded(() => new View(section, pictures));
for (const [id, chart] of Object.entries(pictures.timelines)) guarded(() => new Figure(id, timeline(chart)));
for (const [id, { unit, bars: entries }] of Object.entries(pictures.bars)) {
  new Figure(id, () => bars(entries.map(([name, first, second]) => {
    const ratio = unit === "ratio", value = ratio ? Math.log2(second / first) : second - first, form = formats[unit];
    const text = ratio ? form(second / first) : `${value > 0 ? "+" : "−"}${form(Math.abs(value))}`;
    const shown = ratio ? formatSeconds : form;
    return {
      name, value, text, fill: value > 0 ? pattern("rise", css("s1"), css("b")) : css("s0"),
      says: `${name}: ${ratio ? "measured" : "this plan"} ${shown(first)}, ${ratio ? "predicted" : "the other"} ${shown(second)}`,
    };
  }))());
}
const paintKeys = () => {
  for (const key of document.querySelectorAll("canvas.key")) {
    const pen = key.getContext("2d"), kind = key.dataset.kind, fill = kind ? fillOfPart(kind) : css("soft");
    pen.fillStyle = fill.image ? pen.createPattern(fill.image, "repeat") : fill;
    pen.fillRect(0, 0, key.width, key.height);
  }
};
paintKeys();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours.clear();
  paintKeys();
  for (const one of Object.values(figures)) if (one.chart) one.draw();
});

// -------------------------------------------------------------------------------------------------------- the tables
// Operators by a part of their names; all open or closed.
for (const graph of document.querySelectorAll(".graph")) {
  const field = graph.querySelector("input"), count = graph.querySelector(".found");
  field.addEventListener("input", () => {
    const wanted = field.value.trim().toLowerCase();
    let found = 0;
    for (const op of graph.querySelectorAll(".op")) {
      const fits = op.dataset.name.toLowerCase().includes(wanted);
      op.classList.toggle("hidden", !fits);
      found += fits;
    }
    for (const module of [...graph.querySelectorAll(".module")].reverse()) {
      const left = module.querySelector(".op:not(.hidden)");
      module.classList.toggle("hidden", !left);
      if (wanted && left) module.open = true;
    }
    count.textContent = wanted ? `${found} found` : "";
  });
  for (const button of graph.querySelectorAll("button[data-open]")) {
    button.addEventListener("click", () => {
      for (const module of graph.querySelectorAll(".module")) module.open = button.dataset.open === "yes";
    });
  }
}
// A link opens what its target lies in, though a search may have hidden it.
const reveal = () => {
  const hash = location.hash.slice(1), target = document.getElementById(hash) || document.getElementById(decodeURIComponent(hash));
  if (!target) return;
  for (let at = target; at; at = at.parentElement) {
    if (at.tagName === "DETAILS") at.open = true;
    at.classList.remove("hidden");
  }
  target.scrollIntoView({ block: "nearest" });
  (target.querySelector("summary") || target).focus();
};
addEventListener("hashchange", reveal);
reveal();
