"use strict";
(() => {
  const form = document.getElementById("controls");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)");
  // What traces have in common stands once in the page.
  function unpacked({ shared, wheres, xs, traces, layout }) {
    const data = traces.map(([index, where, x, y, customdata, cells, times]) => {
      const rest = shared[index];
      const meta = { ...rest.meta, where: wheres[where], ...(cells && { cells }), ...(times && { times }) };
      return { ...rest, x: xs[x], y, ...(customdata && { customdata }), meta };
    });
    return { data, layout };
  }

  const plots = [...document.querySelectorAll("script.plot-data")].map((script) => {
    let figure; // read when it is drawn first: the page answers before
    return {
      node: document.getElementById(script.dataset.for),
      selection: script.parentElement.querySelector(".selection"),
      get figure() { return figure ??= unpacked(JSON.parse(script.textContent)); },
    };
  });
  const hidden = new Set(); // legend groups switched off, in all figures alike
  const notes = JSON.parse(document.getElementById("cell-notes")?.textContent ?? "null");
  const PAPER = 680; // CSS pixels that A4 and Letter have between their margins
  const PAPER_HEIGHT = 320; // so that two figures stand on a sheet
  let printing = false;

  const selection = () => Object.fromEntries(new FormData(form));
  const plain = (html) => { // text of what the page's author escaped
    const template = document.createElement("template");
    template.innerHTML = html;
    return template.content.textContent;
  };
  function element(name, properties = {}, ...children) {
    const node = Object.assign(document.createElement(name), properties);
    node.append(...children);
    return node;
  }
  const shown = (where, chosen) => Object.entries(where).every(([key, value]) => chosen[key] === value);

  function theme() {
    const style = getComputedStyle(document.documentElement);
    return (name) => style.getPropertyValue("--" + name).trim();
  }

  function painted(trace, colour) {
    const slot = trace.meta.slot;
    if (slot === undefined) return trace;
    const ink = colour(slot === "ink" ? "soft" : "s" + slot);
    const copy = { ...trace, line: { ...trace.line, color: ink }, marker: { ...trace.marker, color: ink } };
    if (hidden.has(groupOf(trace))) copy.visible = "legendonly";
    if (trace.error_y) copy.error_y = { ...trace.error_y, color: ink };
    if (trace.textfont) copy.textfont = { ...trace.textfont, color: colour("ink") };
    if (notes && trace.meta.cells && window.innerWidth >= 600) {
      copy.customdata = trace.customdata.map((text, i) => {
        const more = notes.texts[notes.of[trace.meta.cells[i]]];
        return text && more ? `${text}<br><span style="font-size:11px">${more}</span>` : text;
      });
    }
    return copy;
  }

  function seconds(value) {
    const [unit, scale] = value < 1e-3 ? ["µs", 1e6] : value < 1 ? ["ms", 1e3] : ["s", 1];
    return `${Number((value * scale).toPrecision(3))} ${unit}`;
  }

  // Speed-ups over another baseline than the one that the page was written with, from the traces' times.
  function rebased(traces, baseline) {
    const times = new Map();
    for (const { x, meta } of traces) {
      if (meta.of === baseline) x.forEach((length, i) => times.set(`${length} ${meta.run}`, meta.times[i]));
    }
    return traces.filter((trace) => !trace.meta.ring).map((trace) => {
      if (!trace.meta.times) return trace;
      const y = trace.x.map((length, i) => {
        const [base, mine] = [times.get(`${length} ${trace.meta.run}`), trace.meta.times[i]];
        return base && mine ? base / mine : null;
      });
      const customdata = y.map((ratio, i) => ratio === null ? "" : `${Number(ratio.toPrecision(3))}× in ${seconds(trace.meta.times[i])}`);
      return { ...trace, y, customdata };
    });
  }

  // The lane for cells that were not timed takes as many rows as the selection needs.
  function placed(layout, traces, width) {
    const { height: usual, lane_row: laneRow, bar } = layout.meta;
    const height = bar ? 90 + bar * Math.max(1, new Set(traces.flatMap(({ y }) => y)).size) : printing ? PAPER_HEIGHT : usual;
    const rows = Math.max(0, ...traces.map((trace) => (trace.meta.lane ?? -1) + 1));
    const lane = rows ? rows * laneRow + 8 : 0;
    const names = new Set(traces.filter((trace) => trace.showlegend !== false).map((trace) => trace.name));
    const legend = Math.ceil(names.size / Math.max(1, Math.floor(width / 150))) * 20 + 12;
    const total = height + lane + (width < 600 ? legend - 32 : 0);
    const share = lane / (total - layout.margin.b - legend);
    return {
      height: total,
      margin: { ...layout.margin, t: Math.max(legend, bar ? 32 : 0), l: width < 600 ? 52 : layout.margin.l },
      yaxis: { ...layout.yaxis, domain: [rows ? share + 0.02 : 0, 1] },
      xaxis: { ...layout.xaxis, anchor: rows ? "y2" : "y" },
      // an axis without height would be drawn at NaN
      yaxis2: { ...layout.yaxis2, domain: [0, rows ? share : 0.01], range: [rows - 0.7, -0.7] },
    };
  }

  // Ticks of a phone stand upright: every second or third of them.
  function thinned(axis, width) {
    const step = Math.ceil((axis.tickvals?.length ?? 0) / 6);
    if (width >= 600 || step < 2) return axis;
    const some = (list) => list.filter((_, i) => (list.length - 1 - i) % step === 0);
    return { ...axis, tickvals: some(axis.tickvals), ticktext: some(axis.ticktext) };
  }

  // A selection whose values lie near each other takes finer ticks than 1, 2, 5 of each decade.
  function refined(axis, traces, fine) {
    const values = fine && axis.tickmode === "array" ? traces.filter(({ meta }) => meta.lane === undefined).flatMap(({ y }) => y).filter((y) => y > 0) : [];
    if (!values.length || axis.range) return axis;
    const [low, high] = [Math.min(...values) / 1.1, Math.max(...values) * 1.1];
    const within = (value) => low <= value && value <= high;
    if (axis.tickvals.filter(within).length > 2) return axis;
    const places = fine.tickvals.flatMap((value, i) => (within(value) ? [i] : []));
    const step = Math.ceil(places.length / 7);
    const some = places.filter((_, i) => i % step === 0);
    if (some.length < 2) return axis;
    return { ...axis, tickvals: some.map((i) => fine.tickvals[i]), ticktext: some.map((i) => fine.ticktext[i]) };
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
    const meta = figure.layout.meta;
    let traces = figure.data.filter((trace) => shown(trace.meta.where, chosen));
    let axis = figure.layout.yaxis;
    if (meta.baseline) {
      const baseline = chosen.baseline ?? meta.baseline;
      if (baseline !== meta.baseline) {
        traces = rebased(traces, baseline);
        axis = { ...axis, tickmode: "auto", tickvals: undefined, ticktext: undefined };
      }
      axis = { ...axis, title: { ...axis.title, text: `times faster than ${baseline.replaceAll("&", "&amp;").replaceAll("<", "&lt;")}` } };
    }
    axis = refined(axis, traces, meta.fine);
    const unit = traces[0]?.meta.unit; // of values that have their own by selection
    if (unit) axis = { ...axis, ticksuffix: unit };
    const width = printing ? PAPER : node.clientWidth;
    const look = themed(colour);
    const place = placed(figure.layout, traces, width);
    const layout = {
      ...figure.layout, ...look, ...place, axis: undefined, width, autosize: false,
      xaxis: { ...thinned(place.xaxis, width), ...look.axis },
      yaxis: { ...axis, domain: place.yaxis.domain, ...look.axis },
      hoversubplots: "axis", // so that the lane speaks beside the lines
      dragmode: touch.matches ? false : "zoom",
      ...(traces.length ? {} : { xaxis: { visible: false }, yaxis: { visible: false } }),
      annotations: traces.length ? [] : [{
        text: figure.layout.meta.empty ?? "Nothing was measured for this selection.",
        showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5,
      }],
    };
    const small = { textfont: { size: 10 }, showscale: false };
    const lanes = traces.map((trace) => painted((width < 600 && trace.meta.lane !== undefined)
      || (width < 700 && trace.type === "heatmap") ? { ...trace, ...small } : trace, colour));
    if (meta.bar) node.style.minHeight = 0;
    caption.textContent = meta.captions.find(({ where }) => shown(where, chosen))?.text ?? meta.instead ?? "";
    return Plotly.react(node, lanes, layout, {
      displaylogo: false, doubleClickDelay: 400, displayModeBar: width < 600 ? false : "hover",
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
      toImageButtonOptions: { format: "svg", filename: node.id },
    });
  }

  // What the figure shows, in words: a row per series, a column per length.
  function numbers({ node, figure }) {
    const details = node.parentElement.querySelector("details.numbers");
    if (!details?.open) return;
    const lines = node.data.filter(({ meta, customdata, x }) => customdata && !meta.ring && x.length);
    const scatter = figure.layout.hovermode === "closest";
    const { unit } = figure.layout.meta; // of points whose text leaves their place out
    const lengths = scatter ? [] : [...new Set(lines.flatMap(({ x }) => x))].sort((a, b) => (typeof a === "string" ? 0 : a - b));
    const { tickvals = [], ticktext = [] } = figure.layout.xaxis;
    const label = (x) => (typeof x === "string" ? plain(x) : tickvals.includes(x) ? ticktext[tickvals.indexOf(x)] : x % 1024 ? String(x) : `${x / 1024}k`);
    const rows = new Map();
    for (const { name, x, y, customdata, meta } of lines) {
      const cells = rows.get(name) ?? new Map();
      x.forEach((at, i) => {
        let text = plain((customdata[i] || "").split("<br>")[0].replace("<extra></extra>", ""));
        if (unit && text && y[i] !== null) text = `${Number(y[i].toPrecision(4))} ${unit}, ${Number(x[i].toPrecision(4))} FLOP/B, ${text}`;
        if (text && (y[i] !== null || meta.lane !== undefined)) cells.set(scatter ? cells.size : at, text);
      });
      rows.set(name, cells);
    }
    const head = element("tr", {}, ...["series", ...(scatter ? ["points"] : lengths.map(label))].map((text) => element("th", { scope: "col", textContent: text })));
    const body = [...rows].map(([name, cells]) => element("tr", {}, element("th", { scope: "row", textContent: plain(name) }),
      ...(scatter ? [element("td", { textContent: [...cells.values()].join("; ") })] : lengths.map((at) => element("td", { textContent: cells.get(at) ?? "" })))));
    const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
    details.querySelector(".scroll")?.remove();
    details.append(element("div", { className: "scroll", tabIndex: 0 }, table));
  }

  function tick() {
    for (const box of form.querySelectorAll("[data-series]")) box.checked = !hidden.has(escaped(box.dataset.series));
  }

  function drawAll() {
    const [chosen, colour] = [selection(), theme()];
    tick();
    for (const plot of plots) { draw(plot, chosen, colour); numbers(plot); }
    remember();
  }

  const distance = ({ node }) => Math.abs(node.getBoundingClientRect().top);

  function render() {
    drawAll();
    renderTables();
  }

  function renderTables() {
    const chosen = selection();
    tick();
    for (const row of document.querySelectorAll("[data-where]")) {
      row.hidden = !printing && !shown(JSON.parse(row.dataset.where), chosen);
    }
    for (const grid of grids) grid.draw(chosen);
  }

  const groupOf = (trace) => trace.legendgroup || trace.name;

  function toggle(event) {
    const group = groupOf(event.data[event.curveNumber]);
    if (!hidden.delete(group)) hidden.add(group);
    drawAll();
    return false;
  }

  // A double click leaves one series alone, or brings all back.
  function isolate(event) {
    const group = groupOf(event.data[event.curveNumber]);
    const others = event.data.map(groupOf).filter((other) => other !== group);
    const alone = others.every((other) => hidden.has(other));
    hidden.clear();
    if (!alone) others.forEach((other) => hidden.add(other));
    drawAll();
    return false;
  }

  const MOST_ROWS = 500;

  // A table drawn from data: of the rows that are wanted, the first MOST_ROWS until all are asked for.
  function gridOf(place) {
    const { label, noun, example, tools, head, texts, columns, values: packed, wheres, where } = JSON.parse(place.querySelector(".grid-data").textContent);
    const values = packed.map((one) => (one?.of ? one.at.map((index) => one.of[index]) : one));
    const count = columns[0]?.length ?? 0;
    const textOf = (index) => (Array.isArray(texts[index]) ? texts[index][0] : texts[index]);
    let index = null; // of words, made for the first search
    function indexed() {
      const lines = Array.from({ length: count }, (_, row) => columns.map((column) => textOf(column[row])).join(" ").toLowerCase());
      // A word that some cell has as a whole ("causal", "flash", "1k") means that word; others match anywhere.
      const vocabulary = new Set(lines.flatMap((line) => line.split(/\s+/)));
      return { lines, vocabulary };
    }
    const state = { sort: -1, down: false, find: "", only: place.id !== "cells-table", all: false };
    const found = element("output");
    const box = element("input", { type: "search", placeholder: example, autocomplete: "off" });
    const only = element("input", { type: "checkbox", checked: state.only });
    const copy = element("button", { type: "button", textContent: "Copy" });
    const more = element("button", { type: "button", className: "more" });
    const body = element("tbody");
    const heads = head.map(({ title, kind, number }, column) => {
      const button = element("button", { type: "button", textContent: title });
      button.addEventListener("click", () => {
        Object.assign(state, { sort: column, down: state.sort === column && !state.down });
        draw(selection());
        remember();
      });
      return element("th", { scope: "col", className: kind.replace("reason", "") + (number ? " number" : "") }, button);
    });
    const table = element("table", { className: head.filter(({ kind }) => !kind.includes("screen")).length > 13 ? "sortable many" : "sortable" }, element("caption", { className: "unseen", textContent: label }),
      element("thead", {}, element("tr", {}, ...heads)), body);
    let rows = [];

    function wanted(chosen) {
      const asked = state.find.toLowerCase().split(/\s+/).filter(Boolean);
      const visible = wheres.map((one) => shown(one, chosen));
      const kept = [];
      for (let row = 0; row < count; row++) {
        if (state.only && where.length && !visible[where[row]]) continue;
        if (!asked.length) { kept.push(row); continue; }
        index ??= indexed();
        const { lines, vocabulary } = index;
        const tokens = new Set(lines[row].split(/\s+/));
        if (asked.every((word) => (vocabulary.has(word) ? tokens.has(word) : lines[row].includes(word)))) kept.push(row);
      }
      return state.sort < 0 ? kept : sorted(kept);
    }

    // Empty cells stay last whichever way the column is sorted.
    function sorted(kept) {
      const numbers = values[state.sort];
      const key = numbers ? (row) => numbers[row] : (row) => textOf(columns[state.sort][row]) || null;
      const sign = state.down ? -1 : 1;
      return kept.sort((left, right) => {
        const [a, b] = [key(left), key(right)];
        if (a === null || b === null) return (a === null) - (b === null);
        return sign * (numbers ? a - b : a.localeCompare(b, undefined, { numeric: true }));
      });
    }

    function cell(column, row) {
      const text = texts[columns[column][row]];
      const node = element("td", { className: head[column].kind });
      if (Array.isArray(text)) node.append(element("span", { textContent: text[0], className: text[1], title: text[2] }));
      else node.textContent = text;
      if (head[column].number) node.dataset.value = values[column][row] ?? "";
      return node;
    }

    function draw(chosen) {
      rows = wanted(chosen);
      const limit = state.all ? rows.length : MOST_ROWS;
      body.replaceChildren(...rows.slice(0, limit).map((row) => element("tr", {}, ...columns.map((_, column) => cell(column, row)))));
      heads.forEach((node, column) => (column === state.sort
        ? node.setAttribute("aria-sort", state.down ? "descending" : "ascending") : node.removeAttribute("aria-sort")));
      found.textContent = `${rows.length} ${noun}` + (rows.length === 1 ? "" : "s");
      more.hidden = rows.length <= limit;
      more.textContent = `Show all ${rows.length} rows`;
    }

    const raw = (row, column) => (values[column] ? values[column][row] : textOf(columns[column][row]) || null);
    function csv(mark) {
      const quoted = (value) => (value === null ? "" : /[",\t\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
      return [head.map(({ name }) => name), ...rows.map((row) => columns.map((_, column) => raw(row, column)))]
        .map((line) => line.map(quoted).join(mark)).join("\n") + "\n";
    }
    const json = () => JSON.stringify(rows.map((row) => Object.fromEntries(head.map(({ name }, column) => [name, raw(row, column)]))), null, 1) + "\n";

    function saves(format, text) {
      const button = element("button", { type: "button", textContent: `Download ${format.toUpperCase()}`, className: format });
      button.addEventListener("click", () => {
        const href = URL.createObjectURL(new Blob([text()], { type: format === "csv" ? "text/csv" : "application/json" }));
        element("a", { href, download: `${place.id}.${format}` }).click();
        setTimeout(() => URL.revokeObjectURL(href), 1000);
      });
      return button;
    }

    copy.addEventListener("click", () => {
      const area = element("textarea", { value: csv("\t") });
      document.body.append(area);
      area.select();
      copy.textContent = document.execCommand("copy") ? "Copied" : "Not copied";
      area.remove();
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    });
    const redraw = () => { draw(selection()); remember(); };
    more.addEventListener("click", () => { state.all = true; redraw(); });
    box.addEventListener("input", () => { state.find = box.value; redraw(); });
    only.addEventListener("change", () => { state.only = only.checked; redraw(); });
    const bar = element("div", { className: "search" }, element("label", {}, "Search ", box),
      ...(where.length ? [element("label", {}, only, " the selection above alone")] : []), found, copy, saves("csv", () => csv(",")), saves("json", json));
    if (tools) place.append(bar);
    place.append(element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: label }, table), more);
    return {
      draw, state, key: place.id,
      restore() { box.value = state.find; only.checked = state.only; },
      column: (name) => head.findIndex((one) => one.name === name), name: () => head[state.sort]?.name,
    };
  }

  const grids = [...document.querySelectorAll(".grid")].map(gridOf);
  const cells = grids.find(({ key }) => key === "cells-table");
  const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;").replaceAll("'", "&#x27;");

  // The address holds what differs from the page as it opens: "#memory?pass=bwd&hide=naive".
  const usual = selection();
  let section = location.hash.slice(1).split("?")[0];

  function remember() {
    const state = new URLSearchParams();
    for (const [key, value] of Object.entries(selection())) if (usual[key] !== value) state.set(key, value);
    if (hidden.size) state.set("hide", JSON.stringify([...hidden].map(plain)));
    if (cells?.state.find) state.set("find", cells.state.find);
    if (cells?.state.only) state.set("only", "1");
    if (cells && cells.state.sort >= 0) state.set("sort", (cells.state.down ? "-" : "") + cells.name());
    const text = "#" + section + (state.size ? "?" + state : "");
    if (text !== location.hash && (text !== "#" || location.hash)) history.replaceState(null, "", text);
  }

  // Takes what the address says over; returns the section that it names.
  function restore() {
    const [at, text = ""] = location.hash.slice(1).split(/\?(.*)/s);
    section = at;
    const state = new URLSearchParams(text);
    for (const [key, value] of Object.entries({ ...usual, ...Object.fromEntries(state) })) {
      const field = form.elements.namedItem(key);
      if (!(key in usual) || !field) continue;
      const known = field instanceof RadioNodeList ? [...field].some((one) => one.value === value)
        : field instanceof HTMLSelectElement && [...field.options].some((one) => one.value === value);
      if (known) field.value = value;
    }
    hidden.clear();
    let hide = [];
    try { hide = JSON.parse(state.get("hide") ?? "[]"); } catch { /* not an address of ours */ }
    for (const name of Array.isArray(hide) ? hide : []) hidden.add(escaped(String(name)));
    if (cells) {
      const sort = state.get("sort") ?? "";
      Object.assign(cells.state, {
        find: state.get("find") ?? "", only: state.get("only") === "1", down: sort.startsWith("-"),
        sort: sort ? cells.column(sort.replace(/^-/, "")) : -1,
      });
      cells.restore();
    }
    return at;
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", (event) => {
    const { series } = event.target.dataset;
    if (series === undefined) { render(); return; }
    hidden[event.target.checked ? "delete" : "add"](escaped(series));
    drawAll();
  });
  for (const plot of plots) {
    plot.node.parentElement.querySelector("details.numbers")?.addEventListener("toggle", () => numbers(plot));
  }
  dark.addEventListener("change", render);
  // What an address names comes to stand below the bar, however many lines that has.
  const below = () => { document.documentElement.style.scrollPaddingTop = `${form.offsetHeight + 12}px`; };
  below();
  let width = window.innerWidth;
  window.addEventListener("resize", below);
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) { width = window.innerWidth; render(); }
  });
  for (const [event, value] of [["beforeprint", true], ["afterprint", false]]) {
    window.addEventListener(event, () => { printing = value; document.documentElement.classList.toggle("light", value); render(); });
  }
  const opening = restore();
  renderTables();
  remember();
  if (opening) document.getElementById(opening)?.scrollIntoView();
  // The page answers at once; figures follow one by one, those in sight first.
  const waiting = [...plots].sort((a, b) => distance(a) - distance(b));
  (function next() {
    const plot = waiting.shift();
    if (!plot) return;
    draw(plot, selection(), theme());
    numbers(plot);
    plot.node.on("plotly_legendclick", toggle);
    plot.node.on("plotly_legenddoubleclick", isolate);
    if (opening && !waiting.length) document.getElementById(opening)?.scrollIntoView();
    setTimeout(next);
  })();
  window.addEventListener("hashchange", () => {
    const known = location.hash.includes("?");
    const at = known ? restore() : location.hash.slice(1);
    section = at;
    render();
    if (known && at) document.getElementById(at)?.scrollIntoView();
  });
})();
