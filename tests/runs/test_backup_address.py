"""Backups and weights at an address: a real S3 server on loopback, over a connection that vanishes; and what
is refused."""

import hashlib
import json
import shutil
import types
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from tests.conftest import best_weights, exact, refuses, same
from tests.runs.store import Line, content, s3_server
from tpukit import MNIST, Run, TpukitError, train
from tpukit.devices.runtime import Runtime
from tpukit.host import secrets
from tpukit.runs import storage, weights

KEY, SECRET = "AKIAEXAMPLEEXAMPLE", "very/secret+value0000000000000000000000"


@pytest.fixture(scope="session")
def server():
    pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    with s3_server() as port:
        yield port


@pytest.fixture
def line(server, monkeypatch):
    line = Line(server)
    for name, value in dict(
        AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET, AWS_DEFAULT_REGION="us-east-1"
    ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{line.port}")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)  # each takes seconds
    monkeypatch.setitem(storage.S3_TIMEOUTS["config_kwargs"], "retries", dict(max_attempts=0))
    yield line
    line.close()


@pytest.fixture
def bucket(line, server, request):
    """(client, name of an empty bucket); the client goes around the line."""
    boto3 = pytest.importorskip("boto3")
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server}")
    name = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:20]
    client.create_bucket(Bucket=name)
    return types.SimpleNamespace(client=client, name=name, address=f"s3://{name}/runs/mnist")


def stored(bucket):
    """Key -> bytes of all that is in the bucket."""
    found = bucket.client.list_objects_v2(Bucket=bucket.name).get("Contents", [])
    return {
        one["Key"]: bucket.client.get_object(Bucket=bucket.name, Key=one["Key"])["Body"].read()
        for one in found
    }


def without_secrets(*texts):
    return not any(secret in text for text in texts for secret in (KEY, SECRET, SECRET.replace("/", "%2F")))


@pytest.fixture(scope="module")
def straight(digits, tmp_path_factory):
    """(settings, run) of a training of 4 epochs that nothing interrupted."""
    settings = dict(dataset_dir=digits, save_every_s=0.0, batch_size=25, log_every=3, num_workers=0)
    task = MNIST(epochs=4, **settings)
    run = Run.open(tmp_path_factory.mktemp("straight") / "run", task)
    train(task, run, runtime=Runtime("cpu"), progress=False)
    return settings, run


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_training_whose_machine_is_lost_resumes_on_a_fresh_one(
    kind, straight, tmp_path, cpu, capsys, request
):
    backup = tmp_path / "drive/run" if kind == "folder" else request.getfixturevalue("bucket").address
    settings, whole = straight
    for epochs in (2, 4):
        task = MNIST(epochs=epochs, **settings)
        run = Run.open(tmp_path / "here", task, backup=backup)
        train(task, run, runtime=cpu, progress=False)
        found = content(run.path)
        shutil.rmtree(run.path)
    run = Run.open(tmp_path / "there", MNIST(epochs=5, **settings), backup=backup)
    assert exact(run) == exact(whole) and same(best_weights(run), best_weights(whole))
    names = ("best.safetensors", "records.jsonl", *(f"checkpoints/{e['file']}" for e in run.checkpoints()))
    assert len(names) == 4 and all((run.path / name).read_bytes() == found[name] for name in names)
    out = capsys.readouterr().out
    assert f"from {backup}" in out and "resuming at step 16" in out
    if kind == "bucket":
        left = {**found, **stored(request.getfixturevalue("bucket"))}
        assert without_secrets(out, *(value.decode(errors="ignore") for value in left.values()))


@pytest.mark.slow
def test_a_training_whose_connection_vanishes_trains_on_and_its_next_session_catches_up(
    bucket, line, straight, tmp_path, cpu, capsys, monkeypatch
):
    settings, whole = straight
    task = MNIST(epochs=3, **settings)
    saved, save = [], Run.save

    def cut_after_the_first(self, state, step, size):
        save(self, state, step, size)
        saved.append(step)
        line.cut()

    with monkeypatch.context() as cutting:
        cutting.setattr(Run, "save", cut_after_the_first)
        train(task, Run.open(tmp_path / "here", task, backup=bucket.address), runtime=cpu, progress=False)
    assert len(saved) > 1 and capsys.readouterr().out.count("failed") == 1
    assert listed(bucket)[0]["step"] == saved[0]
    line.mend()
    task = MNIST(epochs=4, **settings)
    again = Run.open(tmp_path / "here", task, backup=bucket.address)
    train(task, again, runtime=cpu, progress=False)
    assert exact(again) == exact(whole)
    assert listed(bucket)[0]["step"] == again.checkpoints()[0]["step"] > saved[-1]


def listed(bucket):
    return json.loads(stored(bucket)["runs/mnist/checkpoints/checkpoints.json"])


def state(step):
    return dict(a=torch.full((200_000,), float(step)))  # 800 kB


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut_after", [0, 500, 5_000, 400_000, 810_000], ids=lambda size: f"after {size} bytes"
)
def test_a_connection_that_vanishes_within_a_backup_loses_nothing_and_the_backup_catches_up(
    cut_after, bucket, line, tmp_path, capsys
):
    run = Run.open(tmp_path / "run", MNIST(), backup=bucket.address)
    run.save(state(1), 1)
    before = stored(bucket)
    line.cut() if cut_after == 0 else line.mend(cut_after)
    run.print("something")
    run.save(state(2), 2)
    assert line.is_cut and [entry["step"] for entry in run.checkpoints()] == [2, 1]
    printed = capsys.readouterr().out
    assert printed.count(f"backup to {bucket.address} failed") == 1 and without_secrets(printed)
    half = stored(bucket)
    for entry in listed(bucket):
        assert hashlib.sha256(half[f"runs/mnist/checkpoints/{entry['file']}"]).hexdigest() == entry["sha256"]
    assert before["runs/mnist/config.json"] == half["runs/mnist/config.json"]
    run.save(state(3), 3)  # still cut: reported once
    assert "failed" not in capsys.readouterr().out
    line.mend()
    run.save(state(4), 4)
    assert f"backup to {bucket.address} works again" in capsys.readouterr().out
    fresh = Run.open(tmp_path / "fresh", MNIST(), backup=bucket.address)
    assert [entry["step"] for entry in fresh.checkpoints()] == [4, 3]
    assert torch.equal(fresh.restore()["a"], state(4)["a"])


@pytest.mark.slow
def test_a_lost_connection_at_the_start_is_an_error_and_not_an_empty_backup(bucket, line, tmp_path):
    Run.open(tmp_path / "run", MNIST(), backup=bucket.address).save({}, 1)
    before = stored(bucket)
    for disturb in (line.cut, lambda: line.mend(100)):
        disturb()
        with refuses(bucket.address):
            Run.open(tmp_path / "new", MNIST(), backup=bucket.address)
    assert not (tmp_path / "new").exists() and stored(bucket) == before


# Rules of a backup, on a file system in memory


def names_in(store):
    return {name.removeprefix("/backups/mnist/") for name in store}


def pipe(name, content):
    """Write a file of the file system in memory."""
    fsspec.filesystem("memory").pipe_file(name, content)


def says(monkeypatch, values, info=MemoryFileSystem.info):
    """Let the file system in memory say these things of each file."""
    monkeypatch.setattr(MemoryFileSystem, "info", lambda self, path, **_: info(self, path) | values)


@pytest.mark.parametrize("kind", ["folder", "address"])
def test_another_runs_backup_a_later_state_and_other_files_are_refused_and_left(kind, memory, tmp_path):
    backup = memory[0] if kind == "address" else tmp_path / "drive/mnist"

    def kept():
        return content(tmp_path / "drive") | {name: file.getvalue() for name, file in memory[1].items()}

    run = Run.open(tmp_path / "run", MNIST(), backup=backup)
    run.save({}, 1)
    shutil.copytree(run.path, tmp_path / "left behind")
    behind = Run.open(tmp_path / "behind", MNIST(), backup=backup)  # a second session of this run
    run.save({}, 2)
    before = kept()
    other = Run.open(tmp_path / "other", MNIST())
    with refuses(backup, run.config["id"], other.path):
        Run.open(other.path, MNIST(), backup=backup)
    with refuses(backup, "step 2", "step 1"):
        Run.open(tmp_path / "left behind", MNIST(), backup=backup)
    behind.save({}, 1)
    with refuses(backup, "batch_size"):
        Run.open(tmp_path / "new", MNIST(batch_size=7), backup=backup)
    above = "memory://backups" if kind == "address" else tmp_path / "drive"
    with refuses(above, "mnist"):
        Run.open(tmp_path / "new", MNIST(), backup=above)
    assert kept() == before and Run.open(tmp_path / "third", MNIST(), backup=backup).config == run.config


# Addresses and secrets


@pytest.mark.parametrize(
    "address",
    [
        "s3://AKIA:hunter2@bucket/run",
        "https://host/file?X-Amz-Signature=hunter2",
        "https://hunter2@host/x",
        "s3://bucket/f?pwd=hunter2",
        "ftp://me:hunter2@host/x",
    ],
)
def test_an_address_that_holds_a_secret_is_refused_without_showing_it(address, tmp_path):
    for use in (
        lambda: Run.open(tmp_path / "run", MNIST(), backup=address),
        lambda: weights.read(address),
        lambda: Run.open(tmp_path / "run", MNIST(weights=address)),
        lambda: Run.open(tmp_path / "run", MNIST(weights=Path(address))),
    ):
        with pytest.raises(TpukitError) as error:
            use()
        assert "hunter2" not in str(error.value) and address.partition(":")[0] in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_path_in_which_two_slashes_became_one_is_still_the_address_and_a_path_stays_one(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert Run.open("12:30", MNIST()).path.is_dir()  # a run's folder is never an address
    for place in (Path("s3://bucket/run"), "s3://bucket/run/"):
        assert storage.address_of(place) == "s3://bucket/run"
    assert storage.address_of("hf://datasets/me/runs@main/x") == "hf://datasets/me/runs@main/x"
    assert storage.address_of("S3://Bucket/Run") == "s3://Bucket/Run"
    for path in (tmp_path, "run", "C:/runs/a", "C:\\runs", "./s3:/x", "runs/12:30"):
        assert storage.address_of(path) is None
    # ssh: a lost upload leaves half a file
    for neither in ("s3://", "s3:bucket/x", "s3:", "my:runs/mnist", "file:///tmp/x", "ssh://host/run"):
        with refuses(neither.partition(":")[0], "s3://"):
            Run.open(tmp_path / "run", MNIST(), backup=neither)


@pytest.mark.parametrize(
    "scheme, name, option, error, said",
    [
        ("hf", "HF_TOKEN", "token", RuntimeError, "cannot be reached"),
        ("s3", "AWS_SECRET_ACCESS_KEY", "secret", ImportError, "needs a package"),
    ],
)
def test_a_secret_goes_to_the_library_alone_and_is_scrubbed_from_its_errors_which_are_one_sentence(
    scheme, name, option, error, said, tmp_path, monkeypatch
):
    opened = []

    def url_to_fs(address, **options):
        opened.append(options)
        raise error("cannot use hf_TOPSECRET here")

    monkeypatch.setattr("fsspec.url_to_fs", url_to_fs)
    monkeypatch.setattr(secrets, "_found", set())
    monkeypatch.setenv(name, "hf_TOPSECRET")
    with pytest.raises(TpukitError) as raised:
        Run.open(tmp_path / "run", MNIST(), backup=f"{scheme}://me/run")
    assert opened[0][option] == "hf_TOPSECRET"
    assert f"{scheme}://me/run {said}" in str(raised.value)
    assert "***" in str(raised.value) and "TOPSECRET" not in str(raised.value)
    assert raised.value.__cause__ is None and raised.value.__suppress_context__
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "value, expected",
    [
        ("/keys/mine.json", "/keys/mine.json"),
        ('{"type": "service_account"}', dict(type="service_account")),
        ('{"private_key": "PRIVATE', None),
    ],
    ids=["path", "content", "a part of it"],
)
def test_googles_key_file_is_taken_by_path_or_content_and_a_part_is_named_and_not_shown(
    value, expected, monkeypatch
):
    monkeypatch.setattr(secrets, "_found", set())
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", value)
    if expected:
        assert storage.Storage("gs://me/run").options == dict(token=expected)
        return
    with pytest.raises(TpukitError, match="GOOGLE_APPLICATION_CREDENTIALS") as error:
        storage.Storage("gs://bucket/run")
    assert "PRIVATE" not in str(error.value)


# Damage


def saved(tmp_path, address):
    """Leave a run with a backup at an address, of two checkpoints and best weights, and its folder `behind`
    as of the first."""
    run = Run.open(tmp_path / "run", MNIST(), backup=address)
    for step in (1, 2):
        run.save_best(dict(weight=torch.full((50,), float(step))), epoch=step)
        run.save(dict(a=step), step)
        shutil.copytree(run.path, tmp_path / "behind") if step == 1 else None


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_where_the_list_at_an_address_cannot_be_read_the_checkpoints_found_there_are_restored(
    damage, memory, tmp_path
):
    address, store = memory
    saved(tmp_path, address)
    name = "/backups/mnist/checkpoints/checkpoints.json"
    data = bytearray(store[name].getvalue())
    data[1] ^= 0x10
    fsspec.filesystem("memory").rm_file(name)
    if damage == "flipped":
        pipe(name, data)
    with refuses("step 2", "step 1"):
        Run.open(tmp_path / "behind", MNIST(), backup=address)
    again = Run.open(tmp_path / "again", MNIST(), backup=address)
    assert again.restore() == dict(a=2)
    again.save(dict(a=3), 3)
    assert {"checkpoints/step-00000003.pt", "checkpoints/step-00000002.pt"} <= names_in(store)


def test_a_file_that_arrives_shorter_than_its_store_says_is_refused_and_replaces_nothing(
    memory, tmp_path, monkeypatch
):
    address, _ = memory
    saved(tmp_path, address)
    target = tmp_path / "kept"
    target.write_text("whole")
    says(monkeypatch, dict(size=10_000))
    with refuses(address, "best.safetensors", 10_000):
        storage.Storage(address).get("best.safetensors", target)
    with refuses(address):
        Run.open(tmp_path / "again", MNIST(), backup=address)
    assert target.read_text() == "whole" and not (tmp_path / "again/config.json").exists()
