// The sound goes over a WebSocket, frame by frame as the browser delivers it. What comes while a message waits for its
// answer goes together in the next message, so a slow server gets fewer and longer ones. app.py has the messages.
import { draw } from "./picture.js";

const RATE = 16000;
const CHUNK = 512; // samples of a step of the model
const SHOWN_S = 10;
const LATENCY_OVER_MS = 5000;
// A server that is this far behind will not catch up.
const WAITING_S_MAX = 10;

const at = (id) => document.getElementById(id);
let live = null; // what runs now
let last = null; // what ran before, and stays to be seen

at("microphone").onclick = () => start(fromMicrophone);
at("recording").onclick = () => start(fromRecording);
at("stop").onclick = () => stop("stopped");
requestAnimationFrame(show);

async function start(open) {
  stop("starting");
  at("error").hidden = true;
  const run = {
    context: new AudioContext({ sampleRate: RATE }),
    tracks: [], // of the microphone
    frames: [], // { at, length, low, high } of what was sent, for the picture
    probabilities: [], // { at, value }
    arrived: [], // { end, time } of the frames whose last sample no step has had yet
    waiting: [], // frames for the next message
    asked: false, // whether a message waits for its answer
    latencies: [], // { time, ms } of steps
    samples: 0, // that the browser has delivered
    messages: 0,
    length: 0, // of the last message, in samples
    steps: 0,
  };
  live = run;
  at("stop").disabled = false;
  try {
    await run.context.audioWorklet.addModule("page/frames.js");
    const [source, name] = await open(run);
    await connected(run);
    if (live !== run) {
      release(run); // stopped meanwhile
      return;
    }
    const frames = new AudioWorkletNode(run.context, "frames", {
      numberOfOutputs: 0,
      channelCount: 1,
      channelCountMode: "explicit",
    });
    frames.port.onmessage = (message) => take(run, message.data);
    source.connect(frames);
    source.start?.(); // a microphone has started by itself
    at("state").value = name;
  } catch (error) {
    if (live === run) fail(String(error));
    else release(run);
  }
}

function stop(state) {
  const run = live;
  live = null;
  at("stop").disabled = true;
  at("state").value = state;
  if (!run) return;
  last = run;
  release(run);
}

function release(run) {
  for (const track of run.tracks) track.stop();
  if (run.context.state !== "closed") run.context.close();
  run.socket?.close(1000);
}

function fail(text) {
  stop("stopped");
  at("error").textContent = text;
  at("error").hidden = false;
}

// ---- where the sound comes from

async function fromMicrophone(run) {
  let stream;
  try {
    // Without it, the page was not loaded over HTTPS nor from this machine.
    if (!navigator.mediaDevices) throw new Error("the browser gives it to pages over HTTPS or of this machine only");
    // The model was trained on sound as it is.
    const audio = { echoCancellation: false, noiseSuppression: false, autoGainControl: false };
    stream = await navigator.mediaDevices.getUserMedia({ audio });
  } catch (error) {
    const [source] = await fromRecording(run);
    return [source, `recording, because there is no microphone (${error.message})`];
  }
  run.tracks = stream.getTracks();
  for (const track of run.tracks) track.onended = () => live === run && fail("The microphone is gone.");
  return [run.context.createMediaStreamSource(stream), "microphone"];
}

async function fromRecording(run) {
  const answer = await fetch("speech.wav");
  const source = run.context.createBufferSource();
  source.buffer = await run.context.decodeAudioData(await answer.arrayBuffer());
  source.loop = true;
  source.connect(run.context.destination);
  return [source, "recording"];
}

// ---- the socket

function connected(run) {
  const address = new URL("socket", location.href);
  address.protocol = address.protocol.replace("http", "ws");
  run.socket = new WebSocket(address);
  run.socket.onmessage = (message) => receive(run, JSON.parse(message.data));
  return new Promise((resolve, reject) => {
    run.socket.onopen = resolve;
    run.socket.onclose = (event) => {
      const why = event.reason || (event.code === 1006 ? "it broke, or the server cannot be reached" : `code ${event.code}`);
      const text = `The connection to the page's server is over: ${why}.`;
      reject(text);
      if (live === run) fail(text);
    };
  });
}

function take(run, frame) {
  if (live !== run) return;
  let low = 0;
  let high = 0;
  for (const sample of frame) {
    low = Math.min(low, sample);
    high = Math.max(high, sample);
  }
  run.frames.push({ at: run.samples, length: frame.length, low, high });
  run.samples += frame.length;
  run.arrived.push({ end: run.samples, time: performance.now() });
  run.waiting.push(frame);
  forget(run);
  if (!run.asked) send(run);
  else if (run.samples - run.arrived[0].end > WAITING_S_MAX * RATE) {
    fail(`The server is ${WAITING_S_MAX} seconds behind.`);
  }
}

function send(run) {
  run.length = run.waiting.reduce((sum, frame) => sum + frame.length, 0);
  const samples = new Float32Array(run.length);
  let at = 0;
  for (const frame of run.waiting) {
    samples.set(frame, at);
    at += frame.length;
  }
  run.waiting = [];
  run.asked = true;
  run.messages += 1;
  run.socket.send(samples);
}

function receive(run, answer) {
  run.asked = false;
  if (answer.error) {
    if (live === run) fail(answer.error);
    return;
  }
  const now = performance.now();
  for (const value of answer.probabilities) {
    run.probabilities.push({ at: run.steps * CHUNK, value });
    run.steps += 1;
    // The latency counts from the frame that completed the step's samples.
    while (run.arrived[0].end < run.steps * CHUNK) run.arrived.shift();
    run.latencies.push({ time: now, ms: now - run.arrived[0].time });
  }
  if (answer.batches) run.figures = answer;
  if (live === run && run.waiting.length) send(run);
}

// ---- what is shown

function show() {
  const run = live ?? last;
  if (run) {
    draw(at("picture"), run, SHOWN_S * RATE, CHUNK);
    tell(run);
  }
  requestAnimationFrame(show);
}

// Drops what is no longer shown. Not in `show`, which doesn't run while the tab is hidden.
function forget(run) {
  const first = run.samples - SHOWN_S * RATE;
  const old = performance.now() - LATENCY_OVER_MS;
  while (run.frames.length && run.frames[0].at + run.frames[0].length < first) run.frames.shift();
  while (run.probabilities.length && run.probabilities[0].at + CHUNK < first) run.probabilities.shift();
  while (run.latencies.length && run.latencies[0].time < old) run.latencies.shift();
}

function tell(run) {
  const newest = run.probabilities.at(-1);
  if (newest) at("now").textContent = `${newest.value > 0.5 ? "speech" : "silence"} (${newest.value.toFixed(2)})`;
  const whole = (number) => number.toLocaleString("en");
  at("sent").textContent = `${(run.samples / RATE).toFixed(1)} s in ${whole(run.messages)} messages; the last has ${run.length} samples`;
  at("steps").textContent = whole(run.steps);
  if (run.latencies.length) {
    const sorted = run.latencies.map(({ ms }) => ms).sort((a, b) => a - b);
    const median = sorted[sorted.length >> 1];
    at("latency").textContent = `${median.toFixed(1)} ms (median of 5 s), at most ${sorted.at(-1).toFixed(1)} ms`;
  }
  if (run.figures) {
    const batches = Object.entries(run.figures.batches).map(([size, runs]) => `${runs} × ${size}`);
    at("batches").textContent = batches.join(", ") || "none";
    at("tabs").textContent = run.figures.tabs;
  }
}
