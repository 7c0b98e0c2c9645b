"""Exports a decoder with random weights: a Llama, as Optimum exports it, with a cache for each layer.

It needs packages that this project does not, so it gets a virtual environment of its own:

    python3.11 -m venv /tmp/optimum
    /tmp/optimum/bin/pip install torch==2.7.1 transformers==4.57.6 optimum-onnx==0.1.0 optimum==2.1.0 onnx==1.23.2
    /tmp/optimum/bin/python scripts/support/bench/export_decoder.py --layers 4 --hidden 256 decoder.onnx

`assets/decoder.onnx` was made so with the default sizes.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from optimum.exporters.onnx import onnx_export_from_model
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description="Exports a decoder with random weights.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=32, help="width; four heads share it")
    parser.add_argument("--vocabulary", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        onnx_export_from_model(model, output=folder, task="text-generation-with-past", do_validation=False)
        shutil.copy(Path(folder) / "model.onnx", options.file)


if __name__ == "__main__":
    main()
