"""Train in sessions on Kaggle or Colab, from here: send a task, a notebook or the hardware check, and follow
them until the training is done."""

import contextlib
import dataclasses
import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tyro

import tpukit
from tpukit.cli.options import to_stderr
from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.host.tables import Table, printable
from tpukit.runs.run import settings_dict
from tpukit.training.task import Task

Repeatable = tyro.conf.UseAppendAction
Parameters = Annotated[
    tuple[tuple[str, str], ...],
    Repeatable,
    tyro.conf.arg(name="parameter", aliases=("-p",), metavar="NAME VALUE"),
]
Notebook = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="NOTEBOOK.ipynb")]
ServiceName = Literal["kaggle", "colab"]
ChainName = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]


@dataclasses.dataclass(frozen=True)
class ChainOptions:
    name: str | None = None
    """Of the chain, and of its sessions there: tpukit-NAME-1, tpukit-NAME-2. By default the task's or the
    notebook's."""
    accelerator: Literal["tpu", "gpu", "none"] = "tpu"
    """What a session gets: a TPU, a GPU or neither. A session that does not get it ends within a minute."""
    sessions: int = 1
    """At most so many sessions; in a sweep, for each run."""
    until_epochs: int | None = None
    """Send sessions until the run has so many epochs. By default --epochs; for a notebook, until it has run
    to its end once."""
    hours: float = 8.5
    """Limit of one session. At most ten minutes before it, the training saves and the session ends."""
    dataset: Annotated[tuple[str, ...], Repeatable] = ()
    """OWNER/NAME of a dataset there, an input of every session; once for each."""
    internet: bool = False
    """Let the sessions reach the internet."""
    vary: Annotated[tuple[tuple[str, ...], ...], Repeatable] = ()
    """A sweep: SETTING VALUE VALUE ..., a run for each value, one after the other. Once for each setting that
    varies: all combinations."""


Options = Annotated[ChainOptions, tyro.conf.arg(name="")]


def _sends(service: ServiceName, about: str) -> dict[str, Callable]:
    """What can be sent to a service: word -> command."""

    def task(task: Task, options: ChainOptions) -> int:
        return _send_task(service, task, options)

    def notebook(notebook: Notebook, parameter: Parameters = (), options: Options = ChainOptions()) -> int:
        """Run a notebook in sessions.

        Args:
            notebook: it gets the library into a cell of its own, if it has none.
            parameter: a value in place of that in the cell tagged `parameters`; once for each.
        """
        return _send_notebook(service, notebook, parameter, options)

    def check(options: Options = ChainOptions()) -> int:
        """Check the hardware of a session, and bring the report."""
        return _start(service, "hardware-check", options, kind="check", settings=[{}])

    task.__name__, task.__doc__ = service, about
    return {"task": task, "notebook": notebook, "hardware-check": check}


def status(name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")] = "") -> None:
    """Where a chain stands, or each of them.

    Args:
        name: of a chain; without it, of all that were sent from this folder.
    """
    from tpukit.tools.send import chain as chains

    names = [name] if name else sorted(path.parent.name for path in _root().glob(f"*/{chains.FILE}"))
    if not names:
        print("nothing was sent from this folder: `tpukit send kaggle --help`")
        return
    rows = []
    for each in names:
        try:
            rows.append((each, *_words(chains.read(_folder(each)))))
        except TpukitError as error:
            if name:
                raise
            rows.append((each, "", str(error), ""))  # the others are shown
    print(Table("Sent", ("chain", "on", "state", "where it is"), rows))


def follow(name: ChainName, sessions: int | None = None) -> int:
    """Wait for a chain: print what its sessions print, bring what they leave, and send the next one until the
    training is done. Ctrl-C leaves the session running, and the next `follow` goes on. Exit code 1 if it is
    not done.

    Args:
        name: of a chain.
        sessions: from now on, at most so many.
    """
    return _advance(name, sessions=sessions)


def fetch(name: ChainName) -> int:
    """Bring what a session has left, if it has ended, and send nothing.

    Args:
        name: of a chain.
    """
    _advance(name, push=False)
    return 0


def stop(name: ChainName) -> None:
    """Send no more sessions of a chain. The one that runs goes on: the page on which you can stop it is
    printed. Nothing is deleted.

    Args:
        name: of a chain.
    """
    from tpukit.tools.send import chain as chains
    from tpukit.tools.send import follow

    folder = _folder(name)
    chain = chains.read(folder)
    (folder / follow.STOPPED).touch()
    print(f"{name}: no more sessions are sent")
    if chain.sent and chain.sent[-1].state in ("intended", "sent"):
        page = _service(chain.service).url(chain.sent[-1].kernel)
        print(f"the last one may still run, and can be stopped there: {page}")
        print(f"`tpukit send fetch {name}` then brings what it left")


COMMANDS = dict(status=status, follow=follow, fetch=fetch, stop=stop)
SERVICES = dict(
    kaggle=_sends("kaggle", "Train a task in sessions on Kaggle."),
    colab=_sends(
        "colab",
        "Train a task on Colab, one machine after another, by Google's own command `colab` (pip install"
        " google-colab-cli). It follows at once, and the terminal has to stay open. A machine that Colab"
        " takes away leaves nothing: take short --hours. Colab's FAQ restricts remote control of machines"
        " that are not paid for (docs/SEND.md, section 6).",
    ),
)
REPORT_FORM = "https://github.com/TPUKIT_SOURCE/issues/new?template=hardware.yml"
OTHERS = ("notebook", "hardware-check")  # that can be sent besides a task


def find(*words: str) -> Callable | None:
    """The function of a command line's words after `send`; None where they do not name one."""
    if words and words[0] in COMMANDS:
        return COMMANDS[words[0]]
    return SERVICES[words[0]].get(words[1], SERVICES[words[0]]["task"]) if len(words) > 1 else None


def with_words(argv: list[str]) -> list[str]:
    """A command line with the words that may be left out: `send kaggle X.ipynb` sends a notebook, and the
    option --hardware-check stands for the word."""
    if len(argv) > 2 and argv[1] in SERVICES:
        if "--hardware-check" in argv:
            return [*argv[:2], "hardware-check", *(word for word in argv[2:] if word != "--hardware-check")]
        if argv[2].endswith(".ipynb"):
            return [*argv[:2], "notebook", *argv[2:]]
    return argv


# What they share


def _root() -> Path:
    return tpukit.detect().outputs / "sent"


def _folder(name: str) -> Path:
    from tpukit.tools.send.chain import NAME

    if not NAME.fullmatch(name):
        raise TpukitError(f"no chain can be named {name!r}: `tpukit send status` lists those that were sent")
    return _root() / name


def _service(name: ServiceName) -> Any:
    if name == "kaggle":
        from tpukit.tools.send.kaggle import Kaggle

        return Kaggle()
    from tpukit.tools.send.colab import Colab

    return Colab()


def _send_task(service: ServiceName, task: Task, options: ChainOptions) -> int:
    for name, value in vars(task).items():
        if isinstance(value, Path) and value.exists():
            raise TpukitError(
                f"--{name.replace('_', '-')} {value} is on this machine, and a session does not see it: make"
                " it a dataset there (--dataset OWNER/NAME)"
            )
    types = get_type_hints(type(task))
    varied = _varied(options.vary, lambda name, text: _parsed(types, name, text))
    epochs = options.until_epochs or task.epochs
    tasks = [dataclasses.replace(task, **dict(epochs=epochs) | values) for values in varied]
    defaults, settings = settings_dict(type(task)()), []
    for each, values in zip(tasks, varied):
        chosen = settings_dict(each).items()
        settings.append({name: value for name, value in chosen if name in values or value != defaults[name]})
    if len({each.epochs for each in tasks}) > 1:
        epochs = None
    alone = service == "kaggle" and not options.internet
    if task.dataset and alone and not (options.dataset or task.dataset_dir):
        to_stderr(f"no --dataset is given: the sessions make a synthetic {task.dataset}")
    options = dataclasses.replace(options, until_epochs=epochs)
    return _start(service, task.name, options, kind="task", task=task.name, settings=settings)


def _send_notebook(
    service: ServiceName, notebook: Path, parameter: Iterable[tuple[str, str]], options: ChainOptions
) -> int:
    from tpukit.tools.notebook import parameters, read_cells
    from tpukit.tools.send import session

    known = parameters(read_cells(notebook))
    anything = None | int | float | str
    types = {name: anything if value is None else type(value) for name, value in known.items()}
    given = {name: _parsed(types, name, text) for name, text in parameter}
    varied = _varied(options.vary, lambda name, text: _parsed(types, name, text))
    settings = [given | values for values in varied]
    kept = {session.NOTEBOOK: notebook.read_bytes()}
    return _start(service, notebook.stem, options, kept, kind="notebook", settings=settings)


def _varied(vary: tuple[tuple[str, ...], ...], parse: Callable[[str, str], Any]) -> list[dict[str, Any]]:
    """All combinations of a sweep's values, in order; a single empty one without a sweep."""
    names = [words[0].replace("-", "_") if words else "" for words in vary]
    if len(set(names)) < len(names) or any(len(words) < 2 for words in vary):
        given = " ".join(f"--vary {' '.join(words)}" for words in vary)
        raise TpukitError(f"{given}: give a setting and its values, each setting once: --vary lr 0.01 0.05")
    values = [[parse(name, text) for text in words[1:]] for name, words in zip(names, vary)]
    return [dict(zip(names, combination)) for combination in itertools.product(*values)]


def _parsed(types: dict[str, Any], name: str, text: str) -> Any:
    """The value of a setting, or of a notebook's parameter, as an option of its type would take it."""
    if name not in types:
        raise TpukitError(
            f"there is no setting {name!r}: {', '.join(types) or 'no cell is tagged `parameters`'}"
        )
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(types[name], args=["--", text])
    except SystemExit as error:
        raise TpukitError(f"{name} is {text!r}, which is no value of this setting") from error


def _start(
    service: ServiceName, name: str, options: ChainOptions, kept: dict[str, bytes] | None = None, **more: Any
) -> int:
    from tpukit.tools.send import chain as chains
    from tpukit.tools.send import follow

    if service == "colab" and options.dataset:
        raise TpukitError(
            "--dataset names a dataset of Kaggle: on Colab the task, or your notebook, downloads its data"
        )
    chosen = dataclasses.asdict(options)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower())[: chains.LONGEST].strip("-")
    name = chosen.pop("name") or slug
    chosen.pop("vary")
    chosen["datasets"] = list(chosen.pop("dataset"))
    chain = chains.Chain(name=name, service=service, **chosen | more)
    chains.check(chain)
    folder = _folder(name)
    if (folder / chains.FILE).exists() and chains.read(folder).sent:
        raise TpukitError(
            f"a chain {name} was sent already: `tpukit send follow {name}` goes on with it, another --name"
            " starts another"
        )
    there = _service(service)
    text = follow.send(folder, chain, there, kept or {}, _say)
    if there.attached and text == "sent":
        return _advance(name, there=there)
    print(f"{name}: {text}. Next: tpukit send follow {name}")
    return 0


def _words(chain: Any) -> tuple[str, str, str]:
    """(service, state, page) of a chain."""
    from tpukit.tools.send import chain as chains
    from tpukit.tools.send import follow

    service, last = _service(chain.service), chain.sent[-1] if chain.sent else None
    if last is None or last.state == "intended":
        return chain.service, "about to be sent: `follow`", ""
    if last.state == "sent":
        word = service.state(last.kernel).word
        text = word if word in ("queued", "running") else f"ended there ({word}): `follow` brings it"
    else:
        following = chains.decide(chain)
        text = following if isinstance(following, str) else "between two sessions: `follow`"
    if (_folder(chain.name) / follow.STOPPED).exists():
        text += ", stopped by you"
    return chain.service, f"{text}; {chains.where(chain)}", service.url(last.kernel)


def _advance(name: str, *, push: bool = True, sessions: int | None = None, there: Any = None) -> int:
    from tpukit.tools.send import chain as chains
    from tpukit.tools.send import follow

    folder = _folder(name)
    chains.read(folder)  # which says what there is
    with files.exclusive_lock(folder / ".lock"):
        chain = chains.read(folder)
        if sessions is not None:
            chain.sessions = sessions
            chains.check(chain)
            chains.write(folder, chain)
        try:
            text = follow.follow(folder, there or _service(chain.service), _say, push=push)
        except KeyboardInterrupt:
            print(f"\nThe session goes on. `tpukit send follow {name}` waits for it again")
            raise
        for line in _results(folder, chains.read(folder)):
            print(line)
    _say(f"{name}: {text}")
    return 0 if text == chains.DONE else 1


def _results(folder: Path, chain: Any) -> Iterator[Table | str]:
    """What a chain has brought, for its user: runs, a sweep's in a table, or a report."""
    for report in sorted(folder.glob("sessions/*/outputs/hardware.json"))[-1:]:
        files.copy_atomic(report, folder / report.name)
        yield f"report: {folder / report.name}. Please send it: {REPORT_FORM}"
    if len(chain.settings) > 1:
        yield _sweep_table(folder, chain)
    for config in sorted(folder.glob("runs/**/config.json")):
        yield f"run: {config.parent}  (tpukit show {config.parent})"


def _sweep_table(folder: Path, chain: Any) -> Table:
    """The runs of a sweep, the best first."""
    names = list(dict.fromkeys(name for settings in chain.settings for name in settings))
    varied = [name for name in names if len({str(each.get(name)) for each in chain.settings}) > 1]
    rows = []
    for number, settings in enumerate(chain.settings):
        sent = chain.sent_for(number)
        runs = (folder / chain.runs(number)).glob("*/config.json")
        best = max((score for config in runs for score in _scores(config.parent)), default=None)
        epochs = max((session.epochs for session in sent), default=0)
        ended = sent[-1].state if sent else "not sent"
        rows.append([*(settings.get(name) for name in varied), epochs, best, ended])
    rows.sort(key=lambda row: (row[-2] is None, -(row[-2] or 0)))
    return Table("Sweep, the best first", (*varied, "epochs", "best score", "ended"), rows)


def _scores(path: Path) -> list[float]:
    """The scores of a run by which its best weights are chosen."""
    from tpukit.reporting import findings
    from tpukit.runs.run import Run

    run = Run.find(path)
    series = findings.curves(run.records())
    return series.get(findings.labels_of(run.config).score or "", ([], []))[1]


def _say(line: str) -> None:
    print(printable(line), flush=True)
