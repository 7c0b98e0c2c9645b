"""Spells the most probable words with a beam search: each beam is a sequence, and a beam that splits is cloned.

    python beam_search.py --url localhost:8001 --begin st --width 8

Works with the model speller: it knows a few words, and predicts the next letter from the last two.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tritonclient.grpc as grpcclient

from triton_stateful import Sequence

LETTERS = " abcdefghijklmnopqrstuvwxyz"  # a space begins and ends a word
SPACE = 0


@dataclass
class Beam:
    """A beginning of a word, and a sequence whose state has seen it."""

    score: float  # the logarithm of its probability
    text: str
    sequence: Sequence
    next_letters: np.ndarray  # the logarithms of their probabilities

    def step(self, letter: int) -> None:
        """Adds a letter."""
        self.score += float(self.next_letters[letter])
        self.text += LETTERS[letter]
        self.see(letter)

    def see(self, letter: int) -> None:
        """Shows the model a letter."""
        [self.next_letters] = self.sequence.step(np.array([[letter]], np.int64))["LOG_PROBABILITIES"]


def search(begin: Callable[[], Sequence], start: str, width: int, longest: int = 20) -> list[tuple[float, str]]:
    """The best words that begin with `start`, best first. `begin` makes a new sequence."""
    first = Beam(0.0, start, begin(), np.empty(0))
    for character in f" {start}":
        first.see(LETTERS.index(character))
    beams = [first]
    words: list[tuple[float, str]] = []
    while beams:
        ways = [(beam.score + float(beam.next_letters[n]), beam, n) for beam in beams for n in range(len(LETTERS))]
        ways.sort(key=lambda way: way[0], reverse=True)
        chosen: dict[int, list[int]] = {id(beam): [] for beam in beams}
        for score, beam, letter in ways[:width]:
            if letter == SPACE:
                words.append((score, beam.text))
            elif len(beam.text) < longest:
                chosen[id(beam)].append(letter)
        grown = []
        for beam in beams:
            letters = chosen[id(beam)]
            if not letters:
                beam.sequence.end()
                continue
            # All clones are made before the beam itself goes on.
            clones = [Beam(beam.score, beam.text, beam.sequence.clone(), beam.next_letters) for _ in letters[1:]]
            for each, letter in zip([beam, *clones], letters):
                each.step(letter)
                grown.append(each)
        # Nothing that is worse than the best words can become better.
        words = sorted(words, reverse=True)[:width]
        worst = words[-1][0] if len(words) == width else -np.inf
        beams = []
        for beam in grown:
            if beam.score > worst:
                beams.append(beam)
            else:
                beam.sequence.end()
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: localhost:8001)")
    parser.add_argument("--model", default="speller")
    parser.add_argument("--begin", default="st", help="how the words begin (default: st)")
    parser.add_argument("--width", type=int, default=8, help="how many beams (default: 8)")
    options = parser.parse_args()
    with grpcclient.InferenceServerClient(options.url) as client:
        for score, word in search(lambda: Sequence(client, options.model), options.begin, options.width):
            print(f"{np.exp(score):.4f} {word}")


if __name__ == "__main__":
    main()
