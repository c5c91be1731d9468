"""`make gallery DATA=folder MSHNET=run CDEIT=run`: makes the pictures of docs/ and docs/gallery/ anew.

DATA holds IRSTD-1k/, mnist/ and eit-uef2017/. MSHNET and CDEIT are the runs whose weights are shown; they
are only read, and may still be trained. The small trainings (digits, the live chart) are made here, on the
CPU, in minutes, and kept in outputs/gallery. What a picture cannot say (epochs, scores, hours) is printed: it
belongs on the pages beside it."""

import argparse
import dataclasses
import io
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import tpukit
from release import pictures
from tpukit.devices.runtime import Runtime
from tpukit.reporting import figures, findings
from tpukit.runs import weights
from tpukit.tasks.cdeit import CLASSICAL, colour
from tpukit.tasks.mshnet import scores
from tpukit.tasks.trained import task_of
from tpukit.tools import measure, migrate
from tpukit.training.prediction import predict_test_images

ROOT = Path(__file__).parent.parent
FRAMES = 10  # of the live chart's strip
SHOWN_S = 0.7  # each of them; the last one longer


def main():
    parser = argparse.ArgumentParser(prog="python -m release.gallery", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which pictures (default: all of {', '.join(PICTURES)})"
    )
    parser.add_argument("--data", type=Path, help="folder that holds IRSTD-1k/, mnist/ and eit-uef2017/")
    parser.add_argument("--mshnet", type=Path, help="run of MSHNet on IRSTD-1k whose weights are shown")
    parser.add_argument("--cdeit", type=Path, help="run of CDEIT whose weights are shown")
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs/gallery", help="where it trains")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    given = parser.parse_args()
    if unknown := set(given.names) - set(PICTURES):
        sys.exit(f"no picture {', '.join(sorted(unknown))}: choose from {', '.join(PICTURES)}")
    for name in given.names or PICTURES:
        make, needed = PICTURES[name]
        if missing := [option for option in needed if getattr(given, option) is None]:
            print(f"{name}: left out, it needs --{' --'.join(missing)}")
            continue
        for file, content in make(given).items():
            path = given.out / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            print(f"{len(content) / 1e3:5.0f} kB  {path}")


# MSHNet on IRSTD-1k


def targets(given) -> dict[str, bytes]:
    """Test images and what the weights of a run find in them, as a wide picture and as a card; the run's
    curves."""
    with tempfile.TemporaryDirectory() as folder:
        run, task = snapshot(given.mshnet, folder, dataset_dir=given.data / "IRSTD-1k")
        names = task.test_set().names
        batch, logits = predict_test_images(run, task, len(names))
        labels = batch["mask"].numpy()[:, 0] >= 128
        logits = logits.numpy()[:, 0]
        samples = [pictures.examine(*sample) for sample in zip(batch["image"].numpy(), labels, logits)]
        found = scores.summary([scores.count(*sample) for sample in zip(logits, labels)])
        chosen = pictures.choose(samples)
        if not chosen:
            sys.exit(f"targets: no test image shows a target that {given.mshnet} finds; train it longer")
        told = pictures.story(run)
        curves = pictures.curves(run).encode()
    print(pictures.in_words(told))
    print("predicted here:", pictures.in_words(found))
    print("shown:", [f"{number} ({names[number]})" for number in chosen], "of test.txt, from 0")
    shown = [samples[number] for number in chosen]
    wide = pictures.detections(shown, (10.0, 4.9), text=11)
    card = pictures.detections([shown[0], *shown[-2:]], pictures.CARD, text=13)
    return {
        "detections.png": pictures.png(wide),
        "gallery/mshnet.png": pictures.png(card),
        "irstd1k.svg": curves,
    }


def snapshot(path: Path, folder: str, **settings):
    """(run, task): a copy of what is read of a run, which may still be trained, and its task with some other
    settings. The best weights come first: the records then know their evaluation."""
    for name in ("best.safetensors", "config.json", "records.jsonl"):
        shutil.copy(path / name, folder)
    run = tpukit.Run(folder)
    weights.check_embedded_sha256(run.best())
    return run, dataclasses.replace(task_of(run.config), **settings)


# CDEIT on a real tank


def tank(given) -> dict[str, bytes]:
    """Three of the real measurements of UEF2017, by two classical methods and by a run's weights: those with
    the quartiles of its error."""
    with tempfile.TemporaryDirectory() as folder:
        measured = given.data / "eit-uef2017/test"
        run, task = snapshot(given.cdeit, folder, dataset_dir=measured, data="uef2017")
        found = tpukit.test(task, run, runtime=Runtime("cpu"), progress=False)
        batch, prediction = task.load_predictions(run.path / "predictions")
        told = pictures.story(run)
    print(pictures.in_words(told))
    print("real measurements:", pictures.in_words(found))
    images = {"real tank": batch["image"]} | {name: batch[key] for name, key in CLASSICAL.items()}
    images = {name: np.asarray(values).squeeze() for name, values in images.items()}
    images["CDEIT"] = prediction[:, 0]
    errors = np.sqrt(((images["CDEIT"] - images["real tank"]) ** 2).mean((1, 2)))
    order = np.argsort(errors)
    chosen = [order[round(share * (len(order) - 1))] for share in (0.25, 0.5, 0.75)]
    print("shown:", [int(number) for number in chosen], "of the measurements, in the order of their names")
    rmse = {name: values["rmse"] for name, values in found["beside"].items()} | {"CDEIT": found["rmse"]}
    rows = [[("", colour(values[number])) for values in images.values()] for number in chosen]
    heads = [f"{name}\nRMSE {rmse[name]:.3f}" if name in rmse else name for name in images]
    rows[0] = [(head, picture) for head, (_, picture) in zip(heads, rows[0])]
    card = pictures.panels(rows, "")
    return {"gallery/cdeit.png": pictures.png(card)}


# Digits


def digits(given) -> dict[str, bytes]:
    """Ten test digits, one of each class, and what MNIST's small network makes of them."""
    task = tpukit.MNIST(dataset_dir=given.data / "mnist", epochs=2)
    run, found = train(task, given.runs / "mnist")
    batch, predicted = predict_test_images(run, task, 100)
    labels, images = batch["label"].numpy(), batch["image"].numpy()[:, 0]
    firsts = [int(np.flatnonzero(labels == digit)[0]) for digit in range(10)]
    cells = [
        (f"predicted {guess}" if guess == digit else f"{digit}, predicted {guess}", images[number])
        for digit, (number, guess) in enumerate((number, int(predicted[number])) for number in firsts)
    ]
    title = f"{found['accuracy']:.1%} of {found['images']:,} test digits right"
    return {"gallery/mnist.png": pictures.png(pictures.panels([cells[:5], cells[5:]], title))}


def image_folders(given) -> dict[str, bytes]:
    """MNIST as class folders of PNG files, as one's own images would be, by a small network of timm."""
    folder = given.runs / "mnist-png"
    if not folder.exists():
        write_folders(given.data / "mnist/mnist.npz", folder)
    task = tpukit.ImageClassifier(
        dataset_dir=folder,
        model_name="test_resnet",
        pretrained="no",
        image_size=28,
        epochs=3,
        batch_size=128,
        lr=2e-3,
        flip=0,
        crop=0.8,
        schedule="cosine",
        warmup_epochs=0.5,
    )
    run, found = train(task, given.runs / "images")
    worst, logits = task.load_predictions(run.path / "predictions")
    guesses = [result["class"] for result in task.results({}, logits)]
    mistakes = [
        (f"{task.class_names[label]}, predicted {guess}", image.transpose(1, 2, 0))
        for label, guess, image in zip(worst["label"], guesses, worst["image"])
        if task.class_names[label] != guess
    ]
    confusion = found["confusion"]
    title = f"{found['accuracy']:.1%} of {found['images']:,} test images right; four of the mistakes"
    card = pictures.confusion(np.array(confusion["counts"]), confusion["classes"], mistakes, title)
    return {"gallery/images.png": pictures.png(card)}


def write_folders(npz: Path, folder: Path) -> None:
    """mnist.npz as folder/SPLIT/DIGIT/NUMBER.png."""
    with np.load(npz) as arrays, tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        for split in ("train", "test"):
            for digit in range(10):
                (Path(unfinished) / split / str(digit)).mkdir(parents=True)
            for number, (image, digit) in enumerate(zip(arrays[f"x_{split}"], arrays[f"y_{split}"])):
                Image.fromarray(image).save(Path(unfinished) / split / str(digit) / f"{number:05d}.png")
        shutil.move(unfinished, folder)
        Path(unfinished).mkdir()  # which is removed


def train(task, path: Path):
    """(run, scores of its kept weights) of a training in a folder, which continues there."""
    run = tpukit.Run.open(path, task)
    tpukit.train(task, run, runtime=Runtime("cpu"), progress=False)
    return run, tpukit.test(task, run, runtime=Runtime("cpu"), progress=False)


# The live chart


def live(given) -> dict[str, bytes]:
    """The live chart of a training on synthetic images while it fills, from its own records."""
    folder = given.runs / "infrared"
    if not folder.exists():
        folder.mkdir(parents=True)
        tpukit.MSHNet.synthesize(folder, 32, np.random.default_rng(0))
    task = tpukit.MSHNet(dataset_dir=folder, epochs=12, warm_epoch=2, base_size=64, crop_size=64, log_every=4)
    run, _ = train(task, given.runs / "live")
    records, labels = run.records(), findings.labels_of(run.config)
    total = max(record["step"] for record in records)
    frames = []
    for number in range(1, FRAMES + 1):
        step = round(total * number / FRAMES)
        done = [record for record in records if record["step"] <= step]
        epoch = max(record.get("epoch", 0) for record in done) + 1
        progress = dict(name=task.name, unit="step", step=step, total=total, epoch=epoch)
        shown = Image.open(io.BytesIO(figures.as_png(figures.live_figure(done, progress, labels))))
        ground = Image.new("RGBA", shown.size, "white")
        frame = Image.alpha_composite(ground, shown.convert("RGBA")).convert("RGB")
        frame.thumbnail((1000, 1000))
        frames.append(frame.quantize(48, dither=Image.Dither.NONE))
    times = [round(1000 * SHOWN_S)] * (FRAMES - 1) + [4000]
    gif = io.BytesIO()
    frames[0].save(gif, "GIF", save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True)
    return {"gallery/live.gif": gif.getvalue()}


# Tools


def migration(given) -> dict[str, bytes]:
    """What `migrate` finds in its example script: each kind once."""
    with tempfile.TemporaryDirectory() as folder:
        found, _ = migrate.examine(migrate.copy_example(Path(folder)))
    kinds = {finding.rule: finding for finding in reversed(found)}
    lines = [
        (f"line {finding.line}: {' '.join(finding.found.replace('`', '').split())}", finding.what_to_do)
        for finding in sorted(kinds.values(), key=lambda finding: finding.line)
    ]
    title = f"{len(found)} places of a GPU script that a TPU does not like"
    return {"gallery/migration.png": pictures.png(pictures.words(lines, title))}


def comparison(given) -> dict[str, bytes]:
    """Hours of a training of MSHNet by hardware, as guides on the web publish them; each at its cheapest
    place."""
    cheapest = {}
    for offer in measure.compare([]).offers:  # the cheaper first
        cheapest.setdefault(offer.epoch_s, offer)
    offers = sorted(cheapest.values(), key=lambda offer: offer.machine_h)
    names = [offer.name.partition(" (")[0].replace(", ", "\n") for offer in offers]
    texts = [f"{offer.machine_h:.3g} h, {offer.words()[2]}" for offer in offers]
    title = "400 epochs of MSHNet: published, not measured"
    hours = {"hours": [offer.machine_h for offer in offers]}
    return {"gallery/comparison.png": pictures.png(pictures.bars(names, hours, texts, title, "hours"))}


def prices(given) -> dict[str, bytes]:
    """List prices of the machines that the notebook on renting knows."""
    listed = {price.hardware: price for price in measure.read_prices() if price.place == "Google Cloud"}
    machines = {
        "one T4": ("T4", 1),
        "v5e-1": ("TPU v5e", 1),
        "v6e-1": ("TPU v6e", 1),
        "v5e-8": ("TPU v5e", 8),
    }
    usd = {
        kind: [listed[hardware].per_hour(chips=chips, spot=spot) for hardware, chips in machines.values()]
        for kind, spot in (("on demand", False), ("spot", True))
    }
    texts = [f"{full:.2f}, spot {spot:.2f} USD" for full, spot in zip(*usd.values())]
    title = f"List prices of Google Cloud, {listed['T4'].as_of}"
    return {
        "gallery/cloud.png": pictures.png(pictures.bars(list(machines), usd, texts, title, "USD per hour"))
    }


def sessions(given) -> dict[str, bytes]:
    """40 hours of training in free sessions of three lengths, as the notebook on many sessions plans them."""
    names, hours, texts = [], [], []
    for length_h in (8.5, 4.25, 2.125):
        limits = measure.Price("TPU v5e", "Kaggle", session_h=length_h, week_h=20)
        needed = measure.sessions_needed(40, limits, start_h=1 / 6)
        assert needed is not None
        count, machine_h, calendar_h = needed
        names.append(f"{count} sessions\nof {length_h:.3g} h")
        hours.append(machine_h)
        texts.append(f"{machine_h:.1f} h, done on day {calendar_h // 24 + 1:.0f}")
    title = "40 hours of training, 20 free hours a week"
    return {
        "gallery/sessions.png": pictures.png(pictures.bars(names, {"hours": hours}, texts, title, "hours"))
    }


# Name -> (what makes its files, the options that it needs).
PICTURES = {
    "targets": (targets, ("data", "mshnet")),
    "tank": (tank, ("data", "cdeit")),
    "digits": (digits, ("data",)),
    "images": (image_folders, ("data",)),
    "live": (live, ()),
    "migration": (migration, ()),
    "comparison": (comparison, ()),
    "prices": (prices, ()),
    "sessions": (sessions, ()),
}

if __name__ == "__main__":
    main()
