"""Token mixers other than attention: Gated DeltaNet, Mamba-2, short convolution.

See `mixer.py` for the protocol.
"""

from litft.model.config import (
    Config,
    DeltaNetConfig,
    LayerConfig,
    Mamba2Config,
    ShortConvConfig,
)
from litft.model.mixers.delta_net import DeltaNet
from litft.model.mixers.mamba2 import Mamba2
from litft.model.mixers.mixer import Mixer
from litft.model.mixers.short_conv import ShortConv

__all__ = ["Mixer", "make_mixer"]

CLASSES: dict[type, type[Mixer]] = {
    DeltaNetConfig: DeltaNet,
    Mamba2Config: Mamba2,
    ShortConvConfig: ShortConv,
}


def make_mixer(config: Config, layer: LayerConfig) -> Mixer | None:
    """Build the recurrent mixer of a layer, or return None if it only has attention."""
    if layer.mixer is None:
        return None
    return CLASSES[type(layer.mixer)](config, layer.mixer)
