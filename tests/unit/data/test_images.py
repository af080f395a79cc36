"""The data modules: split, normalization, digest, batches, against numpy written out by hand."""

import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_dps.core.errors import ConfigError, DataError
from lit_dps.core.trial import Cell, Trial
from lit_dps.data import CIFAR10, MNIST, FashionMNIST, ImageData
from lit_dps.data import images as module
from lit_dps.data.loaders import seeded_epochs
from lit_dps.training.workload import Workload
from tests.support.errors import refuses
from tests.support.texts import numbers_in
from tests.support.tiny import gray, write_idx, write_parquet
from tests.unit.engines.test_engine import MODEL

TRAIN, TEST = gray(50, 0), gray(7, 1)


@pytest.fixture(autouse=True)
def fresh_cache():
    module._loaded.cache_clear()
    yield
    module._loaded.cache_clear()


@pytest.fixture
def root(tmp_path):
    write_idx(tmp_path / "MNIST/raw", TRAIN, TEST)
    return tmp_path


def mnist(root, **arguments) -> MNIST:
    data = MNIST(
        root=str(root), batch_size=arguments.pop("batch_size", 4), download=False, **arguments
    )
    data.setup("fit")
    return data


def gathered(data, loader) -> tuple[torch.Tensor, torch.Tensor]:
    cpu = torch.device("cpu")
    x, y = zip(*(data.transfer_batch_to_device(batch, cpu) for batch in loader), strict=True)
    return torch.cat(x), torch.cat(y)


def split() -> tuple[np.ndarray, np.ndarray]:
    ids = np.arange(50)
    np.random.RandomState(0).shuffle(ids)
    return ids[:5], ids[5:]


def test_validation_is_the_first_tenth_of_the_authors_shuffle_normalized_by_the_whole_file(root):
    data = mnist(root, eval_batch_size=2)
    x = TRAIN[0].astype(np.float64)
    mean, std = x.sum() / x.size, np.sqrt(((x - x.sum() / x.size) ** 2).sum() / x.size)
    val, train = split()
    for loader, images, labels in (
        (data.val_dataloader(), x[val], TRAIN[1][val]),
        (data.test_dataloader(), TEST[0], TEST[1]),
    ):
        ours, classes = gathered(data, loader)
        assert ours.dtype is torch.float32 and classes.dtype is torch.int64
        # float64 until the one rounding to float32, so half an ulp of numbers up to 2
        np.testing.assert_allclose(ours[:, 0].numpy(), (images - mean) / std, rtol=6e-8, atol=1e-9)
        np.testing.assert_array_equal(classes, labels)
    ours, classes = gathered(data, islice(data.pruning_dataloader(10), 5))
    state = np.random.RandomState(0)
    state.shuffle(np.arange(50))
    epoch = np.arange(45)
    state.shuffle(epoch)
    np.testing.assert_allclose(
        ours[:, 0].numpy(), (x[train][epoch] - mean) / std, rtol=6e-8, atol=1e-9
    )
    np.testing.assert_array_equal(classes, TRAIN[1][train][epoch])


def test_colour_is_normalized_per_channel(tmp_path):
    x = np.random.default_rng(2).integers(0, [100, 200, 256], (50, 32, 32, 3)).astype(np.uint8)
    write_parquet(tmp_path / "cifar10/train.parquet", x, TRAIN[1])
    write_parquet(tmp_path / "cifar10/test.parquet", x[:7], TEST[1])
    data = CIFAR10(root=str(tmp_path), batch_size=2, download=False)
    data.setup()
    ours, _ = gathered(data, data.val_dataloader())
    val, _ = split()
    assert ours.shape == (5, 3, 32, 32)
    for channel in range(3):
        whole = x[..., channel].astype(np.float64)
        expected = (x[val][..., channel] - whole.mean()) / whole.std()
        np.testing.assert_allclose(ours[:, channel].numpy(), expected, rtol=6e-8, atol=1e-9)


def test_training_batches_are_the_authors_epochs_run_on(root):
    data = mnist(root, batch_size=20)
    stream = np.concatenate(list(islice(data.images.order.epochs(), 4)))
    ours, classes = gathered(data, islice(data.train_dataloader(), 9))
    np.testing.assert_array_equal(ours, data.images.x["train"][stream])
    np.testing.assert_array_equal(classes, TRAIN[1][split()[1]][stream])


def test_a_pass_takes_every_example_once_with_a_short_last_batch(root):
    data = mnist(root)
    batches = list(data.pruning_dataloader(20))
    assert [len(batch.index) for batch in batches] == [20, 20, 5]
    assert len(data.pruning_dataloader(20)) == 3
    assert sorted(torch.cat([batch.index for batch in batches]).tolist()) == list(range(45))


def order_of(data, n=45):
    return torch.cat([batch.index for batch in islice(data.train_dataloader(), n)]).tolist()


def test_a_per_trial_order_depends_on_the_order_seed_alone(root):
    torch.manual_seed(0)
    first = order_of(mnist(root, batch_size=9, order="per_trial", order_seed=3), 10)
    torch.manual_seed(1)
    np.random.seed(1)
    assert order_of(mnist(root, batch_size=10, order="per_trial", order_seed=3), 9) == first
    assert order_of(mnist(root, batch_size=9, order="per_trial", order_seed=4), 10) != first
    assert first == np.concatenate(list(islice(seeded_epochs(45, 3), 2))).tolist()


def test_the_authors_order_ignores_the_order_seed(root):
    assert order_of(mnist(root, order_seed=3)) == order_of(mnist(root, order_seed=4))


def test_an_order_can_be_given_as_a_file(root):
    np.save(root / "order.npy", np.arange(45)[::-1])
    assert order_of(mnist(root, batch_size=9, order=str(root / "order.npy")), 5) == list(
        range(44, -1, -1)
    )


@pytest.mark.parametrize("change", ["pixel", "label", "test"])
def test_the_digest_changes_with_any_byte(root, tmp_path_factory, change):
    (x, y), (test_x, test_y) = [(x.copy(), y.copy()) for x, y in (TRAIN, TEST)]
    {"pixel": x[49, 27, :], "label": y, "test": test_x[0, 0]}[change][-1] ^= 1
    other = tmp_path_factory.mktemp("other")
    write_idx(other / "MNIST/raw", (x, y), (test_x, test_y))
    assert mnist(other).digest != mnist(root).digest
    same = tmp_path_factory.mktemp("same")
    write_idx(same / "MNIST/raw", TRAIN, TEST, gz=True)
    assert mnist(same).digest == mnist(root).digest


@pytest.mark.parametrize("batch_size", [0, -1, 46])
def test_a_batch_size_outside_the_split_is_refused(root, batch_size):
    with pytest.raises(ConfigError) as caught:
        mnist(root, batch_size=batch_size)
    assert caught.value.key == "data.batch_size"
    assert numbers_in(caught.value.allowed) == [1, 45]


@pytest.mark.parametrize("batch_size", [1, 45])
def test_a_batch_size_up_to_the_split_is_allowed(root, batch_size):
    assert len(order_of(mnist(root, batch_size=batch_size), 3)) == 3 * batch_size


@pytest.mark.parametrize("size", [0, -1])
def test_an_eval_batch_size_below_one_is_refused(root, size):
    with pytest.raises(ConfigError) as caught:
        list(mnist(root, eval_batch_size=size).val_dataloader())
    assert caught.value.key == "data.eval_batch_size"


def test_the_variable_names_the_folder(root, monkeypatch):
    monkeypatch.setenv("LIT_DPS_DATA", str(root))
    data = MNIST(batch_size=4, download=False)
    data.setup()
    assert len(data.images.y["test"]) == 7


def test_the_sets_of_one_root_do_not_mix(root):
    with refuses("data.root", str(root), error=DataError) as refused:
        FashionMNIST(root=str(root), download=False).setup()
    assert f"{root}/FashionMNIST/raw/" in str(refused.value)


def test_a_data_set_that_does_not_say_how_to_read_it_is_told_so():
    class Mine(ImageData):
        pass

    with pytest.raises(TypeError) as refused:
        Mine().setup()
    assert str(refused.value).startswith("Mine ") and "load" in str(refused.value)


def test_a_data_set_of_ones_own_needs_only_load():
    class Mine(ImageData):
        def load(self):
            return module.prepare(
                (TRAIN[0][..., None], TRAIN[1].astype("int64")), (TEST[0][..., None], TEST[1])
            )

    data = Mine(batch_size=3)
    data.setup()
    assert gathered(data, data.val_dataloader())[0].shape == (5, 1, 28, 28)


class Noisy(ImageData):
    """Images of noise of a given strength; `loads` counts how often they are made."""

    loads = 0

    def __init__(self, noise: float = 1.0, **arguments):
        super().__init__(**arguments)
        self.noise = noise

    def load(self):
        Noisy.loads += 1
        (x, y), test = TRAIN, (TEST[0][..., None], TEST[1])
        return module.prepare(((self.noise * x[..., None]).clip(0, 9), y.astype("int64")), test)


class Kept(Noisy):
    """Keeps its arguments as Lightning does."""

    def __init__(self, noise: float = 1.0, batch_size: int = 2, order_seed: int = 0):
        super().__init__(0.0, batch_size=batch_size, order_seed=order_seed)
        self.save_hyperparameters()
        self.noise = None

    def load(self):
        Noisy.loads += 1
        return module.prepare(
            (TRAIN[0][..., None] % self.hparams.noise, TRAIN[1]), (TEST[0][..., None], TEST[1])
        )


class Called(Noisy):
    """Has an argument that cannot be compared: a function."""

    def __init__(self, noise: float = 1.0):
        super().__init__()
        self.scale = lambda x: x % noise

    def load(self):
        return module.prepare(
            (self.scale(TRAIN[0][..., None]), TRAIN[1]), (TEST[0][..., None], TEST[1])
        )


class Static(ImageData):
    """Written before `load` knew arguments."""

    def __init__(self, noise: float = 1.0, **arguments):
        super().__init__(**arguments)
        self.noise = noise

    @staticmethod
    def load():
        return module.prepare(
            (TRAIN[0][..., None], TRAIN[1].astype("int64")), (TEST[0][..., None], TEST[1])
        )


def loaded(data: ImageData) -> ImageData:
    data.batch_size = 4
    data.setup()
    return data


@pytest.mark.parametrize("kind", [Noisy, Kept, Called])
def test_the_arguments_of_a_data_set_decide_on_its_images(kind):
    weak, strong = loaded(kind(noise=2.0)), loaded(kind(noise=7.0))
    assert weak.digest != strong.digest
    assert not torch.equal(weak.images.x["train"], strong.images.x["train"])
    assert loaded(kind(noise=2.0)).digest == weak.digest


@pytest.mark.parametrize("kind", [Noisy, Kept])
def test_data_sets_of_equal_arguments_are_read_once(kind):
    before = Noisy.loads
    same = [loaded(kind(noise=2.0, batch_size=b, order_seed=b)) for b in (1, 2, 3)]
    assert Noisy.loads == before + 1 and len({id(data.images) for data in same}) == 1
    loaded(kind(noise=3.0)), loaded(kind(noise=2.0))
    assert Noisy.loads == before + 2


class Taken(Noisy):
    """Has an argument with the name of an attribute that holds the loaded images."""

    def __init__(self, images: int = 3, **arguments):
        super().__init__(**arguments)
        self.images = images


def test_an_argument_with_the_name_of_an_attribute_of_the_base_is_refused():
    with refuses("data", "Taken"):
        Taken().read()


def test_an_attribute_that_is_set_later_decides_too():
    data = Noisy(noise=2.0)
    first = loaded(data).digest
    data.noise = 7.0
    assert loaded(data).digest == loaded(Noisy(noise=7.0)).digest != first


@pytest.mark.parametrize("wrap", [staticmethod, classmethod])
def test_a_load_without_an_instance_still_works(wrap):
    class Old(Static):
        load = wrap(lambda *kind: Static.load())

    assert loaded(Old(noise=1.0)).digest == loaded(Old(noise=2.0)).digest == loaded(Static()).digest


def test_the_example_of_the_page_has_its_arguments(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
    (text,) = re.findall(r"```python\n# my_data.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "stripes_of_the_page.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    workload = Workload(
        MODEL,
        {"class_path": "stripes_of_the_page.Stripes", "init_args": {}},
        {"accelerator": "cpu"},
    )
    spread = []
    for noise in (0.5, 8.0):
        data = workload.build(Trial(Cell(4, 0.0, (("data.noise", noise),)), 0)).data
        x, y = loaded(data).on_device("train", torch.device("cpu"))
        of_class = x[y == y[0]]
        spread.append(float(of_class.std(0).mean() / x.std()))
    assert spread[0] < 0.7 and spread[1] > 0.95, "noise hides the classes"


def test_all_trials_of_a_process_share_one_copy_on_a_device(root):
    one, other = mnist(root), mnist(root, batch_size=2)
    device = torch.device("meta")
    for split in ("train", "val"):
        assert one.on_device(split, device)[0] is other.on_device(split, device)[0]
        assert one.on_device(split, device)[0].device == device
    assert one.on_device("train", torch.device("cpu"))[0] is one.images.x["train"]
