// Hands on each block of samples that the browser has, whatever its length is.
class Frames extends AudioWorkletProcessor {
  process([[samples]]) {
    // There is no channel before the source has started.
    if (samples) {
      const frame = samples.slice();
      this.port.postMessage(frame, [frame.buffer]);
    }
    return true;
  }
}

registerProcessor("frames", Frames);
