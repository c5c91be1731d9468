"""A fresh process that measures one batch size: the request comes on stdin, the answer goes into the given
folder."""

import functools
import json
import os
import signal
import sys
from pathlib import Path

from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.launching.launcher import launch
from tpukit.launching.supervisor import end_with_parent
from tpukit.runs.run import Run
from tpukit.tools.compare.measuring import measure
from tpukit.training.task import from_request

end_with_parent(os.getppid())
folder, request = Path(sys.argv[1]), json.loads(sys.stdin.read())
try:
    task = from_request(request)
    run = Run.open(folder / "run", task)
    run.echo = False
    function = functools.partial(measure, steps=request["steps"], started=request["started"])
    result = launch(function, task, run, cores=request["cores"], parallel=request["parallel"])
except TpukitError as error:
    result = dict(error=str(error))
except KeyboardInterrupt:
    sys.exit(128 + signal.SIGINT)
files.write_atomic(folder / "result.json", json.dumps(result))
