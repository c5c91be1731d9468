"""The simulated tank: its physics against pyEIT and against a real tank, its scenes, and the sets that are
made of them."""

import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
from scipy import ndimage

from tpukit import TpukitError
from tpukit.tasks.cdeit import simulator


@pytest.fixture(scope="session")
def model_tank():
    return simulator.Tank()


def test_simulated_voltages_of_the_real_images_agree_with_the_measured_ones(model_tank, uef2017):
    correlations = []
    for path in (uef2017 / "test").glob("*.npz"):
        with np.load(path) as sample:
            simulated = model_tank.simulate(sample["xs"].reshape(128, 128))
            correlations.append(np.corrcoef(simulated, sample["ys"].ravel())[0, 1])
    assert len(correlations) == 22
    assert np.mean(correlations) >= 0.96 and min(correlations) > 0.91  # as docs/CDEIT.md has it


@pytest.mark.slow
def test_the_tank_solves_what_pyeit_solves_and_its_classical_images_are_those_of_pyeit(model_tank):
    from pyeit.eit.fem import EITForward
    from pyeit.eit.jac import JAC

    assert model_tank.elements == 2821
    conductivity = np.random.default_rng(0).uniform(0.01, 20, model_tank.elements)
    slow = EITForward(model_tank.mesh, model_tank.protocol).solve_eit(conductivity)
    assert np.allclose(model_tank.volts(conductivity), slow, rtol=1e-8, atol=1e-12)
    solver = JAC(model_tank.mesh, model_tank.protocol)
    solver.setup(method="kotre", p=0.5, lamb=simulator.GAUSS_NEWTON)
    volts = model_tank.simulate(simulator.scene(np.random.default_rng(0)))
    of_elements = solver.solve(volts * np.sign(model_tank.empty) / simulator.VOLTS, 0)
    ours = (model_tank.baselines["xs_gn"] @ volts).reshape(128, 128)[model_tank._pixel]
    assert np.abs(ours - of_elements).max() < 1e-5 * np.abs(of_elements).max()


def test_a_conductive_inclusion_beside_an_electrode_is_seen_there_and_its_sign_turns_with_it(model_tank):
    x, y = simulator.pixel_places()
    electrode = model_tank.mesh.node[model_tank.mesh.el_pos[5], :2] * 0.8
    image = (np.hypot(x - electrode[0], y - electrode[1]) < 0.15).astype(np.float32)
    conductive, resistive = (model_tank.simulate(sign * image).reshape(16, 13) for sign in (1, -1))
    assert np.abs(conductive).sum(1).argmax() in (4, 5)  # the two patterns that drive electrode 5
    assert np.corrcoef(conductive.ravel(), resistive.ravel())[0, 1] < -0.9
    assert not model_tank.simulate(np.zeros_like(image)).any()


def test_the_classical_images_show_where_an_inclusion_is_and_its_sign(model_tank):
    x, y = simulator.pixel_places()
    for sign in (-1, 1):
        truth = sign * (np.hypot(x - 0.3, y + 0.4) < 0.25).astype(np.float32)
        for name, matrix in model_tank.baselines.items():
            image = (matrix @ model_tank.simulate(truth)).reshape(128, 128)
            assert np.corrcoef(image[simulator.disk()], truth[simulator.disk()])[0, 1] > 0.6, name
            assert not image[~simulator.disk()].any()


def test_scenes_hold_one_to_four_inclusions_of_either_sign_apart_and_inside():
    seen, signs = set(), set()
    for seed in range(60):
        image = simulator.scene(np.random.default_rng(seed))
        assert set(np.unique(image)) <= {-1, 0, 1} and not image[~simulator.disk()].any()
        neighbours = np.ones((3, 3))  # diagonal ones too
        _, count = ndimage.label(image != 0, neighbours)
        of_each_sign = [ndimage.label(image == sign, neighbours)[1] for sign in (-1, 1)]
        assert count == sum(of_each_sign)  # none of two signs
        seen.add(count)
        signs.update(np.unique(image))
    assert seen == {1, 2, 3, 4} and signs == {-1, 0, 1}


@pytest.mark.slow
def test_a_simulation_continues_where_it_stopped_with_any_number_of_workers(tank, tmp_path):
    files = sorted((tank / "train").glob("*.npz"))
    assert len(files) == 21 and len(list((tank / "test").glob("*.npz"))) == 5
    again = tmp_path / "eit"
    simulator.simulate(again, samples=3, test_samples=0, seed=3, progress=False)
    (again / "train/000002.npz").write_bytes(b"")  # as a power cut can leave it
    (again / "train/.000003.npz.7.partial").write_bytes(b"cut short by a kill")
    kept = (again / "train/000001.npz").stat().st_mtime_ns
    simulator.simulate(again, samples=21, test_samples=5, workers=2, seed=3, progress=False)
    assert (again / "train/000001.npz").stat().st_mtime_ns == kept
    for path in files:
        with np.load(path) as one, np.load(again / "train" / path.name) as other:
            for name in ("xs", "ys", "xs_gn", "TR", "seed"):
                assert np.array_equal(one[name], other[name]), path
    with np.load(files[4]) as sample:
        assert sample["seed"].tolist() == [3, 0, 4] and sample["ys"].shape == (208, 1)
    assert json.loads((again / "simulation.json").read_text())["seed"] == 3
    with pytest.raises(TpukitError, match="'seed': 3.*not.*'seed': 4, 'snr_db': 20"):
        simulator.simulate(again, samples=30, seed=4, snr_db=20)
    for damage, told in (("[]", "choose another folder"), ("{", "damaged")):
        (again / "simulation.json").write_text(damage)
        with pytest.raises(TpukitError, match=told):
            simulator.simulate(again, samples=30, seed=3)


def test_noise_has_the_power_that_was_asked_for(model_tank):
    quiet, loud = (
        simulator.make_sample(model_tank, "train", 7, seed=0, snr_db=snr_db, mismatch=0.0)["ys"]
        for snr_db in (300, 20)
    )
    noise = 20 * math.log10(np.sqrt(np.mean(quiet**2)) / np.sqrt(np.mean((loud - quiet) ** 2)))
    assert noise == pytest.approx(20, abs=1)


def test_more_samples_than_the_disk_can_hold_are_refused_but_a_whole_set_on_a_full_disk_needs_no_space(
    tank, tmp_path, monkeypatch
):
    with pytest.raises(TpukitError, match="GB free"):
        simulator.simulate(tmp_path / "set", samples=10**12)
    assert list((tmp_path / "set").iterdir()) == []
    monkeypatch.setattr(simulator.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(9, 9, 0))
    assert simulator.simulate(tank, samples=21, test_samples=5, seed=3, progress=False) == tank


def test_without_pyeit_the_simulator_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyeit.mesh", None)
    with pytest.raises(TpukitError, match="pyeit>=1.2.4"):
        simulator.Tank()


def test_without_shapely_the_tank_is_the_same_and_shapely_stays_missing(model_tank):
    program = (
        "import sys, json; sys.modules['shapely'] = None\n"
        "from tpukit.tasks.cdeit.simulator import Tank\n"
        "print(json.dumps([Tank().empty.tolist(), 'shapely.geometry' in sys.modules]))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [model_tank.empty.tolist(), False]
