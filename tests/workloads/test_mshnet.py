"""MSHNet's parts against slow, plain references written here."""

import random
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tpukit import TpukitError
from tpukit.workloads.mshnet import MSHNet, augment, strips
from tpukit.workloads.mshnet.data import InfraredSet, read_image
from tpukit.workloads.mshnet.loss import sls_loss
from tpukit.workloads.mshnet.model import upsample
from tpukit.workloads.mshnet.scores import Scores


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_upsampling_equals_bilinear_interpolation_with_aligned_corners(factor):
    x = torch.randn(2, 3, 12, 20, generator=torch.Generator().manual_seed(1), requires_grad=True)
    wanted = F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=True)
    torch.testing.assert_close(upsample(x, factor), wanted, atol=1e-5, rtol=0)
    weight = torch.randn_like(wanted)
    ours = torch.autograd.grad((upsample(x, factor) * weight).sum(), x)[0]
    theirs = torch.autograd.grad((wanted * weight).sum(), x)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_doubling_by_blending_equals_bilinear_interpolation_and_its_gradient_is_exact():
    x = torch.randn(2, 3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    wanted = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
    torch.testing.assert_close(strips.double(x), wanted, atol=1e-6, rtol=0)  # its shares are float32
    assert torch.autograd.gradcheck(strips.double, x[:1, :1])
    assert torch.autograd.gradcheck(
        lambda x: strips.double(strips.cut(x, 2), 2), torch.randn(1, 1, 6, 3).double().requires_grad_()
    )


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_network_that_works_on_strips_has_the_outputs_gradients_and_statistics_of_one_that_does_not(
    count, train, monkeypatch
):
    torch.manual_seed(0)
    plain = MSHNet().model().double().train(train)
    cut = MSHNet().model().double().train(train)
    cut.load_state_dict(plain.state_dict())
    image = torch.randn(2, 3, 64, 64, dtype=torch.float64)

    def outcome(model):
        logits, masks = model(image)
        loss = (logits**2).mean() + sum((mask**2).mean() for mask in masks)
        loss.backward()
        return [logits, *masks, *model.buffers()], [p.grad for p in model.parameters()]

    wanted, wanted_gradients = outcome(plain)
    monkeypatch.setattr(strips, "count", lambda image: count)
    by_rows = lambda layer, x: strips.convolve_rows(layer, x) if layer.kernel_size[0] == 7 else layer(x)  # noqa: E731
    monkeypatch.setattr(strips, "attend", lambda layer, x, count: strips.cut(by_rows(layer, strips.join(x, count)), count))
    found, gradients = outcome(cut)
    for a, b in zip([*found, *gradients], [*wanted, *wanted_gradients]):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-9)


def test_strips_fill_the_lanes_of_an_xla_core_and_no_other_device(xla):
    count = lambda batch, size: strips.count(torch.zeros(batch, 3, size, size).to(xla.device))  # noqa: E731
    assert [count(32, 256), count(4, 256), count(128, 256), count(16, 64), count(1, 48), count(1, 16)] == [4, 16, 1, 4, 2, 1]
    assert strips.count(torch.zeros(32, 3, 256, 256)) == 1


def by_pil(image, mask, numbers, base_size, crop_size):
    """What the published recipe makes of a sample with PIL."""
    image, mask = Image.fromarray(image), Image.fromarray(mask)
    bilinear, nearest = Image.Resampling.BILINEAR, Image.Resampling.NEAREST
    if numbers is None:
        return image.resize((base_size, base_size), bilinear), mask.resize((base_size, base_size), nearest)
    plan = augment.plan(numbers, image.size, base_size, crop_size)
    size = augment.scaled_size(image.size, plan["long_size"])
    if plan["flip"]:
        image, mask = ImageOps.mirror(image), ImageOps.mirror(mask)
    box = (plan["x1"], plan["y1"], plan["x1"] + crop_size, plan["y1"] + crop_size)
    image, mask = image.resize(size, bilinear).crop(box), mask.resize(size, nearest).crop(box)
    return image if plan["blur"] is None else image.filter(ImageFilter.GaussianBlur(plan["blur"])), mask


def test_a_set_of_many_sizes_and_modes_gives_what_pil_gives_on_the_host_and_on_a_device(tmp_path):
    rng = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
    sizes = [(64, 48), (40, 90), (200, 200), (33, 57)]
    for number, (width, height) in enumerate(sizes):
        shape = (height // 4 + 1, width // 4 + 1, *([3] if number % 2 else []))
        image = Image.fromarray(rng.integers(0, 255, shape, np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
        image.save(tmp_path / "images" / f"{number}.png")
        Image.fromarray(np.where(rng.random((height, width)) > 0.9, 255, 0).astype(np.uint8)).save(
            tmp_path / f"masks/{number}.png"
        )
    for name in ("trainval.txt", "test.txt"):
        (tmp_path / name).write_text("0\n1\n2\n3\n")
    data = InfraredSet(tmp_path, "train", base_size=64, crop_size=48)
    assert data.device_nbytes() == sum(a.nbytes for a in data.device_arrays().values()) == 4 * (3 + 1) * 200 * 200
    indices = rng.integers(0, 4, 40)
    for numbers, size in ((rng.random((40, 6)), 48), (None, 64)):
        host, rows = data.batch(indices, numbers), {k: torch.as_tensor(v[indices]) for k, v in data.device_arrays().items()}
        device = data.compose(rows, {k: torch.as_tensor(v) for k, v in data.sample_parameters(indices, numbers).items()})
        assert host["image"].shape == device["image"].shape == (40, 3, size, size)
        assert np.abs(device["image"].numpy() - host["image"]).max() <= 0.5 + 1e-3  # the host rounds
        np.testing.assert_array_equal(device["mask"], host["mask"])
        for slot, index in enumerate(indices):
            sample = None if numbers is None else numbers[slot]
            image, mask = by_pil(data.images[index], data.masks[index], sample, 64, 48)
            difference = np.abs(host["image"][slot] - augment.planes(np.asarray(image)).astype(int))
            blurs = sample is not None and sample[4] < 0.5
            assert difference.max() <= (3 if blurs else 1) and difference.mean() < 0.8
            np.testing.assert_array_equal(host["mask"][slot, 0], mask)
            assert host["mask"][slot].max() == 255


class BfloatProducts(TorchFunctionMode):
    """Within it, matrices are multiplied as a TPU does it: factors rounded to bfloat16, sums in float32."""

    def __torch_function__(self, function, types, arguments=(), settings=None):
        if function in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            arguments = [factor.bfloat16().float() for factor in arguments]
        return function(*arguments, **(settings or {}))


def test_products_in_bfloat16_as_a_tpu_takes_them_move_no_grey_level(infrared):
    data = InfraredSet(infrared, "train", base_size=64, crop_size=64)
    rng = np.random.default_rng(0)
    indices, numbers = rng.integers(0, len(data), 8), rng.random((8, 6))
    rows = {name: torch.as_tensor(pixels[indices]) for name, pixels in data.device_arrays().items()}
    parameters = {name: torch.as_tensor(value) for name, value in data.sample_parameters(indices, numbers).items()}
    wanted = data.compose(rows, parameters)
    with BfloatProducts():
        found = data.compose(rows, parameters)
    assert 0 < (found["image"] - wanted["image"]).abs().max() < 0.05
    assert torch.equal(found["mask"], wanted["mask"])


def test_loss_is_the_mean_over_samples_of_a_plain_loop():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 1, 16, 24, generator=generator)
    target = (torch.rand(3, 1, 16, 24, generator=generator) > 0.9).float()
    for warm_up in (True, False):
        alone = [sls_loss(logits[i : i + 1], target[i : i + 1], warm_up=warm_up) for i in range(3)]
        assert abs(sls_loss(logits, target, warm_up=warm_up) - sum(alone) / 3) < 1e-6


def test_loss_of_an_image_without_target_is_finite_and_so_is_its_gradient():
    logits = torch.full((2, 1, 16, 16), -200.0, requires_grad=True)
    for warm_up in (True, False):
        loss = sls_loss(logits, torch.zeros(2, 1, 16, 16), warm_up=warm_up)
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()


def test_the_output_after_the_warm_up_starts_as_what_the_warm_up_trained(infrared):
    model = MSHNet(dataset_dir=infrared).model().eval()
    image = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(image)[0], model(image, warm_up=True)[0])
    assert MSHNet(dataset_dir=infrared, final_init="random").model().final.weight.std() > 0.05


def disc(size, centre, area_side):
    image = np.zeros((size, size), bool)
    image[centre[0] : centre[0] + area_side, centre[1] : centre[1] + area_side] = True
    return image


def test_a_false_region_as_large_as_a_matched_one_counts_here_but_not_in_the_published_code():
    target = disc(32, (4, 4), 3)
    prediction = target | disc(32, (20, 20), 3) | disc(32, (10, 25), 2)
    scores = Scores()
    scores.add(np.where(prediction, 5.0, -5.0)[None, None], target[None, None].astype(float))
    assert scores.result()["fa"] == (9 + 4) / 32**2
    assert scores.published()["fa"] == 4 / 32**2
    assert scores.result()["pd"] == scores.published()["pd"] == 1


def test_grey_labels_count_from_one_half_here_and_only_at_one_in_the_published_intersection():
    target = np.zeros((1, 1, 8, 8))
    target[0, 0, 2, 2:6] = [1, 0.6, 0.5, 0.4]
    logits = np.where(target > 0, 1.0, -1.0)
    scores = Scores()
    scores.add(logits, target)
    assert scores.result()["iou"] == 3 / 4
    assert scores.published()["iou"] == 1 / (4 + 3 - 1)
    assert scores.result()["pixel_accuracy"] == 3 / 3 and scores.published()["pixel_accuracy"] == 1 / 4
    # ROC at threshold 0.9, where nothing is predicted, and at 0.5, where all four grey pixels are.
    ours, published = scores.roc(), scores.published()["roc"]
    assert ours["tpr"][9] == published["tpr"][9] == 0
    assert ours["tpr"][5] == 3 / 3.001 and ours["fpr"][5] == 1 / 61.001
    assert published["tpr"][5] == 1 / 1.001 and published["fpr"][5] == 3 / 63.001


def test_each_evaluation_starts_its_counts_at_zero_and_leaves_padding_out():
    target = disc(16, (4, 4), 3)[None, None].repeat(2, 0).astype(float)
    logits = np.where(target > 0, 5.0, -5.0)
    once, padded = Scores(), Scores()
    once.add(logits[:1], target[:1])
    padded.add(logits, target, valid=np.array([True, False]))
    assert once.result() == padded.result() and once.result()["targets"] == 1


def test_niou_is_the_mean_of_the_images_and_iou_their_sum():
    target = np.stack([disc(16, (2, 2), 4), disc(16, (2, 2), 2)])[:, None].astype(float)
    prediction = np.stack([disc(16, (2, 2), 4), disc(16, (2, 2), 4)])[:, None]
    scores = Scores()
    scores.add(np.where(prediction, 1.0, -1.0), target)
    assert scores.result()["niou"] == (1 + 4 / 16) / 2
    assert scores.result()["iou"] == (16 + 4) / (16 + 16)


def test_augmentation_settings_cover_their_whole_range_and_nothing_beyond():
    rng = np.random.default_rng(0)
    plans = [augment.plan(rng.random(6), (512, 400), 64, 64) for _ in range(4000)]
    sizes = {p["long_size"] for p in plans}
    assert (min(sizes), max(sizes)) == (32, 128)
    assert abs(np.mean([p["flip"] for p in plans]) - 0.5) < 0.03
    for p in plans:
        width, height = augment.scaled_size((512, 400), p["long_size"])
        assert 0 <= p["x1"] <= max(width - 64, 0) and 0 <= p["y1"] <= max(height - 64, 0)
    largest = augment.plan((0, 1 - 1e-12, 1 - 1e-12, 1 - 1e-12, 0.9, 0), (512, 400), 64, 64)
    assert largest["x1"] == 128 - 64 and largest["y1"] == 100 - 64


@pytest.mark.parametrize(
    "mode, wanted", [("L", 102), ("RGB", 102), ("RGBA", 102), ("P", 102), ("LA", 102), ("I;16", 102), ("1", 255)]
)
def test_a_grey_image_of_every_mode_is_read_to_the_same_grey(tmp_path, mode, wanted):
    path = tmp_path / "image.png"
    if mode == "I;16":
        Image.fromarray(np.full((8, 8), 102 * 257, np.uint16)).save(path)
    elif mode == "1":
        Image.new("1", (8, 8), 1).save(path)
    else:
        Image.new("RGB", (8, 8), (102,) * 3).convert(mode).save(path)
    array = read_image(path)
    assert array.dtype == np.uint8 and (array == wanted).all() and array.shape == (8, 8)


@pytest.mark.parametrize("apart, shape", [(1, (8, 8)), (2, (8, 8, 3))])
def test_colours_that_differ_by_more_than_rounding_are_kept(tmp_path, apart, shape):
    colours = np.full((8, 8, 3), 100, np.uint8)
    colours[2, 3, 1] += apart
    Image.fromarray(colours).save(tmp_path / "image.png")
    array = read_image(tmp_path / "image.png")
    assert array.shape == shape and np.abs(array.reshape(8, 8, -1) - colours.astype(int)).max() <= (apart == 1)


def write_set(folder, names, *, lists=("trainval.txt", "test.txt"), mask_suffix="", size=(32, 32)):
    for kind, suffix in (("images", ""), ("masks", mask_suffix)):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for name in names:
            Image.new("L", size, 50).save(folder / kind / f"{name}{suffix}.png")
    for name in lists:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join(names) + "\n")
    return folder


@pytest.mark.parametrize(
    "lists, suffix",
    [
        (("trainval.txt", "test.txt"), ""),
        (("img_idx/train_NUDT-SIRST.txt", "img_idx/test_NUDT-SIRST.txt"), ""),
        (("50_50/train.txt", "50_50/test.txt"), ""),
        (("idx_427/trainval.txt", "idx_427/test.txt"), "_pixels0"),
    ],
)
def test_the_lists_of_the_published_sets_are_found(tmp_path, lists, suffix):
    write_set(tmp_path, ["a", "b"], lists=lists, mask_suffix=suffix)
    for split in ("train", "test"):
        assert InfraredSet(tmp_path, split).names == ["a", "b"]


def test_all_bad_pairs_are_listed_with_their_line_before_training(tmp_path):
    write_set(tmp_path, ["good", "noimage", "nomask", "othersize", "damaged"])
    (tmp_path / "images/noimage.png").unlink()
    (tmp_path / "masks/nomask.png").unlink()
    Image.new("L", (16, 32)).save(tmp_path / "masks/othersize.png")
    data = (tmp_path / "images/damaged.png").read_bytes()
    (tmp_path / "images/damaged.png").write_bytes(data[: len(data) // 2])
    with pytest.raises(TpukitError) as error:
        MSHNet(dataset_dir=tmp_path).datasets()
    for line, name, what in (
        (2, "noimage", "no image"),
        (3, "nomask", "no mask"),
        (4, "othersize", "mask is 16x32"),
        (5, "damaged", "unreadable"),
    ):
        assert any(f"line {line}: {name}" in text and what in text for text in str(error.value).splitlines()), name
    assert "4 of 5 entries" in str(error.value) and "--skip-bad" in str(error.value)
    data, _ = MSHNet(dataset_dir=tmp_path, skip_bad=True).datasets()
    assert data.names == ["good"] and "left out 4 of 5" in data.notes


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(8193, 8192), (12000, 12000), (1 << 30, 1 << 30)])
def test_an_image_that_claims_a_huge_size_is_named_and_not_decoded(tmp_path, size, monkeypatch):
    write_set(tmp_path, ["good", "bomb"])
    path = tmp_path / "images/bomb.png"
    data = bytearray(path.read_bytes())
    data[16:24] = struct.pack(">II", *size)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    path.write_bytes(data)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: pytest.fail(f"{image.size} decoded"))
    with pytest.raises((TpukitError, Image.DecompressionBombError), match="pixels"):
        read_image(path)
    monkeypatch.undo()
    with pytest.raises(TpukitError, match="line 2: bomb: images/bomb.png is unreadable .*pixels"):
        MSHNet(dataset_dir=tmp_path).datasets()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("ending", [".png", ".bmp", ".jpg", ".tif"])
def test_a_damaged_image_of_any_kind_is_a_sentence_and_no_traceback(tmp_path, ending):
    rng = random.Random(ending)
    names = [f"{number:03d}" for number in range(150)]
    write_set(tmp_path, names)
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    for name in names:
        (tmp_path / f"images/{name}.png").unlink()
        path = tmp_path / f"images/{name}{ending}"
        Image.fromarray(pixels).save(path)
        data = bytearray(path.read_bytes())
        for _ in range(rng.choice((1, 8))):
            data[rng.randrange(rng.choice((64, len(data))))] = rng.randrange(256)
        path.write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])
    with pytest.raises(TpukitError, match=f"of 150 entries.*\n.*images/.*{ending} is unreadable"):
        MSHNet(dataset_dir=tmp_path).datasets()


def test_missing_folder_missing_list_and_empty_list_say_what_to_do(tmp_path):
    with pytest.raises(TpukitError, match="does not exist"):
        InfraredSet(tmp_path / "nowhere", "train")
    write_set(tmp_path, ["a"], lists=())
    with pytest.raises(TpukitError, match="looked for trainval.txt.*should hold images/"):
        InfraredSet(tmp_path, "train")
    (tmp_path / "trainval.txt").write_text("\n\n")
    with pytest.raises(TpukitError, match="trainval.txt is empty"):
        InfraredSet(tmp_path, "train")
    (tmp_path / "trainval.txt").write_bytes("gelände".encode("latin-1"))
    with pytest.raises(TpukitError, match="trainval.txt is no text in UTF-8 .*at byte 3.*save it as UTF-8"):
        InfraredSet(tmp_path, "train")


def test_a_list_with_the_mark_of_a_windows_editor_is_read(tmp_path):
    write_set(tmp_path, ["a", "b"])
    path = tmp_path / "trainval.txt"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert InfraredSet(tmp_path, "train").names == ["a", "b"]


def test_sizes_that_the_network_cannot_halve_are_refused(infrared):
    with pytest.raises(TpukitError, match="crop_size=100.*multiple of 16"):
        MSHNet(dataset_dir=infrared, crop_size=100)


def test_real_irstd1k_is_read_whole(real_data):
    data, test = MSHNet(dataset_dir=real_data / "IRSTD-1k", base_size=64, crop_size=64).datasets()
    assert (len(data), len(test)) == (800, 201)
    assert data.colours == test.colours == 1  # three of its images are stored in colour and grey to within a level
    batch = data.batch([0, 1], np.random.default_rng(0).random((2, 6)))
    assert batch["image"].shape == batch["mask"].shape == (2, 1, 64, 64)
