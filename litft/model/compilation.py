"""torch.compile for a block, in training and in decoding."""

import torch
import torch._inductor.config
import torch.fx.experimental._config
from torch import nn


def compile_block(block: nn.Module) -> None:
    """Compile a block for any number of tokens, documents and cached keys; identical blocks share a
    graph."""
    # LoRA's scale is a constant, though `dynamic` would make it an input
    torch._dynamo.config.specialize_float = True
    # sizes that are equal in the first step need not be equal later: a row may be as long as the
    # model is wide, and its length would become a constant
    torch.fx.experimental._config.use_duck_shape = False
    # a graph for each kind of block, of each open model, with and without several rows and tokens
    torch._dynamo.config.recompile_limit = 64
    # the casts of all factors of LoRA in a few kernels: launching them is the host's time
    torch._inductor.config.combo_kernels = True
    block.compile(dynamic=True)
