"use strict";
// What the script of every page begins with: how pages draw, take keys, and sort tables.

// The theme's colours, by name.
function colours() {
  const style = getComputedStyle(document.documentElement);
  return name => style.getPropertyValue("--" + name).trim();
}

// A canvas made so tall, in CSS pixels, as sharp as the screen is; what draws on it, and its width.
function ready(canvas, tall) {
  const width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = tall * scale;
  canvas.style.height = tall + "px";
  const to = canvas.getContext("2d");
  to.scale(scale, scale);
  to.font = "12px system-ui, sans-serif";
  to.textBaseline = "middle";
  return [to, width];
}

const MOVES = {
  ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
  PageUp: [-8, 0], PageDown: [8, 0], Home: [0, -1e9], End: [0, 1e9],
};

// Call move(down, right) when a key that moves a cursor is pressed on this element.
function onArrows(element, move) {
  element.addEventListener("keydown", event => {
    if (!MOVES[event.key] || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    move(...MOVES[event.key]);
  });
}

// Make a heading of a table a button that sorts: the largest first; again, the other way.
function onSort(heading, sort) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...heading.childNodes);
  heading.append(button);
  button.addEventListener("click", () => sort(heading.getAttribute("aria-sort") === "descending"));
}

// Show that the table is sorted by the column with this heading.
function markSorted(heading, up) {
  for (const other of heading.parentNode.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
}

// The order of two values: numbers, also where they are written as text, or text.
function compare(one, other) {
  const difference = Number(one) - Number(other);
  return Number.isNaN(difference) ? (one < other ? -1 : one > other ? 1 : 0) : difference;
}

// The share that a digit means, 0 to z (one_page.py).
function shareOf(digit) {
  return parseInt(digit, 36) / 35;
}
