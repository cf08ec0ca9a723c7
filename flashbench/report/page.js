"use strict";
(() => {
  const form = document.getElementById("controls");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)");
  const plots = [...document.querySelectorAll("script.plot-data")].map((script) => ({
    node: document.getElementById(script.dataset.for),
    selection: script.parentElement.querySelector(".selection"),
    figure: JSON.parse(script.textContent),
  }));
  const hidden = new Set(); // legend groups switched off, in all figures alike
  let printing = false;

  const selection = () => Object.fromEntries(new FormData(form));
  const shown = (where, chosen) => Object.entries(where).every(([key, value]) => chosen[key] === value);

  function theme() {
    const style = getComputedStyle(document.documentElement);
    return (name) => style.getPropertyValue("--" + name).trim();
  }

  function painted(trace, colour) {
    const slot = trace.meta.slot;
    const ink = colour(slot === "ink" ? "soft" : "s" + slot);
    const copy = { ...trace, line: { ...trace.line, color: ink }, marker: { ...trace.marker, color: ink } };
    if (hidden.has(groupOf(trace))) copy.visible = "legendonly";
    if (trace.textfont) copy.textfont = { ...trace.textfont, color: colour("ink") };
    return copy;
  }

  // The lane for cells that were not timed takes as many rows as the selection needs.
  function placed(layout, traces, width) {
    const { height, lane_row: laneRow } = layout.meta;
    const rows = Math.max(0, ...traces.map((trace) => (trace.meta.lane ?? -1) + 1));
    const lane = rows ? rows * laneRow + 8 : 0;
    const names = new Set(traces.filter((trace) => trace.showlegend !== false).map((trace) => trace.name));
    const legend = Math.ceil(names.size / Math.max(1, Math.floor(width / 150))) * 20 + 12;
    const total = height + lane + (width < 600 ? legend - 32 : 0);
    const share = lane / (total - layout.margin.b - legend);
    return {
      height: total,
      margin: { ...layout.margin, t: legend, l: width < 600 ? 52 : layout.margin.l },
      yaxis: { ...layout.yaxis, domain: [rows ? share + 0.02 : 0, 1] },
      xaxis: { ...layout.xaxis, anchor: rows ? "y2" : "y" },
      // an axis without height would be drawn at NaN
      yaxis2: { ...layout.yaxis2, domain: [0, rows ? share : 0.01], range: [rows - 0.7, -0.7] },
    };
  }

  function themed(colour) {
    const axis = {
      gridcolor: colour("line"), linecolor: colour("line"), tickcolor: colour("line"), zerolinecolor: colour("line"),
    };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("ink") },
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") }, align: "left" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("soft"), activecolor: colour("accent") },
      axis,
    };
  }

  function draw({ node, selection: caption, figure }, chosen, colour) {
    const traces = figure.data.filter((trace) => shown(trace.meta.where, chosen));
    const width = node.clientWidth;
    const look = themed(colour);
    const place = placed(figure.layout, traces, width);
    const layout = {
      ...figure.layout, ...look, ...place, axis: undefined,
      xaxis: { ...place.xaxis, ...look.axis },
      yaxis: { ...place.yaxis, ...look.axis },
      hoversubplots: "axis", // so that the lane speaks beside the lines
      dragmode: touch.matches ? false : "zoom",
      annotations: traces.length ? [] : [{
        text: figure.layout.meta.empty ?? "Nothing was measured for this selection.",
        showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5,
      }],
    };
    const lanes = traces.map((trace) => painted(width < 600 && trace.meta.lane !== undefined
      ? { ...trace, textfont: { size: 10 } } : trace, colour));
    caption.textContent = figure.layout.meta.captions.find(({ where }) => shown(where, chosen))?.text ?? "";
    return Plotly.react(node, lanes, layout, {
      responsive: true, displaylogo: false, displayModeBar: width < 600 ? false : "hover",
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
      toImageButtonOptions: { format: "svg", filename: node.id },
    });
  }

  function render() {
    const chosen = selection();
    const colour = theme();
    for (const plot of plots) draw(plot, chosen, colour);
    for (const row of document.querySelectorAll("[data-where]")) {
      row.hidden = !printing && !shown(JSON.parse(row.dataset.where), chosen);
    }
  }

  const groupOf = (trace) => trace.legendgroup || trace.name;

  function toggle(event) {
    const group = groupOf(event.data[event.curveNumber]);
    if (!hidden.delete(group)) hidden.add(group);
    render();
    return false;
  }

  // A double click leaves one series alone, or brings all back.
  function isolate(event) {
    const group = groupOf(event.data[event.curveNumber]);
    const others = event.data.map(groupOf).filter((other) => other !== group);
    const alone = others.every((other) => hidden.has(other));
    hidden.clear();
    if (!alone) others.forEach((other) => hidden.add(other));
    render();
    return false;
  }

  function sortable(table) {
    const body = table.tBodies[0];
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        body.append(...sorted([...body.rows], column, down ? -1 : 1));
      });
    });
  }

  // Empty cells stay last whichever way the column is sorted.
  function sorted(rows, column, sign) {
    const key = (row) => {
      const cell = row.cells[column];
      return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
    };
    return rows.sort((left, right) => {
      const [a, b] = [key(left), key(right)];
      if (a === "" || b === "") return (a === "") - (b === "");
      return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
    });
  }

  function search(box, table, found) {
    const rows = [...table.tBodies[0].rows].map((row) => {
      const text = [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase();
      return { row, text, words: new Set(text.split(/\s+/)) };
    });
    // A word that some cell has as a whole ("causal", "flash", "1k") means that word; others match anywhere.
    const vocabulary = new Set(rows.flatMap(({ words }) => [...words]));
    box.addEventListener("input", () => {
      const wanted = box.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      for (const { row, text, words } of rows) {
        row.hidden = !wanted.every((word) => (vocabulary.has(word) ? words.has(word) : text.includes(word)));
        count += !row.hidden;
      }
      found.textContent = count + (count === 1 ? " cell" : " cells");
    });
  }

  for (const table of document.querySelectorAll("table.sortable")) sortable(table);
  const box = document.getElementById("search");
  if (box) search(box, document.getElementById("cells-table"), document.getElementById("found"));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", render);
  dark.addEventListener("change", render);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) { width = window.innerWidth; render(); }
  });
  for (const [event, value] of [["beforeprint", true], ["afterprint", false]]) {
    window.addEventListener(event, () => { printing = value; document.documentElement.classList.toggle("light", value); render(); });
  }
  render();
  for (const { node } of plots) {
    node.on("plotly_legendclick", toggle);
    node.on("plotly_legenddoubleclick", isolate);
  }
})();
