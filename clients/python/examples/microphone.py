"""Sends a recording as a microphone does, 20 ms every 20 ms, and prints when somebody speaks.

    python microphone.py --url localhost:8001 --file ../../../assets/speech.wav

The requests go over one gRPC stream and wait for answers only if a second of sound has none. Works with the model
silero_vad: 16 kHz, mono, 16 bit. The server cuts what they bring into the 512 samples that the model rates, so an
answer has a probability or none.
"""

from __future__ import annotations

import argparse
import sys
import time
import wave

import numpy as np

from triton_stateful import Sequence, Stream

PACKET = 320
PACKET_S = PACKET / 16000
CHUNK_S = 512 / 16000
#: After so many requests, the next one waits for an answer. The server refuses more than max_queued_requests_per_sequence, 100.
MOST_WAITING = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: localhost:8001)")
    parser.add_argument("--model", default="silero_vad")
    parser.add_argument("--file", required=True, help="a WAV file: 16 kHz, mono, 16 bit")
    parser.add_argument("--packets", type=int, default=500, help="how often to send 20 ms (default: 500)")
    parser.add_argument("--pace", type=float, default=1.0, help="1: as fast as a microphone; 0: as fast as possible")
    options = parser.parse_args()

    with wave.open(options.file, "rb") as recording:
        if (recording.getframerate(), recording.getnchannels(), recording.getsampwidth()) != (16000, 1, 2):
            sys.exit(f"{options.file}: 16 kHz, mono, 16 bit is expected")
        samples = np.frombuffer(recording.readframes(options.packets * PACKET), "<i2").astype(np.float32) / 32768
    packets = [samples[None, at : at + PACKET] for at in range(0, len(samples), PACKET)]  # the last may be shorter

    answers = []
    started = time.monotonic()
    with Stream(options.url) as stream, Sequence(stream, options.model) as sequence:
        for number, packet in enumerate(packets):
            due = started + (number + 1) * PACKET_S * options.pace
            time.sleep(max(0.0, due - time.monotonic()))  # the microphone has the whole packet
            answers.append(sequence.send(packet, end=number == len(packets) - 1))
            if number >= MOST_WAITING:
                answers[number - MOST_WAITING].result()
        probabilities = [float(value) for answer in answers for value in answer.result()["output"].ravel()]
    speaks = False
    for number, probability in enumerate(probabilities):
        if (probability > 0.5) != speaks:
            speaks = not speaks
            print(f"{number * CHUNK_S:6.2f} s: {'speech' if speaks else 'silence'} ({probability:.2f})")
    print(f"{len(packets)} requests, {len(probabilities)} steps")


if __name__ == "__main__":
    main()
