"""Images: reading the official files and refusing others, what is done to batches, how good probabilities are."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile

import numpy as np
import pytest
import torch
from scipy.io import savemat
from scipy.ndimage import gaussian_filter
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss

from eigenoise.inference import metrics
from eigenoise.studies.data import DataFileError, Images, images, transforms
from eigenoise.studies.data.transforms import Normalise, augment, corrupt


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pictures(count=6):
    return torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator())


# Files.


@pytest.fixture
def small(monkeypatch):
    """Files of the official layout with three images each, and the hashes that they have."""
    monkeypatch.setattr(images, "RECORDS", 3)
    random = np.random.default_rng(0)
    files = {}
    for name in images.CIFAR10_FILES:
        raw = random.integers(0, 256, (3, images.RECORD), dtype=np.uint8)
        raw[:, 0] %= 10
        files[name] = raw.tobytes()
    known = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    monkeypatch.setattr(images, "CIFAR10_FILES", known)
    return files


def write(folder, files):
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def archive(path, files, *, links=(), prefix=images.CIFAR10_FOLDER):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{prefix}/{name}")
            member.size = len(content)
            if name in links:
                member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc/passwd", 0
            tar.addfile(member, io.BytesIO(content))
        evil = tarfile.TarInfo("../outside.txt")
        evil.size = 4
        tar.addfile(evil, io.BytesIO(b"evil"))
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("inside", [True, False])
def test_the_six_files_are_read(tmp_path, small, inside):
    home = tmp_path / images.CIFAR10_FOLDER
    write(home, small)
    train, test = images.cifar10(tmp_path if inside else home)
    assert (len(train), len(test)) == (15, 3)
    raw = np.frombuffer(small["data_batch_2.bin"], np.uint8).reshape(3, -1)
    assert int(train.y[4]) == raw[1, 0]
    assert torch.equal(train.x[4].flatten(), torch.from_numpy(raw[1, 1:].copy()))
    assert train.x.dtype is torch.uint8


def test_a_missing_file_comes_from_the_archive_and_nothing_else_does(tmp_path, small, monkeypatch):
    cache = tmp_path / "deep" / "cache"
    cache.mkdir(parents=True)
    digest = archive(cache / "cifar-10-binary.tar.gz", small)
    monkeypatch.setattr(images, "CIFAR10_HASH", f"md5:{digest}")
    train, test = images.cifar10(cache)
    assert (len(train), len(test)) == (15, 3)
    assert sorted(path.name for path in cache.rglob("*") if path.is_file()) == sorted(
        [*small, "cifar-10-binary.tar.gz"]
    )
    assert not list(tmp_path.rglob("outside.txt"))


def test_damaged_and_missing_files_are_named(tmp_path, small, monkeypatch):
    home = tmp_path / images.CIFAR10_FOLDER
    write(home, {**small, "test_batch.bin": small["test_batch.bin"][:-1] + b"x"})
    with pytest.raises(DataFileError, match=r"test_batch.bin is damaged or not the known file.*delete it"):
        images.cifar10(tmp_path)
    (home / "test_batch.bin").unlink()
    monkeypatch.setattr(images, "CIFAR10_URL", "http://127.0.0.1:9/cifar-10-binary.tar.gz")
    with pytest.raises(DataFileError, match=r"could not be downloaded.*put it at .*EIGENOISE_DATA"):
        images.cifar10(tmp_path)
    archive(tmp_path / "cifar-10-binary.tar.gz", small)
    with pytest.raises(DataFileError, match=r"cifar-10-binary.tar.gz is damaged"):
        images.cifar10(tmp_path)


@pytest.mark.parametrize("trouble", ["link", "short", "cut", "empty"])
def test_an_archive_with_something_else_in_it_is_refused(tmp_path, small, monkeypatch, trouble):
    path = tmp_path / "cifar-10-binary.tar.gz"
    if trouble == "short":
        archive(path, {**small, "test_batch.bin": b"short"})
    elif trouble == "empty":
        archive(path, {})
    else:
        archive(path, small, links=["data_batch_3.bin"] if trouble == "link" else ())
    if trouble == "cut":
        path.write_bytes(path.read_bytes()[:-2000])
    monkeypatch.setattr(images, "CIFAR10_HASH", f"md5:{hashlib.md5(path.read_bytes()).hexdigest()}")
    with pytest.raises(DataFileError, match=r"holds something else|cannot be unpacked"):
        images.cifar10(tmp_path)


def test_the_real_files_have_the_known_hashes():
    assert len(set(images.CIFAR10_FILES.values())) == 6
    assert all(len(value) == 64 for value in images.CIFAR10_FILES.values())
    assert images.RECORD * images.RECORDS == 30_730_000


def test_images_that_cannot_be_are_refused():
    x, y = pictures(), torch.arange(6)
    assert len(Images(x, y).some(slice(2)).to("cpu")) == 2
    for bad_x, bad_y in ((x.float(), y), (x[:, :1], y), (x[..., :31], y), (x, y[:5]), (x, y + 5), (x, y - 1)):
        with pytest.raises(ValueError, match=r"[xy](: expected| must)"):
            Images(bad_x, bad_y)


def test_other_sets_are_brought_to_the_same_shape(tmp_path):
    grey = np.random.default_rng(0).integers(0, 256, (4, 28, 28), dtype=np.uint8)
    path = tmp_path / images.OTHERS["fashion-mnist"]
    path.parent.mkdir()
    header = np.array([2051, 4, 28, 28], ">i4").tobytes()
    path.write_bytes(gzip.compress(header + grey.tobytes()))
    x = images.other("fashion-mnist", tmp_path)
    assert x.shape == (4, 3, 32, 32)
    assert torch.equal(x[:, 1, 2:30, 2:30], torch.from_numpy(grey))
    assert not x[:, :, :2].any()
    colour = np.random.default_rng(1).integers(0, 256, (32, 32, 3, 5), dtype=np.uint8)
    path = tmp_path / images.OTHERS["svhn"]
    path.parent.mkdir()
    savemat(path, {"X": colour})
    assert torch.equal(images.other("svhn", tmp_path)[3, 2], torch.from_numpy(colour[:, :, 2, 3].copy()))


@pytest.mark.parametrize("name", images.OTHERS)
@pytest.mark.parametrize(
    "content",
    [b"", b"nothing", gzip.compress(np.array([2051, 9, 28, 28], ">i4").tobytes())],
    ids=["empty", "words", "header"],
)
def test_other_sets_that_are_damaged_or_missing_are_named(tmp_path, name, content):
    with pytest.raises(DataFileError, match=f"{name} is not in the cache: put its test part at"):
        images.other(name, tmp_path)
    path = tmp_path / images.OTHERS[name]
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(DataFileError, match="cannot be read"):
        images.other(name, tmp_path)
    with pytest.raises(ValueError, match="name must be one of"):
        images.other("mnist", tmp_path)


# What is done to batches.


def test_normalising_is_by_each_colour():
    x = pictures(50)
    normalised = Normalise.of(x)(x)
    assert normalised.dtype is torch.float32
    torch.testing.assert_close(normalised.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float32), atol=1e-5, rtol=0)
    torch.testing.assert_close(normalised.std((0, 2, 3)), torch.ones(3, dtype=torch.float32), atol=1e-4, rtol=0)
    assert torch.isfinite(Normalise.of(torch.zeros_like(x))(x)).all()
    with pytest.raises(ValueError, match="x: expected images"):
        Normalise.of(x[:0])


def test_augmented_images_are_shifted_and_mirrored_ones():
    x = pictures(40)
    padded = torch.nn.functional.pad(x, (4,) * 4)
    seen = set()
    for image, border in zip(augment(x, generator()), padded, strict=True):
        found = [
            (dy, dx, flip)
            for dy in range(9)
            for dx in range(9)
            for flip in (False, True)
            if torch.equal(
                image, (lambda part, flip=flip: part.flip(-1) if flip else part)(border[:, dy : dy + 32, dx : dx + 32])
            )
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 30
    assert {flip for *_, flip in seen} == {False, True}
    assert torch.equal(augment(x, generator(3)), augment(x, generator(3)))
    assert not torch.equal(augment(x, generator(3)), augment(x, generator(4)))


@pytest.mark.parametrize("kind", transforms.CORRUPTIONS)
def test_corruptions_grow_with_severity(kind):
    smooth = torch.linspace(0, 255, 32).round().to(torch.uint8).expand(4, 3, 32, 32).clone()
    smooth[:, :, 8:12] = 255 - smooth[:, :, 8:12]
    away = [
        float((corrupt(smooth, kind, severity, generator()).float() - smooth.float()).square().mean())
        for severity in range(1, 6)
    ]
    assert away == sorted(away)
    assert away[0] > 0
    for severity in (0, 6):
        with pytest.raises(ValueError, match="severity: expected 1 to 5"):
            corrupt(smooth, kind, severity, generator())
    with pytest.raises(ValueError, match="kind must be one of"):
        corrupt(smooth, "fog", 1, generator())


def test_corruptions_are_what_they_say():
    x = pictures()
    noisy = corrupt(x.clamp(100, 150), "noise", 3, generator())
    assert float((noisy.float() - x.clamp(100, 150).float()).std() / 255) == pytest.approx(0.08, rel=0.02)
    flat = corrupt(x, "contrast", 2, generator()).float()
    torch.testing.assert_close(flat.std((2, 3)), 0.5 * x.float().std((2, 3)), rtol=0.01, atol=0)
    blurred = corrupt(x, "blur", 4, generator())
    wanted = gaussian_filter(x[0, 1].numpy().astype(float), 0.8, mode="mirror", truncate=5)
    assert np.abs(blurred[0, 1].numpy() - wanted).max() < 0.51 + 0.1


# How good probabilities are.


def test_scores_of_probabilities():
    probs = torch.rand(500, 4, generator=generator()).softmax(-1)
    y = torch.multinomial(probs, 1, generator=generator(1)).squeeze(-1)
    assert float(metrics.accuracy(probs, y)) == pytest.approx(float((probs.argmax(-1) == y).double().mean()))
    two = torch.stack([1 - probs[:, 0], probs[:, 0]], -1)
    wanted = 2 * brier_score_loss((y == 0).long().numpy(), probs[:, 0].numpy())
    assert float(metrics.brier(two, (y == 0).long())) == pytest.approx(wanted)
    sure, right = probs.max(-1)[0], (probs.argmax(-1) == y).double()
    found = metrics.reliability(probs, y, bins=10)
    true, mean = calibration_curve(right.numpy(), sure.numpy(), n_bins=10)
    held = found.weight > 0
    np.testing.assert_allclose(found.accuracy[held].numpy(), true)
    np.testing.assert_allclose(found.confidence[held].numpy(), mean)
    assert float(found.weight.sum()) == pytest.approx(1.0)
    assert float(found.error) == pytest.approx((found.weight[held].numpy() * np.abs(true - mean)).sum())


def test_a_sure_and_right_network_is_calibrated_and_a_sure_and_wrong_one_is_not():
    y = torch.arange(4) % 2
    right = torch.eye(2)[y]
    assert float(metrics.reliability(right, y).error) == 0.0
    assert float(metrics.reliability(right, 1 - y).error) == 1.0
    assert float(metrics.brier(right, 1 - y)) == 2.0


def test_auroc():
    assert metrics.auroc(torch.arange(5.0), torch.arange(5.0) + 10) == 1.0
    assert metrics.auroc(torch.ones(5), torch.ones(7)) == 0.5


def test_probabilities_and_classes_must_fit():
    probs = torch.full((3, 2), 0.5)
    for bad, y in ((probs[0], torch.zeros(2).long()), (probs, torch.zeros(2).long()), (probs, torch.tensor([0, 1, 2]))):
        with pytest.raises(ValueError, match=r"(probs|y) must"):
            metrics.accuracy(bad, y)
