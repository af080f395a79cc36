"""How images lie in memory between the layers of a network."""

from __future__ import annotations

from torch import Tensor


def channels_last(images: Tensor) -> Tensor:
    """The same images (batch, channels, height, width), on a CPU with their channels last in memory.

    Convolutions hand the layout on, and pooling is vectorised over the channels where they come last; where they come
    first PyTorch does not vectorise it at all. Values are the same; sums of the layers may round otherwise. On other
    devices images stay as they are: kernels there have tastes of their own.
    """
    if images.device.type != "cpu":
        return images
    n, channels, height, width = images.shape
    # Convolutions go by the strides. Tensor.contiguous(memory_format=...) leaves those of a single channel as they are,
    # and torch.vmap does not know it.
    return images.permute(0, 2, 3, 1).flatten().view(n, height, width, channels).permute(0, 3, 1, 2)
