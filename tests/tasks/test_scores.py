"""Scores of predictors whose worth is known, against plain computations: a tie, NaN or infinity is never a
good score, in any precision."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.tasks.text.small import TINY
from tpukit import CDEIT, MNIST, ImageClassifier, LanguageModel, MSHNet, TpukitError
from tpukit_tasks.cdeit.simulator import disk, scene

KINDS = ("perfect", "constant", "nan", "one nan", "infinite", "minus infinite", "shifted")
BROKEN = ("nan", "infinite", "minus infinite")
every_predictor = pytest.mark.parametrize("kind", KINDS)
in_each_precision = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
RNG = np.random.default_rng(0)
CLASSES = 4
LABELS = np.arange(24) % CLASSES


def spoiled(kind, perfect, shifted):
    """What a predictor of a kind gives, where the right thing is `perfect`."""
    if kind in ("perfect", "shifted"):
        return dict(perfect=perfect, shifted=shifted)[kind].copy()
    values = dict(nan=np.nan, constant=0.25, infinite=np.inf)
    if kind in ("one nan", "minus infinite"):
        values |= {"one nan": perfect, "minus infinite": -np.inf}
    made = np.zeros_like(perfect) + values[kind]
    if kind == "one nan":
        made[(0,) * made.ndim] = np.nan
    return made


def batches(prediction, dtype, **arrays):
    """(prediction, batch) of a padded set, whose padding is perfect and does not count."""
    arrays = {name: torch.as_tensor(values) for name, values in arrays.items()}
    valid = torch.arange(len(prediction)) < len(prediction) - 1
    return [(torch.as_tensor(prediction).to(dtype), dict(arrays, valid=valid))]


# Classes


def logits_of(kind, labels):
    """Logits (N, K) of a predictor."""
    perfect = np.float32(0.01) * RNG.normal(size=(len(labels), CLASSES)).astype(np.float32)
    perfect += 4 * np.eye(CLASSES, dtype=np.float32)[labels]
    return spoiled(kind, perfect, np.roll(perfect, 1, 1))


def accuracy_of(logits, labels):
    """By loops: the first of the largest, if all are numbers."""
    right = 0
    for row, label in zip(logits, labels, strict=True):
        is_finite = all(math.isfinite(value) for value in row)
        right += is_finite and row.tolist().index(max(row.tolist())) == label
    return right / len(labels)


EXPECTED = {"perfect": 1, "constant": 6 / 23, "one nan": 22 / 23, "shifted": 0} | dict.fromkeys(BROKEN, 0)


@every_predictor
@in_each_precision
def test_the_accuracy_of_images_is_that_of_argmax_and_counts_what_is_not_finite_as_wrong(kind, dtype):
    task: ImageClassifier = SimpleNamespace(class_names=list("abcd"))  # pyright: ignore
    logits = logits_of(kind, LABELS)
    found = ImageClassifier.evaluate(task, batches(logits, dtype, label=LABELS))
    logits = torch.as_tensor(logits).to(dtype).double().numpy()[:-1]
    assert found["accuracy"] == accuracy_of(logits, LABELS[:-1]) == pytest.approx(EXPECTED[kind])
    confusion = found["confusion"]
    counts = np.array(confusion["counts"])
    assert found["accuracy"] == pytest.approx(np.trace(counts) / 23) and counts.sum() == 23
    assert np.array_equal(counts.sum(1)[:CLASSES], np.bincount(LABELS[:-1]))
    bad = 23 if kind in BROKEN else int(kind == "one nan")
    assert found.get("not_finite", 0) == bad
    assert confusion["classes"] == (list("abcd") if not bad else [*"abcd", "not finite"])
    assert counts.shape == (4 + bool(bad),) * 2 and (not bad or counts[:, 4].sum() == bad)


@pytest.mark.parametrize("classes", [100, 1000])
def test_ties_of_bf16_are_no_right_answers(classes):
    labels = RNG.integers(classes, size=2000)
    logits = torch.as_tensor(RNG.normal(size=(2000, classes)) + 2.5 * np.eye(classes)[labels]).bfloat16()
    task: ImageClassifier = SimpleNamespace(class_names=list(map(str, range(classes))))  # pyright: ignore
    batch = dict(label=torch.as_tensor(labels), valid=torch.ones(2000, dtype=torch.bool))
    by_numpy = (logits.float().numpy().argmax(1) == labels).mean()
    tied = (logits == logits.amax(1, keepdim=True)).sum(1) > 1
    assert tied.any() and ImageClassifier.evaluate(task, [(logits, batch)])["accuracy"] == by_numpy


@every_predictor
@in_each_precision
def test_mnist_predicts_no_digit_where_the_logits_are_not_finite(kind, dtype):
    logits = torch.as_tensor(logits_of(kind, LABELS)).to(dtype)
    task, image = MNIST(), torch.zeros(len(LABELS), 1, 28, 28, dtype=torch.uint8)
    predicted = task.predict(lambda images: logits, dict(image=image))  # pyright: ignore
    found = task.evaluate([(predicted, dict(label=torch.as_tensor(LABELS), valid=torch.arange(24) < 23))])
    assert found == dict(accuracy=accuracy_of(logits.double().numpy()[:-1], LABELS[:-1]), images=23)
    assert found["accuracy"] == pytest.approx(EXPECTED[kind])
    is_bad = ~np.isfinite(logits.float().numpy()).all(1)
    assert np.array_equal(predicted.numpy() == -1, is_bad)


@pytest.mark.parametrize("bias", [0.5, np.nan, np.inf])
def test_on_xla_the_digits_are_those_of_the_cpu_by_one_graph_without_a_fallback(bias, xla):
    images = np.random.default_rng(0).integers(0, 256, (6, 1, 28, 28), np.uint8)
    task = MNIST(channels=2)
    network = task.model().eval()
    network[-1].bias.data[3] = bias  # pyright: ignore
    digits = task.predict(network, dict(image=torch.as_tensor(images)))
    predict = task.predictor(xla.to_device(network), xla)  # which may be compiled once
    for _ in range(2):
        assert torch.equal(xla.to_cpu(predict(xla.put_batch(dict(image=images)))), digits)
    assert (digits == -1).all() == (not np.isfinite(bias)) and not xla.counters()["fallbacks"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_images_that_got_no_number_are_named_so_wherever_they_are_shown(value, tmp_path):
    logits = np.array([[value, 1.0], [0.0, 3.0]], np.float32)
    batch = dict(label=torch.tensor([0, 1]), valid=torch.ones(2, dtype=torch.bool))
    images = np.zeros((2, 3, 4, 4), np.uint8)
    data = SimpleNamespace(classes=["a", "b"], names=["bad.png", "good.png"], images=images)
    task = ImageClassifier()
    vars(task)["class_names"] = ["a", "b"]
    task.save_predictions(tmp_path, [(torch.as_tensor(logits), batch)], data)
    lines = (tmp_path / "predictions.csv").read_text().splitlines()
    assert lines[1].startswith("bad.png,a,not finite,") and lines[2].startswith("good.png,b,b,")
    saved, predicted = task.load_predictions(tmp_path)
    titles = [row[0][0] for row in task.panels(saved, predicted)]
    assert titles[0].startswith("✗ a, predicted not finite") and titles[1].startswith("✓ b")
    with pytest.raises(TpukitError, match="NaN or infinite"):
        task.results({}, logits)
    assert task.results({}, logits[1:])[0]["class"] == "b"


# Targets


def targets(count=6, side=48):
    """Masks (B, side, side) bool: two far squares in each, none in the last but one."""
    masks = np.zeros((count, side, side), bool)
    for number, mask in enumerate(masks):
        mask[5 + number : 9 + number, 6:10] = mask[30:33, 30 + number : 33 + number] = number != count - 2
    return masks


def detections_by_hand(prediction, masks, is_finite):
    """iou, niou, pd, fa. Regions by flooding, centroids by means."""
    inside = union = targets = found = false = 0
    each = []
    for marked, mask, good in zip(prediction, masks, is_finite, strict=True):
        marked = marked if good else ~mask
        both, either = (marked & mask).sum(), (marked | mask).sum()
        inside, union = inside + both, union + either
        each.append(both / either if either else 1.0)
        left = flooded(marked)
        for target in flooded(mask):
            targets += 1
            near = [one for one in left if good and np.hypot(*(one.mean(0) - target.mean(0))) < 3]
            if near:
                found += 1
                left = [one for one in left if one is not near[0]]
        false += sum(len(region) for region in left)
    return inside / max(union, 1), np.mean(each), found / max(targets, 1), false / masks.size


def flooded(mask):
    """The pixels (N, 2) of each 8-connected region, in scan order."""
    left, regions = set(zip(*map(list, np.nonzero(mask)), strict=True)), []
    for start in sorted(left):
        if start not in left:
            continue
        region, waiting = [], [start]
        left.remove(start)
        while waiting:
            row, column = waiting.pop()
            region.append((row, column))
            near = {(row + i, column + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
            left -= near
            waiting += near
        regions.append(np.array(region))
    return regions


@every_predictor
@in_each_precision
def test_scores_of_targets_are_those_by_hand_and_the_worst_for_what_is_not_finite(kind, dtype):
    masks = targets()
    perfect = np.where(masks, 4.0, -4.0).astype(np.float32)
    perfect += 0.1 * RNG.normal(size=perfect.shape).astype(np.float32)
    logits = spoiled(kind, perfect, np.roll(perfect, 2, 2))
    images = np.where(masks, 255, 0).astype(np.uint8)[:, None]
    found = MSHNet().evaluate(batches(logits[:, None], dtype, mask=images))
    logits = torch.as_tensor(logits).to(dtype).float().numpy()[:-1]
    finite = np.isfinite(logits).all((1, 2))
    wanted = detections_by_hand(1 / (1 + np.exp(-logits)) > 0.5, masks[:-1], finite)
    assert [found[name] for name in ("iou", "niou", "pd", "fa")] == pytest.approx(wanted)
    if kind == "perfect":
        assert [found[name] for name in ("iou", "niou", "pd", "fa")] == [1, 1, 1, 0]
    if kind in BROKEN:
        assert [found[name] for name in ("iou", "niou", "pixel_recall", "pd")] == [0, 0, 0, 0]
        assert found["fa"] == (~masks[:-1]).mean() and found["not_finite"] == 5
    assert found.get("not_finite", 0) == (~finite).sum()


def test_a_network_without_numbers_does_not_find_a_target_in_the_middle_nor_none_in_own_files():
    mask = np.zeros((1, 1, 33, 33), np.uint8)
    mask[..., 15:18, 15:18] = 255  # as far from the corners as the centre of all pixels
    logits, valid = torch.full((1, 1, 33, 33), torch.inf), torch.ones(1, dtype=torch.bool)
    for sign in (1, -1, torch.nan):
        found = MSHNet().evaluate([(sign * logits, dict(mask=torch.as_tensor(mask), valid=valid))])
        assert (found["iou"], found["pd"]) == (0, 0) and found["fa"] > 0.9
        with pytest.raises(TpukitError, match="1089 numbers that are NaN or infinite"):
            MSHNet().results({}, sign * logits)


# Conductivities


def similarity(image, truth):
    """The map of SSIM of Wang et al., by the sums over each pixel's window."""
    offsets = np.arange(-5, 6)
    weights = np.exp(-(offsets**2) / (2 * 1.5**2))
    weights /= weights.sum()
    padded = [np.pad(one.astype(float), 5, "symmetric") for one in (image, truth)]
    a, b = (np.lib.stride_tricks.sliding_window_view(one, (11, 11)) for one in padded)

    def mean(values):
        return np.einsum("ijkl,k,l->ij", values, weights, weights, optimize=True)

    mean_a, mean_b = mean(a), mean(b)
    apart_a, apart_b = (one - at[..., None, None] for one, at in ((a, mean_a), (b, mean_b)))
    return ((2 * mean_a * mean_b + 0.0004) * (2 * mean(apart_a * apart_b) + 0.0036)) / (
        (mean_a**2 + mean_b**2 + 0.0004) * (mean(apart_a**2) + mean(apart_b**2) + 0.0036)
    )


@every_predictor
@in_each_precision
def test_scores_of_conductivities_are_those_by_hand_and_no_number_for_what_is_not_finite(kind, dtype):
    rng, inside = np.random.default_rng(1), disk()
    truth = np.stack([scene(rng) for _ in range(3)])
    image = spoiled(kind, truth, np.roll(truth, 3, 2))
    if kind == "one nan":
        image[0, 64, 64] = np.nan  # the first pixel lies outside of the tank
    arrays = dict(image=truth[:, None], TR=truth[:, None][:, 0], xs_gn=truth)
    found = CDEIT().evaluate(batches(image[:, None], dtype, **arrays))
    image = np.where(inside, torch.as_tensor(image).to(dtype).float().numpy(), 0)[:-1]
    scores = [found[name] for name in ("rmse", "psnr", "cc", "ssim")]
    if bad := {"one nan": 1}.get(kind, 2 * (kind in BROKEN)):
        assert found["not_finite"] == bad and np.isnan(scores).all()
        with pytest.raises(TpukitError, match="NaN or infinite"):
            CDEIT().results({}, image[:, None])
        return
    errors = [np.mean((a[inside] - b[inside]).astype(float) ** 2) for a, b in zip(image, truth)]
    assert found["rmse"] == pytest.approx(np.mean(np.sqrt(errors)), abs=1e-7)
    assert found["psnr"] == pytest.approx(np.mean(10 * np.log10(4 / np.maximum(errors, 1e-12))))
    pairs = [(a[inside].astype(float), b[inside].astype(float)) for a, b in zip(image, truth)]
    cc = 0 if kind == "constant" else np.mean([np.corrcoef(*pair)[0, 1] for pair in pairs])
    assert found["cc"] == pytest.approx(cc) and "not_finite" not in found
    by_hand = [similarity(*pair)[inside].mean() for pair in zip(image, truth)]
    assert found["ssim"] == pytest.approx(np.mean(by_hand), abs=1e-6)


# Tokens


@every_predictor
@in_each_precision
def test_the_loss_of_a_token_is_that_by_hand_and_no_number_for_what_is_not_finite(kind, dtype):
    from tpukit_tasks.text.loss import cross_entropy

    labels = RNG.integers(0, 32, (5, 7))
    labels[2, 3:] = -1
    perfect = 8 * np.eye(32, dtype=np.float32)[labels.clip(0)]
    logits = spoiled(kind, perfect, np.roll(perfect, 1, 2))
    hidden, head = torch.as_tensor(logits).to(dtype), torch.eye(32, dtype=dtype)
    if kind in BROKEN:  # an infinite one times the zeros of the matrix is NaN
        hidden[:, 1:] = 0
    _, losses = cross_entropy(hidden, head, torch.as_tensor(labels))
    found = dict(loss=losses, count=torch.as_tensor((labels >= 0).sum(1)), prompt=torch.zeros(5))
    found["written"] = torch.zeros(5, 9)
    task = LanguageModel(**TINY | dict(samples=0))
    scores = task.evaluate([(found, dict(valid=torch.arange(5) < 4))])
    if bad := {"one nan": 1}.get(kind, 4 * (kind in BROKEN)):
        assert scores["not_finite"] == bad
        assert math.isnan(scores["test_loss"]) and math.isnan(scores["perplexity"])
        return
    rows = hidden.float().numpy().astype(float)[:4]
    each = [
        np.log(np.exp(row).sum()) - row[label]
        for row, label in zip(rows.reshape(-1, 32), labels[:4].ravel())
        if label >= 0
    ]
    assert scores["test_loss"] == pytest.approx(np.mean(each), rel=1e-4) and scores["tokens"] == len(each)
    assert scores["perplexity"] == pytest.approx(np.exp(np.mean(each)), rel=1e-3)
    if kind == "constant":
        assert scores["perplexity"] == pytest.approx(32, rel=1e-3)


def test_no_token_is_no_perfect_score_and_an_infinite_loss_stays_one():
    task = LanguageModel(**TINY | dict(samples=0))
    for loss, count, wanted in ((0.0, 0, math.nan), (math.inf, 3, math.inf)):
        found = dict(loss=torch.tensor([loss]), count=torch.tensor([count]))
        scores = task.evaluate([(found, dict(valid=torch.tensor([True])))])
        assert scores["perplexity"] == pytest.approx(wanted, nan_ok=True)
        assert scores["log_likelihood"] == pytest.approx(-wanted, nan_ok=True)
        json.dumps(scores)
