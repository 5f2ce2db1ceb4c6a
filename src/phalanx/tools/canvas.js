"use strict";
// What the scripts of all pages begin with: how they draw.

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
