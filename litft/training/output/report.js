// Redraws the curves of report.html: values under the pointer, a logarithmic axis for the loss, smoothing.
"use strict";
const TICKS = 4;
const plots = [...document.querySelectorAll(".plot")];
const logarithmic = document.getElementById("logarithmic");
const smoothing = document.getElementById("smoothing");
const short = (value) => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4)));

// exponential moving average; the weights of the first points are corrected for their number
function smooth(curve, factor) {
  let sum = 0, weight = 0;
  return curve.map(([step, value]) => {
    sum = factor * sum + (1 - factor) * value;
    weight = factor * weight + (1 - factor);
    return [step, sum / weight];
  });
}

function draw(plot, index) {
  const { curves, steps, low, high } = plot.dataset;
  const factor = Number(smoothing.value);
  plot.shown = JSON.parse(curves).map((curve) => smooth(curve, factor));
  const positive = plot.shown.every((curve) => curve.every(([, value]) => value > 0));
  const log = logarithmic.checked && index === 0 && positive;
  const scale = log ? Math.log10 : (value) => value;
  const values = plot.shown.flat().map(([, value]) => value);
  const bottom = log ? scale(Math.min(...values)) : Number(low);
  const top = log ? scale(Math.max(...values)) : Number(high);
  plot.height = (value) => (100 * (top - scale(value))) / (top - bottom || 1);
  plot.querySelectorAll("polyline").forEach((line, number) => {
    const points = plot.shown[number].map(([step, value]) => `${(100 * step) / Math.max(steps, 1)},${plot.height(value)}`);
    if (points.length === 1) points.push(points[0].replace(/^[^,]*/, (x) => Number(x) + 1));
    line.setAttribute("points", points.join(" "));
    const marks = plot.querySelectorAll("path.point")[number];
    if (marks.getAttribute("d")) marks.setAttribute("d", points.slice(0, plot.shown[number].length).map((at) => `M${at}h0`).join(""));
  });
  const labels = plot.querySelector(".y");
  plot.linear ??= labels.innerHTML;
  labels.innerHTML = plot.linear;
  plot.querySelectorAll("line").forEach((line) => line.classList.toggle("hidden", log));
  if (!log) return;
  labels.replaceChildren(...Array.from({ length: TICKS + 1 }, (_, number) => {
    const label = document.createElement("span");
    label.style.top = `${(100 * number) / TICKS}%`;
    label.textContent = short(10 ** (top - ((top - bottom) * number) / TICKS));
    return label;
  }));
}

function point(plot, event) {
  const box = plot.querySelector("svg").getBoundingClientRect();
  const step = ((event.clientX - box.left) / box.width) * Math.max(plot.dataset.steps, 1);
  const names = plot.shown.length > 1 ? ["training, ", "validation, "] : [""];
  const nearest = plot.shown.map((curve, number) => [names[number], curve]).filter(([, curve]) => curve.length).map(([name, curve]) =>
    [name, ...curve.reduce((best, item) => (Math.abs(item[0] - step) < Math.abs(best[0] - step) ? item : best))]);
  const tip = plot.querySelector(".tip");
  tip.textContent = nearest.map(([name, at, value]) => `${name}step ${Math.round(at)}: ${short(value)}`).join("   ");
  tip.hidden = !nearest.length;
}

plots.forEach((plot, index) => {
  draw(plot, index);
  plot.addEventListener("pointermove", (event) => point(plot, event));
  plot.addEventListener("pointerleave", () => { plot.querySelector(".tip").hidden = true; });
});
for (const control of [logarithmic, smoothing]) control?.addEventListener("input", () => plots.forEach(draw));
