"""A notebook in JupyterLab in a browser."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.conftest import ROOT


@pytest.fixture
def lab(tmp_path):
    """A JupyterLab on loopback serving tmp_path; yields its address."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    settings = {
        # render all cells, not the visible ones alone
        "notebook-extension/tracker": '{"windowingMode": "none"}',
        "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
    }
    for name, content in settings.items():
        path = tmp_path / f"settings/@jupyterlab/{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(content)
    token = secrets.token_hex(8)
    environ = dict(
        os.environ,
        JUPYTERLAB_SETTINGS_DIR=str(tmp_path / "settings"),
        JUPYTER_CONFIG_DIR=str(tmp_path / "config"),
    )
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    command += [f"--port={port}", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={tmp_path}"]
    log = open(tmp_path / "lab.log", "w")
    server = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{address}/api?token={token}", timeout=2)
                break
            except OSError:
                is_late = time.monotonic() > deadline or server.poll() is not None
                assert not is_late, (tmp_path / "lab.log").read_text()
                time.sleep(0.3)
        yield lambda path: f"{address}/lab/tree/{path}?token={token}"
    finally:
        server.terminate()
        server.wait(20)
        log.close()


@pytest.mark.nightly
def test_run_all_in_a_real_jupyterlab_shows_live_bars_and_plots(lab, tmp_path):
    browser = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)
    if browser is None:
        pytest.skip("no Chromium here, which opens JupyterLab; on Debian and Ubuntu: apt install chromium")
    from playwright.sync_api import expect, sync_playwright

    shutil.copy(ROOT / "notebooks/mnist_quickstart.ipynb", tmp_path)
    with sync_playwright() as playwright:
        quiet = (
            "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update".split()
        )
        chromium = playwright.chromium.launch(executable_path=shutil.which(browser), args=quiet)
        page = chromium.new_page(viewport=dict(width=1200, height=1600))
        page.goto(lab("mnist_quickstart.ipynb"))
        expect(page.locator(".jp-Notebook .jp-CodeCell").first).to_be_visible(timeout=60_000)
        expect(page.get_by_text("Python 3 (ipykernel) | Idle")).to_be_visible(timeout=60_000)
        last = page.locator(".jp-CodeCell").last.locator(".jp-OutputArea-output")
        # JupyterLab asks when its list of kernels comes late
        select = page.get_by_role("button", name="Select Kernel")
        deadline, asked = time.monotonic() + 180, False
        while not last.count():
            assert time.monotonic() < deadline, page.locator("body").inner_text()
            if select.is_visible():
                select.click()
                asked = False
            if not asked:
                page.get_by_role("menuitem", name="Run", exact=True).click()
                page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
                asked = True
            page.wait_for_timeout(500)
        expect(last.first).to_contain_text("cross_entropy")
        expect(page.locator(".jp-OutputArea-output", has_text="step/s")).to_have_count(2)  # bars, as text
        pictures = page.locator(".jp-OutputArea-output img")
        expect(pictures).to_have_count(6)  # two live charts, samples, curves, predictions, own
        for index in range(6):
            assert pictures.nth(index).evaluate("image => image.complete && image.naturalWidth") > 300
        errors = page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']")
        expect(errors).to_have_count(0)
        chromium.close()
