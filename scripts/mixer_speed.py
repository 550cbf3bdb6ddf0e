"""Time a layer with each recurrent mixer against a layer of attention: forward, and forward and
backward, on this machine.

python scripts/mixer_speed.py [--tokens 2048] [--rounds 7]     (about 20 seconds on two CPU cores)
python scripts/mixer_speed.py --device cuda [--plain]          (bf16; plain: without the kernels of
flash-linear-attention)
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from litft.families import read_config
from litft.model.config import DeltaNetConfig, Mamba2Config, MixerConfig, ShortConvConfig
from litft.model.mixers import kernels
from litft.model.transformer import GPT

WIDTH = 1024
LLAMA = dict(
    model_type="llama",
    vocab_size=512,
    hidden_size=WIDTH,
    intermediate_size=64,
    num_hidden_layers=1,
)
LLAMA |= dict(num_attention_heads=16, max_position_embeddings=1 << 20)
MIXERS: dict[str, MixerConfig | None] = {
    "attention": None,
    "gated delta net": DeltaNetConfig(8, 8, 128, 128, 4, 1e-6),
    "KDA": DeltaNetConfig(8, 8, 128, 128, 4, 1e-6, row_decay=True),
    "Mamba-2": Mamba2Config(16, 64, 1, 128, 4, 1e-6),
    "short convolution": ShortConvConfig(WIDTH, 3),
}


def make_layer(mixer: MixerConfig | None, device: str) -> GPT:
    """Return a network of one layer, with attention or a mixer, and random weights."""
    config = read_config(LLAMA)
    if mixer:
        config = replace(config, layers=(config.layers[0].with_mixer(mixer),))
    model = GPT(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def seconds(model: GPT, tokens: torch.Tensor, backward: bool) -> float:
    """Return the seconds that one pass takes."""
    start = time.perf_counter()
    with torch.set_grad_enabled(backward):
        logits = model(tokens)
    if backward:
        logits.sum().backward()
    if tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Print a table of median times, and their ratios to those of attention; the layers take
    turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="do not use the kernels of flash-linear-attention",
    )
    args = parser.parse_args()
    if args.plain:
        kernels.can_run = lambda *_: False
    models = {name: make_layer(mixer, args.device) for name, mixer in MIXERS.items()}
    tokens = torch.randint(0, 512, (1, args.tokens), device=args.device)
    times: dict[str, list[list[float]]] = {name: [[], []] for name in models}
    if args.device == "cuda":  # compile the kernels
        for model in models.values():
            seconds(model, tokens, backward=True)
    for _ in range(args.rounds):
        for name, model in models.items():
            for number, backward in enumerate((False, True)):
                times[name][number].append(seconds(model, tokens, backward))
    medians = {
        name: [statistics.median(values) for values in pair] for name, pair in times.items()
    }
    print("| layer | forward, ms | forward and backward, ms |\n|---|---|---|")
    for name, pair in medians.items():
        cells = (
            f"{1e3 * t:.3g} ({t / base:.2f})"
            for t, base in zip(pair, medians["attention"], strict=True)
        )
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
