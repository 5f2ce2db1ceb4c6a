const byId = id => document.getElementById(id);
const MINUTE = 60, LEAST = 10, LABELS = 64, MOMENTS = 1200;
const TROUBLE = ["stopped", "dead", "unreachable"];
let job = null, samples = [], curves = [], paused = false, cursor = null, connected = true;
let sorted = { column: 0, up: true };

// Words -----------------------------------------------------------------------------------------

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (value >= 1024 && power < 4) { value /= 1024; power++; }
  return value.toFixed(power && value < 100 ? 1 : 0) + " " + units[power];
}
const share = value => Math.round(100 * value) + " %";
function seconds(value) {
  if (!value) return "";
  return value < 1 ? (value * 1e3).toFixed(value < .1 ? 1 : 0) + " ms" : value.toFixed(value < 100 ? 2 : 0) + " s";
}
const clock = time => new Date(time * 1e3).toLocaleTimeString();
function call(rank) {
  if (!rank.operation) return rank.status === "running" ? "(computing)" : "";
  return rank.operation + (rank.sequence === null ? "" : " #" + rank.sequence);
}
function figure(value) {
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  return size && (size < .001 || size >= 1e6) ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}
function logged(rank) {
  return Object.entries(rank.values).map(([name, value]) => `${name} ${figure(value)}`).join(", ");
}

// The table: one row a rank ---------------------------------------------------------------------

// Heading; class; what stands there; what it is sorted by, if that is something else.
const COLUMNS = [
  ["rank", "", r => r.rank],
  ["status", "text status", r => r.status + (job.slowest === r.rank ? ", slowest" : "")],
  ["step", "", r => r.step ?? "", r => r.step ?? -1],
  ["step time", "", r => seconds(r.step_seconds), r => r.step_seconds],
  ["call", "text", call],
  ["for", "", r => r.operation ? seconds(r.seconds_in) : "", r => r.operation ? r.seconds_in : -1],
  ["waits for", "text", r => r.waits_for.slice(0, 8).join(", ") + (r.waits_for.length > 8 ? ", ..." : "")],
  ["waiting", "", r => share(r.waiting), r => r.waiting],
  ["communicating", "", r => share(r.communicating), r => r.communicating],
  ["reason", "text reason long", r => r.reason],
  ["sent a second", "", r => bytes(r.sent), r => r.sent],
  ["received a second", "", r => bytes(r.received), r => r.received],
  ["memory", "", r => r.memory ? bytes(r.memory) : "", r => r.memory],
  ["logged", "text long", logged],
  ["last line", "text long", r => r.log],
  ["about", "text long", r => r.signature],
  ["line", "text", r => r.where],
  ["group", "text long", r => r.operation ? r.group || "all ranks" : ""],
  ["last call", "text long", r => r.last_call],
  ["host", "text", r => r.host],
  ["process", "", r => r.pid || "", r => r.pid],
  ["generation", "", r => r.generation],
  ["published", "", r => r.time ? clock(r.time) : "", r => r.time],
];
const rows = new Map();

COLUMNS.forEach(([heading, kind], column) => {
  const cell = document.createElement("th");
  cell.scope = "col";
  cell.className = kind.includes("text") ? "text" : "";
  cell.textContent = heading;
  onSort(cell, up => {
    sorted = { column, up };
    fillTable();
  });
  byId("heads").append(cell);
});

function newRow() {
  const row = document.createElement("tr");
  for (const [, kind] of COLUMNS) row.insertCell().className = kind;
  return row;
}

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function fillTable() {
  if (!job) return;
  const present = new Set(job.ranks.map(rank => rank.rank));
  for (const [number, row] of rows) if (!present.has(number)) { row.remove(); rows.delete(number); }
  for (const rank of job.ranks) {
    if (!rows.has(rank.rank)) rows.set(rank.rank, newRow());
    const row = rows.get(rank.rank);
    row.className = rank.status + (job.slowest === rank.rank ? " slowest" : "");
    COLUMNS.forEach(([, kind, text], column) => {
      const cell = row.cells[column], words = String(text(rank));
      put(cell, words);
      if (kind.includes("long") && cell.title !== words) cell.title = words;
    });
  }
  const [, , text, value] = COLUMNS[sorted.column], key = value ?? text;
  const order = [...job.ranks].sort((one, other) => {
    const difference = compare(key(one), key(other));
    return (sorted.up ? difference : -difference) || one.rank - other.rank;
  });
  const body = byId("rows");
  order.forEach((rank, place) => {
    const row = rows.get(rank.rank);
    if (body.rows[place] !== row) body.insertBefore(row, body.rows[place] ?? null);
  });
  markSorted(byId("heads").cells[sorted.column], sorted.up);
}

// What is wrong; a screen reader is told once, and not how many seconds it has been so -----------

let said = "";

// The cause comes first; who waits for it is folded.
function fillTrouble() {
  const [cause, ...waits] = job.chain, lines = cause ? [["cause", cause]] : [];
  if (waits.length) lines.push(["waits", waits]);
  for (const rank of job.ranks) {
    const text = `rank ${rank.rank} is ${rank.status}${rank.reason ? ": " + rank.reason : ""}`;
    if (TROUBLE.includes(rank.status) && text !== cause) lines.push([rank.status, text]);
  }
  if (job.ended) lines.push(["end", `The job has ended: ${job.ended}`]);
  if (!connected && !job.ended) lines.push(["end", "The connection to phalanx watch is lost: it has ended, perhaps."]);
  const spoken = lines.filter(([kind]) => kind !== "cause" && kind !== "waits").map(([, text]) => text);
  if (job.chain.length) spoken.push("ranks wait, and nothing moves");
  put(byId("spoken"), spoken.join("; "));
  const now = JSON.stringify(lines);
  if (now === said) return;
  said = now;
  const open = byId("alerts").querySelector("details")?.open;
  byId("alerts").className = lines.length ? "bad" : "";
  if (!lines.length) lines.push(["fine", "Nothing: no rank is stopped, dead or out of reach, and nothing stalls."]);
  byId("alerts").replaceChildren(...lines.map(([kind, text]) => {
    const line = document.createElement(kind === "waits" ? "details" : "p");
    line.className = kind;
    if (kind === "waits") fillWaits(line, text, open);
    else line.textContent = text;
    return line;
  }));
}

function fillWaits(part, lines, open) {
  const waiting = job.ranks.filter(rank => rank.waits_for.length).length;
  const heading = document.createElement("summary");
  heading.textContent = waiting === 1 ? "1 rank waits" : `${waiting} ranks wait`;
  part.open = Boolean(open);
  part.append(heading, ...lines.map(text => {
    const line = document.createElement("p");
    line.textContent = text;
    return line;
  }));
}

function fillSummary() {
  const count = status => job.ranks.filter(rank => rank.status === status).length;
  const words = ["running", "starting", ...TROUBLE, "ended"]
    .filter(count).map(status => `${count(status)} ${status}`);
  const slowest = job.slowest === null ? "" : `; slowest: rank ${job.slowest}`;
  const started = job.generation ? `, started again ${job.generation} times` : "";
  const when = paused ? `; paused at ${clock(job.time)}` : `; ${clock(job.time)}`;
  put(byId("name"), job.name);
  put(byId("summary"), `${job.world_size} ranks: ${words.join(", ")}${started}${slowest}${when}`);
  document.title = `${TROUBLE.some(count) ? "(!) " : ""}${job.name}: phalanx watch`;
}

// The timeline and the plots --------------------------------------------------------------------

const rowHeight = () => Math.max(4, Math.min(28, Math.floor(512 / job.world_size)));
const end = () => samples[samples.length - 1].time;

// What rank did in a sample: its status, and the shares of time of a rank that runs.
function did(sample, rank) {
  const part = sample.ranks.slice(3 * rank, 3 * rank + 3);
  const communicating = shareOf(part[0]), waiting = shareOf(part[1]);
  const computing = Math.max(0, 1 - communicating - waiting);
  return { status: { s: "starting", r: "running", t: "stopped", d: "dead", u: "unreachable", e: "starting" }[part[2]],
    shares: [["computing", computing], ["communicating", communicating], ["waiting", waiting]] };
}

function spans(width) {  // from and to, in pixels, of each sample
  const scale = (width - LABELS) / MINUTE;
  return samples.map((sample, place) => {
    const before = place ? Math.max(samples[place - 1].time, sample.time - 2) : sample.time - .5;
    return [width - (end() - before) * scale, width - (end() - sample.time) * scale];
  });
}

function drawTimeline() {
  if (!samples.length) return;
  const height = rowHeight(), gap = height > 8 ? 2 : 0, every = Math.ceil(14 / height), axis = 20;
  const colour = colours(), [to, width] = ready(byId("timeline"), height * job.world_size + axis);
  const places = spans(width);
  for (let rank = 0; rank < job.world_size; rank++) {
    const top = rank * height, inside = height - gap;
    samples.forEach((sample, place) => {
      const [from, until] = places[place];
      if (until <= LABELS) return;
      const left = Math.max(from, LABELS), { status, shares } = did(sample, rank);
      let bottom = top + inside;
      for (const [state, part] of status === "running" ? shares : [[status, 1]]) {
        to.fillStyle = colour(state);
        to.fillRect(left, bottom - part * inside, until - left + .5, part * inside);
        bottom -= part * inside;
      }
    });
    to.fillStyle = colour("text");
    if (rank % every === 0) to.fillText("rank " + rank, 0, Math.max(7, top + height / 2));
  }
  to.fillStyle = colour("dim");
  for (let ago = 0; ago <= MINUTE; ago += 15) {
    to.textAlign = ago === 0 ? "right" : ago === MINUTE ? "left" : "center";
    const place = width - (width - LABELS) * ago / MINUTE;
    to.fillText(ago ? `${ago} s ago` : "now", place, height * job.world_size + axis / 2);
  }
  to.textAlign = "left";
  if (cursor) {
    const [from, until] = places[Math.min(cursor.place, places.length - 1)];
    to.strokeStyle = colour("text");
    to.lineWidth = 2;
    to.strokeRect(from - 1, cursor.rank * height - 1, until - from + 2, height + 1);
  }
}

function moveCursor(rank, place) {
  if (!samples.length) return;
  const inside = (value, most) => Math.max(0, Math.min(most, value));
  cursor = { rank: inside(rank, job.world_size - 1), place: inside(place, samples.length - 1) };
  const sample = samples[cursor.place], { status, shares } = did(sample, cursor.rank);
  const what = status === "running" ? shares.map(([state, part]) => `${share(part)} ${state}`).join(", ") : status;
  put(byId("readout"), `rank ${cursor.rank}, ${clock(sample.time)}: ${what}`);
  drawTimeline();
}

byId("timeline").addEventListener("mousemove", event => {
  if (!job) return;
  const places = spans(event.target.clientWidth);
  const place = places.findIndex(([from, until]) => from <= event.offsetX && event.offsetX <= until);
  if (place >= 0) moveCursor(Math.floor(event.offsetY / rowHeight()), place);
});
onArrows(byId("timeline"), (down, right) => {
  if (!job) return;
  const from = cursor ?? { rank: -down, place: samples.length - 1 - right };
  moveCursor(from.rank + down, from.place + right);
});

// A plot: its title, the words for a value, its lines by name, as [colour, moment -> value], its moments.
function plots() {
  const names = [...new Set(curves.flatMap(moment => Object.keys(moment.values)))];
  return [
    ...names.map(name => [name, figure, { [name]: ["link", moment => moment.values[name]] }, curves]),
    ["step time", seconds, {
      slowest: ["waiting", sample => sample.steps[1] || undefined],
      fastest: ["computing", sample => sample.steps[0] || undefined],
    }, samples],
    ["bytes a second, all ranks", bytes, {
      sent: ["link", sample => sample.sent || undefined],
      received: ["communicating", sample => sample.received || undefined],
    }, samples],
  ];
}

function drawPlots() {
  const parts = byId("plots");
  const wanted = plots();
  while (parts.children.length > wanted.length) parts.lastChild.remove();
  wanted.forEach(([title, words, lines, moments], number) => {
    if (!parts.children[number]) {
      const part = document.createElement("figure");
      part.append(document.createElement("figcaption"), document.createElement("canvas"));
      parts.append(part);
    }
    const [caption, canvas] = parts.children[number].children;
    canvas.setAttribute("role", "img");
    const span = moments === curves ? "since the watch began" : "over the last minute";
    canvas.setAttribute("aria-label", `Plot of ${title} ${span}`);
    drawPlot(caption, canvas, title, words, lines, moments);
  });
}

function drawPlot(caption, canvas, title, words, lines, moments) {
  const colour = colours(), tall = 110, [to, width] = ready(canvas, tall);
  const values = Object.values(lines).flatMap(([, of]) => moments.map(of)).filter(value => value !== undefined);
  const whole = moments === curves && curves.length;
  const since = whole ? Math.min(curves[0].time, end() - LEAST) : end() - MINUTE;
  const low = Math.min(...values), high = Math.max(...values), range = high - low || Math.abs(high) || 1;
  const last = Object.entries(lines).map(([name, [, of]]) => [name, of(moments[moments.length - 1])])
    .filter(([, value]) => value !== undefined).map(([name, value]) => `${name} ${words(value) || "0"}`);
  const bold = document.createElement("b");
  bold.textContent = title;
  const span = whole ? `; since ${clock(since)}` : "; last minute";
  caption.replaceChildren(bold, values.length ? `: ${last.join(", ")}${span}` : ": nothing yet");
  to.strokeStyle = colour("line");
  to.strokeRect(.5, .5, width - 1, tall - 1);
  if (!values.length) return;
  const y = value => tall - 14 - (value - low) / range * (tall - 28);
  for (const [, [name, of]] of Object.entries(lines)) {
    to.strokeStyle = colour(name);
    to.lineWidth = 2;
    to.beginPath();
    let drawing = false;
    for (const moment of moments) {
      const value = of(moment);
      if (value === undefined) { drawing = false; continue; }
      const x = 4 + (moment.time - since) * (width - 8) / (end() - since);
      if (drawing) to.lineTo(x, y(value)); else to.moveTo(x, y(value));
      drawing = true;
    }
    to.stroke();
  }
  to.fillStyle = colour("dim");
  to.fillText(words(high) || "0", 4, 8);
  if (high !== low) to.fillText(words(low) || "0", 4, tall - 8);
}

// What comes ------------------------------------------------------------------------------------

function show() {
  if (!job) return;
  fillSummary();
  fillTrouble();
  fillTable();
  drawTimeline();
  drawPlots();
}

const held = { job: null, samples: [], curves: [] };  // while it is paused
const source = new EventSource("events");
source.addEventListener("open", () => {  // after an interruption all samples come again
  held.samples = [];
  connected = true;
});
source.addEventListener("message", event => {
  const news = JSON.parse(event.data);
  held.job = news.job;
  held.samples.push(...news.samples);
  const since = news.job.time - MINUTE;
  held.samples = held.samples.filter(sample => sample.time >= since);
  if (news.curves) held.curves = news.curves.map(([time, values]) => ({ time, values }));
  else held.curves.push(...news.samples.filter(sample => Object.keys(sample.values).length));
  while (held.curves.length > MOMENTS) held.curves = held.curves.filter((_, place) => place % 2 === 0);
  if (news.job.ended) source.close();
  showSoon();
});
source.addEventListener("error", () => {
  connected = false;
  if (job) fillTrouble();
  else put(byId("summary"), "phalanx watch does not answer: it has ended, or its address has changed.");
});

// States that come faster than this page is drawn are drawn together; a page that is hidden draws none.
let due = false;
function showSoon() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    if (!paused) resume();
  });
}

function resume() {
  if (cursor) cursor.place -= Math.max(0, samples.findIndex(sample => sample.time >= held.samples[0].time));
  if (cursor && cursor.place < 0) cursor.place = 0;
  job = held.job;
  samples = [...held.samples];
  curves = [...held.curves];
  show();
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  put(byId("pause"), paused ? "Go on" : "Pause");
  if (!paused && held.job) resume();
  else if (job) fillSummary();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
new ResizeObserver(() => { drawTimeline(); if (job) drawPlots(); }).observe(document.body);
