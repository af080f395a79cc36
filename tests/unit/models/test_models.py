"""The networks against numpy written out by hand, and their initial weights against the
distribution."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest, truncnorm
from torch import nn

from lit_dps.models import MLP, ResNet8, SimpleCNN
from tests.support.errors import raises_about


def relu(x):
    return np.maximum(x, 0)


def conv(x, w, b, stride=1, padding="SAME"):
    """tf.nn.conv2d in NCHW: SAME pads ceil(n / stride) outputs' worth, the odd one at the end."""
    k = w.shape[2]
    if padding == "SAME":
        sides = []
        for n in x.shape[2:]:
            total = max((math.ceil(n / stride) - 1) * stride + k - n, 0)
            sides.append((total // 2, total - total // 2))
        x = np.pad(x, [(0, 0), (0, 0), *sides])
    windows = np.lib.stride_tricks.sliding_window_view(x, (k, k), axis=(2, 3))[
        :, :, ::stride, ::stride
    ]
    return np.einsum("ncyxij,ocij->noyx", windows, w) + b[:, None, None]


def pool(x, reduce):
    n, c, height, width = x.shape
    x = x[:, :, : height // 2 * 2, : width // 2 * 2]  # VALID: an odd last row or column is left out
    return reduce(x.reshape(n, c, height // 2, 2, width // 2, 2), axis=(3, 5))


def simple_cnn(p, x):
    """As in the authors' network.py: convolution, bias, ReLU, max-pool."""
    for name in ("conv1", "conv2"):
        x = pool(relu(conv(x, p[f"{name}.weight"], p[f"{name}.bias"], padding="VALID")), np.max)
    return x.reshape(len(x), -1) @ p["linear.weight"].T + p["linear.bias"]


def resnet8(p, x):
    """As in the authors' network.py."""
    x = conv(x, p["conv.weight"], p["conv.bias"])
    for i, down in enumerate((False, True, True)):
        w1, b1, w2, b2 = (
            p[f"blocks.{i}.{name}"]
            for name in ("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias")
        )
        active = relu(x)
        branch = conv(relu(conv(active, w1, b1, stride=2 if down else 1)), w2, b2)
        if down:
            shortcut = np.zeros_like(branch)
            shortcut[:, : x.shape[1]] = pool(active, np.mean)  # after the ReLU, new channels zero
        else:
            shortcut = x  # before the ReLU
        x = shortcut + branch
    return relu(x).mean(axis=(2, 3)) @ p["linear.weight"].T + p["linear.bias"]


def mlp(p, x):
    x = x.reshape(len(x), -1)
    for i in (1, 3):
        x = relu(x @ p[f"layers.{i}.weight"].T + p[f"layers.{i}.bias"])
    return x @ p["layers.5.weight"].T + p["layers.5.bias"]


@pytest.mark.parametrize(
    ("network", "reference", "shape"),
    [
        (SimpleCNN(), simple_cnn, (1, 28, 28)),
        (SimpleCNN((3, 32, 32), 7), simple_cnn, (3, 32, 32)),
        (SimpleCNN((2, 17, 23)), simple_cnn, (2, 17, 23)),  # odd sides, not square
        (ResNet8(), resnet8, (3, 32, 32)),
        (ResNet8(1, 5), resnet8, (1, 8, 12)),
        (MLP((2, 3, 4), (6, 5), 3), mlp, (2, 3, 4)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_forward_equals_numpy(network, reference, shape):
    rng = np.random.default_rng(0)
    network = network.double()
    for parameter in network.parameters():  # biases too, so that a forgotten one shows
        spread = 1 / math.sqrt(max(parameter[0].numel(), 1))
        parameter.data = torch.from_numpy(rng.normal(0, spread, parameter.shape))
    x = rng.normal(size=(2, *shape))
    arrays = {name: parameter.detach().numpy() for name, parameter in network.named_parameters()}
    with torch.no_grad():
        ours = network(torch.from_numpy(x)).numpy()
    theirs = reference(arrays, x)
    assert np.abs(theirs).max() > 0.1
    np.testing.assert_allclose(
        ours, theirs, rtol=0, atol=1e-11
    )  # float64 sums of at most 1024 terms of size 1


def shapes(network):
    return {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}


def test_simple_cnn_has_the_papers_parameters():
    assert shapes(SimpleCNN()) == {
        "conv1.weight": (32, 1, 5, 5),
        "conv1.bias": (32,),
        "conv2.weight": (64, 32, 5, 5),
        "conv2.bias": (64,),
        "linear.weight": (10, 1024),
        "linear.bias": (10,),
    }
    assert sum(parameter.numel() for parameter in SimpleCNN().parameters()) == 62_346


def test_resnet8_has_biases_no_normalization_and_no_shortcut_weights():
    expected = {"conv.weight": (16, 3, 3, 3), "conv.bias": (16,)}
    for i, (n_in, n_out) in enumerate(((16, 16), (16, 32), (32, 64))):
        expected |= {
            f"blocks.{i}.conv1.weight": (n_out, n_in, 3, 3),
            f"blocks.{i}.conv1.bias": (n_out,),
        }
        expected |= {
            f"blocks.{i}.conv2.weight": (n_out, n_out, 3, 3),
            f"blocks.{i}.conv2.bias": (n_out,),
        }
    assert shapes(ResNet8()) == expected | {"linear.weight": (10, 64), "linear.bias": (10,)}
    assert list(ResNet8().buffers()) == []


def test_simple_cnn_refuses_images_that_its_convolutions_use_up():
    assert SimpleCNN((1, 16, 16))(torch.zeros(1, 1, 16, 16)).shape == (1, 10)
    for shape in ((1, 15, 16), (1, 16, 15), (1, 8, 8)):
        with raises_about(ValueError, "Simple-CNN"):
            SimpleCNN(shape)


NETWORKS = {"simple_cnn": SimpleCNN, "resnet8": ResNet8, "mlp": MLP}


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_initial_weights_are_truncated_normal_with_variance_one_over_fan_in(make):
    torch.manual_seed(0)
    for name, parameter in make().named_parameters():
        w = parameter.detach().double().numpy().ravel()
        if name.endswith("bias"):
            assert not w.any(), name
            continue
        fan_in = parameter[0].numel()
        wanted = math.sqrt(1 / fan_in)
        shape = truncnorm(-2, 2)
        scale = wanted / shape.std()  # the deviation before the cut at two of them
        assert np.abs(w).max() <= 2 * scale * (1 + 1e-6), name
        # The standard error of a deviation is std * sqrt((kurtosis - 1) / 4n); five of them, 12
        # tensors, a fixed seed
        kurtosis = 3 + shape.stats("k")
        assert abs(w.std() / wanted - 1) < 5 * math.sqrt((kurtosis - 1) / (4 * w.size)), name
        assert abs(w.mean()) < 5 * wanted / math.sqrt(w.size), name
        assert kstest(w / scale, shape.cdf).pvalue > 1e-3, name
        if (
            w.size > 1000
        ):  # it does reach the cut: a normal of the same deviation, or a cut at one, would not pass
            assert np.abs(w).max() > 1.9 * scale, name


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_initial_weights_depend_on_the_torch_seed_alone(make):
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn.append(torch.cat([parameter.detach().flatten() for parameter in make().parameters()]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
