"""CDEIT: the network, the sets, the noise and the samplers, training, and scores."""

import copy
import csv
import math

import numpy as np
import pytest
import torch
from scipy import io, stats
from skimage import metrics

from tests.conftest import best_weights, checkpoint, exact, same
from tpukit import CDEIT, Run, TpukitError, detect, train
from tpukit.tools.try_model import try_model
from tpukit.training.evaluation import test as score_run  # under its own name pytest would run it
from tpukit.workloads.cdeit import diffusion, simulator
from tpukit.workloads.cdeit.data import FALLBACK, voltage_map
from tpukit.workloads.cdeit.model import Attention, CDEITModel, RelativeAttention
from tpukit.workloads.cdeit.scores import image_scores

TINY = dict(patch=16, width=16, heads=2, window=4, levels=1)
SMALL = dict(TINY, batch_size=8, lr=1e-2, objective="l2", log_every=2, num_workers=1)


def task_of(folder, **more):
    return CDEIT(dataset_dir=folder, **{**SMALL, "epochs": 2, **more})


# The model


@pytest.mark.parametrize("trains", [True, False])
def test_attention_by_some_queries_at_a_time_is_attention(trains, xla, monkeypatch):
    for name in ("PAIRS", "PAIRS_WITHOUT_GRADIENT"):
        monkeypatch.setattr(f"tpukit.workloads.cdeit.model.{name}", 6 * 3 * 2 * 16)  # 6 of the 16 queries
    torch.manual_seed(0)
    plain, x = Attention(16, 2), torch.randn(3, 16, 16)
    wanted = plain(x)
    wanted.square().sum().backward()
    ours = xla.place(copy.deepcopy(plain))
    with torch.set_grad_enabled(trains):
        found = ours(x.to(xla.device))
    torch.testing.assert_close(found.detach().cpu(), wanted.detach(), atol=1e-6, rtol=1e-5)
    if trains:
        found.square().sum().backward()
        for a, b in zip(ours.parameters(), plain.parameters()):
            torch.testing.assert_close(a.grad.cpu(), b.grad, atol=1e-5, rtol=1e-5)


def test_window_attention_adds_the_bias_of_every_offset():
    torch.manual_seed(0)
    attention = RelativeAttention(8, 2, 3)
    x = torch.randn(1, 9, 8)
    query, key, value = attention.qkv(x).view(9, 3, 2, 4).permute(1, 2, 0, 3)
    out = torch.zeros(9, 2, 4)
    for head in range(2):
        for i in range(9):
            logits = [
                float(query[head, i].detach() @ key[head, j].detach()) / 2
                + float(attention.relative_position_bias_table[(i // 3 - j // 3 + 2) * 5 + i % 3 - j % 3 + 2, head])
                for j in range(9)
            ]
            out[i, head] = torch.softmax(torch.tensor(logits), 0) @ value[head]
    assert torch.allclose(attention(x)[0], attention.proj(out.reshape(9, 8)), atol=1e-5)


def test_sizes_that_do_not_fit_are_refused_with_all_of_them():
    with pytest.raises(TpukitError, match=r"the token grid image_size / patch \(16\) must be a multiple of the window"):
        CDEIT(patch=8, window=5).model()
    with pytest.raises(TpukitError, match="patch=0.* all are at least 1"):
        CDEIT(patch=0).model()
    with pytest.raises(TpukitError, match="sampling_steps=0: choose 1 to 1000"):
        CDEIT(sampling_steps=0)
    with pytest.raises(TpukitError, match="eta=1.2: choose 0"):
        CDEIT(eta=1.2)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_checkpointing_changes_no_gradient(device, request):
    runtime, gradients = request.getfixturevalue(device), []
    inputs = (torch.randn(2, 1, 128, 128), torch.tensor([3, 900]), torch.randn(2, 1, 16, 16))
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = CDEITModel(**TINY, checkpointing=checkpointing)
        for parameter in model.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.1)
        model = runtime.place(model)

        def step(image, t, voltages):
            model(image, t, voltages).square().mean().backward()

        runtime.compile(step)(*runtime.put(dict(enumerate(inputs))).values())
        gradients.append(runtime.host([p.grad for p in model.parameters() if p.requires_grad]))
    assert all(g.any() for g in gradients[0])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients))


# Noise and samplers


def test_noise_is_normal_and_depends_on_its_key_alone():
    keys = torch.tensor([0, 1, 2, 1 << 39, 77])
    noise = diffusion.normal(keys, (1, 128, 128))
    assert torch.equal(noise[3:], diffusion.normal(keys[3:], (1, 128, 128)))
    assert all(stats.kstest(image.numpy().ravel(), "norm").pvalue > 1e-3 for image in noise)
    flat = noise.flatten(1).numpy()
    assert np.abs(np.corrcoef(flat) - np.eye(5)).max() < 0.03
    assert abs(np.corrcoef(flat[:, 1:].ravel(), flat[:, :-1].ravel())[0, 1]) < 0.02


def test_noise_is_the_same_on_an_xla_device(xla):
    keys = np.array([5, 1 << 39])
    found = xla.host(xla.inference(lambda k: diffusion.normal(k, (1, 32, 32)))(xla.put({"k": keys})["k"]))
    assert torch.allclose(found, diffusion.normal(torch.as_tensor(keys), (1, 32, 32)), atol=1e-4)


@pytest.mark.parametrize("rows", [diffusion.ddim_schedule(1), diffusion.ddim_schedule(7), diffusion.ancestral_schedule()])
def test_a_sampler_with_a_perfect_network_ends_at_the_clean_image_and_visits_the_right_noise_on_its_way(rows):
    clean, left = 0.7, diffusion.alphas_cumprod()
    assert rows[0, 0] == 999 and (np.diff(rows[:, 0]) < 0).all() and rows[-1, 3] == 0
    # x_t = sqrt(left) clean + noise of variance 1 - left: mean and variance of x carried through the updates by hand
    mean, variance = math.sqrt(left[999]) * clean, 1 - left[999]
    for (t, a, b, c), after in zip(rows, [*rows[1:, 0], None]):
        mean, variance = a * clean + b * mean, b**2 * variance + c**2
        if after is not None:
            assert mean == pytest.approx(math.sqrt(left[int(after)]) * clean, abs=1e-6)
            assert variance == pytest.approx(1 - left[int(after)], abs=1e-6)
    assert mean == pytest.approx(clean) and variance == pytest.approx(0, abs=1e-9)


def test_eta_0_adds_no_noise_and_1000_ddim_steps_are_ancestral_sampling():
    assert not diffusion.ddim_schedule(9, eta=0.0)[:, 3].any()
    assert np.allclose(diffusion.ddim_schedule(1000), diffusion.ancestral_schedule(), atol=1e-6)


# The sets


def test_a_batch_holds_images_maps_times_and_keys(tank):
    data, test_data = task_of(tank).datasets()
    assert (len(data), len(test_data)) == (21, 5)
    batch = data.batch(np.array([2, 9]), np.array([[0.25, 0.999], [0.5, 0.0]]))
    assert batch["t"].tolist() == [999, 0] and batch["key"].tolist() == [2**38, 2**39]
    with np.load(tank / "train/000009.npz") as sample:
        assert np.array_equal(batch["image"][1, 0], sample["xs"])
        mean, deviation = data.statistics
        assert np.array_equal(batch["voltages"][1], voltage_map(sample["ys"].T, mean, deviation)[0])
    normal = np.concatenate([data.batch(np.arange(21))["voltages"]])
    filled = normal[:, 0, np.arange(16), (np.arange(16) + 5) % 16]
    assert abs(filled.mean()) < 1e-4 and filled.std() == pytest.approx(1, abs=1e-3)
    assert not normal[:, 0, np.arange(16), (np.arange(16) + 1) % 16].any()


def test_statistics_are_taken_beside_the_split_then_from_data_then_computed_and_saved(tank, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "root"
    for split in ("train", "test"):
        (root / split).mkdir(parents=True)
        for path in (tank / split).glob("*.npz"):
            (root / split / path.name).write_bytes(path.read_bytes())
    data, test_data = task_of(root).datasets()
    assert f"computed from the training set in {root}, and saved there" in data.said
    assert f"mean.pth and std.pth of {root}" in test_data.said
    volts = np.stack([np.load(path)["ys"].ravel() for path in sorted((root / "train").glob("*.npz"))]).reshape(-1, 16, 13)
    saved = torch.load(root / "mean.pth", weights_only=True)
    assert saved.shape == (1, 16, 13) and np.allclose(saved[0], volts.mean(0), rtol=1e-5)
    assert np.allclose(data.statistics[1], volts.std(0), rtol=1e-4)
    FALLBACK.mkdir()
    for name in ("mean.pth", "std.pth"):
        torch.save(torch.full((1, 16, 13), 2.0), FALLBACK / name)
    data, _ = task_of(root).datasets()
    assert not np.allclose(data.statistics[0], 2.0) and f"mean.pth and std.pth of {root}" in data.said
    (root / "mean.pth").unlink()
    data, _ = task_of(root).datasets()
    assert np.allclose(data.statistics[0], 2.0) and f"mean.pth and std.pth of {FALLBACK}" in data.said
    (FALLBACK / "mean.pth").unlink()  # half of a pair is none
    data, _ = task_of(root).datasets()
    assert np.allclose(data.statistics[0], volts.mean(0), rtol=1e-5) and "computed" in data.said


def test_statistics_that_cannot_be_saved_are_used_all_the_same(tank, tmp_path, monkeypatch):
    (tmp_path / "train").symlink_to(tank / "train")

    def read_only(*arguments, **more):
        raise OSError(30, "Read-only file system")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tpukit.workloads.cdeit.data.files.atomic_file", read_only)
    task = task_of(tmp_path)
    statistics, said = task._statistics(tmp_path / "train")
    assert "not saved" in said and "Read-only file system" in said and statistics[1].all()


@pytest.mark.parametrize("spelling", ["data2017", "test2017"])
def test_real_sets_are_found_in_both_spellings_and_in_their_own_units(uef2017, tmp_path, spelling):
    (tmp_path / spelling).symlink_to(uef2017 / "test")
    for name in ("mean.pth", "std.pth"):
        (tmp_path / name).symlink_to(uef2017 / name)
    data = task_of(tmp_path, data="uef2017").test_set()
    assert len(data) == 22
    batch = data.batch(np.arange(22))
    truth = batch["image"][:, 0]
    assert np.mean(np.sqrt((truth**2).mean((1, 2)))) == pytest.approx(0.253, abs=5e-4)  # the all-zero guess, as published
    inside = simulator.disk()
    correlation = np.mean([np.corrcoef(a[inside], b[inside])[0, 1] for a, b in zip(batch["TR"], truth)])
    assert correlation == pytest.approx(0.695, abs=1e-3)  # Tikhonov's, as published


def test_ktc2023_has_its_own_folder_and_units_and_may_lack_the_classical_images(tank, tmp_path, cpu):
    (tmp_path / "data2023").mkdir()
    (tmp_path / "train").symlink_to(tank / "train")
    for path in sorted((tank / "test").glob("*.npz"))[:2]:
        sample = np.load(path)
        np.savez(tmp_path / "data2023" / path.name, xs=sample["xs"], ys=sample["ys"] * 1978)
    task = task_of(tmp_path, data="ktc2023", sampling_steps=1)
    data = task.test_set()
    assert np.allclose(data.batch([1])["voltages"], task_of(tank).test_set().batch([1])["voltages"], atol=1e-4)
    run = Run(tmp_path / "run")
    run.path.mkdir()
    torch.save(task.model().state_dict(), tmp_path / "weights.pth")
    scores = score_run(
        task_of(tmp_path, data="ktc2023", sampling_steps=1, weights=tmp_path / "weights.pth"), run, runtime=cpu, progress=False
    )
    assert set(scores["beside"]) == {"all zero"} and scores["images"] == 2
    with np.load(run.path / "predictions/ktc2023.npz") as kept:
        assert np.isnan(kept["TR"]).all()
    batch, images = task.kept(run.path / "predictions")
    assert task.panels(batch, images)[0][1][1].shape == (128, 128, 3)  # Tikhonov's panel is grey


def test_damaged_predictions_are_named(tmp_path):
    names = dict(xs=(2, 8, 8), TR=(2, 8, 8), xs_gn=(2, 8, 8), prediction=(2, 8, 8))
    path, task = tmp_path / "ktc2023.npz", CDEIT(data="ktc2023")
    np.savez_compressed(path, **{name: np.random.default_rng(0).random(shape, np.float32) for name, shape in names.items()})
    whole = path.read_bytes()
    assert task.kept(tmp_path)[1].shape == (2, 1, 8, 8)
    for place in (2, 100, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
        with pytest.raises(TpukitError, match="ktc2023.npz is damaged"):
            task.kept(tmp_path)


def test_the_folder_of_a_test_set_is_no_training_set(uef2017):
    with pytest.raises(TpukitError, match="no training set"):
        task_of(uef2017 / "test").datasets()


def test_several_samples_may_stand_in_one_file(tank, tmp_path):
    (tmp_path / "train").mkdir(), (tmp_path / "test").mkdir()
    for split in ("train", "test"):
        samples = [dict(np.load(path)) for path in sorted((tank / split).glob("*.npz"))]
        stacked = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        np.savez(tmp_path / split / "all.npz", **stacked)
    for one, other in zip(task_of(tank).datasets(), task_of(tmp_path).datasets()):
        assert len(one) == len(other)
        a, b = one.batch(np.arange(5)), other.batch(np.arange(5))
        assert all(np.allclose(a[name], b[name], atol=1e-5) for name in a)
    assert other.names[2] == "all-2"


@pytest.mark.parametrize(
    "content, message",
    [
        (b"not a zip", "cannot be read"),
        (dict(xs=np.zeros((128, 128))), "has no array 'ys': a sample needs xs"),
        (dict(xs=np.zeros((64, 64)), ys=np.zeros(208)), r"xs has shape \(64, 64\), a sample needs \(128, 128\)"),
        (dict(xs=np.zeros((2, 128, 128)), ys=np.zeros(208)), "its arrays hold 2 xs, 1 ys"),
        (dict(xs=np.zeros((2, 128, 128)), ys=np.zeros((208, 2))), r"ys has shape \(208, 2\), a sample needs \(208,\)"),
    ],
)
def test_a_file_that_is_no_sample_is_named_with_what_is_wrong(tmp_path, content, message):
    (tmp_path / "train").mkdir()
    if isinstance(content, bytes):
        (tmp_path / "train/bad.npz").write_bytes(content)
    else:
        np.savez(tmp_path / "train/bad.npz", **content)
    with pytest.raises(TpukitError, match="bad.npz.*" + message):
        task_of(tmp_path).datasets()


def test_a_folder_without_the_split_is_refused_with_what_is_there(tmp_path):
    (tmp_path / "other").mkdir()
    with pytest.raises(TpukitError, match=r"no training set in .*train/.*there are: other.*tpukit simulate eit"):
        task_of(tmp_path).datasets()


# Training


def test_training_lowers_the_loss_moves_the_weights_and_keeps_their_average(tank, tmp_path, cpu):
    task = task_of(tank, epochs=30, eval_every=30)
    run = Run.open(tmp_path / "run", task)
    scores = train(task, run, runtime=cpu, progress=False)
    losses = [r["loss"] for r in run.records("train")]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:3])
    torch.manual_seed(task.seed)
    kept, now, start = best_weights(run), checkpoint(run)["model"], task.model().state_dict()
    moved = [n for n in start if start[n].is_floating_point() and n != "pos_embed"]
    assert all(not torch.equal(now[n], start[n]) for n in moved)
    assert torch.equal(now["pos_embed"], start["pos_embed"])
    assert same(kept, checkpoint(run)["averaged"]) and not torch.equal(kept["pos_embed"], 0 * kept["pos_embed"])
    assert not same({n: kept[n] for n in moved}, {n: now[n] for n in moved})
    assert set(scores) == {"rmse", "psnr", "ssim", "cc", "images", "broken", "beside"} and scores["images"] == 5
    assert set(scores["beside"]) == {"Tikhonov", "Gauss-Newton", "all zero"}


def test_training_is_one_program_and_sampling_two_on_xla_and_both_equal_the_cpu(tank, tmp_path, cpu, xla):
    task = task_of(tank, epochs=13, eval_every=13, lr=1e-3, precision="fp32")  # 26 steps: two averages of the weights
    runs = []
    for runtime in (cpu, xla):
        run = Run.open(tmp_path / str(runtime.device), task)
        scores = train(task, run, runtime=runtime, progress=False)
        runs.append(([r["loss"] for r in run.records("train")], scores, run))
    (losses, scores, _), (xla_losses, xla_scores, run) = runs
    assert np.allclose(losses, xla_losses, rtol=1e-2) and np.allclose(losses[:5], xla_losses[:5], rtol=1e-4)
    assert scores["rmse"] == pytest.approx(xla_scores["rmse"], rel=1e-2) and scores["cc"] != 0
    large = [r["step"] for r in run.records("compile") if r["what"] == "step" and r["seconds"] > 0.5]
    assert large == [1], "the step is compiled once, whatever the timesteps are"
    model, batch = xla.place(task.model()), xla.put(task.test_set().batch(np.arange(4)))
    for steps, programs in ((3, 2), (6, 0)):  # another number of steps needs no other program
        before = xla.compilations()[0]
        CDEIT(**{**SMALL, "sampling_steps": steps}).predictor(model, xla)(batch)
        xla.sync()
        assert xla.compilations()[0] - before == programs


def test_stopped_and_resumed_equals_straight(tank, tmp_path, cpu):
    task = task_of(tank, epochs=12, eval_every=4)  # 24 steps
    straight, stopped = Run.open(tmp_path / "straight", task), Run.open(tmp_path / "stopped", task)
    train(task, straight, runtime=cpu, progress=False)
    for epochs in (6, 12):
        train(task_of(tank, epochs=epochs, eval_every=4), stopped, runtime=cpu, progress=False)
    # The sixth epoch was the last of one, and was evaluated there.
    kept = [[r for r in exact(run) if (r["kind"], r["step"]) != ("evaluation", 12)] for run in (straight, stopped)]
    assert kept[0] == kept[1]
    for name in ("model", "averaged"):
        assert same(checkpoint(straight)[name], checkpoint(stopped)[name])


def test_weights_carry_the_statistics_that_they_were_trained_with(tank, tmp_path, cpu):
    task = task_of(tank, epochs=1)
    run = Run.open(tmp_path / "run", task)
    train(task, run, runtime=cpu, progress=False)
    other = tmp_path / "other"
    (other / "test").mkdir(parents=True)
    for path in (tank / "test").glob("*.npz"):
        (other / "test" / path.name).write_bytes(path.read_bytes())
    for name in ("mean.pth", "std.pth"):
        torch.save(torch.full((1, 16, 13), 9.0), other / name)
    data = task_of(other, weights=run.path / "best.safetensors").test_set()
    assert "those that" in data.said
    assert np.array_equal(data.statistics[0], task.datasets()[0].statistics[0])


def test_a_test_keeps_predictions_as_npz_and_mat_and_scores_of_every_image(tank, uef2017, tmp_path, cpu):
    task = task_of(tank, epochs=1)
    run = Run.open(tmp_path / "run", task)
    train(task, run, runtime=cpu, progress=False)
    root = tmp_path / "real"
    root.mkdir()
    (root / "data2017").symlink_to(uef2017 / "test")
    task = task_of(root, data="uef2017", sampling_steps=2)
    scores = score_run(task, run, runtime=cpu, progress=False)
    assert scores["broken"] == 0
    with np.load(run.path / "predictions/uef2017.npz") as kept:
        prediction, truth, tikhonov = kept["prediction"], kept["xs"], kept["TR"]
        assert kept["names"][0] == "1_1" and prediction.shape == (22, 128, 128) and prediction.any((1, 2)).all()
    with np.load(uef2017 / "test/1_1.npz") as original:
        assert np.array_equal(original["xs"], truth[0]) and np.allclose(original["TR"], tikhonov[0], rtol=1e-5)
    matlab = io.loadmat(run.path / "predictions/uef2017.mat")
    assert np.array_equal(matlab["prediction"], prediction) and matlab["names"].ravel()[1].item() == "1_2"
    rows = list(csv.DictReader(open(run.path / "predictions/uef2017.csv")))
    assert len(rows) == 4 * (22 + 1)
    *ours, mean = [float(row["rmse"]) for row in rows if row["method"] == "CDEIT"]
    assert mean == pytest.approx(np.mean(ours)) == pytest.approx(scores["rmse"])
    inside, unit = simulator.disk(), 2 / 1040.856
    by_hand = [np.sqrt(np.mean((p[inside] / unit - t[inside]) ** 2)) for p, t in zip(prediction, truth)]
    assert by_hand == pytest.approx(ours, rel=1e-4)
    assert scores["beside"]["Tikhonov"]["cc"] == pytest.approx(0.695, abs=1e-3)
    batch, images = task.kept(run.path / "predictions")
    panels = task.panels({name: values[:2] for name, values in batch.items()}, images[:2])
    assert [title for title, _ in panels[0]] == ["conductivity", "Tikhonov", "Gauss-Newton", "CDEIT"]
    assert panels[0][0][1].shape == (128, 128, 3)


def test_a_prediction_that_is_no_number_is_counted_and_loses_no_run(tank):
    data = task_of(tank).test_set()
    batch = {name: torch.as_tensor(value) for name, value in data.batch(np.arange(5)).items()}
    images = batch["image"].clone()
    images[3, 0, 64, 64] = float("nan")
    scores = task_of(tank).evaluate([(images, dict(batch, valid=torch.ones(5, dtype=bool)))])
    assert scores["broken"] == 1 and scores["rmse"] == pytest.approx(
        float(batch["image"][3, 0][simulator.disk()].square().mean().sqrt()) / 5, rel=1e-4
    )


def test_ancestral_sampling_runs_all_its_steps(tank, cpu):
    task = task_of(tank, sampler="ancestral")
    assert task.scored_on() == "simulated by ancestral in 1000 steps"
    assert task_of(tank, sampling_steps=3, eta=0.5).scored_on() == "simulated by ddim in 3 steps with eta 0.5"
    with pytest.raises(TpukitError, match="sampling_steps=7: ancestral sampling takes all 1000; leave it out"):
        task_of(tank, sampler="ancestral", sampling_steps=7)
    seen = []
    model = task.model().eval()
    model.register_forward_pre_hook(lambda module, inputs: seen.append(int(inputs[1][0])))
    batch = {name: torch.as_tensor(value) for name, value in task.test_set().batch(np.arange(1)).items()}
    image = task.predictor(model, cpu)(batch)
    assert seen == list(range(999, -1, -1)) and not image.any()  # a fresh network says that the image is empty


def test_every_sample_is_sampled_from_noise_of_its_own_whatever_batch_it_is_in(tank, cpu):
    task, seen = task_of(tank, sampling_steps=3), []
    model, data = task.model().eval(), task.test_set()
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    for chosen in ([0, 1, 2], [2]):
        task.predictor(model, cpu)({name: torch.as_tensor(value) for name, value in data.batch(np.array(chosen)).items()})
    three, alone = seen[:3], seen[3:]  # what the network was shown at each of the steps
    assert all(torch.equal(a[2], b[0]) for a, b in zip(three, alone))
    assert np.abs(np.corrcoef(torch.cat([x.flatten(1) for x in (three[0], three[1])]).numpy())[0, 1:3]).max() < 0.05
    # The network says 0, so the second input is what is left of the first and new noise: it is not the first, scaled.
    assert abs(np.corrcoef(three[0][0].ravel(), three[1][0].ravel())[0, 1]) < 0.9


def test_the_best_starts_anew_when_another_set_is_scored(tank, uef2017, tmp_path, cpu):
    root = tmp_path / "root"
    root.mkdir()
    for name, target in (("train", tank / "train"), ("test", tank / "test"), ("data2017", uef2017 / "test")):
        (root / name).symlink_to(target)
    run = Run.open(tmp_path / "run", task_of(root, epochs=1))
    train(task_of(root, epochs=1), run, runtime=cpu, progress=False)
    task = task_of(root, epochs=2, data="uef2017")
    train(task, Run.open(run.path, task), runtime=cpu, progress=False)
    scores = run.records("evaluation")[-1]["scores"]
    state = checkpoint(run)["state"]
    assert state["best"] == scores["cc"] and state["best_on"].startswith("uef2017")


# Scores


def test_scores_equal_their_definitions_inside_the_disk():
    rng = np.random.default_rng(0)
    truth, inside = simulator.scene(rng), simulator.disk()
    image = (truth + rng.normal(0, 0.2, truth.shape)).astype(np.float32) * inside
    found = image_scores(image, truth, inside)
    a, b = image[inside], truth[inside]
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((a - b) ** 2)), rel=1e-5)
    assert found["psnr"] == pytest.approx(metrics.peak_signal_noise_ratio(b, a, data_range=2), rel=1e-5)
    assert found["cc"] == pytest.approx(np.corrcoef(a, b)[0, 1], rel=1e-5)
    assert image_scores(truth, truth, inside) == dict(rmse=0, psnr=pytest.approx(126, abs=1), ssim=1, cc=pytest.approx(1))
    assert image_scores(0 * truth, truth, inside)["cc"] == 0
    y, x = 64, 64
    weight = np.exp(-((np.mgrid[-5:6, -5:6] ** 2).sum(0)) / (2 * 1.5**2))
    weight /= weight.sum()
    p, t = (v[y - 5 : y + 6, x - 5 : x + 6].astype(float) for v in (image, truth))
    mp, mt = (weight * p).sum(), (weight * t).sum()
    vp, vt, cov = (weight * p * p).sum() - mp**2, (weight * t * t).sum() - mt**2, (weight * p * t).sum() - mp * mt
    c1, c2 = (0.01 * 2) ** 2, (0.03 * 2) ** 2
    similarity = (2 * mp * mt + c1) * (2 * cov + c2) / ((mp**2 + mt**2 + c1) * (vp + vt + c2))
    one = np.zeros_like(inside)
    one[y, x] = True
    assert image_scores(image, truth, one)["ssim"] == pytest.approx(similarity, abs=1e-4)


# Doctor


def test_doctor_says_how_far_half_precision_moves_the_model(cpu):
    env = detect({}, "/nowhere")
    checks = try_model(CDEIT(**SMALL), env)
    assert [c.what for c in checks] == ["cdeit in fp32", "cdeit in bf16"] and {c.level for c in checks} == {"ok"}
    moved = float(checks[1].found.split("moves by ")[1].split("%")[0])
    assert 0.01 < moved < 5
