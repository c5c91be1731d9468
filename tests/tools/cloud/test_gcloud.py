"""The real gcloud against a stand-in for Google; the notebook that rents; tasks for SkyPilot."""

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading

import papermill
import pytest

from tests.conftest import ROOT
from tests.test_notebooks import outputs, run_notebook, text
from tests.tools.cloud import stand_in
from tests.tools.cloud.conftest import refused, write_program
from tests.tools.cloud.test_creating import REFUSALS
from tpukit import cli
from tpukit.tools.cloud import gcloud, rented, renting, running

# The real gcloud, with a stand-in for Google's end of the line


class Api(http.server.BaseHTTPRequestHandler):
    """The part of the TPU API that is used, on loopback. requests: name -> request. refuse: the error of the next creation."""

    requests, refuse, seen = {}, None, []

    def do_GET(self):
        place = self.path.partition("?")[0]
        name = place.rpartition("/")[2]
        if place.endswith(("/queuedResources", "/nodes")):
            found = [r for r in self.requests.values() if place.endswith("/queuedResources")]
            return self.answer({place.rpartition("/")[2]: found})
        if "/queuedResources/" in place and name in self.requests:
            return self.answer(self.requests[name])
        message = f"Resource '{place.removeprefix('/v2/')}' was not found"
        self.answer({"error": dict(code=404, message=message, status="NOT_FOUND")}, 404)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append(("POST", self.path, asked))
        if self.refuse:
            return self.answer({"error": self.refuse}, self.refuse["code"])
        name = re.search("queuedResourceId=([a-z]+)", self.path)[1]
        zone = re.search("locations/([^/]+)", self.path)[1]
        made = stand_in.request(name, zone)
        self.requests[name] = {**made, **asked, "state": {"state": "ACTIVE"}}
        self.answer(dict(name=f"projects/mine/locations/{zone}/operations/one", done=True, response={}))

    def do_DELETE(self):
        self.seen.append(("DELETE", self.path, None))
        self.requests.pop(self.path.partition("?")[0].rpartition("/")[2])
        self.answer(dict(name="projects/mine/locations/us-central1-a/operations/two", done=True, response={}))

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


@pytest.fixture
def api(tmp_path, monkeypatch):
    """The stand-in API, which the installed gcloud talks to without any login."""
    if not shutil.which("gcloud"):
        pytest.skip("no gcloud on this machine")
    monkeypatch.setattr(renting, "POLL_S", 0)
    handler = type("OneApi", (Api,), dict(requests={}, seen=[]))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = dict(
        CLOUDSDK_CONFIG=str(tmp_path / "no-login"),
        CLOUDSDK_CORE_ACCOUNT="me@example.com",
        CLOUDSDK_CORE_PROJECT="mine",
        CLOUDSDK_CORE_CHECK_GCE_METADATA="false",
        CLOUDSDK_CORE_DISABLE_USAGE_REPORTING="true",
        CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK="true",
        CLOUDSDK_AUTH_DISABLE_CREDENTIALS="true",
        CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU=f"http://127.0.0.1:{server.server_port}/",
    )
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    yield handler
    server.shutdown()
    server.server_close()


def test_the_real_gcloud_takes_the_commands_and_asks_google_for_what_was_meant(api, capsys):
    assert cli.main(["cloud", "create", "mine", "--accelerator", "v6e-4", "--spot", "--hours", "2", "--yes"]) == 0
    (_, path, asked), *_ = api.seen
    assert path.startswith("/v2/projects/mine/locations/us-central1-a/queuedResources?") and "queuedResourceId=mine" in path
    (spec,) = asked["tpu"]["nodeSpec"]
    node = spec["node"]
    assert asked["spot"] == {} and asked["queueingPolicy"] == {"validUntilDuration": "3600s"} and spec["nodeId"] == "mine"
    assert (node["acceleratorType"], node["runtimeVersion"]) == ("v6e-4", "v2-alpha-tpuv6e")
    assert node["labels"].items() >= {"made-by": "tpukit", "tpukit-minutes": "120", "tpukit-capacity": "spot"}.items()
    assert node["serviceAccount"] == {"scope": ["https://www.googleapis.com/auth/cloud-platform"]}
    script = node["metadata"]["startup-script"]
    assert (
        script.startswith("#!/bin/bash\n")
        and script.endswith("done\n")
        and "mine --zone=us-central1-a --project=mine" in script
    )
    assert cli.main(["cloud", "list"]) == 0 and "v6e-4 spot" in capsys.readouterr().out
    assert cli.main(["cloud", "delete", "mine", "--yes"]) == 0 and "mine is gone" in capsys.readouterr().out
    assert api.seen[-1][:2] == ("DELETE", "/v2/projects/mine/locations/us-central1-a/queuedResources/mine?alt=json&force=True")
    assert api.requests == {}


@pytest.mark.parametrize(
    "code, status, said, fix",
    [
        (429, "RESOURCE_EXHAUSTED", next(iter(REFUSALS)), "Ask for more at"),
        (400, "INVALID_ARGUMENT", [said for said in REFUSALS if "zonal" in said][0][18:], "us-central1-a has no v5litepod-1"),
        (
            403,
            "PERMISSION_DENIED",
            [said for said in REFUSALS if "has not been used" in said][0][19:],
            "gcloud services enable",
        ),
        (403, "PERMISSION_DENIED", [said for said in REFUSALS if "queuedResources.create'" in said][0][19:], "roles/tpu.admin"),
    ],
    ids=["quota", "zone", "api", "permission"],
)
def test_what_the_real_gcloud_makes_of_googles_refusals_is_understood(code, status, said, fix, api, capsys):
    api.refuse = dict(code=code, status=status, message=said)
    told = refused(capsys, "create", "mine", "--yes")
    assert said in told and fix in told, told


def test_the_real_gcloud_knows_every_option_that_is_given_for_ssh_and_scp(api, capsys):
    """It refuses these for want of a machine, which it asks for after reading its options."""
    cloud = gcloud.Gcloud()
    machine = rented.Rented("mine", "us-central1-a", node=stand_in.node("mine"))
    for act in (
        lambda: cloud.show(*cloud.tpus("tpu-vm", "ssh", "mine", "--worker=all", "--command=cd\nls", zone=machine.zone)),
        lambda: running.fetch_run(cloud, machine, "here"),
        lambda: cloud.show(*cloud.tpus("tpu-vm", "scp", "--recurse", "mine:run", "here", "--worker=0", zone=machine.zone)),
    ):
        with pytest.raises(gcloud.GcloudError) as error:
            act()
        assert error.value.kind == "gone", error.value


# The notebook


NOTEBOOK = "cloud_tpu_vm.ipynb"


def test_the_notebook_shows_every_command_and_runs_none_unless_told_to(google, tmp_path):
    notebook = run_notebook(NOTEBOOK, tmp_path)
    said = text(notebook)
    for words in ("$2.40", "$19.20", "queued-resources create tpukit", "startup-script", "tpukit train mnist --epochs 4"):
        assert words in said + "".join(outputs(notebook, "text/html")), words
    for words in ("tpu-vm scp --recurse", "queued-resources delete tpukit --zone=ZONE", "queued-resources list --zone=-"):
        assert words in said, words
    assert stand_in.calls(google) == []


def test_the_notebook_rents_nothing_before_it_knows_where_the_machine_gets_tpukit(google, tmp_path):
    with pytest.raises(papermill.PapermillExecutionError, match="set SOURCE above"):
        run_notebook(NOTEBOOK, tmp_path, GO=True, NAME="mine", EPOCHS=1, PROJECT="mine")
    assert stand_in.calls(google) == []


def test_the_notebook_rents_trains_fetches_and_deletes_when_told_to(google, tmp_path, digits):
    write_program(google / "host-bin/pip", 'mkdir -p ~/.local/bin; cp -u "$0" ~/.local/bin/uv; true')
    program = f'PYTHONPATH={ROOT} exec {sys.executable} -m tpukit "$@"'
    small = f'[ "$1" = train ] && set -- "$@" --dataset-dir {digits} --batch-size 8 --channels 4'
    write_program(google / "host-0/tpukit-python/bin/tpukit", f"{small}\n{program}")
    notebook = run_notebook(NOTEBOOK, tmp_path, GO=True, NAME="mine", EPOCHS=1, PROJECT="mine", SOURCE="tpukit==0.1")
    said = text(notebook)
    for words in (
        "mine is there and costs money",
        "epoch 1: loss",
        "ended with exit code 0",
        "mine is gone",
        "has rented nothing",
    ):
        assert words in said, words
    assert (tmp_path / "outputs/mine/mnist/best.safetensors").exists() and outputs(notebook, "image/png")
    assert stand_in.read(google)["nodes"] == []


# SkyPilot


FROM = ["--source", "git+https://github.com/me/tpukit"]


def task(capsys, *argv):
    import yaml

    assert cli.main(["cloud", "skypilot", *argv]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_the_skypilot_task_recovers_spot_machines_and_stops_idle_ones(capsys):
    written = task(capsys, *FROM, "--accelerator", "v6e-8", "--bucket", "gs://b", "--", "train", "mnist")
    resources = written["resources"]
    assert resources["accelerators"] == "tpu-v6e-8" and resources["accelerator_args"] == {"runtime_version": "v2-alpha-tpuv6e"}
    assert resources["use_spot"] and resources["job_recovery"] == "EAGER_NEXT_REGION"
    assert resources["autostop"] == {"idle_minutes": 10, "down": True}
    assert written["file_mounts"]["/run-copy"]["source"] == "gs://b" and "--backup /run-copy/tpukit" in written["run"]
    assert "torchrun" not in written["run"]
    for bucket, words in (
        (["--bucket", "gs://b"], "goes on from its copy in gs://b"),
        ([], "begins anew: no --bucket keeps it"),
    ):
        assert cli.main(["cloud", "skypilot", *FROM, *bucket]) == 0
        assert words in capsys.readouterr().out
    written = task(capsys, *FROM, "--accelerator", "T4:2", "--nodes", "2", "--no-spot", "--", "train", "mnist")
    assert written["num_nodes"] == 2 and written["resources"]["accelerators"] == "T4:2" and not written["resources"]["use_spot"]
    assert "--node-rank $SKYPILOT_NODE_RANK" in written["run"] and "-m -- tpukit train mnist" in written["run"]
    environ = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "PATH": os.environ["PATH"],
    }
    environ["SKYPILOT_NUM_GPUS_PER_NODE"] = "2"
    ran = subprocess.run(["bash", "-c", "echo " + written["run"]], env=environ, capture_output=True, text=True)
    assert "--nnodes 2 --nproc-per-node 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 -m -- tpukit" in ran.stdout
