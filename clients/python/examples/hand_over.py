"""Hands a sequence over from one server to another: a snapshot goes on there, with the same answers.

    python hand_over.py --first localhost:8001 --second otherhost:8001

Works with the model speller, which both servers must serve.
"""

from __future__ import annotations

import argparse

import numpy as np

from triton_stateful import Retry, Sequence

LETTERS = " abcdefghijklmnopqrstuvwxyz"


def spell(sequence: Sequence, text: str) -> list[float]:
    """How probable each next letter is, after those before it."""
    probabilities = []
    for letter, following in zip(text, text[1:]):
        answer = sequence.step(np.array([[LETTERS.index(letter)]], np.int64))["LOG_PROBABILITIES"]
        probabilities.append(float(np.exp(answer[0, LETTERS.index(following)])))
    return probabilities


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", default="localhost:8001", help="gRPC address of the first server")
    parser.add_argument("--second", default="localhost:8001", help="gRPC address of the second server")
    parser.add_argument("--model", default="speller")
    parser.add_argument("--text", default=" streaming ", help="letters and spaces")
    options = parser.parse_args()

    half = len(options.text) // 2
    with Sequence(options.first, options.model, retry=Retry()) as sequence:
        probabilities = spell(sequence, options.text[: half + 1])
        snapshot = sequence.snapshot()
        here = spell(sequence, options.text[half:])
    print(f"{options.first}: {len(probabilities)} steps, a snapshot of {len(snapshot)} bytes")
    with Sequence(options.second, options.model, snapshot=snapshot, retry=Retry()) as sequence:
        there = spell(sequence, options.text[half:])
        print(f"{options.second}: {sequence.steps} steps")
    for following, probability in zip(options.text[1:], probabilities + there):
        print(f"{following!r} {probability:.3f}")
    print("both go on alike" if here == there else "the answers differ")


if __name__ == "__main__":
    main()
