"""Sends a recording as a microphone does, a chunk every 32 ms, and prints when somebody speaks.

    python microphone.py --url localhost:8001 --file ../../../assets/speech.wav

The chunks go over one gRPC stream and don't wait for answers. Works with the model silero_vad: 16 kHz, mono, 16 bit.
"""

from __future__ import annotations

import argparse
import sys
import time
import wave

import numpy as np

from triton_stateful import Sequence, Stream

CHUNK = 512
CHUNK_S = CHUNK / 16000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: localhost:8001)")
    parser.add_argument("--model", default="silero_vad")
    parser.add_argument("--file", required=True, help="a WAV file: 16 kHz, mono, 16 bit")
    parser.add_argument("--chunks", type=int, default=300, help="how many chunks to send (default: 300)")
    parser.add_argument("--pace", type=float, default=1.0, help="1: as fast as a microphone; 0: as fast as possible")
    options = parser.parse_args()

    with wave.open(options.file, "rb") as recording:
        if (recording.getframerate(), recording.getnchannels(), recording.getsampwidth()) != (16000, 1, 2):
            sys.exit(f"{options.file}: 16 kHz, mono, 16 bit is expected")
        samples = np.frombuffer(recording.readframes(options.chunks * CHUNK), "<i2").astype(np.float32) / 32768
    chunks = samples[: len(samples) // CHUNK * CHUNK].reshape(-1, 1, CHUNK)

    answers = []
    started = time.monotonic()
    with Stream(options.url) as stream, Sequence(stream, options.model) as sequence:
        for number, chunk in enumerate(chunks):
            due = started + (number + 1) * CHUNK_S * options.pace
            time.sleep(max(0.0, due - time.monotonic()))  # the microphone has the whole chunk
            answers.append(sequence.send(chunk, end=number == len(chunks) - 1))
        speaks = False
        for number, answer in enumerate(answers):
            probability = answer.result()["output"].item()
            if (probability > 0.5) != speaks:
                speaks = not speaks
                print(f"{number * CHUNK_S:6.2f} s: {'speech' if speaks else 'silence'} ({probability:.2f})")
    print(f"{len(chunks)} chunks")


if __name__ == "__main__":
    main()
