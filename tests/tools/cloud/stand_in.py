"""A stand-in for gcloud on PATH: it records every call, keeps requests and machines in a file, and refuses where it is told to.

`ssh --command` runs the command in a home folder of its own for every host, `scp` copies from there.
"""

import datetime
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

HOME = pathlib.Path(os.environ.get("GCLOUD_STAND_IN", "."))


def install(folder):
    """Put the stand-in into a folder. Returns what to add to the environment."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "bin/gcloud"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I {pathlib.Path(__file__)} "$@"\n')
    program.chmod(0o755)
    write(folder, config={"core": {"account": "me@example.com", "project": "mine"}})
    return {"PATH": f"{program.parent}:{os.environ['PATH']}", "GCLOUD_STAND_IN": str(folder)}


def read(folder):
    return json.loads((folder / "cloud.json").read_text())


def write(folder, **changes):
    """Change the state of the stand-in's cloud.

    requests, nodes: as Google's API has them. states: of a request, one after the other. failed: Google's words for FAILED.
    refuse: "group verb" -> what to say instead of doing it (a list: once each, null: do it). stuck: deleting does nothing.
    create_s: seconds that creating takes. hosts: of a machine. warn: what every command says besides.
    """
    empty = dict(
        config={}, requests=[], nodes=[], states=["ACTIVE"], failed="", refuse={}, stuck=False, create_s=0, hosts=1, warn=""
    )
    before = read(folder) if (folder / "cloud.json").exists() else empty
    (folder / "cloud.tmp").write_text(json.dumps({**before, **changes}, indent=1))
    os.replace(folder / "cloud.tmp", folder / "cloud.json")


def calls(folder):
    """The arguments of every call, in order."""
    log = folder / "calls.jsonl"
    return [json.loads(text) for text in log.read_text().splitlines()] if log.exists() else []


def request(name, zone="us-central1-a", state="ACTIVE", accelerator="v5litepod-1", labels=None, hours_ago=1.0):
    """A request as `queued-resources describe` shows it."""
    node = dict(acceleratorType=accelerator, runtimeVersion="v2-alpha-tpuv5-lite", labels=labels or {})
    spec = dict(parent=f"projects/mine/locations/{zone}", nodeId=name, node=node)
    place = f"projects/mine/locations/{zone}/queuedResources/{name}"
    return dict(name=place, createTime=ago(hours_ago), tpu=dict(nodeSpec=[spec]), state=dict(state=state))


def node(name, zone="us-central1-a", state="READY", accelerator="v5litepod-1", labels=None, hours_ago=1.0):
    """A machine as `tpu-vm describe` shows it."""
    place = f"projects/mine/locations/{zone}/nodes/{name}"
    return dict(name=place, createTime=ago(hours_ago), acceleratorType=accelerator, state=state, labels=labels or {})


def ago(hours):
    when = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(hours=hours)
    return when.strftime("%Y-%m-%dT%H:%M:%S.123456789Z")


def main(argv):
    with open(HOME / "calls.jsonl", "a") as log:
        log.write(json.dumps(argv) + "\n")
    cloud = read(HOME)
    if argv[:2] == ["config", "list"]:
        return show(cloud["config"])
    print(cloud["warn"], file=sys.stderr)
    group, verb, *rest = argv[2:]
    flags = dict((word[2:].split("=", 1) + [""])[:2] for word in rest if word.startswith("--"))
    names = [word for word in rest if not word.startswith("--")]
    said = cloud["refuse"].get(f"{group} {verb}")
    if isinstance(said, list):
        said = said.pop(0) if said else None
        write(HOME, refuse=cloud["refuse"])
    if said:
        sys.exit(f"ERROR: (gcloud.compute.tpus.{group}.{verb}) {said}")
    kept = "requests" if group == "queued-resources" else "nodes"
    zone = flags["zone"]
    of_zone = [part for part in cloud[kept] if zone in ("-", part["name"].split("/")[3])]
    if verb == "list":
        return show(of_zone)
    if verb == "create":
        time.sleep(cloud["create_s"])
        labels = dict(label.split("=") for label in flags["labels"].split(","))
        made = request(names[0], zone, cloud["states"][0], flags["accelerator-type"], labels, hours_ago=0)
        return write(HOME, requests=[*read(HOME)["requests"], made])
    if verb in ("ssh", "scp"):
        return work(verb, names, flags, cloud)
    found = [part for part in of_zone if part["name"].endswith(f"/{names[0]}")]
    if not found:
        place = f"projects/mine/locations/{zone}/{'queuedResources' if kept == 'requests' else 'nodes'}/{names[0]}"
        sys.exit(f"ERROR: (gcloud.compute.tpus.{group}.{verb}) NOT_FOUND: Resource '{place}' was not found.")
    if verb == "describe" and kept == "requests":
        advance(found[0], cloud)
    if verb == "describe":
        return print(found[0]["createTime"]) if flags.get("format") == "value(createTime)" else show(found[0])
    assert verb == "delete" and (kept == "nodes" or "force" in flags), argv
    if not cloud["stuck"]:
        place = found[0]["name"].replace("queuedResources", "nodes")
        write(HOME, **{kept: [part for part in cloud[kept] if part is not found[0]]})
        write(HOME, nodes=[part for part in read(HOME)["nodes"] if part["name"] != place])


def advance(one, cloud):
    """The next state of a request that is asked for its state."""
    if len(cloud["states"]) > 1:
        one["state"]["state"] = cloud["states"].pop(1)
        if one["state"]["state"] == "FAILED" and cloud["failed"]:
            one["state"]["failedData"] = {"error": {"code": 8, "message": cloud["failed"]}}
    if one["state"]["state"] == "ACTIVE" and not cloud["nodes"]:
        spec = one["tpu"]["nodeSpec"][0]
        zone = one["name"].split("/")[3]
        cloud["nodes"] = [node(spec["nodeId"], zone, "READY", spec["node"]["acceleratorType"], spec["node"]["labels"], 0)]
    write(HOME, requests=cloud["requests"], states=cloud["states"], nodes=cloud["nodes"])


def work(verb, names, flags, cloud):
    hosts = range(cloud["hosts"]) if flags.get("worker") == "all" else [int(flags.get("worker") or 0)]
    for host in hosts:
        home = HOME / f"host-{host}"
        home.mkdir(exist_ok=True)
        if verb == "scp":
            shutil.copytree(
                home / names[0].partition(":")[2], pathlib.Path(names[1]) / pathlib.Path(names[0]).name, dirs_exist_ok=True
            )
        elif "command" in flags:
            environ = {**os.environ, "HOME": str(home), "PATH": f"{HOME}/host-bin:{os.environ['PATH']}"}
            code = subprocess.run(["bash", "-c", flags["command"]], env=environ, cwd=home).returncode
            if code:
                sys.exit(code)
        else:
            print(f"a shell on host {host}")


def show(value):
    print(json.dumps(value))


if __name__ == "__main__":
    main(sys.argv[1:])
