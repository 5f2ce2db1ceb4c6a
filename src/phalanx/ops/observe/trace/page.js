// The picture: a row a rank, a column a bin of time; in each, from below, the states' shares.
const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("timeline");
const readout = document.getElementById("readout");
const LABELS = 64, AXIS = 22;
const height = Math.max(4, Math.min(40, Math.floor(640 / data.ranks.length)));
let cursor = null;

function share(row, bin, state) {
  return shareOf(data.shares[row][bin * data.states.length + state]);
}

function draw() {
  const tall = height * data.ranks.length + AXIS;
  const colour = colours(), [to, width] = ready(canvas, tall);
  const wide = (width - LABELS) / data.bins, gap = height > 8 ? 2 : 0;
  const every = Math.ceil(14 / height);  // ranks a label
  data.ranks.forEach((rank, row) => {
    const top = row * height, inside = height - gap;
    to.fillStyle = colour("absent");
    to.fillRect(LABELS, top, width - LABELS, inside);
    for (let bin = 0; bin < data.bins; bin++) {
      let bottom = top + inside;
      data.states.forEach((state, number) => {
        const tall = share(row, bin, number) * inside;
        if (!tall) return;
        to.fillStyle = colour(state);
        to.fillRect(LABELS + bin * wide, bottom - tall, wide + .4, tall);
        bottom -= tall;
      });
    }
    if (row % every === 0) {
      to.fillStyle = colour("text");
      to.fillText("rank " + rank, 0, Math.max(7, top + height / 2));
    }
  });
  to.fillStyle = colour("dim");
  const base = tall - AXIS / 2;
  for (let tick = 0; tick <= 5; tick++) {
    to.textAlign = tick === 0 ? "left" : tick === 5 ? "right" : "center";
    to.fillText(seconds(data.seconds * tick / 5), LABELS + (width - LABELS) * tick / 5, base);
  }
  to.textAlign = "left";
  if (cursor) {
    to.strokeStyle = colour("text");
    to.lineWidth = 2;
    to.strokeRect(LABELS + cursor.bin * wide - 1, cursor.row * height - 1, wide + 2, height + 1);
  }
}

function seconds(value) {
  if (value >= 10 || value === 0) return value.toFixed(0) + " s";
  if (value >= .01) return value.toFixed(value < 1 ? 3 : 2) + " s";
  return (value * 1e3).toFixed(3) + " ms";
}

function show(row, bin) {
  cursor = {
    row: Math.max(0, Math.min(data.ranks.length - 1, row)),
    bin: Math.max(0, Math.min(data.bins - 1, bin)),
  };
  const each = data.states.map((state, number) =>
    Math.round(100 * share(cursor.row, cursor.bin, number)) + " % " + state);
  const from = data.seconds * cursor.bin / data.bins, to = data.seconds * (cursor.bin + 1) / data.bins;
  readout.textContent =
    `rank ${data.ranks[cursor.row]}, ${seconds(from)} to ${seconds(to)}: ${each.join(", ")}`;
  draw();
}

canvas.addEventListener("mousemove", event => {
  const wide = (canvas.clientWidth - LABELS) / data.bins;
  show(Math.floor(event.offsetY / height), Math.floor((event.offsetX - LABELS) / wide));
});
onArrows(canvas, (down, right) => cursor ? show(cursor.row + down, cursor.bin + right) : show(0, 0));
new ResizeObserver(draw).observe(canvas);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    if (heading.dataset.fixed !== undefined) return;
    onSort(heading, up => {
      markSorted(heading, up);
      const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const rows = [...body.rows].sort((one, other) => compare(key(one), key(other)));
      body.append(...(up ? rows : rows.reverse()));
    });
  });
}
