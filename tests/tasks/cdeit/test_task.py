"""Training, sampling, and what a test saves."""

import numpy as np
import pytest
import torch

from tests.tasks.cdeit.small import task_of
from tests.tpukit.training.conftest import train_in
from tpukit import Run, train
from tpukit.devices.runtime import Runtime
from tpukit.training.evaluation import test as score_run  # under its own name pytest would run it
from tpukit_tasks.cdeit import simulator


@pytest.fixture(scope="module")
def trained(tank, tmp_path_factory):
    """(task, run) of one epoch."""
    task = task_of(tank, epochs=1)
    return task, train_in(tmp_path_factory.mktemp("trained") / "run", task, Runtime("cpu"))


@pytest.mark.slow
def test_training_is_one_graph_and_sampling_two_on_xla_and_both_equal_the_cpu(tank, tmp_path, cpu, xla):
    task = task_of(tank, epochs=3, eval_every=3, lr=1e-3, precision="fp32")
    losses, scores = {}, {}
    for runtime in (cpu, xla):
        run = Run.open(tmp_path / str(runtime.device), task)
        scores[runtime] = train(task, run, runtime=runtime, progress=False)
        losses[runtime] = [r["loss"] for r in run.records("train")]
    assert losses[xla] == pytest.approx(losses[cpu], rel=1e-2)
    assert losses[xla][:5] == pytest.approx(losses[cpu][:5], rel=1e-4)
    assert scores[xla]["rmse"] == pytest.approx(scores[cpu]["rmse"], rel=1e-2) and scores[cpu]["cc"] != 0
    compiled = [r["what"] for r in run.records("compile") for _ in range(r["programs"])]
    assert compiled.count("step") == 1, "the step is compiled once, whatever the timesteps are"
    # Another test of this process may have compiled the same sampling before.
    assert compiled.count("initial_noise") <= 1 and compiled.count("sampling_step") <= 1
    assert (run.path / "log.txt").read_text().count("attention: in slices") == 1


def test_weights_carry_the_statistics_that_they_were_trained_with(trained, tank, tmp_path):
    task, run = trained
    (tmp_path / "test").symlink_to(tank / "test")
    for name in ("mean.pth", "std.pth"):
        torch.save(torch.full((1, 16, 13), 9.0), tmp_path / name)
    data = task_of(tmp_path, weights=run.path / "best.safetensors").test_set()
    assert "those that" in data.notes
    assert np.array_equal(data.statistics[0], task.datasets()[0].statistics[0])


def test_each_sample_of_a_users_files_has_a_name_and_noise_of_its_own_and_another_unit_is_told(
    trained, tank, tmp_path, capsys
):
    task, run = trained
    with np.load(tank / "test/000001.npz") as sample:
        voltages = sample["ys"].reshape(1, -1)
    np.save(tmp_path / "volts.npy", voltages)
    np.savetxt(tmp_path / "millivolts.txt", 1000 * voltages.repeat(2, axis=0))
    batch, names = task.read_files([tmp_path / "volts.npy", tmp_path / "millivolts.txt"], run.best())
    assert names == ["volts.npy, 1", "millivolts.txt, 1", "millivolts.txt, 2"]
    assert batch["key"].tolist() == [0, 1, 2] and len(batch["voltages"]) == 3
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 1 and told[0].startswith("millivolts.txt: its voltages are")


def test_a_test_set_may_lack_the_classical_images(trained, tank, tmp_path, cpu):
    _, run = trained
    (tmp_path / "test").mkdir()
    for path in sorted((tank / "test").glob("*.npz"))[:2]:
        with np.load(path) as sample:
            np.savez(tmp_path / "test" / path.name, xs=sample["xs"], ys=sample["ys"])
    task = task_of(tmp_path, sampling_steps=1, weights=run.best())
    scores = score_run(task, run, runtime=cpu, progress=False)
    assert set(scores["beside"]) == {"all zero"} and scores["images"] == 2
    batch, images = task.load_predictions(run.path / "predictions")
    assert np.isnan(batch["TR"]).all()
    assert task.panels(batch, images)[0][1][1].shape == (128, 128, 3)  # Tikhonov's panel is grey


def test_a_test_saves_its_predictions_in_the_unit_of_the_files_and_scores_them(
    trained, uef2017, tmp_path, cpu
):
    _, run = trained
    root = tmp_path / "real"
    root.mkdir()
    (root / "data2017").symlink_to(uef2017 / "test")
    task = task_of(root, data="uef2017", sampling_steps=2)
    scores = score_run(task, run, runtime=cpu, progress=False)
    with np.load(run.path / "predictions/uef2017.npz") as kept:
        prediction, truth, tikhonov = kept["prediction"], kept["xs"], kept["TR"]
        assert kept["names"][0] == "1_1" and prediction.any((1, 2)).all()
    with np.load(uef2017 / "test/1_1.npz") as original:
        assert np.array_equal(original["xs"], truth[0])
        assert np.allclose(original["TR"], tikhonov[0], rtol=1e-5)
    inside, unit = simulator.disk(), 2 / 1040.856
    by_hand = [np.sqrt(np.mean((p[inside] / unit - t[inside]) ** 2)) for p, t in zip(prediction, truth)]
    assert scores["rmse"] == pytest.approx(np.mean(by_hand), rel=1e-4)
    assert scores["beside"]["Tikhonov"]["cc"] == pytest.approx(0.695, abs=1e-3)
    batch, images = task.load_predictions(run.path / "predictions")
    panels = task.panels({name: values[:2] for name, values in batch.items()}, images[:2])
    assert [title for title, _ in panels[0]] == ["conductivity", "Tikhonov", "Gauss-Newton", "CDEIT"]
    assert panels[0][0][1].shape == (128, 128, 3)


def test_a_prediction_that_is_no_number_makes_no_score_look_like_one(tank):
    data = task_of(tank).test_set()
    batch = {name: torch.as_tensor(value) for name, value in data.batch(np.arange(2)).items()}
    images = torch.full_like(batch["image"], float("nan"))
    scores = task_of(tank).evaluate([(images, dict(batch, valid=torch.ones(2, dtype=bool)))])
    assert np.isnan([scores["rmse"], scores["cc"]]).all()


def test_every_sample_is_sampled_from_noise_of_its_own_whatever_batch_it_is_in(tank, cpu):
    task, seen = task_of(tank, sampling_steps=3), []
    model, data = task.model().eval(), task.test_set()
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    for chosen in ([0, 1, 2], [2]):
        task.predictor(model, cpu)(cpu.put(data.batch(np.array(chosen))))
    three, alone = seen[:3], seen[3:]  # its input at each of the steps
    assert all(torch.equal(a[2], b[0]) for a, b in zip(three, alone))
    assert np.abs(np.corrcoef(three[0].flatten(1))[0, 1:]).max() < 0.05
    # The network predicts 0, so the second input is what is left of the first and new noise: it is not the
    # first, scaled.
    assert abs(np.corrcoef(three[0][0].ravel(), three[1][0].ravel())[0, 1]) < 0.9
