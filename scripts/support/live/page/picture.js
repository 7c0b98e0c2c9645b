// Draws the sound, and the probability of speech over it. The newest sample is at the right edge.
export function draw(canvas, { frames, probabilities, samples }, shown, chunk) {
  const scale = window.devicePixelRatio;
  const width = Math.round(canvas.clientWidth * scale);
  const height = Math.round(canvas.clientHeight * scale);
  // Setting either clears the canvas.
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  const pen = canvas.getContext("2d");
  const style = getComputedStyle(canvas);
  const first = Math.max(0, samples - shown);
  const x = (sample) => ((sample - first) / shown) * width;
  const y = (value) => (1 - value) * (height / 2); // of sound, from -1 to 1

  pen.clearRect(0, 0, width, height);
  pen.fillStyle = style.getPropertyValue("--sound");
  for (const { at, length, low, high } of frames) {
    const thick = Math.max(1, y(low) - y(high));
    pen.fillRect(x(at), y(high), Math.max(1, x(at + length) - x(at)), thick);
  }

  pen.strokeStyle = style.getPropertyValue("--speech");
  pen.fillStyle = pen.strokeStyle;
  pen.lineWidth = 2 * scale;
  pen.beginPath();
  for (const { at, value } of probabilities) pen.lineTo(x(at + chunk / 2), y(value));
  pen.stroke();
  if (!probabilities.length) return;
  pen.lineTo(x(probabilities.at(-1).at + chunk / 2), y(0));
  pen.lineTo(x(probabilities[0].at + chunk / 2), y(0));
  pen.globalAlpha = 0.15;
  pen.fill();
  pen.globalAlpha = 1;
}
