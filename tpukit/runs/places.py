"""Where copies of a run lie: a folder, or an address such as s3://bucket/run. The only user of fsspec."""

import base64
import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from tpukit.host import environment, files, secrets
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.tables import printable
from tpukit.runs import checkpoints

# What a library is given, by scheme: the name of its option, and that of the secret. Where there is no such
# secret, a library looks where it always does (a file of the cloud's own tools, the machine's role).
SECRETS = {
    "s3": dict(key="AWS_ACCESS_KEY_ID", secret="AWS_SECRET_ACCESS_KEY", token="AWS_SESSION_TOKEN"),
    "hf": dict(token="HF_TOKEN"),
    "gs": dict(token="GOOGLE_APPLICATION_CREDENTIALS"),
}
# A lost connection is an error within a minute, not a hang.
SETTINGS = {"s3": dict(config_kwargs=dict(connect_timeout=10, read_timeout=30, retries=dict(max_attempts=2)))}
WHOLE_OR_NOT = {
    "s3",
    "s3a",
    "gs",
    "gcs",
    "hf",
    "abfs",
    "az",
    "oci",
    "oss",
    "memory",
}  # a lost upload leaves what was there
MAX_WEIGHTS = 50 * 2**30  # bytes


def address_of(place):
    """The address that a str or a Path (in which `//` is `/`) holds, or None where it is a path.

    Raises TpukitError for what is neither, and, without showing it, for an address that may hold a password
    or a token."""
    kind, colon, rest = re.split(r"[/\\]", str(place), maxsplit=1)[0].partition(":")
    if not colon or len(kind) == 1:  # of a drive of Windows
        return None
    found = re.fullmatch(r"([a-z][a-z0-9+]+):/+(.*[^/])/*", str(place), re.I | re.S)
    if not found:
        raise TpukitError(
            f"{kind}: is not the start of an address, such as s3://bucket/folder, and not that of a path:"
            " give the full address, or the full path of a file or a folder whose name has a colon"
        )
    scheme, rest = found[1].lower(), found[2]
    from fsspec.registry import known_implementations

    if scheme not in known_implementations:
        raise TpukitError(
            f"{scheme}:// is not a kind of address that fsspec knows:"
            f" {', '.join(sorted(known_implementations))}"
        )
    user = rest.partition("/")[0].rpartition("@")[0]
    if ":" in user or (user and scheme in ("http", "https")) or "?" in rest:
        names = ", ".join(SECRETS.get(scheme, {}).values())
        secret = f"the secret in the environment, or in the secrets of Colab or Kaggle ({names})"
        raise TpukitError(
            f"this {scheme}:// address has a name before its @ or a query after a ?, which may hold a"
            " password or a token and would be saved with the run: give the address alone,"
            f" {f'and {secret}' if names else 'or a copy of what is there'}"
        )
    return f"{scheme}:///{rest}" if scheme in ("file", "local") else f"{scheme}://{rest}"


def open_storage(place):
    """The `Folder` or the `Remote` of a path or an address."""
    address = address_of(place)
    return Remote(address) if address else Folder(place)


class Folder:
    """A folder, on Drive for instance."""

    def __init__(self, path):
        self.path = Path(path).resolve()
        # When Drive is lost, an empty folder stays where it was mounted.
        self.mount_point = next(filter(os.path.ismount, (self.path, *self.path.parents)))

    def __str__(self):
        return str(self.path)

    def explained(self):
        """Context manager: an error of the disk names this folder."""
        return files.explain_unwritable(self.path)

    def check(self):
        """Raise TpukitError where the disk is gone: what is written then lands in the empty mount point."""
        if not os.path.ismount(self.mount_point):
            raise TpukitError(f"nothing is mounted at {self.mount_point} any more")

    def check_before_training(self):
        """Raise TpukitError where the folder is on Colab's Drive, and that is not mounted, or cannot be made
        and written in."""
        drive = environment.detect().drive
        if drive is not None and self.path.is_relative_to(drive.parent) and not drive.is_dir():
            raise TpukitError(
                f"the backup {self} is on Drive, which is not mounted: mount it (tpukit.mount_drive) first"
            )
        with self.explained():
            self.path.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.path))

    def open_copy(self, open_run):
        """The run that lies here, for reading."""
        return open_run(self.path)

    def has(self, name):
        return (self.path / name).is_file()

    def check_empty(self, copy):
        copy.check_empty()

    def put(self, source, name, check=None):
        """Copy a file here, whole or not at all. check: raises Damaged where the file of a path is not what
        was written; such a file replaces nothing."""
        self.check()
        files.copy_atomic(source, self.path / name, check)

    def get(self, name, target, check=None):
        """Copy a file from here, whole or not at all. check: as for `put`."""
        files.copy_atomic(self.path / name, target, check)

    def put_list(self, entries):
        """Write the list of checkpoints, and remove those that are no longer in it."""
        self.check()
        (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
        checkpoints.write_list(self.path / "checkpoints", entries)
        self.check()


class Remote:
    """A folder at an address. Its files have the names of those of a run; each appears whole or not at all,
    the list of checkpoints last."""

    def __init__(self, address):
        self.address, self.scheme = address, address.partition(":")[0]
        # Here, and not in a launched core, which cannot ask the page of a notebook.
        named = SECRETS.get(self.scheme, {}).items()
        self._options = {option: value for option, name in named if (value := secrets.find(name))}
        if (
            str(self._options.get("token")).lstrip().startswith("{")
        ):  # of Google: the content of the file, not its path
            try:
                self._options["token"] = json.loads(self._options["token"])
            except ValueError:
                name = SECRETS[self.scheme]["token"]
                raise TpukitError(
                    f"{name} begins like the JSON of a key file, and is none: paste the whole file"
                ) from None
        if self.scheme == "s3" and (endpoint := os.environ.get("AWS_ENDPOINT_URL")):
            self._options["endpoint_url"] = endpoint
        self._opened = None  # (process, file system, root)

    def __str__(self):
        return self.address

    def _open(self):
        """(file system, path of this folder in it)."""
        if self._opened is None or self._opened[0] != os.getpid():  # a connection does not survive a fork
            import fsspec

            options = SETTINGS.get(self.scheme, {}) | self._options | dict(use_listings_cache=False)
            file_system, root = fsspec.url_to_fs(self.address, skip_instance_cache=True, **options)
            self._opened = os.getpid(), file_system, root.rstrip("/")
        return self._opened[1:]

    @contextlib.contextmanager
    def explained(self):
        """Context manager: whatever a library raises is a TpukitError that names this address and no
        secret."""
        try:
            yield
        except TpukitError:
            raise
        except ImportError as error:
            reason = printable(first_line(error))
            raise TpukitError(f"{self.address} needs a package that is not installed ({reason})") from None
        except Exception as error:  # each file system's library has its own; a chained one could show a token
            reason = printable(secrets.hide(f"{type(error).__name__}: {first_line(error)}"))
            raise TpukitError(f"{self.address} cannot be reached: {reason}") from None

    def _size(self, name):
        """Bytes of a file, None where there is none. Not `exists`, which takes a lost connection for a
        missing file."""
        file_system, root = self._open()
        try:
            return file_system.info(f"{root}/{name}")["size"]
        except FileNotFoundError:
            return None

    def _names(self, folder):
        file_system, root = self._open()
        try:
            return [
                path.rstrip("/").rpartition("/")[2]
                for path in file_system.ls(f"{root}{folder}", detail=False)
            ]
        except FileNotFoundError:
            return []

    def check(self):
        """Nothing to check: a lost connection raises when it is used."""

    def check_before_training(self):
        """Raise TpukitError where the address cannot be reached, or its package is missing."""
        with self.explained():
            self._names("")

    def open_copy(self, open_run):
        """What lies here of the run's settings and list of checkpoints, as a run for reading, in a temporary
        folder."""
        self._copied = tempfile.TemporaryDirectory(prefix="tpukit-")
        folder = Path(self._copied.name)
        for name in ("config.json", f"checkpoints/{checkpoints.LIST}"):
            if self.has(name):
                self.get(name, folder / name)
        if not checkpoints.read_list(folder / "checkpoints"):
            with self.explained():
                found = checkpoints.entries_of(self._names("/checkpoints"))
            if found:
                (folder / "checkpoints").mkdir(exist_ok=True)
                checkpoints.write_list(folder / "checkpoints", found)
        copy = open_run(folder)
        copy.label = self.address
        return copy

    def has(self, name):
        with self.explained():
            return self._size(name) is not None

    def check_empty(self, copy):
        with self.explained():
            found = sorted(name for name in self._names("") if name and not name.startswith("."))
        if found:
            has = printable(", ".join(found[:3]))
            raise TpukitError(
                f"{self} is not empty and holds no run (it has {has}): choose a new or an empty folder"
            )

    def put(self, source, name, check=None):
        if check is not None:
            check(source)
        least = source.stat().st_size  # records and log may grow meanwhile
        with self.explained():
            file_system, root = self._open()
            path = f"{root}/{name}"
            target = path if self.scheme in WHOLE_OR_NOT else f"{path}.partial"
            if self.scheme not in WHOLE_OR_NOT:
                file_system.makedirs(path.rpartition("/")[0], exist_ok=True)
            file_system.put_file(str(source), target)
            if file_system.info(target)["size"] < least:
                raise OSError(f"{name} arrived incomplete")
            if target != path:
                file_system.mv(target, path)

    def get(self, name, target, check=None):
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_file(target, check=check) as file, self.explained():
            file_system, root = self._open()
            size = self._size(name)
            with file_system.open(f"{root}/{name}", "rb", cache_type="readahead") as opened:
                shutil.copyfileobj(opened, file, 1 << 20)
            if size is not None and file.tell() != size:
                raise OSError(f"{name} arrived incomplete ({file.tell()} of {size} bytes)")

    def put_list(self, entries):
        with tempfile.TemporaryDirectory(prefix="tpukit-") as folder:
            written = Path(folder) / checkpoints.LIST
            written.write_text(checkpoints.list_text(entries))
            self.put(written, f"checkpoints/{checkpoints.LIST}")
        with self.explained():
            file_system, root = self._open()
            kept = {entry["file"] for entry in entries}
            for name in set(self._names("/checkpoints")) - kept:
                if checkpoints.step_of(name) is not None:  # files of other names are not tpukit's
                    file_system.rm_file(f"{root}/checkpoints/{name}")


# Weights at an address


def fetch(address):
    """The file at an address as a file in the cache folder, downloaded once for every version of it.

    Raises TpukitError where it cannot be reached, is too large, or arrives incomplete or changed, by its size
    and by the MD5 or SHA-256 that a store gives."""
    folder, _, name = address.rpartition("/")
    remote = Remote(folder)
    with remote.explained():
        file_system, root = remote._open()
        about = file_system.info(f"{root}/{name}")
    size = about.get("size")
    version = hashlib.sha256(
        json.dumps([address, size, *_checksums(about)], default=str).encode()
    ).hexdigest()[:16]
    target = files.cache_folder() / "weights" / f"{version}-{Path(printable(name)).name}"
    with files.explain_unwritable(files.cache_folder()):
        files.make_private(files.cache_folder())  # before anything in it is believed
        target.parent.mkdir(exist_ok=True)
    with files.file_lock(target):
        expected = _checksums(about)[1]
        if target.is_file() and target.stat().st_size == size and expected in (None, files.sha256(target)):
            return target
        files.remove_partials(target.parent)
        free = shutil.disk_usage(target.parent).free
        if not size or size > min(MAX_WEIGHTS, free):
            raise TpukitError(
                f"{address} has {size} bytes, and a weights file at most {MAX_WEIGHTS}; {target.parent} has"
                f" {free} free"
            )
        print(printable(f"weights: downloading {address} ({size / 1e6:.0f} MB)"))
        _download(remote, name, about, target)
    return target


def _checksums(about):
    """What a store says of a file's content: (etag, SHA-256 or None, time of its change)."""
    lfs = about.get("lfs") or {}
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    etag = about.get("ETag") or about.get("etag") or about.get("md5Hash") or about.get("blob_id")
    return etag, sha256, about.get("LastModified") or about.get("mtime")


def _download(remote, name, about, target):
    from tqdm.auto import tqdm

    size, (etag, expected, _) = about["size"], _checksums(about)
    md5, sha256, got = hashlib.md5(usedforsecurity=False), hashlib.sha256(), 0
    with (
        files.atomic_file(target) as file,
        tqdm(total=size, unit="B", unit_scale=True, desc=target.name[17:]) as bar,
    ):
        with remote.explained():
            file_system, root = remote._open()
            with file_system.open(f"{root}/{name}", "rb", cache_type="readahead") as opened:
                while got <= size and (part := opened.read(1 << 20)):
                    file.write(part)
                    md5.update(part)
                    sha256.update(part)
                    got += len(part)
                    bar.update(len(part))
        of_content = {md5.hexdigest(), base64.b64encode(md5.digest()).decode()}
        etag = str(etag or "").strip('"')
        # An MD5 has 32 hexadecimal digits, or 24 of base 64; other tags are not of the content alone.
        is_md5 = re.fullmatch(r"[0-9a-f]{32}|[A-Za-z0-9+/]{22}==", etag) and not about.get(
            "ServerSideEncryption"
        )
        if (
            got != size
            or (is_md5 and etag not in of_content)
            or (expected and expected != sha256.hexdigest())
        ):
            raise TpukitError(
                f"{remote}/{name} arrived incomplete or changed ({got} of {size} bytes): try again"
            )
