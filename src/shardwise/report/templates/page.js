"use strict";
// What a box of a chart is, by mouse and by keyboard: left and right go along a row, up and down to the next one.
for (const chart of document.querySelectorAll(".chart")) {
  const said = document.getElementById(chart.dataset.says);
  const rows = [...chart.querySelectorAll("g.row")].map((row) => [...row.querySelectorAll(".box, .point")]);
  let row = 0, column = -1, now = null;
  const show = (box) => {
    if (now) now.classList.remove("now");
    now = box;
    box.classList.add("now");
    said.textContent = box.dataset.says;
  };
  chart.addEventListener("mouseover", (event) => {
    const box = event.target.closest(".box, .point");
    if (!box) return;
    row = rows.findIndex((own) => own.includes(box));
    column = rows[row].indexOf(box);
    show(box);
  });
  chart.addEventListener("keydown", (event) => {
    const along = { ArrowRight: 1, ArrowLeft: -1 }[event.key], across = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!along && !across && event.key !== "Home" && event.key !== "End") return;
    event.preventDefault();
    if (across) {
      let next = row + across;
      while (rows[next] && !rows[next].length) next += across;
      if (!rows[next]) return;
      row = next;
      column = Math.min(Math.max(column, 0), rows[row].length - 1);
    } else if (event.key === "Home") column = 0;
    else if (event.key === "End") column = rows[row].length - 1;
    else column = Math.min(Math.max(column + along, 0), rows[row].length - 1);
    if (rows[row] && rows[row][column]) {
      show(rows[row][column]);
      rows[row][column].scrollIntoView({ block: "nearest", inline: "nearest" });
    }
  });
}
// A wider or narrower timeline.
for (const button of document.querySelectorAll("button[data-zoom]")) {
  button.addEventListener("click", () => {
    const chart = document.getElementById(button.dataset.of);
    const width = chart.getBoundingClientRect().width, first = Number(chart.dataset.width);
    const next = Number(button.dataset.zoom) ? width * Number(button.dataset.zoom) : first;
    chart.setAttribute("width", Math.min(Math.max(next, first), first * 64));
    chart.setAttribute("preserveAspectRatio", "none");
  });
}
// Who holds a tensor: every device of the grid gets the number of its shard.
for (const part of document.querySelectorAll(".holdings")) {
  const shards = JSON.parse(part.querySelector("script").textContent);
  const cells = [...part.querySelectorAll(".cell")], said = part.querySelector("output");
  let now = null;
  const show = (tensor) => {
    if (now) now.classList.remove("now");
    now = tensor;
    tensor.classList.add("now");
    const own = shards[Number(tensor.dataset.key)];
    cells.forEach((cell, i) => {
      const number = own.of[i];
      cell.className = "cell s" + (number % 8);
      cell.querySelector(".shard").textContent = "shard " + number;
      cell.title = own.what[number];
    });
    const what = own.what.map((text, number) => `shard ${number}: ${text}`);
    said.textContent = `${tensor.dataset.name}: ` + what.slice(0, 16).join(", ") + (what.length > 16 ? ` and ${what.length - 16} more` : "");
  };
  for (const tensor of part.querySelectorAll(".tensor")) {
    tensor.addEventListener("mousemove", () => tensor === now || show(tensor)); // not what a scroll brings under it
    tensor.querySelector("summary").addEventListener("focus", () => show(tensor));
  }
  const first = part.querySelector(".tensor");
  if (first) show(first);
}
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
// A link to an operator opens what it lies in.
const reveal = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  target.scrollIntoView({ block: "nearest" });
  (target.querySelector("summary") || target).focus();
};
addEventListener("hashchange", reveal);
reveal();
