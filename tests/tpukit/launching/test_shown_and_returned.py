"""What a launch shows of its cores, what it returns from them, and what it refuses."""

import collections
import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tpukit
from tests.conftest import refuses
from tests.tpukit.launching.conftest import CPU, python
from tests.tpukit.launching.test_core import PLAIN, printed

STDERR = """
import logging, warnings
from tqdm import tqdm

logging.basicConfig(level=logging.INFO, format="logged: %(message)s")

def talk(fails):
    core = tpukit.core()
    print("first words")
    logging.info(f"by {core.rank}")
    warnings.warn(f"careful, {core.rank}")
    for _ in tqdm(range(3), desc=f"bar {core.rank}", mininterval=0):
        time.sleep(0.3)
    sys.stderr.write("caf\u00e9")
    if fails:
        raise ValueError("sample 7 is broken")

launch(talk, False, cores=2)
try:
    launch(talk, True, cores=2)
except CoreFailed as error:
    print("RAISED", error)
"""


@pytest.mark.slow
def test_what_rank_0_logs_warns_and_redraws_is_shown_in_its_order_and_kept_in_its_log(tmp_path):
    ran = python(PLAIN + STDERR, env={**CPU, "TMPDIR": str(tmp_path)})
    whole, failed = ran.stdout.split("all 2 cores started\n")[1:]
    wanted = ["first words", "logged: by 0", "careful, 0", "bar 0:   0%", "bar 0: 100%", "caf\u00e9"]
    places = [whole.find(words) for words in wanted]
    assert -1 not in places and places == sorted(places), whole
    assert "33%" in whole and "67%" in whole  # as they come
    assert "by 1" not in ran.stdout and "careful, 1" not in ran.stdout and "bar 1" not in ran.stdout
    assert failed.count("sample 7 is broken") == 1
    assert "sample 7" not in failed.partition("RAISED")[0] + ran.stderr
    [folder] = tmp_path.glob("tpukit-cores-*")  # the one that failed
    for rank in (0, 1):
        log = (folder / f"rank-0{rank}.log").read_text()
        assert f"careful, {rank}" in log and f"bar {rank}: 100%" in log and "caf\u00e9" in log


RESULTS = """
import collections, dataclasses
import numpy as np
from torch.utils._pytree import tree_leaves

Point = collections.namedtuple("Point", "x y")

def varied():
    history = collections.defaultdict(list, loss=[np.float32(0.5)])
    tensors = [torch.ones(2), torch.ones(3, dtype=torch.bfloat16), np.arange(3), torch.float16]
    return dict(history=history, point=Point(1, 2.5), tensors=tensors, path=Path("a"), words=("b", None, 1j))

def leave():
    tpukit.core().print("leaves")
    sys.exit(0)

def nested():
    launch(print, cores=1)

def refused():
    try:
        launch(nested, cores=2)
    except TpukitError as error:
        return str(error)

one, two = [launch(varied, cores=cores) for cores in (1, 2)]
dropped = [str(one.pop("path")), str(two.pop("path"))]
same = [repr(leaf) for leaf in tree_leaves(one)] == [repr(leaf) for leaf in tree_leaves(two)]
kinds = [type(two[name]).__name__ for name in ("history", "point")]
print("RESULT", [same, kinds, dropped, launch(leave, cores=1), launch(leave, cores=2), refused()])
"""


@pytest.mark.slow
def test_two_cores_return_what_one_does_or_a_sentence():
    ran = python(PLAIN + RESULTS, env=CPU, timeout=100)
    same, kinds, dropped, *left, nested = printed(ran)
    assert same and kinds == ["dict", "tuple"] and dropped == ["a", "None"] and left == [None, None]
    assert ran.stdout.count("result['path'] is a PosixPath") == 2  # on one core, too
    assert "launch in a launched function" in nested


@dataclasses.dataclass
class Score:
    loss: float


@pytest.mark.parametrize(
    "value",
    [Score(0.5), Path("a"), torch.nn.Linear(1, 1), np.array([None]), len, (n for n in range(2)), frozenset()],
    ids=lambda value: type(value).__name__,
)
def test_what_several_cores_could_not_return_is_named_on_one_and_kept(value, capsys):
    result = tpukit.launch(lambda: collections.defaultdict(list, a=[1, value]), cores=1)
    assert result["a"][1] is value
    assert f"result['a'][1] is a {type(value).__name__}, and another process" in capsys.readouterr().out


def test_a_result_that_several_cores_can_return_needs_no_word(capsys):
    value = dict(history=[0.5, None, "a"], weights=torch.nn.Linear(1, 1).state_dict(), n=np.arange(2))
    assert tpukit.launch(lambda: value, cores=1) is value and capsys.readouterr().out == ""


def test_what_is_no_function_or_no_option_or_within_a_launch_is_one_sentence():
    def train(lr=0.1):
        return [lr]

    with refuses("needs a function, not [0.1]", "launch(f, x), not launch(f(x))"):
        tpukit.launch(train())  # pyright: ignore
    with refuses("no option lr, core", "functools.partial"):
        tpukit.launch(train, lr=0.2, core=2)  # pyright: ignore
    with refuses("launch in a launched function"):
        tpukit.launch(tpukit.launch, train, cores=1)
    assert tpukit.launch(sys.exit, cores=1) is None
    with pytest.raises(SystemExit):
        tpukit.launch(sys.exit, 3, cores=1)
