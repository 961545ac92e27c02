// Draws the panels of a run on a shared time axis, with linked zoom and cursor.
"use strict";

(() => {
  const run = JSON.parse(document.getElementById("run-data").textContent);
  const root = document.documentElement;
  const reset = document.getElementById("reset");
  const isWide = matchMedia("(min-width: 901px)"); // the legend fits next to its panel
  const charts = [];

  const AXIS_WIDTH = 62;
  const LEGEND_WIDTH = 280;
  const PRINT_WIDTH = 690;
  const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  const WIDTHS = { bold: 1.8, thin: 1.2, dashed: 1.2, level: 1.2 };
  const DASHES = { dashed: [3, 3], level: [8, 5] };
  const TIME_STEPS = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600,
    900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800,
  ];

  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const color = (line) => `--c-${line.color}`;

  // "12.5 s" in runs of seconds, "2:05" of minutes, "1:02:05" of hours ("1:02 h" on the axis).
  function timeText(seconds, step) {
    const digits = step < 1 ? Math.max(1, Math.ceil(-Math.log10(step) - 1e-9)) : 0;
    if (run.seconds < 60) return `${seconds.toFixed(digits)} s`;
    const rounded = Number(seconds.toFixed(digits));
    const [h, m] = [Math.floor(rounded / 3600), Math.floor(rounded / 60) % 60];
    const s = (rounded % 60).toFixed(digits).padStart(digits ? digits + 3 : 2, "0");
    if (run.seconds < 3600) return `${m}:${s}`;
    const hours = `${h}:${String(m).padStart(2, "0")}`;
    return step < 60 ? `${hours}:${s}` : `${hours} h`;
  }

  function numberText(value) {
    const size = Math.abs(value);
    if (size === 0) return "0";
    return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
  }

  function valueText(panel, value) {
    if (value == null) return "";
    const text = `${numberText(value)}${panel.unit === "%" ? "" : " "}${panel.unit}`;
    return panel.fullScale ? `${text} · ${((100 * value) / panel.fullScale).toFixed(0)}%` : text;
  }

  // Everything drawn in a panel: the edges of the bands first, below the lines.
  function parts(panel) {
    const all = panel.tables.flatMap((table) => table.lines.map((line) => ({ x: table.x, line })));
    const bands = all.filter(({ line }) => line.low && line.style !== "dashed");
    return [
      ...bands.flatMap((part) => [{ ...part, edge: "high" }, { ...part, edge: "low" }]),
      ...all,
    ];
  }

  // Lines may have different times. A null is a gap; an undefined from joining is not.
  function joined(drawn) {
    const EXPAND = 2;
    const tables = [[[0, run.seconds]], ...drawn.map(({ x, line, edge }) => [x, line[edge || "y"]])];
    return uPlot.join(tables, tables.map((table) => table.map(() => EXPAND)));
  }

  function bandsOf(drawn) {
    return drawn.flatMap(({ line, edge }, i) => (edge !== "high" ? [] : [{
      series: [i + 1, i + 2],
      fill: () => `color-mix(in srgb, ${css(color(line))} 20%, transparent)`,
    }]));
  }

  // The index of the nearest value of the line, or the given index inside a gap.
  function nearest(u, series, index) {
    const values = u.data[series];
    if (!series || values[index] !== undefined) return index;
    let [left, right] = [index, index];
    while (left >= 0 && values[left] === undefined) left -= 1;
    while (right < values.length && values[right] === undefined) right += 1;
    const [low, high] = [values[left] != null, values[right] != null];
    if (!low || !high) return low ? left : high ? right : index;
    return u.data[0][index] - u.data[0][left] <= u.data[0][right] - u.data[0][index] ? left : right;
  }

  // A level is constant: it needs no point under the cursor.
  function hoverPoint(part) {
    return part && !part.edge && part.line.style !== "level" ? document.createElement("div") : null;
  }

  function seriesOf(panel, drawn) {
    const time = {
      label: "time",
      value: (u, seconds) => (seconds == null ? "" : timeText(seconds, run.seconds < 120 ? 0.1 : 1)),
    };
    return [time, ...drawn.map(({ line, edge }) => ({
      label: line.label,
      class: edge ? "edge" : "line",
      show: line.shown,
      stroke: () => (edge ? "transparent" : css(color(line))),
      width: edge ? 0 : WIDTHS[line.style],
      dash: DASHES[line.style],
      points: { show: false },
      value: (u, value) => valueText(panel, value),
    }))];
  }

  function axesOf(panel) {
    const shared = {
      stroke: () => css("--faint"),
      font: FONT,
      grid: { stroke: () => css("--grid"), width: 1 },
      ticks: { show: false },
    };
    const time = {
      ...shared,
      size: 34,
      gap: 8,
      space: 74,
      incrs: TIME_STEPS,
      values: (u, splits, axis, space, step) => splits.map((s) => timeText(s, step)),
    };
    const left = { ...shared, scale: "y", size: AXIS_WIDTH, space: 34, gap: 8 };
    const right = {
      ...left,
      scale: "share",
      side: 1,
      grid: { show: false },
      values: (u, splits) => splits.map((s) => `${numberText(s).replace(/\.0+$/, "")}%`),
    };
    return panel.fullScale ? [time, left, right] : [time, left];
  }

  function scalesOf(panel) {
    const roof = (high) => panel.top || high;
    const y = { range: (u, low, high) => [0, roof(high) > 0 ? roof(high) * 1.06 : 1] };
    const scales = { x: { time: false }, y };
    if (panel.fullScale) {
      const percent = (value) => (100 * value) / panel.fullScale;
      scales.share = { from: "y", range: (u, low, high) => [percent(low), percent(high)] };
    }
    return scales;
  }

  function drawPhases(u) {
    const { top, height, left, width } = u.bbox;
    u.ctx.save();
    u.ctx.fillStyle = css("--band");
    for (const [, begin, end] of run.phases) {
      const from = Math.max(left, u.valToPos(begin, "x", true));
      const to = Math.min(left + width, u.valToPos(end, "x", true));
      if (to > from) u.ctx.fillRect(from, top, Math.max(1, to - from), height);
    }
    u.ctx.restore();
  }

  // The step between epoch numbers, and between epoch lines. If dense, only numbered ones have lines.
  function epochSteps(places, ratio) {
    if (places.length < 2) return [1, 1];
    const usual = (places[places.length - 1] - places[0]) / (places.length - 1) / ratio;
    const nice = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];
    const numbers = nice.find((n) => n * usual >= 26) || places.length;
    return [numbers, usual < 12 ? numbers : 1];
  }

  function drawEpochs(u) {
    const { top, height, left, width } = u.bbox;
    const ratio = uPlot.pxRatio;
    const places = run.epochs.map(([seconds]) => u.valToPos(seconds, "x", true));
    const [numbers, lines] = epochSteps(places, ratio);
    const ctx = u.ctx;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = css("--epoch");
    ctx.lineWidth = ratio;
    ctx.setLineDash([]);
    ctx.font = FONT.replace("12px", `${11 * ratio}px`);
    ctx.textBaseline = "top";
    ctx.textAlign = "left";
    run.epochs.forEach(([, index], i) => {
      const x = Math.round(places[i]) + 0.5;
      if (x < left || x > left + width || i % lines) return;
      ctx.globalAlpha = 0.65;
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
      ctx.globalAlpha = 1;
      if (i % numbers === 0) ctx.fillText(String(index), x + 4 * ratio, top + 2 * ratio);
    });
    ctx.restore();
  }

  function zoomChanged(u, scale) {
    if (scale !== "x") return;
    const { min, max } = u.scales.x;
    Object.assign(u.root.parentNode.dataset, { from: min, to: max });
    reset.hidden = max - min > run.seconds * 0.999;
  }

  // Hiding a line also hides its band.
  function lineToggled(drawn) {
    return (u, series, { show }) => {
      if (show == null || series == null || !series || drawn[series - 1].edge) return;
      drawn.forEach(({ line, edge }, i) => {
        if (edge && line === drawn[series - 1].line) u.setSeries(i + 1, { show });
      });
    };
  }

  // Makes the legend of uPlot usable from the keyboard.
  function legendKeys(u) {
    u.root.querySelectorAll(".u-legend .u-series:not(:first-child) th").forEach((name) => {
      Object.assign(name, { tabIndex: 0, role: "button" });
      name.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        name.click();
      });
    });
  }

  function sizeOf(place) {
    const legend = isWide.matches ? LEGEND_WIDTH : 0;
    const width = root.dataset.theme === "light" ? PRINT_WIDTH : place.clientWidth - legend;
    return { width: Math.max(260, width), height: width < 600 ? 190 : 236 };
  }

  function draw(panel, place) {
    const drawn = parts(panel);
    const options = {
      ...sizeOf(place),
      padding: [10, panel.fullScale ? 0 : AXIS_WIDTH, 0, 0],
      scales: scalesOf(panel),
      series: seriesOf(panel, drawn),
      bands: bandsOf(drawn),
      axes: axesOf(panel),
      cursor: {
        y: false,
        points: { size: 7, width: 1.5, show: (u, i) => hoverPoint(drawn[i - 1]) },
        dataIdx: nearest,
        drag: { x: true, y: false, dist: 4 },
        sync: { key: "run", setSeries: false, scales: ["x", null] },
      },
      legend: {
        markers: {
          width: 0,
          stroke: () => "transparent",
          fill: () => "transparent",
        },
      },
      hooks: {
        init: [(u) => {
          u.root.querySelectorAll(".u-legend .u-marker").forEach((marker, i) => {
            if (!i) return;
            const { line } = drawn[i - 1];
            const dash = { dashed: "dotted", level: "dashed" }[line.style] || "solid";
            const width = line.style === "bold" ? 3 : 2;
            marker.style.cssText = `border-top: ${width}px ${dash} var(${color(line)})`;
          });
          legendKeys(u);
        }],
        drawAxes: [drawPhases],
        draw: [drawEpochs],
        setScale: [zoomChanged],
        setSeries: [lineToggled(drawn)],
      },
    };
    return new uPlot(options, joined(drawn), place);
  }

  function resizeAll() {
    charts.forEach(({ chart, place }) => chart.setSize(sizeOf(place)));
  }

  run.panels.forEach((panel, i) => {
    const place = document.getElementById(`plot-${i}`);
    if (place) charts.push({ chart: draw(panel, place), place });
  });

  reset.addEventListener("click", () => {
    charts.forEach(({ chart }) => chart.setScale("x", { min: 0, max: run.seconds }));
  });

  let pending = 0;
  new ResizeObserver(() => {
    cancelAnimationFrame(pending);
    pending = requestAnimationFrame(resizeAll);
  }).observe(document.querySelector("main"));

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    charts.forEach(({ chart }) => chart.redraw());
  });

  // Print in the light theme, at page width, with all sections expanded.
  const folded = document.querySelectorAll("details:not([open])");
  addEventListener("beforeprint", () => {
    root.dataset.theme = "light";
    folded.forEach((each) => { each.open = true; });
    resizeAll();
  });
  addEventListener("afterprint", () => {
    delete root.dataset.theme;
    folded.forEach((each) => { each.open = false; });
    resizeAll();
  });
})();
