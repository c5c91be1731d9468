"""The command line.

Each command imports what it needs when it runs, so that `tpukit doctor` answers where torch is broken. The fields of a
workload's dataclass are options of every command that takes a workload: train, test, plan and compare.
"""

import os
import sys

from tpukit import __version__
from tpukit.cli import comparing, runs, tools
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.tables import printable
from tpukit.workloads import WORKLOADS

USAGE = f"""tpukit {__version__}: PyTorch training that simply works on Colab, Kaggle and a laptop

  tpukit doctor [--model WORKLOAD] what is here, what is wrong, and how to fix it
  tpukit train WORKLOAD [options]  train, or go on with a run that was stopped
  tpukit test WORKLOAD [options]   scores of a weights file, or of a run's best weights
  tpukit show RUN                  scores and curves
  tpukit report RUN [--trace N]    why it compiled, where a step's time went, memory; a profiler's trace of N steps
  tpukit watch RUN                 a run that another process trains, live: how far, how fast, how busy the chip is
  tpukit plan WORKLOAD [options]   whether a training step fits a TPU, and what bounds it; needs no TPU
  tpukit compare WORKLOAD [options]
                                   measure a recipe on what is here, at several batch sizes, and keep it as a small file
  tpukit compare FILES [options]   merge such files of several machines: speed, cost, and which hardware finishes in time
  tpukit migrate FILES [options]   what in PyTorch code will not work on a TPU, by line; --fix fixes what is safe
  tpukit simulate eit [options]    make a training set for impedance tomography
  tpukit rent ACCELERATOR [options] -- train WORKLOAD [options]
                                   train on a rented TPU or GPU: shows the cost, writes a SkyPilot task, starts it on request

Workloads
{chr(10).join(f"  {name:8} {entry.summary}" for name, entry in WORKLOADS.items())}

`tpukit COMMAND [WORKLOAD] --help` lists the options."""


COMMANDS = dict(
    doctor=tools.doctor,
    train=runs.train,
    test=runs.test,
    show=runs.show,
    report=runs.report,
    watch=runs.watch,
    plan=tools.plan,
    compare=comparing.compare,
    migrate=tools.migrate,
    simulate=tools.simulate,
    rent=tools.rent,
)


def main(argv=None):
    """Entry point. Returns the exit code: 0 done, 1 an error that was explained, 2 wrong usage, 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if not argv or argv[0] in ("-h", "--help", "--version"):
            print(__version__ if argv == ["--version"] else USAGE, flush=True)
            return 0 if argv else 2
        if argv[0] not in COMMANDS:
            raise TpukitError(f"no command {argv[0]!r}; there are: {', '.join(COMMANDS)}")
        code = COMMANDS[argv[0]](argv[1:]) or 0
        sys.stdout.flush()
        return code
    except TpukitError as error:
        print(printable(f"tpukit: {error}"), file=sys.stderr)
        return 1
    except ImportError as error:
        if (error.name or "").startswith("tpukit"):
            raise
        print(
            printable(f"tpukit: {first_line(error)}. `tpukit doctor` says what is missing or broken, and its fix"),
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output is gone (`| head`); what Python still holds back goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
